"""What refinement at the target is worth, with a network and with the recommended recipe, and how it was set.

Run from the repository root: python benchmarks/refine.py [--parts styles office_caltech surf digits hearts settings
weights] [--folder runs]

Every part but the last two is an experiment of ``configs/experiments`` over its targets, without ``refine``, with it,
and where there is a network with that trained on (``refine: network``): SourceOnly with the experiment's network, at
unit length and by rank where inputs are features, and the configuration of ``configs/recipes`` for these data.
Accuracies are those of the last round on the target's hidden labels, an oracle; targets are trained and scored on all
their samples. With ``--folder`` runs stay there, and a part that was stopped goes on.

settings  What `doubt` was chosen by: each source in the target's place, by the labels that it has. Of every data set
    and target, a classifier of all sources but one (penalised multinomial logistic regression), refined at that one.
    Accuracy in per cent, averaged over all such pairs.
weights  What the weights of the recipes were chosen by: the same, where each sample counts alike, each source, each of
    a source's classes, or both; and with half of the classes of the source in the target's place cut to a quarter.

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

CUT = ", classes cut"
WEIGHTS = ("samples alike", "sources alike", "classes alike", "both alike")
PATHS = {
    "styles": "../shared/data/office_caltech10_styles_efficientnet_lite0.npz",
    "office_caltech": "../shared/data/office_caltech10_efficientnet_lite0.npz",
    "surf": "../shared/data/office_caltech10_surf.npz",
}

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


def compare(
    part: str, names: list[str] | None, forms: list[str], seeds: list[int], folder: Path | None, jobs: int
) -> Iterator[tuple[str, Row]]:
    """Rows of these names (``None``: all) and what they are called, by form of ``refine``."""
    for name, words in rows(part).items():
        if names is not None and name not in names:
            continue
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
    data = FeatureDomains(PATHS[name], normalise="ranks", **whole) if name in PATHS else HeartDisease(**whole)
    data.setup("fit")
    found = {}
    for domain in data.domain_names():
        inputs = torch.stack([x for x, _ in data.all_samples(domain)])
        found[domain] = (inputs.double(), data.labels(domain).long())
    return found


Labelled = list[tuple[Tensor, Tensor]]
"""Of each source, inputs and classes."""


def in_targets_place(name: str) -> Iterator[tuple[Labelled, Tensor, Tensor, int]]:
    """Of every target, each source in its place: the other sources, its inputs and classes, and how many there are."""
    domains = samples(name)
    classes = int(max(each.max() for _, each in domains.values())) + 1
    for target, held_out in permutations(domains, 2):
        yield [domains[each] for each in domains if each not in (target, held_out)], *domains[held_out], classes


def predicted(sources: Labelled, own: Tensor, classes: int, weights: str = "samples alike") -> Tensor:
    """Class probabilities by a classifier of the sources, whose samples are weighted."""
    x = torch.cat([each for each, _ in sources])
    labels = [F.one_hot(y, classes).double() for _, y in sources]
    if weights in ("classes alike", "both alike"):  # with a mean of 1 over a source's samples
        labels = [y * (len(y) / (y.any(dim=0).sum() * (y @ y.sum(dim=0))))[:, None] for y in labels]
    if weights in ("sources alike", "both alike"):
        labels = [y * len(x) / (len(labels) * len(y)) for y in labels]
    weight, bias = softmax_regression(x, torch.cat(labels), PENALTY)
    return (own @ weight.T + bias).softmax(dim=1)


def right(q: Tensor, labels: Tensor) -> float:
    """Accuracy in per cent."""
    return 100 * float((q.argmax(dim=1) == labels).double().mean())


def settings(name: str) -> dict[str, float]:
    """Accuracy by doubt, and without refinement, with sources in the target's place."""
    accuracies: dict[str, list[float]] = {"as predicted": [], **{f"doubt {doubt}": [] for doubt in DOUBTS}}
    for sources, own, labels, classes in in_targets_place(name):
        p = predicted(sources, own, classes)
        accuracies["as predicted"].append(right(p, labels))
        for doubt in DOUBTS:
            refined = refine_labels(p, own - own.mean(dim=0), doubt=doubt)
            accuracies[f"doubt {doubt}"].append(right(refined, labels))
    return {label: round(statistics.fmean(each), 2) for label, each in accuracies.items()}


def weights(name: str) -> dict[str, float]:
    """Accuracy by the weights of samples, refined, with sources in the target's place."""
    accuracies: dict[str, list[float]] = {label: [] for label in WEIGHTS}
    generator = torch.Generator().manual_seed(0)
    for sources, whole, answers, classes in in_targets_place(name.removesuffix(CUT)):
        fewer = torch.randperm(classes, generator=generator)[: classes // 2]
        stays = ~torch.isin(answers, fewer) | (torch.rand(len(answers), generator=generator) < 0.25)
        own, labels = (whole[stays], answers[stays]) if name.endswith(CUT) else (whole, answers)
        for label, found in accuracies.items():
            refined = refine_labels(predicted(sources, own, classes, label), own - own.mean(dim=0))
            found.append(right(refined, labels))
    return {label: round(statistics.fmean(each), 2) for label, each in accuracies.items()}


OTHERS = {
    "settings": (settings, ("styles", "hearts")),
    "weights": (weights, (*PATHS, "hearts", *(name + CUT for name in PATHS))),
}
"""Parts that are no experiment, each with its data sets."""


def main() -> None:
    """Run the parts, print and write them."""
    parser = options_of(__doc__, __file__)
    parts = [*EXPERIMENTS, *OTHERS]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rows", nargs="+", help="such as recipe, without the form; others stay as they were")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS), help="others stay as they were")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = Results(options.out, "torch", "lightning", "scipy")
    for part in options.parts:
        if part in OTHERS:
            found, names = OTHERS[part]
            for name in names:
                results.keep(found(name), part, name)
                print(f"{part}, {name}, sources in the target's place:", results.found[part][name], flush=True)
        else:
            for label, row in compare(part, options.rows, options.forms, options.seeds, options.folder, options.jobs):
                results.keep(row, part, label)
                show(f"{part}: {label}", row)


if __name__ == "__main__":
    main()
