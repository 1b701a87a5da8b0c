"""Random streams are functions of their names, and leave torch's own generator alone."""

from __future__ import annotations

import contextlib
import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlit.federation.streams import enter_stream, global_seed, stable_seed, torch_streams


def drawn(*name: object) -> torch.Tensor:
    with torch_streams():
        enter_stream(*name)
        return torch.rand(5)


def test_a_seed_is_the_hash_of_its_parts_which_do_not_run_together() -> None:
    digest = hashlib.blake2b(b"0\x1forder\x1fa", digest_size=8).digest()
    assert stable_seed(0, "order", "a") == int.from_bytes(digest, "little") // 2 < 2**63
    assert len({stable_seed("ab", "c"), stable_seed("a", "bc"), stable_seed("abc"), stable_seed("abc", "")}) == 4
    names = [(0, "train", "a", 0), (1, "train", "a", 0), (0, "train", "b", 0), (0, "train", "a", 1)]
    assert len({tuple(drawn(*name).tolist()) for name in names}) == 4


@settings(deadline=None)
@given(st.permutations(range(5)))
def test_a_stream_does_not_depend_on_what_was_drawn_before(order: list[int]) -> None:
    forwards = [drawn(0, "augment", "a", number) for number in range(5)]
    anyhow = {number: drawn(0, "augment", "a", number) for number in order}
    assert all(torch.equal(anyhow[number], forwards[number]) for number in range(5))


def test_torchs_own_generator_is_untouched_even_after_an_error() -> None:
    before = torch.get_rng_state()
    drawn("x")
    with contextlib.suppress(KeyError), torch_streams():
        enter_stream("y")
        torch.rand(3)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)


def test_the_global_seed_is_lightnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "17")
    assert global_seed() == 17
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert global_seed() == 0
