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
import torch

from fedlit.federation import FederationError
from fedlit.remote import BrokenError, RefusedError, ServerLostError
from fedlit.remote.carrier import PIECE_BYTES, Pieces
from fedlit.remote.certificates import make_certificates
from fedlit.remote.star import ServerStar, SiteStar
from loopback import Echo, Loopback, around_a_star, masked_sums, soon
from processes import results

grpc = pytest.importorskip("grpc")
import late_server  # noqa: E402
from fedlit.remote.grpc_carrier import GrpcCaller, GrpcListener  # noqa: E402

SITES = {"north": ["north"], "south": ["south"]}
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


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


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
    tries = results(late_server.run, files, 1.5, ranks=2, timeout=30)[1]
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
        with suppress(OSError):
            while True:
                near, _ = self.listening.accept()
                if not self.is_in:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self.to))
                self.ends += [near, far]
                for here, there in ((near, far), (far, near)):
                    threading.Thread(target=self.pass_on, args=(here, there), daemon=True).start()

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


@pytest.mark.parametrize("seconds", [0.5, None], ids=["for a moment", "for good"])
def test_a_cable_that_is_out_disconnects_a_site_for_good_only_after_the_patience(
    seconds: float | None, files: Path
) -> None:
    """Pulled while the site waits for the others."""
    patience = 4.0 if seconds else 1.0
    listener = GrpcListener("127.0.0.1:0", *of(files, "server"), names=[*SITES])
    server = ServerStar(listener, SITES, {}, wait_for=10.0, patience=patience)
    opening = threading.Thread(target=server.open)
    opening.start()
    assert soon(lambda: server.address)
    cable = Cable(port_of(server.address))
    ports = {"north": cable.port, "south": cable.to}
    frames: dict[str, list[Any]] = {name: [] for name in ("server", *SITES)}
    pulled = threading.Event()

    def meet(star: Any, name: str, number: int) -> None:
        frames[name].append([int(each) for each in star.meet(torch.tensor([star.rank + number]), "a test")])

    def site(name: str) -> None:
        star = SiteStar(GrpcCaller(f"localhost:{ports[name]}", *of(files, name)), {}, None, 10.0, patience)
        star.open()
        try:
            for number in range(6):
                if name == "south" and number in (2, 4):  # north waits meanwhile
                    pulled.wait(10) if number == 2 else time.sleep(0.1)
                meet(star, name, number)
        except ServerLostError as error:
            frames[name].append(error)
        star.close()

    threads = [threading.Thread(target=site, args=(name,)) for name in SITES]
    for thread in threads:
        thread.start()
    opening.join(10)
    server.begin(())
    for number in range(6):
        if number == 2:
            time.sleep(0.1)
            cable.pull()
            if seconds:
                time.sleep(seconds)
                cable.is_in = True
            pulled.set()
        meet(server, "server", number)
    for thread in threads:
        thread.join(15)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    whole = [[number, number + 1, number + 2] for number in range(6)]
    assert frames["server"] == frames["south"]
    if seconds:
        assert frames["server"] == frames["north"] == whole
        assert not server.lost
    else:  # in the third meeting counts what had arrived before the cable was out
        assert frames["server"][:2] == whole[:2]
        assert frames["server"][3:] == [[number, 0, number + 2] for number in range(3, 6)]
        assert isinstance(frames["north"][-1], ServerLostError)
        assert server.lost == {1}
    cable.pull()
    cable.listening.close()
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize("carrier", ["loopback", "gRPC"])
def test_fifty_sites_add_up_and_one_of_them_dies(carrier: str, tmp_path: Path) -> None:
    sites = {f"site{number:02d}": [f"site{number:02d}"] for number in range(50)}
    loopback = Loopback()
    ends: Any = (loopback, loopback.caller)
    if carrier == "gRPC":
        make_certificates(tmp_path, "localhost", [*sites])
        port = free_port()
        listener = GrpcListener(f"127.0.0.1:{port}", *of(tmp_path, "server"), names=[*sites])
        ends = (listener, lambda name: Mortal(f"localhost:{port}", *of(tmp_path, name)))

    def strike(star: Any, caller: Any, round_idx: int) -> None:
        if (star.rank, round_idx) == (7, 2):
            caller.die()

    received = around_a_star(sites, masked_sums(sites, 4, strike, 1000), patience=2.0, ends=ends, timeout=200.0)
    everyone = float(sum(range(1, 51)))
    assert isinstance(received.pop(7), ServerLostError)
    assert received.pop(0) == []
    assert received == [[everyone, everyone, everyone - 7, everyone - 7]] * 49


class Mortal:
    """A caller over gRPC that can die."""

    def __init__(self, *arguments: Any) -> None:
        self.caller = GrpcCaller(*arguments)
        self.dead = False

    def call(self, request: Pieces) -> Pieces:
        if self.dead:
            raise BrokenError("dead")
        return self.caller.call(request)

    def die(self) -> None:
        self.dead = True
        self.caller.close()

    def close(self) -> None:
        self.caller.close()
