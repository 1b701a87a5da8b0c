"""The smallest sum that a server cuts out of a sparse masked round, and what the round costs, before and after.

Run: python benchmarks/sparse_graphs.py [--older FOLDER] [--out benchmarks/sparse_graphs.json]

Before, neighbours stood on a circle in an order made by a digest of all round keys, so that one colluder that announced
its key last could redraw it: the server tries ``REDRAWS`` orders, and in each cuts out every arc. After, each client
draws its neighbours; the server has one graph, and grows parts greedily, from the ``STARTS`` honest clients with the
fewest honest neighbours, in ``DRAWS`` rounds.
It may report up to n - q clients as dropped, as long as a threshold of the holders of each one's shares stays. Where
nothing can be cut, "smallest_sum" is that of all honest survivors, q less the colluders.

"single" is the share of the orders in which the server reads one vector in another way: it leaves some of the holders
of a client's shares out of the list of those who shared secrets, to that client alone, and reports the others as
dropped to everybody else. Each may be d + 1 - t at most, so it takes 2t - d - 1 colluders among the d neighbours. Now
holders ask for a tag on that list: see tests/attacks/test_sparse_graphs.py.

With ``--older``, a folder with fedlit as it was before (its packages linked into ``fedlit/``), also the costs before:
CPU time of a round with all parties in one process, per client, vectors of 100,000 numbers.
"""

# ruff: noqa: E402  (the search is shared with the tests, which the lines below find)
from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from fedlit.privacy import PairwiseMasking, RoundId, driver

SIZES, SHARES = (25, 50, 100, 200), (0.1, 0.2, 1 / 3)
REDRAWS, DRAWS, STARTS = 100, 3, 40
LENGTH = 100_000


def old_degree(number: int) -> int:
    """Neighbours before: theorem 3.1 of Bell et al. (2020), a fifth colluding and a tenth dropping out at random."""
    others, colluding, dropping = number - 1, math.ceil(number / 5), math.ceil(number / 10)
    for degree in range(2, others, 2):
        threshold = 2 * (degree + 1) // 3 + 1
        tails = [
            stats.hypergeom(others, colluding, degree).sf(threshold - 1),
            stats.hypergeom(others, colluding + dropping, degree // 2).sf(degree // 2 - 1),
            stats.hypergeom(others, dropping, degree).sf(degree - threshold),
        ]
        if max(tails) <= 2.0**-40 / number:
            return degree
    return others


def before(number: int, few: int) -> dict[str, Any]:
    """The smallest sum cut out of the circle, over redraws, and how many of these give single vectors."""
    from cuts import Graph

    degree, quorum = old_degree(number), 2 * number // 3 + 1
    threshold, generator = 2 * (degree + 1) // 3 + 1, np.random.default_rng(number)
    places = np.arange(number)
    away = np.abs(places[:, None] - places)
    masks = (np.minimum(away, number - away) <= degree // 2) & (away > 0)
    lengths = np.arange(1, number // 2 + 1)
    arcs = ((places - places[:, None, None]) % number < lengths[:, None]).reshape(-1, number)
    smallest, single = number, 0
    for _ in range(REDRAWS):
        colluding = np.isin(places, generator.permutation(number)[:few])
        graph = Graph(masks, masks | (away == 0), colluding, threshold, quorum)
        parts = arcs & ~colluding
        sums = parts.sum(axis=1)
        parts = parts[(sums > 0) & (sums < smallest)]
        fitting = parts[graph.dropped(parts).sum(axis=1) <= number - quorum]
        sums = fitting.sum(axis=1)[graph.excess(fitting) == 0]
        smallest = min([smallest, *sums.tolist()])
        single += bool((masks[:, colluding].sum(axis=1)[~colluding] >= 2 * threshold - degree - 1).any())
    return {
        "degree": degree,
        "threshold": threshold,
        "smallest_sum": smallest if smallest < number else quorum - few,
        "cut": smallest < number,
        "single": single / REDRAWS,
    }


def after(number: int, few: int, colluders: int) -> dict[str, Any]:
    """The smallest sum cut out of graphs as clients draw them, and the bound."""
    from cuts import drawn

    backend = PairwiseMasking(modulus_bits=64, colluders=colluders)
    degree, threshold = backend.degree(number), backend.shares_needed(number)
    quorum = backend.confirmations_needed(number)
    smallest = number
    for seed in range(DRAWS):
        graph = drawn(np.random.default_rng(seed), number, degree, threshold, quorum, few)
        order = (graph.masks & ~graph.colluding).sum(axis=1).argsort()
        part = graph.smallest(order[~graph.colluding[order]][:STARTS])
        smallest = smallest if part is None else min(smallest, int(part.sum()))
    return {
        "degree": degree,
        "threshold": threshold,
        "smallest_sum": smallest if smallest < number else quorum - few,
        "cut": smallest < number,
        "log2_bound": backend.log2_failure(number, few),
        "bears": backend.colluders_borne(number),
    }


def cost(number: int, repeats: int = 3) -> dict[str, float]:
    """CPU milliseconds and bytes per client of a round: the median."""
    names = [f"c{index}" for index in range(number)]
    backend = PairwiseMasking(modulus_bits=64)
    parties = driver.Parties(backend, names)
    parties.enrol(names)
    vectors = {name: torch.randn(LENGTH) for name in names}

    class Counting(driver.Carrier):
        """Counts what clients send."""

        sent = 0

        def gather(self, messages: Mapping[str, bytes], phase: driver.Phase) -> Mapping[str, bytes]:
            self.sent += sum(map(len, messages.values()))
            return messages

    rows = []
    for repeat in range(repeats):
        counting = Counting()
        clock = [time.process_time()]
        parties.open_round(RoundId(repeat, "cost", repeat), names, counting)
        clock.append(time.process_time())
        masked = {name: parties.clients[name].protect(vector) for name, vector in vectors.items()}
        clock.append(time.process_time())
        parties.server.aggregate(masked)
        parties.server.conclude(parties.ask_survivors(names, counting))
        clock.append(time.process_time())
        more = sum(len(message) - 8 * LENGTH for message in masked.values())
        rows.append([*np.diff(clock) * 1e3 / number, (counting.sent + more) / number])
    opened, protected, closed, sent = np.median(rows, axis=0).round(2).tolist()
    return {"open_ms": opened, "protect_ms": protected, "close_ms": closed, "bytes_beside_the_vector": sent}


def main() -> None:
    """Search, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "sparse_graphs.json")
    parser.add_argument("--older", type=Path)
    parser.add_argument("--cost", type=int, help="print the cost of one size, and stop")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.cost:
        print(json.dumps(cost(given.cost)))
        return
    kept = json.loads(given.out.read_text()) if given.out.exists() else {}
    rows, costs = [], kept.get("costs", {})
    for number in SIZES:
        for share in SHARES:
            few = min(math.ceil(share * number), 2 * (2 * number // 3 + 1) - number - 1)
            asked = min(few, 66)  # a backend is for rounds of less than 200 clients too
            row = {
                "clients": number,
                "colluders": few,
                "whole": 2 * number // 3 + 1 - few,
                "before": before(number, few),
                "after": after(number, few, 1),
            }
            if row["after"]["bears"] < asked:
                row["after_asked_for"] = after(number, asked, asked)
            rows.append(row)
            print(json.dumps(row), flush=True)
    for number in SIZES:
        for name, folder in (("before", given.older), ("after", None)):
            if name == "after" or folder is not None:
                environment = dict(os.environ) | ({} if folder is None else {"PYTHONPATH": str(folder)})
                command = [sys.executable, __file__, "--cost", str(number)]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                costs.setdefault(str(number), {})[name] = json.loads(done.stdout)
                print(number, name, done.stdout, flush=True)
    about = {"what": "smallest honest sums that a lying server cuts out, and costs per client", "redraws": REDRAWS}
    given.out.write_text(json.dumps({**about, "draws": DRAWS, "sums": rows, "costs": costs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
