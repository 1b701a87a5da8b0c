"""Small files of the layouts in which HAPT, PAMAP2 and Widar3 are published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedlit.papers import stand_ins

CHEST_GYRO_Y = 28
"""Column of PAMAP2's files, from 0: after time, activity and heart rate, 17 of the hand, and temperature and 7 more."""


def write_hapt(folder: Path, people: tuple[int, ...] = (1, 2, 10), stretch: int = 300) -> dict[str, npt.NDArray[Any]]:
    """Write RawData of two recordings of each person, and return the arrays of the .npz with the same samples."""
    rng = np.random.default_rng(0)
    raw = folder / "RawData"
    raw.mkdir(parents=True)
    scale = np.array([2e-3] * 3 + [5e-3] * 3)
    parts: list[tuple[npt.NDArray[Any], ...]] = []
    lines = []
    for experiment, (person, recording) in enumerate(((p, r) for p in people for r in range(2)), start=1):
        label = np.full(50 + 7 * stretch, -1)
        for number in range(6):
            first = 50 + number * stretch
            label[first : first + stretch] = number + 1
            lines.append(f"{experiment} {person} {number + 1} {first + 1} {first + stretch}")
        lines.append(f"{experiment} {person} 7 {51 + 6 * stretch} {80 + 6 * stretch}")
        label[50 + 6 * stretch : 80 + 6 * stretch] = 7
        x = rng.integers(-300, 300, (len(label), 6)) + 100 * np.maximum(label, 0)[:, None] * (np.arange(6) == 0)
        for kind, columns in (("acc", slice(0, 3)), ("gyro", slice(3, 6))):
            np.savetxt(raw / f"{kind}_exp{experiment:02d}_user{person:02d}.txt", (x * scale)[:, columns], fmt="%.6f")
        parts.append((x.astype(np.int16), label, np.full(len(label), person), np.full(len(label), recording)))
    (raw / "labels.txt").write_text("\n".join(lines) + "\n")
    columns = (np.concatenate([part[place] for part in parts]) for place in range(4))
    return {**dict(zip(("x", "label", "person", "recording"), columns, strict=True)), "scale": scale}


def write_pamap2(folder: Path, stretch: int = 200) -> dict[str, npt.NDArray[np.float64]]:
    """Write Protocol/subject10X.dat, and return the numbers of each; heart rates are known each eleventh time."""
    subjects = (101, 102, 105)
    (folder / "Protocol").mkdir(parents=True)
    tables = {}
    for subject in subjects:
        rng = np.random.default_rng(subject)
        table = rng.normal(size=(8 * stretch, 54)).round(4)
        table[:, 0] = 8.38 + np.arange(len(table)) / 100
        table[:, 1] = np.repeat([0, 1, 0, 4, 0, 24, 0, 0], stretch)
        table[:, 1][2 * stretch : 2 * stretch + 100] = 1
        table[:, 2] = np.where(np.arange(len(table)) % 11 == 0, 80 + np.arange(len(table)) // 100, np.nan)
        table[250:255, 5] = np.nan  # hand, filled
        table[1100:1160, CHEST_GYRO_Y] = np.nan
        np.savetxt(folder / "Protocol" / f"subject{subject}.dat", table, fmt="%.6g")
        tables[f"subject{subject}"] = table
    return tables


def write_widar3(folder: Path, users: dict[str, tuple[int, ...]] | None = None, gestures: int = 6) -> None:
    """Write BVP files of users by folder, two repetitions of each gesture at two locations; frames differ in number."""
    usual = {"20181130-VS": (5, 10), "20181204-VS/6-link": (1,), "20181211-VS/6-link": (3,)}
    stand_ins.write_widar3(folder, users or usual, gestures, locations=2, repetitions=2)
