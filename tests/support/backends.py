"""Privacy backends that tests of runs go through; keys are quick, as these are about arithmetic and not secrecy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from fedlit.privacy import (
    BFV,
    CKKS,
    CKKSAffine,
    Paillier,
    PaillierAffine,
    PairwiseMasking,
    PlainAffine,
    ThresholdPaillier,
)
from fedlit.privacy.driver import Carrier, Phase

QUICK: dict[str, Any] = {"key_bits": 512, "insecure_test_keys": True}
BACKENDS: dict[str, Any] = {
    "masking": partial(PairwiseMasking, colluders=0),
    "paillier": partial(Paillier, **QUICK),
    "threshold": partial(ThresholdPaillier, threshold=2, colluders=0, **QUICK),
    "bfv": BFV,
    "ckks": CKKS,
}
PROTOCOLS: dict[str, Any] = {
    "plain": PlainAffine,
    "paillier": partial(PaillierAffine, **QUICK, reveal_moments=True),
    "ckks": partial(CKKSAffine, reveal_moments=True),
}
"""For two parties; networks of tests are so small that their products tell them."""
NEEDS = {"paillier": "phe", "threshold": "phe", "bfv": "tenseal", "ckks": "tenseal"}


class Recorded(Carrier):
    """Carries messages within this process, and keeps what clients (``up``) and the server (``down``) have sent."""

    def __init__(self) -> None:
        self.up: list[bytes] = []
        self.down: list[bytes] = []

    def gather(self, messages: Mapping[str, bytes], phase: Phase) -> Mapping[str, bytes]:
        self.up += messages.values()
        return messages

    def scatter(self, messages: Mapping[str, bytes], phase: Phase) -> Mapping[str, bytes]:
        self.down += messages.values()
        return messages


def backend(name: str) -> Any:
    """A new backend; the test is skipped where its library is missing."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    return BACKENDS[name]()
