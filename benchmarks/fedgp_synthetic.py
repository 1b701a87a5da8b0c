"""Does the theory of FedDA and FedGP tell which rule wins? The synthetic experiment of the paper's appendix B.

Run from the repository root: python benchmarks/fedgp_synthetic.py [--seeds 0 1 2] [--jobs 2]

Everything is generated. x in R^50 is from 10 unit Gaussians with centres in U(-.5, .5)^50, and y = A phi(x) + b in
R^10 with 100 radial basis functions phi_i(x) = exp(-|x - mu_i|^2 / s_i). The source has s_i in U(0, 100) and mu_i, A
and b in U(-.5, .5), as the published code; the paper's text prints widths of at most 1, with which phi_i is 0 on all
samples. A target of shift D has mu_i + D u_i and s_i + 100 D v_i, with u and v from U(0, 1): drawn once per seed, and
the run checks that E|y - y_source|^2 grows with D. The published code draws them anew for each D, and its shift goes up
and down.

For every shift and number of target samples, a 50-100-10 sigmoid network is trained from one initialisation by 300
full-batch steps (rate .04, momentum .9) on what a rule makes of the source's and the target's gradient. The rules are
SourceOnly (FedDA with beta = 1), FedDA(.5), FedGP(.5), TargetOnly (beta = 0) and FedDA and FedGP with auto-weights from
5 disjoint batches of the target's samples at every step. The best rule has the lowest loss on 5,000 other samples of
the target. The predicted best one has the lowest Delta^2, the expected squared error of its gradient:

    FedDA: (1 - b)^2 s2 + b^2 d2
    FedGP: [(1 - b)^2 + q (2b - b^2) / m] s2 + b^2 [q t2d2 + (1 - q) |gT|^2]

of m = 6110 parameters, d2 = |gS - gT|^2, t2d2 = d2 minus its part along gS, and the variance s2 = E|gT^ - gT|^2 of the
target's gradient, all computed with the gradients of the 5,000 samples one by one, hence not estimated from the few
that train. q is the probability that gT^ is not opposed to gS and passes the filter max(., 0), from the central limit
theorem. Auto rules are predicted with the beta they used. Delta^2 is taken at the initialisation, as in the paper's
figure 5, and as the mean over each rule's own training.

Reported for the 4 fixed rules and for all 6: the share of cells where the predicted best rule is the best, the rank
correlation (Spearman) of Delta^2 and test loss over the rules of a cell, and the regret: by how much the predicted
rule's loss exceeds the best one's. Beside them the same for each rule chosen blindly everywhere.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import matplotlib as mpl
import numpy as np
import scipy
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from scipy.stats import spearmanr
from torch import Tensor

from fedlit.functional import auto_beta, fedda, fedda_delta_squared, fedgp, fedgp_delta_squared

FEATURES, HIDDEN, OUTPUTS, CENTRES, BASES = 50, 100, 10, 10, 100
SHIFTS = (0.0, 0.07, 0.14, 0.21, 0.28, 0.42, 0.56, 0.77, 0.98)  # of the published code's 15, from 0 by steps of .07
SIZES = (1800, 990, 545, 300, 165, 90, 50, 27, 15)  # the target's variance grows; the published code has these ends
SOURCE_SAMPLES, TEST_SAMPLES, BATCHES = 1000, 5000, 5
STEPS, RATE, MOMENTUM, EVERY = 300, 0.04, 0.9, 30

FIXED = {"SourceOnly": 1.0, "FedDA": 0.5, "FedGP": 0.5, "TargetOnly": 0.0}
RULES = [*FIXED, "FedDA auto", "FedGP auto"]
COLOURS = ["#d62728", "#ff9f1c", "#2a9d3a", "#1f77b4", "#ffd9a0", "#a6dba0"]

Data = tuple[Tensor, Tensor]
Parameters = dict[str, Tensor]


class World:
    """One draw of the experiment: samples of the source, and of targets at any shift."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.centres = self.uniform(CENTRES, FEATURES) - 0.5
        self.mu, self.widths = self.uniform(BASES, FEATURES) - 0.5, 100 * self.uniform(BASES)
        self.mu_shift, self.width_shift = self.uniform(BASES, FEATURES), 100 * self.uniform(BASES)
        self.mix, self.offset = self.uniform(OUTPUTS, BASES) - 0.5, self.uniform(OUTPUTS) - 0.5

    def uniform(self, *shape: int) -> Tensor:
        """From U(0, 1)."""
        return torch.rand(*shape, generator=self.generator)

    def inputs(self, number: int) -> Tensor:
        """Samples of the mixture, the same for source and target."""
        which = torch.randint(CENTRES, (number,), generator=self.generator)
        return self.centres[which] + torch.randn(number, FEATURES, generator=self.generator)

    def outputs(self, x: Tensor, shift: float) -> Tensor:
        """What a target of that shift answers; the source's is 0."""
        squared = torch.cdist(x, self.mu + shift * self.mu_shift).square()
        return torch.exp(-squared / (self.widths + shift * self.width_shift)) @ self.mix.T + self.offset

    def network(self) -> Parameters:
        """Initial weights, as torch.nn.Linear draws them."""
        return {
            "0.weight": (2 * self.uniform(HIDDEN, FEATURES) - 1) / math.sqrt(FEATURES),
            "0.bias": (2 * self.uniform(HIDDEN) - 1) / math.sqrt(FEATURES),
            "1.weight": (2 * self.uniform(OUTPUTS, HIDDEN) - 1) / math.sqrt(HIDDEN),
            "1.bias": (2 * self.uniform(OUTPUTS) - 1) / math.sqrt(HIDDEN),
        }


def signals(w: Parameters, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden units, and each sample's squared error differentiated by the inputs of the hidden and the last units."""
    hidden = torch.sigmoid(x @ w["0.weight"].T + w["0.bias"])
    last = 2 * (hidden @ w["1.weight"].T + w["1.bias"] - y)
    return hidden, last @ w["1.weight"] * hidden * (1 - hidden), last


def gradient(w: Parameters, data: Data) -> Parameters:
    """Of the squared error, summed over outputs and averaged over samples."""
    x, y = data
    hidden, first, last = signals(w, x, y)
    sums = {"0.weight": first.T @ x, "0.bias": first.sum(0), "1.weight": last.T @ hidden, "1.bias": last.sum(0)}
    return {name: total / len(x) for name, total in sums.items()}


def mean(gradients: list[Parameters]) -> Parameters:
    return {name: torch.stack([g[name] for g in gradients]).mean(0) for name in gradients[0]}


def inner(a: Parameters, b: Parameters) -> float:
    return float(sum(torch.dot(a[name].double().flatten(), b[name].double().flatten()) for name in a))


def loss(w: Parameters, data: Data) -> float:
    return float(signals(w, *data)[2].square().sum(1).mean()) / 4  # of 2 (prediction - y)


def ingredients(w: Parameters, source: Parameters, population: Data) -> dict[str, float]:
    """What Delta^2 is made of, but for the number of target samples: moments of one sample's gradient."""
    x, y = population
    hidden, first, last = signals(w, x, y)
    target = {"0.weight": first.T @ x, "0.bias": first.sum(0), "1.weight": last.T @ hidden, "1.bias": last.sum(0)}
    target = {name: total / len(x) for name, total in target.items()}
    # a sample's gradient of a weight matrix is an outer product, whose norm is a product of norms
    squares = first.square().sum(1) * (1 + x.square().sum(1)) + last.square().sum(1) * (1 + hidden.square().sum(1))
    along = (first * (x @ source["0.weight"].T + source["0.bias"])).sum(1)
    along += (last * (hidden @ source["1.weight"].T + source["1.bias"])).sum(1)
    squared, norm, product = inner(target, target), inner(source, source), inner(target, source)
    correction = len(x) / (len(x) - 1)
    return {
        "variance": correction * (float(squares.double().mean()) - squared),
        "variance_along": float(along.double().var()),
        "inner": product,
        "squared": squared,
        "distance": norm - 2 * product + squared,
        "residual": squared - product**2 / norm,
    }


def delta_squared(of: dict[str, float], rule: str, beta: float, samples: int, parameters: int) -> float:
    """Expected squared error of a rule's gradient."""
    variance = of["variance"] / samples
    if not rule.startswith("FedGP"):
        return float(fedda_delta_squared(variance, of["distance"], beta))
    passes = float(scipy.special.ndtr(of["inner"] / math.sqrt(of["variance_along"] / samples)))
    return float(fedgp_delta_squared(variance, of["residual"], beta, parameters, passes, of["squared"]))


def train(rule: str, start: Parameters, source: Data, target: Data, population: Data) -> dict[str, float]:
    """Final loss on the population, Delta^2 at the start and over the training, and the mean beta."""
    w = {name: value.clone() for name, value in start.items()}
    speed = {name: torch.zeros_like(value) for name, value in w.items()}
    parts = [(x, y) for x, y in zip(*(tensor.chunk(BATCHES) for tensor in target), strict=True)]
    parameters = sum(value.numel() for value in w.values())
    deltas, betas = [], []
    for step in range(STEPS):
        measured = step % EVERY == 0
        needs_source = measured or rule != "TargetOnly"
        from_source = gradient(w, source) if needs_source else {}
        if rule in FIXED:
            beta = FIXED[rule]
            from_target = gradient(w, target)
        else:
            batches = [gradient(w, part) for part in parts]
            from_target = mean(batches)
            estimated = auto_beta(batches, [from_source], "fedda" if rule == "FedDA auto" else "fedgp", "model")
            beta = float(estimated.beta)
        betas.append(beta)
        if measured:
            deltas.append(
                delta_squared(ingredients(w, from_source, population), rule, beta, len(target[0]), parameters)
            )
        sources = [from_source if needs_source else from_target]  # of weight 0 where it is not needed
        if rule.startswith("FedGP"):
            step_direction = fedgp(from_target, sources, beta, granularity="model")
        else:
            step_direction = fedda(from_target, sources, beta)
        for name, value in w.items():
            speed[name].mul_(MOMENTUM).add_(step_direction[name])
            value.sub_(RATE * speed[name])
    return {
        "loss": loss(w, population),
        "delta_start": deltas[0],
        "delta_training": float(np.mean(deltas)),
        "beta": float(np.mean(betas)),
        "beta_start": betas[0],
    }


def line(job: tuple[int, float]) -> tuple[float, list[list[dict[str, float]]]]:
    """E|y - y_source|^2 of a seed and shift, and each rule's result for each number of target samples."""
    seed, shift = job
    torch.set_num_threads(1)
    world = World(seed)
    start = world.network()
    x = world.inputs(SOURCE_SAMPLES)
    source, few, many = (x, world.outputs(x, 0.0)), world.inputs(max(SIZES)), world.inputs(TEST_SAMPLES)
    moved = float((world.outputs(many, shift) - world.outputs(many, 0.0)).square().sum(1).mean())
    population = (many, world.outputs(many, shift))
    cells: list[list[dict[str, float]]] = []
    for size in SIZES:
        target = (few[:size], world.outputs(few[:size], shift))
        # the same for any number of target samples
        first = [cells[0][0]] if cells else []
        cells.append([*first, *(train(rule, start, source, target, population) for rule in RULES[len(first) :])])
    print(f"seed {seed}, D = {shift}: {time.process_time():.0f} s of CPU", flush=True)
    return moved, cells


def grid(seed: int, lines: list[tuple[float, list[list[dict[str, float]]]]]) -> dict[str, Any]:
    """Every rule in every cell; arrays are (shift, number of samples, rule)."""
    moved = [shift for shift, _ in lines]
    if any(after <= before for before, after in itertools.pairwise(moved)):
        raise RuntimeError(f"the shift must grow with D, but E|y - y_source|^2 is {moved} for seed {seed}")
    keys = lines[0][1][0][0]
    return {"shift": moved} | {
        key: np.array([[[rule[key] for rule in row] for row in cells] for _, cells in lines]) for key in keys
    }


def compare(predicted: np.ndarray, losses: np.ndarray) -> dict[str, float]:
    """How well the order of ``predicted`` over rules, the last dimension, tells that of ``losses``."""
    predicted, losses = predicted.reshape(-1, predicted.shape[-1]), losses.reshape(-1, losses.shape[-1])
    chosen, best = predicted.argmin(1), losses.argmin(1)
    correlations = [spearmanr(a, b).statistic for a, b in zip(predicted, losses, strict=True)]
    return {
        "agreement": float((chosen == best).mean()),
        "rank_correlation": float(np.mean(correlations)),
        **regrets(losses, chosen),
    }


def regrets(losses: np.ndarray, chosen: np.ndarray) -> dict[str, float]:
    """What choosing costs, in units of the loss and relative to the best rule's."""
    lowest, taken = losses.min(1), losses[np.arange(len(losses)), chosen]
    ratio = taken / lowest - 1
    return {
        "regret": float((taken - lowest).mean()),
        "relative_regret_median": float(np.median(ratio)),
        "relative_regret_mean": float(ratio.mean()),
        "relative_regret_max": float(ratio.max()),
    }


def blindly(losses: np.ndarray, rules: list[str]) -> dict[str, dict[str, float]]:
    """The same for one rule everywhere."""
    flat = losses.reshape(-1, len(rules))
    told = {}
    for k, rule in enumerate(rules):
        always = np.full(len(flat), k)
        told[rule] = {"agreement": float((flat.argmin(1) == k).mean()), **regrets(flat, always)}
    return told


def verdicts(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Per set of rules and point of prediction: on the means over seeds (the paper's figure), and seed by seed."""
    told: dict[str, Any] = {}
    for rules in (list(FIXED), RULES):
        number = len(rules)
        losses = np.stack([run["loss"][..., :number] for run in runs])
        told[f"{number}_rules"] = {"blindly": {"means": blindly(losses.mean(0), rules), "each": blindly(losses, rules)}}
        for point in ("start", "training"):
            deltas = np.stack([run[f"delta_{point}"][..., :number] for run in runs])
            told[f"{number}_rules"][point] = {
                "means": compare(deltas.mean(0), losses.mean(0)),
                "each": compare(deltas, losses),
            }
    return told


def show(told: dict[str, Any]) -> None:
    columns = ("agreement", "rank_correlation", "regret", "relative_regret_median", "relative_regret_mean")
    columns += ("relative_regret_max",)
    print(f"\n{'':34}" + "".join(f"{column.replace('relative_regret', 'relative'):>17}" for column in columns))
    for rules, parts in told.items():
        rows = {f"Delta^2 at the {point}": parts[point] for point in ("start", "training")}
        blind = parts["blindly"]
        rows |= {f"always {rule}": {kind: blind[kind][rule] for kind in blind} for rule in blind["means"]}
        for kind, words in (("means", "means over seeds"), ("each", "each seed")):
            print(f"{rules.replace('_', ' ')}, {words}")
            for name, row in rows.items():
                print(f"  {name:32}" + "".join(f"{row[kind].get(column, math.nan):17.3f}" for column in columns))


def picture(runs: list[dict[str, Any]]) -> Figure:
    """Predicted and actual best rule over the grid, of the fixed rules (above) and of all (below)."""
    figure = Figure(figsize=(20, 13), layout="constrained")
    losses = np.mean([run["loss"] for run in runs], axis=0)
    colours = ListedColormap(COLOURS)
    for row, rules in zip(figure.subplots(2, 3), (list(FIXED), RULES), strict=True):
        number = len(rules)
        actual = losses[..., :number].argmin(-1)
        panels = {
            f"predicted, at the start ({number} rules)": "delta_start",
            f"predicted, over training ({number} rules)": "delta_training",
            f"actual: lowest test loss ({number} rules)": "loss",
        }
        for axis, (title, key) in zip(row, panels.items(), strict=True):
            best = np.mean([run[key] for run in runs], axis=0)[..., :number].argmin(-1)
            axis.imshow(best.T, cmap=colours, vmin=-0.5, vmax=len(RULES) - 0.5, aspect="auto")
            for (i, j), chosen in np.ndenumerate(best):
                text = f"{losses[i, j, chosen]:.2g}"
                if chosen != actual[i, j]:
                    text += f"\n(+{losses[i, j, chosen] / losses[i, j, actual[i, j]] - 1:.0%})"
                axis.text(i, j, text, ha="center", va="center", fontsize=6)
            axis.set_xticks(range(len(SHIFTS)), [f"{shift:g}" for shift in SHIFTS])
            axis.set_yticks(range(len(SIZES)), [str(size) for size in SIZES])
            axis.set_title(title, fontsize=10)
            axis.set_xlabel("domain shift D")
        row[0].set_ylabel("target samples (variance grows downwards)")
    handles = [Patch(color=colour, label=rule) for rule, colour in zip(RULES, COLOURS, strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(RULES), frameon=False)
    figure.suptitle(
        f"Best aggregation rule, means of {len(runs)} seeds. In the cells: test loss of the rule shown, and by how "
        "much it exceeds the best one's",
        fontsize=11,
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    jobs = list(itertools.product(options.seeds, SHIFTS))
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        lines = dict(zip(jobs, pool.map(line, jobs), strict=True))
    runs = [grid(seed, [lines[seed, shift] for shift in SHIFTS]) for seed in options.seeds]
    cpu_seconds = sum(os.times()[:4])
    told = verdicts(runs)
    print("\nmean test loss: " + ", ".join(RULES))
    for i, shift in enumerate(SHIFTS):
        for j, size in enumerate(SIZES):
            means = np.mean([run["loss"][i, j] for run in runs], axis=0)
            print(f"  D = {shift:4g}, n = {size:4d}  " + "  ".join(f"{value:8.3f}" for value in means))
    show(told)
    lists = [{key: np.asarray(value).tolist() for key, value in run.items()} for run in runs]
    result = {
        "verdicts": told, "rules": RULES, "shifts": SHIFTS, "sizes": SIZES, "runs": lists, "seeds": options.seeds,
        "order": "runs: (shift, size, rule)", "source_samples": SOURCE_SAMPLES, "test_samples": TEST_SAMPLES,
        "batches": BATCHES, "steps": STEPS, "rate": RATE, "momentum": MOMENTUM, "delta_every": EVERY,
        "threads": 1, "cores": os.cpu_count(), "cpu_seconds": cpu_seconds,
        "command": "python benchmarks/fedgp_synthetic.py",
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
            "scipy": scipy.__version__, "matplotlib": mpl.__version__,
        },
    }  # fmt: skip
    options.out.write_text(json.dumps(result) + "\n")
    picture(runs).savefig(options.out.with_suffix(".png"), dpi=110)
    print(f"{cpu_seconds:.0f} s of CPU, {options.out}, {options.out.with_suffix('.png')}")


if __name__ == "__main__":
    main()
