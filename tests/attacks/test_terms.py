"""A server that sends clients of one sum different things: no sum comes out, and the error says what differs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlit.federation import Federation, Schedule, Summed
from fedlit.federation.client import Facts
from fedlit.federation.documents import document, read_document
from fedlit.federation.transport import Transport
from fedlit.privacy import AuthenticationError, PairwiseMasking, Plain, TermsError
from relayed import Change, Relayed, false_total, honest
from thread_transport import on_ranks

NAMES = ["a", "b", "c", "t"]
PLACEMENT = [[], *([name] for name in NAMES)]  # the server apart
VICTIM = 3  # rank of client c


def rounds_of(transport: Transport, number: int = 3) -> dict[str, Any]:
    """Means of a few rounds, as each client reads them, and what was booked on their channel."""
    federation = Federation(NAMES, "t", transport=transport, placement=PLACEMENT, privacy=PairwiseMasking(), seed=0)
    federation.introduce({client.name: Facts(10, (2,)) for client in federation.local_clients})
    read = []
    for round_idx in range(number):
        federation.round_idx = round_idx
        payloads = {
            client.name: {"w": torch.full((3,), float(NAMES.index(client.name) + round_idx))}
            for client in federation.local_clients
        }
        means = federation.mean("weights", payloads, weights=federation.weights)
        read.append({name: mean["w"] for name, mean in means.items()})
    return {"read": read, "ledger": federation.ledger.state_dict()}


def attacked(change: Change) -> list[dict[str, Any]]:
    return on_ranks(lambda transport: rounds_of(Relayed(transport, change)), len(PLACEMENT))


def inflated(rank: int, doing: str, message: Tensor) -> Tensor:
    """All but the victim are sent that it has 10^12 samples, which takes their own vectors out of the sum."""
    if "introductions" not in doing or rank == VICTIM:
        return message
    facts = read_document(message)
    return document({name: (10**12 if name == "c" else size, shape) for name, (size, shape) in facts.items()}, doing)


def test_all_read_the_same_means_where_nothing_is_changed() -> None:
    ranks = attacked(honest)
    means = [mean for rank in ranks for mean in rank["read"][2].values()]
    assert len(means) == 4
    assert all(torch.equal(mean, torch.full((3,), 3.5)) for mean in means)


def test_clients_that_were_sent_different_weights_add_nothing_up() -> None:
    with pytest.raises(TermsError, match="differ in the weights"):
        attacked(inflated)


@pytest.mark.parametrize("of_round", [0, 1])
def test_a_total_that_the_server_has_changed_is_refused_by_its_receiver(of_round: int) -> None:
    with pytest.raises(AuthenticationError, match="not the sum"):
        attacked(partial(false_total, of_round=of_round))


def of_both(transport: Transport, change: Change) -> tuple[Federation, dict[str, Any]]:
    """A federation with a channel whose totals have no tags, and a masked one, and what its clients send."""
    privacy = {"open": Plain(), "masked": PairwiseMasking()}
    channels = [Summed(name, "numbers") for name in privacy]
    federation = Federation(
        NAMES, "t", channels=channels, transport=Relayed(transport, change), placement=PLACEMENT, privacy=privacy,
        seed=0,
    )  # fmt: skip
    return federation, {client.name: {"w": torch.ones(3)} for client in federation.local_clients}


def then_masked(transport: Transport, change: Change, to: list[str], number: int = 2) -> None:
    federation, payloads = of_both(transport, change)
    for round_idx in range(number):
        federation.round_idx = round_idx
        federation.mean("open", payloads, to=to)
    federation.mean("masked", payloads)


FALSE = partial(false_total, channel="open")


@pytest.mark.parametrize("to", [NAMES, NAMES[:3]], ids=["all receive it", "one does not"])
def test_totals_without_tags_are_compared_before_the_next_masked_sum(to: list[str]) -> None:
    on_ranks(lambda transport: then_masked(transport, honest, to), len(PLACEMENT))
    with pytest.raises(TermsError, match="earlier totals"):
        on_ranks(lambda transport: then_masked(transport, FALSE, to), len(PLACEMENT))


@pytest.mark.parametrize("lies", [False, True])
def test_who_returns_after_the_last_round_compares_what_it_is_given(lies: bool) -> None:
    """No sum follows in which clients would compare, and what is fetched later has no tags."""

    def ends(transport: Transport) -> dict[str, Any]:
        names = ["a", "b", "c", "d"]
        transport.losable = True
        federation = Federation(
            names,
            "d",
            transport=transport,
            placement=[[], *([name] for name in names)],
            privacy=PairwiseMasking(),
            channels=[Summed("weights", "w")],
            participation=Schedule([names[:3], names]),
            seed=0,
        )
        federation.identify()
        own = {client.name: {"w": torch.ones(40)} for client in federation.local_clients if client.name != "d"}
        federation.mean("weights", own)
        federation.round_idx = 1
        federation.roster.call_back(["d"])
        if lies and transport.rank == 0:
            federation._sums.totals._last["weights"].vector[:40] = 7.0
        received = federation.catch_up("weights")
        federation.compare_totals()
        return received

    placed = 5
    if lies:
        with pytest.raises(TermsError, match="earlier totals"):
            on_ranks(ends, placed)
    else:
        assert torch.equal(on_ranks(ends, placed)[4]["d"]["w"], torch.ones(40))


def test_what_a_client_has_received_outlives_its_process() -> None:
    """The server returns with its own record of who has which total; what was read is in the client's checkpoint."""

    def sums(transport: Transport) -> None:
        federation, payloads = of_both(transport, FALSE)
        federation.mean("open", payloads)
        again, _ = of_both(transport, honest)
        again.load_state_dict(federation.state_dict())
        again.mean("masked", payloads)

    with pytest.raises(TermsError, match="earlier totals"):
        on_ranks(sums, len(PLACEMENT))


def test_what_other_clients_of_a_process_have_received_since_is_no_difference() -> None:
    """Process 0 hosts a and b; b has received nothing since the first total."""

    def sums(transport: Transport) -> None:
        placement = [["a", "b"], ["c"], ["t"]]
        backend = PairwiseMasking(colluders=0)
        federation = Federation(NAMES, "t", transport=transport, placement=placement, privacy=backend, seed=0)
        payloads = {client.name: {"w": torch.ones(3)} for client in federation.local_clients}
        for among in (["b", "c"], *[["a", "t"]] * 9, ["b", "c"]):
            mine = {name: each for name, each in payloads.items() if name in among}
            federation.mean("weights", mine, among=among, to=among)

    on_ranks(sums, 3)
