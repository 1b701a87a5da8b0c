"""200 patients, 20 labels: what methods with target labels come to on a small table, and how far they can be trusted.

Run from the repository root: python benchmarks/small_tables.py [--parts auc others calibration] [--jobs 2]

auc          Area under the ROC curve at VA Long Beach: FedDA and FedGP of configs/methods, and without their warm-up
             ("as the paper's algorithm"), next to FedAvg and to scikit-learn's logistic regression on the same samples.
others       The same of FedGP at the other three hospitals, which its warm-up was not chosen at.
calibration  Expected calibration error and Brier score at VA Long Beach by what a temperature is found with.

Of each hospital a tenth is for validation and 40% for testing; the target keeps the labels of 20 training samples. All
figures are means and standard deviations over five seeds, which also draw the splits, on test samples of the target,
which nothing in a run is chosen by. Logistic regression is an oracle of what is in the data: no federation has pooled
samples. Results go into benchmarks/small_tables.json.
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from fedlit.data import HeartDisease
from fedlit.papers.experiments import Results, fit, spread

SEEDS = (0, 1, 2, 3, 4)
SPLIT = {"target_labels": 20, "val_fraction": 0.1, "test_fraction": 0.4}
TARGET = "va_long_beach"
OTHERS = ("cleveland", "hungary", "switzerland")
NETWORKS = {
    "one layer": [],
    "two hidden layers": ["--model.init_args.extractor=fedlit.models.MLP", "--model.extractor.in_features=38"],
}
METHODS = {"FedGP": "fedgp", "FedGP, auto": "fedgp_auto", "FedDA": "fed_da", "FedDA, auto": "fed_da_auto"}
BEFORE, AFTER = "as the paper's algorithm", "as configured"


def trained(method: str, network: str, rounds: int, target: str = TARGET, *more: str) -> list[dict[str, Any]]:
    """Summaries of five seeds of one method's configuration."""
    with tempfile.TemporaryDirectory() as folder:
        found = fit(
            folder,
            *("--config", "data/heart_disease", "--config", f"methods/{method}"),
            *(f"--data.init_args.{name}={value}" for name, value in SPLIT.items()),
            *NETWORKS[network],
            *(f"--data.init_args.target={target}", f"--trainer.max_epochs={rounds}", f"--seeds={list(SEEDS)}"),
            *("--trainer.enable_checkpointing=false", "--trainer.strategy.num_threads=1"),
            *more,
        )
    return list(found.values())


def area(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """AUC, and in how many runs fewer than all classes were predicted."""
    silent = sum(not all(map(sum, zip(*run["oracle_confusion"], strict=True))) for run in runs)
    return spread([run["oracle_auc"] for run in runs], 1, 3) | {"one class": silent}


def regression(target: str) -> dict[str, Any]:
    """AUC of logistic regression on labelled training samples: of all hospitals, of the sources, of the target."""
    found: dict[str, list[float]] = {"pooled": [], "sources": [], "target only": []}
    for seed in SEEDS:
        data = HeartDisease(target=target, seed=seed, **SPLIT)  # type: ignore[arg-type]
        sources = [client.name for client in data.clients if not client.is_target]
        x, y = samples(data, target, "test")
        for name, clients in (("pooled", [*sources, target]), ("sources", sources), ("target only", [target])):
            inputs, labels = map(torch.cat, zip(*(samples(data, client, "train") for client in clients), strict=True))
            if len(labels.unique()) == 1:  # as 20 labels of Switzerland may be; one probability for all has this area
                found[name].append(0.5)
                continue
            fitted = LogisticRegression(max_iter=5000).fit(inputs, labels)
            found[name].append(roc_auc_score(y, fitted.predict_proba(x)[:, 1]))
    return {name: spread(values, 1, 3) for name, values in found.items()}


def samples(data: HeartDisease, client: str, stage: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """All samples of a client in a stage whose labels are shown."""
    dataset = data.dataset(client, stage)
    x, y = dataset.batch(torch.arange(len(dataset)))  # type: ignore[attr-defined, arg-type]
    return x[y >= 0], y[y >= 0]


def areas(target: str, methods: dict[str, str], rounds: tuple[int, ...], jobs: int) -> dict[str, Any]:
    """By method, network and rounds: before and after."""
    found: dict[str, Any] = {"logistic regression": regression(target)}

    def one(case: tuple[str, str, int]) -> tuple[str, dict[str, Any]]:
        name, network, number = case
        row = {AFTER: area(trained(methods[name], network, number, target))}
        if name != "FedAvg":
            row[BEFORE] = area(trained(methods[name], network, number, target, "--model.init_args.warmup_rounds=0"))
        return f"{name}, {network}, {number} rounds", row

    with ThreadPoolExecutor(jobs) as pool:
        for label, row in pool.map(one, product(methods, NETWORKS, rounds)):
            found[label] = row
            print(target, label, row, flush=True)
    return found


def calibration(jobs: int) -> dict[str, Any]:
    """By method and network: ECE, Brier score and temperature, without one and with each way to find one."""
    ways = {"none": []} | {
        using: ["--trainer.callbacks+=fedlit.callbacks.Calibration", f"--trainer.callbacks.using={using}"]
        for using in ("sources", "weighted", "target")
    }

    def one(case: tuple[str, str, str]) -> tuple[str, str, dict[str, Any]]:
        name, network, way = case
        runs = trained({**METHODS, "FedAvg": "fedavg"}[name], network, 50, TARGET, *ways[way])
        row = {key: spread([run[f"oracle_{key}"] for run in runs], 1, 3) for key in ("ece", "brier", "auc")}
        if way != "none":
            row["temperature"] = spread([run["temperature"] for run in runs], 1, 2)
        return f"{name}, {network}", way, row

    found: dict[str, Any] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for label, way, row in pool.map(one, product(("FedAvg", "FedGP", "FedDA"), NETWORKS, ways)):
            found.setdefault(label, {})[way] = row
            print(label, way, row, flush=True)
    return found


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("auc", "others", "calibration")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    given = parser.parse_args()
    results = Results(given.out, "torch", "lightning", "scikit-learn")
    if "auc" in given.parts:
        results.keep(areas(TARGET, METHODS | {"FedAvg": "fedavg"}, (20, 50), given.jobs), "auc")
    if "others" in given.parts:
        for target in OTHERS:
            results.keep(areas(target, {"FedGP": "fedgp"}, (20,), given.jobs), "others", target)
    if "calibration" in given.parts:
        results.keep(calibration(given.jobs), "calibration")


if __name__ == "__main__":
    main()
