"""Threshold decryption against ``phe`` and plain integers. Keys are short: this is about arithmetic, not secrecy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import pytest
import torch

from backends import QUICK
from fedlit.federation import Federation
from fedlit.privacy import (
    AuthenticationError,
    FixedPoint,
    KeyCheckError,
    Plain,
    QuorumError,
    RangeError,
    RoundId,
    ThresholdPaillier,
    cores,
)
from fedlit.privacy.driver import Carrier, Parties, Phase
from fedlit.privacy.paillier_arithmetic import generate
from fedlit.privacy.threshold import arithmetic, client
from fedlit.privacy.threshold.arithmetic import ThresholdModulus, deal
from refused import refused

phe = pytest.importorskip("phe.paillier")

NAMES = ["a", "b", "c", "d", "e"]
BITS = 512
VECTORS = {name: torch.tensor([1.5 + place, -2.25 * place, 0.125]) for place, name in enumerate(NAMES)}


class Keys:
    """A key of 3 of 5, as dealt, and as ``phe`` has it."""

    def __init__(self) -> None:
        self.private, self.public = generate(BITS)
        p, q = (int.from_bytes(self.private[part : part + BITS // 16], "big") for part in (0, BITS // 16))
        self.n, self.order = p * q, math.lcm(p - 1, q - 1)
        self.phe_public = phe.PaillierPublicKey(self.n)
        self.phe_private = phe.PaillierPrivateKey(self.phe_public, p, q)
        dealt = deal(self.private, self.public, 3, 5)
        self.shares = {point: int.from_bytes(share, "big") for point, share in enumerate(dealt, 1)}
        self.modulus = ThresholdModulus(self.public, BITS, 3, 5)


@pytest.fixture(scope="module")
def keys() -> Keys:
    return Keys()


# -------------------------------------------------------------------------------- the cryptosystem


def test_any_t_shares_open_what_phe_encrypts_and_fewer_do_not(keys: Keys) -> None:
    plaintexts = [0, 1, 12345678901234567890, keys.n - 1]
    ciphertexts = [keys.phe_public.raw_encrypt(plaintext) for plaintext in plaintexts]
    partials = {point: keys.modulus.decrypt_partly(ciphertexts, share, 1) for point, share in keys.shares.items()}
    for number in (3, 4, 5):
        for points in combinations(keys.shares, number):
            assert keys.modulus.combine({point: partials[point] for point in points}, 1) == plaintexts
    for points in combinations(keys.shares, 2):
        with pytest.raises(QuorumError):
            keys.modulus.combine({point: partials[point] for point in points}, 1)
        fewer = ThresholdModulus(keys.public, BITS, 2, 5)
        with pytest.raises(AuthenticationError):  # as if two were enough
            fewer.combine({point: partials[point] for point in points}, 1)


def test_phe_decrypts_what_clients_encrypt_and_their_product(keys: Keys) -> None:
    vectors = [[5, -7, 2**200], [1, 2, -3]]
    bodies = [keys.modulus.encrypt(numbers, b"", 1)[0] for numbers in vectors]
    ciphertexts = [keys.modulus.read(body, 3) for body in bodies]
    for numbers, made in zip(vectors, ciphertexts, strict=True):
        assert [keys.phe_private.raw_decrypt(int(c)) for c in made] == [number % keys.n for number in numbers]
    product = [keys.phe_private.raw_decrypt(int(c)) for c in keys.modulus.multiply(ciphertexts)]
    assert product == [6, keys.n - 5, 2**200 - 3]


def test_noise_is_an_nth_residue_and_never_comes_twice(keys: Keys) -> None:
    seen = keys.modulus.read(keys.modulus.encrypt([0] * 200, b"", 1)[0], 200)  # ciphertexts of 0 are the noise itself
    assert len({*seen}) == 200
    assert {int(pow(c, keys.order, keys.n**2)) for c in seen} == {1}


def test_fewer_than_t_shares_fit_every_exponent(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the polynomial itself: for any two clients there is another one, as likely, with another exponent."""
    drawn: list[tuple[int, int]] = []
    randbelow = arithmetic.secrets.randbelow

    def recorded(largest: int) -> int:
        drawn.append((randbelow(largest), largest))
        return drawn[-1][0]

    monkeypatch.setattr(arithmetic.secrets, "randbelow", recorded)
    dealt = deal(keys.private, keys.public, 3, 5)
    assert len({*map(len, dealt)}) == 1
    shares = {point: int.from_bytes(share, "big") for point, share in enumerate(dealt, 1)}
    delta = math.factorial(5)
    exponent = keys.order * pow(keys.order, -1, keys.n)
    (a, largest), (b, _) = drawn
    assert shares == {x: delta * exponent + a * x + b * x * x for x in range(1, 6)}
    assert largest >= 2**128 * keys.n**2
    for i, j in combinations(shares, 2):
        # delta (d' - d) (i - x) (j - x) / (i j), with d' = 0
        change = -delta * exponent // (i * j)
        assert change * i * j == -delta * exponent
        other = [0, a - change * (i + j), b + change]
        assert all(sum(each * x**power for power, each in enumerate(other)) == shares[x] for x in (i, j))
        # as likely, unless it leaves the range of the random coefficients: by less than 2^-125 of it here
        assert all(abs(new - old) * 2**125 < largest for new, old in zip(other[1:], (a, b), strict=True))


def test_sums_are_the_same_without_gmpy2_and_by_several_workers(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    payloads = {name: {"w": torch.randn(30, generator=generator)} for name in "abc"}
    expected = Plain(FixedPoint()).sum(payloads)["w"]
    assert torch.equal(ThresholdPaillier(workers=2, **QUICK).sum(payloads)["w"], expected)
    monkeypatch.setattr(cores, "gmpy2", lambda: None)
    assert torch.equal(ThresholdPaillier(**QUICK).sum(payloads)["w"], expected)


# -------------------------------------------------------------------------------- parties


class Losing(Carrier):
    """Loses the answers of some clients in a step of closing (0, 1), or nothing."""

    def __init__(self, lost: Mapping[int, str]) -> None:
        self.lost, self.step = lost, 0

    def gather(self, messages: Mapping[str, bytes], phase: Phase) -> Mapping[str, bytes]:
        if phase != "unmasking":
            return messages
        lost = self.lost.get(self.step, "")
        self.step += 1
        return {name: message for name, message in messages.items() if name not in lost}


def total(threshold: int | None, lost: Mapping[int, str], senders: str = "abcde") -> list[float]:
    parties = Parties(ThresholdPaillier(threshold, colluders=0, **QUICK), NAMES)
    parties.enrol(NAMES)
    parties.open_round(RoundId(0, "w", 0), NAMES)
    for name in senders:
        parties.server.add(name, parties.clients[name].protect(VECTORS[name]))
    parties.server.total()
    numbers = parties.server.conclude(parties.ask_survivors([*senders], Losing(lost)))
    return parties.server.reveal(numbers, len(senders)).tolist()


@pytest.mark.parametrize(
    ("threshold", "senders", "lost"),
    [
        (3, "abcde", {}),
        (3, "bde", {}),
        (3, "abcde", {0: "ab"}),
        (3, "abcde", {1: "ac"}),
        (3, "abde", {0: "e"}),
        (3, "abcde", {0: "a", 1: "b"}),
        (None, "bcde", {}),
        (None, "abcde", {1: "d"}),
        (5, "abcde", {}),
    ],
)
def test_clients_may_drop_out_while_t_stay(threshold: int | None, senders: str, lost: dict[int, str]) -> None:
    expected = [sum(float(VECTORS[name][place]) for name in senders) for place in range(3)]
    assert total(threshold, lost, senders) == expected


@pytest.mark.parametrize(
    ("threshold", "senders", "lost"),
    [(3, "ab", {}), (3, "abcde", {0: "abc"}), (3, "abcde", {1: "abc"}), (None, "abc", {}), (5, "abcde", {1: "a"})],
)
def test_without_t_clients_there_is_no_total(threshold: int | None, senders: str, lost: dict[int, str]) -> None:
    with pytest.raises(QuorumError):
        total(threshold, lost, senders)


def test_a_federation_of_fewer_than_all_opens_its_means_and_a_client_that_was_away_reads_them() -> None:
    from fedlit.federation import Schedule

    backend = ThresholdPaillier(2, **QUICK)
    fed = Federation(NAMES, "e", privacy=backend, participation=Schedule([["a", "b", "c"], NAMES]))
    there = fed.mean("w", {name: {"x": VECTORS[name]} for name in "abc"})
    fed.round_idx = 1
    caught = fed.catch_up("w")
    assert sorted(caught) == ["d", "e"]
    assert torch.equal(caught["d"]["x"], there["a"]["x"])
    state = fed.state_dict()
    resumed = Federation(NAMES, "e", privacy=ThresholdPaillier(2, **QUICK), participation=Schedule([NAMES]))
    resumed.load_state_dict(state)  # with a new key
    grid = Federation(NAMES, "e", privacy=Plain(FixedPoint()))
    payloads = {name: {"x": VECTORS[name]} for name in NAMES}
    assert torch.equal(resumed.mean("w", payloads)["d"]["x"], grid.mean("w", payloads)["d"]["x"])


def test_the_dealer_keeps_its_share_and_nothing_else_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    made = generate(BITS)
    monkeypatch.setattr(client, "generate", lambda bits: made)
    parties = Parties(ThresholdPaillier(3, **QUICK), NAMES)
    parties.enrol(NAMES)
    p, q = (int.from_bytes(made[0][part : part + BITS // 16], "big") for part in (0, BITS // 16))
    secret = {p, q, math.lcm(p - 1, q - 1), math.lcm(p - 1, q - 1) * pow(math.lcm(p - 1, q - 1), -1, p * q)}
    seen: set[int] = set()

    def walk(thing: Any) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        assert not isinstance(thing, int) or thing not in secret
        assert thing != made[0]
        if isinstance(thing, dict):
            thing = [*thing, *thing.values()]
        if isinstance(thing, list | tuple):
            for each in thing:
                walk(each)
        elif hasattr(thing, "__dict__"):
            walk(vars(thing))

    dealer: Any = parties.clients["a"]
    walk(dealer)
    assert dealer._key[1] in [each for each in vars(dealer)["_key"]]
    assert len({party._key[1] for party in parties.clients.values()}) == 5  # type: ignore[attr-defined]
    assert not hasattr(parties.server, "_key")


# -------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("argument", "value"), [("threshold", 1), ("colluders", -1), ("key_bits", 513), ("max_clients", 1), ("workers", 0)]
)
def test_arguments_out_of_range_are_refused(argument: str, value: int) -> None:
    with refused(argument):
        ThresholdPaillier(**{**QUICK, argument: value})
    with refused("key_bits"):
        ThresholdPaillier(key_bits=512)
    with refused("threshold"):
        ThresholdPaillier(2, colluders=2, **QUICK)


@pytest.mark.parametrize(
    ("num_clients", "threshold", "colluders", "borne"),
    [
        *((number, None, 0, borne) for number, borne in ((2, 0), (3, 1), (4, 1), (5, 2), (10, 3))),
        *((number, threshold, 0, borne) for number, threshold, borne in ((3, 2, 0), (5, 3, 0), (5, 5, 3), (3, 3, 1))),
        *((number, threshold, 1, borne) for number, threshold, borne in ((3, 2, 1), (5, 3, 2), (4, 2, 1), (5, 2, 1))),
        (10, 5, 4, 4),
    ],
)
def test_how_many_may_collude(num_clients: int, threshold: int | None, colluders: int, borne: int) -> None:
    backend = ThresholdPaillier(threshold, colluders, **QUICK)
    assert backend.colluders_borne(num_clients) == borne
    t = 2 * num_clients // 3 + 1 if threshold is None else threshold
    assert backend.colluders_needed(num_clients) == min(t, num_clients - 1)
    assert f"of {num_clients} clients, {borne} may collude" in backend.describe_round(num_clients).collusion


def test_rounds_that_cannot_be_opened_are_refused_before_anything_is_sent() -> None:
    parties = Parties(ThresholdPaillier(None, max_clients=4, **QUICK), NAMES)
    with pytest.raises(KeyCheckError, match="run the enrolment steps"):
        parties.clients["a"].open_round(RoundId(0, "w", 0), NAMES)
    parties.enrol(NAMES)
    for names, error in ((NAMES[:3], QuorumError), (NAMES, RangeError), ([*NAMES[:3], "x"], KeyCheckError)):
        for party in (parties.clients["a"], parties.server):
            with pytest.raises(error):
                party.open_round(RoundId(0, "w", 0), names)
    with pytest.raises(QuorumError, match="hides nothing of fewer than 3"):  # of two, a colluder knows the other's
        ThresholdPaillier(**QUICK).sum({name: {"x": VECTORS[name]} for name in NAMES[:2]})
    many = Parties(ThresholdPaillier(colluders=7, **QUICK), list("abcdefghi"))
    many.enrol(list("abcdefghi"))
    with pytest.raises(QuorumError, match="of 9 clients, 6 may collude"):
        many.clients["a"].open_round(RoundId(0, "w", 0), list("abcdefghi"))
    few = Parties(ThresholdPaillier(3, **QUICK), NAMES[:2])
    with pytest.raises(QuorumError, match="3 clients must decrypt together"):
        few.enrol(NAMES[:2])


def test_a_modulus_with_small_factors_is_refused() -> None:
    n = (2 ** (BITS - 1) // 15 + 1) * 15
    n += 15 * (n % 2 == 0)
    with pytest.raises(KeyCheckError, match="no small factors"):
        ThresholdModulus(n.to_bytes(BITS // 8, "big"), BITS, 3, 5)
