"""Cost of a federated round against a plain PyTorch loop that does the same work.

Run: python benchmarks/rounds.py [--repeats 5] [--out benchmarks/rounds.json]

FedAvg on scikit-learn's digits, dealt out to K clients: 64-64-64-10 MLP, batch 32, SGD with momentum, one local epoch
per round, 20 rounds, and for the vectorised path 50 clients with a 64-16-10 head. The two sides take turns in one
process with one thread; a figure is the median over repeats of CPU seconds per round, the first round left out.
Start-up (from building the module to the first batch) and memory come from a fresh process; memory is split into
what importing lightning alone takes and what comes on top, and "private" is the part that is not mapped from library
files. The plain loop is given with torch's default SGD, as one would write it, and with the fused one that fedlit uses.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import lightning
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from fedlit import Client, FederatedStrategy
from fedlit.cli import quieten
from fedlit.data import FederatedLoader
from fedlit.methods import FedAvg
from fedlit.models import MLP, Replica
from fedlit.run.component import Component
from fedlit.run.run import Run
from measures import mebibytes

ROUNDS = 20
BATCH = 32
Shards = dict[str, tuple[Tensor, Tensor]]


def shards(num_clients: int) -> Shards:
    """Digits dealt out to the clients."""
    x, y = load_digits(return_X_y=True)
    inputs, labels = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    return {f"client{i}": (inputs[i::num_clients], labels[i::num_clients]) for i in range(num_clients)}


def network(hidden: list[int]) -> tuple[nn.Module, nn.Module]:
    """Extractor and classifier, equal on both sides."""
    torch.manual_seed(0)
    extractor = MLP(64, hidden)
    return extractor, nn.Linear(hidden[-1], 10)


def plain_loop(data: Shards, hidden: list[int], fused: bool = False) -> tuple[list[float], nn.Module]:
    """FedAvg as one would write it by hand; CPU seconds at the end of each round."""
    extractor, classifier = network(hidden)
    models = {name: Replica(copy.deepcopy(extractor), copy.deepcopy(classifier)) for name in data}
    optimizers = {name: SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused) for name, model in models.items()}
    sizes = {name: len(y) for name, (_, y) in data.items()}
    total = sum(sizes.values())
    marks = []
    for _ in range(ROUNDS):
        for name, (x, y) in data.items():
            model, optimizer = models[name], optimizers[name]
            order = torch.randperm(len(y))
            for start in range(0, len(y), BATCH):
                rows = order[start : start + BATCH]
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x[rows]), y[rows])
                loss.backward()
                optimizer.step()
        with torch.no_grad():
            states = {name: model.state_dict() for name, model in models.items()}
            mean = {
                key: sum(states[name][key] * (sizes[name] / total) for name in data)
                for key in next(iter(states.values()))
            }
            for model in models.values():
                model.load_state_dict(mean)
        marks.append(time.process_time())
    return marks, models["client0"]


class Marks(pl.Callback, Component):
    """CPU seconds at the end of each round, and seconds until the first batch."""

    def __init__(self) -> None:
        self.marks: list[float] = []
        self.first_batch = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The first batch is next."""
        self.first_batch = time.perf_counter()

    def on_round_end(self, run: Run) -> None:
        """One more round."""
        self.marks.append(time.process_time())


def fedlit_loop(data: Shards, hidden: list[int], vectorize: bool = False) -> tuple[Marks, nn.Module]:
    """The same through fedlit."""
    extractor, classifier = network(hidden)
    names = list(data)
    module = FedAvg(
        # The target holds its share too and has labels: all clients train, as in the plain loop.
        [*names[:-1], Client(names[-1], role="target", labelled=True)],
        names[-1],
        10,
        extractor,
        classifier,
        optimizer=lambda params: SGD(params, lr=0.05, momentum=0.9, fused=True),
        vectorize=vectorize,
    )
    marks = Marks()
    trainer = pl.Trainer(
        max_epochs=1,
        strategy=FederatedStrategy(num_threads=1, rounds_per_epoch=ROUNDS),
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[marks],
    )
    loader = FederatedLoader({name: TensorDataset(*shard) for name, shard in data.items()}, BATCH, seed=0)
    trainer.fit(module, loader)
    return marks, module.replicas["client0"]


def per_round(marks: list[float]) -> float:
    """CPU seconds per round, the first left out."""
    return (marks[-1] - marks[0]) / (len(marks) - 1)


def compare(num_clients: int, hidden: list[int], repeats: int, vectorize: bool = False) -> dict[str, float]:
    """Median CPU milliseconds per round of both sides, taking turns, and their ratio."""
    data = shards(num_clients)
    sides: dict[str, Callable[[], float]] = {
        "plain": lambda: per_round(plain_loop(data, hidden)[0]),
        "plain_fused": lambda: per_round(plain_loop(data, hidden, fused=True)[0]),
        "fedlit": lambda: per_round(fedlit_loop(data, hidden, vectorize)[0].marks),
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(repeats):
        for side in sides if repeat % 2 == 0 else reversed(sides):
            times[side].append(sides[side]())
    result = {f"{side}_ms": round(1000 * statistics.median(values), 2) for side, values in times.items()}
    for name, base in (("ratio", "plain"), ("ratio_fused", "plain_fused")):
        ratios = sorted(ours / theirs for theirs, ours in zip(times[base], times["fedlit"], strict=True))
        result |= {name: round(statistics.median(ratios), 3)}
        result |= {f"{name}_min": round(ratios[0], 3), f"{name}_max": round(ratios[-1], 3)}
    return result


def start_up() -> dict[str, float]:
    """Seconds from building the module to the first batch, and peak memory, of one run with 10 clients."""
    start = time.perf_counter()
    marks, _ = fedlit_loop(shards(10), [64, 64])
    return {
        "start_up_s": round(marks.first_batch - start, 2),
        "peak_mib": round(mebibytes("VmHWM"), 1),
        "private_mib": round(mebibytes("RssAnon"), 1),
    }


def of_lightning_alone() -> float:
    """Peak memory of a process that only imports lightning, in MiB."""
    code = "import lightning.pytorch; print(open('/proc/self/status').read())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("VmHWM")]
    return round(int(line.split()[1]) / 1024, 1)


def difference(num_clients: int, hidden: list[int]) -> float:
    """Greatest difference between weights after all rounds, vectorised against one client at a time."""
    data = shards(num_clients)
    _, one = fedlit_loop(data, hidden)
    _, many = fedlit_loop(data, hidden, vectorize=True)
    return max(float((a - b).detach().abs().max()) for a, b in zip(one.parameters(), many.parameters(), strict=True))


def main() -> None:
    """Print the table and write the JSON next to it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--start-up", action="store_true", help="only that, as JSON")
    options = parser.parse_args()
    quieten()
    torch.set_num_threads(1)
    if options.start_up:
        print(json.dumps(start_up()))
        return
    fresh = subprocess.run(
        [sys.executable, __file__, "--start-up"], capture_output=True, text=True, check=True, timeout=300
    )
    cases = {
        "10 clients, 64-64-64-10": compare(10, [64, 64], options.repeats),
        "50 clients, 64-64-64-10": compare(50, [64, 64], options.repeats),
        "50 clients, 64-16-10, vectorised": compare(50, [16], options.repeats, vectorize=True),
    }
    result = {
        "what": "CPU milliseconds per round of FedAvg on digits, batch 32, one local epoch, 20 rounds",
        "cases": cases,
        "start_up": json.loads(fresh.stdout.strip().splitlines()[-1]) | {"lightning_alone_mib": of_lightning_alone()},
        "vectorised_difference": difference(50, [16]),
        "repeats": options.repeats,
        "seed": 0,
        "cores": os.cpu_count(),
        "threads": 1,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": lightning.__version__,
        },
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    columns = ("plain loop", "plain, fused", "fedlit", "fedlit/plain", "(min-max)", "fedlit/fused")
    print(f"{'CPU ms per round':34}" + "".join(f"{column:>14}" for column in columns))
    for name, case in cases.items():
        spread = f"({case['ratio_min']:.2f}-{case['ratio_max']:.2f})"
        print(
            f"{name:34}{case['plain_ms']:14.2f}{case['plain_fused_ms']:14.2f}{case['fedlit_ms']:14.2f}"
            f"{case['ratio']:13.2f}x{spread:>14}{case['ratio_fused']:13.2f}x"
        )
    start = result["start_up"]
    print(
        f"start-up {start['start_up_s']} s after imports; peak memory {start['peak_mib']} MiB, of which importing "
        f"lightning alone takes {start['lightning_alone_mib']} MiB; private {start['private_mib']} MiB"
    )
    print(f"vectorised against one by one: weights differ by at most {result['vectorised_difference']:.1e}")
    print(f"{os.cpu_count()} cores, 1 thread, median of {options.repeats}; written to {options.out}")


if __name__ == "__main__":
    main()
