"""What changed in cost between an earlier revision and this one: benchmarks of speed, of both in turns, as ratios.

Run from a clone: python benchmarks/versions.py REVISION [--scripts rounds aggregation privacy] [--repeats 1]

Both packages, of what is committed, are installed into folders of their own, without dependencies, so that they meet
the same libraries. Each runs its own revision's script in turns with the other. A ratio is the median of now over that
of before, of every number that both wrote, counts and settings as well.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measures import environment

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("rounds", "aggregation", "privacy")


def install(revision: str, folder: Path) -> None:
    """Install a revision's package into ``folder/site``; its benchmarks are in ``folder/source``."""
    source = folder / "source"
    source.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "x"], cwd=source, input=archive, check=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder / "site"), str(source)]
    subprocess.run(pip, check=True)


def measured(folder: Path, name: str) -> dict[str, float]:
    """Numbers by path that a revision's script wrote."""
    out = folder / "found.json"
    subprocess.run(
        [sys.executable, str(folder / f"source/benchmarks/{name}.py"), "--out", str(out)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "site")},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return dict(numbers(json.loads(out.read_text())))


def numbers(found: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """All numbers in nested mappings, with the path of each."""
    if isinstance(found, dict):
        for key, value in found.items():
            if key != "environment":
                yield from numbers(value, f"{path}/{key}" if path else key)
    elif isinstance(found, int | float) and not isinstance(found, bool):
        yield path, float(found)


def compared(before: list[dict[str, float]], now: list[dict[str, float]]) -> dict[str, Any]:
    """Medians of both, and their ratio, of what both have."""
    rows = {}
    for path in now[0]:
        if all(path in each for each in (*before, *now)):
            old, new = (statistics.median(each[path] for each in side) for side in (before, now))
            rows[path] = {"before": old, "now": new, **({"ratio": round(new / old, 3)} if old else {})}
    return rows


def main() -> None:
    """Install, measure in turns, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--repeats", type=int, default=1, help="Of each script, which has repeats of its own.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    there = json.loads(options.out.read_text()) if options.out.exists() else {}
    kept = there["results"] if there.get("before") == options.revision else {}
    now = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        sides = {"before": Path(folder, "before"), "now": Path(folder, "now")}
        for side, revision in zip(sides, (options.revision, "HEAD"), strict=True):
            install(revision, sides[side])
        for name in options.scripts:
            taken: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
            for _ in range(options.repeats):
                for side, place in sides.items():
                    taken[side].append(measured(place, name))
            kept[name] = compared(taken["before"], taken["now"])
            for path, row in kept[name].items():
                print(f"{name}: {path:70}", row, flush=True)
            what = (__doc__ or "").splitlines()[0]
            facts = {"what": what, "before": options.revision, "now": now.strip(), "repeats": options.repeats}
            text = json.dumps({**facts, "environment": environment(), "results": kept}, indent=2)
            options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
