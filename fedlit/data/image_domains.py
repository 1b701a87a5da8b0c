"""Photographs in folders: root/domain/class/*.jpg."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedlit.checks import check, check_at_least, check_one_of
from fedlit.data.base import DomainDataModule
from fedlit.data.decoding import VERSION, Interpolation, class_images, loose_images, subfolders
from fedlit.data.domainbed import augmented, domainbed_split, stretched
from fedlit.data.image_checks import (
    Header,
    check_depths,
    check_images,
    check_number,
    check_published,
    checked_colours,
    warn_of_depths,
    warn_of_window,
)
from fedlit.data.image_lists import ImageLists, check_there, read_lists
from fedlit.data.image_samples import IMAGENET_MEAN, IMAGENET_STD, ImageFiles, ImageTransform
from fedlit.data.intensities import Normalise, Reading, Scale, Window, checked_window, moments, quantile_scale
from fedlit.data.raw_inputs import PixelNetwork, RawInputs
from fedlit.data.samples import DatasetNotFoundError, Domain, DomainDataset, check_data, refuse_data
from fedlit.data.source import agreed, check_classes
from fedlit.data.splits import Split, published_split
from fedlit.data.tables.values import some
from fedlit.federation.labels import UNLABELLED
from fedlit.federation.names import alike, check_list, difference, shown

_ONE_CHUNK = 64
"""Images in memory that statistics are computed of at a time."""


class ImageDomains(DomainDataModule):
    """Images in folders ``root/domain/class/*``: Office-Caltech, Office-Home, PACS, VLCS, VisDA, DomainNet, Office-31.

    Office-31 may have one folder more, ``root/domain/images/class/*``; ``lists`` reads the images of list files
    instead, as of DomainNet, ImageCLEF-DA and VisDA-C. Files are JPEG, PNG, BMP, WebP, TIFF or DICOM
    (``.dcm``); hidden ones are not read. Images of the target beside its class folders, or without such folders
    (``root/domain/*.jpg``), have no label; those of sources are left out, with a warning. Domains of clients that
    another process hosts need not be there; then give ``clients``.

    An image is turned upright by its EXIF orientation, laid over white where it is transparent, and converted to 8 bits
    of red, green and blue: grey values of 12 or 16 bits by their full range, colours by their high 8 bits and without
    their profiles (ICC). Then images are scaled so that the shorter side is ``resized_side``, cut to the middle square,
    and normalised. They are decoded once and kept in memory as bytes, or, beyond ``cache_limit_mb``, decoded each time;
    the pixels are the same. Files of several pages or frames are refused.

    With ``window`` or ``normalise``, grey values are read as they are stored instead, in 32 bits, and scaled in their
    own unit: integers of any size, floats, and those of DICOM files after their rescale slope and intercept, in which
    white is the largest value (MONOCHROME1 is inverted). Values without a range that is known (floats, signed or 32-bit
    integers, DICOM) need one of both. Colours are 8 bits, from 0 to 255, here, too.

    Files that cannot be read are named when a client's data are loaded, before anything is trained: by all headers, and
    by whether a file's end is there; those that are kept in memory by decoding them. Images of several bit depths at a
    client are refused if they are to be scaled in one unit, and else warned of, as are those among clients.

    A pretrained network needs images as it was trained on them, which `Backbone` has in ``preprocessing``. Training
    with other values than those is refused unless they are arguments.

    Args:
        root: Folder of the domains. ``None`` is a process without images, such as the server's, which is given
            ``clients`` and ``classes``.
        image_size: Side of the square that a model sees, in pixels; ``None`` is 224.
        resized_side: Pixels of an image's shorter side before the square is cut out, at least ``image_size``; ``None``
            is 8/7 of it (256 for 224).
        interpolation: Of scaling: ``"bilinear"`` or ``"bicubic"``; ``None`` is bilinear.
        mean: What is subtracted from red, green and blue, which are in [0, 1]; ``None`` is ImageNet's mean.
        std: What they are divided by then, positive; ``None`` is ImageNet's standard deviation.
        window: Level and width, in the unit of the values: ``level - width / 2`` becomes 0 and ``level + width / 2``
            1, and values beyond are clipped. ``"file"`` takes the (first) window that each DICOM file has.
        normalise: By the client's own training images: ``"client"`` standardises each channel with their mean and
            deviation, in place of ``mean`` and ``std``; ``"quantiles"`` makes their 1 % and 99 % quantiles 0 and 1,
            clips what is beyond, and goes on with ``mean`` and ``std``. Images that are not kept in memory are decoded
            once for it.
        augment: Cut the square out at a random place and mirror half of the images, in training.
        lists: List file of each domain, a path below ``root`` with ``{domain}`` for its name: ``{domain}_train.txt``,
            ``list/{domain}List.txt``. Each line has an image's path below ``root`` (or the list's folder) and its
            label. Classes are named by the folders of their images, or by their labels where those are no classes.
        test_lists: The same, of the images to test on, in place of a share drawn by ``test_fraction``.
        protocol: ``"domainbed"``: images are scaled to squares whatever their shape; those that sources train on are
            augmented (a random part of 70 to 100 % of the area, mirrored, with other colours, or grey), and are
            decoded each time; and splits are DomainBed's, drawn by ``seed`` and not stratified.
        published: Number of images of each domain (of ``classes``) as published; another number is refused. ``None``
            or ``{}`` takes any.
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
        root: str | None = None,
        *,
        image_size: int | None = None,
        resized_side: int | None = None,
        interpolation: Interpolation | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        window: Window | None = None,
        normalise: Normalise | None = None,
        augment: bool = False,
        lists: str | None = None,
        test_lists: str | None = None,
        protocol: Literal["domainbed"] | None = None,
        published: dict[str, int] | None = None,
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
        self.mean = checked_colours("mean", IMAGENET_MEAN if mean is None else mean)
        self.std = checked_colours("std", IMAGENET_STD if std is None else std)
        check_one_of("normalise", normalise, (None, *get_args(Normalise)))
        is_moot = normalise == "client" and (mean, std) != (None, None)
        rule = "left out with mean or std, whose places it takes"
        check(not is_moot, "normalise", rule, normalise, "take 'quantiles', which goes on with them")
        rule = "'client' or left out with a window, which has its range"
        check(window is None or normalise != "quantiles", "normalise", rule, normalise, "leave one of both out")
        self.normalise = normalise
        self.reading = Reading(window is not None or normalise is not None, checked_window(window))
        arguments: dict[str, Any] = {"interpolation": interpolation}
        if normalise != "client":
            arguments |= {"mean": mean, "std": std}
        self._by_default = [name for name, value in arguments.items() if value is None]
        check_at_least("cache_limit_mb", cache_limit_mb, 0, "MiB")
        check_one_of("protocol", protocol, (None, "domainbed"))
        is_free = (augment, resized_side, interpolation, self.reading.stored) == (False, None, None, False)
        rule = "left out with augment, resized_side, interpolation, window and normalise, which it decides on"
        check(protocol is None or is_free, "protocol", rule, protocol)
        check(lists is not None or test_lists is None, "test_lists", "left out without lists", test_lists)
        self.lists, self.test_lists, self.protocol, self.published = lists, test_lists, protocol, published or {}
        check_list("classes", classes)
        check_classes(classes)
        self.elsewhere = root is None
        if self.elsewhere:
            rule = "named with root=None, in a process without images to find them in"
            way_out = "name all, in the order that all processes have, or give root if there are images here"
            check(self._client_names is not None, "clients", rule, None, way_out)
            check(classes is not None, "classes", rule, None, way_out)
        self.root, self.augment, self.cache_limit_mb = Path(root or "."), augment, cache_limit_mb
        self._wanted = classes
        self._is_test: dict[str, Tensor] = {}
        self._headers: dict[str, list[Header]] = {}
        self._depths: dict[str, dict[str, Path]] = {}
        self._scaling: dict[str, tuple[Scale, Sequence[float], Sequence[float]]] = {}
        self._decoded: dict[tuple[str, int, bytes], Tensor] = {}
        self.check_roster()
        check_published(self.published, [*self.domain_names(), *(client.name for client in self.check_roster())])
        self.class_names()

    @cached_property
    def _listed(self) -> ImageLists | None:
        """What list files name."""
        if self.lists is None or self.elsewhere:
            return None
        return read_lists(self.root, self.lists, self.test_lists, self._client_names)

    @cached_property
    def _folders(self) -> dict[str, dict[str, Path | list[str]]]:
        """Class folders by name, of each domain; or paths of images."""
        if self.elsewhere:
            return {}
        if not self.root.is_dir():
            raise DatasetNotFoundError(
                f"no folder root={str(self.root)!r} (looked for {str(self.root.absolute())!r}): give the folder that "
                "holds one folder per domain, as in root/domain/class/*.jpg; data sets in that layout are listed in "
                "the documentation of ImageDomains and come from their authors' pages"
            )
        if self._listed is not None:
            return {name: {**each} for name, each in self._listed.images.items()}
        domains = {folder.name: folder for folder in subfolders(self.root)}
        rule = "a folder with one folder per domain (root/domain/class/*.jpg)"
        check_data(bool(domains), "root", rule, f"{str(self.root)!r} without any")
        folders: dict[str, dict[str, Path | list[str]]] = {}
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
        numbers = {} if self._listed is None else self._listed.numbers
        shared = set.intersection(*map(set, by_client.values()))
        common = sorted(shared, key=lambda name: (numbers.get(name, 0), name))
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

    def _without_class(self, domain: str) -> list[Path]:
        """Images of the target that lie beside its class folders; those of others are warned of."""
        images = loose_images(self.root / domain, self._folders[domain])
        if images and domain != self.target:
            warnings.warn(
                f"left out {len(images)} images of source {domain!r} beside its class folders "
                f"({some([path.name for path in images])}), as they have no label: move them into folders of classes",
                stacklevel=2,
            )
            return []
        return images

    def domain_names(self) -> list[str]:
        """Return folders in ``root``, sorted."""
        return list(self._folders)

    def class_names(self) -> list[str]:
        """Return class folders that all clients share, sorted, or ``classes`` as passed."""
        return self._class_names

    def _sample_shape(self) -> tuple[int, ...]:
        return (3, self.image_size, self.image_size)  # no image need be here, nor decoded

    def load(self, domain: str) -> Domain:
        """Return paths of a domain's images, sorted by class and name, which are checked; they are decoded later."""
        if self._is_unlabelled(domain):
            images = [loose_images(self.root / domain)]
            labels = torch.full((len(images[0]),), UNLABELLED)
        else:
            found = [self._folders[domain][name] for name in self.class_names()]
            images = [class_images(each) if isinstance(each, Path) else [*map(Path, each)] for each in found]
            labels = torch.arange(len(images)).repeat_interleave(torch.tensor([len(each) for each in images]))
            if self._listed is None and (more := self._without_class(domain)):
                images.append(more)
                labels = torch.cat([labels, torch.full((len(more),), UNLABELLED)])
        paths = [path for each in images for path in each]
        if self._listed is not None:
            check_there(domain, paths)
            tests = self._listed.tests.get(domain, frozenset())
            self._is_test[domain] = torch.tensor([path.as_posix() in tests for path in paths])
        check_number(domain, len(paths), self.published)
        self._headers[domain] = check_images(domain, paths, self.reading, self.resized_side)
        self._depths[domain] = check_depths(domain, self._headers[domain], self.reading)
        return Domain(paths, labels)

    def _make_split(self, name: str, y: Tensor) -> Split:
        hold_out = None
        if self.test_lists is not None:
            hold_out = published_split(self._is_test[name])
        elif self.protocol is not None:
            hold_out = domainbed_split(self.seed, self.domain_names().index(name))
        return self._rules.split(name, y, True, name == self.target, self.seed, hold_out)

    def ids(self, client: str, stage: str) -> list[str] | None:
        """Return paths of the images below ``root``, with forward slashes."""
        positions: Tensor = getattr(self.split(client), "test" if stage == "predict" else stage)
        paths = [path for name in self._members(client) for path in self._domain(name).x]
        return [paths[index].relative_to(self.root).as_posix() for index in positions.tolist()]

    @cached_property
    def cached(self) -> bool:
        """Whether the decoded images of all clients that are here fit ``cache_limit_mb``."""
        side, size = self._side(training=True), 4 if self.reading.stored else 1
        count = sum(len(self._domain(name).y) for name in self._names_here())
        return count * self._channels * size * side**2 <= self.cache_limit_mb * 2**20

    @cached_property
    def _channels(self) -> int:
        """Channels of decoded images: 1 if all that are here are of grey values as they are stored."""
        if not self.reading.stored:
            return 3
        for name in self._names_here():
            self._domain(name)
        return 3 if any(header.colours for each in self._headers.values() for header in each) else 1

    def _side(self, training: bool) -> int:
        """Side of the decoded square; augmentation needs a margin to cut from."""
        return self.resized_side if training and self.augment else self.image_size

    def transform(self, training: bool, client: str | None = None) -> ImageTransform:
        """Scale and normalise images of a client (default: the target's); in training, augment first if asked to."""
        name = self.target if client is None else client
        scale, mean, std = self._scaling_of(name) if self.normalise else (self.reading.scale, self.mean, self.std)
        return ImageTransform(self.image_size, training and self.augment, mean, std, scale)

    def _scaling_of(self, client: str) -> tuple[Scale, Sequence[float], Sequence[float]]:
        """Scale, mean and deviation with statistics of a client's training images, in one look at them."""
        if client not in self._scaling:
            train = self.split(client).train
            files = self._files(client, train, self.labels(client)[train], False, ImageTransform(self.image_size))
            if self.cached and not self.augment:  # these are the images that are trained on
                batches = iter(torch.split(self._stored(client, train, files), _ONE_CHUNK))
            else:
                batches = files.batches(client, self.num_workers)
            scaled = (self.reading.scale(each) for each in batches)
            if self.normalise == "client":
                mean, deviation = (tuple(each.tolist()) for each in moments(scaled))
                self._scaling[client] = self.reading.scale, mean, deviation
            else:
                self._scaling[client] = quantile_scale(scaled), self.mean, self.std
        return self._scaling[client]

    def make_dataset(self, client: str, positions: Tensor, y: Tensor, training: bool) -> Dataset[Any]:
        """Return decoded images if they fit in memory, else files that are decoded on the fly."""
        files = self._files(client, positions, y, training)
        if not self.cached or (files.augments and self.protocol is not None):
            return files
        return DomainDataset(self._stored(client, positions, files), y, files.transform, files.augments)

    def _stored(self, client: str, positions: Tensor, files: ImageFiles) -> Tensor:
        """Decoded images of a client, kept in memory: a transductive target trains and tests on the same pixels."""
        key = (client, files.side, positions.numpy().tobytes())
        if key not in self._decoded:
            self._decoded[key] = files.decode_all(client, self.num_workers)
        return self._decoded[key]

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
        values = {"interpolation": self.interpolation, "mean": [*self.mean], "std": [*self.std]}
        given = {"window": self.reading.window, "normalise": self.normalise, "protocol": self.protocol}
        return sizes | values | {name: value for name, value in given.items() if value is not None}

    def raw_inputs(self) -> RawInputs:
        """Return images that have been read, scaled and cut, and the network that normalises them."""
        side = self.image_size
        transform = self.transform(training=False)
        network = PixelNetwork(transform.mean, transform.std, transform.scale)
        sample = torch.zeros(1, self._channels, side, side, dtype=torch.float32 if self.reading.stored else torch.uint8)
        how = f"{self.interpolation}, with antialiasing, as torchvision's resize and center_crop of a Pillow image"
        cut = f"scaled so that the shorter side has {self.resized_side}, and cut to the middle square of {side} ({how})"
        if self.protocol is not None:
            cut = f"scaled to {side} x {side} pixels, whatever the shape ({how})"
        depth = "colours" if self.reading.stored else "values"
        text = (
            f"{self.reading.values(self._channels)}: turned upright by their EXIF orientation, over white where they "
            f"are transparent, of {depth} of more than 8 bits the high 8; then {cut}. The model "
            f"{self.reading.steps(self.normalise)} by itself."
        )
        return RawInputs(network, sample, text)

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
        """Return what a client announces of its data: as the base class, how images become inputs, and bit depths."""
        facts = super().facts(client)
        for name in self._members(client) if isinstance(self.reading.window, tuple) else ():
            files = self._files(name, torch.tensor([0]), self.labels(name)[:1], False, ImageTransform(self.image_size))
            warn_of_window(name, files.paths[0], files.decode(files.paths), self.reading)
        depths = {depth for name in self._members(client) for depth in self._depths.get(name, ())}
        return facts | {"reading": self._reading(), "depths": sorted(depths)}

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        """As the base class; all clients must read their images alike, and other bit depths are warned of."""
        super().check_facts(facts)
        agreed("reading", facts, f"give {', '.join(self._reading())} alike in the configuration of each client")
        if self.normalise is None:
            warn_of_depths({name: each["depths"] for name, each in facts.items()}, self._depths, self.reading)

    def _files(
        self, client: str, positions: Tensor, y: Tensor, training: bool, transform: ImageTransform | None = None
    ) -> ImageFiles:
        paths: list[Path] = [self._domain(client).x[i] for i in positions.tolist()]
        side, augments, shape = self._side(training), training and self.augment, None
        if self.protocol is not None:  # which augments no test domain
            augments = training and client != self.target
            shape = (augmented if augments else stretched)(side)
        return ImageFiles(
            paths, y, self.resized_side, side, transform or self.transform(training, client), augments,
            self.interpolation, self.reading, self._channels, shape,
        )  # fmt: skip

    def pixels(self, client: str, positions: Tensor) -> Tensor:
        """Return images to look at, before normalisation: floats in [0, 1], shape (n, 3, image_size, image_size).

        Those that the client's mean and deviation normalise alone are in [0, 1] up to two deviations.
        """
        files = self._files(client, positions, self.labels(client)[positions], training=False)
        x = files.decode(files.paths)
        if self.normalise == "client" and self.reading.window is None:
            return (files.transform(x) / 4 + 0.5).clamp(0, 1)
        scale = self._scaling_of(client)[0] if self.normalise else self.reading.scale
        return scale(x).expand(-1, 3, -1, -1)
