"""What the command costs that trains nothing: seconds of a processor until it has answered.

Run from the repository root: python benchmarks/command.py [--out benchmarks/command.json] [--part now]

Each command line is a process of its own: user and system time, Python's start included, the median of five. "before"
is what they took at 6e998cc, where every one of them imported torch and Lightning; with --part before these are
measured again, which needs that commit installed.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from fedlit.papers.experiments import Results

REPEATS = 5

LINES = (
    "--help",
    "",
    "--version",
    "list",
    "list methods",
    "fitt",
    "fit --confg x",
    "fit --config nonexistent",
    "fit --config experiments/first --model.lr 3",
    "report --help",
    "export --help",
    "features --help",
    "benchmark",
    "fit --help",
)
"""What is written after ``fedlit``."""


def processor_seconds(line: str, folder: str) -> float:
    """Of one command, user and system; whatever it answers."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [str(Path(sys.executable).with_name("fedlit")), *line.split()]
    subprocess.run(command, cwd=folder, check=False, stdin=subprocess.DEVNULL, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/command.json"))
    parser.add_argument("--part", choices=["now", "before"], default="now", help="Which of the two is measured.")
    given = parser.parse_args()
    results = Results(given.out, "fedlit", "torch", "lightning", "jsonargparse", repeats=REPEATS)
    with tempfile.TemporaryDirectory() as folder:
        for line in LINES:
            seconds = statistics.median(processor_seconds(line, folder) for _ in range(REPEATS))
            command = f"fedlit {line}".strip()
            results.keep(round(seconds, 2), given.part, command)
            print(f"{seconds:6.2f} s of a processor: {command}", flush=True)


if __name__ == "__main__":
    main()
