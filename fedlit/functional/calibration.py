"""Calibration of probabilities: temperatures, a score, and decisions by costs."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlit.checks import check, check_at_least, check_between
from fedlit.functional.checks import check_entries, check_finite, check_samples, check_shape

LOWEST, HIGHEST = 0.05, 20.0
"""Range of temperatures."""

MAX_NATS = 30.0
"""Bound of one sample's loss, at probability 1e-13: messages must fit the fixed point of a privacy backend."""


def temperature_grid(number: int = 53) -> Tensor:
    """Temperatures in equal ratios from 0.05 to 20, float64, shape (number,).

    Args:
        number: How many, at least 3, as a minimum has two neighbours.
    """
    check_at_least("number", number, 3, "temperatures")
    return torch.logspace(math.log10(LOWEST), math.log10(HIGHEST), number, dtype=torch.float64)


def losses_at(logits: Tensor, labels: Tensor, temperatures: Tensor) -> Tensor:
    r"""Cross-entropy of each sample at each temperature, in nats, float64, shape (n, G), in [0, 30].

    .. math:: l_{ig} = \min\left(-\log \operatorname{softmax}(z_i / T_g)_{y_i}, \, 30\right)

    Args:
        logits: z, shape (n, C).
        labels: y, int64, shape (n,).
        temperatures: T, positive, shape (G,).
    """
    _check("logits", logits, labels)
    heated = logits.double()[:, None, :] / temperatures.double().to(logits.device)[None, :, None]
    log_p = heated.log_softmax(dim=2).gather(2, labels[:, None, None].expand(-1, len(temperatures), 1)).squeeze(2)
    return (-log_p).clamp(0.0, MAX_NATS)


def best_temperature(temperatures: Tensor, losses: Tensor) -> float:
    """Minimum of a curve of mean losses: the vertex of a parabola in log T through its lowest point.

    Args:
        temperatures: Ascending in equal ratios, shape (G,), as of `temperature_grid`.
        losses: At each, shape (G,), in any unit and up to a constant.

    Returns:
        A temperature: of 53, within half a percent of the minimum; the first or the last if the curve is lowest there;
        1 if all losses are equal, as no temperature is better then.
    """
    check_shape("temperatures", temperatures, "G")
    check_shape("losses", losses, len(temperatures), way_out="give one for each temperature")
    check_finite("losses", losses, "has a source diverged?")
    lowest, logs, curve = int(losses.argmin()), temperatures.double().log(), losses.double()
    if bool((curve == curve[0]).all()):
        return 1.0
    if lowest in (0, len(losses) - 1):
        return float(temperatures[lowest])
    before, here, after = curve[lowest - 1 : lowest + 2]
    step = 0.5 * (before - after) / (before - 2 * here + after) if before != after else torch.zeros(())
    return float((logs[lowest] + step * (logs[lowest + 1] - logs[lowest])).exp())


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    r"""Temperature T in [0.05, 20] at which labels are likeliest: above 1 it was too sure (Guo et al., ICML 2017).

    .. math:: \operatorname{argmin}_T \; -\sum_i \log \operatorname{softmax}(z_i / T)_{y_i}

    Args:
        logits: z, shape (n, C).
        labels: y, int64, shape (n,).
    """
    _check("logits", logits, labels)
    check_finite("logits", logits)
    z = logits.double()
    own = z.gather(1, labels[:, None]).squeeze(1)
    # the sum is convex in 1 / T: bisection follows its derivative to 0

    def slope(inverse: float) -> float:
        return float(((inverse * z).softmax(dim=1) * z).sum(dim=1).sub(own).sum())

    low, high = 1 / HIGHEST, 1 / LOWEST
    if slope(low) >= 0:
        return HIGHEST
    if slope(high) <= 0:
        return LOWEST
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 2 / (low + high)


def temperature_at(logits: Tensor, confidence: float) -> float:
    r"""Temperature T in [0.05, 20] at which the mean largest probability is the one asked for, or the nearest one.

    .. math:: \frac1n \sum_i \max_c \operatorname{softmax}(z_i / T)_c = \alpha

    With the share of predictions that are right as alpha, they are neither too sure nor too cautious on average.

    Args:
        logits: z, shape (n, C).
        confidence: alpha, in [0, 1]; below 1 / C it is that of equal probabilities.
    """
    check_samples("logits", logits)
    check_at_least("logits", len(logits), 1, "sample")
    check_between("confidence (alpha)", confidence, 0, 1)
    check_finite("logits", logits)
    z = logits.detach().double()
    z = z - z.amax(dim=1, keepdim=True)
    low, high = math.log(LOWEST), math.log(HIGHEST)
    for _ in range(60):  # the mean falls as T grows
        middle = (low + high) / 2
        surer = float((z / math.exp(middle)).softmax(dim=1).amax(dim=1).mean()) > confidence
        low, high = (middle, high) if surer else (low, middle)
    return math.exp((low + high) / 2)


def brier_score(probabilities: Tensor, labels: Tensor) -> Tensor:
    r"""Mean squared distance between predicted probabilities and outcomes: a scalar in [0, 2], float64 (Brier, 1950).

    .. math:: \frac{1}{n} \sum_i \sum_c (p_{ic} - [c = y_i])^2

    Args:
        probabilities: p, shape (n, C); of two classes the score is twice that of the second one alone.
        labels: y, int64, shape (n,).
    """
    _check("probabilities", probabilities, labels)
    p = probabilities.double()
    return (p - F.one_hot(labels, p.shape[1])).square().sum(dim=1).mean()


def decide(probabilities: Tensor, costs: Tensor) -> Tensor:
    r"""Decisions of minimal expected cost, int64, shape (n,): with costs of 1 for each error, the most probable class.

    .. math:: d_i = \operatorname{argmin}_d \sum_c p_{ic} \, K_{cd}

    See Elkan, The foundations of cost-sensitive learning, IJCAI 2001.

    Args:
        probabilities: p, shape (n, C).
        costs: K, shape (C, C): ``costs[c, d]`` is what deciding for d costs where c is true, in any unit.

    Example:
        >>> missed = torch.tensor([[0.0, 1.0], [9.0, 0.0]])  # to overlook an ill patient costs 9 false alarms
        >>> decide(torch.tensor([[0.85, 0.15], [0.95, 0.05]]), missed)
        tensor([1, 0])
    """
    size = probabilities.shape[-1]
    matrix = costs.double().to(probabilities.device)
    fits = matrix.shape == (size, size) and bool(matrix.isfinite().all())
    rule = f"{size} rows of {size} finite numbers, costs[true class][decided class]"
    check(fits, "costs", rule, costs.tolist())
    return (probabilities.double() @ matrix).argmin(dim=-1)


def _check(name: str, outputs: Tensor, labels: Tensor) -> None:
    check_samples(name, outputs)
    check_at_least(name, len(outputs), 1, "sample")
    check_shape("labels", labels, len(outputs), way_out="give one per sample")
    fits = not labels.is_floating_point() and bool(((labels >= 0) & (labels < outputs.shape[1])).all())
    check_entries(fits, "labels", f"integers from 0 to {outputs.shape[1] - 1}, the columns of {name}", labels)
