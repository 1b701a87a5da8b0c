"""Photographs in folders: root/domain/class/*.jpg."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fedlit.data.base import (
    DatasetLayoutError,
    DatasetNotFoundError,
    Domain,
    DomainDataModule,
    DomainDataset,
    Transform,
    agreed,
    labelled_positions,
)
from fedlit.data.decoding import SUFFIXES, VERSION, Interpolation, decode
from fedlit.data.raw_inputs import PixelNetwork, RawInputs
from fedlit.federation.labels import UNLABELLED
from fedlit.federation.names import alike, check_list, difference, shown

_CLUTTER = ("thumbs.db", "desktop.ini")
_SHOWN = 5
# Of the photographs that nearly all published extractors were trained on.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class ImageDomains(DomainDataModule):
    """Images in folders ``root/domain/class/*``: Office-Caltech, Office-Home, PACS, VLCS, VisDA, DomainNet, Office-31.

    Also reads Office-31 as it is published, with one more folder: ``root/domain/images/class/*``. Files are JPEG, PNG,
    BMP, WebP or TIFF. Hidden files and folders (``.name``) and files beside the folders are not looked at; other files
    among the images give a warning. A target without class folders (``root/domain/*.jpg``) is unlabelled. Domains of
    clients that another process hosts need not be there; then give ``clients``.

    An image is turned upright by its EXIF orientation, laid over white where it is transparent, and converted to 8 bits
    of red, green and blue: grey values of 12 or 16 bits by their full range, colours without their profiles (ICC).
    Values of 32 bits or with a sign and files of several pages or frames are refused. Then images are scaled so that
    the shorter side is ``resized_side``, cut to the middle square, and normalised. They are decoded once and kept in
    memory as bytes, or, if they do not fit ``cache_limit_mb``, decoded each time by ``num_workers`` processes; the
    pixels are the same.

    A pretrained network needs images as it was trained on them. ``fedlit features`` takes what is not given here from
    networks that it knows by name; `Backbone` has it in ``preprocessing``, and training with other values than those
    is refused unless they are given here.

    Args:
        root: Folder of the domains.
        image_size: Side of the square that a model sees, in pixels; ``None`` is 224.
        resized_side: Pixels of an image's shorter side before the square is cut out, at least ``image_size``; ``None``
            is 8/7 of it (256 for 224).
        interpolation: Of scaling: ``"bilinear"`` or ``"bicubic"``; ``None`` is bilinear.
        mean: What is subtracted from red, green and blue, which are in [0, 1]; ``None`` is ImageNet's mean.
        std: What they are divided by then, positive; ``None`` is ImageNet's standard deviation.
        augment: Cut the square out at a random place and mirror half of the images, in training.
        classes: Names of the classes to keep, in the order of their labels. ``None`` keeps all, which must be the same
            in each labelled domain. Images of other classes are left out.
        cache_limit_mb: Memory for decoded images of all clients, in MiB; 0 always decodes on the fly.
        target: The domain that is adapted to; ``None`` takes the last of the clients.
        kwargs: See `DomainDataModule`.

    Raises:
        DatasetNotFoundError: If there is no folder ``root``.
        DatasetLayoutError: If it is laid out in another way.
        ValueError: If a number is out of its range.
    """

    spread = True

    def __init__(
        self,
        root: str,
        *,
        image_size: int | None = None,
        resized_side: int | None = None,
        interpolation: Interpolation | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        augment: bool = False,
        classes: list[str] | None = None,
        cache_limit_mb: int = 2048,
        target: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(target=target, **kwargs)
        self.image_size = 224 if image_size is None else image_size
        if self.image_size < 1:
            raise ValueError(f"image_size must be at least 1 pixel, got {image_size}")
        # without an argument: so that the margins are even, and cutting twice gives the same pixels as cutting once
        margin = max(4, 4 * round(self.image_size / 28))
        self.resized_side = self.image_size + margin if resized_side is None else resized_side
        if self.resized_side < self.image_size:
            raise ValueError(
                f"resized_side must be at least image_size ({self.image_size} pixels), got {resized_side}: the square "
                "is cut out of what it leaves"
            )
        if interpolation not in (None, *get_args(Interpolation)):
            raise ValueError(f"interpolation must be one of {get_args(Interpolation)}, got {interpolation!r}")
        self.interpolation: Interpolation = "bilinear" if interpolation is None else interpolation
        self.mean = _channels("mean", IMAGENET_MEAN if mean is None else mean)
        self.std = _channels("std", IMAGENET_STD if std is None else std)
        given = {"interpolation": interpolation, "mean": mean, "std": std}
        self._by_default = [name for name, value in given.items() if value is None]
        if cache_limit_mb < 0:
            raise ValueError(f"cache_limit_mb must be at least 0 MiB, got {cache_limit_mb}")
        check_list("classes", classes)
        if classes is not None and len(set(classes)) < max(2, len(classes)):
            raise ValueError(f"classes must name at least 2 classes, each once, got {classes}")
        self.root = Path(root)
        self.augment = augment
        self.cache_limit_mb = cache_limit_mb
        self._wanted = classes
        self._decoded: dict[tuple[str, int, bytes], Tensor] = {}
        self.check_roster()
        self.class_names()

    @cached_property
    def _folders(self) -> dict[str, dict[str, Path]]:
        """Class folders by domain and class name, for each domain."""
        if not self.root.is_dir():
            raise DatasetNotFoundError(
                f"no folder root={str(self.root)!r} (looked for {str(self.root.absolute())!r}): give the folder that "
                "holds one folder per domain, as in root/domain/class/*.jpg; data sets in that layout are listed in "
                "the documentation of ImageDomains and come from their authors' pages"
            )
        domains = {folder.name: folder for folder in _subfolders(self.root)}
        if not domains:
            raise DatasetLayoutError(
                f"root={str(self.root)!r} must hold one folder per domain (root/domain/class/*.jpg), got no folder"
            )
        found = {}
        for name, folder in domains.items():
            inner = _subfolders(folder)
            if [child.name for child in inner] == ["images"]:  # Office-31 as published
                inner = _subfolders(inner[0])
            found[name] = {child.name: child for child in inner}
        return found

    @cached_property
    def _class_names(self) -> list[str]:
        here = [client.name for client in self.check_roster() if self.is_here(client.name)]
        by_client = {name: list(self._folders[name]) for name in here if not self._is_unlabelled(name)}
        if self._wanted is None and not by_client:
            raise DatasetLayoutError(
                f"the clients whose images are in {str(self.root)!r} ({here}) have no class folders to show the "
                "classes: name them in classes, in the order of their labels"
            )
        for name, classes in by_client.items():
            if not classes:
                raise DatasetLayoutError(
                    f"domain folder {str(self.root / name)!r} must hold one folder per class "
                    "(root/domain/class/*.jpg), got none: if it is not a domain, name the domains in clients; only the "
                    "target may be a folder of images without classes"
                )
        self._check_alike(by_client)
        if self._wanted is not None:
            for name, classes in by_client.items():
                missing = [wanted for wanted in self._wanted if wanted not in classes]
                if missing:
                    raise DatasetLayoutError(
                        f"classes {missing} have no folder in domain {str(self.root / name)!r}, which has {classes}: "
                        "name classes that all clients share"
                    )
            return self._wanted
        common = sorted(set.intersection(*map(set, by_client.values())))
        extra = {name: sorted(set(classes) - set(common)) for name, classes in by_client.items()}
        if any(extra.values()):
            raise DatasetLayoutError(
                f"all domains in {str(self.root)!r} must have the same class folders, but some are not in each of "
                f"them: { {name: names for name, names in extra.items() if names} }; name the classes to keep, such as "
                f"classes={common}"
            )
        return common

    def _check_alike(self, by_client: Mapping[str, Sequence[str]]) -> None:
        """Refuse class folders that people would take for one, of which no more than one has been named."""
        folders = [(name, each) for name, classes in by_client.items() for each in classes]
        for group in alike(each for _, each in folders):
            wanted = {*group} & {*(self._wanted or group[:1])}
            if wanted and wanted < {*group}:
                where = [f"{name}/{each}" for name, each in folders if each in group]
                raise DatasetLayoutError(
                    f"class folders {shown(group)} in {str(self.root)!r} differ in {difference(group)} "
                    f"({shown(where[:_SHOWN])}{' and more' if len(where) > _SHOWN else ''}): if they are one class, "
                    "rename one, or put their images in one folder; if not, name all in classes"
                )

    def _is_unlabelled(self, domain: str) -> bool:
        """Whether a domain is the target, with images and without class folders."""
        return domain == self.target and not self._folders[domain] and bool(_loose(self.root / domain))

    def domain_names(self) -> list[str]:
        """Folders in ``root``, sorted."""
        return list(self._folders)

    def class_names(self) -> list[str]:
        """Class folders that all clients share, sorted, or ``classes`` as given."""
        return self._class_names

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one image as a model sees it: (3, image_size, image_size)."""
        return (3, self.image_size, self.image_size)

    def load(self, domain: str) -> Domain:
        """Paths of a domain's images, sorted by class and name; they are decoded later."""
        if self._is_unlabelled(domain):
            loose = _loose(self.root / domain)
            return Domain(loose, torch.full((len(loose),), UNLABELLED))
        paths: list[Path] = []
        labels: list[int] = []
        for label, name in enumerate(self.class_names()):
            found = _images(self._folders[domain][name])
            paths += found
            labels += [label] * len(found)
        return Domain(paths, torch.tensor(labels, dtype=torch.int64))

    def ids(self, client: str, stage: str) -> list[str] | None:
        """Paths of the images below ``root``, with forward slashes."""
        positions: Tensor = getattr(self.split(client), "test" if stage == "predict" else stage)
        paths = [path for name in self._members(client) for path in self._domain(name).x]
        return [paths[place].relative_to(self.root).as_posix() for place in positions.tolist()]

    @cached_property
    def cached(self) -> bool:
        """Whether the decoded images of all clients that are here fit ``cache_limit_mb``."""
        side = self._side(training=True)
        here = [client.name for client in self.check_roster() if self.is_here(client.name)]
        count = sum(len(self._domain(name).y) for name in here)
        return count * 3 * side**2 <= self.cache_limit_mb * 2**20

    def _side(self, training: bool) -> int:
        """Side of the decoded square; augmentation needs a margin to cut from."""
        return self.resized_side if training and self.augment else self.image_size

    def transform(self, training: bool) -> Transform:
        """Normalise; in training, augment first if asked to."""
        return ImageTransform(self.image_size, training and self.augment, self.mean, self.std)

    def make_dataset(self, client: str, positions: Tensor, y: Tensor, training: bool) -> Dataset[Any]:
        """Decoded images if they fit in memory, else files that are decoded on the fly."""
        files = self._files(client, positions, y, training)
        if not self.cached:
            return files
        key = (client, files.side, positions.numpy().tobytes())
        if key not in self._decoded:  # a transductive target trains and tests on the same pixels
            self._decoded[key] = files.decode_all(self.num_workers)
        return DomainDataset(self._decoded[key], y, files.transform, files.augments)

    def all_samples(self, domain: str) -> Dataset[Any]:
        """As the base class; decoded when they are read, as most are read once."""
        y = self.labels(domain)
        return self._files(domain, torch.arange(len(y)), y, training=False)

    def identity(self, domain: str) -> list[Any]:
        """How images are decoded, and the files by class and name, with their sizes and times of change."""
        paths: list[Path] = self._domain(domain).x
        files = [(*path.parts[-2:], path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        return [VERSION, self._reading(), *files]

    def _reading(self) -> dict[str, Any]:
        """How files become inputs of a model, in plain data."""
        sizes = {"image_size": self.image_size, "resized_side": self.resized_side}
        return sizes | {"interpolation": self.interpolation, "mean": [*self.mean], "std": [*self.std]}

    def raw_inputs(self) -> RawInputs:
        """Images that have been read, scaled and cut, and the network that normalises them."""
        side = self.image_size
        words = (
            "Pixels of images, red, green and blue, from 0 to 255: turned upright by their EXIF orientation, over "
            "white where they are transparent, of more than 8 bits the high 8; then scaled so that the shorter side "
            f"has {self.resized_side}, and cut to the middle square of {side} ({self.interpolation}, with "
            "antialiasing, as torchvision's resize and center_crop of a Pillow image). The model normalises them by "
            "itself."
        )
        return RawInputs(PixelNetwork(self.mean, self.std), torch.zeros(1, 3, side, side, dtype=torch.uint8), words)

    def setup(self, stage: str | None = None) -> None:
        """As the base class; and refuse images that are not what a pretrained network of the model was trained on.

        Raises:
            DatasetLayoutError: If a network has ``preprocessing`` that differs from values that were not given here, or
                as the base class.
        """
        module = getattr(self.trainer, "lightning_module", None)
        roots = [*getattr(module, "originals", ()), *([] if module is None else [module])]
        for network in (part for root in roots for part in root.modules()):
            expected = getattr(network, "preprocessing", None)
            if isinstance(expected, Mapping):
                self._check_network(expected, getattr(network, "name", type(network).__name__))
        super().setup(stage)

    def _check_network(self, expected: Mapping[str, Any], name: str) -> None:
        reading = self._reading()
        other = {key: value for key, value in expected.items() if key in self._by_default and value != reading[key]}
        if other:
            arguments = ", ".join(f"{key}={value!r}" for key, value in other.items())
            raise DatasetLayoutError(
                f"network {name!r} was trained on images with {arguments}, but {type(self).__name__} has "
                f"{', '.join(f'{key}={reading[key]!r}' for key in other)} by default: give it {arguments}, or what "
                "the weights were trained with"
            )

    def facts(self, client: str) -> dict[str, Any]:
        """Return what a client announces of its data: as the base class, and how images become inputs."""
        return super().facts(client) | {"reading": self._reading()}

    def check_facts(self, told: Mapping[str, Any]) -> None:
        """As the base class; and all clients must read their images alike."""
        super().check_facts(told)
        agreed("reading", told, f"give {', '.join(self._reading())} alike in the configuration of each client")

    def _files(self, client: str, positions: Tensor, y: Tensor, training: bool) -> ImageFiles:
        paths: list[Path] = [self._domain(client).x[i] for i in positions.tolist()]
        side, augments = self._side(training), training and self.augment
        return ImageFiles(paths, y, self.resized_side, side, self.transform(training), augments, self.interpolation)

    def pixels(self, client: str, positions: Tensor) -> Tensor:
        """Images to look at, before normalisation: floats in [0, 1], shape (n, 3, image_size, image_size)."""
        return self._files(client, positions, self.labels(client)[positions], training=False).pixels().float() / 255


def _channels(name: str, values: Sequence[float]) -> tuple[float, ...]:
    """Check a mean or a deviation of red, green and blue."""
    least, most = (0, 1) if name == "mean" else (1e-6, math.inf)
    if len(values) != 3 or not all(least <= value <= most for value in values):
        bounds = "from 0 to 1" if name == "mean" else "above 0"
        raise ValueError(f"{name} must be 3 numbers {bounds}, for colours in [0, 1], got {[*values]}")
    return tuple(values)


def _subfolders(folder: Path) -> list[Path]:
    return sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))


def _loose(folder: Path) -> list[Path]:
    """Images that lie in a domain's folder itself, or in that of Office-31 below it."""
    inside = [folder, *(child for child in _subfolders(folder) if child.name == "images")]
    return sorted(image for each in inside for image in _images_of(each, besides=inside))


def _images(folder: Path) -> list[Path]:
    """Images of a class; there must be some."""
    images = _images_of(folder)
    if not images:
        others = sorted(file.name for file in folder.iterdir())
        raise DatasetLayoutError(
            f"class folder {str(folder)!r} must hold images ({', '.join(SUFFIXES)}), got {others or 'nothing'}: add "
            "images, or leave the class out with classes"
        )
    return images


def _images_of(folder: Path, besides: Sequence[Path] = ()) -> list[Path]:
    """Images in a folder, sorted, with a warning of what else is there but hidden files and ``besides``."""
    files = sorted(f for f in folder.iterdir() if not f.name.startswith(".") and f.name.lower() not in _CLUTTER)
    images = [file for file in files if file.suffix.lower() in SUFFIXES and file.is_file()]
    others = [
        f"{file.name}{'' if file.exists() else ' (a link to nothing)'}"
        for file in sorted({*files} - {*images, *besides})
    ]
    if images and others:
        warnings.warn(
            f"left out {len(others)} entries of {str(folder)!r} that are not images ({', '.join(SUFFIXES)}): "
            f"{others[:3]}{' and more' if len(others) > 3 else ''}",
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
            places = torch.randint(0, x.shape[-1] - size + 1, (len(x), 2)).tolist()
            x = torch.stack(
                [im[:, top : top + size, left : left + size] for im, (top, left) in zip(x, places, strict=True)]
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
