"""One method of fedlit as a module in an ordinary Trainer: FedGP, for a plant that has inspected a few machines.

The networks are the project's own; so is the Trainer, with whatever strategy, logger and callbacks it has.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Adam
from torch.utils.data import TensorDataset

from fedlit import Client
from fedlit.data import FederatedLoader
from fedlit.methods import FedGP
from plant_monitor.detector import Spectrum
from plant_monitor.signals import CONDITIONS, record


def make_method(sources: tuple[str, ...] = ("gdansk", "oslo", "lyon"), target: str = "turin") -> FedGP:
    """FedGP over the plants, of which the target has labels for some of its records."""
    roster = [*map(Client, sources), Client(target, role="target", labelled=True)]
    return FedGP(
        roster,
        target,
        len(CONDITIONS),
        Spectrum(),
        nn.Linear(16, len(CONDITIONS)),
        beta=0.5,
        optimizer=lambda params: Adam(params, lr=0.01),
    )


def make_loader(method: FedGP, inspected: int = 20, machines: int = 200, seed: int = 0) -> FederatedLoader:
    """Training records of each plant; -1 stands for the label that a machine of the target does not have."""
    data = {}
    for place, client in enumerate(method.clients):
        signals, conditions = record(client.name, machines, 10 * seed + place)
        if client.is_target:
            conditions = torch.where(torch.arange(machines) < inspected, conditions, -1)
        data[client.name] = TensorDataset(signals, conditions)
    return FederatedLoader(data, batch_size=40, seed=seed)
