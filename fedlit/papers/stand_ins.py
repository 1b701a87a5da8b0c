"""Small files in place of data sets that have to be fetched, in their layouts, so that the papers' experiments run.

Classes differ in colour and in where an image is bright, so that something can be learnt. No figure of them is one of
the paper's data.
"""

from __future__ import annotations

import colorsys
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Overrides = dict[str, str]
"""Configuration keys and their values as the command line takes them, by which a configuration reads the files."""

_CLASSES = ("bird", "dog", "mug")
_PER_CLASS = 12


def _numbered(count: int) -> tuple[str, ...]:
    """Names of as many classes as the published data have, where a configuration gives their number."""
    return tuple(f"class_{number:02d}" for number in range(count))


def write_images(
    root: Path,
    domains: Iterable[str],
    layout: str = "{domain}/{name}/{name}_{number:04d}.jpg",
    lists: Mapping[str, tuple[int, int]] | None = None,
    classes: Sequence[str] = _CLASSES,
) -> Overrides:
    """Write 12 images of 32x32 pixels of each class and each domain, and list files of them.

    Args:
        root: Folder of the data set.
        domains: Their names.
        layout: Path of an image, of ``domain``, ``name`` and ``label`` of its class, and ``number`` from 0.
        lists: Path of a list by ``domain``, and the numbers of the first image in it and the first beyond.
        classes: Their names.
    """
    from PIL import Image

    rng = np.random.default_rng(0)
    for place, domain in enumerate(domains):
        paths = []
        for label, name in enumerate(classes):
            colour = 255 * np.array(colorsys.hsv_to_rgb(label % 3 / 3, 0.8, 0.9 - 0.15 * (place % 4)))
            top, left = divmod(label, 6)  # of a bright square in a grid of 6 x 6
            for number in range(_PER_CLASS):
                pixels = colour + rng.normal(scale=40, size=(32, 32, 3))
                pixels[5 * top : 5 * top + 5, 5 * left : 5 * left + 5] += 150
                pixels = pixels.clip(0, 255).astype(np.uint8)
                paths.append((layout.format(domain=domain, name=name, label=label, number=number), label, number))
                (root / paths[-1][0]).parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(root / paths[-1][0])
        for pattern, (first, end) in (lists or {}).items():
            file = root / pattern.format(domain=domain)
            file.parent.mkdir(parents=True, exist_ok=True)
            lines = [f"{path} {label}\n" for path, label, number in paths if first <= number < end]
            # paths in a list beside the images start at its folder
            start = f"{domain}/" if file.parent.name == domain else ""
            file.write_text("".join(line.removeprefix(start) for line in lines), encoding="utf-8")
    return {"data.init_args.root": str(root), "data.init_args.published": "null"}


def _office31(root: Path) -> Overrides:
    layout = "{domain}/images/{name}/frame_{number:04d}.jpg"
    return write_images(root, ("amazon", "dslr", "webcam"), layout, classes=_numbered(31))


def _visda(root: Path) -> Overrides:
    lists = {"{domain}/image_list.txt": (0, _PER_CLASS)}
    write_images(root, ("test",), "{domain}/trunk{number:02d}/{name}.jpg", lists, _numbered(12))
    return write_images(root, ("train", "validation"), lists=lists, classes=_numbered(12))


def _images_of(*domains: str, **options: Any) -> Callable[[Path], Overrides]:
    return partial(write_images, domains=domains, **options)


def _bright(y: npt.NDArray[np.int64], side: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Noise of shape (n, side, side), brighter in a square whose place is that of the digit."""
    x = rng.integers(0, 128, (len(y), side, side))
    edge = side // 4
    for label in range(10):
        top, left = edge * (label // 4), edge * (label % 4)
        x[y == label, top : top + edge, left : left + edge] += 120
    return x.astype(np.uint8)


def write_idx(folder: Path, number: int = 3000) -> Overrides:
    """Write the four files of MNIST and of Fashion-MNIST, a sixth of the images for testing."""
    folder.mkdir(parents=True, exist_ok=True)
    labels = np.arange(number) % 10
    images = _bright(labels, 28, np.random.default_rng(0))
    for part, chosen in (("train", slice(number // 6, None)), ("t10k", slice(0, number // 6))):
        for kind, array in (("images-idx3", images[chosen]), ("labels-idx1", labels[chosen].astype(np.uint8))):
            head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape)
            (folder / f"{part}-{kind}-ubyte").write_bytes(head + array.tobytes())
    return {"data.init_args.root": str(folder)}


def write_cifar10(folder: Path, number: int = 500) -> Overrides:
    """Write the six files of CIFAR-10's binary version, each with so many images."""
    inner = folder / "cifar-10-batches-bin"
    inner.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{batch}" for batch in range(1, 6)), "test_batch"):
        labels = rng.permutation(np.arange(number) % 10)
        planes = [_bright(labels, 32, rng).reshape(number, -1) for _ in range(3)]
        rows = np.concatenate([labels[:, None].astype(np.uint8), *planes], axis=1)
        (inner / f"{name}.bin").write_bytes(rows.tobytes())
    return {"data.init_args.root": str(folder), "data.init_args.published": "false"}


def write_digit_five(folder: Path, sizes: tuple[int, int] = (200, 60)) -> Overrides:
    """Write the six .mat files of Digit-Five, with so many images for training and for testing in each domain."""
    from scipy.io import savemat

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    y = [rng.permutation(np.arange(size) % 10) for size in sizes]
    hot = [np.eye(10, dtype=np.uint8)[each] for each in y]

    def grey(side: int) -> list[npt.NDArray[np.uint8]]:
        return [_bright(each, side, rng) for each in y]

    def colours(side: int) -> list[npt.NDArray[np.uint8]]:
        return [np.stack([x // (1 + channel) for channel in range(3)], axis=3) for x in grey(side)]

    of = ("train", "test")
    labels = {f"label_{part}": each for part, each in zip(of, hot, strict=True)}
    mnist = {f"{part}_{side}": x for side in (28, 32) for part, x in zip(of, grey(side), strict=True)}
    savemat(folder / "mnist_data.mat", mnist | labels)
    savemat(folder / "mnistm_with_label.mat", dict(zip(of, colours(28), strict=True)) | labels)
    for part, x, each in zip(of, colours(32), y, strict=True):
        ten = np.where(each == 0, 10, each)[:, None].astype(np.uint8)
        savemat(folder / f"svhn_{part}_32x32.mat", {"X": x.transpose(1, 2, 3, 0), "y": ten})
    syn = {f"{part}_data": x for part, x in zip(of, colours(32), strict=True)}
    savemat(folder / "syn_number.mat", syn | {f"{part}_label": each[:, None] for part, each in zip(of, y, strict=True)})
    cells = np.empty((2, 2), dtype=object)
    for row, x in enumerate(grey(28)):
        cells[row, 0], cells[row, 1] = x[:, None] / 255.0, y[row][:, None]
    savemat(folder / "usps_28x28.mat", {"dataset": cells})
    return {"data.init_args.path": str(folder), "data.init_args.published": "false"}


_WIDAR3 = {"20181130-VS": range(10, 18), "20181209-VS/6-link": (2, 3, 6), "20181211-VS/6-link": (3, 7, 8, 9)}
"""Users of the papers' experiments, in three rooms."""


def write_widar3(
    folder: Path,
    users: Mapping[str, Iterable[int]] = _WIDAR3,
    gestures: int = 6,
    locations: int = 5,
    repetitions: int = 1,
) -> Overrides:
    """Write BVP files of users by folder, with some repetitions of each gesture at each location."""
    from scipy.io import savemat

    for place, numbers in users.items():
        for user in numbers:
            inner = folder / place / f"user{user}"
            inner.mkdir(parents=True)
            for number in range(gestures * locations * repetitions):
                gesture, location = number % gestures + 1, number // gestures % locations + 1
                repetition = number // gestures // locations + 1
                rng = np.random.default_rng(100 * user + number)
                x = rng.random((20, 20, 10 + number % 5)) + 3 * (np.arange(20) == 2 * gesture)[:, None, None]
                name = f"user{user}-{gesture}-{location}-1-{repetition}-1-1e-07-100-20-100000-L0.mat"
                savemat(inner / name, {"velocity_spectrum_ro": x})
    return {"data.init_args.path": str(folder)}


def write_pamap2(folder: Path, length: int = 2500) -> Overrides:
    """Write Protocol/subject10X.dat of six people, each with so many samples (100 a second) of three activities."""
    (folder / "Protocol").mkdir(parents=True)
    activities = (1, 4, 5)  # lying, walking and running: one of each intensity
    for subject in (101, 102, 105, 106, 108, 109):
        rng = np.random.default_rng(subject)
        table = rng.normal(size=(length * len(activities), 54))
        table[:, 0] = np.arange(len(table)) / 100
        table[:, 1] = np.repeat(activities, length)
        table[:, 2] = np.where(np.arange(len(table)) % 11 == 0, 80, np.nan)
        table[:, 3:] += np.repeat(np.arange(len(activities)), length)[:, None]
        np.savetxt(folder / "Protocol" / f"subject{subject}.dat", table, fmt="%.4g")
    return {"data.init_args.path": str(folder)}


_DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")

STAND_INS: dict[str, Callable[[Path], Overrides]] = {
    "Office-31": _office31,
    "Office-Home": _images_of("Art", "Clipart", "Product", "Real World"),
    "ImageCLEF-DA": _images_of(
        *("b", "c", "i", "p"),
        layout="{domain}/{label}_{number}.jpg",
        lists={"list/{domain}List.txt": (0, _PER_CLASS)},
    ),
    "Adaptiope": _images_of("product_images", "real_life", "synthetic"),
    "VisDA-C": _visda,
    "DomainNet": _images_of(*_DOMAINNET, lists={"{domain}_train.txt": (0, 8), "{domain}_test.txt": (8, _PER_CLASS)}),
    "Digit-Five": write_digit_five,
    "CIFAR-10": write_cifar10,
    "PACS": _images_of("art_painting", "cartoon", "photo", "sketch"),
    "VLCS": _images_of("Caltech101", "LabelMe", "SUN09", "VOC2007"),
    "TerraIncognita": _images_of("location_38", "location_43", "location_46", "location_100"),
    "Office-Caltech-10": _images_of("amazon", "caltech10", "dslr", "webcam", classes=_numbered(10)),
    "Fashion-MNIST": partial(write_idx, number=15_000),
    "ColoredMNIST": write_idx,
    "Widar3.0": write_widar3,
    "PAMAP2": write_pamap2,
}
"""By the data set's name: writes it into a folder, and returns what has to be set so that it is read from there."""
