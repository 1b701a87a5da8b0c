"""MNIST, Fashion-MNIST and CIFAR-10 as federations: coloured digits, and the controlled shifts of FedGP."""

from __future__ import annotations

import hashlib
import pickle
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedlit.checks import check, check_at_least, check_between, check_one_of
from fedlit.data.base import DomainDataModule
from fedlit.data.files import unzipped
from fedlit.data.raw_inputs import PixelNetwork, RawInputs
from fedlit.data.samples import DatasetNotFoundError, Domain, DomainDataset, Transform, check_data, refuse_data, to_unit
from fedlit.data.shifts import add_noise, check_shifts, label_share, source_labels
from fedlit.data.splits import apportion, shuffled_by_class
from fedlit.federation.errors import RosterError
from fedlit.federation.streams import stable_seed

_PARTS = ("train", "t10k")
_FILES = [f"{part}-{content}-ubyte" for part in _PARTS for content in ("images-idx3", "labels-idx1")]

COLOUR_NOISE = {"plus90": 0.1, "plus80": 0.2, "minus90": 0.9}
"""Probability that the colour disagrees with the label, by domain."""

CLASSES = ["T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"]
TARGET = "target"

_PER_FILE = 10_000
"""Images in each of CIFAR-10's six files."""

_AGAIN = "get the archive again"


class ColoredMNIST(DomainDataModule):
    """Coloured MNIST (Arjovsky et al., Invariant Risk Minimization, 2019), three domains of a third of MNIST each.

    A digit below 5 is of class 1 and any other of class 0, but a quarter of these labels (``label_noise``) are flipped.
    The digit is then drawn in the colour of its label (class 0 red, class 1 green), which is flipped with probability
    0.1 in domain ``plus90`` (the papers' "+90%"), 0.2 in ``plus80`` and 0.9 in ``minus90``. Images have two channels,
    red and green, of which one is empty, in [0, 1].

    Args:
        root: Folder with the four idx files of MNIST (gzipped or not), or with them in ``raw/`` or ``MNIST/raw/``.
        download: Let torchvision download them into ``root`` if they are not there.
        image_size: 14 leaves out every second row and column, as Arjovsky et al. do; 28 keeps all, as DomainBed and
            FedGP do.
        label_noise: Share of the labels that are flipped, in [0, 0.5].
        target: The domain that is adapted to.
        kwargs: See `DomainDataModule`.

    Raises:
        DatasetNotFoundError: If the files are not there.
    """

    def __init__(
        self,
        root: str,
        *,
        download: bool = False,
        image_size: Literal[14, 28] = 14,
        label_noise: float = 0.25,
        target: str = "minus90",
        **kwargs: Any,
    ) -> None:
        super().__init__(target=target, **kwargs)
        check_one_of("image_size", image_size, (14, 28))
        check_between("label_noise", label_noise, 0, 0.5)
        self.root = root
        self.download = download
        self.image_size = image_size
        self.label_noise = label_noise
        self.check_roster()

    def domain_names(self) -> list[str]:
        """Return the three domains."""
        return list(COLOUR_NOISE)

    def class_names(self) -> list[str]:
        """Return what the digits of each class are, but for the flipped labels."""
        return ["5 to 9", "0 to 4"]

    @cached_property
    def _images(self) -> tuple[Tensor, Tensor]:
        return load_idx(self.root, "MNIST", self.download)

    def positions(self, domain: str) -> Tensor:
        """Return positions of a domain's digits among the 70,000 (training files first), ascending, always the same."""
        count = len(self._images[1])
        order = torch.randperm(count, generator=torch.Generator().manual_seed(stable_seed("ColoredMNIST", "parts")))
        return order[self.domain_names().index(domain) :: len(COLOUR_NOISE)].sort().values

    def load(self, domain: str) -> Domain:
        """Flip labels, then colour the digits of one domain."""
        images, digits = self._images
        chosen = self.positions(domain)
        generator = torch.Generator().manual_seed(stable_seed("ColoredMNIST", "flips", domain))
        flipped = torch.rand(len(chosen), generator=generator) < self.label_noise
        disagrees = torch.rand(len(chosen), generator=generator) < COLOUR_NOISE[domain]
        y = ((digits[chosen] < 5) ^ flipped).long()
        colour = y ^ disagrees.long()
        step = 28 // self.image_size
        grey = images[chosen][:, ::step, ::step]
        x = torch.zeros(len(grey), 2, *grey.shape[1:], dtype=torch.uint8)
        x[torch.arange(len(grey)), colour] = grey
        return Domain(x, y)

    def transform(self, training: bool) -> Transform:
        """Convert bytes to floats in [0, 1]."""
        return to_unit

    def raw_inputs(self) -> RawInputs:
        """Return bytes of pixels, of a red and a green channel."""
        return bytes_of_pixels((2, self.image_size, self.image_size))


class FashionMNIST(DomainDataModule):
    """Fashion-MNIST (Xiao et al., 2017) for one target and several sources, shifted as in FedGP (Jiang et al., 2024).

    The 70,000 images (or ``max_samples`` of them) are pooled and dealt out by class, and each client splits its own
    into training, validation and test; 28x28 grey, in [0, 1] before noise. Without a label shift each client gets an
    equal share. The paper's settings (appendix C.7): ``noise_level`` 0.2 to 0.8 with ``target_labels=100``; or
    ``noise_level=0`` with ``label_shift`` 0.45 to 0 and ``target_labels=0.15``.

    Args:
        root: Folder with the four idx files (gzipped or not), or with them in ``raw/`` or ``FashionMNIST/raw/``.
        download: Let torchvision download them into ``root`` if they are not there.
        max_samples: Images of all clients together, as many of each class and the same in every run; at least one of
            each class for each client. ``None`` deals out all.
        num_sources: Number of sources, ``source_1`` and so on; the target is called ``target``.
        noise_level: Standard deviation of the noise added to the target's images, at least 0, not clipped.
        source_noise: The same for the sources: one number, or one for each source.
        redraw_noise: Draw new noise each time an image is trained on, as the published code does, which augments
            the data. ``False`` gives each image one noise for good, as validation and test images have.
        label_shift: The paper's eta in [0, 0.5]: the target holds 1 - eta of the images of the first three classes and
            eta of the others, and the sources share the rest equally. ``None`` for no shift.
        labels_per_source: Classes that each source has, 1 to 10 (the paper's "labels available", table 14); ``None``
            for all. It excludes ``label_shift``.
        target: Always ``"target"``.
        kwargs: See `DomainDataModule`.

    Raises:
        DatasetNotFoundError: If the files are not there.
    """

    labels_per_client: int | None = None
    _stream: str = "FashionMNIST"
    _shape: tuple[int, int, int] = (1, 28, 28)

    def __init__(
        self,
        root: str,
        *,
        download: bool = False,
        max_samples: int | None = None,
        num_sources: int = 9,
        noise_level: float = 0.4,
        source_noise: float | list[float] = 0.0,
        redraw_noise: bool = False,
        label_shift: float | None = None,
        labels_per_source: int | None = None,
        target: str = TARGET,
        **kwargs: Any,
    ) -> None:
        super().__init__(target=target, **kwargs)
        check(target == TARGET, "target", f"{TARGET!r}, for which the shifts are made", target, error=RosterError)
        check_at_least("num_sources", num_sources, 1)
        if max_samples is not None:
            unit = f"images, one of each class for each of {num_sources + 1} clients"
            check_at_least("max_samples", max_samples, len(CLASSES) * (num_sources + 1), unit)
        levels = source_noise if isinstance(source_noise, list) else [source_noise] * num_sources
        check(len(levels) == num_sources, "source_noise", f"one number or {num_sources} (num_sources)", source_noise)
        check_at_least("noise_level", noise_level, 0)
        for level in levels:
            check_at_least("source_noise", level, 0)
        check_shifts(len(CLASSES), label_shift, labels_per_source)
        self.root = root
        self.download = download
        self.max_samples = max_samples
        self.num_sources = num_sources
        self.redraw_noise = redraw_noise
        self.label_shift = label_shift
        self.labels_per_source = labels_per_source
        self.unshared_classes = label_shift is not None or labels_per_source is not None
        self._levels = dict(zip(self.domain_names(), [*levels, noise_level], strict=True))
        self.check_roster()

    def domain_names(self) -> list[str]:
        """Return the sources, then the target."""
        return [*(f"source_{number}" for number in range(1, self.num_sources + 1)), TARGET]

    def class_names(self) -> list[str]:
        """Return types of clothing."""
        return CLASSES

    @cached_property
    def _images(self) -> tuple[Tensor, Tensor]:
        """Bytes of all images, shape (n, channels, height, width), and their labels."""
        hint = " (Debian: apt-get install dataset-fashion-mnist, root=/usr/share/datasets/fashion-mnist)"
        images, labels = load_idx(self.root, "FashionMNIST", self.download, hint)
        return images[:, None], labels

    @cached_property
    def _shares(self) -> dict[str, Tensor]:
        """Positions of each client's images, ascending; the same in every run."""
        y = self._images[1]
        shuffled, names = shuffled_by_class(y, len(CLASSES), self._stream, "shares"), self.domain_names()
        shares: dict[str, list[Tensor]] = {name: [] for name in names}
        of_source = self.labels_per_client or self.labels_per_source or len(CLASSES)
        holds = {name: source_labels(number, of_source, len(CLASSES)) for number, name in enumerate(names)}
        counts = torch.bincount(y, minlength=len(CLASSES))
        kept = apportion(counts, min(1.0, (self.max_samples or len(y)) / len(y)), counts).tolist()
        for label, number in enumerate(kept):
            members = shuffled[label][:number]
            holders = [name for name in names[:-1] if label in holds[name]]
            share = 1 / len(names) if self.label_shift is None else label_share(label, self.label_shift, is_target=True)
            if self.labels_per_client is not None:
                share = (label in holds[TARGET]) / (len(holders) + 1)
            first = round(share * len(members))
            shares[TARGET].append(members[:first])
            if holders:
                for name, part in zip(holders, members[first:].tensor_split(len(holders)), strict=True):
                    shares[name].append(part)
        return {name: torch.cat(parts).sort().values for name, parts in shares.items()}

    def load(self, domain: str) -> Domain:
        """Return one client's images with their noise."""
        level = self._levels[domain]
        x = self._clean(domain)
        if level > 0:  # otherwise they stay bytes, a quarter of the memory
            x = add_noise(to_unit(x), level, self._stream, "noise", domain)
        return Domain(x, self._images[1][self._shares[domain]])

    def _clean(self, domain: str) -> Tensor:
        return self._images[0][self._shares[domain]]

    def make_dataset(self, client: str, positions: Tensor, y: Tensor, training: bool) -> Dataset[Any]:
        """Return the samples of ``client`` at ``positions``, where asked with noise that is drawn batch by batch."""
        level = self._levels[client]
        if not (training and self.redraw_noise and level > 0):
            return super().make_dataset(client, positions, y, training)
        # The loader points torch's global generator at a stream of the client and the batch.
        return DomainDataset(self._clean(client)[positions], y, partial(with_new_noise, std=level), augments=True)

    def transform(self, training: bool) -> Transform:
        """Convert bytes to floats in [0, 1]."""
        return to_unit

    def raw_inputs(self) -> RawInputs | None:
        """Return bytes of pixels; images with noise are no bytes, and are taken as they are."""
        return None if self._levels[self.target] > 0 else bytes_of_pixels(self._shape)


class CIFAR10(FashionMNIST):
    """CIFAR-10 (Krizhevsky, 2009) for one target and several sources, shifted as in FedGP (Jiang et al., 2024).

    As `FashionMNIST`, with 60,000 photographs of 32x32 pixels in colour. The paper's setting (appendix C.7), in which
    "the task is to predict 4 classes on both source and target clients", is ``labels_per_client=4``, with
    ``noise_level`` 0.2 to 0.8 and ``target_labels=0.1``.

    Args:
        root: Folder with ``cifar-10-batches-py``, as torchvision puts it there, or with the binary version
            (``cifar-10-batches-bin``, or its six files).
        labels_per_client: Classes that each source and the target have, 1 to 10: client i, counted from 0 with the
            target as the last one, has class i and others at random (the same in each run), and a class is shared
            equally by those that have it, as in NIID-Bench. It excludes ``label_shift`` and ``labels_per_source``.
        published: Refuse files of the binary version that have another number of images than the published 10,000.
            Those of torchvision's folder always have to have the published MD5 sums.
        kwargs: See `FashionMNIST`.

    Raises:
        DatasetNotFoundError: If the files are not there.
        DatasetLayoutError: If they are not the published ones.
    """

    _stream, _shape = "CIFAR10", (3, 32, 32)

    def __init__(
        self, root: str, *, labels_per_client: int | None = None, published: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(root, **kwargs)
        others = (self.label_shift, self.labels_per_source)
        rule = "left out with label_shift or labels_per_source, which decide on classes too"
        check(labels_per_client is None or others == (None, None), "labels_per_client", rule, labels_per_client)
        check_between("labels_per_client", 1 if labels_per_client is None else labels_per_client, 1, len(CLASSES))
        self.labels_per_client = labels_per_client
        self.published = published
        self.unshared_classes = self.unshared_classes or labels_per_client is not None

    def class_names(self) -> list[str]:
        """Return kinds of animals and vehicles."""
        return ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]

    @cached_property
    def _images(self) -> tuple[Tensor, Tensor]:
        return load_cifar10(self.root, self.download, self.published)


def bytes_of_pixels(shape: tuple[int, int, int]) -> RawInputs:
    """Return images as bytes, of shape (channels, height, width), and the network that does what `to_unit` does."""
    text = "Pixels of images, from 0 to 255; the model divides them by 255 by itself."
    return RawInputs(PixelNetwork([0.0], [1.0]), torch.zeros(1, *shape, dtype=torch.uint8), text)


def with_new_noise(x: Tensor, std: float) -> Tensor:
    """Return images in [0, 1] with Gaussian noise from torch's global generator."""
    x = to_unit(x)
    return x + std * torch.randn(x.shape)


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
    labels = [_read(files[f"{part}-labels-idx1-ubyte"]) for part in _PARTS]
    folder = str(files[_FILES[0]].parent)
    fits = images[0].shape[1:] == images[1].shape[1:] and [*map(len, images)] == [*map(len, labels)]
    shown = f"images of shapes {[tuple(x.shape) for x in images]} and {[*map(len, labels)]} labels"
    check_data(fits, folder, "files that belong together", shown, "get them again")
    y = torch.cat(labels)
    check_data(not len(y) or int(y.max()) < 10, folder, "labels from 0 to 9", int(y.max()), "get them again")
    return torch.cat(images), y


def load_cifar10(root: str, download: bool, is_published: bool = True) -> tuple[Tensor, Tensor]:
    """Read all 60,000 images of CIFAR-10, the 50,000 training images first; others if not ``is_published``.

    Returns:
        Images, uint8, shape (n, 3, 32, 32), and labels, int64, shape (n,).
    """
    from torchvision.datasets import CIFAR10 as Published

    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    for folder in (Path(root), Path(root) / "cifar-10-batches-bin"):
        if all((folder / name).is_file() for name in names):
            rows = torch.cat([_read_rows(folder / name, is_published) for name in names])
            return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()
    folder = Path(root) / Published.base_folder
    if download and not folder.exists():
        _download(root, "CIFAR10")
    if not folder.exists():
        raise DatasetNotFoundError(
            f"no {str(folder)!r}, nor {names} there or in cifar-10-batches-bin: set download=True, or root to the "
            "folder in which CIFAR-10's archive was unpacked"
        )
    entries = [_published(folder / name, md5) for name, md5 in (*Published.train_list, *Published.test_list)]
    images = torch.cat([torch.from_numpy(entry["data"]) for entry in entries]).reshape(-1, 3, 32, 32)
    return images, torch.tensor([label for entry in entries for label in entry["labels"]])


def _published(file: Path, md5: str) -> dict[str, Any]:
    """Unpickle a file of the Python version, if it is the published one: any other may run code."""
    check_data(file.is_file(), str(file), "a file of CIFAR-10", "none", _AGAIN)
    content = file.read_bytes()
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    check_data(found == md5, str(file), f"the published file, of MD5 {md5}", f"{found} ({len(content)} bytes)", _AGAIN)
    entry: dict[str, Any] = pickle.loads(content, encoding="latin1")  # of the bytes that were hashed
    return entry


def _read_rows(file: Path, is_published: bool) -> Tensor:
    """Label and pixels of each image, shape (n, 3073), of a file of the binary version."""
    content = file.read_bytes()
    rule, width = "images of 3073 bytes, each with a label from 0 to 9 first", 1 + 3 * 32 * 32
    check_data(bool(content) and len(content) % width == 0, str(file), rule, f"{len(content)} bytes", _AGAIN)
    number, way_out = len(content) // width, f"{_AGAIN}, or set published=False, as for some images"
    check_data(number == _PER_FILE or not is_published, str(file), f"{_PER_FILE} images", number, way_out)
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, width)
    check_data(bool((rows[:, 0] < 10).all()), str(file), rule, f"label {int(rows[:, 0].max())}", _AGAIN)
    return rows


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
                "the files another way and set root to their folder"
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
            refuse_data(str(file), "an idx file of bytes", error or "one that is cut short", "get it again")
    return values
