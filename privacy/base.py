"""SecureAggregation: the contract between a federation and whatever protects its sums.

A round of secure aggregation has four verbs, each run by one party::

    open_round   clients agree on what they need for this round (keys, seeds)
    protect      at each client: plaintext vector -> message
    aggregate    at the server: messages -> protected total
    reveal       at the key holder: protected total -> plaintext total

A federation calls them in this order; a backend fills them in and knows nothing of networks, processes or Lightning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor


@dataclass(frozen=True)
class RoundId:
    """Names one use of a backend, so that nothing made for one use can be replayed in another.

    Args:
        round_idx: Communication round, from 0.
        channel: Kind of message.
        call: Counts the aggregations of this federation, from 0; never repeats.
    """

    round_idx: int
    channel: str
    call: int


@dataclass(frozen=True)
class Description:
    """What a backend hides from whom, in words that a privacy report can print.

    Args:
        backend: Class name.
        adversary: Who is assumed to look, and how they behave.
        hidden: What the adversary does not learn.
        revealed: What somebody learns nevertheless.
        collusion: Who must not join forces.
        dropouts: What happens when a client vanishes within a round.
        bytes_per_number: Bytes on the wire for one number of a vector.
        error: Greatest error of one entry of the sum, in words.
    """

    backend: str
    adversary: str
    hidden: str
    revealed: str
    collusion: str
    dropouts: str
    bytes_per_number: float
    error: str


class SecureAggregation(ABC):
    """Adds up vectors of several clients; what else is learnt, and by whom, is what `describe` says.

    Attributes:
        key_holder: Who runs `reveal`: the server, or the clients that receive the total.
        min_clients: Fewest clients whose sum hides anything; a sum over fewer is refused.
    """

    key_holder: ClassVar[Literal["server", "clients"]]
    min_clients: ClassVar[int]

    @abstractmethod
    def open_round(self, clients: Sequence[str], round_id: RoundId) -> None:
        """Prepare a sum over ``clients``; runs between the clients."""

    @abstractmethod
    def protect(self, client: str, vector: Tensor) -> Tensor:
        """Message of ``client`` for its vector of shape (n,); runs at the client. Leaves ``vector`` as it is."""

    @abstractmethod
    def aggregate(self, messages: Mapping[str, Tensor]) -> Tensor:
        """Protected total of the messages, added in their order; runs at the server."""

    @abstractmethod
    def reveal(self, total: Tensor, num_clients: int) -> Tensor:
        """Plaintext total, shape (n,), of ``num_clients`` vectors; runs at the key holder."""

    @abstractmethod
    def error_bound(self, num_clients: int) -> float:
        """Greatest absolute error of one entry of the total, beyond that of adding floats in order."""

    @abstractmethod
    def describe(self) -> Description:
        """Adversary, what is hidden and revealed, tolerated dropouts, cost."""
