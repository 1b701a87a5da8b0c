"""FedRF-TCA (Feng, Wang, Li, Yang, Lou, Mi, Qiu and Liao, arXiv 2311.04686), Algorithms 2 to 5.

Differences from the paper, where it leaves something open or does not work as printed:

- For several present sources, the target's loss (11) uses the mean of their messages. Their sum, as in the published
  code, is smallest where the means differ, at |S_t| mean_S = mean_T.
- In a round without participating sources, the target has no loss and nothing is averaged; undefined in the paper.
- At the end of a run the target gets the sources' latest classifiers, whether or not T_C divides the number of rounds.
- The target's message has a channel of its own, as it goes to single sources and no secure mean can carry it.
- With several local steps in a round, messages are exchanged in the first of them and kept for the others.
- ``unit_norm`` (published code; not in the paper), ``unbiased`` and ``constraint`` are options; see their defaults.

Differences from the published code: every client has an extractor of its own and its MMD gradient reaches it (there
one shared module is trained by all, and messages lose their graph before the loss); the draw of S_t can be everybody;
nothing is chosen by target labels.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from fedlit.checks import check_at_least, check_one_of
from fedlit.federation import Channel, Client, Open, Summed, UniformSubset
from fedlit.functional import Kernel, alignment_loss, sample_frequencies
from fedlit.methods.mean_messages import exchange_means
from fedlit.models import AlignedReplica, VotingReplica, feature_width, part_of
from fedlit.models.aligned import STAYS_LOCAL, check_widths
from fedlit.module import Batch, FederatedModule
from fedlit.run.options import ReplicaSpec, Requires
from fedlit.run.replicas import NORMS, Replicas
from fedlit.run.run import Run
from fedlit.run.weights import Weighting


class FedRFTCA(FederatedModule):
    """Align clients by means of random features (Feng et al., arXiv 2311.04686, Algorithms 2 to 5).

    Every client has its own extractor, an aligner W that is averaged in every round, and a classifier that the sources
    average every T_C rounds and the target receives. In each round sources and target exchange the mean random
    feature of one mini-batch, and lower the distance between the two after alignment.

    Absent sources (``participation``; here a uniform subset by default) go on training on their labels alone.

    The target is evaluated from the first round in which it has a classifier: with T_C = 50 the 50th, with votes the
    last. Selecting a round by ``target/score`` needs a T_C of few rounds, or a warm-up.

    Args:
        clients: The roster.
        target: Name of the client adapted to.
        num_classes: Number of classes.
        extractor: Network from inputs to features; each client gets a copy and trains it.
        classifier: Network from ``num_components`` aligned features to logits; ``None`` is a linear layer.
        num_frequencies: Number N of random frequencies; messages have 2N numbers.
        num_components: Width m of the aligned features, at most 2N.
        bandwidth: Kernel width sigma, in units of the features (of length 1 with ``unit_norm``).
        kernel: Kernel that the random features stand for.
        unit_norm: Scale extracted features to length 1, so that one bandwidth fits all extractors.
        mmd_weight: Weight lambda of the alignment in a source's loss, at least 0.
        unbiased: Remedy for the constant bias of mini-batch means: see `alignment_loss`. Of little effect beside
            ``constraint="relative"``, which nearly makes it a constant.
        constraint: Remedy for W tending to 0, which alone makes the alignment perfect: ``"relative"`` divides it by
            the spread of the aligned features, ``"orthogonal"`` makes W's columns orthogonal and of their first
            length after every round, ``"none"`` is the paper's loss, held up by the classification loss alone.
        train_extractor: What of the extractors is trained once a warm-up is over: ``"all"``; ``"norm"``, the scales
            and shifts of normalisation layers; or ``"none"``. Statistics of BatchNorm follow a client's own data in
            any case. Bringing means together does not keep classes apart: an extractor that is free to move, such as
            one trained from scratch, can collapse at the target (the paper's is pretrained, and frozen up to its last
            stage: ``ResNet(freeze="layer3")``).
        classifier_period: Rounds T_C between averages of the classifiers; ``None`` never averages them, and the
            sources' classifiers vote at the end (appendix D.B; ties go to the larger mean probability).
        weighting: Weights of clients in a mean; the paper's are uniform.
        kwargs: See `FederatedModule`.

    Raises:
        ValueError: If an argument is out of range.

    Notes:
        A message has 2N numbers and an average of aligners 2N m, whatever the size of batches and data.

        Who learns what, given a privacy backend: the target the sources' mean message, W and C; each source the
        target's message (which goes through no backend), W and C. A mean of random features over few samples reveals
        much of them. A mean over two clients reveals to each of them the other's share: W of a single present source is
        known to the target, and the target's to it. Rounds with fewer sources than the backend can hide pass without
        their message.
    """

    replicas: Replicas[AlignedReplica]
    requires: ClassVar[Requires] = Requires(
        unlabelled_target=True,
        tasks=("classification",),
        matches_distributions=True,
        adaptation_weight="mmd_weight",
        participation=UniformSubset(),
        trains_when_absent=True,
    )
    replica_spec: ClassVar[ReplicaSpec] = ReplicaSpec(local=STAYS_LOCAL, apart="FedRF-TCA averages classifiers alone")

    def __init__(
        self,
        clients: Sequence[Client | str],
        target: str,
        num_classes: int,
        extractor: nn.Module,
        classifier: nn.Module | None = None,
        *,
        num_frequencies: int = 500,
        num_components: int = 100,
        bandwidth: float = 1.0,
        kernel: Kernel = "gaussian",
        unit_norm: bool = True,
        mmd_weight: float = 1.0,
        unbiased: bool = True,
        constraint: Literal["none", "relative", "orthogonal"] = "relative",
        train_extractor: Literal["all", "norm", "none"] = "all",
        classifier_period: int | None = 50,
        weighting: Weighting = "uniform",
        **kwargs: Any,
    ) -> None:
        check_widths(num_frequencies, num_components, bandwidth, kernel)
        check_at_least("mmd_weight (lambda)", mmd_weight, 0)
        check_one_of("constraint", constraint, ("none", "relative", "orthogonal"))
        check_one_of("train_extractor", train_extractor, ("all", "norm", "none"))
        if train_extractor == "norm" and not any(isinstance(module, NORMS) for module in extractor.modules()):
            raise ValueError(
                "train_extractor='norm' trains normalisation layers, and the extractor has none: give 'none', or 'all'"
            )
        if classifier_period is not None and classifier_period < 1:
            raise ValueError(
                f"classifier_period (T_C) must be at least 1 round, or null to let the sources vote at the end, got "
                f"{classifier_period}"
            )
        classifier = nn.Linear(num_components, num_classes) if classifier is None else classifier
        super().__init__(clients, target, num_classes, extractor, classifier, weighting=weighting, **kwargs)
        self.num_frequencies = num_frequencies
        self.num_components = num_components
        self.bandwidth = bandwidth
        self.kernel = kernel
        self.unit_norm = unit_norm
        self.mmd_weight = mmd_weight
        self.unbiased = unbiased
        self.constraint = constraint
        self.train_extractor = train_extractor
        self.classifier_period = classifier_period
        # Columns of W are orthogonal and so long that an aligned feature has a length of about 1.
        self._gain = math.sqrt(2 * num_frequencies / num_components)
        self.run.weights.watchers.append(self.note_classifier_)
        self._classified_in = -1  # round in which the target last got a classifier

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Means of random features in both directions, W every round, and C seldom or once."""
        talk = (
            Summed("features", "mean random feature of a batch", up="sources", to="target", too_few="skip"),
            Open("target_features", "the target's mean random feature", up="target", to="sources"),
            Summed("aligner", "W", too_few="skip"),
        )
        if self.classifier_period is None:
            return (*talk, Open("vote", "C of each source", up="sources", to="target", how_often="once, at the end"))
        how_often = f"every {self.classifier_period} rounds and at the end"
        return (*talk, Summed("classifier", "C", up="sources", how_often=how_often, too_few="skip"))

    # ---------------------------------------------------------------- Algorithms 2 and 3: local training

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """Everyone: the target on its unlabelled samples."""
        return self.clients

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Exchange messages in the first step of a round; then each client's loss."""
        features = {
            client.name: self.replicas[client].random_features(samples[0])
            for client, samples in self.run.in_streams(batch)
        }
        if self.federation.batch_idx == 0:
            self.exchange_means({name: own.mean(dim=0) for name, own in features.items()})
        losses = {}
        for client, samples in self.run.in_streams(batch, "classify"):
            own = self.aligned_loss(client, features[client.name], samples)
            if own is not None:
                losses[client.name] = own
        return losses

    def exchange_means(self, means: Mapping[str, Tensor]) -> None:
        """Sources learn the target's mean feature; the target learns only the mean over present sources.

        Means are those of local clients, each of shape (2N,).
        """
        federation = self.federation
        received = exchange_means(
            federation,
            ("features", "target_features"),
            {name: {"mean": mean} for name, mean in means.items()},
            [client for client in federation.present("features") if not client.is_target],
            weights=self.run.weights.mean_weights,
        )
        for client in federation.local_clients:
            replica = self.replicas[client]
            replica.heard.fill_(client.name in received)
            if client.name in received:
                replica.received.copy_(received[client.name]["mean"])

    def aligned_loss(self, client: Client, features: Tensor, samples: Sequence[Any]) -> Tensor | None:
        """L_C + lambda L_MMD of a source, L_MMD of the target; without L_MMD where no message was received.

        Features are the client's random ones of its batch, shape (b, 2N).
        """
        replica = self.replicas[client]
        aligned = replica.aligner(features)
        alignment = None
        if replica.heard:
            other = replica.aligner(replica.received)
            relative = self.constraint == "relative"
            alignment = alignment_loss(aligned, other, unbiased=self.unbiased, relative=relative)
        if client.is_target:
            return alignment
        loss = self.task.loss(client, replica.classifier(aligned), samples[1])
        return loss if alignment is None else loss + self.mmd_weight * alignment

    def on_after_backward(self) -> None:
        """Forget the gradients of what is not to be trained; an optimiser passes over parameters without one."""
        super().on_after_backward()
        if self.run.clock.warming_up or self.train_extractor == "all":
            return
        for client in self.federation.local_clients:
            for module in self.replicas[client].extractor.modules():
                if self.train_extractor == "none" or not isinstance(module, NORMS):
                    for param in module.parameters(recurse=False):
                        param.grad = None

    # ---------------------------------------------------------------- Algorithm 4: aggregation

    def on_round_start(self, run: Run) -> None:
        """Nobody trains on from a model of before the warm-up's end."""
        run.weights.finish_warmup()

    def on_round_end(self, run: Run) -> None:
        """Average W over present sources and the target (line 3), and C over present sources every T_C rounds (4-6)."""
        if self._num_sources("aligner"):
            self.run.weights.average_("aligner", among=self.clients, part="aligner")
        if self.constraint == "orthogonal":
            self.orthogonalise_()
        due = self.classifier_period is not None and (run.clock.round_idx + 1) % self.classifier_period == 0
        if due and self._num_sources("classifier"):
            self.run.weights.average_("classifier", among=self.sources, part="classifier")
            if self.federation.senders("classifier"):
                self._classified_in = run.clock.round_idx

    def on_run_end(self, run: Run) -> None:
        """Give the target a classifier for good: the sources' mean, or all of theirs to vote."""
        if self._classified_in == run.clock.last_round:
            return
        self._classified_in = run.clock.last_round
        if self.classifier_period is None:
            self.vote_()
        else:
            run.weights.average_("classifier", self.sources, [self.target], "classifier", absent_too=True)

    @torch.no_grad()
    def vote_(self) -> None:
        """Send every source's classifier to the target."""
        federation = self.federation
        ballots = {
            client.name: part_of(self.run.weights.of(client.name, frozen_too=True), "classifier")
            for client in self.sources
            if federation.is_local(client)
        }
        received = federation.exchange(
            "vote", ballots, around=self.run.weights.received_part("classifier"), absent_too=True
        )
        for name, messages in received.items():
            cast(VotingReplica, self.replicas[name]).count_(messages)

    @torch.no_grad()
    def orthogonalise_(self) -> None:
        """Replace W of each local client by the nearest multiple of an orthonormal matrix, c W (W^T W)^(-1/2)."""
        for client in self.federation.local_clients:
            weight = self.replicas[client].aligner.weight  # W^T
            values, vectors = torch.linalg.eigh((weight @ weight.T).double())
            root = self._gain * (vectors * values.clamp(min=1e-12).rsqrt()) @ vectors.T
            weight.copy_(root.to(weight.dtype) @ weight)

    # ---------------------------------------------------------------- set-up and hooks

    def build_replica(self) -> nn.Module:
        """Copies of extractor and classifier, frequencies from the seed, and W with orthogonal columns."""
        extractor, classifier = copy.deepcopy(self.originals)
        width = feature_width(extractor)
        sample = partial(sample_frequencies, self.num_frequencies, width, self.bandwidth, self.kernel)
        aligner = nn.Linear(2 * self.num_frequencies, self.num_components, bias=False)
        first = torch.empty_like(aligner.weight, dtype=torch.float32)  # QR has no half precision
        with torch.no_grad():
            aligner.weight.copy_(nn.init.orthogonal_(first, gain=self._gain))
        return AlignedReplica(extractor, sample, self.federation.seed, aligner, classifier, self.unit_norm)

    def build_target(self, replica: AlignedReplica) -> AlignedReplica:
        """Where classifiers vote, the target has room for all of them."""
        voters = [client.name for client in self.sources]
        return VotingReplica(replica, voters) if self.classifier_period is None else replica

    def note_classifier_(self, received: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Note that a target without votes has received a classifier."""
        for name, state in received.items():
            if any(entry.startswith("classifier.") for entry in state) and not self.replicas[name].votes:
                self.replicas[name].informed.fill_(True)

    def on_fit_start(self) -> None:
        """No classifier was given in this run yet."""
        super().on_fit_start()
        self._classified_in = self.federation.round_idx - 1

    def on_run_start(self, run: Run) -> None:
        """Nobody has voted yet; not called where a finished run is resumed, which keeps its votes. Warn of short runs.

        After the warm-up every extractor moves on its own, and the classifier follows those of the sources.
        """
        if self.warmup_rounds:
            self.run.clock.warn_of_few_steps(
                "with 50, and standardised inputs, it ended up to 8 points below SourceOnly"
            )
        for client in self.federation.local_clients:
            if self.replicas[client].votes:
                self.replicas[client].informed.fill_(False)

    def can_predict(self, client: Client) -> bool:
        """Whether it is a source, or a target that has got a classifier."""
        return not client.is_target or bool(self.replicas[client].informed)

    def on_test_start(self) -> None:
        """Warn if a checkpoint was made before the target had a classifier."""
        self._check_informed()

    def on_predict_start(self) -> None:
        """As `on_test_start`."""
        self._check_informed()

    def _check_informed(self) -> None:
        if self.federation.is_local(self.target) and not self.can_predict(self.target):
            warnings.warn(
                f"target {self.target.name!r} has no classifier yet: these weights are from before the first average "
                "of the classifiers, or before the vote at the end of the run; its predictions mean nothing",
                stacklevel=2,
            )

    def _num_sources(self, channel: str) -> int:
        return sum(not client.is_target for client in self.federation.present(channel))
