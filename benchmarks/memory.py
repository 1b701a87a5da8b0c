"""Memory: MiB for each further local client of FedAvg in one process, and bytes by number of a secure sum.

Run: python benchmarks/memory.py [--parts clients state_dir recompute sums] [--networks "ResNet-18, 96 pixels"]
    [--out benchmarks/memory.json]

Each figure of clients is of a fresh process that trains two rounds of two local steps, SGD with momentum, on images
that are made as they are read; "mib" is the peak of its memory (VmHWM) with the larger number of clients less that with
the smaller one, by further client, and "weights_and_state_mib" what a client's weights and momenta take. "together" is
how small networks are trained: the losses of all clients before one backward pass, and what they send collected before
it is added; "in turns" is how large ones are. "ms" is CPU time by local step of a client, with the smaller number.

"state_dir" is the peak of 10 and 100 clients of ResNet-18 whose weights and momenta are in files of a folder, with
batches of 8, and CPU and wall time by local step next to 10 in memory. "recompute" is "mib" and "ms" of FedDAN, whose
clients exchange features' means in each local step, with their activations kept until the backward pass, and with
extractors that run again in it.

"sums" is one sum of vectors of float32 under each backend, made step by step in a fresh process: bytes by number of a
message, and of the most that a step takes beyond what was there before it: a client that protects its vector, the
server that adds messages and makes the total, and whoever reveals it, as float64.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedlit import Client, FederatedModule, FederatedStrategy
from fedlit.data import FederatedLoader
from fedlit.federation.sums import driver
from fedlit.methods import FedAvg, FedDAN
from fedlit.models import ResNet
from fedlit.privacy import BFV, CKKS, Paillier, PairwiseMasking, Plain, RoundId, SecureAggregation
from fedlit.privacy.driver import Parties
from fedlit.run import turns
from measures import environment, mebibytes, peak, seconds

NETWORKS: Mapping[str, tuple[int, int, int, tuple[int, int]]] = {
    "ResNet-18, 96 pixels": (18, 96, 32, (3, 7)),
    "ResNet-50, 224 pixels": (50, 224, 8, (2, 4)),
}
"""Depth, pixels, batch size and the two numbers of clients."""

STEPS, ROUNDS = 2, 2

PARTS = ("clients", "state_dir", "recompute", "sums")

SUMS: Mapping[str, tuple[Callable[[], SecureAggregation], int]] = {
    "Plain": (Plain, 10**8),
    "PairwiseMasking": (PairwiseMasking, 10**8),
    "BFV": (BFV, 10**8),
    "CKKS": (CKKS, 10**8),
    "Paillier": (lambda: Paillier(key_bits=2048), 4 * 10**6),
}
"""Backends, and how many numbers their vectors have; Paillier would decrypt 10^8 for hours."""


class Images(Dataset[tuple[Tensor, int]]):
    """Random images, made when they are read."""

    def __init__(self, pixels: int, size: int) -> None:
        self.pixels, self.size = pixels, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, self.pixels, self.pixels, generator=generator), index % 10


def train(
    network: str,
    num_clients: int,
    together: bool = False,
    state_dir: str | None = None,
    feddan: str | None = None,
    batch_size: int | None = None,
) -> dict[str, Any]:
    """Train in this process; its peak, CPU time, and a hash of the weights."""
    depth, pixels, usual, _ = NETWORKS[network]
    batch_size = batch_size or usual
    if together:
        turns.LARGE = driver._LONG = sys.maxsize
    torch.manual_seed(0)
    names = [f"client{index}" for index in range(num_clients)]
    clients = [*names[:-1], Client(names[-1], role="target", labelled=True)]
    resnet = ResNet(depth, weights=None)
    module: FederatedModule = FedAvg(clients, names[-1], 10, resnet)
    if feddan is not None:
        module = FedDAN(names, names[-1], 10, resnet, num_frequencies=100, recompute=feddan == "recompute")
    options: dict[str, Any] = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar"], False)
    options |= {"enable_model_summary": False, "num_sanity_val_steps": 0, "accelerator": "cpu", "max_epochs": ROUNDS}
    trainer = pl.Trainer(strategy=FederatedStrategy(num_threads=1, state_dir=state_dir), **options)
    data = {name: Images(pixels, STEPS * batch_size) for name in names}
    begun = time.perf_counter()
    spent = seconds(lambda: trainer.fit(module, FederatedLoader(data, batch_size, seed=0)))
    wall = time.perf_counter() - begun
    digest = hashlib.sha256()
    for param in module.replicas[names[0]].parameters():
        digest.update(param.detach().numpy().tobytes())
    numbers = sum(param.numel() for param in module.replicas[names[0]].parameters())
    return {
        "peak_mib": mebibytes("VmHWM"),
        "ms": 1000 * spent / (num_clients * STEPS * ROUNDS),
        "wall_ms": 1000 * wall / (num_clients * STEPS * ROUNDS),
        "weights_and_state_mib": 2 * 4 * numbers / 2**20,
        "sha256": digest.hexdigest(),
    }


def apart(network: str, num_clients: int, **options: Any) -> dict[str, Any]:
    """`train` in a fresh process."""
    return in_fresh_process("--one", json.dumps({"network": network, "num_clients": num_clients, **options}))


def in_fresh_process(*arguments: str) -> dict[str, Any]:
    """What this file prints with the arguments."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=3600)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(network: str) -> dict[str, Any]:
    """Both ways, with few clients and more."""
    few, more = NETWORKS[network][3]
    found: dict[str, Any] = {}
    hashes: dict[int, set[str]] = {few: set(), more: set()}
    for way in ("together", "in turns"):
        runs = {number: apart(network, number, together=way == "together") for number in (few, more)}
        for number, run in runs.items():
            hashes[number].add(run["sha256"])
        mib, own = (runs[more]["peak_mib"] - runs[few]["peak_mib"]) / (more - few), runs[few]["weights_and_state_mib"]
        found[way] = {"mib": round(mib, 1), "of_weights_and_state": round(mib / own, 2), "ms": round(runs[few]["ms"])}
    return {
        "clients": [few, more],
        "weights_and_state_mib": round(own, 1),
        **found,
        "equal_bits": all(len(each) == 1 for each in hashes.values()),
    }


def offload(network: str = "ResNet-18, 96 pixels") -> dict[str, Any]:
    """With weights and momenta in files."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        inside, few = (apart(network, 10, state_dir=where, batch_size=8) for where in (None, folder))
        many = apart(network, 100, state_dir=folder, batch_size=8)
        larger = apart(network, 100, state_dir=folder)
    return {
        "clients": [10, 100],
        "weights_and_state_mib": [round(number * few["weights_and_state_mib"]) for number in (10, 100)],
        "peak_mib": [round(run["peak_mib"]) for run in (few, many)],
        "peak_mib, batches of 32": round(larger["peak_mib"]),
        "ms": [round(run["ms"]) for run in (few, many)],
        "wall_ms": [round(run["wall_ms"]) for run in (few, many)],
        "in_memory": {key: round(inside[key]) for key in ("peak_mib", "ms", "wall_ms")},
        "equal_bits": inside["sha256"] == few["sha256"],
        "environment": environment(),
    }


def recompute(network: str = "ResNet-18, 96 pixels") -> dict[str, Any]:
    """Of a method whose clients exchange in each local step."""
    few, more = NETWORKS[network][3]
    found: dict[str, Any] = {"clients": [few, more], "environment": environment()}
    hashes = set()
    for way in ("keep", "recompute"):
        runs = [apart(network, number, feddan=way) for number in (few, more)]
        mib = (runs[1]["peak_mib"] - runs[0]["peak_mib"]) / (more - few)
        found[way] = {"mib": round(mib, 1), "ms": round(runs[0]["ms"])}
        found["weights_and_state_mib"] = round(runs[0]["weights_and_state_mib"], 1)
        hashes.add((runs[0]["sha256"], runs[1]["sha256"]))
    return {**found, "equal_bits": len(hashes) == 1}


def secure_sum(name: str) -> dict[str, Any]:
    """One sum in this process, of three clients whose vectors are equal."""
    make, length = SUMS[name]
    backend, clients = make(), ["a", "b", "c"]
    vector = torch.rand(length, generator=torch.Generator().manual_seed(0))
    backend.sum({client: {"": vector[:10]} for client in clients})  # what libraries allocate on their first call
    parties, by_number = Parties(backend, clients), length / 2**20
    parties.enrol(clients)
    parties.open_round(RoundId(0, "sum", 0), clients)
    most: dict[str, float] = {}
    made: dict[str, Tensor] = {}

    def step(which: str, action: Callable[[], object]) -> None:
        most[which] = max(most.get(which, 0.0), round(peak(action) / by_number, 1))

    def protect(client: str) -> None:
        made["message"] = parties.clients[client].protect(vector)

    def total() -> None:
        made["total"] = parties.total(clients)

    def reveal() -> None:
        holder = parties.server if backend.key_holder == "server" else parties.clients["a"]
        made["sum"] = holder.reveal(made["total"], len(clients))

    for client in clients:
        step("client", partial(protect, client))
        step("server adds", partial(parties.server.add, client, made["message"]))
        message = made["message"].nbytes / length
    made.clear()
    step("server makes the total", total)
    step("revealed", reveal)
    error = max(
        float((some - len(clients) * own).abs().max())
        for some, own in zip(torch.split(made["sum"], 10**6), torch.split(vector, 10**6), strict=True)
    )
    return {
        "numbers": length, "message": round(message, 1), **most, "largest_error": error, "environment": environment()
    }  # fmt: skip


def main() -> None:
    """Print the table and write the JSON next to it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--sum", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sum:
        print(json.dumps(secure_sum(options.sum)))
        return
    if options.one:
        print(json.dumps(train(**options.one)))
        return
    made = json.loads(options.out.read_text()) if options.out.exists() else {"results": {}}
    results = made["results"]
    networks = options.networks if "clients" in options.parts else []
    if networks:
        made["environment"] = environment()
    print(f"{'network':24}{'own':>8}{'together':>22}{'in turns':>22}{'ms':>14}   equal bits")
    for network in networks:
        results[network] = row = compare(network)
        cells = [f"{row[way]['mib']} ({row[way]['of_weights_and_state']}x)" for way in ("together", "in turns")]
        times = f"{row['together']['ms']} / {row['in turns']['ms']}"
        own = row["weights_and_state_mib"]
        print(f"{network:24}{own:>8}{cells[0]:>22}{cells[1]:>22}{times:>14}   {row['equal_bits']}")
    if "state_dir" in options.parts:
        results["state_dir"] = row = offload()
        print("state_dir: " + ", ".join(f"{key} {value}" for key, value in row.items() if key != "environment"))
    if "recompute" in options.parts:
        results["recompute"] = row = recompute()
        print("recompute: " + ", ".join(f"{key} {value}" for key, value in row.items() if key != "environment"))
    if "sums" in options.parts:
        results["sums"] = {name: in_fresh_process("--sum", name) for name in SUMS}
        print(f"bytes by number: {json.dumps(results['sums'], indent=2)}")
    options.out.write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    main()
