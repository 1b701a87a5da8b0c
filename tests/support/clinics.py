"""Tables of four clinics that differ as tables of different clinics do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

CLINICS = {"north": 90, "east": 60, "west": 45, "south": 80}
"""Rows of each; of south's, 20 have a label."""


def clinic(name: str, seed: int = 0) -> pd.DataFrame:
    """A clinic's patients: ages, a measurement that is missing for some, two categories, and whether they are ill."""
    number = [*CLINICS].index(name)
    rng, rows = np.random.default_rng([seed, number]), CLINICS[name]
    ill = rng.permutation(rows) % 2
    table = pd.DataFrame(
        {
            "patient": [f"{name}-{row}" for row in range(rows)],
            "age": (50 + 5 * number + 10 * rng.standard_normal(rows) + 8 * ill).round(1),
            "marker": 1e4 + 3 * rng.standard_normal(rows) + 6 * ill,
            "sex": rng.choice(["f", "m"], rows),
            "ward": rng.choice(["a", "b", name], rows),
            "ill": np.where(ill == 1, "yes", "no"),
        }
    )
    if name != "west":
        table.loc[rng.random(rows) < 0.2, "marker"] = np.nan
    if name == "east":
        table.loc[::7, "ward"] = None
    if name == "south":
        table.loc[rng.permutation(rows)[20:], "ill"] = None
        table = table[["ill", "ward", "patient", "sex", "marker", "age"]]  # other order
    return table


def write(folder: Path, *names: str) -> dict[str, str]:
    """Files of some clinics in a folder, and what ``files`` is then called by all."""
    for name in names:
        clinic(name).to_csv(folder / f"{name}.csv", index=False)
    return {name: f"{name}.csv" for name in CLINICS}


ARGUMENTS: dict[str, Any] = {
    "label": "ill", "id": "patient", "target": "south", "target_labels": 1.0, "batch_size": 16, "seed": 0,
}  # fmt: skip
"""Of the data module."""
