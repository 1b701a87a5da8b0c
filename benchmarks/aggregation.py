"""FedGP, FedDA and auto-weighting on the updates of a ResNet-18: time next to FedAvg's, and memory.

Run from the repository root: python benchmarks/aggregation.py [--out benchmarks/aggregation.json]

A target and 10 sources, float32, each with all 122 entries of the state of a ResNet-18 (11.7 million parameters, and
BatchNorm's statistics and counters). The sources are the target plus noise: no projection is filtered. CPU seconds of
one thread (time.process_time), medians of actions that take turns. Asked: FedGP at most 2 times FedAvg of the same
tensors (the 11 that FedGP reads; FedAvg of the sources alone stands beside it); at most 2 copies of the model more
than inputs and result; auto-weights of 50 batches in memory that does not grow with their number.

"fedavg" is fedlit's, which adds in place; "fedavg, new tensors" writes total + share * update, and takes longer.
Memory is the peak of a fresh process above what it holds with the inputs in place, in copies of the model. For
auto-weights the batches come from a generator, whose newest batch is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# before torch is imported: CPU time sums over threads
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import torch
import torchvision
from torch import Tensor

from fedlit.functional import (
    auto_beta,
    auto_weights,
    fedavg,
    fedda,
    fedgp,
    fedgp_cosine,
    products_with_sources,
)
from measures import medians, peak

SOURCES, BATCHES, BETA = 10, 50, 0.5

Update = dict[str, Tensor]


def noisy(update: Update, seed: int, deviation: float = 1.0) -> Update:
    """The update plus noise in every entry but the counters."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(t.shape, generator=generator).mul_(deviation).add_(t) if t.is_floating_point() else t.clone()
        for name, t in update.items()
    }


def updates(number: int) -> tuple[Update, list[Update]]:
    """The target's update and the sources', which have a cosine of about 0.7 with it."""
    with torch.random.fork_rng():
        state = torchvision.models.resnet18(weights=None).state_dict()
    zero = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    target = noisy(zero, seed=0)
    return target, [noisy(target, seed=1 + idx) for idx in range(number)]


def batches(target: Update, number: int) -> Iterator[Update]:
    for idx in range(number):
        yield noisy(target, seed=100 + idx)


def fedavg_with_new_tensors(sources: list[Update]) -> Update:
    mean = {}
    for name, first in sources[0].items():
        total = first / len(sources)
        for source in sources[1:]:
            total = total + source[name] / len(sources)
        mean[name] = total.to(first.dtype)
    return mean


def weighed(target: Update, sources: list[Update]) -> Update:
    """FedGP's step as its target takes it with automatic weights: they and the projections share their products."""
    products = products_with_sources(target, sources, "layer")
    residuals = products.target.sum() - (products.inner.square() / products.sources).sum(dim=1)
    return fedgp(target, sources, auto_weights(1.0, residuals), products=products)


def timed(repeats: int) -> dict[str, float]:
    target, sources = updates(SOURCES)
    drawn = list(batches(target, 3))
    return medians(
        {
            "fedavg": lambda: fedavg([target, *sources]),
            "fedavg, sources only": lambda: fedavg(sources),
            "fedgp, layer": lambda: fedgp(target, sources, BETA),
            "fedgp, layer: inner products alone": lambda: products_with_sources(target, sources, "layer"),
            "fedgp, auto-weights": lambda: weighed(target, sources),
            "fedavg, new tensors": lambda: fedavg_with_new_tensors([target, *sources]),
            "fedgp, model": lambda: fedgp(target, sources, BETA, granularity="model"),
            "fedgp_cosine, layer": lambda: fedgp_cosine(target, sources, BETA, [1.0] * SOURCES),
            "fedda": lambda: fedda(target, sources, BETA),
            "auto_beta, 3 batches": lambda: auto_beta(drawn, sources, "fedgp", "layer"),
        },
        repeats,
    )


def peak_of(action: str) -> float:
    """Peak memory of one action above the inputs, in copies of the model."""
    target, sources = updates(SOURCES)
    run: dict[str, Callable[[Update, list[Update], int], object]] = {
        "fedavg": lambda t, s, b: fedavg([t, *s]),
        "fedda": lambda t, s, b: fedda(t, s, BETA),
        "fedgp": lambda t, s, b: fedgp(t, s, BETA),
        "fedgp_cosine": lambda t, s, b: fedgp_cosine(t, s, BETA, [1.0] * SOURCES),
        "batches": lambda t, s, b: [None for _ in batches(t, b)],
        "auto_beta": lambda t, s, b: auto_beta(batches(t, b), s, "fedgp", "layer"),
    }
    name, _, number = action.partition(":")
    small = {"a": torch.ones(3)}
    run[name](small, [small] * SOURCES, 2)  # what libraries allocate on their first call
    copy = sum(tensor.numel() * tensor.element_size() for tensor in target.values()) / 2**20
    return peak(lambda: run[name](target, sources, int(number or 0))) / copy


def memory(action: str) -> float:
    command = [sys.executable, str(Path(__file__)), "--peak-of", action]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak_of is not None:
        print(peak_of(options.peak_of))
        return
    times = timed(options.repeats)
    ratio = times["fedgp, layer"] / times["fedavg, sources only"]
    per_fedavg = {name: value / times["fedavg"] for name, value in times.items()}
    print(f"{'':22} CPU ms  per FedAvg  (FedGP per FedAvg of the sources only: {ratio:.2f})")
    for name, value in times.items():
        print(f"{name:22} {1000 * value:6.0f}  {per_fedavg[name]:10.2f}")
    copies = {name: memory(name) - 1 for name in ("fedavg", "fedda", "fedgp", "fedgp_cosine")}
    print("copies of the model at the peak, beyond inputs and result")
    for name, value in copies.items():
        print(f"{name:22} {value:6.2f}")
    streamed = {
        str(number): {name: memory(f"{name}:{number}") for name in ("batches", "auto_beta")} for number in (5, BATCHES)
    }
    print("copies of the model at the peak of auto_beta, beyond the sources; of its generator of batches alone")
    for key, row in streamed.items():
        print(f"{key + ' batches':22} {row['auto_beta']:6.2f}  {row['batches']:6.2f}")
    result = {
        "asked": {"fedgp_per_fedavg": 2, "copies": 2, "auto_beta_batches": BATCHES},
        "cpu_seconds": times,
        "per_fedavg": per_fedavg,
        "fedgp_per_fedavg_of_sources_only": ratio,
        "copies_beyond_inputs_and_result": copies,
        "copies_beyond_sources_by_batches": streamed,
        "model": "torchvision.models.resnet18", "sources": SOURCES, "beta": BETA, "dtype": "float32", "seed": 0,
        "repeats": options.repeats, "threads": 1, "cores": os.cpu_count(), "load_average": os.getloadavg()[0],
        "time": "CPU seconds, medians", "command": "python benchmarks/aggregation.py",
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "torchvision": torchvision.__version__,
        },
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
