"""Results of runs, as one HTML page and the same as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedlit.callbacks.privacy_report import NOT_PROTECTED
from fedlit.callbacks.report.charts import Line, Panel, dots
from fedlit.callbacks.report.federations import FederationRuns, by_federation, by_title
from fedlit.callbacks.report.pages import (
    Block,
    Bullets,
    Folded,
    Heading,
    Picture,
    Text,
    pictures_in,
    to_html,
    to_markdown,
)
from fedlit.callbacks.report.run import ORACLE, blocks_of, drawn, in_percent, panel_of
from fedlit.callbacks.report.run_folder import RunFolder, differences
from fedlit.callbacks.report.verdict import SPREAD, ranking, target_blocks, verdict
from fedlit.callbacks.run_record import METRICS, SUMMARY
from fedlit.callbacks.selection import TRUST, trust_of
from fedlit.callbacks.summary import CHANNELS, closing_table
from fedlit.tables import COLLAPSED, Table, mean_and_deviation

_SIDE_BY_SIDE = 4
"""Maximum number of runs whose configurations have a column each."""

_MAX_PICTURES = 1 << 20
"""Bytes of the runs' own pictures up to which they are shown; beyond, they are only named."""

_DISTINGUISHABLE = 16
"""Maximum number of curves in one picture."""

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
    """Title and content of the page on at least one run: results first, single runs behind folds."""
    federations = by_federation(runs)
    labels = {run.name: run for federation in federations for run in federation.runs}
    runs = [labels[run.name] for run in runs]
    title = f"{_listed(run.method for run in runs)} on {_listed(run.target for run in runs)}"
    blocks: list[Block] = [Heading(1, title)]
    if len(federations) > 1:
        blocks.append(Text(_APART % len(federations)))
    for federation in federations:
        blocks += [*_results(federation), *_over_rounds(federation), *_targets(federation)]
    if len(runs) > 1:
        blocks += _config_diff(runs)
    blocks += [Heading(2, "One run" if len(runs) == 1 else f"{len(runs)} runs"), Text(_ROUNDS_MEAN), _folders(runs)]
    pictured = sum(path.stat().st_size for run in runs for path in run.pictures) <= _MAX_PICTURES
    for number, run in enumerate(runs, 1):
        heading = f"{run.method} on {run.target}, seed {run.seed} ({run.name})"
        content = blocks_of(run, f"run-{number}", pictured)
        blocks += [Heading(3, heading), *content] if len(runs) == 1 else [Folded(heading, content)]
    lines = dict.fromkeys(line for run in runs if run.privacy for line in run.privacy.not_protected)
    blocks += [Heading(2, "What no backend protects"), Bullets(list(lines or NOT_PROTECTED))]
    return f"fedlit report: {title}", blocks


def _listed(names: Iterable[str]) -> str:
    """Different names in a sentence; of many the first and how many more."""
    different = list(dict.fromkeys(names))
    shown = different if len(different) <= 4 else [*different[:3], f"{len(different) - 3} more"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _folders(runs: Sequence[RunFolder]) -> Block:
    rows = [
        [
            *(run.name, run.method, run.target, run.seed),
            "finished" if run.summary is not None else f"unfinished: no {SUMMARY}",
            str(run.num_rounds),
        ]
        for run in runs
    ]
    table = Table.of(["folder", "method", "target", "seed", "state", "rounds"], rows, words=5)
    return table if len(runs) <= _SIDE_BY_SIDE else Folded("folders", [table])


def _results(federation: FederationRuns) -> list[Block]:
    """The method to take, differences to the floor, and the closing table."""
    folders = [run for run in federation.runs if run.summary is not None]
    finished = [replace(run.summary, method=run.title) for run in folders if run.summary is not None]
    blocks: list[Block] = [Heading(2, f"What it came to{federation.suffix}")]
    if not finished:
        note = f"No run has finished: what follows is what they left, without a {SUMMARY}."
        return [*blocks, Text(_ORACLE_MEANS), Text(note)]
    if len(finished) < len(federation.runs):
        blocks.append(Text(f"Of finished runs alone: {len(finished)} of {len(federation.runs)}."))
    blocks += [*ranking(folders), Text(_ORACLE_MEANS)]
    if len(finished) > 1:
        blocks += verdict(finished, _trust(folders, federation.prefix), federation.prefix)
        if len({run.seed for run in finished}) > 1:
            rule = "Differences are taken within each seed. Two standard deviations are a rule of thumb, no test."
            blocks.append(Text(rule))
    closing = closing_table(finished)
    if closing.caption is not None:
        blocks.append(Text(f"Over repetitions: {closing.caption}."))
    channels = next(place for place, column in enumerate(closing.columns) if column.title == CHANNELS)
    blocks.append(closing.select([place for place in range(len(closing.columns)) if place != channels]))
    if any(run.only_class for run in finished):
        blocks.append(Text(f"{COLLAPSED} predicts one class alone."))
    return [
        *blocks,
        Folded("megabytes by channel", [closing.select([0, 1, channels])]),
        Folded("what is hidden from whom, and more on these numbers", [Bullets(list(closing.footnotes))]),
    ]


def _trust(runs: Sequence[RunFolder], prefix: str) -> Picture | None:
    """The highest trust of each method on each target, if runs of several methods have it."""
    trusted = [run for run in runs if trust_of(run)]
    targets = list(dict.fromkeys(run.target for run in trusted))
    values = {
        method: [[max(trust_of(run).values()) for run in some if run.target == target] for target in targets]
        for method, some in by_title(trusted).items()
    }
    if len(values) < 2:
        return None
    title = f"{TRUST} of the most trusted round"
    return Picture(f"{prefix}methods_1.svg", title, dots(title, targets, values, SPREAD))


def _config_diff(runs: Sequence[RunFolder]) -> list[Block]:
    configured = [run for run in runs if run.config]
    blocks: list[Block] = [Heading(2, "What differs in the configurations")]
    lacking = [run.name for run in runs if not run.config]
    if lacking:
        blocks.append(Text(f"{_listed(lacking)} has no config.yaml and is left out."))
    if len(configured) < 2:
        return [*blocks, Text("There are no two configurations to compare.")]
    by_run = len(configured) <= _SIDE_BY_SIDE
    columns = [run.name if by_run else run.title for run in configured]
    changed = differences([run.config for run in configured])
    rows = []
    for key, values in changed.items():
        cells: dict[str, dict[str, None]] = {column: {} for column in columns}
        for column, value in zip(columns, values, strict=True):
            cells[column][value] = None
        if len({tuple(each) for each in cells.values()}) > 1:  # seeds and targets differ within each method
            rows.append([key, *("\n".join(each) for each in cells.values())])
    if not rows:
        return [*blocks, Text("Nothing: they are equal." if not changed else "Nothing but targets, seeds and folders.")]
    text = Text("Keys in which not all are equal; '-' where a configuration lacks the key.")
    table = Table.of(["key", *dict.fromkeys(columns)], rows, words=len(columns) + 1)
    return [*blocks, text, table] if by_run else [*blocks, text, Folded(f"{len(rows)} keys", [table])]


def _over_rounds(federation: FederationRuns) -> list[Block]:
    """The target's scores over rounds by method, mean and spread over seeds."""
    blocks: list[Block] = []
    for number, target in enumerate(federation.targets, 1):
        here = by_title(run for run in federation.runs if run.target == target)
        if len(here) > _DISTINGUISHABLE:
            blocks.append(Text(f"{len(here)} settings on {target} are too many to be distinguished in one picture."))
            continue
        accuracy = [in_percent(line) for line in _means(here, "oracle/target/acc")]
        within = " (compares rounds of one method, not methods)" if len(here) > 1 else ""
        samples = f"{target}, validation samples"
        panels: list[Panel] = [
            *panel_of(f"{samples}: accuracy in % ({ORACLE})", accuracy),
            *panel_of(f"{samples}: R2 ({ORACLE})", _means(here, "oracle/target/r2")),
            *panel_of(f"{samples}: {TRUST}", _means(here, TRUST)),
            *panel_of(f"{samples}: target/score{within}", _means(here, "target/score")),
        ]
        if panels:
            blocks += drawn(panels, f"{federation.prefix}all_{number}", "all runs")
    if not blocks:
        return []
    repeated = len({run.seed for run in federation.runs}) > 1
    note = [Text("Means over seeds, with a band of one standard deviation to either side.")] if repeated else []
    return [Heading(2, f"The target over rounds{federation.suffix}"), *note, *blocks]


def _means(here: Mapping[str, Sequence[RunFolder]], name: str) -> list[Line]:
    """Per method the mean of a metric over the runs that have it, in rounds in which all of them have it."""
    lines = []
    for place, (method, runs) in enumerate(here.items()):
        curves = [run.curves[name] for run in runs if name in run.curves]
        rounds = [at for at in (curves[0] if curves else {}) if all(at in curve for curve in curves)]
        both = {at: mean_and_deviation([curve[at] for curve in curves]) for at in rounds}
        spread = {at: each for at, (_, each) in both.items() if each is not None}
        if both:
            lines.append(Line(method, {at: mean for at, (mean, _) in both.items()}, place, spread=spread))
    return lines


def _targets(federation: FederationRuns) -> list[Block]:
    """How samples of each target are predicted."""
    sections: list[tuple[str, list[Block]]] = []
    for number, target in enumerate(federation.targets, 1):
        here = by_title(run for run in federation.runs if run.target == target and run.summary is not None)
        blocks = target_blocks(target, here, f"{federation.prefix}target_{number}")
        if blocks:
            sections.append((target, blocks))
    if not sections:
        return []
    shown = sections[0][1] if len(sections) == 1 else [Folded(f"target {name}", blocks) for name, blocks in sections]
    return [Heading(2, f"How the target's samples are predicted{federation.suffix}"), *shown]
