"""The same run on 1, 2 and K+1 processes and under torchrun, processes that fail, and who has what in files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import one_site
import processes
from method_table import ONE_PASS
from site_runs import merged, start, trouble, under_torchrun

pytestmark = pytest.mark.multiprocess
SLOW = pytest.mark.slow

THREE_ROUNDS = ["--rounds", "3"]
APART = ["--devices", "3", "--placement", "[[], ['clean', 'blended'], ['fonts']]"]
"""A process for the server alone, which hosts no client and so has nothing to take off a sum."""


@pytest.fixture(scope="module")
def one() -> dict:
    """The run on one process, which all others are compared with."""
    (result,) = start(*THREE_ROUNDS)
    return result


@pytest.mark.parametrize(("launcher", "devices"), [pytest.param(start, 3, id="K+1", marks=SLOW), (under_torchrun, 2)])
def test_placement_changes_neither_weights_nor_ledger_nor_metrics(
    one: dict, launcher: Callable[..., list[dict[str, Any]]], devices: int
) -> None:
    results = launcher(*THREE_ROUNDS, "--devices", str(devices))
    assert len(results) == devices
    assert merged(results) == one["weights"]
    for result in results:
        assert result["ledger"] == one["ledger"]
        assert result["metrics"] == one["metrics"]


LAYOUTS = {"two": ["--devices", "2"], "three": ["--devices", "3"], "server apart": [*APART]}
BY_DEFAULT = [("FedGP auto", "server apart")]
EVERY = [name for name in one_site.ARGUMENTS if name not in ("Oracle", "FedGP auto, one batch")]


def short(method: str) -> list[str]:
    """One round of all samples, or short rounds of some clients."""
    rounds = "3" if "phases" in method else "2"  # two of which are a warm-up
    return ["--method", method, "--rounds", rounds, *(["--everyone"] if method in ONE_PASS else ["--steps", "4"])]


@pytest.mark.parametrize(
    ("method", "layout"),
    [
        *BY_DEFAULT,
        *(
            pytest.param(method, layout, marks=pytest.mark.slow)
            for method in EVERY
            for layout in LAYOUTS
            if (method, layout) not in BY_DEFAULT
        ),
    ],
)
def test_placement_changes_nothing_whatever_is_exchanged(method: str, layout: str) -> None:
    (alone,) = start(*short(method))
    results = start(*short(method), *LAYOUTS[layout])
    assert merged(results) == alone["weights"]
    assert layout != "server apart" or results[0]["weights"] == {}
    assert all(result["ledger"] == alone["ledger"] for result in results)
    assert all(result["metrics"] == alone["metrics"] for result in results)


@SLOW
@pytest.mark.parametrize("method", ["KNNPer", "APFL", "FedRFTCA"])
def test_a_run_of_three_processes_resumes_on_two(method: str, tmp_path: Path) -> None:
    path, arguments = str(tmp_path / "half.ckpt"), ["--method", method, "--steps", "4"]
    (alone,) = start(*arguments, "--rounds", "2")
    start(*arguments, "--rounds", "1", "--save", path, "--devices", "3")
    results = start(*arguments, "--rounds", "2", "--resume", path, "--devices", "2")
    assert merged(results) == alone["weights"]
    assert all(result["ledger"] == alone["ledger"] for result in results)


@pytest.mark.parametrize("privacy", [pytest.param("None", marks=SLOW), "PairwiseMasking(colluders=0)"])
def test_a_server_apart_resumes_and_others_do_from_it(privacy: str, tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    arguments = ["--everyone", "--steps", "2", "--privacy", privacy]
    (alone,) = start(*arguments, "--rounds", "2")
    start(*arguments, *APART, "--rounds", "1", "--save", path)
    for where in (APART, []):
        assert merged(start(*arguments, *where, "--rounds", "2", "--resume", path)) == alone["weights"]


@pytest.mark.parametrize(
    ("method", "privacy", "two_party"),
    [
        pytest.param("FedGP auto, exact", "None", "None", id="open", marks=SLOW),
        pytest.param("FedGP auto", "PairwiseMasking(colluders=0)", "PlainAffine()", id="masked"),
    ],
)
def test_updates_on_three_processes_equal_one_and_a_round_under_way_resumes_on_two(
    method: str, privacy: str, two_party: str, tmp_path: Path
) -> None:
    arguments = ["--method", method, "--privacy", privacy, "--two-party", two_party, "--everyone", "--rounds", "2"]
    (alone,) = start(*arguments)
    three = start(*arguments, "--devices", "3", "--save-steps", str(tmp_path))
    assert merged(three) == alone["weights"]
    assert "beta" in alone["metrics"]
    for result in three:
        assert result["ledger"] == alone["ledger"]
        assert result["metrics"] == alone["metrics"]  # every process logs what the target has told
    saved = {path: torch.load(path, weights_only=True)["federation"] for path in tmp_path.glob("*.ckpt")}
    within = [path for path, state in saved.items() if state["round_idx"] == 1 and state["batch_idx"]]
    last = max(within, key=lambda path: int(saved[path]["batch_idx"]))
    results = start(*arguments, "--devices", "2", "--resume", str(last))
    assert merged(results) == alone["weights"]
    for result in results:  # norms of gradients are a mean over the steps since the checkpoint
        kept = {name: value for name, value in alone["metrics"].items() if not name.endswith("grad_norm")}
        assert kept.items() <= result["metrics"].items()


def test_sites_that_know_only_their_own_data_train_the_same(one: dict) -> None:
    results = start(*THREE_ROUNDS, "--own", "--devices", "3")
    assert merged(results) == one["weights"]
    weights = [entry for entry in results[0]["ledger"] if entry[1] == "weights"]
    assert weights == [entry for entry in one["ledger"] if entry[1] == "weights"]


BACKENDS = {
    "masking": ("PairwiseMasking(colluders=0)", "cryptography"),
    # quick keys: this is about arithmetic and not about secrecy
    "paillier": ("Paillier(key_bits=512, insecure_test_keys=True)", "phe"),
    "threshold": ("ThresholdPaillier(2, 0, key_bits=512, insecure_test_keys=True)", "phe"),
    "bfv": ("BFV()", "tenseal"),
}


@pytest.mark.parametrize(
    ("method", "name"),
    [
        *(("FedRFTCA", "masking"), pytest.param("FedDANN", "masking", marks=SLOW)),
        *(pytest.param("FedRFTCA", name, marks=SLOW) for name in ("bfv", "paillier", "threshold")),
        *(
            pytest.param(method, "masking", marks=SLOW)
            for method in (
                *ONE_PASS,
                *("FedDAN", "FedCORAL", "KD3A", "KD3A, votes", "KD3A, soft votes"),
                *("CoMDA, votes", "AdaBN, mixing", "FedAvg, moments"),
            )
        ),
    ],
)
def test_hidden_messages_train_the_same_on_three_processes_and_on_the_plain_grid(method: str, name: str) -> None:
    backend, library = BACKENDS[name]
    pytest.importorskip(library)
    arguments = [*short(method), *([] if method in ONE_PASS else ["--everyone"])]
    (clear,) = start(*arguments, "--privacy", "Plain(FixedPoint())")
    results = start(*arguments, "--privacy", backend, "--devices", "3")
    assert merged(results) == clear["weights"]
    assert all(result["metrics"] == clear["metrics"] for result in results)


@SLOW
@pytest.mark.parametrize("name", ["paillier", "threshold", "bfv"])
def test_exact_backends_resume_on_other_processes_with_new_keys(name: str, tmp_path: Path) -> None:
    backend, library = BACKENDS[name]
    pytest.importorskip(library)
    path, arguments = str(tmp_path / "half.ckpt"), ["--steps", "4", "--privacy"]
    (on_grid,) = start(*arguments, "Plain(FixedPoint())", "--rounds", "2")
    start(*arguments, backend, "--rounds", "1", "--save", path, "--devices", "2")
    results = start(*arguments, backend, "--rounds", "2", "--resume", path, "--devices", "3")
    assert merged(results) == on_grid["weights"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            ["--privacy", "PairwiseMasking(FixedPoint(20, 0.001), colluders=0)"],
            "bound is 0.001: raise bound",
            marks=SLOW,
        ),
        pytest.param(["--trouble", "nan", "--method", "FedAvg"], "the training loss of client", marks=SLOW),
        pytest.param(["--method", "OutOfStep"], "channel 'gossip'", marks=SLOW),
        (["--trouble", "init"], "the initial network"),
        (["--trouble", "raise"], "something went wrong at this site"),
        pytest.param(["--method", "FedGP auto, one batch"], "at least 2 of different samples", marks=SLOW),
        (["--trouble", "kill"], "lost the other processes"),
        (["--trouble", "stall", "--timeout", "1"], "was silent for 1 s (timeout)"),
    ],
)
def test_trouble_at_one_process_ends_all_with_a_clear_error(arguments: list[str], message: str) -> None:
    assert message in trouble("--devices", "2", "--rounds", "2", *arguments)


@pytest.mark.parametrize("stage", ["fit", *(pytest.param(stage, marks=SLOW) for stage in ("validate", "predict"))])
def test_a_loader_of_clients_that_others_host_is_told(stage: str) -> None:
    ended = processes.run(one_site.with_anothers_data, stage, ranks=2)
    hosted = [["clean", "blended"], ["fonts"]]
    for one, names, given in zip(ended, hosted, (["fonts"], ["clean"]), strict=True):
        said = f"RosterError: this process hosts {names}, its loader has {given}: give each process a loader"
        assert said in one.error


@SLOW
def test_each_process_reads_its_own_files_of_features_alone(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for rank, name in enumerate(("a", "b", "t")):
        x = generator.normal(size=(30, 4)).astype(np.float32)
        labels = {} if name == "t" else {f"{name}_y": (x[:, 0] > 0).astype(np.int64)}
        (tmp_path / str(rank)).mkdir()
        for folder in (tmp_path, tmp_path / str(rank)):
            np.savez(folder / f"{name}.npz", **{f"{name}_x": x}, **labels, classes=np.array(["no", "yes"]))
    (alone,) = processes.results(one_site.on_features, str(tmp_path), 1)
    apart = processes.results(one_site.on_features, str(tmp_path), 3, ranks=3)
    assert [list(each) for each in apart] == [["a"], ["b"], ["t"]]
    assert {name: digest for each in apart for name, digest in each.items()} == alone


def test_more_processes_than_clients_are_refused() -> None:
    assert "4 processes for 3 clients" in trouble("--devices", "4")


MASKED = ["--method", "FedAvg", "--privacy", "PairwiseMasking(colluders=0)", "--everyone", "--steps", "3"]
THREE = [*MASKED, "--devices", "3"]
CLIENTS = {0: ["clean"], 1: ["blended"], 2: ["fonts"]}
"""By process."""


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a round, of three processes that know their own data alone."""
    made = tmp_path_factory.mktemp("masked")
    start(*THREE, "--own", "--rounds", "1", "--save", str(made / "half.ckpt"))
    return made


@pytest.fixture(scope="module")
def straight() -> dict[str, Any]:
    (alone,) = start(*MASKED, "--rounds", "2")
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


@pytest.mark.parametrize(("devices", "file"), [pytest.param("1", "half.ckpt.part1", marks=SLOW), ("2", "half.ckpt")])
def test_training_goes_on_from_any_file_of_the_set_on_any_number_of_processes(
    folder: Path, straight: dict[str, Any], devices: str, file: str
) -> None:
    results = start(*MASKED, "--devices", devices, "--rounds", "2", "--resume", str(folder / file))
    assert merged(results) == straight["weights"]


def test_it_goes_on_where_each_process_finds_its_own_file_alone(
    folder: Path, straight: dict[str, Any], tmp_path: Path
) -> None:
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
        name = "half.ckpt" + (f".part{rank}" if rank else "")
        shutil.copy(folder / name, tmp_path / str(rank))
    results = start(*THREE, "--rounds", "2", "--resume", str(tmp_path / "RANK" / "half.ckpt"))
    assert merged(results) == straight["weights"]


def test_one_file_for_all_is_asked_for_by_name_and_says_what_it_holds(straight: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "all.ckpt"
    results = start(*THREE, "--rounds", "1", "--save", str(path), "--gather")
    assert [file.name for file in tmp_path.iterdir()] == ["all.ckpt"]
    assert list(load(path)["clients"]) == ["clean", "blended", "fonts"]
    (said,) = results[0]["warnings"]
    assert "process 0 gets and writes the weights and optimiser states of ['blended', 'fonts']" in said
    (alone,) = start(*MASKED, "--rounds", "2", "--resume", str(path))
    assert alone["weights"] == straight["weights"]


def test_checkpoints_within_rounds_leave_no_file_of_those_that_are_replaced(tmp_path: Path) -> None:
    start(*THREE, "--rounds", "1", "--steps", "11", "--save-steps", str(tmp_path), "--keep", "1")  # after 5 and 10
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        f"step=10.ckpt{part}" for part in ("", ".part1", ".part2")
    ]


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
    assert message in trouble(*MASKED, "--rounds", "2", "--resume", str(tmp_path / "half.ckpt"))
