"""Images of one client as a dataset: decoded sample by sample or all at once, and what is done to batches of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fedlit.data.decoding import READING, Interpolation, decode
from fedlit.data.image_checks import refuse_images
from fedlit.data.intensities import BYTES, Reading, Scale
from fedlit.data.samples import DatasetLayoutError, Transform, labelled_positions

# Of the photographs that nearly all published extractors were trained on.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class ImageTransform:
    """Stored pixels to normalised floats, squares of ``image_size`` pixels.

    To augment is to cut a random square and mirror half of the images, drawn from torch's global generator.
    """

    image_size: int
    augment: bool = False
    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD
    scale: Scale = BYTES

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return self.augment

    def __call__(self, x: Tensor) -> Tensor:
        """Transform images, shape (n, 3, side, side), or (n, 1, side, side) of grey ones, which get 3 channels."""
        if self.augment:
            size = self.image_size
            corners = torch.randint(0, x.shape[-1] - size + 1, (len(x), 2)).tolist()
            x = torch.stack(
                [im[:, top : top + size, left : left + size] for im, (top, left) in zip(x, corners, strict=True)]
            )
            mirrored = torch.rand(len(x)) < 0.5
            x = torch.where(mirrored.view(-1, 1, 1, 1), x.flip(-1), x)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (self.mean, self.std))
        return (self.scale(x) - mean) / std


@dataclass(eq=False)
class ImageFiles(Dataset[tuple[Tensor, Tensor]]):
    """Images of one client that are decoded sample by sample, as `decode` does, with classes y, int64, -1 where hidden.

    The transform is applied to a batch of decoded images; ``augments`` states whether it, or ``shape``, draws random
    numbers.
    """

    paths: Sequence[Path]
    y: Tensor
    resized_side: int
    side: int
    transform: Transform
    augments: bool = False
    interpolation: Interpolation = "bilinear"
    reading: Reading = READING
    channels: int = 3
    shape: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        self.labelled_indices = labelled_positions(self.y)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.decode(self.paths[index : index + 1]))[0], self.y[index]

    def decode_all(self, client: str, num_workers: int) -> Tensor:
        """All images of a client as one tensor, as `decode` returns them, decoded by ``num_workers`` processes."""
        dtype = torch.float32 if self.reading.stored else torch.uint8
        pixels = torch.empty(len(self), self.channels, self.side, self.side, dtype=dtype)
        start = 0
        for batch in self.batches(client, num_workers):
            pixels[start : start + len(batch)] = batch
            start += len(batch)
        return pixels

    def batches(self, client: str, num_workers: int) -> Iterator[Tensor]:
        """Decode all images in order, some at a time; at the end refuse all files that cannot be read, by name."""
        loader: DataLoader[Path] = DataLoader(
            self.paths,  # type: ignore[arg-type]  # a list has all that a data set must
            batch_size=64,
            num_workers=num_workers,
            collate_fn=self._decode_or_name,
            # The default start-up draws a seed from torch's global generator, which would make the cache visible there.
            generator=torch.Generator().manual_seed(0),
        )
        failures: list[tuple[Path, str]] = []
        for pixels, failed in loader:
            failures += failed
            yield pixels
        refuse_images(client, failures)

    def _decode_or_name(self, paths: Sequence[Path]) -> tuple[Tensor, list[tuple[Path, str]]]:
        """Pixels of those images that can be read, and what is wrong with the others."""
        read, failures = [], []
        for path in paths:
            try:
                read.append(self.decode([path]))
            except DatasetLayoutError as error:
                failures.append((path, str(error)))
        return torch.cat(read) if read else torch.empty(0, *self._shape), failures

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self.channels, self.side, self.side

    def decode(self, paths: Sequence[Path]) -> Tensor:
        """Pixels of some images: uint8, shape (n, 3, side, side); of stored values float32, (n, channels, side, side).

        Those of one channel become 3 equal ones where others of the client have colours.
        """
        rules = self.resized_side, self.side, self.interpolation, self.reading, self.shape
        decode_one = (decode(each, *rules) for each in paths)
        return torch.stack([each.expand(self._shape) for each in decode_one])
