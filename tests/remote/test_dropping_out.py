"""Sites that drop out: the others go on as if these had been absent, or stop and state why."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from campaign import Moment, moments, outcome
from processes import Ended
from refused import slow
from site_runs import plain, start
from stars import struck

pytest.importorskip("grpc")

MASKED = "PairwiseMasking(colluders=0)"
RUN = ("--own", "--everyone", "--steps", "2")


def schedule(server: dict[str, Any], dropped_in: int = -1, client: str = "") -> str:
    """Clients of each round, in JSON, without one in the round in which it dropped out."""
    rounds = [server["present"][key] for key in sorted(server["present"], key=int)]
    return json.dumps(
        [[name for name in there if number != dropped_in or name != client] for number, there in enumerate(rounds)]
    )


def finished(ended: dict[str, Ended], names: Iterable[str]) -> dict[str, dict[str, Any]]:
    for name in names:
        assert not ended[name].error, ended[name].error
    return {name: plain(ended[name].result) for name in names}


def check_weights(results: Iterable[dict[str, Any]], scheduled: dict[str, Any]) -> None:
    for result in results:
        assert all(scheduled["weights"][client] == weights for client, weights in result["weights"].items())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["FedMMD", "FedAvg", "FedDaDiL", "FedGP", "FedRFTCA", "FedDA", "FedDAN", "FedCORAL"])
def test_a_site_that_is_killed_is_as_one_that_is_absent(method: str, tmp_path: Path) -> None:
    arguments = ("--method", method, *RUN, "--rounds", "3", "--wait-for", "5")
    # two steps a round: in the second of round 1, or before the first where clients send in each
    step = 2 if method in ("FedMMD", "FedRFTCA", "FedDAN", "FedCORAL") else 3
    ended = struck(tmp_path, f"blended:local steps:{step}:kill", *arguments)
    assert ended["blended"].exit_code == -9
    results = finished(ended, ("server", "clean", "fonts"))
    assert all(result["lost"] == [2] for result in results.values())
    (scheduled,) = start(*arguments, "--schedule", schedule(results["server"], 1, "blended"))
    check_weights(results.values(), scheduled)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "fault"),
    [*((method, "protect:2") for method in ("FedAvg", "FedGP", "FedMMD")), ("FedAvg", "local steps:4")],
)
def test_a_round_that_needs_a_site_that_is_killed_within_it_is_repeated_with_it(
    method: str, fault: str, tmp_path: Path
) -> None:
    # three vectors of three, and so also where it is killed before the sum
    privacy = MASKED if fault != "local steps:4" else "PairwiseMasking(colluders=0, threshold=3)"
    arguments = ("--method", method, *RUN, "--rounds", "4", "--privacy", privacy)
    kept = ("--checkpoints", str(tmp_path / "kept"), "--repeat")
    ended = struck(tmp_path, f"clean:{fault}:kill", *arguments, *kept, back=True)
    assert ended["clean"].exit_code == -9
    names = ("server", "blended", "fonts", "back")
    assert "cannot be had without ['clean']" in ended["server"].output, ended
    results = finished(ended, names)
    (undisturbed,) = start(*arguments)
    weights = {client: each for result in results.values() for client, each in result["weights"].items()}
    assert weights == undisturbed["weights"]


@pytest.mark.slow
def test_a_site_that_a_round_needs_and_that_does_not_come_back_is_named_by_all(tmp_path: Path) -> None:
    arguments = ("--method", "FedAvg", *RUN, "--rounds", "4", "--privacy", MASKED, "--wait-for", "4")
    kept = ("--checkpoints", str(tmp_path / "kept"), "--repeat")
    ended = struck(tmp_path, "clean:protect:2:kill", *arguments, *kept)
    for name in ("server", "blended", "fonts"):
        assert "sites ['clean'] did not come within 4 s (wait_for)" in ended[name].error


# not FedRFTCA, whose clients train on in rounds in which they are absent, which a killed one does not
@pytest.mark.parametrize(
    ("method", "privacy"),
    [
        ("FedAvg", MASKED),
        *(slow(method, "None") for method in ("FedAvg", "FedGP", "FedMMD", "FedDaDiL", "FedDaDiL, phases", "FedDA")),
        *(slow(method, MASKED) for method in ("FedGP", "FedMMD", "FedDaDiL", "FedDA")),
    ],
)
def test_a_site_that_comes_back_with_its_checkpoint_goes_on_as_one_that_was_absent(
    method: str, privacy: str, tmp_path: Path
) -> None:
    arguments = ("--method", method, *RUN, "--rounds", "6", "--privacy", privacy)
    kept = ("--checkpoints", str(tmp_path / "kept"), "--pause", "0.4")
    step = 3 if "phases" in method else 4  # before round 1 of the encoder's, to come back in the next phase; or round 2
    ended = struck(tmp_path, f"blended:local steps:{step}:kill", *arguments, *kept, back=True)
    results = finished(ended, ("server", "clean", "fonts", "back"))
    server = results.pop("server")
    assert "blended" in server["present"]["5"], "it has not come back in time"
    (scheduled,) = start(*arguments, "--schedule", schedule(server))  # it was killed between two rounds
    check_weights(results.values(), scheduled)
    assert all(result["weights"] and result["round_idx"] == 6 for result in results.values())


@pytest.mark.slow
def test_a_source_that_missed_the_class_moments_starts_its_atoms_from_them(tmp_path: Path) -> None:
    arguments = ("--method", "FedDaDiL, phases", *RUN, "--rounds", "8", "--values")
    kept = ("--checkpoints", str(tmp_path / "kept"), "--pause", "0.3")
    ended = struck(tmp_path, "blended:local steps:6:kill", *arguments, *kept, back=True)
    results = finished(ended, ("server", "clean", "fonts", "back"))
    assert "blended" not in results["server"]["present"]["2"], "it was there in the round of moments"
    started = [numbers[2] for result in results.values() for numbers in result["values"].values()]
    assert started == [1.0] * 3  # of a dictionary: two coordinates, then whether it has started


@pytest.mark.slow
@pytest.mark.parametrize("method", ["FedAvg", "FedGP"])
def test_a_source_that_comes_back_with_nothing_gets_the_model_of_all(method: str, tmp_path: Path) -> None:
    arguments = ("--method", method, *RUN, "--rounds", "6", "--again", "none")
    kept = ("--checkpoints", str(tmp_path / "kept"), "--pause", "0.4")
    ended = struck(tmp_path, "clean:local steps:4:kill", *arguments, *kept, back=True)
    results = finished(ended, ("server", "blended", "fonts", "back"))
    assert "clean" in results["server"]["present"]["5"], "it has not come back in time"
    assert results["back"]["round_idx"] == 6
    assert results["back"]["weights"]["clean"] == results["blended"]["weights"]["blended"]
    assert all(results["server"]["emptied"]), "the server keeps the networks of its module"
    assert not any(results["blended"]["emptied"])


@pytest.mark.slow  # it waits in vain
def test_a_target_that_alone_had_the_model_and_lost_it_states_that(tmp_path: Path) -> None:
    arguments = ("--method", "FedGP", *RUN, "--rounds", "8", "--again", "none")
    kept = ("--checkpoints", str(tmp_path / "kept"), "--pause", "0.3")
    ended = struck(tmp_path, "fonts:local steps:4:kill", *arguments, *kept, back=True)
    assert "RosterError" in ended["back"].error
    for name in ("server", "clean", "blended"):
        assert ended[name].error or plain(ended[name].result)["round_idx"] == 8, "neither an end nor an error"


@pytest.mark.slow
@pytest.mark.parametrize(("step", "missed"), [(4, -1), (5, 2)], ids=["between rounds", "in round 2"])
def test_a_target_that_comes_back_has_missed_no_round_but_the_one_it_dropped_out_in(
    step: int, missed: int, tmp_path: Path
) -> None:
    arguments = ("--method", "FedGP", *RUN, "--rounds", "5")
    kept = ("--checkpoints", str(tmp_path / "kept"))
    ended = struck(tmp_path, f"fonts:local steps:{step}:kill", *arguments, *kept, back=True)
    results = finished(ended, ("server", "clean", "blended", "back"))
    server = results.pop("server")
    assert all("fonts" in names for names in server["present"].values()), server["present"]
    (scheduled,) = start(*arguments, "--schedule", schedule(server, missed, "fonts"))
    check_weights(results.values(), scheduled)
    assert all(result["weights"] for result in results.values())


@pytest.mark.slow
def test_the_others_go_on_as_with_the_schedule_that_happened() -> None:
    found = outcome(Moment("opening", 5, "kill", "masking, 2 of 3 shares"))
    assert found["outcome"] == "finished", found
    assert found["seconds"] < 3, "noticed too late"


@pytest.mark.slow
@pytest.mark.parametrize("moment", moments(36), ids=str)
def test_a_fault_at_any_moment_ends_in_a_schedule_or_a_named_error(moment: Moment) -> None:
    found = outcome(moment)
    assert found["outcome"] in ("finished", "stopped", "did not strike"), found
    assert found["seconds"] < 15, "noticed too late"
