"""Runs as they go, from what is in their folders so far, as a page that a browser loads again and again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedlit.callbacks.report.charts import Line, Panel
from fedlit.callbacks.report.pages import Block, Heading, Pictures, Text, pictures_in, to_html
from fedlit.callbacks.report.run import ORACLE, curves_of, drawn, panel_of
from fedlit.callbacks.report.run_folder import RunFolder, read_runs
from fedlit.callbacks.run_record import METRICS, SETTINGS, SUMMARY
from fedlit.callbacks.shared import clock
from fedlit.tables import Table

SECONDS = 5
"""After which the page is loaded again."""

_SILENT = 120.0
"""Seconds without a change of its files after which a run that has not ended is said to give no sign, at least; one of
long rounds has the time of ten."""

_DRAWN = 4
"""Runs whose curves are drawn: those that go, else the last that ended."""

_RUNNING = "running"

_FILES = (SUMMARY, METRICS, "config.yaml", SETTINGS)


def live_page(places: Sequence[Path], sites: Mapping[str, str] | None = None, doing: str = "") -> str:
    """HTML of all runs in or below some folders, those that go first; reads the folders.

    Args:
        places: Folders.
        sites: What each site of a federation across organisations does, as its server knows it; ``None`` elsewhere.
        doing: What the server waits for.
    """
    now = time.time()
    blocks: list[Block] = [Heading(1, f"Runs in {', '.join(map(str, places))}")]
    blocks.append(Text(f"As of {time.strftime('%H:%M:%S', time.localtime(now))}; loaded again every {SECONDS} s."))
    if sites is not None:
        blocks += [Heading(2, "Sites"), Table.of(["site", "state"], [[*each] for each in sites.items()], words=2)]
        blocks += [Text(f"The server is at: {doing}.")] if doing else []
    try:
        runs = read_runs(places)
    except FileNotFoundError:
        return _html([*blocks, Text("No run has ended an epoch there yet.")])
    except (OSError, ValueError) as error:  # such as a file that is being written
        return _html([*blocks, Text(str(error))])
    changed = {run.name: _changed(run.folder) for run in runs}
    states = {run.name: _state(run, now - changed[run.name]) for run in runs}
    runs.sort(key=lambda run: (states[run.name] != _RUNNING, -changed[run.name]))
    accuracy = f"{ORACLE} accuracy"
    header = ["run", "state", "round", "ETA", "target score", accuracy, "MB", "s a round", "target", "seed"]
    rows = [_row(run, states[run.name], now - changed[run.name]) for run in runs]
    blocks += [Heading(2, "Runs"), Table.of(header, rows, words=2)]
    going = [run for run in runs if states[run.name] == _RUNNING] or runs[:1]
    for run in going[:_DRAWN]:
        blocks += [Heading(2, run.name), Pictures([*curves_of(run), *pictures_in(drawn(_bytes(run), "MB", run.name))])]
    return _html(blocks)


def _html(blocks: Sequence[Block]) -> str:
    return to_html("fedlit: runs", blocks, SECONDS)


def _changed(folder: Path) -> float:
    """When a run last wrote one of its files."""
    return max((path.stat().st_mtime for name in _FILES if (path := folder / name).is_file()), default=0.0)


def _pace(run: RunFolder) -> float | None:
    """Mean seconds of a round."""
    seconds = run.curves.get("time/round_s") or {}
    return sum(seconds.values()) / len(seconds) if seconds else None


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
    if not isinstance(epochs, int) or epochs < 0:
        return None
    return epochs * (per_epoch if isinstance(per_epoch, int) and per_epoch > 0 else 1)


def _row(run: RunFolder, state: str, silent: float) -> list[str]:
    total, pace = _total(run), _pace(run)
    oracle = "oracle/target/r2" if run.is_regression else "oracle/target/acc"
    left = "-"
    if state == _RUNNING and total is not None and pace is not None:
        left = clock(max(0.0, pace * (total - run.num_rounds) - silent))
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
