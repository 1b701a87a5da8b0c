"""FedDAN (Long, Cao, Wang and Jordan, ICML 2015) and FedCORAL (Sun and Saenko, ECCV workshops 2016), federated.

Differences from the papers, which have one source and no federation:

- Losses are of means over samples, which a secure sum can give: FedDAN's of random features, FedCORAL's of second
  moments. The gradients of all clients together are that of the joint loss. Sources weigh the same: see `match`.
- FedDAN's kernels weigh the same; the paper optimises their weights, no published code does. The middle bandwidth is
  the mean squared distance in a round's first batches (paper: the median, 33 kernels). The discrepancy is the biased
  estimate, 1/U of that of published codes, which add kernels.

Differences from published codes: tllib has the linear estimate of the discrepancy, skada the kernel exp(-d / s);
tllib's CORAL has a mean in place of 1 / (4 d^2), and a term of the features' means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

import fedlit.functional as fn
from fedlit.checks import check, check_count
from fedlit.federation import Channel, Client
from fedlit.methods.mean_matching import MomentMatching


class FedDAN(MomentMatching):
    """Match mean random features of several Gaussian kernels (deep adaptation networks, Long et al., ICML 2015).

    The distance of these means tends to `multi_kernel_mmd` of the features as ``num_frequencies`` grows. With one
    kernel and a network of one hidden layer it is DaNN (Ghifary, Kleijn and Zhang, PRICAI 2014).

    Args:
        num_frequencies: Number N of random frequencies, a multiple of ``num_kernels``; messages have 2N numbers.
        num_kernels: Number U of Gaussian kernels exp(-d^2 / b_u), at least 1.
        bandwidth_factor: Ratio of one b_u to the one before, above 1.
        bandwidth: The b_u in the middle: a positive squared length, or ``"mean"``, the mean squared distance between
            all clients' features in the first step of each round; then everyone learns once a round the mean feature
            over all clients' batches, and the mean of its squared entries.
    """

    contents: ClassVar[str] = "mean random feature of a batch"
    scale_argument: ClassVar[str] = "bandwidth"

    def __init__(
        self,
        *args: Any,
        num_frequencies: int = 500,
        num_kernels: int = 5,
        bandwidth_factor: float = 2.0,
        bandwidth: Literal["mean"] | float = "mean",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        check_count("num_kernels (U)", num_kernels, 1)
        holds = num_frequencies >= 1 and not num_frequencies % num_kernels
        check(holds, "num_frequencies (N)", f"a positive multiple of num_kernels ({num_kernels})", num_frequencies)
        check(1 < bandwidth_factor < math.inf, "bandwidth_factor", "above 1 and finite", bandwidth_factor)
        self.check_scale("b", bandwidth, "squared length")
        self.num_frequencies = num_frequencies
        self.num_kernels = num_kernels
        self.bandwidth_factor = bandwidth_factor
        self.bandwidth = bandwidth

    def num_moments(self) -> int:
        """Return 2N: a cosine and a sine of each frequency."""
        return 2 * self.num_frequencies

    def mean(self, client: str, features: Tensor) -> Tensor:
        """Return the mean random feature, shape (2N,)."""
        middle = self.pair_distance(client) if self.bandwidth == "mean" else float(self.bandwidth)
        frequencies = _frequencies(
            self.num_frequencies, self.width, self.federation.seed, middle, self.num_kernels, self.bandwidth_factor
        )
        return fn.random_fourier_features(features, frequencies).mean(dim=0)


@lru_cache(maxsize=4)
def _frequencies(num: int, width: int, seed: int, middle: float, num_kernels: int, factor: float) -> Tensor:
    """Return frequencies of all kernels, shape (num, width), equal for everyone with the seed."""
    unit = fn.sample_frequencies(num, width, bandwidth=1.0, seed=seed)
    return fn.mixture_frequencies(unit, fn.bandwidth_ladder(middle, num_kernels, factor))


class FedCORAL(MomentMatching):
    r"""Match the domains' covariances by `coral_loss` (Deep CORAL, Sun and Saenko, ECCV workshops 2016).

    .. math:: L = \frac{1}{4 d^2} \left\|C_S - C_T\right\|_F^2

    Pooled, C_S is the covariance of all sources' samples, the spread of their means included: sources send second
    moments of their features and a 1. A batch of one sample is not matched. Messages have d (d + 1) / 2 numbers, pooled
    over several sources d + 1 more: put a `Bottleneck` behind an extractor of many features. The mean of features
    should not be many times their spread, as the pooled covariance is a difference of moments.

    Args:
        mmd_weight: Weight lambda of the loss, at least 0.
        feature_variance: Divisor v of the covariances: a positive number, 1 for the paper's loss; or ``"mean"``, the
            mean variance of all clients' features in the first step of each round, so that their unit has no effect.

    Notes:
        Pooled, everyone learns the sources' mean feature, and the difference of their second moments and the target's
        covariance; with ``feature_variance="mean"`` also what everyone learns in `FedDAN` with ``bandwidth="mean"``.
    """

    contents: ClassVar[str] = "covariance of a batch"
    scale_argument: ClassVar[str] = "feature_variance"
    fewest_samples: ClassVar[int] = 2

    def __init__(self, *args: Any, feature_variance: Literal["mean"] | float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.check_scale("v", feature_variance, "variance")
        self.feature_variance = feature_variance

    @property
    def pools(self) -> bool:
        """Whether the covariance of several sources is that of all their samples together."""
        return self.match == "pooled" and len(self.sources) > 1

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Covariances, or second moments and means of pooled sources; and weights."""
        contents = "second moments and mean of a batch, the target's covariance negative"
        return tuple(
            replace(channel, contents=contents) if self.pools and channel.name == "moments" else channel
            for channel in super().channels
        )

    def num_moments(self) -> int:
        """Return the size of an upper triangle."""
        width = self.width + self.pools
        return width * (width + 1) // 2

    def mean(self, client: str, features: Tensor) -> Tensor:
        """Return second moments about the mean; of a pooled source, of features and a 1 about 0; shape (M,)."""
        features = features / math.sqrt(self.variance(client))
        if not self.pools:
            return fn.second_moments(features, features.mean(dim=0))
        if client == self.target.name:
            features, beside = features - features.mean(dim=0), features.new_zeros(len(features), 1)
        else:
            beside = features.new_ones(len(features), 1)
        wider = torch.cat([features, beside], dim=1)
        return fn.second_moments(wider, torch.zeros_like(wider[0]))

    def variance(self, client: str) -> float:
        """Return v; half the mean squared distance is the trace of the covariance of all."""
        if self.feature_variance == "mean":
            return self.pair_distance(client) / (2 * self.width)
        return float(self.feature_variance)

    def corrections(self, sources: Sequence[Client]) -> dict[str, float]:
        """Return the factors n / (n - 1) of an unbiased covariance; for pooled sources, of all their samples.

        Samples that weigh w_i have the factor 1 / (1 - sum of w_i^2), with w_i = 1 / (K n_k) of those of source k.
        """
        sizes = self.run.samples.sizes_in_step([*sources, self.target])
        factors = {name: size / (size - 1) for name, size in sizes.items()}
        if self.match == "pooled":
            squares = sum(1 / (len(sources) ** 2 * sizes[client.name]) for client in sources)
            factors |= dict.fromkeys((client.name for client in sources), 1 / (1 - squares))
        return factors

    def squared_length(self, gap: Tensor) -> Tensor:
        """Return the loss of a difference of covariances, a scalar."""
        return (fn.central_moments(gap) if self.pools else gap).square().sum() / (4 * self.width**2)
