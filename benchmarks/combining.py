"""Combining in place of choosing: what is lost next to the best method of each target, which nobody knows beforehand.

Run from the repository root: python benchmarks/combining.py [--data surf styles office_caltech hearts hapt digits
shifted] [--seeds 0 1 2 3 4] [--jobs 2] [--folder runs]

Each part is ``fedlit fit --select combine`` over the methods POOL of an experiment
``configs/experiments/*_baselines.yaml`` and the data's recipe, on every target. Printed, in points of accuracy on the
target's samples (an oracle, by which nothing is chosen), mean ± sample standard deviation over seeds of the average
over targets:

SourceOnly  What adapts nothing.
recipe      The recipe by itself, with the experiment's rounds.
best        The best of all methods on each target and seed, in hindsight.
chosen      The one that ``--select best`` takes, by trust; its last round.
combined    The network that has learnt the combination.
lost        Of the last two, next to the best. "worst" is the most on a target and seed, and "below" the most that is
            lost next to SourceOnly.
ece         Expected calibration error of the recipe's and the combined probabilities, 15 bins.

"shifted" is styles with other shares of classes in each domain: of class c, domain i keeps (1 + (c + 3i) mod 10) tenths
of its samples.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import leaderboard
from baselines_accuracy import EXPERIMENTS, entries, kept_in
from fedlit.papers.experiments import Results, fit, options_of, show, spread

STYLES = Path("../shared/data/office_caltech10_styles_efficientnet_lite0.npz")
PARTS = {**EXPERIMENTS, "hapt": "hapt_baselines", "shifted": EXPERIMENTS["styles"]}
RECIPES = {part: Path(recipe).name for part, (recipe, *_) in leaderboard.RECIPES.items()} | {
    "hapt": "networks",
    "shifted": "features",
}
POOL = (
    *("FedCORAL", "FedDANN", "CDAN", "KD3A", "GALA", "CoMDA", "FedRFTCA", "FedJDA", "FedAnalytic", "FedAnalytic, lda"),
    *("FedMMD", "SHOT", "T3A"),
)
"""Of an experiment's methods, as far as it has them: without those that differ little from another."""

Run = Mapping[str, Any]


def shift(folder: Path) -> Path:
    """Write styles with other shares of classes in each domain."""
    file, kept = np.load(STYLES), {}
    for place, name in enumerate(key[:-2] for key in file if key.endswith("_y")):
        y = file[f"{name}_y"]
        tenths = [np.flatnonzero(y == c)[: (1 + (c + 3 * place) % 10) * int((y == c).sum()) // 10] for c in range(10)]
        rows = np.sort(np.concatenate(tenths))
        kept |= {f"{name}_x": file[f"{name}_x"][rows], f"{name}_y": y[rows]}
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "shifted.npz", classes=file["classes"], **kept)
    return folder / "shifted.npz"


def pool(part: str) -> list[Any]:
    """Entries of ``compare``."""
    rows = entries(PARTS[part])
    return [*(rows[name] for name in POOL if name in rows), f"recipes/{RECIPES[part]}"]


def trained(part: str, seed: int, folder: Path | None, jobs: int) -> tuple[list[Run], dict[str, str]]:
    """Summaries of all runs with a seed, and the method that trust takes on each target."""
    with kept_in(folder, f"{part}-{seed}") as place:
        own = leaderboard.PREPARED.get(part, ())
        if part == "shifted":
            own = (f"--data.path={shift(Path(place).absolute())}", *leaderboard.PREPARED["styles"])
        runs = fit(
            place,
            f"--config=experiments/{PARTS[part]}",
            f"--compare={json.dumps(pool(part))}",
            "--select=combine",
            "--trainer.enable_checkpointing=true",
            f"--seeds=[{seed}]",
            f"--jobs={jobs}",
            *own,
        )
        (file,) = Path(place).glob("experiment_*/selected.json")
        selections = json.loads(file.read_text())
    return [*runs.values()], {each["target"]: each["chosen"]["method"] for each in selections if each["chosen"]}


def figures(part: str, runs: Sequence[Run], chosen: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """By target: accuracies and calibration errors, in per cent."""
    found: dict[str, dict[str, float]] = {}
    for target in sorted({run["target"] for run in runs}):
        own = {run["method"]: run for run in runs if run["target"] == target}
        accuracy = {name: 100 * run["oracle_accuracy"] for name, run in own.items()}
        combined, recipe = own.get("combined", own["SourceOnly"]), own[RECIPES[part]]  # the safe one, without any
        found[target] = {
            "SourceOnly": accuracy["SourceOnly"],
            "recipe": accuracy[RECIPES[part]],
            "best": max(value for name, value in accuracy.items() if name != "combined"),
            "chosen": accuracy[chosen.get(target, "SourceOnly")],
            "combined": 100 * combined["oracle_accuracy"],
            "ece, recipe": 100 * recipe["oracle_ece"],
            "ece, combined": 100 * combined["oracle_ece"],
        }
    return found


def summed_up(of_seeds: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Means and spreads over seeds of what is by seed and target."""
    columns = [*next(iter(next(iter(of_seeds.values())).values()))]

    def over(value: Any) -> dict[str, float]:
        return spread([statistics.fmean(map(value, targets.values())) for targets in of_seeds.values()], 1.0, 2)

    row: dict[str, Any] = {name: over(lambda cells, name=name: cells[name]) for name in columns}
    every = [cells for targets in of_seeds.values() for cells in targets.values()]
    for name in ("chosen", "combined"):
        row[f"{name}, lost"] = over(lambda cells, name=name: cells["best"] - cells[name])
        row[f"{name}, worst"] = round(max(cells["best"] - cells[name] for cells in every), 2)
        row[f"{name}, below"] = round(max(cells["SourceOnly"] - cells[name] for cells in every), 2)
    return row


def of_targets(of_seeds: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Means and spreads over seeds for each target: which tasks lose, and what they lose."""
    every = [*of_seeds.values()]
    columns = ("SourceOnly", "recipe", "best", "chosen", "combined")
    return {
        target: {name: spread([seed[target][name] for seed in every], 1.0, 2) for name in columns}
        for target in every[0]
    }


def main() -> None:
    """Train what is not kept, and print a row for each data set."""
    parser = options_of(__doc__, __file__, jobs=2)
    parser.add_argument("--data", nargs="+", choices=[*PARTS], default=[*RECIPES])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = Results(options.out, "torch", "lightning", "scipy")
    for part in options.data:
        by_seed = results.found.get("by seed", {}).get(part, {})
        for seed in options.seeds:
            runs, picks = trained(part, seed, options.folder, options.jobs)
            by_seed = {**by_seed, str(seed): figures(part, runs, picks)}
            results.keep({**results.found.get("picks", {}).get(part, {}), str(seed): picks}, "picks", part)
            results.keep(by_seed, "by seed", part)
            results.keep(of_targets(by_seed), "tasks", part)
            results.keep({**summed_up(by_seed), "seeds": sorted(map(int, by_seed))}, "combining", part)
            show(f"{part}, {len(by_seed)} seeds", results.found["combining"][part])


if __name__ == "__main__":
    main()
