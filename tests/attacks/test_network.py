"""Somebody on the line between a site and the server of `fedlit serve`, who passes on what comes and keeps it."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
import torch

from fedlit.remote.certificates import make_certificates
from loopback import Echo

pytest.importorskip("grpc")
from fedlit.remote.grpc_carrier import GrpcCaller, GrpcListener


def tapped(to: int, kept: list[bytes]) -> int:
    """A port behind which another one is, and where all that passes either way is kept."""
    listening = socket.create_server(("127.0.0.1", 0))

    def pass_on(come: socket.socket, go: socket.socket) -> None:
        while data := come.recv(1 << 16):
            kept.append(data)
            go.sendall(data)

    def accept() -> None:
        while True:
            near, far = listening.accept()[0], socket.create_connection(("127.0.0.1", to))
            for ends in ((near, far), (far, near)):
                threading.Thread(target=pass_on, args=ends, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listening.getsockname()[1])


def test_who_listens_on_the_line_learns_sizes_and_nothing_else(tmp_path: Path) -> None:
    make_certificates(tmp_path, "localhost", ["north"])
    *site, authority = (tmp_path / name for name in ("north.crt", "north.key", "ca.crt"))
    listener = GrpcListener("127.0.0.1:0", tmp_path / "server.crt", tmp_path / "server.key", authority, names=["north"])
    echo, kept = Echo(listener), []
    vector = torch.randn(20_000, generator=torch.Generator().manual_seed(0)).numpy().tobytes()
    caller = GrpcCaller(f"localhost:{tapped(int(echo.address.rpartition(':')[2]), kept)}", *site, authority)
    assert list(caller.call(iter([vector]))) == [b"north", vector]
    caller.close()
    echo.close()
    seen = b"".join(kept)
    assert 2 * len(vector) < len(seen) < 2.2 * len(vector)
    assert not any(vector[at : at + 16] in seen for at in range(0, len(vector), 16))
