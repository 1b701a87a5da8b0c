"""`CellFinder` in a federation of four microscopes, by five methods; nobody has marked the cells of the last one."""

from __future__ import annotations

import argparse
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import TensorDataset

from cells import MICROSCOPES, SIZE, CellFinder, pictures
from fedlit import (
    Client,
    Federated,
    FederatedAdaBN,
    FederatedDAN,
    FederatedModule,
    FederatedProx,
    FederatedRep,
    FederatedStrategy,
)
from fedlit.data import FederatedLoader

TARGET = "turin"
SITES = [*MICROSCOPES]
MARKED = 8  # pictures of the target whose cells are marked, where a method needs some


def methods(rounds: int) -> dict[str, FederatedModule]:
    """`CellFinder` in each of them; without ``num_classes``, its ``validation_step`` alone evaluates."""
    some = [*SITES[:-1], Client(TARGET, role="target", labelled=True)]
    features = {"features": "bottleneck", "width": 16 * (SIZE // 2) ** 2, "num_frequencies": 100}
    return {
        "FedAvg": Federated(CellFinder(), SITES, TARGET),
        "FedProx": FederatedProx(CellFinder(), SITES, TARGET, mu=0.1),
        "FedDAN": FederatedDAN(CellFinder(), SITES, TARGET, warmup_rounds=rounds // 2, **features),
        "AdaBN": FederatedAdaBN(CellFinder(), SITES, TARGET),
        f"FedRep, {MARKED} marked": FederatedRep(CellFinder(), some, TARGET, head="head", local_norm=True),
    }


def loaders(number: int, has_marks: bool) -> tuple[FederatedLoader, FederatedLoader]:
    """Pictures to train on, and others; a picture of -1 is one that nobody has marked."""
    train = {site: pictures(site, number) for site in SITES}
    x, kinds = train[TARGET].tensors
    marked = (torch.arange(number) < MARKED) & has_marks
    train[TARGET] = TensorDataset(x, torch.where(marked[:, None, None], kinds, -1))
    others = {site: pictures(site, number, seed=1) for site in SITES}
    return FederatedLoader(train, 16, seed=0), FederatedLoader(others, 16, training=False)


def main(rounds: int = 20, number: int = 64) -> dict[str, dict[str, float]]:
    """Train each method, and print a row of each."""
    rows: dict[str, dict[str, float]] = {}
    print(f"{'':18}{'sources IoU':>12}{'target IoU':>12}{'target Dice':>12}  (of the target: an oracle)")
    for name in methods(rounds):
        L.seed_everything(0, verbose=False)
        method = methods(rounds)[name]
        quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
        trainer = L.Trainer(
            max_epochs=rounds, accelerator="cpu", devices=1, strategy=FederatedStrategy(num_threads=1),
            callbacks=[EarlyStopping("source/iou", mode="max", patience=10)], enable_model_summary=False, **quiet,
        )  # fmt: skip
        trainer.fit(method, *loaders(number, has_marks=method.target.labelled))
        numbers = ("source/iou", "oracle/target/iou", "oracle/target/dice")
        row = {key: float(trainer.callback_metrics[key]) for key in numbers}
        print(f"{name:18}" + "".join(f"{each:12.2f}" for each in row.values()), flush=True)
        rows[name] = row
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pictures", type=int, default=64, help="of each microscope")
    given = parser.parse_args()
    main(given.rounds, given.pictures)
