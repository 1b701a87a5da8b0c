"""The idx files of MNIST and its relatives, gzipped or not, wherever they are."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from fedlit.data.files import unzipped
from fedlit.data.samples import DatasetLayoutError, DatasetNotFoundError

_PARTS = ("train", "t10k")
_FILES = [f"{part}-{content}-ubyte" for part in _PARTS for content in ("images-idx3", "labels-idx1")]


def load_idx(root: str, name: str, download: bool, elsewhere: str = "") -> tuple[Tensor, Tensor]:
    """Read all 70,000 images of an MNIST-like data set, the 60,000 training images first.

    The four idx files are in ``root``, in its ``raw/`` or, as torchvision puts them, in ``NAME/raw/``; the class
    ``name`` of ``torchvision.datasets`` downloads them there if asked to. Errors add how to get them ``elsewhere``.

    Returns:
        Images, uint8, shape (n, height, width), and labels, int64, shape (n,).
    """
    folders = [Path(root), Path(root) / "raw", Path(root) / name / "raw"]
    files = _find(folders)
    if files is None and download:
        _download(root, name)
        files = _find(folders)
    if files is None:
        raise DatasetNotFoundError(
            f"no idx files of {name} ({', '.join(_FILES)}, each with or without .gz) in {[*map(str, folders)]}: set "
            f"download=True, or root to the folder that has them{elsewhere}"
        )
    images = [_read(files[f"{part}-images-idx3-ubyte"]) for part in _PARTS]
    labels = torch.cat([_read(files[f"{part}-labels-idx1-ubyte"]) for part in _PARTS])
    folder = str(files[_FILES[0]].parent)
    if images[0].shape[1:] != images[1].shape[1:] or sum(map(len, images)) != len(labels):
        raise DatasetLayoutError(
            f"the idx files in {folder!r} hold images of shape {' and '.join(str(tuple(x.shape)) for x in images)} and "
            f"{len(labels)} labels: they do not belong together, get them again"
        )
    return torch.cat(images), labels


def _find(folders: list[Path]) -> dict[str, Path] | None:
    """The four files, if a folder has all of them; where one is there twice, not the gzipped one."""
    for folder in folders:
        files = {name: f for name in _FILES for f in (folder / f"{name}.gz", folder / name) if f.is_file()}
        if len(files) == len(_FILES):
            return files
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


def _read(file: Path) -> Tensor:
    """The images or labels of a file."""
    from torchvision.datasets.mnist import read_image_file, read_label_file

    read = read_image_file if "images" in file.name else read_label_file
    with TemporaryDirectory() as folder:
        path = file
        if file.suffix == ".gz":
            path = Path(folder, file.stem)
            path.write_bytes(unzipped(file))
        try:
            values: Tensor = read(str(path))
        except Exception as error:  # assertions among them
            raise DatasetLayoutError(
                f"{str(file)!r} is not an idx file of bytes, or is cut short: get it again"
            ) from error
    return values
