"""The ledger: who sent how many bytes and messages to whom, per round and channel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

SERVER = "server"
"""Name of the party that aggregates, as a sender or receiver in the ledger; no client may be called so."""

KEYS = "/keys"
"""Ends the name under which a channel's key agreement, shares and unmasking are booked: ``"weights/keys"``."""


@dataclass(frozen=True, order=True)
class LedgerEntry:
    """Messages from one party to another in one round over one channel.

    Args:
        round_idx: Communication round, from 0.
        channel: Kind of message.
        sender: Client name or ``"server"``.
        receiver: Client name or ``"server"``.
        messages: Number of messages.
        num_bytes: Bytes on the wire, headers included.
    """

    round_idx: int
    channel: str
    sender: str
    receiver: str
    messages: int
    num_bytes: int


class Ledger:
    """Books every message that crosses between two parties, at its size on the wire.

    A simulated run books exactly what a distributed run sends: the same entries on every process, whatever the
    placement of clients.
    """

    def __init__(self) -> None:
        self._book: dict[tuple[int, str, str, str], list[int]] = {}
        self._by_round: dict[int, Counter[str]] = {}
        self._total = 0

    def record(self, round_idx: int, channel: str, sender: str, receiver: str, num_bytes: int) -> None:
        """Book one message of ``num_bytes`` bytes."""
        key = (round_idx, channel, sender, receiver)
        entry = self._book.get(key)
        if entry is None:
            entry = self._book[key] = [0, 0]
        entry[0] += 1
        entry[1] += num_bytes
        self._add(round_idx, channel, num_bytes)

    def _add(self, round_idx: int, channel: str, num_bytes: int) -> None:
        if round_idx not in self._by_round:
            self._by_round[round_idx] = Counter()
        self._by_round[round_idx][channel] += num_bytes
        self._total += num_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes sent so far, all channels and rounds."""
        return self._total

    def __iter__(self) -> Iterator[LedgerEntry]:
        """Entries ordered by round, then in the order in which they were first booked."""
        for key, (messages, num_bytes) in sorted(self._book.items(), key=lambda item: item[0][0]):
            yield LedgerEntry(*key, messages, num_bytes)

    def __len__(self) -> int:
        return len(self._book)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and sorted(self) == sorted(other)

    __hash__ = None  # type: ignore[assignment]

    def bytes_by_channel(self, round_idx: int | None = None) -> dict[str, int]:
        """Bytes per channel, of one round or of all of them."""
        totals: Counter[str] = Counter()
        for each in [*self._by_round] if round_idx is None else [round_idx]:
            totals.update(self._by_round.get(each, {}))
        return dict(totals)

    def bytes_up_and_down(self, channel: str) -> tuple[int, int]:
        """Bytes of ``channel`` sent by clients and sent by the server."""
        up = down = 0
        for (_, name, sender, _), (_, num_bytes) in self._book.items():
            if name == channel:
                if sender == SERVER:
                    down += num_bytes
                else:
                    up += num_bytes
        return up, down

    def messages_by_channel(self) -> dict[str, int]:
        """Messages per channel, all rounds."""
        totals: Counter[str] = Counter()
        for (_, channel, _, _), (messages, _) in self._book.items():
            totals[channel] += messages
        return dict(totals)

    def state_dict(self) -> dict[str, Any]:
        """The entries as plain values and one tensor, so that a checkpoint loads with ``weights_only=True``."""
        keys = list(self._book)
        names = sorted({name for key in keys for name in key[1:]})
        index = {name: position for position, name in enumerate(names)}
        rows = [[key[0], *(index[name] for name in key[1:]), *self._book[key]] for key in keys]
        return {"words": names, "rows": torch.tensor(rows, dtype=torch.int64).reshape(-1, 6)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the entries by those of `state_dict`."""
        names = state["words"]
        self._book = {
            (row[0], names[row[1]], names[row[2]], names[row[3]]): [row[4], row[5]] for row in state["rows"].tolist()
        }
        self._by_round, self._total = {}, 0
        for (round_idx, channel, _, _), (_, num_bytes) in self._book.items():
            self._add(round_idx, channel, num_bytes)
