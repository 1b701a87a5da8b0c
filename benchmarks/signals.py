"""Recordings of phones: 30 people of HAPT as domains, six of them in turn the unlabelled target.

Run from the repository root, with ../shared/data: python benchmarks/signals.py [--parts methods features cost masked]
[--methods GALA] [--folder runs]. With ``--folder`` the runs stay there, and a part that was stopped goes on. With
``--methods`` those rows of "methods" and "cost" alone are made anew.

methods   ``configs/experiments/hapt_baselines.yaml``: a small network on windows of 6 channels, 29 sources; SourceOnly,
    FedAvg and ten methods, 10 rounds.
features  ``configs/experiments/hapt_features.yaml``: the recipe on 91 numbers of each window.
cost      Each method and the recipe at one target in a process of its own: CPU seconds, and the most memory that it
    takes, with Python, torch and the windows of all clients.
masked    FedAvg and FedMMD at one target with one seed, every client in each round, plain and masked: the last round's
    figures, and the greatest relative difference of a loss that is logged.

Accuracies are balanced (the mean recall of the classes), of the last round, on all windows of the target, whose labels
training does not see: an oracle, by which nothing was chosen.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from baselines_accuracy import EVERYBODY, entries, kept_in, some
from fedlit.papers.experiments import Results, by_method, fit, options_of, show

NETWORKS = "hapt_baselines"
FEATURES = "hapt_features"
MEASURE = "oracle_balanced_accuracy"
ONE = ("--seeds=[0]", "--targets=[person4]", "--compare=[]")
PARTS = ("methods", "features", "cost", "masked")


def accuracies(
    experiment: str, methods: Sequence[str], folder: Path | None, part: str, jobs: int
) -> dict[str, dict[str, Any]]:
    """By method, of all or of some."""
    with kept_in(folder, "-".join([part, *methods])) as place:
        found = by_method([*fit(place, *some(experiment, methods), f"--jobs={jobs}").values()], MEASURE)
    return {name: row for name, row in found.items() if not methods or name != "SourceOnly"}


def cost(asked: Sequence[str]) -> dict[str, dict[str, int]]:
    """CPU seconds of a run and MiB at its peak, by method, of all or of some."""
    rows = entries(NETWORKS)
    runs: dict[str, tuple[str, Any]] = {name: (NETWORKS, rows[name]) for name in asked or rows}
    if not asked:
        runs = {"recipe on features": (FEATURES, None), "SourceOnly": (NETWORKS, None)} | runs
    found = {}
    for name, (experiment, method) in runs.items():
        with kept_in(None, "cost") as place:
            command = [str(Path(sys.executable).with_name("fedlit")), "fit", *some(experiment, ()), *ONE]
            if isinstance(method, dict):
                command += [f"--trainer.{key}={json.dumps(value)}" for key, value in method.get("trainer", {}).items()]
                model = {key: method[key] for key in ("class_path", "init_args")}
                file = Path(place, "method.yaml")
                file.write_text(yaml.safe_dump({"model": model}))
                method = file
            command += [f"--config={method}"] if method else []
            command.append(f"--trainer.default_root_dir={place}")
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            _, status, used = os.wait4(process.pid, 0)  # of this process and its children alone
            if status:
                raise RuntimeError(f"{' '.join(command)} failed")
        row = {"cpu_seconds": round(used.ru_utime + used.ru_stime), "peak_mib": round(used.ru_maxrss / 1024)}
        found[name] = row
        print(f"{name:20} {row}", flush=True)
    return found


def losses(run: Path) -> list[float]:
    """All losses that a run logged, by round and name."""
    with (run / "metrics.csv").open() as file:
        return [float(v) for row in csv.DictReader(file) for name, v in row.items() if name.endswith("loss") and v]


def masked(folder: Path | None) -> dict[str, dict[str, Any]]:
    """By method: figures of a plain run and of a masked one, and how far their losses are apart."""
    found = {}
    for method in ("methods/fedavg", "methods/fed_mmd"):
        row: dict[str, Any] = {}
        logged = []
        for backend, path in (("plain", "fedlit.privacy.Plain"), ("masked", "fedlit.privacy.PairwiseMasking")):
            with kept_in(folder, f"{Path(method).name}_{backend}") as place:
                strategy = "--trainer.strategy.init_args."
                privacy = (f"{strategy}privacy={path}", f"{strategy}participation={EVERYBODY}")
                runs = fit(place, *some(NETWORKS, ()), f"--config={method}", *ONE, *privacy)
                ((run, summary),) = runs.items()
                logged.append(losses(run))
            row[backend] = {
                "balanced_accuracy": round(100 * summary[MEASURE], 2),
                "megabytes": round(sum(summary["bytes_by_channel"].values()) / 1e6, 2),
                "seconds": round(summary["seconds_total"], 1),
            }
        pairs = zip(*logged, strict=True)
        row["greatest_loss_difference"] = max(abs(a - b) / max(abs(a), 1e-3) for a, b in pairs)
        found[summary["method"]] = row
        print(summary["method"], row, flush=True)
    return found


def main() -> None:
    """Run the parts, print and write them."""
    parser = options_of(__doc__, __file__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--methods", nargs="+", default=(), help="rows to make anew")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = Results(options.out, "torch", "lightning")
    for part in options.parts:
        there = results.found.get(part, {}) if options.methods else {}
        if part == "cost":
            results.keep(there | cost(options.methods), part)
        elif part == "masked":
            results.keep(masked(options.folder), part)
        else:
            methods = options.methods if part == "methods" else ()
            found = accuracies(NETWORKS if part == "methods" else FEATURES, methods, options.folder, part, options.jobs)
            for method, row in found.items():
                show(f"{part}: {method}", row)
            results.keep(there | found, part)


if __name__ == "__main__":
    main()
