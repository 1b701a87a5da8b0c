"""``fedlit sweep FILE``: a sweep file of W&B, its trials in W&B's order, on this machine and without W&B."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import yaml

from fedlit.checks import check, check_one_of, refuse
from fedlit.cli.arguments import as_word, find_config, type_true
from fedlit.cli.distributions import Parameter, mark, read_parameters
from fedlit.cli.known import did_you_mean, load
from fedlit.configs import flow

_KEYS = (
    *("method", "metric", "parameters", "program", "command", "run_cap", "early_terminate"),
    *("name", "description", "project", "entity", "apiVersion", "kind", "controller"),
)
"""Keys of a sweep file; those of the second line set where W&B shows it."""

_LAUNCHED = ("job", "image_uri", "scheduler", "metrics")
"""Keys of sweeps that run on W&B's own queues, or by another optimiser."""

_MOST = 10_000
"""Trials of a grid that are taken without being asked for by number."""

_COMMAND = ("${env}", "${interpreter}", "${program}", "${args}")
_VARIABLE = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")

_DESCRIPTION = """
Run the trials of a W&B sweep file here, without W&B and its service: the same parameters, combinations, distributions
and command, which must be fedlit fit. A table ranks settings by the metric of the file, which must need no label of the
target; methods are ranked by validator/trust alone. Trials that the same command, or the file with other values, has
finished are taken as they are, interrupted ones go on, and one that fails does not end the others.
"""


@dataclass(frozen=True)
class SweepFile:
    """A sweep file, read and checked."""

    path: str  # where it lies
    method: str  # ``"grid"``, ``"random"`` or ``"bayes"``
    parameters: tuple[Parameter, ...]  # sorted by name, as W&B has them
    command: tuple[str, ...]  # words that start a trial, with W&B's placeholders
    metric: str | None  # by which trials are ranked; ``None`` if the file names none
    maximises: bool  # whether a higher one is better
    run_cap: int | None  # most trials that the file allows
    stops_early: bool  # whether it asks W&B to end trials that look bad

    @classmethod
    def read(cls, path: str) -> SweepFile:
        """Read a file.

        Raises:
            FileNotFoundError: If it is not there.
            ValueError: If it has what W&B or this command does not take; the message has the key and a way out.
        """
        if not os.path.isfile(path):
            rule = "a sweep file of W&B, or the name of an installed one such as sweeps/fedprox_digits"
            refuse("FILE", rule, path, "this is neither", FileNotFoundError)
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeError) as error:
            raise ValueError(f"it is no YAML, and must be mended: {' '.join(str(error).split())}") from error
        if not isinstance(content, dict):
            refuse("it", "a mapping with method, parameters and command", str(content)[:60])
        for key in content:
            if key in _LAUNCHED:
                raise ValueError(f"{key} is for W&B's service alone: leave it out, or start the sweep with wandb")
            if key not in _KEYS:
                raise ValueError(f"a sweep file has no key {key!r}{did_you_mean(str(key), _KEYS)} leave it out")
        check_one_of("method", content.get("method"), ("grid", "random", "bayes"))
        metric, maximises = _metric(content.get("metric") or {})
        cap = content.get("run_cap")
        check(cap is None or (isinstance(cap, int) and cap >= 1), "run_cap", "at least 1 trial", cap)
        command = content.get("command") or _COMMAND
        check(not isinstance(command, str), "command", "a list of words", command, "put each in a line of its own")
        words = tuple(content.get("program", "") if str(word) == "${program}" else str(word) for word in command)
        parameters = tuple(read_parameters(content.get("parameters")))
        names = [parameter.name for parameter in parameters]
        twice = next((each for each in names if names.count(each) > 1), None)
        if twice is not None:
            raise ValueError(f"parameters has {twice} twice, nested and with points in its name: name it once")
        return cls(path, content["method"], parameters, words, metric, maximises, cap, "early_terminate" in content)

    @property
    def merged(self) -> list[str]:
        """Sentences on values that stand for one trial, though they are of different types."""
        lines = []
        for parameter in self.parameters:
            by_mark: dict[str, dict[str, Any]] = {}
            for value in parameter.about.get("values", ()):
                by_mark.setdefault(mark(value), {})[type_true(value)] = value
            lines += [
                f"parameters.{parameter.name} has {' and '.join(same)}, which are one value to W&B: "
                f"{[*same.values()][-1]!r} is tried. Write '{next(iter(same.values()))}' in quotes to try both"
                for same in by_mark.values()
                if len(same) > 1
            ]
        return lines

    def trials(self, method: str, number: int | None, seed: int) -> list[dict[str, Any]]:
        """Settings of each trial, by parameter; each combination once.

        Of a ``"grid"`` these are all combinations, or the first, the last parameter changing fastest; of ``"random"``
        search a number is drawn, and more trials of the same seed begin with the same. A `ValueError` if there is no
        grid, or it is too large.
        """
        drawn: Iterator[Sequence[Any]]
        if method == "random":
            assert number is not None
            stream = random.Random(seed)
            drawn = ([each.at(stream.uniform(0.0, 1.0)) for each in self.parameters] for _ in range(number))
        else:
            values = [each.grid() for each in self.parameters]
            total = math.prod(map(len, values))
            if number is None and total > _MOST:
                raise ValueError(
                    f"its grid has {total} trials: --trials N takes the first of them, --method random any"
                )
            drawn = islice(product(*values), number)
        names = [parameter.name for parameter in self.parameters]
        trials: dict[str, dict[str, Any]] = {}
        for each in drawn:
            trials.setdefault(mark([*each]), dict(zip(names, each, strict=True)))
        return [*trials.values()]

    def words(self, values: Mapping[str, Any]) -> list[str]:
        """What follows ``fedlit fit`` in a trial, as W&B's agent would write it.

        Values that would arrive as others, or of another type, are written as a configuration instead: infinity, the
        text "null", and ``None`` or a small number in a list.

        Raises:
            ValueError: If it is another command than ``fedlit fit``.
        """
        nested = self._nested(values)
        written = {name: as_word(name, value, str(value)) for name, value in nested.items()}
        kept = {name for name, word in written.items() if word == f"--{name}={nested[name]}"}
        whole = json.dumps(nested)
        whole = whole if type_true(yaml.safe_load(whole)) == type_true(nested) else flow(nested)
        apart = {name: [f"--{name}", str(nested[name])] if name in kept else [word] for name, word in written.items()}
        flags = {name: f"--{name}" if nested[name] is True else word for name, word in written.items()}
        placeholders: dict[str, list[str]] = {
            "env": ["/usr/bin/env"],
            "interpreter": ["python"],
            "args": [*written.values()],
            "args_no_hyphens": [word.removeprefix("--") if name in kept else word for name, word in written.items()],
            "args_no_equals": [word for words in apart.values() for word in words],
            "args_no_boolean_flags": [word for name, word in flags.items() if nested[name] is not False],
            "args_json": [whole],
            "args_json_file": [whole],  # a configuration may be given as text, too
        }
        words: list[str] = []
        for word in self.command:
            word = _VARIABLE.sub(lambda match: os.environ.get(match[1], match[1]), word)
            name = word[2:-1] if word.startswith("${") and word.endswith("}") else None
            if name is not None and name not in placeholders:
                known = ", ".join(f"${{{each}}}" for each in placeholders)
                raise ValueError(f"command has {word}, and its placeholders must be of {known}")
            words += [word] if name is None else placeholders[name]
        return _after_fit(words)

    def _nested(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values of nested parameters in mappings, as W&B has them."""
        nested: dict[str, Any] = {}
        for parameter in self.parameters:
            inside = nested
            for name in parameter.path[:-1]:
                inside = inside.setdefault(name, {})
            inside[parameter.path[-1]] = values[parameter.name]
        return nested


def _metric(metric: Any) -> tuple[str | None, bool]:
    """By which trials are ranked, and whether it is the better the higher."""
    if not isinstance(metric, dict) or not isinstance(metric.get("name", ""), str):
        refuse("metric", "a name and a goal, such as {name: target/score, goal: maximize}", metric)
    name, goal = metric.get("name"), metric.get("goal", "minimize")
    check_one_of("metric.goal", goal, ("minimize", "maximize"))
    if name is not None and "oracle" in name:
        raise ValueError(
            f"metric {name!r} is of hidden labels, which nobody has who must choose: rank by one that needs none, "
            "such as {name: target/score, goal: maximize}; the table has the oracle beside it"
        )
    if name is not None and "goal" not in metric and load("fedlit.run.trainer_checks:best_mode")(name) == "max":
        raise ValueError(
            f"metric {name!r} is the better the higher, but without a goal W&B takes the lowest: write goal: maximize"
        )
    return name, goal == "maximize"


def _after_fit(words: Sequence[str]) -> list[str]:
    """What follows ``fedlit fit``; whatever starts it on this machine."""
    rest = [*words]
    for before in (["/usr/bin/env"], ["python", "-m"], ["python"]):
        if rest[: len(before)] == before:
            rest = rest[len(before) :]
    if not rest or Path(rest[0]).name not in ("fedlit", "fedlit.cli") or rest[1:2] != ["fit"]:
        raise ValueError(
            "its command must start fedlit fit, as with program: fedlit and command: ['${env}', '${program}', fit, "
            f"--config=FILE, '${{args}}'], and it starts {' '.join(words[:4])!r}: wandb starts other programs"
        )
    return rest[2:]


def sweep(args: list[str]) -> None:
    """Run the trials of a sweep file, and print what they came to."""
    parser = argparse.ArgumentParser(
        "fedlit sweep",
        description=_DESCRIPTION,
        epilog="Words after a lone -- are added to each trial: fedlit sweep FILE -- --trainer.max_epochs=2",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="sweep file, or an installed one: sweeps/fedprox_digits")
    parser.add_argument(
        "--method", choices=("grid", "random"), help="all combinations, or random ones, whatever the file sets"
    )
    parser.add_argument("--trials", type=_count, metavar="N", help="most trials; random ones need it, or run_cap there")
    parser.add_argument(
        "--seed", type=int, default=0, help="of random trials (default: 0); more trials of a seed begin with the same"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trials that are trained side by side")
    parser.add_argument(
        "--fresh", nargs="?", const="true", default="false", choices=("true", "false"), help="train all trials again"
    )
    parser.add_argument(
        "--wandb", action="store_true", help="keep W&B's logger, which is left out otherwise; see docs/sweeps.md"
    )
    parser.add_argument("--list", action="store_true", dest="only_list", help="print the trials, and train none")
    end = args.index("--") if "--" in args else len(args)
    options, more = parser.parse_args(args[:end]), args[end + 1 :]
    path = find_config(options.file)
    try:
        file = SweepFile.read(path)
        method = _method(file, options)
        trials = file.trials(method, options.trials or file.run_cap, options.seed)
        file.words(trials[0])
    except FileNotFoundError as error:
        sys.exit(f"fedlit: {error}")
    except ValueError as error:
        sys.exit(f"fedlit: {path}: {error}")
    if options.only_list:
        for number, values in enumerate(trials):
            print(f"{number + 1}: {shlex.join(['fedlit', 'fit', *file.words(values), *more])}")
        return
    from fedlit.cli.trials import Sweep  # which takes torch, and seconds

    asked = options.trials or file.run_cap
    if method == "random" and asked is not None and len(trials) < asked:
        print(f"{asked - len(trials)} of {asked} random trials equal others, and are left out", flush=True)
    for line in file.merged:
        print(line, flush=True)
    if file.stops_early:
        print("early_terminate is for W&B's service: every trial is trained to its end", flush=True)
    Sweep(file, trials, more, options.jobs, options.fresh == "true", options.wandb).run(["sweep", *args])


def _method(file: SweepFile, options: argparse.Namespace) -> str:
    """How trials are chosen; raises a `ValueError` where it takes more to know that."""
    if file.method == "bayes" and options.method is None:
        raise ValueError(
            "method bayes chooses each trial by what others came to, which W&B's service does (wandb sweep): give "
            "--method random --trials N, which draws from the same parameters, or --method grid if all have values"
        )
    method = str(options.method or file.method)
    if method == "random" and options.trials is None and file.run_cap is None:
        raise ValueError("random trials have no end: give --trials N, or run_cap in the file")
    return method


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 trial, got {text!r}")
    return int(text)
