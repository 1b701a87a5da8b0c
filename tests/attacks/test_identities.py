"""A server that puts its own keys in the place of clients', at the start or when one returns."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID
from torch import Tensor

from fedlit.cli.seats import certify
from fedlit.federation import Federation, Open, Summed
from fedlit.federation.documents import document, read_document
from fedlit.federation.identities import Identities, Voucher
from fedlit.federation.journal import Journal
from fedlit.federation.sealing import Seals
from fedlit.federation.transport import Transport
from fedlit.privacy import CKKS, DecodeError, KeyCheckError, Paillier, PairwiseMasking, ThresholdPaillier
from fedlit.privacy.links import KeyPair
from fedlit.remote.certificates import check_files, common_name, make_certificates
from fedlit.remote.message_carrier import MessageCaller
from fedlit.remote.relay import KIT, OWN
from fedlit.remote.seats import CarriedSite
from fedlit.remote.vouchers import CertificateVoucher, fingerprint_of
from refused import refused
from relayed import Relayed
from thread_transport import on_ranks

NAMES = ["a", "b", "c", "t"]
PLACEMENT = [[], *([name] for name in NAMES)]  # the server apart
SWAPPED = KeyPair()
"""Of the server, in place of client c's."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, "localhost", NAMES)
    make_certificates(folder / "other", "localhost", NAMES)
    return folder


def voucher(folder: Path, name: str, **peers: str) -> Voucher:
    return CertificateVoucher(folder / f"{name}.crt", folder / f"{name}.key", folder / "ca.crt", peers)


def swapped(rank: int, doing: str, message: Tensor) -> Tensor:
    """The statement of client c with another key, to all others."""
    if "identity keys" not in doing or rank == NAMES.index("c") + 1:
        return message
    try:
        statement = read_document(message)
    except DecodeError:
        return message
    if isinstance(statement, dict) and "c" in statement.get("keys", ()):
        statement["keys"]["c"] = SWAPPED.public
        return document(statement, doing)
    return message


def sums(
    transport: Transport, folder: Path | None, journals: Path | None = None, change: Any = None, **settings: Any
) -> Any:
    """The keys that a process knows after it has met the others, and a masked sum."""
    relayed = transport if change is None else Relayed(transport, change)
    federation = Federation(NAMES, "t", transport=relayed, placement=PLACEMENT, seed=0, **settings)
    (name,) = [client.name for client in federation.local_clients] or [""]
    if name and journals is not None:
        federation.journal = Journal(journals / f"{name}.releases")
    federation.identify(voucher(folder, name) if folder is not None and name else None)
    total = federation.sum("weights", {name: {"w": torch.ones(2)}} if name else {})
    assert all(torch.equal(each["w"], torch.full((2,), 4.0)) for each in total.values())
    return federation._identities.publics  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "backend",
    [
        PairwiseMasking(),
        *(scheme(key_bits=1024, insecure_test_keys=True) for scheme in (Paillier, ThresholdPaillier)),
        CKKS(),
    ],
    ids=["masks", "Paillier", "ThresholdPaillier", "CKKS"],
)
def test_with_certificates_a_swapped_key_is_refused_before_anything_is_sent(backend: Any, certificates: Path) -> None:
    """Keys of 1024 bits test the arithmetic, not secrecy."""
    privacy: dict[str, Any] = {"privacy": backend, "channels": [Summed("weights", "weights")]}
    keys = on_ranks(lambda transport: sums(transport, certificates, **privacy), len(PLACEMENT))
    assert all(each == keys[0] for each in keys)
    with pytest.raises(KeyCheckError, match="client 'c' is not signed"):
        on_ranks(lambda transport: sums(transport, certificates, change=swapped, **privacy), len(PLACEMENT))


def test_a_return_does_not_unpin(tmp_path: Path) -> None:
    """Without certificates, keys are trusted when they are first seen, and never again."""
    privacy: dict[str, Any] = {"privacy": PairwiseMasking(), "channels": [Summed("weights", "weights")]}
    first = on_ranks(lambda transport: sums(transport, None, tmp_path, **privacy), len(PLACEMENT))
    again = on_ranks(lambda transport: sums(transport, None, tmp_path, **privacy), len(PLACEMENT))
    assert first[1] == again[1]
    with pytest.raises(KeyCheckError, match="'c' has another identity key than before"):
        on_ranks(lambda transport: sums(transport, None, tmp_path, swapped, **privacy), len(PLACEMENT))


def met(transport: Transport, folder: Path, allowed: list[str]) -> None:
    federation = Federation(NAMES, "t", transport=transport, placement=PLACEMENT, seed=0)
    for client in federation.local_clients:
        federation.journal = Journal(folder / f"{client.name}.releases")
    federation.identify(None, allowed)


def test_a_site_that_lost_its_journal_has_to_be_allowed_by_the_others(tmp_path: Path) -> None:
    on_ranks(lambda transport: met(transport, tmp_path, []), len(PLACEMENT))
    (tmp_path / "b.releases").unlink()
    with pytest.raises(KeyCheckError, match=r"allow_rejoin: \[b\]"):
        on_ranks(lambda transport: met(transport, tmp_path, []), len(PLACEMENT))
    on_ranks(lambda transport: met(transport, tmp_path, ["b"]), len(PLACEMENT))
    on_ranks(lambda transport: met(transport, tmp_path, []), len(PLACEMENT))  # and is known from then on


def test_backends_use_the_stated_keys_and_no_others() -> None:
    """The directory of keys that the server relays in enrolment is another one than was stated."""

    def enrolled(transport: Transport, backend: Any) -> None:
        def change(rank: int, doing: str, message: Tensor) -> Tensor:
            content = bytes(message.numpy().tobytes())
            key = stated.get("c", b"-" * 32)
            return torch.frombuffer(bytearray(content.replace(key, SWAPPED.public)), dtype=torch.uint8)

        relayed = Relayed(transport, lambda rank, doing, message: message)
        federation = Federation(
            NAMES, "t", transport=relayed, placement=PLACEMENT, seed=0, privacy=backend,
            channels=[Summed("weights", "weights")],
        )  # fmt: skip
        federation.identify()
        stated = federation._identities.publics  # type: ignore[union-attr]
        if transport.rank == 1:
            relayed._change = change
        federation.sum("weights", {client.name: {"w": torch.ones(2)} for client in federation.local_clients})

    for backend in (PairwiseMasking(), Paillier(key_bits=1024, insecure_test_keys=True)):
        with pytest.raises(KeyCheckError, match="identity key"):
            on_ranks(lambda transport, backend=backend: enrolled(transport, backend), len(PLACEMENT))


def test_encrypted_messages_go_under_the_stated_keys() -> None:
    def exchanged(transport: Transport, secretly: bool) -> None:
        federation = Federation(
            NAMES, "t", transport=transport, placement=PLACEMENT, seed=0, encrypted=True,
            channels=[Open("models", "weights")],
        )  # fmt: skip
        federation.identify()
        if secretly and transport.rank == 3:  # it sends another key than it has stated
            federation._exchange._seals = Seals(["c"])
        payloads = {client.name: {"w": torch.ones(2)} for client in federation.local_clients}
        federation.exchange("models", payloads)

    on_ranks(lambda transport: exchanged(transport, False), len(PLACEMENT))
    with pytest.raises(KeyCheckError, match="identity key"):
        on_ranks(lambda transport: exchanged(transport, True), len(PLACEMENT))


def test_who_comes_back_states_its_keys_anew_with_all_others_also_if_nobody_asked() -> None:
    """Sums of three clients have tags, whose key needs identity keys: also in a federation that was told of none."""
    state: dict[str, Any] = {}

    def sums_around_a_return(transport: Transport) -> list[float]:
        def made() -> Federation:
            return Federation(
                NAMES, "t", transport=transport, placement=PLACEMENT, seed=0, privacy=PairwiseMasking(),
                channels=[Summed("weights", "weights")],
            )  # fmt: skip

        federation = made()
        payloads = {client.name: {"w": torch.ones(2)} for client in federation.local_clients}
        federation.sum("weights", payloads)
        if transport.rank == 0:
            state.update(federation.public_state())
        have = {"c": {"weights": 1}}
        transport.all_gather(None, "the state is there")
        if transport.rank == 3:
            federation = made()
            federation.come_back(state)
        federation.welcome(have)
        return [float(total["w"][0]) for total in federation.sum("weights", payloads).values()]

    ranks = on_ranks(sums_around_a_return, len(PLACEMENT), timeout=5.0)
    assert ranks == [[], [4.0], [4.0], [4.0], [4.0]]


@pytest.mark.parametrize(
    "statement",
    [None, 7, {}, {"keys": {"c": b"short"}, "lasting": True, "proof": {}}, {"keys": {"b": bytes(32)}},
     {"keys": {"c": bytes(32)}, "lasting": 1, "proof": {}}, {"keys": {"c": bytes(32)}, "lasting": True, "proof": 3}],
)  # fmt: skip
def test_what_is_no_statement_is_an_error(statement: Any) -> None:
    federation = Federation(NAMES, "t", seed=0)
    identities = Identities(federation._messenger)
    federation._messenger.rank_of["c"] = 1
    with pytest.raises(DecodeError):
        identities._take(1, statement)


# -------------------------------------------------------------------- certificates

MESSAGE = bytes(range(32))


def test_a_voucher_is_valid_for_its_client_and_message_alone(certificates: Path) -> None:
    north, south = voucher(certificates, "a"), voucher(certificates, "b")
    proof = north.sign(MESSAGE)
    south.check("a", MESSAGE, proof)
    attempts: list[tuple[str, bytes, Any]] = [
        ("c", MESSAGE, proof),  # another client
        ("a", bytes(32), proof),  # another key
        ("a", MESSAGE, {}),
        ("a", MESSAGE, {**proof, "chain": b"text"}),
        ("a", MESSAGE, {**proof, "signature": proof["signature"][:-1] + b"\x00\x00"}),
        ("a", MESSAGE, {"chain": proof["chain"], "signature": south.sign(MESSAGE)["signature"]}),
        ("a", MESSAGE, voucher(certificates / "other", "a").sign(MESSAGE)),  # of another authority
    ]
    for client, message, given in attempts:
        with pytest.raises(KeyCheckError, match=client):
            south.check(client, message, given)


def test_fingerprints_need_no_authority(certificates: Path) -> None:
    other = voucher(certificates / "other", "a")
    found = fingerprint_of(x509.load_pem_x509_certificate((certificates / "other" / "a.crt").read_bytes()))
    voucher(certificates, "b", a=found).check("a", MESSAGE, other.sign(MESSAGE))
    with pytest.raises(KeyCheckError, match="sha256:"):  # signed by the authority, and another one than expected
        voucher(certificates, "b", a=found).check("a", MESSAGE, voucher(certificates, "a").sign(MESSAGE))
    voucher(certificates, "b", first="a").check("first", MESSAGE, voucher(certificates, "a").sign(MESSAGE))
    with refused("peers['a']"):
        voucher(certificates, "b", a="sha256:12")


def issued(folder: Path, names: list[str], key: Any, authority: bool = False, days: tuple[int, int] = (-1, 1)) -> Any:
    """A certificate of the trial's authority, with a key of any type."""
    import datetime as dt

    ca = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    secret: Any = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now + dt.timedelta(days=days[0]))
        .not_valid_after(now + dt.timedelta(days=days[1]))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .sign(secret, hashes.SHA256())
    )


def written(folder: Path, certificates: list[Any], key: Any, ca: Path) -> Callable[..., Voucher]:
    pem = serialization.Encoding.PEM
    (folder / "x.crt").write_bytes(b"".join(each.public_bytes(pem) for each in certificates))
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "x.key").write_bytes(secret)
    return partial(CertificateVoucher, folder / "x.crt", folder / "x.key", ca)


@pytest.mark.parametrize(
    "make",
    [lambda: rsa.generate_private_key(65537, 2048), ed25519.Ed25519PrivateKey.generate],
    ids=["RSA", "Ed25519"],
)
def test_keys_of_other_types_sign_as_well(make: Any, certificates: Path, tmp_path: Path) -> None:
    key = make()
    proof = written(tmp_path, [issued(certificates, ["a"], key)], key, certificates / "ca.crt")({}).sign(MESSAGE)
    voucher(certificates, "b").check("a", MESSAGE, proof)
    with pytest.raises(KeyCheckError):
        voucher(certificates, "b").check("a", bytes(32), proof)


@pytest.mark.parametrize(
    ("names", "days"), [(["a", "b"], (-1, 1)), (["a\0b"], (-1, 1)), (["a"], (-2, -1)), (["a"], (1, 2)), ([], (-1, 1))]
)
def test_certificates_of_several_names_or_out_of_date_vouch_for_nobody(
    names: list[str], days: tuple[int, int], certificates: Path, tmp_path: Path
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = issued(certificates, names, key, days=days)
    own = written(tmp_path, [certificate], key, certificates / "ca.crt")({})
    for client in ("a", "b"):
        with pytest.raises(KeyCheckError):
            voucher(certificates, "c").check(client, MESSAGE, own.sign(MESSAGE))
    with refused("certificate"):
        check_files(tmp_path / "x.crt", tmp_path / "x.key", certificates / "ca.crt")
    if len(names) != 1 or "\0" in names[0]:
        with refused("certificate"):
            common_name(certificate)


@pytest.mark.parametrize("authority", [True, False])
def test_a_site_is_no_authority(authority: bool, certificates: Path, tmp_path: Path) -> None:
    """A site's certificate would issue one in the name of another."""
    key, intermediate = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    second = issued(certificates, ["b"], intermediate, authority)
    folder = tmp_path / "issuer"
    folder.mkdir()
    pem = serialization.Encoding.PEM
    (folder / "ca.crt").write_bytes(second.public_bytes(pem))
    (folder / "ca.key").write_bytes(
        intermediate.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    chain = [issued(folder, ["a"], key), second]
    proof = written(tmp_path, chain, key, certificates / "ca.crt")({}).sign(MESSAGE)
    if authority:
        voucher(certificates, "c").check("a", MESSAGE, proof)
    else:
        with pytest.raises(KeyCheckError):
            voucher(certificates, "c").check("a", MESSAGE, proof)


# -------------------------------------------------------------------- startup kits of FLARE


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the sites a, b, c and t, of the server, and of an administrator, as FLARE provisions them."""
    lighter = pytest.importorskip("nvflare.lighter.utils")
    folder = tmp_path_factory.mktemp("workspace")
    root, (key, public) = lighter.generate_keys()[0], lighter.generate_keys()  # one for all, as they are slow to make
    authority = lighter.Identity("project")
    whole = lighter.generate_cert(authority, authority, root, root.public_key(), ca=True)
    for name in [*NAMES, "server1", "admin@o.org"]:
        certificate = lighter.generate_cert(lighter.Identity(name, "o"), authority, root, public)
        startup = folder / name / "startup"
        startup.mkdir(parents=True)
        (startup / "client.crt").write_bytes(lighter.serialize_cert(certificate))
        (startup / "client.key").write_bytes(lighter.serialize_pri_key(key))
        (startup / "rootCA.pem").write_bytes(lighter.serialize_cert(whole))
    return folder


class NoRelay:
    """In place of the process that hands messages on."""


def certified(folder: Path | None, name: str, *args: str) -> CarriedSite:
    """The seat of a site in a job, whose workspace is in a folder; ``None`` has no startup kit, as the simulator."""
    seat = CarriedSite(MessageCaller(NoRelay()), None, 1.0, 1.0)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        if folder is not None:
            patch.setenv(KIT, str(folder / name / "startup"))
            patch.setenv(OWN, str(folder / name / "local" / "fedlit.yaml"))
        certify(seat, args)
    return seat


def of_flare(transport: Transport, vouchers: dict[str, Any], change: Any = None) -> Any:
    relayed = transport if change is None else Relayed(transport, change)
    federation = Federation(NAMES, "t", transport=relayed, placement=PLACEMENT, seed=0, privacy=PairwiseMasking())
    (name,) = [client.name for client in federation.local_clients] or [""]
    federation.identify(vouchers.get(name))
    return federation._identities.publics  # type: ignore[union-attr]


def test_startup_kits_vouch_for_the_keys_of_sites(kits: Path) -> None:
    """Before the mend, and in the simulator, who relays the keys puts its own in the place of client c's."""
    vouchers = {name: certified(kits, name).voucher() for name in NAMES}
    keys = on_ranks(lambda transport: of_flare(transport, vouchers), len(PLACEMENT))
    assert all(each == keys[0] for each in keys)
    with pytest.raises(KeyCheckError, match="client 'c' is not signed"):
        on_ranks(lambda transport: of_flare(transport, vouchers, swapped), len(PLACEMENT))
    without = {name: certified(None, name).voucher() for name in NAMES}
    keys = on_ranks(lambda transport: of_flare(transport, without, swapped), len(PLACEMENT))
    assert [each["c"] == SWAPPED.public for each in keys] == [True, True, True, False, True]


@pytest.mark.parametrize("other", ["server1", "admin@o.org", "b"])
def test_other_kits_of_a_project_vouch_for_no_client(other: str, kits: Path, certificates: Path) -> None:
    site, proof = certified(kits, "a").voucher(), certified(kits, other).voucher().sign(MESSAGE)  # type: ignore[union-attr]
    assert site is not None
    for client in {"a", "c", "t"} - {other}:
        with pytest.raises(KeyCheckError, match="expected"):
            site.check(client, MESSAGE, proof)
    with pytest.raises(KeyCheckError, match="authority"):  # of another project
        site.check("c", MESSAGE, voucher(certificates, "c").sign(MESSAGE))


def test_a_site_in_flare_says_itself_who_speaks_for_others_and_no_job_does(kits: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("seat: {peers: {ward: server1, clinic: server1}, allow_rejoin: [b]}")
    local = kits / "a" / "local"
    local.mkdir()
    (local / "fedlit.yaml").write_text("seat: {peers: {clinic: b}, allow_rejoin: [c]}")
    seat = certified(kits, "a", f"--config={tmp_path / 'job.yaml'}", f"--config={local / 'fedlit.yaml'}")
    assert seat.peers == {"clinic": "b"}
    assert seat.allow_rejoin == ["c"]
    site = seat.voucher()
    assert site is not None
    proof = {name: certified(kits, name).voucher().sign(MESSAGE) for name in ("b", "server1")}  # type: ignore[union-attr]
    site.check("clinic", MESSAGE, proof["b"])
    for client in ("clinic", "ward"):
        with pytest.raises(KeyCheckError):
            site.check(client, MESSAGE, proof["server1"])
    for wrong, said in (("journal: x", "takes peers, allow_rejoin"), ("peers: {b: 'sha256:1'}", "sha256")):
        (local / "fedlit.yaml").write_text(f"seat: {{{wrong}}}")
        with pytest.raises(SystemExit, match=said):
            certified(kits, "a", f"--config={local / 'fedlit.yaml'}")


@pytest.mark.parametrize("lacking", [None, "client.key"])
def test_the_executor_finds_the_startup_kit_of_its_site(
    lacking: str | None, kits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flare = pytest.importorskip("fedlit.flare")
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable
    from nvflare.apis.signal import Signal
    from nvflare.apis.workspace import Workspace

    place = tmp_path / "site"
    shutil.copytree(kits / "b", place)
    (place / "local").mkdir(exist_ok=True)
    if lacking is not None:
        (place / "startup" / lacking).unlink()

    class Context(FLContext):
        def get_engine(self) -> Any:
            return SimpleNamespace(get_workspace=lambda: Workspace(str(place), "b"))

        def get_job_id(self, default: Any = None) -> str:
            return "1"

        def get_identity_name(self, default: str = "") -> str:
            return "b"

    environments: list[dict[str, str]] = []
    executor = flare.FedlitExecutor([])
    monkeypatch.setattr(flare, "_arguments", lambda fl_ctx, arguments: [])
    monkeypatch.setattr(executor, "_watch", lambda command, environment, *_: environments.append(environment) or 0)
    executor.execute(flare.TASK, Shareable(), Context(), Signal())
    assert environments[0].get(KIT) == (None if lacking else str(place / "startup"))
    assert environments[0][OWN] == str(place / "local" / "fedlit.yaml")
