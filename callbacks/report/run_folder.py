"""Read back what ``fedlit fit`` leaves in a run's folder."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import stat
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import yaml

from fedlit.callbacks.communication_ledger import read_csv
from fedlit.callbacks.privacy_report import Report
from fedlit.callbacks.run_record import EMBEDDINGS, HEADER, MAX_SAMPLES, METRICS, SETTINGS, SUMMARY
from fedlit.callbacks.run_summary import RunSummary
from fedlit.callbacks.selection import COMBINATION, Member
from fedlit.callbacks.shared import check_fields
from fedlit.configs import flat
from fedlit.federation import LedgerEntry

_MAX_BYTES = 1 << 28
"""Of one file that is read."""

_MAX_ENTRIES = 100_000
"""Of a configuration, each counted as often as aliases repeat it."""

_PNG = b"\x89PNG\r\n\x1a\n"

Curve = dict[int, float]
"""A number of each round in which there is one."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Embedded:
    """A sample in the plane with names of classes, which may be empty."""

    client: str
    x: float
    y: float
    predicted: str
    label: str


@dataclass(frozen=True)
class RunFolder:
    """Content of one run's folder."""

    name: str  # the last parts of its path, as many as distinguish the runs of a report
    summary: RunSummary | None  # ``None`` if the run has not finished, or was not one of ``fedlit fit``
    config: Mapping[str, object]  # leaves of its configuration by dotted key; empty if there is none
    curves: Mapping[str, Curve]  # by metric, its numbers by round; see `rounds_of`
    final: Mapping[str, float]  # metrics of the evaluation after training, on test samples; empty if there was none
    ledger: Sequence[LedgerEntry] | None  # all messages; ``None`` if it was not written
    privacy: Report | None  # the file of `PrivacyReport`; ``None`` without
    # of FedDaDiL, by client: its coordinates and its cost of transport by round
    dictionary: Mapping[str, Mapping[str, Curve]]
    pictures: Sequence[Path]  # paths of pictures, sorted
    # test samples in the plane of their features' principal components; empty if none were written
    embeddings: Sequence[Embedded] = ()
    members: Sequence[Member] = ()  # of the combination that it has learnt, if it is a network of one
    folder: Path = Path()
    label: str = ""  # name in a report's tables where runs of the method differ in settings; empty is the method

    @property
    def method(self) -> str:
        """Name in the closing table."""
        if self.summary is not None:
            return self.summary.method
        return str(self.config.get("model.class_path", "unknown method")).rsplit(".", maxsplit=1)[-1]

    @property
    def title(self) -> str:
        """Name in a report's tables."""
        return self.label or self.method

    @property
    def target(self) -> str:
        """Name of the client adapted to."""
        if self.summary is not None:
            return self.summary.target
        return str(self.config.get("data.init_args.target", "unknown target"))

    @property
    def seed(self) -> str:
        """As text; ``"unknown"`` where no file has it."""
        return str(self.config.get("seed_everything", "unknown") if self.summary is None else self.summary.seed)

    @property
    def num_rounds(self) -> int:
        """Rounds that have ended, as far as the folder shows."""
        return self.summary.rounds if self.summary is not None else max(self.curves.get("round", {}), default=-1) + 1

    @property
    def is_regression(self) -> bool:
        """Whether numbers are predicted: metrics show it, whatever the configuration lacks."""
        of_numbers = any(name.endswith("/r2") for name in (*self.curves, *self.final))
        return of_numbers or (self.summary is not None and self.summary.oracle_r2 is not None)


def read_runs(places: Sequence[Path]) -> list[RunFolder]:
    """Read all runs in or below some folders, in natural order (version_2 before version_10), each once.

    Raises:
        FileNotFoundError: If a folder is missing, or has no run at any depth.
        ValueError: If a file of a run cannot be read.
    """
    return [_read(folder, name) for folder, name in folders_of(places).items()]


def folders_of(places: Sequence[Path]) -> dict[Path, str]:
    """Folders of all runs in or below some folders, with their names in a report, in natural order.

    Raises:
        FileNotFoundError: If a folder is missing, or has no run at any depth.
    """
    folders = list(dict.fromkeys(folder for place in places for folder in _folders(place)))
    return dict(zip(folders, _names(folders), strict=True))


def check_folder(place: Path) -> None:
    """Raise a `FileNotFoundError` if there is no such folder."""
    if not place.is_dir():
        problem = "which is a file" if place.exists() else "which does not exist"
        raise FileNotFoundError(f"RUN_DIR must be a folder, got '{place}', {problem}: {_WAY_OUT}")


def _folders(place: Path) -> list[Path]:
    check_folder(place)
    folders = {path.parent.resolve() for name in (SUMMARY, METRICS) for path in place.rglob(name)}
    if not folders:
        raise FileNotFoundError(
            f"RUN_DIR must hold a run, that is a folder with {SUMMARY} or {METRICS}, got '{place}', which has none at "
            f"any depth: {_WAY_OUT}"
        )
    return sorted(folders, key=lambda folder: [_natural(part) for part in folder.parts])


_WAY_OUT = "give the folder that `fedlit fit` wrote (runs/METHOD/version_N, if nothing else was set), or one above it"


def _natural(text: str) -> list[tuple[int, int, str]]:
    """A key that sorts numbers in a name by their value, and before letters."""
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", text) if part]


def _names(folders: Sequence[Path]) -> list[str]:
    """The last two parts of each path, or as many as it takes to distinguish them."""
    for length in count(2):
        names = ["/".join(folder.parts[-length:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("distinct paths have distinct parts")


def read_progress(folder: Path, name: str) -> RunFolder:
    """A run's summary, configuration and metrics alone; raises a `ValueError` if one cannot be read."""
    summary = _parsed(folder / SUMMARY, RunSummary.from_json)
    content = _parsed(folder / "config.yaml", _mapping) or _parsed(folder / SETTINGS, _mapping)
    config = flat(content) if content else {}
    rows = _parsed(folder / METRICS, _metrics) or []
    final: Mapping[str, float] = {}
    per_epoch = config.get("trainer.strategy.init_args.rounds_per_epoch")
    per_epoch = per_epoch if isinstance(per_epoch, int) and per_epoch > 0 else 1  # foreign settings have no such number
    if summary is not None and _ends_with_test(rows, per_epoch):
        last = max(place for place, row in enumerate(rows) if "epoch" in row)
        final, rows = rows[last], rows[:last]
    return RunFolder(
        name=name,
        summary=summary,
        config=config,
        curves=rounds_of(rows),
        final=final,
        ledger=None,
        privacy=None,
        dictionary={},
        pictures=(),
        folder=folder,
    )


def _read(folder: Path, name: str) -> RunFolder:
    """All of a run; raises a `ValueError` if a file cannot be read."""
    prefix = "dictionary_"
    tables = sorted(folder.glob(f"{prefix}*.csv"), key=lambda path: _natural(path.name))
    return replace(
        read_progress(folder, name),
        ledger=_parsed(folder / "ledger.csv", read_csv),
        privacy=_parsed(folder / "privacy.json", Report.from_json),
        dictionary={path.stem.removeprefix(prefix): _parsed(path, _dictionary) or {} for path in tables},
        pictures=sorted(map(_picture, folder.glob("*.png")), key=lambda path: _natural(path.name)),
        embeddings=_parsed(folder / EMBEDDINGS, _embedded) or (),
        members=_parsed(folder / COMBINATION, _members) or (),
    )


def _ends_with_test(rows: Sequence[Mapping[str, float]], rounds_per_epoch: int) -> bool:
    """Whether the last evaluation of a finished run is on test samples: that comes when all epochs are over."""
    epochs = [row["epoch"] for row in rows if "epoch" in row]
    ended = max((row["round"] for row in rows if "round" in row), default=-1) + 1
    return bool(epochs) and epochs[-1] * rounds_per_epoch >= ended


# ---------------------------------------------------------------- files, which a stranger may have made


def _parsed(path: Path, parse: Callable[[str], _T]) -> _T | None:
    """Parse a file; ``None`` if there is none. Raises a `ValueError` if no run writes such a file."""
    if not path.is_file():
        return None
    try:
        _check_file(path)
        return parse(path.read_text(encoding="utf-8"))
    except (*_UNREADABLE, csv.Error, yaml.YAMLError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error


_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


def _unreadable(path: Path, reason: str) -> ValueError:
    return ValueError(
        f"RUN_DIR must hold files as a run of this version of fedlit writes them, got '{path}', which cannot be "
        f"read ({reason}): restore the file, or move it away to report the run without it"
    )


def _check_file(path: Path) -> None:
    """Raise a `ValueError` if a stranger's folder would have us read a file elsewhere, or one without end."""
    if path.is_symlink():
        raise ValueError(f"it is a link to '{path.resolve()}', which a run does not write")
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no file, but a device or a pipe, which may have no end")
    size = status.st_size
    if size > _MAX_BYTES:
        raise ValueError(f"it has {size} bytes, more than {_MAX_BYTES}")


def _picture(path: Path) -> Path:
    try:
        _check_file(path)
        with path.open("rb") as file:
            if file.read(len(_PNG)) != _PNG:
                raise ValueError("it is no PNG picture")
    except (ValueError, OSError) as error:
        raise _unreadable(path, str(error)) from error
    return path


def _mapping(text: str) -> dict[str, Any]:
    content = yaml.safe_load(text)
    if not isinstance(content, dict):
        raise TypeError(f"expected a mapping, got {type(content).__name__}")
    pending: list[object] = [content]
    for _ in range(_MAX_ENTRIES):  # aliases make much of little, or have no end
        if not pending:
            return content
        each = pending.pop()
        pending += each.values() if isinstance(each, dict) else each if isinstance(each, list) else []
    raise ValueError(f"it has more than {_MAX_ENTRIES} entries, counted as often as aliases repeat them")


def differences(configs: Sequence[Mapping[str, object]]) -> dict[str, list[str]]:
    """By dotted key, each configuration's value as YAML in one line, for keys in which not all are equal.

    Where a configuration lacks the key it has ``"-"``.
    """
    keys = sorted({key for config in configs for key in config}, key=lambda key: [*map(_natural, key.split("."))])
    values = {key: [as_yaml(config[key]) if key in config else "-" for config in configs] for key in keys}
    return {key: texts for key, texts in values.items() if len(set(texts)) > 1}


def as_yaml(value: object) -> str:
    """A leaf as YAML writes it in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True)
    return text.removesuffix("...\n").strip()


# ---------------------------------------------------------------- numbers by round


def _rows(text: str) -> list[dict[str, float]]:
    """Rows of the CSVLogger's table, without its empty cells."""
    lines = csv.reader(io.StringIO(text[: text.rfind("\n") + 1]))  # a killed run may have left half a line
    header = next(lines, [])
    rows: list[dict[str, float]] = []
    for cells in lines:
        row: dict[str, float] = {}
        for name, cell in zip(header, cells, strict=False):
            with suppress(ValueError):  # empty, or a text that a foreign callback has logged
                row[name] = float(cell)
        rows.append(row)
    return rows


def _metrics(text: str) -> list[dict[str, float]]:
    rows = _rows(text)
    rounds_of(rows)  # fails here, where the file is known, if it cannot read them
    return rows


def _dictionary(text: str) -> dict[str, Curve]:
    return rounds_of([row | {"step": row["round"]} for row in _rows(text)])


def _members(text: str) -> list[Member]:
    return [check_fields(Member(**each)) for each in json.loads(text)["members"]]


def _embedded(text: str) -> list[Embedded]:
    lines = csv.reader(io.StringIO(text))
    header, rows = next(lines, []), [*lines]
    if header != HEADER:
        raise ValueError(f"its columns are {header}, not {HEADER}")
    samples = [Embedded(row[0], float(row[1]), float(row[2]), *row[3:]) for row in rows if len(row) == len(header)]
    if len(samples) != len(rows) or not all(math.isfinite(each.x) and math.isfinite(each.y) for each in samples):
        raise ValueError("a row has not all of its columns, or a place that is not finite")
    if len(samples) > MAX_SAMPLES * len({each.client for each in samples}):
        raise ValueError(f"it has more than {MAX_SAMPLES} samples of a client")
    return samples


def rounds_of(rows: Sequence[Mapping[str, float]]) -> dict[str, Curve]:
    """Curves of a CSVLogger's rows, which have a step each, but a round only where one ends.

    Rows that Lightning logs have an epoch too: they belong to the last round that ended above them, and of several
    evaluations between two rounds the first counts: that of the model that the round left, where rounds are evaluated
    as they end. Other rows are written when a round ends, with the step at which it ends, some above its row.
    """
    ends = [(place, row["step"], int(row["round"])) for place, row in enumerate(rows) if "round" in row]
    curves: dict[str, Curve] = {}
    for place, row in enumerate(rows):
        if "epoch" in row:
            at = bisect_left(ends, place, key=lambda end: end[0]) - 1
        else:
            at = bisect_left(ends, row["step"], key=lambda end: end[1])
        if 0 <= at < len(ends):
            for name in row.keys() - {"step", "epoch"}:
                curves.setdefault(name, {}).setdefault(ends[at][2], row[name])
    return dict(sorted(curves.items()))
