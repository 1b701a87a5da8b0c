"""Small images in the folders of data sets that cannot be shipped, so that their configurations can be run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

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
