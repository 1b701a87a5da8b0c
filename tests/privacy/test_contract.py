"""The contract of SecureAggregation carries backends other than Plain: one-time pads over fixed-point integers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

from fedlit.federation import SERVER, Federation, FederationError, Schedule
from fedlit.privacy import Description, Plain, RoundId, SecureAggregation

NAMES = ["a", "b", "c", "t"]


class AdditivePads(SecureAggregation):
    """Each client adds a pad that the clients know and the server does not; for tests, so its pads are not secret."""

    key_holder: ClassVar[Literal["server", "clients"]] = "clients"
    min_clients: ClassVar[int] = 2
    scale = 2.0**24

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.pads: dict[str, str] = {}
        self.length = 0

    def _pad(self, client: str) -> Tensor:
        seed = int.from_bytes(hashlib.sha256(self.pads[client].encode()).digest()[:7], "little")
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(-(2**63), 2**63 - 1, (self.length,), generator=generator, dtype=torch.int64)

    def open_round(self, clients: Sequence[str], round_id: RoundId) -> None:
        self.log.append(("open_round", tuple(clients), round_id))
        self.pads = {name: f"test only {name} {round_id}" for name in clients}

    def protect(self, client: str, vector: Tensor) -> Tensor:
        self.log.append(("protect", client))
        self.length = len(vector)
        return (vector.double() * self.scale).round().long() + self._pad(client)

    def aggregate(self, messages: Mapping[str, Tensor]) -> Tensor:
        self.log.append(("aggregate", tuple(messages)))
        return torch.stack(list(messages.values())).sum(dim=0)

    def reveal(self, total: Tensor, num_clients: int) -> Tensor:
        self.log.append(("reveal", num_clients))
        assert num_clients == len(self.pads)
        self.length = len(total)
        for name in self.pads:
            total = total - self._pad(name)
        return (total.double() / self.scale).float()

    def error_bound(self, num_clients: int) -> float:
        return num_clients / self.scale / 2

    def describe(self) -> Description:
        return Description("AdditivePads", "server", "vectors", "the sum", "server and a client", "none", 8.0, "tiny")


def payloads(generator: torch.Generator, names: Sequence[str] = NAMES) -> dict[str, dict[str, Tensor]]:
    return {
        name: {"w": torch.randn(3, 2, generator=generator), "b": torch.randn((), generator=generator)} for name in names
    }


def federation(backend: SecureAggregation | Mapping[str, SecureAggregation] | None, **arguments: Any) -> Federation:
    return Federation(NAMES, "t", privacy=backend, **arguments)


@pytest.mark.parametrize(
    ("verb", "arguments"), [("sum", {}), ("mean", {}), ("mean", {"weights": {"a": 5.0, "b": 1.0, "c": 2.5, "t": 0.5}})]
)
def test_another_backend_gives_the_plain_result_within_its_error(
    verb: str, arguments: dict[str, Any], generator: torch.Generator
) -> None:
    sent, backend = payloads(generator), AdditivePads()
    plain = getattr(federation(None), verb)("w", sent, **arguments)
    padded = getattr(federation(backend), verb)("w", sent, **arguments)
    assert plain.keys() == padded.keys()
    # the total and, in a mean, the sum of weights that it is divided by are each off by the declared error
    tolerance = 8 * backend.error_bound(4) + 1e-6
    for name in plain:
        for entry in ("w", "b"):
            assert padded[name][entry].dtype == torch.float32
            torch.testing.assert_close(padded[name][entry], plain[name][entry], rtol=0, atol=tolerance)


def test_a_round_has_four_verbs_in_order_and_the_server_sees_pads_only(generator: torch.Generator) -> None:
    backend = AdditivePads()
    fed = federation(backend)
    fed.round_idx = 7
    sent = payloads(generator)
    fed.mean("w", sent, among=["b", "a"], to=["t", "c"])
    assert backend.log == [
        ("open_round", ("a", "b"), RoundId(7, "w", 0)),
        ("protect", "a"),
        ("protect", "b"),
        ("aggregate", ("a", "b")),
        ("reveal", 2),
    ]


def test_no_two_rounds_share_an_id_even_after_a_failure(generator: torch.Generator) -> None:
    backend = AdditivePads()
    fed = federation(backend)
    for _ in range(3):
        fed.mean("w", payloads(generator))
        fed.sum("x", payloads(generator))
        with pytest.raises(FederationError, match="hides nothing"):
            fed.sum("w", payloads(generator, ["a"]))
    ids = [entry[2] for entry in backend.log if entry[0] == "open_round"]
    assert len(set(ids)) == len(ids) == 9


def test_a_sum_over_too_few_is_refused_before_anything_is_sent(generator: torch.Generator) -> None:
    backend = AdditivePads()
    fed = federation(backend, participation=Schedule([["b", "t"]]))
    with pytest.raises(
        FederationError, match=r"over channel 'w' in round 0 would run over \['b'\] alone, but Additive"
    ):
        fed.mean("w", payloads(generator), among=fed.sources)
    assert len(fed.ledger) == 0
    assert "aggregate" not in {entry[0] for entry in backend.log}


def test_no_round_is_opened_for_nobody(generator: torch.Generator) -> None:
    backend = AdditivePads()
    fed = federation(backend, participation=Schedule([["t"]]))
    assert fed.mean("w", payloads(generator), among=fed.sources) == {}
    assert backend.log == []


def test_backends_are_chosen_by_channel(generator: torch.Generator) -> None:
    backend = AdditivePads()
    fed = federation({"secret": backend})
    fed.sum("open", payloads(generator))
    assert backend.log == []
    assert isinstance(fed.backend("open"), Plain)
    fed.sum("secret", payloads(generator))
    assert len(backend.log) == 1 + 4 + 1 + 1
    sizes = {(entry.channel, entry.sender): entry.num_bytes for entry in fed.ledger if entry.sender != SERVER}
    # 7 numbers of 8 bytes and not 4, and "int64" in the header is two letters shorter than "float32"
    assert sizes["secret", "a"] - sizes["open", "a"] == 7 * 4 - 2


def test_catching_up_works_while_the_server_holds_no_key(generator: torch.Generator) -> None:
    fed = federation(AdditivePads(), participation=Schedule([["a", "b"], NAMES]))
    sent = payloads(generator)
    there = fed.mean("w", sent)
    fed.round_idx = 1
    caught = fed.catch_up("w")
    assert sorted(caught) == ["c", "t"]
    assert torch.equal(caught["c"]["w"], there["a"]["w"])


def test_a_server_with_the_key_reveals_once_and_remembers_the_plain_total(generator: torch.Generator) -> None:
    class ServerPads(AdditivePads):
        key_holder: ClassVar[Literal["server", "clients"]] = "server"

    backend = ServerPads()
    fed = federation(backend, participation=Schedule([["a", "b"], NAMES]))
    there = fed.mean("w", payloads(generator))
    other = federation(ServerPads(), participation=Schedule([["a", "b"], NAMES]))
    other.load_state_dict(fed.state_dict())  # a process that never had the keys of that round
    for one in (fed, other):
        one.round_idx = 1
        assert torch.equal(one.catch_up("w")["c"]["w"], there["a"]["w"])
    assert [entry[0] for entry in backend.log].count("reveal") == 1


def test_plain_adds_from_left_to_right_and_leaves_messages_alone() -> None:
    plain = Plain()
    big, one, minus = (torch.tensor([value]) for value in (1e8, 1.0, -1e8))
    # in float32 (1e8 + 1) - 1e8 is 0, and (1e8 - 1e8) + 1 is 1
    assert plain.aggregate({"a": big, "b": one, "c": minus}).item() == 0.0
    assert plain.aggregate({"a": big, "c": minus, "b": one}).item() == 1.0
    assert big.item() == 1e8
    assert plain.error_bound(100) == 0.0


def test_plain_claims_to_hide_nothing() -> None:
    description = Plain().describe()
    assert (description.backend, description.hidden, description.bytes_per_number) == ("Plain", "nothing", 4.0)
