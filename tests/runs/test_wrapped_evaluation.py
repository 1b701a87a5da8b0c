"""A module's own validation_step and test_step in a federation: against Lightning alone on a client's data."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MultilabelF1Score

import fedlit
import processes
from fedlit.callbacks import OracleAccuracy, RunRecord, TargetPredictions, Validators
from fedlit.data import FederatedLoader
from fedlit.federation import GuardedLabels, LabelGuardError
from helpers import QUIET, trainer
from own_modules import Net, Turns
from refused import refused
from small_federation import CLIENTS, NUM_CLASSES, TARGET, Blobs

SOURCES = [name for name in CLIENTS if name != TARGET]


class Validated(Net):
    """Evaluates in all the ways in which people do."""

    def __init__(self) -> None:
        super().__init__()
        self.right = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.by_hand = MulticlassAccuracy(NUM_CLASSES, average="macro")
        self.several = MetricCollection(
            [MulticlassF1Score(NUM_CLASSES), MulticlassAccuracy(NUM_CLASSES)], prefix="all/"
        )
        self.hits: list[Tensor] = []

    def on_validation_epoch_start(self) -> None:
        self.hits = []

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.right(logits, y)
        self.by_hand.update(logits, y)
        self.several(logits, y)
        self.hits.append(logits.argmax(dim=1) == y)
        self.log("val_acc", self.right)
        self.log_dict({"val/loss": loss, "val/double": 2 * loss}, prog_bar=True, sync_dist=True)
        self.log("weighed", loss, batch_size=1 + batch_idx)
        for reduce in (torch.max, "min", "sum"):
            self.log(f"by_{getattr(reduce, '__name__', reduce)}", loss, reduce_fx=reduce)
        self.log_dict(self.several)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("hits", torch.cat(self.hits).float().mean())
        self.log("by_hand", self.by_hand.compute())
        self.by_hand.reset()

    def test_step(self, batch: Any) -> None:
        assert isinstance(batch[1], GuardedLabels) == (id(self) in AT_TARGET)
        self.log("certainty", self(batch[0]).softmax(dim=1).max(dim=1).values.mean())


AT_TARGET: set[int] = set()


def wrapped(module: Any = None, wrapper: Any = fedlit.Federated, clients: Any = CLIENTS, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return wrapper(Validated() if module is None else module(), clients, TARGET, **kwargs)


def numbers(fitted: pl.Trainer, prefix: str) -> dict[str, float]:
    found = {name.removeprefix(prefix): float(value) for name, value in fitted.callback_metrics.items()}
    return {name: value for name, value in found.items() if f"{prefix}{name}" in fitted.callback_metrics}


def alone(method: Any, client: str, dataset: Any) -> dict[str, float]:
    """What Lightning's Trainer logs of a client's copy, which it has by itself, on the client's samples."""
    module = copy.deepcopy(method.replicas[client].extractor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (found,) = pl.Trainer(**QUIET).validate(module, DataLoader(dataset, 8), verbose=False)
    return found


@pytest.mark.parametrize(("unknown", "sanity"), [(0, 0), (10, 2)])
def test_each_client_is_validated_as_by_lightning_alone(unknown: int, sanity: int) -> None:
    method, data = wrapped(num_classes=NUM_CLASSES), Blobs(unknown)
    fitted = trainer(2, num_sanity_val_steps=sanity)
    fitted.fit(method, data)
    rows = {}
    for name in SOURCES:
        rows[name] = alone(method, name, data.parts["val"][name])
        ours = numbers(fitted, f"source/{name}/")
        assert {key: ours[key] for key in rows[name]} == pytest.approx(rows[name])
    assert len({row["val/loss"] for row in rows.values()}) == 3  # nobody's numbers are another's
    for key in rows["dslr"]:
        mean = sum(row[key] for row in rows.values()) / 3
        assert float(fitted.callback_metrics[f"source/{key}"]) == pytest.approx(mean)
    known = TensorDataset(*(tensor[unknown:] for tensor in data.parts["val"][TARGET].tensors))
    theirs = alone(method, TARGET, known)
    if unknown:  # batches are cut before samples without a label are left out
        theirs = {key: each for key, each in theirs.items() if key not in ("weighed", "by_max", "by_min", "by_sum")}
    ours = numbers(fitted, "oracle/target/")
    assert {key: ours[key] for key in theirs} == pytest.approx(theirs)
    assert not {*numbers(fitted, "target/")} & {*theirs}


def test_a_step_that_reads_no_label_of_the_target_is_no_oracle_and_never_has_them() -> None:
    method, data = wrapped(num_classes=NUM_CLASSES), Blobs()
    fitted = trainer(1)
    fitted.fit(method, data)
    AT_TARGET.add(id(method.replicas[TARGET].extractor))
    deep = copy.deepcopy

    def noted(module: Any, *args: Any) -> Any:
        copied = deep(module, *args)
        AT_TARGET.add(id(copied))
        kept.append(copied)
        return copied

    kept: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedlit.wrapped.evaluation.copy.deepcopy", noted)
        (found,) = fitted.test(method, data, verbose=False)
    AT_TARGET.clear()
    with torch.no_grad():
        logits = method.replicas[TARGET].extractor.eval()(data.parts["test"][TARGET].tensors[0])
    assert found["target/certainty"] == pytest.approx(float(logits.softmax(dim=1).max(dim=1).values.mean()))
    assert "source/certainty" in found
    assert not any(name.startswith("oracle/") for name in found)


def test_labels_that_a_step_collects_and_a_hook_reads_are_an_oracle() -> None:
    class Collecting(Net):
        def on_validation_epoch_start(self) -> None:
            self.seen: list[Any] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen.append((self(batch[0]), batch[1]))

        def on_validation_epoch_end(self) -> None:
            logits, y = map(torch.cat, zip(*self.seen, strict=True))
            self.log("hits", (logits.argmax(dim=1) == y).float().mean())

    fitted = trainer(1, [OracleAccuracy()])
    fitted.fit(wrapped(Collecting, num_classes=NUM_CLASSES), Blobs())
    found = fitted.callback_metrics
    assert float(found["oracle/target/hits"]) == pytest.approx(float(found["oracle/target/acc"]))
    assert "target/hits" not in found


def test_a_target_without_labels_is_evaluated_by_what_reads_none() -> None:
    fitted = trainer(1)
    fitted.fit(wrapped(num_classes=NUM_CLASSES), Blobs(unknown=30))
    assert "source/val_acc" in fitted.callback_metrics
    assert not any(name.startswith("oracle/") for name in fitted.callback_metrics)


@pytest.mark.parametrize("kind", [EarlyStopping, ModelCheckpoint])
def test_nothing_is_selected_by_labels_of_the_target(kind: Any) -> None:
    with pytest.raises(LabelGuardError, match="hidden labels"):
        trainer(1, [kind(monitor="oracle/target/val_acc", mode="max")], enable_checkpointing=True).fit(
            wrapped(num_classes=NUM_CLASSES), Blobs()
        )


def selected(folder: str, devices: int) -> dict[str, Any]:
    """Rounds that a run stops after and keeps, by numbers of the module."""
    stop = EarlyStopping("source/val/loss", min_delta=0.08, patience=1)
    keep = ModelCheckpoint(folder, "{epoch}", "source/dslr/val_acc", mode="max")
    fitted = trainer(6, [stop, keep], devices=devices, enable_checkpointing=True)
    fitted.fit(wrapped(num_classes=NUM_CLASSES), Blobs())
    names = ("source/val/loss", "source/dslr/val_acc", "oracle/target/val/loss")
    return {
        "stopped": stop.stopped_epoch,
        "best": Path(keep.best_model_path).name,
        **{name: float(fitted.callback_metrics[name]) for name in names},
    }


@pytest.mark.multiprocess
def test_a_run_is_stopped_and_kept_by_a_module_s_numbers_alike_on_all_processes(tmp_path: Path) -> None:
    one = selected(str(tmp_path / "one"), 1)
    assert 0 < one["stopped"] < 5
    assert processes.results(selected, str(tmp_path / "two"), 2, ranks=2) == [one] * 2


def test_hooks_of_an_evaluation_are_each_copy_s_own() -> None:
    calls: Counter[tuple[str, str]] = Counter()

    class Hooked(Validated):
        def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert not self.training
            note("step")(self)
            return super().validation_step(batch, batch_idx)

    def note(hook: str) -> Any:
        def called(self: Any, *args: Any) -> None:
            if id(self) in names:  # not the copy that is tried
                calls[names[id(self)], hook] += 1
            getattr(Validated, f"on_validation_{hook}", lambda *_: None)(self, *args)

        return called

    names: dict[int, str] = {}
    ends = ("start", "epoch_start", "epoch_end", "end", "batch_start", "batch_end")
    for hook in ends:
        setattr(Hooked, f"on_validation_{hook}", note(hook))
    method, data = wrapped(Hooked, num_classes=NUM_CLASSES), Blobs()
    del data.parts["val"]["dslr"]
    data.parts["val"]["dslr"] = TensorDataset(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))
    method.configure_model()
    names |= {id(method.replicas[client].extractor): client for client in CLIENTS}
    loader = FederatedLoader({name: each for name, each in data.parts["val"].items() if len(each)}, 8, training=False)
    trainer(1).validate(method, loader, verbose=False)
    for client in CLIENTS:
        found = {hook: calls[client, hook] for hook in ("step", *ends)}
        counts = (0, 1, 1, 0, 0, 0, 0) if client == "dslr" else (4, 1, 1, 1, 1, 4, 4)
        assert [*found.values()] == [*counts]


def test_names_of_fedlit_are_not_written_over() -> None:
    class Taken(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("acc", torch.tensor(7.0))

    fitted = trainer(1)
    fitted.fit(wrapped(Taken, num_classes=NUM_CLASSES), Blobs())
    assert fitted.callback_metrics["source/own_acc"] == 7
    assert fitted.callback_metrics["source/acc"] <= 1


# ---------------------------------------------------------------- outputs of any form


class Several(pl.LightningModule):
    """Three labels of each sample, of which it may have any."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(5, 16), nn.ReLU())
        self.head = nn.Linear(16, 3)
        self.f1 = MultilabelF1Score(3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.backbone(x))}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.binary_cross_entropy_with_logits(self(batch[0])["logits"], batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.f1(self(batch[0])["logits"], batch[1].int())
        self.log("f1", self.f1)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


def labelled_several(size: int = 120) -> dict[str, TensorDataset]:
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(5, 3, generator=generator)
    shards = {}
    for shift, name in enumerate(CLIENTS):
        x = torch.randn(size, 5, generator=generator)
        shards[name] = TensorDataset(x + 0.2 * shift, (x @ directions > 0).float())
    return shards


FEATURES = {"features": "backbone", "width": 16, "warmup_rounds": 5}


@pytest.mark.parametrize(
    ("wrapper", "given"),
    [(fedlit.Federated, {}), (fedlit.FederatedProx, {"mu": 0.1}), (fedlit.FederatedDAN, FEATURES)],
    ids=["FedAvg", "FedProx", "FedDAN"],
)
def test_several_labels_of_a_sample_are_learnt_by_the_module_s_loss(wrapper: Any, given: Any) -> None:
    shards = labelled_several()
    method = wrapped(Several, wrapper, **given)
    evaluated = FederatedLoader(shards, 40, training=False)
    fitted = trainer(8)
    fitted.fit(method, FederatedLoader(shards, 40, seed=0), evaluated)
    found = {name: float(value) for name, value in fitted.callback_metrics.items()}
    assert found["source/f1"] > 0.85
    assert found["oracle/target/f1"] > 0.8
    assert "source/acc" not in found
    (first, *_) = fitted.predict(method, evaluated)
    assert first[TARGET]["logits"].shape == (40, 3)


def test_a_record_of_outputs_of_any_form_has_the_module_s_numbers(tmp_path: Path) -> None:
    shards = labelled_several(40)
    fitted = trainer(2, [RunRecord(tmp_path)])
    fitted.fit(wrapped(Several), FederatedLoader(shards, 40), FederatedLoader(shards, 40, training=False))
    (file,) = tmp_path.glob("**/metrics.csv")
    assert {"source/dslr/f1", "source/f1", "oracle/target/f1"} <= {*file.read_text().splitlines()[0].split(",")}


@pytest.mark.parametrize("callback", [OracleAccuracy, Validators])
def test_callbacks_that_read_outputs_refuse_those_of_any_form(callback: Any) -> None:
    with pytest.raises(ValueError, match="num_classes=None"):
        trainer(1, [callback()]).fit(wrapped(Several), FederatedLoader(labelled_several(), 40))


def test_predictions_of_any_form_are_not_written_as_classes(tmp_path: Path) -> None:
    fitted = trainer(1, [TargetPredictions(str(tmp_path / "p.csv"))])
    with pytest.raises(ValueError, match="num_classes=None"):
        fitted.predict(wrapped(Several), FederatedLoader(labelled_several(), 40, training=False))


def test_a_form_is_for_outputs_that_fedlit_evaluates() -> None:
    with refused("task"):
        wrapped(Several, task="regression")


# ---------------------------------------------------------------- a local head, and statistics of the target


class Split(Net):
    """`Net` without dropout, whose loop is that of its two parts given to a method."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


LABELLED = [*SOURCES, fedlit.Client(TARGET, role="target", labelled=True)]


@pytest.mark.parametrize(
    ("kind", "clients", "given"), [("Rep", LABELLED, {"head": "head"}), ("AdaBN", CLIENTS, {})], ids=["FedRep", "AdaBN"]
)
def test_wrapped_and_split_in_two_are_the_same(kind: str, clients: Any, given: Any) -> None:
    ours = wrapped(Split, getattr(fedlit, f"Federated{kind}"), clients, num_classes=NUM_CLASSES, **given)
    trainer(3).fit(ours, Blobs())
    torch.manual_seed(0)
    net = Split()
    net.backbone.out_features = 8
    method = getattr(fedlit.methods, {"Rep": "FedRep"}.get(kind, kind))
    theirs = method(
        clients, TARGET, NUM_CLASSES, net.backbone, net.head,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    )  # fmt: skip
    trainer(3).fit(theirs, Blobs())
    heads = set()
    for client in CLIENTS:
        state = ours.replicas[client].state_dict()
        heads.add(float(state["extractor.head.weight"][0].sum()))
        for name, tensor in theirs.replicas[client].state_dict().items():
            part, _, rest = name.partition(".")
            assert torch.equal(
                state[f"extractor.{ {'extractor': 'backbone', 'classifier': 'head'}[part] }.{rest}"], tensor
            )
    assert len(heads) == (4 if kind == "Rep" else 1)


class Tied(Split):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, NUM_CLASSES))
        self.again = self.head[0]


@pytest.mark.parametrize(
    ("module", "wrapper", "given", "said"),
    [
        (Split, fedlit.FederatedRep, {"head": "tail"}, "head='tail' is no part of Split"),
        (Tied, fedlit.FederatedRep, {"head": "head"}, "are one weight"),
        (Turns, fedlit.FederatedRep, {"head": "head"}, "cannot add to its loss or choose its gradients"),
        (Split, fedlit.FederatedAdaBN, {"mixing": 0.5}, "takes no mixing"),
        (Net, fedlit.FederatedAdaBN, {}, "replaces the statistics of BatchNorm"),
    ],
)
def test_modules_that_a_method_cannot_take_are_refused(module: Any, wrapper: Any, given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wrapped(module, wrapper, LABELLED, num_classes=NUM_CLASSES, **given)


class TurnsInBatches(Turns):
    """Steps by itself, with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU())


def test_a_module_that_steps_by_itself_has_statistics_of_the_target() -> None:
    plain, adapted = (
        wrapped(TurnsInBatches, wrapper, num_classes=NUM_CLASSES)
        for wrapper in (fedlit.Federated, fedlit.FederatedAdaBN)
    )
    for method in (plain, adapted):
        trainer(1).fit(method, Blobs())
    ours, theirs = (method.replicas[TARGET].extractor for method in (adapted, plain))
    assert torch.equal(ours.head.weight, theirs.head.weight)
    assert not torch.equal(ours.backbone[1].running_mean, theirs.backbone[1].running_mean)
