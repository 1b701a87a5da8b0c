"""What parties of masked and of threshold sums do alike: identities, messages of a step, and the order of steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, TypeVar

from fedlit.privacy.base import AggregationClient
from fedlit.privacy.errors import AuthenticationError, KeyCheckError, QuorumError, ReplayError
from fedlit.privacy.links import Identity, KeyPair, check_members, pack_fields, unpack_fields
from fedlit.privacy.masking.round import SERVER, party, read


class _Opened(Protocol):
    due: str


_Round = TypeVar("_Round", bound=_Opened)


class IdentifiedClient(AggregationClient):
    """A client that knows the identity keys of all others, and that of the server."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._identity = Identity(party(name))
        self._publics: Mapping[str, bytes] | None = None
        self._roster: tuple[str, ...] = ()

    def introduce(self, keys: KeyPair, publics: Mapping[str, bytes]) -> None:
        """See `AggregationClient`."""
        self._identity, self._publics = Identity(party(self.name), keys), publics
        self._identity.pin({party(peer): public for peer, public in publics.items()})

    def _receive_identities(self, message: bytes) -> None:
        directory = unpack_fields(message)
        if set(directory) != {SERVER, *map(party, self._roster)}:
            raise KeyCheckError(f"identity keys are of {sorted(directory)}, but the roster is {list(self._roster)}")
        if self._publics is not None:
            check_members(self._roster, self._publics, "enrol without having stated an identity key", KeyCheckError)
        self._identity.pin(directory)

    def _verifies(self, peer: str, tag: bytes, view: bytes, about: bytes) -> bool:
        """Whether another client has the same view; a wrong tag is none, lest a single client stop the round."""
        try:
            self._identity.link(party(peer)).verify(view, about, tag)
        except AuthenticationError:
            return False
        return True


def relay_identities(identity: Identity, messages: Mapping[str, bytes], roster: Collection[str]) -> dict[str, bytes]:
    """Pin the identity keys of all clients at the server, and return the directory to each of them."""
    missing = [name for name in roster if name not in messages]
    strangers = [name for name in messages if name not in roster]
    if missing or strangers:
        raise QuorumError(f"clients {missing} did not enrol, {strangers} did: the roster is {list(roster)}")
    publics = {party(name): messages[name] for name in roster}
    identity.pin(publics)
    return dict.fromkeys(roster, pack_fields({SERVER: identity.public, **publics}))


def read_bodies(
    identity: Identity, step: str, messages: Mapping[str, bytes], clients: Collection[str], bound_to: bytes
) -> dict[str, bytes]:
    """Bodies of what ``clients`` sent the server in a step, in their order, once the tags have been checked."""
    check_members(messages, clients, f"send {step}")
    return {name: read(identity, party(name), step, bound_to, messages[name]) for name in clients if messages.get(name)}


def step_due(opened: _Round | None, step: str, client: str, steps: Sequence[str], more: str = "") -> _Round:
    """Return a client's open round, if this step of it comes next."""
    if opened is None or opened.due != step:
        state = "no round is open" if opened is None else f"the step {opened.due!r} comes next"
        raise ReplayError(
            f"client {client!r} cannot take the step {step!r}, as {state}: {list(steps)} follow open_round in this "
            f"order, each once{more}"
        )
    return opened


def part_due(opened: _Round | None, what: str, order: str) -> _Round:
    """Return the server's open round, if this comes next in it."""
    if opened is None or opened.due != what:
        state = "no round is open" if opened is None else f"{opened.due} are due"
        raise ReplayError(
            f"{what} come too early, too late or twice, as {state}: {order} follow open_round in this order"
        )
    return opened
