"""Files of images: folders that are listed, squares of pixels that are decoded, and how these become inputs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fedlit.data.decoding import SUFFIXES, Interpolation, decode
from fedlit.data.samples import Transform, check_data, labelled_positions
from fedlit.data.tables.values import some

_CLUTTER = ("thumbs.db", "desktop.ini")
# Of the photographs that nearly all published extractors were trained on.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def subfolders(folder: Path) -> list[Path]:
    """Return folders in a folder, sorted, but hidden ones."""
    return sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))


def loose_images(folder: Path) -> list[Path]:
    """Return images that lie in a domain's folder itself, or in that of Office-31 below it."""
    inside = [folder, *(child for child in subfolders(folder) if child.name == "images")]
    return sorted(image for each in inside for image in _images_in(each, besides=inside))


def class_images(folder: Path) -> list[Path]:
    """Return the images of a class, of which there must be some."""
    images = _images_in(folder)
    others = sorted(file.name for file in folder.iterdir())
    way_out = "add images, or leave the class out with classes"
    check_data(bool(images), str(folder), f"a folder of images ({', '.join(SUFFIXES)})", some(others), way_out)
    return images


def _images_in(folder: Path, besides: Sequence[Path] = ()) -> list[Path]:
    """Images in a folder, sorted; warns of what else is there but hidden files and ``besides``."""
    files = sorted(f for f in folder.iterdir() if not f.name.startswith(".") and f.name.lower() not in _CLUTTER)
    images = [file for file in files if file.suffix.lower() in SUFFIXES and file.is_file()]
    others = [
        f"{file.name}{'' if file.exists() else ' (a link to nothing)'}"
        for file in sorted({*files} - {*images, *besides})
    ]
    if images and others:
        warnings.warn(
            f"left out entries of {str(folder)!r} that are not images ({', '.join(SUFFIXES)}): {some(others)}",
            stacklevel=2,
        )
    return images


@dataclass(frozen=True)
class ImageTransform:
    """Bytes to normalised floats, squares of ``image_size`` pixels.

    To augment is to cut a random square and mirror half of the images, drawn from torch's global generator.
    """

    image_size: int
    augment: bool = False
    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return self.augment

    def __call__(self, x: Tensor) -> Tensor:
        """Transform uint8 images, shape (n, 3, side, side)."""
        if self.augment:
            size = self.image_size
            corners = torch.randint(0, x.shape[-1] - size + 1, (len(x), 2)).tolist()
            x = torch.stack(
                [im[:, top : top + size, left : left + size] for im, (top, left) in zip(x, corners, strict=True)]
            )
            mirrored = torch.rand(len(x)) < 0.5
            x = torch.where(mirrored.view(-1, 1, 1, 1), x.flip(-1), x)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (self.mean, self.std))
        return (x.float() / 255 - mean) / std


@dataclass(eq=False)
class ImageFiles(Dataset[tuple[Tensor, Tensor]]):
    """Images of one client that are decoded sample by sample, as `decode` does, with classes y, int64, -1 where hidden.

    The transform is applied to a batch of decoded images; ``augments`` states whether it draws random numbers.
    """

    paths: Sequence[Path]
    y: Tensor
    resized_side: int
    side: int
    transform: Transform
    augments: bool = False
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        self.labelled_indices = labelled_positions(self.y)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self._decode(self.paths[index : index + 1]))[0], self.y[index]

    def decode_all(self, num_workers: int) -> Tensor:
        """All images as one uint8 tensor, shape (n, 3, side, side), decoded by ``num_workers`` processes."""
        pixels = torch.empty(len(self), 3, self.side, self.side, dtype=torch.uint8)
        loader: DataLoader[Path] = DataLoader(
            self.paths,  # type: ignore[arg-type]  # a list has all that a data set must
            batch_size=64,
            num_workers=num_workers,
            collate_fn=self._decode,
            # The default start-up draws a seed from torch's global generator, which would make the cache visible there.
            generator=torch.Generator().manual_seed(0),
        )
        start = 0
        for batch in loader:
            pixels[start : start + len(batch)] = batch
            start += len(batch)
        return pixels

    def pixels(self) -> Tensor:
        """All images, as `decode_all` has them, decoded by this process."""
        return self._decode(self.paths)

    def _decode(self, paths: Sequence[Path]) -> Tensor:
        return torch.stack([decode(path, self.resized_side, self.side, self.interpolation) for path in paths])
