"""OracleAccuracy, CommunicationLedger and RoundTimer in real runs, against numbers computed another way."""

from __future__ import annotations

import csv
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    brier_score_loss,
    confusion_matrix,
    f1_score,
    recall_score,
    roc_auc_score,
)
from torch.utils.data import TensorDataset

import processes
import small_federation
from fedlit import FederatedModule, methods
from fedlit.callbacks import CommunicationLedger, OracleAccuracy, RoundTimer, RunSummary, TargetPredictions, summarise
from fedlit.federation import Fraction, LabelGuardError, Ledger, Schedule
from fedlit.run.collapse import CollapseWatch
from fedlit.run.component import Component
from fedlit.run.run import Run
from small_federation import CLIENTS, NUM_CLASSES, TARGET, Blobs, EveryMetric, build, trainer


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def column(rows: list[dict[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row.get(name)]


# ---------------------------------------------------------------- oracle accuracy


@pytest.mark.parametrize("federated", [True, False])
@pytest.mark.parametrize("unknown", [0, 7])
def test_oracle_accuracy_is_that_of_the_targets_logits(tmp_path: Path, federated: bool, unknown: int):
    data, module = Blobs(unknown), build(weighting="uniform")
    run = trainer(2, [OracleAccuracy(per_class=True)], tmp_path, federated)
    run.fit(module, data)
    for part in ("val", "test"):
        if part == "test":
            run.test(module, data, verbose=False)
        x, y = (tensor[unknown:] for tensor in data.parts[part][TARGET].tensors)
        with torch.no_grad():
            logits = module.replicas[TARGET](x)
        got, true, predicted = run.callback_metrics, y.numpy(), logits.argmax(1).numpy()
        assert float(got["oracle/target/acc"]) == pytest.approx(accuracy_score(true, predicted), abs=1e-7)
        assert float(got["oracle/target/loss"]) == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-5)
        balanced, f1 = balanced_accuracy_score(true, predicted), f1_score(y, logits.argmax(1), average="weighted")
        assert float(got["oracle/target/balanced_acc"]) == pytest.approx(balanced, abs=1e-6)
        assert float(got["oracle/target/f1"]) == pytest.approx(f1, abs=1e-6)
        recall = recall_score(true, predicted, average=None, labels=range(NUM_CLASSES))
        for index in range(NUM_CLASSES):
            assert float(got[f"oracle/target/acc/{index}"]) == pytest.approx(recall[index], abs=1e-7)


def test_classes_are_left_out_unless_asked_for_and_absent_ones_always(tmp_path: Path):
    data = Blobs()
    for part in ("val", "test"):
        labels = data.parts[part][TARGET].tensors[1]
        labels[labels == 2] = 1
    run = trainer(1, [OracleAccuracy(per_class=True)], tmp_path)
    run.fit(build(), data)
    assert {name for name in run.callback_metrics if name.startswith("oracle/target/acc/")} == {
        f"oracle/target/acc/{index}" for index in (0, 1, 3)
    }
    balanced = [float(run.callback_metrics[f"oracle/target/acc/{index}"]) for index in (0, 1, 3)]
    assert float(run.callback_metrics["oracle/target/balanced_acc"]) == pytest.approx(sum(balanced) / 3, abs=1e-6)
    run = trainer(1, [OracleAccuracy()], tmp_path)
    run.fit(build(), data)
    assert {name for name in run.callback_metrics if name.startswith("oracle/")} == {
        "oracle/target/acc",
        "oracle/target/balanced_acc",
        "oracle/target/f1",
        "oracle/target/loss",
        "oracle/target/ece",
        "oracle/target/brier",
        "oracle/target/auc",
    }


def test_scores_of_probabilities_are_scikit_learns(tmp_path: Path):
    """The calibration error is summed here over bins of the most probable class, from its definition."""
    data, module = Blobs(), build()
    run = trainer(2, [watcher := OracleAccuracy()], tmp_path)
    run.fit(module, data)
    assert watcher.confusion is None, "the rounds' validations do not tell it"
    run.test(module, data, verbose=False)
    x, y = data.parts["test"][TARGET].tensors
    with torch.no_grad():
        p = module.replicas[TARGET](x).double().softmax(dim=1)
    sure, right = p.max(dim=1).values, (p.argmax(dim=1) == y).double()
    error = 0.0
    for low in torch.arange(15) / 15:
        inside = (sure > low) & (sure <= low + 1 / 15)
        if inside.any():
            error += float(inside.double().mean() * (sure[inside].mean() - right[inside].mean()).abs())
    got = run.callback_metrics
    assert float(got["oracle/target/ece"]) == pytest.approx(error, abs=1e-6)
    area = roc_auc_score(y, p, multi_class="ovr")
    assert float(got["oracle/target/auc"]) == pytest.approx(area, abs=1e-6)
    squares = sum(brier_score_loss(y == label, p[:, label]) for label in range(NUM_CLASSES))
    assert float(got["oracle/target/brier"]) == pytest.approx(squares, abs=1e-6)
    matrix = confusion_matrix(y, p.argmax(dim=1))
    assert watcher.confusion == matrix.tolist()
    summary = summarise(run, module, 1.0)
    assert (summary.oracle_ece, summary.oracle_auc, summary.oracle_brier) == pytest.approx(
        (error, area, squares), abs=1e-6
    )
    assert summary.oracle_confusion == matrix.tolist()
    assert summary.classes == ["0", "1", "2", "3"]
    recall = recall_score(y, p.argmax(dim=1), average=None)
    assert summary.oracle_class_accuracy == pytest.approx(dict(zip("0123", recall, strict=True)))
    assert RunSummary.from_json(summary.to_json()) == summary


@pytest.mark.parametrize("there", [[0, 1, 3], [2]])
def test_areas_are_of_classes_that_some_samples_have_and_others_have_not(there: list[int], tmp_path: Path):
    data, module = Blobs(), build()
    labels = data.parts["test"][TARGET].tensors[1]
    labels[~torch.isin(labels, torch.tensor(there))] = there[0]
    run = trainer(1, [watcher := OracleAccuracy()], tmp_path)
    run.fit(module, data)
    run.test(module, data, verbose=False)
    with torch.no_grad():
        p = module.replicas[TARGET](data.parts["test"][TARGET].tensors[0]).softmax(dim=1)
    assert watcher.confusion is not None
    assert [label for label, row in enumerate(watcher.confusion) if sum(row)] == there
    summary = summarise(run, module, 1.0)
    assert list(summary.oracle_class_accuracy) == [str(label) for label in there]
    if len(there) == 1:
        assert "oracle/target/auc" not in run.callback_metrics
        assert summary.oracle_auc is None
    else:
        areas = [roc_auc_score(labels == label, p[:, label]) for label in there]
        assert summary.oracle_auc == pytest.approx(sum(areas) / len(areas), abs=1e-6)


# ---------------------------------------------------------------- a model that says the same of everyone


def told(run: Any, module: Any) -> list[str]:
    """Warnings about the target's predictions in fit, test and predict."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(module, Blobs())
        run.test(module, Blobs(), verbose=False)
        run.predict(module, Blobs())
    return [str(each.message) for each in caught if "predictions for target" in str(each.message)]


def test_predictions_of_one_class_are_told_once_at_the_end_of_each_stage(tmp_path: Path):
    module = build(optimizer=lambda params: torch.optim.SGD(params, lr=1e-9))
    module.originals[1].bias.data += torch.tensor([0.0, 0.0, 100.0, 0.0])
    said = told(trainer(2, [], tmp_path), module)
    assert len(said) == 3
    assert all(text.startswith("all 30 predictions for target 'webcam' are of class 2, ") for text in said)
    assert all("max_epochs" in text and "optimizer" in text and "warmup_rounds" in text for text in said)


def test_a_model_that_tells_samples_apart_is_not_warned_about(tmp_path: Path):
    assert not told(trainer(2, [], tmp_path), build())


class OneClassFrom(pl.Callback, Component):
    """From a round on, all clients predict class 2."""

    def __init__(self, round_idx: int) -> None:
        self.round_idx = round_idx

    def on_round_end(self, run: Run) -> None:
        module: Any = run.module
        round_idx = run.clock.round_idx
        if round_idx == self.round_idx:
            for client in module.federation.local_clients:
                module.replicas[client].classifier.bias.data[2] += 1000.0


def worse(run: Any, module: Any) -> list[str]:
    """Warnings of a fit about predictions that get worse."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(module, Blobs())
    return [str(each.message) for each in caught if "have got worse" in str(each.message)]


def test_a_collapse_is_told_once_in_the_round_where_it_starts(tmp_path: Path):
    module = build(methods.FedDANN)
    (said,) = worse(trainer(6, [OneClassFrom(3)], tmp_path), module)
    assert said.startswith(
        "the predictions of FedDANN for target 'webcam' have got worse by round 3: 100% of them are "
    )
    assert "of class 2, and the largest class had" in said
    assert all(way in said for way in ("validator/trust", "trust_region", "reversal_weight", "warmup_rounds"))


class MixedFrom(OneClassFrom, Component):
    """From a round on, networks are as sure as ever and know nothing: features change faster than samples lie apart."""

    def on_round_end(self, run: Run) -> None:
        module: Any = run.module
        round_idx = run.clock.round_idx
        if round_idx == self.round_idx:
            for client in module.federation.local_clients:
                module.replicas[client].extractor.register_forward_hook(lambda *call: 20 * torch.sin(1e4 * call[2]))


def test_classes_that_mix_in_a_sure_network_are_told(tmp_path: Path):
    (said,) = worse(
        trainer(8, [MixedFrom(4)], tmp_path), build(optimizer=lambda params: torch.optim.Adam(params, lr=0.02))
    )
    assert "have got worse by round 6: near samples are put into different classes more often" in said
    assert "validator/trust" in said


def test_among_images_nobody_looks_for_neighbours(tmp_path: Path):
    data = Blobs()
    for part in data.parts.values():
        for name in part:
            x, y = part[name].tensors
            part[name] = TensorDataset(x[:, None, None], y)
    module = build(optimizer=lambda params: torch.optim.Adam(params, lr=0.02))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(8, [MixedFrom(4)], tmp_path).fit(module, data)
    assert not [each for each in caught if "near samples" in str(each.message)]


@pytest.mark.parametrize("method", [methods.SourceOnly, methods.FedDANN, methods.FedMMD])
def test_a_run_that_learns_is_not_warned_about(method: type[FederatedModule], tmp_path: Path):
    assert not worse(trainer(6, [], tmp_path), build(method))


def test_a_variety_of_a_quarter_and_a_score_that_stays_below_its_best_are_told():
    even = {"a": 25, "b": 25, "c": 25, "d": 25}  # as many as 4 classes: variety 3
    watch = CollapseWatch()
    assert not watch.see(even, 0.5, 0)
    assert not watch.see({"a": 50, "b": 50}, 0.5, 1)  # 2 classes: 1, more than a quarter of 3
    assert watch.see({"a": 94, "b": 6}, 0.9, 2) == "94% of them are of class a, and the largest class had 25% before"
    assert not watch.see({"a": 100}, 0.9, 3)  # once

    watch = CollapseWatch()
    scores = [0.4, 0.37, 0.39, 0.37, 0.37, 0.37, 0.37]  # 0.38 is where a fall begins; a run of two is none
    said = [watch.see(even, score, round_idx) for round_idx, score in enumerate(scores)]
    assert [bool(each) for each in said] == [False] * 5 + [True, False]
    assert said[5] == (
        "their label-free score (target/score) was 0.400 after round 0, and has been lower in 3 validations since, "
        "now 0.370"
    )
    assert not CollapseWatch().see({"a": 9}, 0.0, 0)  # too few to tell

    watch = CollapseWatch()
    assert not watch.see({"a": 60}, 0.0, 0)  # has not learnt yet
    assert not watch.see({"a": 30, "b": 30}, 0.1, 1)
    assert watch.see({"a": 60}, 0.1, 2).startswith("100% of them")

    watch = CollapseWatch()
    informations = [0.4, 0.31, 0.29, 0.29, 0.31, 0.29, 0.29, 0.29]  # below 0.3, three quarters of the best
    said = [watch.see(even, 0.5, round_idx, each) for round_idx, each in enumerate(informations)]
    assert [bool(each) for each in said] == [False] * 7 + [True]
    assert said[7].endswith("was 0.400 after round 0, and has been lower in 3 validations since, now 0.290")

    watch = CollapseWatch()  # of little, a quarter of 0.2 is asked: noise
    assert not any(watch.see(even, 0.5, round_idx, each) for round_idx, each in enumerate([0.1, 0.06, 0.06, 0.06]))


def test_a_target_with_no_known_label_has_no_oracle(tmp_path: Path):
    run = trainer(1, [OracleAccuracy()], tmp_path)
    run.fit(build(), Blobs(unknown=30))
    assert not [name for name in run.callback_metrics if name.startswith("oracle/")]


def test_sanity_checking_asks_no_oracle(tmp_path: Path):
    module = build()
    run = trainer(1, [OracleAccuracy()], tmp_path, num_sanity_val_steps=1, limit_val_batches=0.5)
    run.fit(module, Blobs())
    assert module.federation.ledger.messages_by_channel()["oracle"] == 1 + len(CLIENTS)  # one validation


def test_looking_changes_neither_the_weights_nor_the_other_channels(tmp_path: Path):
    runs = []
    for callbacks in ([], [OracleAccuracy(), CommunicationLedger(print_table=False), RoundTimer()]):
        module = build()
        trainer(2, callbacks, tmp_path, strategy={"participation": Fraction(0.5)}).fit(module, Blobs())
        sent = [entry for entry in module.federation.ledger if entry.channel != "oracle"]
        runs.append((sent, module.state_dict()))
    assert sorted(runs[0][0]) == sorted(runs[1][0])
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])


@pytest.mark.parametrize(
    "selecting",
    [
        lambda folder: EarlyStopping("oracle/target/acc", mode="max"),
        lambda folder: ModelCheckpoint(str(folder), monitor="oracle/target/loss"),
    ],
)
@pytest.mark.parametrize("oracle_first", [True, False])
def test_selection_by_the_targets_labels_is_refused(tmp_path: Path, selecting: Any, oracle_first: bool):
    callbacks = [OracleAccuracy(), selecting(tmp_path)]
    run = trainer(1, callbacks if oracle_first else callbacks[::-1], tmp_path, enable_checkpointing=True)
    with pytest.raises(LabelGuardError, match=r"monitor='oracle/target/.*'target/score' .* or 'source/acc'"):
        run.fit(build(), Blobs())


def test_schedules_by_the_targets_labels_are_refused(tmp_path: Path):
    module = build()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    plateau = {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "oracle/target/loss"}
    module.configure_optimizers = lambda: {"optimizer": optimizer, "lr_scheduler": plateau}  # type: ignore[method-assign]
    with pytest.raises(LabelGuardError, match=r"ReduceLROnPlateau.*hidden labels"):
        trainer(1, [OracleAccuracy()], tmp_path).fit(module, Blobs())


def test_label_free_selection_is_welcome(tmp_path: Path):
    callbacks = [OracleAccuracy(), EarlyStopping("target/score", mode="max"), EarlyStopping("source/acc", mode="max")]
    trainer(1, callbacks, tmp_path).fit(build(), Blobs())


@pytest.mark.parametrize("callback", [OracleAccuracy(), CommunicationLedger(), RoundTimer(), TargetPredictions()])
def test_other_modules_are_refused_by_name(tmp_path: Path, callback: pl.Callback):
    from lightning.pytorch.demos.boring_classes import BoringModel

    run = trainer(1, [callback], tmp_path, federated=False)
    with pytest.raises(TypeError, match=f"{type(callback).__name__} watches a FederatedModule, got BoringModel"):
        run.fit(BoringModel())


# ---------------------------------------------------------------- communication


@pytest.mark.parametrize("federated", [True, False])
def test_the_file_adds_up_to_the_ledger(tmp_path: Path, federated: bool, capsys: pytest.CaptureFixture[str]):
    module = build(weighting="uniform")
    trainer(3, [OracleAccuracy(), CommunicationLedger()], tmp_path, federated).fit(module, Blobs())
    ledger = module.federation.ledger
    rows = read_csv(tmp_path / "ledger.csv")
    assert list(rows[0]) == ["round", "channel", "sender", "receiver", "messages", "bytes"]
    sent, messages, again = Counter[str](), Counter[str](), Ledger()
    for row in rows:
        sent[row["channel"]] += int(row["bytes"])
        messages[row["channel"]] += int(row["messages"])
    assert dict(sent) == ledger.bytes_by_channel()
    assert dict(messages) == ledger.messages_by_channel()
    assert sum(sent.values()) == ledger.total_bytes
    again.load_state_dict(ledger.state_dict())
    assert len(rows) == len(again) == len(ledger)

    table = capsys.readouterr().out
    up, down = ledger.bytes_up_and_down("weights")
    line = next(line for line in table.splitlines() if "weights" in line)
    for number in (str(messages["weights"]), f"{up / 1e6:#.3g}", f"{down / 1e6:#.3g}", f"{(up + down) / 3:,.0f}"):
        assert number in line
    assert "metrics" in table
    assert "oracle" in table
    assert "client-to-client" not in table


def test_messages_between_clients_have_their_own_column(capsys: pytest.CaptureFixture[str]):
    from fedlit.callbacks.communication_ledger import ledger_table
    from fedlit.console import show

    ledger = Ledger()
    for round_idx in range(4):
        ledger.record(round_idx, "features", "amazon", "webcam", 500_000)
    ledger.record(3, "classifier", "amazon", "server", 123_456_789)
    ledger.record(3, "classifier", "server", "webcam", 42)
    ledger.record(3, "metrics", "amazon", "server", 1000)
    show(ledger_table(ledger))
    lines = capsys.readouterr().out.splitlines()
    cells = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]] for line in lines if "│" in line
    }
    assert cells["features"] == ["4", "4", "0", "0", "2.00", "2.00", "500,000"]
    assert cells["classifier"] == ["1", "2", "123", "0.000042", "0", "123", "123,456,831"]
    assert cells["method"] == ["4", "6", "123", "0.000042", "2.00", "125", "31,364,208"]
    assert cells["metrics"] == ["1", "1", "0.00100", "0", "0", "0.00100", "1,000"]
    assert cells["all"][-2] == "125"


def test_curves_add_up_to_the_ledger_and_silent_rounds_are_zero(tmp_path: Path):
    module, logger = build(), CSVLogger(tmp_path)
    book = tmp_path / "deep" / "book.csv"
    # in rounds 1 and 2 nobody is there to send
    strategy = {"participation": Schedule([CLIENTS, [], [TARGET], CLIENTS])}
    callback = CommunicationLedger(str(book), print_table=False)
    trainer(4, [callback], tmp_path, logger=logger, strategy=strategy).fit(module, Blobs())
    rows = read_csv(Path(logger.log_dir) / "metrics.csv")
    sent = module.federation.ledger.bytes_by_channel()
    curve, total = column(rows, "comm/weights/MB"), column(rows, "comm/MB")
    assert [value > 0 for value in curve] == [True, False, False, True]
    assert sum(curve) == pytest.approx(sent["weights"] / 1e6, rel=1e-12)
    assert total == pytest.approx([sum(curve[: index + 1]) for index in range(4)], rel=1e-12)
    assert len(column(rows, "comm/metrics/MB")) == 4
    assert book.exists()


def test_fast_dev_run_writes_no_file(tmp_path: Path):
    trainer(1, [CommunicationLedger(print_table=False)], tmp_path, fast_dev_run=True).fit(build(), Blobs())
    assert not list(tmp_path.rglob("*.csv"))


# ---------------------------------------------------------------- time


class Seconds(pl.Callback, Component):
    """What the federation's clocks showed when the last round had ended."""

    def on_round_end(self, run: Run) -> None:
        module: Any = run.module
        self.last = dict(module.federation.seconds)


@pytest.mark.parametrize("rounds_per_epoch", [1, 2])
def test_times_of_rounds_add_up_to_the_federations(tmp_path: Path, rounds_per_epoch: int):
    logger, seconds = CSVLogger(tmp_path), Seconds()
    strategy = {"rounds_per_epoch": rounds_per_epoch}
    trainer(4 // rounds_per_epoch, [RoundTimer(), seconds], tmp_path, logger=logger, strategy=strategy).fit(
        build(), Blobs()
    )
    rows = read_csv(Path(logger.log_dir) / "metrics.csv")
    assert len(column(rows, "time/round_s")) == 4
    for phase in ("local", "exchange", "protection"):
        assert sum(column(rows, f"time/{phase}_s")) == pytest.approx(seconds.last[phase], rel=1e-9)
    assert sum(column(rows, "time/round_s")) >= sum(seconds.last.values())


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("steps", [8, 6])
def test_resumed_curves_go_on(tmp_path: Path, steps: int):
    """Rounds of 4 steps; the checkpoint is written at a round's end, or in the middle of a round."""

    def callbacks() -> list[pl.Callback]:
        return [CommunicationLedger(print_table=False), RoundTimer(), Seconds()]

    saving = ModelCheckpoint(tmp_path, filename="mid", every_n_train_steps=steps, save_top_k=-1)
    stopped = CSVLogger(tmp_path, "stopped")
    run = trainer(2, [*callbacks(), saving], tmp_path, logger=stopped, enable_checkpointing=True)
    run.fit(build(), Blobs())
    logger, resumed, module = CSVLogger(tmp_path, "resumed"), callbacks(), build()
    trainer(4, resumed, tmp_path, logger=logger).fit(module, Blobs(), ckpt_path=str(tmp_path / "mid.ckpt"))
    before, after = (read_csv(Path(log.log_dir) / "metrics.csv") for log in (stopped, logger))
    before = [row for row in before if int(row["step"]) <= steps]
    done = steps // 4
    assert len(column(after, "comm/MB")) == 4 - done
    first, rest = column(before, "comm/weights/MB")[:done], column(after, "comm/weights/MB")
    assert sum(first) + sum(rest) == pytest.approx(column(after, "comm/MB")[-1])
    assert column(after, "comm/MB")[-1] == pytest.approx(module.federation.ledger.bytes_by_channel()["weights"] / 1e6)
    for phase in ("local", "exchange"):
        spent = sum(column(before, f"time/{phase}_s")[:done]) + sum(column(after, f"time/{phase}_s"))
        assert spent == pytest.approx(resumed[2].last[phase], rel=1e-9)  # type: ignore[attr-defined]


# ---------------------------------------------------------------- loggers and processes


def test_figures_reach_tensorboard(tmp_path: Path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger, module, seen = TensorBoardLogger(tmp_path), build(), EveryMetric()
    callbacks = [OracleAccuracy(), CommunicationLedger(print_table=False), RoundTimer(), seen]
    trainer(3, callbacks, tmp_path, logger=logger).fit(module, Blobs())
    events = event_accumulator.EventAccumulator(logger.log_dir)
    events.Reload()
    oracle = [event.value for event in events.Scalars("oracle/target/acc")]
    assert oracle == pytest.approx([row["oracle/target/acc"] for row in seen.rows])
    sent = module.federation.ledger.bytes_by_channel()["weights"]
    assert sum(event.value for event in events.Scalars("comm/weights/MB")) == pytest.approx(sent / 1e6)
    assert [event.step for event in events.Scalars("time/round_s")] == [4, 8, 12]


@pytest.mark.slow
def test_figures_reach_wandb_offline(tmp_path: Path):
    wandb = pytest.importorskip("wandb")
    from lightning.pytorch.loggers import WandbLogger

    logger, module = WandbLogger(save_dir=str(tmp_path), offline=True), build()
    callbacks = [OracleAccuracy(), CommunicationLedger(print_table=False), RoundTimer()]
    trainer(2, callbacks, tmp_path, logger=logger).fit(module, Blobs())
    summary = dict(logger.experiment.summary)
    wandb.finish()
    assert summary["comm/MB"] == pytest.approx(module.federation.ledger.bytes_by_channel()["weights"] / 1e6)
    assert 0 <= summary["oracle/target/acc"] <= 1
    assert summary["time/round_s"] > 0
    assert (tmp_path / "ledger.csv").exists()


@pytest.mark.multiprocess
def test_two_processes_log_what_one_logs(tmp_path: Path):
    told: dict[str, Any] = {}
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        ended = processes.run(small_federation.watched, folder, count, ranks=count)
        assert not any(one.error for one in ended), ended
        printed = "".join(one.output for one in ended)
        assert printed.count("bytes per round") == 1, "one process prints the table"
        told |= {f"{rank}/{count}": one.result for rank, one in enumerate(ended)}
    alone = told["0/1"]
    assert {"oracle/target/acc", "target/temperature"} <= {*alone["rows"][-1]}
    assert sum(map(sum, alone["summary"]["oracle_confusion"])) == 30
    assert 0.1 < alone["summary"]["temperature"] < 10
    assert "comm/weights/MB" in alone["rows"][0]
    for rank in ("0/2", "1/2"):
        assert told[rank]["rows"] == alone["rows"]
        same_for_all = ("oracle_accuracy", "target_score", "rounds", "bytes_by_channel", "backends")
        for same in (*same_for_all, "oracle_ece", "oracle_auc", "oracle_confusion", "temperature"):
            assert told[rank]["summary"][same] == alone["summary"][same]
        assert told[rank]["summary"]["processes"] == 2
    for file in ("ledger.csv", "predictions.csv"):
        assert (tmp_path / "1" / file).read_text() == (tmp_path / "2" / file).read_text()


def test_a_method_that_sends_nothing_is_watched_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    module = build(FederatedModule)
    trainer(2, [OracleAccuracy(), CommunicationLedger(), RoundTimer()], tmp_path).fit(module, Blobs())
    line = next(line for line in capsys.readouterr().out.splitlines() if "method" in line)
    assert [cell.strip() for cell in line.split("│")[2:-1]] == ["0"] * 6
    assert summarise(module.trainer, module, 1.0).backends == {}


@pytest.mark.parametrize(("unknown", "is_few"), [(28, True), (15, False)])
def test_an_accuracy_of_a_few_validation_samples_is_told_as_such(tmp_path: Path, unknown: int, is_few: bool) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer(2, [OracleAccuracy()], tmp_path).fit(build(), Blobs(unknown))
    found = [str(each.message) for each in told if "validation samples of 'webcam'" in str(each.message)]
    assert [each.partition("(oracle) ")[2] for each in found] == (
        ["is of 2 with a label, of which one makes 50 points: it shows little"] if is_few else []
    )
