"""The ledger's sums and its way through a checkpoint."""

from __future__ import annotations

import io

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlit.federation import SERVER, Ledger, LedgerEntry

names = st.sampled_from(["a", "b", "VA Long Beach", SERVER])
records = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["weights", "atoms"]), names, names, st.integers(0, 2**40)),
    max_size=20,
)


def booked(rows: list[tuple[int, str, str, str, int]]) -> Ledger:
    ledger = Ledger()
    for row in rows:
        ledger.record(*row)
    return ledger


def test_messages_between_the_same_two_in_a_round_are_added_up_in_any_order() -> None:
    rows = [(1, "w", "a", SERVER, 10), (0, "w", "b", SERVER, 5), (1, "w", "a", SERVER, 3)]
    ledger = booked(rows)
    assert list(ledger) == [LedgerEntry(0, "w", "b", SERVER, 1, 5), LedgerEntry(1, "w", "a", SERVER, 2, 13)]
    assert (ledger.total_bytes, len(ledger)) == (18, 2)
    assert booked(rows[::-1]) == ledger != booked(rows[:2])
    assert ledger != booked([(1, "w", "a", SERVER, 11), *rows[1:]])
    assert ledger != "ledger"


def test_sums_by_channel_round_and_direction() -> None:
    ledger = booked(
        [(0, "w", "a", SERVER, 10), (0, "w", SERVER, "a", 7), (0, "x", "a", "b", 100), (1, "w", "b", SERVER, 1)]
    )
    assert ledger.bytes_by_channel() == {"w": 18, "x": 100}
    assert ledger.bytes_by_channel(0) == {"w": 17, "x": 100}
    assert ledger.bytes_by_channel(7) == {}
    assert ledger.bytes_up_and_down("w") == (11, 7)
    assert ledger.bytes_up_and_down("x") == (100, 0)
    assert ledger.messages_by_channel() == {"w": 3, "x": 1}


@settings(deadline=None)
@given(records)
def test_a_checkpoint_loaded_with_weights_only_restores_the_ledger(rows: list[tuple[int, str, str, str, int]]) -> None:
    ledger, file = booked(rows), io.BytesIO()
    torch.save(ledger.state_dict(), file)
    file.seek(0)
    other = booked([(9, "old", "a", "b", 1)])
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other == ledger
    assert list(other) == list(ledger)
    assert other.total_bytes == ledger.total_bytes
