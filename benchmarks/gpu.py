"""Every method on a GPU next to the CPU, and what a round of a ResNet-50 costs there.

Run from the repository root, where there is a GPU: python benchmarks/gpu.py [--parts methods resume copies resnet]

methods  Each row of the tests' table of methods, three rounds on the CPU and on the GPU, in 64 and 32 bits and with
    masked sums: distance between the target's weights of both, relative to how far they moved; and whether both sent
    the same messages.
resume   Each row, three rounds on the GPU next to two rounds, a checkpoint, and the third: whether they are equal, with
    dropout.
copies   Milliseconds to bring a vector of a federation to the CPU (`to_host`), next to `Tensor.cpu`, by its length.
resnet   Wall-clock seconds of a round of three sources and a target, ResNet-50 of torchvision with random weights,
    inputs of random numbers, and the most memory that the GPU held; FedAvg also as a loop written by hand.

Devices are compared without dropout, whose random numbers are others on a GPU. Products of 32 bits are torch's default,
without TF32.
"""

# ruff: noqa: E402  (the table of methods is one of the tests, which the lines below find)
from __future__ import annotations

import argparse
import copy
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedlit.run.component import Component
from fedlit.run.run import Run

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from fedlit import Client, FederatedModule
from fedlit.data import FederatedLoader
from fedlit.federation import RosterError
from fedlit.federation.wire import to_host
from fedlit.methods import FedAvg, FedGP, FedMMD, FedRFTCA
from fedlit.models import Backbone, Replica
from fedlit.papers.experiments import Results
from fedlit.privacy import PairwiseMasking
from helpers import build, digits, same, trainer, weights
from method_table import METHODS

ROUNDS = 3
STEPS = 10
OPTIMISING: dict[str, Any] = {
    "optimizer": partial(SGD, lr=0.05, momentum=0.9),  # Adam makes whole steps of the rounding of gradients that are 0
    "lr_scheduler": partial(StepLR, step_size=2, gamma=0.5),
}


class Start(pl.Callback):
    """Keeps the target's weights as they are before the first round."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """They are there now."""
        self.weights = weights(pl_module, pl_module.target.name)


def fitted(
    name: str,
    device: str,
    *callbacks: pl.Callback,
    precision: Any = "32-true",
    masked: bool = False,
    dropout: float = 0.0,
    rounds: int = ROUNDS,
    checkpoint: Path | None = None,
) -> pl.Trainer:
    """A row of the table, trained."""
    _quieten()
    torch.set_num_threads(1)
    os.environ["PL_GLOBAL_SEED"] = "0"
    method, arguments, options = METHODS[name]
    data = digits(batch_size=32, **options)
    module = build(method, data, **OPTIMISING | {"dropout": dropout} | arguments)
    strategy = {"privacy": PairwiseMasking(colluders=0)} if masked else {}  # as two sources are few
    run = trainer(rounds, callbacks, gradient_clip_val=1.0, strategy=strategy, accelerator=device, precision=precision)
    run.fit(module, data, ckpt_path=checkpoint)
    return run


def compared(name: str, device: str) -> dict[str, Any]:
    """A row of the table on both devices."""
    row: dict[str, Any] = {"same messages": True}
    for label, bits, masked in (("64 bits", 64, False), ("32 bits", 32, False), ("64 bits, masked", 64, True)):
        start = Start()
        try:
            expected = module_of(fitted(name, "cpu", start, precision=f"{bits}-true", masked=masked))
            found = module_of(fitted(name, device, precision=f"{bits}-true", masked=masked))
        except RosterError:  # of a method that needs single messages
            row[label] = "refused"
            continue
        row[label] = distance(expected, start.weights, found)
        row["same messages"] &= sorted(expected.federation.ledger) == sorted(found.federation.ledger)
    return row


def module_of(run: pl.Trainer) -> FederatedModule:
    """What a run trained."""
    module = run.lightning_module
    assert isinstance(module, FederatedModule)
    return module


def distance(expected: FederatedModule, start: dict[str, Tensor], found: FederatedModule) -> float:
    """Between the target's weights of two runs, relative to how far they moved in the first."""
    one, other = (weights(module, module.target.name) for module in (expected, found))
    names = [name for name, each in one.items() if each.is_floating_point()]
    differences = [(one[name].cpu() - other[name].cpu()).double().flatten() for name in names]
    steps = [  # samples that KNNPer remembers are none at the start
        (one[name].cpu() - (start[name].cpu() if start[name].shape == one[name].shape else 0)).double().flatten()
        for name in names
    ]
    return float(torch.cat(differences).norm() / torch.cat(steps).norm())


def resumed(name: str, device: str) -> dict[str, bool]:
    """Whether a row's run is equal to the last bit if it is left and resumed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "two.ckpt")
        fitted(name, device, dropout=0.2, rounds=ROUNDS - 1).save_checkpoint(path)
        again = module_of(fitted(name, device, dropout=0.2, checkpoint=path))
    straight = module_of(fitted(name, device, dropout=0.2))
    clients = [client.name for client in straight.clients]
    return {"equal": all(same(weights(straight, client), weights(again, client)) for client in clients)}


def copied(length: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of both ways, medians of 20, after one for the memory that torch keeps."""
    vector, found = torch.randn(length, device=device), {}
    for name, copy_of in (("to_host", to_host), ("cpu", Tensor.cpu)):
        times = []
        for _ in range(21):
            start = now(device)
            copy_of(vector)
            times.append(now(device) - start)
        found[name] = round(1000 * statistics.median(times[1:]), 3)
    return found


def _quieten() -> None:
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def images(size: int, pixels: int) -> dict[str, TensorDataset]:
    """Random images of ten classes by client."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: TensorDataset(
            torch.randn(size, 3, pixels, pixels, generator=generator), torch.randint(10, (size,), generator=generator)
        )
        for name in ("a", "b", "c", "target")
    }


class Seconds(pl.Callback, Component):
    """Wall clock at the end of each round, once the GPU is done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[float] = []

    def on_round_end(self, run: Run) -> None:
        """One more."""
        self.marks.append(now(self.device))


def now(device: torch.device) -> float:
    """Seconds, once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def resnet(method: str, device: torch.device, precision: str, batch: int, pixels: int) -> dict[str, float]:
    """Seconds of a round, and mebibytes of the GPU."""
    data = images(batch * STEPS, pixels)
    torch.manual_seed(0)
    clients = [Client(name) for name in ("a", "b", "c")]
    target = Client("target", role="target", labelled=method in ("FedAvg", "FedGP"))
    options = {"FedMMD": {"degree": 1, "warmup_rounds": 0}, "FedRFTCA": {"num_frequencies": 512, "num_components": 64}}
    kind = {each.__name__: each for each in (FedAvg, FedGP, FedMMD, FedRFTCA)}[method]
    module = kind(
        [*clients, target], "target", 10, Backbone("resnet50"),
        optimizer=partial(SGD, lr=0.001, momentum=0.9), **options.get(method, {}),
    )  # fmt: skip
    marks = Seconds(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    loader = FederatedLoader(data, batch, seed=0)
    trainer(4, [marks], accelerator=device.type, precision=precision).fit(module, loader)
    rounds = [after - before for before, after in pairwise(marks.marks)]
    return {"seconds": round(statistics.median(rounds), 3), **_memory(device)}


def by_hand(device: torch.device, precision: str, batch: int, pixels: int) -> dict[str, float]:
    """FedAvg as a loop in torch that does the same work."""
    data = images(batch * STEPS, pixels)
    torch.manual_seed(0)
    extractor = Backbone("resnet50")
    start = Replica(extractor, nn.Linear(extractor.out_features, 10)).to(device)
    models = {name: copy.deepcopy(start) for name in data}
    optimizers = {name: SGD(model.parameters(), lr=0.001, momentum=0.9) for name, model in models.items()}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    marks = []
    for _ in range(4):
        for name, dataset in data.items():
            x, y = dataset.tensors
            order = torch.randperm(len(y))
            for rows in order.split(batch):
                inputs, labels = x[rows].to(device), y[rows].to(device)
                with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16-mixed"):
                    loss = functional.cross_entropy(models[name](inputs), labels)
                optimizers[name].zero_grad()
                loss.backward()
                optimizers[name].step()
        with torch.no_grad():
            states = [model.state_dict() for model in models.values()]
            mean = {
                key: sum(state[key] for state in states) / len(states) if first.is_floating_point() else first
                for key, first in states[0].items()
            }
            for model in models.values():
                model.load_state_dict(mean)
        marks.append(now(device))
    rounds = [after - before for before, after in pairwise(marks)]
    return {"seconds": round(statistics.median(rounds), 3), **_memory(device)}


def _memory(device: torch.device) -> dict[str, float]:
    return {"MiB": round(torch.cuda.max_memory_allocated(device) / 2**20)} if device.type == "cuda" else {}


def main() -> None:
    """Run the parts, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["methods", "resume", "copies", "resnet"])
    parser.add_argument("--rows", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu tries the script itself.")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print(f"skipped: torch {torch.__version__} finds no GPU here; --device cpu tries the script itself")
        return
    gpu = torch.cuda.get_device_name() if given.device == "cuda" else "none"
    results = Results(given.out, "torch", "torchvision", "lightning", gpu=gpu)
    parts = given.parts or ["methods", "resume", "copies", "resnet"]
    context = multiprocessing.get_context("spawn")
    for part, work in (("methods", compared), ("resume", resumed)):
        if part not in parts:
            continue
        with ProcessPoolExecutor(given.jobs, mp_context=context) as pool:
            waiting = {name: pool.submit(work, name, given.device) for name in given.rows}
            for name, future in waiting.items():
                row = future.result() if future.exception() is None else {"error": repr(future.exception())}
                results.keep(row, part, name)
                print(f"{part}: {name:24s}", row, flush=True)
    for length in (10**5, 10**6, 10**7, 10**8) if "copies" in parts else ():
        row = copied(length, torch.device(given.device))
        results.keep(row, "copies", f"{length:,} numbers")
        print(f"copies: {length:13,}", row, flush=True)
    if "resnet" in parts:
        _quieten()
        device = torch.device(given.device)
        for precision in ("32-true", "bf16-mixed"):
            for method in ("by hand", "FedAvg", "FedGP", "FedRFTCA", "FedMMD"):
                measure = by_hand if method == "by hand" else partial(resnet, method)
                row = measure(device, precision, given.batch, given.pixels)
                results.keep(row, "resnet", f"{method}, {precision}")
                print(f"resnet: {method:12s} {precision:12s}", row, flush=True)


if __name__ == "__main__":
    main()
