"""Runs as they go, from what is in their folders so far, as a page that a browser loads again and again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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
"""Seconds without a change of its files after which a run that has not ended is said to give no sign, at least; one of
long rounds has the time of ten."""

_YEAR = 3.2e7
"""Seconds."""

_DRAWN = 4
"""Runs whose curves are drawn: those that go, else the last that ended."""

_RUNNING = "running"

_HEADER = (
    *("run", "state", "round", "ETA", "target score"),
    *(f"{ORACLE} accuracy", "MB", "s a round", "target", "seed"),
)

_FILES = (SUMMARY, METRICS, "config.yaml", SETTINGS)


class LiveRuns:
    """All runs in or below some folders, each read again when its files have changed.

    Args:
        places: Folders.
    """

    def __init__(self, places: Sequence[Path]) -> None:
        self.places = places
        self._kept: dict[Path, tuple[object, RunFolder | str]] = {}

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
        runs, unread = self._read()
        if not runs and not unread:
            blocks.append(Text("No run has ended an epoch there yet."))
        silent = {run.name: now - _changed(run.folder) for run in runs}
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

    def _read(self) -> tuple[list[RunFolder], dict[str, str]]:
        """Runs, and by name why others cannot be read, such as one whose file is being written."""
        try:
            folders = folders_of(self.places)
        except FileNotFoundError:
            folders = {}
        kept = {}
        for folder, name in folders.items():
            stamp = (name, *map(_stamp, (folder / each for each in _FILES)))
            if self._kept.get(folder, (None, ""))[0] == stamp:
                kept[folder] = self._kept[folder]
                continue
            try:
                kept[folder] = stamp, read_progress(folder, name)
            except (OSError, ValueError) as error:
                kept[folder] = stamp, str(error)
        self._kept = kept
        runs = [run for _, run in kept.values() if isinstance(run, RunFolder)]
        return runs, {folders[folder]: reason for folder, (_, reason) in kept.items() if isinstance(reason, str)}


def _stamp(path: Path) -> tuple[int, int] | None:
    """Size and time of change of a file; ``None`` if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _curves(run: RunFolder) -> Block:
    try:
        return Pictures([*curves_of(run), *pictures_in(drawn(_bytes(run), "MB", run.name))])
    except (ArithmeticError, ValueError, TypeError):  # numbers that no chart can hold
        return Text(f"Its curves cannot be drawn: {METRICS} has numbers that are too large.")


def _changed(folder: Path) -> float:
    """When a run last wrote one of its files."""
    return max((path.stat().st_mtime for name in _FILES if (path := folder / name).is_file()), default=0.0)


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
