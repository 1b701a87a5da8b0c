"""Helpers of several callbacks: the module they watch, files of a run, and numbers as text."""

from __future__ import annotations

import csv
import types
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from lightning.pytorch import LightningModule, Trainer

from fedlit.checks import check
from fedlit.federation import KEYS
from fedlit.module import FederatedModule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOGGING_CHANNELS = ("metrics", "oracle")
"""Channels of logged numbers, which are sent as plaintext."""

SOURCE_MOMENTS = "source_moments"
"""Channel of statistics that `Validators` average over the sources, through its privacy backend."""

CLASS_MEANS = "class_means"
"""Channel of the means of inputs by class that `Validators` average over the sources, through its privacy backend."""

CALIBRATION = "calibration"
"""Channel of the losses that `Calibration` averages over the sources, through its privacy backend."""

_T = TypeVar("_T")
_K = TypeVar("_K")


def watched(channel: str) -> bool:
    """Whether a channel only carries numbers for watching: the method would train the same without it."""
    return channel in LOGGING_CHANNELS or channel.removesuffix(KEYS) in (SOURCE_MOMENTS, CLASS_MEANS, CALIBRATION)


def federated(module: LightningModule, callback: object) -> FederatedModule:
    """``module``, which must be a `FederatedModule` for ``callback`` to watch it; raises a `TypeError` otherwise."""
    if not isinstance(module, FederatedModule):
        raise TypeError(
            f"{type(callback).__name__} watches a FederatedModule, got {type(module).__name__}: train a method of "
            "fedlit.methods, or remove the callback"
        )
    return module


def class_names(trainer: Trainer, module: FederatedModule) -> list[str]:
    """Names of classes, or of numbers to predict: the data module's ``classes``, or else numbers from 0."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    names = getattr(data, "classes", None)
    if names is None:
        return [str(index) for index in range(module.num_classes)]
    check(
        len(names) == module.num_classes,
        "classes",
        f"{module.num_classes} names, for the outputs of {type(module).__name__} (num_classes)",
        names,
        f"give the module num_classes={type(data).__name__}.num_classes",
    )
    return [str(name) for name in names]


# ---------------------------------------------------------------- files of a run


def grouped(items: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """Items by a key, in the order in which keys first occur."""
    groups: dict[_K, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def log_folder(trainer: Trainer) -> Path:
    """The Trainer's ``log_dir`` or ``default_root_dir``; called on all processes, as ``log_dir`` is a broadcast."""
    return Path(trainer.log_dir or trainer.default_root_dir)


def is_dry(trainer: Trainer) -> bool:
    """Whether it is a ``fast_dev_run``, which writes no files."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def write_rows(path: Path, rows: Iterable[Iterable[object]]) -> None:
    """Write a CSV file; folders on the way are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def check_fields(record: _T) -> _T:
    """A dataclass that was read from a file; raises a `TypeError` if a field has another type than is declared."""
    for name, annotation in get_type_hints(type(record)).items():
        if not _fits(getattr(record, name), annotation):
            raise TypeError(f"{name} cannot be {str(getattr(record, name))[:100]!r}")
    return record


def _fits(value: object, annotation: Any) -> bool:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(k, parts[0]) and _fits(v, parts[1]) for k, v in value.items())
    if origin in (list, tuple):
        return isinstance(value, origin) and all(_fits(each, parts[0]) for each in value)
    if isinstance(value, bool):  # to Python an int
        return annotation is bool
    if isinstance(value, int):  # bounded, as larger ones are no floats
        return annotation in (int, float) and abs(value) < 2**63
    if is_dataclass(value):
        check_fields(value)
    return isinstance(value, annotation)


def megabytes(num_bytes: float) -> str:
    """Bytes in MB (10^6), to three digits, or to the byte where that would be nothing: ``"3.21"``, ``"0.000042"``."""
    amount = num_bytes / 1e6
    if amount >= 100:
        return f"{amount:,.0f}"
    if amount >= 0.001:
        return f"{amount:#.3g}"
    return f"{amount:.6f}" if num_bytes else "0"


def colors_of(number: int) -> list[Any]:
    """Colours that distinguish so many things."""
    import matplotlib as mpl

    if number <= 10:
        return [mpl.colormaps["tab10"](place) for place in range(number)]
    return [mpl.colormaps["turbo"](0.04 + 0.92 * place / (number - 1)) for place in range(number)]


def over_rounds(axis: Axes) -> None:
    """Make the horizontal axis one of communication rounds."""
    axis.set_xlabel("round")
    axis.locator_params(axis="x", integer=True)
    axis.grid(alpha=0.25)
