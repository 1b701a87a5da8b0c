"""FedGP's auto-weights: what the isotropic residual costs, and hidden against open updates.

Run from the repository root: python benchmarks/fedgp_weights.py [--parts residual hidden] [--jobs 2]

On 9,000 images of Fashion-MNIST, fewer than the experiments' own, with optimisers that keep
their state and without a warm-up.
residual: mean beta over rounds and accuracy of FedGP's auto-weights with the residual's variance taken as isotropic (no
    batch gradient needed) and as the paper estimates it.
hidden: FedGP's auto-weights with open updates, under masking, and under masking on ten processes.

Accuracies are those of the last round on the target's test samples, which nothing was chosen by.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from fedlit.papers.experiments import Results, fit, spread

NOISE = "--config=experiments/fashion_mnist_noise_fedgp"
LEVELS = ("0.4", "0.8")
SMALL = [
    *("--data.max_samples=9000", "--data.test_fraction=0.6", "--trainer.max_epochs=50"),
    *("--model.init_args.reset_optimizer=false", "--model.init_args.warmup_rounds=0"),
]
AUTO = ["--model=FedGP", "--model.init_args.beta=auto", "--data.target_batch_size=4"]


def fit_alone(folder: str, *arguments: str) -> list[dict[str, Any]]:
    """Summaries of the runs of one ``fedlit fit``, each with the rows of its curves."""
    runs = []
    for place, summary in fit(folder, *arguments, "--compare=null").items():
        with (place / "aggregation_curves.csv").open() as file:
            runs.append({**summary, "curves": list(csv.DictReader(file)), "folder": place})
    return runs


def accuracy(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Of the runs of one setting."""
    return spread([run["oracle_accuracy"] for run in runs])


def residual_cell(level: str, residual: str, seeds: list[int]) -> dict[str, Any]:
    """Mean beta and accuracy of auto-weights."""
    with tempfile.TemporaryDirectory() as folder:
        extra = [
            f"--data.noise_level={level}",
            f"--seeds={seeds}",
            *SMALL,
            *AUTO,
            f"--model.init_args.residual={residual}",
        ]
        runs = fit_alone(folder, NOISE, *extra)
        betas = [statistics.fmean(float(row["beta"]) for row in run["curves"]) for run in runs]
        return {"accuracy": accuracy(runs), "beta": spread(betas, 1.0, 3)}


def hidden(rounds: int) -> dict[str, Any]:
    """Largest difference between the target's weights after some rounds, and their fingerprints."""
    settings = {
        "open": [],
        "masking": ["--config=privacy/masking"],
        "masking, 10 processes": ["--config=privacy/masking", "--trainer.devices=10"],
    }
    config = [NOISE, "--seeds=[0]"]
    short = [f"--trainer.max_epochs={rounds}", "--trainer.check_val_every_n_epoch=1"]
    short += ["--trainer.enable_checkpointing=true", "--trainer.strategy.init_args.gather_checkpoints=true"]
    result: dict[str, Any] = {}
    weights: dict[str, dict[str, torch.Tensor]] = {}
    for name, extra in settings.items():
        with tempfile.TemporaryDirectory() as folder:
            (run,) = fit_alone(folder, *config, *SMALL, *extra, *AUTO, *short)
            (path,) = Path(run["folder"]).rglob("*.ckpt")
            weights[name] = torch.load(path, weights_only=True)["clients"]["target"]["weights"]
            apart = [float((tensor - weights["open"][key]).abs().max()) for key, tensor in weights[name].items()]
            result[name] = {
                "accuracy": round(100 * run["oracle_accuracy"], 2),
                "sha256": run["target_sha256"][:8],
                "largest_difference_to_open": max(apart),
                "megabytes": {key: round(size / 1e6, 3) for key, size in run["bytes_by_channel"].items()},
                "seconds": round(run["seconds_total"], 1),
            }
            print(rounds, name, result[name], flush=True)
    return result


def main() -> None:
    """Run the chosen parts, and write the JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["residual", "hidden"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="Runs side by side, one thread each.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    results = Results(options.out, "torch", "lightning", seeds=options.seeds)
    with ThreadPoolExecutor(options.jobs) as pool:
        if "residual" in options.parts:
            settings = [(level, r) for level in LEVELS for r in ("isotropic", "exact")]
            found = pool.map(lambda setting: residual_cell(*setting, options.seeds), settings)
            table = {f"{level}, {r}": cell for (level, r), cell in zip(settings, found, strict=True)}
            results.keep(table, "residual")
            for name, cell in table.items():
                print(name, cell, flush=True)
    if "hidden" in options.parts:
        for rounds in (1, 5):
            results.keep(hidden(rounds), "hidden", f"{rounds} round{'s' if rounds > 1 else ''}")


if __name__ == "__main__":
    main()
