"""The backend of threshold decryption: settings, thresholds and what they hide; see `fedlit.privacy.threshold`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal, final

from fedlit.checks import check_at_least, check_count
from fedlit.privacy.base import Description, RoundId, SecureAggregation
from fedlit.privacy.errors import KeyCheckError, QuorumError, RangeError
from fedlit.privacy.fixed_point import FixedPoint
from fedlit.privacy.links import Identity, check_members, digest, round_digest
from fedlit.privacy.masking.round import SERVER, party
from fedlit.privacy.paillier_arithmetic import RECOMMENDED_KEY_BITS, Slots, check_settings
from fedlit.privacy.threshold.arithmetic import ThresholdModulus, load
from fedlit.privacy.threshold.client import ThresholdClient
from fedlit.privacy.threshold.server import ThresholdServer


@final
class ThresholdPaillier(SecureAggregation):
    """Adds Paillier ciphertexts; nobody has the key, of which clients have shares: t of them open a sum together.

    One client and the server open nothing, unless it is the one that has dealt the shares, and the server that asks to
    have a single vector decrypted is refused. The server learns the sum. Ciphertexts are ordinary ones, which ``phe``
    makes as well. Needs ``pip install 'fedlit[paillier]'``.

    Args:
        threshold: Clients that open a sum together, t, at least 2; ``None`` is the fewest above two thirds of those
            that enrol, whether they send vectors or not. The higher, the more clients may collude (`colluders_borne`),
            and the fewer may drop out.
        colluders: Clients that may collude with a server that lies, at least, c: ``threshold`` is higher, and so many
            of a round's clients must confirm whose vectors are in the sum that c more cannot make them confirm two. Of
            two clients, one that colludes knows the other's vector from their sum: 0 asks for that by name.
        dealer: Client that makes the key and deals the shares, which has to be trusted: without it there are no sums.
            ``None`` takes the first that is connected, whom a server that lies can choose by whom it reports as
            disconnected.
        codec: Grid on which numbers travel; ``None`` is ``FixedPoint()``.
        key_bits: Bits of the modulus, a multiple of 16. Less than 3072 gives a warning, less than 2048 is refused.
        max_clients: Maximum number of vectors in one sum, at least 2; more take more room in every ciphertext.
        insecure_test_keys: Allow keys of any size, where nothing is secret.
        workers: At most this many cores share the work on a long vector; ``None`` is the number of cores that the
            process may use.

    Raises:
        ValueError: If an argument is out of range.
        RangeError: If the sum of so many vectors exceeds 63 bits, or does not fit the key.
        ImportError: If ``phe`` is missing.

    References:
        Damgard and Jurik, A generalisation, a simplification and some applications of Paillier's probabilistic
        public-key system, PKC 2001. Fouque, Poupard and Stern, Sharing decryption in the context of voting or
        lotteries, FC 2000. Shoup, Practical threshold signatures, EUROCRYPT 2000.
    """

    key_holder: ClassVar[Literal["server", "clients"]] = "server"
    enrolment: ClassVar[tuple[str, ...]] = ("identities", "keys")
    opening: ClassVar[tuple[str, ...]] = ("terms",)
    closing: ClassVar[tuple[str, ...]] = ("confirm", "decrypt")
    codec: FixedPoint

    def __init__(
        self,
        threshold: int | None = None,
        colluders: int = 1,
        dealer: str | None = None,
        codec: FixedPoint | None = None,
        key_bits: int = RECOMMENDED_KEY_BITS,
        max_clients: int = 64,
        insecure_test_keys: bool = False,
        workers: int | None = None,
    ) -> None:
        check_at_least("colluders", colluders, 0, "client(s)")
        fewest = max(2, colluders + 1)
        check_at_least("threshold", fewest if threshold is None else threshold, fewest, f"with {colluders} colluders")
        check_settings(key_bits, insecure_test_keys, workers)
        check_count("max_clients", max_clients, 2)
        self.threshold = threshold
        self.dealer = dealer
        self.codec = FixedPoint() if codec is None else codec
        self.key_bits = key_bits
        self.max_clients = max_clients
        self.workers = workers
        self.colluders = colluders
        self.min_clients = max(threshold or 2, colluders + 2)
        self.codec.check_headroom(max_clients, 2**63 - 1, "63 bits")
        largest = self.codec.largest_sum(max_clients)
        self.slots = Slots(largest, 2 * largest + 1, key_bits)

    def __repr__(self) -> str:
        return (
            f"ThresholdPaillier(threshold={self.threshold}, colluders={self.colluders}, dealer={self.dealer!r}, "
            f"codec={self.codec}, key_bits={self.key_bits}, max_clients={self.max_clients})"
        )

    def client(self, name: str) -> ThresholdClient:
        """Encrypts, and holds a share of the key; one deals the shares (`dealer_of`)."""
        return ThresholdClient(name, self)

    def server(self) -> ThresholdServer:
        """Relays ciphertexts, and puts partial decryptions of their sum together."""
        return ThresholdServer(self)

    def dealer_of(self, roster: Sequence[str]) -> str:
        """Return the client that deals the shares; raises a `QuorumError` if the one that has to is missing."""
        if self.dealer is None:
            return roster[0]
        if self.dealer not in roster:
            raise QuorumError(
                f"dealer {self.dealer!r} of the shares is not among the clients that enrol, {list(roster)}: wait for "
                "it, or start the run anew with another dealer"
            )
        return self.dealer

    def trusted_alone(self, roster: Sequence[str]) -> str | None:
        """The dealer, who reads every vector if it keeps the key."""
        return roster[0] if self.dealer not in roster else self.dealer

    def shares_needed(self, num_clients: int) -> int:
        """Clients that open a sum together, t, of so many that have enrolled."""
        return 2 * num_clients // 3 + 1 if self.threshold is None else self.threshold

    def quorum(self, num_clients: int, shares: int) -> int:
        """Clients of a round of so many that must confirm the same list of vectors, q, where ``shares`` are needed.

        Two lists take 2q confirmations, and each of the n clients that does not collude gives one; of the q vectors,
        two are not of colluders.
        """
        return max(shares, self.colluders + 2, (num_clients + self.colluders) // 2 + 1)

    def colluders_needed(self, num_clients: int) -> int:
        """As many as open vectors with their shares; or all others, who take their own off the sum."""
        return min(num_clients - 1, self.shares_needed(num_clients))

    def colluders_borne(self, num_clients: int) -> int:
        """Clients of a round of so many, all that have enrolled, that may collude with a server that lies.

        They have fewer than t shares, do not confirm two lists, which takes 2q - n, and leave two vectors of others in
        the smallest sum.
        """
        return self._borne(num_clients, self.shares_needed(num_clients))

    def _borne(self, num_clients: int, shares: int) -> int:
        quorum = self.quorum(num_clients, shares)
        return max(0, min(shares - 1, 2 * quorum - num_clients - 1, quorum - 2))

    def check_left(self, left: int, clients: Sequence[str], modulus: ThresholdModulus, what: str) -> None:
        """Raise a `QuorumError` unless the clients ``left`` of a round are enough for a sum, and to open it."""
        needed = self.quorum(len(clients), modulus.threshold)
        if left < needed:
            raise QuorumError(f"only {left} of the clients {list(clients)} {what}, but at least {needed} must")

    def check_round(self, clients: Sequence[str], roster: Sequence[str]) -> None:
        """Raise a `QuorumError` at too few clients, a `RangeError` at too many, a `KeyCheckError` at strangers."""
        self.check_clients(len(clients))
        check_at_least("max_clients", self.max_clients, len(clients), "for the clients of this sum", error=RangeError)
        check_members(clients, roster, "open a round before they enrol", KeyCheckError)
        if len(clients) < (needed := self.shares_needed(len(roster))):
            raise QuorumError(
                f"{len(clients)} clients take part, but {needed} of the {len(roster)} that have enrolled must decrypt "
                "together: let more take part, or give threshold"
            )
        if (borne := self._borne(len(clients), needed)) < self.colluders:
            raise QuorumError(
                f"of {len(clients)} clients, {borne} may collude with a server that lies, fewer than colluders="
                f"{self.colluders}: let more clients take part, raise threshold, or ask for fewer colluders by name"
            )

    def load_key(self, public: bytes, roster: Sequence[str]) -> ThresholdModulus:
        """Load a public key whose shares the clients of a roster have; raises a `KeyCheckError` if it is malformed."""
        threshold = self.shares_needed(len(roster))
        if threshold > len(roster):
            raise QuorumError(f"{threshold} clients must decrypt together, but only {list(roster)} enrol")
        return load(public, self.key_bits, threshold, len(roster))

    def bind(self, round_id: RoundId, clients: Sequence[str], identity: Identity, modulus: ThresholdModulus) -> bytes:
        """Digest of a round, to which its messages are bound: the clients, their keys, the modulus and the settings."""
        return digest(
            "threshold round",
            round_digest(round_id, clients),
            [[name, identity.public_of(party(name))] for name in clients],
            identity.public_of(SERVER),
            str(modulus.n),
            [modulus.threshold, self.max_clients, self.codec.fraction_bits, self.codec.bound],
        )

    def error_bound(self, num_clients: int) -> float:
        """Half a step of the grid per client: the sum itself is exact."""
        return self.codec.error_bound(num_clients)

    def describe(self) -> Description:
        """Adversary, what is hidden and revealed, tolerated dropouts, cost."""
        some = "more than two thirds of the clients" if self.threshold is None else f"{self.threshold} of the clients"
        chosen = "" if self.dealer else "; a server that reports others as disconnected chooses it"
        refused = f": refused where not even {self.colluders} may collude" if self.colluders else ""
        return Description(
            backend="ThresholdPaillier",
            adversary="the server, also one that deviates from the protocol, and anybody on the wire; as long as "
            f"moduli of {self.key_bits} bits cannot be factored, nor composite residues recognised, and "
            f"{'the client that enrols first' if self.dealer is None else self.dealer} deals the shares of the key "
            "honestly. Not a server that swaps keys when clients enrol, "
            "where these are trusted on first use, or has sites without a journal repeat a round",
            hidden="every client's vector, and sums of fewer than q of n clients, where q must confirm whose vectors "
            "are in the sum",
            revealed="to the server: the sum and who is in it; if it reports clients as dropped whose vectors it has, "
            "the sum of the others, at least q, in its place",
            collusion=f"{some} that enrolled, whose shares open every vector, also without the server; the server with "
            f"all others in a sum; if it deviates, with 2q - n of the n clients of a round, or with q - 1{refused}. "
            f"The client that deals the shares could keep the key, and open every vector by itself{chosen}",
            dropouts=f"clients may vanish while {some} that enrolled stay, and q of the round",
            bytes_per_number=2 * self.key_bits / 4 / self.slots.count,  # a vector, and parts of its sum to open it
            error=self.codec.error_text(),
        )

    def describe_round(self, num_clients: int) -> Description:
        """The same as `describe`, with the number of clients that may collude in rounds of so many."""
        about = self.describe()
        borne = self.colluders_borne(num_clients)
        return replace(
            about, collusion=f"of {num_clients} clients, {borne} may collude with it. Not: {about.collusion}"
        )
