"""What a module of one's own logs in training and how it steps: against Lightning alone, which trains one client."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric
from torchmetrics.classification import MulticlassAccuracy

import fedlit
from fedlit.data import FederatedLoader
from fedlit.federation import NotTrainedError
from helpers import QUIET, trainer
from own_modules import Turns, build
from small_federation import Blobs

X, Y = torch.randn(22, 3, generator=torch.Generator().manual_seed(0)), torch.arange(22) % 2


class Small(pl.LightningModule):
    """A linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Telling(Small):
    """Logs in every way that has an epoch's number."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.best = MulticlassAccuracy(2, average="micro"), MaxMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.log("mean", loss, on_step=False, on_epoch=True)
        self.log("least", loss, on_step=False, on_epoch=True, reduce_fx="min")
        self.log("seen", float(len(logits)), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("hits", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.best(self.accuracy.compute())
        self.log_dict({"best": self.best.compute(), "epoch": float(self.current_epoch)})


class Skipping(Small):
    """Leaves out some batches, and all of an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 or self.current_epoch == 1:
            return None
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()["optimizer"]


class Averaged(Small):
    """Has a frozen part, which moves by itself, is trained from the second epoch on, or neither."""

    def __init__(self, moves: bool = False, thaws: bool = False) -> None:
        super().__init__()
        self.before = nn.Linear(3, 3).requires_grad_(False)
        self.moves, self.thaws = moves, thaws

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.before(x))

    def on_train_epoch_start(self) -> None:
        self.before.requires_grad_(self.thaws and self.current_epoch == 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.moves:
            self.before.weight.data.lerp_(torch.eye(3), 0.1)
        return super().training_step(batch, batch_idx)


def federated(module: pl.LightningModule, rounds: int = 3) -> tuple[fedlit.Federated, dict[str, Tensor]]:
    """Train on one source, batches in order; the target's samples have no labels."""
    unlabelled = TensorDataset(X + 1, torch.full((22,), -1))
    data = {"a": DataLoader(TensorDataset(X, Y), 8, sampler=range(22)), "b": DataLoader(unlabelled, 8)}
    method, fitted = fedlit.Federated(module, ["a", "b"], "b", 2), trainer(rounds)
    fitted.fit(method, FederatedLoader.from_loaders(data))
    return method, fitted.callback_metrics


def alone(module: pl.LightningModule, rounds: int = 3) -> tuple[pl.LightningModule, dict[str, Tensor]]:
    fitted = pl.Trainer(**QUIET, max_epochs=rounds, devices=1)
    fitted.fit(module, DataLoader(TensorDataset(X, Y), 8, sampler=range(22)))
    return module, fitted.callback_metrics


@pytest.mark.parametrize("kind", [Telling, Skipping])
def test_training_on_one_source_is_lightnings_own(kind: type[Small]) -> None:
    module = kind()
    method, ours = federated(copy.deepcopy(module))
    plain, theirs = alone(copy.deepcopy(module))
    assert torch.equal(method.replicas["a"].extractor.net.weight, plain.net.weight)
    assert not torch.equal(module.net.weight, plain.net.weight)
    assert {name: float(ours[f"source/a/{name}"]) for name in theirs} == pytest.approx(
        {name: float(value) for name, value in theirs.items()}
    )
    assert len(theirs) == (6 if kind is Telling else 0)


def test_metrics_are_of_one_round_where_an_epoch_has_several() -> None:
    data = {name: DataLoader(TensorDataset(X, Y), 8, sampler=range(22)) for name in "ab"}
    seen = []
    for rounds, strategy in ((2, {}), (1, {"rounds_per_epoch": 2})):
        torch.manual_seed(0)
        fitted = trainer(rounds, strategy=strategy)
        fitted.fit(fedlit.Federated(Telling(), ["a", "b"], "b", 2), FederatedLoader.from_loaders(data))
        seen.append({name: float(fitted.callback_metrics[f"source/a/{name}"]) for name in ("mean", "hits", "seen")})
    assert seen[0] == seen[1]
    assert seen[0]["hits"] > 0


def test_a_step_that_always_gives_none_is_an_error() -> None:
    class Forgotten(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)

    with pytest.raises(NotTrainedError, match="must give the loss, and gave None for all batches of client 'a'"):
        federated(Forgotten(), 1)


@pytest.mark.parametrize("thaws", [True, False])
def test_frozen_weights_that_move_by_themselves_are_told(thaws: bool) -> None:
    with pytest.warns(UserWarning, match=r"frozen weights of client 'a' .*'extractor.before.weight' and 0 more"):
        federated(Averaged(moves=True))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "frozen weights")
        method, _ = federated(Averaged(thaws=thaws))
    of_source, of_target = (method.replicas[name].extractor.before.weight for name in "ab")
    assert torch.equal(of_source, of_target)
    assert torch.equal(of_target, method.originals[0].before.weight) != thaws


class ByModel(Turns):
    """`Turns`, whose optimisers choose what takes gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for optimizer in self.optimizers():
            with optimizer.toggle_model():
                assert self.head.weight.requires_grad != self.backbone[0].weight.requires_grad
                loss = F.cross_entropy(self(batch[0]), batch[1])
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=0.5)
                optimizer.step()
        self.lr_schedulers().step()


def test_optimisers_choose_what_takes_gradients() -> None:
    torch.manual_seed(0)
    ours, theirs = build("by itself", ByModel()), build("by itself")
    for method in (ours, theirs):
        trainer(2).fit(method, Blobs())
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


class Boxes(Small):
    """Finds boxes, of which each image has some."""

    def training_step(self, batch: Any, batch_idx: int, *, weight: float = 1.0) -> Any:
        images, found = batch
        means = torch.stack([each["boxes"].mean(dim=0) for each in found])
        return weight * F.mse_loss(self(images), means)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("gap", self.training_step(batch, batch_idx))


@pytest.mark.parametrize("target", ["b", fedlit.Client("b", role="target", labelled=True)])
def test_labels_may_be_a_structure_for_each_sample(target: Any) -> None:
    def loader(shift: float) -> Any:
        rows = [(x, {"boxes": torch.arange(2.0 + 2 * (i % 3)).view(-1, 2) + shift}) for i, x in enumerate(X)]
        return DataLoader(rows, 8, collate_fn=lambda some: (torch.stack([x for x, _ in some]), [y for _, y in some]))

    method, fitted = fedlit.Federated(Boxes(), ["a", target], "b"), trainer(1)
    data = {"a": loader(0), "b": loader(9)}
    fitted.fit(method, FederatedLoader.from_loaders(data), FederatedLoader.from_loaders(data, stage="val"))
    batch = [[*each] for each in zip(*loader(9).dataset, strict=True)]
    with torch.no_grad():
        gap = method.replicas["b"].extractor.training_step((torch.stack(batch[0]), batch[1]), 0)
    assert float(fitted.callback_metrics["oracle/target/gap"]) == pytest.approx(float(gap), rel=1e-5)
