"""Who has what in files: under a backend that hides single messages, each process has its own clients in its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from site_runs import merged, start, trouble

pytestmark = pytest.mark.multiprocess

MASKED = ["--method", "FedAvg", "--privacy", "PairwiseMasking(colluders=0)", "--everyone", "--steps", "3"]
THREE = [*MASKED, "--devices", "3"]
CLIENTS = {0: ["clean"], 1: ["blended"], 2: ["fonts"]}
"""By process."""


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two rounds, of three processes that know their own data alone."""
    made = tmp_path_factory.mktemp("masked")
    start(*THREE, "--own", "--rounds", "2", "--save", str(made / "half.ckpt"))
    return made


@pytest.fixture(scope="module")
def straight() -> dict[str, Any]:
    (alone,) = start(*MASKED, "--rounds", "4")
    return alone


def test_each_process_writes_its_own_clients_and_nobody_elses(folder: Path) -> None:
    files = [folder / "half.ckpt", folder / "half.ckpt.part1", folder / "half.ckpt.part2"]
    assert sorted(folder.iterdir()) == sorted(files)
    checkpoints = [load(file) for file in files]
    for rank, checkpoint in enumerate(checkpoints):
        assert list(checkpoint["clients"]) == CLIENTS[rank]
        assert [key for key in checkpoint["state_dict"] if key.startswith("replicas.")] == []
        # no number of another client is in the file under any name: raw bytes of its largest tensors
        raw = files[rank].read_bytes()
        for other, theirs in enumerate(checkpoints):
            for name in CLIENTS[other]:
                for group in theirs["clients"][name]["optimizers"][0]:
                    for state in group["params"]:
                        largest = max(state.values(), key=torch.numel)
                        assert largest.numel() > 1
                        assert (largest.numpy().tobytes() in raw) == (other == rank), (rank, other)
    assert len({checkpoint["set"] for checkpoint in checkpoints}) == 1


@pytest.mark.parametrize(("devices", "file"), [("1", "half.ckpt.part1"), ("2", "half.ckpt")])
def test_training_goes_on_from_any_file_of_the_set_on_any_number_of_processes(
    folder: Path, straight: dict[str, Any], devices: str, file: str
) -> None:
    results = start(*MASKED, "--devices", devices, "--rounds", "4", "--resume", str(folder / file))
    assert merged(results) == straight["weights"]


def test_it_goes_on_where_each_process_finds_its_own_file_alone(
    folder: Path, straight: dict[str, Any], tmp_path: Path
) -> None:
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
        name = "half.ckpt" + (f".part{rank}" if rank else "")
        shutil.copy(folder / name, tmp_path / str(rank))
    results = start(*THREE, "--rounds", "4", "--resume", str(tmp_path / "RANK" / "half.ckpt"))
    assert merged(results) == straight["weights"]


def test_one_file_for_all_is_asked_for_by_name_and_says_what_it_holds(straight: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "all.ckpt"
    results = start(*THREE, "--rounds", "2", "--save", str(path), "--gather")
    assert [file.name for file in tmp_path.iterdir()] == ["all.ckpt"]
    assert list(load(path)["clients"]) == ["clean", "blended", "fonts"]
    (said,) = results[0]["warnings"]
    assert "process 0 gets and writes the weights and optimiser states of ['blended', 'fonts']" in said
    (alone,) = start(*MASKED, "--rounds", "4", "--resume", str(path))
    assert alone["weights"] == straight["weights"]


def test_checkpoints_within_rounds_leave_no_file_of_those_that_are_replaced(tmp_path: Path) -> None:
    start(*THREE, "--rounds", "2", "--save-steps", str(tmp_path), "--keep", "1")
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".ckpt", ".part1", ".part2"]


def test_without_a_backend_that_hides_there_is_one_file(tmp_path: Path) -> None:
    plain = ["--method", "FedAvg", "--everyone", "--steps", "3", "--devices", "2", "--rounds", "1"]
    start(*plain, "--save", str(tmp_path / "all.ckpt"))
    assert [file.name for file in tmp_path.iterdir()] == ["all.ckpt"]


@pytest.mark.parametrize(
    ("missing", "message"),
    [(["part1", "part2"], "no state of ['blended', 'fonts']"), (["ckpt"], "no state of ['clean']"), ([], "another")],
)
def test_files_that_are_missing_or_of_another_checkpoint_are_refused(
    folder: Path, tmp_path: Path, missing: list[str], message: str
) -> None:
    for file in folder.iterdir():
        if file.suffix[1:] not in missing:
            shutil.copy(file, tmp_path)
    if not missing:
        part = tmp_path / "half.ckpt.part1"
        torch.save(load(part) | {"set": "another"}, part)
    assert message in trouble(*MASKED, "--rounds", "4", "--resume", str(tmp_path / "half.ckpt"))
