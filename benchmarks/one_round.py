"""One round in closed form next to 200 rounds of regression, on features: accuracy, calibration error and bytes.

Run from the repository root: python benchmarks/one_round.py [--data office_caltech styles surf hearts hapt backends]
[--jobs 2] [--folder runs]

Rows are the data's recipe, whose 200 rounds are steps of one regression over all sources, and `FedAnalytic` on the same
features with the heads ridge and LDA, each as it is and refined at the target. Every domain is the unlabelled target in
turn (of HAPT six people). One seed: it draws the regression's first weights alone. Accuracy and the expected
calibration error (15 bins) are those on all samples of the target, an oracle.

backends  `FedAnalytic` on the tables of the hospitals under each backend, with keys of full length: the largest
    difference of a weight of its head from that of a sum of floats, relative to the largest weight; VA Long Beach. Of
    plain sums, too, on the backends' grid.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baselines_accuracy import kept_in
from fedlit.papers.experiments import Results, fit, options_of

STYLES = "--data.path=../shared/data/office_caltech10_styles_efficientnet_lite0.npz"
PEOPLE = [f"person{number}" for number in range(1, 7)]
DATA: dict[str, tuple[str, str, tuple[str, ...], Sequence[str]]] = {
    "office_caltech": ("office_caltech_features", "features", (), ["all"]),
    "styles": ("office_caltech_features", "features", (STYLES, "--data.target=photo"), ["all"]),
    "surf": ("office_caltech_surf", "features", (), ["all"]),
    "hearts": ("heart_disease", "tables", (), ["all"]),
    "hapt": ("hapt", "signals", ("--data.magnitudes={acc: [acc_x, acc_y, acc_z]}",), PEOPLE),
}
"""Configuration of the data, recipe, more words, and targets."""
BACKENDS = ("plain", "masking", "bfv", "ckks", "paillier", "threshold_paillier")
LAST = "--trainer.check_val_every_n_epoch=1"
HEADS: dict[str, tuple[str, ...]] = {
    "200 rounds": (),
    "one round, ridge": ("--model.penalty=leave_one_out",),
    "one round, LDA": ("--model.head=lda",),
}


def words(head: str, refine: bool) -> list[str]:
    """What a row changes of the recipe."""
    given = HEADS[head]
    if not given:
        return [f"--model.refine={str(refine).lower()}"]
    return closed_form(*given, refine=refine)


def closed_form(*more: str, refine: bool) -> list[str]:
    """What one round of `FedAnalytic` changes of a recipe."""
    return [
        "--model=fedlit.methods.FedAnalytic",
        *more,
        f"--model.refine={str(refine).lower()}",
        "--model.extractor=fedlit.models.Features",
        "--trainer.max_epochs=1",
        "--trainer.strategy.local_steps=null",
    ]


def row(data: str, head: str, refine: bool, folder: Path | None, jobs: int) -> dict[str, Any]:
    """Means over targets."""
    config, recipe, more, targets = DATA[data]
    with kept_in(folder, f"{data}-{head}-{refine}") as place:
        runs = fit(
            place,
            f"--config=data/{config}",
            f"--config=recipes/{recipe}",
            *more,
            *words(head, refine),
            f"--targets={json.dumps(list(targets))}",
            f"--jobs={jobs}",
            "--trainer.strategy.num_threads=1",
            LAST,
        ).values()
    by_target = {run["target"]: round(100 * run["oracle_accuracy"], 1) for run in runs}
    return {
        "accuracy": round(100 * statistics.fmean(run["oracle_accuracy"] for run in runs), 1),
        "by target": by_target,
        "ece": round(statistics.fmean(run["oracle_ece"] for run in runs), 3),
        "ece, worst": round(max(run["oracle_ece"] for run in runs), 3),
        "megabytes": round(statistics.fmean(sum(run["bytes_by_channel"].values()) for run in runs) / 1e6, 2),
        "rounds": max(run["rounds"] for run in runs),
    }


def head_of(backend: str, head: str, folder: Path | None) -> Tensor:
    """Weights and biases that are solved for under a backend, or of open floats, in one row."""
    with kept_in(folder, f"backends-{backend}-{head}") as place:
        fit(
            place,
            "--config=data/heart_disease",
            "--config=recipes/tables",
            *([f"--config=privacy/{backend}"] if backend else []),
            *closed_form(f"--model.head={head}", refine=False),
            "--trainer.enable_checkpointing=true",
        )
        (path,) = Path(place).glob("*/version_0/checkpoints/*.ckpt")
        weights = torch.load(path, weights_only=False)["clients"]["va_long_beach"]["weights"]
    return torch.cat([weights[f"classifier.linear.{name}"].double().flatten() for name in ("weight", "bias")])


def differences(head: str, folder: Path | None) -> dict[str, float]:
    """Of a head under each backend from that of the open sum, relative to its largest number."""
    expected = head_of("", head, folder)
    largest = float(expected.abs().max())
    return {each: float((head_of(each, head, folder) - expected).abs().max()) / largest for each in BACKENDS}


def main() -> None:
    """Run and print."""
    parser = options_of(__doc__, __file__, jobs=2)
    parser.add_argument("--data", nargs="+", choices=[*DATA, "backends"], default=[*DATA, "backends"])
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = Results(options.out, "torch", "lightning")
    for head in ("ridge", "lda", "qda_diagonal") if "backends" in options.data else ():
        results.keep(differences(head, options.folder), "backends", head)
        print(f"backends {head:16s}", results.found["backends"][head], flush=True)
    for data in (each for each in options.data if each != "backends"):
        for head in HEADS:
            for refine in (False, True):
                name = f"{head}, refined" if refine else head
                found = row(data, head, refine, options.folder, options.jobs)
                results.keep({**results.found.get(data, {}), name: found}, data)
                print(
                    f"{data:16s} {name:26s}",
                    {key: value for key, value in found.items() if key != "by target"},
                    flush=True,
                )


if __name__ == "__main__":
    main()
