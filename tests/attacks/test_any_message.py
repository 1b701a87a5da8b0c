"""A server or a site that lies at any one message: an error, or nothing changes; no wrong total, and no vector."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

from adversary import LIES, Moment, moments_of, run
from fedlit.federation import Federation, Open, Pairwise, Summed
from fedlit.federation.client import Facts
from fedlit.federation.errors import FederationError, RosterError
from fedlit.federation.transport import Transport
from fedlit.privacy import Paillier, PaillierAffine, PairwiseMasking, PrivacyError

NAMES = ["a", "b", "c", "t"]
PLACEMENT = [[], *([name] for name in NAMES)]  # the server apart
QUICK: dict[str, Any] = {"key_bits": 512, "insecure_test_keys": True}
"""Keys of 512 bits test what is refused, and no secrecy."""

SIZE = 40
CHANNELS = [
    Summed("masked", "weights"),
    Summed("encrypted", "moments"),
    Open("models", "a model"),
    Pairwise("gradients", "moments", "sources", "target"),
]


def vector_of(name: str, round_idx: int) -> torch.Tensor:
    return torch.arange(float(SIZE)) / 7 + NAMES.index(name) + round_idx / 3


def program(transport: Transport, results: list[Any]) -> None:
    """What runs send: facts, keys, hidden means and sums, sealed models, products with moments; in two rounds."""
    federation = Federation(
        NAMES, "t", transport=transport, placement=PLACEMENT, seed=0, channels=CHANNELS, encrypted=True,
        privacy={"masked": PairwiseMasking(), "encrypted": Paillier(**QUICK)},
        two_party=PaillierAffine(**QUICK, reveal_moments=True),
    )  # fmt: skip
    federation.identify()
    local = [client.name for client in federation.local_clients]
    federation.introduce({name: Facts(10 + NAMES.index(name), (SIZE,)) for name in local})
    sources, target = NAMES[:3], federation.target
    for round_idx in range(2):
        federation.round_idx = round_idx
        payloads = {name: {"w": vector_of(name, round_idx)} for name in local}
        for received in (
            federation.mean("masked", payloads, weights=federation.weights),
            federation.sum("encrypted", payloads),
            {
                name: {"w": each["a"]["w"]}
                for name, each in federation.exchange("models", payloads).items()
                if name != "a"
            },
        ):
            results.extend(message["w"] for message in received.values())
        moments = {name: vector_of(name, round_idx)[:4].double() for name in local if name in sources}
        maps = {"t": {name: (torch.ones(2, 4).double() / 8, torch.zeros(2).double()) for name in sources}}
        pairs = [(client, target) for client in federation.sources]
        learnt = federation.affine("gradients", moments, {k: v for k, v in maps.items() if k in local}, pairs, 2)
        results.extend(each[name] for each in learnt.values() for name in sources)


@cache
def honest() -> tuple[list[list[Any]], list[Moment]]:
    results, error, seen, _ = run(program, len(PLACEMENT))
    assert error is None
    assert [len(each) for each in results] == [0, 4, 6, 6, 12]
    return results, moments_of(seen)


def judge(lie: str, at: Moment) -> str:
    """Say what came of a lie, or fail: only what honest clients use counts, up to where they stop."""
    results, error, seen, lied = run(program, len(PLACEMENT), lie, at)
    if not lied:
        return "no lie"
    expected, _ = honest()
    own = at.kind == "introductions" and at.sender and lie == "change"  # a site may state another number of samples
    for rank, (got, right) in enumerate(zip(results, expected, strict=True)):
        wrong = [index for index, one in enumerate(got) if not torch.equal(one, right[index])]
        assert own or not wrong, f"{lie} at {at}: rank {rank} uses wrong results {wrong}"
    assert error is None or isinstance(error, FederationError | PrivacyError | RosterError), f"{lie} at {at}: {error!r}"
    for moment, message in seen:
        if moment.receiver == 0 and not moment.frame:
            for name in NAMES:
                for round_idx in range(2):
                    plain = vector_of(name, round_idx).numpy().tobytes()[:32]
                    assert plain not in message.numpy().tobytes(), f"{lie} at {at}: the server reads a vector"
    return "nothing changed" if error is None else type(error).__name__


def outcomes(step: int) -> Counter[str]:
    cases = [(lie, moment) for moment in honest()[1] for lie in LIES]
    return Counter(judge(lie, moment) for lie, moment in cases[::step])


def test_lies_at_messages_of_all_kinds_are_refused_or_change_nothing() -> None:
    """Each way to lie and each kind of message, though not all pairs of them: those are in the slow test."""
    counts = outcomes(29)
    assert counts.total() >= 10
    assert sum(count for outcome, count in counts.items() if outcome.endswith("Error")) >= counts.total() // 3


@pytest.mark.slow
def test_all_lies_at_all_messages_are_refused_or_change_nothing() -> None:
    counts = outcomes(1)
    assert counts.total() == len(honest()[1]) * len(LIES)
    assert counts["nothing changed"] + counts["no lie"] < counts.total() // 2
