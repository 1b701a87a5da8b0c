"""Federated domain adaptation as PyTorch Lightning modules."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedlit.exported import load
    from fedlit.federation import Client, Federation
    from fedlit.module import FederatedModule
    from fedlit.run.component import Component, Phase, PhaseSettings
    from fedlit.run.options import ReplicaSpec, Requires
    from fedlit.run.run import Run
    from fedlit.strategy import FederatedStrategy
    from fedlit.trained import train
    from fedlit.wrapped import (
        Federated,
        FederatedAdaBN,
        FederatedCORAL,
        FederatedDAN,
        FederatedProx,
        FederatedRep,
    )

__all__ = [
    "Client",
    "Component",
    "Federated",
    "FederatedAdaBN",
    "FederatedCORAL",
    "FederatedDAN",
    "FederatedModule",
    "FederatedProx",
    "FederatedRep",
    "FederatedStrategy",
    "Federation",
    "Phase",
    "PhaseSettings",
    "ReplicaSpec",
    "Requires",
    "Run",
    "load",
    "train",
]

__version__ = version("fedlit")

_HOMES = {
    "Client": "fedlit.federation",
    "Federation": "fedlit.federation",
    "FederatedModule": "fedlit.module",
    **dict.fromkeys(("Component", "Phase", "PhaseSettings"), "fedlit.run.component"),
    **dict.fromkeys(("ReplicaSpec", "Requires"), "fedlit.run.options"),
    "Run": "fedlit.run.run",
    "load": "fedlit.exported",
    "train": "fedlit.trained",
    "FederatedStrategy": "fedlit.strategy",
    **dict.fromkeys(("Federated", "FederatedAdaBN", "FederatedCORAL"), "fedlit.wrapped"),
    **dict.fromkeys(("FederatedDAN", "FederatedProx", "FederatedRep"), "fedlit.wrapped"),
}


def __getattr__(name: str) -> Any:
    # Importing lightning takes seconds; `import fedlit` alone should not.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fedlit' has no attribute {name!r}")
