"""The backend of pairwise masks: settings, thresholds and what they hide; see `fedlit.privacy.masking`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, final

import numpy as np

from fedlit.checks import check, check_at_least, check_one_of, refuse
from fedlit.privacy.base import Description, SecureAggregation
from fedlit.privacy.errors import QuorumError
from fedlit.privacy.fixed_point import FixedPoint
from fedlit.privacy.links import Identity
from fedlit.privacy.masking.client import MaskingClient
from fedlit.privacy.masking.round import SERVER, MaskedRound, default_degree, party
from fedlit.privacy.masking.server import MaskingServer

_LARGEST_TRIED = 200
"""Clients of the largest round that is tried to see whether it bears the colluders asked for."""


@final
class PairwiseMasking(SecureAggregation):
    """Masks that cancel in the sum, and can be removed when clients drop out within a round.

    Args:
        codec: Grid on which numbers travel; ``None`` is `FixedPoint()`.
        modulus_bits: Size of the ring, 32 or 64; a number takes 4 or 8 bytes. 32 bits hold sums of 63 clients on the
            default grid.
        threshold: Shares that restore a client's secrets, out of one for each neighbour and one for itself, more than
            half: a fraction from 0.5 (exclusive) to 1, or a number of shares; ``None`` is the fewest above two thirds.
            So many of a round's clients must also confirm who survived. The higher, the more clients may collude with
            the server (`colluders_borne`), and the fewer may drop out.
        neighbours: Clients with which each one shares masks, even; ``None`` is all of up to 20 clients, and beyond,
            as many as keep the masks safe: see `default_degree`.
        colluders: Clients that may collude with a server that lies, at least: a round that bears fewer is refused. Of
            two clients, one that colludes knows the other's vector from their sum: 0 asks for that by name.

    Raises:
        ValueError: If an argument is out of range.
        RangeError: If the ring is too small for the grid.

    References:
        Bonawitz et al., Practical secure aggregation for privacy-preserving machine learning, CCS 2017, figure 4,
        with tags for each peer in place of signatures in round 3. Bell et al., Secure single-server aggregation with
        (poly)logarithmic overhead, CCS 2020, algorithm 2.
    """

    key_holder: ClassVar[Literal["server", "clients"]] = "server"
    enrolment: ClassVar[tuple[str, ...]] = ("identities",)
    opening: ClassVar[tuple[str, ...]] = ("keys", "shares")
    closing: ClassVar[tuple[str, ...]] = ("confirm", "unmask")
    codec: FixedPoint

    def __init__(
        self,
        codec: FixedPoint | None = None,
        modulus_bits: Literal[32, 64] = 32,
        threshold: int | float | None = None,
        neighbours: int | None = None,
        colluders: int = 1,
    ) -> None:
        check_one_of("modulus_bits", modulus_bits, (32, 64))
        check(
            not isinstance(threshold, float) or 0.5 < threshold <= 1,
            "threshold",
            "above 0.5 and at most 1 as a fraction",
            threshold,
            "with shares of one half, the server could restore both secrets of a client",
        )
        check(not isinstance(threshold, int) or threshold >= 2, "threshold", "at least 2 as a number", threshold)
        check(
            neighbours is None or (neighbours >= 2 and neighbours % 2 == 0),
            "neighbours",
            "even, at least 2",
            neighbours,
        )
        check_at_least("colluders", colluders, 0, "client(s)")
        self.codec = FixedPoint() if codec is None else codec
        self.modulus_bits = modulus_bits
        self.threshold = threshold
        self.neighbours = neighbours
        self.colluders = colluders
        self.min_clients = self._fewest_clients()
        self._check_headroom(self.min_clients)

    def client(self, name: str) -> MaskingClient:
        """Masks, and holds shares of others' secrets."""
        return MaskingClient(name, self)

    def server(self) -> MaskingServer:
        """Adds masked vectors, and removes the masks of their sum."""
        return MaskingServer(self)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of one number in the ring."""
        return np.dtype("<u4" if self.modulus_bits == 32 else "<u8")

    @property
    def signed_dtype(self) -> np.dtype[Any]:
        """Type of one number once the ring is read as from -2^(bits-1) to 2^(bits-1)."""
        return np.dtype(f"<i{self.dtype.itemsize}")

    def check_clients(self, num_clients: int) -> None:
        """Raise a `QuorumError` if they are too few, also against `colluders`, or the threshold does not suit them."""
        if num_clients < 2:
            super().check_clients(num_clients)
        borne = self.colluders_borne(num_clients)
        if borne < self.colluders:
            raise QuorumError(
                f"of {num_clients} clients, {borne} may collude with a server that lies, fewer than colluders="
                f"{self.colluders}: let more clients take part, raise threshold, or ask for fewer colluders by name"
            )

    def check_round(self, num_clients: int) -> None:
        """Raise as `check_clients`, or a `RangeError` if the sum of so many clients may not fit the ring."""
        self.check_clients(num_clients)
        self._check_headroom(num_clients)

    def _fewest_clients(self) -> int:
        """Size of the smallest round that bears the colluders asked for."""
        suited = False
        for number in range(2, _LARGEST_TRIED):
            try:
                borne = self.colluders_borne(number)
            except QuorumError:  # the threshold does not suit so many: a round of them raises this
                continue
            suited = True
            if borne >= self.colluders:
                return number
        if suited:
            refuse(
                "colluders",
                f"borne by a round of less than {_LARGEST_TRIED} clients",
                self.colluders,
                f"ask for fewer, or raise threshold ({self.threshold}) and neighbours ({self.neighbours})",
            )
        return 2

    def _check_headroom(self, num_clients: int) -> None:
        self.codec.check_headroom(num_clients, 2 ** (self.modulus_bits - 1) - 1, f"uint{self.modulus_bits} masks")

    def degree(self, num_clients: int) -> int:
        """Neighbours of each client in a round of so many."""
        degree = default_degree(num_clients) if self.neighbours is None else self.neighbours
        return min(degree, num_clients - 1)

    def shares_needed(self, num_clients: int) -> int:
        """Shares that restore a secret; a `QuorumError` if ``threshold`` is no majority of them, or above all."""
        shares = self.degree(num_clients) + 1
        if not isinstance(self.threshold, int):
            return self._fraction_of(shares)
        check(
            shares < 2 * self.threshold <= 2 * shares,
            "threshold",
            f"more than half of the {shares} shares of a secret and at most all of them, with {num_clients} clients",
            self.threshold,
            "pass it as a fraction",
            QuorumError,
        )
        return self.threshold

    def _fraction_of(self, number: int) -> int:
        """The threshold as a fraction of shares, or of clients."""
        if isinstance(self.threshold, float):
            return max(number // 2 + 1, math.ceil(self.threshold * number))
        return number // 2 + 1 if self.threshold is not None else 2 * number // 3 + 1

    def confirmations_needed(self, num_clients: int) -> int:
        """Clients of a round of so many that must confirm the same view of who survived, q."""
        return max(self._fraction_of(num_clients), self.shares_needed(num_clients))

    def fewest_in_total(self, num_clients: int) -> int:
        """As many as must confirm who survived."""
        return max(self.min_clients, self.confirmations_needed(num_clients))

    def colluders_needed(self, num_clients: int) -> int:
        """As many as hold shares enough of a client's secrets; or all others, who take their own off the sum."""
        return min(num_clients - 1, self.shares_needed(num_clients))

    def colluders_borne(self, num_clients: int) -> int:
        """Clients of a round of so many that may collude with a server that lies, without a vector of others read.

        They confirm two views if they are 2q - n; and they leave out their own vectors of the sum over the fewest
        that may survive, which is then to be one of two others at least.
        """
        confirming, shares = self.confirmations_needed(num_clients), self.shares_needed(num_clients)
        complete = self.degree(num_clients) == num_clients - 1
        return max(0, min(2 * confirming - num_clients - 1, (confirming if complete else shares) - 2))

    def agree(
        self, opening: bytes, roster: Sequence[str], identity: Identity, keys: Mapping[str, bytes], terms: bytes
    ) -> MaskedRound:
        """The round among those who announced keys, as every party derives it; raises as `MaskedRound`."""
        return MaskedRound(
            opening,
            roster,
            {peer: identity.public_of(peer) for peer in (SERVER, *map(party, roster))},
            keys,
            threshold=self.shares_needed(len(roster)),
            quorum=self.confirmations_needed(len(roster)),
            degree=self.degree(len(roster)),
            settings=[self.modulus_bits, self.codec.fraction_bits, self.codec.bound],
            terms=terms,
        )

    def error_bound(self, num_clients: int) -> float:
        """Half a step of the grid per client: the sum itself is exact."""
        return self.codec.error_bound(num_clients)

    def describe(self) -> Description:
        """Adversary, what is hidden and revealed, tolerated dropouts, cost."""
        threshold = "more than two thirds" if self.threshold is None else f"the threshold {self.threshold}"
        refused = f": refused where not even {self.colluders} may collude" if self.colluders else ""
        return Description(
            backend="PairwiseMasking",
            adversary="the server, honest but curious, or one that sends clients different terms of a sum, such as "
            "sample counts or totals. Not one that has a round repeated, or all sites return as after a crash, or that "
            "swaps keys when clients enrol, which are trusted on first use: it reads single vectors",
            hidden="every client's vector, and sums of fewer than q of n clients, where q must confirm who survived",
            revealed="to the server: the sum and who is in it; if it reports clients as dropped whose vectors it has, "
            "the sum of the others, at least q; in a sparse graph (beyond 20 clients), then also sums of as few "
            "clients as restore a secret",
            collusion=f"the server with {threshold} of those who hold shares of a client's secrets, or with all others "
            f"in a sum; if it reports false dropouts, with 2q - n of the n clients, or with q - 1{refused}",
            dropouts=f"clients may vanish while {threshold} of those who hold shares of each one's secrets stay",
            bytes_per_number=self.modulus_bits / 8,
            error=self.codec.error_text(),
        )

    def describe_round(self, num_clients: int) -> Description:
        """The same, with the number of clients that may collude in a round of so many."""
        base = self.describe()
        if num_clients < 2:
            return base
        borne = self.colluders_borne(num_clients)
        return replace(base, collusion=f"of {num_clients} clients, {borne} may collude with it. Not: {base.collusion}")

    def __repr__(self) -> str:
        return (
            f"PairwiseMasking(codec={self.codec!r}, modulus_bits={self.modulus_bits}, threshold={self.threshold}, "
            f"neighbours={self.neighbours}, colluders={self.colluders})"
        )
