"""Swept parameters: their values in a grid, and W&B's distributions, from which random trials are drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedlit.checks import check, refuse

_RANGE = {"min", "max"}
_STEPS: dict[str, float] = {"q": 1}  # whole, so that steps are counts unless the file sets another
_NORMAL, _BETA = {"mu": 0.0, "sigma": 1.0}, {"a": 1.0, "b": 1.0}

DISTRIBUTIONS: dict[str, tuple[set[str], dict[str, float]]] = {
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


@dataclass(frozen=True)
class Parameter:
    """A setting that is swept."""

    path: tuple[str, ...]  # its name; of a nested one, the names above it before
    kind: str  # its distribution
    about: Mapping[str, Any]  # what the distribution was given, or has by default

    @property
    def name(self) -> str:
        """With points between nested names, as the command line has it."""
        return ".".join(self.path)

    def grid(self) -> Sequence[Any]:
        """All values, in order."""
        way_out = "give values, or --method random with --trials N"
        check(self.kind in _GRID, f"parameters.{self.name}", "of a distribution with a grid", self.kind, way_out)
        if self.kind == "constant":
            return [self.about["value"]]
        if self.kind == "categorical":
            return [*{mark(value): value for value in self.about["values"]}.values()]
        low, high = self.about["min"], self.about["max"]
        if self.kind == "int_uniform":
            return range(low, high + 1)
        import numpy as np

        return [_whole(value, self.about) for value in np.arange(low, high, self.about["q"]).tolist()]

    def at(self, share: float) -> Any:
        """The value below which this share of the distribution lies, in [0, 1]: of a uniform number, a random one."""
        from scipy import stats  # takes a second, which a grid need not wait

        about, kind = self.about, self.kind.removeprefix("q_")
        low, high = about.get("min", 0), about.get("max", 1)
        if kind == "constant":
            return about["value"]
        if kind == "categorical":
            return about["values"][int(stats.randint.ppf(share, 0, len(about["values"])).clip(0))]
        if kind == "categorical_w_probabilities":
            return about["values"][self._index(share)]
        if kind == "int_uniform":
            return int(stats.randint.ppf(share, low, high + 1))
        if kind == "uniform":
            value = stats.uniform.ppf(share, low, high - low)
        elif kind == "log_uniform_values":
            value = math.exp(stats.uniform.ppf(share, math.log(low), math.log(high) - math.log(low)))
        elif kind == "inv_log_uniform_values":
            value = math.exp(-stats.uniform.ppf(1 - share, -math.log(high), math.log(high) - math.log(low)))
        elif kind == "normal":
            value = stats.norm.ppf(share, loc=about["mu"], scale=about["sigma"])
        elif kind == "log_normal":
            value = stats.lognorm.ppf(share, s=about["sigma"], scale=math.exp(about["mu"]))
        else:
            value = stats.beta.ppf(share, a=about["a"], b=about["b"])
        if "q" in about:
            return _whole(round(float(value) / about["q"]) * about["q"], about)
        return float(value)

    def _index(self, share: float) -> int:
        below, odds = 0.0, self.about["probabilities"]
        for index, each in enumerate(odds):
            below += each
            if share < below:
                return index
        return max(index for index, each in enumerate(odds) if each)  # rounding left a little above the last


def read_parameters(tree: Any, above: tuple[str, ...] = ()) -> Iterator[Parameter]:
    """All parameters, sorted by name on each level, as W&B sorts them: words that come later win.

    Raises:
        ValueError: If one has what W&B does not take.
    """
    if not isinstance(tree, dict) or not tree:
        named = "a mapping of what is swept, such as model.init_args.mu: {values: [0.1, 1.0]}"
        refuse(".".join(["parameters", *above]), named, tree)
    for name, about in sorted(tree.items(), key=lambda item: str(item[0])):
        path = (*above, str(name))
        if not isinstance(about, dict):
            refuse(f"parameters.{'.'.join(path)}", "a mapping with values, value, or min and max", about)
        if set(about) == {"parameters"}:
            yield from read_parameters(about["parameters"], path)
        else:
            yield _parameter(path, about)


def _parameter(path: tuple[str, ...], about: Mapping[str, Any]) -> Parameter:
    where = f"parameters.{'.'.join(path)}"
    settings = {key: value for key, value in about.items() if key != "distribution"}
    kind = about.get("distribution", _usual(settings))
    if kind in _OF_EXPONENTS:
        way_out = f"write {kind}_values, whose min and max are values instead of their logarithms"
        refuse(where, "of a distribution that W&B has not given up", kind, way_out)
    if kind not in DISTRIBUTIONS:
        rule = f"a mapping with values, or value, or min and max, or a distribution of {', '.join(DISTRIBUTIONS)}"
        refuse(where, rule, dict(about))
    needed, defaults = DISTRIBUTIONS[kind]
    if not needed <= set(settings) <= needed | set(defaults):
        also = f", and may have {', '.join(defaults)}" if defaults else ""
        refuse(where, f"a mapping with {' and '.join(sorted(needed)) or 'nothing'} for {kind}{also}", settings)
    full = defaults | settings
    _check_numbers(where, kind, full)
    return Parameter(path, kind, full)


def _usual(settings: Mapping[str, Any]) -> str | None:
    """The distribution that W&B takes if none is named."""
    if set(settings) == _RANGE:
        return "int_uniform" if all(type(value) is int for value in settings.values()) else "uniform"
    listed = ("constant", "categorical", "categorical_w_probabilities")
    return next((kind for kind in listed if set(settings) == DISTRIBUTIONS[kind][0]), None)


def _check_numbers(where: str, kind: str, about: Mapping[str, Any]) -> None:
    for key, value in about.items():
        if key in ("values", "probabilities"):
            check(isinstance(value, list) and value != [], f"{where}.{key}", "a list with at least one value", value)
        elif key != "value" and not _is_number(value):
            refuse(f"{where}.{key}", "a number", value, _written_as_text(value))
        elif key in ("q", "sigma", "a", "b"):
            check(value > 0, f"{where}.{key}", "above 0", value)
    if "min" in about:
        low, high = about["min"], about["max"]
        check(low < high, f"{where}.min", f"below max ({high})", low)
        check(low > 0 or "log_uniform" not in kind, f"{where}.min", f"above 0 with {kind}", low)
        whole = isinstance(low, int) and isinstance(high, int)
        check(whole or kind != "int_uniform", where, "a mapping with a whole min and max for int_uniform", about)
    odds = about.get("probabilities")
    if odds is not None:
        count = len(about["values"])
        sound = all(_is_number(each) and each >= 0 for each in odds) and math.isclose(sum(odds), 1, rel_tol=1e-5)
        rule = f"{count} numbers, one for each value, with sum 1"
        check(sound and len(odds) == count, f"{where}.probabilities", rule, odds)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _written_as_text(value: object) -> str:
    """What to write instead of a number that YAML takes for a text, such as 1e-3."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    return f"YAML takes it for a text, so write {number:f}" if math.isfinite(number) else ""


def _whole(value: float, about: Mapping[str, Any]) -> float:
    """A multiple of a whole step as a whole number, as W&B's server sends 3 for 3.0; but not of limits written so."""
    written_so = any(isinstance(about.get(key), float) for key in ("min", "max", "q"))
    return int(value) if not written_so and float(value).is_integer() else value


def mark(value: Any) -> str:
    """A text that is the same of values that W&B's service takes for the same: 1 and 1.0, but not true."""

    def plain(each: Any) -> Any:
        if isinstance(each, dict):
            return {str(key): plain(inner) for key, inner in each.items()}
        if isinstance(each, list):
            return [plain(inner) for inner in each]
        return int(each) if isinstance(each, float) and each.is_integer() else each

    return json.dumps(plain(value), sort_keys=True, default=str)
