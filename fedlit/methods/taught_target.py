"""What KD3A and Co-MDA share: at the end of a round the target learns how its sources classify all of its samples.

Models or votes: either every source sends its model to the target, which asks it (the default); or the target sends its
samples to the sources, once, which answer through a secure sum. The target trains on the answers in the round after.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from fedlit.checks import check_one_of
from fedlit.federation import Channel, Client, Open
from fedlit.federation.nested import Inputs, concatenate, leaves, mapped, pieces, rebuilt
from fedlit.models import Replica
from fedlit.module import FederatedModule
from fedlit.run.local import evaluating
from fedlit.run.options import ReplicaSpec, Requires
from fedlit.run.replicas import Replicas
from fedlit.run.run import Run

ExchangeName = Literal["models", "votes"]

STEPS = 2**20
"""Probabilities are multiples of its inverse: sums of them over up to 16 sources are exact in float32, and on the
default grid of secure sums. So answers are the same to the last bit whoever adds them, and in whatever order."""

_AT_ONCE = 512
"""Samples that a teacher is asked of in one go."""


_INPUTS = "inputs"
"""Of a message with samples: before the path of a tensor."""


def _message(inputs: Inputs) -> dict[str, Tensor]:
    return {f"{_INPUTS}{path}": tensor for path, tensor in leaves(inputs).items()}


def on_grid(numbers: Tensor) -> Tensor:
    """Numbers of absolute value up to 1, of any shape, as the nearest multiples of 2^-20, float32."""
    return (numbers.float() * STEPS).round() / STEPS


class TaughtTarget(FederatedModule):
    """The target trains on its sources' predictions on its samples; a subclass defines what is made of them.

    In the first round after a warm-up the sources train alone. A round in which the target, or every source, is away
    leaves the target with what it had learned before. What is kept from round to round of each source is kept by
    whoever asks it: the target (models), or the source itself (votes).

    Args:
        exchange: ``"models"`` or ``"votes"``.
        kwargs: See `FederatedModule`.

    Raises:
        ValueError: If an argument is out of range.
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
            raise ValueError(
                "exchange='models' needs whole models at the target, and local_norm=True keeps their normalisation "
                "layers at home: leave it out, or take exchange='votes'"
            )
        self.exchange = exchange
        self._shown: set[str] = set()  # sources that have the target's samples
        self._samples: dict[str, dict[str, Tensor]] = {}  # their tensors by path, by local source
        self._kept: dict[str, dict[str, Tensor]] = {}  # from round to round, by the client that it is about
        self._lessons: dict[str, Tensor] = {}  # of the target's samples, one row each

    @property
    def teaching(self) -> Channel:
        """The open channel over which models or samples are sent, so that sources can be asked."""
        if self.exchange == "models":
            return Open("teacher", "the whole model of each source", "sources", "target")
        contents = "the inputs of all training samples of the target (exchange='models' sends none)"
        return Open("samples", contents, "target", "sources", "once", samples=True)

    # ---------------------------------------------------------------- local steps

    def learners(self, round_idx: int) -> tuple[Client, ...]:
        """The sources, and from the second round after a warm-up on the target."""
        return self.clients if round_idx > self.warmup_rounds else self.sources

    def lesson(self) -> dict[str, Tensor]:
        """What the target has learned of the samples of its batch in this local step, by name; nothing at first."""
        rows = self.run.samples.positions(self.target)
        return {name: table[rows].to(self.device) for name, table in self._lessons.items()}

    def labelled_loss(self, network: Callable[[Tensor], Tensor], batch: Sequence[Any]) -> Tensor | float:
        """The task's loss of one of the target's networks on those samples of a batch that have labels; 0 without."""
        return self.task.loss(self.target, network(batch[0]), batch[1]) if self.target.labelled else 0.0

    def share_over(self) -> float:
        """The run's `progress`; 0 if it has no planned end."""
        return 0.0 if self.run.clock.planned_rounds() is None else self.run.clock.progress

    # ---------------------------------------------------------------- rounds

    def on_round_start(self, run: Run) -> None:
        """Clients that were away at the end of a warm-up fetch its result."""
        run.weights.finish_warmup()

    def teachers(self) -> list[str]:
        """Names of sources that participate on all channels in this round, wherever they are, if the target does."""
        each = [{client.name for client in self.federation.present(channel.name)} for channel in self.channels]
        participants = set.intersection(*each)
        return [client.name for client in self.sources if {client.name, self.target.name} <= participants]

    def ask_(self, teachers: Sequence[str]) -> dict[str, Tensor]:
        """Return teachers' answers on the target's training samples, by name, as far as this process is to know them.

        That is everybody's where the target has their models, and local sources' where these have its samples.
        Probabilities on the grid, shape (n_T, C), float32, on the CPU.
        """
        federation, target = self.federation, self.target.name
        if self.exchange == "models":
            sent = {name: self.run.weights.of(name) for name in teachers if federation.is_local(name)}
            received = federation.exchange("teacher", sent, to=[self.target], around=self.run.weights.received)
            return {
                name: self.answers(self.teacher(state), self.run.samples.inputs(self.target))
                for name, state in received.get(target, {}).items()
            }
        late = [name for name in teachers if name not in self._shown]
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
        """The target's samples as a local source has them, in batches, structured as its own inputs."""
        tensors = {path.removeprefix(_INPUTS): tensor for path, tensor in self._samples[source.name].items()}
        alone = tensors.get("")
        yield from pieces(rebuilt(self.run.samples.first(source), tensors) if alone is None else alone, _AT_ONCE)

    def teacher(self, state: Mapping[str, Tensor]) -> Replica:
        """A source's network at the target, from what it has sent; frozen weights are the target's own."""
        own = self.replicas[self.target]
        network = Replica(*copy.deepcopy((own.extractor, own.classifier)))
        network.load_state_dict(state, strict=False)
        return network

    def answers(self, network: nn.Module, batches: Iterable[Inputs]) -> Tensor:
        """A network's probabilities, on the grid, with statistics that stand still and without dropout."""
        with evaluating(network), self.trainer.precision_plugin.forward_context():
            moved = (mapped(lambda tensor: tensor.to(self.device), inputs) for inputs in batches)
            return torch.cat([on_grid(network(inputs).softmax(dim=1)).cpu() for inputs in moved])

    def add_(
        self, channel: str, messages: Mapping[str, Mapping[str, Tensor]], teachers: Collection[str]
    ) -> dict[str, dict[str, Tensor]]:
        """The total of what teachers' answers amount to, by the local clients that learn it; see `ask_` for whose.

        Votes go through a secure sum; of models the target has it by itself. Where too few teach for a secure sum,
        nobody learns anything.
        """
        if self.exchange == "votes":
            received = self.federation.sum(channel, messages, among=teachers)
            return {name: {key: tensor.cpu() for key, tensor in total.items()} for name, total in received.items()}
        total: dict[str, Tensor] = {}
        for name in (name for name in teachers if name in messages):
            total = {key: total[key] + tensor if total else tensor for key, tensor in messages[name].items()}
        return {self.target.name: total} if total else {}

    def heard(self, channel: str, teachers: Collection[str]) -> list[str]:
        """Return whose answers `add_` sums over a channel, wherever they are hosted."""
        return self.federation.senders(channel, teachers) if self.exchange == "votes" else [*teachers]

    def kept(self, client: str) -> dict[str, Tensor]:
        """What is kept of a client from round to round, to read and to write, where it is asked."""
        return self._kept.setdefault(client, {})

    # ---------------------------------------------------------------- those who come back, and checkpoints

    def public_state(self) -> dict[str, Any]:
        """Return the names of sources that have the target's samples."""
        return {"shown": sorted(self._shown)}

    def on_return(self, public: Mapping[str, Any], clients: Collection[str]) -> None:
        """Show the samples again to sources that return, and to all as the target does, whatever they have kept."""
        self._shown = set() if self.target.name in clients else {*public["shown"]} - {*clients}

    def client_state(self, client: str) -> dict[str, Any]:
        """Return what is kept of a client, the target's samples that a source has, and what the target has learned."""
        about = [client] if self.exchange == "votes" else []
        if self.exchange == "models" and client == self.target.name:
            about = [each.name for each in self.clients]
        state: dict[str, Any] = {"kept": {name: self._kept[name] for name in about if name in self._kept}}
        state |= {"samples": self._samples[client]} if client in self._samples else {}
        return state | ({"lessons": self._lessons} if client == self.target.name else {})

    def load_state(self, clients: Mapping[str, Mapping[str, Any]], public: Mapping[str, Any], resumes: bool) -> None:
        """Restore `client_state` of local clients and `public_state`."""
        self._shown = set(public.get("shown", ()))
        for name, state in clients.items():
            self._kept.update(state.get("kept", {}))
            if "samples" in state:
                self._samples[name] = state["samples"]
            if name == self.target.name:
                self._lessons = state.get("lessons", {})
