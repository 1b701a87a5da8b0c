"""Methods that need no target label, with one backbone, as many rounds and the same batches: accuracy, bytes, seconds.

Run from the repository root: python benchmarks/baselines_accuracy.py [--parts office_caltech styles surf digits hearts
privacy] [--methods fed_mmd FedCORAL] [--folder runs]. With ``--folder`` the runs stay there, and a part that was
stopped goes on; with ``--methods``, named as in the experiment, those rows alone are made again.

Every part but the last is one ``fedlit fit`` of an experiment ``configs/experiments/*_baselines.yaml`` over targets and
seeds. Accuracies are those of the last round, on the target's hidden labels, which nothing was chosen by;
"round_by_score" is the round that the label-free score chooses, "round_by_oracle" the best one, which no federation
could choose, both on validation samples of the target.

privacy  The first experiment at one target with one seed, every client in each round, under masking and under CKKS:
    accuracy and bytes next to plain sums.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from fedlit.papers.experiments import CONFIGS, Results, by_method, fit, options_of, show

EXPERIMENTS = {
    "office_caltech": "office_caltech_baselines",
    "styles": "office_caltech_styles_baselines",
    "surf": "office_caltech_surf_baselines",
    "digits": "digits_baselines",
    "hearts": "heart_baselines",
}
BACKENDS = {"plain": "fedlit.privacy.Plain", "masking": "fedlit.privacy.PairwiseMasking", "CKKS": "fedlit.privacy.CKKS"}

EVERYBODY = "fedlit.federation.Everyone"  # so that enough clients are heard to hide one in every round


@contextmanager
def kept_in(folder: Path | None, part: str) -> Iterator[str]:
    """Where a part's runs are written: a folder of its own that stays, or one that does not."""
    if folder is not None:
        yield str(folder / part)
    else:
        with tempfile.TemporaryDirectory() as passing:
            yield passing


def entries(experiment: str) -> dict[str, Any]:
    """Entries of an experiment's ``compare``, by their names in tables."""

    def name_of(entry: Any) -> str:
        if not isinstance(entry, str):
            return str(entry["name"])
        return str(_read(entry)["model"]["class_path"]).rpartition(".")[2]

    return {name_of(each): each for each in _read(f"experiments/{experiment}")["compare"]}


def _read(config: str) -> Any:
    return yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())


def some(experiment: str, methods: Sequence[str]) -> list[str]:
    """Words that name an experiment, with all its methods or with those."""
    words = [f"--config=experiments/{experiment}"]
    if methods:
        rows = entries(experiment)
        words.append(f"--compare={json.dumps([rows[method] for method in methods])}")
    return words


def experiment(
    name: str, methods: Sequence[str], folder: Path | None, jobs: int, *more: str
) -> dict[str, dict[str, Any]]:
    """A row for each method, or for some, with ``more`` arguments of the command."""
    with kept_in(folder, "-".join([name, *methods])) as place:
        return by_method(list(fit(place, *some(EXPERIMENTS[name], methods), *more, f"--jobs={jobs}").values()))


def privacy(methods: Sequence[str], folder: Path | None, jobs: int) -> dict[str, dict[str, dict[str, float]]]:
    """By method and backend: accuracy in per cent, and megabytes that all clients send and get."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for backend, path in BACKENDS.items():
        with kept_in(folder, "-".join(["privacy", backend, *methods])) as place:
            runs = fit(
                place,
                *some(EXPERIMENTS["office_caltech"], methods),
                "--seeds=[0]",
                "--targets=[webcam]",
                f"--jobs={jobs}",
                f"--trainer.strategy.init_args.privacy={path}",
                f"--trainer.strategy.init_args.participation={EVERYBODY}",
            )
        for run in runs.values():
            row = {"accuracy": 100 * run["oracle_accuracy"], "megabytes": sum(run["bytes_by_channel"].values()) / 1e6}
            found.setdefault(run["method"], {})[backend] = {key: round(value, 2) for key, value in row.items()}
    return found


def main() -> None:
    """Run the parts, print and write them."""
    parser = options_of(__doc__, __file__, jobs=2)
    parser.add_argument("--parts", nargs="+", choices=(*EXPERIMENTS, "privacy"), default=(*EXPERIMENTS, "privacy"))
    parser.add_argument("--methods", nargs="+", default=(), help="rows to make again")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = Results(options.out, "torch", "lightning")
    for part in options.parts:
        if part == "privacy":
            found: dict[str, dict[str, Any]] = privacy(options.methods, options.folder, options.jobs)
            for method, row in found.items():
                cells = (f"{name} {each['accuracy']:.1f} ({each['megabytes']:.1f} MB)" for name, each in row.items())
                print(f"{method:24}", "  ".join(cells), flush=True)
        else:
            found = experiment(part, options.methods, options.folder, options.jobs)
            for method, row in found.items():
                show(method, row)
        if options.methods:
            for method, row in found.items():  # SourceOnly, which others are compared with, is among them
                results.keep(row, part, method)
        else:
            results.keep(found, part)


if __name__ == "__main__":
    main()
