"""Target accuracies of the experiments in configs/experiments, as benchmarks/RESULTS.md has them.

Run from the repository root: python benchmarks/accuracy.py [--out benchmarks/accuracy.json]

Each experiment is one ``fedlit fit`` over its targets and seeds, in a directory of its own; the JSON keeps the mean and
sample standard deviation over seeds, and the versions and cores they were measured with.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path

import lightning
import torch

from fedlit.papers.experiments import fit, spread

EXPERIMENTS: dict[str, list[str]] = {
    "digits": ["--seeds=[0,1,2,3,4]"],
    "heart_fedavg": [],
    "office_caltech_features_fedavg": [],
}
"""Experiments, with arguments that their files do not have."""


def run(name: str, extra: list[str]) -> list[dict[str, object]]:
    """Summaries of all runs of one experiment."""
    with tempfile.TemporaryDirectory() as folder:
        return list(fit(folder, f"--config=experiments/{name}", *extra).values())


def table(runs: list[dict[str, object]]) -> dict[str, dict[str, dict[str, float]]]:
    """Accuracy by method and target, and the average over targets, which is taken within each seed."""
    accuracy = {(str(r["method"]), str(r["target"]), r["seed"]): float(r["oracle_accuracy"]) for r in runs}  # type: ignore[arg-type]
    result: dict[str, dict[str, dict[str, float]]] = {}
    for method in sorted({key[0] for key in accuracy}):
        targets = sorted({target for m, target, _ in accuracy if m == method})
        seeds = sorted({seed for m, _, seed in accuracy if m == method})  # type: ignore[type-var]
        result[method] = {t: spread([accuracy[method, t, seed] for seed in seeds]) for t in targets}
        if len(targets) > 1:
            means = [statistics.fmean(accuracy[method, t, seed] for t in targets) for seed in seeds]
            result[method]["average"] = spread(means)
    return result


def main() -> None:
    """Run all experiments and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    results = {}
    for name, extra in EXPERIMENTS.items():
        runs = run(name, extra)
        results[name] = {
            "command": " ".join(["fedlit fit --config", f"configs/experiments/{name}.yaml", *extra]),
            "seeds": sorted({r["seed"] for r in runs}),  # type: ignore[type-var]
            "target_accuracy_percent": table(runs),
            "seconds": round(sum(float(r["seconds_total"]) for r in runs), 1),  # type: ignore[arg-type]
        }
        for method, row in results[name]["target_accuracy_percent"].items():  # type: ignore[attr-defined]
            cells = "  ".join(f"{target} {cell['mean']:.1f} ± {cell['std']:.1f}" for target, cell in row.items())
            print(f"{name}: {method}: {cells}")
    versions = {"python": platform.python_version(), "torch": torch.__version__, "lightning": lightning.__version__}
    options.out.write_text(
        json.dumps({"results": results, "cores": os.cpu_count(), "versions": versions}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
