"""Cost of a round of each method that needs no target label, next to SourceOnly with the same batches.

Run from the repository root: python benchmarks/baselines.py [--repeats 5] [--out benchmarks/baselines.json]

Digits in three domains, `SmallCNN` on images of 8x8 pixels, and an MLP 64-64-64-10, of which fixed costs are nearly
all; batch 64, rounds of 7 local steps, in one process with one thread. Methods take turns; a figure is the median over
repeats of CPU seconds per round, the first round left out; closed forms have one round alone. A target without labels
takes no step in SourceOnly, and one in most other methods: with K sources that alone is (K + 1) / K. "Sums" are the
secure sums and other exchanges of a local step, "announcements" the meetings of processes that these take: in a median
step, and how many more there are in a round's steps together, as of what clients agree on in the first of them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from fedlit import FederatedStrategy
from fedlit.cli import quieten
from fedlit.data import Digits
from fedlit.federation import Federation
from fedlit.federation.messenger import Messenger
from fedlit.methods import (
    FADA,
    FADE,
    KD3A,
    AdaBN,
    CoMDA,
    FedAvg,
    FedCORAL,
    FedDaDiL,
    FedDAN,
    FedDANN,
    FedJDA,
    FedMMD,
    FedRFTCA,
    FedRFTCAClosedForm,
    FedWDGRL,
    SourceOnly,
)
from fedlit.models import MLP, SmallCNN
from fedlit.run.component import Component
from fedlit.run.run import Run
from measures import environment

ROUNDS = 12
METHODS: dict[str, Callable[..., Any]] = {
    "SourceOnly": SourceOnly,
    "FedAvg": FedAvg,
    "AdaBN": AdaBN,
    "FedDAN": FedDAN,
    "FedCORAL": FedCORAL,
    "FedDANN": FedDANN,
    "CDAN": lambda *args, **kwargs: FedDANN(*args, conditional=True, **kwargs),
    "FADE": FADE,
    "FedWDGRL": FedWDGRL,
    "FADA": FADA,
    "KD3A": lambda *args, **kwargs: KD3A(*args, gate=0.5, **kwargs),
    "CoMDA": lambda *args, **kwargs: CoMDA(*args, warmup_rounds=0, **kwargs),
    "FedRFTCA": FedRFTCA,
    "FedRFTCAClosedForm": FedRFTCAClosedForm,
    "FedJDA": FedJDA,
    "FedMMD": lambda *args, **kwargs: FedMMD(*args, warmup_rounds=0, **kwargs),
    "FedDaDiL": lambda *args, **kwargs: FedDaDiL(*args, warmup_rounds=0, **kwargs),
}
VERBS = ("exchange", "mean", "sum", "affine")


class Counts(pl.Callback, Component):
    """CPU seconds at the start and the end of each round, and what was called within local steps of the last one."""

    def __init__(self) -> None:
        self.marks: list[float] = []
        self.inside = False
        self.calls: dict[str, list[int]] = {"announcements": [], "sums": []}

    def counted(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call that is counted within local steps."""

        def counting(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                self.calls[what][-1] += 1
            return call(*args, **kwargs)

        return counting

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        """The first round begins."""
        self.marks.append(time.process_time())

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        """A step of the last round is counted."""
        self.inside = trainer.current_epoch == ROUNDS - 1
        for steps in self.calls.values() if self.inside else ():
            steps.append(0)

    def on_before_optimizer_step(self, *_: Any) -> None:
        """What follows belongs to the round."""
        self.inside = False

    def on_round_end(self, run: Run) -> None:
        """One more round."""
        self.inside = False
        self.marks.append(time.process_time())


def run(name: str, kind: str, counting: bool = False) -> Counts:
    """Train a method for some rounds."""
    flat = kind == "MLP"
    data = Digits(clients=["clean", "blended", "fonts"], target="fonts", flatten=flat, batch_size=64, seed=0)
    pl.seed_everything(0, verbose=False)
    network = MLP(64, [64, 64], batch_norm=name == "AdaBN") if flat else SmallCNN(1)
    module = METHODS[name](
        data.clients, data.target, data.num_classes, network, optimizer=lambda params: torch.optim.SGD(params, lr=0.05)
    )
    counts = Counts()
    kept = {(owner, verb): getattr(owner, verb) for owner, verb in _watched()}
    if counting:
        for (owner, verb), call in kept.items():
            setattr(owner, verb, counts.counted("announcements" if owner is Messenger else "sums", call))
    trainer = pl.Trainer(
        max_epochs=ROUNDS,
        strategy=FederatedStrategy(num_threads=1),
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        callbacks=[counts],
    )
    try:
        trainer.fit(module, data)
    finally:
        for (owner, verb), call in kept.items():
            setattr(owner, verb, call)
    return counts


def _watched() -> list[tuple[type, str]]:
    return [(Messenger, "announce"), *((Federation, verb) for verb in VERBS)]


def main() -> None:
    """Print the table and write the JSON next to it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    quieten()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    networks = {kind: measured(kind, options.repeats) for kind in ("SmallCNN", "MLP")}
    facts = {
        "what": (__doc__ or "").splitlines()[0],
        "rounds": ROUNDS,
        "repeats": options.repeats,
        "seed": 0,
        "threads": 1,
    }
    options.out.write_text(json.dumps({**facts, "environment": environment(), "results": networks}, indent=2) + "\n")
    for kind, rows in networks.items():
        print(
            f"{kind:20}{'ms a round':>12}{'of SourceOnly':>15}{'(min-max)':>14}{'sums a step':>13}{'(once)':>8}"
            f"{'announcements':>15}{'(once)':>8}"
        )
        for name, row in rows.items():
            spread = f"({row['ratio_min']:.2f}-{row['ratio_max']:.2f})"
            print(
                f"{name:20}{row['round_ms']:12.1f}{row['ratio']:14.2f}x{spread:>14}{row['sums']:13}"
                f"{'(' + str(row['sums_once']) + ')':>8}{row['announcements']:15}"
                f"{'(' + str(row['announcements_once']) + ')':>8}"
            )


def measured(kind: str, repeats: int) -> dict[str, dict[str, float]]:
    """A row for each method, with one network."""
    taken: dict[str, list[float]] = {name: [] for name in METHODS}
    order = random.Random(0)
    for _ in range(repeats):
        for name in order.sample(list(METHODS), len(METHODS)):
            marks = run(name, kind).marks
            taken[name].append((marks[-1] - marks[1]) / (len(marks) - 2) if len(marks) > 2 else marks[1] - marks[0])
    rows: dict[str, dict[str, float]] = {}
    for name, times in taken.items():
        ratios = sorted(own / other for own, other in zip(times, taken["SourceOnly"], strict=True))
        counts = run(name, kind, counting=True)
        rows[name] = {
            "round_ms": round(1000 * statistics.median(times), 2),
            "ratio": round(statistics.median(ratios), 2),
            "ratio_min": round(ratios[0], 2),
            "ratio_max": round(ratios[-1], 2),
            **{what: _typical(steps) for what, steps in counts.calls.items()},
            **{f"{what}_once": sum(steps) - len(steps) * _typical(steps) for what, steps in counts.calls.items()},
        }
    return rows


def _typical(calls: list[int]) -> int:
    """Calls in a median step; 0 of a method whose last round has none."""
    return statistics.median_low(calls) if calls else 0


if __name__ == "__main__":
    main()
