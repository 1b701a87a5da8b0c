"""What shells complete: names and keys that there are, in a real bash too."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedlit.cli import main
from fedlit.cli.command import COMMANDS, TRAINER
from fedlit.cli.completion import words_after
from fedlit.cli.known import known


def test_commands_configurations_classes_and_kinds_are_completed() -> None:
    assert set(words_after([""])) == {*TRAINER, *COMMANDS, "--version", "--help"}
    assert words_after(["ex"]) == ["export"]
    assert words_after([]) == words_after([""])
    assert words_after(["fit", "--config", "privacy/p"]) == ["privacy/paillier", "privacy/plain"]
    assert words_after(["join", "-c", "methods/fedgp"]) == ["methods/fedgp", "methods/fedgp_auto"]
    assert words_after(["fit", "--model", "FedDA"]) == ["FedDA", "FedDAN", "FedDANN"]
    assert words_after(["list", "m"]) == ["methods", "models"]
    assert words_after(["fit", "--select", ""]) == ["best", "combine"]
    assert words_after(["export", "ru"]) == []  # files are the shell's


def test_keys_are_those_of_the_classes_that_have_been_named() -> None:
    assert "--trainer.max_epochs" in words_after(["fit", "--trainer.m"])
    assert words_after(["fit", "--trainer.strategy.local"]) == ["--trainer.strategy.local_steps"]
    mmd = {f"--model.{name}" for name in known().arguments["fedlit.methods.FedMMD"]}
    assert set(words_after(["fit", "--config", "methods/fed_mmd", "--model."])) == mmd
    assert set(words_after(["fit", "--model=FedMMD", "--model."])) == mmd
    assert "--model.degree" not in words_after(["fit", "--model", "FedAvg", "--model."])
    found = words_after(["fit", "--config", "experiments/first", "--data.targ"])
    assert found == ["--data.target", "--data.target_batch_size", "--data.target_label_draw", "--data.target_labels"]
    assert words_after(["fit", "--config", "nowhere.yaml", "--see"]) == ["--seed_everything", "--seeds"]


@pytest.mark.parametrize("words", [["fit", "--config=privacy/pai"], ["fit", "--config", "=", "privacy/pai"]])
def test_values_after_an_equals_sign_are_completed_as_the_shell_divides_them(words: list[str]) -> None:
    assert words_after(words) == [words[-1].replace("privacy/pai", "privacy/paillier")]


def test_scripts_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for shell, text in (("bash", "complete -o default"), ("zsh", "bashcompinit"), ("fish", "complete -c fedlit")):
        main(["completion", shell])
        assert text in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["completion", "tcsh"])


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (("fedlit", "fit", "--config", "privacy/pai"), ["privacy/paillier"]),
        (("fedlit", "fit", "--config", "=", "privacy/pai"), ["privacy/paillier"]),
        (("fedlit", "do"), ["doctor"]),
    ],
)
def test_bash_completes(line: tuple[str, ...], expected: list[str], tmp_path: Path) -> None:
    command = tmp_path / "fedlit"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fedlit.cli "$@"\n')
    command.chmod(0o755)
    words = " ".join(f"'{word}'" for word in line)
    script = (
        f'PATH="{tmp_path}:$PATH"; eval "$(fedlit completion bash)"; COMP_WORDS=({words}); COMP_CWORD={len(line) - 1}; '
        '_fedlit; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected
