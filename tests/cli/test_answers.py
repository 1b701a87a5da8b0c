"""What the command answers without a run: at once, which is without torch, and with what is wrong in the first line."""

from __future__ import annotations

import inspect
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedlit.cli import main
from fedlit.cli.command import Answer
from fedlit.cli.help import SCREENS
from fedlit.papers.experiments import CONFIGS
from fedlit.remote import Server, Site

HEAVY = {"torch", "lightning", "torchvision", "torchmetrics", "numpy", "scipy", "sklearn", "matplotlib"}

AT_ONCE: dict[str, str] = {
    "": "usage: fedlit COMMAND",
    "--help": "usage: fedlit COMMAND",
    "--version": "fedlit ",
    "fit --help": "usage: fedlit fit --config CONFIG",
    "join -h": "seat.server",
    "list": "FedAvg",
    "list method": "invalid choice: 'method'",
    "fitt": "fedlit: 'fitt' is no command: did you mean 'fit'?",
    "experiments/first": "fedlit: 'experiments/first' is no command: ",
    "fit --confg x": "fedlit: --confg: there is no 'confg': did you mean 'config'?",
    "fit --config experiments/frist": "did you mean 'experiments/first'?",
    "fit --config experiments/first --model.lr 3": "fedlit: --model.lr: SourceOnly has no argument 'lr': did you mean "
    "'model.optimizer.lr'?",
    "fit --config experiments/first --data.targt x": "Digits has no argument 'targt': did you mean 'target'?",
    "fit --config data/digits --config methods/fedavg --model.optimizer.lr 0.1": "name the class that has it, too: "
    "--model.optimizer Adam",
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


@pytest.mark.parametrize("command", SCREENS)
def test_the_first_screen_names_keys_and_configurations_that_there_are(command, capsys):
    main([command, "-h"])
    screen = capsys.readouterr().out
    assert len(screen.splitlines()) < 60
    assert max(map(len, screen.splitlines())) <= 100
    keys = set(re.findall(r"^  ((?:seat|data|model|trainer|seeds|select|jobs|ckpt)[\w., ]*?)  ", screen, re.MULTILINE))
    words = {word for key in keys for word in key.split(", ")} - {"data", "model"}
    if command in ("serve", "join"):
        taken = inspect.signature({"serve": Server, "join": Site}[command]).parameters
        assert words == {f"seat.{name}" for name in taken} - {"seat.step_timeout", "seat.journal", "seat.peers",
                                                             "seat.allow_rejoin"}  # fmt: skip
        return
    with pytest.raises(SystemExit):
        main([command, "--help=all"])
    listed = set(re.findall(r"--([\w.]+)", capsys.readouterr().out))
    own = {"data.target", "model.optimizer", "trainer.strategy.local_steps", "trainer.strategy.privacy"}
    assert {"data.target"} <= words
    assert words - own <= listed
    if command == "fit":
        shown = set(re.findall(r"\w+", screen))
        assert {
            path.stem for path in CONFIGS.rglob("*.yaml") if path.parent.name not in ("sweeps", "settings")
        } <= shown
    line = (
        "--config=experiments/first --seeds=null --compare=null --data.target=clean --model.optimizer=Adam "
        "--model.optimizer.lr=0.1 "
        "--trainer.strategy.local_steps=2 --trainer.strategy.privacy=PairwiseMasking --print_config"
    )
    with pytest.raises(SystemExit) as ended:
        main(["fit", *line.split()])
    assert not ended.value.code


def test_help_names_networks_of_fedlit_and_counts_those_of_others(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--model.help", "FedAvg"])
    text = " ".join(capsys.readouterr().out.split())
    assert len(text) < 12_000
    networks = re.search(r"known subclasses: (fedlit\.models\.[^)]*) and (\d+) of other packages\)", text)
    assert networks is not None
    assert "fedlit.methods" not in networks[1]
    assert {"fedlit.models.MLP", "fedlit.models.ResNet"} <= set(networks[1].split(", "))
    assert int(networks[2]) > 500
    assert "torch.optim.SGD" in text  # of few, all are named
    with pytest.raises(SystemExit):
        main(["fit", "--help=all"])
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"fedlit\.callbacks\.Validators,[^)]* and \d+ of other packages", text)
    assert text.index("--model.help") < text.index("--data.help") < text.index("--trainer.max_epochs")
