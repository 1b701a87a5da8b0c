"""Messages of a process to the one that has started it, which hands them on.

What starts a process is not trusted less than that process; what passes is plain data all the same, and no pickle.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, final

import torch

from fedlit.federation.documents import document, read_document
from fedlit.remote.carrier import RefusedError
from fedlit.remote.message_carrier import Message

_log = logging.getLogger("fedlit.remote")

_ADDRESS, _KEY = "FEDLIT_RELAY", "FEDLIT_RELAY_KEY"


@final
class Relay:
    """The end of the process that hands on.

    Args:
        send: See `MessageCaller`.
    """

    def __init__(self, send: Callable[[Message, float], Message | None]) -> None:
        self._send, self._key = send, secrets.token_bytes(16)
        self._listener = Listener(authkey=self._key)
        self._closed = False
        threading.Thread(target=self._accept, name="fedlit-relay", daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """By which a process that is started finds this end."""
        return {_ADDRESS: str(self._listener.address), _KEY: self._key.hex()}

    def close(self) -> None:
        """Let nobody in any more."""
        self._closed = True
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except (OSError, EOFError, AuthenticationError):  # closed, or who knocked has gone, or has another key
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection[Any, Any]) -> None:
        try:
            while True:
                message, seconds = _read(connection.recv_bytes())
                try:
                    answer = self._send(message, seconds)
                except Exception:  # of what hands on: the process that was started tries again
                    _log.exception("a message could not be handed on")
                    answer = None
                connection.send_bytes(_bytes([answer]))
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
            self._local.connection.send_bytes(_bytes([dict(message), seconds]))
            (answer,) = _read(self._local.connection.recv_bytes())
        except (OSError, EOFError) as error:
            raise RefusedError(f"the process that has started this one is gone: {error}") from None
        return answer if isinstance(answer, Mapping) else None


def _bytes(value: list[Any]) -> bytes:
    return document(value, "a message").numpy().tobytes()


def _read(message: bytes) -> Any:
    return read_document(torch.frombuffer(bytearray(message), dtype=torch.uint8))
