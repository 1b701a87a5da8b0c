"""What tags and a journal add to a masked round: CPU time of all parties, in one process, of 10 clients.

Run: python benchmarks/checked_rounds.py [--repeats 15] [--out benchmarks/checked_rounds.json]

The three ways take turns within each repetition; ratios are medians of those within one. The journal is one file of all
clients, which synchronises an entry before each vector leaves and one before each client confirms who survived; waiting
for the disk is wall time, and is reported apart.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fedlit.federation import Federation
from fedlit.federation.journal import Journal
from fedlit.federation.sums import driver
from fedlit.privacy import PairwiseMasking

CLIENTS, LENGTHS = 10, (10_000, 1_000_000)
WAYS = ("neither", "tags", "tags and journal")


def federation_of(way: str, folder: Path) -> Federation:
    """A federation whose rounds are masked in one of the ways."""
    names = [f"c{number}" for number in range(CLIENTS)]
    federation = Federation(names, names[-1], privacy=PairwiseMasking(), seed=0)
    if way == "tags and journal":
        federation.journal = Journal(folder / f"{time.monotonic_ns()}.releases")
    return federation


def seconds_of(federation: Federation, way: str, payloads: Any) -> tuple[float, float]:
    """CPU and wall time of one sum."""
    checked, driver._CHECKED = driver._CHECKED, CLIENTS + 1 if way == "neither" else driver._CHECKED  # type: ignore[misc]
    start, wall = time.process_time(), time.perf_counter()
    federation.sum("weights", payloads)
    ended = time.process_time() - start, time.perf_counter() - wall
    driver._CHECKED = checked  # type: ignore[misc]
    federation.round_idx += 1
    return ended


def measured(length: int, repeats: int, folder: Path) -> dict[str, Any]:
    """Medians of each way, and of the ratios to the round without tags and journal."""
    generator = torch.Generator().manual_seed(0)
    federations = {way: federation_of(way, folder) for way in WAYS}
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for repeat in range(repeats + 1):
        payloads = {f"c{each}": {"w": torch.rand(length, generator=generator)} for each in range(CLIENTS)}
        for way, federation in federations.items():
            once = seconds_of(federation, way, payloads)
            if repeat:  # the first enrols
                times[way].append(once)
    result: dict[str, Any] = {}
    for way, of in times.items():
        ratios = [one[0] / base[0] for one, base in zip(of, times["neither"], strict=True)]
        result[way] = {
            "cpu_ms": round(1e3 * statistics.median(each[0] for each in of), 2),
            "wall_ms": round(1e3 * statistics.median(each[1] for each in of), 2),
            "ratio": round(statistics.median(ratios), 3),
        }
    return result


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        results = {str(length): measured(length, options.repeats, Path(folder)) for length in LENGTHS}
    for length, ways in results.items():
        for way, of in ways.items():
            times = f"{of['cpu_ms']:9.2f} ms CPU {of['wall_ms']:9.2f} ms"
            print(f"{length:>8} numbers, {way:<17} {times}  x {of['ratio']:.3f}")
    content = {
        "command": f"python benchmarks/checked_rounds.py --repeats {options.repeats}",
        "clients": CLIENTS, "seed": 0, "repeats": options.repeats, "threads": 1, "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2), "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "numpy", "cryptography")}, "results": results,
    }  # fmt: skip
    options.out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
