"""Rounds in which everyone trains from one model and the target combines updates: FedDA's, FedGP's and FADA's.

An update is the change of a client's weights since the round's start, which it remembers (`RoundMemory`), as the target
does the gradient of each batch there, or each of its steps, for its variance.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.func import functional_call
from torch.optim import Optimizer

from fedlit import Requires, Run
from fedlit.federation import Client, FederatedLoader, RosterError
from fedlit.federation.nested import Inputs
from fedlit.methods.target_rate import TargetRate
from fedlit.models import RoundMemory
from fedlit.module import Batch
from fedlit.run.local import evaluating
from fedlit.run.replicas import Replicas
from fedlit.run.turns import independent

Update = dict[str, Tensor]

UPDATE_ALONE = "it is for the channel 'update' alone"
"""Why other channels get no differential privacy."""


class CombinedUpdates(TargetRate):
    """The target combines the updates of a round and hands out the new model; a subclass defines how.

    Args:
        align_magnitudes: Scale a source's update by the ratio of the target's summed learning rates to the source's.
        kwargs: See `TargetRate` and `FederatedModule`.
    """

    requires: ClassVar[Requires] = Requires(target_labels=True)

    observes_steps: bool = False
    """Whether the target's variance is that of its local steps, rather than of gradients at the round's start."""

    def __init__(self, *args: Any, align_magnitudes: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.align_magnitudes = align_magnitudes
        self._memories: dict[str, RoundMemory] = {}
        self._rates: dict[str, float] = {}  # of the clients that have stepped in the local step under way
        self._behind: set[str] | None = None  # sources that lack the target's newest model; None before there is one

    # ---------------------------------------------------------------- rounds

    def on_round_start(self, run: Run) -> None:
        """Let clients that were absent fetch the current model; note what the round starts from."""
        if self._behind is None and self.warmup_rounds:  # the newest model is a warm-up's
            run.weights.catch_up("weights")
        self.send_model_()
        for client in self.federation.local_clients:
            self.memory(client).begin_(self.weights_of(client))

    @torch.no_grad()
    def move_to_(self, step: Update) -> None:
        """Return to the round's start, and let the target take its step from there, if there is one."""
        for client in self.federation.local_clients:
            state, memory = self.weights_of(client), self.memory(client)
            torch._foreach_copy_([state[name] for name in memory.start], list(memory.start.values()))
            if client.is_target and step:
                torch._foreach_add_([state[name] for name in step], list(step.values()))
                for variance, mean in self.moments_of(client).items():
                    # the step was one of second moments: see `update`
                    state[variance].add_(memory.start[mean].square() - state[mean].square()).clamp_(min=0)
            memory.forget_()

    def hand_out_(self) -> None:
        """Send the target's weights, the newest model."""
        self._behind = {client.name for client in self.sources}  # absent ones stay in it until they return
        self.send_model_()

    def send_model_(self) -> None:
        """Send the target's weights to present clients that lack the newest."""
        federation = self.federation
        present = {client.name for client in federation.present("model")}
        behind = self._behind or set()
        late = [client for client in self.sources if client.name in behind & present]
        if not late or self.target.name not in present:
            return
        sent = {self.target.name: self.run.weights.of(self.target.name)} if federation.is_local(self.target) else {}
        received = federation.exchange("model", sent, to=late)
        self.run.weights.load_({name: messages[self.target.name] for name, messages in received.items()})
        self._behind = behind - {client.name for client in late}

    def has_newest(self, client: Client) -> bool:
        """Whether a client trains on the target's newest model; others have old updates."""
        return client.name not in (self._behind or ())

    # ---------------------------------------------------------------- local steps

    @property
    def keeps_gradients(self) -> bool:
        """Whether the target's batch gradients of a round are remembered, one copy of the parameters each."""
        return False

    @independent
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Take a local step; note the gradient of the target's batch at the round's start."""
        learners, own = {client.name for client in self.run.present_learners()}, self.run.turns.own(batch)
        observes = not (self.observes_steps or self.run.clock.warming_up)
        if observes and self.target.name in own.keys() & learners:
            self.observe_(self.task.standardised(self.target.name, batch[self.target.name]))
        return super().training_step(batch, batch_idx)

    def observe_(self, samples: Sequence[Any]) -> None:
        """Note the target's gradient over a batch at the round's first weights; skip a second pass over samples."""
        memory, loader = self.memory(self.target), self.trainer.train_dataloader
        different = loader.batches_per_pass(self.target.name) if isinstance(loader, FederatedLoader) else math.inf
        if memory.statistics.count >= different:
            return
        params = self.parameters_of(self.target)
        with memory.at_start(self.replicas[self.target.name], self.weights_of(self.target)):
            for client, inputs in self.run.in_streams({self.target.name: samples}, "variance"):
                loss = self.loss(client, inputs)
                gradients = torch.autograd.grad(loss, list(params.values()), materialize_grads=True)
                memory.observe_(dict(zip(params, gradients, strict=True)))

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Take a step, and note for its clients their learning rates."""
        self._rates.clear()
        warming_up, observed = self.run.clock.warming_up, Update()
        if self.observes_steps and not warming_up and self.federation.is_local(self.target):
            observed = self.parameters_of(self.target)
        before = {name: param.detach().clone() for name, param in observed.items()}
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if warming_up:
            return
        rates = self._rates
        for client in self.federation.local_clients:
            if client.name in rates:
                self.memory(client).record_(rates[client.name])
        if observed and rates.get(self.target.name):
            steps = {
                name: (param.detach() - before[name]) / rates[self.target.name] for name, param in observed.items()
            }
            self.memory(self.target).observe_(steps)

    def on_step_taken(self, optimizer: Optimizer) -> None:
        """Note the learning rate of each client's first group with gradients."""
        for group in optimizer.param_groups:
            if any(param.grad is not None for param in group["params"]):
                self._rates.setdefault(group["client"], float(group["lr"]))

    # ---------------------------------------------------------------- updates

    def update(self, client: Client) -> Update:
        """Return the change of a local client's weights in this round.

        With ``batchnorm_average`` the change of var + mean^2 stands under the name of the variance.
        """
        state, memory = self.weights_of(client), self.memory(client)
        update = memory.update(state)
        for variance, mean in self.moments_of(client).items():
            update[variance] += state[mean].square() - memory.start[mean].to(state[mean].device).square()
        return update

    def rated(self, client: Client) -> Update:
        """Return a local source's update and, without differential privacy, its summed learning rates as "path"."""
        update = self.update(client)
        if self.federation.channels["update"].mechanism is None:
            update["path"] = torch.tensor(self.memory(client).path, dtype=torch.float64)
        return update

    def aligned(self, message: Update, path: float) -> Update:
        """Return the update of a `rated` message; aligned, it is scaled to ``path``, the target's summed rates."""
        update = {name: tensor for name, tensor in message.items() if name != "path"}
        if not self.align_magnitudes:
            return update
        own = float(message["path"])
        layers, _ = self.parts(update)  # statistics do not grow with learning rates
        return update | times(layers, path / own if own else 1.0)

    def receive_updates(self, sources: Sequence[Client]) -> dict[str, Update]:
        """Send sources' updates to the target, which sees each; return them where it is hosted, aligned."""
        sent = {client.name: self.rated(client) for client in sources if self.federation.is_local(client)}
        received = self.federation.exchange("update", sent, to=[self.target]).get(self.target.name, {})
        return {name: self.aligned(message, self.memory(self.target).path) for name, message in received.items()}

    def parts(self, update: Update) -> tuple[Update, Update]:
        """Return the layers of an update, which gradients move, and its running statistics."""
        trained = self.parameters_of(self.federation.local_clients[0])
        layers = {name: update[name] for name in trained if name in update}
        return layers, {name: tensor for name, tensor in update.items() if name not in trained}

    def weights_of(self, client: Client) -> Update:
        """Return a local client's shared weights but counters (integers), which are in no update."""
        state = self.run.weights.of(client.name).items()
        return {name: tensor for name, tensor in state if tensor.is_floating_point()}

    def moments_of(self, client: Client) -> dict[str, str]:
        """Return the variances in `weights_of` that are combined as second moments, each with its mean."""
        state = self.weights_of(client)
        return {name: mean for name, mean in self.run.weights.variances(client.name).items() if name in state}

    def parameters_of(self, client: Client) -> Update:
        """Return a local client's shared and trained parameters, by name."""
        shared = self.run.weights.of(client.name)
        params = self.replicas[client.name].named_parameters()
        return {name: param for name, param in params if name in shared and param.requires_grad}

    def memory(self, client: Client | str) -> RoundMemory:
        """Return the memory of a local client."""
        name = client if isinstance(client, str) else client.name
        if name not in self._memories:
            self._memories[name] = RoundMemory(self.keeps_gradients)
        return self._memories[name]

    def shares(self, names: Sequence[str]) -> list[float]:
        """Return weights w_i of sources, of sum 1."""
        known = self.run.weights.mean_weights
        weights = [1.0 if known is None else float(known[name]) for name in names]
        return [weight / sum(weights) for weight in weights]

    # ---------------------------------------------------------------- sites that return, and checkpoints

    def public_state(self) -> dict[str, Any]:
        """Return the names of sources that lack the newest model."""
        return {"behind": None if self._behind is None else sorted(self._behind)}

    def on_return(self, public: Mapping[str, Any], clients: Collection[str]) -> None:
        """Send the newest model to sources that return.

        Raises:
            RosterError: At the target, if it returns without a checkpoint: the model was its own.
        """
        target, behind = self.target, public["behind"]
        if behind is None:
            return
        if self._behind is None and target.name in clients and self.federation.is_local(target):
            raise RosterError(
                f"target {target.name!r} comes back without a checkpoint, and the model, which it hands out in "
                f"{type(self).__name__}, is in no other place: start it with its checkpoint, or all from the beginning"
            )
        self._behind = {client.name for client in self.sources if client.name in {*behind, *clients}}

    def client_state(self, client: str) -> dict[str, Any]:
        """Return what a client remembers of a round under way."""
        return {"memory": self.memory(client).state_dict()} if self.run.clock.step else {}

    def load_state(self, clients: Mapping[str, Mapping[str, Any]], public: Mapping[str, Any], resumes: bool) -> None:
        """Restore who lacks the newest model, and what is remembered of a round under way."""
        behind = public.get("behind")
        self._behind = None if behind is None else set(behind)
        for name, state in clients.items():
            if "memory" in state:
                device = self.federation.device or torch.device("cpu")
                self.memory(name).load_state_dict(move_data_to_device(state["memory"], device))


class WeighedUpdates(CombinedUpdates):
    r"""The target adds the sources' changes to its own, by weights that it computes.

    .. math:: \theta \leftarrow \theta_T + \sum_i \alpha_i \, \Delta_i
    """

    replicas: Replicas[Any]

    def on_round_end(self, run: Run) -> None:
        """Add the sources' updates to the target's by their weights, and send the new model."""
        federation, target = run.federation, self.target
        participants = federation.present("update")
        if target not in participants:
            self.move_to_({})
            return
        sources = [client for client in participants if not client.is_target and self.has_newest(client)]
        updates = self.receive_updates(sources)
        step: Update = {}
        reported: dict[str, dict[str, float]] = {}
        if federation.is_local(target):
            step = self.update(target)
            weights = self.weigh(updates)
            reported[target.name] = {f"attention/{name}": weight for name, weight in weights.items()}
            if weights:
                step |= {name: torch.zeros_like(tensor) for name, tensor in self.parts(step)[1].items()}
            for name, weight in weights.items():
                weighted = times(updates[name], weight)
                torch._foreach_add_(list(step.values()), [weighted[key] for key in step])
        self.move_to_(step)
        self.hand_out_()
        names = [f"attention/{client.name}" for client in self.sources]
        run.log(federation.report(reported, names).get(target.name, {}), target)

    def weigh(self, updates: Mapping[str, Update]) -> dict[str, float]:
        """Return the sources' weights, of sum 1, from their updates; called where the target is hosted."""
        raise NotImplementedError

    def features_with(self, client: Client, state: Update, inputs: Inputs) -> Tensor:
        """Return a local client's features, in evaluation mode, with a state of its extractor; shape (n, width)."""
        extractor = self.replicas[client].extractor
        with evaluating(extractor):
            return cast(Tensor, functional_call(extractor, state, (inputs,), tie_weights=True))

    def observe_(self, samples: Sequence[Any]) -> None:
        """Note nothing: no variance of the target's gradient is needed."""


def times(update: Update, factor: float) -> Update:
    """Return an update times a factor."""
    return dict(zip(update, torch._foreach_mul(list(update.values()), factor), strict=True))
