"""The backend of pairwise masks: settings, thresholds and what they hide; see `fedlit.privacy.masking`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal, final

from fedlit.checks import check, check_count, check_one_of, refuse
from fedlit.privacy.base import Description, SecureAggregation
from fedlit.privacy.errors import QuorumError
from fedlit.privacy.fixed_point import FixedPoint
from fedlit.privacy.links import Identity
from fedlit.privacy.masking.client import MaskingClient
from fedlit.privacy.masking.graph import FAILURE, default_degree, fraction_of, log2_failure
from fedlit.privacy.masking.round import SERVER, MaskedRound, party
from fedlit.privacy.masking.server import MaskingServer

_LARGEST_TRIED = 200
"""Clients of the largest round that is tried to see whether it bears the colluders asked for."""


@final
class PairwiseMasking(SecureAggregation):
    """Masks that cancel in the sum, and can be removed when clients drop out within a round.

    Args:
        codec: Grid on which numbers travel; ``None`` is `FixedPoint()`.
        modulus_bits: Size of the ring, 32 or 64; a number takes 4 or 8 bytes. ``None`` is 32 in rounds whose sums it
            holds, of up to 63 clients on the default grid, and else 64.
        threshold: Shares that restore a client's secrets, out of one for each neighbour and one for itself, more than
            half: a fraction from 0.5 (exclusive) to 1, or a number of shares; ``None`` is the fewest above two thirds.
            So many of a round's clients must also confirm who survived. The higher, the more clients may collude with
            the server (`colluders_borne`), and the fewer may drop out. Where none may (by default of two or three
            clients, with 1.0 of as many as there are), a round has fewer messages: see `recovers`.
        neighbours: Clients that each one draws: it shares masks with these and with those that drew it. ``None`` is all
            of up to 20 clients, and beyond, as few as suffice against ``colluders``, or a fifth of the clients: see
            `fedlit.privacy.masking.graph`.
        colluders: Clients that may collude with a server that lies, at least: a round that bears fewer is refused. Of
            two clients, one that colludes knows the other's vector from their sum: 0 asks for that by name.

    Raises:
        ValueError: If an argument is out of range.
        RangeError: If the ring is too small for the grid.

    References:
        Bonawitz et al., Practical secure aggregation for privacy-preserving machine learning, CCS 2017, figure 4,
        with tags for each peer in place of signatures in round 3. Bell et al., Secure single-server aggregation with
        (poly)logarithmic overhead, CCS 2020, for sparse graphs; see `fedlit.privacy.masking.graph`.
    """

    key_holder: ClassVar[Literal["server", "clients"]] = "server"
    enrolment: ClassVar[tuple[str, ...]] = ("identities",)
    opening: ClassVar[tuple[str, ...]] = ("keys", "shares")
    closing: ClassVar[tuple[str, ...]] = ("confirm", "unmask")
    codec: FixedPoint

    def __init__(
        self,
        codec: FixedPoint | None = None,
        modulus_bits: Literal[32, 64] | None = None,
        threshold: int | float | None = None,
        neighbours: int | None = None,
        colluders: int = 1,
    ) -> None:
        check_one_of("modulus_bits", modulus_bits, (32, 64, None))
        kinds = "null, an integer or a fraction such as 0.7"
        check(threshold is None or isinstance(threshold, int | float), "threshold", kinds, threshold)
        check(
            not isinstance(threshold, float) or 0.5 < threshold <= 1,
            "threshold",
            "above 0.5 and at most 1 as a fraction",
            threshold,
            "with shares of one half, the server could restore both secrets of a client",
        )
        check(not isinstance(threshold, int) or threshold >= 2, "threshold", "at least 2 as a number", threshold)
        if neighbours is not None:
            check_count("neighbours", neighbours, 2)
        check_count("colluders", colluders, 0)
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

    def ring(self, num_clients: int) -> int:
        """Bits of the ring in a round of so many."""
        if self.modulus_bits is not None:
            return self.modulus_bits
        return 32 if self.codec.largest_sum(num_clients) < 2**31 else 64

    def check_clients(self, num_clients: int) -> None:
        """Raise a `QuorumError` if they are too few, also against `colluders`, or the threshold does not suit them."""
        if num_clients < 2:
            super().check_clients(num_clients)
        if not self._bears(num_clients, self.colluders):
            borne = self.colluders_borne(num_clients)
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
                if self._bears(number, self.colluders):
                    return number
            except QuorumError:  # the threshold does not suit so many: a round of them raises this
                continue
            suited = True
        if suited:
            refuse(
                "colluders",
                f"borne by a round of less than {_LARGEST_TRIED} clients",
                self.colluders,
                f"ask for fewer, or raise threshold ({self.threshold}) and neighbours ({self.neighbours})",
            )
        return 2

    def _check_headroom(self, num_clients: int) -> None:
        bits = self.ring(num_clients)
        most = min(2 ** (bits - 1) - 1, 2**53)  # totals are decoded into float64
        self.codec.check_headroom(num_clients, most, f"uint{bits} masks")

    def degree(self, num_clients: int) -> int:
        """Clients that each one draws in a round of so many; all others, if the graph is complete."""
        if self.neighbours is None:
            return default_degree(num_clients, self.threshold, self.colluders)
        return min(self.neighbours, num_clients - 1)

    def shares_needed(self, num_clients: int) -> int:
        """Shares that restore a secret; a `QuorumError` if ``threshold`` is no majority of them, or above all."""
        shares = self.degree(num_clients) + 1
        if not isinstance(self.threshold, int):
            return fraction_of(self.threshold, shares)
        check(
            shares < 2 * self.threshold <= 2 * shares,
            "threshold",
            f"more than half of the {shares} shares of a secret and at most all of them, with {num_clients} clients",
            self.threshold,
            "pass it as a fraction",
            QuorumError,
        )
        return self.threshold

    def confirmations_needed(self, num_clients: int) -> int:
        """Clients of a round of so many that must confirm the same view of who survived, q."""
        needed = fraction_of(self.threshold, num_clients)
        return max(needed, self.shares_needed(num_clients)) if isinstance(self.threshold, int) else needed

    def fewest_in_total(self, num_clients: int) -> int:
        """As many as must confirm who survived."""
        return max(self.min_clients, self.confirmations_needed(num_clients))

    def colluders_needed(self, num_clients: int) -> int:
        """As many as hold shares enough of a client's secrets; or all others, who take their own off the sum."""
        return min(num_clients - 1, self.shares_needed(num_clients))

    def colluders_borne(self, num_clients: int) -> int:
        """Clients of a round of so many that may collude with a server that lies, without a sum of few others read.

        They confirm two views if they are 2q - n; and they leave out their own vectors of the sum over the fewest
        that may survive, q, which is then to be one of two others at least. In a sparse graph, they cut it
        with a probability of 2^-40 at most.
        """
        safe, unsafe = 0, num_clients
        while unsafe - safe > 1:  # fewer colluders can do no more than many
            tried = (safe + unsafe) // 2
            safe, unsafe = (tried, unsafe) if self._bears(num_clients, tried) else (safe, tried)
        return safe

    def _bears(self, num_clients: int, colluders: int) -> bool:
        """Whether so many may collude: always none, which is what the server alone can do."""
        quorum = self.confirmations_needed(num_clients)
        if colluders > max(0, min(2 * quorum - num_clients - 1, quorum - 2)):
            return False
        return not colluders or self.log2_failure(num_clients, colluders) <= FAILURE

    def log2_failure(self, num_clients: int, colluders: int) -> float:
        """Logarithm to base 2 of the probability that so many cut the graph of a round, -inf if it is complete."""
        if not self._is_sparse(num_clients):
            return -math.inf
        shares, quorum = self.shares_needed(num_clients), self.confirmations_needed(num_clients)
        return log2_failure(num_clients, self.degree(num_clients), shares, quorum, colluders)

    def _is_sparse(self, num_clients: int) -> bool:
        return self.degree(num_clients) < num_clients - 1

    def recovers(self, num_clients: int) -> bool:
        """Whether a total can do without some clients of a round of so many.

        It cannot if all of them hold a share of each secret, and all shares are needed: then they share none.
        """
        needed = self.threshold if isinstance(self.threshold, int) else fraction_of(self.threshold, num_clients)
        return self._is_sparse(num_clients) or needed < num_clients

    def steps(self, num_clients: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the steps of a round of so many; see `recovers`."""
        return (self.opening, self.closing) if self.recovers(num_clients) else (("keys",), ())

    def agree(
        self, opening: bytes, roster: Sequence[str], identity: Identity, announced: Mapping[str, bytes], terms: bytes
    ) -> MaskedRound:
        """The round among those who announced keys and draws, as every party derives it; raises as `MaskedRound`."""
        return MaskedRound(
            opening,
            roster,
            {peer: identity.public_of(peer) for peer in (SERVER, *map(party, roster))},
            announced,
            threshold=self.shares_needed(len(roster)),
            quorum=self.confirmations_needed(len(roster)),
            degree=self.degree(len(roster)),
            ring=self.ring(len(roster)),
            settings=[self.codec.fraction_bits, self.codec.bound],
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
            adversary="the server, also one that sends clients different terms of a sum or changes a total; with "
            "journals at the sites also one that repeats rounds, and with their certificates one that swaps keys when "
            "clients enrol. Without, keys are trusted on first use, and a server that swaps them reads single vectors",
            hidden="every client's vector, and sums of fewer than q of n clients, where q must confirm who survived",
            revealed="to the server: the sum and who is in it; if it reports clients as dropped whose vectors it has, "
            "the sum of the others, at least q; in a sparse graph (beyond 20 clients), no sum of fewer but for a "
            "probability of 2^-40 a round, if as few collude as it bears",
            collusion=f"the server with {threshold} of those who hold shares of a client's secrets, or with all others "
            f"in a sum; if it reports false dropouts, with 2q - n of the n clients, or with q - 1{refused}",
            dropouts=f"clients may vanish while {threshold} of those who hold shares of each one's secrets stay; where "
            "these are all clients of a round, none may, and nobody shares secrets",
            bytes_per_number=self.ring(self.min_clients) / 8,
            error=self.codec.error_text(),
        )

    def describe_round(self, num_clients: int) -> Description:
        """The same, with the number of clients that may collude in a round of so many."""
        base = self.describe()
        if num_clients < 2:
            return base
        borne = self.colluders_borne(num_clients)
        but = ""
        if self._is_sparse(num_clients):
            but = (
                f", but for a probability of 2^{math.ceil(self.log2_failure(num_clients, borne))} a round over the "
                f"{self.degree(num_clients)} neighbours that each client draws"
            )
        collusion = f"of {num_clients} clients, {borne} may collude with it{but}. Not: {base.collusion}"
        return replace(base, collusion=collusion, bytes_per_number=self.ring(num_clients) / 8)

    def __repr__(self) -> str:
        return (
            f"PairwiseMasking(codec={self.codec!r}, modulus_bits={self.modulus_bits}, threshold={self.threshold}, "
            f"neighbours={self.neighbours}, colluders={self.colluders})"
        )
