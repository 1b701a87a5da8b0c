"""Weights that several layers of a network share, which all copies of it have to keep tied."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn


def tied_weights(network: nn.Module) -> list[tuple[str, str]]:
    """Parameters and buffers that a network has under several names.

    Args:
        network: Of which `state_dict` has every name.

    Returns:
        The first name and another one, for each further name.
    """
    first: dict[int, str] = {}
    named = [*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False)]
    pairs = [(first.setdefault(id(tensor), name), name) for name, tensor in named]
    return [(name, other) for name, other in pairs if name != other]


def check_tied(extractor: nn.Module, classifier: nn.Module, apart: str, stays_local: tuple[str, ...]) -> None:
    """Refuse weights that copies of the networks could not share as the networks themselves do.

    Args:
        extractor: As given to a method.
        classifier: As given to a method.
        apart: Why extractor and classifier can share no weight; empty where they can.
        stays_local: Beginnings of names that never leave a client.

    Raises:
        ValueError: If there are such weights.
    """
    both = nn.ModuleDict({"extractor": extractor, "classifier": classifier})
    for name, other in tied_weights(both):
        crossing = name.startswith("extractor.") != other.startswith("extractor.")
        if crossing and (apart or name.startswith(stays_local) != other.startswith(stays_local)):
            reason = apart or "one of both stays at its client, and the other is averaged"
            raise ValueError(
                f"{name!r} and {other!r} are one weight, but {reason}: give the classifier weights of its own, or take "
                "a method that trains and averages both together, such as FedAvg"
            )
    for (device, _, end, name), (next_device, start, _, other) in pairwise(sorted(_memory(both))):
        if device == next_device and start < end:
            first, second = sorted((name, other), reverse=True)
            raise ValueError(
                f"{first!r} and {second!r} share memory but are two parameters, which a client's copy of the networks "
                "would separate: assign the same Parameter to both, or give each its own memory"
            )


def check_part(replica: nn.Module, within: tuple[str, ...]) -> None:
    """Raise a `ValueError` if a weight whose name begins in one of these ways is tied to one whose name does not."""
    for name, other in tied_weights(replica):
        if name.startswith(within) != other.startswith(within):
            raise ValueError(
                f"{name!r} and {other!r} are one weight, which cannot be averaged as part of {list(within)} alone: "
                "average all parts that have it, or give each part weights of its own"
            )


def _memory(network: nn.Module) -> list[tuple[str, int, int, str]]:
    """Device, first address, the address after the last, and name of each parameter that is an ordinary tensor."""
    found = []
    for name, param in network.named_parameters():
        ordinary = type(param) is nn.Parameter and param.layout is torch.strided and not param.is_meta
        if ordinary and param.numel():
            extent = 1 + sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
            start = param.data_ptr()
            found.append((str(param.device), start, start + extent * param.element_size(), name))
    return found
