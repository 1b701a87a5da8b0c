"""How much to trust a source: weights from the variance of the target's gradients and the distance to the source's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from fedlit.checks import check, check_at_least, check_one_of
from fedlit.functional.aggregation import (
    CHUNK,
    Granularity,
    check_alike,
    check_granularity,
    flat,
    layer_names,
    products_of_layers,
)
from fedlit.functional.checks import check_entries, check_finite

Rule = Literal["fedda", "fedgp"]


@dataclass(eq=False)  # tensors have no truth value
class BatchStatistics:
    r"""Mean and variance of batch gradients that come one at a time, in the memory of one model (Welford, 1962).

    .. math:: \bar{g} = \frac{1}{B} \sum_j g_j, \qquad V = \frac{1}{B - 1} \sum_j \lVert g_j - \bar{g} \rVert^2

    Integer entries and BatchNorm's ``running_mean`` and ``running_var`` take no part. The stored state can be passed to
    the constructor again.

    Attributes:
        mean: Mean of the gradients so far, in float32 at least; empty before the first. `add` changes it in place.
        squares: Sum of the squared distances from the mean, in float64.
        count: Number of gradients so far (B).
    """

    mean: dict[str, Tensor] = field(default_factory=dict)
    squares: float = 0.0
    count: int = 0

    def __post_init__(self) -> None:
        # the mean is changed in place, which must not reach the caller's tensors
        self.mean = {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in self.mean.items()}

    @torch.no_grad()
    def add(self, update: dict[str, Tensor]) -> None:
        """Take in one more batch gradient, or update of one local step, whose layers must match those before."""
        layers = {name: update[name].detach() for name in layer_names(update)}
        if self.count == 0:
            for name, layer in layers.items():
                self.mean[name] = layer.new_zeros(layer.shape, dtype=torch.promote_types(layer.dtype, torch.float32))
                self.mean[name].copy_(layer)
            self.count = 1
            return
        check_alike([self.mean, layers], ["the gradients before", "this one"])
        self.count += 1
        distance: Tensor | float = 0.0
        for name, layer in layers.items():
            pieces = (torch.split(flat(tensor), CHUNK) for tensor in (self.mean[name], layer))
            for part, chunk in zip(*pieces, strict=True):
                mean = part.double()
                step = chunk.to(mean) - mean
                distance = distance + step.dot(step)
                part.copy_(mean.add(step, alpha=1 / self.count))
        self.squares += float(distance) * (self.count - 1) / self.count

    @property
    def variance(self) -> float:
        """Unbiased sample variance of a batch gradient, summed over coordinates (V)."""
        check_at_least("count (B)", self.count, 2, "batches for a variance", "use smaller batches")
        return self.squares / (self.count - 1)


@dataclass(frozen=True)
class AutoBeta:
    r"""Weights of the sources, and the estimates they come from. All in float64.

    Attributes:
        beta: Weight of each source, shape (N,), from 0 to 1.
        target_variance: Variance of the target's mean gradient, summed over coordinates (:math:`\hat\sigma^2 = V / B`).
        distance: Squared distance of each source's gradient from the target's expected one (:math:`d^2`), shape (N,).
            Unbiased, hence it can be negative.
        residual: Squared distance of the target's expected gradient from the span of each source's
            (:math:`\tau^2 d^2`), shape (N,). Unbiased: it can be negative, or exceed ``distance``.
    """

    beta: Tensor
    target_variance: Tensor
    distance: Tensor
    residual: Tensor


def auto_weights(target_variance: float | Tensor, distance: float | Tensor) -> Tensor:
    r"""Weight of a source, from 0 to 1, that minimises the expected squared error of FedDA or FedGP.

    .. math:: \beta = \frac{\sigma^2}{\sigma^2 + \max(d^2, 0)}, \quad 0 \text{ where } \sigma^2 = 0

    An estimate of :math:`d^2` below zero means that source and target cannot be distinguished: the weight is 1. See
    Jiang et al., ICLR 2024, section 4.2, which drops the denominator's 1/m, for m parameters, as well.

    Args:
        target_variance: Variance of the target's mean gradient (sigma^2), not negative.
        distance: Estimate of a squared distance, of a shape that goes with the variance's: from the source's gradient
            for FedDA (d^2), from its span for FedGP (tau^2 d^2).
    """
    variance, squared = _together(target_variance, distance)
    fits = bool(variance.isfinite().all() and (variance >= 0).all())
    rule, way_out = "finite and not negative", "estimate it from at least two batches"
    check(fits, "target_variance (sigma^2)", rule, target_variance, way_out)
    check_finite("distance (d^2)", squared, "has a client's model diverged?")
    total = variance + squared.clamp(min=0)
    return torch.where(variance == 0, 0.0, variance / torch.where(variance == 0, 1.0, total))


def fedda_delta_squared(target_variance: float | Tensor, distance: float | Tensor, beta: float | Tensor) -> Tensor:
    r"""Delta error of FedDA with one source: expected squared distance of its result from the target's true gradient.

    .. math:: \Delta^2 = (1 - \beta)^2 \sigma^2 + \beta^2 d^2

    Exact for one source; for several their mean bounds it. See Jiang et al., ICLR 2024, theorem 4.2. `auto_weights`
    minimises it.

    Args:
        target_variance: Variance of the target's mean gradient (sigma^2), not negative.
        distance: Squared distance of the source's gradient from the target's expected one (d^2).
        beta: Weight of the source, in [0, 1].

    Returns:
        Float64, of the shape that the arguments have together, in squared units of a gradient.
    """
    variance, squared, weight = _of_delta(target_variance, "distance (d^2)", distance, beta)
    return (1 - weight) ** 2 * variance + weight**2 * squared


def fedgp_delta_squared(
    target_variance: float | Tensor,
    residual: float | Tensor,
    beta: float | Tensor,
    num_parameters: float = math.inf,
    kept: float | Tensor = 1.0,
    target_square: float | Tensor = 0.0,
) -> Tensor:
    r"""Delta error of FedGP with one source, as `fedda_delta_squared`.

    .. math:: \Delta^2 = \left[ (1 - \beta)^2 + \delta \frac{2 \beta - \beta^2}{m} \right] \sigma^2
              + \beta^2 \left[ \delta \tau^2 d^2 + (1 - \delta) \lVert g_T \rVert^2 \right]

    Exact for isotropic noise and projections of the whole model of which all (delta = 1) or none pass the filter; else
    the mean-field approximation. See Jiang et al., ICLR 2024, theorem 4.4 (delta = 1) and appendix A.4.

    Args:
        target_variance: As for `fedda_delta_squared`.
        residual: Squared distance of the target's expected gradient from the span of the source's (tau^2 d^2).
        beta: As for `fedda_delta_squared`.
        num_parameters: Number of parameters (m), at least 1; infinite as for `auto_weights`, which then minimises it.
        kept: Probability that the source passes the filter (delta), in [0, 1].
        target_square: Squared length of the target's expected gradient; counts if sources are filtered.
    """
    check(num_parameters >= 1, "num_parameters (m)", "at least 1", num_parameters)
    variance, squared, weight = _of_delta(target_variance, "residual (tau^2 d^2)", residual, beta)
    _, share, length = _together(variance, kept, target_square)
    _check_shares("kept (delta)", share)
    check_finite("target_square", length, "has the target's model diverged?")
    along = share * (2 * weight - weight**2) / num_parameters
    return ((1 - weight) ** 2 + along) * variance + weight**2 * (share * squared + (1 - share) * length)


def _of_delta(
    target_variance: float | Tensor, argument: str, distance: float | Tensor, beta: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments in float64, checked."""
    variance, squared, weight = _together(target_variance, distance, beta)
    fits = bool(variance.isfinite().all() and (variance >= 0).all())
    check_entries(fits, "target_variance (sigma^2)", "finite and not negative", variance)
    check_finite(argument, squared, "has a client's model diverged?")
    _check_shares("beta", weight)
    return variance, squared, weight


def _together(*values: float | Tensor) -> list[Tensor]:
    """Numbers and tensors in float64, on the device of the first tensor."""
    device = next((each.device for each in values if isinstance(each, Tensor)), None)
    return [torch.as_tensor(each, dtype=torch.float64, device=device) for each in values]


def _check_shares(argument: str, shares: Tensor) -> None:
    check_entries(bool(((shares >= 0) & (shares <= 1)).all()), argument, "from 0 to 1", shares)


@torch.no_grad()
def auto_beta(
    target_batches: Iterable[dict[str, Tensor]],
    sources: Sequence[dict[str, Tensor]],
    rule: Rule = "fedda",
    granularity: Granularity = "layer",
) -> AutoBeta:
    r"""Estimate the weights of sources in FedDA or FedGP from batch gradients of the target.

    .. math:: \hat\sigma^2 = \frac{V}{B}, \qquad
              \hat{d}^2 = \lVert g_S - \bar{g} \rVert^2 - \frac{V}{B}, \qquad
              \widehat{\tau^2 d^2} = \lVert \bar{g} - P \bar{g} \rVert^2 - \frac{V_r}{B}

    :math:`P` projects on the span of the source's update, and :math:`V_r` is the sample variance of
    :math:`g_j - P g_j`. All three are unbiased for independent batches. The batches are read once and not kept. See
    their appendix A.5, where all batches are kept; this is the same number in less memory.

    Args:
        target_batches: Gradients of the target at one point, one per batch of equal size, at least two.
        sources: One update per source (g_S), at least one, in the scale of the target's.
        rule: ``"fedda"`` weighs with the distance, ``"fedgp"`` with the residual.
        granularity: Of the projections in the residual, as that of `fedgp`.
    """
    check_one_of("rule", rule, get_args(Rule))
    check_granularity(granularity)
    check(len(sources) > 0, "sources", "at least 1 update", sources)
    statistics = BatchStatistics()
    along_mean = along_squares = torch.zeros((), dtype=torch.float64)
    callers = ["the target", *(f"source {idx}" for idx in range(len(sources)))]
    sources = [{name: source[name] for name in layer_names(source)} for source in sources]
    for batch in target_batches:
        statistics.add(batch)
        if statistics.count == 1:
            check_alike([statistics.mean, *sources], callers)
        inner, norms_squared, _ = products_of_layers(batch, sources, granularity)
        along = _lengths(inner, norms_squared)
        step = along - along_mean
        along_mean = along_mean + step / statistics.count
        along_squares = along_squares + step * (along - along_mean)
    batches, variance = statistics.count, statistics.variance
    inner, norms_squared, mean_squares = products_of_layers(statistics.mean, sources, granularity)
    mean_squared = mean_squares.sum(dim=0, keepdim=True)
    target_variance = mean_squared.new_tensor(variance / batches)
    distance = norms_squared.sum(1) - 2 * inner.sum(1) + mean_squared - target_variance
    variance_along = along_squares.sum(1) / (batches - 1)
    residual = mean_squared - _lengths(inner, norms_squared).square().sum(1) - (variance - variance_along) / batches
    beta = auto_weights(target_variance, distance if rule == "fedda" else residual)
    return AutoBeta(beta=beta, target_variance=target_variance, distance=distance, residual=residual)


def _lengths(inner: Tensor, norms_squared: Tensor) -> Tensor:
    """Inner products with the unit vectors of directions; 0 for a direction that is 0."""
    return torch.where(norms_squared == 0, 0.0, inner / torch.where(norms_squared == 0, 1.0, norms_squared).sqrt())
