"""Sites that are away when the last round ends: they get the result when they return, or are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from processes import Ended
from refused import slow
from site_runs import plain, start
from stars import around, struck

pytest.importorskip("grpc")

SITES = ("clean", "blended", "fonts")
MASKED = "PairwiseMasking(colluders=0, threshold=2)"
PAILLIER = "Paillier(key_bits=512, insecure_test_keys=True)"
RUN = ("--own", "--everyone", "--steps", "2", "--rounds", "3")
LAST = "local steps:5"
"""In the second of two steps of the last of three rounds."""


def back_at_the_end(folder: Path, site: str, fault: str, *arguments: str) -> dict[str, dict[str, Any]]:
    """What each process has at the end, by its site, one of which is killed and comes back."""
    arguments = (*RUN, *arguments, "--checkpoints", str(folder / "kept"))
    ended = struck(folder, f"{site}:{fault}:kill", *arguments, back=True)
    assert ended[site].exit_code == -9
    return finished({**ended, site: ended["back"]}, "server", *SITES)


def finished(ended: dict[str, Ended], *names: str) -> dict[str, dict[str, Any]]:
    for name in names:
        assert not ended[name].error, f"{name}: {ended[name].error}"
    return {name: plain(ended[name].result) for name in names}


def without(site: str, *arguments: str) -> dict[str, str]:
    """Weights of one process in which a client was absent in the last round."""
    there = [[*SITES], [*SITES], [name for name in SITES if name != site]]
    (result,) = start(*RUN, *arguments, "--schedule", json.dumps(there))
    return dict(result["weights"])


def weights(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: digest for result in results.values() for name, digest in result["weights"].items()}


def kept(folder: Path, site: str) -> dict[str, Tensor]:
    """Weights in a site's checkpoint of the last round."""
    written = torch.load(folder / "kept" / site / "epoch=2.ckpt", weights_only=True)
    assert (written["epoch"], written["federation"]["round_idx"]) == (2, 3)
    return dict(written["clients"][site]["weights"])


def check_whole(folder: Path, results: dict[str, dict[str, Any]]) -> None:
    """All ended after the same rounds, with the same numbers, and with a checkpoint of what they have."""
    assert [result["round_idx"] for result in results.values()] == [3] * 4
    assert all(result["metrics"] == results["server"]["metrics"] for result in results.values())
    assert results["server"]["metrics"]["round"] == 2
    for name in SITES:
        kept(folder, name)


@pytest.mark.parametrize(
    ("method", "site", "privacy"),
    [
        ("FedAvg", "blended", MASKED),
        *(slow("FedAvg", *others) for others in (("blended", "None"), ("blended", PAILLIER), ("fonts", MASKED))),
        *(slow("FedGP", site, privacy) for site in ("blended", "fonts") for privacy in ("None", MASKED)),
        *(slow("FedDA", site, privacy) for site in ("blended", "fonts") for privacy in ("None", MASKED)),
        *(slow(method, "fonts", PAILLIER) for method in ("FedAvg", "FedGP")),
    ],
)
def test_a_site_that_is_killed_in_the_last_round_has_the_weights_of_all_when_it_returns(
    method: str, site: str, privacy: str, tmp_path: Path
) -> None:
    arguments = ("--method", method, "--privacy", privacy)
    results = back_at_the_end(tmp_path, site, LAST, *arguments)
    check_whole(tmp_path, results)
    assert len({*weights(results).values()}) == 1
    scheduled = without(site, *arguments)
    assert all(scheduled[name] == weights(results)[name] for name in SITES if name != site)
    written = [kept(tmp_path, name) for name in SITES]
    assert all(torch.equal(each[key], written[0][key]) for each in written for key in written[0])


@pytest.mark.slow
@pytest.mark.parametrize("privacy", ["None", MASKED])
@pytest.mark.parametrize("site", ["blended", "fonts"])
def test_the_target_has_the_last_classifiers_of_all_sources_whoever_was_away(
    site: str, privacy: str, tmp_path: Path
) -> None:
    arguments = ("--method", "FedMMD", "--privacy", privacy)
    results = back_at_the_end(tmp_path, site, LAST, *arguments)
    check_whole(tmp_path, results)
    if site != "fonts":  # it has no more than its own last network
        assert weights(results)[site] == without(site, *arguments)[site]
    committee = kept(tmp_path, "fonts")
    for number, source in enumerate(("clean", "blended")):
        own = {key: value for key, value in kept(tmp_path, source).items() if key.startswith("classifier.")}
        assert own
        for key, value in own.items():
            assert torch.equal(committee[key.replace("classifier", f"members.{number}", 1)], value)


@pytest.mark.slow
@pytest.mark.parametrize("privacy", ["None", MASKED, PAILLIER])
@pytest.mark.parametrize(("method", "site"), [("FedRFTCA", "blended"), ("FedRFTCA", "fonts"), ("Voting", "fonts")])
def test_fedrf_tca_gives_all_its_w_and_the_target_its_classifier(
    method: str, site: str, privacy: str, tmp_path: Path
) -> None:
    results = back_at_the_end(tmp_path, site, LAST, "--method", method, "--privacy", privacy)
    check_whole(tmp_path, results)
    written = {name: kept(tmp_path, name) for name in SITES}
    assert all(torch.equal(each["aligner.weight"], written["clean"]["aligner.weight"]) for each in written.values())
    target = written["fonts"]
    if method == "Voting":
        assert all(bool(value.all()) for key, value in target.items() if key.startswith("informed"))
    else:
        assert bool(target["informed"])
        if site == "fonts":  # the sources have sent theirs in the last round
            assert torch.equal(target["classifier.weight"], written["clean"]["classifier.weight"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "site", "privacy"),
    [("FedAvg", "blended", MASKED), ("FedAvg", "blended", PAILLIER), ("FedMMD", "fonts", "None"),
     ("FedGP", "blended", "None"), ("FedRFTCA", "fonts", MASKED)],
)  # fmt: skip
def test_one_that_has_taken_part_to_the_end_and_dies_before_it_has_written_that_gets_it_again(
    method: str, site: str, privacy: str, tmp_path: Path
) -> None:
    arguments = ("--method", method, "--privacy", privacy)
    results = back_at_the_end(tmp_path, site, "checkpoint:2", *arguments)
    check_whole(tmp_path, results)
    (undisturbed,) = start(*RUN, *arguments)
    others = [name for name in SITES if name != site]
    assert all(weights(results)[name] == undisturbed["weights"][name] for name in others)
    if method in ("FedAvg", "FedGP"):
        assert weights(results) == undisturbed["weights"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "site", "privacy"),
    [("FedAvg", "blended", MASKED), ("FedGP", "fonts", "None"), ("FedAvg", "blended", PAILLIER),
     ("FedMMD", "fonts", MASKED), ("FedRFTCA", "fonts", MASKED)],
)  # fmt: skip
def test_a_run_that_ends_without_a_site_names_it_and_gives_it_the_result_when_all_start_again(
    method: str, site: str, privacy: str, tmp_path: Path
) -> None:
    arguments = (*RUN, "--method", method, "--privacy", privacy, "--checkpoints", str(tmp_path / "kept"))
    ended = struck(tmp_path, f"{site}:{LAST}:kill", *arguments, "--wait-for", "3")
    others = [name for name in SITES if name != site]
    first = finished(ended, "server", *others)
    for result in first.values():
        (text,) = result["missing"]
        assert f"without ['{site}']" in text
        assert "start the server and all sites again" in text
    results = dict(zip(("server", *SITES), around(tmp_path, *arguments), strict=True))
    assert [result["round_idx"] for result in results.values()] == [3] * 4
    assert all(weights(results)[name] == weights(first)[name] for name in others)
    if method in ("FedAvg", "FedGP"):
        assert len({*weights(results).values()}) == 1
    for name in SITES:
        kept(tmp_path, name)


@pytest.mark.slow
def test_a_source_gets_the_model_of_a_run_that_stopped_early(tmp_path: Path) -> None:
    arguments = ("--method", "FedRFTCAClosedForm", "--own", "--everyone", "--rounds", "3")
    files = ("--checkpoints", str(tmp_path / "kept"))
    ended = struck(tmp_path, "blended:checkpoint:0:kill", *arguments, *files, back=True)
    results = finished({**ended, "blended": ended["back"]}, "server", *SITES)
    assert [result["round_idx"] for result in results.values()] == [1] * 4  # of three
    (undisturbed,) = start(*arguments)
    assert weights(results) == undisturbed["weights"]
    written = torch.load(tmp_path / "kept" / "blended" / "epoch=0.ckpt", weights_only=True)["clients"]["blended"]
    model = torch.load(tmp_path / "kept" / "clean" / "epoch=0.ckpt", weights_only=True)["clients"]["clean"]
    assert torch.equal(written["weights"]["classifier.weight"], model["weights"]["classifier.weight"])


@pytest.mark.slow
def test_a_run_that_stopped_early_gives_its_result_with_the_epochs_that_it_came_to(tmp_path: Path) -> None:
    arguments = ("--method", "FedRFTCAClosedForm", "--own", "--everyone", "--checkpoints", str(tmp_path / "kept"))
    ended = struck(tmp_path, "blended:checkpoint:0:kill", *arguments, "--rounds", "3", "--wait-for", "3")
    first = finished(ended, "server", "clean", "fonts")
    assert all(
        "start the server and all sites again with max_epochs=1" in each["missing"][0] for each in first.values()
    )
    results = dict(zip(("server", *SITES), around(tmp_path, *arguments, "--rounds", "1"), strict=True))
    (undisturbed,) = start("--method", "FedRFTCAClosedForm", "--own", "--everyone", "--rounds", "3")
    assert weights(results) == undisturbed["weights"]
