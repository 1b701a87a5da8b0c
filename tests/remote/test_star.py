"""A server with sites around it gives the results of one process, with any method and backend."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlit.methods import FedAvg
from fedlit.privacy import CKKS
from fedlit.run.agreement import arguments, plain
from helpers import build, digits
from refused import slow
from site_runs import start
from stars import around

pytest.importorskip("grpc")

MASKED = "PairwiseMasking(colluders=0)"
SMALL = "key_bits=512, insecure_test_keys=True"  # tests arithmetic, and not secrecy
METHODS = (
    "AdaBN, mixing", "FedAvg", "FedProx", "SourceOnly", "FinetuneOffline", "FedRFTCA", "Voting", "FedRFTCAClosedForm",
    "FedDA", "FedDA auto", "FedGP", "FedGP auto", "FedGP auto, exact", "FedGP by layer", "FedDaDiL", "FedMMD",
    "FedMMD, pairwise", "APFL", "Ditto", "FedRep", "KNNPer", "TargetOnly", "CoMDA", "CoMDA, votes", "KD3A",
    "KD3A, votes", "Wrapped", "FedAnalytic", "FedAnalytic, squares", "FedJDA", "GALA", "SHOT", "T3A",
)  # fmt: skip
ONE_PASS = ("FedRFTCAClosedForm", "FedAnalytic", "FedJDA")
BACKENDS = {
    "masked": MASKED,
    "BFV": "BFV()",
    "Paillier": f"Paillier({SMALL})",
    "threshold": f"ThresholdPaillier(2, 0, {SMALL})",
}
CASES: dict[str, tuple[str, ...]] = {method: ("--method", method) for method in METHODS}
CASES |= {
    f"{method}, {name}": ("--method", method, "--everyone", "--privacy", backend)
    for method in ("FedAvg", "FedGP auto", "FedMMD", "FedDaDiL", "FedAnalytic")
    for name, backend in BACKENDS.items()
}
TWO_PARTIES = ("--two-party", f"PaillierAffine({SMALL}, reveal_moments=True)", "--rounds", "1", "--steps", "1")
CASES["two parties"] = ("--method", "FedMMD, pairwise", "--everyone", *TWO_PARTIES)
CASES["FedAnalytic, leave one out"] = ("--method", "FedAnalytic, leave one out", "--everyone")
CASES["intervals, masked"] = ("--method", "FedAvg", "--numbers", "--measured", "--privacy", MASKED)
CASES["clinic, masked"] = ("--method", "FedAvg", "--measured", "--privacy", MASKED)
CASES["fractions, masked"] = ("--method", "FedAvg", "--privacy", MASKED)


# all ways to send are in test_processes.py by default
@pytest.mark.parametrize("case", [case if case == "fractions, masked" else slow(case) for case in CASES])
def test_sites_around_a_server_give_the_results_of_one_process(case: str, tmp_path: Path) -> None:
    steps = () if case.startswith(ONE_PASS) else ("--steps", "2")
    arguments = ("--own", "--rounds", "3", *steps, *CASES[case])
    (alone,) = start(*arguments)
    results = around(tmp_path, *arguments)
    weights = {name: value for result in results for name, value in result["weights"].items()}
    assert weights == alone["weights"]
    if "--measured" in arguments:
        assert alone["metrics"].keys() & {"target/radius", "oracle/target/at_sensitivity/ppv"}
    for result in results:
        assert messages(result) == messages(alone)
        assert result["metrics"] == alone["metrics"]
    assert not results[0]["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["FedMMD", "FedAvg", "FedGP auto", "FedDaDiL"])
def test_ckks_around_a_server_is_within_its_bound_of_one_process(method: str, tmp_path: Path) -> None:
    steps = "2" if "auto" in method else "1"  # a variance takes several batches
    arguments = ("--method", method, "--everyone", "--privacy", "CKKS()", "--own", "--steps", steps, "--values")
    (alone,) = start(*arguments, "--rounds", "1")
    results = around(tmp_path, *arguments, "--rounds", "1")
    values = {name: value for result in results for name, value in result["values"].items()}
    assert values.keys() == alone["values"].keys()
    # a round's sums are off by the bound at most, and what is made of them by little more
    bound = 10 * CKKS().error_bound(3)
    for name, value in alone["values"].items():
        assert max(abs(one - other) for one, other in zip(values[name], value, strict=True)) <= bound
    assert max(len(value) for value in values.values()) > 100


def messages(result: dict[str, Any]) -> list[Any]:
    """The ledger, but for keys: BFV writes them in as many bytes as they happen to need."""
    return [entry for entry in result["ledger"] if not entry[1].endswith("/keys")]


def test_optimisers_are_compared_where_a_configuration_names_classes() -> None:
    made = [plain(partial(print, torch.optim.Adam, lr=rate)) for rate in (0.1, 0.1, 0.3)]
    assert made[0] == made[1] == {"made by": ["torch.optim.adam.Adam"], "lr": 0.1}
    assert made[2] != made[0]
    data = digits()
    module = build(FedAvg, data, optimizer=partial(torch.optim.SGD, lr=0.1))
    assert arguments(module.run)["optimizer"] == {"made by": "torch.optim.sgd.SGD", "lr": 0.1}
