"""What runs came to, as one HTML page and the same as Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedlit.callbacks.privacy_report import NOT_PROTECTED
from fedlit.callbacks.report.charts import Dots, Line, Panel, mean_and_spread
from fedlit.callbacks.report.federations import by_federation
from fedlit.callbacks.report.pages import (
    Block,
    Bullets,
    Folded,
    Heading,
    Picture,
    Table,
    Text,
    pictures_in,
    to_html,
    to_markdown,
)
from fedlit.callbacks.report.ranking import ranking
from fedlit.callbacks.report.run import ORACLE, blocks_of, drawn, in_percent, panel_of
from fedlit.callbacks.report.run_folder import RunFolder, differences
from fedlit.callbacks.report.target import target_blocks
from fedlit.callbacks.report.verdict import SPREAD, how_to_read, verdict
from fedlit.callbacks.run_record import METRICS, SUMMARY
from fedlit.callbacks.selection import TRUST, trust_of
from fedlit.callbacks.summary import COLLAPSED, closing_table

_SIDE_BY_SIDE = 4
"""Most runs whose configurations are shown each in a column."""

_MOST_PICTURES = 1 << 20
"""Bytes of pictures that runs have left; of more they are named alone."""

_CHANNELS = "MB by channel"
"""A column of the closing table that has many words."""

_DISTINGUISHABLE = 16
"""Most curves in one picture."""

_NAMEABLE = 3
"""Most keys by which a method's settings are called; where they differ in more, they are called by their runs."""

_ORACLE_MEANS = (
    f"{ORACLE} marks numbers that are measured with the target's hidden labels. No federation has them, and nothing "
    "may be selected by them."
)
_APART = (
    "These runs are of %d federations, as data, clients, samples to score or tasks differ. They are reported one after "
    "the other: nothing is compared or averaged over several of them."
)
_ROUNDS_MEAN = (
    f"Rounds are those of the column 'round' of {METRICS}, the first is 0. An evaluation on validation samples is that "
    "of the last round that had ended before it. The one on test samples comes after training and is in no curve."
)


def write_report(runs: Sequence[RunFolder], path: Path) -> list[Path]:
    """Write a page on some runs as HTML, as Markdown beside it, and the pictures of the latter in a folder beside both.

    The same runs, at least one, give the same bytes. The path is that of the HTML page and ends in ``.html``; folders
    on the way are made. Returns the HTML page, the Markdown page, and the folder.
    """
    title, blocks = report_on(runs)
    page, folder = path.with_suffix(".md"), path.with_name(f"{path.stem}_files")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(to_html(title, blocks), encoding="utf-8")
    page.write_text(to_markdown(blocks, folder.name), encoding="utf-8")
    for picture in pictures_in(blocks):
        (folder / picture.file).write_bytes(picture.on_disk())
    return [path, page, folder]


def report_on(runs: Sequence[RunFolder]) -> tuple[str, list[Block]]:
    """Title and content of the page on at least one run: what they come to first, single runs behind folds."""
    title = f"{_listed(run.method for run in runs)} on {_listed(run.target for run in runs)}"
    federations = by_federation(runs)
    names = {name: called for each in federations for name, called in distinct_names(each.runs).items()}
    blocks: list[Block] = [Heading(1, title)]
    if len(federations) > 1:
        blocks.append(Text(_APART % len(federations)))
    for number, federation in enumerate(federations, 1):
        several = len(federations) > 1
        about, prefix = (f": {federation.title}", f"federation-{number}_") if several else ("", "")
        blocks += _closing(federation.runs, names, about, prefix)
        blocks += _over_rounds(federation.runs, names, about, prefix)
        blocks += _targets(federation.runs, names, about, prefix)
    if len(runs) > 1:
        blocks += _config_diff(runs, names)
    blocks += [Heading(2, "One run" if len(runs) == 1 else f"{len(runs)} runs"), Text(_ROUNDS_MEAN), _folders(runs)]
    pictured = sum(path.stat().st_size for run in runs for path in run.pictures) <= _MOST_PICTURES
    for place, run in enumerate(runs):
        found = blocks_of(run, f"run-{place + 1}", pictured)
        blocks += [Heading(3, _heading(run)), *found] if len(runs) == 1 else [Folded(_heading(run), found)]
    lines = dict.fromkeys(line for run in runs if run.privacy for line in run.privacy.not_protected)
    blocks += [Heading(2, "What no backend protects"), Bullets(list(lines or NOT_PROTECTED))]
    return f"fedlit report: {title}", blocks


def _listed(names: Iterable[str]) -> str:
    """Different names in a sentence; of many the first and how many more."""
    found = list(dict.fromkeys(names))
    shown = found if len(found) <= 4 else [*found[:3], f"{len(found) - 3} more"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _heading(run: RunFolder) -> str:
    return f"{run.method} on {run.target}, seed {run.seed} ({run.name})"


def _state(run: RunFolder) -> str:
    return "finished" if run.summary is not None else f"unfinished: no {SUMMARY}"


def _folders(runs: Sequence[RunFolder]) -> Block:
    rows = [[run.name, run.method, run.target, run.seed, _state(run), str(run.num_rounds)] for run in runs]
    table = Table(["folder", "method", "target", "seed", "state", "rounds"], rows, words=5)
    return table if len(runs) <= _SIDE_BY_SIDE else Folded("folders", [table])


def _closing(runs: Sequence[RunFolder], names: Mapping[str, str], about: str, prefix: str) -> list[Block]:
    folders = [run for run in runs if run.summary is not None]
    finished = [replace(run.summary, method=names[run.name]) for run in folders if run.summary is not None]
    blocks: list[Block] = [Heading(2, f"What it came to{about}")]
    if not finished:
        return [
            *blocks,
            Text(_ORACLE_MEANS),
            Text(f"No run has finished: what follows is what they left, without a {SUMMARY}."),
        ]
    if len(finished) < len(runs):
        blocks.append(Text(f"Of finished runs alone: {len(finished)} of {len(runs)}."))
    blocks += [*ranking(folders, names), Text(_ORACLE_MEANS)]
    if len(finished) > 1:
        blocks += [*verdict(finished, _trust(folders, names, prefix), prefix), *how_to_read(finished)]
    closing = closing_table(finished)
    if closing.title is not None:
        blocks.append(Text(f"Over repetitions: {closing.title}."))
    columns = [column.replace("\n", " ") for column in closing.columns]
    sums = frozenset(place for place, row in enumerate(closing.rows) if row.style)
    numbers = [place for place, column in enumerate(columns) if column != _CHANNELS]
    sent = [0, 1, columns.index(_CHANNELS)]

    def table(places: Sequence[int], words: int) -> Table:
        rows = [[row.cells[place].replace("\n", ", ") for place in places] for row in closing.rows]
        return Table([columns[place] for place in places], rows, words, sums)

    return [
        *blocks,
        table(numbers, 2),
        *([Text(f"{COLLAPSED} predicts one class alone.")] if any(run.only_class for run in finished) else []),
        Folded("megabytes by channel", [table(sent, 3)]),
        Folded("what is hidden from whom, and more on these numbers", [Bullets(list(closing.notes))]),
    ]


def _trust(runs: Sequence[RunFolder], names: Mapping[str, str], prefix: str) -> Picture | None:
    """The highest trust of each method on each target, if runs of several methods have it."""
    targets = list(dict.fromkeys(run.target for run in runs if trust_of(run)))
    values: dict[str, list[list[float]]] = {}
    for run in runs:
        if trust_of(run):
            of_targets = values.setdefault(names[run.name], [[] for _ in targets])
            of_targets[targets.index(run.target)].append(max(trust_of(run).values()))
    if len(values) < 2:
        return None
    title = f"{TRUST} of the most trusted round"
    return Picture(f"{prefix}methods_1.svg", title, Dots(title, targets, values, SPREAD).draw())


_SAME_METHOD = re.compile(
    r"seed_everything$|seeds|targets|compare|select|jobs|fresh|seat|config$|ckpt_path|data\.init_args\.target$"
    r"|trainer\.(default_root_dir|logger|enable_progress_bar)"
)
"""Keys in which repetitions of one method differ."""


def distinct_names(runs: Sequence[RunFolder]) -> dict[str, str]:
    """What runs are called, by their folders' names: settings of one method have names of their own.

    Where a method's runs differ in more than target and seed, as in a sweep, its name is followed by what differs, or,
    where that is much, by the first folder of the setting. Runs that are equal in target and seed, too, are called by
    their folders, or else they would count as repetitions.
    """
    names: dict[str, str] = {}
    for method in dict.fromkeys(run.method for run in runs):
        same = [run for run in runs if run.method == method]
        settings = [
            {k: v for k, v in run.config.items() if not _SAME_METHOD.match(k)} or {"rounds": run.num_rounds}
            for run in same
        ]
        found = differences(settings)
        own = [
            tuple(f"{key.rsplit('.', 1)[-1]}={values[place]}" for key, values in found.items())
            for place in range(len(same))
        ]
        if len(found) > _NAMEABLE:
            first = {words: run.name for words, run in reversed([*zip(own, same, strict=True)])}
            own = [(f"as {first[words]}",) for words in own]
        times = Counter((words, run.target, run.seed) for words, run in zip(own, same, strict=True))
        again = {words for (words, *_), count in times.items() if count > 1}
        for words, run in zip(own, same, strict=True):
            shown = words
            if words in again:
                shown = (f"as {run.name}",) if len(found) > _NAMEABLE else (*words, run.name)
            names[run.name] = f"{method} ({', '.join(shown)})" if shown else method
    return names


def _config_diff(runs: Sequence[RunFolder], names: Mapping[str, str]) -> list[Block]:
    known = [run for run in runs if run.config]
    blocks: list[Block] = [Heading(2, "What differs in the configurations")]
    lacking = [run.name for run in runs if not run.config]
    if lacking:
        blocks.append(Text(f"{_listed(lacking)} has no config.yaml and is left out."))
    if len(known) < 2:
        return [*blocks, Text("There are no two configurations to compare.")]
    by_run = len(known) <= _SIDE_BY_SIDE
    columns = [run.name for run in known] if by_run else list(dict.fromkeys(names[run.name] for run in known))
    found = differences([run.config for run in known])
    rows = []
    for key, values in found.items():
        if by_run:
            rows.append([key, *values])
            continue
        own = [
            dict.fromkeys(value for run, value in zip(known, values, strict=True) if names[run.name] == column)
            for column in columns
        ]
        if len({tuple(each) for each in own}) > 1:  # what differs within a method alone are seeds and targets
            rows.append([key, *("\n".join(each) for each in own)])
    if not rows:
        return [*blocks, Text("Nothing: they are equal." if not found else "Nothing but targets, seeds and folders.")]
    text = Text("Keys in which not all are equal; '-' where a configuration lacks the key.")
    table = Table(["key", *columns], rows, words=len(columns) + 1)
    return [*blocks, text, table] if by_run else [*blocks, text, Folded(f"{len(rows)} keys", [table])]


def _over_rounds(runs: Sequence[RunFolder], names: Mapping[str, str], about: str, prefix: str) -> list[Block]:
    """The target of each method over rounds, mean and spread over seeds."""
    blocks: list[Block] = []
    for number, target in enumerate(dict.fromkeys(run.target for run in runs), 1):
        here: dict[str, list[RunFolder]] = {}
        for run in runs:
            if run.target == target:
                here.setdefault(names[run.name], []).append(run)
        if len(here) > _DISTINGUISHABLE:
            blocks.append(Text(f"{len(here)} settings on {target} are too many to be distinguished in one picture."))
            continue
        panels: list[Panel] = []
        for metric, title in (("acc", "accuracy in %"), ("r2", "R2")):
            lines = _means(here, f"oracle/target/{metric}")
            shown = [in_percent(line) for line in lines] if metric == "acc" else lines
            panels += panel_of(f"{target}, validation samples: {title} ({ORACLE})", shown)
        panels += panel_of(f"{target}, validation samples: {TRUST}", _means(here, TRUST))
        within = " (compares rounds of one method, not methods)" if len(here) > 1 else ""
        panels += panel_of(f"{target}, validation samples: target/score{within}", _means(here, "target/score"))
        if panels:
            blocks += drawn(panels, f"{prefix}all_{number}", "all runs")
    if not blocks:
        return []
    repeated = len({run.seed for run in runs}) > 1
    note = [Text("Means over seeds, with a band of one standard deviation to either side.")] if repeated else []
    return [Heading(2, f"The target over rounds{about}"), *note, *blocks]


def _means(here: Mapping[str, Sequence[RunFolder]], name: str) -> list[Line]:
    lines = []
    for place, (method, runs) in enumerate(here.items()):
        curves = [run.curves[name] for run in runs if name in run.curves]
        rounds = [at for at in (curves[0] if curves else {}) if all(at in curve for curve in curves)]
        both = {at: mean_and_spread([curve[at] for curve in curves]) for at in rounds}
        spread = {at: each for at, (_, each) in both.items() if each is not None}
        if both:
            lines.append(Line(method, {at: mean for at, (mean, _) in both.items()}, place, spread=spread))
    return lines


def _targets(runs: Sequence[RunFolder], names: Mapping[str, str], about: str, prefix: str) -> list[Block]:
    """How samples of each target are predicted."""
    found: list[tuple[str, list[Block]]] = []
    for number, target in enumerate(dict.fromkeys(run.target for run in runs), 1):
        own: dict[str, list[RunFolder]] = {}
        for run in runs:
            if run.target == target and run.summary is not None:
                own.setdefault(names[run.name], []).append(run)
        blocks = target_blocks(target, own, f"{prefix}target_{number}")
        if blocks:
            found.append((target, blocks))
    if not found:
        return []
    shown = found[0][1] if len(found) == 1 else [Folded(f"target {target}", blocks) for target, blocks in found]
    return [Heading(2, f"How the target's samples are predicted{about}"), *shown]
