"""A server that leaves out a vector that has arrived."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import backends
from fedlit.federation import Federation
from fedlit.privacy import AuthenticationError, FixedPoint, PairwiseMasking, Plain, PrivacyError, SecureAggregation

NAMES = ["a", "b", "c", "d", "t"]
SAMPLES = {"a": 10.0, "b": 300.0, "c": 20.0, "d": 40.0, "t": 7.0}


def lying(backend: SecureAggregation, monkeypatch: pytest.MonkeyPatch, without: str) -> SecureAggregation:
    kind = type(backend.server())
    add = kind.add

    def lie(self: Any, name: str, message: Any) -> None:
        if name != without:
            add(self, name, message)

    monkeypatch.setattr(kind, "add", lie)
    return backend


def payloads() -> dict[str, Any]:
    return {name: {"x": torch.full((3,), float(place))} for place, name in enumerate(NAMES)}


@pytest.fixture(params=["plain", "plain on a grid", *backends.BACKENDS])
def backend(request: pytest.FixtureRequest) -> Any:
    plain = {"plain": Plain(), "plain on a grid": Plain(FixedPoint())}
    return plain.get(request.param) or backends.backend(request.param)


@pytest.mark.parametrize("weights", [None, SAMPLES])
@pytest.mark.parametrize("without", ["t", "b"])
def test_a_mean_without_a_vector_that_has_arrived_is_nobodys(
    monkeypatch: pytest.MonkeyPatch, backend: SecureAggregation, weights: Any, without: str
) -> None:
    federation = Federation(NAMES, "t", privacy=lying(backend, monkeypatch, without), seed=0)
    with pytest.raises(
        PrivacyError, match=r"has left a vector out that arrived|must be 5, as announced|is not the sum"
    ):
        federation.mean("weights", payloads(), weights=weights)


def test_a_sum_without_a_vector_that_it_is_said_to_have_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no weight, but tags; one that is said to lack the vector, as of a client that dropped out, has neither."""
    backend = PairwiseMasking()
    federation = Federation(NAMES, "t", privacy=lying(backend, monkeypatch, "t"), seed=0)
    with pytest.raises(AuthenticationError):
        federation.sum("weights", payloads())
    assert "reports clients as dropped whose vectors it has" in backend.describe().revealed


def test_an_honest_total_of_numbers_between_the_steps_of_all_grids_is_read(
    backend: SecureAggregation, generator: torch.Generator
) -> None:
    vectors = {name: torch.rand(50, generator=generator, dtype=torch.float64).float() for name in NAMES}
    federation = Federation(NAMES, "t", privacy=backend, seed=0)
    received = federation.sum("weights", {name: {"x": vector} for name, vector in vectors.items()})
    exact = torch.stack([vector.double() for vector in vectors.values()]).sum(dim=0)
    assert received.keys() == vectors.keys()
    assert all(
        float((each["x"].double() - exact).abs().max()) <= backend.error_bound(5) + 2e-6 for each in received.values()
    )
