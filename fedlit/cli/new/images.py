"""Images: a folder for each client, and in it one for each class."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedlit.cli.new.study import Study, Writers, check_target, seen_from


def suffixes() -> tuple[str, ...]:
    """Suffixes of image files; importing them takes seconds, which the help need not."""
    from fedlit.data.decoding import SUFFIXES

    return SUFFIXES


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe images."""
    parser.add_argument("--image_size", type=int, help="side of the square that the network sees, in pixels")


def own(given: argparse.Namespace) -> Study:
    """The user's images."""
    from fedlit.data import ImageDomains

    size = 64 if given.image_size is None else given.image_size
    names = ImageDomains(str(given.data), image_size=size).domain_names()
    check_target(given.target, names)
    data = ImageDomains(str(given.data), target=given.target, image_size=size)
    classes = data.class_names()
    return Study(
        files=seen_from(given.dir, given.data),
        target=given.target,
        labelled=int((data.load(given.target).y >= 0).sum()),
        about=f"images of {len(names)} clients ({', '.join(names)}) in {len(classes)} classes; {given.target!r} is "
        "adapted to.",
        place=f"They are read from `{given.data}`, which has a folder for each client, and in it one for each class.",
        more={"image_size": size, "rounds": 40},
    )


_CLIENTS = {"written": "clean", "photographed": "blended", "faxed": "noisy", "printed": "fonts"}
"""Clients of the example, and the domains of `fedlit.data.Digits` that they are."""

_SIDE, _IMAGES = 16, 60
"""Pixels of an image's side, and images of each class at each client."""


def example(folder: Path, writers: Writers) -> Study:
    """The embedded digits, as image files that somebody might have."""

    def write() -> None:
        import numpy as np
        from PIL import Image

        from fedlit.data import Digits

        digits = Digits(noisy_std=0.2, photo_strength=0.3)
        for client, domain in _CLIENTS.items():
            samples = digits.load(domain)
            pixels = (samples.x[:, 0].clamp(0, 1) * 255).byte().numpy()
            for digit in range(digits.num_classes):
                place = folder / "data" / client / str(digit)
                place.mkdir(parents=True)
                for number, sample in enumerate(np.flatnonzero(samples.y.numpy() == digit)[:_IMAGES]):
                    image = Image.fromarray(pixels[sample]).resize((_SIDE, _SIDE), Image.Resampling.BICUBIC)
                    image.save(place / f"{number:02d}.png")

    writers.append(write)
    return Study(
        files="data",
        target="printed",
        labelled=10 * _IMAGES,
        about="images of digits as an example: of three clients, who write, photograph and fax them, and of a fourth, "
        "who prints them and whose labels score the result and are for comparison.",
        place="The example runs as it is. Then put a folder of your own for each client into `data/`, in place of "
        "those there, and in it one for each class: `data/CLIENT/CLASS/*.jpg`. Give `image_size` what they need.",
        listing="- `data/`: the example, a folder for each client, and in it one for each class.\n",
        more={"image_size": _SIDE, "rounds": 20},
    )
