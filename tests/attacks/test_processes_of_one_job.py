"""Processes that a launcher starts: their journals and the keys of the others outlive them, as those of sites do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedlit.methods import FedAvg
from fedlit.remote.seats import CarriedSite
from helpers import build, digits, trainer
from refused import refused, slow
from site_runs import merged, start, trouble, under_torchrun

MASKED = ["--method", "FedAvg", "--privacy", "PairwiseMasking(colluders=0)", "--everyone", "--steps", "2"]
TWO = ["--devices", "2"]
APART = ["--devices", "3", "--placement", "[[], ['clean', 'blended'], ['fonts']]"]


def of_one_round(folder: Path, *where: str) -> list[str]:
    """Arguments of a run that goes on from a checkpoint of its first round."""
    save = ("--save", str(folder / "half.ckpt"))
    start(*MASKED, *where, "--rounds", "1", *save, "--journal", str(folder / "journals"))
    return [*MASKED, *where, "--rounds", "2", "--resume", str(folder / "half.ckpt")]


def lines(folder: Path) -> dict[str, int]:
    return {path.name: len(path.read_text().splitlines()) for path in sorted((folder / "journals").iterdir())}


@pytest.mark.parametrize(
    ("where", "names"),
    [
        slow(TWO, ["clean-of-2", "fonts-of-2"]),
        slow(["--devices", "3"], ["blended-of-3", "clean-of-3", "fonts-of-3"]),
        slow(APART, ["clean-of-3", "fonts-of-3"]),
    ],
    ids=["two", "three", "server apart"],
)
def test_a_run_goes_on_and_repeats_a_round_with_the_journals_of_before(
    where: list[str], names: list[str], tmp_path: Path
) -> None:
    (alone,) = start(*MASKED, "--rounds", "2")
    again = [*of_one_round(tmp_path, *where), "--journal", str(tmp_path / "journals")]
    before = lines(tmp_path)
    assert [*before] == [f"{name}.releases" for name in names]
    first = start(*again)
    grown = lines(tmp_path)
    assert all(grown[name] > before[name] for name in grown)
    assert merged(first) == alone["weights"]
    assert merged(start(*again)) == alone["weights"]
    assert lines(tmp_path) == grown, "what is repeated is no new release, and keys are known"
    if where == TWO:  # placed otherwise all have other keys
        for elsewhere in ([], ["--devices", "3"]):
            assert merged(start(*elsewhere, *again[: len(MASKED)], *again[len(MASKED + TWO) :])) == alone["weights"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        *("FedGP", "FedDAN", "FedRFTCA", "FedMMD", "FedDaDiL", "FedDA", "FedDANN", "FedCORAL", "FedMME", "KNNPer"),
        *("KD3A, votes", "CoMDA, votes", "FedAvg, moments"),
    ],
)
def test_every_kind_of_method_repeats_its_rounds_with_journals(method: str, tmp_path: Path) -> None:
    masked = ["--method", method, *MASKED[2:]]
    (alone,) = start(*masked, "--rounds", "2")
    save = ["--save", str(tmp_path / "half.ckpt"), "--rounds", "1"]
    start(*masked, *TWO, *save, "--journal", str(tmp_path / "journals"))
    again = ["--rounds", "2", "--resume", str(tmp_path / "half.ckpt"), "--journal", str(tmp_path / "journals")]
    for _ in range(2):
        assert merged(start(*masked, *TWO, *again)) == alone["weights"]


@pytest.mark.slow
def test_torchrun_has_journals_as_well(tmp_path: Path) -> None:
    path = str(tmp_path / "journals")
    under_torchrun(*MASKED, *TWO, "--rounds", "1", "--journal", path)
    before = lines(tmp_path)
    under_torchrun(*MASKED, *TWO, "--rounds", "1", "--journal", path)
    assert lines(tmp_path) == before


def test_a_round_that_is_repeated_without_a_client_is_refused(tmp_path: Path) -> None:
    """Before the mend the second sum came out, too: the difference is the vector of who is left out."""
    again = of_one_round(tmp_path, *TWO)
    without = ["--schedule", json.dumps([["clean", "blended", "fonts"], ["clean", "fonts"]])]
    start(*again, *without)
    with_journals = [*again, "--journal", str(tmp_path / "journals")]
    start(*with_journals)
    said = trouble(*with_journals, *without)
    assert "JournalError: client 'clean' has released in this step" in said
    assert "among ['clean', 'blended', 'fonts'], and now it would be among ['clean', 'fonts']" in said


def test_a_key_that_changed_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    again = [*of_one_round(tmp_path, *TWO), "--journal", str(tmp_path / "journals")]
    (tmp_path / "journals" / "fonts-of-2.releases").unlink()
    said = trouble(*again)
    assert "KeyCheckError: client 'fonts' has another identity key than before" in said
    assert "allow_rejoin: [fonts]" in said
    start(*again, "--allow-rejoin", "fonts")
    start(*again)  # and is known from then on


@pytest.mark.slow
def test_a_journal_of_another_seed_is_refused(tmp_path: Path) -> None:
    of_one_round(tmp_path, *TWO)
    said = trouble(*MASKED, *TWO, "--rounds", "1", "--seed", "1", "--journal", str(tmp_path / "journals"))
    assert "is of another run (seed was 0, and is 1)" in said


@pytest.mark.parametrize("given", [{"journal": "folder"}, {"allow_rejoin": ["fonts"]}])
def test_beside_a_seat_they_are_the_seats(given: dict[str, Any]) -> None:
    seat = CarriedSite(None, None, 1.0, 1.0)  # type: ignore[arg-type]  # it is refused before anybody is called
    data = digits()
    with refused(next(iter(given))):
        trainer(1, strategy={"seat": seat, **given}).fit(build(FedAvg, data), data)


# ---------------------------------------------------------------- fedlit fit

RUN = [
    *("fit", "--config=experiments/digits", "--config=privacy/masking", "--trainer.max_epochs=1"),
    *("--trainer.devices=2", "--trainer.strategy.init_args.local_steps=1"),
    "--trainer.strategy.init_args.privacy.init_args.colluders=0",
]


def command(folder: Path, *words: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "WORLD_SIZE")}
    fedlit = Path(sys.executable).with_name("fedlit")
    done = subprocess.run(
        [fedlit, *RUN, *words], capture_output=True, text=True, timeout=200, check=False, env=environment, cwd=folder
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_has_journals_in_its_folder_and_goes_on_with_them(tmp_path: Path) -> None:
    assert not command(tmp_path, "--compare=null")
    (journal, other) = sorted(tmp_path.glob("runs/*/version_0/journals/*-of-2.releases"))
    (checkpoint,) = tmp_path.glob("runs/*/version_0/checkpoints/*.ckpt")
    more = ["--compare=null", "--trainer.max_epochs=2", f"--ckpt_path={checkpoint}"]
    before = [len(each.read_text().splitlines()) for each in (journal, other)]
    assert not command(tmp_path, *more)
    grown = [len(each.read_text().splitlines()) for each in (journal, other)]
    assert all(one < two for one, two in zip(before, grown, strict=True))
    (later,) = tmp_path.glob("runs/*/version_1/checkpoints/*.ckpt")
    assert not command(tmp_path, *more[:1], "--trainer.max_epochs=3", f"--ckpt_path={later}")
    assert all(len(each.read_text().splitlines()) > two for each, two in zip((journal, other), grown, strict=True))
    other.unlink()
    assert "has another identity key than before" in command(tmp_path, *more)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_an_experiment_has_them_beside_its_runs_and_sets_them_aside_with_fresh(tmp_path: Path) -> None:
    several = ["--compare=null", "--seeds=[0,1]"]
    assert not command(tmp_path, *several)
    folders = sorted(tmp_path.glob("runs/experiment_*/*.journals"))
    assert [folder.name for folder in folders] == ["001.journals", "002.journals"]
    contents = {path: path.read_bytes() for folder in folders for path in folder.iterdir()}
    assert len(contents) == 4
    for summary in tmp_path.glob("runs/*/version_0/summary.json"):  # as if it had been interrupted
        summary.unlink()
    assert not command(tmp_path, *several)
    assert {path: path.read_bytes() for path in contents} == contents
    assert not command(tmp_path, *several, "--fresh=true")
    names = {folder.name for folder in tmp_path.glob("runs/experiment_*/*.journals*")}
    assert names == {"001.journals", "001.journals-1", "002.journals", "002.journals-1"}
    assert all(path.read_bytes() != content for path, content in contents.items())
