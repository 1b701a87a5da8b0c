"""What the papers' files say: every table and figure, the experiments behind it, and the figures that were printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

import yaml

from fedlit.checks import check, check_one_of

FOLDER = files("fedlit.papers")
"""Of the papers' files."""

Cells = Mapping[str, Mapping[str, Any]]
"""Figures by row and column."""


@dataclass(frozen=True)
class Fit:
    """One ``fedlit fit``: the methods of a configuration, each on its targets, with its seeds."""

    config: str | Sequence[str]  # of the installed configurations; of several, later ones take precedence
    set: Mapping[str, Any] = field(default_factory=dict)  # arguments by their dotted names
    column: str = ""  # of the table; without, each target is one
    targets: Mapping[str, str] = field(default_factory=dict)  # the paper's names of targets, by ours
    row: str = ""  # of the configured method alone; without, each method that is compared is one
    needs: str = ""  # data that users fetch themselves

    @property
    def configs(self) -> Sequence[str]:
        """The configurations, in their order."""
        return [self.config] if isinstance(self.config, str) else self.config


@dataclass(frozen=True)
class Entry:
    """A table or figure of a paper."""

    title: str
    runs: Sequence[Fit] = ()
    measure: str | Sequence[str] = "oracle_accuracy"  # of a run's summary, or of what `experiments` makes of it
    curve: str = ""  # in place of a measure: a metric of each source, such as "beta", in `rounds`
    rounds: Sequence[int] = ()  # counted from 1; the columns
    rows: Mapping[str, str] = field(default_factory=dict)  # names of methods here, by the paper's
    paper: Cells = field(default_factory=dict)  # what was printed
    departs: str = ""  # what differs in what is run
    difference: str = ""  # why other figures come out
    source: Mapping[str, str] = field(default_factory=dict)  # key "from": another benchmark's file and its part
    script: str = ""  # that benchmark, with its arguments; beside "shows", one that draws it
    same: Sequence[str] = ()  # tables, as PAPER/TABLE, whose runs and figures are this one's
    shows: str = ""  # of an entry in which nothing is measured: why not
    average: bool = True  # over columns means something, so that the overview has it; else its first column

    @property
    def measures(self) -> Sequence[str]:
        """What is read of each run."""
        return [self.measure] if isinstance(self.measure, str) else self.measure

    @property
    def data(self) -> Sequence[str]:
        """Data that users fetch themselves, each once."""
        return list(dict.fromkeys(run.needs for run in self.runs if run.needs))


@dataclass(frozen=True)
class Paper:
    """A paper, with all its tables and figures."""

    name: str
    paper: str  # authors, title, where and when
    settings: str  # what holds for all its tables
    own: Sequence[str]  # beginnings of names of rows that are of the paper's method, the first one first
    tables: Mapping[str, Entry]


def names() -> list[str]:
    """Names of the papers, in the order of their files."""
    found = (each.name for each in FOLDER.iterdir())
    return sorted(name.removesuffix(".yaml") for name in found if name.endswith(".yaml"))


@cache
def read(name: str) -> Paper:
    """A paper's file.

    Args:
        name: One of `names`.

    Raises:
        ValueError: If there is none of that name, or if a key of it is unknown.
    """
    check_one_of("PAPER", name, tuple(names()))
    text = FOLDER.joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    whole = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # the former is ten times as fast
    entries = {key: _entry(f"{name}, {key}", value) for key, value in whole.pop("tables").items()}
    return _made(Paper, name, {"name": name, "settings": "", "own": (), "tables": entries, **whole})


def entry(paper: str, table: str) -> Entry:
    """A table or figure by name, such as ``"table-12"``.

    Raises:
        ValueError: If the paper has none of that name.
    """
    tables = read(paper).tables
    check_one_of("TABLE", table, tuple(tables))
    return tables[table]


def same_as(asked: Entry) -> list[tuple[str, str]]:
    """Papers and tables whose runs are an entry's, by name."""
    return [(paper, table) for paper, _, table in (name.partition("/") for name in asked.same)]


def _entry(where: str, given: Mapping[str, Any]) -> Entry:
    given = {("source" if key == "from" else key): value for key, value in given.items()}
    runs = [_made(Fit, f"{where}, runs", run) for run in given.pop("runs", ())]
    made = _made(Entry, where, {"runs": runs, **given})
    ways = sum(map(bool, (made.runs, made.source, made.same, made.shows)))
    check(ways == 1, where, "an entry with one of runs, from, same and shows", list(given), "give one of them")
    return made


Made = TypeVar("Made")


def _made(kind: type[Made], where: str, given: Mapping[str, Any]) -> Made:
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    for key in given:
        check(key in known, where, f"made of {', '.join(known)}", key, "leave this key out")
    return kind(**given)
