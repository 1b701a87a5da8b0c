"""FedMMD: what adapting in a federation costs in accuracy, next to the same training where all features are open.

Run from the repository root: python benchmarks/fed_mmd_accuracy.py [--parts office_L4 office_L64 heart curves]

Every row is one ``fedlit fit`` of an experiment with all its targets and seeds. Balanced accuracy and weighted F1 of
the last round on the target's hidden labels, by which nothing was chosen; means over targets within each seed.

office_L4, office_L64   EfficientNet features of Office-Caltech-10 through a bottleneck of 4 features, the paper's
    length, and of 64. "centralised": everybody sees everybody's features, and the kernel is the Gaussian itself, with
    the sources one by one or pooled into one, the paper's two baselines. "federated": the secure mean of Taylor
    moments, without protection, masked, or under CKKS; and the paper's exchange under Paillier with keys of 3072 bits,
    whose numbers give the moments away at this length: the shipped configuration has 8 features and degree 3.
    "no alignment" has lambda = 0, and says what the discrepancy itself does.
heart    Four hospitals as they are: a table with several sources.
heart_rate   The same as a regression; R2 in per cent.
curves   Loss and accuracy by round, open and encrypted over one another, on target amazon with seed 0; a PNG.

The paper's Table 3 (Office-31 photographs, one source, L = 4) has 36.3 and 29.5 on average for balanced accuracy and
weighted F1 of its centralised training, and 34.5 and 27.9 for the federated one.
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

from matplotlib.figure import Figure

from fedlit.papers.experiments import CONFIGS, Results, fit

EXPERIMENTS = CONFIGS / "experiments"
PLAIN = EXPERIMENTS / "office_caltech_fed_mmd_plain.yaml"
ALONE = "--compare=null"
OPEN = "--model.init_args.exchange=open"
POOLED = "--data.pool_sources=true"
REVEALING = '{"moments": {"class_path": "fedlit.privacy.PaillierAffine", "init_args": {"reveal_moments": true}}}'
MASKED = "--trainer.strategy.init_args.privacy=fedlit.privacy.PairwiseMasking"

OFFICE: dict[str, tuple[Path, list[str]]] = {
    "SourceOnly": (PLAIN, [ALONE, "--model=fedlit.methods.SourceOnly"]),
    "no alignment": (PLAIN, [ALONE, "--model.init_args.mmd_weight=0"]),
    "centralised, sources one by one": (PLAIN, [ALONE, OPEN]),
    "centralised, sources pooled": (PLAIN, [ALONE, OPEN, POOLED]),
    "federated, plain": (PLAIN, [ALONE]),
    "federated, plain, degree 1": (PLAIN, [ALONE, "--model.init_args.degree=1"]),
    "federated, classifiers at the end": (PLAIN, [ALONE, "--model.init_args.classifier_period=null"]),
    "federated, masked": (EXPERIMENTS / "office_caltech_fed_mmd_masking.yaml", [ALONE]),
    "federated, CKKS": (EXPERIMENTS / "office_caltech_fed_mmd_ckks.yaml", [ALONE]),
    "federated, pairwise Paillier": (
        EXPERIMENTS / "office_caltech_fed_mmd_paillier.yaml",
        [ALONE, "--model.init_args.degree=2", f"--trainer.strategy.init_args.two_party={REVEALING}"],
    ),
}
"""Rows of a table: an experiment, and what is changed in it."""


def hearts(name: str) -> dict[str, tuple[Path, list[str]]]:
    """Rows of the tables of hearts."""
    path = EXPERIMENTS / f"{name}.yaml"
    return {
        "SourceOnly": (path, [ALONE, "--model=fedlit.methods.SourceOnly"]),
        "no alignment": (path, [ALONE, "--model.init_args.mmd_weight=0"]),
        "centralised, sources one by one": (path, [ALONE, OPEN]),
        "centralised, sources pooled": (path, [ALONE, OPEN, POOLED]),
        "federated, plain": (path, [ALONE]),
        "federated, masked": (path, [ALONE, MASKED]),
    }


def office(length: int) -> dict[str, tuple[Path, list[str]]]:
    """Rows of a table of Office-Caltech."""
    wide = [f"--model.init_args.extractor.init_args.out_features={length}"]
    return {
        name: (path, [*arguments, *wide])
        for name, (path, arguments) in OFFICE.items()
        if length <= 4 or "Paillier" not in name  # its gradients of 64 features at degree 2 would take days
    }


PARTS = {
    "office_L4": office(4),
    "office_L64": office(64),
    "heart": hearts("heart_fed_mmd"),
    "heart_rate": hearts("heart_rate_fed_mmd"),
}
CURVES = ("centralised, sources one by one", "federated, plain", "federated, pairwise Paillier")
METRICS = {"oracle_balanced_accuracy": "balanced accuracy", "oracle_f1": "weighted F1", "oracle_r2": "R2"}


def row(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and sample standard deviation over seeds of the mean over targets, in per cent."""
    result: dict[str, Any] = {"seeds": sorted({run["seed"] for run in runs})}
    for key in METRICS:
        if all(run[key] is not None for run in runs):
            seeds = [statistics.fmean(100 * r[key] for r in runs if r["seed"] == seed) for seed in result["seeds"]]
            result[key] = {
                "mean": round(statistics.fmean(seeds), 1),
                "std": round(statistics.stdev(seeds), 1) if len(seeds) > 1 else 0.0,
                "by_target": {
                    target: round(statistics.fmean(100 * r[key] for r in runs if r["target"] == target), 1)
                    for target in sorted({run["target"] for run in runs})
                },
            }
    result["seconds"] = round(statistics.fmean(run["seconds_total"] for run in runs), 1)
    sent = [sum(run["bytes_by_channel"].get(name, 0) for name in ("moments", "target_moments")) for run in runs]
    result["moments_MB"] = round(statistics.fmean(sent) / 1e6, 3)
    return result


def show(part: str, rows: dict[str, Any]) -> None:
    """Print a part as a table in Markdown."""
    keys = [key for key in METRICS if any(key in each for each in rows.values())]
    print(f"\n| {part} | {' | '.join(METRICS[key] for key in keys)} | moments, MB | seconds |")
    print(f"|---|{'---|' * (len(keys) + 2)}")
    for name in (name for name in PARTS[part] if name in rows):
        found = rows[name]
        numbers = " | ".join(f"{found[key]['mean']:.1f} ± {found[key]['std']:.1f}" for key in keys)
        print(f"| {name} | {numbers} | {found['moments_MB']:.2f} | {found['seconds']:.1f} |", flush=True)


def by_round(path: Path, name: str) -> tuple[list[float], list[float]]:
    """Rounds and values of one metric of a run; the test at its end, on other samples, is left out."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    rounds, values, current = [], [], 0.0
    for line in rows:
        current = float(line["round"]) if line.get("round") else current
        if line.get(name) and current not in rounds:
            rounds.append(current)
            values.append(float(line[name]))
    return rounds, values


def curves(out: Path) -> dict[str, Any]:
    """Draw training loss and the target's accuracy by round of several runs over one another; the curves."""
    found: dict[str, Any] = {}
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    for (name, style), width in zip(zip(CURVES, ("-", "--", ":"), strict=True), (4.0, 2.5, 2.0), strict=True):
        with tempfile.TemporaryDirectory() as folder:
            experiment, arguments = office(4)[name]
            (run,) = fit(folder, f"--config={experiment}", *arguments, "--seeds=[0]", "--targets=[amazon]")
            (path,) = run.rglob("metrics.csv")
            for axis, metric in ((loss, "train/loss"), (accuracy, "oracle/target/acc")):
                rounds, values = by_round(path, metric)
                axis.plot(rounds, values, style, linewidth=width, label=name)
                found.setdefault(name, {})[metric] = values
    loss.set_ylabel("training loss, mean over clients")
    accuracy.set_ylabel("accuracy on target amazon (oracle)")
    accuracy.set_ylim(0, 1)
    for axis in (loss, accuracy):
        axis.axvline(14.5, color="grey", linewidth=0.8)
        axis.text(14.7, axis.get_ylim()[1], "alignment starts", va="top", fontsize=8, color="grey")
        axis.set_xlabel("round")
        axis.legend(fontsize=8)
    figure.suptitle("FedMMD on Office-Caltech features, L = 4, degree 2, seed 0: open, federated, and encrypted")
    figure.savefig(out, dpi=110)
    return found


def main() -> None:
    """Run the chosen parts, and write the JSON after each row."""
    parts = [*PARTS, "curves"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rows", nargs="+", help="Only these rows.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="Runs side by side, one thread each.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    results = Results(options.out, "torch", "lightning", "tenseal", "phe")

    def run(job: tuple[str, str]) -> None:
        part, name = job
        experiment, arguments = PARTS[part][name]
        with tempfile.TemporaryDirectory() as folder:
            found = row(list(fit(folder, f"--config={experiment}", *arguments).values()))
        results.keep(found, part, name)
        print(f"{part}, {name}: {found}", flush=True)

    jobs = [
        (part, name)
        for part in options.parts
        if part in PARTS
        for name in PARTS[part]
        if options.rows is None or name in options.rows
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, jobs))
    if "curves" in options.parts:
        results.keep(curves(options.out.with_suffix(".png")), "curves")
    for part in options.parts:
        if part in results.found and part in PARTS:
            show(part, results.found[part])


if __name__ == "__main__":
    main()
