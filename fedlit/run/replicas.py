"""Clients' copies of the networks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar, cast

from torch import nn

from fedlit.checks import refuse
from fedlit.federation import Client

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
"""Normalisation layers, which ``local_norm`` keeps local."""

ReplicaT_co = TypeVar("ReplicaT_co", bound=nn.Module, covariant=True)


class Replicas(nn.Module, Generic[ReplicaT_co]):
    """Replica of each local client, by client or name (``nn.ModuleDict`` would refuse some names)."""

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


def check_local_norm(networks: Iterable[nn.Module], idle: Sequence[str]) -> None:
    """Raise a `ValueError` if clients that never train would keep normalisation layers that never saw data."""
    if idle and any(isinstance(part, NORMS) for network in networks for part in network.modules()):
        rule = f"False where {list(idle)} do not train, whose normalisation layers would be untouched"
        refuse("local_norm", rule, True, "give False, or the target labels, or a method that trains there")
