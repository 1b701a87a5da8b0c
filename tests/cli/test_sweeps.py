"""Sweeps as they are shipped: what an agent of W&B would start, trial by trial, without its server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from commands import parsed, refusal, rows
from fedlit.cli import main
from refused import slow

wandb = pytest.importorskip("wandb")

SHORT = [f"--trainer.{key}" for key in ("max_epochs=1", "limit_train_batches=2", "limit_val_batches=1",
         "limit_test_batches=1", "enable_checkpointing=false", "enable_model_summary=false")]  # fmt: skip
CONFIGS = Path(__file__).parents[2] / "configs"
SWEEPS = {path.stem: path for path in sorted((CONFIGS / "sweeps").glob("*.yaml"))}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WANDB_MODE", "offline")
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
    chosen = [[each[index % len(each)] for each in values] for index in range(count)]
    return [dict(zip(sweep["parameters"], each, strict=True)) for each in chosen]


def command_line(sweep: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """The words after ``fedlit fit`` that an agent starts, put together as in ``wandb.wandb_agent.Agent``."""
    from wandb.sdk.launch.sweeps import utils

    placed = utils.create_sweep_command_args({"args": {name: {"value": value} for name, value in values.items()}})
    placed |= {"program": [sweep["program"]], "env": ["/usr/bin/env"], "interpreter": ["python"]}
    words: list[str] = []
    for word in utils.create_sweep_command(list(sweep["command"])):
        words += placed[word[2:-1]] if word.startswith("${") else [word]
    assert words[:3] == ["/usr/bin/env", "fedlit", "fit"]
    return words[3:]


def run_as_agent(sweep: dict[str, Any], values: dict[str, Any], run_id: str, patch: pytest.MonkeyPatch) -> None:
    parameters = Path("wandb", "sweep-fedlit", f"config-{run_id}.yaml")
    parameters.parent.mkdir(parents=True, exist_ok=True)
    written = {"wandb_version": 1} | {name: {"value": value} for name, value in values.items()}
    parameters.write_text(yaml.safe_dump(written))
    for name, value in (("SWEEP_ID", "fedlit"), ("RUN_ID", run_id), ("SWEEP_PARAM_PATH", str(parameters))):
        patch.setenv(f"WANDB_{name}", value)
    wandb.teardown()  # an agent starts a process for each trial; here each must read its environment anew
    main(["fit", *command_line(sweep, values), *SHORT])


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[dict[str, Any], set[str]]]:
    """By run, what W&B has of its configuration, and the names of its metrics, when it is finished."""
    runs = {}
    finish = wandb.sdk.wandb_run.Run.finish

    def listen(run: Any, *args: Any, **kwargs: Any) -> None:
        runs[run.id] = (dict(run.config), set(run.summary.keys()))
        finish(run, *args, **kwargs)

    monkeypatch.setattr(wandb.sdk.wandb_run.Run, "finish", listen)
    return runs


def check_configured(values: dict[str, Any], config: Any) -> None:
    for name, value in values.items():
        if name != "config":
            section, *rest = name.split(".")
            inside = config
            for part in [section, "init_args", *rest] if section == "data" else [section, *rest]:
                inside = inside[part]
            assert inside == value


@pytest.mark.parametrize("name", [name if name == "methods_digits" else slow(name) for name in SWEEPS])
def test_trials_of_a_sweep_are_configured_as_it_says(name):
    sweep = yaml.safe_load(SWEEPS[name].read_text())
    assert sweep["metric"]["goal"] == "maximize"
    assert not sweep["metric"]["name"].startswith("oracle/")
    for config in sweep["parameters"].get("config", {"values": []})["values"]:
        assert (CONFIGS / f"{config}.yaml").is_file()
    first, *_, last = trials(sweep)
    for values in (first, last):
        (each,) = parsed(*command_line(sweep, values))
        check_configured(values, each.arguments)
    made = each.parser.instantiate(each.arguments)
    assert [*made.model.clients] == [*made.data.clients]


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEPS)
def test_the_first_trial_and_the_first_of_each_method_train(name, monkeypatch, logged):
    sweep = yaml.safe_load(SWEEPS[name].read_text())
    metric, methods = sweep["metric"]["name"], set()
    trained = [values for index, values in enumerate(trials(sweep)) if not index or "config" in values]
    for number, values in enumerate(trained):
        run_as_agent(sweep, values, f"trial{number}", monkeypatch)
        (folder,) = Path("runs").glob(f"*/trial{number}")
        config = yaml.safe_load((folder / "config.yaml").read_text())
        check_configured(values, config)
        methods.add(folder.parent.name)
        assert any(row.get(metric) for row in rows(folder / "metrics.csv"))
        assert (folder / "summary.json").is_file()
        online, metrics = logged[f"trial{number}"]
        assert metric in metrics
        assert {key: online[key] for key in values} == values
        assert online["model"]["class_path"] == config["model"]["class_path"]
    assert len(methods) == len(sweep["parameters"].get("config", {"values": [1]})["values"])


@pytest.mark.slow
def test_a_trial_that_starts_again_leaves_what_its_first_start_wrote(monkeypatch, logged):
    sweep = yaml.safe_load(SWEEPS["fedprox_digits"].read_text())
    values = trials(sweep)[0]
    for _ in range(2):
        run_as_agent(sweep, values, "trial", monkeypatch)
    assert {folder.parent.name for folder in Path("runs").rglob("summary.json")} == {"trial", "trial-1"}
    online, metrics = logged["trial"]
    assert sweep["metric"]["name"] in metrics
    assert {key: online[key] for key in values} == values


def test_a_trial_is_one_run(monkeypatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "fedlit")
    assert "a trial of a W&B sweep is one run, but this is 2" in refusal("fit", "--config", "experiments/digits")
