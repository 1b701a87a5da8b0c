"""A process for the server alone, which hosts no client and so has nothing to take off a sum."""

from __future__ import annotations

from pathlib import Path

import pytest

from method_table import ONE_PASS
from site_runs import merged, start

pytestmark = pytest.mark.multiprocess

APART = ["--devices", "3", "--placement", "[[], ['clean', 'blended'], ['fonts']]"]


@pytest.mark.parametrize(
    "method",
    [
        *("FedGP auto", "FedMMD, pairwise", "FedDaDiL"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "FedProx",
                "FedRFTCA",
                "Voting",
                "FedJDA",
                "FedRFTCAClosedForm",
                "FedDA",
                "FedDA auto",
                "FedGP",
                "FedGP auto, exact",
                "FedMMD",
                "FedCORAL",
            )
        ),
    ],
)
def test_every_kind_of_exchange_works_without_clients_at_the_server(method: str) -> None:
    how = ["--everyone"] if method in ONE_PASS else ["--steps", "4"]
    arguments = ["--method", method, "--rounds", "3", *how]
    (alone,) = start(*arguments)
    results = start(*arguments, *APART)
    assert results[0]["weights"] == {}
    assert merged(results) == alone["weights"]
    assert all(result["ledger"] == alone["ledger"] for result in results)
    assert all(result["metrics"] == alone["metrics"] for result in results)


@pytest.mark.parametrize("privacy", [pytest.param("None", marks=pytest.mark.slow), "PairwiseMasking(colluders=0)"])
def test_it_resumes_and_from_it_others_do(privacy: str, tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    arguments = ["--everyone", "--steps", "4", "--privacy", privacy]
    (alone,) = start(*arguments, "--rounds", "4")
    start(*arguments, *APART, "--rounds", "2", "--save", path)
    for where in (APART, ["--devices", "2"], []):
        assert merged(start(*arguments, *where, "--rounds", "4", "--resume", path)) == alone["weights"]


def test_inner_products_by_layer_are_computed_without_the_server() -> None:
    backend = ["--privacy", "PairwiseMasking(colluders=0)", "--two-party", "PlainAffine()", "--everyone"]
    arguments = ["--method", "FedGP by layer", "--rounds", "2", "--steps", "4", *backend]
    (alone,) = start(*arguments)
    results = start(*arguments, *APART)
    assert merged(results) == alone["weights"]
    assert all(result["ledger"] == alone["ledger"] for result in results)
