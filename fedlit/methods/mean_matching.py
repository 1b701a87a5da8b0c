"""Clients that lower a distance between means over their samples in each local step: FedDAN's and FedCORAL's."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedlit import FederatedModule, ReplicaSpec, Requires, Run
from fedlit.checks import check, check_at_least, check_one_of
from fedlit.federation import Channel, Client, DivergedError, Open, Summed
from fedlit.functional import mean_pair_distance
from fedlit.methods.shared import check_moves_features, exchange_means, sources_in_step, sum_difference
from fedlit.models import MatchingReplica, feature_width
from fedlit.models.copies import check_tied, copied
from fedlit.models.matching import STAYS_LOCAL
from fedlit.module import Batch
from fedlit.run.replicas import Replicas


class MomentMatching(FederatedModule):
    r"""Sources lower their task's loss and lambda L, the target lambda L: a squared distance of means over samples.

    .. math:: L = \Big|\frac{1}{K}\sum_k m_k - m_T\Big|^2 \;\text{(pooled)}, \qquad
              L = \frac{1}{K}\sum_k |m_k - m_T|^2 \;\text{(pairwise)}

    A target with labels lowers its task's loss on these, too. A subclass defines the means.

    Args:
        mmd_weight: Weight lambda of the distance, at least 0. It has no effect at a target without labels under an
            optimiser whose steps do not depend on the gradient's length, such as Adam.
        match: ``"pooled"`` or ``"pairwise"``, which is larger by the sources' spread and pulls them together.
        every: Whether clients exchange means in each local ``"step"``, or in the first of a ``"round"``; later steps
            then use the others' received means and the client's current one.
        average: Average at the end of a round ``"all"``, over everyone, or the ``"classifier"``, over the sources, so
            that extractors stay local.
        kwargs: See `FederatedModule`.

    Raises:
        ValueError: If the extractor has nothing to train.

    Notes:
        Pooled, everyone learns the difference of the sources' mean and the target's from one sum; with a single source,
        each of the two can solve for the other's. Pairwise, the target learns the mean over sources, and every source
        the target's, in plaintext. A mean over few samples reveals much of them.
    """

    replicas: Replicas[MatchingReplica]
    requires: ClassVar[Requires] = Requires(
        unlabelled_target=True, matches_distributions=True, adaptation_weight="mmd_weight"
    )
    replica_spec: ClassVar[ReplicaSpec] = ReplicaSpec(local=STAYS_LOCAL)

    contents: ClassVar[str]
    """Contents of a message."""

    scale_argument: ClassVar[str]
    """Name of the argument that follows the features' scale if it is ``"mean"``: see `learn_scale_`."""

    fewest_samples: ClassVar[int] = 1
    """A client with fewer in its batch sits out the step."""

    def __init__(
        self,
        *args: Any,
        mmd_weight: float = 1.0,
        match: Literal["pooled", "pairwise"] = "pooled",
        every: Literal["step", "round"] = "step",
        average: Literal["all", "classifier"] = "all",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        check_at_least("mmd_weight (lambda)", mmd_weight, 0)
        check_one_of("match", match, ("pooled", "pairwise"))
        check_one_of("every", every, ("step", "round"))
        check_one_of("average", average, ("all", "classifier"))
        if average == "classifier":
            check_tied(*self.originals, "average='classifier' averages classifiers alone", self.replica_spec.local)
        check_moves_features(self)
        self.width = self.matched_width()
        self.mmd_weight = mmd_weight
        self.match = match
        self.every = every
        self.average = average
        self._warned = False

    def check_scale(self, symbol: str, value: float | str, unit: str) -> None:
        """Refuse a value of ``scale_argument`` that is neither "mean" nor a positive number."""
        holds = value == "mean" if isinstance(value, str) else 0 < value < math.inf
        check(holds, f"{self.scale_argument} ({symbol})", f"'mean', or a positive and finite {unit}", value)

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The scale of the features, if it is followed; means, as set by ``match``; and weights."""
        how_often = "every local step" if self.every == "step" else "every round"
        talk: tuple[Channel, ...] = ()
        if self.follows_scale:
            talk = (Summed("scale", "mean feature of a batch and its mean square", too_few="skip"),)
        if self.match == "pooled":
            contents = f"{self.contents}, the target's negative"
            talk += (Summed("moments", contents, how_often=how_often, too_few="skip"),)
        else:
            talk += (
                Summed("moments", self.contents, "sources", "target", how_often, too_few="skip"),
                Open("target_moments", self.contents, "target", "sources", how_often),
            )
        if self.average == "all":
            return (*talk, Summed("weights", "weights of the network"))
        return (*talk, Summed("weights", "weights of the classifier", up="sources"))

    # ---------------------------------------------------------------- a local step

    def on_run_start(self, run: Run) -> None:
        """Refuse batches of unknown sizes, by which they are weighed."""
        if run.samples.loader is not None and (self.follows_scale or self.fewest_samples > 1):
            for client in self.clients:
                run.samples.loader.check_sized(client.name)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Exchange means, and return each client's loss."""
        features = {client.name: self.features(client, samples) for client, samples in self.run.in_streams(batch)}
        means = self.matched_means(features)
        losses = {}
        for client, samples in self.run.in_streams(batch, "classify"):
            replica, name = self.replicas[client], client.name
            parts = []
            if client.labelled:
                parts.append(self.loss_of_features(client, features[name], samples))
            if name in means and replica.share:
                gap = replica.others + replica.share * means[name]
                parts.append(self.mmd_weight * self.squared_length(gap))
            if parts:
                losses[name] = torch.stack(parts).sum()
        return losses

    def features(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """Return features of a local client's batch, which are matched, shape (n, width)."""
        features: Tensor = self.replicas[client].extractor(batch[0])
        return features

    def loss_of_features(self, client: Client, features: Tensor, batch: Sequence[Any]) -> Tensor:
        """Return the loss on labels of a local client, a scalar, from the features of its batch."""
        return self.task.loss(client, self.replicas[client].classifier(features), batch[1])

    def matched_width(self) -> int:
        """Return the width of the features that are matched."""
        return feature_width(self.originals[0])

    def matched_means(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return means of local clients that are matched, with gradients, from features of shape (n, width)."""
        local = {client.name: self.replicas[client] for client in self.federation.local_clients}
        able = {name: own for name, own in features.items() if len(own) >= self.fewest_samples}
        if self.every == "round" and self.federation.batch_idx:
            return {name: self.mean(name, own) for name, own in able.items() if local[name].share}
        for replica in local.values():
            replica.share.zero_()  # unmatched, until messages of this step have arrived
        sources = self.matched_sources()
        if not sources or (self.follows_scale and not self.learn_scale_(sources, features)):
            return {}
        sources = self.large_enough(sources)
        if not sources:
            return {}
        participants = {self.target.name, *(client.name for client in sources)}
        means = {name: self.mean(name, own) for name, own in able.items() if name in participants}
        self.exchange_(sources, means)
        return means

    def matched_sources(self) -> list[Client]:
        """Return the sources that can be matched with the target in this step; none if it cannot."""
        sources = sources_in_step(self, *(channel.name for channel in self.channels if channel.name != "weights"))
        # without those that dropped out in this round; where too few are left to hide, the exchange warns
        there = self.federation.senders("moments") or [client.name for client in self.clients]
        sources = [client for client in sources if client.name in there]
        if self.match == "pooled" and self.target.name not in there:
            return []
        return sources

    def large_enough(self, sources: list[Client]) -> list[Client]:
        """Return the sources with enough samples in their batch; none if the target has too few."""
        if self.fewest_samples == 1:
            return sources
        sizes = self.run.samples.sizes_in_step([*sources, self.target])
        small = [name for name, size in sizes.items() if size < self.fewest_samples]
        if small and not self._warned:
            self._warned = True
            warnings.warn(
                f"{small} have a batch of 1 sample, which has no covariance, and are not matched in this step, nor are "
                "others later: raise batch_size, or set drop_last=True",
                stacklevel=2,
            )
        return [] if self.target.name in small else [client for client in sources if client.name not in small]

    def exchange_(self, sources: Sequence[Client], means: Mapping[str, Tensor]) -> None:
        """Exchange means; note at each local client the others' part of the distance, and its share in it."""
        target, number = self.target.name, len(sources)
        sizes = self.corrections(sources)
        sent = {name: sizes[name] * own for name, own in means.items()}
        if self.match == "pooled":
            shares = {client.name: sizes[client.name] / number for client in sources} | {target: -sizes[target]}
            gaps = sum_difference(self.federation, "moments", sent, sources)
            others = {name: gaps[name] - shares[name] * own.detach() for name, own in means.items() if name in gaps}
        else:
            roots = dict.fromkeys((client.name for client in sources), 1 / math.sqrt(number)) | {target: 1.0}
            shares = {name: -root * sizes[name] for name, root in roots.items()}
            messages = {name: {"moments": own} for name, own in sent.items()}
            received = exchange_means(self.federation, ("moments", "target_moments"), messages, sources)
            others = {name: roots[name] * message["moments"] for name, message in received.items()}
        for name, other in others.items():
            self.replicas[name].others.copy_(other)
            self.replicas[name].share.fill_(shares[name])

    # ---------------------------------------------------------------- the scale of the features

    @property
    def follows_scale(self) -> bool:
        """Whether clients exchange the scale of their features once a round."""
        return bool(getattr(self, self.scale_argument) == "mean")

    def learn_scale_(self, sources: Sequence[Client], features: Mapping[str, Tensor]) -> bool:
        """In a round's first step, set all replicas' ``reference``: the mean squared distance of all samples.

        Return whether there is one, which is equal on all processes.
        """
        federation, participants = self.federation, [*sources, self.target]
        if not federation.senders("scale", among=participants):
            return False
        if federation.batch_idx == 0:
            sizes = self.run.samples.sizes_in_step(participants)
            sent = {
                name: {"mean": own.mean(dim=0), "square": own.square().mean()}
                for name, own in ((name, own.detach().double()) for name, own in features.items() if name in sizes)
            }
            for name, moments in federation.mean("scale", sent, participants, participants, weights=sizes).items():
                distance = mean_pair_distance(moments["mean"], moments["square"], sum(sizes.values()))
                if distance == 0:
                    federation.fail(
                        DivergedError(
                            f"the features of all samples of {[*sizes]} are alike in round {federation.round_idx}, "
                            f"and have no scale: give {self.scale_argument}, a smaller mmd_weight, or more "
                            "warmup_rounds"
                        )
                    )
                self.replicas[name].reference.fill_(distance or 1.0)
        return True

    def pair_distance(self, client: str) -> float:
        """Return the last mean squared distance between all clients' features, positive."""
        return float(self.replicas[client].reference)

    # ---------------------------------------------------------------- what a subclass defines

    def num_moments(self) -> int:
        """Return how many numbers M a mean has."""
        raise NotImplementedError

    def mean(self, client: str, features: Tensor) -> Tensor:
        """Return a local client's mean, shape (M,), from features of shape (n, width)."""
        raise NotImplementedError

    def squared_length(self, gap: Tensor) -> Tensor:
        """Return the loss of a difference of means, shape (M,), a scalar."""
        return gap.square().sum()

    def corrections(self, sources: Sequence[Client]) -> dict[str, float]:
        """Return factors of the means of all participants, by name."""
        return dict.fromkeys((client.name for client in (*sources, self.target)), 1.0)

    # ---------------------------------------------------------------- rounds and set-up

    def build_replica(self) -> nn.Module:
        """Return copies of extractor and classifier, with buffers for received means."""
        return MatchingReplica(*copied(self.originals), self.num_moments())

    def on_round_start(self, run: Run) -> None:
        """Let clients that were absent fetch the current model."""
        run.weights.finish_warmup()
        run.weights.catch_up("weights")

    def on_round_end(self, run: Run) -> None:
        """Average everyone's networks, or the sources' classifiers."""
        if self.average == "all":
            run.weights.average_("weights", among=self.clients)
        else:
            run.weights.average_("weights", among=self.sources, part="classifier")
