"""Clients' copies of the networks: which of their weights leave a client, and what each last received."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from fedlit.federation import Client
from fedlit.run.batchnorm import as_second_moments, as_variances, variances_of

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
"""Normalisation layers: what ``local_norm`` keeps at home."""

_PARTS = ("extractor", "classifier")
"""Of a replica, which are copies of the networks given to the constructor."""

ReplicaT_co = TypeVar("ReplicaT_co", bound=nn.Module, covariant=True)


class Replicas(nn.Module, Generic[ReplicaT_co]):
    """What each local client holds, by client or its name (of which ``nn.ModuleDict`` would refuse some).

    A method whose clients hold more than a `Replica` annotates its attribute ``replicas`` with the class that they do.
    """

    def __getitem__(self, client: Client | str) -> ReplicaT_co:
        name = client.name if isinstance(client, Client) else client
        if name not in self._modules:
            raise KeyError(f"client {name!r} is not hosted by this process, which has {list(self._modules)}")
        return cast(ReplicaT_co, self._modules[name])

    def __setitem__(self, client: str, module: nn.Module) -> None:
        self._modules[client] = module

    def __delitem__(self, client: str) -> None:
        del self._modules[client]

    def __contains__(self, client: object) -> bool:
        return client in self._modules

    def __len__(self) -> int:
        return len(self._modules)


class SharedWeights:
    """Those weights of local replicas that leave their clients, tied ones once, under their first name.

    Frozen weights are equal everywhere from the start, and are left out. Frozen is a parameter that is not trainable in
    the network given to the constructor, nor now, and still has its value; and with a layer's parameters its buffers,
    such as BatchNorm's statistics, as long as the layer is in evaluation mode. In training mode they move.

    Args:
        replicas: Of local clients.
        originals: Extractor and classifier as given to the constructor.
        stays_local: Beginnings of names that never leave.
        local_norm: Whether normalisation layers stay, parameters and statistics.
        moments: Whether a mean is taken of BatchNorm's second moments, rather than of its variances.

    Attributes:
        received: By client, what it last received (at first, what it started with), as far as it is remembered: what
            differential privacy clips its messages around.
    """

    def __init__(
        self,
        replicas: Replicas[nn.Module],
        originals: tuple[nn.Module, nn.Module],
        stays_local: Sequence[str],
        local_norm: bool,
        moments: bool = False,
    ) -> None:
        self._replicas = replicas
        self._originals = dict(zip(_PARTS, originals, strict=True))
        self._stays_local = tuple(stays_local)
        self._local_norm = local_norm
        self._moments = moments
        self._known: dict[str, dict[str, tuple[dict[str, Tensor], str]]] = {}
        self._untouched: dict[str, frozenset[str]] = {}
        self._remembers = False
        self._restored: dict[str, dict[str, Tensor]] = {}
        self.received: dict[str, dict[str, Tensor]] = {}

    def start_(self, clients: Iterable[Client], remembers: bool, sends: bool = False, blurs: bool = False) -> None:
        """Begin a run.

        Args:
            clients: Local ones.
            remembers: Whether to keep what each receives.
            sends: Whether the run has a channel for weights, so that they must be finite.
            blurs: Whether differential privacy adds noise to them.

        Raises:
            ValueError: If weights that are sent have NaN or infinity.
        """
        clients = list(clients)
        self._known.clear()
        self._untouched = {client.name: self._find_untouched(client.name) for client in clients}
        for client in clients[:1] if sends else ():  # others start alike
            bad = [name for name, tensor in self.of(client.name).items() if not bool(torch.isfinite(tensor).all())]
            if bad:
                raise ValueError(
                    f"weights of networks must be finite before training, as clients send them, and {bad[:3]} of "
                    f"client {client.name!r} have NaN or infinity: register a constant, such as a mask, with "
                    "persistent=False, or mend the weights"
                )
            noisy = [name for name in self.of(client.name) if name.endswith("running_var")] if blurs else []
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

    def restore_(self, client: str, received: dict[str, Tensor]) -> None:
        """Take what a client had received before a checkpoint, for the run that starts next."""
        self._restored[client] = received

    def of(self, client: str, frozen_too: bool = False) -> dict[str, Tensor]:
        """Weights of a local client that leave it, by name.

        Args:
            client: Its name.
            frozen_too: Whether those are among them that are not sent because everybody has them.
        """
        if client not in self._known:
            replica = self._replicas[client]
            state = replica.state_dict(keep_vars=True)
            norms = [module for module in replica.modules() if isinstance(module, NORMS)] if self._local_norm else []
            # By tensor, as a tied one has several names, and stays local under all of them.
            local = {id(tensor) for module in norms for tensor in (*module.parameters(), *module.buffers())}
            # A count of batches is nobody else's business, and one integer would send all numbers in float64.
            local |= {id(tensor) for name, tensor in state.items() if name.endswith("num_batches_tracked")}
            local |= {id(tensor) for name, tensor in state.items() if name.startswith(self._stays_local)}
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
        """Names of running variances that leave a local client as second moments, each with that of its mean."""
        if not self._moments:
            return {}
        pairs, shared = variances_of(self._replicas[client]), self.of(client)
        return {variance: mean for variance, mean in pairs.items() if variance in shared and mean in shared}

    def to_average(self, client: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A local client's weights as they are sent where a mean of them is taken, which `write_` takes back."""
        return as_second_moments(state, self.variances(client))

    def _find_untouched(self, client: str) -> frozenset[str]:
        """Entries that were given frozen and still have the values given, which a checkpoint may have replaced."""
        frozen = _frozen(self._originals, whatever_mode=True) & _frozen(_parts_of(self._replicas[client]))
        given = {f"{part}.{name}": t for part, net in self._originals.items() for name, t in net.state_dict().items()}
        own = self._replicas[client].state_dict()
        return frozenset(
            name
            for name in frozen
            if name in given and torch.equal(own[name].cpu(), given[name].to("cpu", own[name].dtype))
        )

    @torch.no_grad()
    def write_(self, received: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write received weights into local replicas: ``{client: {name: tensor}}``; see `to_average`, too."""
        for client, message in received.items():
            own, state = self.of(client, frozen_too=True), as_variances(message)
            if state:  # a part that is frozen as a whole is an empty message
                torch._foreach_copy_([own[name] for name in state], list(state.values()))
            for name in [name for name in state if name.endswith("running_var")]:
                own[name].clamp_(min=0)  # the noise of differential privacy may bring it below
            if self._remembers:
                self.received[client] = {**self.received.get(client, {}), **state}


def _places(replica: nn.Module, state: Mapping[str, object]) -> dict[str, tuple[dict[str, Tensor], str]]:
    """Of entries that are parameters or buffers, the module's dictionary and the key; of tied ones under one name.

    Other entries are state that a module describes in a form of its own (``get_extra_state``), and have no mean.
    """
    places: dict[int, tuple[Any, str]] = {}
    for module in replica.modules():
        for holder in (module._parameters, module._buffers):
            places |= {id(tensor): (holder, key) for key, tensor in holder.items() if tensor is not None}
    return {name: places.pop(id(value)) for name, value in state.items() if id(value) in places}


def _check_complete(client: str, replica: nn.Module, state: Mapping[str, object]) -> None:
    """Raise a `ValueError` if weights that are trained are not in a replica's state, and would never be averaged."""
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
    """Names in replicas' state of what no training moves; ``whatever_mode`` takes buffers in training mode too."""
    found: set[str] = set()
    for part, network in parts.items():
        for prefix, module in network.named_modules(prefix=part):
            params = dict(module.named_parameters(recurse=False))
            fixed = [name for name, param in params.items() if not param.requires_grad]
            if params and len(fixed) == len(params) and (whatever_mode or not module.training):
                fixed += [name for name, _ in module.named_buffers(recurse=False)]
            found.update(f"{prefix}.{name}" for name in fixed)
    return frozenset(found)


def check_local_norm(networks: Iterable[nn.Module], idle: Sequence[str]) -> None:
    """Refuse that clients which never train keep normalisation layers that never saw data.

    Raises:
        ValueError: If there are both.
    """
    if idle and any(isinstance(part, NORMS) for network in networks for part in network.modules()):
        raise ValueError(
            f"local_norm=True leaves {list(idle)}, who do not train, with untouched normalisation layers: give the "
            "target labels, use a method that trains there, or local_norm=False"
        )
