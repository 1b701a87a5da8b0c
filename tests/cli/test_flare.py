"""``fedlit flare``: the job that it writes, and what it refuses."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commands import refusal
from fedlit.cli.command import main

HEARTS = """
data: {class_path: fedlit.data.HeartDisease, init_args: {target: va_long_beach}}
model:
  class_path: fedlit.methods.FedAvg
  init_args: {extractor: {class_path: fedlit.models.MLP, init_args: {in_features: 38, hidden: [8]}}}
trainer: {max_epochs: 2, accelerator: cpu, strategy: {class_path: fedlit.FederatedStrategy}}
"""
SITES = "north:cleveland+hungary,south:switzerland,west:va_long_beach"


@pytest.fixture
def experiment(tmp_path: Path) -> str:
    file = tmp_path / "hearts.yaml"
    file.write_text(HEARTS)
    return str(file)


def test_a_job_has_what_its_parties_need(tmp_path, experiment, capsys):
    more = tmp_path / "more.yaml"
    more.write_text("trainer: {max_epochs: 3}")
    out = tmp_path / "jobs" / "hearts"
    words = ["--sites", SITES, "--out", str(out), "--patience=5", "--model.weighting", "uniform"]
    main(["flare", "--config", experiment, f"--config={more}", *words])
    assert f"nvflare job submit -j {out}" in capsys.readouterr().out
    meta = json.loads((out / "meta.json").read_text())
    assert meta["name"] == "hearts"
    assert meta["deploy_map"] == {"app": ["server", "north", "south", "west"]}
    configs = out / "app" / "config"
    assert (configs / "0-hearts.yaml").read_text() == HEARTS
    assert (configs / "1-more.yaml").read_text() == more.read_text()
    (workflow,) = json.loads((configs / "config_fed_server.json").read_text())["workflows"]
    assert workflow["path"] == "fedlit.flare.FedlitController"
    arguments = ["--config=0-hearts.yaml", "--config=1-more.yaml", "--model.weighting", "uniform"]
    assert workflow["args"] == {
        "sites": {"north": ["cleveland", "hungary"], "south": ["switzerland"], "west": ["va_long_beach"]},
        "arguments": arguments,
        "wait_for": 600.0,
        "patience": 5.0,
        "step_timeout": 7200.0,
    }
    (executor,) = json.loads((configs / "config_fed_client.json").read_text())["executors"]
    assert executor["tasks"] == ["fedlit"]
    assert executor["executor"] == {
        "path": "fedlit.flare.FedlitExecutor",
        "args": {"arguments": arguments, "wait_for": 600.0, "patience": 5.0},
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sites", "north,north"], r"--sites must be names, each once .* got 'north' twice"),
        (["--sites", "North,north"], r"--sites \['North', 'north'\] differ in capitals alone: rename one"),
        (["--sites", "north:a+b,south:b"], "has client 'b' at two sites"),
        (["--sites", "north,south"], r"has the clients \['north', 'south'\], but the experiment's are \['cleveland', "),
        (["--sites", SITES, "--seeds=[0, 1]"], "a job of FLARE is for one run, but this is 2"),
        (["--sites", SITES, "--patience=0"], "--patience must be positive seconds, got 0.0"),
    ],
)
def test_what_is_no_job_is_refused(tmp_path, experiment, words, message):
    with pytest.raises(SystemExit, match=message):
        main(["flare", "--config", experiment, *words, "--out", str(tmp_path / "job")])
    assert not (tmp_path / "job").exists()


def test_data_that_are_at_the_sites_alone_need_not_be_here(tmp_path):
    """As the experiment of examples/three_hospitals: it names clients and classes, and each site its table."""
    tables = "data: {class_path: CSVDomains, init_args: {clients: [a, b], classes: [n, y], label: y, target: b}}\n"
    file = tmp_path / "tables.yaml"
    file.write_text(tables + "model:" + HEARTS.partition("model:")[2])
    assert "has the clients ['a', 'c'], but the experiment's are ['a', 'b']" in refusal(
        "flare", "--config", str(file), "--sites", "a,c", "--out", str(tmp_path / "job")
    )
    main(["flare", "--config", str(file), "--sites", "a,b", "--out", str(tmp_path / "job")])
    assert (tmp_path / "job" / "meta.json").is_file()


def test_a_folder_that_is_there_is_not_written_over_and_a_site_outside_flare_says_who_starts_it(experiment):
    words = ["--config", experiment]
    assert "is there already: give a new folder" in refusal("flare", *words, "--sites", SITES, "--out", ".")
    assert "flare site is started by NVIDIA FLARE" in refusal("flare", "site", *words)


def test_the_executor_starts_a_killed_process_again_and_no_other(monkeypatch, tmp_path):
    pytest.importorskip("nvflare")
    from nvflare.apis.fl_constant import ReturnCode
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable
    from nvflare.apis.signal import Signal

    from fedlit import flare

    class Context(FLContext):
        def get_engine(self) -> None:
            return None

    monkeypatch.setattr(flare, "_arguments", lambda fl_ctx, arguments: [])
    monkeypatch.setattr(flare, "_places", lambda fl_ctx: (tmp_path, tmp_path / "output", tmp_path))
    for codes, expected in (
        ([0], ReturnCode.OK),
        ([-9, -11, 0], ReturnCode.OK),
        ([-9, 2], ReturnCode.EXECUTION_EXCEPTION),
        ([-9] * 20, ReturnCode.EXECUTION_EXCEPTION),
    ):
        left = list(codes)
        executor = flare.FedlitExecutor([])
        monkeypatch.setattr(executor, "_watch", lambda *_, left=left: left.pop(0))
        assert executor.execute(flare.TASK, Shareable(), Context(), Signal()).get_return_code() == expected
        assert len(left) == (14 if len(codes) == 20 else 0)
    assert executor.execute("train", Shareable(), Context(), Signal()).get_return_code() == ReturnCode.TASK_UNKNOWN


def test_a_process_is_watched_to_its_end_or_to_that_of_the_job(capfd, tmp_path):
    """Its output is in a file of the site alone: FLARE sends logs to its server."""
    pytest.importorskip("nvflare")
    from nvflare.apis.signal import Signal

    from fedlit.flare import FedlitExecutor

    executor, signal, output = FedlitExecutor([]), Signal(), tmp_path / "runs" / "output"
    command = [sys.executable, "-c", "import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)"]
    assert executor._watch(command, os.environ, signal, output) == 3
    assert sorted(output.read_text().split()) == ["one", "two"]
    assert output.stat().st_mode & 0o077 == 0
    assert "two" not in "".join(capfd.readouterr())
    signal.trigger(True)
    assert executor._watch([sys.executable, "-c", "import time; time.sleep(60)"], os.environ, signal, output) == -15


@pytest.mark.parametrize(
    "method", [pytest.param("FedAvg", marks=pytest.mark.packaging), pytest.param("FedMMD", marks=pytest.mark.slow)]
)
def test_a_job_in_the_simulator_ends_in_the_model_of_one_process(tmp_path, experiment, method):
    pytest.importorskip("nvflare")
    words = ["--trainer.strategy.init_args.privacy=PairwiseMasking", "--trainer.strategy.init_args.local_steps=3"]
    words += [] if method == "FedAvg" else ["--model=FedMMD", "--model.warmup_rounds=1"]
    main(["fit", "--config", experiment, *words, f"--trainer.default_root_dir={tmp_path / 'one'}"])
    main(["flare", "--config", experiment, *words, "--sites", SITES, "--out", str(tmp_path / "job")])
    place = tmp_path / "workspace"
    (place / "local").mkdir(parents=True)
    (place / "local" / "resources.json").write_text('{"format_version": 2, "class_allow_list": ["fedlit.flare"]}')
    nvflare = Path(sys.executable).with_name("nvflare")
    command = [str(nvflare), "simulator", str(tmp_path / "job"), "-w", str(place), "-c", "north,south,west", "-t", "3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    hashes = []
    for folder in (tmp_path / "one", place / "west"):
        (summary,) = folder.rglob("summary.json")
        hashes.append(json.loads(summary.read_text())["target_sha256"])
    assert hashes[0] == hashes[1]


@pytest.mark.packaging
def test_a_job_that_a_sites_policy_does_not_allow_ends_there(tmp_path, experiment):
    """Before the mend the job trained, under `Plain`; its server reads no more than that the policy refuses."""
    pytest.importorskip("nvflare")
    main(["flare", "--config", experiment, "--sites", SITES, "--out", str(tmp_path / "job")])
    place = tmp_path / "workspace"
    (place / "local").mkdir(parents=True)
    (place / "local" / "resources.json").write_text('{"format_version": 2, "class_allow_list": ["fedlit.flare"]}')
    (place / "local" / "policy.yaml").write_text("backends: [PairwiseMasking]")
    nvflare = Path(sys.executable).with_name("nvflare")
    command = [str(nvflare), "simulator", str(tmp_path / "job"), "-w", str(place), "-c", "north,south,west", "-t", "3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False)
    said = done.stdout + done.stderr
    assert "has ended (its policy refuses the job): its own output says more" in said
    assert "backends must be" not in said
    outputs = list((place).rglob("fedlit-runs/*.log"))
    assert any("backends must be one of ['PairwiseMasking'], got 'Plain'" in each.read_text() for each in outputs)
    assert not list(place.rglob("summary.json"))


@pytest.mark.parametrize("version", ["2.8.1", "3.0.0"])
def test_another_flare_is_refused_with_its_version(version, monkeypatch):
    nvflare = pytest.importorskip("nvflare")
    monkeypatch.setattr(nvflare, "__version__", version)
    monkeypatch.delitem(sys.modules, "fedlit.flare", raising=False)
    with pytest.raises(ImportError, match=rf"2\.9 or a later 2\.x, and this is {re.escape(version)}: pip install"):
        importlib.import_module("fedlit.flare")
