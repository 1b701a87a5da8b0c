"""Runs as they go, from what is in their folders so far, as a page that a browser loads again and again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fedlit.callbacks.report.charts import Line, Panel
from fedlit.callbacks.report.pages import Block, Heading, Pictures, Text, pictures_in, to_html
from fedlit.callbacks.report.run import ORACLE, curves_of, drawn, panel_of
from fedlit.callbacks.report.run_folder import RunFolder, folders_of, read_progress
from fedlit.callbacks.run_record import METRICS, SETTINGS, SUMMARY
from fedlit.callbacks.shared import clock
from fedlit.tables import Table

SECONDS = 5
"""After which the page is loaded again."""

_SILENT = 120.0
"""Seconds without a change of its files, or ten rounds if these are longer, after which a run has stopped."""

_YEAR = 3.2e7
"""Seconds."""

_DRAWN = 4
"""Runs whose curves are drawn: those that go, else the last that ended."""

_RUNNING = "running"

_ACCURACY = f"{ORACLE} accuracy"
_HEADER = ("run", "state", "round", "ETA", "target score", _ACCURACY, "MB", "s a round", "target", "seed")

_FILES = (SUMMARY, METRICS, "config.yaml", SETTINGS)


Stamps = list[tuple[str, int, float]]
"""Name, size and time of change of each of a run's files."""


class LiveRuns:
    """All runs in or below some folders, each read again when its files have changed.

    Args:
        places: Folders.
    """

    def __init__(self, places: Sequence[Path]) -> None:
        self.places = places
        self._kept: dict[Path, tuple[str, Stamps, RunFolder | str]] = {}

    def page(self, sites: Mapping[str, str] | None = None, doing: str = "") -> str:
        """HTML of the runs, those that go first.

        Args:
            sites: What each site of a federation across organisations does, as its server knows; ``None`` elsewhere.
            doing: What the server waits for.
        """
        now = time.time()
        blocks: list[Block] = [Heading(1, f"Runs in {', '.join(map(str, self.places))}")]
        at = time.strftime("%H:%M:%S", time.localtime(now))
        blocks.append(Text(f"As of {at}; loaded again every {SECONDS} s."))
        if sites is not None:
            blocks += [Heading(2, "Sites"), Table.of(["site", "state"], [[*each] for each in sites.items()], words=2)]
            blocks += [Text(f"The server is at: {doing}.")] if doing else []
        changed, unread = self._read()
        runs = [run for run, _ in changed]
        if not runs and not unread:
            blocks.append(Text("No run has ended an epoch there yet."))
        silent = {run.name: now - at for run, at in changed}
        states = {run.name: _state(run, silent[run.name]) for run in runs}
        runs.sort(key=lambda run: (states[run.name] != _RUNNING, silent[run.name]))
        rows = [_row(run, states[run.name], silent[run.name]) for run in runs]
        rows += [[name, "cannot be read", *["-"] * (len(_HEADER) - 2)] for name in unread]
        if rows:
            blocks += [Heading(2, "Runs"), Table.of(_HEADER, rows, words=2)]
        blocks += [Text(reason) for reason in unread.values()]
        going = [run for run in runs if states[run.name] == _RUNNING] or runs[:1]
        for run in going[:_DRAWN]:
            blocks += [Heading(2, run.name), _curves(run)]
        return to_html("fedlit: runs", blocks, SECONDS)

    def _read(self) -> tuple[list[tuple[RunFolder, float]], dict[str, str]]:
        """Runs with the time of their last change; by name why others cannot be read, as while a file is written."""
        try:
            folders = folders_of(self.places)
        except FileNotFoundError:
            folders = {}
        earlier, self._kept = self._kept, {}
        for folder, name in folders.items():
            stamps = [*filter(None, (_stamp(folder / each) for each in _FILES))]
            before = earlier.get(folder)
            if before is None or before[:2] != (name, stamps):
                before = name, stamps, _progress(folder, name)
            self._kept[folder] = before
        kept = self._kept.values()
        read = [(run, _changed(stamps)) for _, stamps, run in kept if isinstance(run, RunFolder)]
        return read, {name: reason for name, _, reason in kept if isinstance(reason, str)}


def _stamp(path: Path) -> tuple[str, int, float] | None:
    """Name, size and time of change of a file; ``None`` if there is none."""
    with suppress(OSError):
        status = path.stat()
        return path.name, status.st_size, status.st_mtime
    return None


def _changed(stamps: Stamps) -> float:
    """When a run last wrote one of its files."""
    return max((at for *_, at in stamps), default=0.0)


def _progress(folder: Path, name: str) -> RunFolder | str:
    """A run, or why it cannot be read."""
    try:
        return read_progress(folder, name)
    except (OSError, ValueError) as error:
        return str(error)


def _curves(run: RunFolder) -> Block:
    try:
        return Pictures([*curves_of(run), *pictures_in(drawn(_bytes(run), "MB", run.name))])
    except (ArithmeticError, ValueError, TypeError):  # numbers that no chart can hold
        return Text(f"Its curves cannot be drawn: {METRICS} has numbers that are too large.")


def _pace(run: RunFolder) -> float | None:
    """Mean seconds of a round."""
    seconds = [each for each in run.curves.get("time/round_s", {}).values() if 0 <= each < _YEAR]
    return sum(seconds) / len(seconds) if seconds else None


def _state(run: RunFolder, silent: float) -> str:
    if run.summary is not None:
        return "ended"
    if silent < max(_SILENT, 10 * (_pace(run) or 0.0)):
        return _RUNNING
    return f"no sign for {clock(silent)}"


def _total(run: RunFolder) -> int | None:
    """Rounds that the run is to have, as its configuration has them."""
    epochs = run.config.get("trainer.max_epochs")
    per_epoch = run.config.get("trainer.strategy.init_args.rounds_per_epoch")
    if not isinstance(epochs, int) or not 0 <= epochs < 10**9:
        return None
    return epochs * (per_epoch if isinstance(per_epoch, int) and per_epoch > 0 else 1)


def _row(run: RunFolder, state: str, silent: float) -> list[str]:
    total, pace = _total(run), _pace(run)
    oracle = "oracle/target/r2" if run.is_regression else "oracle/target/acc"
    left = "-"
    if state == _RUNNING and total is not None and pace is not None:
        left = clock(min(_YEAR, max(0.0, pace * (total - run.num_rounds) - silent)))
    return [
        run.name,
        state,
        f"{run.num_rounds}" if total is None else f"{run.num_rounds} of {total}",
        left,
        _last(run, "target/score"),
        _last(run, oracle),
        _last(run, "comm/MB", 3),
        "-" if pace is None else f"{pace:.3g}",
        run.target,
        run.seed,
    ]


def _last(run: RunFolder, name: str, digits: int = 2) -> str:
    curve = run.curves.get(name)
    return f"{curve[max(curve)]:.{digits}f}" if curve else "-"


def _bytes(run: RunFolder) -> list[Panel]:
    """Megabytes of each round by channel, and of all until then."""
    names = sorted(name for name in run.curves if name.startswith("comm/") and name.count("/") == 2)
    channels = [Line(name.split("/")[1], run.curves[name], place) for place, name in enumerate(names)]
    sent = [Line("of the method", run.curves["comm/MB"])] if "comm/MB" in run.curves else []
    return [*panel_of("MB of a round, by channel", channels), *panel_of("MB sent so far", sent)]
