"""How a federation runs the parties of a backend, seen with one-time pads that log what happens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlit.federation import SERVER, Federation, FederationError, PayloadError, Schedule
from fedlit.privacy import (
    FixedPoint,
    KeyCheckError,
    Plain,
    QuorumError,
    RangeError,
    RoundId,
    SecureAggregation,
)
from pads import AdditivePads, PadClient, ServerPads

NAMES = ["a", "b", "c", "t"]


def happened(backend: AdditivePads, *verbs: str) -> list[tuple[Any, ...]]:
    return [entry for entry in backend.log if entry[0] in verbs]


def payloads(generator: torch.Generator, names: Sequence[str] = NAMES) -> dict[str, dict[str, Tensor]]:
    return {
        name: {"w": torch.randn(3, 2, generator=generator), "b": torch.randn((), generator=generator)} for name in names
    }


def federation(backend: SecureAggregation | Mapping[str, SecureAggregation] | None, **arguments: Any) -> Federation:
    return Federation(NAMES, "t", privacy=backend, **arguments)


def test_a_round_has_four_verbs_in_order_and_the_server_sees_pads_only(generator: torch.Generator) -> None:
    backend = AdditivePads()
    fed = federation(backend)
    fed.round_idx = 7
    sent = payloads(generator)
    fed.mean("w", sent, among=["b", "a"], to=["t", "c"])
    round_id = RoundId(7, "w", 3)  # three announcements for the enrolment: sent, relayed, checked
    assert backend.log == [
        *(("enrol", name) for name in [*NAMES, SERVER]),
        ("relay", "greet", ("a", "b", "c", "t")),
        *(("receive", name, "greet") for name in NAMES),
        *(("open_round", name, ("a", "b"), round_id) for name in ["a", "b", SERVER]),
        ("relay", "agree", ("a", "b")),
        *(("receive", name, "agree") for name in ["a", "b"]),
        ("protect", "a"),
        ("protect", "b"),
        ("aggregate", ("a", "b")),
        ("reveal", "c", 2),
    ]
    fed.mean("w", sent)
    assert len(happened(backend, "enrol")) == 5  # once and for all


def test_key_material_is_booked_under_a_channel_of_its_own(generator: torch.Generator) -> None:
    fed = federation(AdditivePads())
    fed.mean("w", payloads(generator))
    header = 4 + len('[["keys","uint8",[7]]]')
    booked = {(entry.sender, entry.receiver): entry.num_bytes for entry in fed.ledger if entry.channel == "w/keys"}
    # "a greet" and "a agree" up, with " ok" added down
    assert booked["a", SERVER] == 2 * (header + 7)
    assert booked[SERVER, "a"] == 2 * (header + 1 + 10)
    assert len(booked) == 8


def test_errors_of_a_backend_name_the_client_and_the_channel(generator: torch.Generator) -> None:
    sent = payloads(generator)
    sent["b"]["w"] = torch.full((3, 2), 7.0)
    with pytest.raises(RangeError, match="client 'b', channel 'w': "):
        federation(Plain(FixedPoint(fraction_bits=10, bound=1.0))).sum("w", {"b": sent["b"]})


def test_no_two_rounds_share_an_id_even_after_a_failure(generator: torch.Generator) -> None:
    backend = AdditivePads()
    fed = federation(backend)
    for _ in range(3):
        fed.mean("w", payloads(generator))
        fed.sum("x", payloads(generator))
        with pytest.raises(FederationError, match="hides nothing"):
            fed.sum("w", payloads(generator, ["a"]))
    ids = [entry[3] for entry in happened(backend, "open_round") if entry[1] == SERVER]
    assert len(set(ids)) == len(ids) == 9


def test_a_sum_over_too_few_is_refused_before_anything_is_sent(generator: torch.Generator) -> None:
    backend = AdditivePads()
    fed = federation(backend, participation=Schedule([["t"], ["b", "t"]]))
    assert fed.mean("w", payloads(generator), among=fed.sources) == {}
    assert backend.log == [], "nobody is not too few"
    fed.round_idx = 1
    with pytest.raises(FederationError, match=r"channel 'w' in round 1 would run over \['b'\] alone, but Additive"):
        fed.mean("w", payloads(generator), among=fed.sources)
    assert {entry.channel for entry in fed.ledger} == {"w/keys"}  # of the enrolment
    assert happened(backend, "open_round", "aggregate") == []


def test_backends_are_chosen_by_channel(generator: torch.Generator) -> None:
    backend = AdditivePads()
    fed = federation({"secret": backend, "open": Plain()})
    fed.sum("open", payloads(generator))
    assert backend.log == []
    assert isinstance(fed.channels["open"].backend, Plain)
    fed.sum("secret", payloads(generator))
    assert len(happened(backend, "protect", "aggregate", "reveal")) == 4 + 1 + 1
    sizes = {(entry.channel, entry.sender): entry.num_bytes for entry in fed.ledger if entry.sender != SERVER}
    # 7 numbers of 8 bytes and not 4, the bit of who sent, and "int64" is two letters shorter than "float32"
    assert sizes["secret", "a"] - sizes["open", "a"] == 7 * 4 + 8 - 2


def test_keys_of_before_a_resume_are_gone(generator: torch.Generator) -> None:
    backend = AdditivePads()
    fed = federation(backend)
    fed.mean("w", payloads(generator))
    state = fed.state_dict()
    fed.mean("w", payloads(generator))
    fed.load_state_dict(state)
    fed.mean("w", payloads(generator))
    assert len(happened(backend, "enrol")) == 2 * 5
    ids = [entry[3] for entry in happened(backend, "open_round") if entry[1] == SERVER]
    assert len({round_id.call for round_id in ids}) == 3


def test_a_client_that_refuses_its_key_can_enrol_again(generator: torch.Generator) -> None:
    backend = AdditivePads()
    fed = federation(backend)
    refuse = ["greet"]

    def receive(self: PadClient, step: str, message: bytes) -> None:
        if step in refuse and self.name == "b":
            refuse.clear()
            raise KeyCheckError("b does not like this key")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PadClient, "receive", receive)
        with pytest.raises(KeyCheckError, match="does not like"):
            fed.mean("w", payloads(generator))
        assert sorted(fed.mean("w", payloads(generator))) == NAMES


def test_what_cannot_be_packed_or_unpacked_fails_once_and_is_not_kept(generator: torch.Generator) -> None:
    fed = federation(None, participation=Schedule([["a", "b"]]))
    sent = {name: {"n": torch.tensor([200], dtype=torch.uint8)} for name in NAMES}
    with pytest.raises(RangeError, match="entry 'n' goes from 400 to 400"):
        fed.sum("w", sent, to=["a", "t"])
    assert fed.catch_up("w") == {}
    with pytest.raises(PayloadError, match="complex64"):
        fed.mean("w", {"a": {"z": torch.zeros(1, dtype=torch.complex64)}})
    assert sorted(fed.mean("w", payloads(generator))) == ["a", "b"]


def test_catching_up_works_while_the_server_holds_no_key(generator: torch.Generator) -> None:
    fed = federation(AdditivePads(), participation=Schedule([["a", "b"], NAMES]))
    sent = payloads(generator)
    there = fed.mean("w", sent)
    fed.round_idx = 1
    caught = fed.catch_up("w")
    assert sorted(caught) == ["c", "t"]
    assert torch.equal(caught["c"]["w"], there["a"]["w"])


def test_after_a_resume_a_client_that_read_the_total_seals_it_anew(generator: torch.Generator) -> None:
    schedule = Schedule([["a", "b"], ["b", "c"], NAMES])
    fed = federation(AdditivePads(), participation=schedule)
    there = fed.mean("w", payloads(generator))
    backend = AdditivePads()
    resumed = federation(backend, participation=schedule)
    resumed.load_state_dict(fed.state_dict())
    for round_idx, late in [(1, "c"), (2, "t")]:
        resumed.round_idx = round_idx
        caught = resumed.catch_up("w")
        assert list(caught) == [late]
        assert torch.equal(caught[late]["w"], there["a"]["w"])
    assert happened(backend, "reissue") == [("reissue", "a")]


def test_a_total_that_nobody_could_read_before_the_checkpoint_is_lost(generator: torch.Generator) -> None:
    schedule = Schedule([["a", "b"], NAMES])
    fed = federation(AdditivePads(), participation=schedule)
    fed.mean("w", payloads(generator), to=["t"])
    resumed = federation(AdditivePads(), participation=schedule)
    resumed.load_state_dict(fed.state_dict())
    resumed.round_idx = 1
    with pytest.raises(QuorumError, match="its key is gone"):
        resumed.catch_up("w")


def test_a_server_with_the_key_reveals_once_and_remembers_the_plain_total(generator: torch.Generator) -> None:
    backend = ServerPads()
    fed = federation(backend, participation=Schedule([["a", "b"], NAMES]))
    there = fed.mean("w", payloads(generator))
    other = federation(ServerPads(), participation=Schedule([["a", "b"], NAMES]))
    other.load_state_dict(fed.state_dict())  # a process that never had the keys of that round
    for one in (fed, other):
        one.round_idx = 1
        assert torch.equal(one.catch_up("w")["c"]["w"], there["a"]["w"])
    assert happened(backend, "reveal") == [("reveal", SERVER, 2)]
