"""Facts that all processes of a run must share, and that sites compare with the server."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch.nn.parameter import is_lazy

from fedlit.federation.descriptions import described
from fedlit.federation.documents import fingerprint
from fedlit.federation.streams import global_seed
from fedlit.run.checkpoint import class_path
from fedlit.run.run import Run

_TRAINED_WITH = (
    "max_epochs",
    "max_steps",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "check_val_every_n_epoch",
    "val_check_interval",
    "limit_train_batches",
    "limit_val_batches",
    "fast_dev_run",
)
"""Attributes of a Trainer that must be equal on all processes, so that they stay in step."""


def facts_of(run: Run, rounds: tuple[int | None, int]) -> dict[str, Any]:
    """Return what must be equal on all processes; ``rounds`` are local steps in a round and rounds in an epoch."""
    return {
        "roster": [(client.name, client.role) for client in run.clients],
        "method": class_path(run),
        "rounds": rounds,
        "seed (call seed_everything before building the module)": global_seed(),
        "the initial network (call seed_everything before building it)": networks_fingerprint(run),
    }


def trained_with(trainer: Trainer) -> dict[str, Any]:
    """Return the arguments of a Trainer that must be equal on all processes."""
    return {name: getattr(trainer, name, None) for name in _TRAINED_WITH if getattr(trainer, name, None) != 0}


def networks_fingerprint(run: Run) -> str:
    """Return a fingerprint of the networks that clients start from."""
    digest = hashlib.sha256()
    for network in run.originals:
        for name, tensor in network.state_dict(keep_vars=True).items():
            digest.update(name.encode())
            if not isinstance(tensor, torch.Tensor):  # of get_extra_state
                digest.update(fingerprint(tensor).encode())
                continue
            if is_lazy(tensor):  # drawn from the seed when the width of the data is known
                continue
            if tensor.is_meta:
                raise ValueError(
                    "the module's networks are empty, as those of a server are once its run has begun: build the "
                    "module anew for another run"
                )
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        # frozen weights are not sent
        digest.update(repr([param.requires_grad for param in network.parameters()]).encode())
    return digest.hexdigest()[:16]


def arguments(run: Run) -> dict[str, Any]:
    """Return the method's arguments that are plain data, and what makes optimisers and schedules."""
    made = {name: getattr(run.local, name) for name in ("optimizer", "lr_scheduler")}
    return {name: plain(value) for name, value in {**run.module.hparams, **made}.items()}


def plain(value: Any) -> Any:
    """Return a value as JSON has it, else as text: functions and objects by type, as sites define them elsewhere."""
    if isinstance(value, bool | int | float | str | type(None)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, partial):  # a class of a configuration, with its arguments
        made = [plain(each) for each in value.args if isinstance(each, type)] or plain(value.func)
        return {"made by": made, **{name: plain(each) for name, each in value.keywords.items()}}
    text = described(value) if isinstance(value, type | set | frozenset | np.ndarray | torch.Tensor) else repr(value)
    return type(value).__name__ if " at 0x" in text else text
