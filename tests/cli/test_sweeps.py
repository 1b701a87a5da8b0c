"""Sweeps as they are shipped: what an agent of W&B would start, trial by trial, without its server."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedlit.cli import main
from fedlit.cli.experiment import Experiment

wandb = pytest.importorskip("wandb")

SHORT = [f"--trainer.{key}" for key in ("max_epochs=1", "limit_train_batches=2", "limit_val_batches=1",
         "limit_test_batches=1", "enable_checkpointing=false", "enable_model_summary=false")]  # fmt: skip
SWEEPS = sorted((Path(__file__).parents[2] / "configs" / "sweeps").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _offline_and_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    yield
    wandb.teardown()


def trials(sweep: dict[str, Any]) -> list[dict[str, Any]]:
    """Trials that have every value of every parameter at least once; of a range, its ends and its mean."""
    values = []
    for about in sweep["parameters"].values():
        if "values" in about:
            values.append(about["values"])
        else:
            assert about["distribution"] == "log_uniform_values"
            values.append([about["min"], (about["min"] * about["max"]) ** 0.5, about["max"]])
    count = max(3, *map(len, values))
    chosen = [[each[place % len(each)] for each in values] for place in range(count)]
    return [dict(zip(sweep["parameters"], each, strict=True)) for each in chosen]


def command_line(sweep: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """The words that an agent starts, put together as in ``wandb.wandb_agent.Agent``."""
    from wandb.sdk.launch.sweeps import utils

    told = utils.create_sweep_command_args({"args": {name: {"value": value} for name, value in values.items()}})
    told |= {"program": [sweep["program"]], "env": ["/usr/bin/env"], "interpreter": ["python"]}
    words: list[str] = []
    for word in utils.create_sweep_command(list(sweep["command"])):
        words += told[word[2:-1]] if word.startswith("${") else [word]
    return words


def run_as_agent(
    path: Path, values: dict[str, Any], run_id: str, monkeypatch: pytest.MonkeyPatch, *more: str
) -> dict[str, Any]:
    """One trial in this process, with the environment that an agent gives it; returns the sweep."""
    from wandb.sdk.launch.sweeps import utils

    sweep = utils.load_sweep_config(str(path))
    assert sweep is not None
    parameters = Path("wandb", "sweep-fedlit", f"config-{run_id}.yaml")
    parameters.parent.mkdir(parents=True, exist_ok=True)
    written = {"wandb_version": 1} | {name: {"value": value} for name, value in values.items()}
    parameters.write_text(yaml.safe_dump(written))
    for name, value in (("SWEEP_ID", "fedlit"), ("RUN_ID", run_id), ("SWEEP_PARAM_PATH", str(parameters))):
        monkeypatch.setenv(f"WANDB_{name}", value)
    env, program, *arguments = command_line(sweep, values)
    assert [env, program] == ["/usr/bin/env", "fedlit"]
    wandb.teardown()  # an agent starts a process for each trial; here each must read its environment anew
    main([*arguments, *more])
    return sweep


@pytest.fixture
def told_wandb(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[dict[str, Any], set[str]]]:
    """By run, what W&B was told of its configuration, and the names of its metrics, when it was finished."""
    told = {}
    finish = wandb.sdk.wandb_run.Run.finish

    def listen(run: Any, *args: Any, **kwargs: Any) -> None:
        told[run.id] = (dict(run.config), set(run.summary.keys()))
        finish(run, *args, **kwargs)

    monkeypatch.setattr(wandb.sdk.wandb_run.Run, "finish", listen)
    return told


class InstantiatedError(Exception):
    """Method, data and Trainer of a run are there, which goes no further."""


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each run was configured with; those of ``fast_dev_run`` end when all is instantiated."""
    seen = []
    start = Experiment.start

    def listen(self: Experiment, run: Any) -> Any:
        seen.append(self.parsed.arguments)
        if self.parsed.arguments.trainer.fast_dev_run:
            made = self.parsed.parser.instantiate_classes(self.parsed.arguments)
            assert [*made.model.clients] == [*made.data.clients]
            raise InstantiatedError
        return start(self, run)

    monkeypatch.setattr(Experiment, "start", listen)
    return seen


def found(config: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        config = config[part]
    return config


LONG = ("fed_dadil_digits", "methods_digits", "fed_mmd_heart", "fedgp_heart", "fedrf_tca_digits")


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=pytest.mark.slow if p.stem in LONG else ()) for p in SWEEPS]
)
def test_trials_of_a_sweep_in_one_folder(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told_wandb: dict[str, tuple[dict[str, Any], set[str]]],
    configured: list[Any],
) -> None:
    """The first, and the first of each method, train; others have the same method and data, and are instantiated."""
    swept = trials(yaml.safe_load(path.read_text()))
    logged = [values for place, values in enumerate(swept) if not place or "config" in values]
    for number, values in enumerate(swept):
        trains = values in logged
        with nullcontext() if trains else pytest.raises(InstantiatedError):
            more = SHORT if trains else ["--trainer.fast_dev_run=1"]
            run_as_agent(path, values, f"trial{number}", monkeypatch, *more)
    sweep = yaml.safe_load(path.read_text())
    assert sweep["metric"]["goal"] == "maximize"
    metric = sweep["metric"]["name"]
    assert not metric.startswith("oracle/")
    for values, config in zip(swept, configured, strict=True):
        check_configured(values, config)
    methods = set()
    for number, values in enumerate(logged):
        (folder,) = Path("runs").glob(f"*/trial{number}")
        config = yaml.safe_load((folder / "config.yaml").read_text())
        check_configured(values, config)
        methods.add(folder.parent.name)
        with (folder / "metrics.csv").open() as file:
            assert any(row.get(metric) for row in csv.DictReader(file))
        assert (folder / "summary.json").is_file()
        online, metrics = told_wandb[f"trial{number}"]
        assert metric in metrics
        assert {name: online[name] for name in values} == values
        assert online["model"]["class_path"] == config["model"]["class_path"]
    if "config" in sweep["parameters"]:
        assert len(methods) == len(sweep["parameters"]["config"]["values"])


def check_configured(values: dict[str, Any], config: Any) -> None:
    for name, value in values.items():
        if name != "config":
            section, *rest = name.split(".")
            where = ".".join([section, "init_args", *rest]) if section == "data" else name
            assert found(config, where) == value


def test_a_trial_that_starts_again_leaves_what_its_first_start_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    path = next(path for path in SWEEPS if path.stem == "methods_digits")
    values = trials(yaml.safe_load(path.read_text()))[0]
    for _ in range(2):
        run_as_agent(path, values, "trial", monkeypatch, *SHORT)
    assert {folder.parent.name for folder in Path("runs").rglob("summary.json")} == {"trial", "trial-1"}


def test_a_trial_is_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SWEEP_ID", "fedlit")
    with pytest.raises(SystemExit, match="a trial of a W&B sweep is one run, but this is 2"):
        main(["fit", "--config", "experiments/digits"])


def test_runs_of_an_experiment_are_runs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    main(["fit", "--config", "experiments/digits", "--config", "loggers/wandb", *SHORT])
    assert len(list(Path("runs", "wandb").glob("offline-run-*"))) == 2
    assert sorted(path.parent.parent.name for path in Path("runs").rglob("summary.json")) == ["FedAvg", "SourceOnly"]
    assert wandb.run is None
