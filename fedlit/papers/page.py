"""docs/papers.md: every table and figure of the papers, from the files of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fedlit.papers.entries import Cells, Entry, names, read, same_as
from fedlit.papers.running import STAND_IN, compared, label_of, ours, read_made, read_results, seconds, seeds_of
from fedlit.tables import Table

_INTRODUCTION = """\
# The papers

What you get here: every table and figure of the five papers that fedlit's methods come from: the configuration, the
command that makes it again, whether it was run here, our figures and the paper's.

`fedlit benchmark PAPER TABLE` runs one (from an installed package, too), prints it next to the paper's, and keeps the
figures in a JSON file with versions, cores and seeds. `fedlit benchmark --list` lists them. Where the data have to be
fetched by you, `configs/data/` says what to download and how it is laid out; `--stand-in` runs the same experiments on
a few small files of that layout, which shows that they run, and no accuracy.

Accuracies are in per cent, on labels of the target that nothing was chosen by (an oracle), mean ± sample standard
deviation over seeds. This page is written by `fedlit benchmark --page docs/papers.md` from those files. The runs whose
time these have took {hours:.0f} hours together, by the clock, each on one core.
"""


def page(folder: Path, benchmarks: Path | None) -> str:
    """The whole page, as Markdown.

    Args:
        folder: Of the files of results.
        benchmarks: Folder of the benchmarks' files, from which some entries take theirs.
    """
    parts, total = [_INTRODUCTION], 0.0
    for name in names():
        paper = read(name)
        found = {table: ours(name, table, folder, benchmarks) for table in paper.tables}
        small = read_results(folder / f"{STAND_IN}.json").get(name, {})
        spent = seconds(name, folder, benchmarks) / 3600
        total += spent
        cost = f"Its runs took {spent:.1f} hours together, each by the clock." if spent else ""
        parts.append("\n\n".join(filter(None, (f"## {name}", f"{paper.paper}.", paper.settings.strip(), cost))) + "\n")
        made = read_made(folder / f"{name}.json")
        rows, sections = [], []
        for table, asked in paper.tables.items():
            run_here = state(asked, found[table], small.get(table))
            linked, means = asked.title, averages(asked, found[table], paper.own)
            if not asked.shows and not asked.same:
                linked = f"[{asked.title}](#{name}-{table})"
                seeds = seeds_of(name, table, folder, benchmarks)
                sections.append(_section(name, table, asked, found[table], run_here, seeds, made))
            rows.append([table.replace("-", " ").capitalize(), linked, run_here, *means])
        titles = ("", "what it shows", "run here", "ours", "the paper's")
        parts += [Table.of(titles, rows, words=len(titles)).markdown(escaped=False) + "\n", *sections]
    parts[0] = _INTRODUCTION.format(hours=total)
    return "\n".join(parts)


def state(asked: Entry, found: Cells, small: Mapping[str, Any] | None) -> str:
    """Whether a table was run, on what."""
    if asked.shows:
        how = f"drawn by `fedlit benchmark {asked.script}`" if asked.script else "nothing to run"
        return f"{how}: {asked.shows.strip()}"
    if asked.same:
        others = f"as {' and '.join(' '.join(other) for other in same_as(asked))}"
        return "; ".join(filter(None, (others, asked.departs.strip())))
    tried = "" if small is None else f"{small['fits']} of its fits ran on stand-ins"
    if found:
        cells = {(row, column) for row, of_row in asked.paper.items() for column in of_row}
        done = sum(column in found.get(row, {}) for row, column in cells)
        here = "yes" if done == len(cells) else f"{done} of {len(cells)} cells" if done else "yes, none of its cells"
        return "; ".join(filter(None, (here if not asked.departs else f"{here}, in another setting", tried)))
    if tried:
        return f"not run on the paper's data; {tried}"
    return "not run"


def averages(asked: Entry, found: Cells, own: Sequence[str] = ()) -> tuple[str, str]:
    """Our average and the paper's: the printed one, or else over the columns that both have, or the first of these.

    Of the first measure, and of the first row that both have; those of the paper's method, whose names start with one
    of ``own``, go first in its order. The paper's alone, where there is none.
    """
    ranks = {
        row: next((rank for rank, name in enumerate(own) if row.startswith(name)), len(own)) for row in asked.paper
    }
    rows = sorted(asked.paper, key=ranks.__getitem__)
    for row in rows:
        both = averages_of(asked, found, row)
        if both is not None:
            where, mine, printed = both
            return f"{row}{where}: {mine:.1f}", f"{printed:.1f}"
    for row in rows:
        printed_alone = {
            column: (number,) for column, cell in _printed(asked, row).items() if (number := _number(cell)) is not None
        }
        if printed_alone:
            where, (number, *_) = _averaged(asked, printed_alone)
            return "-", f"{row}{where}: {number:.1f}"
    return "-", "-"


def averages_of(asked: Entry, found: Cells, row: str) -> tuple[str, float, float] | None:
    """Of which column, our average and the paper's in a row, over the columns that both have; ``None`` without any."""
    label = _label(asked)
    pairs = {
        column: (mine, printed)
        for column, cell in _printed(asked, row).items()
        if (mine := _number(found.get(row, {}).get(column + label))) is not None
        and (printed := _number(cell)) is not None
    }
    if not pairs:
        return None
    where, (mine, printed) = _averaged(asked, pairs)
    return where, mine, printed


def _label(asked: Entry) -> str:
    """The end of the columns of the first measure."""
    return label_of(asked.measures[0]) if len(asked.measures) > 1 else ""


def _printed(asked: Entry, row: str) -> dict[str, Any]:
    """The paper's cells of the first measure in a row."""
    label = _label(asked)
    return {column.removesuffix(label): cell for column, cell in asked.paper[row].items() if column.endswith(label)}


def _averaged(asked: Entry, cells: Mapping[str, tuple[float, ...]]) -> tuple[str, tuple[float, ...]]:
    """Of the column of averages, if there is one; else means over all, or the first column's, which is named."""
    for column in ("average", "Avg"):
        if column in cells:
            return "", cells[column]
    first = next(iter(cells))
    if not asked.average:
        return f", {first}", cells[first]
    return "", tuple(fmean(each) for each in zip(*cells.values(), strict=True))


def _section(
    paper: str,
    table: str,
    asked: Entry,
    found: Cells,
    run_here: str,
    seeds: Mapping[str, int],
    made: Mapping[str, Any],
) -> str:
    lines = [f"### {paper}: {table}", f"{asked.title}. Here: {run_here}."]
    command = f"fedlit benchmark {asked.script}" if asked.script else f"fedlit benchmark {paper} {table}"
    needs = f" Needs {', '.join(asked.data)}." if asked.data else ""
    lines.append(f"`{command}`, of {_configurations(asked)}.{needs}")
    lines += [text.strip() for text in (asked.departs, asked.difference) if text]
    runs = (now for piece, now in made.items() if piece.startswith(f"{table}, "))
    other = dict.fromkeys(_made_by(now) for now in runs if found and now["command"] != command)
    if other:  # in another setting, or of other seeds
        lines.append(f"These figures were made by {' and '.join(other)}.")
    if found and seeds:
        lines.append(_over(seeds, [row for row in found if row not in seeds]))
    if asked.paper or found:
        lines += ["Ours (the paper's):", replace(compared(asked, found), caption=None).markdown()]
    return "\n\n".join(lines) + "\n"


def _over(seeds: Mapping[str, int], others_without: Sequence[str]) -> str:
    """Over how many seeds the means are; rows of ``others_without`` have none, as nothing in them is random."""
    rows: dict[int, list[str]] = {}
    for row, number in seeds.items():
        rows.setdefault(number, []).append(row)
    most, *others = sorted(rows.items(), key=lambda each: -len(each[1]))
    whose = f" of {', '.join(most[1])}" if others_without else ""
    text = f"Means{whose} are over {most[0]} seeds" if most[0] > 1 else f"Figures{whose} are of one seed"
    less = (f"of {', '.join(names)} over {number}" if number > 1 else f"of {', '.join(names)} of one seed"
            for number, names in others)  # fmt: skip
    return "; ".join((text, *less)) + "."


def _made_by(now: Mapping[str, Any]) -> str:
    return f"`{now['command']}`" + (f" ({now['gpu']})" if "gpu" in now else "")


def _configurations(asked: Entry) -> str:
    if asked.script:
        return f"benchmarks/{asked.script.split()[0]}.py"
    return ", ".join(
        f"`{config}`" for config in dict.fromkeys(config for each in asked.runs for config in each.configs)
    )


def _number(cell: Any) -> float | None:
    if isinstance(cell, Mapping):
        return float(cell["mean"])
    if cell is None:
        return None
    try:
        return float(str(cell).split("±")[0].split("(")[0])
    except ValueError:
        return None
