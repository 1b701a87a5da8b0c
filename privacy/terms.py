"""The terms of a sum: everything public that shapes what its clients send and what their total means.

Each client computes them from what it has received itself. Masks are derived from their digest, so those of clients
that were sent different terms do not cancel: a server that deviates obtains noise (the masks that depend on the model,
of Pasquini, Francati and Ateniese, Eluding secure aggregation, CCS 2022, with all that is public in place of the
model). Under threshold decryption clients compare them before they send. Backends with a shared key do not use them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

from fedlit.privacy.errors import DecodeError, TermsError
from fedlit.privacy.links import digest

DIGEST_BYTES = 32
_SHORT = 8
"""Bytes of an item's digest as it is sent, which only say what differs; the digest of all items is whole."""
_CUT = 16
"""Bytes of a total's digest as it is sent."""


@final
class Terms:
    """Named items, each hashed by itself, and the digest of all of them.

    Args:
        items: By name, strings, numbers, bytes and lists of them, in the same order at all clients.
        received: Digests of 32 bytes of earlier totals that this client has received, by channel and number: another
            client may have received others, but nothing else under the same number.
        places: Totals that are sent to peers, at least as many as ``received``, so that all clients send alike much.
    """

    def __init__(
        self,
        items: Mapping[str, object] | None = None,
        received: Mapping[tuple[str, int], bytes] | None = None,
        places: int = 0,
    ) -> None:
        self._digests = {name: digest("terms", name, value) for name, value in (items or {}).items()}
        self.digest = digest("terms", [[name, each] for name, each in self._digests.items()])
        self._places = places
        self._received = {digest("total", *key)[:_SHORT]: each[:_CUT] for key, each in (received or {}).items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Of the items, in their order."""
        return tuple(self._digests)

    def to_bytes(self) -> bytes:
        """Return the digest of all items, and a short one of each, by which an error names those that differ."""
        return self.digest + b"".join(each[:_SHORT] for each in self._digests.values())

    def for_peers(self) -> bytes:
        """Return what peers `check`: all items, and what was received."""
        content = b"".join(key + each for key, each in self._received.items())
        return self.to_bytes() + content.ljust(self._places * (_SHORT + _CUT), b"\0")

    def check(self, theirs: bytes, peer: str, owner: str) -> None:
        """Raise a `TermsError` unless ``theirs``, from `for_peers` of ``peer``, agree with the terms of ``owner``."""
        ours = self.to_bytes()
        items, rest = theirs[: len(ours)], theirs[len(ours) :]
        if items != ours:
            raise different(ours, items, owner, peer, self._digests)
        entries = [rest[start : start + _SHORT + _CUT] for start in range(0, len(rest), _SHORT + _CUT)]
        if any(self._received.get(entry[:_SHORT], entry[_SHORT:]) != entry[_SHORT:] for entry in entries):
            raise _refusal(owner, peer, "in earlier totals")


def different(ours: bytes, theirs: bytes, owner: str, peer: str, names: Iterable[str] = ()) -> TermsError:
    """Return the error of two clients whose terms, as `Terms.to_bytes` gives them, differ, with the items' names."""
    pairs = zip(names, _parts(ours), _parts(theirs), strict=False)
    items = [name for name, one, other in pairs if one != other]
    what = f"in {', '.join(items)}" if items else "in what they consist of"
    return _refusal(owner, peer, what)


def _refusal(owner: str, peer: str, what: str) -> TermsError:
    return TermsError(
        f"clients {owner!r} and {peer!r} have received different terms of one sum: they differ {what}. Nothing was "
        "added. Either the server does not send all clients the same, or a client runs another configuration or version"
    )


def digest_in(terms: bytes) -> bytes:
    """Digest of all items, from what `Terms.to_bytes` gave; a `DecodeError` if there is none."""
    if len(terms) < DIGEST_BYTES:
        raise DecodeError(f"terms of a sum have at least {DIGEST_BYTES} bytes, got {len(terms)}")
    return terms[:DIGEST_BYTES]


def _parts(terms: bytes) -> list[bytes]:
    return [terms[start : start + _SHORT] for start in range(DIGEST_BYTES, len(terms), _SHORT)]
