"""Small files in place of data sets that cannot be shipped, so that their configurations can be run."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sensor_files import write_hapt, write_pamap2, write_widar3

DOMAINS = {
    "pacs": ("art_painting", "cartoon", "photo", "sketch"),
    "vlcs": ("Caltech101", "LabelMe", "SUN09", "VOC2007"),
    "terra_incognita": ("location_38", "location_43", "location_46", "location_100"),
}
"""Folders of each configuration's data set, as DomainBed names them."""


def write_images(root: Path, domains: tuple[str, ...], per_class: int = 12) -> None:
    """Write noise of 16x16 pixels into root/domain/class/*.png, for two classes."""
    rng = np.random.default_rng(0)
    for domain in domains:
        for name in ("bird", "dog"):
            folder = root / domain / name
            folder.mkdir(parents=True)
            for number in range(per_class):
                Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / f"{number}.png")


OFFICE = ("amazon", "caltech10", "dslr", "webcam")


def write_digits(path: Path) -> None:
    """Write noise as MNIST's 600 and USPS's 450 images, all digits among them, into the file of `DigitFive`."""
    rng = np.random.default_rng(0)
    mnist, usps = (rng.integers(0, 256, (n, side, side), dtype=np.uint8) for n, side in ((600, 28), (450, 16)))
    np.savez(path, mnist_x=mnist, mnist_y=np.arange(600) % 10, usps_x=usps, usps_y=np.arange(450) % 10)


def write_features(path: Path, width: int) -> None:
    """Write 40 vectors of counts of two classes for each domain of Office-Caltech-10."""
    rng = np.random.default_rng(0)
    arrays = {f"{name}_x": rng.integers(0, 9, (40, width), dtype=np.uint8) for name in OFFICE}
    np.savez(path, classes=["bike", "mug"], **arrays, **{f"{name}_y": np.arange(40) % 2 for name in OFFICE})


def write_idx(folder: Path, number: int = 3000) -> None:
    """Write noise as the four files of MNIST and of Fashion-MNIST, a sixth of it for testing."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (number, 28, 28), dtype=np.uint8), (np.arange(number) % 10).astype(np.uint8)
    for part, chosen in (("train", slice(number // 6, None)), ("t10k", slice(0, number // 6))):
        for kind, array in (("images-idx3", images[chosen]), ("labels-idx1", labels[chosen])):
            head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape)
            (folder / f"{part}-{kind}-ubyte").write_bytes(head + array.tobytes())


def write_stand_in(name: str, folder: Path) -> dict[str, Any]:
    """Write what the configuration ``name`` of configs/data reads; the arguments that say where it is."""
    if name in DOMAINS or name == "office_caltech_images":
        write_images(folder, DOMAINS.get(name, OFFICE))
    elif name == "digit_five":
        write_digits(folder / "digits.npz")
        return {"path": str(folder / "digits.npz")}
    elif name in ("office_caltech_features", "office_caltech_surf"):
        write_features(folder / "features.npz", 1280 if name == "office_caltech_features" else 800)
        return {"path": str(folder / "features.npz")}
    elif name == "hapt":
        np.savez(folder / "hapt.npz", **write_hapt(folder))  # type: ignore[arg-type]
        return {"path": str(folder / "hapt.npz")}
    elif name == "pamap2":
        write_pamap2(folder, stretch=400)
        return {"path": str(folder), "window": 1.0, "stride": 0.5}  # seconds, of recordings that are short
    elif name == "widar3":
        write_widar3(folder)
        return {"path": str(folder)}
    elif name in ("colored_mnist", "fashion_mnist"):
        write_idx(folder)
    else:  # shipped with the package
        return {}
    return {"root": str(folder)}
