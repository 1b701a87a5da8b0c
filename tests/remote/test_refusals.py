"""Sites that are not let in, with the reason at both ends; the others notice nothing."""

from __future__ import annotations

import datetime as dt
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedlit.remote.carrier import BrokenError, RefusedError
from fedlit.remote.certificates import check_files, make_certificates
from fedlit.remote.star import ServerStar, SiteStar
from loopback import soon

grpc = pytest.importorskip("grpc")
from fedlit.remote.grpc_carrier import GrpcCaller, GrpcListener  # noqa: E402

FACTS = {"the version of fedlit": "1", "method": "FedAvg", "the arguments": {"rate": 0.1, "mu": 1}}
SITES = {"north": ["north"], "south": ["south"]}


class Stage:
    """A server that waits for two sites, of which the test brings a third."""

    def __init__(self, folder: Path) -> None:
        self.files, self.others = folder / "files", folder / "others"
        make_certificates(self.files, "localhost", ["north", "south", "stranger"])
        make_certificates(self.others, "localhost", ["north"])
        listener = GrpcListener("127.0.0.1:0", *self.of("server"), names=list(SITES))
        self.star = ServerStar(listener, SITES, FACTS, wait_for=20.0, patience=2.0, step_timeout=60.0)
        self.opening = threading.Thread(target=self.star.open, daemon=True)
        self.opening.start()
        assert soon(lambda: self.star.address)
        self.address = f"localhost:{self.star.address.rpartition(':')[2]}"

    def of(self, name: str, folder: Path | None = None) -> tuple[Path, Path, Path]:
        folder = folder or self.files
        return folder / f"{name}.crt", folder / f"{name}.key", folder / "ca.crt"

    def site(self, name: str, facts: Any = FACTS, clients: Any = None, files: Any = None) -> SiteStar:
        return SiteStar(GrpcCaller(self.address, *(files or self.of(name))), facts, clients, 12.0, 2.0)

    def finish(self) -> None:
        """Let the two that are welcome meet."""
        threads = [threading.Thread(target=self.meet, args=(self.site(name),)) for name in SITES]
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
def logged() -> Iterator[list[str]]:
    """The server's log."""
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
    "other arguments": (
        lambda stage: stage.site("north", FACTS | {"the arguments": {"mu": 1}}),
        "the arguments differs: the server has {'rate': 0.1}, site 'north' has {}",
    ),
    "a line of a log": (
        lambda stage: stage.site("north", FACTS | {"x\n12:00:00: site south has left": 1}),
        "x 12:00:00: site south has left differs",
    ),
    "another's client": (lambda stage: stage.site("north", clients=["south"]), "claims the clients ['south']"),
    "an unknown name": (lambda stage: stage.site("stranger"), "stranger"),
}


def test_other_claims_are_refused_by_both_values_at_both_ends(stage: Stage, logged: list[str]) -> None:
    for claim, (site, reason) in CLAIMS.items():
        logged.clear()
        with pytest.raises(RefusedError) as raised:
            site(stage).open()
        assert reason in str(raised.value), claim
        assert any("refused" in line and ("north" in line or "stranger" in line) for line in logged), claim
        assert not any("\n" in line for line in logged), claim
    stage.finish()


def test_a_second_process_of_a_name_and_a_clock_that_is_far_off_are_refused(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("fedlit.remote.star.admission.CLOCKS", -1.0)
        with pytest.raises(RefusedError, match="clock of site 'north' is"):
            stage.site("north").open()
    monkeypatch.setattr("fedlit.remote.star.admission.STILL_CONNECTED", 0.3)
    first = stage.site("north")
    first.open()
    with pytest.raises(RefusedError, match="another process is connected"):
        stage.site("north").open()
    first.close("gives way")
    stage.finish()


def expired(stage: Stage, folder: Path) -> tuple[Path, Path]:
    """A certificate of the stage's authority that was valid until yesterday, and its key."""
    authority: Any = serialization.load_pem_private_key((stage.files / "ca.key").read_bytes(), None)
    key, now = ec.generate_private_key(ec.SECP256R1()), dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "north")]))
        .issuer_name(x509.load_pem_x509_certificate((stage.files / "ca.crt").read_bytes()).subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=3))
        .not_valid_after(now - dt.timedelta(days=1))
        .sign(authority, hashes.SHA256())
    )
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "old.crt").write_bytes(certificate.public_bytes(encoding))
    (folder / "old.key").write_bytes(key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain))
    return folder / "old.crt", folder / "old.key"


def test_ends_of_other_authorities_do_not_trust_each_other(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedlit.remote.grpc_carrier._UNTRUSTED", 1.5)
    (certificate, key, ca), (other, other_key, other_ca) = stage.of("north"), stage.of("north", stage.others)
    old = *expired(stage, tmp_path), ca
    papers = {
        "another authority": (other, other_key, ca),
        "self-signed": (other_ca, stage.others / "ca.key", ca),
        "expired": old,
        "of another server": (certificate, key, other_ca),
    }
    with ThreadPoolExecutor() as pool:
        sites = {pool.submit(stage.site("north", files=files).open): which for which, files in papers.items()}
    for site, which in sites.items():
        assert isinstance(site.exception(), RefusedError), which
        assert "trust" in str(site.exception()), which
    with pytest.raises(ValueError, match="valid now"):
        check_files(*old)
    stage.finish()


def test_a_caller_without_a_certificate_gets_nothing(stage: Stage) -> None:
    credentials = grpc.ssl_channel_credentials((stage.files / "ca.crt").read_bytes())
    for channel in (grpc.secure_channel(stage.address, credentials), grpc.insecure_channel(stage.address)):
        with channel, pytest.raises(grpc.RpcError):
            list(channel.stream_stream("/fedlit/call")(iter([b'{"kind": "hello"}']), timeout=3))
    stage.finish()


REQUESTS = [
    *(b"no JSON", b"[]", b'{"kind": "pickle"}', b'{"kind": []}', b'{"kind": "step"}', b"[" * 5000),
    b'{"kind": "hello", "session": "0123456789abcdef", "clock": 1%s}' % (b"0" * 400),
]


def test_requests_of_other_forms_are_refused(stage: Stage) -> None:
    caller = GrpcCaller(stage.address, *stage.of("north"))
    for request in REQUESTS:
        with pytest.raises(RefusedError, match="cannot read what 'north' sends"):
            list(caller.call(iter([request])))
    caller.close()
    stage.finish()


def test_a_body_that_is_too_long_drops_its_site_and_no_other(stage: Stage) -> None:
    liar, other = stage.site("north"), stage.site("south")
    threads = [threading.Thread(target=each.open) for each in (liar, other)]
    for thread in threads:
        thread.start()
    for thread in (*threads, stage.opening):
        thread.join(15)
    stage.star.begin(())
    errors: list[BaseException] = []

    def lie() -> None:
        with pytest.raises((RefusedError, BrokenError)) as raised:
            liar.meet(torch.zeros(1000, dtype=torch.int64), "a lie")
        errors.append(raised.value)

    calls = [threading.Thread(target=lie), threading.Thread(target=other.meet, args=(torch.tensor([2]), "a test"))]
    for thread in calls:
        thread.start()
    frames = stage.star.meet(torch.tensor([7]), "a test")
    for thread in calls:
        thread.join(15)
    assert [int(frame) for frame in frames] == [7, 0, 2]
    assert stage.star.lost == {1}
    assert errors
    other.close()
