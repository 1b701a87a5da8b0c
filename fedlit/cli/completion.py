"""``fedlit completion``: what shells complete the command with, without torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import suppress

from fedlit.cli.arguments import normalise
from fedlit.cli.command import COMMANDS, TRAINER
from fedlit.cli.help import SCREENS
from fedlit.cli.known import KINDS, known
from fedlit.cli.mistakes import TOP, arguments_by_key, installed

_BASH = r"""_fedlit() {
    local IFS=$'\n'
    COMPREPLY=($(fedlit completion words -- "${COMP_WORDS[@]:1:$COMP_CWORD}" 2> /dev/null))
}
complete -o default -F _fedlit fedlit"""

_SCRIPTS = {
    "bash": _BASH,
    "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{_BASH}",
    "fish": "complete -c fedlit -a '(fedlit completion words -- (commandline -opc)[2..] (commandline -ct))'",
}

_TRAINER_KEYS = ("accelerator", "callbacks", "devices", "default_root_dir", "logger", "max_epochs", "precision")
"""Arguments of Lightning's Trainer that runs often set."""

_OF_KIND = {"model": "methods", "data": "data", "trainer.strategy.privacy": "privacy"}
"""Keys whose values are classes, and of what kind these are."""

_VALUES = {"select": ("best", "combine"), "trainer.accelerator": ("cpu", "gpu", "auto")}


def completion(args: list[str]) -> None:
    """Print a shell's script, or for that the words that may follow."""
    if args[:2] == ["words", "--"]:
        print("\n".join(words_after(args[2:])))
        return
    parser = argparse.ArgumentParser(
        "fedlit completion",
        description="Print the script by which a shell completes fedlit: commands, configurations, classes and keys. "
        'For bash: eval "$(fedlit completion bash)" in ~/.bashrc; for zsh the same with zsh in ~/.zshrc; for fish: '
        "fedlit completion fish > ~/.config/fish/completions/fedlit.fish",
    )
    parser.add_argument("shell", choices=[*_SCRIPTS])
    print(_SCRIPTS[parser.parse_args(args).shell])


def words_after(words: Sequence[str]) -> list[str]:
    """What the last of a command's words may be; where that is nothing, shells take files."""
    *before, current = [word for word in words if word != "="] or [""]  # where bash divides --key=value
    key, is_whole, begun = current.partition("=")
    if is_whole:  # in one word, as other shells have it
        return [f"{key}={value}" for value in words_after([*before, key, begun])]
    if words[-1:] == ["="]:
        before, current = [*before, current], ""
    return sorted(word for word in set(_words(before)) if word.startswith(current))


def _words(before: Sequence[str]) -> Iterator[str]:
    if not before:
        yield from (*TRAINER, *COMMANDS, "--version", "--help")
        return
    key = before[-1].removeprefix("--").replace("init_args.", "")
    if before == ["list"]:
        yield from KINDS
    elif before == ["completion"]:
        yield from _SCRIPTS
    elif before[-1] in ("--config", "-c"):
        yield from installed()
    elif key in _OF_KIND and before[-1].startswith("--"):
        yield from (row.name for row in known().listed[_OF_KIND[key]])
    elif key in _VALUES and before[-1].startswith("--"):
        yield from _VALUES[key]
    elif before[0] in SCREENS:
        yield from (f"--{key}" for key in (*TOP, "help=all", *(f"trainer.{name}" for name in _TRAINER_KEYS)))
        with suppress(SystemExit, OSError, ValueError):  # of a file that is none, or half written
            for place, names in arguments_by_key(normalise(["fit", *before[1:]])).items():
                yield from (f"--{place}.{name}" for name in names)
