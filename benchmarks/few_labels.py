"""What to start with where the target has a few labels: methods, with each source in the target's place.

Run from the repository root: python benchmarks/few_labels.py [--parts hearts styles office_caltech surf digits]
[--seeds 0 1 2] [--folder runs] [--jobs 2]

For each target of a data set (the experiments of ``benchmarks/leaderboard.py``) it is left out, and each of its
sources takes its place with LABELS labels, next to the other sources. So the sources' labels choose, and no label of a
target is looked at. Besides the methods of ``configs/methods`` that take target labels there are the recipes: without
the labels ("recipe"), and with the target as one more client of the recipe's regression ("recipe, FedAvg"). Data are
prepared as the recipe has them. Accuracy is on the other samples of the source in the target's place, after the last
round.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from baselines_accuracy import EXPERIMENTS, kept_in
from fedlit.papers.experiments import CONFIGS, Results, fit, options_of, spread
from leaderboard import FEW_LABELS, LABELS, PREPARED, RECIPES

Runs = list[dict[str, Any]]


def clients(part: str) -> list[str]:
    """Of a part's data set, in its order."""
    config = yaml.safe_load((CONFIGS / f"experiments/{EXPERIMENTS[part]}.yaml").read_text())["data"]
    module, _, name = config["class_path"].rpartition(".")
    data = getattr(import_module(module), name)(**config.get("init_args", {}))
    return [client.name for client in data.clients]


def left_out(part: str, target: str, seeds: Sequence[int], folder: Path | None, jobs: int) -> Runs:
    """Summaries of all runs in which a target's sources are the clients, each in turn the target."""
    others = [name for name in clients(part) if name != target]
    experiment = f"--config=experiments/{EXPERIMENTS[part]}"
    common = [
        f"--data.clients={others}",
        f"--data.target={others[-1]}",
        "--targets=[all]",
        f"--seeds={[*seeds]}",
        f"--jobs={jobs}",
    ]
    labels = f"--data.target_labels={LABELS}"
    recipe, *fitting = RECIPES[part]
    pieces = {
        "methods": [
            f"--compare=[{', '.join(f'methods/{name}' for name in FEW_LABELS)}]",
            labels,
            *PREPARED.get(part, ()),
        ],
        "recipe": [f"--config={recipe}", *fitting, "--compare=[]", "--data.target_labels=0"],
        "recipe, FedAvg": [f"--config={recipe}", "--model=fedlit.methods.FedAvg", *fitting, "--compare=[]", labels],
    }
    found: Runs = []
    for name, words in pieces.items():
        with kept_in(folder, f"{part}-without-{target}-{name}".replace(", ", "-")) as place:
            runs = fit(place, experiment, *words, *common)
        found += [run | ({} if name == "methods" else {"method": name}) for run in runs.values()]
    return found


def row(runs: Runs, method: str) -> dict[str, Any]:
    """Mean over pairs of a target and a source in its place, and its deviation over seeds."""
    own = [run for run in runs if run["method"] == method]
    seeds = sorted({run["seed"] for run in own})
    by_seed = [statistics.fmean(run["oracle_accuracy"] for run in own if run["seed"] == seed) for seed in seeds]
    return spread(by_seed) | {"seeds": seeds, "pairs": len(own) // len(seeds)}


def main() -> None:
    """Run the parts, print and write them."""
    parser = options_of(__doc__, __file__, jobs=2)
    parser.add_argument("--parts", nargs="+", choices=[*EXPERIMENTS], default=[*EXPERIMENTS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = Results(options.out, "torch", "lightning")
    for part in options.parts:
        runs = [
            run
            for target in clients(part)
            for run in left_out(part, target, options.seeds, options.folder, options.jobs)
        ]
        rows = {method: row(runs, method) for method in dict.fromkeys(run["method"] for run in runs)}
        results.keep(rows, part)
        for method, each in sorted(rows.items(), key=lambda item: -item[1]["mean"]):
            print(f"{part}: {method:24s} {each['mean']:5.1f} ± {each['std']:.1f}", flush=True)


if __name__ == "__main__":
    main()
