"""What a federation across organisations costs: rounds, start-up and memory, in one process, over gloo and TLS.

Run from the repository root: python benchmarks/across.py [--out benchmarks/across.json] [--only rounds|memory]

Rounds: FedAvg and FedMMD on digits with three clients, in one process, three processes over gloo, and a server with
three sites over gRPC with mutual TLS, without and with latency that a relay on the loopback adds (half each way).
Memory: two means of a model over sites that are processes, masked and under BFV, CKKS and Paillier, by its megabytes.
"""

# ruff: noqa: E402  (runs are those of the tests, which the lines below find)
from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import one_site
import processes
from measures import environment
from stars import certificates

ROUNDS, REPEATS = 12, 3
METHODS = ("FedAvg", "FedMMD")
LATENCIES = (0, 20, 100)
"""Milliseconds there and back."""

OPTIONS: dict[str, dict[str, Any]] = {"PairwiseMasking": {"colluders": 0}}
MEANS = (
    *(("PairwiseMasking", megabytes, sites) for megabytes, sites in ((100, 2), (100, 3), (1000, 2))),
    *(("BFV", megabytes, sites) for megabytes, sites in ((20, 2), (20, 3), (200, 2))),
    *(("CKKS", 100, 2), ("Paillier", 4, 2)),
)
"""Backends, megabytes and sites: a site takes seven models when masked, and this machine has 24 GB."""


# ---------------------------------------------------------------- rounds


def timed(arguments: list[str], ranks: int) -> dict[str, float]:
    """Seconds of a round, and from the start to the first one, of a run: medians over repeats and rounds."""
    rounds, starts = [], []
    for _ in range(REPEATS):
        begun = time.time()
        results = processes.results(one_site.run, arguments, ranks=ranks, timeout=300)
        moments = results[0]["moments"]
        rounds += [late - early for early, late in pairwise(moments[1:])]
        starts.append(moments[0] - begun)
    return {"round_s": statistics.median(rounds), "start_s": statistics.median(starts)}


def measure_rounds(folder: Path) -> list[dict[str, Any]]:
    """A row for each method and way to run."""
    files, rows = certificates(folder), []
    for method in METHODS:
        shared = ["--method", method, "--own", "--everyone", "--rounds", str(ROUNDS), "--steps", "5"]
        ways: list[tuple[str, list[str], int]] = [
            ("one process", shared, 1),
            ("three processes over gloo", [*shared, "--devices", "3"], 3),
            *(
                (f"server and three sites, {delay} ms", [*shared, "--star", files, "--latency", str(delay)], 4)
                for delay in LATENCIES
            ),
        ]
        for way, arguments, ranks in ways:
            row = {"method": method, "way": way, **timed(arguments, ranks)}
            rows.append(row)
            print(
                f"{method:8} {way:34} {1000 * row['round_s']:8.1f} ms a round, start {row['start_s']:.2f} s", flush=True
            )
    return rows


# ---------------------------------------------------------------- memory


def _peak() -> float:
    """Megabytes of this process at most, so far."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def _mean(files: str, port: int, rank: int, backend: str, sites: int, megabytes: int, pipe: Any) -> None:
    """Two means of a model, at the server (rank 0) or a site."""
    import torch

    from fedlit import privacy
    from fedlit.federation import Federation
    from fedlit.remote import Server, Site

    torch.set_num_threads(1)
    one_site.SITES[:] = one_site.SITES[-sites:]
    os.environ["LOCAL_RANK"], os.environ["MASTER_PORT"] = str(rank), str(port)
    seat: Server | Site = one_site.seated(files, 60.0)
    model = torch.zeros(megabytes * 250_000)  # as the module of each process has it
    star = seat.open({})
    federation = Federation(
        one_site.SITES, "fonts", transport=star, placement=[[], *star.sites.values()],
        privacy=getattr(privacy, backend)(**OPTIONS.get(backend, {})), seed=0,
    )  # fmt: skip
    star.begin(())
    federation.settled = True
    before, seconds = _peak(), []
    if not rank:  # whose module's is emptied when the run begins
        del model
    for _ in range(2):  # in the second the server has the total of the first, for those who come back
        begun = time.perf_counter()
        federation.roll_call()
        payloads = {client.name: {"w": model} for client in federation.local_clients}  # none at the server
        received = federation.mean("weights", payloads)
        del payloads, received
        seconds.append(time.perf_counter() - begun)
    pipe.send({"before_mb": before, "peak_mb": _peak(), "seconds": seconds})
    star.close()


def measure_memory(folder: Path) -> list[dict[str, Any]]:
    """A row for each size of the model."""
    files, rows = certificates(folder), []
    context = multiprocessing.get_context("spawn")
    for backend, megabytes, sites_each in MEANS:
        pipes, workers = [], []
        port = free_port()
        for rank in range(sites_each + 1):
            ours, theirs = context.Pipe(duplex=False)
            own = (files, port, rank, backend, sites_each, megabytes, theirs)
            workers.append(context.Process(target=_mean, args=own))
            workers[-1].start()
            pipes.append(ours)
        told = [pipe.recv() for pipe in pipes]
        for worker in workers:
            worker.join()
        server, sites = told[0], told[1:]
        row = {
            "backend": backend,
            "model_mb": megabytes,
            "sites": sites_each,
            "round_s": server["seconds"],
            "server_before_mb": server["before_mb"],
            "server_peak_mb": server["peak_mb"],
            "server_models": (server["peak_mb"] - server["before_mb"]) * 1.048576 / megabytes + 1,
            "site_peak_mb": max(site["peak_mb"] for site in sites),
            "site_before_mb": max(site["before_mb"] for site in sites),
        }
        rows.append(row)
        first, second = row["round_s"]
        print(
            f"{backend}, {megabytes} MB, {sites_each} sites: {first:.1f} and {second:.1f} s a mean; server "
            f"{row['server_peak_mb']:.0f} MB at most, {row['server_before_mb']:.0f} before: "
            f"{row['server_models']:.2f} models; site {row['site_peak_mb']:.0f} MB",
            flush=True,
        )
    return rows


def free_port() -> int:
    """A port of the loopback that nobody has."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--only", choices=("rounds", "memory"))
    given = parser.parse_args()
    result: dict[str, Any] = json.loads(given.out.read_text()) if given.out.is_file() else {}
    result |= {"environment": environment(), "seed": 0, "threads": 1, "rounds_each": ROUNDS, "repeats": REPEATS}
    found = result.setdefault("results", {})
    with tempfile.TemporaryDirectory() as folder:
        if given.only != "memory":
            processes.start()
            found["rounds"] = measure_rounds(Path(folder))
            processes.stop()
        if given.only != "rounds":
            found["memory"] = measure_memory(Path(folder))
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
