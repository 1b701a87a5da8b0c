"""PrivacyReport: which backend hides messages from whom, as described by itself, and what was sent."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from fedlit.callbacks.shared import LOGGING_CHANNELS, check_fields, federated, is_dry, log_folder
from fedlit.federation import KEYS, Federation
from fedlit.privacy import Description
from fedlit.run.component import Component
from fedlit.run.run import Run
from fedlit.tables import Column, Row, Table, show

_ALWAYS = (
    "Without certificates of the sites, the server is trusted when clients enrol: one that swaps keys then reads "
    "single vectors whatever the backend. Without journals at the sites, so does one that has a round repeated.",
    "No backend protects what a sum itself reveals, round after round: only differential privacy limits it.",
    "Who takes part, in which round, and the number of training samples of each client are known to all.",
    "Sums of the same messages over different clients, in another round or run, reveal their difference.",
    "Watched numbers (channels 'metrics' and 'oracle': losses, accuracies) are sent in the clear, unless reports of "
    "the strategy state otherwise. Messages from client to client are read by their receivers.",
)
_JOB = (
    "The processes of a run are joined without encryption or authentication: use a private network or a tunnel.",
    "The server is part of process 0 and shares its memory with the clients placed there: whoever runs that process "
    "has their keys, and with a backend whose clients share one key everybody's vectors. A placement whose first list "
    "is empty gives the server a process of its own.",
)
_SEATS = (
    "Sites and the server are joined by TLS with certificates on both sides: whoever can sign such certificates can "
    "come as any site, or be the server.",
    "The server has no client, and no key of theirs. It reads what each channel reveals to it, and who is there, when, "
    "and how much everybody sends. Messages from client to client pass through it: it reads those in the clear, unless "
    "they are encrypted between the two, as they are beside a privacy backend.",
)
_TRUST = ("Public keys are trusted when they are first received: whoever swaps them then is everybody's peer.",)
_LAST = "Clients are trusted to follow the protocol; nothing keeps one from sending a poisoned vector."

NOT_PROTECTED = (
    *_ALWAYS,
    *_JOB,
    *_TRUST,
    "Checkpoints have weights and optimiser states in the clear: of a process's own clients, or, where they are "
    "gathered, of all of them at process 0.",
    _LAST,
)
"""Sentences on what no backend protects."""

NOT_PROTECTED_AROUND_A_SERVER = (
    *_ALWAYS,
    *_SEATS,
    *_TRUST,
    "Checkpoints are in the clear: a site's has weights and optimiser states of its own clients, the server's the last "
    "total of each channel that it could read.",
    _LAST,
)
"""The same where a server has sites around it."""

_WIDTH = 120
"""Characters in a line of the printed report in a file or a pipe."""

_LABEL, _CHANNEL = 20, 40
"""Characters of the printed report for the names of its rows, and the minimum for each of several channels."""


@dataclass(frozen=True)
class ChannelReport:
    """One channel of a run."""

    channel: str  # its name
    # of its backend; ``None`` for messages from client to client, which no backend carries
    description: Description | None
    bytes_up: int  # sent by clients, key material apart
    bytes_down: int  # sent by the server, key material apart
    bytes_keys: int  # of key agreement, shares and unmasking, both ways
    clip_norm: float | None  # of the channel's differential privacy; ``None`` without
    noise_multiplier: float | None  # the same
    sent: str = ""  # protection, contents, senders, receivers and frequency of messages, as the method declares them


@dataclass(frozen=True)
class Report:
    """Protection and traffic of a run's channels; `rich` prints it as tables."""

    channels: list[ChannelReport]  # those with messages of the method
    # greatest privacy loss of a client against observers of single messages; ``None`` without differential
    # privacy
    epsilon_message: float | None
    epsilon_sum: float | None  # against observers of sums only, by the noise that no total lacks
    not_protected: tuple[str, ...] = NOT_PROTECTED  # sentences on what no backend protects

    def to_json(self) -> str:
        """The fields as a JSON object; an epsilon that is not finite, as with next to no noise, is ``null``."""
        losses = {"epsilon_message": self.epsilon_message, "epsilon_sum": self.epsilon_sum}
        epsilons = {name: each if math.isfinite(each or 0) else None for name, each in losses.items()}
        return json.dumps(asdict(self) | epsilons, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read back what `to_json` wrote."""
        record = json.loads(text)
        channels = [
            ChannelReport(**(channel | {"description": None if about is None else Description(**about)}))
            for channel in record["channels"]
            for about in [channel["description"]]
        ]
        for channel in channels:
            if (channel.clip_norm is None) != (channel.noise_multiplier is None):
                raise ValueError(f"channel {channel.channel!r} has clip_norm or noise_multiplier without the other")
        return check_fields(cls(**(record | {"channels": channels, "not_protected": tuple(record["not_protected"])})))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """As many channels side by side as there is room for, then what is not protected."""
        yield Text("privacy report" if self.channels else "privacy report: nothing is sent", style="bold")
        table = channel_table(self.channels)
        together = max(1, (options.max_width - _LABEL) // _CHANNEL)
        for first in range(1, len(table.columns), together):
            yield table.select([0, *range(first, min(first + together, len(table.columns)))])
        if self.epsilon_message is not None:
            yield Text(f"epsilon {self.epsilon_message:.3g} by message, {self.epsilon_sum:.3g} by sum, at most")
        yield Text("Not protected:")
        for line in self.not_protected:
            note = RichTable.grid(padding=(0, 1))
            note.add_row("-", Text(line))
            yield note

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """A width that is good to read where there is no screen to fit it to."""
        return Measurement(_WIDTH, _WIDTH)


def channel_table(channels: Sequence[ChannelReport], with_traffic: bool = True) -> Table:
    """One column per channel, one row per statement; bytes and noise only ``with_traffic``."""
    descriptions = [channel.description for channel in channels]
    rows = [["messages", *(channel.sent or "-" for channel in channels)]]
    rows += [
        [item.name.replace("_", " "), *(_described(description, item.name) for description in descriptions)]
        for item in fields(Description)
    ]
    if with_traffic:
        rows += [
            ["bytes up", *(f"{channel.bytes_up:,}" for channel in channels)],
            ["bytes down", *(f"{channel.bytes_down:,}" for channel in channels)],
            ["bytes of keys", *(f"{channel.bytes_keys:,}" for channel in channels)],
            ["differential privacy", *map(_noise, channels)],
        ]
    columns = [Column(""), *(Column(channel.channel, folds=True) for channel in channels)]
    return Table(columns, [Row(list(row)) for row in rows])


def _described(description: Description | None, field: str) -> str:
    if description is None:
        return "none: from client to client in the clear" if field == "backend" else "-"
    value = getattr(description, field)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _noise(channel: ChannelReport) -> str:
    return "none" if channel.clip_norm is None else f"clip {channel.clip_norm:g}, noise {channel.noise_multiplier:g}"


def report(federation: Federation) -> Report:
    """Sum up the traffic of a federation so far, and its protection."""
    ledger = federation.ledger
    sent = ledger.bytes_by_channel()
    channels = []
    for channel in sent:
        if channel in LOGGING_CHANNELS or channel.endswith(KEYS):
            continue
        up, down = ledger.bytes_up_and_down(channel)
        resolved = federation.channels[channel]
        mechanism = resolved.mechanism
        channels.append(
            ChannelReport(
                channel=channel,
                description=resolved.description,
                bytes_up=up,
                bytes_down=down,
                bytes_keys=sent.get(channel + KEYS, 0),
                clip_norm=None if mechanism is None else mechanism.clip_norm,
                noise_multiplier=None if mechanism is None else mechanism.noise_multiplier,
                sent=resolved.sent,
            )
        )
    lines = NOT_PROTECTED_AROUND_A_SERVER if federation.transport.losable else NOT_PROTECTED
    by_message, by_sum = _spent(federation) or (None, None)
    return Report(channels, by_message, by_sum, lines)


def _spent(federation: Federation) -> tuple[float, float] | None:
    """Greatest privacy loss of a client, by message and by sum; ``None`` without differential privacy."""
    if not federation.channels.mechanisms:
        return None
    by_message, by_sum = federation.epsilon("message"), federation.epsilon("sum")
    return max(by_message.values(), default=0.0), max(by_sum.values(), default=0.0)


class PrivacyReport(Callback, Component):
    """Print and write, at the end of a fit, what each channel's backend hides from whom, and what nothing protects.

    With differential privacy, log the greatest privacy loss of a client after each round as ``privacy/epsilon``
    (against observers of single messages) and ``privacy/epsilon_sum`` (against observers of sums only, who added no
    noise).

    Args:
        json: Path of the file; ``None`` is ``privacy.json`` in the Trainer's ``log_dir``, or its ``default_root_dir``.
        print_table: Whether to print the report.
    """

    def __init__(self, json: str | None = None, print_table: bool = True) -> None:
        self.json = json
        self.print_table = print_table

    def on_round_end(self, run: Run) -> None:
        """Log the privacy losses so far."""
        spent = _spent(run.federation)
        if spent is not None:
            run.log({"privacy/epsilon": spent[0], "privacy/epsilon_sum": spent[1]})

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file and print the report."""
        path = Path(self.json or log_folder(trainer) / "privacy.json")
        if not trainer.is_global_zero:
            return
        summed = report(federated(pl_module, self).federation)
        if not is_dry(trainer):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(summed.to_json() + "\n", encoding="utf-8")
        if self.print_table:
            show(summed)
