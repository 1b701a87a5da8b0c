"""Small files in place of data sets that cannot be shipped, so that their configurations can be run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fedlit.papers.stand_ins import STAND_INS, write_idx
from sensor_files import write_hapt

PAPERS = {
    "adaptiope": "Adaptiope", "cifar10": "CIFAR-10", "domainnet": "DomainNet", "image_clef": "ImageCLEF-DA",
    "office31": "Office-31", "office_caltech_images": "Office-Caltech-10", "office_home": "Office-Home", "pacs": "PACS",
    "published_digit_five": "Digit-Five", "terra_incognita": "TerraIncognita", "visda": "VisDA-C", "vlcs": "VLCS",
    "colored_mnist": "ColoredMNIST", "pamap2": "PAMAP2", "widar3": "Widar3.0",
}  # fmt: skip
"""Data set of each configuration whose files the package makes itself."""

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


def write_stand_in(name: str, folder: Path) -> dict[str, Any]:
    """Write what the configuration ``name`` of configs/data reads; the arguments that say where it is."""
    if name in PAPERS:
        found = STAND_INS[PAPERS[name]](folder)
        return {key.removeprefix("data.init_args."): yaml.safe_load(value) for key, value in found.items()}
    if name == "digit_five":
        write_digits(folder / "digits.npz")
        return {"path": str(folder / "digits.npz")}
    elif name in ("office_caltech_features", "office_caltech_surf"):
        write_features(folder / "features.npz", 1280 if name == "office_caltech_features" else 800)
        return {"path": str(folder / "features.npz")}
    elif name == "hapt":
        np.savez(folder / "hapt.npz", **write_hapt(folder))  # type: ignore[arg-type]
        return {"path": str(folder / "hapt.npz")}
    elif name == "fashion_mnist":
        return {"root": write_idx(folder)["data.init_args.root"]}
    return {}  # shipped with the package
