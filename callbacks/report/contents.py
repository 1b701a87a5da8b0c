"""What runs of ``fedlit fit`` came to, as one HTML page and the same as Markdown."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedlit.callbacks.communication_ledger import Sums, split, sums_of
from fedlit.callbacks.privacy_report import NOT_PROTECTED, declared, described, traffic
from fedlit.callbacks.report.curves import Line, Panel, draw
from fedlit.callbacks.report.pages import (
    Block,
    Bullets,
    Folded,
    Heading,
    Links,
    Picture,
    Pictures,
    Table,
    Text,
    to_html,
    to_markdown,
)
from fedlit.callbacks.report.run_folder import METRICS, SUMMARY, Curve, RunFolder, as_yaml, differences
from fedlit.callbacks.shared import LOGGING_CHANNELS
from fedlit.callbacks.summary import RunSummary, closing_table
from fedlit.federation import KEYS

_TOLD_APART = 16
"""Most curves of runs in one picture."""

_NAMEABLE = 3
"""Most keys by which a method's settings are called; where they differ in more, they are called by their runs."""

_ORACLE = "ORACLE"
_ORACLE_MEANS = (
    f"{_ORACLE} marks numbers that are measured with the target's hidden labels. No federation has them, and nothing "
    "may be selected by them."
)
_ROUNDS_MEAN = (
    f"Rounds are those of the column 'round' of {METRICS}, the first is 0. An evaluation on validation samples is that "
    "of the last round that had ended before it. The one on test samples comes after training and is in no curve."
)
_PRIVACY_KEYS = tuple(f"trainer.strategy.init_args.{name}" for name in ("privacy", "two_party", "differential_privacy"))


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
    for picture in (picture for block in blocks if isinstance(block, Pictures) for picture in block.pictures):
        (folder / picture.file).write_bytes(picture.content)
    return [path, page, folder]


def report_on(runs: Sequence[RunFolder]) -> tuple[str, list[Block]]:
    """Title and content of the page on at least one run."""
    title = f"{_listed(run.method for run in runs)} on {_listed(run.target for run in runs)}"
    blocks: list[Block] = [Heading(1, title), Text(f"{_ORACLE_MEANS} {_ROUNDS_MEAN}"), *_overview(runs)]
    if len(runs) > 1:
        blocks += [*_config_diff(runs), *_side_by_side(runs)]
    for place, run in enumerate(runs):
        blocks += _run(run, f"run-{place + 1}")
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


def _overview(runs: Sequence[RunFolder]) -> list[Block]:
    rows = [[run.name, run.method, run.target, run.seed, _state(run), str(run.num_rounds)] for run in runs]
    blocks: list[Block] = [
        Heading(2, "One run" if len(runs) == 1 else f"{len(runs)} runs"),
        Table(["folder", "method", "target", "seed", "state", "rounds"], rows, words=5),
    ]
    if len(runs) > 1:
        blocks.append(Links([(_heading(run), f"run-{place + 1}") for place, run in enumerate(runs)]))
    blocks.append(Heading(2, "Closing table"))
    finished = _told_apart([run for run in runs if run.summary is not None])
    if not finished:
        return [*blocks, Text(f"No run has finished: the table is made of what {SUMMARY} says.")]
    closing = closing_table(finished)
    if closing.title is not None:
        blocks.append(Text(f"Over repetitions: {closing.title}."))
    if len(finished) < len(runs):
        blocks.append(Text(f"Of finished runs alone: {len(finished)} of {len(runs)}."))
    columns = [column.replace("\n", " ") for column in closing.columns]
    sums = frozenset(place for place, row in enumerate(closing.rows) if row.style)
    # the channels are words among numbers: last, they leave the numbers in one block
    order = sorted(range(len(columns)), key=lambda place: columns[place] == "MB by channel")
    header = [columns[place] for place in order]
    return [
        *blocks,
        Table(header, [[row.cells[place] for place in order] for row in closing.rows], words=2, sums=sums),
        Bullets(list(closing.notes)),
    ]


_SAME_METHOD = re.compile(
    r"seed_everything$|seeds|targets|compare|data\.init_args\.target$|trainer\.(default_root_dir|logger)"
)
"""Keys in which repetitions of one method differ."""


def _told_apart(runs: Sequence[RunFolder]) -> list[RunSummary]:
    """Summaries of finished runs, settings of one method under names of their own.

    Where a method's runs differ in more than target and seed, as in a sweep, its name is followed by what differs, or,
    where that is much, by the first folder of the setting. Runs that are equal in target and seed, too, are called by
    their folders, or else they would count as repetitions.
    """
    told: dict[str, str] = {}
    for method in dict.fromkeys(run.method for run in runs):
        same = [run for run in runs if run.method == method]
        settings = [{k: v for k, v in run.config.items() if not _SAME_METHOD.match(k)} for run in same]
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
            shown = (*words, run.name) if words in again else words
            told[run.name] = f"{method} ({', '.join(shown)})" if shown else method
    return [replace(run.summary, method=told[run.name]) for run in runs if run.summary is not None]


def _config_diff(runs: Sequence[RunFolder]) -> list[Block]:
    known = [run for run in runs if run.config]
    blocks: list[Block] = [Heading(2, "What differs in the configurations")]
    for run in runs:
        if not run.config:
            blocks.append(Text(f"{run.name} has no config.yaml and is left out."))
    found = differences([run.config for run in known])
    if len(known) < 2:
        return [*blocks, Text("There are no two configurations to compare.")]
    if not found:
        return [*blocks, Text("Nothing: they are equal.")]
    rows = [[key, *values] for key, values in found.items()]
    return [
        *blocks,
        Text("Keys in which not all are equal; '-' where a configuration lacks the key."),
        Table(["key", *(run.name for run in known)], rows, words=len(known) + 1),
    ]


def _side_by_side(runs: Sequence[RunFolder]) -> list[Block]:
    """The target of all runs that adapt to it, over rounds."""
    blocks: list[Block] = []
    for number, target in enumerate(dict.fromkeys(run.target for run in runs), 1):
        here = [run for run in runs if run.target == target]
        if len(here) > _TOLD_APART:
            blocks.append(Text(f"{len(here)} runs on {target} are too many to be told apart in one picture."))
            continue
        panels: list[Panel] = []
        for metric, title in (("acc", "accuracy in %"), ("r2", "R2")):
            name = f"oracle/target/{metric}"
            lines = [line for place, run in enumerate(here) for line in _line(run, name, run.name, place)]
            shown = [_in_percent(line) for line in lines] if metric == "acc" else lines
            panels += _panel(f"{target}, validation samples: {title} ({_ORACLE})", shown)
        free = [line for place, run in enumerate(here) for line in _line(run, "target/score", run.name, place)]
        panels += _panel(f"{target}, validation samples: label-free score", free)
        if panels:
            blocks += _drawn(panels, f"all_{number}", "all runs")
    return [Heading(2, "The target over rounds"), *blocks] if blocks else []


def _run(run: RunFolder, anchor: str) -> list[Block]:
    blocks: list[Block] = [Heading(2, _heading(run), anchor)]
    if run.summary is None:
        blocks.append(
            Text(
                f"This run has no {SUMMARY}: it was interrupted, or was not one of fedlit fit. What follows is what it "
                f"left until then, {run.num_rounds} rounds."
            )
        )
    if not run.curves:
        blocks.append(Text(f"There are no curves: {METRICS} has no round, or there is none, as with other loggers."))
    blocks += _clients(run)
    for title, panels in (
        ("Accuracy" if _metric(run) == "acc" else "R2", _scores(run)),
        ("Losses", _losses(run)),
        ("Weights of the sources", _weights(run)),
        ("Barycentric coordinates", _coordinates(run)),
    ):
        if panels:
            blocks += [Heading(3, title), *_drawn(panels, f"{anchor}_{_slug(title)}", run.name)]
    blocks += [Heading(3, "Communication"), *_communication(run, anchor)]
    blocks += [Heading(3, "Privacy"), *_privacy(run, anchor)]
    if run.pictures:
        pictures = [
            Picture(f"{anchor}_{path.name}", f"{run.name}: {path.stem}", path.read_bytes()) for path in run.pictures
        ]
        blocks += [Heading(3, "Pictures of the run"), Pictures(pictures, wide=True)]
    return blocks


def _slug(title: str) -> str:
    return title.lower().replace(" ", "_")


def _drawn(panels: Sequence[Panel], file: str, whose: str) -> list[Block]:
    """Pictures of panels, and their numbers."""
    pictures = [
        Picture(f"{file}_{place + 1}.svg", f"{whose}: {panel.title}", draw(panel)) for place, panel in enumerate(panels)
    ]
    return [Pictures(pictures), *(Folded(f"numbers: {panel.title}", _by_round(panel.lines)) for panel in panels)]


def _by_round(lines: Sequence[Line]) -> Table:
    rounds = sorted({round_idx for line in lines for round_idx in line.points})
    rows = [
        [str(round_idx), *(_number(line.points[round_idx]) if round_idx in line.points else "" for line in lines)]
        for round_idx in rounds
    ]
    return Table(["round", *(line.label for line in lines)], rows, words=0)


def _number(value: float) -> str:
    """Four digits; whole numbers in full."""
    return f"{value:,.0f}" if math.isfinite(value) and value == int(value) else f"{value:#.4g}"


# ---------------------------------------------------------------- what is measured


def _metric(run: RunFolder) -> str:
    """How well a client does: accuracy, or in regression R2."""
    return "r2" if any(name.endswith("/r2") for name in (*run.curves, *run.final)) else "acc"


def _sources(run: RunFolder) -> list[str]:
    found = (re.fullmatch(r"source/([^/]+)/\w+", name) for name in (*run.curves, *run.final))
    return sorted({match[1] for match in found if match})


def _line(run: RunFolder, name: str, label: str, place: int | None, emphasis: bool = False) -> list[Line]:
    """A curve, if it was logged."""
    return [Line(label, run.curves[name], place, emphasis)] if name in run.curves else []


def _per_source(run: RunFolder, name: str) -> list[Line]:
    """Curves of ``name``, in which ``*`` stands for a source."""
    sources = list(enumerate(_sources(run)))
    return [line for place, source in sources for line in _line(run, name.replace("*", source), source, place)]


def _panel(
    title: str, lines: Sequence[Line], limits: tuple[float, float] | None = None, logarithmic: bool = False
) -> list[Panel]:
    """A panel, if there is something to draw."""
    return [Panel(title, lines, limits, logarithmic)] if lines else []


def _target(run: RunFolder) -> str:
    return f"{run.target} (target, {_ORACLE})"


def _scores(run: RunFolder) -> list[Panel]:
    metric = _metric(run)
    lines = [
        *_per_source(run, f"source/*/{metric}"),
        *_line(run, f"source/{metric}", "mean of sources", None),
        *_line(run, f"oracle/target/{metric}", _target(run), None, True),
    ]
    first = len(_sources(run))
    others = sorted(name for name in run.curves if re.fullmatch(rf"oracle/target/[^/]+/{metric}", name))
    for place, name in enumerate(others, first):
        lines += _line(run, name, f"{run.target} by {name.split('/')[2]} ({_ORACLE})", place)
    if metric == "acc":
        lines = [_in_percent(line) for line in lines]
        panels = _panel("accuracy on validation samples, in %", lines, (-2, 102))
    else:
        panels = _panel("R2 on validation samples, at most 1", lines)
    validators = sorted(name for name in run.curves if name.startswith("validator/"))
    free = _line(run, "target/score", "target/score", None)
    for place, name in enumerate(validators):
        free += _line(run, name, name, place)
    return [*panels, *_panel("label-free scores of the target, the higher the better", free)]


def _in_percent(line: Line) -> Line:
    return Line(line.label, {at: 100 * value for at, value in line.points.items()}, line.place, line.emphasis)


def _losses(run: RunFolder) -> list[Panel]:
    last = len(_sources(run))
    training = [
        *_per_source(run, "source/*/loss"),
        *_line(run, "target/loss", f"{run.target} (target)", last),
        *_line(run, "train/loss", "mean of clients", None),
    ]
    validation = [*_per_source(run, "source/*/eval_loss"), *_line(run, "oracle/target/loss", _target(run), None, True)]
    return [
        *_panel("training loss, mean over the local steps of a round", training, logarithmic=True),
        *_panel("loss on validation samples", validation, logarithmic=True),
    ]


def _weights(run: RunFolder) -> list[Panel]:
    beta = [*_per_source(run, "beta/*"), *_line(run, "beta", "mean of sources", None, True)]
    distance = [*_per_source(run, "distance/*"), *_line(run, "target_variance", "target variance", None, True)]
    return [
        *_panel("weight of the source, beta", beta, (-0.03, 1.03)),
        *_panel("squared distance of updates, and variance of the target's", distance, logarithmic=True),
        *_panel("tau: distance of g_T to the directions of g_S, over d", _per_source(run, "tau/*"), (-0.03, 1.03)),
    ]


def _coordinates(run: RunFolder) -> list[Panel]:
    panels: list[Panel] = []
    costs: list[Line] = []
    for place, (client, columns) in enumerate(run.dictionary.items()):
        role = f"{client} (target)" if client == run.target else client
        atoms = [name for name in columns if name.startswith("coordinate_")]
        lines = [Line(f"atom {name.removeprefix('coordinate_')}", columns[name], at) for at, name in enumerate(atoms)]
        panels += _panel(f"barycentric coordinates of {role}", lines, (-0.03, 1.03))
        costs += [Line(role, columns["transport_cost"], place)] if "transport_cost" in columns else []
    return [*panels, *_panel("cost of transport to the client's barycenter", costs)]


def _clients(run: RunFolder) -> list[Block]:
    """How each client does in the end."""
    metric = _metric(run)
    unit = "accuracy in %" if metric == "acc" else "R2"
    rows = [
        _client_row(run, source, "source", f"source/{source}/{metric}", f"source/{source}/loss")
        for source in _sources(run)
    ]
    role = f"target (its {unit.split()[0]}: {_ORACLE})"
    rows.append(_client_row(run, "mean", "sources", f"source/{metric}", None))
    rows.append(_client_row(run, run.target, role, f"oracle/target/{metric}", "target/loss"))
    rows = [row for row in rows if any(row[2:])]
    if not rows:
        return []
    header = [f"{unit}, last validation", "in round", f"{unit}, test samples", "last training loss"]
    return [Table(["client", "role", *header], rows, words=2)]


def _client_row(run: RunFolder, client: str, role: str, score: str, loss: str | None) -> list[str]:
    curve: Curve = run.curves.get(score, {})
    losses: Curve = run.curves.get(loss or "", {})
    last = max(curve, default=None)
    return [
        client,
        role,
        "" if last is None else _score(score, curve[last]),
        "" if last is None else str(last),
        _score(score, run.final[score]) if score in run.final else "",
        _number(losses[max(losses)]) if losses else "",
    ]


def _score(name: str, value: float) -> str:
    return f"{100 * value:.1f}" if name.endswith("acc") else f"{value:.3f}"


# ---------------------------------------------------------------- what was sent, and under whose protection


def _communication(run: RunFolder, anchor: str) -> list[Block]:
    if run.ledger is None:
        return _logged_bytes(run, anchor)
    channels, method, everything = sums_of(run.ledger)
    own, other = split(channels)
    named = [*((name, channels[name]) for name in own), ("method", method)]
    named += [*((name, channels[name]) for name in other), ("all", everything)] if other else []
    header = ["rounds", "messages", "up", "down", "between clients", "total", "per round"]
    rows = [[name, *_sums(sums)] for name, sums in named]
    sums = frozenset(place for place, row in enumerate(rows) if row[0] in ("method", "all") and row[0] not in channels)
    points: dict[str, dict[int, float]] = {name: {} for name in (*own, *other)}
    for entry in run.ledger:
        sent = points[entry.channel]
        sent[entry.round_idx] = sent.get(entry.round_idx, 0) + entry.num_bytes
    return [
        Text(
            "Bytes by channel, as the ledger has them: up to the server, down from it, and from client to client; per "
            "round in which the channel was used. The channels 'metrics', 'oracle' and 'source_moments' carry what is "
            "watched, and are not the method's; numbers of an evaluation are booked to the round that it is of, other "
            "messages between two rounds to the later one."
        ),
        Table(["channel", *header], rows, sums=sums),
        *_drawn(_bytes_by_channel(points), f"{anchor}_communication", run.name),
    ]


def _sums(sums: Sums) -> list[str]:
    rounds = len(sums.rounds)
    sent = (sums.up, sums.down, sums.across, sums.total, round(sums.total / max(1, rounds)))
    return [str(rounds), f"{sums.messages:,}", *(f"{number:,}" for number in sent)]


def _bytes_by_channel(points: Mapping[str, Mapping[int, float]]) -> list[Panel]:
    own, _ = split(points)
    lines = [Line(name, points[name], own.index(name) if name in own else None) for name in points]
    return _panel("bytes sent in a round, by channel", lines, logarithmic=True)


def _logged_bytes(run: RunFolder, anchor: str) -> list[Block]:
    """By the metrics, where the ledger was not written."""
    found = {name: re.fullmatch(r"comm/(.+)/MB", name) for name in run.curves}
    # a channel that is silent in a round is logged as 0, and has no entry in a ledger
    points = {
        match[1]: {at: float(round(1e6 * amount)) for at, amount in run.curves[name].items() if amount}
        for name, match in found.items()
        if match
    }
    points = {channel: sent for channel, sent in points.items() if sent}
    if not points:
        return [Text("Not known: there is no ledger.csv, and no round has logged bytes.")]
    rows = [
        [channel, str(len(sent)), f"{sum(sent.values()):,.0f}", f"{sum(sent.values()) / len(sent):,.0f}"]
        for channel, sent in points.items()
    ]
    return [
        Text(
            f"There is no ledger.csv: bytes are those that {METRICS} has of each round when it ended, without who sent "
            "to whom, and without what evaluations report after it."
        ),
        Table(["channel", "rounds", "total", "per round"], rows),
        *_drawn(_bytes_by_channel(points), f"{anchor}_communication", run.name),
    ]


def _epsilon(value: float | None) -> str:
    """In words; JSON has no infinity, so that one is missing there."""
    return "without bound" if value is None else f"{value:.3g}"


def _privacy(run: RunFolder, anchor: str) -> list[Block]:
    blocks: list[Block] = []
    if run.privacy is not None:
        channels = run.privacy.channels
        names = [channel.channel for channel in channels]
        told = declared([channel.sent for channel in channels])
        rows = [told, *described([channel.description for channel in channels]), *traffic(channels)]
        if any(channel.clip_norm is not None for channel in channels):
            by_message, by_sum = map(_epsilon, (run.privacy.epsilon_message, run.privacy.epsilon_sum))
            blocks.append(
                Text(
                    f"Greatest privacy loss of a client, at most: epsilon {by_message} against those who see single "
                    f"messages, {by_sum} against those who see sums only."
                )
            )
    else:
        blocks.append(
            Text(
                "There is no privacy.json (--trainer.callbacks+=fedlit.callbacks.PrivacyReport writes it): this is "
                "what the run's other files tell."
            )
        )
        configured = [
            f"{key.removeprefix('trainer.strategy.init_args.')}: {as_yaml(value)}"
            for key, value in run.config.items()
            if key.startswith(_PRIVACY_KEYS) and value is not None
        ]
        blocks.append(Bullets(configured) if configured else Text("No privacy backend is configured."))
        sent = {} if run.summary is None else run.summary.bytes_by_channel
        names = [name for name in sent if name not in LOGGING_CHANNELS and not name.endswith(KEYS)]
        rows = []
        if run.summary is not None:
            told = declared([run.summary.channels.get(name, "") for name in names])
            rows = [told, *described([run.summary.backends.get(name) for name in names])]
    if names:
        blocks.append(Table(["", *names], rows, words=len(names) + 1))
    spent = [
        *_line(run, "privacy/epsilon", "who sees single messages", 0),
        *_line(run, "privacy/epsilon_sum", "who sees sums only", 1),
    ]
    panels = _panel("epsilon spent by a client, at most, against those", spent)
    return [*blocks, *(_drawn(panels, f"{anchor}_privacy", run.name) if panels else [])]
