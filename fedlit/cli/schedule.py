"""Runs of an experiment, or of a sweep: one after the other or side by side, from where the same command was ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Protocol, TypeVar

from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fedlit.callbacks import RunSummary, closing_table
from fedlit.callbacks.report.run_folder import read_runs
from fedlit.callbacks.run_record import write_whole
from fedlit.callbacks.selection import as_json, select
from fedlit.callbacks.summary import write_tables
from fedlit.cli.command import causes
from fedlit.cli.experiment import Experiment
from fedlit.cli.folders import ExperimentFolder, first_process
from fedlit.cli.lightning_cli import Parsed
from fedlit.remote import Seat
from fedlit.remote.processes import LAST_LINES, PATIENCE, await_end

_ONE = "FEDLIT_RUN"
"""Set in the environment of a process that trains one run of the experiment: its number."""

_HOPELESS = 3
"""Failed runs, and none that did not fail, after which others are not tried."""

_T = TypeVar("_T")


class Runs(Protocol[_T]):
    """What is trained one after the other or side by side: runs of an experiment, or trials of a sweep."""

    @property
    def parsed(self) -> Parsed:
        """Of all, what ``jobs``, ``fresh`` and the number of hosts are taken from."""

    @property
    def runs(self) -> Sequence[_T]:
        """Each has a name as its text."""

    @property
    def folder(self) -> ExperimentFolder:
        """Where it is kept what is finished."""

    def start(
        self,
        run: _T,
        place: Callable[[Path], Path] | None = None,
        checkpoint: Path | None = None,
        seat: Seat | None = None,
    ) -> RunSummary:
        """Train and evaluate one of ``runs``."""


def run_all(experiment: Experiment, args: list[str]) -> None:
    """Train the runs that are not finished yet, and print and write the table of all.

    Args:
        experiment: With several runs.
        args: Of the command line, for processes that train single runs.
    """
    experiment.check()
    if trains_one(experiment):
        return
    folder, total = experiment.folder, len(experiment.runs)
    waiting = still_to_train(experiment)
    try:
        train_all(experiment, args, waiting)
    finally:  # a run that fails does not take the others' results with it
        done = [summary for number in range(total) if (summary := folder.finished(number)) is not None]
        if done:
            print_table(done)
            if first_process() and not is_dry(experiment):
                paths = write_tables(done, folder.path)
                say(f"tables: {', '.join(map(str, paths))}")
                if experiment.parsed.arguments.select is not None:
                    _select(folder, total)


def trains_one(experiment: Runs[_T]) -> bool:
    """Train the one run that this process was started for; ``False`` if it was started by the user."""
    one = os.environ.get(_ONE)  # left there for further processes of the same run
    if one is None:
        return False
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    train(experiment, int(one))
    return True


def still_to_train(experiment: Runs[_T]) -> list[int]:
    """Numbers of the runs that are not finished, and a sentence on those that are."""
    jobs, folder, total = experiment.parsed.arguments.jobs, experiment.folder, len(experiment.runs)
    if jobs < 1:
        sys.exit(f"fedlit: jobs must be at least 1, got {jobs}: it is how many runs are trained side by side")
    if jobs > 1 and "LOCAL_RANK" in os.environ:
        sys.exit("fedlit: jobs starts processes by itself: leave torchrun out, or give --jobs 1")
    waiting = [*range(total)]
    if not _afresh(experiment):
        waiting = [number for number in waiting if folder.finished(number) is None]
    elif first_process():
        folder.forget()
    if len(waiting) < total:
        say(
            f"{total - len(waiting)} of {total} runs are finished already, in '{folder.root}': --fresh true "
            "trains them again"
        )
    return waiting


def train_all(
    experiment: Runs[_T], args: list[str], waiting: Sequence[int], failed: dict[int, str] | None = None
) -> None:
    """Train runs.

    Args:
        experiment: Of which.
        args: Of the command line, for processes that train single runs.
        waiting: Numbers of the runs.
        failed: Filled with what runs failed of, by number, while others go on; ``None`` ends with the first.
    """
    jobs = 1 if is_dry(experiment) else experiment.parsed.arguments.jobs  # which leaves no file for another process
    clock = Clock(len(experiment.runs), len(waiting), min(jobs, max(1, len(waiting))))
    if jobs > 1:
        _side_by_side(experiment, args, waiting, clock, failed)
        return
    for number in waiting:
        say(clock.line(number, str(experiment.runs[number])) + _taken(experiment.folder, number))
        try:
            train(experiment, number)
        except (Exception, SystemExit) as error:
            if failed is None or any(isinstance(each, KeyboardInterrupt | SIGTERMException) for each in causes(error)):
                raise
            reason = str(error) if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
            _go_on(failed, number, f"run {number + 1} of {clock.total} ({experiment.runs[number]}) failed: {reason}")
        clock.tick(failed)


def _go_on(failed: dict[int, str] | None, number: int, text: str) -> None:
    """Note what a run failed of, or end with it where others do not go on."""
    if failed is None:
        sys.exit(f"fedlit: {text}")
    failed[number] = text
    say(f"fedlit: {text}")


def _select(folder: ExperimentFolder, number: int) -> None:
    """Print, and write, which of the finished runs to take the model of."""
    places = [folder.folder_of(each) for each in range(number) if folder.finished(each) is not None]
    found = select({str(place): read_runs([place])[0] for place in places if place is not None})
    path = folder.path / "selected.json"
    write_whole(path, as_json(found))
    for each in found:
        say(str(each))
    if not found:
        say("nothing is selected: no validation has logged validator/trust, as where reports are off")


@dataclass
class Clock:
    """Shows which run it is, and how long the others will take.

    Args:
        total: Runs of the experiment.
        left: Of them, those that are not finished.
        jobs: Trained side by side.
    """

    total: int
    left: int
    jobs: int

    def __post_init__(self) -> None:
        self._start, self._done = time.monotonic(), 0

    def tick(self, failed: dict[int, str] | None = None) -> None:
        """One more has ended; end with it if it is one of several that failed, and none is finished."""
        self._done += 1
        if failed and len(failed) == self._done == _HOPELESS and self.left == self.total:
            sys.exit(f"fedlit: the first {_HOPELESS} runs failed, and others are not tried")

    def line(self, number: int, run: str) -> str:
        """For the run of this number that starts."""
        about = ""
        if self._done:
            seconds = (time.monotonic() - self._start) / self._done * (self.left - self._done)
            minutes = round(seconds / 60)
            about = f", about {minutes} min left" if minutes else ", less than a minute left"
        return f"run {number + 1} of {self.total}{about}: {run}"


def _taken(folder: ExperimentFolder, number: int) -> str:
    """What is added to the line of a run that somebody else trains."""
    return "; another command trains it, and this one waits for its end" if folder.busy(number) else ""


def is_dry(experiment: Runs[_T]) -> bool:
    """Whether runs are to try the code for a batch or a few (fast_dev_run), and write nothing."""
    return bool(experiment.parsed.arguments.trainer.fast_dev_run)


def _afresh(experiment: Runs[_T]) -> bool:
    """Whether to train all runs, whatever there is: also if hosts, which would have to agree, each have a disk."""
    arguments = experiment.parsed.arguments
    hosts = max(arguments.trainer.num_nodes or 1, int(os.environ.get("GROUP_WORLD_SIZE", "1")))  # as of torchrun
    return bool(arguments.fresh) or hosts > 1


def train(experiment: Runs[_T], number: int, seat: Seat | None = None, until: int | None = None) -> None:
    """Train one run, unless another command has done so by now.

    Args:
        experiment: Of which.
        number: Of the run.
        seat: In a federation across organisations.
        until: Round that a checkpoint to go on from comes before at the latest.
    """
    folder = experiment.folder
    afresh = _afresh(experiment)
    with folder.held(number):
        if first_process() and folder.finished(number) is not None and not (seat and afresh):
            if "LOCAL_RANK" in os.environ:  # the other processes of this one are in the run already
                sys.exit("fedlit: another command trains the same experiment: wait for its end")
            return
        checkpoint = None if afresh else folder.checkpoint(number, until)
        folder.keep(number, experiment.start(experiment.runs[number], partial(folder.place, number), checkpoint, seat))


def _side_by_side(
    experiment: Runs[_T], args: list[str], waiting: Sequence[int], clock: Clock, failed: dict[int, str] | None
) -> None:
    """Train runs in processes of their own, each with its share of the cores."""
    folder, queue = experiment.folder, [*waiting]
    folder.path.mkdir(parents=True, exist_ok=True)
    threads = max(1, (os.cpu_count() or 1) // clock.jobs)
    running: dict[int, subprocess.Popen[bytes]] = {}
    before = signal.signal(signal.SIGTERM, _end)
    try:
        while queue or running:
            while queue and len(running) < clock.jobs:
                number = queue.pop(0)
                say(clock.line(number, str(experiment.runs[number])) + _taken(folder, number))
                with folder.log(number).open("wb") as log:
                    running[number] = _start(args, number, threads, log)
            time.sleep(0.05)
            for number in [number for number, process in running.items() if process.poll() is not None]:
                process = running.pop(number)
                if process.returncode or folder.finished(number) is None:
                    lines = folder.log(number).read_text(encoding="utf-8", errors="replace").splitlines()
                    ending = "\n".join(lines[-LAST_LINES:])
                    run = f"run {number + 1} of {clock.total} ({experiment.runs[number]})"
                    _go_on(failed, number, f"{run} failed; '{folder.log(number)}' ends with:\n{ending}")
                clock.tick(failed)
    finally:
        signal.signal(signal.SIGTERM, before)
        for process in running.values():
            process.terminate()
        for process in running.values():
            await_end(process)


def _end_with(parent: int) -> None:
    """End this process if the one that has started it was killed, or else nobody would know of it."""
    while os.getppid() == parent:
        time.sleep(1)
    print("fedlit: the command that has started this run is gone: it ends, too", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)
    os._exit(1)


def _end(*_: object) -> None:
    raise SIGTERMException


def _start(args: list[str], number: int, threads: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    own = {_ONE: str(number), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    # -P: the folder's files go before installed ones where they do in this process, and not in a clone, say
    safe = [] if {"", os.getcwd()} & {*sys.path} else ["-P"]
    command = [sys.executable, *safe, "-m", "fedlit.cli", *args]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **own})


@rank_zero_only
def say(text: str) -> None:
    """Print, in one process alone."""
    print(text, flush=True)


@rank_zero_only
def print_table(summaries: list[RunSummary], one_method: bool = False) -> None:
    """Print what runs came to; with ``one_method`` they are called by settings of one."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 140).print(closing_table(summaries, one_method))
