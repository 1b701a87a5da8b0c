"""Photographs in folders: root/domain/class/*.jpg."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedlit.checks import check, check_at_least, check_one_of
from fedlit.data.base import DomainDataModule
from fedlit.data.decoding import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    VERSION,
    ImageFiles,
    ImageTransform,
    Interpolation,
    class_images,
    loose_images,
    subfolders,
)
from fedlit.data.raw_inputs import PixelNetwork, RawInputs
from fedlit.data.samples import DatasetNotFoundError, Domain, DomainDataset, check_data, refuse_data
from fedlit.data.source import agreed, check_classes
from fedlit.federation.labels import UNLABELLED
from fedlit.federation.names import alike, check_list, difference, shown


class ImageDomains(DomainDataModule):
    """Images in folders ``root/domain/class/*``: Office-Caltech, Office-Home, PACS, VLCS, VisDA, DomainNet, Office-31.

    Office-31 may have one folder more, ``root/domain/images/class/*``. Files are JPEG, PNG, BMP, WebP or TIFF; hidden
    ones and those beside the folders are not read. A target without class folders (``root/domain/*.jpg``) has no
    labels. Domains of clients that another process hosts need not be there; then give ``clients``.

    An image is turned upright by its EXIF orientation, laid over white where it is transparent, and converted to 8 bits
    of red, green and blue: grey values of 12 or 16 bits by their full range, colours without their profiles (ICC).
    Values of 32 bits or with a sign and files of several pages or frames are refused. Then images are scaled so that
    the shorter side is ``resized_side``, cut to the middle square, and normalised. They are decoded once and kept in
    memory as bytes, or, beyond ``cache_limit_mb``, decoded each time; the pixels are the same.

    A pretrained network needs images as it was trained on them, which `Backbone` has in ``preprocessing``. Training
    with other values than those is refused unless they are arguments.

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
        check_at_least("image_size", self.image_size, 1, "pixel")
        # without an argument: so that the margins are even, and cutting twice gives the same pixels as cutting once
        margin = max(4, 4 * round(self.image_size / 28))
        self.resized_side = self.image_size + margin if resized_side is None else resized_side
        rule = f"at least image_size ({self.image_size} pixels)"
        way_out = "the square is cut out of what it leaves"
        check(self.resized_side >= self.image_size, "resized_side", rule, resized_side, way_out)
        check_one_of("interpolation", interpolation, (None, *get_args(Interpolation)))
        self.interpolation: Interpolation = "bilinear" if interpolation is None else interpolation
        self.mean = _channels("mean", IMAGENET_MEAN if mean is None else mean)
        self.std = _channels("std", IMAGENET_STD if std is None else std)
        arguments = {"interpolation": interpolation, "mean": mean, "std": std}
        self._by_default = [name for name, value in arguments.items() if value is None]
        check_at_least("cache_limit_mb", cache_limit_mb, 0, "MiB")
        check_list("classes", classes)
        check_classes(classes)
        self.root, self.augment, self.cache_limit_mb, self._wanted = Path(root), augment, cache_limit_mb, classes
        self._decoded: dict[tuple[str, int, bytes], Tensor] = {}
        self.check_roster()
        self.class_names()

    @cached_property
    def _folders(self) -> dict[str, dict[str, Path]]:
        """Class folders by name, of each domain."""
        if not self.root.is_dir():
            raise DatasetNotFoundError(
                f"no folder root={str(self.root)!r} (looked for {str(self.root.absolute())!r}): give the folder that "
                "holds one folder per domain, as in root/domain/class/*.jpg; data sets in that layout are listed in "
                "the documentation of ImageDomains and come from their authors' pages"
            )
        domains = {folder.name: folder for folder in subfolders(self.root)}
        rule = "a folder with one folder per domain (root/domain/class/*.jpg)"
        check_data(bool(domains), "root", rule, f"{str(self.root)!r} without any")
        folders = {}
        for name, folder in domains.items():
            inner = subfolders(folder)
            if [child.name for child in inner] == ["images"]:  # Office-31 as published
                inner = subfolders(inner[0])
            folders[name] = {child.name: child for child in inner}
        return folders

    @cached_property
    def _class_names(self) -> list[str]:
        here = self._names_here()
        by_client = {name: list(self._folders[name]) for name in here if not self._is_unlabelled(name)}
        rule = f"named where no client has class folders, as of {here} in {str(self.root)!r}"
        check_data(self._wanted is not None or bool(by_client), "classes", rule, None, "in the order of labels")
        for name, classes in by_client.items():
            way_out = "name the domains in clients, or make a folder of images without classes the target"
            rule = "a folder with one folder per class (root/domain/class/*.jpg)"
            check_data(bool(classes), f"{name} (domain in {self.root})", rule, "none", way_out)
        self._check_alike(by_client)
        if self._wanted is not None:
            for name, classes in by_client.items():
                missing = [wanted for wanted in self._wanted if wanted not in classes]
                way_out = "name classes that all clients share"
                check_data(not missing, "classes", f"folders of domain {name!r}, {classes}", missing, way_out)
            return self._wanted
        common = sorted(set.intersection(*map(set, by_client.values())))
        extra = {name: others for name, each in by_client.items() if (others := sorted({*each} - {*common}))}
        way_out = f"name the classes to keep, such as classes={common}"
        check_data(not extra, "classes", f"folders of all domains in {str(self.root)!r}", f"others, {extra}", way_out)
        return common

    def _check_alike(self, by_client: Mapping[str, Sequence[str]]) -> None:
        """Refuse class folders that people would take for one, of which no more than one has been named."""
        folders = [(name, each) for name, classes in by_client.items() for each in classes]
        for group in alike(each for _, each in folders):
            wanted = {*group} & {*(self._wanted or group[:1])}
            if wanted and wanted < {*group}:
                where = shown(f"{name}/{each}" for name, each in folders if each in group)
                way_out = "rename one, or put their images in one folder, or name all in classes if they are different"
                got = f"{shown(group)}, which differ in {difference(group)}, in folders {where}"
                refuse_data("classes", "different names", got, way_out)

    def _is_unlabelled(self, domain: str) -> bool:
        """Whether a domain is the target, with images and without class folders."""
        return domain == self.target and not self._folders[domain] and bool(loose_images(self.root / domain))

    def domain_names(self) -> list[str]:
        """Return folders in ``root``, sorted."""
        return list(self._folders)

    def class_names(self) -> list[str]:
        """Return class folders that all clients share, sorted, or ``classes`` as passed."""
        return self._class_names

    def _sample_shape(self) -> tuple[int, ...]:
        return (3, self.image_size, self.image_size)  # no image need be here, nor decoded

    def load(self, domain: str) -> Domain:
        """Return paths of a domain's images, sorted by class and name; they are decoded later."""
        if self._is_unlabelled(domain):
            loose = loose_images(self.root / domain)
            return Domain(loose, torch.full((len(loose),), UNLABELLED))
        images = [class_images(self._folders[domain][name]) for name in self.class_names()]
        labels = torch.arange(len(images)).repeat_interleave(torch.tensor([len(each) for each in images]))
        return Domain([path for each in images for path in each], labels)

    def ids(self, client: str, stage: str) -> list[str] | None:
        """Return paths of the images below ``root``, with forward slashes."""
        positions: Tensor = getattr(self.split(client), "test" if stage == "predict" else stage)
        paths = [path for name in self._members(client) for path in self._domain(name).x]
        return [paths[index].relative_to(self.root).as_posix() for index in positions.tolist()]

    @cached_property
    def cached(self) -> bool:
        """Whether the decoded images of all clients that are here fit ``cache_limit_mb``."""
        side = self._side(training=True)
        count = sum(len(self._domain(name).y) for name in self._names_here())
        return count * 3 * side**2 <= self.cache_limit_mb * 2**20

    def _side(self, training: bool) -> int:
        """Side of the decoded square; augmentation needs a margin to cut from."""
        return self.resized_side if training and self.augment else self.image_size

    def transform(self, training: bool) -> ImageTransform:
        """Normalise; in training, augment first if asked to."""
        return ImageTransform(self.image_size, training and self.augment, self.mean, self.std)

    def make_dataset(self, client: str, positions: Tensor, y: Tensor, training: bool) -> Dataset[Any]:
        """Return decoded images if they fit in memory, else files that are decoded on the fly."""
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
        """Return how images are decoded, and the files by class and name, with their sizes and times of change."""
        paths: list[Path] = self._domain(domain).x
        files = [(*path.parts[-2:], path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        return [VERSION, self._reading(), *files]

    def _reading(self) -> dict[str, Any]:
        """How files become inputs of a model, in plain data."""
        sizes = {"image_size": self.image_size, "resized_side": self.resized_side}
        return sizes | {"interpolation": self.interpolation, "mean": [*self.mean], "std": [*self.std]}

    def raw_inputs(self) -> RawInputs:
        """Return images that have been read, scaled and cut, and the network that normalises them."""
        side = self.image_size
        text = (
            "Pixels of images, red, green and blue, from 0 to 255: turned upright by their EXIF orientation, over "
            "white where they are transparent, of more than 8 bits the high 8; then scaled so that the shorter side "
            f"has {self.resized_side}, and cut to the middle square of {side} ({self.interpolation}, with "
            "antialiasing, as torchvision's resize and center_crop of a Pillow image). The model normalises them by "
            "itself."
        )
        return RawInputs(PixelNetwork(self.mean, self.std), torch.zeros(1, 3, side, side, dtype=torch.uint8), text)

    def setup(self, stage: str | None = None) -> None:
        """As the base class; and refuse defaults here that differ from a pretrained network's ``preprocessing``."""
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
            now = ", ".join(f"{key}={reading[key]!r}" for key in other)
            way_out = f"give {type(self).__name__} {arguments}, or what the weights were trained with"
            rule = f"as the network {name!r} was trained ({arguments})"
            refuse_data(f"{next(iter(other))} (of images)", rule, f"{now} by default", way_out)

    def facts(self, client: str) -> dict[str, Any]:
        """Return what a client announces of its data: as the base class, and how images become inputs."""
        return super().facts(client) | {"reading": self._reading()}

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        """As the base class; and all clients must read their images alike."""
        super().check_facts(facts)
        agreed("reading", facts, f"give {', '.join(self._reading())} alike in the configuration of each client")

    def _files(self, client: str, positions: Tensor, y: Tensor, training: bool) -> ImageFiles:
        paths: list[Path] = [self._domain(client).x[i] for i in positions.tolist()]
        side, augments = self._side(training), training and self.augment
        return ImageFiles(paths, y, self.resized_side, side, self.transform(training), augments, self.interpolation)

    def pixels(self, client: str, positions: Tensor) -> Tensor:
        """Return images to look at, before normalisation: floats in [0, 1], shape (n, 3, image_size, image_size)."""
        files = self._files(client, positions, self.labels(client)[positions], training=False)
        return files.decode(files.paths).float() / 255


def _channels(name: str, values: Sequence[float]) -> tuple[float, ...]:
    """Check a mean or a deviation of red, green and blue."""
    fits = [0 <= value <= 1 if name == "mean" else value >= 1e-6 for value in values]
    bounds = "from 0 to 1" if name == "mean" else "above 0"
    check(len(values) == 3 and all(fits), name, f"3 numbers {bounds}, for colours in [0, 1]", [*values])
    return tuple(values)
