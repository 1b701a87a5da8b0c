"""Faults at random moments of small runs around a server: outcomes, and how long it took until they were noticed.

A site is killed, frozen (SIGSTOP) or cut off in its local steps, or in the opening, protecting, unmasking, download or
checkpoint of a round. The others finish as the schedule that happened, bit for bit, or stop with a named error.
"""

# ruff: noqa: E402  (runs are those of the tests, which the lines below find)
from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import processes
from campaign import moments, outcome
from measures import environment


def main() -> None:
    """Run the campaign, print its table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    given = parser.parse_args()
    processes.start()
    rows = []
    begun = time.perf_counter()
    try:
        for moment in moments(given.faults, given.seed):
            found = outcome(moment)
            rows.append({**vars(moment), **found})
            if found["outcome"] not in ("finished", "stopped"):
                print(moment, found, flush=True)
    finally:
        processes.stop()
    table: dict[str, Counter[str]] = {}
    longest: dict[str, float] = {}
    for row in rows:
        key = f"{row['phase']}, {row['kind']}"
        table.setdefault(key, Counter())[row["outcome"]] += 1
        longest[key] = max(longest.get(key, 0.0), row["seconds"])
    outcomes = sorted({row["outcome"] for row in rows})
    print(f"{'moment and fault':26}" + "".join(f"{each:>16}" for each in outcomes) + f"{'noticed after':>16}")
    for key in sorted(table):
        print(f"{key:26}" + "".join(f"{table[key][each]:>16}" for each in outcomes) + f"{longest[key]:>14.1f} s")
    total = Counter(row["outcome"] for row in rows)
    print(f"{len(rows)} faults in {time.perf_counter() - begun:.0f} s, patience 1 s: {dict(total)}")
    given.out.write_text(
        json.dumps(
            {"environment": environment(), "seed": given.seed, "patience": 1.0, "results": {"faults": rows}}, indent=1
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
