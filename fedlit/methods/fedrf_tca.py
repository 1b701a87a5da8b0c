"""FedRF-TCA (Feng, Wang, Li, Yang, Lou, Mi, Qiu and Liao, arXiv 2311.04686), Algorithms 2 to 5.

Differences from the paper, where it leaves something open or does not work as printed:

- The target's loss (11) uses the mean of the sources' messages. Their sum (published code) is smallest where the means
  differ, at |S_t| mean_S = mean_T. Messages are exchanged in a round's first local step and kept for the others; the
  target's goes to single sources, in plaintext.
- In a round without sources, the target has no loss and nothing is averaged.
- At the end of a run the target gets the sources' latest classifiers, whether or not T_C divides the number of rounds.
- ``unit_norm``, ``unbiased`` and ``constraint`` are options; equation 11 has neither of the last two, which are on by
  default, and ``settings/fedrf_tca_paper`` turns them off. The code scales extracted features (``unit_norm``) and,
  before the classifier, aligned ones (``Head(unit_norm=True)``) to length 1; the paper scales neither.

Differences from the published code: extractors are local and receive the MMD gradient (there one module is trained by
all, and messages lose their graph); the draw of S_t can be everybody; nothing is chosen by target labels.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from fedlit import FederatedModule, ReplicaSpec, Requires, Run
from fedlit.checks import check_at_least, check_count, check_one_of, refuse
from fedlit.federation import Channel, Client, Open, Summed, UniformSubset
from fedlit.functional import Kernel, alignment_loss, sample_frequencies
from fedlit.methods.shared import exchange_means, send_classifiers
from fedlit.models import AlignedReplica, VotingReplica, feature_width
from fedlit.models.aligned import STAYS_LOCAL, check_widths
from fedlit.models.copies import copied
from fedlit.module import Batch
from fedlit.run.replicas import NORMS, Replicas
from fedlit.run.weights import Weighting


class FedRFTCA(FederatedModule):
    """Align clients by means of random features (Feng et al., arXiv 2311.04686, Algorithms 2 to 5).

    Every client has a local extractor, an aligner W that is averaged in every round, and a classifier that the sources
    average every T_C rounds and the target receives. In each round sources and target exchange the mean random feature
    of one mini-batch, and lower the distance between the two after alignment. Absent sources (``participation``; here a
    uniform subset by default) go on training on their labels alone.

    The target is evaluated from the first round in which it has a classifier: with T_C = 50 the 50th, with votes the
    last. Selecting a round by ``target/score`` needs a T_C of few rounds, or a warm-up.

    Args:
        extractor: Network from inputs to features; each client gets a copy and trains it.
        classifier: Network from ``num_components`` aligned features to logits; ``None`` is a linear layer.
        num_frequencies: Number N of random frequencies; messages have 2N numbers.
        num_components: Width m of the aligned features, at most 2N.
        bandwidth: Kernel width sigma, in units of the features (of length 1 with ``unit_norm``).
        kernel: Kernel that the random features stand for.
        unit_norm: Scale extracted features to length 1, so that one bandwidth fits all extractors.
        mmd_weight: Weight lambda of the alignment in a source's loss, at least 0.
        unbiased: Remove the bias of mini-batch means: see `alignment_loss`. Of little effect beside
            ``constraint="relative"``.
        constraint: Keeps W from tending to 0: ``"relative"`` divides the alignment by the spread of the aligned
            features, ``"orthogonal"`` resets W's columns to be orthogonal, of their first length, after every round,
            ``"none"`` is the paper's loss.
        train_extractor: Extractors' weights that are trained after a warm-up: ``"all"``; ``"norm"``, the scales and
            shifts of normalisation layers; or ``"none"``. Statistics of BatchNorm follow a client's data in any case.
            An extractor trained from scratch can collapse at the target, as equal means do not keep classes apart (the
            paper's is pretrained, and frozen up to its last stage: ``ResNet(freeze="layer3")``).
        classifier_period: Rounds T_C between averages of the classifiers; ``None`` never averages them, and the
            sources' classifiers vote at the end (appendix D.B; ties go to the larger mean probability).
        weighting: Weights of clients in a mean; the paper's are uniform.
        kwargs: See `FederatedModule`.

    Notes:
        A message has 2N numbers and an average of aligners 2N m, whatever the size of batches and data.

        With a privacy backend the target learns the sources' mean message, W and C; each source the target's message
        (in plaintext), W and C. A mean of random features over few samples reveals much of them. A mean over two
        clients reveals to each the other's: W of a single present source to the target, and the target's to it. Rounds
        with fewer sources than the backend can hide pass without their message.
    """

    replicas: Replicas[AlignedReplica]
    requires: ClassVar[Requires] = Requires(
        unlabelled_target=True,
        ignores_target_labels=True,
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
            refuse("train_extractor", "'none' or 'all' for an extractor without normalisation layers", train_extractor)
        if classifier_period is not None:
            way_out = "null: the sources vote at the end"
            check_count("classifier_period (T_C)", classifier_period, 1, "round", way_out)
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

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Exchange messages in the first step of a round; return each client's loss."""
        features = {
            client.name: self.replicas[client].random_features(samples[0])
            for client, samples in self.run.in_streams(batch)
        }
        if self.federation.batch_idx == 0:  # for all steps of the round
            self.exchange_means({name: own.mean(dim=0) for name, own in features.items()})
        losses = {
            client.name: self.aligned_loss(client, features[client.name], samples)
            for client, samples in self.run.in_streams(batch, "classify")
        }
        return {name: loss for name, loss in losses.items() if loss is not None}

    def exchange_means(self, means: Mapping[str, Tensor]) -> None:
        """Send sources the target's mean feature (2N,), and the target the mean over present sources."""
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
        """Return L_C + lambda L_MMD of a source, L_MMD of the target, from random features (b, 2N) of its batch.

        L_MMD is left out where no message was received.
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
        """Drop gradients of what is not trained; an optimiser skips parameters without one."""
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
        """Let clients that were absent fetch the warm-up's result; if they return after the end, W and classifier."""
        run.weights.finish_warmup()
        for channel in ("aligner", "classifier") if run.federation.roster.returned else ():
            if channel in run.federation.channels:
                run.weights.catch_up(channel)

    def on_round_end(self, run: Run) -> None:
        """Average W over present sources and the target (line 3), and C over present sources every T_C rounds (4-6)."""
        if self._num_sources("aligner"):
            run.weights.average_("aligner", among=self.clients, part="aligner")
        if self.constraint == "orthogonal":
            self.orthogonalise_()
        due = self.classifier_period is not None and (run.clock.round_idx + 1) % self.classifier_period == 0
        if due and self._num_sources("classifier"):
            run.weights.average_("classifier", among=self.sources, part="classifier")
            if self.federation.senders("classifier"):
                self._classified_in = run.clock.round_idx

    def on_run_end(self, run: Run) -> None:
        """Send the target its final classifier: the sources' mean, or all of theirs to vote."""
        votes, returned = self.classifier_period is None, run.federation.roster.returned
        if returned:  # who may not know when it was
            self._classified_in = max(run.federation.transport.all_gather(self._classified_in, "the last classifier"))
        if self._classified_in == run.clock.last_round and not (votes and returned):
            return
        self._classified_in = run.clock.last_round
        if votes:
            with torch.no_grad():
                for name, messages in send_classifiers(run, "vote", absent_too=True).items():
                    cast(VotingReplica, self.replicas[name]).count_(messages)
        else:
            run.weights.average_("classifier", self.sources, [self.target], "classifier", absent_too=True)

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
        """Return copies of extractor and classifier, frequencies from the seed, and W with orthogonal columns."""
        extractor, classifier = copied(self.originals)
        width = feature_width(extractor)
        sample = partial(sample_frequencies, self.num_frequencies, width, self.bandwidth, self.kernel)
        aligner = nn.Linear(2 * self.num_frequencies, self.num_components, bias=False)
        first = torch.empty_like(aligner.weight, dtype=torch.float32)  # QR has no half precision
        with torch.no_grad():
            aligner.weight.copy_(nn.init.orthogonal_(first, gain=self._gain))
        return AlignedReplica(extractor, sample, self.federation.seed, aligner, classifier, self.unit_norm)

    def build_target(self, replica: AlignedReplica) -> AlignedReplica:
        """Return the target's replica, with room for all classifiers if they vote."""
        voters = [client.name for client in self.sources]
        return VotingReplica(replica, voters) if self.classifier_period is None else replica

    def note_classifier_(self, received: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Note that a target without votes has received a classifier."""
        for name, state in received.items():
            if any(entry.startswith("classifier.") for entry in state) and not self.replicas[name].votes:
                self.replicas[name].informed.fill_(True)

    def on_fit_start(self) -> None:
        """Note that no classifier was sent in this run yet."""
        super().on_fit_start()
        self._classified_in = self.federation.round_idx - 1

    def on_run_start(self, run: Run) -> None:
        """Forget the votes of an earlier run (a finished run that is resumed keeps them), and warn of short runs."""
        if self.warmup_rounds:
            run.clock.warn_of_few_steps("with 50, and standardised inputs, it ended up to 8 points below SourceOnly")
        for client in self.federation.local_clients:
            if self.replicas[client].votes:
                self.replicas[client].informed.fill_(False)

    def can_predict(self, client: Client) -> bool:
        """Return whether it is a source, or a target that has a classifier."""
        return not client.is_target or bool(self.replicas[client].informed)

    def on_test_start(self) -> None:
        """Warn if a checkpoint was made before the target had a classifier."""
        if self.federation.is_local(self.target) and not self.can_predict(self.target):
            warnings.warn(
                f"target {self.target.name!r} has no classifier yet: these weights are from before the first average "
                "of the classifiers, or before the vote at the end of the run; its predictions mean nothing",
                stacklevel=2,
            )

    on_predict_start = on_test_start

    def _num_sources(self, channel: str) -> int:
        return sum(not client.is_target for client in self.federation.present(channel))
