"""Figure 2 of FedDaDiL's paper: its loss between two versions of the atoms, around them, and over rounds.

Run from the repository root: python benchmarks/dadil_figures.py [--parts interpolation landscape rounds]

On EfficientNet-Lite0 features of Office-Caltech-10 with target amazon and seed 0. The loss is the mean over the clients
of equation 11, on 200 samples of each and all points of the atoms.

interpolation  After 20 rounds, dslr and webcam take 20 steps more on their own; (1 - t) P_0 + t P_1 between the two.
landscape      All points shifted by u times a random vector of length 1, with beta = 2, next to what theorem 3.1 says:
    a quadratic function of u, whose second derivative is 2.
rounds         The training loss after so many rounds of E local steps, each a pass over the atoms.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam

from fedlit.papers.experiments import fit, run_parts

EXPERIMENT = ["--config=experiments/office_caltech_feddadil", "--compare=null"]
STEPS = (1, 2, 5, 10)
ROUNDS = (1, 5, 10, 20, 30)


class Trained:
    """A dictionary after 20 rounds, and samples of all clients."""

    def __init__(self) -> None:
        from fedlit.cli import FedlitCLI, quieten
        from fedlit.methods import FedDaDiL

        quieten()
        with tempfile.TemporaryDirectory() as folder:
            where = ["--seeds=null", "--targets=null", "--seed_everything=0", f"--trainer.default_root_dir={folder}"]
            cli = FedlitCLI(["fit", *EXPERIMENT, *where, "--trainer.max_epochs=21"], one_of_many=True)
        assert isinstance(cli.model, FedDaDiL)
        self.module = cli.model
        generator = torch.Generator().manual_seed(0)
        self.samples = {}
        for client in self.module.clients:
            domain = cli.datamodule.load(client.name)
            kept = torch.randperm(len(domain.y), generator=generator)[:200]
            self.samples[client.name] = domain.x[kept].float(), domain.y[kept]
        first = self.module.replicas[self.module.clients[0]].dictionary
        self.points, self.labels = first.points.detach().clone(), first.labels.detach().clone()

    def place(self, points: Tensor, labels: Tensor) -> None:
        """Give all clients these atoms."""
        for client in self.module.clients:
            dictionary = self.module.replicas[client].dictionary
            dictionary.points.data.copy_(points)
            dictionary.labels.data.copy_(labels)

    def loss(self) -> float:
        """Mean over clients."""
        losses = [self.module.loss(each, self.samples[each.name]).item() for each in self.module.clients]
        return sum(losses) / len(losses)

    def version(self, name: str) -> tuple[Tensor, Tensor]:
        """Atoms after 20 steps of one client."""
        self.place(self.points, self.labels)
        client = next(each for each in self.module.clients if each.name == name)
        dictionary = self.module.replicas[client].dictionary
        optimizer = Adam([{"params": [dictionary.points], "lr": 0.003}, {"params": [dictionary.labels], "lr": 0.01}])
        for _ in range(20):
            optimizer.zero_grad()
            self.module.loss(client, self.samples[name]).backward()
            optimizer.step()
        return dictionary.points.detach().clone(), dictionary.labels.detach().clone()


def interpolation() -> dict[str, Any]:
    """Loss by t."""
    trained = Trained()
    (points, labels), (other_points, other_labels) = trained.version("dslr"), trained.version("webcam")
    row = {}
    for tenth in range(0, 11, 2):
        t = tenth / 10
        trained.place((1 - t) * points + t * other_points, (1 - t) * labels + t * other_labels)
        row[f"t = {t:g}"] = round(trained.loss(), 4)
    return {"loss": row}


def landscape() -> dict[str, Any]:
    """Loss by u."""
    trained = Trained()
    trained.module.label_cost = 2.0
    direction = torch.randn(trained.points.shape[-1], generator=torch.Generator().manual_seed(1))
    direction /= direction.norm()

    def at(u: float) -> float:
        trained.place(trained.points + u * direction, trained.labels)
        return trained.loss()

    middle, slope = at(0), (at(1) - at(-1)) / 2
    rows: dict[str, dict[str, float]] = {"loss": {}, "quadratic": {}}
    for u in (-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5):
        rows["loss"][f"u = {u:g}"] = round(at(u), 4)
        rows["quadratic"][f"u = {u:g}"] = round(middle + u * slope + u**2, 4)
    return rows


def rounds() -> dict[str, Any]:
    """Training loss by E and round of the atoms."""
    rows = {}
    for steps in STEPS:
        with tempfile.TemporaryDirectory() as folder:
            length = [f"--trainer.strategy.init_args.local_steps={steps}", f"--trainer.max_epochs={max(ROUNDS) + 1}"]
            (place,) = fit(folder, *EXPERIMENT, "--seeds=[0]", "--targets=[amazon]", *length)
            with (place / "metrics.csv").open() as file:
                found = {float(row["round"]): row["train/loss"] for row in csv.DictReader(file) if row["train/loss"]}
        rows[f"E = {steps}"] = {f"round {each}": round(float(found[float(each)]), 4) for each in ROUNDS}
    return rows


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "interpolation": interpolation,
    "landscape": landscape,
    "rounds": rounds,
}


if __name__ == "__main__":
    run_parts(__doc__, __file__, PARTS, "torch", "lightning", "POT")
