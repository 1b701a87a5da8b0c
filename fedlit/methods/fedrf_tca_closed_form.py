"""RF-TCA and JDA of a whole federation in closed form: one round, one secure mean, no training. Not in the papers.

RF-TCA (Feng et al., arXiv 2311.04686, Algorithm 1) needs of the data only their mean random features and second
moments, and JDA (Long et al., ICCV 2013, Algorithm 1) of the sources those and sums by class; these add up over
clients. So the aligner is that of the pooled data, which nobody has seen. The classifier, too, follows from moments:
linear discriminant analysis of the aligned source features.

Differences of FedJDA from its paper: features are random Fourier features; a target sample takes the class of the
nearest class mean, as the nearest source sample is not known. The published code's factor C and its columns of length 1
are kept, its faults not: see `jda`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from fedlit import FederatedModule, ReplicaSpec, Requires, Run
from fedlit.checks import check, check_at_least, check_one_of, refuse
from fedlit.federation import Channel, Client, DivergedError, Open, RosterError, Summed
from fedlit.federation.lone_classes import (
    CLASS_SOURCES,
    LoneClasses,
    check_lone_classes,
    class_sources,
    find_lone_classes,
)
from fedlit.functional import (
    Kernel,
    RandomFeatureSums,
    Scaling,
    jda_from_sums,
    linear_discriminant,
    rf_tca_from_sums,
    sample_frequencies,
)
from fedlit.models import AlignedReplica, feature_width
from fedlit.models.aligned import STAYS_LOCAL, check_widths
from fedlit.module import Batch
from fedlit.run.replicas import Replicas
from fedlit.run.weights import Weighting

_MODEL = ("aligner.weight", "classifier.weight", "classifier.bias")
"""What is handed out, by name in a replica's state."""


class FedRFTCAClosedForm(FederatedModule):
    """RF-TCA from one secure mean of moments (own; RF-TCA is of Feng et al., arXiv 2311.04686, Algorithm 1).

    Its extractor is fixed (the identity on features computed beforehand, or a pretrained network): every client goes
    once through its data and adds up random features s, their outer products, and for sources s times the label.
    The target receives the sources' means only, adds its moments, solves for aligner and classifier, and sends
    both to everyone. Then the run stops. With ``warmup_rounds`` this is the round after them, and the extractor is the
    one trained in them. Sources that are absent in it (by default nobody) are left out and get no model.

    Args:
        extractor: Network from inputs to features, used as it is.
        num_frequencies: Number N of random frequencies.
        num_components: Width m of the aligned features, at most 2N.
        bandwidth: Kernel width sigma, in units of the features (of length 1 with ``unit_norm``).
        kernel: Kernel that the random features stand for.
        unit_norm: Scale extracted features to length 1, so that one bandwidth fits all extractors.
        gamma: Weight of RF-TCA's regularisation, positive; ``None`` takes its useful scale, the squared distance
            between the domains' mean features.
        shrinkage: Of the classifier's covariance: see `linear_discriminant`.
        lone_classes: Where a backend hides the moments, those of a class that one source alone has are its own:
            ``"leave_out"`` that source's samples of it, so that nobody predicts the class, or ``"send"`` them.
        weighting: Weights of sources in the mean: by ``"samples"`` (pooled data), ``"sqrt"`` or ``"uniform"``.
        kwargs: See `FederatedModule`.

    Raises:
        RosterError: If the round did not go through all training samples of a client, or the target or every source is
            absent in it.

    Notes:
        The moments are N (2N + 1) + 2N (C + 1) + C numbers in float64, the model is 2N m + (m + 1) C.

        With a privacy backend the target learns the sources' weighted mean moments (with one source, its own exactly),
        class shares and class means included; with ``lone_classes="send"`` those of a class that one source alone has
        are that source's own, which it cannot notice. Left out, samples of it are in no moment, and the source weighs
        as before. The sources learn W and the classifier, which reveal something of the target: as W^T C W = I, the
        pooled scatter C on the span of W follows from W, all of it for m = 2N, and a source that knows the other
        sources' share, as a single source does, can subtract it.
    """

    replicas: Replicas[AlignedReplica]
    requires: ClassVar[Requires] = Requires(
        unlabelled_target=True, tasks=("classification",), class_weights=False, matches_distributions=True
    )
    replica_spec: ClassVar[ReplicaSpec] = ReplicaSpec(local=STAYS_LOCAL, frozen_statistics=True)
    problem: ClassVar[str] = "RF-TCA"
    """What is solved, in errors."""

    def __init__(
        self,
        clients: Sequence[Client | str],
        target: str,
        num_classes: int,
        extractor: nn.Module,
        *,
        num_frequencies: int = 500,
        num_components: int = 100,
        bandwidth: float = 1.0,
        kernel: Kernel = "gaussian",
        unit_norm: bool = True,
        gamma: float | None = None,
        shrinkage: float = 0.1,
        lone_classes: LoneClasses = "leave_out",
        weighting: Weighting = "samples",
        **kwargs: Any,
    ) -> None:
        check_widths(num_frequencies, num_components, bandwidth, kernel)
        check(0 < shrinkage <= 1, "shrinkage", "in (0, 1]", shrinkage, "it is the weight of the identity")
        if gamma is not None and not 0 < gamma < math.inf:
            refuse("gamma", "positive and finite, or null to take the useful scale from the data", gamma)
        if kwargs.get("local_norm"):
            refuse("local_norm", "False, as moments of different extractors do not add up", True, "leave it out")
        check_lone_classes(lone_classes)
        classifier = nn.Linear(num_components, num_classes)
        super().__init__(clients, target, num_classes, extractor, classifier, weighting=weighting, **kwargs)
        self.num_frequencies = num_frequencies
        self.num_components = num_components
        self.bandwidth = bandwidth
        self.kernel = kernel
        self.unit_norm = unit_norm
        self.gamma = gamma
        self.shrinkage = shrinkage
        self.lone_classes = lone_classes
        self._sums: dict[str, RandomFeatureSums] = {}
        self._class_sums: dict[str, Tensor] = {}

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Moments to the target, and the model that it makes of them."""
        contents = "mean random features, their products, and sums by class"
        moments = Summed("moments", contents, "sources", "target", "once", fixed=True)
        first = (class_sources(moments),) if self.lone_classes == "leave_out" else ()
        return moments, *first, Open("model", "W and the classifier", up="target", to="sources", how_often="once")

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """Everyone, in the first round after a warm-up."""
        return self.clients if round_idx == self.warmup_rounds else ()

    @torch.no_grad()
    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Add a batch's moments; nothing is trained, so there are no losses."""
        for client, samples in self.run.in_streams(batch):
            replica = self.replicas[client]
            replica.eval()
            features = replica.random_features(samples[0])
            name = client.name
            if not features.isfinite().all():  # every process is to know why the run ends
                self.federation.fail(
                    DivergedError(
                        f"the features of client {name!r} hold NaN or infinity: scale its inputs, or take another "
                        "extractor"
                    )
                )
                continue
            self.add_(client, features, None if client.is_target else samples[1])
        return {}

    def add_(self, client: Client, features: Tensor, labels: Tensor | None) -> None:
        """Add a batch's random features, shape (b, 2N), to a client's sums; ``labels`` are a source's."""
        name = client.name
        sums = RandomFeatureSums.of(features)
        self._sums[name] = self._sums[name] + sums if name in self._sums else sums
        if labels is not None:
            members = F.one_hot(labels, self.num_classes).double()
            ones = torch.ones(len(features), 1, dtype=torch.float64, device=features.device)
            by_class = torch.cat([features.double(), ones], dim=1).T @ members  # the last row counts
            self._class_sums[name] = self._class_sums.get(name, torch.zeros_like(by_class)) + by_class

    def on_round_start(self, run: Run) -> None:
        """Clients that were away fetch a warm-up's result; sources that return after the end, the model."""
        run.weights.finish_warmup()
        target, returned = self.target.name, run.federation.roster.returned
        if not returned or target in returned:
            return
        sent = (
            {target: {name: run.weights.of(target)[name] for name in _MODEL}} if run.federation.is_local(target) else {}
        )
        received = run.federation.exchange("model", sent, to=sorted(returned))
        run.weights.load_({name: messages[target] for name, messages in received.items()})

    @torch.no_grad()
    def on_round_end(self, run: Run) -> None:
        """One secure mean over the sources, to the target; one model from there to everyone."""
        if run.clock.round_idx > self.warmup_rounds:
            return
        self._check_complete()
        federation = self.federation
        lone = self.leave_out_()
        received = federation.mean(
            "moments",
            {client.name: self.moments(client) for client in self.sources if client.name in self._sums},
            weights=self.run.weights.mean_weights,
        )
        solved: dict[str, dict[str, Tensor]] = {}
        try:
            solved = {name: self.solve(_whole(mean) if name in lone else mean) for name, mean in received.items()}
        except ValueError as error:  # on one process; the next exchange raises it on all
            federation.fail(RosterError(f"{self.problem} cannot be solved for these data: {error}"))
        handed_out = federation.exchange("model", solved)
        models = {**solved, **{name: messages[self.target.name] for name, messages in handed_out.items()}}
        self.run.weights.load_(models)
        self.forget_()
        self.trainer.should_stop = True

    def leave_out_(self) -> dict[str, Tensor]:
        """Take samples of classes that one source alone has out of its sums; return these classes by local client.

        Out of all sums: the mean of all features less those of the other classes would be the class's.
        """
        counts = {name: each[-1] for name, each in self._class_sums.items()}
        found = find_lone_classes(self.federation, CLASS_SOURCES, counts, "nobody will predict them")
        lone = {name: classes for name, classes in found.items() if bool(classes.any())}
        for client in (each for each in self.sources if each.name in lone and each.name in counts):
            name, own = client.name, lone[client.name].to(counts[client.name].device)
            if not bool((own & (counts[name] > 0)).any()):
                continue
            before = self._sums[name]
            zeros = torch.zeros_like(before.second_moment), torch.zeros_like(before.total)
            self._sums[name], self._class_sums[name] = RandomFeatureSums(*zeros, 0), 0 * self._class_sums[name]
            replica = self.replicas[client].eval()
            for _, inputs, labels in self.run.samples.labelled([client]):
                kept = ~own[labels]
                with self.trainer.precision_plugin.forward_context():
                    features = replica.random_features(inputs)[kept]
                if len(features):
                    self.add_(client, features, labels[kept])
        return lone

    def forget_(self) -> None:
        """Leave no sums for another run."""
        self._sums.clear()
        self._class_sums.clear()

    def moments(self, client: Client) -> dict[str, Tensor]:
        """Return what a source sends: means over its samples, all in [-1, 1].

        Outer products are multiplied by N, as their entries are of the order 1/N and fixed-point grids are absolute; of
        the symmetric matrix the upper half is sent.
        """
        sums = self._sums[client.name]
        count = max(sums.count, 1)  # 0 if it alone has each of its classes: zeros are added
        rows, columns = torch.triu_indices(len(sums.total), len(sums.total), device=sums.total.device)
        return {
            "second": sums.second_moment[rows, columns] * (self.num_frequencies / count),
            "first": sums.total / count,
            "by_class": self._class_sums[client.name] / count,
        }

    def solve(self, mean: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return aligner and classifier, as entries of a replica's state, from the sources' mean `moments`."""
        own = self._sums[self.target.name]
        first = mean["first"].double()
        width = len(first)
        second = first.new_zeros(width, width)
        rows, columns = torch.triu_indices(width, width, device=first.device)
        second[rows, columns] = second[columns, rows] = mean["second"].double() / self.num_frequencies
        present = self.federation.present("moments")
        count = sum(client.num_samples or 0 for client in present if not client.is_target)
        pooled = RandomFeatureSums(second * count, first * count, count)
        by_class = mean["by_class"].double()
        aligner = self.align(pooled, by_class * count, own)
        weight, bias = linear_discriminant(
            aligner.T @ second @ aligner, aligner.T @ by_class[:-1], by_class[-1], self.shrinkage
        )
        model = zip(_MODEL, (aligner.T, weight, bias), strict=True)
        return {name: tensor.float().contiguous() for name, tensor in model}

    def align(self, sources: RandomFeatureSums, by_class: Tensor, own: RandomFeatureSums) -> Tensor:
        """Return W, shape (2N, m), from sums over all sources and over the target's samples.

        ``by_class`` has the sources' sums of random features by class, and in its last row their numbers of samples,
        shape (2N + 1, C).
        """
        gamma = self.gamma
        if gamma is None:
            gamma = float((sources.total / sources.count - own.total / own.count).square().sum())
        aligner, _ = rf_tca_from_sums(sources, own, self.num_components, gamma)
        return aligner

    def build_replica(self) -> nn.Module:
        """The extractor as given, frequencies from the seed, and room for aligner and classifier."""
        extractor, classifier = copy.deepcopy(self.originals)
        width = feature_width(extractor)
        sample = partial(sample_frequencies, self.num_frequencies, width, self.bandwidth, self.kernel)
        aligner = nn.Linear(2 * self.num_frequencies, self.num_components, bias=False)
        return AlignedReplica(extractor, sample, self.federation.seed, aligner, classifier, self.unit_norm)

    def on_fit_start(self) -> None:
        """Start with empty sums, and warn if nobody trains the extractor; a resumed run may have nothing left to do."""
        super().on_fit_start()
        self.forget_()
        rounds = self.trainer.max_epochs or 0
        if not self.warmup_rounds and rounds > 1 and any(p.requires_grad for p in self.originals[0].parameters()):
            rank_zero_warn(
                f"{type(self).__name__} takes its extractor as it is and stops after one round of {rounds}: one that "
                "is not pretrained stays at its first weights. "
                f"Give warmup_rounds={rounds - 1}, in which FedAvg trains it"
            )
        if self.federation.round_idx > self.warmup_rounds:
            self.trainer.should_stop = True

    def _check_complete(self) -> None:
        """Raise on every process unless each participating local client has been through all of its samples."""
        federation = self.federation
        participants = federation.present("moments")
        error: RosterError | None = None
        if len({client.is_target for client in participants}) < 2:
            error = RosterError(
                f"round {federation.round_idx} gathers the moments of the target and at least one source, but only "
                f"{[client.name for client in participants]} participate: give no participation, which means everyone"
            )
        for client in participants:
            if federation.is_local(client):
                seen = self._sums[client.name].count if client.name in self._sums else 0
                if seen != client.num_samples and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
                    error = RosterError(
                        f"the moments of client {client.name!r} cover {seen} of {client.num_samples} training samples: "
                        "give drop_last=False, FederatedStrategy(local_steps=None) and no limit_train_batches, and "
                        "do not resume within the round"
                    )
        federation.check("moments", error)


class FedJDA(FedRFTCAClosedForm):
    """JDA from one secure mean over the sources (own; JDA is of Long et al., ICCV 2013, Algorithm 1).

    As `FedRFTCAClosedForm`, with the means of classes brought together, too: the target solves RF-TCA first, gives each
    of its samples the class of the nearest class mean in the components, solves again with these classes, and so on
    until they stay. More iterations cost no message.

    Args:
        num_iterations: Most iterations, the first of which is without classes.
        gamma: Weight of the regularisation (the paper's lambda), positive. Its useful scale is the variance of random
            features, below 1.
        scaling: ``"unit"`` gives every column of W length 1, as published, so that components keep their unequal
            variances; ``"constraint"`` gives all the same. The nearest class mean depends on it.
        kwargs: See `FedRFTCAClosedForm`.

    Notes:
        The target keeps the random features of all its samples (n_T x 2N numbers) until they are classified. What is
        sent is as for `FedRFTCAClosedForm`; W and the classifier follow from the means of the guessed classes too.
    """

    problem: ClassVar[str] = "JDA"

    def __init__(
        self, *args: Any, num_iterations: int = 10, gamma: float = 1.0, scaling: Scaling = "unit", **kwargs: Any
    ) -> None:
        check_at_least("num_iterations", num_iterations, 1, way_out="one alone is RF-TCA")
        check_one_of("scaling", scaling, ("unit", "constraint"))
        if gamma is None:
            refuse("gamma", "positive and finite", gamma, "the paper's is 1")
        super().__init__(*args, gamma=gamma, **kwargs)
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
        """Return W of the last iteration."""
        assert self.gamma is not None
        sums = sources.second_moment, by_class[:-1], by_class[-1], torch.cat(self._rows)
        return jda_from_sums(
            *sums, self.num_components, self.gamma, num_iterations=self.num_iterations, scaling=self.scaling
        ).aligner


def _whole(mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the mean over the sources that have sent moments and not zeros: those whose class shares are above 0."""
    share = mean["by_class"][-1].sum()
    return {name: tensor / share for name, tensor in mean.items()}
