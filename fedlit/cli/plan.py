"""Runs of one command: an experiment's or a sweep's, each trained once, one after the other or side by side.

The same command again takes finished runs as they are, and goes on with those that were interrupted.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fedlit.callbacks import RunSummary, closing_table
from fedlit.callbacks.summary import write_tables
from fedlit.cli.command import causes
from fedlit.cli.folders import STARTS, ExperimentFolder, first_of_host, first_process, set_aside
from fedlit.cli.lightning_cli import FedlitCLI
from fedlit.cli.parsed import Parsed
from fedlit.federation.client import names_of
from fedlit.federation.leaks import hidden_senders, over_other_senders, over_other_targets
from fedlit.module import FederatedModule
from fedlit.privacy import PrivacyWarning
from fedlit.remote import Seat
from fedlit.remote.processes import LAST_LINES, PATIENCE, await_end

_ONE = "FEDLIT_RUN"
"""Set in the environment of a process that trains a single run: its number."""


class WarnOfRepeats(Callback):
    """Warns, before a run trains, of sums that reveal single messages beside those of the plan's other runs."""

    def __init__(self, targets: Sequence[str]) -> None:
        self.targets = targets
        self._senders: dict[tuple[str, int], Any] = {}  # of earlier runs, by target and seed

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The channels of the run are known now."""
        assert isinstance(pl_module, FederatedModule)
        federation = pl_module.federation
        channels, run = federation.channels, (federation.target.name, federation.seed)
        method, before = self._senders.setdefault(run, (type(pl_module).__name__, hidden_senders(channels)))
        for sentence in (
            *over_other_targets(channels, names_of(federation.clients), self.targets),
            *over_other_senders(channels, before, method),
        ):
            rank_zero_warn(sentence, category=PrivacyWarning)


class Plan(ABC):
    """Runs that one command stands for.

    Attributes:
        parsed: Configuration from which ``jobs``, ``fresh`` and the number of hosts are taken.
        runs: What is trained; each prints as the name of the run.
        targets_tried: Clients that are the target of a run, as far as the command varies it.
        hopeless: Number of first runs that fail after which the others are not trained.
    """

    parsed: Parsed
    runs: Sequence[object]
    targets_tried: Sequence[str]
    hopeless: ClassVar[int] = 1

    @abstractmethod
    def configuration(self, number: int) -> Parsed:
        """The arguments that a run is trained with."""

    @abstractmethod
    def name(self, number: int) -> str | None:
        """The run's name in tables; ``None`` for its method's class."""

    @cached_property
    @abstractmethod
    def folder(self) -> ExperimentFolder:
        """Where finished runs are noted."""

    @abstractmethod
    def close(self, done: Mapping[int, RunSummary], failed: Collection[int]) -> None:
        """Print and write the results of the finished runs."""

    @property
    def is_many(self) -> bool:
        """Whether runs share a table and a folder."""
        return len(self.runs) > 1

    @property
    def root(self) -> Path:
        """Folder of the runs' folders."""
        return Path(self.parsed.arguments.trainer.default_root_dir or "runs")

    @property
    def is_dry(self) -> bool:
        """Whether runs only try the code for a few batches (fast_dev_run), and write nothing."""
        return bool(self.parsed.arguments.trainer.fast_dev_run)

    @cached_property
    def _repeats(self) -> WarnOfRepeats | None:
        return WarnOfRepeats(self.targets_tried) if len(self.runs) > 1 else None

    def start(
        self,
        number: int,
        place: Callable[[Path], Path] | None = None,
        checkpoint: Path | None = None,
        seat: Seat | None = None,
    ) -> RunSummary:
        """Train and evaluate a run.

        Args:
            number: Of the run.
            place: Makes its folder in the one that is passed; ``None`` takes the next number.
            checkpoint: From which it goes on.
            seat: In a federation across organisations.
        """
        cli = FedlitCLI(
            self.configuration(number),
            one_of_many=self.is_many,
            name=self.name(number),
            repeats=self._repeats,
            place=place,
            checkpoint=checkpoint,
            seat=seat,
            journals=None if seat is not None or place is None else self.folder.journals(number).absolute(),
        )
        assert cli.summary is not None
        return cli.summary

    def run(self, args: list[str]) -> None:
        """Train the runs that are not finished, and close; processes of single runs get the command line ``args``."""
        one = os.environ.get(_ONE)  # left there for further processes of the same run
        if one is not None:
            threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
            self.train(int(one))
            return
        waiting = self.waiting()
        jobs = 1 if self.is_dry else self.parsed.arguments.jobs  # dry runs leave no file for another process
        clock = Clock(len(self.runs), len(waiting), min(jobs, max(1, len(waiting))))
        try:
            if jobs > 1:
                self._side_by_side(args, waiting, clock)
            else:
                self._one_by_one(waiting, clock)
        finally:  # a run that fails does not take the others' results with it
            finished = ((number, self.folder.finished(number)) for number in range(len(self.runs)))
            done = {number: summary for number, summary in finished if summary is not None}
            if done:
                self.close(done, clock.failed)
        if clock.failed:
            sys.exit(f"fedlit: {len(clock.failed)} of {len(self.runs)} runs failed: the same command tries them again")

    def write_tables(self, summaries: list[RunSummary], *more: Path) -> None:
        """Write the tables of finished runs, and print where they and other files are."""
        paths = [*write_tables(summaries, self.folder.path), *more]
        say(f"tables: {', '.join(map(str, paths))}")

    def train(self, number: int, seat: Seat | None = None, until: int | None = None) -> None:
        """Train one run, unless another command has done so by now; from a checkpoint before round ``until``.

        A run that ends without some clients counts as unfinished, so that all can start it again for these.
        """
        folder, afresh = self.folder, self._afresh()
        if seat is not None and STARTS in os.environ:  # it has started itself again, and is in the same run
            afresh = False
        with folder.held(number):
            if first_process() and folder.finished(number) is not None and not (seat and afresh):
                if "LOCAL_RANK" in os.environ:  # the other processes of this one are in the run already
                    sys.exit("fedlit: another command trains the same experiment: wait for its end")
                return
            if seat is not None and afresh:  # or checkpoints of an earlier run would lie beside its own
                folder.forget()
            checkpoint = None if afresh else folder.checkpoint(number, until)
            if seat is not None and not seat.is_server:
                seat.journal = seat.journal or str(folder.journal(number))
                seat.accounts = str(folder.root / "accounts")  # of all experiments here, and never set aside
                if afresh:
                    set_aside(Path(seat.journal))
            summary = self.start(number, partial(folder.place, number), checkpoint, seat)
            missing = () if seat is None else seat.missing
            folder.keep(number, summary, missing)
            if missing:
                print_table([summary])

    def _afresh(self) -> bool:
        """Whether to train all runs: also on several hosts, each with its disk, which would have to agree."""
        arguments = self.parsed.arguments
        hosts = max(arguments.trainer.num_nodes or 1, int(os.environ.get("GROUP_WORLD_SIZE", "1")))  # as of torchrun
        return bool(arguments.fresh) or hosts > 1

    def set_journals_aside(self) -> None:
        """Let processes of runs that begin anew have new journals; it has to be before any of them opens one."""
        for number in range(len(self.runs)) if first_of_host() else ():
            named = self.configuration(number).arguments.get("trainer.strategy.init_args.journal")
            folder = self.folder.journals(number).absolute() if named is None else Path(named).expanduser()
            if folder.is_absolute():  # else it is in the folder of a run that has no other yet
                set_aside(folder)

    def waiting(self) -> list[int]:
        """Numbers of the runs that are not finished, and a sentence on those that are."""
        jobs, total = self.parsed.arguments.jobs, len(self.runs)
        if jobs < 1:
            sys.exit(f"fedlit: jobs must be at least 1, got {jobs}: it is how many runs are trained side by side")
        if jobs > 1 and "LOCAL_RANK" in os.environ:
            sys.exit("fedlit: jobs starts processes by itself: leave torchrun out, or give --jobs 1")
        waiting = [*range(total)]
        if self.parsed.arguments.fresh:
            self.set_journals_aside()
        if not self._afresh():
            waiting = [number for number in waiting if self.folder.finished(number) is None]
        elif first_process():
            self.folder.forget()
        if len(waiting) < total:
            say(
                f"{total - len(waiting)} of {total} runs are finished already, in '{self.root}': --fresh true "
                "trains them again"
            )
        return waiting

    def _announce(self, number: int, clock: Clock) -> None:
        busy = "; another command trains it, and this one waits for its end" if self.folder.busy(number) else ""
        say(clock.line(number, str(self.runs[number])) + busy)

    def _fail(self, number: int, reason: str, clock: Clock, others: bool = False) -> None:
        """Note a failed run; end with it where no other has done better, unless ``others`` are running."""
        text = f"fedlit: run {number + 1} of {len(self.runs)} ({self.runs[number]}) failed{reason}"
        clock.failed.append(number)
        clock.tick()
        if others or not clock.is_hopeless(self.hopeless):
            say(text)
        elif self.hopeless == 1:
            sys.exit(text)
        else:
            say(text)
            sys.exit(f"fedlit: the first {self.hopeless} runs failed, and others are not tried")

    @property
    def in_one_process(self) -> bool:
        """Whether a run trains in one process, as far as the command can tell."""
        devices = self.parsed.arguments.trainer.devices
        return devices in (1, "1", "auto") and int(os.environ.get("WORLD_SIZE", "1")) == 1

    def _one_by_one(self, waiting: Sequence[int], clock: Clock) -> None:
        for number in waiting:
            self._announce(number, clock)
            try:
                self.train(number)
            except (Exception, SystemExit) as error:
                ended = any(isinstance(each, KeyboardInterrupt | SIGTERMException) for each in causes(error))
                # several processes might come to be in different runs after an error of one of them
                if ended or (self.hopeless == 1 and (clock.none_ended or not self.in_one_process)):
                    raise
                self._fail(number, f": {self._reason(number, error)}", clock)
            else:
                clock.tick()

    def _reason(self, number: int, error: BaseException) -> str:
        """What ended a run, and where its traceback is."""
        if isinstance(error, SystemExit):
            return str(error).removeprefix("fedlit: ")
        reason = f"{type(error).__name__}: {error}"
        if self.is_dry or not first_process():
            return reason
        self.folder.path.mkdir(parents=True, exist_ok=True)
        self.folder.log(number).write_text(traceback.format_exc(), encoding="utf-8")
        return f"{reason} (see '{self.folder.log(number)}')"

    def _side_by_side(self, args: list[str], waiting: Sequence[int], clock: Clock) -> None:
        """Train each run in a process with its share of the cores."""
        folder, queue = self.folder, [*waiting]
        folder.path.mkdir(parents=True, exist_ok=True)
        threads = max(1, (os.cpu_count() or 1) // clock.jobs)
        running: dict[int, subprocess.Popen[bytes]] = {}
        before = signal.signal(signal.SIGTERM, _end)
        try:
            while queue or running:
                while queue and len(running) < clock.jobs and not clock.is_hopeless(self.hopeless):
                    number = queue.pop(0)
                    self._announce(number, clock)
                    with folder.log(number).open("wb") as log:
                        running[number] = _start(args, number, threads, log)
                time.sleep(0.05)
                for number in [number for number, process in running.items() if process.poll() is not None]:
                    process = running.pop(number)
                    if process.returncode or folder.finished(number) is None:
                        lines = folder.log(number).read_text(encoding="utf-8", errors="replace").splitlines()
                        ending = "\n".join(lines[-LAST_LINES:])
                        reason = f"; '{folder.log(number)}' ends with:\n{ending}"
                        self._fail(number, reason, clock, others=bool(running))
                    else:
                        clock.tick()
        finally:
            signal.signal(signal.SIGTERM, before)
            for process in running.values():
                process.terminate()
            for process in running.values():
                await_end(process)


@dataclass
class Clock:
    """Shows which run it is, and how long the others will take."""

    total: int  # runs of the plan
    left: int  # of them, those that are not finished
    jobs: int  # trained side by side
    failed: list[int] = field(default_factory=list)  # numbers of runs that failed

    def __post_init__(self) -> None:
        self._start, self._done = time.monotonic(), 0

    def tick(self) -> None:
        """One more has ended."""
        self._done += 1

    @property
    def none_ended(self) -> bool:
        """Whether no run has ended yet, in an earlier command either."""
        return self._done == 0 and self.left == self.total

    def is_hopeless(self, number: int) -> bool:
        """Whether the runs that have ended are this many at least, and all failed."""
        return self._done >= number and len(self.failed) == self._done and self.left == self.total

    def line(self, number: int, run: str) -> str:
        """For the run of this number that starts."""
        about = ""
        if self._done:
            seconds = (time.monotonic() - self._start) / self._done * (self.left - self._done)
            minutes = round(seconds / 60)
            about = f", about {minutes} min left" if minutes else ", less than a minute left"
        return f"run {number + 1} of {self.total}{about}: {run}"


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
