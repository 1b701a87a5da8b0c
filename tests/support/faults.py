"""What happens to one site at one moment of a run: it is killed, frozen, or cut off."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from fedlit.federation.aggregation import Aggregation
from fedlit.federation.messenger import Messenger
from fedlit.remote.carrier import BrokenError, Pieces

PHASES = ("local steps", "opening", "protect", "unmasking", "download", "checkpoint")
KINDS = ("kill", "stop", "cut")
FROZEN = 20
"""Seconds for which a site is."""


class Fault(pl.Callback):
    """Strikes when a site is in a phase for the n-th time.

    Args:
        words: ``SITE:PHASE:NUMBER:KIND``, of the names above; numbers count from 0.
    """

    def __init__(self, words: str) -> None:
        self.site, self.phase, number, self.kind = words.split(":")
        self.left = int(number)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.federation = pl_module.federation
        if not any(client.name == self.site for client in self.federation.local_clients):
            return
        watched: tuple[Any, str] | None = {
            "opening": (Aggregation, "_converse"),
            "protect": (Messenger, "to_server"),
            "unmasking": (Aggregation, "_unmask"),
            "download": (Messenger, "broadcast"),
            "checkpoint": (trainer.strategy.checkpoint_io, "save_checkpoint"),
        }.get(self.phase)
        if watched is None:
            return
        owner, name = watched
        original: Callable[..., Any] = getattr(owner, name)

        def struck(*args: Any, **kwargs: Any) -> Any:
            self.count()
            return original(*args, **kwargs)

        setattr(owner, name, struck)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if self.phase == "local steps" and any(client.name == self.site for client in self.federation.local_clients):
            self.count()

    def count(self) -> None:
        self.left -= 1
        if self.left == -1:
            self.strike()

    def strike(self) -> None:
        if self.kind == "cut":
            caller = self.federation.transport._caller  # type: ignore[attr-defined]
            caller.close()
            caller.call = cut_off
            return
        if self.kind == "stop":  # for longer than anybody waits; then the test has to end
            subprocess.Popen(["/bin/sh", "-c", f"sleep {FROZEN}; kill -9 {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)


def cut_off(request: Pieces) -> Pieces:
    raise BrokenError("the cable is out")
