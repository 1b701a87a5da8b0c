"""Cost of a round of each method that needs no target label, next to SourceOnly with the same batches.

Run from the repository root: python benchmarks/baselines.py [--repeats 5] [--out benchmarks/baselines.json]

Digits in three domains, `SmallCNN` on images of 8x8 pixels, and an MLP 64-64-64-10, of which fixed costs are nearly
all; batch 64, rounds of 7 local steps, in one process with one thread. Methods take turns; a figure is the median over
repeats of CPU seconds per round, the first round left out; closed forms have one round alone. A target without labels
takes no step in SourceOnly, and one in most other methods: with K sources that alone is (K + 1) / K. "Sums" are the
secure sums and other exchanges of a local step, "announcements" the meetings of processes that these take: in a median
step, and how many more there are in a round's steps together, as of what clients agree on in the first of them.

"By hand" are loops as one would write them in PyTorch for one process, with the same networks, batches and steps, fused
SGD, and one backward pass for everything: what the arithmetic of a method costs next to that of FedAvg.
"""

from __future__ import annotations

import argparse
import copy
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
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from fedlit import FederatedStrategy
from fedlit.cli import quieten
from fedlit.data import Digits
from fedlit.federation import Federation
from fedlit.federation.messenger import Messenger
from fedlit.functional import entropy_weights, gradient_penalty, multilinear_map
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
from fedlit.models import MLP, SmallCNN, make_discriminator
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
BY_HAND = ("FedAvg", "FedDANN", "FADE", "CDAN", "FedWDGRL")


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


def digits(kind: str) -> Digits:
    """Three domains, the last of which is the target."""
    return Digits(clients=["clean", "blended", "fonts"], target="fonts", flatten=kind == "MLP", batch_size=64, seed=0)


def run(name: str, kind: str, counting: bool = False) -> Counts:
    """Train a method for some rounds."""
    data = digits(kind)
    pl.seed_everything(0, verbose=False)
    network = MLP(64, [64, 64], batch_norm=name == "AdaBN") if kind == "MLP" else SmallCNN(1)
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


class ByHand:
    """A method as a plain loop over clients; the networks are the same at all of them after each round.

    Args:
        name: One of BY_HAND.
        kind: Network.
    """

    def __init__(self, name: str, kind: str) -> None:
        data = digits(kind)
        data.prepare_data()
        data.setup("fit")
        self.name = name
        self.steps = list(data.train_dataloader())
        self.target = data.target
        sources = [client for client in self.steps[0] if client != self.target]
        self.clients = sources if name == "FedAvg" else [*sources, self.target]
        self.shares = {client: 0.5 if client == self.target else 0.5 / len(sources) for client in self.clients}
        torch.manual_seed(0)
        extractor = MLP(64, [64, 64]) if kind == "MLP" else SmallCNN(1)
        width = extractor.out_features * (10 if name == "CDAN" else 1)
        networks = (extractor, nn.Linear(extractor.out_features, 10)), make_discriminator(width, 64)
        copies = {client: copy.deepcopy(networks) for client in self.clients}
        self.models = {client: nn.ModuleList(model) for client, (model, _) in copies.items()}
        self.critics = {client: critic for client, (_, critic) in copies.items()}
        self.optimizers = [SGD(model.parameters(), lr=0.05, fused=True) for model in self.models.values()]
        self.critic_optimizers = [SGD(critic.parameters(), lr=0.03, fused=True) for critic in self.critics.values()]

    def train(self) -> list[float]:
        """CPU seconds at the end of each round."""
        marks = []
        for _ in range(ROUNDS):
            for batch in self.steps:
                self.step(batch)
            average(self.models)
            if self.name == "FADE":
                average(self.critics)
            marks.append(time.process_time())
        return marks

    def step(self, batch: Any) -> None:
        """All clients' local steps."""
        for optimizer in (*self.optimizers, *self.critic_optimizers):
            optimizer.zero_grad()
        features = {client: self.models[client][0](batch[client][0]) for client in self.clients}
        if self.name == "FedWDGRL":
            self.step_critics(features)
        for client, own in features.items():
            needed = client != self.target or self.name == "CDAN"
            outputs = self.models[client][1](own) if needed else None
            losses = [F.cross_entropy(outputs, batch[client][1])] if client != self.target else []
            if self.name != "FedAvg":
                losses.append(self.shares[client] * self.domain_loss(client, own, outputs))
            sum(losses, torch.zeros(())).backward()
        if self.name in ("FedDANN", "CDAN"):
            self.sum_gradients_of_critics()
        for optimizer in (*self.optimizers, *(self.critic_optimizers if self.name != "FedWDGRL" else ())):
            optimizer.step()

    def domain_loss(self, client: str, features: Tensor, outputs: Tensor | None) -> Tensor:
        """What its discriminator or critic says, through a gradient reversal where the method has one."""
        critic, is_target = self.critics[client], client == self.target
        if self.name == "FedWDGRL":
            return (-0.2 if is_target else 0.2) * critic(features).mean()
        judged, weights = features.view_as(features), None
        judged.register_hook(lambda gradient: -gradient)
        if self.name == "CDAN":
            assert outputs is not None
            probabilities = outputs.detach().softmax(dim=1)
            judged, weights = multilinear_map(judged, probabilities), entropy_weights(probabilities)
        guesses = critic(judged)
        truth = torch.zeros_like(guesses) if is_target else torch.ones_like(guesses)
        return F.binary_cross_entropy_with_logits(guesses, truth, weights)

    def step_critics(self, features: dict[str, Tensor]) -> None:
        """A step of the critic, by the sum of all clients' gradients."""
        for client, own in features.items():
            critic, sign = self.critics[client], -1.0 if client == self.target else 1.0
            loss = 10 * gradient_penalty(critic, own.detach()) - 2 * sign * critic(own.detach()).mean()
            (self.shares[client] * loss).backward()
        self.sum_gradients_of_critics()
        for optimizer in self.critic_optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def sum_gradients_of_critics(self) -> None:
        """All critics get the sum of their gradients; they only read it, so that one tensor does."""
        for weights in zip(*(critic.parameters() for critic in self.critics.values()), strict=True):
            total = sum(weight.grad for weight in weights if weight.grad is not None)
            for weight in weights:
                weight.grad = total


@torch.no_grad()
def average(networks: dict[str, nn.Module]) -> None:
    """All clients get the mean."""
    for weights in zip(*(network.parameters() for network in networks.values()), strict=True):
        mean = torch.stack(list(weights)).mean(dim=0)
        for weight in weights:
            weight.copy_(mean)


def by_hand(kind: str, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a round of the plain loops, and times that of FedAvg."""
    taken: dict[str, list[float]] = {name: [] for name in BY_HAND}
    order = random.Random(0)
    for _ in range(repeats):
        for name in order.sample(BY_HAND, len(BY_HAND)):
            marks = ByHand(name, kind).train()
            taken[name].append((marks[-1] - marks[0]) / (len(marks) - 1))
    return {
        name: {
            "round_ms": round(1000 * statistics.median(times), 2),
            "ratio": round(
                statistics.median(own / other for own, other in zip(times, taken["FedAvg"], strict=True)), 2
            ),
        }
        for name, times in taken.items()
    }


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
    for kind, rows in networks.items():
        for name, row in by_hand(kind, options.repeats).items():
            rows[name]["by hand"] = row
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
        for name in BY_HAND:
            row = rows[name]["by hand"]
            print(f"by hand, {name:11}{row['round_ms']:12.1f}{row['ratio']:14.2f}x of FedAvg by hand")


def measured(kind: str, repeats: int) -> dict[str, dict[str, Any]]:
    """A row for each method, with one network."""
    taken: dict[str, list[float]] = {name: [] for name in METHODS}
    order = random.Random(0)
    for _ in range(repeats):
        for name in order.sample(list(METHODS), len(METHODS)):
            marks = run(name, kind).marks
            taken[name].append((marks[-1] - marks[1]) / (len(marks) - 2) if len(marks) > 2 else marks[1] - marks[0])
    rows: dict[str, dict[str, Any]] = {}
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
