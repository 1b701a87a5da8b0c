"""Recordings of three channels and two classes, as arrays and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

CLASSES = ("still", "walk")


def recording(seed: int = 0, rate: float = 50.0) -> tuple[Any, Any, Any]:
    """Channels x, y, z, of which the first tells classes apart; classes take turns of 2 seconds, ten times."""
    rng = np.random.default_rng(seed)
    time = np.arange(round(20 * rate)) / rate
    label = (time // 2.0).astype(int) % len(CLASSES)
    x = rng.normal((0, 0, 1), 0.3, (len(time), 3))
    x[:, 0] += label * np.sin(2 * np.pi * 2 * time)
    return time, x.astype(np.float32), label


def arrays(persons: Sequence[str] = ("a", "b", "c"), recordings: int = 1, **changes: Any) -> dict[str, Any]:
    """Recordings of persons one after the other, as `SignalDomains` reads them; ``changes`` replace arrays."""
    parts = []
    for number, person in enumerate(persons):
        for index in range(recordings):
            _, x, label = recording(10 * number + index)
            parts.append((x, label, np.full(len(x), person), np.full(len(x), index)))
    content = {
        key: np.concatenate(part)
        for key, part in zip(("x", "label", "person", "recording"), zip(*parts, strict=True), strict=True)
    }
    content["rate"] = np.array(50.0)
    content |= changes
    return {key: value for key, value in content.items() if value is not None}


def write(
    folder: Path,
    domain: str,
    name: str = "r0",
    by_class: bool = False,
    columns: Sequence[str] = ("x", "y", "z"),
    label: str | None = "label",
    suffix: str = ".csv",
    **more: Any,
) -> Path:
    """Write a table of a recording, with time stamps and labels, or tables of its parts in folders of classes."""
    time, x, labels = recording(**more)
    table = pd.DataFrame(x[:, ["xyz".index(column) for column in columns]], columns=[*columns])
    table.insert(0, "t", time)
    names = np.array(CLASSES)[labels]
    parts = {f"{domain}/{cls}": table[names == cls] for cls in CLASSES} if by_class else {domain: table}
    for place, part in parts.items():
        if not by_class and label is not None:
            part[label] = names
        path = folder / place / f"{name}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        part.to_parquet(path) if suffix == ".parquet" else part.to_csv(path, index=False)
    return folder
