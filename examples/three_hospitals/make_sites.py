"""Folders as three hospitals might have them: each with its own patients of the UCI heart disease data, and no others.

Long Beach is the target: it has inspected 20 of its 200 patients. What became of its others lies apart, in
``truth.csv``: nobody has it in training.
"""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import pandas as pd

HOSPITALS = {"cleveland": "Cleveland", "hungary": "Hungary", "long_beach": "VA Long Beach"}
TARGET, LABELLED = "long_beach", 20


def main(out: Path) -> None:
    """Write ``NAME/patients.csv`` for each hospital, and ``truth.csv``."""
    with files("fedlit.data").joinpath("heart_disease_uci.csv").open() as file:
        everybody = pd.read_csv(file)
    everybody["disease"] = np.where(everybody.pop("num") > 0, "yes", "no")
    for column in ("trestbps", "chol"):  # nobody alive has a blood pressure or a cholesterol of 0
        everybody[column] = everybody[column].where(everybody[column] > 0)
    for name, called in HOSPITALS.items():
        table = everybody[everybody["dataset"] == called].drop(columns=["dataset", "id"]).reset_index(drop=True)
        table.insert(0, "patient", [f"{name}-{number}" for number in range(len(table))])
        if name == TARGET:
            out.mkdir(parents=True, exist_ok=True)
            table[["patient", "disease"]].to_csv(out / "truth.csv", index=False)
            hidden = np.random.default_rng(0).permutation(len(table))[LABELLED:]
            table.loc[hidden, "disease"] = None
        (out / name).mkdir(parents=True, exist_ok=True)
        table.to_csv(out / name / "patients.csv", index=False)
        print(f"{out / name / 'patients.csv'}: {len(table)} patients")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "sites"))
