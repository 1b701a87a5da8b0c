"""What Ditto and APFL share: a model of its own at every client, beside the averaged one."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedlit.federation import Client
from fedlit.methods.fedavg import FedAvg
from fedlit.models import Replica
from fedlit.run.options import ReplicaSpec, Requires
from fedlit.run.replicas import Replicas
from fedlit.run.run import Run


class PersonalReplica(Replica):
    """A client's copy of the averaged model w, and its personal model v, a copy at first, by which it is evaluated."""

    personalised: Tensor

    def __init__(self, extractor: nn.Module, classifier: nn.Module) -> None:
        super().__init__(extractor, classifier)
        self.personal = Replica(*copy.deepcopy((extractor, classifier)))
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
        """Two parameter groups per local client, of w and of v.

        After a warm-up only w has a momentum, and torch's fused SGD takes no such mixture in one group.
        """
        groups: list[dict[str, Any]] = []
        for client in self.federation.local_clients:
            personal = list(self.replicas[client].personal.parameters())
            own = {id(param) for param in personal}
            shared = [param for param in self.replicas[client].parameters() if id(param) not in own]
            for params in (shared, personal):
                trained = [param for param in params if param.requires_grad]
                groups.append({"params": trained, "client": client.name})
        return groups
