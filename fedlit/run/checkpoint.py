"""Checkpoints: a client's state is under ``checkpoint["clients"][name]``, and everything else is public.

Lightning saves all clients together: `split` puts each one's share under its name, and `join` puts them back.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, cast

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from fedlit.federation import FederationError, RosterError
from fedlit.models.copies import lazily_copied, memory_of, share_
from fedlit.run.checkpoint_files import PROCESS
from fedlit.run.clock import is_share
from fedlit.run.optimisation import changes
from fedlit.run.run import Run

REPLICAS = "replicas."
"""Prefix of the clients' weights in a module's state dict: ``replicas.NAME.…``."""

SERVER = "server"
"""Key of what process 0 keeps for the server: totals for clients that were absent, and clocks."""


def class_path(run: Run) -> str:
    """Return the import path of a method's class, its name in checkpoints and between processes."""
    return public_path(f"{type(run.module).__module__}.{type(run.module).__qualname__}")


def public_path(path: str) -> str:
    """Return a class's import path without the file of fedlit that has it, which may change."""
    return re.sub(r"^fedlit\.methods\.\w+\.(?=\w+$)", "fedlit.methods.", path)


def save(run: Run, checkpoint: dict[str, Any]) -> None:
    """Put each client's state under its name; add the state of the federation and of the components."""
    federation = run.federation
    if run.turns.unfinished:
        raise FederationError(
            f"no checkpoint is written: a local step has failed which clients {run.turns.unfinished} have taken, and "
            "others have not, so that a run that goes on from here would take it twice. Resume from an earlier one"
        )
    local = [client.name for client in federation.local_clients]
    split(checkpoint, local)
    state = federation.state_dict()
    totals, digests = state.pop("clients"), state.pop("digests")
    checkpoint.setdefault(SERVER, {})["federation"] = state.pop("server")
    checkpoint |= {"federation": state, "method": class_path(run)}
    for each in run.components:
        checkpoint |= each.public_state()
        for name in local:
            checkpoint["clients"][name] |= each.client_state(name)
    for name in local:
        checkpoint["clients"][name] |= {"totals": totals[name], "digests": digests[name]}


def load(run: Run, checkpoint: dict[str, Any]) -> None:
    """Restore Lightning's layout and, if training goes on, the state of the federation.

    Raises:
        RosterError: If it belongs to another roster, or training cannot go on from it.
    """
    federation = run.federation
    federation.roster.check(checkpoint["federation"]["roster"])
    if is_share(run.clock.warmup):
        run.clock.warmup_rounds = (checkpoint.get("plan") or {}).get("warmup_rounds", run.clock.warmup_rounds)
    local = [client.name for client in federation.local_clients]
    predicting = run.is_attached and run.trainer.state.fn == TrainerFn.PREDICTING
    check_there(checkpoint, [name for name in local if name == run.target.name] if predicting else local)
    join(checkpoint, local)
    complete(run, checkpoint, local)
    states = {name: checkpoint["clients"].get(name, {}) for name in local}
    resumes = run.is_fitting or not run.is_attached
    if resumes:
        _check_resumed(run, checkpoint)
        totals = {name: state["totals"] for name, state in states.items()}
        digests = {name: state.get("digests", {}) for name, state in states.items()}
        memory = {"server": checkpoint[SERVER]["federation"], "clients": totals, "digests": digests}
        federation.load_state_dict(checkpoint["federation"] | memory)
    for each in run.components:
        each.load_state(states, checkpoint, resumes)


def _check_resumed(run: Run, checkpoint: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that training cannot go on from; warn of changed arguments."""
    if public_path(checkpoint["method"]) != class_path(run):
        raise RosterError(
            f"the checkpoint is one of {checkpoint['method']}, this run trains {class_path(run)}: resume with the "
            "same method, or load the weights alone with load_from_checkpoint"
        )
    _warn_of_changes(run, checkpoint)
    if run.federation.hosts_server and checkpoint.get(PROCESS, 0):
        raise RosterError(
            f"process 0 resumes from a file of process {checkpoint[PROCESS]}, and needs its own, which has the state "
            "of the server: NAME.ckpt, and not NAME.ckpt.part1"
        )


def _warn_of_changes(run: Run, checkpoint: Mapping[str, Any]) -> None:
    """Warn of arguments that differ from those with which training began."""
    before, now = checkpoint.get("hyper_parameters", {}), run.module.hparams
    # the roster is compared elsewhere; param_groups below
    changed = changes(
        before, now, [key for key in now if key in before and key not in ("param_groups", "clients", "recompute")]
    )
    if changed:
        rank_zero_warn(f"training goes on with other arguments than the checkpoint's: {'; '.join(changed.values())}")
    if "param_groups" in before and before["param_groups"] != run.local.param_groups:  # as rates of the optimizer are
        rank_zero_warn(
            f"param_groups was {before['param_groups']} and is {run.local.param_groups}: an optimizer goes on with the "
            "settings that the checkpoint has"
        )


def complete(run: Run, checkpoint: dict[str, Any], clients: Sequence[str]) -> None:
    """Fill in this process's weights for clients whose states a lone target's file lacks."""
    lacking = {name for name in clients if name not in checkpoint["clients"]}
    own: Any = run.module.state_dict()
    state: Any = OrderedDict(checkpoint["state_dict"])
    state.update({key: own[key] for key in own if _in_client(key)[0] in lacking})
    state._metadata = own._metadata
    checkpoint["state_dict"] = state


def local_part(run: Run, state: Mapping[str, Any], strict: bool) -> Mapping[str, Any]:
    """Return a state dict without the weights of clients that other processes host.

    Raises:
        ValueError: If it is another part of a checkpoint.
        RosterError: If it has no weights of clients, or if ``strict`` and a local client's are missing or a client is
            unknown.
    """
    names, kind = [client.name for client in run.clients], run.name
    load_file = f"load the file with {kind}.load_from_checkpoint(path, ...), or give the Trainer ckpt_path=path"
    if "state_dict" in state or any(isinstance(state.get(name), Mapping) for name in names):
        what = "a whole checkpoint" if "state_dict" in state else "checkpoint['clients']"
        raise ValueError(f"state_dict must have weights by their names replicas.CLIENT..., got {what}: {load_file}")
    there = dict.fromkeys(client for client, _ in map(_in_client, state) if client)
    lacking = [client.name for client in run.federation.local_clients if client.name not in there]
    if lacking and not there:
        raise RosterError(
            f"state_dict has no weights of clients {lacking}, so that nothing would be loaded: a checkpoint file has "
            f"them in checkpoint['clients'][NAME]['weights']; {load_file}"
        )
    known = {*names}
    unknown = [name for name in there if name not in known]
    if strict and unknown:
        raise RosterError(f"state_dict has weights of {unknown}, which are not among the clients {names}")
    if strict and lacking:
        raise RosterError(
            f"state_dict has weights of {[*there]}, and none of {lacking}, which this process hosts: load a state dict "
            "with all of them, or give strict=False, which leaves theirs as they are"
        )
    elsewhere = {name for name in names if name not in run.replicas}
    left: Any = OrderedDict({key: each for key, each in state.items() if _in_client(key)[0] not in elsewhere})
    left._metadata = getattr(state, "_metadata", None)
    return cast(Mapping[str, Any], left)


def _in_client(key: str) -> tuple[str, str]:
    """Return of whose replica a key of a state dict is, and the key in it; of none, "" and the key."""
    client, _, rest = key.removeprefix(REPLICAS).partition(".")
    return (client, rest) if key.startswith(REPLICAS) else ("", key)


def load_by_client(module: Any, state: Mapping[str, Any], strict: bool, assign: bool) -> Any:
    """Load a state dict as torch does, which would look through the keys of all clients for each of them.

    Raises:
        RuntimeError: If shapes differ, or if ``strict`` and names do.
    """
    parts: defaultdict[str, Any] = defaultdict(OrderedDict)  # by client; of what is no replica, under ""
    for key, each in state.items():
        client, rest = _in_client(key)
        parts[client][rest] = each
    for key, each in (getattr(state, "_metadata", None) or {}).items():
        client, rest = _in_client(key)
        vars(parts[client]).setdefault("_metadata", {})[rest] = each
    first: dict[Any, Tensor] = {}
    replicas = module.replicas
    module.replicas = type(replicas)()
    try:
        found = nn.Module.load_state_dict(module, parts.pop("", {}), False, assign)
    finally:
        module.replicas = replicas
    for name, replica in replicas.named_children():
        try:
            part = replica.load_state_dict(loaded := parts.pop(name, {}), False, assign)
        except RuntimeError as error:
            raise RuntimeError(f"client {name!r}: {error}") from error
        if module.run.offload is None:
            own = replica.state_dict(keep_vars=True)
            for key in loaded.keys() & own.keys():  # what clients have once in a file, they have once here
                if (other := first.setdefault(id(loaded[key]), own[key])) is not own[key]:
                    share_(own[key], other)
        found.missing_keys.extend(f"{REPLICAS}{name}.{key}" for key in part.missing_keys)
        found.unexpected_keys.extend(f"{REPLICAS}{name}.{key}" for key in part.unexpected_keys)
    found.unexpected_keys.extend(f"{REPLICAS}{name}.{key}" for name, part in parts.items() for key in part)
    if strict and any(found):
        raise RuntimeError(
            f"state_dict does not fit {type(module).__name__}: it lacks {found.missing_keys}, and has besides "
            f"{found.unexpected_keys}"
        )
    return found


def check_there(checkpoint: Mapping[str, Any], clients: Sequence[str]) -> None:
    """Raise a `RosterError` unless the files of a checkpoint have the states of these clients."""
    lacking = [name for name in clients if name not in checkpoint["clients"]]
    if lacking:
        raise RosterError(
            f"the checkpoint was written by several processes, each of its own clients, and there is no state of "
            f"{lacking} in what was read: put the files of one checkpoint side by side (NAME.ckpt, NAME.ckpt.part1, "
            "...) and give the first, place clients as they were, or train with gather_checkpoints true"
        )


def split(checkpoint: dict[str, Any], clients: Sequence[str]) -> None:
    """Move what Lightning saved of each local client under its name, in place."""
    states = checkpoint.setdefault("clients", {})
    own = {name: states.setdefault(name, {}) for name in clients}
    for state in own.values():
        state["weights"] = {}
    left = {}
    for key, tensor in checkpoint["state_dict"].items():
        name, rest = _in_client(key)
        if name in own:
            own[name]["weights"][rest] = tensor
        else:
            left[key] = tensor
    checkpoint["state_dict"] = left
    _keep_once([state["weights"] for state in own.values()])
    if "optimizer_states" in checkpoint:
        optimizers = [_groups_by_client(optimizer) for optimizer in checkpoint.pop("optimizer_states")]
        for name, state in own.items():
            state["optimizers"] = [groups.get(name, []) for groups in optimizers]
        if not own:  # a server's, which train nothing
            checkpoint.setdefault(SERVER, {})["optimizers"] = [groups.get(SERVER, []) for groups in optimizers]
    schedules = checkpoint.get("lr_schedulers", [])
    for place, schedule in enumerate(schedules):
        if schedule and set(schedule) <= {*clients, SERVER}:  # else one of the module's own, equal on all processes
            schedules[place] = None
            for name, state in schedule.items() if own else ():
                own[name].setdefault("lr_schedulers", {})[place] = state


def _keep_once(clients: Sequence[dict[str, Any]]) -> None:
    """Replace weights that clients have in one memory by one tensor, which a file has once.

    It is a copy that shares the memory, too: writing to a file gives what is written memory of its own.
    """
    users = Counter(memory_of(weight) for weights in clients for weight in weights.values())
    once: dict[Hashable, Tensor | None] = {None: None}
    for weights in clients:
        for key, weight in weights.items():
            where = memory_of(weight)
            if users[where] > 1 and where not in once:
                once[where] = lazily_copied(weight)
            if (kept := once.get(where)) is not None:
                weights[key] = kept


def join(checkpoint: dict[str, Any], clients: Collection[str]) -> None:
    """Move the states of local clients to where Lightning reads them, in place."""
    own = {name: state for name, state in checkpoint["clients"].items() if name in clients}
    checkpoint["state_dict"] = dict(checkpoint["state_dict"])
    for name, state in own.items():
        checkpoint["state_dict"] |= {f"{REPLICAS}{name}.{key}": tensor for key, tensor in state["weights"].items()}
    optimizers = [state["optimizers"] for state in own.values() if "optimizers" in state]
    if not own and "optimizers" in checkpoint.get(SERVER, {}):
        checkpoint["optimizer_states"] = [_numbered(groups) for groups in checkpoint[SERVER]["optimizers"]]
    elif any("optimizers" in state for state in checkpoint["clients"].values()):
        each = zip(*optimizers, strict=True)
        checkpoint["optimizer_states"] = [_numbered(chain.from_iterable(groups)) for groups in each]
    for place, schedule in enumerate(checkpoint.get("lr_schedulers", [])):
        if schedule is None:
            schedules = {name: state.get("lr_schedulers", {}) for name, state in own.items()}
            checkpoint["lr_schedulers"][place] = {name: of[place] for name, of in schedules.items() if place in of}


def arrange(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Reorder an optimiser state as the groups of the optimiser that loads it; a `RosterError` if sizes differ.

    The state may hold groups of other clients too. Of several groups of a client, the n-th meets the n-th.
    """
    names = [group.get("client") for group in optimizer.param_groups]
    everything, sizes = _groups_by_client(state), defaultdict[Any, list[int]](list)
    for group in optimizer.param_groups:
        sizes[group.get("client")].append(len(group["params"]))
    saved = {name: [*everything.get(name, [])] for name in sizes}
    for name, groups in saved.items():
        own, before = sizes[name], [len(group["params"]) for group in groups]
        if own != before:
            raise RosterError(
                f"the checkpoint has parameter groups of {before} parameters for client {name!r}, and the optimizer of "
                f"this run has groups of {own}: go on with the same networks, param_groups and frozen parts"
            )
    return _numbered([saved[name].pop(0) for name in names])


def _groups_by_client(optimizer: Mapping[str, Any]) -> dict[Any, list[dict[str, Any]]]:
    """Return parameter groups by client, with states of parameters in place of their numbers."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for group in optimizer["param_groups"]:
        states = [optimizer["state"].get(number) for number in group["params"]]
        found.setdefault(group.get("client"), []).append({**group, "params": states})
    return found


def _numbered(groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return an optimiser state of these groups, with parameters numbered as torch does."""
    states: dict[int, Any] = {}
    numbered: list[dict[str, Any]] = []
    number = 0
    for group in groups:
        numbers = range(number, number + len(group["params"]))
        states |= {new: state for new, state in zip(numbers, group["params"], strict=True) if state is not None}
        numbered.append({**group, "params": list(numbers)})
        number = numbers.stop
    return {"state": states, "param_groups": numbered}
