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

from fedlit.privacy.masking import server as masking_server

pytest.importorskip("tenseal")
pytest.importorskip("phe")

import fuzz
import fuzz_formats
from fuzz_formats import Format, WrongSumError

SLOW = ("rotation keys", "mat files", "run folders", "checkpoints", "CKKS for two")
QUICK = [name for name in fuzz.FORMATS if name not in SLOW]


def failures(rows: dict[str, fuzz.Row]) -> list[str]:
    return [f"{found['format']} {found['number']}: {found['told']}" for row in rows.values() for found in row.failures]


def test_what_comes_from_outside_is_read_or_refused_by_a_typed_error(tmp_path: Path):
    rows = fuzz.run(QUICK, 200, seed=0, deadline=math.inf, folder=tmp_path)
    assert failures(rows) == []
    assert sum(row.cases for row in rows.values()) == pytest.approx(200, abs=len(QUICK))
    assert all(row.outcomes["typed"] > 0 for row in rows.values())


@pytest.mark.slow
def test_so_it_is_in_every_format_with_other_seeds(tmp_path: Path):
    rows = fuzz.run(fuzz.FORMATS, 20_000, seed=1, deadline=time.monotonic() + 300, folder=tmp_path)
    assert failures(rows) == []


def refuses(_: bytes) -> None:
    raise ValueError("this is no message")


def fails(_: bytes) -> None:
    {}["no"]


def sums_wrongly(_: bytes) -> None:
    raise WrongSumError("3 in place of 4")


def sleeps(_: bytes) -> None:
    time.sleep(60)


READERS: dict[str, Callable[[bytes], object]] = {
    "read": len,
    "typed": refuses,
    "untyped": fails,
    "hang": sleeps,
    "crash": lambda _: os.abort(),
    "wrong sum": sums_wrongly,
}


@pytest.mark.parametrize("outcome", fuzz.OUTCOMES)
def test_each_outcome_is_known_and_is_that_of_its_case(outcome: str):
    form = Format(
        share=1,
        draw=lambda rng: bytes([rng.randrange(4)]),
        read=lambda case: READERS[outcome](case) if case == b"\0" else None,
        typed=(ValueError,),
    )
    expected = [outcome if form.draw(fuzz.random_of(0, "a", number)) == b"\0" else "read" for number in range(6)]
    found = list(fuzz.outcomes(form, "a", 0, range(6), limit=0.5))
    assert [kind for kind, _ in found] == expected
    assert expected.count(outcome) >= 1
    told = {"untyped": "KeyError", "crash": "exit code -6", "wrong sum": "3 in place of 4"}
    assert all(told.get(outcome, "") in text or kind == "read" for kind, text in found)


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


@pytest.mark.parametrize("missing", ["check_tag", "_check_newest"])
def test_a_backend_without_one_of_its_checks_is_caught(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if missing == "check_tag":
        monkeypatch.setattr(masking_server, missing, lambda *_: None)
        rows = fuzz.run(["masked rounds"], 300, seed=0, deadline=math.inf, folder=tmp_path)
    else:
        monkeypatch.setattr("fedlit.privacy.shared_key.SharedKeyClient._check_newest", lambda *_: None)
        rows = fuzz.run(["Paillier rounds"], 300, seed=0, deadline=math.inf, folder=tmp_path)
    (row,) = rows.values()
    assert row.outcomes["wrong sum"] > 0
