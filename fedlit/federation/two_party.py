"""Runs a `TwoPartyAffine` between pairs of clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor

from fedlit.federation.choices import Resolved
from fedlit.federation.errors import JournalError, with_place
from fedlit.federation.exchange import Exchange
from fedlit.federation.messenger import Message, Messenger, Pair, Party
from fedlit.federation.release import Releases
from fedlit.federation.wire import part
from fedlit.privacy import DecodeError, PlainAffine, PrivacyError, RoundId
from fedlit.privacy.affine import AffineSource, AffineTarget
from fedlit.privacy.affine_bound import Granted, key_of

_T = TypeVar("_T")


class TwoPartyExchange:
    """Local parties by channel and pair, with keys that last as long as the process.

    A holder of moments has one key pair, and encrypts its moments once for all their receivers.
    """

    def __init__(
        self,
        messenger: Messenger,
        exchange: Exchange,
        releases: Releases,
        timed: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._messenger = messenger
        self._exchange = exchange
        self._releases = releases
        self._timed = timed
        self._holders: dict[tuple[str, Pair], AffineSource] = {}
        self._learners: dict[tuple[str, Pair], AffineTarget] = {}
        self._introduced: set[tuple[str, Pair]] = set()
        self._granted: dict[tuple[str, str], Granted] = {}  # by channel and holder of moments, to all receivers

    def run(
        self,
        resolved: Resolved,
        moments: Mapping[str, Tensor],
        maps: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]],
        pairs: Sequence[Pair],
        num_outputs: int | Mapping[str, int],
    ) -> dict[str, dict[str, Tensor]]:
        """See `Federation.affine`; ``pairs`` are of the holder of moments and the receiver of y."""
        channel, protocol, journal = resolved.name, resolved.protocol or PlainAffine(), self._messenger.journal
        step = () if journal is None else journal.next_sum(self._messenger.step, channel)
        holders = dict.fromkeys(first for first, _ in pairs)
        own: dict[str, Tensor] = {}
        for name in [name for name in moments if name in holders]:
            own |= self._releases.of(resolved, name, {name: moments[name]}, None)
        self._releases.account(resolved, dict.fromkeys(holders, 1.0))  # of all, the same on every process
        call, round_idx = self._messenger.position
        # with the step, so that nobody answers in one step of his what is asked in another of the other's
        round_id = RoundId(round_idx, f"{channel} {self._messenger.step}", call)
        pairs = self._still_there(pairs)
        new = [pair for pair in pairs if (channel, pair) not in self._introduced]
        for pair in new:
            if self._messenger.is_local(pair[0]):
                others = (self._holders.get((channel, (pair[0], name))) for name in self._messenger.rank_of)
                sharing = next((party for party in others if party is not None), None)
                self._holders[channel, pair] = protocol.source() if sharing is None else sharing.for_another()
                if (channel, pair[0]) not in self._granted:
                    before = None if journal is None else journal.granted(pair[0], channel)
                    self._granted[channel, pair[0]] = Granted(before)
            if self._messenger.is_local(pair[1]):
                self._learners[channel, pair] = protocol.target()
        keys = self._relay(resolved, new, lambda pair: self._holders[channel, pair].public_key())
        for pair, key in keys.items():
            self._guarded(channel, pair[1], lambda pair=pair, key=key: self._learners[channel, pair].receive_key(key))  # type: ignore[misc]
        self._introduced |= {(channel, pair) for pair in new}

        def protect(pair: Pair) -> bytes:
            party, (holder, receiver) = self._holders[channel, pair], pair
            party.open_round(round_id, receiver)
            most = num_outputs if isinstance(num_outputs, int) else num_outputs[receiver]
            held = own[holder].double().cpu().contiguous()
            grant = (holder, step, receiver, key_of(held), most)
            again = journal is not None and journal.has_granted(grant)
            party.granted = Granted() if again else self._granted[channel, holder]
            message = party.protect(held, most)
            if journal is not None and not again and protocol.most_outputs(len(held)) is not None:
                journal.grant(grant)
            return message

        def evaluate(pair: Pair) -> bytes | None:
            if self._vanished(sent, pair):
                return None
            party = self._learners[channel, pair]
            party.open_round(round_id, pair[1])
            matrix, offset = (each.double().cpu() for each in maps[pair[1]][pair[0]])
            reply = party.evaluate(_arrived(sent, pair), matrix, offset)
            if journal is not None and protocol.most_outputs(matrix.shape[1]) is not None:
                journal.ask(pair[1], step, pair[0], torch.cat([matrix.flatten(), offset]))
            return reply

        def unlock(pair: Pair) -> bytes | None:
            if self._vanished(replies, pair):
                return None
            return self._holders[channel, pair].unlock(_arrived(replies, pair))

        sent = self._relay(resolved, pairs, protect)
        replies = self._relay(resolved, pairs, evaluate, back=True)
        answers = self._relay(resolved, pairs, unlock)
        outputs: dict[str, dict[str, Tensor]] = {}
        for pair, answer in answers.items():
            y = self._guarded(
                channel,
                pair[1],
                lambda pair=pair, answer=answer: self._learners[channel, pair].reveal(answer),  # type: ignore[misc]
            )
            if y is not None:
                outputs.setdefault(pair[1], {})[pair[0]] = y.to(self._messenger.device or y.device)
        if pairs:
            self._messenger.check(channel)  # whether an answer was refused somewhere
        return outputs

    def forget(self) -> None:
        """Make new keys when pairs meet again, as somebody has come back who has none."""
        self._holders.clear()
        self._learners.clear()
        self._introduced.clear()

    def _still_there(self, pairs: Sequence[Pair]) -> list[Pair]:
        return [pair for pair in pairs if not any(self._messenger.is_lost(name) for name in pair)]

    def _vanished(self, messages: Mapping[Pair, bytes], pair: Pair) -> bool:
        """Return whether a due message did not arrive, as its sender may be lost: the next announcement shows it."""
        return pair not in messages and self._messenger.transport.losable

    def _relay(
        self, channel: Resolved, pairs: Sequence[Pair], write: Callable[[Pair], bytes | None], back: bool = False
    ) -> dict[Pair, bytes]:
        """Carry a byte string for each pair, to its second or ``back`` to its first; return those to local clients."""
        outgoing: dict[Party, Message] = {}
        wanted: dict[str, list[str]] = {}
        ways = {pair: (pair[1], pair[0]) if back else pair for pair in self._still_there(pairs)}
        for pair, (sender, receiver) in ways.items():
            wanted.setdefault(sender, []).append(receiver)
            if self._messenger.is_local(sender) and not self._messenger.failed:
                message = self._guarded(channel.name, sender, lambda pair=pair: write(pair))  # type: ignore[misc]
                if message is not None:
                    outgoing[sender, receiver] = {"bytes": _to_tensor(message)}
        if not ways:
            return {}
        with self._timed("exchange"):
            received = self._exchange.carry(channel, outgoing, wanted, "affine")
        return {
            pair: part(received[receiver][sender], "bytes", torch.uint8).cpu().numpy().tobytes()
            for pair, (sender, receiver) in ways.items()
            if sender in received.get(receiver, {})
        }

    def _guarded(self, channel: str, client: str, step: Callable[[], _T]) -> _T | None:
        """Result of one party's step; a refusal is kept for the next announcement, which raises it everywhere."""
        try:
            with self._timed("protection"):
                return step()
        except (PrivacyError, JournalError) as error:
            self._messenger.fail(with_place(error, f"client {client!r}, channel {channel!r}"))
            return None


def _arrived(messages: Mapping[Pair, bytes], pair: Pair) -> bytes:
    """The message of a pair; a `DecodeError` if the other party's process has announced none."""
    if pair not in messages:
        raise DecodeError(f"a message between {pair[0]!r} and {pair[1]!r} is due, and none was announced")
    return messages[pair]


def _to_tensor(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.zeros(0, dtype=torch.uint8)
