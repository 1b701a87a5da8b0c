"""Robust means against numpy's and scipy's, and against a client that sends anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from fedlit.federation import Federation
from fedlit.privacy import Plain, QuorumError, RobustPlain
from refused import refused

NAMES = ["a", "b", "c", "d", "t"]


def payloads_of(generator: torch.Generator, names: list[str] = NAMES) -> dict[str, dict[str, torch.Tensor]]:
    return {name: {"w": torch.randn(3, 2, generator=generator, dtype=torch.float64)} for name in names}


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("backend", "oracle"),
    [
        (RobustPlain(), lambda rows: np.median(rows, axis=0)),
        (RobustPlain("trimmed_mean", 0.25), lambda rows: stats.trim_mean(rows, 0.25)),
        (RobustPlain("trimmed_mean", 0.0), lambda rows: rows.mean(axis=0)),
    ],
    ids=["median", "trimmed mean", "mean"],
)
def test_rules_are_those_of_numpy_and_scipy(
    backend: RobustPlain, oracle: Any, number: int, generator: torch.Generator
) -> None:
    payloads = payloads_of(generator, NAMES[:number])
    weights = dict(zip(payloads, [5.0, 1.0, 900.0, 2.0, 7.0], strict=False))  # which count for nothing
    got = backend.mean(payloads, weights)["w"]
    rows = np.stack([payload["w"].numpy() for payload in payloads.values()])
    np.testing.assert_allclose(got.numpy(), oracle(rows), atol=1e-12)


@pytest.mark.parametrize("backend", [RobustPlain(), RobustPlain("trimmed_mean", 0.2)])
@pytest.mark.parametrize("sent", [1e30, -1e30, 0.0])
def test_one_client_of_five_moves_the_mean_no_further_than_the_others_are(
    backend: RobustPlain, sent: float, generator: torch.Generator
) -> None:
    payloads = payloads_of(generator)
    honest = torch.stack([payload["w"] for name, payload in payloads.items() if name != "b"])
    payloads["b"]["w"] = torch.full((3, 2), sent, dtype=torch.float64)
    weights = {name: 1e6 if name == "b" else 1.0 for name in NAMES}  # with a huge number of samples, too
    federation = Federation(NAMES, "t", privacy=backend, seed=0)
    got = federation.mean("weights", payloads, weights=weights)["t"]["w"]
    assert bool((honest.min(dim=0).values <= got).all())
    assert bool((got <= honest.max(dim=0).values).all())
    owned = Federation(NAMES, "t", privacy=Plain(), seed=0).mean("weights", payloads, weights=weights)["t"]["w"]
    assert not torch.allclose(owned, got) or sent == 0.0


def test_long_vectors_are_scaled_to_the_bound() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 5.0], [300.0, 400.0]])
    got = RobustPlain("trimmed_mean", 0.0, norm_bound=2.0).combine(rows)
    torch.testing.assert_close(got, torch.tensor([(3.0 + 0.0 + 6.0) / 3, (4.0 + 5.0 + 8.0) / 3]))
    assert torch.equal(RobustPlain(norm_bound=1.0).combine(torch.zeros(3, 2)), torch.zeros(2))


def test_sums_are_refused(generator: torch.Generator) -> None:
    federation = Federation(NAMES, "t", privacy=RobustPlain(), seed=0)
    with pytest.raises(QuorumError, match="'weights'"):
        federation.sum("weights", payloads_of(generator))
    with pytest.raises(QuorumError, match="robust"):
        RobustPlain().server().aggregate({})


@pytest.mark.parametrize(
    ("argument", "given"),
    [("rule", {"rule": "mean"}), ("trim", {"trim": 0.5}), ("trim", {"trim": -0.1}), ("norm_bound", {"norm_bound": 0})],
)
def test_arguments_out_of_range_are_named(argument: str, given: dict[str, Any]) -> None:
    with refused(argument):
        RobustPlain(**given)
