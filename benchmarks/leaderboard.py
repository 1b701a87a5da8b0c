"""Leaderboard: methods on five data sets, and what is recommended beside them; accuracy, rank, bytes, seconds.

Run from the repository root: python benchmarks/leaderboard.py [--parts office_caltech styles surf digits hearts]
[--again] [--few-labels] [--methods FedAnalytic] [--folder runs] [--jobs 2]

Every part is an experiment ``configs/experiments/*_baselines.yaml``: one backbone, as many rounds and the same batches
for all methods, each domain in turn as the target. The row "recommended" is a configuration of ``configs/recipes`` on
the same data, with its own rounds. What it does to the data (features by each client's ranks) is done for all methods,
so that rows differ by what is trained alone. Rows of digits and hearts, whose data it takes as they are, are those of
``benchmarks/baselines_accuracy.json``; ``--again`` trains the methods of these parts anew, too. With ``--few-labels``
the methods are those that take labels of the target, and have LABELS of them. With ``--methods`` those rows alone are
made anew, of which "recommended" may be one.

Accuracies are those of the last round on all samples of the target, whose labels are hidden: an oracle, and nothing is
chosen by it. "round_by_score" is the round that the label-free score chooses and "round_by_oracle" the best one, both
on validation samples. The picture, `leaderboard.png`, has mean accuracy against bytes.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from baselines_accuracy import EXPERIMENTS, experiment, kept_in
from fedlit.papers.experiments import Results, by_method, fit, options_of, show

HERE = Path(__file__).parent
RECOMMENDED = "recommended"


def given(width: int) -> str:
    """Features as they are, for a linear classifier."""
    return f"--model.extractor={{class_path: fedlit.models.Features, init_args: {{in_features: {width}}}}}"


RECIPES: dict[str, tuple[str, ...]] = {
    "office_caltech": ("recipes/features", given(1280)),
    "styles": ("recipes/features", given(1280)),
    "surf": ("recipes/features", given(800)),
    "digits": ("recipes/networks", "--trainer.strategy.init_args.local_steps=null"),
    "hearts": ("recipes/tables", given(38)),
}
"""By part, a configuration and what fits it to the data."""

PREPARED = dict.fromkeys(("office_caltech", "styles", "surf"), ("--data.normalise=ranks",))
"""By part, what its recipe does to the data, for the methods that it is compared with."""

LABELS = 50
FEW_LABELS = (
    *("fedavg", "fed_da", "fed_da_auto", "fedgp", "fedgp_auto", "fed_mme", "finetune_offline", "target_only", "ditto"),
    *("apfl", "fedrep", "knn_per"),
)
"""Of configs/methods."""

Rows = dict[str, dict[str, Any]]


def recommended(part: str, seeds: Sequence[int], folder: Path | None, jobs: int) -> dict[str, Any]:
    """The row of a part's recipe."""
    recipe, *words = RECIPES[part]
    with kept_in(folder, f"recommended-{part}") as place:
        runs = fit(
            place,
            f"--config=experiments/{EXPERIMENTS[part]}",
            f"--config={recipe}",
            *words,
            "--compare=[]",
            f"--seeds=[{', '.join(map(str, seeds))}]",
            f"--jobs={jobs}",
        )
    (row,) = by_method([*runs.values()]).values()
    return row


def few_labels(part: str, seeds: Sequence[int], folder: Path | None, jobs: int) -> Rows:
    """Rows of the methods that take target labels; SourceOnly, which adds nothing, is the floor."""
    with kept_in(folder, f"few_labels-{part}") as place:
        runs = fit(
            place,
            f"--config=experiments/{EXPERIMENTS[part]}",
            f"--compare=[{', '.join(f'methods/{name}' for name in FEW_LABELS)}]",
            f"--data.target_labels={LABELS}",
            *PREPARED.get(part, ()),
            f"--seeds=[{', '.join(map(str, seeds))}]",
            f"--jobs={jobs}",
        )
    return by_method([*runs.values()])


def per_run(row: dict[str, Any], targets: int) -> tuple[float, float]:
    """Megabytes that all clients send and get, and seconds."""
    return sum(row["megabytes"].values()), row["seconds"] / (targets * len(row["seeds"]))


def targets_of(row: dict[str, Any]) -> list[str]:
    """Those with an accuracy of their own."""
    return [name for name, cell in row.items() if isinstance(cell, dict) and "mean" in cell and name not in _SUMMARIES]


_SUMMARIES = ("average", "round_by_score", "round_by_oracle", "target_score")


def standings(board: dict[str, Rows]) -> list[tuple[str, float, float, float]]:
    """Method, mean rank, and means of accuracy and of megabytes, over the parts; the best rank first.

    Only methods that are in every part. Equal accuracies share their mean rank.
    """
    everywhere = [name for name in next(iter(board.values())) if all(name in rows for rows in board.values())]
    found = []
    for method in everywhere:
        ranks, accuracies, sizes = [], [], []
        for rows in board.values():
            own = rows[method]["average"]["mean"]
            others = [rows[name]["average"]["mean"] for name in everywhere]
            ranks.append(1 + sum(each > own for each in others) + (sum(each == own for each in others) - 1) / 2)
            accuracies.append(own)
            sizes.append(per_run(rows[method], len(targets_of(rows[method])))[0])
        found.append((method, statistics.fmean(ranks), statistics.fmean(accuracies), statistics.fmean(sizes)))
    return sorted(found, key=lambda each: (each[1], -each[2]))


def picture(board: dict[str, Rows]) -> Figure:
    """Mean accuracy of every method against what all its clients send and get."""
    rows = sorted(standings(board), key=lambda each: each[2])
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots()
    gap = (rows[-1][2] - rows[0][2]) / 24
    right = 1.6 * max(size for *_, size in rows)
    height = rows[0][2] - 3 * gap
    for method, _, accuracy, size in rows:
        height = max(accuracy, height + gap)  # names at the height of their points, or one above the other, with a line
        best = method == RECOMMENDED
        axes.plot([size, right], [accuracy, height], color="tab:orange" if best else "0.8", linewidth=0.8, zorder=1)
        axes.scatter(size, accuracy, color="tab:orange" if best else "tab:blue", zorder=2)
        axes.annotate(
            f" {method}", (right, height), va="center", annotation_clip=False, weight="bold" if best else "normal"
        )
    axes.set_xscale("log")
    axes.set_xticks([20, 50, 100, 200, 500], ["20", "50", "100", "200", "500"])
    axes.minorticks_off()
    axes.set_xlabel("megabytes that all clients send and get in a run, mean over data sets")
    axes.set_ylabel("accuracy on the target in %, mean over data sets (oracle)")
    axes.set_title(f"Methods that need no label of the target, {len(board)} data sets")
    axes.set_xlim(right=right)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    """Run, print, draw and write."""
    parser = options_of(__doc__, __file__, jobs=2)
    parser.add_argument("--parts", nargs="+", choices=[*EXPERIMENTS], default=[*EXPERIMENTS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--again", action="store_true", help="train every method, in place of the rows that are kept")
    parser.add_argument("--methods", nargs="+", default=(), help="rows without target labels to make anew")
    parser.add_argument("--few-labels", action="store_true", help=f"methods that take {LABELS} labels of the target")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = Results(options.out, "torch", "lightning", "scipy")
    kept = json.loads((HERE / "baselines_accuracy.json").read_text())["results"]
    for part in options.parts:
        if options.few_labels:
            rows = few_labels(part, options.seeds, options.folder, options.jobs)
        elif options.methods:
            prepared, made = PREPARED.get(part, ()), kept[part]
            named = [name for name in options.methods if name != RECOMMENDED]
            if prepared and named:
                made = experiment(part, named, options.folder, options.jobs, *prepared)
            rows = results.found["no labels"][part] | {name: made[name] for name in named}
            if RECOMMENDED in options.methods:
                rows[RECOMMENDED] = recommended(part, options.seeds, options.folder, options.jobs)
        else:
            prepared = PREPARED.get(part, ())
            rows = kept[part]
            if prepared or options.again:
                rows = experiment(part, (), options.folder, options.jobs, *prepared)
            rows = dict(rows)
            rows[RECOMMENDED] = recommended(part, options.seeds, options.folder, options.jobs)
        results.keep(rows, "few labels" if options.few_labels else "no labels", part)
        for method, row in rows.items():
            show(f"{part}: {method}", row)
    for name, board in results.found.items():
        print(f"\n{name}: mean rank, accuracy and MB over {', '.join(board)}")
        for method, rank, accuracy, size in standings(board):
            print(f"{method:24s} {rank:5.1f} {accuracy:6.1f} {size:8.1f}")
    if "no labels" in results.found:
        picture(results.found["no labels"]).savefig(options.out.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
