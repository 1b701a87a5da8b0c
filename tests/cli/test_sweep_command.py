"""``fedlit sweep``: W&B's trials, trained as runs of an experiment are, ranked without labels of the target."""

from __future__ import annotations

import csv
import json
import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedlit.cli import main
from fedlit.cli.sweep_file import SweepFile

ROOT = Path(__file__).parents[2]
SWEEPS = sorted((ROOT / "configs" / "sweeps").glob("*.yaml"))
COMMAND = ["${env}", "${program}", "fit", "${args}"]

RANDOM: dict[str, Any] = {
    "u": {"min": 0.0, "max": 1},
    "i": {"min": 1, "max": 9},
    "v": {"values": ["a", "b", "c", "d", "e"]},
    "p": {"values": [1, 2, 3], "probabilities": [0.2, 0.5, 0.3]},
    "lu": {"distribution": "log_uniform_values", "min": 1e-4, "max": 1e-1},
    "il": {"distribution": "inv_log_uniform_values", "min": 0.1, "max": 3.0},
    "ql": {"distribution": "q_log_uniform_values", "min": 1, "max": 300},
    "qu": {"distribution": "q_uniform", "min": 1, "max": 300, "q": 2.5},
    "n": {"distribution": "normal"},
    "qn": {"distribution": "q_normal", "mu": 3, "sigma": 10, "q": 2},
    "ln": {"distribution": "log_normal", "mu": 1},
    "qln": {"distribution": "q_log_normal", "q": 0.1},
    "be": {"distribution": "beta", "a": 2},
    "qb": {"distribution": "q_beta", "q": 0.05, "b": 3},
    "k": {"value": None},
    "nest": {"parameters": {"w": {"min": 1, "max": 3}}},
}
DRAWN: list[dict[str, Any]] = [
    {
        "be": 0.7892412146420775, "i": 7, "il": 1.4948489726825445, "k": None, "ln": 5.17082757567309,
        "lu": 0.058475640842054914, "n": -1.8956188975912576, "p": 3, "qb": 0.3, "ql": 170, "qln": 0.3, "qn": 2,
        "qu": 75.0, "u": 0.5437608592359304, "v": "c", "nest": {"w": 2},
    },
    {
        "be": 0.11451720215278664, "i": 2, "il": 0.2587196071746044, "k": None, "ln": 5.611633127301936,
        "lu": 0.0003011706436252439, "n": 0.831473810638375, "p": 2, "qb": 0.05, "ql": 1, "qln": 3.1, "qn": -6,
        "qu": 65.0, "u": 0.9824211088259253, "v": "e", "nest": {"w": 1},
    },
    {
        "be": 0.5378709582668751, "i": 9, "il": 0.6258906256602262, "k": None, "ln": 1.1916395206207702,
        "lu": 0.06651628772831239, "n": 0.49767076407995314, "p": 3, "qb": 0.1, "ql": 8, "qln": 0.4, "qn": -8,
        "qu": 20.0, "u": 0.3013591007694625, "v": "d", "nest": {"w": 3},
    },
]  # fmt: skip
"""What the engine of W&B (sweeps 0.3.0, ``random_search_next_runs``) draws from `RANDOM` after ``random.seed(5)``."""

GRID: dict[str, Any] = {
    "b": {"values": [1, 1.0, "x"]},
    "a": {"min": 0, "max": 1},
    "c": {"distribution": "q_uniform", "min": 0, "max": 1, "q": 0.5},
    "k": {"value": 7},
    "n": {"parameters": {"z": {"values": [3, 4]}, "y": {"value": "u"}}},
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


def written(**content: Any) -> str:
    path = Path("sweep.yaml")
    whole = {"program": "fedlit", "command": COMMAND, "method": "grid"} | content
    path.write_text(yaml.safe_dump({key: value for key, value in whole.items() if value is not None}))
    return str(path)


def nested(file: SweepFile, trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Settings as W&B has them, with nested parameters in mappings."""
    return [file._nested(values) for values in trials]


def test_random_trials_are_those_of_wandb() -> None:
    file = SweepFile.read(written(method="random", parameters=RANDOM))
    drawn = nested(file, file.trials("random", 3, seed=5))
    for ours, theirs in zip(drawn, DRAWN, strict=True):
        assert ours == {
            name: pytest.approx(value, rel=1e-12) if isinstance(value, float) else value
            for name, value in theirs.items()
        }
    assert nested(file, file.trials("random", 30, seed=5))[:3] == drawn
    assert file.trials("random", 3, seed=6)[0]["u"] != drawn[0]["u"]


def test_a_grid_is_that_of_wandb() -> None:
    """sorted by name, the last fastest, constants in it, 1 and 1.0 the same: as ``grid_search_next_runs`` has it."""
    file = SweepFile.read(written(parameters=GRID))
    expected = [
        {"a": a, "b": b, "c": c, "k": 7, "n": {"y": "u", "z": z}}
        for a in (0, 1)
        for b in (1.0, "x")
        for c in (0.0, 0.5)
        for z in (3, 4)
    ]
    assert nested(file, file.trials("grid", None, 0)) == expected
    assert nested(file, file.trials("grid", 5, 0)) == expected[:5]


def test_the_engine_of_wandb_gives_the_same_where_it_is_installed() -> None:
    pytest.importorskip("sweeps", reason="W&B's engine needs numpy before 2.0, so it is installed by hand")
    from sweeps.grid_search import grid_search_next_runs
    from sweeps.random_search import random_search_next_runs

    grid = SweepFile.read(written(parameters=GRID))
    found = grid_search_next_runs([], {"method": "grid", "parameters": GRID}, n=1000)
    theirs = [{name: each["value"] for name, each in run.config.items()} for run in found if run is not None]
    assert nested(grid, grid.trials("grid", None, 0)) == theirs
    file = SweepFile.read(written(method="random", parameters=RANDOM))
    random.seed(5)
    for ours, run in zip(
        nested(file, file.trials("random", 300, seed=5)),
        random_search_next_runs({"method": "random", "parameters": RANDOM}, n=300),
        strict=True,
    ):
        for name, value in ours.items():
            assert run.config[name]["value"] == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value)


def test_probabilities_are_kept() -> None:
    file = SweepFile.read(written(method="random", parameters={"p": RANDOM["p"], "n": RANDOM["n"]}))
    drawn = [values["p"] for values in file.trials("random", 4000, seed=0)]
    assert [drawn.count(value) / 4000 for value in (1, 2, 3)] == pytest.approx([0.2, 0.5, 0.3], abs=0.03)


@pytest.mark.parametrize(
    "placeholder", ["args", "args_no_hyphens", "args_no_equals", "args_no_boolean_flags", "args_json", "args_json_file"]
)
def test_words_are_those_of_wandbs_agent(placeholder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.sdk.launch.sweeps import utils

    monkeypatch.setenv("WHERE", "here")
    command = ["${env}", "${interpreter}", "-m", "fedlit.cli", "fit", "--x=${envvar:WHERE}/y", f"${{{placeholder}}}"]
    parameters = {
        "a.b": {"value": 1e-4},
        "c": {"value": [1, "x"]},
        "t": {"value": True},
        "f": {"value": False},
        "n": {"value": None},
    }
    file = SweepFile.read(written(parameters=parameters, command=command))
    values = {name: about["value"] for name, about in sorted(parameters.items())}
    told = utils.create_sweep_command_args({"args": {name: {"value": value} for name, value in values.items()}})
    told["args_json_file"] = told["args_json"]  # the file's text, which a configuration may be given as
    assert file.words(values) == ["--x=here/y", *told[placeholder]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"parameters": {"x": {"distribution": "log_uniform", "min": -3, "max": 0}}}, "write log_uniform_values"),
        ({"parameters": {"x": {"distribution": "cauchy", "min": 0, "max": 1}}}, "parameters.x must have values"),
        ({"parameters": {"x": {"min": 0.1, "max": 1.0}}}, "distribution uniform, which a grid has no values of"),
        ({"parameters": {"x": {"min": 2, "max": 1}}}, r"parameters.x.min must be below max \(1\), got 2"),
        ({"parameters": {"x": {"distribution": "log_uniform_values", "min": 0, "max": 1}}}, "min must be above 0"),
        ({"parameters": {"x": {"distribution": "normal", "mean": 0}}}, "may have mu, sigma, got {'mean': 0}"),
        ({"parameters": {"x": {"min": "1e-3", "max": 1}}}, "YAML takes it for a text, so write 0.001"),
        ({"parameters": {"x": {"values": []}}}, "parameters.x.values must be a list with at least one value"),
        (
            {"parameters": {"x": {"values": [1, 2], "probabilities": [0.5, 0.6]}}},
            "2 numbers, one for each value, and sum",
        ),
        ({"parameters": {"x": 3}}, "parameters.x must have values, value, or min and max, got 3"),
        ({"parameters": None}, "parameters must name what is swept"),
        ({"parameters": {"a.b": {"value": 1}, "a": {"parameters": {"b": {"value": 2}}}}}, "parameters has a.b twice"),
        ({"parameters": {"x": {"min": 0, "max": 99_999}}}, "its grid has 100000 trials: --trials N"),
        ({"metric": {"name": "oracle/target/acc"}}, "is of hidden labels, which nobody has who must choose"),
        ({"metric": {"name": "target/score", "goal": "max"}}, "metric.goal must be minimize or maximize, got 'max'"),
        ({"method": "bayes"}, "give --method random --trials N"),
        ({"method": "random"}, "random trials have no end: give --trials N, or run_cap"),
        ({"method": "griddy"}, "method must be grid, random or bayes, got 'griddy'"),
        ({"parametres": {}}, "no key 'parametres': did you mean 'parameters'?"),
        ({"job": "x"}, "job is for W&B's service alone"),
        ({"command": ["${env}", "${program}", "${args}"]}, "must start fedlit fit"),
        ({"program": "train.py", "command": None}, "must start fedlit fit.* it starts '.*train.py"),
        ({"command": [*COMMAND, "${args_hydra}"]}, r"\$\{args_hydra\}, and its placeholders must be of"),
        ({"command": "fedlit fit"}, "command must be a list of words"),
        ({"run_cap": 0}, "run_cap must be at least 1 trial, got 0"),
    ],
)
def test_what_cannot_be_run_is_told_with_the_way_out(content: dict[str, Any], message: str) -> None:
    path = written(**({"parameters": {"x": {"values": [1]}}} | content))
    with pytest.raises(SystemExit, match=message):
        main(["sweep", path])
    assert not Path("runs").exists()


def test_a_file_that_is_not_there_or_no_yaml_is_told(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"'nowhere.yaml' is neither"):
        main(["sweep", "nowhere.yaml"])
    Path("broken.yaml").write_text("method: [grid")
    with pytest.raises(SystemExit, match=r"broken.yaml: it is no YAML, and must be mended"):
        main(["sweep", "broken.yaml"])
    with pytest.raises(SystemExit):
        main(["sweep", str(SWEEPS[0]), "--trials", "0"])


@pytest.mark.parametrize("path", SWEEPS, ids=[path.stem for path in SWEEPS])
def test_trials_of_the_shipped_files_are_configured(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fedlit.cli.trials import Sweep

    file = SweepFile.read(str(path))
    method = "random" if file.method == "bayes" else file.method
    trials = file.trials(method, None if method == "grid" else 6, seed=0)
    sweep = Sweep(file, trials, [], jobs=1, fresh=False, wandb=False)
    for number in {0, len(trials) // 2, len(trials) - 1}:
        arguments = sweep.configuration(number).arguments
        assert arguments.trainer.logger is None  # of W&B's
        for name, value in trials[number].items():
            section, *rest = name.split(".")
            where = ".".join([section, "init_args", *rest]) if section == "data" else name
            assert name == "config" or arguments[where] == value
    assert len({str(trial) for trial in sweep.runs}) == len(trials)
    main(
        [
            "sweep",
            f"sweeps/{path.stem}",
            *(["--method=random"] if file.method == "bayes" else []),
            "--trials=2",
            "--list",
        ]
    )
    assert capsys.readouterr().out.count("fedlit fit --config=data/") == 2


# ---------------------------------------------------------------- trained

TINY = [
    *(
        "${env}",
        "${program}",
        "fit",
        "--config=data/heart_disease",
        "--config=methods/fedprox",
        "--config=loggers/wandb",
    ),
    *("--trainer.max_epochs=1", "--trainer.strategy.num_threads=1", "--trainer.enable_checkpointing=false"),
    *("--model.init_args.optimizer=torch.optim.SGD", "${args}"),
]
SCORE = {"name": "target/score", "goal": "maximize"}


def rows(name: str = "sweep") -> list[dict[str, str]]:
    with Path(f"runs/sweep_{name}/trials.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_sweep_ranks_goes_on_and_takes_what_it_has_tried(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)  # as where it is not installed
    lr = "model.init_args.optimizer.init_args.lr"
    parameters: dict[str, Any] = {lr: {"values": [0.001, 0.3]}, "seed_everything": {"values": [0, 1]}}
    main(["sweep", written(command=TINY, metric=SCORE, parameters=parameters)])
    printed = capsys.readouterr().out
    assert "run 4 of 4" in printed
    first = rows()
    assert [(row["trial"], row["state"], row[lr]) for row in first] == [
        ("1", "finished", "0.001"), ("2", "finished", "0.001"), ("3", "finished", "0.3"), ("4", "finished", "0.3"),
    ]  # fmt: skip
    for row in first:  # what the table has is what the run has logged and summed up
        folder = Path(row["folder"])
        with (folder / "metrics.csv").open() as file:
            logged = [float(each["target/score"]) for each in csv.DictReader(file) if each.get("target/score")]
        summary = json.loads((folder / "summary.json").read_text())
        assert float(row["target/score"]) == logged[-1] == pytest.approx(summary["target_score"])
        assert float(row["oracle_accuracy"]) == summary["oracle_accuracy"]
        assert (summary["method"], str(summary["seed"])) == (f"lr={row[lr]}", row["seed_everything"])
    means = {
        value: sum(float(row["target/score"]) for row in first if row[lr] == value) / 2 for value in ("0.001", "0.3")
    }
    best = max(means, key=lambda value: means[value])
    assert f"best on va_long_beach by target/score (the highest, no label of the target needed): lr={best}," in printed
    assert printed.count("(oracle)") >= 2
    place = printed.index("settings by target/score, the highest first")
    after = printed[place:]
    assert re.search(r"\n *(1, 2|3, 4) +([\d.]+) ", after)[2] == best  # type: ignore[index]

    # more values, an interrupted trial, and a repetition: only what is missing is trained
    times = {row["folder"]: (Path(row["folder"]) / "summary.json").stat().st_mtime_ns for row in first}
    (Path(first[1]["folder"]) / "summary.json").unlink()
    parameters[lr]["values"].insert(0, 0.1)
    main(["sweep", written(command=TINY, metric=SCORE, parameters=parameters), "--trials=5"])
    printed = capsys.readouterr().out
    assert "2 of 5 runs are finished already" in printed
    assert printed.count("run 4 of 5") == 1
    assert "run 3 of 5" not in printed
    now = rows()
    assert [row[lr] for row in now] == ["0.1", "0.1", "0.001", "0.001", "0.3"]
    assert now[3]["target/score"] == first[1]["target/score"]
    assert {row["folder"] for row in first[:3]} <= {row["folder"] for row in now}
    kept = [first[0]["folder"], first[2]["folder"]]
    assert all((Path(each) / "summary.json").stat().st_mtime_ns == times[each] for each in kept)


def test_a_trial_that_fails_does_not_end_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    path = written(command=TINY, metric=SCORE, parameters={"data.init_args.batch_size": {"values": [100000, 32]}})
    with pytest.raises(SystemExit, match="1 of 2 trials failed: the same command tries them again"):
        main(["sweep", path, "--", "--data.init_args.drop_last=true"])
    printed = capsys.readouterr().out
    assert "fedlit: run 1 of 2 (batch_size=100000) failed: " in printed
    assert (
        "best on va_long_beach by target/score (the highest, no label of the target needed): batch_size=32" in printed
    )
    assert [row["state"] for row in rows()] == ["failed", "finished"]


def test_settings_are_compared_within_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    """Two targets: each has a best one, and so has their average, as all settings were tried on both."""
    metric = {"name": "source/acc", "goal": "minimize"}
    parameters = {
        "config": {"values": ["methods/source_only", "methods/fedprox"]},
        "data.target": {"values": ["hungary", "cleveland"]},
    }
    command = [word for word in TINY if word != "--config=methods/fedprox" and "optimizer" not in word]
    main(["sweep", written(command=command, metric=metric, parameters=parameters)])
    printed = capsys.readouterr().out
    found = {(row["config"], row["data.target"]): float(row["source/acc"]) for row in rows()}
    names = {"methods/source_only": "SourceOnly", "methods/fedprox": "FedProx"}
    for target in ("hungary", "cleveland"):
        low = min(names, key=lambda config: found[config, target])
        assert f"best on {target} by source/acc (the lowest, no label of the target needed): {names[low]}, " in printed
    low = min(names, key=lambda config: found[config, "hungary"] + found[config, "cleveland"])
    assert f"best on average of 2 targets: {names[low]}, " in printed
    assert "FedProx - SourceOnly: " in printed  # the closing table of an experiment


def test_trials_that_log_no_such_metric_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    path = written(command=TINY, metric={"name": "val_loss"}, parameters={"model.init_args.mu": {"values": [0.1]}})
    with pytest.raises(SystemExit, match="1 of 1 trials failed"):
        main(["sweep", path])
    printed = capsys.readouterr().out
    assert "it has not logged 'val_loss', the metric of sweep.yaml: rank by one of " in printed
    assert "target/score" in printed
    assert "oracle/" not in printed
    assert "nothing is ranked: no trial has logged a number as 'val_loss'" in printed


def test_a_trial_is_one_run() -> None:
    path = written(command=[*TINY, "--seeds=[0,1]"], metric=SCORE, parameters={"model.init_args.mu": {"values": [0.1]}})
    with pytest.raises(
        SystemExit, match=r"a trial is one run from its start, but sweep.yaml has seeds: .*--seeds=null"
    ):
        main(["sweep", path])


@pytest.mark.slow
def test_trials_side_by_side_equal_those_one_after_the_other() -> None:
    path = written(command=TINY, metric=SCORE, parameters={"model.init_args.mu": {"values": [0.1, 1.0]}})
    main(["sweep", path])
    serial = [row["target/score"] for row in rows()]
    Path("runs").rename("serial")
    main(["sweep", path, "--jobs=2"])
    assert [row["target/score"] for row in rows()] == serial
    assert len([*Path("runs/sweep_sweep").glob("trial_*.txt")]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("path", SWEEPS, ids=[path.stem for path in SWEEPS])
def test_the_shipped_files_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--method=random"] if yaml.safe_load(path.read_text())["method"] == "bayes" else []
    short = ["--trainer.max_epochs=2", "--trainer.limit_train_batches=2"]
    main(["sweep", f"sweeps/{path.stem}", *more, "--trials=2", "--", *short])
    assert [row["state"] for row in rows(path.stem)] == ["finished", "finished"]
    assert "by target/score (the highest, no label of the target needed)" in capsys.readouterr().out


# ---------------------------------------------------------------- the page


def blocks(language: str) -> list[str]:
    text = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_page_has_a_sweep_and_commands_that_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    (content,) = blocks("yaml")
    Path("mine.yaml").write_text(content)
    commands = [line.split("#")[0] for block in blocks("bash") for line in block.splitlines() if "fedlit sweep" in line]
    assert len(commands) >= 5
    for command in commands:
        words = shlex.split(command.replace("WANDB_MODE=offline ", ""))
        assert words[:2] == ["fedlit", "sweep"]
        place = words.index("--") if "--" in words else len(words)
        main([*words[1:place], "--list", *words[place:]])
        first, *_ = capsys.readouterr().out.splitlines()
        assert first.startswith("1: fedlit fit --config=data/")


def test_the_pages_table_of_distributions_is_whole() -> None:
    from fedlit.cli.sweep_file import _DISTRIBUTIONS

    text = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE)) == set(_DISTRIBUTIONS)
