"""A site that dials before its server listens, each in a process of its own, as they are at organisations."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from fedlit.remote import BrokenError
from fedlit.remote.grpc_carrier import GrpcCaller, GrpcListener


def run(files: Path, late: float) -> int:
    """Tries that the site, rank 1, needed; the server, rank 0, listens ``late`` seconds after it has begun."""
    own, port = "server" if os.environ["LOCAL_RANK"] == "0" else "north", os.environ["MASTER_PORT"]
    papers = files / f"{own}.crt", files / f"{own}.key", files / "ca.crt"
    if own == "server":
        time.sleep(late)
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
