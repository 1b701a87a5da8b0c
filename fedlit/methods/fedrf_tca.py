"""FedRF-TCA (Feng, Wang, Li, Yang, Lou, Mi, Qiu and Liao, arXiv 2311.04686), Algorithms 2 to 5.

Differences from the paper, where it leaves something open or does not work as printed:

- For several present sources, the target's loss (11) uses the mean of their messages. Their sum, as in the published
  code, is smallest where the means differ (card: |S_t| mean_S = mean_T).
- In a round in which nobody is heard, the target has no loss and nothing is averaged; the paper leaves it undefined.
- At the end of a run the target gets the sources' latest classifiers, whether or not T_C divides the number of rounds.
- With several local steps in a round, messages are exchanged in the first of them and kept for the others.
- ``unit_norm`` (published code; not in the paper), ``unbiased`` and ``constraint`` are options; see their defaults.

Differences from the published code: every client has an extractor of its own and its MMD gradient reaches it (there
one shared module is trained by all, and messages lose their graph before the loss); the draw of S_t can be everybody;
nothing is chosen by target labels.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlit.federation import Client, Participation, UniformSubset
from fedlit.functional import Kernel, alignment_loss, sample_frequencies
from fedlit.models import AlignedReplica, VotingReplica, feature_width
from fedlit.module import NORMS, Batch, FederatedModule

Message = dict[str, Tensor]


class FedRFTCA(FederatedModule):
    """Align clients through the means of their random features, averaging little and seldom.

    Every client has its own extractor, an aligner W that is averaged in every round, and a classifier that the sources
    average every T_C rounds and the target receives. In each round sources and target tell each other the mean random
    feature of one mini-batch, and lower the distance between the two after alignment.

    Absent sources (``participation``; here a uniform subset by default) go on training on their labels alone.

    Sends: "features", 2N numbers from each present source (of which the target learns the mean only) and from the
    target to each of them, whatever the batch or data size; "aligner", 2N m numbers up and down for each present
    source and the target, every round; "classifier", from present sources to them and the target, every T_C rounds;
    "vote", each source's classifier to the target, once at the end, if there is no T_C. The target learns the sources'
    mean message, sources learn the target's message; a mean of random features over few samples reveals much of
    them.

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
        unbiased: Remedy for the constant bias of mini-batch means: see `alignment_loss`.
        constraint: Remedy for W tending to 0, which alone makes the alignment perfect: ``"relative"`` divides it by
            the spread of the aligned features, ``"orthonormal"`` makes W's columns orthonormal after every round,
            ``"none"`` is the paper's loss, held up by the classification loss alone.
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
    """

    uses_unlabelled_target: ClassVar[bool] = True
    default_participation: ClassVar[Participation] = UniformSubset()
    trains_when_absent: ClassVar[bool] = True

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
        constraint: Literal["none", "relative", "orthonormal"] = "relative",
        train_extractor: Literal["all", "norm", "none"] = "all",
        classifier_period: int | None = 50,
        weighting: Literal["samples", "uniform"] = "uniform",
        **kwargs: Any,
    ) -> None:
        if not 1 <= num_components <= 2 * num_frequencies:
            raise ValueError(
                f"num_components (m) must be between 1 and 2 * num_frequencies (2N = {2 * num_frequencies}), got "
                f"{num_components}"
            )
        if not mmd_weight >= 0:
            raise ValueError(f"mmd_weight (lambda) must be at least 0, got {mmd_weight}")
        if constraint not in ("none", "relative", "orthonormal"):
            raise ValueError(f"constraint must be 'none', 'relative' or 'orthonormal', got {constraint!r}")
        if train_extractor not in ("all", "norm", "none"):
            raise ValueError(f"train_extractor must be 'all', 'norm' or 'none', got {train_extractor!r}")
        if classifier_period is not None and classifier_period < 1:
            raise ValueError(
                f"classifier_period (T_C) must be at least 1 round, or null to let the sources vote at the end, got "
                f"{classifier_period}"
            )
        sample_frequencies(1, 1, bandwidth, kernel)  # refuses a bad bandwidth or kernel now rather than at the start
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
        self._classified_in = -1  # round in which the target last got a classifier

    # ---------------------------------------------------------------- Algorithms 2 and 3: local training

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """Everyone: the target on its unlabelled samples."""
        return self.clients

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Exchange messages in the first step of a round; then each client's loss."""
        features = {
            client.name: self.replica(client).random_features(samples[0]) for client, samples in self.in_streams(batch)
        }
        if self.federation.batch_idx == 0:
            self.exchange_means({name: own.mean(dim=0) for name, own in features.items()})
        losses = {}
        for client, samples in self.in_streams(batch, "classify"):
            own = self.aligned_loss(client, features[client.name], samples)
            if own is not None:
                losses[client.name] = own
        return losses

    def exchange_means(self, means: Message) -> None:
        """Sources learn the target's mean feature; the target learns only the mean over present sources.

        Args:
            means: Of local clients, each of shape (2N,).
        """
        federation = self.federation
        target = self.target.name
        up = federation.mean(
            "features",
            {name: {"mean": mean} for name, mean in means.items() if name != target},
            among=self.sources,
            to=[self.target],
            weights=federation.weights if self.weighting == "samples" else None,
            too_few="skip",
        )
        down = federation.exchange(
            "features", {target: {"mean": means[target]}} if target in means else {}, to=self.sources
        )
        received = {name: message["mean"] for name, message in up.items()}
        received.update({name: messages[target]["mean"] for name, messages in down.items() if target in messages})
        for client in federation.local_clients:
            replica = self.replica(client)
            replica.heard.fill_(client.name in received)
            if client.name in received:
                replica.received.copy_(received[client.name])

    def aligned_loss(self, client: Client, features: Tensor, samples: Sequence[Any]) -> Tensor | None:
        """L_C + lambda L_MMD of a source, L_MMD of the target; without L_MMD where nothing was heard.

        Args:
            client: Whose loss.
            features: Its random features, shape (b, 2N).
            samples: Its batch.
        """
        replica = self.replica(client)
        aligned = replica.aligner(features)
        alignment = None
        if replica.heard:
            other = replica.aligner(replica.received)
            relative = self.constraint == "relative"
            alignment = alignment_loss(aligned, other, unbiased=self.unbiased, relative=relative)
        if client.is_target:
            return alignment
        loss = F.cross_entropy(replica.classifier(aligned), samples[1])
        return loss if alignment is None else loss + self.mmd_weight * alignment

    def on_after_backward(self) -> None:
        """Forget the gradients of what is not to be trained; an optimiser passes over parameters without one."""
        super().on_after_backward()
        if self.warming_up or self.train_extractor == "all":
            return
        for client in self.federation.local_clients:
            for module in self.replica(client).extractor.modules():
                if self.train_extractor == "none" or not isinstance(module, NORMS):
                    for param in module.parameters(recurse=False):
                        param.grad = None

    # ---------------------------------------------------------------- Algorithm 4: aggregation

    def on_round_start(self, round_idx: int) -> None:
        """A client that was away at the end of a warm-up fetches its result."""
        if self.warmup_rounds:
            self.load_shared_(self.federation.catch_up("weights"))

    def on_round_end(self, round_idx: int) -> None:
        """Average W over present sources and the target (line 3), and C over present sources every T_C rounds (4-6)."""
        if self._sources_heard("aligner"):
            self.average_("aligner", among=self.clients, part="aligner", too_few="skip")
        if self.constraint == "orthonormal":
            self.orthonormalise_()
        due = self.classifier_period is not None and (round_idx + 1) % self.classifier_period == 0
        if due and self._sources_heard("classifier"):
            self.average_("classifier", among=self.sources, part="classifier", too_few="skip")
            self._classified_in = round_idx
        if round_idx + 1 == self._planned_rounds():
            self.close_run()

    def close_run(self) -> None:
        """Give the target a classifier for good: the sources' mean, or all of theirs to vote."""
        last = self.federation.round_idx
        if self._classified_in == last:
            return
        self._classified_in = last
        if self.classifier_period is None:
            self.vote_()
        else:
            self.average_(
                "classifier", among=self.sources, to=[self.target], part="classifier", too_few="skip", absent_too=True
            )

    @torch.no_grad()
    def vote_(self) -> None:
        """Send every source's classifier to the target."""
        federation = self.federation
        ballots = {
            client.name: dict(self.replica(client).classifier.state_dict())
            for client in self.sources
            if federation.is_local(client)
        }
        received = federation.exchange("vote", ballots, to=[self.target], absent_too=True)
        for name, messages in received.items():
            replica = self.replicas[name]
            assert isinstance(replica, VotingReplica)
            for voter, classifier in zip(replica.voters, replica.ballot, strict=True):
                classifier.load_state_dict(messages[voter])
            replica.voted.fill_(True)

    @torch.no_grad()
    def orthonormalise_(self) -> None:
        """Replace W of each local client by the nearest matrix with orthonormal columns, W (W^T W)^(-1/2)."""
        for client in self.federation.local_clients:
            weight = self.replica(client).aligner.weight  # W^T
            values, vectors = torch.linalg.eigh((weight @ weight.T).double())
            root = vectors * values.clamp(min=1e-12).rsqrt() @ vectors.T
            weight.copy_(root.to(weight.dtype) @ weight)

    # ---------------------------------------------------------------- set-up and hooks

    def build_replica(self) -> nn.Module:
        """Copies of extractor and classifier, frequencies from the seed, and W with orthogonal columns.

        W is scaled so that the length of an aligned feature is about 1.
        """
        extractor, classifier = (copy.deepcopy(network) for network in self.originals)
        width = feature_width(self.originals[0])
        frequencies = sample_frequencies(
            self.num_frequencies, width, self.bandwidth, self.kernel, seed=self.federation.seed
        )
        aligner = nn.Linear(2 * self.num_frequencies, self.num_components, bias=False)
        nn.init.orthogonal_(aligner.weight, gain=(2 * self.num_frequencies / self.num_components) ** 0.5)
        return AlignedReplica(extractor, frequencies, aligner, classifier, self.unit_norm)

    def configure_model(self) -> None:
        """Build the replicas; where classifiers vote, the target has room for all of them."""
        super().configure_model()
        name = self.target.name
        if self.classifier_period is None and name in self.replicas:
            replica = self.replica(self.target)
            if not isinstance(replica, VotingReplica):
                self.replicas[name] = VotingReplica(replica, [client.name for client in self.sources])

    def replica(self, client: Client) -> AlignedReplica:
        """What a local client holds."""
        replica = self.replicas[client.name]
        assert isinstance(replica, AlignedReplica)
        return replica

    def shared_state(self, client: str) -> dict[str, Tensor]:
        """What was received, and others' classifiers, stay."""
        state = super().shared_state(client)
        for name in [n for n in state if n in ("received", "heard", "voted") or n.startswith("ballot.")]:
            del state[name]
        return state

    def on_fit_start(self) -> None:
        """No classifier was given in this run yet."""
        super().on_fit_start()
        self._classified_in = self.federation.round_idx - 1

    def on_train_start(self) -> None:
        """Nobody has voted yet; not called where a finished run is resumed, which keeps its votes."""
        for client in self.federation.local_clients:
            replica = self.replica(client)
            if isinstance(replica, VotingReplica):
                replica.voted.fill_(False)

    def on_train_end(self) -> None:
        """Close a run that was stopped before its last round."""
        super().on_train_end()
        rounds = self.federation.round_idx
        if rounds and self._classified_in < rounds - 1:
            self.close_run()

    def _evaluate(self, batch: Batch) -> dict[str, Tensor]:
        """As the base class; before the vote the target has nothing to predict with, and is left out."""
        name = self.target.name
        if name in batch:
            replica = self.replicas[name]
            if isinstance(replica, VotingReplica) and not replica.voted:
                batch = {client: samples for client, samples in batch.items() if client != name}
        return super()._evaluate(batch)

    def _sources_heard(self, channel: str) -> bool:
        return any(not client.is_target for client in self.federation.present(channel))

    def _planned_rounds(self) -> int | None:
        epochs = self.trainer.max_epochs
        return None if epochs is None or self._plan is None else epochs * int(self._plan["rounds_per_epoch"])
