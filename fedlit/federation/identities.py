"""Identity keys of clients: who vouches for them, and that nobody swaps them afterwards.

All that hides or authenticates messages between clients begins with an X25519 key of each: masks, shared keys, shares
and encrypted messages. They cross the server, which could put its own in their place. So each process states the keys
of its clients once, signed with the key of its certificate where it has one; others check the certificate against
their authority, or the fingerprint that they were given, and keep the key in their journal. A process that starts again
derives the same keys from the secret in its own journal: another key than the known one is an error.

Where no certificates are, keys are trusted when they are first seen.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from fedlit.federation.errors import RosterError
from fedlit.federation.messenger import Messenger
from fedlit.privacy import DecodeError, KeyCheckError, PrivacyError, Terms
from fedlit.privacy.links import KEY_BYTES, KeyPair, Link, derive, digest

_FRESH = 16
"""Bytes that a process draws for each meeting."""

_PAD = 4096
"""Proofs are padded to multiples of so many bytes: who returns, with another signature, states as many as before."""


class Voucher(ABC):
    """Signs what a process states of its clients, and checks what others state of theirs."""

    @abstractmethod
    def sign(self, message: bytes) -> Mapping[str, bytes]:
        """Return proof, by name, that this process stands by a message of 32 bytes."""

    @abstractmethod
    def check(self, client: str, message: bytes, proof: Mapping[str, object]) -> None:
        """Raise a `KeyCheckError` unless ``proof`` shows that who speaks for a client stands by the message."""


class Identities:
    """Identity keys of the clients of this process, and those that others state.

    Args:
        messenger: Of the federation, with this process's journal if it keeps one.
        voucher: Signs and checks statements; ``None`` trusts what is first seen.
        allow_rejoin: Clients whose key may be another one than before, as their site has lost its journal.

    Attributes:
        keys: Key pairs of local clients, by name.
        publics: Public keys of 32 bytes of all clients that were there, by name.

    Raises:
        RosterError: If a client of ``allow_rejoin`` is unknown.
    """

    def __init__(self, messenger: Messenger, voucher: Voucher | None = None, allow_rejoin: Iterable[str] = ()) -> None:
        self._messenger, self._voucher = messenger, voucher
        self._allowed = frozenset(allow_rejoin)
        unknown = sorted(self._allowed - messenger.rank_of.keys())
        if unknown:
            raise RosterError(f"allow_rejoin names {unknown}, which are not in {[*messenger.rank_of]}")
        journal = messenger.journal
        local = [name for name in messenger.rank_of if messenger.is_local(name)]
        self.keys = {name: KeyPair(None if journal is None else journal.secret_of("identity", name)) for name in local}
        self._pinned: dict[str, bytes] = {} if journal is None else journal.pinned()
        self.publics: dict[str, bytes] = {}
        self._fresh: list[bytes] = []  # of each rank, so that nothing of an earlier meeting passes
        self._shared: bytes | None = None
        self._dealer = ""  # of the shared key

    def meet(self) -> None:
        """State the keys of local clients, and take in those of the others; every process calls it.

        Raises:
            KeyCheckError: On every process, if a key is not vouched for, or is another one than before.
            DecodeError: On every process, if a statement is none.
        """
        messenger = self._messenger
        keys = {name: pair.public for name, pair in self.keys.items()}
        lasting = messenger.journal is not None
        fresh = secrets.token_bytes(_FRESH)
        proof = {} if self._voucher is None else self._voucher.sign(self._statement(keys, lasting, fresh))
        padding = bytes(-sum(map(len, proof.values())) % _PAD)
        own = {"keys": keys, "lasting": lasting, "fresh": fresh, "proof": {**proof, "": padding}}
        statements = messenger.transport.all_gather(own, "identity keys")
        self.publics, self._shared = dict(keys), None
        self._fresh = [b""] * len(statements)
        self._fresh[messenger.transport.rank] = fresh
        try:
            for rank, statement in enumerate(statements):
                if rank != messenger.transport.rank and rank not in messenger.transport.lost:
                    self._take(rank, statement)
        except PrivacyError as error:
            messenger.fail(error)
        messenger.check("identity keys")

    def shared_key(self) -> bytes:
        """Return 32 bytes that all clients share, and the server has not; every process calls it.

        The first client that is there draws them, and encrypts them for each of the others. A process without clients
        has bytes of its own.
        """
        messenger = self._messenger
        if self._shared is None or messenger.is_lost(self._dealer):  # lost while it dealt, maybe
            here = [name for name in messenger.rank_of if not messenger.is_lost(name)]
            self._dealer = dealer = here[0]
            about = digest("shared key", here, self._fresh)
            drawn = secrets.token_bytes(KEY_BYTES)
            sealed: dict[str, bytes] = {}
            if messenger.is_local(dealer):
                far = [name for name in here if not messenger.is_local(name)]
                sealed = {name: self._link(dealer, name, about).seal(drawn, about) for name in far}
            dealt = messenger.transport.all_gather(sealed, "shared key")[messenger.rank_of[dealer]]
            try:
                for name in [name for name in self.keys if not messenger.is_local(dealer)]:
                    drawn = self._opened(dealt, dealer, name, about, "has dealt client {name} no key")
            except PrivacyError as error:
                messenger.fail(error)
            self._shared = drawn
        return self._shared

    def compare(self, terms: Terms) -> None:
        """Compare what processes have received, in pairs over links of their clients; every process calls it.

        Raises:
            TermsError: On every process, if two have received something else as one total.
        """
        messenger = self._messenger
        spokes = {rank: name for name, rank in reversed(messenger.rank_of.items()) if not messenger.is_lost(name)}
        own = spokes.pop(messenger.transport.rank, "")
        if not own:  # a process without clients reads no totals
            spokes = {}

        def about(sender: str, receiver: str) -> bytes:
            return digest("received totals", self._fresh, sender, receiver)

        ways = {peer: about(own, peer) for peer in spokes.values()}
        sealed = {peer: self._link(own, peer, way).seal(terms.for_peers(), way) for peer, way in ways.items()}
        sent = messenger.transport.all_gather(sealed, "received totals")
        try:
            for rank, peer in spokes.items():
                missing = "does not say client {name} which totals it has received"
                theirs = self._opened(sent[rank], peer, own, about(peer, own), missing)
                terms.check(theirs, peer, own)
        except PrivacyError as error:
            messenger.fail(error)
        messenger.check("received totals")

    def _opened(self, sent: Any, peer: str, name: str, about: bytes, missing: str) -> bytes:
        """Open what a peer has sealed for a local client; ``missing`` says what is wrong if there is nothing."""
        if not isinstance(sent, Mapping) or type(sent.get(name)) is not bytes:
            raise DecodeError(f"client {peer!r} {missing.format(name=repr(name))}")
        return self._link(name, peer, about).open(sent[name], about)

    def _link(self, owner: str, peer: str, about: bytes) -> Link:
        if peer not in self.publics:
            raise KeyCheckError(f"client {peer!r} has stated no identity key")
        return Link(derive(self.keys[owner].agree(self.publics[peer], peer), about), peer)

    def _take(self, rank: int, statement: Any) -> None:
        names = [name for name, host in self._messenger.rank_of.items() if host == rank]
        try:
            keys, lasting, fresh, proof = (statement[key] for key in ("keys", "lasting", "fresh", "proof"))
            whole = {*keys} == {*names} and all(type(key) is bytes and len(key) == KEY_BYTES for key in keys.values())
        except (TypeError, KeyError, AttributeError) as error:
            raise DecodeError(f"rank {rank} states no identity keys, but a {type(statement).__name__}") from error
        whole = whole and type(lasting) is bool and type(fresh) is bytes and len(fresh) == _FRESH
        if not whole or not isinstance(proof, Mapping):
            raise DecodeError(f"rank {rank} states identity keys of {[*keys]}, and hosts {names}")
        message, self._fresh[rank] = self._statement(keys, lasting, fresh), fresh
        for name in names:
            if self._voucher is not None:
                self._voucher.check(name, message, proof)
            self._pin(name, keys[name], lasting)
        self.publics |= keys

    def _pin(self, name: str, key: bytes, lasting: bool) -> None:
        known = self._pinned.get(name, key)
        if known != key and name not in self._allowed:
            raise KeyCheckError(
                f"client {name!r} has another identity key than before: its site has lost its journal, or somebody "
                f"takes its place. If its operator confirms the loss, start with allow_rejoin: [{name}] at all sites"
            )
        # who keeps no journal has another key in every process
        if lasting and self._pinned.get(name) != key:
            self._pinned[name] = key
            if self._messenger.journal is not None:
                self._messenger.journal.pin(name, key)

    def _statement(self, keys: Mapping[str, bytes], lasting: bool, fresh: bytes) -> bytes:
        return digest("identity keys of clients", [*self._messenger.rank_of], sorted(keys.items()), lasting, fresh)
