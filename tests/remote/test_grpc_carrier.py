"""The carrier over gRPC: what it brings, whom it names, and what it says when a line is cut."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlit.federation import Client, Federation, FederationError
from fedlit.privacy import PairwiseMasking
from fedlit.remote import BrokenError, RefusedError, ServerLostError
from fedlit.remote.carrier import PIECE_BYTES, Pieces
from fedlit.remote.certificates import make_certificates
from fedlit.remote.star import ServerStar, SiteStar
from loopback import Loopback, around_a_star
from processes import results

grpc = pytest.importorskip("grpc")
import late_server  # noqa: E402
from fedlit.remote.grpc_carrier import GrpcCaller, GrpcListener  # noqa: E402


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, "localhost", ["north", "south"])
    return folder


def of(files: Path, name: str) -> tuple[Path, Path, Path]:
    return files / f"{name}.crt", files / f"{name}.key", files / "ca.crt"


class Echo:
    """A listener that answers by the name of who calls, and then by what it was told; notes who comes and goes."""

    def __init__(self, files: Path, address: str = "127.0.0.1:0") -> None:
        self.noted: list[str] = []
        self.listener = GrpcListener(address, *of(files, "server"), names=["north", "south"])
        self.address = self.listener.listen(
            self.answer, lambda name: self.note("came", name), lambda name: self.note("gone", name)
        )
        self.port = int(self.address.rpartition(":")[2])

    def note(self, what: str, name: str) -> None:
        self.noted.append(f"{what} {name}")

    def answer(self, name: str, pieces: Pieces) -> Pieces:
        self.note("call", name)
        yield name.encode()
        for piece in pieces:
            if piece == b"refuse":
                raise RefusedError("not this\none" + "!" * 10_000)
            yield piece


@pytest.fixture
def echo(files: Path) -> Iterator[Echo]:
    echo = Echo(files)
    yield echo
    echo.listener.close()


@pytest.fixture
def north(files: Path, echo: Echo) -> Iterator[GrpcCaller]:
    caller = GrpcCaller(f"localhost:{echo.port}", *of(files, "north"))
    yield caller
    caller.close()


def soon(condition: Any, seconds: float = 3.0) -> bool:
    ends = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends:
        time.sleep(0.01)
    return bool(condition())


def test_pieces_come_as_they_were_sent_with_the_name_that_the_certificate_proves(echo: Echo, north: GrpcCaller) -> None:
    pieces = [b"head", b"", bytes(PIECE_BYTES), b"\0\xff" * 1000]
    assert list(north.call(iter(pieces))) == [b"north", *pieces]
    assert list(north.call(iter([]))) == [b"north"]


def test_a_site_has_come_before_its_first_call_and_is_gone_when_it_closes(echo: Echo, north: GrpcCaller) -> None:
    for _ in range(3):
        list(north.call(iter([b"x"])))
    assert echo.noted == ["came north", *["call north"] * 3], "one connection for all calls"
    north.close()
    assert soon(lambda: echo.noted[-1] == "gone north")
    list(north.call(iter([b"x"])))
    assert echo.noted[-2:] == ["came north", "call north"], "and may come again"


def test_a_site_that_is_there_before_its_server_finds_it(files: Path) -> None:
    tries = results(late_server.run, files, 1.5, ranks=2, timeout=30)[1]
    assert 1 < tries < 8, "one at least was in vain, and the server was found soon after it came"


def test_two_sites_are_told_apart(echo: Echo, north: GrpcCaller, files: Path) -> None:
    south = GrpcCaller(f"localhost:{echo.port}", *of(files, "south"))
    assert next(south.call(iter([]))) == b"south"
    assert next(north.call(iter([]))) == b"north"
    south.close()
    assert soon(lambda: "gone south" in echo.noted)
    assert "gone north" not in echo.noted
    assert next(north.call(iter([]))) == b"north"


def test_a_refusal_comes_with_its_words_though_not_endlessly_many(north: GrpcCaller) -> None:
    with pytest.raises(RefusedError, match="not this\none!!!") as raised:
        list(north.call(iter([b"refuse"])))
    assert 4000 < len(str(raised.value)) < 8192
    assert list(north.call(iter([b"x"]))) == [b"north", b"x"], "other calls come through"


def test_a_piece_that_is_larger_than_pieces_are_is_refused_before_it_is_taken(echo: Echo, north: GrpcCaller) -> None:
    list(north.call(iter([b"x"])))
    with pytest.raises((RefusedError, BrokenError)):
        list(north.call(iter([bytes(2 * PIECE_BYTES)])))
    assert list(north.call(iter([b"x"]))) == [b"north", b"x"]


def test_a_site_that_calls_and_calls_takes_no_threads_of_others(echo: Echo, north: GrpcCaller, files: Path) -> None:
    ended = threading.Event()

    def endless() -> Pieces:
        yield b"first"
        ended.wait(20)

    replies = [north.call(endless()) for _ in range(60)]
    taken = 0
    for reply in replies:
        with suppress(BrokenError):
            taken += next(reply) == b"north"
    assert 1 <= taken < 6
    south = GrpcCaller(f"localhost:{echo.port}", *of(files, "south"))
    start = time.monotonic()
    assert list(south.call(iter([b"x"]))) == [b"south", b"x"]
    assert time.monotonic() - start < 10
    south.close()
    ended.set()


def test_an_address_that_is_taken_is_named(echo: Echo, files: Path) -> None:
    with pytest.raises(FederationError, match=f"nothing can listen at '127.0.0.1:{echo.port}'") as raised:
        Echo(files, f"127.0.0.1:{echo.port}")
    assert "\n" not in str(raised.value)


def test_calls_that_are_under_way_break_when_the_listener_closes_and_a_new_one_is_found(
    files: Path, echo: Echo, north: GrpcCaller
) -> None:
    def endless() -> Pieces:
        yield b"first"
        time.sleep(1.5)

    reply = north.call(endless())
    assert [next(reply), next(reply)] == [b"north", b"first"]
    echo.listener.close()
    with pytest.raises(BrokenError):
        list(reply)
    with pytest.raises(BrokenError):
        list(north.call(iter([b"x"])))
    again = Echo(files, f"127.0.0.1:{echo.port}")

    def comes_through() -> bool:
        with suppress(BrokenError):
            return list(north.call(iter([b"x"]))) == [b"north", b"x"]
        return False

    assert soon(comes_through, 6.0)
    assert again.noted[0] == "came north"
    north.close()
    again.listener.close()


def test_a_server_that_is_not_there_is_broken_and_not_refused(files: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    caller = GrpcCaller(f"localhost:{port}", *of(files, "north"))
    with pytest.raises(BrokenError, match="refused") as raised:
        list(caller.call(iter([b"x"])))
    assert "\n" not in str(raised.value)
    caller.close()


# ---------------------------------------------------------------- a cable between


class Cable:
    """A port of the loopback behind which another one is, as long as the cable is in."""

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

    def put_in(self) -> None:
        self.is_in = True


SITES = {"north": ["north"], "south": ["south"]}


@pytest.mark.parametrize("seconds", [0.5, None], ids=["for a moment", "for good"])
def test_a_cable_that_is_out_loses_a_site_only_if_that_takes_longer_than_the_patience(
    seconds: float | None, files: Path
) -> None:
    """Pulled while the site waits for the others, and while it is on its way."""
    listener = GrpcListener("127.0.0.1:0", *of(files, "server"), names=[*SITES])
    server = ServerStar(listener, SITES, {}, wait_for=10.0, patience=4.0 if seconds else 1.0)
    opening = threading.Thread(target=server.open)
    opening.start()
    assert soon(lambda: server.address)
    cable = Cable(int(server.address.rpartition(":")[2]))
    ports = {"north": cable.port, "south": cable.to}
    results: dict[str, list[Any]] = {name: [] for name in SITES}
    pulled = threading.Event()

    def site(name: str) -> None:
        caller = GrpcCaller(f"localhost:{ports[name]}", *of(files, name))
        star = SiteStar(caller, {}, None, 10.0, server.board.members.patience)
        star.open()
        try:
            for number in range(6):
                if name == "south" and number in (2, 4):  # north waits meanwhile
                    pulled.wait(10) if number == 2 else time.sleep(0.1)
                results[name].append([int(each) for each in star.meet(torch.tensor([star.rank + number]), "a test")])
        except ServerLostError as error:
            results[name].append(error)
        star.close()

    threads = [threading.Thread(target=site, args=(name,)) for name in SITES]
    for thread in threads:
        thread.start()
    opening.join(10)
    server.begin(())
    seen = []
    for number in range(6):
        if number == 2:
            time.sleep(0.1)
            cable.pull()
            if seconds:
                time.sleep(seconds)
                cable.put_in()
            pulled.set()
        seen.append([int(each) for each in server.meet(torch.tensor([number]), "a test")])
    for thread in threads:
        thread.join(15)
    assert not any(thread.is_alive() for thread in threads), "somebody hangs"
    whole = [[number, number + 1, number + 2] for number in range(6)]
    if seconds:
        assert seen == results["north"] == results["south"] == whole
        assert not server.lost
    else:
        without = [*whole[:2], *([number, 0, number + 2] for number in range(2, 6))]
        assert seen == results["south"]
        # what had arrived before the cable was out counts
        assert [each for each in seen[3:]] == without[3:]
        assert seen[:2] == whole[:2]
        assert isinstance(results["north"][-1], ServerLostError)
        assert server.lost == {1}
    cable.pull()
    cable.listening.close()
    server.close()


# ---------------------------------------------------------------- many sites


@pytest.mark.slow
@pytest.mark.parametrize("carrier", ["loopback", "gRPC"])
def test_fifty_sites_add_up_and_one_of_them_dies(carrier: str, tmp_path: Path) -> None:
    names = [f"site{number:02d}" for number in range(50)]
    sites = {name: [name] for name in names}
    if carrier == "gRPC":
        make_certificates(tmp_path, "localhost", names)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = GrpcListener(f"127.0.0.1:{port}", *of(tmp_path, "server"), names=names)
        ends: Any = (server, lambda name: Mortal(f"localhost:{port}", *of(tmp_path, name)))
    else:
        loopback = Loopback()
        ends = (loopback, loopback.caller)

    def action(star: Any, caller: Any) -> list[float]:
        clients = [Client(name, role="target" if name == names[-1] else "source") for name in names]
        federation = Federation(
            clients,
            names[-1],
            transport=star,
            placement=[[], *sites.values()],
            privacy=PairwiseMasking(colluders=0, threshold=0.6),
            seed=0,
        )
        federation.settled = True
        if star.rank == 0:
            star.begin(())
        found = []
        for round_idx in range(4):
            federation.round_idx = round_idx
            start = time.monotonic()
            federation.roll_call()
            if star.rank == 7 and round_idx == 2:
                caller.die()
            mine = {client.name: {"x": torch.full((1000,), star.rank / 2)} for client in federation.local_clients}
            got = federation.sum("weights", mine)
            if star.rank == 0:
                print(f"{carrier}: round {round_idx} of 50 sites took {time.monotonic() - start:.2f} s", flush=True)
            found += [float(payload["x"][0]) for payload in got.values()]
        return found

    start = time.monotonic()
    results = around_a_star(sites, action, patience=2.0, ends=ends, timeout=200.0)
    print(f"{carrier}: all in {time.monotonic() - start:.1f} s")
    everyone = sum(range(1, 51)) / 2
    assert isinstance(results.pop(7), ServerLostError)
    assert results[0] == []
    for result in results[1:]:
        assert result == [everyone, everyone, everyone - 3.5, everyone - 3.5]


class Mortal:
    """A caller over gRPC that can die."""

    def __init__(self, *arguments: Any) -> None:
        self.caller = GrpcCaller(*arguments)
        self.dead = False

    def call(self, request: Pieces) -> Pieces:
        if self.dead:
            raise BrokenError("there is nobody")
        return self.caller.call(request)

    def die(self) -> None:
        self.dead = True
        self.caller.close()

    def close(self) -> None:
        self.caller.close()
