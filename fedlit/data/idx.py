"""The idx files of MNIST and its relatives, gzipped or not, from wherever they were put."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedlit.data.base import DatasetLayoutError, DatasetNotFoundError
from fedlit.data.files import unzipped

_PARTS = ("train", "t10k")
_FILES = [f"{part}-{kind}-ubyte" for part in _PARTS for kind in ("images-idx3", "labels-idx1")]


def load_idx(root: str, name: str, download: bool, elsewhere: str = "") -> tuple[Tensor, Tensor]:
    """All 70,000 images of an MNIST-like data set, the 60,000 training images first.

    The four idx files are in ``root``, in its ``raw/`` or, as torchvision puts them, in ``NAME/raw/``; the class
    ``name`` of ``torchvision.datasets`` downloads them there if asked to. Errors add how to get them ``elsewhere``.

    Returns:
        Images, uint8, shape (n, height, width), and labels, int64, shape (n,).
    """
    places = [Path(root), Path(root) / "raw", Path(root) / name / "raw"]
    files = _find(places)
    if files is None and download:
        _download(root, name)
        files = _find(places)
    if files is None:
        raise DatasetNotFoundError(
            f"no idx files of {name} ({', '.join(_FILES)}, each with or without .gz) in "
            f"{[str(place) for place in places]}: set download=True, or root to the folder that has them{elsewhere}"
        )
    parts = [_read(files[f"{part}-images-idx3-ubyte"], num_dims=3) for part in _PARTS]
    if parts[0].shape[1:] != parts[1].shape[1:]:
        raise DatasetLayoutError(
            f"the idx files in {str(next(iter(files.values())).parent)!r} hold images of {tuple(parts[0].shape[1:])} "
            f"and of {tuple(parts[1].shape[1:])} pixels: they do not belong together, get them again"
        )
    images = torch.cat(parts)
    labels = torch.cat([_read(files[f"{part}-labels-idx1-ubyte"], num_dims=1) for part in _PARTS]).long()
    if len(images) != len(labels):
        raise DatasetLayoutError(
            f"the idx files in {str(next(iter(files.values())).parent)!r} hold {len(images)} images but {len(labels)} "
            "labels: they do not belong together, get them again"
        )
    return images, labels


def _find(places: list[Path]) -> dict[str, Path] | None:
    """The four files, if one of the places has all of them; where one is there twice, not the gzipped one."""
    for place in places:
        found = {name: f for name in _FILES for f in (place / f"{name}.gz", place / name) if f.is_file()}
        if len(found) == len(_FILES):
            return found
    return None


def _download(root: str, name: str) -> None:
    from filelock import FileLock  # comes with torch
    from torchvision import datasets

    Path(root).mkdir(parents=True, exist_ok=True)
    with FileLock(Path(root) / f".{name}.lock"):  # several processes of one run may get here at once
        try:
            getattr(datasets, name)(root, download=True)
        except (RuntimeError, OSError) as error:
            raise DatasetNotFoundError(
                f"{name} could not be downloaded into root={root!r} ({error}): look at the connection, or get "
                "the idx files another way and set root to their folder"
            ) from error


def _read(file: Path, num_dims: int) -> Tensor:
    content = unzipped(file) if file.suffix == ".gz" else file.read_bytes()
    # Two zeros, 8 for unsigned bytes, the number of dimensions, and each dimension as a big-endian int32.
    start = 4 + 4 * num_dims
    shape = [int(size) for size in np.frombuffer(content[4:start], dtype=">i4")] if len(content) >= start else []
    if content[:4] != bytes([0, 0, 8, num_dims]) or math.prod(shape) != len(content) - start:
        raise DatasetLayoutError(
            f"{str(file)!r} is not an idx file of bytes with {num_dims} dimensions, or is cut short: get it again"
        )
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8, offset=start).copy()).view(shape)
