"""Carrier: brings requests of sites to a server and its replies back; gRPC is one, and others can stand in its place.

Only sites call; the server answers. A carrier knows pieces of bytes, the name of the site that a certificate proves,
and whether a site is connected.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from fedlit.federation.errors import FederationError

PIECE_BYTES = 1 << 18
"""Largest piece of a request or reply: longer ones are cut, so that none is ever copied as a whole."""

Pieces = Iterator[bytes]
"""Of one request or reply, each of at most `PIECE_BYTES`; the first is its head."""


class RefusedError(FederationError):
    """The other end refuses this one: it needs another certificate, version, experiment or name."""


class BrokenError(FederationError):
    """A call did not come through; it may be made again."""


class Listener(ABC):
    """The server's end of a carrier."""

    @abstractmethod
    def listen(
        self, answer: Callable[[str, Pieces], Pieces], came: Callable[[str], None], gone: Callable[[str], None]
    ) -> str:
        """Take calls from now on, each in its own thread; returns the address as ``HOST:PORT``.

        Args:
            answer: Takes the name of a site and its request, and returns the reply, perhaps after hours; or raises a
                `RefusedError`, whose text the site receives. Where a request or reply breaks off, taking its pieces
                raises a `BrokenError`.
            came: Called with the name of a site for each of its connections.
            gone: Called with the name of a site when one of these ends, as soon as that is noticed.

        Raises:
            FederationError: If nothing can listen at the address.
        """

    @abstractmethod
    def close(self) -> None:
        """End: calls under way break off, and no others are taken."""


class Caller(ABC):
    """A site's end of a carrier."""

    @abstractmethod
    def call(self, request: Pieces) -> Pieces:
        """Send a request, and take the reply; connects first if no connection stands.

        Raises:
            BrokenError: If the call did not come through, here or while the reply's pieces are taken.
            RefusedError: If the server refuses the site or its request, or the two do not trust each other.
        """

    @abstractmethod
    def close(self) -> None:
        """End the connection, if one stands."""
