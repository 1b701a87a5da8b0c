"""`Federation.affine`: the two-party exchange y = A m + b carried between clients, also between processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedlit.federation import ChannelError, Federation, RosterError, Schedule
from fedlit.privacy import (
    AffineGrid,
    CKKSAffine,
    FixedPoint,
    GaussianMechanism,
    PaillierAffine,
    PlainAffine,
    TwoPartyAffine,
)
from refused import refused, slow


def small_grid() -> AffineGrid:
    return AffineGrid(FixedPoint(16, 8.0), FixedPoint(16, 8.0), FixedPoint(16, 8.0))


def numbers(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*shape, generator=generator) for shape in ((6,), (2, 6), (2,)))  # type: ignore[return-value]


def run(federation: Federation, seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    m, matrix, offset = numbers(seed)
    pairs = [(federation.target, source) for source in federation.sources]
    maps = {source.name: {federation.target.name: (matrix, offset)} for source in federation.sources}
    return federation.affine("dot", {federation.target.name: m}, maps, pairs, num_outputs=2)


@pytest.mark.parametrize(
    ("protocol", "tolerance"),
    [
        (PlainAffine(), 1e-12),
        (PlainAffine(small_grid()), None),
        (PaillierAffine(small_grid(), 512, insecure_test_keys=True, reveal_moments=True), None),
        slow(CKKSAffine(reveal_moments=True), None),
    ],
    ids=["floats", "grid", "paillier (small key: tests arithmetic, not secrecy)", "ckks"],
)
def test_every_protocol_gives_the_affine_map_of_the_moments(protocol: TwoPartyAffine, tolerance: float | None) -> None:
    received = run(Federation(["a", "b", "t"], "t", two_party=protocol))
    m, matrix, offset = (tensor.double() for tensor in numbers())
    bound = protocol.error_bound(6) if tolerance is None else tolerance
    assert set(received) == {"a", "b"}
    for name in received:
        assert set(received[name]) == {"t"}
        assert float((received[name]["t"] - (matrix @ m + offset)).abs().max()) <= bound


def test_keys_are_sent_once_and_every_later_exchange_is_shorter() -> None:
    protocol = PaillierAffine(small_grid(), 512, insecure_test_keys=True, reveal_moments=True)
    federation = Federation(["a", "t"], "t", two_party={"dot": protocol})
    totals = []
    for _ in range(3):
        run(federation)
        totals.append(federation.ledger.bytes_by_channel()["dot"])
    first, second, third = totals[0], totals[1] - totals[0], totals[2] - totals[1]
    assert second < first
    assert second == third


@pytest.mark.parametrize("exchange", ["both ways", "from the target alone"])
def test_a_holder_has_one_key_pair_and_encrypts_once_for_all_receivers(
    exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three sources and a target: 4 encryptions of moments and 4 key pairs, not 6, one for each pair."""
    counted = {"keys": 0, "encryptions": 0}

    def counting(name: str, method: Any) -> Any:
        def count(*args: Any) -> Any:
            counted[name] += 1
            return method(*args)

        return count

    party = PaillierAffine.source_type
    monkeypatch.setattr(party, "__init__", counting("keys", party.__init__))
    monkeypatch.setattr(party, "_encrypt", counting("encryptions", party._encrypt))
    protocol = PaillierAffine(small_grid(), 512, insecure_test_keys=True, reveal_moments=True)
    federation = Federation(["a", "b", "c", "t"], "t", two_party=protocol)
    m, matrix, offset = numbers()
    target, sources = federation.target, federation.sources
    pairs = [(target, source) for source in sources]
    maps = {source.name: {"t": (matrix, offset)} for source in sources}
    moments = {"t": m}
    if exchange == "both ways":
        pairs += [(source, target) for source in sources]
        maps["t"] = {source.name: (matrix, offset) for source in sources}
        moments |= {source.name: m / (2 + index) for index, source in enumerate(sources)}
    holders = len(moments)
    for step in range(1, 3):
        outputs = federation.affine("dot", moments, maps, pairs, num_outputs=2)
        assert counted == {"keys": holders, "encryptions": step * holders}
    for receiver, holder in ((source.name, "t") for source in sources):
        exact = matrix.double() @ moments[holder].double() + offset.double()
        assert float((outputs[receiver][holder] - exact).abs().max()) <= protocol.error_bound(6)
    if exchange == "both ways":
        for source in sources:
            exact = matrix.double() @ moments[source.name].double() + offset.double()
            assert float((outputs["t"][source.name] - exact).abs().max()) <= protocol.error_bound(6)


def test_moments_of_strangers_are_refused_and_absent_clients_left_out() -> None:
    federation = Federation(["a", "t"], "t", two_party=PlainAffine(small_grid()))
    maps = {"a": {"t": (torch.ones(1, 2), torch.zeros(1))}}
    with pytest.raises(RosterError, match="stranger"):
        federation.affine("dot", {"stranger": torch.ones(2)}, maps, [(federation.target, federation.sources[0])], 1)
    assert set(run(Federation(["a", "b", "t"], "t", participation=Schedule([["a", "t"]])))) == {"a"}


def test_differential_privacy_noises_the_moments_and_books_them() -> None:
    mechanism = GaussianMechanism(clip_norm=1.0, noise_multiplier=1.0)
    federation = Federation(["a", "t"], "t", differential_privacy={"dot": mechanism})
    exact = run(Federation(["a", "t"], "t"))["a"]["t"]
    assert float((run(federation)["a"]["t"] - exact).abs().max()) > 1e-5  # nearer in 2e-11 of all runs
    assert list(federation.accounts["message"].clients) == ["t"]


def test_a_protocol_is_that_of_its_channel_and_describes_it() -> None:
    federation = Federation(["a", "t"], "t", two_party={"dot": PlainAffine(small_grid()), "other": CKKSAffine()})
    with refused("two_party", ChannelError):
        federation.affine("third", {}, {}, [], 1)
    run(federation)
    description = federation.channels["dot"].description
    assert description is not None
    assert description.backend == "PlainAffine"
