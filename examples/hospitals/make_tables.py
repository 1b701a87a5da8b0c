"""Tables as four hospitals might have them: the 920 patients of the UCI heart disease data, each hospital in a folder.

They differ as tables do. Hungary measures cholesterol in mmol/l and Switzerland blood pressure in kPa; columns have
other orders; many values are missing, whole columns at some; and Long Beach has inspected 20 of its 200 patients. What
became of its others lies apart, in ``truth.csv``: nobody has it in training, ``compare.py`` scores with it.
"""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import pandas as pd

HOSPITALS = {
    "cleveland": "Cleveland", "hungary": "Hungary", "switzerland": "Switzerland", "long_beach": "VA Long Beach",
}  # fmt: skip
TARGET, LABELLED = "long_beach", 20


def tables() -> tuple[dict[str, pd.DataFrame], pd.Series]:
    """The table of each hospital, and of which patients of the target have the disease."""
    with files("fedlit.data").joinpath("heart_disease_uci.csv").open() as file:
        everybody = pd.read_csv(file)
    everybody["disease"] = np.where(everybody.pop("num") > 0, "yes", "no")
    for column in ("trestbps", "chol"):  # nobody alive has a blood pressure or a cholesterol of 0
        everybody[column] = everybody[column].where(everybody[column] > 0)
    found = {}
    for name, called in HOSPITALS.items():
        table = everybody[everybody["dataset"] == called].drop(columns=["dataset", "id"]).reset_index(drop=True)
        table.insert(0, "patient", [f"{name}-{number}" for number in range(len(table))])
        found[name] = table
    found["hungary"]["chol"] = (found["hungary"]["chol"] / 38.67).round(2)
    found["switzerland"]["trestbps"] = (found["switzerland"]["trestbps"] / 7.5).round(1)
    found["hungary"] = found["hungary"][[*reversed(found["hungary"].columns)]]
    truth = found[TARGET].set_index("patient")["disease"]
    hidden = np.random.default_rng(0).permutation(len(truth))[LABELLED:]
    found[TARGET].loc[hidden, "disease"] = None
    return found, truth


def write(folder: Path) -> None:
    """Each hospital's table in a folder of its own, and the truth beside them."""
    found, truth = tables()
    for name, table in found.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        table.to_csv(folder / name / f"{name}.csv", index=False)
    truth.to_csv(folder / "truth.csv")


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "sites"))
