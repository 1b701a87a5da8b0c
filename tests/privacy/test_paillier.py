"""Paillier sums against ``phe`` and plain integers. Small keys test the arithmetic here; they keep nothing secret."""

from __future__ import annotations

import atexit
import errno
import os
import signal
import struct
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import Recorded
from bodies import added, encrypted
from fedlit.privacy import (
    DecodeError,
    FixedPoint,
    KeyCheckError,
    Plain,
    RangeError,
    RoundId,
    cores,
)
from fedlit.privacy import paillier as paillier_module
from fedlit.privacy import paillier_arithmetic as arithmetic
from fedlit.privacy.driver import Parties
from fedlit.privacy.errors import PrivacyWarning
from fedlit.privacy.paillier import Paillier
from refused import refused

phe = pytest.importorskip("phe.paillier")

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
BITS = 512
SIZE = BITS // 4


def backend(**arguments: Any) -> Paillier:
    return Paillier(**{"key_bits": BITS, "insecure_test_keys": True, **arguments})


class Keys:
    """One key pair as the scheme and as ``phe`` load it."""

    def __init__(self, of: Paillier) -> None:
        self.private_bytes, self.public_bytes = of.generate_keys()
        self.private = of.load_key(self.public_bytes, self.private_bytes)
        self.public = of.load_key(self.public_bytes)
        half = len(self.private_bytes) // 2
        p, q = (int.from_bytes(part, "big") for part in (self.private_bytes[:half], self.private_bytes[half:]))
        self.phe_public = phe.PaillierPublicKey(p * q)
        self.phe_private = phe.PaillierPrivateKey(self.phe_public, p, q)
        self.n, self.p = p * q, p


@pytest.fixture(scope="module")
def keys() -> Keys:
    return Keys(backend())


def ciphertexts_of(body: bytes, size: int = SIZE) -> list[int]:
    return [int.from_bytes(body[i : i + size], "big") for i in range(0, len(body), size)]


def to_body(*ciphertexts: int, size: int = SIZE) -> bytes:
    return b"".join(c.to_bytes(size, "big") for c in ciphertexts)


def digits(plaintext: int, n: int, base: int, count: int) -> list[int]:
    """Balanced digits of a residue modulo n, least first: written apart from `Slots`, which adds an offset instead."""
    rest = plaintext - n if plaintext > n // 2 else plaintext
    found = []
    for _ in range(count):
        digit = (rest + base // 2) % base - base // 2
        found.append(digit)
        rest = (rest - digit) // base
    assert rest == 0
    return found


# -------------------------------------------------------------------------------- the cryptosystem


@pytest.mark.parametrize("num_vectors", [1, 5])
def test_phe_decrypts_vectors_of_clients_and_the_servers_total(
    num_vectors: int, keys: Keys, generator: torch.Generator
) -> None:
    paillier = backend()
    vectors = [torch.randn(40, generator=generator) for _ in range(num_vectors)]
    bodies = [encrypted(keys.private, vector) for vector in vectors]
    base = 2 * 64 * paillier.codec.limit + 1
    numbers = [
        digit
        for c in ciphertexts_of(added(keys.public, bodies, 40) if num_vectors > 1 else bodies[0])
        for digit in digits(keys.phe_private.raw_decrypt(c), keys.n, base, paillier.slots.count)
    ]
    assert numbers[:40] == sum(paillier.codec.encode(vector) for vector in vectors).tolist()
    assert not any(numbers[40:])


def test_a_client_decrypts_what_phe_encrypts(keys: Keys) -> None:
    paillier = backend()
    numbers = [5, -7, paillier.codec.limit, -paillier.codec.limit, 0]
    base = 2 * 64 * paillier.codec.limit + 1
    plaintext = sum(number * base**i for i, number in enumerate(numbers)) % keys.n
    body = to_body(keys.phe_public.raw_encrypt(plaintext))
    assert torch.equal(keys.private.decrypt(body, 5, 1), paillier.codec.decode(torch.tensor(numbers)))


def test_noise_is_an_nth_residue_and_never_comes_twice(keys: Keys) -> None:
    vector = torch.zeros(backend().slots.count * 200)
    seen = ciphertexts_of(encrypted(keys.private, vector)) + ciphertexts_of(encrypted(keys.private, vector))
    # ciphertexts of 0 are the noise itself
    assert len(set(seen)) == len(seen) == 400
    # also apart modulo each prime: noise that repeats modulo one of them gives the key away through a gcd
    for prime in (keys.p, keys.n // keys.p):
        assert len({c % prime for c in seen}) == 400
    phi = (keys.p - 1) * (keys.n // keys.p - 1)
    assert {pow(c, phi, keys.n**2) for c in seen[:20]} == {1}


def test_noise_is_spread_over_the_whole_group(keys: Keys) -> None:
    noise = ciphertexts_of(encrypted(keys.private, torch.zeros(backend().slots.count * 300)))
    for prime in (keys.p, keys.n // keys.p):
        upper_half = sum(c % prime > prime // 2 for c in noise)
        assert 90 < upper_half < 210  # 7 standard deviations around 150 (4e-12)


def test_sums_are_the_same_without_gmpy2(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    payloads = {name: {"w": torch.randn(30, generator=generator)} for name in "abc"}
    monkeypatch.setattr(cores, "gmpy2", lambda: None)
    paillier = backend()
    assert torch.equal(paillier.sum(payloads)["w"], Plain(paillier.codec).sum(payloads)["w"])


@pytest.mark.parametrize(("workers", "length"), [(1, 500), (2, 1), (None, 500)])
def test_workers_change_nothing_but_the_time(
    workers: int | None, length: int, keys: Keys, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "_SMALLEST_PART", 1e-9)
    paillier = backend(workers=workers)
    key = paillier.load_key(keys.public_bytes, keys.private_bytes)
    vector = torch.randn(length, generator=generator)
    assert torch.equal(
        key.decrypt(encrypted(key, vector), length, 1), paillier.codec.decode(paillier.codec.encode(vector))
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_long_vectors_are_summed_in_pieces(
    workers: int, keys: Keys, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three ciphertexts, the last piece of fewer, and the last ciphertext not full."""
    monkeypatch.setattr(arithmetic, "_SMALLEST_PART", 1e-9)
    for module in (arithmetic, paillier_module):
        monkeypatch.setattr(module, "PIECE", 3)
    paillier = backend(workers=workers)
    for length in (1, 3 * paillier.slots.count, 3 * paillier.slots.count + 1, 8 * paillier.slots.count - 2):
        payloads = {name: {"w": torch.randn(length, generator=generator)} for name in "abc"}
        assert torch.equal(paillier.sum(payloads)["w"], Plain(paillier.codec).sum(payloads)["w"])
        pieces = list(keys.private.encrypt(payloads["a"]["w"]))
        total: deque[Any] = deque()
        keys.public.add(total, b"".join(pieces), length)
        for made in (pieces, list(keys.public.write(total))):
            assert [len(piece) // SIZE for piece in made] == [
                min(3, paillier.slots.integers(length) - first)
                for first in range(0, paillier.slots.integers(length), 3)
            ]


def test_an_error_in_a_thread_arrives(keys: Keys) -> None:
    with pytest.raises(ZeroDivisionError):
        cores.spread(lambda number: 1 // number, [1, 2, 0, 4], 2)


# -------------------------------------------------------------------------------- forked children


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The children made so far, even for little work; none of them, and no pipe, is left in the end."""
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    fork, children, files = os.fork, [], len(os.listdir("/dev/fd"))

    def recorded() -> int:
        children.append(fork())
        return children[-1]

    monkeypatch.setattr(os, "fork", recorded)
    monkeypatch.setattr(arithmetic, "_SMALLEST_PART", 1e-9)
    yield children
    for child in children:
        with pytest.raises(ChildProcessError):
            os.waitpid(child, os.WNOHANG)
    assert len(os.listdir("/dev/fd")) == files


def number_and_process(numbers: Sequence[int]) -> bytes:
    return b"".join(struct.pack("!II", number, os.getpid()) for number in numbers)


def processes_of(work: Callable[[Sequence[int]], bytes], workers: int = 3, smallest: int = 1) -> list[int]:
    """Processes that worked on each of 8 numbers, which are all there and in order."""
    pairs = list(struct.iter_unpack("!II", cores.spread_forked(work, range(8), 8, workers, smallest)))
    assert [number for number, _ in pairs] == list(range(8))
    return [process for _, process in pairs]


def test_each_process_works_on_one_part(forked: list[int]) -> None:
    processes = processes_of(number_and_process)
    assert processes == 3 * [os.getpid()] + 3 * forked[:1] + 2 * forked[1:]


@pytest.mark.parametrize(("smallest", "children"), [(2, 2), (4, 1), (5, 0)])
def test_nothing_is_forked_for_little_work(smallest: int, children: int, forked: list[int]) -> None:
    processes_of(number_and_process, smallest=smallest)
    assert len(forked) == children


@pytest.mark.parametrize("end", ["raises", "exits", "is killed", "sends too little"])
def test_the_part_of_a_child_that_fails_is_done_by_its_parent(
    end: str, forked: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    parent = os.getpid()

    def work(numbers: Sequence[int]) -> bytes:
        body = number_and_process(numbers)
        if os.getpid() != parent:
            if end == "raises":
                raise MemoryError
            if end == "exits":
                sys.exit(1)
            if end == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            return body[:-1]
        return body

    assert set(processes_of(work)) == {parent}
    assert len(forked) == 2
    assert capfd.readouterr() == ("", "")


def test_where_no_child_can_be_made_the_parent_works_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_fork() -> int:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "fork", no_fork, raising=False)
    assert set(processes_of(number_and_process)) == {os.getpid()}
    monkeypatch.delattr(os, "fork")
    assert set(processes_of(number_and_process)) == {os.getpid()}


def test_an_error_of_the_work_itself_arrives_and_ends_the_children(forked: list[int]) -> None:
    parent = os.getpid()

    def work(numbers: Sequence[int]) -> bytes:
        if os.getpid() == parent:
            raise ZeroDivisionError
        return bytes(2**20)  # more than a pipe holds: it cannot be written before somebody reads

    with pytest.raises(ZeroDivisionError):
        processes_of(work)
    assert len(forked) == 2


def test_a_program_that_never_waits_for_its_children_is_served(forked: list[int]) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert len(set(processes_of(number_and_process))) == 3
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_children_leave_without_running_exit_handlers(forked: list[int], tmp_path: Path) -> None:
    handler = atexit.register((tmp_path / "ran").touch)
    try:
        processes_of(number_and_process)
    finally:
        atexit.unregister(handler)
    assert len(forked) == 2
    assert not (tmp_path / "ran").exists()


def test_threads_that_encrypt_at_the_same_time_do_not_mix_their_children(keys: Keys, forked: list[int]) -> None:
    key = backend(workers=3).load_key(keys.public_bytes, keys.private_bytes)
    vectors = [torch.full((100,), float(number)) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        bodies = list(pool.map(partial(encrypted, key), vectors))
    assert len(forked) == 8
    for body, vector in zip(bodies, vectors, strict=True):
        assert torch.equal(key.decrypt(body, 100, 1), vector.double())


def test_no_noise_of_one_process_comes_in_another(keys: Keys, forked: list[int]) -> None:
    key = backend(workers=4).load_key(keys.public_bytes, keys.private_bytes)
    zeros = torch.zeros(4 * 50 * backend().slots.count)
    noise = ciphertexts_of(encrypted(key, zeros)) + ciphertexts_of(encrypted(key, zeros))
    assert len(forked) == 6
    # also apart modulo each prime
    for modulus in (keys.n**2, keys.p, keys.n // keys.p):
        assert len({c % modulus for c in noise}) == 400


# -------------------------------------------------------------------------------- powers


@settings(max_examples=30, deadline=None)
@given(base=st.integers(2, 2**64), modulus=st.integers(2, 2**64), exponent=st.integers(0, 2**40 - 1))
def test_powers_of_a_fixed_base_are_powers(base: int, modulus: int, exponent: int) -> None:
    assert arithmetic.FixedBase(base, modulus, 5).power(exponent) % modulus == pow(base, exponent, modulus)


# -------------------------------------------------------------------------------- keys


def test_short_keys_are_refused_or_give_a_warning_and_the_default_is_long() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Paillier().key_bits == 3072
    with pytest.warns(PrivacyWarning, match="2048 bits are weaker"):
        Paillier(key_bits=2048)
    for bits in (512, 2032):
        with refused("key_bits"):
            Paillier(key_bits=bits)


@pytest.mark.parametrize(
    ("argument", "value"), [("key_bits", 513), ("key_bits", 10**6), ("max_clients", 1), ("workers", 0)]
)
def test_arguments_out_of_range_are_refused(argument: str, value: int) -> None:
    with refused(argument):
        backend(**{argument: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_clients": 2**12}, "63 bits hold only"),
        ({"max_clients": 2**10, "key_bits": 64}, "key_bits must be at least 65"),
    ],
)
def test_sums_beyond_the_headroom_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RangeError, match=message):
        backend(codec=FixedPoint(50, 4.0), **arguments)


def test_a_missing_phe_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "phe.paillier", None)
    with pytest.raises(ImportError, match=r"fedlit\[paillier\]"):
        backend()


def test_halves_that_do_not_belong_together_are_refused(keys: Keys) -> None:
    trivial = b"\0" * (BITS // 16 - 1) + b"\1" + keys.private_bytes[: BITS // 16]
    for private in (Keys(backend()).private_bytes, trivial):
        with pytest.raises(KeyCheckError):
            backend().load_key(keys.public_bytes, private)


def test_malformed_keys_are_refused(keys: Keys) -> None:
    scheme = backend()
    even = (keys.n - 1).to_bytes(BITS // 8, "big")
    short = (keys.n >> 1 | 1).to_bytes(BITS // 8, "big")
    for public in (b"", keys.public_bytes[1:], even, short, keys.public_bytes + keys.private_bytes, bytes(10**6)):
        with pytest.raises(KeyCheckError):
            scheme.load_key(public)
    with pytest.raises(KeyCheckError, match="must be of 64 bytes"):
        scheme.load_key(keys.public_bytes, keys.private_bytes + b"\0")
    with pytest.raises(KeyCheckError, match="must be of 1024 bits"):
        backend(key_bits=1024).load_key(keys.public_bytes, keys.private_bytes)


def test_nothing_printed_shows_a_key(keys: Keys) -> None:
    modulus = arithmetic.load_private(keys.private_bytes, keys.public_bytes, BITS)
    for shown in (repr(modulus), repr(keys.private), repr(keys.public)):
        assert str(keys.p)[:8] not in shown
        assert hex(keys.p)[2:10] not in shown


# -------------------------------------------------------------------------------- attacks on ciphertexts


@pytest.mark.parametrize(
    "hostile",
    [
        *(
            lambda keys, of=of: to_body(of(keys))
            for of in (lambda keys: 0, lambda keys: keys.n, lambda keys: 5 * keys.n)
        ),
        *(lambda keys, of=of: to_body(of(keys)) for of in (lambda keys: 7 * keys.p, lambda keys: keys.n**2)),
        lambda keys: b"\xff" * SIZE,
        *(lambda keys, size=size: bytes(size) for size in (0, 1, SIZE - 1, SIZE + 1, 2 * SIZE, 10**6)),
    ],
)
def test_what_is_no_ciphertext_is_neither_added_nor_decrypted(hostile: Callable[[Keys], bytes], keys: Keys) -> None:
    bad, good = hostile(keys), encrypted(keys.private, torch.ones(3))
    for bodies in ([bad, good], [good, bad]):
        with pytest.raises(DecodeError):
            added(keys.public, bodies, 3)
    for length in (3, 2**63):
        with pytest.raises(DecodeError):
            keys.private.decrypt(bad, length, 1)


def test_ciphertexts_that_were_changed_or_made_under_another_key_are_refused_even_without_the_frame(keys: Keys) -> None:
    bodies = [bytearray(encrypted(keys.private, torch.ones(3))) for _ in range(3)]
    for body, position in zip(bodies, (0, SIZE // 2, SIZE - 1), strict=True):
        body[position] ^= 1
    for bad in (*bodies, encrypted(Keys(backend()).private, torch.ones(3))):
        with pytest.raises(DecodeError):
            keys.private.decrypt(bytes(bad), 3, 1)


@pytest.mark.parametrize(
    ("value", "length", "times", "read", "announced"),
    [
        (32.0, 3, 3, 3, 2),  # more vectors than announced, noticed once they are too large
        (32.0, backend().slots.count, 65, backend().slots.count, 64),  # past the headroom, which never wraps
        (1.0, 5, 1, 3, 1),  # numbers hidden behind the announced length
    ],
)
def test_totals_beyond_what_was_announced_are_refused(
    value: float, length: int, times: int, read: int, announced: int, keys: Keys
) -> None:
    body = encrypted(keys.private, torch.full((length,), value))
    total = added(keys.public, [body] * times, length) if times > 1 else body
    with pytest.raises(DecodeError, match=r"out of range|exceeds what 2 clients"):
        keys.private.decrypt(total, read, announced)


# -------------------------------------------------------------------------------- the whole exchange


def test_the_server_holds_no_private_key_and_receives_none() -> None:
    wire, names = Recorded(), list("abc")
    parties = Parties(backend(), names)
    parties.enrol(names, wire)
    parties.open_round(RoundId(0, "w", 0), names, wire)
    messages = {name: client.protect(torch.ones(5)) for name, client in parties.clients.items()}
    parties.server.aggregate(messages)
    ours, theirs = (vars(party)["_keys"][0]._modulus for party in (parties.clients["a"], parties.server))
    assert isinstance(ours, arithmetic.PrivateModulus)
    assert type(theirs) is arithmetic.PublicModulus
    sent = [*wire.up, *wire.down, *(message.numpy().tobytes() for message in messages.values())]
    for prime in (int(ours._p.prime), int(ours._q.prime)):
        secret = prime.to_bytes(BITS // 16, "big")
        assert not any(secret in message or secret[::-1] in message for message in sent)
