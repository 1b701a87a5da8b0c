"""Checkpoints: what is a client's is under ``checkpoint["clients"][name]``, and everything else is public.

Lightning has weights, optimisers and schedules of all clients in one place each: `split` puts every client's share
under its name, and `join` puts them back. Of several processes each writes its own clients, and `gather` unites them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, cast

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from fedlit.federation import FederationError, RosterError
from fedlit.federation.documents import document, fingerprint, read_document
from fedlit.privacy import DecodeError
from fedlit.run.checkpoint_files import PROCESS
from fedlit.run.label_scale import LabelScale
from fedlit.run.method import Method
from fedlit.run.tasks import Regression
from fedlit.run.warmup import is_share

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
    data = _data_of(method)
    for name in local:
        own = {"totals": totals[name], "losses": losses.get(name, []), "received": method.shared.received.get(name)}
        checkpoint["clients"][name] |= own
        if data is not None and (kept := data.client_state(name)):
            checkpoint["clients"][name]["data"] = kept
        if isinstance(method.task, Regression) and name in method.task.scales:
            checkpoint["clients"][name]["label_scale"] = method.task.scales[name].state()
    if method.target.name in local and method.target_temperature != 1:
        checkpoint["clients"][method.target.name]["temperature"] = method.target_temperature


def restore_outputs(method: Method, checkpoint: Mapping[str, Any], clients: Iterable[str]) -> None:
    """Read what networks give as in the run of a checkpoint: with its temperature of the target, and scale of labels.

    One that has none of these is of logits as they are, or of numbers in the labels' unit.

    Raises:
        RosterError: If the checkpoint has something else in their place.
    """
    if isinstance(method.task, Regression):
        states = {name: checkpoint.get("clients", {}).get(name, {}).get("label_scale") for name in clients}
        method.task.scales = {
            name: LabelScale.from_state(state, method.task.num_outputs)
            for name, state in states.items()
            if state is not None
        }
    found = checkpoint.get("clients", {}).get(method.target.name, {}).get("temperature", 1.0)
    if not isinstance(found, float) or not 0 < found < math.inf:
        raise RosterError(f"the checkpoint's temperature of the target must be a positive number, got {found!r}")
    method.target_temperature = found


def _data_of(method: Method) -> Any:
    """The data module of a run, if it keeps something of clients."""
    data = getattr(method._trainer, "datamodule", None)
    return data if hasattr(data, "client_state") else None


def load(method: Method, checkpoint: dict[str, Any]) -> None:
    """Give Lightning its form back, and go on where the checkpoint stopped if training does.

    Raises:
        RosterError: If it belongs to another roster, or training cannot go on from it.
    """
    federation = method.federation
    federation.roster.check(checkpoint["federation"]["roster"])
    if is_share(method.warmup):
        method.warmup_rounds = (checkpoint.get("plan") or {}).get("warmup_rounds", method.warmup_rounds)
    local = [client.name for client in federation.local_clients]
    trainer = method._trainer
    predicting = trainer is not None and trainer.state.fn == TrainerFn.PREDICTING
    check_there(checkpoint, [name for name in local if name == method.target.name] if predicting else local)
    join(checkpoint, local)
    complete(method, checkpoint, local)
    restore_outputs(method, checkpoint, local)
    restore_data(_data_of(method), checkpoint, local)
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
    _warn_of_changes(method, checkpoint)
    if federation.hosts_server and checkpoint.get(PROCESS, 0):
        raise RosterError(
            f"process 0 resumes from a file of process {checkpoint[PROCESS]}, and needs its own, which has the state "
            "of the server: NAME.ckpt, and not NAME.ckpt.part1"
        )
    own = {name: checkpoint["clients"][name] for name in local}
    memory = {"server": checkpoint[SERVER]["federation"], "clients": {name: own[name]["totals"] for name in own}}
    federation.load_state_dict(checkpoint["federation"] | memory)
    method.record.restore_plan_(checkpoint["plan"])
    for name, state in own.items():
        method.record.restore_(name, state["losses"])
        if state["received"] is not None:
            method.shared.restore_(name, state["received"])


_PLAIN = (bool, int, float, str, list, type(None))


def _warn_of_changes(method: Method, checkpoint: Mapping[str, Any]) -> None:
    """Warn of arguments with which training goes on otherwise than it began."""
    before, now = checkpoint.get("hyper_parameters", {}), cast(Any, method).hparams
    changed = [
        f"{name} was {before[name]!r} and is {now[name]!r}"
        for name in now
        if name in before
        and isinstance(now[name], _PLAIN)
        and before[name] != now[name]
        and name not in ("param_groups", "clients")  # the roster is compared by itself
    ]
    if changed:
        rank_zero_warn(f"training goes on with other arguments than the checkpoint's: {'; '.join(changed)}")
    if "param_groups" in before and before["param_groups"] != method.param_groups:  # as rates of the optimizer are
        rank_zero_warn(
            f"param_groups was {before['param_groups']} and is {method.param_groups}: an optimizer goes on with the "
            "settings that the checkpoint has"
        )


def complete(method: Method, checkpoint: dict[str, Any], clients: Sequence[str]) -> None:
    """Where the target predicts by itself, and has its own file alone: leave the others' replicas as they are.

    Modules read a state by the version of its form, which a checkpoint with clients apart does not state.
    """
    if "clients" not in checkpoint:
        return
    lacking = tuple(f"{REPLICAS}{name}." for name in clients if name not in checkpoint["clients"])
    own: Any = cast(nn.Module, method).state_dict()
    state: Any = OrderedDict(checkpoint["state_dict"])
    state.update({key: own[key] for key in own if lacking and key.startswith(lacking)})
    state._metadata = own._metadata
    checkpoint["state_dict"] = state


def local_part(method: Method, state: Mapping[str, Any], strict: bool) -> Mapping[str, Any]:
    """Return what a process loads of a state dict: all but the weights of clients that other processes host.

    Args:
        method: With its replicas built.
        state: As `FederatedModule.state_dict` gives it, of a process that hosts as many clients or more.
        strict: Whether it must have the weights of each local client, and of no unknown one.

    Raises:
        ValueError: If it is another part of a checkpoint.
        RosterError: If it has no weights of clients, or lacks a local client, or has an unknown one.
    """
    names, kind = [client.name for client in method.clients], type(method).__name__
    load_file = f"load the file with {kind}.load_from_checkpoint(path, ...), or give the Trainer ckpt_path=path"
    if "state_dict" in state or any(isinstance(state.get(name), Mapping) for name in names):
        what = "a whole checkpoint" if "state_dict" in state else "checkpoint['clients']"
        raise ValueError(f"state_dict must have weights by their names replicas.CLIENT..., got {what}: {load_file}")
    there = dict.fromkeys(key.split(".")[1] for key in state if key.startswith(REPLICAS))
    lacking = [client.name for client in method.federation.local_clients if client.name not in there]
    if lacking and not there:
        raise RosterError(
            f"state_dict has no weights of clients {lacking}, so that nothing would be loaded: a checkpoint file has "
            f"them in checkpoint['clients'][NAME]['weights']; {load_file}"
        )
    unknown = [name for name in there if name not in names]
    if strict and unknown:
        raise RosterError(f"state_dict has weights of {unknown}, which are not among the clients {names}")
    if strict and lacking:
        raise RosterError(
            f"state_dict has weights of {[*there]}, and none of {lacking}, which this process hosts: load a state dict "
            "with all of them, or give strict=False, which leaves theirs as they are"
        )
    elsewhere = tuple(f"{REPLICAS}{name}." for name in names if name not in method.replicas)
    if not elsewhere:
        return state
    left: Any = OrderedDict({key: each for key, each in state.items() if not key.startswith(elsewhere)})
    left._metadata = getattr(state, "_metadata", None)
    return cast(Mapping[str, Any], left)


def restore_data(data: Any, checkpoint: Mapping[str, Any], clients: Iterable[str]) -> None:
    """Give a data module what a checkpoint keeps of the data of these clients."""
    for name in clients if data is not None else ():
        state = checkpoint.get("clients", {}).get(name, {}).get("data")
        if state:
            data.load_client_state(name, state)


def check_there(checkpoint: Mapping[str, Any], clients: Sequence[str]) -> None:
    """Raise a `RosterError` unless the files of a checkpoint that were found have the states of these clients."""
    lacking = [name for name in clients if "clients" in checkpoint and name not in checkpoint["clients"]]
    if lacking:
        raise RosterError(
            f"the checkpoint was written by several processes, each of its own clients, and there is no state of "
            f"{lacking} in what was read: put the files of one checkpoint side by side (NAME.ckpt, NAME.ckpt.part1, "
            "...) and give the first, place clients as they were, or train with gather_checkpoints true"
        )


def split(checkpoint: dict[str, Any], clients: Sequence[str]) -> None:
    """Put what Lightning saved of each local client under its name, in place; what is nobody's stays where it was."""
    states = checkpoint.setdefault("clients", {})
    own = {name: states.setdefault(name, {}) for name in clients}
    for name, state in own.items():
        prefix = f"{REPLICAS}{name}."
        weights = {key: tensor for key, tensor in checkpoint["state_dict"].items() if key.startswith(prefix)}
        state["weights"] = {key.removeprefix(prefix): tensor for key, tensor in weights.items()}
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k not in weights}
    if "optimizer_states" in checkpoint:
        optimizers = checkpoint.pop("optimizer_states")
        for name, state in own.items():
            state["optimizers"] = [_groups_of(name, optimizer) for optimizer in optimizers]
        if not own:  # a server's, which train nothing
            checkpoint.setdefault(SERVER, {})["optimizers"] = [
                _groups_of(SERVER, optimizer) for optimizer in optimizers
            ]
    schedules = checkpoint.get("lr_schedulers", [])
    for place, schedule in enumerate(schedules):
        if schedule and set(schedule) <= {*clients, SERVER}:  # else one of the module's own, equal on all processes
            schedules[place] = None
            for name, state in schedule.items() if own else ():
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
    if not own and "optimizers" in checkpoint.get(SERVER, {}):
        checkpoint["optimizer_states"] = [_numbered(groups) for groups in checkpoint[SERVER]["optimizers"]]
    elif any("optimizers" in state for state in checkpoint["clients"].values()):
        each = zip(*optimizers, strict=True)
        checkpoint["optimizer_states"] = [_numbered(chain.from_iterable(groups)) for groups in each]
    for place, schedule in enumerate(checkpoint.get("lr_schedulers", [])):
        if schedule is None:
            schedules = {name: state.get("lr_schedulers", {}) for name, state in own.items()}
            checkpoint["lr_schedulers"][place] = {name: of[place] for name, of in schedules.items() if place in of}


@dataclass(frozen=True)
class Part:
    """What a process sends of its checkpoint, for `gather`.

    Args:
        clients: State of each of its clients; empty where each process writes its own.
        public: Fingerprint of everything else, by key.
        callbacks: Fingerprint of the state of each callback.
    """

    clients: dict[str, Any]
    public: dict[str, str]
    callbacks: dict[str, str]

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any], own: Collection[str] = (), states: bool = True) -> Part:
        """Of a checkpoint, in which processes may have values of their own under the keys ``own``: of a site's data.

        Without ``states``, no client's state is sent.
        """
        public = {key: value for key, value in checkpoint.items() if key not in ("clients", "callbacks", SERVER, *own)}
        callbacks = checkpoint.get("callbacks", {})
        prints = [{key: fingerprint(value) for key, value in some.items()} for some in (public, callbacks)]
        return cls({name: state if states else {} for name, state in checkpoint["clients"].items()}, *prints)

    @classmethod
    def read(cls, clients: Collection[str], message: Tensor) -> Part:
        """Part that the host of these clients has sent; raises a `DecodeError` if it is something else."""
        sent = read_document(message)
        names = {each.name for each in fields(cls)}
        if not isinstance(sent, dict) or {*sent} != names or not all(isinstance(part, dict) for part in sent.values()):
            raise DecodeError(f"a process sent no checkpoint, but {str(sent)[:100]}")
        states = sent["clients"]
        if {*states} != {*clients} or not all(isinstance(state, dict) for state in states.values()):
            raise DecodeError(f"a process that hosts {[*clients]} sent the states of {str([*states])[:100]}")
        return cls(**sent)

    def message(self) -> Tensor:
        """For another process, shape (bytes,); a `PayloadError` names what no message can hold."""
        return document({**vars(self)}, "checkpoint")


def check_public(parts: Sequence[Part]) -> None:
    """Raise a `FederationError` if something that is under no client's name differs between processes."""
    first = parts[0]
    for rank, part in enumerate(parts):
        for key in dict.fromkeys([*first.public, *part.public]):
            if first.public.get(key) != part.public.get(key):
                raise FederationError(
                    f"checkpoint[{key!r}] differs between ranks 0 and {rank}, and the file could keep one of them "
                    f"only: put what is a client's under checkpoint['clients'][name], where {key!r} is saved"
                )
        for key in dict.fromkeys([*first.callbacks, *part.callbacks]):
            if not key.startswith("Timer") and first.callbacks.get(key) != part.callbacks.get(key):  # clocks differ
                rank_zero_warn(
                    f"the state of callback {key} differs between ranks 0 and {rank}; the checkpoint keeps that of "
                    "rank 0. Let its on_save_checkpoint put what is a client's under "
                    "checkpoint.setdefault('clients', {})[name]"
                )


def gather(checkpoint: Mapping[str, Any], parts: Sequence[Part], clients: Sequence[str]) -> dict[str, Any]:
    """The checkpoint of the whole federation.

    Args:
        checkpoint: Of rank 0.
        parts: From all ranks.
        clients: All names, in roster order.

    Returns:
        The checkpoint of rank 0, with the clients of all ranks.
    """
    states = {name: state for part in parts for name, state in part.clients.items()}
    return {**checkpoint, "clients": {name: states[name] for name in clients if name in states}}


def arrange(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimiser state in the order of the groups of the optimiser that is about to load it.

    It may have groups of other clients too. A client may have several groups (one per part of its network); the n-th of
    a client meets the n-th of that client.

    Raises:
        RosterError: If a client's groups have other numbers of parameters.
    """
    names = [group.get("client") for group in optimizer.param_groups]
    saved = {name: _groups_of(name, state) for name in names}
    for name, groups in saved.items():
        own = [len(group["params"]) for group in optimizer.param_groups if group.get("client") == name]
        before = [len(group["params"]) for group in groups]
        if own != before:
            raise RosterError(
                f"the checkpoint has parameter groups of {before} parameters for client {name!r}, and the optimizer of "
                f"this run has groups of {own}: go on with the same networks, param_groups and frozen parts"
            )
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
