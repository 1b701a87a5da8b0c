"""Ditto and APFL: a personal model at every client, beside the averaged one.

Ditto: Li, Hu, Beirami and Smith, ICML 2021, Algorithm 1. Differences from the paper: w and v take their steps on the
same batches, with the same optimiser; the paper has them apart, with a number of steps for each. v starts as the first
w that its client trains, which after a warm-up is its result.

APFL: Deng, Kamani and Mahdavi, arXiv 2003.13461, 2020, Algorithm 1. Differences from the paper: alpha is fixed and the
same for all, as in Jiang et al. (ICLR 2024). BatchNorm's running statistics are not mixed: those of the mixed model's
activations are kept.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedlit import ReplicaSpec, Requires, Run
from fedlit.checks import check_at_least, check_between
from fedlit.federation import Client
from fedlit.methods.fedavg import FedAvg
from fedlit.methods.shared import divided
from fedlit.models import Anchor, Replica
from fedlit.models.copies import copied
from fedlit.run.replicas import Replicas


class PersonalReplica(Replica):
    """A client's copy of the averaged model w, and its personal model v, a copy at first, by which it is evaluated."""

    personalised: Tensor

    def __init__(self, extractor: nn.Module, classifier: nn.Module) -> None:
        super().__init__(extractor, classifier)
        self.personal = Replica(*copied((extractor, classifier)))
        # Whether v has started; in a warm-up there is w alone.
        self.register_buffer("personalised", torch.tensor(False))

    def shared(self, x: Tensor) -> Tensor:
        """Logits of w."""
        return super().forward(x)

    def own(self, x: Tensor) -> Tensor:
        """Logits of the model that the client is evaluated by."""
        logits: Tensor = self.personal(x)
        return logits

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the personal model; before it has started, of w."""
        return self.own(x) if self.personalised else self.shared(x)

    @torch.no_grad()
    def personalise_(self) -> None:
        """Start v from w."""
        for part in ("extractor", "classifier"):
            # a copy, as what a module gives by get_extra_state may be its own object
            self.personal.get_submodule(part).load_state_dict(copy.deepcopy(self.get_submodule(part).state_dict()))
        self.personalised.fill_(True)


class Personalised(FedAvg, ABC):
    """FedAvg of w over all clients with labels, the target among them; every client also trains a v that stays with it.

    A client's v starts as the w of the first round in which it is present. Both take a step on the same batches, and
    are clipped each by itself, so that w is what `FedAvg` makes it. A client's training loss is the sum of both.
    """

    replicas: Replicas[PersonalReplica]
    requires: ClassVar[Requires] = Requires(target_labels=True)
    replica_spec: ClassVar[ReplicaSpec] = ReplicaSpec(local=("personal",), several_models=True)

    @abstractmethod
    def build_replica(self) -> PersonalReplica:
        """What one client holds."""

    def on_run_start(self, run: Run) -> None:
        """No v has started while a run warms up, even if one was trained by a run before it."""
        if self.run.clock.warming_up:
            for client in self.federation.local_clients:
                self.replicas[client].personalised.fill_(False)

    def on_round_start(self, run: Run) -> None:
        """Fetch the current w, and start v where a client takes part for the first time."""
        super().on_round_start(run)
        for client in self.federation.present():
            if self.federation.is_local(client) and not self.replicas[client].personalised:
                self.replicas[client].personalise_()

    def loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """The task's loss of w plus that of the personal model."""
        shared = self.task.loss(client, self.replicas[client].shared(batch[0]), batch[1])
        return shared + super().loss(client, batch)

    def client_param_groups(self) -> list[dict[str, Any]]:
        """Two parameter groups per local client, of w and of v."""
        # after a warm-up only w has a momentum, and torch's fused SGD takes no such mixture in one group
        return divided(super().client_param_groups(), lambda client: self.replicas[client].personal)


class MixedReplica(PersonalReplica):
    """A client's copy of the averaged model w and its local model v, evaluated as alpha v + (1 - alpha) w.

    v starts as a copy of w; alpha is in [0, 1].
    """

    def __init__(self, extractor: nn.Module, classifier: nn.Module, alpha: float) -> None:
        super().__init__(extractor, classifier)
        self.alpha = alpha

    def own(self, x: Tensor) -> Tensor:
        """Logits of the mixed model; their gradient reaches v alone."""
        mixed = {
            name: torch.lerp(self.get_parameter(name).detach(), param, self.alpha)
            for name, param in self.personal.named_parameters()
        }
        logits: Tensor = functional_call(self.personal, mixed, (x,))
        return logits


class APFL(Personalised):
    """FedAvg of w, and at each client a local v_k that is mixed with it (Deng et al., arXiv 2003.13461, Algorithm 1).

    w takes steps on its own loss F_k(w), v_k along alpha grad F_k(alpha v_k + (1 - alpha) w). Each client is evaluated
    by the mixture; v_k never leaves it.

    Args:
        alpha: Share of the local model in [0, 1]: 0 is FedAvg (with BatchNorm statistics of the client's own), 1 is
            local training.

    Raises:
        RosterError: When training starts, if the target has no labels.
    """

    def __init__(self, *args: Any, alpha: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_between("alpha", alpha, 0, 1, "it is the share of the local model")
        self.alpha = alpha

    def build_replica(self) -> PersonalReplica:
        """Both models, and how they are mixed."""
        return MixedReplica(*copied(self.originals), self.alpha)


class AnchoredPersonalReplica(PersonalReplica):
    """Both models of a client, and the w of the round's start that v is held near."""

    def __init__(self, extractor: nn.Module, classifier: nn.Module) -> None:
        super().__init__(extractor, classifier)
        self.anchor = Anchor(self.personal.parameters())  # buffers, so that a checkpoint within a round has them


class Ditto(Personalised):
    """FedAvg of w, and at each client a local model v_k that is held near it (Li et al., ICML 2021, Algorithm 1).

    v_k minimises F_k(v) + (lam / 2) |v - w|^2, where w is the averaged model of the round's start. Each client is
    evaluated by its v_k, which never leaves it.

    Args:
        lam: Strength lambda of the pull towards w, at least 0: with 0 the v_k are trained locally, with a large one
            they are w. Steps of SGD need learning rate * lam < 2. Jiang et al. (ICLR 2024) take 1.

    Raises:
        RosterError: When training starts, if the target has no labels.
    """

    replicas: Replicas[AnchoredPersonalReplica]
    replica_spec: ClassVar[ReplicaSpec] = replace(Personalised.replica_spec, local=("personal", "anchor."))

    def __init__(self, *args: Any, lam: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_at_least("lam (lambda)", lam, 0, way_out="it weighs the pull towards the averaged model")
        self.lam = lam

    def build_replica(self) -> AnchoredPersonalReplica:
        """Both models, and the anchor."""
        return AnchoredPersonalReplica(*copied(self.originals))

    def on_round_start(self, run: Run) -> None:
        """Fetch the current w, and remember it."""
        super().on_round_start(run)
        for client in self.federation.local_clients:
            replica = self.replicas[client]
            network = [*replica.extractor.parameters(), *replica.classifier.parameters()]
            replica.anchor.move_(dict.fromkeys(network))  # tied ones once

    def loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """Cross-entropies of w and v, plus the pull of v towards the w of the round's start."""
        replica = self.replicas[client]
        distance = replica.anchor.squared_distance(replica.personal.parameters())
        return super().loss(client, batch) + 0.5 * self.lam * distance
