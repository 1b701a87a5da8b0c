"""Joint distribution adaptation of a whole federation in closed form: one round, one secure mean, no training.

Not in a paper. JDA (Long et al., ICCV 2013, Algorithm 1) needs of the sources only the sum of products of features, and
sums and numbers of samples by class: the message of `FedRFTCAClosedForm`. All its iterations run at the target, which
has its own samples at hand, and are those of the pooled data, which nobody has seen.

Differences from the paper: features are random Fourier features; a target sample takes the class of the nearest class
mean, as the nearest source sample is not known; the final classifier is linear discriminant analysis of the aligned
source features. The published code's factor C and its columns of length 1 are kept, its faults not: see `jda`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedlit.checks import check_at_least, check_one_of, refuse
from fedlit.federation import Client
from fedlit.functional import RandomFeatureSums, Scaling, jda_from_sums
from fedlit.methods.fedrf_tca_closed_form import FedRFTCAClosedForm


class FedJDA(FedRFTCAClosedForm):
    """JDA from one secure mean over the sources (own; JDA is of Long et al., ICCV 2013, Algorithm 1).

    As `FedRFTCAClosedForm`, with the means of classes brought together, too.

    The target receives the sources' mean, solves RF-TCA first, gives each of its samples the class of the nearest
    class mean in the components found, solves again with these classes, and so on until they stay. It sends aligner
    and classifier to everyone, and the run stops. More iterations cost no message.

    Args:
        clients: The roster.
        target: Name of the client adapted to.
        num_classes: Number of classes.
        extractor: Network from inputs to features, used as it is.
        num_iterations: Most iterations, the first of which is without classes.
        gamma: Weight of the regularisation (the paper's lambda), positive. Its useful scale is the variance of random
            features, below 1.
        scaling: ``"unit"`` gives every column of W length 1, as published, so that components keep their unequal
            variances; ``"constraint"`` gives all the same. The nearest class mean depends on it.
        kwargs: See `FedRFTCAClosedForm`.

    Raises:
        ValueError: If an argument is out of range.

    Notes:
        The target keeps the random features of all its samples (n_T x 2N numbers) until they are classified.

        What is sent, and who learns what, is as for `FedRFTCAClosedForm`. The classes that the target has guessed
        never leave it, but W and the classifier follow from their means and numbers too.
    """

    problem: ClassVar[str] = "JDA"

    def __init__(
        self,
        clients: Sequence[Client | str],
        target: str,
        num_classes: int,
        extractor: nn.Module,
        *,
        num_iterations: int = 10,
        gamma: float = 1.0,
        scaling: Scaling = "unit",
        **kwargs: Any,
    ) -> None:
        check_at_least("num_iterations", num_iterations, 1, way_out="one alone is RF-TCA")
        check_one_of("scaling", scaling, ("unit", "constraint"))
        if gamma is None:
            refuse("gamma", "positive and finite", gamma, "the paper's is 1")
        super().__init__(clients, target, num_classes, extractor, gamma=gamma, **kwargs)
        self.num_iterations = num_iterations
        self.scaling = scaling
        self._rows: list[Tensor] = []

    def add_(self, client: Client, features: Tensor, labels: Tensor | None) -> None:
        """The target keeps its random features as well, for they are classified in each iteration."""
        super().add_(client, features, labels)
        if client.is_target:
            self._rows.append(features)

    def forget_(self) -> None:
        """Leave neither sums nor features for another run."""
        super().forget_()
        self._rows.clear()

    def align(self, sources: RandomFeatureSums, by_class: Tensor, own: RandomFeatureSums) -> Tensor:
        """All iterations of JDA, from sums over all sources and the target's own samples; W, shape (2N, m)."""
        assert self.gamma is not None
        found = jda_from_sums(
            sources.second_moment,
            by_class[:-1],
            by_class[-1],
            torch.cat(self._rows),
            self.num_components,
            self.gamma,
            num_iterations=self.num_iterations,
            scaling=self.scaling,
        )
        return found.aligner
