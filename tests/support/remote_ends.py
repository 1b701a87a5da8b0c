"""Ends of carriers in processes of their own, as they are at organisations."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from fedlit.remote import BrokenError
from fedlit.remote.grpc_carrier import GrpcCaller, GrpcListener
from fedlit.remote.relay import RelayedSender


def late(files: Path, seconds: float) -> int:
    """Tries that the site, rank 1, needed; the server, rank 0, listens so many seconds after it has begun."""
    own, port = "server" if os.environ["LOCAL_RANK"] == "0" else "north", os.environ["MASTER_PORT"]
    papers = files / f"{own}.crt", files / f"{own}.key", files / "ca.crt"
    if own == "server":
        time.sleep(seconds)
        gone = threading.Event()
        listener = GrpcListener(f"127.0.0.1:{port}", *papers, names=["north"])
        listener.listen(lambda name, pieces: pieces, lambda name: None, lambda name: gone.set())
        gone.wait(20)
        listener.close()
        return 0
    caller, ends = GrpcCaller(f"localhost:{port}", *papers), time.monotonic() + 15
    tries = 0
    while True:
        tries += 1
        try:
            assert list(caller.call(iter([b"here"]))) == [b"here"]
        except BrokenError:
            assert time.monotonic() < ends, f"no server in {tries} tries"
            time.sleep(0.25)
        else:
            caller.close()
            return tries


def through_a_relay(environment: dict[str, str], messages: list[tuple[dict[str, Any], float]]) -> list[Any]:
    """Answers to messages, each with its patience, of a process that another one has started."""
    os.environ.update(environment)
    send = RelayedSender()
    return [send(message, seconds) for message, seconds in messages]
