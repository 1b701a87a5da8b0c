"""BatchNorm across clients: means of variances or of second moments, and statistics of the target's own (AdaBN).

Run from the repository root: python benchmarks/batchnorm.py [--cases digits ...] [--jobs 2]

Each figure is accuracy on all samples of a target, whose labels nothing was chosen by, or on the sources' test samples,
after the last round: the mean over targets and its sample standard deviation over three seeds. All columns have the
same networks, batches and rounds, and SGD with momentum. "spread of means" is the share of the variance of all sources'
data in the last round that a mean of variances lacks, in per cent, on average over layers and channels. Results go into
benchmarks/batchnorm.json.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.optim import SGD

from fedlit import FederatedStrategy
from fedlit.callbacks import OracleAccuracy
from fedlit.data import DigitFive, Digits, DomainDataModule, FeatureDomains
from fedlit.functional import mixture_variance
from fedlit.methods import AdaBN, SourceOnly
from fedlit.models import Features, SmallCNN
from fedlit.papers.experiments import Results, spread
from fedlit.run.batchnorm import variances_of
from fedlit.run.run import Run

SEEDS = (0, 1, 2)
SHARED = Path("../shared/data")
ALL: dict[str, Any] = {"transductive": True, "batch_size": 32}
WRITTEN = ("mnist", "usps", "optdigits")
CASES: dict[str, tuple[Callable[..., DomainDataModule], tuple[str, ...]]] = {
    "digits, embedded": (partial(Digits, **ALL), ("clean", "blended", "fonts", "noisy")),
    "MNIST, USPS, optdigits": (
        partial(
            DigitFive,
            SHARED / "digits_mnist10k_usps.npz",
            clients=list(WRITTEN),
            max_samples=1000,
            image_size=16,
            **ALL,
        ),
        WRITTEN,
    ),
    "Office-Caltech": (
        partial(FeatureDomains, SHARED / "office_caltech10_efficientnet_lite0.npz", **ALL),
        ("amazon", "caltech10", "dslr", "webcam"),
    ),
    "Office-Caltech, styles": (
        partial(FeatureDomains, SHARED / "office_caltech10_styles_efficientnet_lite0.npz", **ALL),
        ("photo", "painting", "sketch", "night"),
    ),
}


class Noting(SourceOnly):
    """Notes which share of the variance of all sources' data is the spread of their means, before these are averaged.

    Attributes:
        spread: That share in the last round, on average over layers and channels.
    """

    spread = math.nan

    def on_round_end(self, run: Run) -> None:
        """Look at the sources' own statistics first."""
        states = [self.run.weights.of(client.name) for client in self.sources]
        weights = torch.tensor([float(self.federation.weights[client.name]) for client in self.sources])
        shares: list[Tensor] = []
        for variance, mean in variances_of(self.replicas[self.sources[0]]).items():
            means, variances = (torch.stack([state[name] for state in states]) for name in (mean, variance))
            whole = mixture_variance(means, variances, weights)
            shares.append(1 - (weights / weights.sum() @ variances)[whole > 0] / whole[whole > 0])
        self.spread = float(torch.cat(shares).mean())
        super().on_round_end(run)


COLUMNS: dict[str, tuple[type[SourceOnly], dict[str, Any]]] = {
    "mean of variances": (SourceOnly, {"batchnorm_average": "variances"}),
    "mean of second moments": (Noting, {"batchnorm_average": "moments"}),
    "AdaBN": (AdaBN, {}),
    "AutoDIAL": (AdaBN, {"mixing": "learned", "warmup_rounds": 10}),
}
ROUNDS = 20
LOCAL_STEPS = {"MNIST, USPS, optdigits": 10, "Office-Caltech": 10, "Office-Caltech, styles": 10}
"""Steps of a client in a round; the embedded digits have as many as a pass over a client's samples takes."""


def networks(case: str) -> tuple[nn.Module, nn.Module | None]:
    """A small convolutional network, or a hidden layer on features, with BatchNorm."""
    if not case.startswith("Office"):
        return SmallCNN(1), None
    return Features(1280), nn.Sequential(nn.Linear(1280, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))


def run(piece: tuple[str, str, str, int]) -> dict[str, float]:
    """One training: accuracies in the end, what is lost of the spread, and CPU seconds."""
    case, column, target, seed = piece
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    start = time.process_time()
    lightning.seed_everything(seed, verbose=False)
    data = CASES[case][0](target=target)
    method, arguments = COLUMNS[column]
    extractor, classifier = networks(case)
    module = method(
        data.clients,
        data.target,
        data.num_classes,
        extractor,
        classifier,
        optimizer=lambda params: SGD(params, lr=0.02, momentum=0.9, fused=True),
        **arguments,
    )
    trainer = lightning.Trainer(
        max_epochs=ROUNDS,
        accelerator="cpu",
        devices=1,
        strategy=FederatedStrategy(local_steps=LOCAL_STEPS.get(case), num_threads=1),
        callbacks=[OracleAccuracy()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
    found = {
        name: float(trainer.callback_metrics[key])
        for name, key in (("target", "oracle/target/acc"), ("sources", "source/acc"))
    }
    if isinstance(module, Noting):
        found["spread"] = module.spread
    return found | {"seconds": time.process_time() - start}


def main() -> None:
    """Run the chosen cases, and write the JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--columns", nargs="+", choices=list(COLUMNS), default=list(COLUMNS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="Runs side by side, one thread each.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    results = Results(options.out, "torch", "lightning", rounds=ROUNDS, seeds=SEEDS)
    for case in options.cases:
        targets = CASES[case][1]
        pieces = list(product([case], options.columns, targets, SEEDS))
        with ProcessPoolExecutor(options.jobs) as pool:
            done = dict(zip(pieces, pool.map(run, pieces), strict=True))
        for column in options.columns:
            row: dict[str, Any] = {
                kind: spread([statistics.fmean(done[case, column, t, seed][kind] for t in targets) for seed in SEEDS])
                for kind in ("target", "sources")
            }
            if "spread" in done[case, column, targets[0], SEEDS[0]]:
                lost = [done[case, column, target, seed]["spread"] for target, seed in product(targets, SEEDS)]
                row["spread of means"] = round(100 * statistics.fmean(lost), 1)
            for target in targets:
                row[target] = spread([done[case, column, target, seed]["target"] for seed in SEEDS])
            row["cpu_seconds"] = round(sum(done[case, column, t, s]["seconds"] for t in targets for s in SEEDS))
            print(case, column, row, flush=True)
            results.keep(row, case, column)


if __name__ == "__main__":
    main()
