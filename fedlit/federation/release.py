"""Payloads as they leave a client: detached copies, or with the noise of differential privacy, and its accounts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from fedlit.federation.choices import Resolved
from fedlit.federation.errors import with_place
from fedlit.federation.journal import digest_of
from fedlit.federation.messenger import Messenger
from fedlit.privacy import Accountant, GaussianMechanism, InputError
from fedlit.privacy.packing import Payload


class Releases:
    """Detaches or noises what local clients send, and accounts for the releases of all.

    Attributes:
        accounts: Of differential privacy: what was spent against those who see single messages (``"message"``), and
            against those who see sums only (``"sum"``), where the backend hides the messages.
    """

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self.accounts = {"message": Accountant(), "sum": Accountant()}

    def of(
        self, channel: Resolved, client: str, payload: Payload, around: Mapping[str, Payload] | None
    ) -> dict[str, Tensor]:
        """Return what leaves a local client for its ``payload``; an error waits for the next announcement.

        ``around`` has, by client, public values that payloads are close to.
        """
        messenger, mechanism = self._messenger, channel.mechanism
        for tensor in payload.values():
            messenger.check_finite(channel.name, client, tensor)
        if mechanism is None:
            return {name: tensor.detach().clone() for name, tensor in payload.items()}
        if not messenger.failed:
            try:
                near, key = None if around is None else around.get(client, {}), None
                if messenger.journal is not None:
                    about = channel.name, client, mechanism.clip_norm, mechanism.noise_multiplier
                    contents = [digest_of(each) for each in (payload, near or {})]
                    key = messenger.journal.noise_key(*about, *messenger.step, *contents)
                return mechanism.release(payload, near, key)
            except InputError as error:
                messenger.fail(with_place(error, f"client {client!r}, channel {channel.name!r}"))
        return {}

    def numbers(self, channel: Resolved, client: str, values: Mapping[str, float]) -> dict[str, float]:
        """Return what a local client sends for its numbers, by the channel's mechanism; see `Federation.report`."""
        finite = {name: torch.tensor(value).double().nan_to_num(0.0, 0.0, 0.0) for name, value in values.items()}
        return {name: float(number) for name, number in self.of(channel, client, finite, None).items()}

    def account(self, channel: Resolved, sent: Mapping[str, float]) -> None:
        """Book what clients have released over a channel; in a hidden sum, the noise of all of them covers each.

        A client's share w of a sum with noise w_j z C from each client j is a Gaussian mechanism of multiplier
        z |w| / w, at least z |w| as the largest weight is 1; ``sent`` has these w, relative to the largest.
        """
        if channel.mechanism is None:
            return
        multiplier = channel.mechanism.noise_multiplier
        self.accounts["message"].record(sent, multiplier)
        self.accounts["sum"].record(sent, multiplier * (math.hypot(*sent.values()) if channel.hides else 1.0))

    def epsilon(self, mechanisms: Iterable[GaussianMechanism], against: Literal["message", "sum"]) -> dict[str, float]:
        """Privacy loss of each client that has released anything; see `Federation.epsilon`."""
        delta = max((mechanism.delta for mechanism in mechanisms), default=1e-5)
        account = self.accounts[against]
        return {name: account.epsilon(name, delta) for name in account.clients}

    def state_dict(self) -> dict[str, Any]:
        """Return what was spent, as plain values."""
        return {against: account.state_dict() for against, account in self.accounts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` left off."""
        for against, account in self.accounts.items():
            account.load_state_dict(state[against])
