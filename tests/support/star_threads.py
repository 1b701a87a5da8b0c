"""A star whose server and sites are threads of this process, each with its end of gRPC."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from fedlit.federation.transport import Transport
from fedlit.remote.certificates import make_certificates
from fedlit.remote.grpc_carrier import GrpcCaller, GrpcListener
from fedlit.remote.star import ServerStar, SiteStar
from loopback import soon

_T = TypeVar("_T")


def on_a_star(
    action: Callable[[Transport], _T], sites: Mapping[str, Sequence[str]], folder: Path
) -> list[_T | Exception]:
    """What ``action`` returns or raises at the server and at each site; ``sites`` has their clients."""
    make_certificates(folder, "localhost", list(sites))

    def files(name: str) -> tuple[Path, Path, Path]:
        return folder / f"{name}.crt", folder / f"{name}.key", folder / "ca.crt"

    listener = GrpcListener("127.0.0.1:0", *files("server"), names=list(sites))
    server = ServerStar(listener, sites, {}, wait_for=20.0, patience=2.0, step_timeout=20.0)
    opening = threading.Thread(target=server.open, daemon=True)
    opening.start()
    assert soon(lambda: server.address)
    address = f"localhost:{server.address.rpartition(':')[2]}"
    ends = [SiteStar(GrpcCaller(address, *files(name)), {}, None, 12.0, 2.0) for name in sites]

    def work(end: ServerStar | SiteStar) -> _T | Exception:
        try:
            if isinstance(end, SiteStar):
                end.open()
            else:
                opening.join(15)
                end.begin(())
            return action(end)
        except Exception as error:
            return error
        finally:
            if isinstance(end, SiteStar):
                end.close()

    with ThreadPoolExecutor(len(sites) + 1) as pool:
        results = list(pool.map(work, [server, *ends]))
    server.close()
    return results
