"""What refinement at the target is worth, with a network and with the recommended recipe, and how it was set.

Run from the repository root: python benchmarks/refine.py [--parts styles office_caltech surf digits hearts settings
weights sizes shares heads temperatures guard] [--folder runs]

Every part but the last seven is an experiment of ``configs/experiments`` over its targets, without ``refine``, with it,
and where there is a network with that trained on (``refine: network``): SourceOnly with the experiment's network, at
unit length and by rank where inputs are features, and the configuration of ``configs/recipes`` for these data.
Accuracies are those of the last round on the target's hidden labels, an oracle; targets are trained and scored on all
their samples. With ``--folder`` runs stay there, and a part that was stopped goes on.

settings  What `doubt` was chosen by, without a model of the target's own: each source in the target's place, by the
    labels that it has. Of every data set and target, a classifier of all sources but one (penalised multinomial
    logistic regression), refined at that one. Accuracy in per cent, averaged over all such pairs.
weights  What the recipes' weights of sources were chosen by: the same, without a model, too, where a source counts by
    its samples, by the square root of these, or as much as any other; and where all sources but the largest are in
    PIECES of few samples.
sizes     Accuracy by `alpha` and the number of the target's samples, without a model of the target's own and with
    one: MNIST and USPS, predicted by a network of the other two domains of digits (256 and 128 units), whose last
    features have the neighbours; Fashion-MNIST with noise of 0.4, by a network of images without (Debian: apt-get
    install dataset-fashion-mnist); the windows of 15 people of HAPT, by one of 15 others; and three domains of digits
    as features of EfficientNet-Lite0 (extra `backbones`), by the recipe's regression. Mean of three draws.
shares    The same targets, 1,000 samples of which the most frequent class has 1, 10 or 50 times as many as the rarest,
    at the default alpha, without a model and with one. Mean of five draws, in each of which other classes are rare.
heads     Whether the mean of the recipe's regression and of Gaussian classes (256 principal directions, shrinkage .3),
    each brought to one confidence, is refined better than the regression, with sources in the target's place; and the
    regression with another alpha, and with the target's own model.
temperatures  Calibration error (15 bins, in per cent) with one temperature, and with one for each predicted class that
    has at least 30 (100) of the other sources' held-out samples, of which each has its fifth, in the target's place.
guard  How much of the sources' accuracy is left by a classifier of other classes of the target, next to one of the
    predicted ones, by which refinement is taken or not: of the true classes, of refined ones, of true ones of which two
    have changed places, and of which one counts as another. Median and least in per cent, over sources in the target's
    place; "digits" has three targets (1,797 samples each), by the last features of a network of the other two domains.

The guard's share was loosened after accuracies of styles, SURF features and digits had been seen, and again after those
of printed digits and MNIST.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.neural_network import MLPClassifier
from torch import Tensor
from torchmetrics.functional.classification import multiclass_calibration_error

from baselines_accuracy import EXPERIMENTS, kept_in
from fedlit.data import HAPT, FashionMNIST, FeatureDomains, HeartDisease
from fedlit.data.raw_inputs import RankNetwork
from fedlit.functional import (
    best_temperature,
    losses_at,
    neighbour_graph,
    normal_scores,
    refine_labels,
    softmax_regression,
    temperature_grid,
    to_confidence,
)
from fedlit.models import Backbone
from fedlit.papers.experiments import Results, by_method, fit, options_of, show
from leaderboard import RECIPES

SIZES, ALPHAS = (250, 500, 1000, 2000, 4000, 8000), (0.7, 0.8, 0.9)
FEATURES = " features"
"""After the name of a domain of digits, given as features of a published network."""
SPREADS = {
    f"{'with model, ' if with_model else ''}alpha {alpha}": (alpha, with_model)
    for with_model in (False, True)
    for alpha in ALPHAS
}
"""How labels are refined, by what a column is called."""
DOUBTS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
FORMS = {"false": "", "true": ", refined", "network": ", trained on"}
"""Of ``refine``, and what their rows are called."""

POWERS = {"samples": 1.0, "sqrt": 0.5, "uniform": 0.0}
"""By name of a ``weighting``, of the samples that a source has."""
PIECES, SAMPLES = 8, 15
"""Into which a source is cut, and how many samples each has."""
CUT = ", in pieces"
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
    part: str, names: list[str], forms: list[str], seeds: list[int], folder: Path | None, jobs: int
) -> Iterator[tuple[str, Row]]:
    """Rows of these names and what they are called, by form of ``refine``."""
    for name, words in ((name, words) for name, words in rows(part).items() if name in names):
        for refine in (form for form in forms if form != "network" or name != "recipe"):
            label = f"{name}{FORMS[refine]}"
            with kept_in(folder, f"{part}-{label}".replace(", ", "-")) as place:
                runs = fit(
                    place,
                    f"--config=experiments/{EXPERIMENTS[part]}",
                    *words,
                    "--compare=[]",
                    "--data.val_fraction=0",
                    f"--seeds={seeds}",
                    f"--jobs={jobs}",
                    f"--model.refine={refine}",
                )
            (row,) = by_method([*runs.values()]).values()
            yield label, row


def samples(name: str, normalise: Literal["ranks", "none"] = "ranks") -> dict[str, tuple[Tensor, Tensor]]:
    """All of every domain: inputs, of tables as the recipe has them, and classes."""
    whole: dict[str, Any] = {"transductive": True, "val_fraction": 0.0, "test_fraction": 0.0}
    data = FeatureDomains(PATHS[name], normalise=normalise, **whole) if name in PATHS else HeartDisease(**whole)
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
    domains = samples(name.removesuffix(CUT))
    raw = samples(name.removesuffix(CUT), "none") if name.endswith(CUT) else {}
    generator = torch.Generator().manual_seed(0)
    classes = int(max(each.max() for _, each in domains.values())) + 1
    for target, held_out in permutations(domains, 2):
        others = [each for each in domains if each not in (target, held_out)]
        largest = max(others, key=lambda each: len(domains[each][1]))
        sources = [domains[each] for each in others if not raw or each == largest]
        for each in (each for each in others if raw and each != largest):
            x, y = raw[each]
            order = torch.randperm(len(y), generator=generator)[: PIECES * SAMPLES]
            sources += [(RankNetwork(x[own])(x[own]).double(), y[own]) for own in order.split(SAMPLES)]
        yield sources, *domains[held_out], classes


def predicted(sources: Labelled, own: Tensor, classes: int, power: float = 1.0) -> Tensor:
    """Class probabilities by a classifier of the sources, which count by a power of their numbers of samples."""
    x = torch.cat([each for each, _ in sources])
    shares = torch.tensor([len(y) ** power for _, y in sources])
    each = shares / shares.sum() * len(x) / torch.tensor([len(y) for _, y in sources])
    labels = [F.one_hot(y, classes).double() * one for (_, y), one in zip(sources, each, strict=True)]
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
            refined = refine_labels(p, own - own.mean(dim=0), doubt=doubt, with_model=False)
            accuracies[f"doubt {doubt}"].append(right(refined, labels))
    return {label: round(statistics.fmean(each), 2) for label, each in accuracies.items()}


def weights(name: str) -> dict[str, float]:
    """Accuracy by what sources count by, refined, with sources in the target's place."""
    accuracies: dict[str, list[float]] = {label: [] for label in POWERS}
    for sources, own, labels, classes in in_targets_place(name):
        for label, power in POWERS.items():
            p = predicted(sources, own, classes, power)
            refined = refine_labels(p, own - own.mean(dim=0), with_model=False)
            accuracies[label].append(right(refined, labels))
    return {label: round(statistics.fmean(each), 2) for label, each in accuracies.items()}


def digits() -> dict[str, tuple[Tensor, Tensor]]:
    """Pixels of three domains, 16 x 16, and classes."""
    file = np.load("../shared/data/digits_mnist10k_usps.npz")
    x, y = load_digits(return_X_y=True)
    images = {name: (file[f"{name}_x"], file[f"{name}_y"]) for name in ("mnist", "usps")}
    images["optdigits"] = (x.reshape(-1, 8, 8), y)
    found = {}
    for name, (pixels, labels) in images.items():
        drawn = torch.tensor(pixels, dtype=torch.float32)[:, None]
        flat = F.interpolate(drawn, (16, 16), mode="bilinear").flatten(1).double()
        found[name] = (flat / flat.amax(dim=1, keepdim=True).clamp(min=1e-9), torch.tensor(labels).long())
    return found


def fashion() -> dict[str, tuple[Tensor, Tensor]]:
    """Pixels and classes of 12,000 images without noise and as many with it."""
    data = FashionMNIST("/usr/share/datasets/fashion-mnist", num_sources=1, max_samples=24_000, noise_level=0.4, seed=0)
    data.setup("fit")
    domains = {"images": "source_1", "fashion": "target"}
    drawn = {name: list(zip(*data.all_samples(own), strict=True)) for name, own in domains.items()}
    return {
        name: (torch.stack(x).flatten(1).double(), torch.tensor([int(label) for label in y]))
        for name, (x, y) in drawn.items()
    }


def phones() -> dict[str, tuple[Tensor, Tensor]]:
    """Numbers of each window, by each person's ranks, and activities, of 15 people and of the 15 others."""
    data = HAPT("../shared/data/hapt.npz", features=True, normalise="ranks", transductive=True, val_fraction=0.0)
    data.setup("fit")
    people = data.domain_names()
    found = {}
    for name, own in (("people", people[:15]), ("hapt", people[15:])):
        x = torch.stack([x for person in own for x, _ in data.all_samples(person)])
        found[name] = (x.double(), torch.cat([data.labels(person) for person in own]).long())
    return found


@cache
def digit_features() -> dict[str, tuple[Tensor, Tensor]]:
    """Of 4,000 samples of each domain, features of EfficientNet-Lite0, and classes."""
    network, found = Backbone("efficientnet_lite0").eval(), {}
    for name, (pixels, labels) in digits().items():
        rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:4000]
        features = []
        for drawn in pixels[rows].float().reshape(-1, 1, 16, 16).split(64):
            with torch.inference_mode():
                large = F.interpolate(drawn, (96, 96), mode="bicubic").clamp(0, 1)
                features.append(network((large.expand(-1, 3, -1, -1) - 0.45) / 0.225))
        found[name] = (torch.cat(features).double(), labels[rows])
    return found


TARGETS = {
    **{"mnist": digits, "usps": digits, "fashion": fashion, "hapt": phones},
    **{name + FEATURES: digit_features for name in ("mnist", "usps", "optdigits")},
}
"""Of "sizes", and which domains it and its sources are of."""


def by_network(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Class probabilities of a target's samples by a network of the other domains, its last features, and classes."""
    domains = TARGETS[name]()
    x, y = domains.pop(name)
    network = network_of([*domains.values()])
    return torch.tensor(network.predict_proba(x.numpy())), last_features(network, x), y


def network_of(sources: Labelled) -> MLPClassifier:
    """A network with two hidden layers."""
    x, y = (torch.cat(each).numpy() for each in zip(*sources, strict=True))
    return MLPClassifier((256, 128), max_iter=15, random_state=0).fit(x, y)


def last_features(network: MLPClassifier, x: Tensor) -> Tensor:
    """What a network's last layer predicts from."""
    features = x.numpy()
    for weight, bias in list(zip(network.coefs_, network.intercepts_, strict=True))[:-1]:
        features = np.maximum(features @ weight + bias, 0)
    return torch.tensor(features)


def target(name: str) -> tuple[Callable[[Tensor], tuple[Tensor, Tensor]], Tensor]:
    """What gives predictions and centred inputs of some of a target's samples, and the classes of all."""
    if name.endswith(FEATURES):
        domains = dict(TARGETS[name]())
        x, y = domains.pop(name.removesuffix(FEATURES))
        sources = [(by_rank(each), labels) for each, labels in domains.values()]
    else:
        p, x, y = by_network(name)

    def of_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
        own = by_rank(x[rows]) if name.endswith(FEATURES) else F.normalize(x[rows], dim=1)
        there = predicted(sources, own, 10, POWERS["sqrt"]) if name.endswith(FEATURES) else p[rows]
        return there, own - own.mean(dim=0)

    return of_rows, y


def sizes(name: str) -> dict[str, float]:
    """Accuracy by alpha and number of samples."""
    of_rows, y = target(name)
    generator, found = torch.Generator().manual_seed(0), {}
    for number in (each for each in SIZES if each <= len(y)):
        accuracies: dict[str, list[float]] = {"as predicted": [], **{label: [] for label in SPREADS}}
        for _ in range(3):
            rows = torch.randperm(len(y), generator=generator)[:number]
            there, own = of_rows(rows)
            graph = neighbour_graph(own)
            accuracies["as predicted"].append(right(there, y[rows]))
            for label, (alpha, with_model) in SPREADS.items():
                refined = refine_labels(there, own, graph=graph, alpha=alpha, with_model=with_model)
                accuracies[label].append(right(refined, y[rows]))
        found |= {f"{number}, {label}": statistics.fmean(each) for label, each in accuracies.items()}
    return {label: round(value, 1) for label, value in found.items()}


def shares(name: str) -> dict[str, float]:
    """Accuracy by how unequal classes are."""
    (of_rows, y), generator, found = target(name), torch.Generator().manual_seed(0), {}
    classes = int(y.max()) + 1
    for ratio in (1, 10, 50):
        accuracies: dict[str, list[float]] = {"as predicted": [], "without model": [], "with model": []}
        for _ in range(5):
            frequency = ratio ** (torch.randperm(classes, generator=generator).double() / (classes - 1))
            wanted = (1000 * frequency / frequency.sum()).round().long()
            shuffled = torch.randperm(len(y), generator=generator)
            rows = torch.cat([shuffled[y[shuffled] == c][: wanted[c]] for c in range(classes)])
            there, own = of_rows(rows)
            accuracies["as predicted"].append(right(there, y[rows]))
            for label, with_model in (("without model", False), ("with model", True)):
                accuracies[label].append(right(refine_labels(there, own, with_model=with_model), y[rows]))
        found |= {f"1:{ratio}, {label}": statistics.fmean(each) for label, each in accuracies.items()}
    return {label: round(value, 1) for label, value in found.items()}


def by_rank(x: Tensor) -> Tensor:
    """Features as the recipe has them."""
    return F.normalize(normal_scores(x), dim=1)


def heads(name: str) -> dict[str, float]:
    """Accuracy of two classifiers and of their mean, refined."""
    accuracies: dict[str, list[float]] = {
        "regression": [],
        "Gaussian classes": [],
        "mean": [],
        "regression, alpha 0.9": [],
        "regression, with model": [],
    }
    for sources, own, labels, classes in in_targets_place(name):
        x, y = (torch.cat(each) for each in zip(*sources, strict=True))
        directions = torch.linalg.svd(x - x.mean(dim=0), full_matrices=False)[2][:256].T
        gaussian = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.3).fit(x @ directions, y)
        there = torch.zeros(len(own), classes, dtype=torch.float64)
        there[:, gaussian.classes_] = torch.tensor(gaussian.predict_proba(own @ directions))
        both = [predicted(sources, own, classes, POWERS["sqrt"]), there]
        both.append(sum(to_confidence(p, 0.5) for p in both) / 2)  # type: ignore[arg-type]
        centred = own - own.mean(dim=0)
        graph = neighbour_graph(centred)
        for (label, each), p in zip(accuracies.items(), [*both, both[0], both[0]], strict=True):
            alpha, with_model = 0.9 if label == "regression, alpha 0.9" else None, label == "regression, with model"
            refined = refine_labels(p, centred, graph=graph, alpha=alpha, with_model=with_model)
            each.append(right(refined, labels))
    return {label: round(statistics.fmean(each), 2) for label, each in accuracies.items()}


def temperatures(name: str) -> dict[str, float]:
    """Calibration errors."""
    errors: dict[str, list[float]] = {"none": [], "one": [], "by class, 30": [], "by class, 100": []}
    generator, grid = torch.Generator().manual_seed(0), temperature_grid()
    for sources, own, labels, classes in in_targets_place(name):
        orders = [torch.randperm(len(y), generator=generator) for _, y in sources]
        parts = [rows.tensor_split([len(rows) // 5]) for rows in orders]
        held, kept = ([(x[rows[i]], y[rows[i]]) for (x, y), rows in zip(sources, parts, strict=True)] for i in (0, 1))
        xs, ys = (torch.cat(each) for each in zip(*held, strict=True))
        outputs = predicted(kept, torch.cat([xs, own]), classes).log()
        there, logits = outputs[: len(xs)], outputs[len(xs) :]
        losses, classes_there, predicted_class = losses_at(there, ys, grid), there.argmax(dim=1), logits.argmax(dim=1)
        overall = best_temperature(grid, losses.mean(dim=0))
        for label, each in errors.items():
            own_temperatures = torch.full((classes,), 1.0 if label == "none" else overall, dtype=torch.float64)
            for c in range(classes) if "," in label else ():
                of_class = losses[classes_there == c]
                if len(of_class) >= int(label.split()[-1]):
                    own_temperatures[c] = best_temperature(grid, of_class.mean(dim=0))
            q = (logits / own_temperatures[predicted_class, None]).softmax(dim=1)
            each.append(100 * float(multiclass_calibration_error(q, labels, classes, n_bins=15)))
    return {label: round(statistics.fmean(each), 1) for label, each in errors.items()}


def guard(name: str) -> dict[str, float]:
    """Accuracy on the sources' samples that is left."""
    left: dict[str, list[float]] = {}
    for sources, own, p, labels in digit_networks() if name == "digits" else regressions(name):
        moved, gone = labels.clone(), labels.clone()
        moved[labels == 0], moved[labels == 1], gone[labels == 0] = 1, 0, 1
        refined = refine_labels(p, own - own.mean(dim=0)).argmax(dim=1)
        learnt = {"true": labels, "refined": refined, "two changed places": moved, "one as another": gone}
        before = answered(sources, own, p.argmax(dim=1), p.shape[1])
        for label, classes in learnt.items():
            left.setdefault(label, []).append(100 * answered(sources, own, classes, p.shape[1]) / before)
    summaries = {"median": statistics.median, "least": min}
    return {f"{label}, {word}": round(of(each), 1) for label, each in left.items() for word, of in summaries.items()}


def answered(sources: Labelled, own: Tensor, classes: Tensor, num_classes: int) -> float:
    """The sources' accuracy by a classifier of the target's samples and these classes, as the guard fits it."""
    mean, deviation = own.mean(dim=0), own.std(dim=0, correction=0)
    scale = torch.where(deviation > 0, deviation, 1.0) * own.shape[1] ** 0.5
    weight, bias = softmax_regression((own - mean) / scale, F.one_hot(classes, num_classes).double(), 1 / len(own))
    x, y = (torch.cat(each) for each in zip(*sources, strict=True))
    return right((x - mean) / scale @ weight.T + bias, y)


def regressions(name: str) -> Iterator[tuple[Labelled, Tensor, Tensor, Tensor]]:
    """With sources in the target's place: sources, inputs there, what the recipe's regression predicts, and classes."""
    for sources, own, labels, classes in in_targets_place(name):
        yield sources, own, predicted(sources, own, classes, POWERS["sqrt"]), labels


def digit_networks() -> Iterator[tuple[Labelled, Tensor, Tensor, Tensor]]:
    """Of each domain as the target: the sources' last features, its own, what the network predicts, and classes."""
    domains, generator = digits(), torch.Generator().manual_seed(0)
    for target, (x, y) in domains.items():
        rows = torch.randperm(len(y), generator=generator)[:1797]
        sources = [each for name, each in domains.items() if name != target]
        network = network_of(sources)
        p = torch.tensor(network.predict_proba(x[rows].numpy()))
        yield (
            [(last_features(network, x), y) for x, y in sources],
            last_features(network, x[rows]),
            p,
            y[rows],
        )


OTHERS = {
    "settings": (settings, ("styles", "hearts")),
    "weights": (weights, (*PATHS, "hearts", *(name + CUT for name in PATHS))),
    "sizes": (sizes, tuple(TARGETS)),
    "shares": (shares, tuple(TARGETS)),
    "heads": (heads, (*PATHS, "hearts")),
    "temperatures": (temperatures, (*PATHS, "hearts")),
    "guard": (guard, (*PATHS, "hearts", "digits")),
}
"""Parts that are no experiment, each with its data sets."""


def main() -> None:
    """Run the parts, print and write them."""
    parser = options_of(__doc__, __file__)
    parts = [*EXPERIMENTS, *OTHERS]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    names = dict.fromkeys(name for part in EXPERIMENTS for name in rows(part))
    parser.add_argument("--rows", nargs="+", choices=list(names), default=list(names), help="others stay as they were")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS), help="others stay as they were")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = Results(options.out, "torch", "lightning", "scipy")
    for part in options.parts:
        if part in OTHERS:
            found, data = OTHERS[part]
            for name in data:
                results.keep(found(name), part, name)
                print(f"{part}, {name}:", results.found[part][name], flush=True)
        else:
            for label, row in compare(part, options.rows, options.forms, options.seeds, options.folder, options.jobs):
                results.keep(row, part, label)
                show(f"{part}: {label}", row)


if __name__ == "__main__":
    main()
