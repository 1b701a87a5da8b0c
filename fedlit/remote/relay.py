"""Relay: messages of a process to the one that has started it, which hands them on; plain data, and no pickle."""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, final

from fedlit.remote.carrier import RefusedError
from fedlit.remote.message_carrier import Message

_log = logging.getLogger("fedlit.remote")

_ADDRESS, _KEY = "FEDLIT_RELAY", "FEDLIT_RELAY_KEY"

TIMES = "FEDLIT_TIMES"
"""In the environment of a process that is started: its seconds ``wait_for`` and ``patience``."""

POLICY = "FEDLIT_POLICY"
"""In the environment of a process that is started: the file of its site's policy, if there is one."""

KIT = "FEDLIT_KIT"
"""In the environment of a process that is started: the folder of its site's certificate, key and authority, if any."""

OWN = "FEDLIT_OWN"
"""In the environment of a process that is started: the file of its site's own part of the configuration."""

_SECONDS = "seconds"
"""Key of a message's patience, on its way."""


@final
class Relay:
    """The end of the process that hands on, by ``send``: see `MessageCaller`."""

    def __init__(self, send: Callable[[Message, float], Message | None]) -> None:
        self._send, self._key = send, secrets.token_bytes(16)
        self._listener = Listener(authkey=self._key)
        self._closed = False
        threading.Thread(target=self._accept, name="fedlit-relay", daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which a process that is started finds this end."""
        return {_ADDRESS: str(self._listener.address), _KEY: self._key.hex()}

    def close(self) -> None:
        """Take no more connections."""
        self._closed = True
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except (OSError, EOFError, AuthenticationError):  # closed, or the other end has gone or has another key
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection[Any, Any]) -> None:
        try:
            while True:
                message = _read(connection.recv_bytes())
                assert message is not None
                try:
                    answer = self._send(message, message.pop(_SECONDS))
                except Exception:  # of what hands on: the process that was started tries again
                    _log.exception("a message could not be handed on")
                    answer = None
                connection.send_bytes(_bytes(answer))
        except (OSError, EOFError):
            connection.close()


@final
class RelayedSender:
    """The end of the process that was started: sends as `MessageCaller` wants it, from any thread."""

    def __init__(self) -> None:
        self._address, self._key = os.environ[_ADDRESS], bytes.fromhex(os.environ[_KEY])
        self._local = threading.local()

    def __call__(self, message: Message, seconds: float) -> Message | None:
        """Send a message, and return its answer."""
        try:
            if not hasattr(self._local, "connection"):
                self._local.connection = Client(self._address, authkey=self._key)
            self._local.connection.send_bytes(_bytes({**message, _SECONDS: seconds}))
            return _read(self._local.connection.recv_bytes())
        except (OSError, EOFError) as error:
            raise RefusedError(f"the process that has started this one is gone: {error}") from None


def _bytes(message: Message | None) -> bytes:
    """A message as a line of JSON, in which lists of bytes are their lengths, and then those bytes.

    Not as a document, which is made for tensors: each way would take a millisecond, some sixty times a round.
    """
    lists = {key: value for key, value in (message or {}).items() if isinstance(value, list)}
    plain = message and {key: value for key, value in message.items() if key not in lists}
    head = json.dumps([plain, {key: [len(piece) for piece in pieces] for key, pieces in lists.items()}])
    return b"".join([head.encode(), b"\n", *(piece for pieces in lists.values() for piece in pieces)])


def _read(message: bytes) -> dict[str, Any] | None:
    start = message.index(b"\n") + 1
    plain, lengths = json.loads(message[:start])
    for key, sizes in lengths.items():
        plain[key] = []
        for size in sizes:
            plain[key].append(message[start : start + size])
            start += size
    return plain if plain is None else dict(plain)
