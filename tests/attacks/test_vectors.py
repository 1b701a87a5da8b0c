"""Clients that send what no client sends: they are named, and the sum goes on without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedlit.federation import DivergedError, Federation
from fedlit.federation.errors import PayloadError
from fedlit.federation.transport import Transport
from fedlit.privacy import PairwiseMasking, Plain, SecureAggregation
from thread_transport import on_ranks

NAMES = ["a", "b", "c", "t"]
PLACEMENT = [[], *([name] for name in NAMES)]
LIAR = "b"


def mean(
    transport: Transport, backend: SecureAggregation, lie: str, liars: tuple[str, ...], hidden: bool = True
) -> Any:
    federation = Federation(NAMES, "t", transport=transport, placement=PLACEMENT, privacy=backend, seed=0)
    payloads = {each.name: {"w": torch.full((3,), float(NAMES.index(each.name)))} for each in federation.local_clients}
    messenger = federation._messenger  # a client that lies has another program
    for name in payloads:
        if name in liars and lie == "not finite":
            messenger.check_finite = lambda *args: None  # type: ignore[method-assign]
            payloads[name]["w"][1] = torch.nan
        if name in liars and lie == "of 10":
            client = federation._sums._backends.parties(backend).clients[name]
            client.protect = lambda vector: torch.zeros(1000, dtype=torch.uint8)  # type: ignore[method-assign]
            if hidden:
                messenger.fail = lambda error: None  # type: ignore[method-assign]
    return [federation.mean("weights", payloads, weights=dict.fromkeys(NAMES, 1.0)) for _ in range(2)]


@pytest.mark.parametrize(
    ("backend", "lie"), [(Plain(), "not finite"), (Plain(), "of 10"), (PairwiseMasking(colluders=0), "of 10")]
)
def test_a_vector_that_is_not_finite_or_much_too_long_is_left_out(backend: SecureAggregation, lie: str) -> None:
    with pytest.warns(UserWarning, match=f"client '{LIAR}' \\({lie}"):
        ranks = on_ranks(lambda transport: mean(transport, backend, lie, (LIAR,)), len(PLACEMENT))
    others = [NAMES.index(name) for name in NAMES if name != LIAR]
    expected = torch.full((3,), sum(others) / len(others))
    for rank, name in enumerate(NAMES, 1):
        for received in ranks[rank]:
            assert torch.allclose(received[name]["w"], expected, atol=1e-5)


def test_a_client_whose_payload_is_much_longer_by_mistake_ends_the_run() -> None:
    with pytest.raises(PayloadError, match=f"client '{LIAR}' would send 10.. bytes"):
        on_ranks(lambda transport: mean(transport, Plain(), "of 10", (LIAR,), hidden=False), len(PLACEMENT))


def test_a_sum_of_vectors_of_which_none_is_finite_names_all() -> None:
    with pytest.raises(DivergedError, match="'a', 'b', 'c', 't'"):
        on_ranks(lambda transport: mean(transport, Plain(), "not finite", tuple(NAMES)), len(PLACEMENT))
