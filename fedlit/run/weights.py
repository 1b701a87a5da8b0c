"""Shared weights: which weights of a replica leave its client, how they are averaged, and what was received."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from fedlit.checks import check_one_of, refuse
from fedlit.federation import Client, RosterError
from fedlit.federation.errors import about
from fedlit.models import part_of
from fedlit.models.copies import check_part, share_
from fedlit.run.batchnorm import as_second_moments, as_variances, variances_of
from fedlit.run.component import Component
from fedlit.run.replicas import NORMS

if TYPE_CHECKING:
    from fedlit.run.run import Run

_PARTS = ("extractor", "classifier")
"""Parts of a replica that are copies of the networks passed to the constructor."""

Weighting: TypeAlias = Literal["samples", "sqrt", "uniform"]
"""Weights of clients in a mean: number of training samples, its square root, or equal."""


@dataclass(frozen=True)
class Averaging:
    """How means of clients' weights are taken; arguments are those of `FederatedModule`.

    Raises:
        ValueError: If an argument is none of its choices, or the two about normalisation contradict each other.
    """

    weighting: Weighting
    local_norm: bool = False
    batchnorm_average: Literal["variances", "moments"] = "variances"

    def __post_init__(self) -> None:
        check_one_of("weighting", self.weighting, get_args(Weighting))
        check_one_of("batchnorm_average", self.batchnorm_average, ("variances", "moments"))
        if self.local_norm and self.batchnorm_average == "moments":
            refuse(
                "batchnorm_average",
                "'variances' beside local_norm=True, which keeps at its client what 'moments' averages",
                self.batchnorm_average,
                "leave one of both out",
            )


class SharedWeights(Component):
    """Weights of local replicas that leave their clients, tied ones once, under their first name.

    Frozen weights are equal everywhere from the start and are left out: parameters that were passed to the constructor
    as not trainable, still are, and have their first values; and the buffers of a layer whose parameters all are, such
    as BatchNorm's statistics, in evaluation mode alone, as training mode moves them.

    Args:
        run: Whose clients share them.
        averaging: How means of them are taken.

    Attributes:
        stays_local: Prefixes of names that never leave.
        max_share: Maximum of the weights in a mean that one of three clients or more may have, see `FederatedStrategy`.
        watchers: Functions that are called with what was written into local replicas.
        received: By client, what it last received (at first its initial weights), as far as it is remembered:
            differential privacy clips its messages around that.
    """

    def __init__(self, run: Run, averaging: Averaging) -> None:
        self._run = run
        self.watchers: list[Callable[[Mapping[str, Mapping[str, Tensor]]], None]] = []
        self._replicas = run.replicas
        self._originals = dict(zip(_PARTS, run.originals, strict=True))
        self.stays_local = run.spec.local
        self.averaging = averaging
        self.max_share = 1.0
        self._known: dict[str, dict[str, tuple[dict[str, Tensor], str]]] = {}
        self._untouched: dict[str, frozenset[str]] = {}
        self._always_frozen: dict[str, frozenset[str]] = {}
        self._remembers = False
        self._restored: dict[str, dict[str, Tensor]] = {}
        self.received: dict[str, dict[str, Tensor]] = {}

    def start_(self) -> None:
        """Begin a run: remember clients' initial weights where differential privacy clips around them.

        Raises:
            ValueError: If weights that are sent have NaN or infinity.
        """
        federation = self._run.federation
        channels, clients = federation.channels, federation.local_clients
        sends, remembers = "weights" in channels, bool(channels.mechanisms)
        self._known.clear()
        frozen = self._frozen_originals()
        self._untouched = {client.name: self._find_untouched(client.name, frozen) for client in clients}
        self._always_frozen.clear()
        for client in clients[:1] if sends else ():  # others start alike
            bad = [name for name, tensor in self.of(client.name).items() if not bool(torch.isfinite(tensor).all())]
            if bad:
                raise ValueError(
                    f"weights of networks must be finite before training, as clients send them, and {bad[:3]} of "
                    f"client {client.name!r} have NaN or infinity: register a constant, such as a mask, with "
                    "persistent=False, or mend the weights"
                )
            blurred = channels["weights"].mechanism is not None
            noisy = [name for name in self.of(client.name) if name.endswith("running_var")] if blurred else []
            if noisy:
                warnings.warn(
                    f"differential privacy adds noise to running variances of BatchNorm ({noisy[0]!r} is the first of "
                    f"{len(noisy)}), of which those below 0 become 0, and outputs large: take GroupNorm or LayerNorm, "
                    "or keep them at their clients (local_norm=True)",
                    stacklevel=2,
                )
        self._remembers = remembers
        restored, self._restored, self.received = self._restored, {}, {}
        for client in clients if remembers else ():
            own = {name: tensor.detach().clone() for name, tensor in self.of(client.name, True).items()}
            self.received[client.name] = restored.get(client.name, own)

    def client_state(self, client: str) -> dict[str, Any]:
        """Return what a client last received."""
        return {"received": self.received.get(client)}

    def load_state(self, clients: Mapping[str, Mapping[str, Any]], public: Mapping[str, Any], resumes: bool) -> None:
        """Restore what clients had received before a checkpoint, for the run that starts next."""
        for name, state in clients.items() if resumes else ():
            if state.get("received") is not None:
                self._restored[name] = state["received"]

    def of(self, client: str, frozen_too: bool = False) -> dict[str, Tensor]:
        """Return the weights of a local client that leave it, by name, with ``frozen_too`` those equal everywhere."""
        if client not in self._known:
            replica = self._replicas[client]
            state = replica.state_dict(keep_vars=True)
            norms = (
                [module for module in replica.modules() if isinstance(module, NORMS)]
                if self.averaging.local_norm
                else []
            )
            # By tensor, as a tied one has several names, and stays local under all of them.
            local = {id(tensor) for module in norms for tensor in (*module.parameters(), *module.buffers())}
            # A count of batches is nobody else's business, and one integer would send all numbers in float64.
            local |= {id(tensor) for name, tensor in state.items() if name.endswith("num_batches_tracked")}
            local |= {id(tensor) for name, tensor in state.items() if name.startswith(self.stays_local)}
            self._known[client] = _places(replica, {k: each for k, each in state.items() if id(each) not in local})
            _check_complete(client, replica, state)
        # looked up each time, as a module may put another tensor in a buffer's place
        known = {name: holder[key] for name, (holder, key) in self._known[client].items()}
        untouched = self._untouched.get(client)
        if frozen_too or not untouched:
            return known
        replica = self._replicas[client]
        frozen = untouched & _frozen(_parts_of(replica))
        return {name: tensor for name, tensor in known.items() if name not in frozen}

    def variances(self, client: str) -> dict[str, str]:
        """Return running variances that are sent as second moments, each with the name of its mean."""
        if self.averaging.batchnorm_average != "moments":
            return {}
        pairs, shared = variances_of(self._replicas[client]), self.of(client)
        return {variance: mean for variance, mean in pairs.items() if variance in shared and mean in shared}

    def to_average(self, client: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a local client's weights as they are sent for a mean, which `load_` takes back."""
        return as_second_moments(state, self.variances(client))

    @property
    def mean_weights(self) -> Mapping[str, float] | None:
        """Weights of clients in a mean, by name, according to ``weighting``; ``None`` is equal ones."""
        if self.averaging.weighting == "uniform":
            return None
        sizes = self._run.federation.weights
        if self.averaging.weighting == "samples":
            return sizes
        return {name: math.sqrt(size) for name, size in sizes.items()}

    def too_heavy(self, among: Sequence[Client]) -> RosterError | None:
        """Return an error that names the one of three clients or more that has more than ``max_share`` of weights."""
        weights = self.mean_weights
        if weights is None or len(among) < 3 or self.max_share >= 1:
            return None
        name = max(among, key=lambda client: weights[client.name]).name
        share, samples = weights[name] / sum(weights[each.name] for each in among), self._run.federation.weights
        if share <= self.max_share:
            return None
        text = (
            f"client {name!r} has {share:.1%} of the weights in means over {len(among)} clients (weighting="
            f"{self.averaging.weighting!r}, {samples[name]} of {sum(samples[each.name] for each in among)} training "
            f"samples), above max_share={self.max_share:g}: if it is to own so much of them, give the strategy "
            f"max_share={math.ceil(share * 1000) / 1000:g}; if not, the method weighting='uniform', or leave it out"
        )
        error = about("max_share", self.max_share, RosterError(text))
        error.public = text  # type: ignore[attr-defined]  # all know the numbers of samples
        return error

    def average_(
        self,
        channel: str,
        among: Iterable[Client],
        to: Iterable[Client] | None = None,
        part: str | tuple[str, ...] | None = None,
        absent_too: bool = False,
    ) -> None:
        """Replace the shared weights of ``to`` by the mean over ``among``, as far as they are present.

        Args:
            channel: Over which they are sent.
            among: Clients whose weights are averaged, weighted by ``weighting``.
            to: Clients that receive the mean; ``None`` is all receivers of the channel.
            part: Sub-module of the replicas to average, such as ``"classifier"``, or several; a `ValueError` if a
                weight is tied to another part.
            absent_too: See `Federation.mean`.
        """
        federation, among = self._run.federation, tuple(among)
        heavy = self.too_heavy(among)
        if heavy is not None:  # of means with the target, as sources are compared when a run starts
            federation.fail(heavy)
        named = (part,) if isinstance(part, str) else part
        parts = ("",) if named is None else tuple(f"{name}." for name in named)
        there = {client.name for client in (among if absent_too else federation.present(channel))}
        local = [client.name for client in among if client.name in there and federation.is_local(client)]
        for name in local if named is not None else ():
            check_part(self._replicas[name], parts)
        states = {name: {k: t for k, t in self.of(name).items() if k.startswith(parts)} for name in local}
        payloads = {name: self.to_average(name, state) for name, state in states.items()}
        around = {name: self.to_average(name, state) for name, state in self.received.items()}
        self.load_(federation.mean(channel, payloads, among, to, self.mean_weights, around, absent_too))

    def catch_up(self, channel: str, absent_too: bool = False) -> None:
        """Let clients that were absent fetch the newest mean of a channel; see `Federation.catch_up`."""
        self.load_(self._run.federation.catch_up(channel, absent_too=absent_too))

    def finish_warmup(self) -> None:
        """In the first round after a warm-up, let clients that were absent at its end fetch its result."""
        clock = self._run.clock
        if clock.warmup_rounds and clock.round_idx == clock.warmup_rounds:
            self.catch_up("weights", absent_too=True)

    def received_part(self, part: str) -> dict[str, dict[str, Tensor]]:
        """Return what local clients last received of a part: a mechanism clips around it."""
        return {client: part_of(state, part) for client, state in self.received.items()}

    def moved_frozen(self, client: str) -> list[str]:
        """Return parameters of a local client that are not sent as they are frozen, and have changed all the same.

        Those that were trained at an earlier call have been averaged then, and are left out.
        """
        replica = self._replicas[client]
        params = dict(replica.named_parameters()).keys() & self.of(client, frozen_too=True).keys()
        frozen = self._always_frozen.get(client, self._untouched[client]) & _frozen(_parts_of(replica)) & params
        self._always_frozen[client] = frozen
        return sorted(frozen - self._find_untouched(client, self._frozen_originals())) if frozen else []

    def _frozen_originals(self) -> dict[str, Tensor]:
        """Return the first values of what was passed as frozen, by its name in replicas."""
        frozen = _frozen(self._originals, whatever_mode=True)
        given = {f"{part}.{name}": t for part, net in self._originals.items() for name, t in net.state_dict().items()}
        return {name: tensor for name, tensor in given.items() if name in frozen}

    def _find_untouched(self, client: str, given: Mapping[str, Tensor]) -> frozenset[str]:
        """Return entries passed as frozen that still have their first values; a checkpoint may have replaced some."""
        if not given:
            return frozenset()
        own = self._replicas[client].state_dict()
        return frozenset(
            name
            for name in given.keys() & _frozen(_parts_of(self._replicas[client]))
            if torch.equal(own[name].cpu(), given[name].to("cpu", own[name].dtype))
        )

    @torch.no_grad()
    def load_(self, received: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write received weights into local replicas: ``{client: {name: tensor}}``; see `to_average`."""
        for client, message in received.items():
            own, state = self.of(client, frozen_too=True), as_variances(message)
            copied = [name for name in state if self._run.offload is not None or not share_(own[name], state[name])]
            if copied:
                torch._foreach_copy_([own[name] for name in copied], [state[name] for name in copied])
            for name in [name for name in state if name.endswith("running_var")]:
                own[name].clamp_(min=0)  # the noise of differential privacy may bring it below
            if self._remembers:
                self.received[client] = {**self.received.get(client, {}), **state}
            self._run.release(client)
        for watch in self.watchers:
            watch(received)


def _places(replica: nn.Module, state: Mapping[str, object]) -> dict[str, tuple[dict[str, Tensor], str]]:
    """Locate parameters and buffers: module dictionary and key by name, tied ones once; other entries have no mean."""
    places: dict[int, tuple[Any, str]] = {}
    for module in replica.modules():
        for holder in (module._parameters, module._buffers):
            places |= {id(tensor): (holder, key) for key, tensor in holder.items() if tensor is not None}
    return {name: places.pop(id(value)) for name, value in state.items() if id(value) in places}


def _check_complete(client: str, replica: nn.Module, state: Mapping[str, object]) -> None:
    """Refuse a replica whose state lacks trained weights, which would never be averaged."""
    known = {id(value) for value in state.values()}
    lacking = [name for name, param in replica.named_parameters() if param.requires_grad and id(param) not in known]
    if lacking:
        raise ValueError(
            f"the state_dict of client {client!r} leaves out or copies {lacking[:3]}, which are trained and would not "
            "be averaged: let state_dict(keep_vars=True) have the parameters themselves, or freeze them"
        )


def _parts_of(replica: nn.Module) -> dict[str, nn.Module]:
    return {part: getattr(replica, part) for part in _PARTS if hasattr(replica, part)}


def _frozen(parts: Mapping[str, nn.Module], whatever_mode: bool = False) -> frozenset[str]:
    """Return names in replicas' state that no training moves; ``whatever_mode`` includes buffers in training mode."""
    found: set[str] = set()
    for part, network in parts.items():
        for prefix, module in network.named_modules(prefix=part):
            params = dict(module.named_parameters(recurse=False))
            fixed = [name for name, param in params.items() if not param.requires_grad]
            if params and len(fixed) == len(params) and (whatever_mode or not module.training):
                fixed += [name for name, _ in module.named_buffers(recurse=False)]
            found.update(f"{prefix}.{name}" for name in fixed)
    return frozenset(found)
