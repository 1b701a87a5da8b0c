"""Digests of the totals that this process has received, which clients of the next sum compare in pairs.

A server that publishes one total to some clients and another to the rest would learn single vectors from the next sum
(model inconsistency: Pasquini, Francati and Ateniese, CCS 2022). So each client sends its list to each of its
neighbours in the sum, sealed beside the shares of its secrets, and refuses a neighbour that has received something else
under the same number. What a client lists is what it has received itself: nobody states it for another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from torch import Tensor

REMEMBERED = 4
"""Totals of a channel that are compared: enough for clients that were absent from the last ones.

A running hash of all would compare less: a client that was absent once has another one from then on, honestly. So each
total is compared by itself, among those that both have read, and the list of them has to end somewhere.
"""


class ReceivedTotals:
    """By channel, numbers and digests of the newest totals that were received here."""

    def __init__(self) -> None:
        self._digests: dict[str, dict[int, bytes]] = {}

    def note(self, channel: str, number: int, digest: bytes) -> None:
        """Enter a total, with `digest_of` it."""
        digests = self._digests.setdefault(channel, {})
        digests[number] = digest
        for old in sorted(digests)[:-REMEMBERED]:
            del digests[old]

    def listed(self) -> dict[tuple[str, int], bytes]:
        """Return all of them, by channel and number."""
        return {(channel, number): each for channel, of in self._digests.items() for number, each in of.items()}

    def state_dict(self) -> dict[str, dict[int, str]]:
        """Return the digests in hexadecimal."""
        return {channel: {number: each.hex() for number, each in of.items()} for channel, of in self._digests.items()}

    def load_state_dict(self, states: Iterable[Mapping[str, Mapping[int, str]]]) -> None:
        """Go on where the `state_dict` of each local client left off."""
        self._digests = {}
        for state in states:
            for channel, digests in state.items():
                for number, text in sorted(digests.items()):
                    self.note(channel, int(number), bytes.fromhex(text))


def digest_of(vector: Tensor, schema: bytes, num_clients: int, weighted: bool) -> bytes:
    """Hash a total as a client reads it: its numbers, shape (n,), and what they mean."""
    hashed = hashlib.sha256(repr((len(schema), num_clients, weighted, str(vector.dtype))).encode() + schema)
    hashed.update(vector.detach().cpu().contiguous().numpy().data)
    return hashed.digest()
