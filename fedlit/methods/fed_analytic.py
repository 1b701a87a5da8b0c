"""FedAnalytic: heads in closed form from one secure mean (AFL, He et al., CVPR 2025; GH-OFL, Turazza et al., 2026).

Sums of features, their outer products and the labels add up over clients, so that each head is that of the pooled data,
however they are dealt out. AFL's clients send solutions of their own, whose merge by its absolute aggregation law has
the same result; sums need none of its inversions, and travel through a secure mean. FedCGS (Guan, Zhou and Gu, AAAI
2025, arXiv 2503.06962) sends the same sums, and its Gaussian classes of one covariance are the head ``"lda"``.

Differences from the papers:

- An intercept, which is not penalised, and a penalty of means in place of sums: with n samples it is AFL's over n.
- Logits of the ridge are its outputs over their mean squared error by class, so that probabilities are those of
  Gaussian errors; AFL has outputs alone, whose largest is the same.
- GH-OFL trains further heads on samples drawn from the classes' Gaussians; here are the two that need no training.
- Random features, classes' shares and leaving one source out for the penalty are ours.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor, nn

from fedlit import ReplicaSpec
from fedlit.checks import check, check_at_least, check_one_of, check_positive
from fedlit.federation import Channel, Client, RosterError, Summed
from fedlit.federation.lone_classes import LoneClasses
from fedlit.functional import (
    Kernel,
    LabelMoments,
    RidgePath,
    diagonal_discriminant,
    linear_discriminant,
    sample_frequencies,
)
from fedlit.functional.discriminant import MIN_PRIOR
from fedlit.methods.closed_form import ClosedForm
from fedlit.models import feature_width
from fedlit.models.closed_form import ClosedFormHead
from fedlit.models.copies import copied
from fedlit.models.replica import Replica, is_width_open
from fedlit.run.replicas import Replicas
from fedlit.run.weights import Weighting

HeadName = Literal["ridge", "lda", "qda_diagonal"]
"""What is solved for."""

PENALTIES = tuple(10.0 ** (half / 2) for half in range(-12, 3))
"""Candidates of ``penalty="leave_one_out"``: the mean of the eigenvalues of features of length 1 is at most 1 / p."""

_LARGEST_ERROR = 10.0
"""At which the squared errors of candidates are cut, for fixed-point grids; that of equal outputs is below 1."""

_LEAST_VARIANCE = 1e-3
"""Of the ridge's errors by class, where it fits all labels; and of blurred features at length 1, over all of them."""

_LEAST_SHARE = 1e-3
"""Of a class, where shares are blurred, and of the sources that are not left out."""

_MOST_UNKNOWN = 0.1
"""Share of a source's samples that may be of classes of no other source, where it is left out."""

_LEAST_STEPS = 64
"""Of the grid of a backend, in the mean square of a feature that it can tell from 0."""

_FACTOR = 16.0
"""Of outer products: entries of features of length 1 stay within the usual grids' bound of 32."""


class FedAnalytic(ClosedForm):
    """Ridge regression or Gaussian classes on fixed features, in one round (AFL, arXiv 2405.16240; GH-OFL, 2602.01186).

    Every source goes once through its data and adds up features f, their outer products, and f by class; with
    ``head="qda_diagonal"`` squares by class, too. The target receives the mean over sources, solves for the head, and
    sends it to everyone. Then the run stops.

    Args:
        extractor: Network from inputs to features, used as it is; the identity on features computed beforehand.
        head: ``"ridge"`` is regression on one-hot labels, ``"lda"`` Gaussian classes of one covariance,
            ``"qda_diagonal"`` Gaussian classes with variances of their own and independent features.
        penalty: Of the ridge's squared weights, next to mean squared errors, positive. ``"leave_one_out"`` takes the
            candidate whose heads of all other sources have the least squared error on each source, summed up over
            the sources of whose samples 90% are of classes that others have; sources then receive the mean, too.
        shrinkage: Of covariance or variances, in (0, 1]: see `linear_discriminant` and `diagonal_discriminant`.
        class_shares: Priors of Gaussian classes: the sources' ``"samples"``, or ``"equal"`` ones.
        num_frequencies: Number N of random Fourier features (2N numbers) that take the features' place, for boundaries
            that are curved; 0 for none.
        bandwidth: Kernel width of random features, in units of the features.
        kernel: Kernel that they stand for.
        unit_norm: Scale extracted features to length 1. Without, features are to be of the order 1: backends that hide
            moments round them to a grid, which takes small ones for 0, with a warning at the source.
        lone_classes: See `ClosedForm`.
        weighting: Weights of sources in the mean: by ``"samples"`` (pooled data), ``"sqrt"`` or ``"uniform"``. Samples
            of classes that are left out count in them, so that the head is then not that of the samples that are left.
        kwargs: See `FederatedModule`.

    Raises:
        RosterError: See `ClosedForm`; and if there is or takes part one source, which cannot be left out, or all
            sources have classes of their own.

    Notes:
        The moments of p features and C classes are p (p + 3) / 2 + (p + 1) C numbers, 834,000 for 1,280 features and
        10 classes; those of squares p C more.

        With a privacy backend the target learns the sources' weighted mean moments (with one source, its own exactly);
        with ``penalty="leave_one_out"`` so does each source, so that of two sources, or of the two that have a class,
        each learns the other's. The head goes to all sources, and tells of the pooled data: with "qda_diagonal" its
        classes' shares, means and shrunk variances themselves, otherwise C (p + 1) functions of the moments.

        Differential privacy of "moments" is of whole clients, and takes a fixed penalty. With ``unit_norm`` a clipping
        norm of 2 clips nothing, nor does 2.24 with "qda_diagonal". What clipping and noise leave is mended: shares of
        classes sum to 1 again, and no variance is negative. The head, which is computed from them alone, is not blurred
        again, and costs the target nothing of a privacy budget.

    Attributes:
        chosen_penalty: On the target's process, the penalty that leaving one source out has chosen; else ``None``.
    """

    replicas: Replicas[Replica]
    replica_spec: ClassVar[ReplicaSpec] = ReplicaSpec(local=("classifier.frequencies",), frozen_statistics=True)
    problem: ClassVar[str] = "the head"
    solution: ClassVar[tuple[str, ...]] = ("classifier.linear.weight", "classifier.linear.bias")
    solution_words: ClassVar[str] = "the head"

    def __init__(
        self,
        clients: Sequence[Client | str],
        target: str,
        num_classes: int,
        extractor: nn.Module,
        *,
        head: HeadName = "ridge",
        penalty: float | Literal["leave_one_out"] = 0.001,
        shrinkage: float = 0.1,
        class_shares: Literal["samples", "equal"] = "samples",
        num_frequencies: int = 0,
        bandwidth: float = 1.0,
        kernel: Kernel = "gaussian",
        unit_norm: bool = True,
        lone_classes: LoneClasses = "leave_out",
        weighting: Weighting = "samples",
        **kwargs: Any,
    ) -> None:
        check_one_of("head", head, get_args(HeadName))
        check_one_of("class_shares", class_shares, ("samples", "equal"))
        for name, number in (("num_frequencies", num_frequencies), ("penalty", penalty), ("shrinkage", shrinkage)):
            is_number = isinstance(number, Real) and not isinstance(number, bool)
            is_word = name == "penalty" and isinstance(number, str)
            check(is_number or is_word, name, "a number", number, error=TypeError)
        check(isinstance(num_frequencies, int), "num_frequencies", "an integer", num_frequencies, error=TypeError)
        check_at_least("num_frequencies", num_frequencies, 0)
        check_one_of("unit_norm", unit_norm, (True, False))
        sample_frequencies(1, 1, bandwidth, kernel)
        check(0 < shrinkage <= 1, "shrinkage", "in (0, 1]", shrinkage, "it is what keeps covariances invertible")
        self.leaves_out = penalty == "leave_one_out"
        if isinstance(penalty, str):
            check_one_of("penalty", penalty, ("leave_one_out",), "or give a positive number")
            rule, way_out = "a number where head is no ridge, which alone has a penalty", "give shrinkage"
            check(head == "ridge", "penalty", rule, penalty, way_out)
        else:
            check_positive("penalty", penalty)
        rule = "'samples' with head='ridge', whose regression has no priors"
        check(head != "ridge" or class_shares == "samples", "class_shares", rule, class_shares, "take head='lda'")
        width = None if is_width_open(extractor) else feature_width(extractor)
        unknown = torch.zeros(num_frequencies, width or 0) if num_frequencies else None
        classifier = ClosedFormHead(width, num_classes, unknown, head == "qda_diagonal", unit_norm)
        super().__init__(
            clients, target, num_classes, extractor, classifier,
            lone_classes=lone_classes, weighting=weighting, **kwargs,
        )  # fmt: skip
        rule, sources = "a number with one source, which cannot be left out", [each.name for each in self.sources]
        check(len(sources) > 1 or not self.leaves_out, "penalty", rule, penalty, f"of {sources}", RosterError)
        self.head, self.penalty, self.shrinkage, self.class_shares = head, penalty, shrinkage, class_shares
        self.num_frequencies, self.bandwidth, self.kernel = num_frequencies, bandwidth, kernel
        self.unit_norm = unit_norm
        self._errors: Tensor | None = None  # of candidates, on sources that were left out
        self.chosen_penalty: float | None = None

    @property
    def contents(self) -> str:
        """Moments of features; for variances by class of their squares, too."""
        squares = "of features and of their squares" if self.head == "qda_diagonal" else "of features"
        return f"mean features, their products, and sums by class {squares}"

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Moments to the target, and the head that it makes of them; errors of candidates in between."""
        moments, *others = super().channels
        if not self.leaves_out:
            return moments, *others
        clipped = "sources take their own part from the mean, where it is not clipped: give a number as penalty"
        contents = "squared errors of heads of the other sources, by penalty"
        errors = Summed("errors", contents, "sources", "target", "once", fixed=True, unblurred=clipped)
        everyone = Summed("moments", self.contents, "sources", "everyone", "once", fixed=True, unblurred=clipped)
        return everyone, errors, *others

    @property
    def least_sources(self) -> int:
        """Two where one is left out."""
        return 2 if self.leaves_out else 1

    @property
    def counted(self) -> tuple[Client, ...]:
        """The sources: the target's samples are not needed."""
        return self.sources

    @property
    def factor(self) -> float:
        """16 at length 1; N with random features, whose products are of the order 1/N; 1 where nothing bounds them."""
        return float(self.num_frequencies) or (_FACTOR if self.unit_norm else 1.0)

    def features(self, client: Client, inputs: Any) -> Tensor:
        """Return features of a batch of a local client, shape (b, p)."""
        replica = self.replicas[client]
        return _head_of(replica).features(replica.extractor(inputs))

    def columns(self, features: Tensor) -> Tensor:
        """Return features, and for variances by class their squares behind them, which `scale` multiplies."""
        if self.head != "qda_diagonal":
            return features
        return torch.cat([features, self.scale * features.square()], dim=1)

    def moments(self, client: Client) -> dict[str, Tensor]:
        """As of `ClosedForm`, with a warning where the backend's grid rounds them away."""
        own, grid = super().moments(client), self.federation.channels["moments"].backend.grid
        if grid is not None and not (self.unit_norm or self.num_frequencies):
            sums = self._sums[client.name]
            square = float(sums.second_moment.diagonal().mean()) / max(sums.count, 1)
            if 0 < square < _LEAST_STEPS / grid.scale:
                warnings.warn(
                    f"features of client {client.name!r} have a mean square of {square:.1e}, and what is sent of them "
                    f"is rounded to multiples of {1 / grid.scale:.1e}: set unit_norm, or scale features to the order 1",
                    stacklevel=2,
                )
        return own

    def forget_(self) -> None:
        """Leave no sums for another run."""
        super().forget_()
        self._errors = None

    # ---------------------------------------------------------------- the penalty, by leaving one source out

    def choose_(self, means: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Sum up errors of all penalties, each source's by heads of all others, at the target."""
        if not self.leaves_out:
            return
        senders = self.federation.senders("moments")
        weights = self.run.weights.mean_weights or dict.fromkeys(senders, 1.0)
        total = sum(weights[name] for name in senders)
        errors: dict[str, dict[str, Tensor]] = {}
        for client in self.sources:
            if client.name in means and client.name in self._sums:
                share = weights[client.name] / total
                errors[client.name] = self._left_out(client, means[client.name], share)
        received = self.federation.mean("errors", errors, weights=self.run.weights.mean_weights)
        for mean in received.values():
            there = mean["there"].double().cpu()
            if not there > 0:  # on the target's process; the next exchange raises it on all
                text = "no source has at least 90% of its samples in classes of other sources, to be left out"
                self.federation.fail(RosterError(f"{text}: give a number as penalty"))
            self._errors = mean["errors"].double().cpu() / there

    def _left_out(self, client: Client, mean: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
        """Return squared errors on a source's moments by heads of all others, by penalty, and that it has any.

        A source does not count if more than a tenth of its samples are of classes that no other has: heads of the
        others are wrong there whatever the penalty, and least so if they say nothing.
        """
        own = self.moments(client)
        others = {name: mean[name].double() - share * own[name].double() for name in own}
        shares, weight = own["by_class"][-1].double(), others["by_class"][-1].sum()
        unknown = shares[others["by_class"][-1] <= _LEAST_SHARE * weight].sum()
        if weight < _LEAST_SHARE or not shares.any() or unknown > _MOST_UNKNOWN * shares.sum():
            nothing = torch.zeros(len(PENALTIES) + 1, dtype=torch.float64)
            return {"errors": nothing[1:], "there": nothing[0]}
        path = RidgePath(self._moments_of({name: each / weight for name, each in others.items()}))
        moments = self._moments_of(own)
        found = [moments.squared_error(*path.at(penalty)) for penalty in PENALTIES]
        errors = torch.tensor(found, dtype=torch.float64).clamp(0.0, _LARGEST_ERROR)
        return {"errors": errors, "there": torch.ones((), dtype=torch.float64)}

    # ---------------------------------------------------------------- the solution

    def solve(self, mean: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the head, as entries of a replica's state, from the sources' mean `moments`."""
        moments = self._moments_of(mean)
        squares = mean["by_class"][len(moments.first) : -1].double() / self.scale  # of the other heads none
        if self.federation.channels["moments"].mechanism is not None:
            moments, squares = mended(moments, squares)
        if self.head == "ridge":
            weight, bias = self._ridge(moments)
        else:
            if self.head == "lda":
                weight, bias = linear_discriminant(moments.second, moments.by_class, moments.priors, self.shrinkage)
            else:
                weight, bias = diagonal_discriminant(squares, moments.by_class, moments.priors, self.shrinkage)
            seen = moments.priors > 0
            if self.class_shares == "equal":
                bias = torch.where(
                    seen, bias - moments.priors.clamp(min=MIN_PRIOR).log() - math.log(int(seen.sum())), bias
                )
        return {name: tensor.float().contiguous() for name, tensor in zip(self.solution, (weight, bias), strict=True)}

    def _ridge(self, moments: LabelMoments) -> tuple[Tensor, Tensor]:
        """Weights and biases of outputs, over their mean squared error by class."""
        if self._errors is None:
            assert not isinstance(self.penalty, str)
            weight, bias = RidgePath(moments).at(self.penalty)
            error = moments.squared_error(weight, bias)
        else:
            best = int(self._errors.argmin())
            self.chosen_penalty, error = PENALTIES[best], float(self._errors[best])
            weight, bias = RidgePath(moments).at(self.chosen_penalty)
        variance = max(error / self.num_classes, _LEAST_VARIANCE)
        return weight / variance, bias / variance

    def _moments_of(self, mean: Mapping[str, Tensor]) -> LabelMoments:
        """Moments as they were sent."""
        first, by_class = mean["first"].double(), mean["by_class"].double()
        return LabelMoments(self.second_moment(mean), first, by_class[: len(first)], by_class[-1])

    def build_replica(self) -> nn.Module:
        """The extractor as given, frequencies from the seed, and room for the head."""
        extractor, classifier = copied(self.originals)
        if self.num_frequencies:
            width = feature_width(extractor)
            drawn = sample_frequencies(self.num_frequencies, width, self.bandwidth, self.kernel, self.federation.seed)
            classifier.frequencies = drawn.to(classifier.get_buffer("frequencies"))
        return Replica(extractor, classifier)


def mended(blurred: LabelMoments, squares: Tensor) -> tuple[LabelMoments, Tensor]:
    """Moments that can be some, of blurred ones and of squares by class, shape (p, C), or (0, C) where there are none.

    Clipping has made all smaller by a factor, which shares of classes tell; noise makes shares and variances negative.
    """
    total = blurred.priors.clamp(min=0).sum().clamp(min=_LEAST_SHARE)
    priors, by_class = blurred.priors / total, blurred.by_class / total
    by_class = by_class * (priors > _LEAST_SHARE)
    priors = priors.clamp(min=_LEAST_SHARE)
    priors = priors / priors.sum()
    between = by_class / priors @ by_class.T
    values, vectors = torch.linalg.eigh(blurred.second / total - between)
    second = between + (vectors * values.clamp(min=_LEAST_VARIANCE / len(values))) @ vectors.T
    if len(squares):
        least = by_class.square() / priors + _LEAST_VARIANCE / len(values) * priors
        squares = torch.maximum(squares / total, least)
    return LabelMoments(second, by_class.sum(dim=1), by_class, priors), squares


def _head_of(replica: Replica) -> ClosedFormHead:
    return cast(ClosedFormHead, replica.classifier)
