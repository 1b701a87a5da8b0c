"""What refinement at the target is worth, with a network and with the recommended recipe, and how it was set.

Run from the repository root: python benchmarks/refine.py [--parts styles office_caltech surf digits hearts settings]
[--folder runs]

Every part but the last is an experiment of ``configs/experiments`` over its targets, without ``refine``, with it, and
where there is a network with that trained on (``refine: network``): SourceOnly with the experiment's network, at unit
length and by rank where inputs are features, and the configuration of ``configs/recipes`` for these data. Accuracies
are those of the last round on the target's hidden labels, an oracle; targets are trained and scored on all their
samples. With ``--folder`` runs stay there, and a part that was stopped goes on.

settings  What `doubt` was chosen by: each source in the target's place, by the labels that it has. Of every data set
    and target, a classifier of all sources but one (penalised multinomial logistic regression), refined at that one.
    Accuracy in per cent, averaged over all such pairs.

The guard's share was loosened after accuracies of styles, SURF features and digits had been seen.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baselines_accuracy import EXPERIMENTS, kept_in
from experiments import Results, by_method, fit, options_of, show
from fedlit.data import FeatureDomains, HeartDisease
from fedlit.functional import refine_labels, softmax_regression
from leaderboard import RECIPES

DOUBTS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
FORMS = {"false": "", "true": ", refined", "network": ", trained on"}
"""Of ``refine``, and what their rows are called."""

Row = dict[str, Any]

PENALTY = 5e-4
"""The weight decay of ``configs/recipes``."""


def rows(part: str) -> dict[str, tuple[str, ...]]:
    """Words of the command by row."""
    recipe, *fitting = RECIPES[part]
    scales = ("unit", "ranks") if "features" in recipe else ()
    network = {f"network, {scale}": (f"--data.normalise={scale}",) for scale in scales} or {"network": ()}
    linear = {"recipe": (f"--config={recipe}", *fitting)}
    return network if part == "digits" else network | linear  # the recipe of digits is the leaderboard's


def compare(part: str, forms: list[str], seeds: list[int], folder: Path | None, jobs: int) -> Iterator[tuple[str, Row]]:
    """Rows and what they are called, by form of ``refine``."""
    for name, words in rows(part).items():
        for refine in (form for form in forms if form != "network" or name != "recipe"):
            label = f"{name}{FORMS[refine]}"
            with kept_in(folder, f"{part}-{label}".replace(", ", "-")) as place:
                runs = fit(
                    place,
                    f"--config=configs/experiments/{EXPERIMENTS[part]}.yaml",
                    *words,
                    "--compare=[]",
                    "--data.val_fraction=0",
                    f"--seeds={seeds}",
                    f"--jobs={jobs}",
                    f"--model.refine={refine}",
                )
            (row,) = by_method([*runs.values()]).values()
            yield label, row


def samples(name: str) -> dict[str, tuple[Tensor, Tensor]]:
    """All of every domain: inputs as the recipes have them, and classes."""
    whole: dict[str, Any] = {"transductive": True, "val_fraction": 0.0, "test_fraction": 0.0}
    data: FeatureDomains | HeartDisease
    if name == "hearts":
        data = HeartDisease(**whole)
    else:
        path = "../shared/data/office_caltech10_styles_efficientnet_lite0.npz"
        data = FeatureDomains(path=path, normalise="ranks", **whole)
    data.setup("fit")
    found = {}
    for domain in data.domain_names():
        inputs = torch.stack([x for x, _ in data.all_samples(domain)])
        found[domain] = (inputs.double(), data.labels(domain).long())
    return found


def settings(name: str) -> dict[str, float]:
    """Accuracy by doubt, and without refinement, with sources in the target's place."""
    domains = samples(name)
    accuracies: dict[str, list[float]] = {"as predicted": [], **{f"doubt {doubt}": [] for doubt in DOUBTS}}
    for target, held_out in permutations(domains, 2):
        sources = [domains[each] for each in domains if each not in (target, held_out)]
        x, y = (torch.cat(parts) for parts in zip(*sources, strict=True))
        own, labels = domains[held_out]
        classes = int(max(each.max() for _, each in domains.values())) + 1
        weight, bias = softmax_regression(x, F.one_hot(y, classes).double(), PENALTY)
        p = (own @ weight.T + bias).softmax(dim=1)
        for label, q in {
            "as predicted": p,
            **{f"doubt {doubt}": refine_labels(p, own - own.mean(dim=0), doubt=doubt) for doubt in DOUBTS},
        }.items():
            accuracies[label].append(100 * float((q.argmax(dim=1) == labels).double().mean()))
    return {label: round(statistics.fmean(each), 2) for label, each in accuracies.items()}


def main() -> None:
    """Run the parts, print and write them."""
    parser = options_of(__doc__, __file__)
    parser.add_argument("--parts", nargs="+", choices=[*EXPERIMENTS, "settings"], default=[*EXPERIMENTS, "settings"])
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS), help="others stay as they were")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = Results(options.out, "torch", "lightning", "scipy")
    for part in options.parts:
        if part == "settings":
            for name in ("styles", "hearts"):
                results.keep(settings(name), part, name)
                print(f"{name}, sources in the target's place:", results.found[part][name], flush=True)
        else:
            for label, row in compare(part, options.forms, options.seeds, options.folder, options.jobs):
                results.keep(row, part, label)
                show(f"{part}: {label}", row)


if __name__ == "__main__":
    main()
