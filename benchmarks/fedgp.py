"""FedDA, FedGP and their auto-weights next to what they are compared with, as in the paper's tables 12, 13 and 17.

Run from the repository root: python benchmarks/fedgp.py [--parts noise label_shift heart] [--jobs 2] [--seeds 0 1 2]

noise, label_shift, heart  The three tables.
state_kept                 A column of the first, with optimisers that keep their state over rounds.

Every cell is one ``fedlit fit`` of an experiment, all methods and seeds; accuracies are those of the last round, on
test samples of the target, which nothing was chosen by. The paper's are of all of Fashion-MNIST (ours: the images that
the experiment's ``max_samples`` says) and, for hearts, of other test patients. Results go into benchmarks/fedgp.json as
they come, with the paper's beside them; cells and rows that are not run keep their figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedlit.papers.entries import entry
from fedlit.papers.experiments import CONFIGS, Results, fit

METHODS = {
    "SourceOnly": "Source only",
    "FedAvg": "FedAvg",
    "FinetuneOffline": "Finetune_Offline",
    "FedDA": "FedDA_0.5",
    "FedGP": "FedGP_0.5",
    "FedGP, cosine": "FedGP_0.5, cosine",
    "FedGP(beta=1.0)": "FedGP_1",
    "FedDA(beta=auto)": "FedDA_Auto",
    "FedGP(beta=auto)": "FedGP_Auto",
    "FedGP, cosine, auto": "FedGP_Auto, cosine",
    "Ditto": "Ditto",
    "FedRep": "FedRep",
    "APFL": "APFL",
    "KNNPer": "KNN-per",
    "TargetOnly": "Target only",
    "Oracle": "Oracle",
}
"""What the experiments' tables and the paper's call a method, in the order of the rows."""

COLUMNS: dict[str, list[str]] = {
    "noise": ["0", "0.2", "0.4", "0.6", "0.8"],
    "label_shift": ["0.45", "0.3", "0.15", "0.1", "0.05", "0.0"],
    "heart": ["cleveland", "hungary", "switzerland", "va_long_beach", "average"],
    "state_kept": ["0.4"],
}
PAPER = {"noise": "table-12", "label_shift": "table-13", "heart": "table-17"}
"""The parts' tables in the paper."""
STATE_KEPT = ("SourceOnly", "FinetuneOffline", "FedDA")
"""What is compared with FedGP there: methods that take the sources' network as it is."""


@dataclass(frozen=True)
class Cell:
    """One experiment, and the column or columns of the table that it fills."""

    part: str
    name: str
    arguments: tuple[str, ...]


def cells(parts: list[str]) -> list[Cell]:
    """All experiments of some parts."""
    found = []
    for part in ("noise", "label_shift"):
        for level in COLUMNS[part] if part in parts else ():
            found.append(Cell(part, level, (f"--config={fashion_mnist(part)}", *at(part, level))))
    for level in COLUMNS["state_kept"] if "state_kept" in parts else ():
        path = fashion_mnist("noise")
        compare = [each for each in yaml.safe_load(path.read_text())["compare"] if called(each) in STATE_KEPT]
        kept = (
            f"--config={path}",
            *at("noise", level),
            f"--compare={json.dumps(compare)}",
            "--model.init_args.reset_optimizer=false",
        )
        found.append(Cell("state_kept", level, kept))
    if "heart" in parts:
        heart = f"--config={CONFIGS}/experiments/heart_fedgp.yaml"
        for hospital in COLUMNS["heart"][:-1]:
            # the experiment's are a fifth of the labels; the paper gives Switzerland all
            labels = ("--data.target_labels=1.0",) if hospital == "switzerland" else ()
            found.append(Cell("heart", hospital, (heart, f"--targets=[{hospital}]", *labels)))
    return found


def fashion_mnist(part: str) -> Path:
    """The experiment of a table."""
    return CONFIGS / f"experiments/fashion_mnist_{part}_fedgp.yaml"


def at(part: str, level: str) -> tuple[str]:
    """What makes a column of it."""
    return (f"--data.{'noise_level' if part == 'noise' else part}={level}",)


def called(compared: str | dict[str, Any]) -> str:
    """Name of a method in an experiment's ``compare``: its own, or its class and options."""
    if isinstance(compared, str):
        return compared.rpartition(".")[2]
    options = ", ".join(f"{name}={value}" for name, value in compared.get("init_args", {}).items())
    name: str = compared.get("name") or f"{called(compared['class_path'])}({options})"
    return name


def some(cell: Cell, methods: list[str] | None) -> list[str]:
    """Words that leave those methods of an experiment, and its first; all without a choice."""
    if methods is None:
        return []
    path = Path(next(word.removeprefix("--config=") for word in cell.arguments if word.startswith("--config=")))
    compare = yaml.safe_load(path.read_text())["compare"]
    return [f"--compare={json.dumps([each for each in compare if called(each) in methods])}"]


def summaries(cell: Cell, seeds: list[int] | None, methods: list[str] | None) -> list[dict[str, Any]]:
    """Of all runs of one experiment."""
    extra = [*some(cell, methods), *([] if seeds is None else [f"--seeds={seeds}"])]
    with tempfile.TemporaryDirectory() as folder:
        return list(fit(folder, *cell.arguments, *extra).values())


def table(cell: Cell, runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per method: mean and sample standard deviation in per cent, the accuracy of each seed, and the cost of a run."""
    result: dict[str, dict[str, Any]] = {}
    for method in METHODS:
        own = sorted((run for run in runs if run["method"] == method), key=lambda run: run["seed"])
        if own:
            accuracies = [round(100 * run["oracle_accuracy"], 2) for run in own]
            result[method] = {
                "mean": round(statistics.fmean(accuracies), 1),
                "std": round(statistics.stdev(accuracies), 1) if len(own) > 1 else 0.0,
                "paper": paper(cell.part, method, cell.name),
                "by_seed": {str(run["seed"]): accuracy for run, accuracy in zip(own, accuracies, strict=True)},
                "seconds": round(statistics.fmean(run["seconds_total"] for run in own), 1),
                "megabytes": round(statistics.fmean(sent(run) for run in own), 3),
            }
    return result


def sent(run: dict[str, Any]) -> float:
    """Megabytes of a run's messages, without what is sent to be logged."""
    logging = ("metrics", "oracle")
    return float(sum(size for channel, size in run["bytes_by_channel"].items() if channel not in logging)) / 1e6


def paper(part: str, method: str, column: str) -> float | None:
    """The paper's figure; ``None`` where it has none."""
    if part not in PAPER:
        return None
    asked = entry("fedgp", PAPER[part])
    names = {ours: row for row, ours in asked.rows.items()}
    row = names.get(method, method).removesuffix(", Definition 4.3")
    return asked.paper.get(row, {}).get(column)


def with_average(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns, and an average over hospitals taken within each seed, once all four are there."""
    names = COLUMNS["heart"]
    if any(name not in columns for name in names[:-1]):
        return columns
    average = {}
    for method in [each for each in METHODS if all(each in columns[name] for name in names[:-1])]:
        by_seed = [columns[name][method]["by_seed"] for name in names[:-1]]
        seeds = [seed for seed in by_seed[0] if all(seed in each for each in by_seed)]
        means = [statistics.fmean(each[seed] for each in by_seed) for seed in seeds]
        average[method] = {
            "mean": round(statistics.fmean(means), 1),
            "std": round(statistics.stdev(means), 1) if len(means) > 1 else 0.0,
            "paper": paper("heart", method, "average"),
        }
    return {**{name: columns[name] for name in names[:-1]}, "average": average}


def show(part: str, columns: dict[str, Any]) -> None:
    """Print a part as a table in Markdown: ours, and in brackets the paper's."""
    names = [name for name in COLUMNS[part] if name in columns]
    print(f"\n| {part} | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for method, title in METHODS.items():
        if any(method in columns[name] for name in names):
            print(f"| {title} | {' | '.join(written(columns[name].get(method)) for name in names)} |", flush=True)


def written(cell: dict[str, Any] | None) -> str:
    """One cell of the table."""
    if cell is None:
        return "-"
    printed = "" if cell["paper"] is None else f" ({cell['paper']:.1f})"
    return f"{cell['mean']:.1f} ± {cell['std']:.1f}{printed}"


def main() -> None:
    """Run the chosen parts, and write the JSON after each cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(COLUMNS), default=list(COLUMNS))
    parser.add_argument("--cells", nargs="+", help="Only these columns, such as 0.4 or hungary.")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="Rows to make again; others stay.")
    parser.add_argument(
        "--seeds", nargs="+", type=int, help="Instead of those of the experiments: 3, and 5 for hearts."
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="Runs side by side, one thread each.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    results = Results(options.out, "torch", "lightning")

    def run(cell: Cell) -> None:
        rows = table(cell, summaries(cell, options.seeds, options.methods))
        with results.lock:
            kept = {} if options.methods is None else results.found.get(cell.part, {}).get(cell.name, {})
            results.keep({name: (kept | rows)[name] for name in METHODS if name in kept | rows}, cell.part, cell.name)
            average = with_average(results.found["heart"]).get("average") if cell.part == "heart" else None
            if average is not None:
                results.keep(average, "heart", "average")
        print(f"{cell.part} {cell.name}: " + ", ".join(f"{m} {written(row)}" for m, row in rows.items()), flush=True)

    chosen = [cell for cell in cells(options.parts) if options.cells is None or cell.name in options.cells]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, chosen))
    for part in options.parts:
        show(part, results.found.get(part, {}))


if __name__ == "__main__":
    main()
