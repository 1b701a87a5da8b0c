"""One checkpoint for all clients: what a single process hosting everyone would have written.

Each process writes its own clients' part; `merge` puts the parts together on rank 0, and `keep_clients` cuts out what
another process needs, whatever the number of processes was and is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

REPLICAS = "replicas."
"""Prefix of the clients' weights in a module's state dict: ``replicas.NAME.…``."""


def merge(parts: Sequence[Mapping[str, Any]], clients: Sequence[str]) -> dict[str, Any]:
    """Checkpoint of the whole federation from those of its processes.

    Args:
        parts: One checkpoint per rank, each with the clients of that rank.
        clients: All names, in roster order, which is the order of one process hosting everyone.

    Returns:
        The checkpoint of rank 0, with the clients of all ranks.
    """
    whole = dict(parts[0])
    whole["state_dict"] = _merge_weights([part["state_dict"] for part in parts], clients)
    if "optimizer_states" in whole:
        states = zip(*(part["optimizer_states"] for part in parts), strict=True)
        whole["optimizer_states"] = [_merge_optimizer(state, clients) for state in states]
    if "lr_schedulers" in whole:
        schedules = zip(*(part["lr_schedulers"] for part in parts), strict=True)
        whole["lr_schedulers"] = [_merge_by_client(state, clients) for state in schedules]
    for key in ("round_losses", "public", "memory"):
        if key in whole:
            whole[key] = _merge_by_client([part[key] for part in parts], clients)
    if "federation" in whole:
        whole["federation"] = _merge_totals([part["federation"] for part in parts])
    return whole


def keep_clients(checkpoint: Mapping[str, Any], clients: Collection[str]) -> dict[str, Any]:
    """The part of a whole checkpoint that a process hosting ``clients`` restores."""
    part = dict(checkpoint)
    part["state_dict"] = {
        name: tensor
        for name, tensor in checkpoint["state_dict"].items()
        if _client_of(name) is None or _client_of(name) in clients
    }
    if "optimizer_states" in part:
        part["optimizer_states"] = [_keep_groups(state, clients) for state in checkpoint["optimizer_states"]]
    return part


def _client_of(name: str) -> str | None:
    return name.removeprefix(REPLICAS).split(".", 1)[0] if name.startswith(REPLICAS) else None


def _merge_weights(parts: Sequence[Mapping[str, Any]], clients: Sequence[str]) -> dict[str, Any]:
    shared = {name: tensor for name, tensor in parts[0].items() if _client_of(name) is None}
    own = {name: tensor for part in parts for name, tensor in part.items() if _client_of(name) is not None}
    place = {client: index for index, client in enumerate(clients)}
    return shared | dict(sorted(own.items(), key=lambda item: place[str(_client_of(item[0]))]))


def _merge_by_client(parts: Sequence[Any], clients: Sequence[str]) -> Any:
    if not all(isinstance(part, Mapping) and set(part) <= set(clients) for part in parts):
        return parts[0]  # a schedule of the module's own, equal on all processes
    merged = {client: state for part in parts for client, state in part.items()}
    return {client: merged[client] for client in clients if client in merged}


def _merge_totals(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Federation state of rank 0; totals that only clients can read come from the ranks whose clients have."""
    published = {channel: dict(item) for channel, item in parts[0]["published"].items()}
    for channel, item in published.items():
        read = [part["published"][channel]["revealed"] for part in parts if channel in part["published"]]
        item["revealed"] = next((total for total in read if total is not None), None)
    return {**parts[0], "published": published}


def _merge_optimizer(parts: Sequence[Mapping[str, Any]], clients: Sequence[str]) -> dict[str, Any]:
    """One optimiser state: groups in roster order, parameters renumbered in that order, as torch numbers them."""
    place = {client: index for index, client in enumerate(clients)}
    pieces = [(group, part["state"]) for part in parts for group in part["param_groups"]]
    for group, _ in pieces:
        if group.get("client") not in place:
            raise ValueError(
                f"each parameter group of an optimizer needs the key 'client' with a name from {list(clients)}, got "
                f"{group.get('client')!r}: build the groups with client_param_groups(), or as it does"
            )
    pieces.sort(key=lambda piece: place[piece[0]["client"]])
    return _renumber(pieces)


def arrange(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An optimiser state in the order of an optimiser's own groups.

    A client may have several groups (one per part of its network); the n-th of a client meets the n-th of that client.

    Args:
        state: State dict with the groups of these clients and maybe of others.
        groups: ``param_groups`` of the optimiser that will load it.
    """
    saved: dict[Any, list[Mapping[str, Any]]] = {}
    for group in state["param_groups"]:
        saved.setdefault(group.get("client"), []).append(group)
    return _renumber([(saved[group.get("client")].pop(0), state["state"]) for group in groups])


def _keep_groups(state: Mapping[str, Any], clients: Collection[str]) -> dict[str, Any]:
    return _renumber([(group, state["state"]) for group in state["param_groups"] if group.get("client") in clients])


def _renumber(pieces: Sequence[tuple[Mapping[str, Any], Mapping[int, Any]]]) -> dict[str, Any]:
    states: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for group, state in pieces:
        numbers = range(number, number + len(group["params"]))
        for new, old in zip(numbers, group["params"], strict=True):
            if old in state:
                states[new] = state[old]
        groups.append({**group, "params": list(numbers)})
        number = numbers.stop
    return {"state": states, "param_groups": groups}
