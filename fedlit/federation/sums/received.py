"""Digests of the totals that clients have received, to which their later sums are bound.

A server that publishes one total to some clients and another to the rest would learn single vectors from the next sum
(model inconsistency: Pasquini, Francati and Ateniese, CCS 2022). So all senders of a sum bind their masks to the last
totals of every channel that all of them have received: who received which is public, and computed by each process.

Not bound is a total that some sender of the next sum has not received; and a client that returns takes the record of
the others from the server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

from fedlit.privacy import TermsError

_REMEMBERED = 8
"""Totals of a channel that a client remembers: those who were absent for longer have none in common with it."""


class ReceivedTotals:
    """By channel, the numbers of the totals that each client has received, and digests of those received here.

    Args:
        local: Clients of this process.
    """

    def __init__(self, local: Collection[str]) -> None:
        self._local = local
        self._numbers: dict[str, dict[str, list[int]]] = {}
        self._digests: dict[str, dict[int, bytes]] = {}

    def note(self, channel: str, number: int, clients: Collection[str], digest: bytes | None) -> None:
        """Enter that ``clients`` have received a total; ``digest`` is `digest_of` it, if local ones are among them."""
        numbers = self._numbers.setdefault(channel, {})
        for name in clients:
            numbers[name] = [*(old for old in numbers.get(name, []) if old != number), number][-_REMEMBERED:]
        digests = self._digests.setdefault(channel, {})
        if digest is not None:
            digests[number] = digest
        remembered = {each for name in self._local for each in numbers.get(name, [])}
        for old in digests.keys() - remembered:
            del digests[old]

    def common(self, clients: Collection[str]) -> list[list[object]]:
        """Channel, number and digest of the remembered totals that all ``clients`` have received.

        A `TermsError` if one of them is local, and lacks a total that it is recorded to have received.
        """
        last: list[list[object]] = []
        for channel, numbers in sorted(self._numbers.items()):
            shared = set.intersection(*({*numbers.get(name, [])} for name in clients)) if clients else set()
            digests = self._digests.get(channel, {})
            lacking = sorted(shared - digests.keys()) if any(name in self._local for name in clients) else []
            if lacking:
                raise TermsError(
                    f"the server records that clients {[*clients]} have received total {lacking[0]} of channel "
                    f"{channel!r}, and this process has not: nothing is sent"
                )
            last += [[channel, number, digests.get(number, b"")] for number in sorted(shared)]
        return last

    def come_back(self, channel: str, client: str, number: int) -> None:
        """Keep of what a returning client has received the total that it still has, if any."""
        numbers = self._numbers.get(channel, {})
        if client in numbers:
            numbers[client] = [each for each in numbers[client] if each == number]

    def state_dict(self) -> dict[str, Any]:
        """Return who has received which totals, equal on all processes."""
        return {channel: {name: [*each] for name, each in of.items()} for channel, of in self._numbers.items()}

    def digests(self) -> dict[str, dict[int, str]]:
        """Return the digests of what was received here, in hexadecimal."""
        return {channel: {number: each.hex() for number, each in of.items()} for channel, of in self._digests.items()}

    def load_state_dict(self, numbers: Mapping[str, Any], digests: Iterable[Mapping[str, Mapping[int, str]]]) -> None:
        """Go on where `state_dict` left off, with the `digests` of each local client."""
        self._numbers = {channel: {name: [*each] for name, each in of.items()} for channel, of in numbers.items()}
        self._digests = {}
        for each in digests:
            for channel, of in each.items():
                mine = self._digests.setdefault(channel, {})
                mine.update({int(number): bytes.fromhex(text) for number, text in of.items()})


def digest_of(vector: Tensor, schema: bytes, num_clients: int, weighted: bool) -> bytes:
    """Hash a total as a client reads it: its numbers, shape (n,), and what they mean."""
    hashed = hashlib.sha256(repr((len(schema), num_clients, weighted, str(vector.dtype))).encode() + schema)
    hashed.update(vector.detach().cpu().contiguous().numpy().data)
    return hashed.digest()
