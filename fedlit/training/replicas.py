"""Clients' copies of the networks: which of their weights leave a client, and what each last received."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from fedlit.federation import Client

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
"""Normalisation layers: what ``local_norm`` keeps at home."""

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

    def __contains__(self, client: object) -> bool:
        return client in self._modules

    def __len__(self) -> int:
        return len(self._modules)


class SharedWeights:
    """Those weights of local replicas that leave their clients.

    Args:
        replicas: Of local clients.
        stays_local: Beginnings of names that never leave.
        local_norm: Whether normalisation layers stay, parameters and statistics.

    Attributes:
        received: By client, what it last received (at first, what it started with), as far as it is remembered: what
            differential privacy clips its messages around.
    """

    def __init__(self, replicas: Replicas[nn.Module], stays_local: Sequence[str], local_norm: bool) -> None:
        self._replicas = replicas
        self._stays_local = tuple(stays_local)
        self._local_norm = local_norm
        self._known: dict[str, dict[str, Tensor]] = {}
        self._remembers = False
        self._restored: dict[str, dict[str, Tensor]] = {}
        self.received: dict[str, dict[str, Tensor]] = {}

    def start_(self, clients: Iterable[Client], remembers: bool) -> None:
        """Begin a run."""
        self._known.clear()
        self._remembers = remembers
        restored, self._restored, self.received = self._restored, {}, {}
        for client in clients if remembers else ():
            own = {name: tensor.detach().clone() for name, tensor in self.of(client.name).items()}
            self.received[client.name] = restored.get(client.name, own)

    def restore_(self, client: str, received: dict[str, Tensor]) -> None:
        """Take what a client had received before a checkpoint, for the run that starts next."""
        self._restored[client] = received

    def of(self, client: str) -> dict[str, Tensor]:
        """Weights of a local client that leave it, by name."""
        if client not in self._known:
            replica = self._replicas[client]
            state = replica.state_dict(keep_vars=True)
            local: set[str] = set()
            for prefix, module in replica.named_modules() if self._local_norm else ():
                if isinstance(module, NORMS):
                    local.update(f"{prefix}.{name}" for name in module.state_dict())
            # A count of batches is nobody else's business, and one integer would send all numbers in float64.
            local.update(name for name in state if name.endswith("num_batches_tracked"))
            local.update(name for name in state if name.startswith(self._stays_local))
            self._known[client] = {name: tensor for name, tensor in state.items() if name not in local}
        return self._known[client]

    @torch.no_grad()
    def write_(self, received: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write received weights into local replicas: ``{client: {name: tensor}}``."""
        for client, state in received.items():
            own = self.of(client)
            torch._foreach_copy_([own[name] for name in state], list(state.values()))
            if self._remembers:
                self.received[client] = {**self.received.get(client, {}), **state}


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
