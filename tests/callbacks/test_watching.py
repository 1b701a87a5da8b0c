"""OracleAccuracy, CommunicationLedger and RoundTimer in real runs, compared with independent computations."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    brier_score_loss,
    confusion_matrix,
    f1_score,
    recall_score,
    roc_auc_score,
)

import processes
import small_federation
from commands import rows as rows_of
from fedlit import FederatedModule, Run
from fedlit.callbacks import (
    AggregationCurves,
    CommunicationLedger,
    OracleAccuracy,
    PrivacyReport,
    RoundTimer,
    RunRecord,
    TargetPredictions,
    summarise,
)
from fedlit.callbacks.communication_ledger import ledger_table
from fedlit.federation import Fraction, LabelGuardError, Ledger, Schedule
from fedlit.run.component import Component
from small_federation import CLIENTS, NUM_CLASSES, TARGET, Blobs, build, trainer


def column(rows: list[dict[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row.get(name)]


def warnings_of(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(("federated", "unknown"), [(True, 7), (False, 0)])
def test_oracle_accuracy_is_that_of_the_targets_logits(tmp_path, federated, unknown):
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


def test_scores_of_probabilities_are_scikit_learns(tmp_path):
    """The calibration error is summed here over bins of the most probable class, from its definition."""
    data, module = Blobs(), build()
    run = trainer(2, [watcher := OracleAccuracy()], tmp_path)
    run.fit(module, data)
    assert watcher.confusion is None, "validations between rounds do not count"
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
    area = roc_auc_score(y, p, multi_class="ovr")
    squares = sum(brier_score_loss(y == label, p[:, label]) for label in range(NUM_CLASSES))
    got = {name.removeprefix("oracle/target/"): float(value) for name, value in run.callback_metrics.items()}
    assert (got["ece"], got["auc"], got["brier"]) == pytest.approx((error, area, squares), abs=1e-6)
    assert not any(name.startswith("acc/") for name in got), "only where per_class asks for them"
    matrix = confusion_matrix(y, p.argmax(dim=1))
    assert watcher.confusion == matrix.tolist()
    summary = summarise(run, module, 1.0)
    assert (summary.oracle_ece, summary.oracle_auc, summary.oracle_brier) == (got["ece"], got["auc"], got["brier"])
    assert summary.oracle_confusion == matrix.tolist()
    assert summary.classes == ["0", "1", "2", "3"]
    recall = recall_score(y, p.argmax(dim=1), average=None)
    assert summary.oracle_class_accuracy == pytest.approx(dict(zip("0123", recall, strict=True)))


@pytest.mark.parametrize("there", [[0, 1, 3], [2]])
def test_missing_classes_have_no_scores(there, tmp_path):
    data, module = Blobs(), build()
    labels = data.parts["test"][TARGET].tensors[1]
    labels[~torch.isin(labels, torch.tensor(there))] = there[0]
    run = trainer(1, [watcher := OracleAccuracy(per_class=True)], tmp_path)
    run.fit(module, data)
    run.test(module, data, verbose=False)
    got = run.callback_metrics
    classes = {int(name.rsplit("/", 1)[1]): float(got[name]) for name in got if name.startswith("oracle/target/acc/")}
    assert sorted(classes) == there
    assert float(got["oracle/target/balanced_acc"]) == pytest.approx(sum(classes.values()) / len(there), abs=1e-6)
    with torch.no_grad():
        p = module.replicas[TARGET](data.parts["test"][TARGET].tensors[0]).softmax(dim=1)
    assert watcher.confusion is not None
    assert [label for label, row in enumerate(watcher.confusion) if sum(row)] == there
    summary = summarise(run, module, 1.0)
    assert list(summary.oracle_class_accuracy) == [str(label) for label in there]
    if len(there) == 1:
        assert "oracle/target/auc" not in got
        assert summary.oracle_auc is None
    else:
        areas = [roc_auc_score(labels == label, p[:, label]) for label in there]
        assert summary.oracle_auc == pytest.approx(sum(areas) / len(areas), abs=1e-6)


def test_a_target_with_no_known_label_has_no_oracle(tmp_path):
    run = trainer(1, [OracleAccuracy()], tmp_path)
    run.fit(build(), Blobs(unknown=30))
    assert not [name for name in run.callback_metrics if name.startswith("oracle/")]


def test_sanity_checking_asks_no_oracle(tmp_path):
    module = build()
    run = trainer(1, [OracleAccuracy()], tmp_path, num_sanity_val_steps=1, limit_val_batches=0.5)
    run.fit(module, Blobs())
    assert module.federation.ledger.messages_by_channel()["oracle"] == 1 + len(CLIENTS)  # one validation


def test_looking_changes_neither_the_weights_nor_the_other_channels(tmp_path):
    runs = []
    for callbacks in ([], [OracleAccuracy(), CommunicationLedger(print_table=False), RoundTimer()]):
        module = build()
        trainer(2, callbacks, tmp_path, strategy={"participation": Fraction(0.5)}).fit(module, Blobs())
        sent = [entry for entry in module.federation.ledger if entry.channel != "oracle"]
        runs.append((sent, module.state_dict()))
    assert sorted(runs[0][0]) == sorted(runs[1][0])
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])


@pytest.mark.parametrize(
    ("selecting", "oracle_first"),
    [
        (lambda folder: EarlyStopping("oracle/target/acc", mode="max"), True),
        (lambda folder: ModelCheckpoint(str(folder), monitor="oracle/target/loss"), False),
    ],
)
def test_selection_by_the_targets_labels_is_refused(tmp_path, selecting, oracle_first):
    callbacks = [OracleAccuracy(), selecting(tmp_path)]
    run = trainer(1, callbacks if oracle_first else callbacks[::-1], tmp_path, enable_checkpointing=True)
    with pytest.raises(LabelGuardError, match="oracle/target/"):
        run.fit(build(), Blobs())


def test_schedules_by_the_targets_labels_are_refused(tmp_path):
    module = build()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    plateau = {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "oracle/target/loss"}
    module.configure_optimizers = lambda: {"optimizer": optimizer, "lr_scheduler": plateau}
    with pytest.raises(LabelGuardError, match="ReduceLROnPlateau"):
        trainer(1, [OracleAccuracy()], tmp_path).fit(module, Blobs())


@pytest.mark.parametrize(
    "callback",
    [OracleAccuracy(), CommunicationLedger(), RoundTimer(), AggregationCurves(), PrivacyReport(), RunRecord()],
    ids=lambda callback: type(callback).__name__,
)
def test_other_modules_are_refused_by_name(tmp_path, callback):
    run = trainer(1, [callback], tmp_path, federated=False)
    with pytest.raises(TypeError, match=f"{type(callback).__name__} watches"):
        run.fit(BoringModel())


def test_the_file_adds_up_to_the_ledger(tmp_path, capsys):
    module = build(weighting="uniform")
    trainer(3, [OracleAccuracy(), CommunicationLedger()], tmp_path).fit(module, Blobs())
    ledger = module.federation.ledger
    rows = rows_of(tmp_path / "ledger.csv")
    assert list(rows[0]) == ["round", "channel", "sender", "receiver", "messages", "bytes"]
    sent, messages = Counter[str](), Counter[str]()
    for row in rows:
        sent[row["channel"]] += int(row["bytes"])
        messages[row["channel"]] += int(row["messages"])
    assert dict(sent) == ledger.bytes_by_channel()
    assert dict(messages) == ledger.messages_by_channel()
    assert sum(sent.values()) == ledger.total_bytes
    assert len(rows) == len(ledger)
    table = capsys.readouterr().out
    up, down = ledger.bytes_up_and_down("weights")
    line = next(line for line in table.splitlines() if "weights" in line)
    for number in (str(messages["weights"]), f"{up / 1e6:#.3g}", f"{down / 1e6:#.3g}", f"{(up + down) / 3:,.0f}"):
        assert number in line
    assert "metrics" in table
    assert "oracle" in table
    assert "between clients" not in table


def test_messages_between_clients_have_a_column():
    ledger = Ledger()
    for round_idx in range(4):
        ledger.record(round_idx, "features", "amazon", "webcam", 500_000)
    ledger.record(3, "classifier", "amazon", "server", 123_456_789)
    ledger.record(3, "classifier", "server", "webcam", 42)
    ledger.record(3, "metrics", "amazon", "server", 1000)
    cells = {row[0]: row[1:] for row in ledger_table(ledger).texts()}
    assert cells["features"] == ["4", "4", "0", "0", "2.00", "2.00", "500,000"]
    assert cells["classifier"] == ["1", "2", "123", "0.000042", "0", "123", "123,456,831"]
    assert cells["method"] == ["4", "6", "123", "0.000042", "2.00", "125", "31,364,208"]
    assert cells["metrics"] == ["1", "1", "0.00100", "0", "0", "0.00100", "1,000"]
    assert cells["all"][-2] == "125"
    exact = {row[0]: row[1:] for row in ledger_table(ledger, exact=True).texts()}
    assert exact["classifier"] == ["1", "2", "123,456,789", "42", "0", "123,456,831", "123,456,831"]


def test_curves_add_up_to_the_ledger_and_silent_rounds_are_zero(tmp_path):
    module, logger = build(), CSVLogger(tmp_path)
    book = tmp_path / "deep" / "book.csv"
    # in rounds 1 and 2 nobody is there to send
    strategy = {"participation": Schedule([CLIENTS, [], [TARGET], CLIENTS])}
    callback = CommunicationLedger(str(book), print_table=False)
    trainer(4, [callback], tmp_path, logger=logger, strategy=strategy).fit(module, Blobs())
    rows = rows_of(Path(logger.log_dir) / "metrics.csv")
    sent = module.federation.ledger.bytes_by_channel()
    curve, total = column(rows, "comm/weights/MB"), column(rows, "comm/MB")
    assert [value > 0 for value in curve] == [True, False, False, True]
    assert sum(curve) == pytest.approx(sent["weights"] / 1e6, rel=1e-12)
    assert total == pytest.approx([sum(curve[: index + 1]) for index in range(4)], rel=1e-12)
    assert len(column(rows, "comm/metrics/MB")) == 4
    assert book.exists()


@pytest.mark.parametrize("callback", [CommunicationLedger(), PrivacyReport(), TargetPredictions()])
def test_fast_dev_run_writes_no_file(tmp_path, callback, capsys):
    module, run = build(weighting="uniform"), trainer(1, [callback], tmp_path, fast_dev_run=True)
    run.fit(module, Blobs())
    run.predict(module, Blobs())
    assert not [*tmp_path.rglob("*.csv"), *tmp_path.rglob("*.json")]
    assert ("privacy report" in capsys.readouterr().out) == isinstance(callback, PrivacyReport)


class Seconds(pl.Callback, Component):
    def on_round_end(self, run: Run) -> None:
        self.last = dict(run.federation.seconds)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_resumed_curves_go_on(tmp_path):
    steps = 6

    def callbacks() -> list[pl.Callback]:
        return [CommunicationLedger(print_table=False), RoundTimer(), Seconds()]

    saving = ModelCheckpoint(tmp_path, filename="mid", every_n_train_steps=steps, save_top_k=-1)
    stopped = CSVLogger(tmp_path, "stopped")
    run = trainer(2, [*callbacks(), saving], tmp_path, logger=stopped, enable_checkpointing=True)
    run.fit(build(), Blobs())
    logger, resumed, module = CSVLogger(tmp_path, "resumed"), callbacks(), build()
    trainer(4, resumed, tmp_path, logger=logger).fit(module, Blobs(), ckpt_path=str(tmp_path / "mid.ckpt"))
    before, after = (rows_of(Path(log.log_dir) / "metrics.csv") for log in (stopped, logger))
    before = [row for row in before if int(row["step"]) <= steps]
    done = steps // 4
    assert len(column(after, "comm/MB")) == 4 - done
    first, rest = column(before, "comm/weights/MB")[:done], column(after, "comm/weights/MB")
    assert sum(first) + sum(rest) == pytest.approx(column(after, "comm/MB")[-1])
    assert column(after, "comm/MB")[-1] == pytest.approx(module.federation.ledger.bytes_by_channel()["weights"] / 1e6)
    for phase in ("local", "exchange"):
        spent = sum(column(before, f"time/{phase}_s")[:done]) + sum(column(after, f"time/{phase}_s"))
        assert spent == pytest.approx(resumed[2].last[phase], rel=1e-9)


@pytest.mark.multiprocess
def test_two_processes_log_what_one_logs(tmp_path):
    results: dict[str, Any] = {}
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        ended = processes.run(small_federation.watched, folder, count, ranks=count)
        assert not any(one.error for one in ended), ended
        printed = "".join(one.output for one in ended)
        assert printed.count("bytes per round") == 1, "one process prints the table"
        results |= {f"{rank}/{count}": one.result for rank, one in enumerate(ended)}
    alone = results["0/1"]
    assert {"oracle/target/acc", "target/temperature"} <= {*alone["rows"][-1]}
    assert sum(map(sum, alone["summary"]["oracle_confusion"])) == 30
    assert 0.1 < alone["summary"]["temperature"] < 10
    assert "comm/weights/MB" in alone["rows"][0]
    for rank in ("0/2", "1/2"):
        assert results[rank]["rows"] == alone["rows"]
        same_for_all = ("oracle_accuracy", "target_score", "rounds", "bytes_by_channel", "backends")
        for same in (*same_for_all, "oracle_ece", "oracle_auc", "oracle_confusion", "temperature"):
            assert results[rank]["summary"][same] == alone["summary"][same]
        assert results[rank]["summary"]["processes"] == 2
    for file in ("ledger.csv", "predictions.csv"):
        assert (tmp_path / "1" / file).read_text() == (tmp_path / "2" / file).read_text()


def test_a_method_that_sends_nothing_is_watched_too(tmp_path, capsys):
    module = build(FederatedModule)
    trainer(2, [OracleAccuracy(), CommunicationLedger(), RoundTimer()], tmp_path).fit(module, Blobs())
    line = next(line for line in capsys.readouterr().out.splitlines() if "method" in line)
    assert line.split() == ["method", *["0"] * 6]
    assert summarise(module.trainer, module, 1.0).backends == {}


@pytest.mark.parametrize(("unknown", "points"), [(28, ["50 points"]), (15, [])])
def test_an_accuracy_of_few_validation_samples_is_warned_of_once(tmp_path, unknown, points):
    texts = warnings_of(lambda: trainer(2, [OracleAccuracy()], tmp_path).fit(build(), Blobs(unknown)))
    texts = [text for text in texts if "validation samples of 'webcam'" in text]
    assert len(texts) == len(points)
    assert all(each in text for each, text in zip(points, texts, strict=True))
