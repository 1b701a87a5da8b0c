"""Why two ends do not come together, by a handshake of one's own, against sockets that are no fedlit server."""

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

grpc = pytest.importorskip("grpc")

Files = tuple[Path, Path, Path]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("files")
    make_certificates(folder, "localhost", ["north"])
    return folder / "north.crt", folder / "north.key", folder / "ca.crt"


@pytest.fixture
def listening() -> Iterator[Callable[[Callable[[socket.socket], Any]], str]]:
    """Starts something that is given each connection to it; returns its address."""
    lines: list[socket.socket] = []

    def start(answer: Callable[[socket.socket], Any]) -> str:
        line = socket.create_server(("127.0.0.1", 0))
        lines.append(line)

        def take() -> None:
            while True:
                try:
                    plain, _ = line.accept()
                except OSError:
                    return
                with closing(plain):
                    answer(plain)

        threading.Thread(target=take, daemon=True).start()
        return f"127.0.0.1:{line.getsockname()[1]}"

    yield start
    for line in lines:
        line.shutdown(socket.SHUT_RDWR)
        line.close()


def http(plain: socket.socket) -> None:
    plain.recv(4096)
    plain.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_what_speaks_no_tls_is_said_to(files: Files, listening: Any) -> None:
    assert "speaks no TLS" in str(objection(listening(http), *files))


def test_what_ends_the_connection_gives_no_reason(files: Files, listening: Any) -> None:
    with pytest.raises(EndedError):
        objection(listening(lambda plain: None), *files)


@pytest.mark.parametrize("server", ["127.0.0.1:1", "nowhere.invalid:443"])
def test_nobody_objects_where_nobody_listens(files: Files, server: str) -> None:
    assert objection(server, *files) is None


def test_a_server_that_is_silent_is_waited_for_a_while(
    files: Files, listening: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedlit.remote.handshake._SECONDS", 0.2)
    assert objection(listening(lambda plain: plain.recv(4096) and threading.Event().wait(0.5)), *files) is None


class Failure(Exception):
    """What gRPC says where a host has two addresses, of which the second is nobody's."""

    def code(self) -> Any:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "failed to connect to all addresses; last error: UNKNOWN: ipv6:%5B::1%5D:1: Connection refused"


def test_words_about_another_address_hide_no_reason(
    files: Files, listening: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(grpc_carrier.GrpcCaller("127.0.0.1:1", *files)._converted(Failure()), BrokenError)
    with pytest.raises(RefusedError, match="do not trust each other: what listens there speaks no TLS"):
        grpc_carrier.GrpcCaller(listening(http), *files)._converted(Failure())
    caller = grpc_carrier.GrpcCaller(listening(lambda plain: None), *files)
    assert isinstance(caller._converted(Failure()), BrokenError)
    monkeypatch.setattr(grpc_carrier, "_UNTRUSTED", 0.0)
    with pytest.raises(RefusedError, match="ends each connection at once"):
        caller._converted(Failure())
