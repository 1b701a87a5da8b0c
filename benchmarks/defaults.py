"""Defaults that hold: what every method gains on SourceOnly with its shipped configuration, and nothing tuned.

Run from the repository root: python benchmarks/defaults.py [--data office_caltech styles surf hearts digits]
[--methods fed_mmd] [--folder runs]. With ``--methods``, those alone are run again, and the others' gains stay.

Methods that need no target label, each as ``--compare methods/NAME`` gives it; but AdaBN, which needs BatchNorm, and
closed forms. Planned rounds and scales of the inputs are changed, on two targets of each data set, one seed. Printed
and written: accuracy less SourceOnly's, in points, averaged over targets, after the last round; on hidden labels of the
target, an oracle that nothing is chosen by. The worst cell of a method is what its user may meet who changes nothing.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baselines_accuracy import kept_in
from fedlit.papers.experiments import Results, fit, options_of
from validators import methods

STEPS = "--trainer.strategy.init_args.local_steps=10"
DATA: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "office_caltech": (("experiments/office_caltech_baselines",), ("amazon", "webcam"), ("unit", "zscore")),
    "styles": (("experiments/office_caltech_styles_baselines",), ("painting", "sketch"), ("unit", "zscore")),
    "surf": (("experiments/office_caltech_surf_baselines",), ("amazon", "webcam"), ("unit", "zscore")),
    "hearts": (("experiments/heart_baselines",), ("cleveland", "va_long_beach"), ("local",)),
    "digits": (("data/digits", "methods/source_only"), ("fonts", "noisy"), ("",)),
}
"""Configurations, targets and scales."""

ROUNDS = (15, 30, 60)
FLOOR = "SourceOnly"


WITHOUT = ("source_only", "adabn", "adabn_autodial", "fed_dan_one_kernel", "fed_jda", "fedrf_tca_closed_form")
"""The floor, those that need BatchNorm, a second setting of a method, and closed forms, which take one round."""


def names() -> list[str]:
    """Of configs/methods."""
    return [name for name in methods() if name not in WITHOUT]


def gains(
    data: str, scale: str, rounds: int, methods: Sequence[str], folder: Path | None, jobs: int
) -> dict[str, float]:
    """By method, in points."""
    configurations, targets, _ = DATA[data]
    with kept_in(folder, f"{data}-{scale}-{rounds}") as place:
        runs = fit(
            place,
            *(f"--config={name}" for name in configurations),
            f"--compare=[{', '.join(f'methods/{name}' for name in methods)}]",
            "--seeds=[0]",
            f"--targets=[{', '.join(targets)}]",
            f"--trainer.max_epochs={rounds}",
            "--trainer.check_val_every_n_epoch=1000",
            STEPS,
            *([f"--data.normalise={scale}"] if scale else []),
            f"--jobs={jobs}",
        )
    accuracies: dict[str, list[float]] = {}
    for run in runs.values():
        accuracies.setdefault(run["method"], []).append(run["oracle_accuracy"])
    floor = statistics.fmean(accuracies.pop(FLOOR))
    return {method: round(100 * (statistics.fmean(each) - floor), 1) for method, each in sorted(accuracies.items())}


def worst(found: dict[str, Any]) -> dict[str, tuple[float, str]]:
    """By method, its least gain and where that is."""
    least: dict[str, tuple[float, str]] = {}
    for cell, row in found.items():
        for method, gain in row.items():
            least[method] = min(least.get(method, (gain, cell)), (gain, cell))
    return dict(sorted(least.items(), key=lambda each: -each[1][0]))


def main() -> None:
    """Run, print and write."""
    parser = options_of(__doc__, __file__)
    parser.add_argument("--data", nargs="+", choices=[*DATA], default=[*DATA])
    parser.add_argument("--methods", nargs="+", choices=names(), default=names())
    parser.add_argument("--rounds", nargs="+", type=int, default=list(ROUNDS))
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = Results(options.out, "torch", "lightning")
    for data in options.data:
        for scale in DATA[data][2]:
            for rounds in options.rounds:
                cell = ", ".join(filter(None, (data, scale, f"{rounds} rounds")))
                row = gains(data, scale, rounds, options.methods, options.folder, options.jobs)
                row = dict(sorted({**results.found.get(cell, {}), **row}.items()))
                results.keep(row, cell)
                print(cell, row, flush=True)
    for method, (gain, cell) in worst(results.found).items():
        print(f"{method:24s} {gain:6.1f}  {cell}")


if __name__ == "__main__":
    main()
