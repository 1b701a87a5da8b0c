"""How far probabilities can be trusted: temperatures that mend them, a score of them, and what to do by them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlit.functional.kernels import check_samples

LOWEST, HIGHEST = 0.1, 10.0
"""Between what a temperature is looked for."""

MOST_NATS = 30.0
"""Of the loss of one sample: at probability 1e-13. It bounds messages, which the fixed point of a backend must hold."""


def temperature_grid(number: int = 41) -> Tensor:
    """Temperatures in equal ratios from 0.1 to 10, float64, shape (number,).

    Args:
        number: How many, at least 3.

    Raises:
        ValueError: If there are fewer.
    """
    if number < 3:
        raise ValueError(f"number of temperatures must be at least 3, as a minimum has two neighbours, got {number}")
    return torch.logspace(math.log10(LOWEST), math.log10(HIGHEST), number, dtype=torch.float64)


def losses_at(logits: Tensor, labels: Tensor, temperatures: Tensor) -> Tensor:
    r"""Cross-entropy of each sample at each temperature.

    .. math:: l_{ig} = \min\left(-\log \operatorname{softmax}(z_i / T_g)_{y_i}, \, 30\right)

    Args:
        logits: z, shape (n, C).
        labels: y, int64, shape (n,).
        temperatures: T, positive, shape (G,).

    Returns:
        In nats, float64, shape (n, G), in [0, 30].

    Raises:
        ValueError: If there is no sample, or a label for each is missing.
    """
    _check("logits", logits, labels)
    heated = logits.double()[:, None, :] / temperatures.double().to(logits.device)[None, :, None]
    own = heated.log_softmax(dim=2).gather(2, labels[:, None, None].expand(-1, len(temperatures), 1)).squeeze(2)
    return (-own).clamp(0.0, MOST_NATS)


def best_temperature(temperatures: Tensor, losses: Tensor) -> float:
    """Where a curve of mean losses is lowest: at the vertex of a parabola in log T through its lowest point.

    Args:
        temperatures: Ascending in equal ratios, shape (G,), as of `temperature_grid`.
        losses: At each, shape (G,), in any unit and up to a constant.

    Returns:
        A temperature: of 41, within half a percent of where the losses between them are lowest. It is the first or the
        last if the curve is lowest there.

    Raises:
        ValueError: If the shapes differ.

    Example:
        >>> grid = temperature_grid()
        >>> round(best_temperature(grid, (grid / 2).log().square()), 6)
        2.0
    """
    if temperatures.shape != losses.shape or losses.dim() != 1:
        raise ValueError(
            f"losses must be one for each temperature, got {tuple(losses.shape)} and {tuple(temperatures.shape)}"
        )
    place, logs, curve = int(losses.argmin()), temperatures.double().log(), losses.double()
    if place in (0, len(losses) - 1):
        return float(temperatures[place])
    before, here, after = curve[place - 1 : place + 2]
    step = 0.5 * (before - after) / (before - 2 * here + after) if before != after else torch.zeros(())
    return float((logs[place] + step * (logs[place + 1] - logs[place])).exp())


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    r"""The temperature at which labels are most likely.

    .. math:: \operatorname{argmin}_T \; -\sum_i \log \operatorname{softmax}(z_i / T)_{y_i}

    The sum is convex in 1 / T, and its derivative is followed to 0 by bisection. Above 1 a network was surer than it
    should have been, below 1 less so.

    Args:
        logits: z, shape (n, C).
        labels: y, int64, shape (n,).

    Returns:
        T in [0.1, 10].

    Raises:
        ValueError: If there is no sample, or a label for each is missing.

    References:
        Guo, Pleiss, Sun and Weinberger, On calibration of modern neural networks, ICML 2017.
    """
    _check("logits", logits, labels)
    z = logits.double()
    own = z.gather(1, labels[:, None]).squeeze(1)

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


def brier_score(probabilities: Tensor, labels: Tensor) -> Tensor:
    r"""Mean squared distance between predicted probabilities and what came to be.

    .. math:: \frac{1}{n} \sum_i \sum_c (p_{ic} - [c = y_i])^2

    Args:
        probabilities: p, shape (n, C).
        labels: y, int64, shape (n,).

    Returns:
        A scalar in [0, 2], float64; of two classes it is twice the score of the second one alone.

    Raises:
        ValueError: If there is no sample, or a label for each is missing.

    References:
        Brier, Verification of forecasts expressed in terms of probability, Monthly Weather Review 1950.
    """
    _check("probabilities", probabilities, labels)
    p = probabilities.double()
    return (p - F.one_hot(labels, p.shape[1])).square().sum(dim=1).mean()


def decide(probabilities: Tensor, costs: Tensor) -> Tensor:
    r"""What costs least on average: with costs of 1 for each error, the most probable class.

    .. math:: d_i = \operatorname{argmin}_d \sum_c p_{ic} \, K_{cd}

    Of two classes with right decisions free, the second is decided for where its probability is above
    K_{01} / (K_{01} + K_{10}).

    Args:
        probabilities: p, shape (n, C).
        costs: K, shape (C, C): ``costs[c, d]`` is what deciding for d costs where c is true, in any unit.

    Returns:
        Classes, int64, shape (n,); of equal costs the first.

    Raises:
        ValueError: If ``costs`` is no finite (C, C) matrix.

    Example:
        >>> missed = torch.tensor([[0.0, 1.0], [9.0, 0.0]])  # to overlook an ill patient costs 9 false alarms
        >>> decide(torch.tensor([[0.85, 0.15], [0.95, 0.05]]), missed)
        tensor([1, 0])

    References:
        Elkan, The foundations of cost-sensitive learning, IJCAI 2001.
    """
    size = probabilities.shape[-1]
    matrix = costs.double().to(probabilities.device)
    if matrix.shape != (size, size) or not bool(matrix.isfinite().all()):
        raise ValueError(
            f"costs must be {size} rows of {size} finite numbers, costs[true class][decided class], got "
            f"{costs.tolist()}"
        )
    return (probabilities.double() @ matrix).argmin(dim=-1)


def _check(name: str, outputs: Tensor, labels: Tensor) -> None:
    check_samples(name, outputs)
    if not len(outputs):
        raise ValueError(f"{name} must hold at least one sample, got none")
    if labels.shape != outputs.shape[:1]:
        raise ValueError(f"labels must be one for each of {len(outputs)} samples, got shape {tuple(labels.shape)}")
