"""What FedDANN and FedWDGRL share: a network D that compares domains, whose gradient is a sum over clients.

Extractors learn to make domains alike to D, which all clients train together and hold alike. D's loss is a sum of
parts, each of one client's features, so its gradient is one secure sum: D learns from pooled data that nobody pools.
"""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fedlit.checks import check_at_least, check_one_of
from fedlit.federation import Channel, Client, Summed
from fedlit.methods.fedavg import FedAvg
from fedlit.models import AdversarialReplica, feature_width, make_discriminator
from fedlit.module import Batch
from fedlit.run.options import Requires
from fedlit.run.replicas import Replicas
from fedlit.run.run import Run


class DomainAdversarial(FedAvg, ABC):
    """FedAvg, and the D that clients train in local steps against their extractors; a subclass defines the losses.

    Args:
        hidden: Units of D's hidden layer.
        sync: ``"step"`` sums gradients of D in local steps; ``"round"`` lets every client train a D of its own, which
            are averaged at the round's end. Each of those sees one domain, and their mean distinguishes little.
        average: Whose extractors and classifiers are averaged: ``"all"``, or those with labels (``"sources"``), so that
            the target's extractor teaches D alone, and without an adversary it is `FedAvg`.
        kwargs: See `FederatedModule`.

    Raises:
        ValueError: If an argument is out of range.
    """

    replicas: Replicas[AdversarialReplica]
    requires: ClassVar[Requires] = Requires(unlabelled_target=True, matches_distributions=True)

    gradient_channel: ClassVar[str]
    """Over which D's gradients are summed."""

    model_channel: ClassVar[str]
    """Over which D itself is averaged."""

    def __init__(
        self,
        *args: Any,
        hidden: int,
        sync: Literal["step", "round"] = "step",
        average: Literal["all", "sources"] = "all",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        check_at_least("hidden", hidden, 1, "unit")
        check_one_of("sync", sync, ("step", "round"))
        check_one_of("average", average, ("all", "sources"))
        self.hidden = hidden
        self.sync = sync
        self.average = average

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The weights, and what D is made of."""
        gradient = Summed(
            self.gradient_channel, "gradient by D's weights", how_often="every local step", too_few="skip"
        )
        model = Summed(self.model_channel, "D's weights", too_few="skip")
        return (*super().channels, *((gradient,) if self.sync == "step" else ()), model)

    def build_replica(self) -> AdversarialReplica:
        """Extractor, classifier and D."""
        extractor, classifier = copy.deepcopy(self.originals)
        return AdversarialReplica(extractor, classifier, make_discriminator(self.judged_width(), self.hidden))

    def judged_width(self) -> int:
        """Width of what D is shown; default: of the features."""
        return feature_width(self.originals[0])

    def client_param_groups(self) -> list[dict[str, Any]]:
        """A parameter group per local client, of extractor and classifier; a subclass defines D's steps."""
        groups: list[dict[str, Any]] = []
        for client in self.federation.local_clients:
            replica = self.replicas[client]
            network = [*replica.extractor.parameters(), *replica.classifier.parameters()]
            trained = [param for param in dict.fromkeys(network) if param.requires_grad]  # tied ones once
            groups.append({"params": trained, "client": client.name})
        return groups

    # ---------------------------------------------------------------- a local step

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Each client's loss on its labels, and against D."""
        losses, features, outputs = {}, {}, {}
        for client, samples in self.run.in_streams(batch):
            replica, name = self.replicas[client], client.name
            own = replica.extractor(samples[0])
            features[name] = own if own.requires_grad else own.clone().requires_grad_()  # of a frozen extractor
            outputs[name] = replica.classifier(features[name])
            nothing = 0 * outputs[name].sum()
            losses[name] = self.task.loss(client, outputs[name], samples[1]) if client.labelled else nothing
        opponents = self.opponents()
        if opponents:
            for name, loss in self.adversarial_losses(opponents, features, outputs).items():
                losses[name] = losses[name] + loss
        return losses

    @abstractmethod
    def adversarial_losses(
        self, opponents: Sequence[Client], features: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """What is added to the losses of those local clients that are opponents, by name; all processes call it.

        Features and outputs are of local clients' batches, of shapes (B, width) and (B, num_classes).
        """

    def opponents(self, step: int | None = None) -> list[Client]:
        """Whose domains D compares in a step of the round; nobody if a side is missing, or too few to hide.

        Without ``step`` it is the one under way.
        """
        first = self.gradient_channel if self.sync == "step" else self.model_channel
        able = self.run.in_step(first, self.model_channel, step=step)
        summed = self.federation.senders(first, able)
        met = [client for client in able if client.name in summed]
        return met if self.target in met and len(met) > 1 else []

    def pooled(self, gradients: Mapping[str, Tensor], opponents: Sequence[Client]) -> dict[str, Tensor]:
        """By what local clients change D: the sum of their parts' gradients in their shares, or each by its own.

        Gradients are by local client, of the client's part as it is by all of D's weights, shape (number of weights,).
        Own ones are averaged in the same shares at the round's end.
        """
        if self.sync == "round":
            return {**gradients}
        shares = domain_shares(opponents)
        parts = {name: {"gradient": shares[name] * own} for name, own in gradients.items()}
        total = self.federation.sum(self.gradient_channel, parts, among=opponents, to=opponents)
        return {name: message["gradient"] for name, message in total.items()}

    # ---------------------------------------------------------------- rounds

    def on_round_start(self, run: Run) -> None:
        """Clients that were away fetch the current networks."""
        super().on_round_start(run)
        self.run.weights.catch_up(self.model_channel)

    def on_round_end(self, run: Run) -> None:
        """Average extractors and classifiers; and D's of those who met in the last step in which anybody did.

        With ``sync="step"`` these are equal, and their mean is for the others.
        """
        among = [client for client in self.clients if client.labelled or self.average == "all"]
        self.run.weights.average_("weights", among, part=("extractor", "classifier"))
        federation = self.federation
        met = next(filter(None, map(self.opponents, reversed(range(federation.batch_idx)))), [])
        sent = {
            client.name: {k: t for k, t in self.run.weights.of(client.name).items() if k.startswith("discriminator.")}
            for client in met
            if federation.is_local(client)
        }
        if met:
            shares, around = domain_shares(met), self.run.weights.received
            self.run.weights.load_(federation.mean(self.model_channel, sent, met, weights=shares, around=around))

    def on_fit_start(self) -> None:
        """Warn where a sum of two hides nothing from the two, and of discriminators of one domain each."""
        super().on_fit_start()
        if self.sync == "round":
            rank_zero_warn(
                f"{type(self).__name__} with sync='round' averages discriminators that each client trains on its one "
                "domain. Such a mean distinguishes domains badly, and may take the target's features anywhere: its "
                "target has ended up to 18 points below SourceOnly, with standardised inputs. Take sync='step' "
                "(FedDANN), whose discriminator is that of all domains' samples, or compare with SourceOnly"
            )
        if self.sync == "step" and len(self.sources) == 1 and self.federation.channels[self.gradient_channel].hides:
            warnings.warn(
                f"gradients over {self.gradient_channel!r} are summed over {self.sources[0].name!r} and the target "
                "alone: each learns the other's by subtracting its own, and they are hidden from the server only",
                stacklevel=2,
            )


def domain_shares(opponents: Sequence[Client]) -> dict[str, float]:
    """Weights of clients' parts in D's loss: 1/(2K) of each of K sources, 1/2 of the target."""
    return {client.name: 0.5 if client.is_target else 0.5 / (len(opponents) - 1) for client in opponents}


def check_weight(name: str, value: float) -> None:
    """Raise a `ValueError` unless a weight of a loss is at least 0 and finite."""
    check_at_least(name, value, 0, way_out="it weighs a loss")
