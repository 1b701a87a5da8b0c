"""What privacy costs by three ways of counting it, and what is booked after five crashes.

Run from the repository root: python benchmarks/budget.py [--out benchmarks/budget.json]

"losses" has the epsilon of n Gaussian releases of multiplier z, with the seconds that its first computation took: by
Renyi differential privacy, as fedlit counted before, and by privacy loss distributions, both of dp-accounting; and
exactly, as fedlit counts now. "crashes" has five processes in a row that end within a release, each begun a round or
two before the end of the last: epsilon of what left client "a", of what its account has, and of what the last
process's own count had, which was all that there was before.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from fedlit.papers.experiments import Results
from fedlit.privacy.differential import epsilon_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from crashing import NOISE, POINTS, booked, crash, released

CASES = ((1.0, 1, 1e-5), (2.0, 10, 1e-5), (5.0, 100, 1e-5), (20.0, 1000, 1e-5), (3.0, 20, 1e-6), (0.5, 20, 1e-5))


def timed(compute: Callable[[], float]) -> dict[str, float]:
    """Epsilon, and the seconds that it took."""
    start = time.perf_counter()
    epsilon = float(compute())
    return {"epsilon": round(epsilon, 6), "seconds": round(time.perf_counter() - start, 4)}


def loss(z: float, releases: int, delta: float) -> dict[str, Any]:
    """Epsilon by each way of counting."""

    def by(accountant: Any) -> float:
        accountant.compose(SelfComposedDpEvent(GaussianDpEvent(z), releases))
        return float(accountant.get_epsilon(delta))

    ways = {
        "renyi": timed(lambda: by(RdpAccountant())),
        "loss distributions": timed(lambda: by(PLDAccountant())),
        "exact": timed(lambda: epsilon_of(releases / z**2, delta)),
    }
    return {"multiplier": z, "releases": releases, "delta": delta, **ways}


def crashes(with_journal: bool) -> list[dict[str, Any]]:
    """Five processes that end at five points, in an order drawn at random."""
    rows, at, draw = [], 0, random.Random(with_journal)
    with tempfile.TemporaryDirectory() as folder:
        for point in draw.sample(POINTS, len(POINTS)):
            at += draw.randrange(1, 3)
            crash(Path(folder), point, max(0, at - 2), at, with_journal)
            spent = {
                "released": released(Path(folder))["a"],
                "booked": booked(Path(folder))["a"],
                "booked before": (at + (point in POINTS[3:])) / NOISE.noise_multiplier**2,  # each round once
            }
            epsilons = {name: round(epsilon_of(each, NOISE.delta), 3) for name, each in spent.items()}
            rows.append({"ends": point, "round": at, **epsilons})
    return rows


def main() -> None:
    """Write all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/budget.json"))
    results = Results(parser.parse_args().out, "fedlit", "torch", "dp-accounting")
    results.keep([loss(*case) for case in CASES], "losses")
    for name, with_journal in (("without a journal", False), ("with a journal", True)):
        results.keep(crashes(with_journal), "crashes", name)


if __name__ == "__main__":
    main()
