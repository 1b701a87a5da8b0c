"""Checkpoints of several processes: comparison of public state, and one file for all by process 0."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fedlit.federation import Federation, FederationError, PayloadError
from fedlit.federation.client import names_of
from fedlit.federation.documents import document, fingerprint, read_document
from fedlit.privacy import DecodeError, PrivacyWarning
from fedlit.run.checkpoint import SERVER
from fedlit.run.checkpoint_files import PROCESS, SET
from fedlit.run.run import Run


@dataclass(frozen=True)
class Part:
    """A process's message about its checkpoint, for `gather`.

    Args:
        clients: State of each of its clients; empty where each process writes a file.
        public: Fingerprint of everything else, by key.
        callbacks: Fingerprint of each callback's state.
    """

    clients: dict[str, Any]
    public: dict[str, str]
    callbacks: dict[str, str]

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any], own: Collection[str] = (), states: bool = True) -> Part:
        """Summarise a checkpoint; values under the keys ``own`` may differ between processes."""
        public = {key: value for key, value in checkpoint.items() if key not in ("clients", "callbacks", SERVER, *own)}
        callbacks = checkpoint.get("callbacks", {})
        prints = [{key: fingerprint(value) for key, value in some.items()} for some in (public, callbacks)]
        return cls({name: state if states else {} for name, state in checkpoint["clients"].items()}, *prints)

    @classmethod
    def read(cls, clients: Collection[str], message: Tensor) -> Part:
        """Read a message from the host of these clients; raises a `DecodeError` if it is something else."""
        sent = read_document(message)
        names = {each.name for each in fields(cls)}
        if not isinstance(sent, dict) or {*sent} != names or not all(isinstance(part, dict) for part in sent.values()):
            raise DecodeError(f"a process sent no checkpoint, but {str(sent)[:100]}")
        states = sent["clients"]
        if {*states} != {*clients} or not all(isinstance(state, dict) for state in states.values()):
            raise DecodeError(f"a process that hosts {[*clients]} sent the states of {str([*states])[:100]}")
        return cls(**sent)

    def message(self) -> Tensor:
        """Return the message, shape (bytes,); a `PayloadError` names what no message can hold."""
        return document({**vars(self)}, "checkpoint")


def check_public(parts: Sequence[Part]) -> None:
    """Raise a `FederationError` if public state differs between processes."""
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
    """Return rank 0's checkpoint with the clients of all ranks, in the order of ``clients``."""
    states = {name: state for part in parts for name, state in part.clients.items()}
    return {**checkpoint, "clients": {name: states[name] for name in clients if name in states}}


def unite(run: Run, checkpoint: dict[str, Any], gathered: bool, rank: int) -> dict[str, Any]:
    """Return what a process writes, after a comparison of public states; every process calls it.

    Raises:
        FederationError: On every process, if public states differ.
        PayloadError: On every process, if a state has what no message can hold.
    """
    federation = run.federation
    data = type(run.trainer.datamodule)  # type: ignore[attr-defined]
    part = Part.of(checkpoint, (data.__qualname__, LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY), gathered)
    message = torch.empty(0, dtype=torch.uint8)
    error: FederationError | DecodeError | None = None
    try:
        message = part.message()
    except PayloadError as found:
        error = found
    federation.check("checkpoint", error)
    messages, error = federation.transport.gather(message, "a checkpoint"), None
    try:
        if messages:
            parts = [Part.read(federation.roster.hosted_by(rank), each) for rank, each in enumerate(messages)]
            check_public(parts)
            checkpoint = gather(checkpoint, parts, names_of(federation.clients)) if gathered else checkpoint
    except (FederationError, DecodeError) as found:
        error = found
    federation.check("checkpoint", error)
    return checkpoint if gathered else checkpoint | {SET: fingerprint(part.public), PROCESS: rank}


def warn_of_gathered(federation: Federation) -> None:
    """Warn that one file has in plaintext what a privacy backend protects otherwise."""
    names = [client.name for client in federation.clients if not federation.is_local(client)]
    rank_zero_warn(
        f"gather_checkpoints is true: process 0 gets and writes the weights and optimiser states of {names}, "
        "which the privacy backend hides from it otherwise, in the clear",
        category=PrivacyWarning,
    )
