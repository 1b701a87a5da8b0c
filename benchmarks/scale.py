"""Many clients, and many samples: what a round costs by those who are present, a masked sum by client, and refinement.

Run: python benchmarks/scale.py [--parts present networks copies masked refine] [--out benchmarks/scale.json]

present  FedAvg of a 64-16-10 MLP, of whose clients 50 sources and the target train in each of six rounds of two local
         steps: CPU seconds to the first batch, by client too, CPU milliseconds of the median round, the peak of the
         process's memory, and CPU seconds and size of a checkpoint, in kilobytes by client.
networks FedAvg of ResNet-18 (32 pixels, batches of 8, SGD without momentum), of whose clients five sources and the
         target take one local step in each of three rounds: the peak of the process's memory beyond what it had
         before, CPU seconds to the first batch, and the size of a checkpoint.
copies   The same, where each client has its weights in memory of its own, as in a torch that cannot share them.
masked   A masked sum of 1,000 numbers, all parties in one process, default settings, a tenth of the clients lost
         after they have shared their secrets: CPU milliseconds by client of agreeing on keys, once in a federation, and
         of the sum, and whether it is that of integers.
refine   `refine_labels` of that many samples with 1,280 features in 200 clusters, 10 classes: CPU seconds.

One thread, a fresh process for each figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from fedlit import Component, FederatedStrategy, Run
from fedlit.data import FederatedLoader
from fedlit.federation import Fraction
from fedlit.functional import refine_labels
from fedlit.methods import FedAvg
from fedlit.models import MLP, ResNet
from fedlit.privacy import FixedPoint, PairwiseMasking, RoundId
from fedlit.privacy.driver import Parties
from measures import environment, mebibytes, seconds

SIZES = {
    "present": [50, 500, 4000, 10000],
    "networks": [10, 100, 1000],
    "copies": [10, 100],
    "masked": [50, 200, 1000],
    "refine": [16000, 100000],
}
PRESENT, ROUNDS = 50, 6


class Marks(pl.Callback, Component):
    """CPU seconds at the start and at the end of each round."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The first batch is next."""
        self.marks.append(time.process_time())

    def on_round_end(self, run: Run) -> None:
        """One more round."""
        self.marks.append(time.process_time())


def present(number: int) -> dict[str, float]:
    """Train with so many clients of which 50 take part in a round."""
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(40, 64), torch.randint(10, (40,)))
    names, marks = [f"client{index}" for index in range(number)], Marks()
    options: dict[str, Any] = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar"], False)
    options |= {"enable_model_summary": False, "accelerator": "cpu", "max_epochs": ROUNDS, "callbacks": [marks]}
    strategy = FederatedStrategy(num_threads=1, participation=Fraction(min(1.0, PRESENT / (number - 1))))
    start = time.process_time()
    module = FedAvg(names, names[-1], 10, MLP(64, [16]))
    trainer = pl.Trainer(strategy=strategy, **options)
    trainer.fit(module, FederatedLoader(dict.fromkeys(names, samples), 20, seed=0))
    peak = mebibytes("VmHWM")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run.ckpt")
        saving = seconds(lambda: trainer.save_checkpoint(file))
        size = file.stat().st_size
    rounds = [after - before for before, after in zip(marks.marks[1:], marks.marks[2:], strict=False)]
    set_up = marks.marks[0] - start
    return {
        "set_up_s": round(set_up, 2),
        "set_up_ms_by_client": round(1000 * set_up / number, 2),
        "round_ms": round(1000 * statistics.median(rounds), 1),
        "peak_mib": round(peak),
        "checkpoint_s": round(saving, 2),
        "checkpoint_kb_by_client": round(size / 1000 / number, 1),
    }


def networks(number: int) -> dict[str, float]:
    """Train ResNets with so many clients of which five take part in a round."""
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(8, 3, 32, 32), torch.randint(10, (8,)))
    names, marks = [f"client{index}" for index in range(number)], Marks()
    options: dict[str, Any] = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar"], False)
    options |= {"enable_model_summary": False, "accelerator": "cpu", "max_epochs": 3, "callbacks": [marks]}
    strategy = FederatedStrategy(num_threads=1, participation=Fraction(5 / (number - 1)))
    before, start = mebibytes("VmHWM"), time.process_time()
    module = FedAvg(names, names[-1], 10, ResNet(18, weights=None), optimizer=partial(torch.optim.SGD, lr=0.01))
    trainer = pl.Trainer(strategy=strategy, **options)
    trainer.fit(module, FederatedLoader(dict.fromkeys(names, samples), 8, seed=0))
    peak = mebibytes("VmHWM") - before
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run.ckpt")
        trainer.save_checkpoint(file)
        size = file.stat().st_size
    return {
        "peak_mib": round(peak),
        "set_up_s": round(marks.marks[0] - start, 1),
        "checkpoint_mib": round(size / 2**20),
    }


def copies(number: int) -> dict[str, float]:
    """`networks`, each client's in memory of its own."""
    del torch._lazy_clone  # type: ignore[attr-defined]
    return networks(number)


def masked(number: int) -> dict[str, float]:
    """One masked sum, of which a tenth of the clients is lost."""
    torch.manual_seed(0)
    names = [f"client{index}" for index in range(number)]
    vectors = {name: torch.randn(1000) for name in names}
    left = names[: -(number // 10)]
    parties = Parties(PairwiseMasking(), names)
    found: list[torch.Tensor] = []

    def take() -> None:
        parties.open_round(RoundId(0, "weights", 0), names)
        for name in left:
            parties.server.add(name, parties.clients[name].protect(vectors[name]))
        found.append(parties.total(left))

    enrolling = seconds(lambda: parties.enrol(names))
    spent = seconds(take)
    exact = torch.stack([FixedPoint().encode(vectors[name]) for name in left]).sum(dim=0)
    return {
        "keys_ms_by_client": round(1000 * enrolling / number, 1),
        "ms_by_client": round(1000 * spent / number, 1),
        "neighbours": PairwiseMasking().degree(number),
        "equal": bool(torch.equal(found[0].to(torch.int64), exact)),
    }


def refine(number: int) -> dict[str, float]:
    """Refine noisy predictions of clustered samples."""
    generator = torch.Generator().manual_seed(0)
    labels, which = (torch.randint(high, (number,), generator=generator) for high in (10, 20))
    centres = torch.randn(200, 1280, generator=generator)
    x = 0.7 * centres[20 * labels + which] + torch.randn(number, 1280, generator=generator)
    p = (F.one_hot(labels, 10) + 1.2 * torch.randn(number, 10, generator=generator)).softmax(dim=1)
    refined: list[torch.Tensor] = []
    spent = seconds(lambda: refined.append(refine_labels(p, x)))
    accuracies = [round(100 * float((each.argmax(dim=1) == labels).double().mean()), 1) for each in (p, refined[0])]
    return {"s": round(spent, 1), "accuracy_before": accuracies[0], "accuracy_after": accuracies[1]}


PARTS = {"present": present, "networks": networks, "copies": copies, "masked": masked, "refine": refine}


def main() -> None:
    """Print the figures and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--one", nargs=2, metavar=("PART", "NUMBER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        part, number = options.one
        print(json.dumps(PARTS[part](int(number))))
        return
    results = json.loads(options.out.read_text())["results"] if options.out.exists() else {}
    for part in options.parts:
        results[part] = {}
        for number in SIZES[part]:
            command = [sys.executable, __file__, "--one", part, str(number)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=3600)
            results[part][str(number)] = json.loads(done.stdout.splitlines()[-1])
            print(part, number, results[part][str(number)], flush=True)
            options.out.write_text(json.dumps({"environment": environment(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
