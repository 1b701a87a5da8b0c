"""Who is not let in, and what both ends are told; the others notice nothing."""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedlit.remote import certificates as made
from fedlit.remote.carrier import BrokenError, RefusedError
from fedlit.remote.certificates import check_files, make_certificates
from fedlit.remote.star import ServerStar, SiteStar

grpc = pytest.importorskip("grpc")
from fedlit.remote.grpc_carrier import GrpcCaller, GrpcListener  # noqa: E402

FACTS = {"the version of fedlit": "1", "method": "FedAvg", "the arguments": {"rate": 0.1, "mu": 1}}
SITES = {"north": ["north"], "south": ["south"]}


class Stage:
    """A server that waits for two sites, of which the test brings a third."""

    def __init__(self, folder: Path) -> None:
        self.files = folder / "files"
        make_certificates(self.files, "localhost", ["north", "south", "stranger"])
        make_certificates(folder / "others", "localhost", ["north"])
        self.others = folder / "others"
        listener = GrpcListener("127.0.0.1:0", *self.of("server"), names=list(SITES))
        self.star = ServerStar(listener, SITES, FACTS, wait_for=20.0, patience=2.0)
        self.opening = threading.Thread(target=self.star.open, daemon=True)
        self.opening.start()
        while not self.star.address:
            time.sleep(0.01)
        self.port = self.star.address.rpartition(":")[2]

    def of(self, name: str, folder: Path | None = None) -> tuple[Path, Path, Path]:
        place = self.files if folder is None else folder
        return place / f"{name}.crt", place / f"{name}.key", place / "ca.crt"

    def site(self, name: str, facts: Any = None, clients: Any = None, files: Any = None) -> SiteStar:
        caller = GrpcCaller(f"localhost:{self.port}", *(files or self.of(name)))
        return SiteStar(caller, FACTS if facts is None else facts, clients, wait_for=12.0, patience=2.0)

    def finish(self) -> None:
        """Let the two that are welcome meet."""
        sites = [self.site(name) for name in SITES]
        threads = [threading.Thread(target=self.meet, args=(each,)) for each in sites]
        for thread in threads:
            thread.start()
        self.opening.join(15)
        frames = self.star.meet(torch.tensor([7]), "a test")
        for thread in threads:
            thread.join(15)
        assert [int(frame) for frame in frames] == [7, 1, 2]
        self.star.close()

    @staticmethod
    def meet(site: SiteStar) -> None:
        site.open()
        assert [int(frame) for frame in site.meet(torch.tensor([site.rank]), "a test")] == [7, 1, 2]
        site.close()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.star.close("the test has ended")


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What the server logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("fedlit.remote")
    log.addHandler(handler)
    yield lines
    log.removeHandler(handler)


CLAIMS: dict[str, tuple[Callable[[Stage], SiteStar], str]] = {
    "another version": (
        lambda stage: stage.site("north", FACTS | {"the version of fedlit": "2"}),
        "the version of fedlit differs: the server has 1, site 'north' has 2",
    ),
    "another method": (
        lambda stage: stage.site("north", FACTS | {"method": "FedProx"}),
        "method differs: the server has FedAvg, site 'north' has FedProx",
    ),
    "another's client": (
        lambda stage: stage.site("north", clients=["south"]),
        "claims the clients \\['south'\\], but the server has \\['north'\\]",
    ),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_who_claims_something_else_is_refused_by_both_values_at_both_ends(
    claim: str, stage: Stage, told: list[str]
) -> None:
    made_by, words = CLAIMS[claim]
    with pytest.raises(RefusedError, match=words):
        made_by(stage).open()
    assert any("refused site north" in line for line in told)
    stage.finish()


def test_only_what_differs_of_many_arguments_is_told_on_one_line(stage: Stage, told: list[str]) -> None:
    with pytest.raises(
        RefusedError, match=r"the arguments differs: the server has \{'rate': 0.1\}, site 'north' has \{\}"
    ):
        stage.site("north", {**FACTS, "the arguments": {"mu": 1}}).open()
    with pytest.raises(RefusedError, match="x 12:00:00: site south has left differs"):
        stage.site("north", {**FACTS, "x\n12:00:00: site south has left": 1}).open()
    assert not any("\n" in line for line in told)
    stage.finish()


def test_a_clock_that_is_far_off_is_refused(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    site, now = stage.site("north"), time.time
    ask = site._ask

    def late(head: Any, body: Any, patience: float) -> Any:
        def ten_minutes_ago() -> bytes:
            monkeypatch.setattr(time, "time", lambda: now() - 600)
            try:
                return bytes(head())
            finally:
                monkeypatch.setattr(time, "time", now)

        return ask(ten_minutes_ago, body, patience)

    monkeypatch.setattr(site, "_ask", late)
    with pytest.raises(RefusedError, match="clock of site 'north' is -600 s off"):
        site.open()
    stage.finish()


def test_a_certificate_of_a_name_that_nobody_knows_is_refused(stage: Stage, told: list[str]) -> None:
    with pytest.raises(RefusedError, match="knows no site 'strang"):
        stage.site("stranger").open()
    assert any("stranger" in line for line in told)
    stage.finish()


def test_a_second_process_of_a_name_is_refused_and_the_first_stays(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedlit.remote.star.admission.STILL_CONNECTED", 0.3)
    first = stage.site("north")
    first.open()
    with pytest.raises(RefusedError, match="another process is connected as site 'north'"):
        stage.site("north").open()
    first.close("gives way")
    stage.finish()


def test_a_server_that_the_sites_authority_has_not_signed_is_not_trusted(stage: Stage) -> None:
    certificate, key, _ = stage.of("north")
    with pytest.raises(RefusedError, match="do not trust each other"):
        stage.site("north", files=(certificate, key, stage.others / "ca.crt")).open()
    stage.finish()


@pytest.mark.parametrize("which", ["another authority", "expired", "self-signed"])
def test_a_site_that_the_servers_authority_has_not_signed_is_refused(
    which: str, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedlit.remote.grpc_carrier._UNTRUSTED", 1.0)
    certificate, key, _ = stage.of("north", stage.others)
    if which == "expired":
        monkeypatch.setattr(made, "_BEFORE", dt.timedelta(days=3))
        authority = made._read_key(stage.files / "ca.key")
        own = ec.generate_private_key(ec.SECP256R1())
        issuer = made._read("ca", stage.files / "ca.crt")[0].subject
        usage = [ExtendedKeyUsageOID.CLIENT_AUTH]
        old = made._certificate(made._named("north"), issuer, own, authority, -1, *usage, ())  # type: ignore[arg-type]
        made._write(tmp_path, "north", old, own)
        certificate, key = tmp_path / "north.crt", tmp_path / "north.key"
        with pytest.raises(ValueError, match="certificate must be valid now"):
            check_files(certificate, key, stage.files / "ca.crt")
    elif which == "self-signed":
        certificate, key = stage.others / "ca.crt", stage.others / "ca.key"
    with pytest.raises(RefusedError, match=r"does not trust this site's certificate|trust each other"):
        stage.site("north", files=(certificate, key, stage.of("north")[2])).open()
    stage.finish()


@pytest.mark.parametrize("secure", [True, False], ids=["no certificate", "plaintext"])
def test_who_shows_no_certificate_gets_nothing(stage: Stage, secure: bool) -> None:
    credentials = grpc.ssl_channel_credentials((stage.files / "ca.crt").read_bytes())
    address = f"localhost:{stage.port}"
    channel = grpc.secure_channel(address, credentials) if secure else grpc.insecure_channel(address)
    with channel, pytest.raises(grpc.RpcError):
        list(channel.stream_stream("/fedlit/call")(iter([b'{"kind": "hello"}']), timeout=3))
    stage.finish()


@pytest.mark.parametrize(
    "request_",
    [
        *(b"no JSON", b"[]", b'{"kind": "pickle"}', b'{"kind": []}', b'{"kind": "step"}', b"[" * 5000),
        b'{"kind": "hello", "session": "0123456789abcdef", "clock": 1%s}' % (b"0" * 400),
    ],
)
def test_requests_that_are_none_are_refused(stage: Stage, request_: bytes) -> None:
    caller = GrpcCaller(f"localhost:{stage.port}", *stage.of("north"))
    with pytest.raises(RefusedError, match="cannot read what 'north' sends"):
        list(caller.call(iter([request_])))
    caller.close()
    stage.finish()


def test_a_longer_body_than_is_due_loses_the_site_and_no_other(stage: Stage) -> None:
    liar = stage.site("north")
    other = stage.site("south")
    threads = [threading.Thread(target=each.open) for each in (liar, other)]
    for thread in threads:
        thread.start()
    for thread in (*threads, stage.opening):
        thread.join(15)
    stage.star.begin(())
    said: list[Any] = []

    def lie() -> None:
        try:
            liar.meet(torch.zeros(1000, dtype=torch.int64), "a lie")
        except Exception as error:
            said.append(error)

    talking = [threading.Thread(target=lie), threading.Thread(target=other.meet, args=(torch.tensor([2]), "a test"))]
    for thread in talking:
        thread.start()
    frames = stage.star.meet(torch.tensor([7]), "a test")
    for thread in talking:
        thread.join(15)
    assert [int(frame) for frame in frames] == [7, 0, 2]
    assert stage.star.lost == {1}
    assert isinstance(said[0], RefusedError | BrokenError)
    other.close()
