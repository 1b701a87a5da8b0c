"""What a report on many runs costs: seconds and bytes of the page on 4 methods, 3 targets and 3 seeds.

Run from the repository root: python benchmarks/report.py [--out benchmarks/report.json]

The runs are trained first, on the embedded digits, 20 rounds each, of several families of methods. Seconds are those of
`fedlit report` on them, as a process of its own: processor time, imports included, the median of five.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from fedlit.papers.experiments import Results, fit

REPEATS = 5


def processor_seconds(command: list[str], folder: str) -> float:
    """Of a process, user and system."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Train, report, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/report.json"))
    given = parser.parse_args()
    results = Results(given.out, "fedlit", "torch", "lightning", seeds=[0, 1, 2])
    with tempfile.TemporaryDirectory() as folder:
        runs = fit(
            f"{folder}/runs",
            "--config=experiments/digits",
            "--compare=[SourceOnly, methods/fed_mmd, methods/fedrf_tca]",
            "--seeds=[0, 1, 2]",
            "--targets=[fonts, noisy, blended]",
            "--trainer.max_epochs=20",
        )
        command = [str(Path(sys.executable).with_name("fedlit")), "report", "runs"]
        seconds = [processor_seconds(command, folder) for _ in range(REPEATS)]
        size = Path(folder, "report.html").stat().st_size
    found = {"runs": len(runs), "seconds": statistics.median(seconds), "megabytes": size / 1e6}
    results.keep(found, "36 runs")
    print(f"{found['runs']} runs: {found['seconds']:.1f} s of a processor, {found['megabytes']:.2f} MB")


if __name__ == "__main__":
    main()
