"""Mean and deviation of columns over all clients, from sums of numbers between -1 and 1.

A secure sum adds fixed-point numbers of a small range, and measurements have any magnitude. So clients first agree on a
power of two for each column: the largest that any of them needs. Further passes, about the mean of the pass before,
keep the precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Total = Callable[[str, Callable[[str], Tensor]], "Tensor | None"]
"""Sum over all clients of what each sends over a channel; ``None`` in a process that hosts no client."""

_PASSES = 3
"""Over the numbers, each about the mean of the one before."""

EXPONENTS = 128
"""Powers of two that are distinguished: from 2^-64, for anything smaller, to 2^63, for anything larger."""

CONSTANT = 2.0**-16
"""Share of a column's squared scale below which its variance is rounding: the column is constant."""


def needed_exponents(magnitudes: Tensor) -> Tensor:
    """Mark for each column the power of two that bounds it, shape (d, 128), float64; none for a column of zeros.

    ``magnitudes`` are absolute values, shape (d,); NaN where there are none.
    """
    exponents = torch.frexp(magnitudes.double().nan_to_num(0.0)).exponent.long().clamp(-64, 63)
    marks = torch.nn.functional.one_hot(exponents + 64, EXPONENTS).double()
    return marks * (magnitudes > 0).double()[:, None]


def largest_scale(total: Tensor) -> Tensor:
    """Largest power of two that any client marked, shape (d,), 1 where none did; ``total`` has (d, 128)."""
    marked = total > 0.5
    highest = EXPONENTS - 1 - marked.flip(1).double().argmax(dim=1)
    return torch.where(marked.any(dim=1), 2.0 ** (highest - 64).double(), 1.0)


def spread_about(x: Tensor, centre: Tensor) -> Tensor:
    """Root mean square of the available values of each column about ``centre``, shape (d,); NaN where none is."""
    return (x - centre).square().nanmean(dim=0).sqrt()


def known_moments(x: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
    """Share of available values, and their first and second moment of (x - centre) / scale, missing ones as 0: (3, d).

    A mean of these over clients, weighted by their n, is that of all samples together. ``x`` is float64, shape (n, d),
    NaN where a value is missing; ``centre`` and ``scale``, positive, have shape (d,).
    """
    available = ~x.isnan()
    z = torch.where(available, (x - centre) / scale, 0.0)
    return torch.stack([available.double(), z, z.square()]).mean(dim=1)


def mean_and_deviation(moments: Tensor, centre: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (of the population) of the available values, from `known_moments` of all samples.

    Two of shape (d,); the deviation is 0 where the column is constant, and both where all values are missing.
    """
    share = moments[0].clamp(min=torch.finfo(torch.float64).tiny)
    first, second = moments[1] / share, moments[2] / share
    variance = second - first.square()
    available = moments[0] > 0
    mean = torch.where(available, centre + scale * first, 0.0)
    return mean, torch.where(available & (variance > CONSTANT), scale * variance.clamp(min=0).sqrt(), 0.0)


def agree_on_moments(
    columns: int, numbers_of: Callable[[str], Tensor], samples: Mapping[str, int], total: Total
) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each of d ``columns`` over all samples, float64, shape (d,); that of a constant is 0.

    ``numbers_of`` a domain are those of its training samples, shape (n, d), NaN where one is missing; ``samples`` has
    each domain's n. ``total`` sums over all domains, over "magnitudes" and "statistics".
    """
    everyone = sum(samples.values())
    mean = deviation = torch.zeros(columns, dtype=torch.float64)
    for _ in range(_PASSES):

        def magnitudes(domain: str, mean: Tensor = mean) -> Tensor:
            return needed_exponents(spread_about(numbers_of(domain), mean))

        needed = total("magnitudes", magnitudes)
        scale = torch.ones_like(mean) if needed is None else largest_scale(needed)

        def share(domain: str, mean: Tensor = mean, scale: Tensor = scale) -> Tensor:
            return samples[domain] / everyone * known_moments(numbers_of(domain), mean, scale)

        moments = total("statistics", share)
        if moments is not None:
            mean, deviation = mean_and_deviation(moments, mean, scale)
    return mean, deviation


def own_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each column of available values, shape (n, d), NaN where one is missing."""
    zero = torch.zeros(x.shape[1], dtype=torch.float64)
    mean, _ = mean_and_deviation(known_moments(x, zero, zero + 1), zero, zero + 1)
    spread = spread_about(x, mean).nan_to_num(0.0)
    scale = torch.where(spread > 0, spread, 1.0)
    return mean_and_deviation(known_moments(x, mean, scale), mean, scale)
