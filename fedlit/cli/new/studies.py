"""Kinds of data for ``fedlit new``: images and feature vectors; `fedlit.cli.new.tables` has tables."""

from __future__ import annotations

import argparse
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fedlit.configs import flow


@dataclass(frozen=True)
class Study:
    """The facts of some data that a configuration and its README state."""

    files: object  # where they are, as the configuration has it
    target: str  # the client that is adapted to
    labelled: int  # samples of the target whose label is known
    about: str  # the data, in a sentence
    place: str  # where to put one's own data, in sentences
    listing: str = ""  # entries of the README's list, for what is written besides
    regression: bool = False
    more: dict[str, object] = field(default_factory=dict)  # placeholders of this kind of data
    write: Callable[[Path], None] = lambda folder: None  # writes the files of an example into a folder


class Kind(ABC):
    """A kind of data; ``suffixes`` of its files lie at ``depths`` (patterns) in a folder of them."""

    summary: str
    depths: Sequence[str] = ("*",)
    suffixes: Sequence[str] = ()
    method: str = "SourceOnly"  # class of the recommended method, which names the folder of its runs

    def options(self, parser: argparse.ArgumentParser) -> None:  # noqa: B027 (need not be overridden)
        """Add options that describe a user's data."""

    @abstractmethod
    def own(self, given: argparse.Namespace) -> Study:
        """A user's data."""

    @abstractmethod
    def example(self) -> Study:
        """An example, not written yet."""


def seen_from(folder: Path, path: Path) -> str:
    """A path as it is written in a configuration in a folder: relative to it, if it lies in it."""
    path, folder = path.resolve(), folder.resolve()
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def check_target(target: str | None, names: Sequence[str]) -> None:
    """End the command unless there are sources and the target is a client."""
    if len(names) < 2:
        sys.exit(f"fedlit: --data must have at least 2 clients, a source and the target, and has {[*names]}")
    if target not in names:
        got = "" if target is None else f", got {target!r}"
        sys.exit(f"fedlit: --target must name the client that is adapted to, one of {[*names]}{got}")


def own_data(module: type[Any], given: argparse.Namespace, **arguments: Any) -> tuple[list[str], Any, Any]:
    """Names of the clients, the data module, and the target's samples."""
    names = module(str(given.data), **arguments).domain_names()
    check_target(given.target, names)
    data = module(str(given.data), target=given.target, **arguments)
    return names, data, data.load(given.target)


def lines(arguments: Mapping[str, Any]) -> str:
    """Arguments of the data module as lines of the configuration."""
    return "".join(f"    {name}: {flow(value)}\n" for name, value in arguments.items())


class Images(Kind):
    """Image files; an example of embedded digits."""

    summary = "images in folders, DIR/CLIENT/CLASS/*.jpg"
    depths = ("*/*", "*/*/*")
    method = "FedAvg"
    clients: ClassVar = {"written": "clean", "photographed": "blended", "faxed": "noisy", "printed": "fonts"}
    """Clients of the example, and the domains of `fedlit.data.Digits` that they are."""
    side, number = 16, 60
    """Pixels of an image's side, and images of each class at each client."""

    @property
    def suffixes(self) -> tuple[str, ...]:  # type: ignore[override]
        """Of image files; importing them takes seconds, which the help need not."""
        from fedlit.data.decoding import SUFFIXES

        return SUFFIXES

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Add the size, and what intensities are scaled by."""
        parser.add_argument("--image_size", type=int, help="side of the square that the network sees, in pixels")
        help_, metavar = "values to show, in their unit, as of DICOM, floats or 12 bits", ("LEVEL", "WIDTH")
        parser.add_argument("--window", nargs=2, type=float, metavar=metavar, help=help_)
        choices = ("client", "quantiles")
        parser.add_argument("--normalise", choices=choices, help="by statistics of each client's own images, instead")

    def own(self, given: argparse.Namespace) -> Study:
        """A user's images."""
        from fedlit.data import ImageDomains

        size = 64 if given.image_size is None else given.image_size
        scaled = {key: getattr(given, key) for key in ("window", "normalise") if getattr(given, key) is not None}
        try:
            names, data, target = own_data(ImageDomains, given, image_size=size, **scaled)
        except ValueError as error:
            options = "\n(--window LEVEL WIDTH and --normalise are options of fedlit new images)"
            sys.exit(f"fedlit: {error}{options * ('normalise=' in str(error))}")
        return Study(
            files=seen_from(given.dir, given.data),
            target=given.target,
            labelled=int((target.y >= 0).sum()),
            about=f"images of {len(names)} clients ({', '.join(names)}) in {len(data.class_names())} classes; "
            f"{given.target!r} is adapted to.",
            place=f"They are read from `{given.data}`, which has a folder for each client, and in it one for each "
            "class.",
            more={"image_size": size, "rounds": 40, "intensities": lines(scaled)},
        )

    def example(self) -> Study:
        """The embedded digits, as image files that somebody might have."""
        return Study(
            files="data",
            target="printed",
            labelled=10 * self.number,
            about="images of digits as an example: of three clients, who write, photograph and fax them, and of a "
            "fourth, who prints them and whose labels score the result and are for comparison.",
            place="The example runs as it is. Then put a folder of your own for each client into `data/`, in place of "
            "those there, and in it one for each class: `data/CLIENT/CLASS/*.jpg`. Give `image_size` what they need.",
            listing="- `data/`: the example, a folder for each client, and in it one for each class.\n",
            more={"image_size": self.side, "rounds": 20, "intensities": ""},
            write=self._write,
        )

    def _write(self, folder: Path) -> None:
        import numpy as np
        from PIL import Image

        from fedlit.data import Digits

        digits = Digits(noisy_std=0.2, photo_strength=0.3)
        for client, domain in self.clients.items():
            samples = digits.load(domain)
            pixels = (samples.x[:, 0].clamp(0, 1) * 255).byte().numpy()
            for digit in range(digits.num_classes):
                place = folder / "data" / client / str(digit)
                place.mkdir(parents=True)
                for number, sample in enumerate(np.flatnonzero(samples.y.numpy() == digit)[: self.number]):
                    image = Image.fromarray(pixels[sample]).resize((self.side, self.side), Image.Resampling.BICUBIC)
                    image.save(place / f"{number:02d}.png")


class Features(Kind):
    """Feature vectors; an example of classes that are apart in the same directions at each client."""

    summary = "feature vectors in an .npz file, NAME_x and NAME_y for each client"
    suffixes = (".npz",)

    def own(self, given: argparse.Namespace) -> Study:
        """A user's features."""
        from fedlit.data import FeatureDomains

        names, data, target = own_data(FeatureDomains, given)
        return Study(
            files=seen_from(given.dir, given.data),
            target=given.target,
            labelled=int((target.y >= 0).sum()),
            about=f"{target.x.shape[1]} features of {len(names)} clients ({', '.join(names)}) in {data.num_classes} "
            f"classes; {given.target!r} is adapted to.",
            place=f"They are read from `{given.data}`.",
        )

    def example(self) -> Study:
        """Made-up features, which the target has in other units."""
        return Study(
            files="features.npz",
            target="south",
            labelled=150,
            about="made-up features of four clients as an example, 150 samples of three classes each; the target, "
            "south, has them in other units.",
            place="The example runs as it is. Then put a file of your own in place of `features.npz`.",
            listing="- `features.npz`: the example.\n",
            write=self._write,
        )

    @staticmethod
    def _write(folder: Path) -> None:
        import numpy as np

        random, width, classes = np.random.default_rng(0), 32, ("a", "b", "c")
        means = random.normal(0, 0.45, (len(classes), width))
        arrays: dict[str, Any] = {"classes": np.array(classes)}
        for client in ("north", "east", "west", "south"):
            y = np.arange(150) % len(classes)
            centres = means + random.normal(0, 0.3, means.shape)  # somewhat apart from other clients'
            x = centres[y] + random.normal(0, 1, (len(y), width))
            if client == "south":
                x = x * 10 ** random.uniform(-1, 1, width) + random.normal(0, 2, width)
            arrays |= {f"{client}_x": x.astype(np.float32), f"{client}_y": y}
        np.savez(folder / "features.npz", **arrays)
