"""End-to-end encryption of messages from client to client, which neither the server nor a relay reads or changes.

A message is encrypted once, under a fresh key (AES-256-GCM), and that key for each receiver under the secret that the
two clients share (X25519, `fedlit.privacy.links`). Public keys are exchanged before the first message and pinned:
whoever swaps them at that moment is a man in the middle. Only what leaves a process is encrypted.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import final

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from fedlit.privacy import AuthenticationError, DecodeError, KeyCheckError
from fedlit.privacy.links import KEY_BYTES, TAG_BYTES, Identity, KeyPair, check_members, digest

MAC_BYTES = 16
"""Bytes that encryption adds to a message."""

WRAP_BYTES = KEY_BYTES + TAG_BYTES
"""Bytes of a message's key, encrypted for one receiver."""

_CHUNK = 1 << 28  # the library takes less than 2^31 bytes at once
_NONCE = bytes(12)  # each key encrypts one message


@final
class Seals:
    """Identity keys of local ``clients``, and those of the others once they are received (``introduced``).

    With ``keys`` and ``publics``, by name, they are those that clients have stated, and others are refused.
    """

    def __init__(
        self,
        clients: Iterable[str],
        keys: Mapping[str, KeyPair] | None = None,
        publics: Mapping[str, bytes] | None = None,
    ) -> None:
        self._identities = {name: Identity(name, (keys or {}).get(name)) for name in clients}
        self._publics = publics
        for identity in self._identities.values():
            identity.pin(self._publics or {})
        self.introduced = False

    def public_keys(self) -> dict[str, dict[str, Tensor]]:
        """Return what each local client sends to all others, once."""
        return {
            name: {"key": torch.frombuffer(bytearray(identity.public), dtype=torch.uint8)}
            for name, identity in self._identities.items()
        }

    def introduce(self, received: Mapping[str, Mapping[str, Mapping[str, Tensor]]]) -> None:
        """Pin the keys that local clients received, by receiver and sender, from clients of other processes.

        A `DecodeError` if a client sends none; a `KeyCheckError` if a key is weak, or that of two clients.
        """
        self.introduced = True
        for name, identity in self._identities.items():
            directory = {}
            for sender, message in received.get(name, {}).items():
                if sender in self._identities:
                    continue
                if "key" not in message:
                    raise DecodeError(f"client {sender!r} sends no key, but {[*message]}")
                directory[sender] = message["key"].cpu().numpy().tobytes()
            if self._publics is not None:
                check_members(directory, self._publics, "send an identity key that they have not stated", KeyCheckError)
            identity.pin(directory)

    def close(self, message: Tensor, sender: str, receivers: Sequence[Sequence[str]], about: bytes) -> list[Tensor]:
        """Encrypt a local client's message, uint8 of shape (n,), for its receivers on each of several processes.

        The message is bound to ``about``, its purpose. Returns uint8 of shape (60 receivers + n + 16,) per process.
        """
        key, body = secrets.token_bytes(KEY_BYTES), torch.empty(len(message) + MAC_BYTES, dtype=torch.uint8)
        cipher = Cipher(algorithms.AES256(key), modes.GCM(_NONCE)).encryptor()
        cipher.authenticate_additional_data(digest("sealed", about, sender))
        plain, sealed = message.numpy(), body.numpy()
        for start in range(0, len(plain), _CHUNK):
            cipher.update_into(plain[start : start + _CHUNK].data, sealed[start : start + _CHUNK].data)
        cipher.finalize()
        sealed[len(plain) :] = np.frombuffer(cipher.tag, np.uint8)
        link = self._identities[sender].link
        wraps = [b"".join(link(name).seal(key, _binding(about, sender, name)) for name in some) for some in receivers]
        return [torch.cat([torch.frombuffer(bytearray(wrap), dtype=torch.uint8), body]) for wrap in wraps]

    def open(self, message: Tensor, sender: str, receivers: Sequence[str], about: bytes) -> Tensor:
        """Inverse of `close`, for local receivers in the same order.

        An `AuthenticationError` if the message was changed, made for something else, or by somebody else.
        """
        data, start = message.numpy(), len(receivers) * WRAP_BYTES
        keys = set()
        for index, name in enumerate(receivers):
            wrap = data[index * WRAP_BYTES : (index + 1) * WRAP_BYTES].tobytes()
            keys.add(self._identities[name].link(sender).open(wrap, _binding(about, sender, name)))
        body, plain = data[start:-MAC_BYTES], torch.empty(max(0, len(data) - start - MAC_BYTES), dtype=torch.uint8)
        try:
            (key,) = keys  # one for all, or somebody would read something else
            cipher = Cipher(algorithms.AES256(key), modes.GCM(_NONCE, data[-MAC_BYTES:].tobytes())).decryptor()
            cipher.authenticate_additional_data(digest("sealed", about, sender))
            for at in range(0, len(body), _CHUNK):
                cipher.update_into(body[at : at + _CHUNK].data, plain.numpy()[at : at + _CHUNK].data)
            cipher.finalize()
        except (InvalidTag, ValueError) as error:
            raise AuthenticationError(
                f"a message of {sender!r} to {list(receivers)} does not open: it was changed on its way, or made for "
                "another exchange"
            ) from error
        return plain


def _binding(about: bytes, sender: str, receiver: str) -> bytes:
    return digest("sealed key", about, sender, receiver)
