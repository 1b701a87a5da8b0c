"""LightningModules as somebody's project has them, which know nothing of federations, and runs of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import fedlit
from helpers import Snapshots, fingerprint, trainer, weights
from small_federation import CLIENTS, NUM_CLASSES, TARGET, Blobs


class Net(pl.LightningModule):
    """A classifier with a rate for each of its two parts, a schedule, dropout, and numbers that it logs."""

    def __init__(self, interval: str = "epoch", inputs: int = 5, classes: int = NUM_CLASSES) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.interval = interval
        self.backbone = nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(8, classes)
        self.accuracy = MulticlassAccuracy(classes, average="micro")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.log_dict({"batch_loss": loss.detach(), "size": float(len(batch[1]))})
        self.log("hits", self.accuracy, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        parts = [{"params": self.backbone.parameters()}, {"params": self.head.parameters(), "lr": 0.05}]
        optimizer = torch.optim.Adam(parts, lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.interval}}


class Simple(pl.LightningModule):
    """The least of a module: a network, cross-entropy, and SGD."""

    def __init__(self, net: nn.Module, lr: float = 0.1) -> None:
        super().__init__()
        self.net, self.lr = net, lr

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Turns(Net):
    """Steps two optimisers by itself, one after the other, and one schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        first, second = self.optimizers()
        loss = torch.zeros(())
        for optimizer in (first, second):
            self.toggle_optimizer(optimizer)
            loss = F.cross_entropy(self(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.lr_schedulers().step()
        return {"loss": loss.detach()}

    def on_train_epoch_end(self) -> None:
        self.log("epoch", float(self.current_epoch))

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.backbone.parameters(), lr=0.01)
        second = torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.StepLR(second, 3, 0.5)]


MODULES: dict[str, tuple[str, type[Net], dict[str, Any]]] = {
    "FedAvg": ("Federated", Net, {}),
    "by itself": ("Federated", Turns, {}),
    "FedProx": ("FederatedProx", Net, {"mu": 0.5}),
    "FedDAN": ("FederatedDAN", Net, {"features": "backbone", "width": 8, "num_frequencies": 20, "warmup_rounds": 1}),
    "FedCORAL": ("FederatedCORAL", Net, {"features": "backbone", "width": 8}),
}


class Uneven(Blobs):
    """Of which clients have 30, 22, 14 and 6 training samples."""

    def __init__(self) -> None:
        super().__init__()
        parts = self.parts["train"]
        for lost, name in enumerate(CLIENTS):
            parts[name] = TensorDataset(*(each[8 * lost :] for each in parts[name].tensors))


def rates_after(rounds: int, devices: int) -> dict[str, float]:
    """Learning rates of local clients after rounds with a schedule of steps."""
    fitted = trainer(rounds, devices=devices)
    fitted.fit(build("FedAvg", Net("step")), Uneven())
    return {group["client"]: group["lr"] for group in fitted.optimizers[0].param_groups[::2]}


def build(kind: str, net: Net | None = None, **kwargs: Any) -> fedlit.FederatedModule:
    """A wrapped module, always of the same weights."""
    wrapper, module, given = MODULES[kind]
    torch.manual_seed(0)
    net = module() if net is None else net
    return getattr(fedlit, wrapper)(net, CLIENTS, TARGET, NUM_CLASSES, **(given | kwargs))


def run(kind: str, rounds: int = 4, devices: int = 1, save: str = "", resume: str = "") -> dict[str, Any]:
    """Fingerprints of the local clients' weights, and what was logged."""
    numbers = Snapshots()
    fitted = trainer(rounds, [numbers], devices=devices)
    method = build(kind)
    fitted.fit(method, Blobs(), ckpt_path=resume or None, weights_only=False)
    if save:
        fitted.save_checkpoint(Path(save))
    prints = {client.name: fingerprint(weights(method, client.name)) for client in method.federation.local_clients}
    rates = [group["lr"] for optimizer in fitted.optimizers for group in optimizer.param_groups]
    return {"weights": prints, "logged": numbers.metrics, "steps": fitted.global_step, "rates": sorted(set(rates))}
