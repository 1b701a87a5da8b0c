"""Why two ends do not come together, asked of sockets that are no fedlit server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fedlit.remote import grpc_carrier
from fedlit.remote.carrier import BrokenError, RefusedError
from fedlit.remote.certificates import make_certificates
from fedlit.remote.handshake import EndedError, objection

pytest.importorskip("grpc")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("files")
    make_certificates(folder, "localhost", ["north"])
    return folder / "north.crt", folder / "north.key", folder / "ca.crt"


@pytest.fixture
def listening() -> Iterator[Callable[[Callable[[socket.socket], Any]], str]]:
    """Starts a socket that passes each connection to a function; returns its address."""
    sockets: list[socket.socket] = []

    def start(answer: Callable[[socket.socket], Any]) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        sockets.append(listener)

        def take() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with closing(connection):
                    answer(connection)

        threading.Thread(target=take, daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in sockets:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def http(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def cut_off(connection: socket.socket) -> None:
    pass


def test_a_listener_without_tls_or_without_an_answer_is_recognised(
    files: Any, listening: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "speaks no TLS" in str(objection(listening(http), *files))
    with pytest.raises(EndedError):
        objection(listening(cut_off), *files)
    monkeypatch.setattr("fedlit.remote.handshake._SECONDS", 0.2)
    assert objection(listening(lambda each: each.recv(4096) and threading.Event().wait(0.5)), *files) is None


@pytest.mark.parametrize("server", ["127.0.0.1:1", "nowhere.invalid:443"])
def test_there_is_no_objection_where_nobody_listens(files: Any, server: str) -> None:
    assert objection(server, *files) is None


def test_a_caller_finds_the_reason_itself(files: Any, listening: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that restarts ends connections once; one that does so for long is refused."""

    def outcome(address: str) -> BaseException:
        caller = grpc_carrier.GrpcCaller(address, *files)
        with pytest.raises((BrokenError, RefusedError)) as raised:
            list(caller.call(iter([b"x"])))
        caller.close()
        return raised.value

    monkeypatch.setattr(grpc_carrier, "_CONNECTS", 0.1)
    assert isinstance(outcome("127.0.0.1:1"), BrokenError)
    assert isinstance(outcome(listening(cut_off)), BrokenError)
    refusal = outcome(listening(http))
    assert isinstance(refusal, RefusedError)
    assert "speaks no TLS" in str(refusal)
    monkeypatch.setattr(grpc_carrier, "_UNTRUSTED", 0.0)
    assert isinstance(outcome(listening(cut_off)), RefusedError)
