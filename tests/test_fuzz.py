"""The fuzzer of `benchmarks/fuzz.py`: a few cases of each quick format, and that it sees what must not happen."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tenseal")
pytest.importorskip("phe")

import fuzz
import fuzz_formats
from fuzz_formats import Format, WrongSumError
from refused import slow

SLOW = ("rotation keys", "mat files", "run folders", "checkpoints", "CKKS for two")
QUICK = [name for name in fuzz.FORMATS if name not in SLOW]


@pytest.fixture(autouse=True)
def _in_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for each format, and not five, of which each costs as much as some ten cases."""
    monkeypatch.setattr(fuzz, "_PARTS", 1)


def failures(rows: dict[str, fuzz.Row]) -> list[str]:
    return [f"{found['format']} {found['number']}: {found['told']}" for row in rows.values() for found in row.failures]


def test_what_comes_from_outside_is_read_or_refused_by_a_typed_error(tmp_path: Path):
    rows = fuzz.run(QUICK, 120, seed=0, deadline=math.inf, folder=tmp_path)
    assert failures(rows) == []
    assert sum(row.cases for row in rows.values()) == pytest.approx(120, abs=len(QUICK))
    assert all(row.outcomes["typed"] > 0 for row in rows.values())


@pytest.mark.slow
def test_so_it_is_in_every_format_with_other_seeds(tmp_path: Path):
    rows = fuzz.run(fuzz.FORMATS, 20_000, seed=1, deadline=time.monotonic() + 300, folder=tmp_path)
    assert failures(rows) == []


def raising(error: Exception) -> Callable[[], object]:
    def read() -> None:
        raise error

    return read


READERS: dict[str, Callable[[], object]] = {
    "read": lambda: None,
    "typed": raising(ValueError("this is no message")),
    "untyped": raising(KeyError("no")),
    "hang": lambda: any(iter(int, 1)),  # in vain, for ever
    "crash": os.abort,
    "wrong sum": raising(WrongSumError("3 in place of 4")),
}


@pytest.mark.parametrize("outcome", fuzz.OUTCOMES)
def test_each_outcome_is_recognised_at_its_case(outcome: str):
    form = Format(
        share=1,
        draw=lambda rng: bytes([rng.randrange(4)]),
        read=lambda case: READERS[outcome]() if case == b"\0" else None,
        typed=(ValueError,),
    )
    expected = [outcome if form.draw(fuzz.random_of(0, "a", number)) == b"\0" else "read" for number in range(6)]
    found = list(fuzz.outcomes(form, "a", 0, range(6), limit=0.25))
    assert [kind for kind, _ in found] == expected
    assert expected.count(outcome) >= 1
    texts = {"untyped": "KeyError", "crash": "exit code -6", "wrong sum": "3 in place of 4"}
    assert all(texts.get(outcome, "") in text or kind == "read" for kind, text in found)


def test_a_case_is_the_same_each_time(tmp_path: Path):
    form = fuzz.FORMATS["frames"](tmp_path)
    draws = [[form.draw(fuzz.random_of(seed, "frames", number)) for number in range(20)] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_a_reader_that_lets_errors_of_others_through_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def careless(message: torch.Tensor) -> dict[str, Any]:
        return {"text": message.numpy().tobytes().decode()}

    monkeypatch.setattr(fuzz_formats, "decode_wire", careless)
    rows = fuzz.run(["wire messages"], 50, seed=0, deadline=math.inf, folder=tmp_path)
    assert rows["wire messages"].outcomes["untyped"] > 20
    (first, *_) = rows["wire messages"].failures
    assert "UnicodeDecodeError" in first["told"]
    assert bytes.fromhex(first["input"])


@pytest.mark.parametrize(
    ("check", "rounds", "cases"),
    [
        slow("fedlit.privacy.masking.server.check_tag", "masked rounds", 300),
        ("fedlit.privacy.shared_key.SharedKeyClient._check_newest", "Paillier rounds", 100),
    ],
)
def test_a_backend_without_one_of_its_checks_is_caught(
    check: str, rounds: str, cases: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(check, lambda *_: None)
    (row,) = fuzz.run([rounds], cases, seed=0, deadline=math.inf, folder=tmp_path).values()
    assert row.outcomes["wrong sum"] > 0
