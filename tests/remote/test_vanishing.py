"""Sites that vanish: the others go on as if these had been absent, or stop and say why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from campaign import Moment, moments, outcome
from site_runs import plain, start
from stars import struck

pytest.importorskip("grpc")

MASKED = "PairwiseMasking(colluders=0)"
RUN = ("--own", "--everyone", "--rounds", "4", "--steps", "2")


def slow(*case: str) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "method",
    [
        "FedMMD",
        *map(slow, ("FedAvg", "FedDaDiL")),
        slow("FedGP"),
        slow("FedRFTCA"),
        slow("FedDA"),
        slow("FedDAN"),
        slow("FedCORAL"),
    ],
)
def test_a_site_that_is_killed_is_as_one_that_is_away(method: str, tmp_path: Path) -> None:
    arguments = ("--method", method, *RUN)
    # two steps a round: in the second of round 1, or before the first where clients speak in each
    step = 2 if method in ("FedMMD", "FedRFTCA", "FedDAN", "FedCORAL") else 3
    ended = struck(tmp_path, f"blended:local steps:{step}:kill", *arguments)
    assert ended["blended"].exit_code == -9
    (scheduled,) = start(*arguments, "--schedule", schedule(plain(ended["server"].result), 1, "blended"))
    for name in ("server", "clean", "fonts"):
        assert not ended[name].error, ended[name].error
        result = plain(ended[name].result)
        assert result["lost"] == [2]
        assert all(result["weights"][client] == scheduled["weights"][client] for client in result["weights"])


# not FedRFTCA, whose clients train on where they are away, and one that was killed has not
@pytest.mark.parametrize(
    ("method", "privacy"),
    [
        ("FedGP", MASKED),
        *(slow(method, "None") for method in ("FedAvg", "FedGP", "FedMMD", "FedDaDiL", "FedDA")),
        *(slow(method, MASKED) for method in ("FedAvg", "FedMMD", "FedDaDiL", "FedDA")),
    ],
)
def test_a_site_that_comes_back_with_its_checkpoint_goes_on_as_one_that_was_away(
    method: str, privacy: str, tmp_path: Path
) -> None:
    arguments = ("--method", method, "--own", "--everyone", "--rounds", "8", "--steps", "2", "--privacy", privacy)
    kept = ("--checkpoints", str(tmp_path / "kept"), "--pause", "0.3")
    ended = struck(tmp_path, "blended:local steps:4:kill", *arguments, *kept, back=True)
    for name in ("server", "clean", "fonts", "back"):
        assert not ended[name].error, ended[name].error
    server = plain(ended["server"].result)
    happened = schedule(server)  # it was killed between two rounds
    assert "blended" in server["present"]["7"], "it has not come back in time"
    (scheduled,) = start(*arguments, "--schedule", happened)
    for name in ("clean", "fonts", "back"):
        result = plain(ended[name].result)
        assert result["weights"]
        assert all(result["weights"][client] == scheduled["weights"][client] for client in result["weights"])
        assert result["round_idx"] == 8


@pytest.mark.parametrize("method", ["FedAvg", slow("FedGP")])
def test_a_source_that_comes_back_with_nothing_has_what_all_have(method: str, tmp_path: Path) -> None:
    arguments = ("--method", method, "--own", "--everyone", "--rounds", "8", "--steps", "2", "--again", "none")
    who = "clean"
    kept = ("--checkpoints", str(tmp_path / "kept"), "--pause", "0.3")
    ended = struck(tmp_path, f"{who}:local steps:4:kill", *arguments, *kept, back=True)
    for name in ("server", "blended", "fonts", "back"):
        assert not ended[name].error, ended[name].error
    assert who in plain(ended["server"].result)["present"]["7"], "it has not come back in time"
    back, others = plain(ended["back"].result), plain(ended["blended"].result)
    assert back["round_idx"] == 8
    assert back["weights"][who] == others["weights"]["blended"], "sources end with the same model"


@pytest.mark.slow  # it waits for what does not come
def test_a_target_that_has_the_model_alone_and_lost_it_says_so(tmp_path: Path) -> None:
    arguments = ("--method", "FedGP", "--own", "--everyone", "--rounds", "8", "--steps", "2", "--again", "none")
    kept = ("--checkpoints", str(tmp_path / "kept"), "--pause", "0.3")
    ended = struck(tmp_path, "fonts:local steps:4:kill", *arguments, *kept, back=True)
    assert "RosterError" in ended["back"].error
    for name in ("server", "clean", "blended"):
        assert ended[name].error or plain(ended[name].result)["round_idx"] == 8, "neither an end nor an error"


@pytest.mark.parametrize(
    ("method", "who", "privacy", "why"),
    [
        ("FedGP", "fonts", "None", "the model is adapted to the target 'fonts'"),
        slow("FedRFTCA", "blended", MASKED, "a mean over channel 'features' needs 2 clients under PairwiseMasking"),
    ],
)
def test_where_a_round_would_change_nothing_it_is_waited_for_and_then_all_stop(
    method: str, who: str, privacy: str, why: str, tmp_path: Path
) -> None:
    arguments = ("--method", method, *RUN, "--privacy", privacy, "--wait-for", "2")
    ended = struck(tmp_path, f"{who}:local steps:0:kill", *arguments)
    assert f"sites ['{who}'] did not come within 2 s (wait_for) to go on: {why}" in ended["server"].error
    for name in {"clean", "blended", "fonts"} - {who}:
        assert f"['{who}'] did not come within 2 s" in ended[name].error


@pytest.mark.parametrize(("step", "missed"), [(4, -1), (5, 2)], ids=["between rounds", "in round 2"])
def test_a_target_that_comes_back_has_missed_no_round_but_the_one_it_was_lost_in(
    step: int, missed: int, tmp_path: Path
) -> None:
    arguments = ("--method", "FedGP", "--own", "--everyone", "--rounds", "5", "--steps", "2")
    kept = ("--checkpoints", str(tmp_path / "kept"))
    ended = struck(tmp_path, f"fonts:local steps:{step}:kill", *arguments, *kept, back=True)
    for name in ("server", "clean", "blended", "back"):
        assert not ended[name].error, ended[name].error
    there = plain(ended["server"].result)["present"]
    assert all("fonts" in names for names in there.values()), there
    (scheduled,) = start(*arguments, "--schedule", schedule(plain(ended["server"].result), missed, "fonts"))
    for name in ("clean", "blended", "back"):
        result = plain(ended[name].result)
        assert result["weights"]
        assert all(result["weights"][client] == scheduled["weights"][client] for client in result["weights"])


def test_an_average_needs_no_target(tmp_path: Path) -> None:
    ended = struck(tmp_path, "fonts:local steps:3:kill", "--method", "FedAvg", *RUN)
    for name in ("server", "clean", "blended"):
        assert not ended[name].error, ended[name].error
    assert all(plain(ended["server"].result)["emptied"]), "the server keeps the networks that it was given"
    assert not any(plain(ended["clean"].result)["emptied"])


SOME = [
    Moment("local steps", 3, "cut", "plain"),
    Moment("opening", 5, "kill", "masking, 2 of 3 shares"),
    Moment("protect", 1, "kill", "masking, 2 of 3 shares"),
    Moment("unmasking", 1, "cut", "masking, 2 of 3 shares"),
    Moment("download", 2, "kill", "plain"),
    Moment("checkpoint", 1, "kill", "plain"),
]


@pytest.mark.parametrize(
    "moment",
    [*SOME[:2], *(pytest.param(m, marks=pytest.mark.slow) for m in SOME[2:])],
    ids=lambda moment: f"{moment.kind} in {moment.phase}",
)
def test_the_others_go_on_as_the_schedule_that_happened(moment: Moment) -> None:
    found = outcome(moment)
    assert found["outcome"] == "finished", found
    assert found["seconds"] < 3, "noticed too late"


def test_where_too_few_are_left_to_unmask_all_stop_and_say_so() -> None:
    found = outcome(Moment("protect", 1, "kill", "masking"))
    assert found["outcome"] == "stopped", found
    assert "QuorumError" in found["errors"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", moments(36), ids=str)
def test_a_fault_at_any_moment_ends_in_a_schedule_or_a_named_error(moment: Moment) -> None:
    found = outcome(moment)
    assert found["outcome"] in ("finished", "stopped", "did not strike"), found
    assert found["seconds"] < 15, "noticed too late"


def schedule(server: dict[str, Any], died_in: int = -1, who: str = "") -> str:
    """Who was there in each round, in JSON; one who died in a round was not, as far as others are concerned."""
    rounds = [server["present"][key] for key in sorted(server["present"], key=int)]
    return json.dumps(
        [[name for name in there if number != died_in or name != who] for number, there in enumerate(rounds)]
    )
