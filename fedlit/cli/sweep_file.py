"""W&B sweep files: their trials, in W&B's order and with W&B's distributions, and the arguments that start one."""

from __future__ import annotations

import json
import math
import os
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice, product
from pathlib import Path
from typing import Any

import yaml

from fedlit.cli.arguments import as_word, flow, type_true
from fedlit.cli.loading import load

_KNOWN = (
    *("method", "metric", "parameters", "program", "command", "run_cap", "early_terminate"),
    *("name", "description", "project", "entity", "apiVersion", "kind", "controller"),
)
"""Keys of a sweep file; those of the second line set where W&B shows it."""

_LAUNCHED = ("job", "image_uri", "scheduler", "metrics")
"""Keys of sweeps that run on W&B's own queues, or by another optimiser."""

_RANGE = {"min", "max"}
_STEPS: dict[str, float] = {"q": 1}  # whole, so that steps are counts unless the file sets another
_NORMAL, _BETA = {"mu": 0.0, "sigma": 1.0}, {"a": 1.0, "b": 1.0}

_DISTRIBUTIONS: dict[str, tuple[set[str], dict[str, float]]] = {
    "constant": ({"value"}, {}),
    "categorical": ({"values"}, {}),
    "categorical_w_probabilities": ({"values", "probabilities"}, {}),
    "int_uniform": (_RANGE, {}),
    "uniform": (_RANGE, {}),
    "q_uniform": (_RANGE, _STEPS),
    "log_uniform_values": (_RANGE, {}),
    "q_log_uniform_values": (_RANGE, _STEPS),
    "inv_log_uniform_values": (_RANGE, {}),
    "normal": (set(), _NORMAL),
    "q_normal": (set(), _NORMAL | _STEPS),
    "log_normal": (set(), _NORMAL),
    "q_log_normal": (set(), _NORMAL | _STEPS),
    "beta": (set(), _BETA),
    "q_beta": (set(), _BETA | _STEPS),
}
"""By name, what each must be given and what it can be given, with the default."""

_OF_EXPONENTS = ("log_uniform", "q_log_uniform", "inv_log_uniform")
"""Distributions whose limits are logarithms, which W&B has given up."""

_GRID = ("constant", "categorical", "int_uniform", "q_uniform")

_MOST = 10_000
"""Trials of a grid that are taken without being asked for by number."""

_COMMAND = ("${env}", "${interpreter}", "${program}", "${args}")
_VARIABLE = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")


@dataclass(frozen=True)
class Parameter:
    """A setting that is swept.

    Args:
        path: Its name; of a nested one, the names above it before.
        kind: Its distribution.
        about: What the distribution was given, or has by default.
    """

    path: tuple[str, ...]
    kind: str
    about: Mapping[str, Any]

    @property
    def name(self) -> str:
        """With points between nested names, as the command line has it."""
        return ".".join(self.path)

    def grid(self) -> Sequence[Any]:
        """All values, in order."""
        if self.kind == "constant":
            return [self.about["value"]]
        if self.kind == "categorical":
            different = {_mark(value): value for value in self.about["values"]}
            return [*different.values()]
        low, high = self.about["min"], self.about["max"]
        if self.kind == "int_uniform":
            return range(low, high + 1)
        import numpy as np

        return [_whole(value, self.about) for value in np.arange(low, high, self.about["q"]).tolist()]

    def at(self, share: float) -> Any:
        """The value below which this share of the distribution lies, in [0, 1]: of a uniform number, a random one."""
        about, kind = self.about, self.kind.removeprefix("q_")
        if kind == "constant":
            return about["value"]
        if kind.startswith("categorical"):
            return about["values"][self._place(share)]
        low, high = about.get("min", 0), about.get("max", 1)
        if kind == "int_uniform":
            return int(_stats().randint.ppf(share, low, high + 1))
        if kind == "uniform":
            found = _stats().uniform.ppf(share, low, high - low)
        elif kind == "log_uniform_values":
            found = math.exp(_stats().uniform.ppf(share, math.log(low), math.log(high) - math.log(low)))
        elif kind == "inv_log_uniform_values":
            found = math.exp(-_stats().uniform.ppf(1 - share, -math.log(high), math.log(high) - math.log(low)))
        elif kind == "normal":
            found = _stats().norm.ppf(share, loc=about["mu"], scale=about["sigma"])
        elif kind == "log_normal":
            found = _stats().lognorm.ppf(share, s=about["sigma"], scale=math.exp(about["mu"]))
        else:
            found = _stats().beta.ppf(share, a=about["a"], b=about["b"])
        if "q" in about:
            return _whole(round(float(found) / about["q"]) * about["q"], about)
        return float(found)

    def _place(self, share: float) -> int:
        """Of the value that a share falls on."""
        odds = self.about.get("probabilities")
        if odds is None:
            return int(_stats().randint.ppf(share, 0, len(self.about["values"])).clip(0))
        below = 0.0
        for place, each in enumerate(odds):
            below += each
            if share < below:
                return place
        return max(place for place, each in enumerate(odds) if each)  # rounding left a little above the last


@dataclass(frozen=True)
class SweepFile:
    """A sweep file, read and checked.

    Args:
        path: Where it lies.
        method: ``"grid"``, ``"random"`` or ``"bayes"``.
        parameters: Sorted by name, as W&B has them.
        command: Words that start a trial, with W&B's placeholders.
        metric: By which trials are ranked; ``None`` if the file names none.
        maximises: Whether a higher one is better.
        run_cap: Most trials that the file allows.
        stops_early: Whether it asks W&B to end trials that look bad.
    """

    path: str
    method: str
    parameters: tuple[Parameter, ...]
    command: tuple[str, ...]
    metric: str | None
    maximises: bool
    run_cap: int | None
    stops_early: bool

    @classmethod
    def read(cls, path: str) -> SweepFile:
        """Read a file.

        Raises:
            FileNotFoundError: If it is not there.
            ValueError: If it has what W&B or this command does not take; the message has the key and a way out.
        """
        if not os.path.isfile(path):
            raise FileNotFoundError(
                f"FILE must be a sweep file of W&B, or the name of an installed one such as sweeps/fedprox_digits, and "
                f"{path!r} is neither"
            )
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeError) as error:
            raise ValueError(f"it is no YAML, and must be mended: {' '.join(str(error).split())}") from error
        if not isinstance(content, dict):
            raise ValueError(f"it must have method, parameters and command, got {str(content)[:60]!r}")
        _check_keys(content)
        metric = content.get("metric") or {}
        if not isinstance(metric, dict) or not isinstance(metric.get("name", ""), str):
            raise ValueError(
                f"metric must have a name and a goal, such as {{name: target/score, goal: maximize}}, got {metric}"
            )
        name, goal = metric.get("name"), metric.get("goal", "minimize")
        if goal not in ("minimize", "maximize"):
            raise ValueError(f"metric.goal must be minimize or maximize, got {goal!r}")
        if name is not None and "oracle" in name:
            raise ValueError(
                f"metric {name!r} is of hidden labels, which nobody has who must choose: rank by one that needs none, "
                "such as {name: target/score, goal: maximize}; the table has the oracle beside it"
            )
        if name is not None and "goal" not in metric and load("fedlit.run.monitors:best_mode")(name) == "max":
            raise ValueError(
                f"metric {name!r} is the better the higher, but without a goal W&B takes the lowest: write goal: "
                "maximize"
            )
        cap = content.get("run_cap")
        if cap is not None and (not isinstance(cap, int) or cap < 1):
            raise ValueError(f"run_cap must be at least 1 trial, got {cap!r}")
        command = content.get("command") or _COMMAND
        if isinstance(command, str):
            raise ValueError(
                f"command must be a list of words, got the text {command!r}: put each in a line of its own"
            )
        words = [content.get("program", "") if str(word) == "${program}" else str(word) for word in command]
        parameters = tuple(_parameters(content.get("parameters")))
        names = [parameter.name for parameter in parameters]
        twice = next((each for each in names if names.count(each) > 1), None)
        if twice is not None:
            raise ValueError(f"parameters has {twice} twice, nested and with points in its name: name it once")
        stops = "early_terminate" in content
        return cls(path, content["method"], parameters, tuple(words), name, goal == "maximize", cap, stops)

    @property
    def merged(self) -> list[str]:
        """Sentences on values that stand for one trial, though they are of different types."""
        lines = []
        for parameter in self.parameters:
            by_mark: dict[str, dict[str, Any]] = {}
            for value in parameter.about.get("values", ()):
                by_mark.setdefault(_mark(value), {})[type_true(value)] = value
            for same in by_mark.values():
                if len(same) > 1:
                    kept = [*same.values()][-1]
                    lines.append(
                        f"parameters.{parameter.name} has {' and '.join(same)}, which are one value to W&B: {kept!r} "
                        f"is tried. Write '{next(iter(same.values()))}' in quotes to try both"
                    )
        return lines

    def trials(self, method: str, number: int | None, seed: int) -> list[dict[str, Any]]:
        """Settings of each trial, by parameter; each combination once.

        Args:
            method: ``"grid"`` takes all combinations, the last parameter changing fastest; ``"random"`` draws.
            number: Most trials; a grid's first ones. ``None`` takes all of a grid.
            seed: Of random trials. More trials of the same seed begin with the same.

        Raises:
            ValueError: If a parameter has no grid, or the grid is too large.
        """
        names = [parameter.name for parameter in self.parameters]
        drawn: Iterator[list[Any]]
        if method == "random":
            assert number is not None
            stream = random.Random(seed)
            drawn = ([each.at(stream.uniform(0.0, 1.0)) for each in self.parameters] for _ in range(number))
        else:
            drawn = self._grid(number)
        found: dict[str, dict[str, Any]] = {}
        for values in drawn:
            found.setdefault(_mark(values), dict(zip(names, values, strict=True)))
        return [*found.values()]

    def _grid(self, number: int | None) -> Iterator[list[Any]]:
        for each in self.parameters:
            if each.kind not in _GRID:
                raise ValueError(
                    f"parameters.{each.name} has the distribution {each.kind}, which a grid has no values of: give "
                    "values, or --method random with --trials N"
                )
        values = [each.grid() for each in self.parameters]
        total = math.prod(map(len, values))
        if number is None and total > _MOST:
            raise ValueError(f"its grid has {total} trials: --trials N takes the first of them, --method random any")
        return islice(map(list, product(*values)), number)

    def words(self, values: Mapping[str, Any]) -> list[str]:
        """What follows ``fedlit fit`` in a trial, as W&B's agent would write it.

        Values that would arrive as others, or of another type, are written as a configuration instead: infinity, the
        text "null", and ``None`` or a small number in a list.

        Args:
            values: By parameter.

        Raises:
            ValueError: If it is another command than ``fedlit fit``.
        """
        nested = self._nested(values)
        written = {name: as_word(name, value, str(value)) for name, value in nested.items()}
        kept = {name for name, word in written.items() if word == f"--{name}={nested[name]}"}
        whole = json.dumps(nested)
        whole = whole if type_true(yaml.safe_load(whole)) == type_true(nested) else flow(nested)
        made: dict[str, list[str]] = {
            "env": ["/usr/bin/env"],
            "interpreter": ["python"],
            "args": [*written.values()],
            "args_no_hyphens": [word.removeprefix("--") if name in kept else word for name, word in written.items()],
            "args_no_equals": [
                each
                for name, word in written.items()
                for each in ((f"--{name}", str(nested[name])) if name in kept else (word,))
            ],
            "args_no_boolean_flags": [
                f"--{name}" if nested[name] is True else word
                for name, word in written.items()
                if nested[name] is not False
            ],
            "args_json": [whole],
            "args_json_file": [whole],  # a configuration may be given as text, too
        }
        words: list[str] = []
        for word in self.command:
            word = _VARIABLE.sub(lambda found: os.environ.get(found[1], found[1]), word)
            macro = word[2:-1] if word.startswith("${") and word.endswith("}") else None
            if macro is not None and macro not in made:
                known = ", ".join(f"${{{name}}}" for name in made)
                raise ValueError(f"command has {word}, and its placeholders must be of {known}")
            words += [word] if macro is None else made[macro]
        return _after_fit(words)

    def _nested(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values of nested parameters in mappings, as W&B has them."""
        found: dict[str, Any] = {}
        for parameter in self.parameters:
            inside = found
            for name in parameter.path[:-1]:
                inside = inside.setdefault(name, {})
            inside[parameter.path[-1]] = values[parameter.name]
        return found


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


def _check_keys(content: Mapping[str, Any]) -> None:
    for key in content:
        if key in _LAUNCHED:
            raise ValueError(f"{key} is for W&B's service alone: leave it out, or start the sweep with wandb")
        if key not in _KNOWN:
            close = get_close_matches(str(key), _KNOWN, 1)
            raise ValueError(
                f"a sweep file has no key {key!r}: " + (f"did you mean {close[0]!r}?" if close else "leave it out")
            )
    method = content.get("method")
    if method not in ("grid", "random", "bayes"):
        raise ValueError(f"method must be grid, random or bayes, got {method!r}")


def _parameters(tree: Any, above: tuple[str, ...] = ()) -> Iterator[Parameter]:
    """All parameters, sorted by name on each level, as W&B sorts them: words that come later win."""
    where = ".".join(["parameters", *above])
    if not isinstance(tree, dict) or not tree:
        raise ValueError(
            f"{where} must name what is swept, such as model.init_args.mu: {{values: [0.1, 1.0]}}, got {tree!r}"
        )
    for name, about in sorted(tree.items(), key=lambda item: str(item[0])):
        path = (*above, str(name))
        if not isinstance(about, dict):
            raise ValueError(f"parameters.{'.'.join(path)} must have values, value, or min and max, got {about!r}")
        if set(about) == {"parameters"}:
            yield from _parameters(about["parameters"], path)
        else:
            yield _parameter(path, about)


def _parameter(path: tuple[str, ...], about: Mapping[str, Any]) -> Parameter:
    where = f"parameters.{'.'.join(path)}"
    given = {key: value for key, value in about.items() if key != "distribution"}
    kind = about.get("distribution", _usual(given))
    if kind in _OF_EXPONENTS:
        raise ValueError(
            f"{where}: the distribution {kind} is not supported, as W&B has given it up: write {kind}_values, whose "
            "min and max are values instead of their logarithms"
        )
    if kind not in _DISTRIBUTIONS:
        raise ValueError(
            f"{where} must have values, or value, or min and max, or a distribution of {', '.join(_DISTRIBUTIONS)} "
            f"with what belongs to it, got {dict(about)}"
        )
    needed, defaults = _DISTRIBUTIONS[kind]
    if not needed <= set(given) <= needed | set(defaults):
        also = f" and may have {', '.join(defaults)}" if defaults else ""
        must = " and ".join(sorted(needed)) or "nothing"
        raise ValueError(f"{where}: the distribution {kind} must have {must}{also}, got {given}")
    full = defaults | given
    _check_numbers(where, kind, full)
    return Parameter(path, kind, full)


def _usual(given: Mapping[str, Any]) -> str | None:
    """The distribution that W&B takes if none is named."""
    if set(given) == _RANGE:
        return "int_uniform" if all(type(value) is int for value in given.values()) else "uniform"
    listed = ("constant", "categorical", "categorical_w_probabilities")
    return next((kind for kind in listed if set(given) == _DISTRIBUTIONS[kind][0]), None)


def _check_numbers(where: str, kind: str, about: Mapping[str, Any]) -> None:
    for key, value in about.items():
        if key in ("values", "probabilities"):
            if not isinstance(value, list) or not value:
                raise ValueError(f"{where}.{key} must be a list with at least one value, got {value!r}")
        elif key != "value" and not _is_number(value):
            raise ValueError(f"{where}.{key} must be a number, got {value!r}" + _written_as_text(value))
    if "min" in about and about["min"] >= about["max"]:
        raise ValueError(f"{where}.min must be below max ({about['max']}), got {about['min']}")
    if "log_uniform" in kind and about["min"] <= 0:
        raise ValueError(f"{where}.min must be above 0 with {kind}, got {about['min']}")
    if kind == "int_uniform" and not all(isinstance(about[key], int) for key in _RANGE):
        raise ValueError(f"{where}: min and max of int_uniform must be whole, got {about['min']} and {about['max']}")
    for key in ("q", "sigma", "a", "b"):
        if about.get(key, 1) <= 0:
            raise ValueError(f"{where}.{key} must be above 0, got {about[key]}")
    odds = about.get("probabilities")
    if odds is None:
        return
    count = len(about["values"])
    if (
        not all(_is_number(each) and each >= 0 for each in odds)
        or len(odds) != count
        or not math.isclose(sum(odds), 1, rel_tol=1e-5)
    ):
        raise ValueError(f"{where}.probabilities must be {count} numbers, one for each value, and sum to 1, got {odds}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _written_as_text(value: object) -> str:
    """What to write instead of a number that YAML takes for a text, such as 1e-3."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    return f": YAML takes it for a text, so write {number:f}" if math.isfinite(number) else ""


def _stats() -> Any:
    from scipy import stats  # takes a second, which a grid need not wait

    return stats


def _whole(value: float, about: Mapping[str, Any]) -> float:
    """A multiple of a whole step as a whole number, as W&B's server sends 3 for 3.0; but not of limits written so."""
    written_so = any(isinstance(about.get(key), float) for key in ("min", "max", "q"))
    return int(value) if not written_so and float(value).is_integer() else value


def _mark(value: Any) -> str:
    """A text that is the same of values that W&B takes for the same: 1 and 1.0, but not true.

    Its service sends both as 1.
    """

    def plain(each: Any) -> Any:
        if isinstance(each, dict):
            return {str(key): plain(inner) for key, inner in each.items()}
        if isinstance(each, list):
            return [plain(inner) for inner in each]
        return int(each) if isinstance(each, float) and each.is_integer() else each

    return json.dumps(plain(value), sort_keys=True, default=str)
