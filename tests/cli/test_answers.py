"""What the command answers without a run: at once, which is without torch, and with what is wrong in the first line."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedlit.cli import main
from fedlit.cli.command import Answer

HEAVY = {"torch", "lightning", "torchvision", "torchmetrics", "numpy", "scipy", "sklearn", "matplotlib"}

AT_ONCE: dict[str, str] = {
    "": "usage: fedlit COMMAND",
    "--help": "usage: fedlit COMMAND",
    "--version": "fedlit ",
    "list": "FedAvg",
    "list method": "invalid choice: 'method'",
    "fitt": "fedlit: 'fitt' is no command: did you mean 'fit'?",
    "experiments/first": "fedlit: 'experiments/first' is no command: ",
    "fit --confg x": "fedlit: --confg: there is no 'confg': did you mean 'config'?",
    "fit --config experiments/frist": "did you mean 'experiments/first'?",
    "fit --config experiments/first --model.lr 3": "fedlit: --model.lr: SourceOnly has no argument 'lr': did you mean "
    "'model.optimizer.lr'?",
    "fit --config experiments/first --data.targt x": "Digits has no argument 'targt': did you mean 'target'?",
    "fit --model FedProxx": "fedlit: --model: there is no class 'FedProxx': did you mean 'FedProx'?",
    "report --help": "RUN_DIR",
    "report nothing --output page.txt": "--output must end in .html",
    "export --help": "RUN_DIR",
    "export nowhere": "fedlit: RUN_DIR must be a folder that fedlit fit left",
    "features --help": "--extractor",
    "certificates --help": "--sites",
    "benchmark": "fedgp table-17",
    "benchmark --help": "fedlit benchmark",
}
"""What is written after ``fedlit``, and what the answer has."""


def test_what_needs_no_torch_answers_without_it(tmp_path):
    """All in one process, which imports nothing heavy, and so each costs no more than all of them."""
    code = """
import contextlib, io, json, resource, sys
from fedlit.cli import main
told = {}
for line in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main(line.split())
        except SystemExit as end:
            print(end.code)
    told[line] = [out.getvalue(), sorted({name.split(".")[0] for name in sys.modules})]
print(json.dumps([told, sum(resource.getrusage(resource.RUSAGE_SELF)[:2])]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([*AT_ONCE])], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    told, seconds = json.loads(done.stdout)
    for line, answer in AT_ONCE.items():
        text, modules = told[line]
        assert answer in text, line
        assert not HEAVY & set(modules), line
    assert seconds < 1.5


def test_features_help_without_classes_has_all_options(capsys):
    from fedlit.cli.commands import make_parser
    from fedlit.data import DomainDataModule

    with pytest.raises(SystemExit) as done:
        main(["features", "--help"])
    assert done.value.code == 0
    printed = capsys.readouterr().out
    whole = make_parser(DomainDataModule)
    options = {name for action in whole._actions for name in action.option_strings} - {"--print_config", "--data.help"}
    assert {"--data", "--extractor", "--out"} <= options
    assert not [name for name in options if name not in printed]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    Path("other.yaml").write_text("[]")
    Path("a.yaml").write_text("data: {class_path: Mine, init_args: {files: other.yaml}}")
    Path("mine.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "empty")
    (tmp_path / "empty").mkdir()
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(__file__=str(tmp_path / "mine.py")))
    words = ["fit", "--config=a.yaml", "--print_config"]
    Answer(words).keep(["printed", "warned"])
    return words


def test_an_answer_is_kept_for_the_same_question_alone(asked, monkeypatch):
    assert Answer(asked).recall() == ["printed", "warned"]
    assert Answer([*asked, "--seeds=[0]"]).recall() is None
    assert Answer(["fit", "--config=a.yaml"]).file is None
    assert Answer(["list", "--help"]).file is None
    assert Answer([*asked, "--data=[*.csv"]).file is None  # an error, which is the command's
    monkeypatch.setenv("COLUMNS", "66")
    assert Answer(asked).recall() is None


@pytest.mark.parametrize("changed", ["a.yaml", "other.yaml", "mine.py", "empty/plugin.py"])
def test_an_answer_is_made_again_where_what_it_depends_on_has_changed(asked, changed):
    Path(changed).write_text("data: {class_path: Other}")
    assert Answer(asked).recall() is None


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--help"], ["--config=experiments/first", "--print_config"]])
def test_the_command_prints_the_same_again_within_two_seconds(words, tmp_path):
    environment = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path / "cache")
    }  # whose fedlit/ would be found as the package
    command = [sys.executable, "-m", "fedlit.cli", "fit", *words]
    first = subprocess.run(command, capture_output=True, check=False, env=environment)
    assert first.returncode == 0, first.stderr.decode()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    again = subprocess.run(command, capture_output=True, check=False, env=environment)
    assert again.returncode == 0, again.stderr.decode()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert again.stdout == first.stdout != b""
    assert sum(after[:2]) - sum(before[:2]) < 2
