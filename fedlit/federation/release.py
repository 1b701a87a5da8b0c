"""Payloads as they leave a client: detached copies, or with the noise of differential privacy, and its accounts."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlit.federation.account import Account, Against, check_budget
from fedlit.federation.choices import Resolved
from fedlit.federation.documents import fingerprint
from fedlit.federation.errors import BudgetError, JournalError, with_place
from fedlit.federation.messenger import KINDS, Messenger, Party
from fedlit.privacy import Accountant, GaussianMechanism, InputError
from fedlit.privacy.differential import NOISE_VERSION, spent_by
from fedlit.privacy.links import derive
from fedlit.privacy.packing import Payload


@dataclass
class Budget:
    """What local clients may spend of their privacy, and where they book it."""

    epsilon: float = math.inf  # of each, as of `Account.book`
    account: str | Mapping[str, str] | None = None  # folder of a file for each client, or each one's file


class Releases:
    """Detaches or noises what local clients send, and accounts for the releases of all.

    Attributes:
        accounts: Of differential privacy: what was spent in this run against those who see single messages
            (``"message"``), and against those who see sums only (``"sum"``), where the backend hides the messages. A
            client takes its own noise off a sum, so that more is spent against it.
        budget: Of local clients.
    """

    def __init__(self, messenger: Messenger, mechanisms: Collection[GaussianMechanism], budget: Budget) -> None:
        self._messenger = messenger
        self._delta = max((mechanism.delta for mechanism in mechanisms), default=1e-5)
        self.accounts: dict[Against, Accountant] = {"message": Accountant(), "sum": Accountant()}
        self.budget = budget
        self._files: dict[str, Account] = {}  # by local client
        self._names: dict[tuple[str, Party], str] = {}  # of messages that would be the same if they were sent again

    def of(
        self, channel: Resolved, party: Party, payload: Payload, around: Mapping[str, Payload] | None
    ) -> dict[str, Tensor]:
        """Return what leaves a local client for its ``payload``; an error waits for the next announcement.

        ``around`` has, by client, public values that payloads are close to.
        """
        messenger, mechanism = self._messenger, channel.mechanism
        client = _sender(party)
        for tensor in payload.values():
            messenger.check_finite(channel.name, client, tensor)
        if mechanism is None:
            return {name: tensor.detach().clone() for name, tensor in payload.items()}
        if not messenger.failed:
            try:
                near, key = None if around is None else around.get(client, {}), None
                if messenger.journal is not None:
                    about = NOISE_VERSION, channel.name, client, mechanism.clip_norm, mechanism.noise_multiplier
                    contents = [fingerprint({**each}) for each in (payload, near or {})]
                    key = messenger.journal.noise_key(*about, *messenger.step, *contents)
                    self._names[channel.name, party] = derive(key, "name").hex()[:32]
                return mechanism.release(payload, near, key)
            except InputError as error:
                messenger.fail(with_place(error, f"client {client!r}, channel {channel.name!r}"))
        return {}

    def numbers(self, channel: Resolved, client: str, values: Mapping[str, float]) -> dict[str, float]:
        """Return what a local client sends for its numbers, by the channel's mechanism; see `Federation.report`."""
        finite = {name: torch.tensor(value).double().nan_to_num(0.0, 0.0, 0.0) for name, value in values.items()}
        return {name: float(number) for name, number in self.of(channel, client, finite, None).items()}

    def account(self, channel: Resolved, sent: Mapping[Any, float]) -> None:
        """Book what clients send next over a channel, with their weights in a sum; every process calls it.

        Local clients' files are written before anything leaves. What exceeds a budget, or cannot be written, raises
        an error on every process.
        """
        if channel.mechanism is None or not sent:
            return
        own = channel.mechanism.noise_multiplier
        multipliers = {party: own * noise for party, noise in self._noise(channel, sent).items()}
        try:
            for party, multiplier in multipliers.items():
                if self._messenger.is_local(_sender(party)):
                    self._pay(channel, party, spent_by(own), spent_by(multiplier))
                self.accounts["message"].record([_sender(party)], own)
                self.accounts["sum"].record([_sender(party)], multiplier)
        except (BudgetError, JournalError) as error:
            self._messenger.fail(error)
        self._messenger.announce(channel.name, {}, KINDS.index("check"))

    def _noise(self, channel: Resolved, sent: Mapping[Party, float]) -> dict[Party, float]:
        """Noise in the total that covers each message, in units of its own.

        A client's share w of a hidden sum with noise w_j z C from each client j is a Gaussian mechanism of multiplier
        z |w| / w, over those j whose vectors are in the total. Where clients may be lost, those are taken to be as few
        as the backend allows, with the smallest weights: nobody knows the others before the vectors have left.
        """
        if not channel.hides:
            return dict.fromkeys(sent, 1.0)
        fewest = channel.backend.fewest_in_total(len(sent)) if self._messenger.transport.losable else len(sent)
        order = sorted(sent, key=lambda party: sent[party])
        squares = [sent[party] ** 2 for party in order]
        smallest = math.fsum(squares[: fewest - 1])
        covered = {}
        for place, party in enumerate(order):
            others = smallest if place >= fewest - 1 else math.fsum([smallest, squares[fewest - 1], -squares[place]])
            covered[party] = math.sqrt(squares[place] + others) / sent[party]
        return covered

    def _pay(self, channel: Resolved, party: Party, message: float, summed: float) -> None:
        client, where, budget = _sender(party), self.budget.account, self.budget.epsilon
        release = self._names.pop((channel.name, party), None)
        if where is None:
            before = self.accounts["sum"].spent(client)
            check_budget(client, before, summed, budget, self._delta, "in this run")
            return
        if client not in self._files:
            path = Path(where) / f"{client}.account" if isinstance(where, str) else Path(where[client])
            self._files[client] = Account(path.expanduser())
        self._files[client].book(client, channel.name, message, summed, release, budget, self._delta)

    def epsilon(self, against: Against) -> dict[str, float]:
        """Privacy loss of each client that has released anything; see `Federation.epsilon`."""
        account = self.accounts[against]
        return {name: account.epsilon(name, self._delta) for name in account.clients}

    def state_dict(self) -> dict[str, Any]:
        """Return what was spent, as plain values."""
        return {against: account.state_dict() for against, account in self.accounts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` left off."""
        for against, account in self.accounts.items():
            account.load_state_dict(state[against])


def _sender(party: Party) -> str:
    return party if isinstance(party, str) else party[0]
