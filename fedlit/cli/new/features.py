"""Feature vectors in an .npz file, NAME_x and NAME_y for each client."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fedlit.cli.new.study import Study, Writers, check_target, seen_from

SUFFIXES = (".npz",)


def options(parser: argparse.ArgumentParser) -> None:
    """Features need no further options."""


def own(given: argparse.Namespace) -> Study:
    """The user's features."""
    from fedlit.data import FeatureDomains

    names = FeatureDomains(str(given.data)).domain_names()
    check_target(given.target, names)
    data = FeatureDomains(str(given.data), target=given.target)
    target = data.load(given.target)
    return Study(
        files=seen_from(given.dir, given.data),
        target=given.target,
        labelled=int((target.y >= 0).sum()),
        about=f"{target.x.shape[1]} features of {len(names)} clients ({', '.join(names)}) in {data.num_classes} "
        f"classes; {given.target!r} is adapted to.",
        place=f"They are read from `{given.data}`.",
    )


def example(folder: Path, writers: Writers) -> Study:
    """Classes that are apart in the same directions at each client; the target's features are in other units."""
    clients, width, classes = ("north", "east", "west", "south"), 32, ("a", "b", "c")

    def write() -> None:
        import numpy as np

        random = np.random.default_rng(0)
        means = random.normal(0, 0.45, (len(classes), width))
        arrays: dict[str, Any] = {"classes": np.array(classes)}
        for client in clients:
            y = np.arange(150) % len(classes)
            own = means + random.normal(0, 0.3, means.shape)  # of this client, somewhat apart from the others'
            x = own[y] + random.normal(0, 1, (len(y), width))
            if client == clients[-1]:
                x = x * 10 ** random.uniform(-1, 1, width) + random.normal(0, 2, width)
            arrays |= {f"{client}_x": x.astype(np.float32), f"{client}_y": y}
        np.savez(folder / "features.npz", **arrays)

    writers.append(write)
    return Study(
        files="features.npz",
        target=clients[-1],
        labelled=150,
        about="made-up features of four clients as an example, 150 samples of three classes each; the target, south, "
        "has them in other units.",
        place="The example runs as it is. Then put a file of your own in place of `features.npz`.",
        listing="- `features.npz`: the example.\n",
    )
