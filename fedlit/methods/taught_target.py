"""A target that trains on pseudo-labels: its sources' predictions at the end of the round before (KD3A, Co-MDA).

Either every source sends its model to the target (default), or the target sends its samples to the sources, once, which
answer through a secure sum.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from fedlit import FederatedModule, ReplicaSpec, Requires, Run
from fedlit.checks import check_one_of, refuse
from fedlit.federation import Channel, Client, Open
from fedlit.federation.nested import Inputs, concatenate, leaves, mapped, pieces, rebuilt
from fedlit.models import Replica
from fedlit.run.local import evaluating
from fedlit.run.replicas import Replicas

ExchangeName = Literal["models", "votes"]

STEPS = 2**20
"""Probabilities are multiples of its inverse, whose sums over up to 16 sources are exact in float32 and on the default
grid of secure sums: results do not depend on who adds them, nor on the order."""

_AT_ONCE = 512
"""Samples in a batch of a teacher model."""

_INPUTS = "inputs"
"""Prefix of tensors' paths in a message with samples."""


def _message(inputs: Inputs) -> dict[str, Tensor]:
    return {f"{_INPUTS}{path}": tensor for path, tensor in leaves(inputs).items()}


def on_grid(numbers: Tensor) -> Tensor:
    """Return numbers of absolute value up to 1 as the nearest multiples of 2^-20, float32."""
    return (numbers.float() * STEPS).round() / STEPS


class TaughtTarget(FederatedModule):
    """The target trains on its sources' predictions on its samples; a subclass defines what is made of them.

    In the first round after a warm-up the sources train alone. A round without the target, or without sources, leaves
    the pseudo-labels as they are. State of each source is kept where its model predicts: at the target (models), or at
    the source (votes).

    Args:
        exchange: ``"models"`` or ``"votes"``.
        kwargs: See `FederatedModule`.
    """

    replicas: Replicas[Replica]
    requires: ClassVar[Requires] = Requires(unlabelled_target=True, tasks=("classification",))
    replica_spec: ClassVar[ReplicaSpec] = ReplicaSpec(
        apart="extractors are averaged or copied without their classifiers"
    )

    def __init__(self, *args: Any, exchange: ExchangeName = "models", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_one_of("exchange", exchange, get_args(ExchangeName))
        if exchange == "models" and self.run.weights.averaging.local_norm:
            rule = "'votes' with local_norm=True, which keeps layers of the models at their clients"
            refuse("exchange", rule, exchange, "leave local_norm out, or take exchange='votes'")
        self.exchange = exchange
        self._shown: set[str] = set()  # sources that have the target's samples
        self._samples: dict[str, dict[str, Tensor]] = {}  # their tensors by path, by local source
        self._kept: dict[str, dict[str, Tensor]] = {}  # from round to round, by client
        self._pseudo_labels: dict[str, Tensor] = {}  # one row for each of the target's samples

    @property
    def teaching(self) -> Channel:
        """The open channel of models or samples."""
        if self.exchange == "models":
            return Open("teacher", "the whole model of each source", "sources", "target")
        contents = "the inputs of all training samples of the target (exchange='models' sends none)"
        return Open("samples", contents, "target", "sources", "once", samples=True)

    # ---------------------------------------------------------------- local steps

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """Return the sources, and from the second round after a warm-up the target."""
        return self.clients if round_idx > self.warmup_rounds else self.sources

    def pseudo_labels(self) -> dict[str, Tensor]:
        """Return the pseudo-labels of the target's batch in this local step, by name; empty at first."""
        rows = self.run.samples.positions(self.target)
        return {name: table[rows].to(self.device) for name, table in self._pseudo_labels.items()}

    def labelled_loss(self, network: Callable[[Tensor], Tensor], batch: Sequence[Any]) -> Tensor | float:
        """Return the task's loss of a network on the target's labelled samples of a batch; 0 without labels."""
        return self.task.loss(self.target, network(batch[0]), batch[1]) if self.target.labelled else 0.0

    def share_over(self) -> float:
        """Return the run's `progress`; 0 if it has no planned end."""
        return 0.0 if self.run.clock.planned_rounds() is None else self.run.clock.progress

    # ---------------------------------------------------------------- rounds

    def on_round_start(self, run: Run) -> None:
        """Let clients that were absent at the end of a warm-up fetch its result."""
        run.weights.finish_warmup()

    def teachers(self) -> list[str]:
        """Return the sources that participate on all channels in this round, if the target does."""
        each = [{client.name for client in self.federation.present(channel.name)} for channel in self.channels]
        participants = set.intersection(*each)
        return [client.name for client in self.sources if {client.name, self.target.name} <= participants]

    def ask_(self, teachers: Sequence[str]) -> dict[str, Tensor]:
        """Return probabilities for the target's training samples by source: all at the target, or of local sources.

        They are on the grid, of shape (n_T, C), float32, on the CPU.
        """
        federation, target = self.federation, self.target.name
        if self.exchange == "models":
            sent = {name: self.run.weights.of(name) for name in teachers if federation.is_local(name)}
            received = federation.exchange("teacher", sent, to=[self.target], around=self.run.weights.received)
            return {
                name: self.answers(self.teacher(state), self.run.samples.inputs(self.target))
                for name, state in received.get(target, {}).items()
            }
        late = [name for name in teachers if name not in self._shown]  # samples go to a source once
        if late:
            own = [*self.run.samples.inputs(self.target)] if federation.is_local(target) else []
            message = {target: _message(concatenate([mapped(Tensor.cpu, inputs) for inputs in own]))} if own else {}
            for name, messages in federation.exchange("samples", message, to=late).items():
                if target in messages:
                    self._samples[name] = {path: tensor.cpu() for path, tensor in messages[target].items()}
            self._shown.update(late)
        local = [client for client in self.sources if client.name in teachers and client.name in self._samples]
        return {client.name: self.answers(self.replicas[client], self._shown_to(client)) for client in local}

    def _shown_to(self, source: Client) -> Iterator[Inputs]:
        """Yield the target's samples at a local source, in batches, structured as the source's inputs."""
        tensors = {path.removeprefix(_INPUTS): tensor for path, tensor in self._samples[source.name].items()}
        alone = tensors.get("")
        yield from pieces(rebuilt(self.run.samples.first(source), tensors) if alone is None else alone, _AT_ONCE)

    def teacher(self, state: Mapping[str, Tensor]) -> Replica:
        """Return a source's network from its message; frozen weights are the target's."""
        own = self.replicas[self.target]
        network = Replica(*copy.deepcopy((own.extractor, own.classifier)))
        network.load_state_dict(state, strict=False)
        return network

    def answers(self, network: nn.Module, batches: Iterable[Inputs]) -> Tensor:
        """Return a network's probabilities in evaluation mode, on the grid."""
        with evaluating(network), self.trainer.precision_plugin.forward_context():
            moved = (mapped(lambda tensor: tensor.to(self.device), inputs) for inputs in batches)
            return torch.cat([on_grid(network(inputs).softmax(dim=1)).cpu() for inputs in moved])

    def add_(
        self, channel: str, messages: Mapping[str, Mapping[str, Tensor]], teachers: Collection[str]
    ) -> dict[str, dict[str, Tensor]]:
        """Return the sum of sources' messages by the local clients that learn it; empty if too few for a secure sum.

        Votes go through a secure sum; with models the target adds them itself.
        """
        if self.exchange == "votes":
            received = self.federation.sum(channel, messages, among=teachers)
            return {name: {key: tensor.cpu() for key, tensor in total.items()} for name, total in received.items()}
        total: dict[str, Tensor] = {}
        for name in (name for name in teachers if name in messages):
            total = {key: total[key] + tensor if total else tensor for key, tensor in messages[name].items()}
        return {self.target.name: total} if total else {}

    def contributors(self, channel: str, teachers: Collection[str]) -> list[str]:
        """Return the sources whose messages `add_` sums over a channel."""
        return self.federation.senders(channel, teachers) if self.exchange == "votes" else [*teachers]

    def kept(self, client: str) -> dict[str, Tensor]:
        """Return the state that is kept of a client from round to round, to read and to write."""
        return self._kept.setdefault(client, {})

    # ---------------------------------------------------------------- returns and checkpoints

    def public_state(self) -> dict[str, Any]:
        """Return the names of sources that have the target's samples."""
        return {"shown": sorted(self._shown)}

    def on_return(self, public: Mapping[str, Any], clients: Collection[str]) -> None:
        """Send the samples again to sources that return, and to all if the target does."""
        self._shown = set() if self.target.name in clients else {*public["shown"]} - {*clients}

    def client_state(self, client: str) -> dict[str, Any]:
        """Return what is kept of a client, the target's samples at a source, and the target's pseudo-labels."""
        about = [client] if self.exchange == "votes" else []
        if self.exchange == "models" and client == self.target.name:
            about = [each.name for each in self.clients]
        state: dict[str, Any] = {"kept": {name: self._kept[name] for name in about if name in self._kept}}
        state |= {"samples": self._samples[client]} if client in self._samples else {}
        return state | ({"lessons": self._pseudo_labels} if client == self.target.name else {})

    def load_state(self, clients: Mapping[str, Mapping[str, Any]], public: Mapping[str, Any], resumes: bool) -> None:
        """Restore `client_state` of local clients and `public_state`."""
        self._shown = set(public.get("shown", ()))
        for name, state in clients.items():
            self._kept.update(state.get("kept", {}))
            if "samples" in state:
                self._samples[name] = state["samples"]
            if name == self.target.name:
                self._pseudo_labels = state.get("lessons", {})
