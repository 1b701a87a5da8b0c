"""The carrier over gRPC: pieces, names and refusals, and lines that are cut."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedlit.federation import FederationError
from fedlit.remote import BrokenError, RefusedError, ServerLostError
from fedlit.remote.carrier import PIECE_BYTES, Pieces
from fedlit.remote.certificates import make_certificates
from loopback import Echo, around_a_star, masked_sums, soon
from processes import free_port, results
from refused import slow

grpc = pytest.importorskip("grpc")
import remote_ends  # noqa: E402
from fedlit.remote.grpc_carrier import GrpcCaller, GrpcListener  # noqa: E402

SITES = ("north", "south", "west")
Call = Callable[[str], GrpcCaller]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, "localhost", [*SITES])
    return folder


def of(files: Path, name: str) -> tuple[Path, Path, Path]:
    return files / f"{name}.crt", files / f"{name}.key", files / "ca.crt"


def listening(files: Path, port: int = 0) -> Echo:
    return Echo(GrpcListener(f"127.0.0.1:{port}", *of(files, "server"), names=[*SITES]))


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@pytest.fixture
def echo(files: Path) -> Iterator[Echo]:
    echo = listening(files)
    yield echo
    echo.close()


@pytest.fixture
def call(files: Path, echo: Echo) -> Iterator[Call]:
    """Makes a site's caller, which is closed at the end."""
    callers: list[GrpcCaller] = []

    def make(name: str) -> GrpcCaller:
        callers.append(GrpcCaller(f"localhost:{port_of(echo.address)}", *of(files, name)))
        return callers[-1]

    yield make
    for caller in callers:
        caller.close()


def ping(caller: GrpcCaller) -> list[bytes]:
    return list(caller.call(iter([b"x"])))


def test_pieces_come_as_they_were_sent_with_the_name_that_the_certificate_proves(call: Call) -> None:
    pieces = [b"head", b"", bytes(PIECE_BYTES), b"\0\xff" * 1000]
    assert list(call("north").call(iter(pieces))) == [b"north", *pieces]
    assert list(call("south").call(iter([]))) == [b"south"]


def test_sites_connect_before_their_first_call_and_disconnect_when_they_close(echo: Echo, call: Call) -> None:
    north, south = call("north"), call("south")
    for _ in range(3):
        ping(north)
    assert echo.noted == ["came north", *["call north"] * 3], "one connection for all calls"
    ping(south)
    north.close()
    assert soon(lambda: echo.noted[-1] == "gone north")
    assert "gone south" not in echo.noted
    ping(north)
    assert echo.noted[-2:] == ["came north", "call north"]


def test_a_site_that_starts_before_its_server_finds_it(files: Path) -> None:
    tries = results(remote_ends.late, files, 1.0, ranks=2, timeout=30)[1]
    assert 1 < tries < 8


def test_refusals_are_bounded_and_so_are_pieces(call: Call) -> None:
    north = call("north")
    with pytest.raises(RefusedError, match="not this\none!!!") as raised:
        list(north.call(iter([b"refuse"])))
    assert 4000 < len(str(raised.value)) < 8192
    with pytest.raises((RefusedError, BrokenError)):
        list(north.call(iter([bytes(2 * PIECE_BYTES)])))
    assert ping(north) == [b"north", b"x"], "other calls come through"


def test_a_site_of_many_calls_takes_no_threads_of_others(call: Call) -> None:
    ended = threading.Event()

    def endless() -> Pieces:
        yield b"first"
        ended.wait(20)

    north, taken = call("north"), 0
    for reply in [north.call(endless()) for _ in range(60)]:
        with suppress(BrokenError):
            taken += next(reply) == b"north"
    assert 1 <= taken < 6
    start = time.monotonic()
    assert ping(call("south")) == [b"south", b"x"]
    assert time.monotonic() - start < 10
    ended.set()


def test_an_address_that_is_taken_is_named(echo: Echo, files: Path) -> None:
    with pytest.raises(FederationError, match=echo.address) as raised:
        listening(files, port_of(echo.address))
    assert "\n" not in str(raised.value)


def test_calls_under_way_break_when_the_listener_closes_and_a_new_one_is_found(
    files: Path, echo: Echo, call: Call
) -> None:
    def endless() -> Pieces:
        yield b"first"
        time.sleep(1.5)

    north = call("north")
    reply = north.call(endless())
    assert [next(reply), next(reply)] == [b"north", b"first"]
    echo.listener.close()
    for broken in (reply, north.call(iter([b"x"]))):
        with pytest.raises(BrokenError):
            list(broken)
    again = listening(files, port_of(echo.address))

    def comes_through() -> bool:
        with suppress(BrokenError):
            return ping(north) == [b"north", b"x"]
        return False

    assert soon(comes_through, 6.0)
    assert again.noted[0] == "came north"
    north.close()
    again.close()


def test_a_server_that_is_not_there_is_broken_and_not_refused(files: Path) -> None:
    caller = GrpcCaller(f"localhost:{free_port()}", *of(files, "north"))
    with pytest.raises(BrokenError, match="refused") as raised:
        ping(caller)
    assert "\n" not in str(raised.value)
    caller.close()


class Cable:
    """A port of the loopback that leads to another one as long as the cable is in."""

    def __init__(self, to: int) -> None:
        self.to, self.ends = to, list[socket.socket]()
        self.is_in = True
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            near, _ = self.listening.accept()
            if self.is_in:
                with suppress(OSError):  # where nothing listens yet
                    far = socket.create_connection(("127.0.0.1", self.to))
                    self.ends += [near, far]
                    for here, there in ((near, far), (far, near)):
                        threading.Thread(target=self.pass_on, args=(here, there), daemon=True).start()
                    continue
            near.close()

    def pass_on(self, here: socket.socket, there: socket.socket) -> None:
        with suppress(OSError):
            while data := here.recv(1 << 16):
                there.sendall(data)
        for end in (here, there):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def pull(self) -> None:
        self.is_in = False
        while self.ends:
            end = self.ends.pop()
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def with_a_cable(folder: Path, sites: dict[str, list[str]], name: str) -> tuple[Cable, Any]:
    """The cable of one site, and the ends of a carrier between all of them and the server."""
    port = free_port()
    cable = Cable(port)

    def caller(site: str) -> GrpcCaller:
        return GrpcCaller(f"localhost:{cable.port if site == name else port}", *of(folder, site))

    return cable, (GrpcListener(f"127.0.0.1:{port}", *of(folder, "server"), names=[*sites]), caller)


@pytest.mark.parametrize("seconds", [slow(0.5), None], ids=["for a moment", "for good"])
def test_a_cable_that_is_out_disconnects_a_site_for_good_only_after_the_patience(
    seconds: float | None, files: Path
) -> None:
    """Pulled while the site waits for another one."""
    sites = {name: [name] for name in SITES}
    cable, ends = with_a_cable(files, sites, "north")

    def strike(star: Any, caller: Any, round_idx: int) -> None:
        if (star.rank, round_idx) == (2, 1):
            time.sleep(0.1)
            cable.pull()
            if seconds:
                time.sleep(seconds)
                cable.is_in = True

    received = around_a_star(sites, masked_sums(sites, 3, strike), 4.0 if seconds else 0.5, ends)
    if seconds:
        assert received == [[], *[[6.0] * 3] * 3]
    else:
        assert isinstance(received.pop(1), ServerLostError)
        assert received == [[], *[[6.0, 5.0, 5.0]] * 2]


@pytest.mark.slow
def test_thirty_sites_add_up_and_one_of_them_disconnects(tmp_path: Path) -> None:
    sites = {f"site{number:02d}": [f"site{number:02d}"] for number in range(30)}
    make_certificates(tmp_path, "localhost", [*sites])
    cable, ends = with_a_cable(tmp_path, sites, "site06")

    def strike(star: Any, caller: Any, round_idx: int) -> None:
        if (star.rank, round_idx) == (7, 2):
            cable.pull()

    received = around_a_star(sites, masked_sums(sites, 4, strike, 1000), patience=2.0, ends=ends, timeout=200.0)
    everyone = float(sum(range(1, 31)))
    assert isinstance(received.pop(7), ServerLostError)
    assert received.pop(0) == []
    assert received == [[everyone, everyone, everyone - 7, everyone - 7]] * 29
