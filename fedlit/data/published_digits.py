"""Digit-Five from its published files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedlit.checks import check_at_least, refuse
from fedlit.data.base import DomainDataModule
from fedlit.data.digit_five import resize
from fedlit.data.digits import NUM_CLASSES
from fedlit.data.files import Arrays, read_mats
from fedlit.data.mnist_likes import bytes_of_pixels
from fedlit.data.raw_inputs import RawInputs
from fedlit.data.samples import DatasetNotFoundError, Domain, Transform, check_data, to_unit
from fedlit.data.splits import Split, kept_of_each_class, published_split

_SIDE = 32
_CHUNK = 4096
"""Images that are resized at a time."""

# file, images and labels, for training and for testing; MATLAB's cells are numbered by row and column
_PARTS = {
    "mnist": [("mnist_data.mat", f"{part}_32", f"label_{part}") for part in ("train", "test")],
    "mnistm": [("mnistm_with_label.mat", part, f"label_{part}") for part in ("train", "test")],
    "svhn": [(f"svhn_{part}_32x32.mat", "X", "y") for part in ("train", "test")],
    "syn": [("syn_number.mat", f"{part}_data", f"{part}_label") for part in ("train", "test")],
    "usps": [("usps_28x28.mat", f"dataset[{row}, 0]", f"dataset[{row}, 1]") for row in (0, 1)],
}

_OTHER = "get the archive again, or the version of it that the documentation names"

COUNTS = {
    "mnist": (55_000, 10_000), "mnistm": (55_000, 10_000), "svhn": (73_257, 26_032), "syn": (25_000, 9_000),
    "usps": (7_438, 1_860),
}  # fmt: skip
"""Images for training and for testing in the published files."""


class PublishedDigitFive(DomainDataModule):
    """Digit-Five (Peng et al., 2019): MNIST, MNIST-M, SVHN, Synthetic Digits and USPS, in colours of 32x32 pixels.

    Reads the files of the benchmark's archive: ``mnist_data.mat``, ``mnistm_with_label.mat``, ``svhn_train_32x32.mat``,
    ``svhn_test_32x32.mat``, ``syn_number.mat`` and ``usps_28x28.mat``. Domains are ``mnist``, ``mnistm``, ``svhn``,
    ``syn`` and ``usps``; only files of those that take part are needed. Each is tested on images of its published test
    part; ``val_fraction`` is a share of its training part. Images are in [0, 1]; those of 28x28 pixels are resized
    (bilinear), and grey ones get three equal channels. `DigitFive` has the same shape without these files.

    Args:
        path: Folder of the files.
        max_train: Training images that each domain keeps at most, with its class shares and the same ones in each run;
            25,000 in the benchmark, of which USPS has 7,438. ``None`` keeps all.
        max_test: The same of the test images, 9,000 in the benchmark.
        published: Refuse files that have other numbers of images than the published ones.
        target: The domain that is adapted to.
        kwargs: See `DomainDataModule`.

    Raises:
        DatasetNotFoundError: If a file is missing.
        DatasetLayoutError: If one holds something else.
    """

    def __init__(
        self,
        path: str,
        *,
        max_train: int | None = 25_000,
        max_test: int | None = 9_000,
        published: bool = True,
        target: str = "mnist",
        **kwargs: Any,
    ) -> None:
        super().__init__(target=target, **kwargs)
        for name, number in (("max_train", max_train), ("max_test", max_test)):
            check_at_least(name, NUM_CLASSES if number is None else number, NUM_CLASSES, "images, one of each digit")
        self.path, self.limits, self.published = Path(path), (max_train, max_test), published
        self._num_train: dict[str, int] = {}
        wanted = sorted({file for client in self.check_roster() for file, _, _ in _PARTS[client.name]})
        missing = [file for file in wanted if not (self.path / file).is_file()]
        if missing:
            rule, way_out = f"a folder with {wanted}", "get the archive of Digit-Five, as the documentation says"
            shown = f"{path!r} without {missing} (looked for {str(self.path.absolute())!r})"
            refuse("path", rule, path, way_out, DatasetNotFoundError, shown)

    def domain_names(self) -> list[str]:
        """Return the five domains."""
        return [*_PARTS]

    def class_names(self) -> list[str]:
        """Return the ten digits."""
        return [str(digit) for digit in range(NUM_CLASSES)]

    def load(self, domain: str) -> Domain:
        """Return a domain's images as bytes, shape (n, 3, 32, 32), those for training first; the same in every run."""
        files = list(dict.fromkeys(file for file, _, _ in _PARTS[domain]))
        read = dict(zip(files, read_mats([self.path / file for file in files], cells=True), strict=True))
        parts = [self._part(domain, number, read) for number in (0, 1)]
        self._num_train[domain] = len(parts[0][1])
        return Domain(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))

    def _part(self, domain: str, number: int, read: Mapping[str, Arrays]) -> tuple[Tensor, Tensor]:
        """The images that are kept of the training part (0) or the test part (1)."""
        file, name, labels = _PARTS[domain][number]
        arrays, where = read[file], str(self.path / file)
        missing = [each for each in (name, labels) if each not in arrays]
        check_data(not missing, where, f"of arrays {[name, labels]}", sorted(arrays), _OTHER)
        images, y = _last_channels(arrays[name]), _digits(arrays[labels], domain)
        sides = (28,) if domain in ("mnistm", "usps") else (_SIDE,)
        fits = (
            images.ndim == 4 and images.shape[1:3] == sides * 2 and images.shape[3] in (1, 3) and len(y) == len(images)
        )
        rule = f"images of {sides[0]}x{sides[0]} pixels, each with a digit from 0 to 9"
        check_data(fits and {*y.tolist()} == {*range(10)}, f"{name} (in {where})", rule,
                   f"shape {arrays[name].shape}, and {labels} of shape {arrays[labels].shape}", _OTHER)  # fmt: skip
        rule, way_out = f"{COUNTS[domain][number]} in {name!r} of {file}, as published", f"{_OTHER}, or set it to false"
        fits = not self.published or len(y) == COUNTS[domain][number]
        check_data(fits, f"published (images of {domain!r})", rule, len(y), way_out)
        keep = kept_of_each_class(y, self.limits[number], NUM_CLASSES, "PublishedDigitFive", domain, number)
        return _squares(images[keep.numpy()], f"{name} (in {where})"), y[keep]

    def _make_split(self, name: str, y: Tensor) -> Split:
        hold_out = published_split(torch.arange(len(y)) >= self._num_train[name])
        return self._rules.split(name, y, True, name == self.target, self.seed, hold_out)

    def transform(self, training: bool) -> Transform:
        """Convert bytes to floats in [0, 1]."""
        return to_unit

    def raw_inputs(self) -> RawInputs:
        """Return bytes of pixels."""
        return bytes_of_pixels((3, _SIDE, _SIDE))


def _last_channels(stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Images of any of the files as (n, height, width, channels)."""
    if stored.ndim == 3:
        return stored[..., None]
    if stored.ndim == 4 and stored.shape[0] == stored.shape[1] == _SIDE:  # of SVHN
        return stored.transpose(3, 0, 1, 2)
    return stored.transpose(0, 2, 3, 1) if stored.ndim == 4 and stored.shape[1] == 1 else stored  # the first of USPS


def _digits(labels: npt.NDArray[Any], domain: str) -> Tensor:
    """Digits of labels (n, 1) or (1, n), or of one column for each digit; SVHN has 10 in place of 0, some USPS too."""
    y = labels.argmax(axis=1) if labels.ndim == 2 and labels.shape[1] == NUM_CLASSES else labels.reshape(-1)
    return torch.from_numpy(np.where((y == NUM_CLASSES) & (domain in ("svhn", "usps")), 0, y).astype(np.int64))


def _squares(images: npt.NDArray[Any], where: str) -> Tensor:
    """Bytes of (n, 3, 32, 32) of images (n, height, width, channels), from 0 to 255, or to 1 as those of USPS."""
    parts = []
    # of floats up to 2 some would be above 1, and not all black next to 255
    unit = 1.0 if images.dtype.kind == "f" and images.max() <= 2 else 255.0
    fits = bool(((images >= 0) & (images <= unit)).all())
    check_data(fits, where, "values from 0 to 255, or 0 to 1", f"{images.min()} to {images.max()}", _OTHER)
    for first in range(0, len(images), _CHUNK):
        x = torch.from_numpy(np.ascontiguousarray(images[first : first + _CHUNK])).permute(0, 3, 1, 2).float() / unit
        x = x if x.shape[-1] == _SIDE else resize(x, _SIDE)
        parts.append((255 * x).round().to(torch.uint8).expand(-1, 3, -1, -1))
    return torch.cat(parts)
