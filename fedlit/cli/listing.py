"""``fedlit list``: what a configuration can name, of fedlit's own and of plug-ins."""

from __future__ import annotations

import argparse
import sys
from functools import cache

from fedlit.cli.known import KINDS, Row, known, offered
from fedlit.cli.loading import load
from fedlit.tables import Column, Table, show
from fedlit.tables import Row as TableRow


def list_command(args: list[str]) -> None:
    """Print what there is."""
    parser = argparse.ArgumentParser(
        prog="fedlit list",
        description="What a configuration can name: fedlit's own classes and those of plug-ins, and scores by which a "
        "model can be chosen without labels of the target.",
    )
    parser.add_argument("kind", nargs="?", choices=KINDS, help="what to list; everything if it is left out")
    kind = parser.parse_args(args).kind
    for each in KINDS if kind is None else (kind,):
        show(_table(each, by_lines=not sys.stdout.isatty()))


def rows(kind: str) -> list[Row]:
    """What there is of a kind: fedlit's own, then plug-ins."""
    return [*known().listed[kind], *(row for of, row in _plug_ins() if of == kind)]


@cache
def _plug_ins() -> list[tuple[str, Row]]:
    """Rows of plug-ins by their kinds, whose classes are imported only if there are any."""
    found: list[tuple[str, Row]] = load("fedlit.cli.catalogue:plugin_rows")() if any(map(offered, KINDS)) else []
    return found


def _table(kind: str, by_lines: bool) -> Table:
    """What there is of a kind; ``by_lines`` for other programs, or else for a screen, which may be narrow."""
    listed = rows(kind)
    names, last = [row.name for row in listed], [row.extra for row in listed]
    below = kind != "validators" and not by_lines and any(last)
    if below:
        names, last = ["\n  ".join([row.name, *row.extra.splitlines()]) for row in listed], []
    columns = {
        "name, and its configurations" if below else "name": names,
        "what it is": [row.what for row in listed],
        "where from": [row.origin for row in listed],
        "sends": [row.sends for row in listed],
        "source statistics" if kind == "validators" else "configuration": last,
    }
    shown = {header: cells for header, cells in columns.items() if any(cells)}
    headings = [Column(header, folds=not header.startswith("name"), min_width=12) for header in shown]
    return Table(headings, [TableRow(list(cells)) for cells in zip(*shown.values(), strict=True)], kind)
