"""CommunicationLedger: who sent how much to whom, as curves, as a file and as a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.table import Table

from fedlit.callbacks.shared import check_fields, federated, megabytes, watched
from fedlit.console import show
from fedlit.federation import SERVER, LedgerEntry
from fedlit.run.component import Component
from fedlit.run.run import Run

COLUMNS = ("round", "channel", "sender", "receiver", "messages", "bytes")


class CommunicationLedger(Callback, Component):
    """Logs what each round sends, writes the ledger to a file, and prints a table of it.

    Logs ``comm/CHANNEL/MB`` (10^6 bytes, of the round that ended) and ``comm/MB`` (all rounds so far, without the
    channels "metrics", "oracle" and "source_moments": those are for watching, not the method's). At the end of a fit
    it writes one row per round, channel, sender and receiver, with exact bytes; a resumed run's file includes the
    rounds before. What is sent between two rounds belongs to the later one, except for the numbers that an evaluation
    reports: those belong to the round that it is of, and come too late to be logged with it.

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
        """Log the bytes of the round that ended; a channel that was silent in it sent 0."""
        sent = run.federation.ledger.bytes_by_channel(run.clock.round_idx)
        for channel, num_bytes in sent.items():
            self._sent[channel] = self._sent.get(channel, 0) + num_bytes
        metrics = {f"comm/{channel}/MB": sent.get(channel, 0) / 1e6 for channel in self._sent}
        own = sum(num_bytes for channel, num_bytes in self._sent.items() if not watched(channel))
        run.log(metrics | {"comm/MB": own / 1e6})

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file and print the table."""
        # log_dir is a broadcast: all processes ask for it
        path = Path(self.csv or Path(trainer.log_dir or trainer.default_root_dir, "ledger.csv"))
        if not trainer.is_global_zero:
            return
        ledger = federated(pl_module, self).federation.ledger
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            write_csv(ledger, path)
        if self.print_table:
            show(ledger_table(ledger))


def write_csv(ledger: Iterable[LedgerEntry], path: Path) -> None:
    """Write the entries to ``path``, bytes exact; folders on the way are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for entry in ledger:
            writer.writerow(
                [entry.round_idx, entry.channel, entry.sender, entry.receiver, entry.messages, entry.num_bytes]
            )


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
    """What went over some channels: bytes to the server, from it and between clients; messages, and rounds."""

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
        """Bytes, whichever way they went."""
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


def ledger_table(ledger: Iterable[LedgerEntry]) -> Table:
    """Per channel: rounds in which it was used, messages and MB; the channels of watched numbers come last."""
    channels, method, everything = sums_of(ledger)
    table = Table(title="communication")
    table.add_column("channel", no_wrap=True)
    across = everything.across > 0
    headers = ["rounds", "messages", "up MB", "down MB", "client-to-client MB", "total MB", "bytes per round"]
    for header in headers:
        if across or header != "client-to-client MB":
            table.add_column(header, justify="right")

    def add(name: str, sums: Sums, style: str | None = None, end_section: bool = False) -> None:
        cells = [name, str(len(sums.rounds)), f"{sums.messages:,}", megabytes(sums.up), megabytes(sums.down)]
        cells += [megabytes(sums.across)] if across else []
        cells += [megabytes(sums.total), f"{sums.total / max(1, len(sums.rounds)):,.0f}"]
        table.add_row(*cells, style=style, end_section=end_section)

    own, other = split(channels)
    for name in own:
        add(name, channels[name], end_section=name == own[-1])
    add("method", method, style="bold", end_section=True)
    for name in other:
        add(name, channels[name], style="dim", end_section=name == other[-1])
    if other:
        add("all", everything)
    return table
