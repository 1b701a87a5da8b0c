"""Everything that can come from outside, spoilt at random: is it refused by an error of its own, or read rightly?

Run from the repository root: python benchmarks/fuzz.py [--minutes 10] [--cases 150000] [--seed 0] [--formats NAME ...]
[--keep FOLDER] [--out benchmarks/fuzz.json]

A case is one input: bytes of one of the formats in `fuzz_formats.py` and `fuzz_files.py`, or a plan of one of the
conversations in `fuzz_conversations.py`, in which one message is spoilt on its way. It may be read, where a change does
no harm or is nobody's to notice, or refused by one of the errors that the format declares (typed). What must not happen
is counted, saved and reported: another error, no end within 10 seconds of a core or 60 on the clock, the end of the
process, or a sum that is wrong although the backend promises a right one or none.

Cases are read in a forked process, which gets a successor if it dies. Each has a random generator of its own, drawn
from ``--seed``, its format and its number, so ``--formats NAME --only NUMBER`` repeats one; keys are the operating
system's, and never the same. Formats take turns, in parts, so that a run that is out of time has cut all of them short.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import platform
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import torch

import fuzz_conversations
import fuzz_files
import fuzz_formats
from fuzz_formats import Format, Make, WrongSumError

FORMATS: dict[str, Make] = fuzz_formats.FORMATS | fuzz_files.FORMATS | fuzz_conversations.FORMATS
OUTCOMES = ("read", "typed", "untyped", "hang", "crash", "wrong sum")
FAILURES = OUTCOMES[2:]
LIMIT_S = 10.0
"""Seconds of a core for one case, with all that it does."""
_WAITING = 6.0
"""How much longer it may take on the clock: a busy machine is no hang, and a case that waits forever uses no core."""

_PARTS = 5
_MEMORY = 4 << 30
"""Bytes that a case may take beyond what the process has: an input that asks for more must not get it unasked."""


@dataclass
class Row:
    """What came of the cases of one format."""

    cases: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)


def random_of(seed: int, name: str, number: int) -> Random:
    """The generator of one case."""
    return Random(f"{seed} {name} {number}")


def outcome_of(form: Format, case: bytes) -> tuple[str, str]:
    """What comes of reading one case in this process, and the traceback if it should not."""
    try:
        form.read(case)
    except WrongSumError:
        return "wrong sum", traceback.format_exc()
    except form.typed as error:
        return "typed", type(error).__name__
    except BaseException:  # a SystemExit or KeyboardInterrupt where none is declared is no better than others
        return "untyped", traceback.format_exc()
    return "read", ""


def _work(form: Format, name: str, seed: int, numbers: range, pipe: Connection, log: int) -> None:
    """In the forked process: read cases, and tell what came of each."""
    faulthandler.enable(log)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + _MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        for number in numbers:
            pipe.send(outcome_of(form, form.draw(random_of(seed, name, number))))
    os._exit(0)  # without what the libraries do when a process ends


def outcomes(form: Format, name: str, seed: int, numbers: range, limit: float = LIMIT_S) -> Iterator[tuple[str, str]]:
    """What comes of each case, in forked processes: one until it dies or takes longer than ``limit``."""
    context, start = multiprocessing.get_context("fork"), numbers.start
    while start < numbers.stop:
        ours, theirs = context.Pipe(duplex=False)
        with tempfile.TemporaryFile() as log:
            rest = range(start, numbers.stop)
            process = context.Process(target=_work, args=(form, name, seed, rest, theirs, log.fileno()), daemon=True)
            process.start()
            theirs.close()
            try:
                while start < numbers.stop:
                    if _is_silent(ours, process.pid or 0, limit):
                        os.kill(process.pid or 0, signal.SIGABRT)  # whereupon it writes down where it was
                        process.join(2)
                        yield "hang", _logged(log)
                        start += 1
                        break
                    yield ours.recv()
                    start += 1
            except EOFError:
                process.join()
                yield "crash", f"exit code {process.exitcode}\n{_logged(log)}"
                start += 1
            finally:
                process.kill()
                process.join()
                ours.close()


def _is_silent(pipe: Connection, pid: int, limit: float) -> bool:
    """Whether nothing arrives from a process that has had its time."""
    begun, deadline = _core_seconds(pid), time.monotonic() + _WAITING * limit
    while time.monotonic() < deadline and _core_seconds(pid) - begun < limit:
        if pipe.poll(limit / 10):
            return False
    return True


def _core_seconds(pid: int) -> float:
    """Of a process, in all its threads."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _logged(log: Any) -> str:
    log.seek(0)
    return str(log.read().decode(errors="replace"))


def run(
    names: Iterable[str], cases: int, seed: int, deadline: float, folder: Path, formats: Mapping[str, Make] = FORMATS
) -> dict[str, Row]:
    """All cases of some formats: each gets its share of ``cases``, until the ``deadline`` on the monotonic clock."""
    made = {name: formats[name](folder) for name in names}
    whole = sum(form.share for form in made.values())
    counts = {name: max(1, round(cases * form.share / whole)) for name, form in made.items()}
    rows = {name: Row() for name in made}
    for part in range(_PARTS):
        for name, form in made.items():
            numbers = range(counts[name] * part // _PARTS, counts[name] * (part + 1) // _PARTS)
            begun = time.monotonic()
            for number, (outcome, text) in zip(numbers, outcomes(form, name, seed, numbers), strict=False):
                note(rows[name], form, name, seed, number, outcome, text)
                if time.monotonic() > deadline:
                    break
            rows[name].seconds += time.monotonic() - begun
    return rows


def note(row: Row, form: Format, name: str, seed: int, number: int, outcome: str, text: str) -> None:
    """Count one case; what must not happen is told, and kept with its input."""
    row.cases += 1
    row.outcomes[outcome] += 1
    if outcome in FAILURES:
        case = form.draw(random_of(seed, name, number))
        row.failures.append({"format": name, "number": number, "outcome": outcome, "input": case.hex(), "told": text})
        alike = sum(_end(found["told"]) == _end(text) for found in row.failures)
        print(f"{outcome.upper()} in {name}, case {number}, {len(case)} bytes" + (", as before" if alike > 1 else ""))
        print(text if alike == 1 else _end(text), flush=True)


def _end(text: str) -> str:
    """The last line of a traceback, by which failures of one cause are known."""
    return text.strip().rpartition("\n")[2][:200]


def table(rows: Mapping[str, Row]) -> str:
    """One line per format, and their sum."""
    total = Row(sum(row.cases for row in rows.values()), sum(row.seconds for row in rows.values()))
    for row in rows.values():
        total.outcomes += row.outcomes
    heads = ("cases", *OUTCOMES, "seconds")
    text = [f"{'format':26}" + "".join(f"{head:>11}" for head in heads)]
    for name, row in {**rows, "all": total}.items():
        figures = [row.cases, *(row.outcomes[outcome] for outcome in OUTCOMES)]
        text.append(f"{name:26}" + "".join(f"{figure:11,}" for figure in figures) + f"{row.seconds:11.1f}")
    return "\n".join(text)


def main() -> None:
    """Read all cases, print the table, write the JSON, and fail if something happened that must not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="after so many, what is left of the cases is left")
    parser.add_argument("--cases", type=int, default=150_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), metavar="NAME")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one case of one format, read in this process")
    parser.add_argument("--keep", type=Path, help="folder for the inputs of what must not happen")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if options.only is not None:
            (name,) = options.formats
            form = FORMATS[name](Path(folder))
            case = form.draw(random_of(options.seed, name, options.only))
            print(case, *outcome_of(form, case), sep="\n")
            return
        rows = run(options.formats, options.cases, options.seed, deadline, Path(folder))
    print(table(rows))
    for found in [found for row in rows.values() for found in row.failures] if options.keep else ():
        options.keep.mkdir(parents=True, exist_ok=True)
        path = options.keep / f"{found['format'].replace(' ', '_')}-{found['number']}"
        path.with_suffix(".bin").write_bytes(bytes.fromhex(found["input"]))
        path.with_suffix(".txt").write_text(found["told"])
    versions = {"python": platform.python_version()}
    versions |= {
        name: version(name) for name in ("torch", "numpy", "cryptography", "phe", "tenseal", "pillow", "scipy")
    }
    figures = {
        name: {"cases": row.cases, **{kind: row.outcomes[kind] for kind in OUTCOMES}, "seconds": round(row.seconds, 1)}
        for name, row in rows.items()
    }
    result = {
        "formats": figures,
        "cases": sum(row.cases for row in rows.values()),
        "failures": [found for row in rows.values() for found in row.failures],
        "seed": options.seed,
        "limit_s": LIMIT_S,
        "cores": os.cpu_count(),
        "processes": 1,
        "versions": versions,
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{result['cases']:,} cases, seed {options.seed}, {os.cpu_count()} cores of which 1 is used; {options.out}")
    sys.exit(1 if result["failures"] else 0)


if __name__ == "__main__":
    main()
