"""SecureAggregation: the contract between a federation and whatever protects its sums.

A backend is a recipe: numbers and choices, no keys. It makes one object per party, which holds that party's secrets
and nothing else, and which sends the others messages as byte strings. Whoever runs a backend carries them::

    enrolment    once, the whole roster and the server: keys that last
    open round   each round, its clients and the server: keys and shares of this round
    protect      at each client: plaintext vector -> message
    aggregate    at the server: messages -> protected total
    close        masks only: the server asks the survivors for what removes the masks of its total, in steps
    reveal       at the key holder: protected total -> plaintext total

Enrolment and opening are made of steps, each the same exchange: every client sends the server a message, the server
relays, every client receives. `fedlit.privacy.driver` has these steps in their order, for one process or several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from fedlit.privacy.driver import sum_in_process
from fedlit.privacy.errors import QuorumError
from fedlit.privacy.fixed_point import FixedPoint
from fedlit.privacy.packing import Payload
from fedlit.privacy.tags import Tags
from fedlit.privacy.terms import Terms

if TYPE_CHECKING:
    from fedlit.privacy.links import KeyPair


@dataclass(frozen=True)
class RoundId:
    """Names one use of a backend, so that nothing made for one use can be replayed in another.

    Args:
        round_idx: Communication round, from 0.
        channel: Name of the channel.
        call: Counts the aggregations of this federation, from 0; never repeats.
        terms: What shapes the sum, as this party has received it: masks and threshold decryption are bound to
            it, ciphertexts under a shared key are not. ``None`` is nothing.
        weighted: Whether a vector ends with its weight, by which its other numbers are multiplied, as in a mean.
    """

    round_idx: int
    channel: str
    call: int
    terms: Terms | None = field(default=None, compare=False)
    weighted: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Description:
    """Claims of a backend: what it hides from whom, as texts for privacy reports.

    Args:
        backend: Class name.
        adversary: Who is assumed to look, and how they behave.
        hidden: What the adversary does not learn.
        revealed: What somebody learns nevertheless.
        collusion: Who must not join forces.
        dropouts: What happens when a client vanishes within a round.
        bytes_per_number: Bytes on the wire for one number of a long vector, from a client to the server.
        error: Greatest error of one entry of the sum.
    """

    backend: str
    adversary: str
    hidden: str
    revealed: str
    collusion: str
    dropouts: str
    bytes_per_number: float
    error: str


class Party:
    """A client or the server, as the runs of a backend begin for both."""

    def enrol(self, roster: Sequence[str]) -> None:
        """Begin enrolment with everybody who may ever take part."""

    def open_round(self, round_id: RoundId, clients: Sequence[str]) -> None:
        """Begin a sum over ``clients``, in roster order; forgets what an earlier round left."""


class AggregationClient(Party, ABC):
    """One client's side of a backend; holds this client's secrets.

    Args:
        name: Of the client, as the roster has it.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def introduce(self, keys: KeyPair, publics: Mapping[str, bytes]) -> None:
        """Before enrolment: identify by these keys, and know the public ones of all clients, of 32 bytes, by name.

        Then enrolment refuses other keys. Without it, each party has a fresh key, trusted when it is first seen.
        """

    @property
    def survivors(self) -> tuple[str, ...]:
        """Whose vectors the total has, as this client is about to confirm; empty where it is not asked."""
        return ()

    def send(self, step: str) -> bytes:
        """This client's message to the server in a step of enrolment or opening; may be empty."""
        raise NotImplementedError(f"{type(self).__name__} has no step {step!r}")

    def receive(self, step: str, message: bytes) -> None:
        """Take in what the server relays in that step; may be empty.

        Raises a `PrivacyError` if it is not what an honest server would have relayed.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step {step!r}")

    def protect_tagged(self, vector: Tensor, tags: Tags) -> Tensor:
        """As `protect`, of a vector and its tags: shape (n + count,)."""
        return self.protect(tags.append(vector, self.name))

    @abstractmethod
    def protect(self, vector: Tensor) -> Tensor:
        """Message to the server for a vector of shape (n,); leaves ``vector`` as it is.

        Raises an `InputError` if the vector cannot be protected: see `FixedPoint`.
        """

    def answer(self, step: str, question: bytes) -> bytes:
        """This survivor's answer to what the server asks in a step of closing.

        Raises a `PrivacyError` if it is not what an honest server would ask.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step {step!r}")

    def reveal(self, total: Tensor, num_clients: int) -> Tensor:
        """Plaintext total, shape (n,), of ``num_clients`` vectors; only where clients are the key holder."""
        raise NotImplementedError(f"{type(self).__name__} holds no key")

    def reissue(self, total: Tensor, num_clients: int) -> Tensor:
        """A total that this client has revealed, encrypted anew for other key holders; they `reveal` it as usual."""
        raise NotImplementedError(f"{type(self).__name__} holds no key")


class AggregationServer(Party, ABC):
    """The server's side of a backend; holds no client's secret.

    Attributes:
        on_grid: Whether totals are integers of the codec's grid, which `reveal` only decodes.
    """

    on_grid: bool = False

    def relay(self, step: str, sent: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the message to each client in a step, given what each has sent; clients may be left out."""
        raise NotImplementedError(f"{type(self).__name__} has no step {step!r}")

    @abstractmethod
    def aggregate(self, messages: Mapping[str, Tensor]) -> Tensor:
        """Protected total of the messages ``{client: message}``, added in their order.

        Raises a `PrivacyError` if a message is not one of this round, or there are too few.
        """

    def add(self, name: str, message: Tensor) -> None:
        """Take one message of the round as it comes, in roster order; `total` is then as `aggregate` of all.

        A backend that adds them at once keeps none; by default they are kept.

        Raises a `PrivacyError` if the message is not one of this round.
        """
        vars(self).setdefault("_kept", {})[name] = message

    def total(self) -> Tensor:
        """Protected total of the messages that came by `add`; raises as `aggregate`."""
        return self.aggregate(vars(self).pop("_kept", {}))

    def ask(self, step: str, answers: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the question to each survivor in a step of closing, given the answers to the step before.

        Raises a `PrivacyError` if answers are missing or wrong.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step {step!r}")

    def conclude(self, answers: Mapping[str, bytes]) -> Tensor:
        """Total without masks, from the answers to the last step of closing.

        Raises a `PrivacyError` if answers are missing or wrong.
        """
        raise NotImplementedError(f"{type(self).__name__} asks nothing")

    def reveal(self, total: Tensor, num_clients: int) -> Tensor:
        """Plaintext total, shape (n,), of ``num_clients`` vectors; only where the server is the key holder."""
        raise NotImplementedError(f"{type(self).__name__} holds no key")


class SecureAggregation(ABC):
    """Adds up vectors of several clients; `describe` states what else is learnt, and by whom.

    Attributes:
        key_holder: Who runs `reveal`: the server, or the clients that receive the total.
        min_clients: Minimum number of clients whose sum hides anything; a sum over fewer is refused.
        enrolment: Names of its steps, run once before the first round, with the whole roster.
        opening: Names of the steps that open each round, with the clients of that round.
        closing: Names of the steps in which survivors are asked something after `AggregationServer.aggregate`; where
            there are any, `AggregationServer.conclude` makes the total, also in rounds that need none of them.
        codec: Grid on which numbers travel; ``None`` sends floats.
        adds: Whether totals are sums, which a median or the like is not.
    """

    key_holder: ClassVar[Literal["server", "clients"]]
    adds: ClassVar[bool] = True
    min_clients: int
    enrolment: ClassVar[tuple[str, ...]] = ()
    opening: ClassVar[tuple[str, ...]] = ()
    closing: ClassVar[tuple[str, ...]] = ()
    codec: FixedPoint | None

    @property
    def grid(self) -> FixedPoint | None:
        """Grid on which the sum of what clients send is exact; ``None`` if there is none."""
        return self.codec

    @abstractmethod
    def client(self, name: str) -> AggregationClient:
        """A client's party, with fresh secrets."""

    @abstractmethod
    def server(self) -> AggregationServer:
        """The server's party."""

    @abstractmethod
    def error_bound(self, num_clients: int) -> float:
        """Greatest absolute error of one entry of the total, beyond that of adding floats in order."""

    @abstractmethod
    def describe(self) -> Description:
        """Adversary, what is hidden and revealed, tolerated dropouts, cost."""

    def describe_round(self, num_clients: int) -> Description:
        """The same as `describe`, of rounds of so many clients."""
        return self.describe()

    def check_clients(self, num_clients: int) -> None:
        """Raise unless a sum over so many clients hides each of them.

        Raises a `QuorumError` if there are fewer than `min_clients`.
        """
        if num_clients < self.min_clients:
            raise QuorumError(
                f"a sum over {num_clients} client(s) was asked for, but {type(self).__name__} hides nothing of fewer "
                f"than {self.min_clients}: let more clients take part"
            )

    def fewest_in_total(self, num_clients: int) -> int:
        """Return how many of so many clients a total has at least, where clients drop out before they have sent."""
        return self.min_clients

    def steps(self, num_clients: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return those of the steps `opening` and `closing` that a round of so many clients takes."""
        return self.opening, self.closing

    def trusted_alone(self, roster: Sequence[str]) -> str | None:
        """Return the client of those that enrol that can read every vector by itself, if there is one."""
        return None

    def colluders_needed(self, num_clients: int) -> int:
        """Clients of a round of so many that read vectors of others, together with a server that follows the protocol.

        All but one, who take their own off the sum, unless a backend needs fewer.
        """
        return num_clients - 1

    def sum(self, payloads: Mapping[str, Payload]) -> dict[str, Tensor]:
        """Sum of ``{client: {name: tensor}}``, with every party in this process.

        Returns:
            ``{name: tensor}`` in the shapes and types of the payloads.

        Raises a `PrivacyError` if a payload cannot be protected, or too few clients send one.
        """
        return sum_in_process(self, RoundId(0, "sum", 0), payloads, None)

    def mean(self, payloads: Mapping[str, Payload], weights: Mapping[str, float] | None = None) -> dict[str, Tensor]:
        """Weighted mean, likewise.

        Args:
            payloads: As in `sum`.
            weights: By client, positive; ``None`` is uniform. They travel inside the sum; on a grid, rounded to
                2^-24 of the largest.
        """
        shares = dict.fromkeys(payloads, 1.0) if weights is None else weights
        return sum_in_process(self, RoundId(0, "sum", 0, weighted=True), payloads, shares)
