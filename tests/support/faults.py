"""Faults of one site at one moment of a run: it is killed, frozen, or cut off."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from fedlit.federation.messenger import Messenger
from fedlit.federation.sums.driver import Sums
from fedlit.privacy import AggregationClient, driver
from fedlit.remote.carrier import BrokenError, Pieces

PHASES = ("local steps", "opening", "protect", "unmasking", "download", "checkpoint")
KINDS = ("kill", "stop", "cut")
FROZEN = 20
"""Seconds for which a site is."""


class Fault(pl.Callback):
    """Strikes when a site is in a phase for the n-th time.

    Args:
        words: ``SITE:PHASE:NUMBER:KIND``, of the names above; numbers count from 0.
        folder: Folder of the files ``struck`` and ``noticed``.
    """

    def __init__(self, words: str, folder: str) -> None:
        self.folder = folder
        self.site, self.phase, number, self.kind = words.split(":")
        self.left = int(number)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.federation = pl_module.federation
        if self.federation.hosts_server:
            star: Any = self.federation.transport
            star.board.drop = self.noticing(star.board.drop)
        if not any(client.name == self.site for client in self.federation.local_clients):
            return
        watched: dict[str, list[tuple[Any, str]]] = {
            "opening": [(driver.Parties, "run_step")],
            "protect": [(kind, "protect") for kind in below(AggregationClient) if "protect" in vars(kind)],
            "sending": [(Messenger, "gather_each")],
            "unmasking": [(Sums, "_unmask")],
            "download": [(Messenger, "broadcast")],
            "checkpoint": [(trainer.strategy.checkpoint_io, "save_checkpoint")],
        }
        for owner, name in watched.get(self.phase, []):
            setattr(owner, name, self.before(getattr(owner, name)))

    def noticing(self, original: Callable[..., None]) -> Callable[..., None]:
        def dropped(*args: Any) -> None:
            Path(self.folder, "noticed").touch()
            original(*args)

        return dropped

    def before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def struck(*args: Any, **kwargs: Any) -> Any:
            self.count()
            return original(*args, **kwargs)

        return struck

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if self.phase == "local steps" and any(client.name == self.site for client in self.federation.local_clients):
            self.count()

    def count(self) -> None:
        self.left -= 1
        if self.left == -1:
            self.strike()

    def strike(self) -> None:
        Path(self.folder, "struck").write_text(str(self.federation.round_idx))
        if self.kind == "cut":
            caller = self.federation.transport._caller  # type: ignore[attr-defined]
            caller.close()
            caller.call = cut_off
            return
        if self.kind == "stop":  # for longer than anybody waits; then the test has to end
            subprocess.Popen(["/bin/sh", "-c", f"sleep {FROZEN}; kill -9 {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)


def below(kind: type) -> list[type]:
    return [each for child in kind.__subclasses__() for each in (child, *below(child))]


def cut_off(request: Pieces) -> Pieces:
    raise BrokenError("the cable is out")
