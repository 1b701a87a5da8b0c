"""CommunicationLedger: bytes and messages by sender, receiver and channel, as curves, a file and a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from fedlit.callbacks.shared import check_fields, federated, is_dry, log_folder, megabytes, watched, write_rows
from fedlit.federation import SERVER, LedgerEntry
from fedlit.run.component import Component
from fedlit.run.run import Run
from fedlit.tables import Column, Row, Table, show

COLUMNS = ("round", "channel", "sender", "receiver", "messages", "bytes")


class CommunicationLedger(Callback, Component):
    """Log the bytes of each round, write the ledger to a file, and print a table of it.

    Logs ``comm/CHANNEL/MB`` (10^6 bytes, of the round that ended) and ``comm/MB`` (all rounds so far, without channels
    for watching such as "metrics"). At the end of a fit, also of a resumed one, it writes one row per round, channel,
    sender and receiver, with exact bytes. What is sent between two rounds belongs to the later one, except for the
    numbers of an evaluation: those belong to the round that it is of, and come too late to be logged with it.

    Args:
        csv: Path of the file; ``None`` is ``ledger.csv`` in the Trainer's ``log_dir``, or its ``default_root_dir``.
        print_table: Whether to print the table.
    """

    def __init__(self, csv: str | None = None, print_table: bool = True) -> None:
        self.csv = csv
        self.print_table = print_table
        self._sent: dict[str, int] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count what earlier rounds sent, if this run resumes."""
        federation = federated(pl_module, self).federation
        self._sent = {}
        for entry in federation.ledger:
            if entry.round_idx < federation.round_idx:
                self._sent[entry.channel] = self._sent.get(entry.channel, 0) + entry.num_bytes

    def on_round_end(self, run: Run) -> None:
        """Log the bytes of the round that ended; a channel without messages in it has 0."""
        sent = run.federation.ledger.bytes_by_channel(run.clock.round_idx)
        for channel, num_bytes in sent.items():
            self._sent[channel] = self._sent.get(channel, 0) + num_bytes
        metrics = {f"comm/{channel}/MB": sent.get(channel, 0) / 1e6 for channel in self._sent}
        of_method = sum(num_bytes for channel, num_bytes in self._sent.items() if not watched(channel))
        run.log(metrics | {"comm/MB": of_method / 1e6})

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file and print the table."""
        path = Path(self.csv or log_folder(trainer) / "ledger.csv")
        if not trainer.is_global_zero:
            return
        ledger = federated(pl_module, self).federation.ledger
        if not is_dry(trainer):
            write_csv(ledger, path)
        if self.print_table:
            show(ledger_table(ledger))


def write_csv(ledger: Iterable[LedgerEntry], path: Path) -> None:
    """Write the entries to ``path``, bytes exact; folders on the way are made."""
    rows = ([e.round_idx, e.channel, e.sender, e.receiver, e.messages, e.num_bytes] for e in ledger)
    write_rows(path, [COLUMNS, *rows])


def read_csv(text: str) -> list[LedgerEntry]:
    """Entries of a file that `write_csv` wrote."""
    return [
        check_fields(
            LedgerEntry(
                round_idx=int(row["round"]),
                channel=row["channel"],
                sender=row["sender"],
                receiver=row["receiver"],
                messages=int(row["messages"]),
                num_bytes=int(row["bytes"]),
            )
        )
        for row in csv.DictReader(io.StringIO(text))
    ]


@dataclass
class Sums:
    """Traffic of some channels: bytes to the server, from it and between clients; messages; and rounds with any."""

    up: int = 0
    down: int = 0
    across: int = 0
    messages: int = 0
    rounds: set[int] = field(default_factory=set)

    def add(self, entry: LedgerEntry) -> None:
        """Count an entry."""
        if entry.sender == SERVER:
            self.down += entry.num_bytes
        elif entry.receiver == SERVER:
            self.up += entry.num_bytes
        else:
            self.across += entry.num_bytes
        self.messages += entry.messages
        self.rounds.add(entry.round_idx)

    @property
    def total(self) -> int:
        """Bytes in all directions."""
        return self.up + self.down + self.across


def sums_of(ledger: Iterable[LedgerEntry]) -> tuple[dict[str, Sums], Sums, Sums]:
    """Sums of each channel, of all channels of the method, and of all, with those of watched numbers."""
    channels: dict[str, Sums] = {}
    method, everything = Sums(), Sums()
    for entry in ledger:
        channels.setdefault(entry.channel, Sums()).add(entry)
        everything.add(entry)
        if not watched(entry.channel):
            method.add(entry)
    return channels, method, everything


def split(channels: Iterable[str]) -> tuple[list[str], list[str]]:
    """Channels of the method, and those of watched numbers."""
    names = list(channels)
    return [name for name in names if not watched(name)], [name for name in names if watched(name)]


def ledger_table(ledger: Iterable[LedgerEntry], exact: bool = False) -> Table:
    """Per channel: rounds in which it was used, messages and traffic; the channels of watched numbers come last.

    Traffic is in bytes if ``exact``, or else in MB, and without a column of messages between clients if there are none.
    """
    channels, method, everything = sums_of(ledger)
    unit, form = ("", "{:,}".format) if exact else (" MB", megabytes)
    numbers: dict[str, tuple[Callable[[Sums], float], Callable[[Any], str]]] = {
        "rounds": (lambda sums: len(sums.rounds), str),
        "messages": (lambda sums: sums.messages, "{:,}".format),
        f"up{unit}": (lambda sums: sums.up, form),
        f"down{unit}": (lambda sums: sums.down, form),
        f"between clients{unit}": (lambda sums: sums.across, form),
        f"total{unit}": (lambda sums: sums.total, form),
        "bytes per round": (lambda sums: round(sums.total / max(1, len(sums.rounds))), "{:,}".format),
    }
    if not exact and not everything.across:
        del numbers[f"between clients{unit}"]
    of_method, watching = split(channels)
    named = [(name, channels[name], False) for name in of_method] + [("method", method, True)]
    named += [(name, channels[name], False) for name in watching] + ([("all", everything, True)] if watching else [])
    ends = {*of_method[-1:], *watching[-1:]}
    rows = [
        Row([name, *(number(sums) for number, _ in numbers.values())], total, total or name in ends)
        for name, sums, total in named
    ]
    columns = [Column(title, numeric=True, form=form) for title, (_, form) in numbers.items()]
    return Table([Column("channel"), *columns], rows, None if exact else "communication")
