"""Checkpoints: what is a client's is under ``checkpoint["clients"][name]``, and everything else is public.

Lightning has weights, optimisers and schedules of all clients in one place each: `split` puts every client's share
under its name, and `join` puts them back. Of several processes each writes its own clients, and `gather` unites them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from fedlit.federation import FederationError, RosterError
from fedlit.training.method import Method

REPLICAS = "replicas."
"""Prefix of the clients' weights in a module's state dict: ``replicas.NAME.…``."""

SERVER = "server"
"""Key of what process 0 keeps by itself, where the server lives: totals for those who were away, and clocks."""


def class_path(method: Method) -> str:
    """Where a method is defined, which names it in checkpoints and between processes."""
    return f"{type(method).__module__}.{type(method).__qualname__}"


def save(method: Method, checkpoint: dict[str, Any]) -> None:
    """Put what Lightning has saved of each client under its name, and add what fedlit saves."""
    federation = method.federation
    local = [client.name for client in federation.local_clients]
    split(checkpoint, local)
    state = federation.state_dict()
    totals, checkpoint.setdefault(SERVER, {})["federation"] = state.pop("clients"), state.pop("server")
    checkpoint |= {"federation": state, "method": class_path(method), "plan": method.record.plan}
    losses = method.record.losses() if federation.batch_idx else {}
    for name in local:
        own = {"totals": totals[name], "losses": losses.get(name, []), "received": method.shared.received.get(name)}
        checkpoint["clients"][name] |= own


def load(method: Method, checkpoint: dict[str, Any]) -> None:
    """Give Lightning its form back, and go on where the checkpoint stopped if training does.

    Raises:
        RosterError: If it belongs to another roster, or training cannot go on from it.
    """
    federation = method.federation
    federation.roster.check(checkpoint["federation"]["roster"])
    local = [client.name for client in federation.local_clients]
    join(checkpoint, local)
    trainer = method._trainer
    if trainer is not None and trainer.state.fn != TrainerFn.FITTING:
        return  # for validation and testing, only the weights are of interest
    if "clients" not in checkpoint:
        if trainer is None:
            return
        raise RosterError(
            "the checkpoint is of a version of fedlit that did not keep each client's state under its name, and "
            "training cannot go on from it: train anew, or use its weights in validate, test, predict and export"
        )
    if checkpoint["method"] != class_path(method):
        raise RosterError(
            f"the checkpoint is one of {checkpoint['method']}, this run trains {class_path(method)}: resume with the "
            "same method, or load the weights alone with load_from_checkpoint"
        )
    own = {name: checkpoint["clients"][name] for name in local}
    memory = {"server": checkpoint[SERVER]["federation"], "clients": {name: own[name]["totals"] for name in own}}
    federation.load_state_dict(checkpoint["federation"] | memory)
    method.record.restore_plan_(checkpoint["plan"])
    for name, state in own.items():
        method.record.restore_(name, state["losses"])
        if state["received"] is not None:
            method.shared.restore_(name, state["received"])


def split(checkpoint: dict[str, Any], clients: Sequence[str]) -> None:
    """Put what Lightning saved of each local client under its name, in place; what is nobody's stays where it was."""
    own = {name: checkpoint.setdefault("clients", {}).setdefault(name, {}) for name in clients}
    for name, state in own.items():
        prefix = f"{REPLICAS}{name}."
        weights = {key: tensor for key, tensor in checkpoint["state_dict"].items() if key.startswith(prefix)}
        state["weights"] = {key.removeprefix(prefix): tensor for key, tensor in weights.items()}
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k not in weights}
    if "optimizer_states" in checkpoint:
        optimizers = checkpoint.pop("optimizer_states")
        for name, state in own.items():
            state["optimizers"] = [_groups_of(name, optimizer) for optimizer in optimizers]
    schedules = checkpoint.get("lr_schedulers", [])
    for place, schedule in enumerate(schedules):
        if schedule and set(schedule) <= set(clients):  # else one of the module's own, equal on all processes
            schedules[place] = None
            for name, state in schedule.items():
                own[name].setdefault("lr_schedulers", {})[place] = state


def join(checkpoint: dict[str, Any], clients: Collection[str]) -> None:
    """Put the states of local clients where Lightning looks for them, in place.

    A checkpoint that is in Lightning's form already, as those of early versions are, stays as it is.
    """
    if "clients" not in checkpoint:
        return
    own = {name: state for name, state in checkpoint["clients"].items() if name in clients}
    checkpoint["state_dict"] = dict(checkpoint["state_dict"])
    for name, state in own.items():
        checkpoint["state_dict"] |= {f"{REPLICAS}{name}.{key}": tensor for key, tensor in state["weights"].items()}
    optimizers = [state["optimizers"] for state in own.values() if "optimizers" in state]
    if optimizers:
        each = zip(*optimizers, strict=True)
        checkpoint["optimizer_states"] = [_numbered(chain.from_iterable(groups)) for groups in each]
    for place, schedule in enumerate(checkpoint.get("lr_schedulers", [])):
        if schedule is None:
            schedules = {name: state.get("lr_schedulers", {}) for name, state in own.items()}
            checkpoint["lr_schedulers"][place] = {name: of[place] for name, of in schedules.items() if place in of}


def gather(parts: Sequence[Mapping[str, Any]], clients: Sequence[str], own: Collection[str] = ()) -> dict[str, Any]:
    """The checkpoint of the whole federation from those of its processes.

    Args:
        parts: One for each rank, each with the clients of that rank.
        clients: All names, in roster order.
        own: Keys that processes may have values of their own under, of which that of rank 0 is taken: of a site's data.

    Returns:
        The checkpoint of rank 0, with the clients of all ranks.

    Raises:
        FederationError: If something that is under no client's name differs between processes.
    """
    states = {name: state for part in parts for name, state in part["clients"].items()}
    for rank, part in enumerate(parts):
        for key in dict.fromkeys([*parts[0], *part]):
            here, there = parts[0].get(key), part.get(key)
            if key in ("clients", SERVER, *own) or same(here, there):
                continue
            if key == "callbacks":
                _warn_of_callbacks(here or {}, there or {}, rank)
                continue
            raise FederationError(
                f"checkpoint[{key!r}] differs between ranks 0 and {rank}, and the file could keep one of them only: "
                f"put what is a client's under checkpoint['clients'][name], where {key!r} is saved"
            )
    return {**parts[0], "clients": {name: states[name] for name in clients if name in states}}


def _warn_of_callbacks(here: Mapping[str, Any], there: Mapping[str, Any], rank: int) -> None:
    for key in dict.fromkeys([*here, *there]):
        if not key.startswith("Timer") and not same(here.get(key), there.get(key)):  # clocks differ
            rank_zero_warn(
                f"the state of callback {key} differs between ranks 0 and {rank}; the checkpoint keeps that of rank 0. "
                "Let its on_save_checkpoint put what is a client's under checkpoint.setdefault('clients', {})[name]"
            )


def same(one: Any, other: Any) -> bool:
    """Whether two values of a checkpoint are equal to the last bit; of objects that are no data, the types."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bytes(one), _bytes(other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))
    plain = isinstance(one, str | bytes | int | float | complex | set | frozenset | None)
    return not plain or one == other or (one != one and other != other)  # NaN is equal to itself here


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def arrange(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimiser state in the order of the groups of the optimiser that is about to load it.

    It may have groups of other clients too. A client may have several groups (one per part of its network); the n-th of
    a client meets the n-th of that client.
    """
    names = [group.get("client") for group in optimizer.param_groups]
    saved = {name: _groups_of(name, state) for name in names}
    return _numbered([saved[name].pop(0) for name in names])


def _groups_of(client: Any, optimizer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A client's parameter groups, each with the states of its parameters in place of their numbers."""
    return [
        {**group, "params": [optimizer["state"].get(number) for number in group["params"]]}
        for group in optimizer["param_groups"]
        if group.get("client") == client
    ]


def _numbered(groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """An optimiser state of these groups, with parameters numbered as torch does."""
    states: dict[int, Any] = {}
    numbered: list[dict[str, Any]] = []
    number = 0
    for group in groups:
        numbers = range(number, number + len(group["params"]))
        states |= {new: state for new, state in zip(numbers, group["params"], strict=True) if state is not None}
        numbered.append({**group, "params": list(numbers)})
        number = numbers.stop
    return {"state": states, "param_groups": numbered}
