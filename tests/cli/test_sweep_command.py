"""``fedlit sweep``: W&B's trials, trained as runs of an experiment are, ranked without labels of the target."""

from __future__ import annotations

import csv
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from jsonargparse import Namespace

from commands import refusal
from fedlit.cli import main
from fedlit.cli.arguments import type_true
from fedlit.cli.distributions import DISTRIBUTIONS
from fedlit.cli.sweep import SweepFile
from fedlit.cli.trials import Ranking, Sweep, Trial, name_trials
from refused import refused, slow
from summaries import summary

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
]  # fmt: skip
"""What the engine of W&B (sweeps 0.3.0, ``random_search_next_runs``) draws from `RANDOM` after ``random.seed(5)``."""

GRID: dict[str, Any] = {
    "b": {"values": [1, 1.0, "x"]},
    "a": {"min": 0, "max": 1},
    "c": {"distribution": "q_uniform", "min": 0, "max": 1, "q": 0.5},
    "k": {"value": 7},
    "n": {"parameters": {"z": {"values": [3, 4]}, "y": {"value": "u"}}},
}


def written(**content: Any) -> str:
    path = Path("sweep.yaml")
    whole = {"program": "fedlit", "command": COMMAND, "method": "grid"} | content
    path.write_text(yaml.safe_dump({key: value for key, value in whole.items() if value is not None}))
    return str(path)


def nested(file: SweepFile, trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Settings as W&B has them, with nested parameters in mappings."""
    return [file._nested(values) for values in trials]


def test_random_trials_are_those_of_wandb():
    file = SweepFile.read(written(method="random", parameters=RANDOM))
    drawn = nested(file, file.trials("random", 2, seed=5))
    for ours, theirs in zip(drawn, DRAWN, strict=True):
        assert ours == {
            name: pytest.approx(value, rel=1e-12) if isinstance(value, float) else value
            for name, value in theirs.items()
        }
    assert nested(file, file.trials("random", 30, seed=5))[:2] == drawn
    assert file.trials("random", 3, seed=6)[0]["u"] != drawn[0]["u"]


def test_a_grid_is_that_of_wandb():
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


@pytest.mark.parametrize(
    "placeholder", ["args", "args_no_hyphens", "args_no_equals", "args_no_boolean_flags", "args_json", "args_json_file"]
)
def test_words_are_those_of_wandbs_agent(placeholder, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.sdk.launch.sweeps import utils

    monkeypatch.setenv("WHERE", "here")
    command = ["${env}", "${interpreter}", "-m", "fedlit.cli", "fit", "--x=${envvar:WHERE}/y", f"${{{placeholder}}}"]
    values = {"a.b": 1e-4, "c": [1, "x"], "f": False, "n": None, "t": True}
    parameters = {name: {"value": value} for name, value in values.items()}
    file = SweepFile.read(written(parameters=parameters, command=command))
    told = utils.create_sweep_command_args({"args": {name: {"value": value} for name, value in values.items()}})
    told["args_json_file"] = told["args_json"]  # the file's text, which a configuration may be given as
    assert file.words(values) == ["--x=here/y", *told[placeholder]]


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("parameters.x", {"parameters": {"x": {"distribution": "cauchy", "min": 0, "max": 1}}}),
    ("parameters.x", {"parameters": {"x": {"min": 0.1, "max": 1.0}}}),
    ("parameters.x.min", {"parameters": {"x": {"min": 2, "max": 1}}}),
    ("parameters.x.sigma", {"parameters": {"x": {"distribution": "normal", "sigma": 0}}}),
    ("parameters.x", {"parameters": {"x": {"distribution": "int_uniform", "min": 0.5, "max": 3}}}),
    ("parameters.x.min", {"parameters": {"x": {"min": "1e-3", "max": 1}}}),
    ("parameters.x.probabilities", {"parameters": {"x": {"values": [1, 2], "probabilities": [0.5, 0.6]}}}),
    ("parameters", {"parameters": None}),
    ("metric.goal", {"metric": {"name": "target/score", "goal": "max"}}),
    ("method", {"method": "griddy"}),
    ("command", {"command": "fedlit fit"}),
    ("run_cap", {"run_cap": 0}),
]


@pytest.mark.parametrize(("argument", "content"), REFUSED)
def test_what_a_file_may_not_have_is_refused(argument, content):
    path = written(**({"parameters": {"x": {"values": [1]}}} | content))
    with refused(argument):
        SweepFile.read(path).trials("grid", None, 0)
    assert refusal("sweep", path).startswith(f"fedlit: {path}: {argument} must be")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"parameters": {"x": {"min": "1e-3", "max": 1}}}, "YAML takes it for a text, so write 0.001"),
        ({"parameters": {"a.b": {"value": 1}, "a": {"parameters": {"b": {"value": 2}}}}}, "parameters has a.b twice"),
        ({"parameters": {"x": {"min": 0, "max": 99_999}}}, "its grid has 100000 trials: --trials N"),
        ({"metric": {"name": "oracle/target/acc"}}, "is of hidden labels"),
        ({"metric": {"name": "target/score"}}, "write goal: maximize"),
        ({"method": "bayes"}, "give --method random --trials N"),
        ({"method": "random"}, "random trials have no end"),
        ({"parametres": {}}, "no key 'parametres': did you mean 'parameters'?"),
        ({"job": "x"}, "job is for W&B's service alone"),
        ({"command": ["${env}", "${program}", "${args}"]}, "must start fedlit fit"),
        ({"command": [*COMMAND, "${args_hydra}"]}, "${args_hydra}, and its placeholders must be of"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_way_out(content, message):
    assert message in refusal("sweep", written(**({"parameters": {"x": {"values": [1]}}} | content)))
    assert not Path("runs").exists()


def test_a_file_that_is_not_there_or_no_yaml_is_refused():
    with refused("FILE", FileNotFoundError):
        SweepFile.read("nowhere.yaml")
    assert "'nowhere.yaml'" in refusal("sweep", "nowhere.yaml")
    Path("broken.yaml").write_text("method: [grid")
    assert "broken.yaml: it is no YAML" in refusal("sweep", "broken.yaml")
    refusal("sweep", str(SWEEPS[0]), "--trials", "0")


ARRIVE: dict[str, Any] = {
    "data.init_args.target_labels": 1.0,
    "model.init_args.warmup_rounds": 1e-05,
    "trainer.limit_train_batches": 1,
    "model.init_args.local_norm": True,
    "model.init_args.trust_region": None,
    "model.init_args.class_weights": [1.0, 1e-05],
    "model.init_args.param_groups": [{"part": "classifier", "lr": float("inf"), "weight_decay": None}],
    "trainer.default_root_dir": "1.0",
}
SPELT = ("no_hyphens", "no_equals", "no_boolean_flags", "json", "json_file")


@pytest.mark.parametrize("placeholder", ["args", *(slow(f"args_{each}") for each in SPELT)])
def test_values_of_a_sweep_arrive_with_their_types(placeholder):
    before = ["-c"] if "json" in placeholder else []
    command = ["${env}", "${program}", "fit", "--config=data/digits", "--config=methods/fedavg", *before]
    command.append(f"${{{placeholder}}}")
    # W&B writes true without a value, or not at all, as arguments without boolean flags
    arrive = {name: value for name, value in ARRIVE.items() if value is not True or "boolean" not in placeholder}
    file = SweepFile.read(
        written(parameters={name: {"value": value} for name, value in arrive.items()}, command=command)
    )
    (values,) = file.trials("grid", None, 0)
    found = Sweep(file, [values], [], jobs=1, fresh=False, wandb=False).configuration(0).arguments
    for name, value in arrive.items():
        assert type_true(found[name]) == type_true(value), name


@pytest.mark.slow
@pytest.mark.parametrize("before", ["pass", "import rich.console"])
def test_one_batch_is_not_all_of_them_whatever_was_imported_before(before):
    """Rich's types made ``limit_train_batches: int | float`` of Lightning a ``float | int``, and 1 became 1.0."""
    code = f"""
{before}
from fedlit.cli.arguments import normalise
from fedlit.cli.lightning_cli import FedlitCLI
words = ["--trainer.limit_train_batches=1", "--trainer.limit_val_batches=1.0", "--trainer.overfit_batches=2"]
words.append("--trainer.val_check_interval=1")
cli = FedlitCLI(normalise(["fit", "--config", "data/digits", "--config", "methods/fedavg", *words]), run_classes=False)
trainer = cli.config["fit"].trainer
print([trainer.limit_train_batches, trainer.limit_val_batches, trainer.overfit_batches, trainer.val_check_interval])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[1, 1.0, 2, 1]"


def test_numbers_that_are_equal_but_of_other_types_are_settings_of_their_own():
    """1 label and all of them (1.0), which W&B takes for one value unless one is a text."""
    name = "data.init_args.target_labels"
    command = ["${env}", "${program}", "fit", "--config=data/digits", "--config=methods/fedavg", "${args}"]
    file = SweepFile.read(written(parameters={name: {"values": [1, "1.0"]}}, command=command))
    sweep = Sweep(file, file.trials("grid", None, 0), [], jobs=1, fresh=False, wandb=False)
    assert [sweep.configuration(number).arguments[name] for number in (0, 1)] == [1, 1.0]
    assert isinstance(sweep.configuration(1).arguments[name], float)
    assert [trial.label for trial in sweep.runs] == ["target_labels=1", "target_labels=1.0"]
    assert sweep.configuration(0).text != sweep.configuration(1).text
    switch = [{"a.b": value} for value in (1, True, "1")]
    assert [trial.label for trial in name_trials(switch)] == ["b=1", "b=True", "b='1'"]


def test_values_that_wandb_takes_for_one_are_told(capsys):
    main(["sweep", written(parameters={"x": {"values": [1, 1.0, True]}}), "--list", "--", "--config=data/digits"])
    printed = capsys.readouterr().out
    file = SweepFile.read("sweep.yaml")
    (line,) = file.merged
    assert line == (
        "parameters.x has 1 and 1.0, which are one value to W&B: 1.0 is tried. Write '1' in quotes to try both"
    )
    assert len(printed.splitlines()) == 2


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({"min": 1, "max": 3}, [1, 2]),
        ({"min": 0.5, "max": 1.5, "q": 0.5}, [0.5, 1.0]),
        ({"min": 0.5, "max": 1.75, "q": 0.25}, [0.5, 0.75, 1.0, 1.25, 1.5]),
    ],
)
def test_steps_are_whole_where_all_limits_are_written_so(about, expected):
    file = SweepFile.read(written(parameters={"x": {"distribution": "q_uniform", **about}}))
    assert repr([values["x"] for values in file.trials("grid", None, 0)]) == repr(expected)


def test_an_agents_trial_that_may_have_lost_its_type_is_refused(monkeypatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "fedlit")
    monkeypatch.setenv("WANDB_SWEEP_PARAM_PATH", str(Path("config.yaml").resolve()))
    fit = ["fit", "--config=data/digits", "--config=methods/fedavg"]
    for name in ("data.target_labels", "trainer.limit_train_batches"):
        Path("config.yaml").write_text(yaml.safe_dump({"wandb_version": 1, name: {"value": 1}}))
        assert f"the sweep gives {name}=1" in refusal(*fit, f"--{name}=1")


class Trained:
    """A sweep whose trials have ended: settings, methods and what they have logged are given."""

    def __init__(self, metric: str, trials: list[tuple[str, str, str, int, float]], maximises: bool) -> None:
        self.file = SimpleNamespace(metric=metric, maximises=maximises)
        self.runs = [
            Trial(number, {"data.target": target, "seed_everything": seed}, {"method": label}, label)
            for number, (label, _, target, seed, _) in enumerate(trials)
        ]
        self._trials = trials
        self.folder = SimpleNamespace(folder_of=lambda number: Path(f"run{number}"))

    def configuration(self, number: int) -> Any:
        label, path, target, *_ = self._trials[number]
        data = Namespace(class_path="fedlit.data.Digits", init_args=Namespace(target=target))
        if label.startswith("path="):
            data.init_args.path = label.removeprefix("path=")
        model = Namespace(class_path=f"fedlit.methods.{path}", init_args=Namespace(refine="refined" in label))
        return SimpleNamespace(arguments=Namespace(model=model, data=data))

    def metric(self, number: int) -> float | None:
        return self._trials[number][-1]

    def done(self) -> dict[int, Any]:
        return {
            number: summary(label, target, 0.5, seed) for number, (label, _, target, seed, _) in enumerate(self._trials)
        }


def best(metric: str, *trials: tuple[str, str, str, int, float], maximises: bool = True) -> list[str]:
    sweep: Any = Trained(metric, list(trials), maximises)
    ranking = Ranking(sweep, sweep.done())
    assert len(ranking.table().rows) == len(ranking.groups)
    return ranking.best()


TRUST = "validator/trust"


def test_trust_ranks_methods_with_a_margin_for_what_adapts_nothing():
    (line,) = best(TRUST, ("FedMMD", "FedMMD", "fonts", 0, 0.4), ("SourceOnly", "SourceOnly", "fonts", 0, 0.3))
    assert line.startswith("best on fonts by validator/trust (the highest, no label of the target needed): FedMMD, 0.4")
    (line,) = best(TRUST, ("FedMMD", "FedMMD", "fonts", 0, 0.4), ("none", "SourceOnly", "fonts", 0, 0.39))
    assert "needed): none, of which no other has 5% more validator/trust, 0.39;" in line


def test_trust_does_not_rank_what_trains_predictions_to_be_certain():
    shot, mmd = ("SHOT", "SHOT", "fonts", 0, 0.9), ("FedMMD", "FedMMD", "fonts", 0, 0.4)
    line, left_out = best(TRUST, shot, mmd, ("SourceOnly", "SourceOnly", "fonts", 0, 0.3))
    assert "needed): FedMMD, 0.4" in line
    assert left_out == "not ranked, as they train predictions to be certain: SHOT"


def test_where_trust_is_near_0_no_settings_are_named():
    trials = [
        (name, name, target, 0, trust)
        for target, values in (("fonts", (0.001, 0.0004)), ("noisy", (0.3, 0.2)))
        for name, trust in zip(("FedMMD", "FedAvg"), values, strict=True)
    ]
    fonts, noisy, average = best(TRUST, *trials)
    assert fonts == (
        "no settings are named on fonts: the highest validator/trust is 0.001, and models that have learnt nothing "
        "reach 0.005 by chance. Until then FedAvg is the safe one"
    )
    assert noisy.startswith("best on noisy by validator/trust")
    assert average == "best on average of 2 targets: FedMMD, 0.1505"


def test_settings_are_compared_within_a_target_and_on_average():
    scores = {("fonts", "mu=1"): 0.3, ("fonts", "mu=2"): 0.2, ("noisy", "mu=1"): 0.1, ("noisy", "mu=2"): 0.9}
    trials = [(label, "FedProx", target, 0, score) for (target, label), score in scores.items()]
    fonts, noisy, average = best("source/acc", *trials, maximises=False)
    assert fonts.startswith("best on fonts by source/acc (the lowest, no label of the target needed): mu=2, 0.2")
    assert noisy.startswith("best on noisy by source/acc (the lowest, no label of the target needed): mu=1, 0.1")
    assert average == "best on average of 2 targets: mu=1, 0.2"


@pytest.mark.parametrize("other", [("FedAvg", "FedAvg"), ("refined", "FedMMD")])
def test_another_class_and_a_refined_model_are_other_methods(other):
    (line,) = best("target/score", ("plain", "FedMMD", "fonts", 0, 0.8), (*other, "fonts", 0, 0.2))
    assert line.startswith("methods are not ranked: target/score compares settings of one method.")


def test_a_method_is_not_ranked_by_what_it_trains_on():
    words = ["${env}", "${program}", "fit", "--config=data/heart_disease", "${args}"]
    metric = {"name": "target/score", "goal": "maximize"}
    for method, name in (("shot", "SHOT"), ("adabn_autodial", "AdaBN with mixing")):
        parameters = {"config": {"values": ["methods/fedavg", f"methods/{method}"]}}
        said = refusal("sweep", written(command=words, parameters=parameters, metric=metric))
        assert f"fedlit: {name} trains its predictions to be certain, so that target/score does not rank it" in said


def test_settings_are_not_ranked_over_data_of_other_contents():
    lines = best("target/score", ("path=a.npz", "FedMMD", "fonts", 0, 0.8), ("path=b.npz", "FedMMD", "fonts", 0, 0.2))
    assert [line.split(" by ")[0] for line in lines] == ["best on fonts (path=a.npz)", "best on fonts (path=b.npz)"]


def test_one_setting_is_the_best_of_nothing():
    assert best("target/score", ("A", "FedMMD", "fonts", 0, 0.8), ("A", "FedMMD", "fonts", 1, 0.2)) == [
        "nothing is ranked: all trials have the same settings"
    ]


TINY = [
    *("${env}", "${program}", "fit", "--config=data/heart_disease", "--config=methods/fedprox"),
    "--config=loggers/wandb",
    *("--trainer.max_epochs=1", "--trainer.strategy.num_threads=1", "--trainer.enable_checkpointing=false"),
    *("--model.init_args.optimizer=torch.optim.SGD", "${args}"),
]
SCORE = {"name": "target/score", "goal": "maximize"}


def rows(name: str = "sweep") -> list[dict[str, str]]:
    with Path(f"runs/sweep_{name}/trials.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_sweep_ranks_goes_on_and_takes_what_it_has_tried(capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)  # as where it is not installed
    lr = "model.init_args.optimizer.init_args.lr"
    parameters: dict[str, Any] = {lr: {"values": [0.001, 0.3]}}
    main(["sweep", written(command=TINY, metric=SCORE, parameters=parameters)])
    printed = capsys.readouterr().out
    assert "run 2 of 2" in printed
    first = rows()
    expected = [("1", "finished", "0.001"), ("2", "finished", "0.3")]
    assert [(row["trial"], row["state"], row[lr]) for row in first] == expected
    for row in first:  # what the table has is what the run has logged and summed up
        folder = Path(row["folder"])
        with (folder / "metrics.csv").open() as file:
            logged = [float(each["target/score"]) for each in csv.DictReader(file) if each.get("target/score")]
        summary = json.loads((folder / "summary.json").read_text())
        assert float(row["target/score"]) == logged[-1] == pytest.approx(summary["target_score"])
        assert float(row["oracle_accuracy"]) == summary["oracle_accuracy"]
        assert summary["method"] == f"lr={row[lr]}"
    best = max(first, key=lambda row: float(row["target/score"]))[lr]
    assert f"best on va_long_beach by target/score (the highest, no label of the target needed): lr={best}," in printed
    assert printed.count("(oracle)") >= 2
    place = printed.index("settings by target/score, the highest first")
    after = printed[place:]
    assert re.search(r"\n *(1|2) +([\d.]+) ", after)[2] == best

    # one more value and an interrupted trial: only what is missing is trained
    kept, killed = (Path(row["folder"], "summary.json") for row in first)
    written_at = kept.stat().st_mtime_ns
    killed.unlink()
    parameters[lr]["values"].append(0.1)
    main(["sweep", written(command=TINY, metric=SCORE, parameters=parameters), "--trials=3"])
    printed = capsys.readouterr().out
    assert "1 of 3 runs are finished already" in printed
    assert printed.count("run 2 of 3") == printed.count("run 3 of 3") == 1
    assert "run 1 of 3" not in printed
    now = rows()
    assert [row[lr] for row in now] == ["0.001", "0.3", "0.1"]
    assert now[1]["target/score"] == first[1]["target/score"]
    assert [row["folder"] for row in now[:2]] == [row["folder"] for row in first]
    assert kept.stat().st_mtime_ns == written_at


@pytest.mark.slow
def test_a_trial_that_fails_does_not_end_the_others(capsys):
    path = written(command=TINY, metric=SCORE, parameters={"data.init_args.batch_size": {"values": [100000, 32]}})
    assert "1 of 2 runs failed" in refusal("sweep", path, "--", "--data.init_args.drop_last=true")
    printed = capsys.readouterr().out
    assert "fedlit: run 1 of 2 (batch_size=100000) failed: " in printed
    assert "no label of the target needed): batch_size=32" in printed
    assert [row["state"] for row in rows()] == ["failed", "finished"]


@pytest.mark.slow
def test_trials_that_log_no_such_metric_are_told(capsys):
    path = written(command=TINY, metric={"name": "val_loss"}, parameters={"model.init_args.mu": {"values": [0.1]}})
    assert "1 of 1 runs failed" in refusal("sweep", path)
    printed = capsys.readouterr().out
    assert "it has not logged 'val_loss', the metric of sweep.yaml: rank by one of " in printed
    assert "target/score" in printed
    assert "oracle/" not in printed
    assert "nothing is ranked: no trial has logged a number as 'val_loss'" in printed


def test_a_trial_is_one_run():
    path = written(command=[*TINY, "--seeds=[0,1]"], metric=SCORE, parameters={"model.init_args.mu": {"values": [0.1]}})
    assert "a trial is one run from its start, but sweep.yaml has seeds: " in refusal("sweep", path)


def blocks(language: str) -> list[str]:
    text = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_page_has_a_sweep_and_commands_that_are_taken(capsys):
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


def test_the_pages_table_of_distributions_is_whole():
    text = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE)) == set(DISTRIBUTIONS)
