"""What MLflow, W&B and TensorBoard have of a run, read back from their stores and from an MLflow server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
from safetensors.torch import load_file

import fedlit
from fedlit.callbacks import Artifacts, MLflow, RunRecord
from fedlit.callbacks.tracking import parameters_of, public, tags_of
from fedlit.cli import main
from fedlit.privacy import PairwiseMasking
from processes import free_port
from small_federation import Blobs, build, trainer
from summaries import summary, write_run

RUN = ["fit", "--config=experiments/first", "--trainer.max_epochs=2", "--seeds=null", "--compare=null"]
FILES = {"config.yaml", "summary.json", "ledger.csv", "metrics.csv", "embeddings.csv", "predictions.csv"} | {
    *("model", "report.html", "table.md")
}


@pytest.fixture(autouse=True)
def nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "WANDB_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("WANDB_MODE", "offline")


def runs_at(uri: str) -> tuple[Any, list[Any]]:
    """An MLflow client, and the runs of the experiment fedlit, the first one first."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("fedlit")
    assert experiment is not None
    return client, list(client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"]))


def test_settings_have_one_key_each() -> None:
    config = {
        "seed_everything": 0,
        "data": {"class_path": "fedlit.data.Digits", "init_args": {"target": "fonts", "clients": None}},
        "model": {
            "class_path": "fedlit.methods.FedAvg",
            "init_args": {
                "optimizer": {
                    "class_path": "torch.optim.SGD",
                    "init_args": {"lr": 0.1},
                    "dict_kwargs": {"fused": True},
                },
                "hidden": [4, 8],
            },
        },
        "trainer": {"max_epochs": 3, "callbacks": [{"class_path": "fedlit.callbacks.Validators"}], "logger": {"a": 1}},
    }
    assert parameters_of(public(config, hides=False)) == {
        "seed_everything": 0,
        "data": "Digits",
        "data.target": "fonts",
        "model": "FedAvg",
        "model.optimizer": "SGD",
        "model.optimizer.lr": 0.1,
        "model.optimizer.fused": True,
        "model.hidden": "4, 8",
        "trainer.max_epochs": 3,
        "trainer.callbacks.0": "Validators",
    }


def test_tags_have_the_revision_of_the_working_directory(tmp_path: Path) -> None:
    assert "git" not in tags_of("FedAvg", "t", 1, [])
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    (tmp_path / "a").write_text("1")
    for words in (["init", "-q"], ["add", "a"], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], check=True)
    revision = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert tags_of("FedAvg", "t", 1, ["B", "A", "A"]) == {
        **{"method": "FedAvg", "target": "t", "seed": "1", "backend": "A, B", "fedlit": fedlit.__version__},
        "git": revision,
    }
    (tmp_path / "a").write_text("2")
    assert tags_of("FedAvg", "t", 1, [])["git"] == f"{revision}-dirty"


def test_a_file_without_a_server_has_settings_tags_numbers_and_files(tmp_path: Path) -> None:
    main([*RUN, "--config=loggers/mlflow"])
    client, (run,) = runs_at(f"sqlite:///{tmp_path}/mlflow.db")
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "SourceOnly, fonts, seed 0"
    given = {"method": "SourceOnly", "target": "fonts", "seed": "0", "backend": "Plain", "fedlit": fedlit.__version__}
    assert run.data.tags.items() >= given.items()
    wanted = {"model": "SourceOnly", "model.optimizer.lr": "0.1", "data.target": "fonts", "trainer.max_epochs": "2"}
    assert run.data.params.items() >= wanted.items()
    assert {artifact.path for artifact in client.list_artifacts(run.info.run_id)} == FILES
    (folder,) = tmp_path.glob("runs/SourceOnly/version_*")
    loss = [each.value for each in client.get_metric_history(run.info.run_id, "train/loss")]
    column = [row.split(",") for row in (folder / "metrics.csv").read_text().splitlines()]
    place = column[0].index("train/loss")
    assert loss == pytest.approx([float(row[place]) for row in column[1:] if row[place]])
    assert 0 < run.data.metrics["oracle/target/acc"] < 1
    kept = client.download_artifacts(run.info.run_id, "model", str(tmp_path))
    sent, exported = (load_file(Path(at, "model.safetensors")) for at in (kept, folder / "model"))
    assert sent.keys() == exported.keys()
    assert all(torch.equal(sent[name], exported[name]) for name in sent)


def test_a_server_that_does_not_answer_ends_no_run_and_gets_it_later(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(UserWarning, match="does not answer"):
        main([*RUN, "--config=loggers/mlflow", f"--trainer.logger.tracking_uri=http://127.0.0.1:{free_port()}"])
    assert "send it with fedlit send runs/SourceOnly/version_0" in capfd.readouterr().err
    assert Path("runs/SourceOnly/version_0/model/model.safetensors").is_file()
    main(["send", "runs/SourceOnly/version_0", "--config=loggers/mlflow"])
    client, (run,) = runs_at(f"sqlite:///{tmp_path}/mlflow.db")
    assert run.data.params["model.optimizer.lr"] == "0.1"
    assert run.data.tags["backend"] == "Plain"
    assert {artifact.path for artifact in client.list_artifacts(run.info.run_id)} == FILES
    assert len(client.get_metric_history(run.info.run_id, "train/loss")) == 2


def test_a_script_sends_as_much_and_no_samples_if_told(tmp_path: Path) -> None:
    logger = MLflow(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    data, module = Blobs(), build()
    run = trainer(2, [RunRecord("runs/mine"), Artifacts(predictions=False)], tmp_path, logger=[logger])
    run.fit(module, data)
    run.test(module, data, verbose=False)
    logger.finalize("success")
    client, (there,) = runs_at(f"sqlite:///{tmp_path}/mlflow.db")
    assert there.data.tags["method"] == type(module).__name__
    assert there.data.params["model"] == type(module).__name__
    names = {artifact.path for artifact in client.list_artifacts(there.info.run_id)}
    assert names >= {"settings.yaml", "report.html", "table.md", "summary.json"}
    assert not names & {"embeddings.csv", "predictions.csv"}


def test_what_cannot_be_sent_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/metrics.csv").write_text("step,train/loss\n0,1.0\n")

    def refusal(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["send", *words])
        return f"{ended.value} {capsys.readouterr().err}"

    write_run(Path("runs/c"), {"seed_everything": 1}, "step,train/loss\n0,1.0\n", summary("FedAvg", "x", 0.5))
    assert "no logger but CSV files" in refusal("runs/c")
    assert "has not ended" in refusal("runs", "--config=loggers/mlflow"), "before the others are sent"
    assert not Path("mlflow.db").exists()
    assert "has not ended" in refusal("runs/a", "--config=loggers/mlflow")
    assert "which does not exist" in refusal("runs/b", "--config=loggers/mlflow")
    assert "'loggers/mlfow' cannot be read" in refusal("runs/c", "--config=loggers/mlfow")
    assert "--trainer.logger" in refusal("runs/a", "--config=loggers/mlflow", "--tracking_uri=x")


def test_of_a_run_that_hides_messages_neither_seat_nor_paths_are_sent_nor_links_nor_checkpoints(tmp_path: Path) -> None:
    config = {"seat": {"key": "certificates/north.key"}, "data": {"init_args": {"root": "/srv/patients/all.csv"}}}
    hidden = summary("FedAvg", "x", 0.5, backends={"weights": PairwiseMasking().describe()})
    folder = write_run(Path("runs/a"), config, "step,train/loss\n0,1.0\n", hidden)
    Path("secret.csv").write_text("secret")
    for name in ("secret.txt", "id_rsa", "x.ckpt", "run.releases"):
        (folder / name).write_text("secret")
    (folder / "link.csv").symlink_to(tmp_path / "secret.csv")
    (folder / "model").mkdir()
    (folder / "model" / "model.safetensors").symlink_to(tmp_path / "secret.csv")
    main(["send", "runs/a", "--config=loggers/mlflow"])
    client, (run,) = runs_at(f"sqlite:///{tmp_path}/mlflow.db")
    sent = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert sent == {"config.yaml", "metrics.csv", "report.html", "summary.json", "table.md"}
    everything = str(run.data.params) + Path(client.download_artifacts(run.info.run_id, "config.yaml")).read_text()
    assert "all.csv" in everything
    assert "/srv" not in everything
    assert "north.key" not in everything
    assert "git" not in run.data.tags, "the revision would be that of the folder in which it is sent"
    assert run.data.tags["mlflow.source.name"] == "fedlit"


def test_a_run_is_sent_once_unless_it_is_asked_for_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(Path("runs/a"), {"seed_everything": 1}, "", summary("FedAvg", "x", 0.5))
    (folder / "metrics.csv").unlink()
    for words in ((), (), ("--again",), ("--trainer.logger.experiment_name=other",)):
        main(["send", "runs", "--config=loggers/mlflow", *words])
    assert capsys.readouterr().out.count("was sent there at") == 1
    assert len(runs_at(f"sqlite:///{tmp_path}/mlflow.db")[1]) == 2, "and one of the other experiment"


@pytest.mark.slow
def test_wandb_and_tensorboard_have_the_same(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    main([*RUN, "--config=loggers/wandb", "--trainer.callbacks+=Artifacts"])
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*.wandb"))
    for text in (b"model.optimizer.lr", b"method:SourceOnly", b"backend:Plain", b"report.html", b"model.safetensors"):
        assert text in written
    main(["send", "runs/SourceOnly/version_0", "--config=loggers/tensorboard"])
    (events,) = tmp_path.rglob("events.out.*")
    found = event_accumulator.EventAccumulator(str(events.parent)).Reload()
    assert "SourceOnly" in str(found.Tensors("table/text_summary"))
    assert len(found.Scalars("train/loss")) == 2


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Address and process of an MLflow server on the loopback, with SQLite."""
    port = free_port()
    store, files = f"sqlite:///{tmp_path}/server.db", str(tmp_path / "files")
    words = ["server", "--host=127.0.0.1", f"--port={port}", f"--backend-store-uri={store}", "--workers=1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", *words, f"--artifacts-destination={files}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + 120
    while True:
        try:
            with urlopen(f"{address}/health", timeout=1):
                break
        except (URLError, OSError):
            assert time.monotonic() < end
            time.sleep(0.5)
    yield address, process
    stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server with its workers."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        return
    process.wait()


@pytest.mark.slow
def test_a_server_gets_a_run_and_its_end_while_another_runs_does_not_end_that(
    server: tuple[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    address, process = server
    words = [*RUN, "--config=loggers/mlflow", f"--trainer.logger.tracking_uri={address}"]
    main(words)
    client, (run,) = runs_at(address)
    assert run.info.status == "FINISHED"
    assert {artifact.path for artifact in client.list_artifacts(run.info.run_id)} == FILES
    report = Path(client.download_artifacts(run.info.run_id, "report.html", str(tmp_path)))
    assert "SourceOnly on fonts" in report.read_text(encoding="utf-8")
    with pytest.warns(UserWarning, match="does not answer"):
        main([*words, f"--trainer.callbacks+={__name__}.EndsServer", f"--trainer.callbacks.pid={process.pid}"])
    assert Path("runs/SourceOnly/version_1/summary.json").is_file()


class EndsServer(fedlit.callbacks.RoundTimer):
    """Kills a process group after the first round."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.pid = pid

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            os.killpg(self.pid, 9)
            time.sleep(1)
