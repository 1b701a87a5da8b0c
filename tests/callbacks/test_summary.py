"""RunSummary and the closing table, on numbers worked out by hand."""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
from rich.console import Console

from fedlit.callbacks import OracleAccuracy, RunSummary, closing_table, summarise
from fedlit.methods import SourceOnly
from fedlit.privacy import Description, GaussianMechanism, Plain, PrivacyWarning
from small_federation import Blobs, build, trainer

SEALED = Description("Sealed", "the server", "every vector", "the sum", "none", "none", 8.0, "0")


def run(method: str, target: str, accuracy: float | None, seed: int = 0, **kwargs: object) -> RunSummary:
    values: dict[str, object] = {
        "method": method,
        "target": target,
        "seed": seed,
        "oracle_accuracy": accuracy,
        "target_score": 0.5,
        "rounds": 10,
        "bytes_by_channel": {"weights": 1_500_000, "metrics": 2000, "oracle": 1000},
        "seconds": {"local": 1.25, "exchange": 0.5},
        "seconds_total": 3.0,
        "processes": 1,
        "target_sha256": "0" * 64,
        "backends": {"weights": Plain().describe()},
    }
    return RunSummary(**(values | kwargs))  # type: ignore[arg-type]


def render(summaries: list[RunSummary], width: int = 140) -> str:
    """As the command line prints it into a file."""
    console = Console(width=width)
    with console.capture() as capture:
        console.print(closing_table(summaries))
    return capture.get()


def cells(text: str) -> dict[tuple[str, str], list[str]]:
    lines = text[text.index("───") :].splitlines()[1:]
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines if "  " in line.strip() and "─" not in line]
    return {(row[0], row[1]): row[2:] for row in rows}


def test_one_run_is_one_row():
    text = render([run("FedAvg", "webcam", 0.876)])
    assert "target accuracy (oracle)" in text
    assert cells(text) == {
        ("FedAvg", "webcam"): ["87.6", "0.500", "10", "weights 1.50", "0.00300", "1.2", "0.5", "0.0", "3.0"]
    }
    assert "privacy: weights -> Plain, hides nothing, reveals every client's vector, to the server" in text
    assert "SourceOnly" not in text
    assert "standard deviation" not in text


def test_names_are_printed_as_they_are():
    """Brackets mean a style to rich, and a closing one that nothing opened is an error to it."""
    text = render([run("SourceOnly [ours]", "webcam", 0.876), run("[/b] x", "[red]", 0.5)])
    assert {("SourceOnly [ours]", "webcam"), ("[/b] x", "[red]")} == set(cells(text))


def test_seeds_are_a_mean_and_a_sample_standard_deviation():
    """Accuracies 80, 82 and 87 %: mean 83, deviations -3, -1, 4, so std = sqrt(26 / 2) = 3.606."""
    runs = [run("FedAvg", "webcam", a, seed, rounds=seed) for seed, a in enumerate((0.80, 0.82, 0.87))]
    text = render([*runs, run("FedAvg", "webcam", None, 3, rounds=3)])
    assert cells(text)["FedAvg", "webcam"][0] == "83.0 ± 3.6"
    assert cells(text)["FedAvg", "webcam"][2] == "1.5"
    assert "mean ± standard deviation over seeds" in text


def test_an_average_is_taken_within_each_seed_first():
    """Seed 0: (80 + 90) / 2 = 85; seed 1: (84 + 94) / 2 = 89; mean 87, std = sqrt((4 + 4) / 1) = 2.83.

    Seed 2 has no dslr, and is left out. Over SourceOnly, which has seed 0 alone: amazon 80 - 50 = 30, dslr 90 - 90 = 0.
    """
    text = render(
        [
            run("SourceOnly", "amazon", 0.50),
            run("SourceOnly", "dslr", 0.90),
            run("FedGP", "amazon", 0.80, 0),
            run("FedGP", "dslr", 0.90, 0),
            run("FedGP", "amazon", 0.84, 1),
            run("FedGP", "dslr", 0.94, 1),
            run("FedGP", "amazon", 0.10, 2),
        ]
    )
    table = cells(text)
    assert list(table) == [
        (method, target) for method in ("SourceOnly", "FedGP") for target in ("amazon", "dslr", "average")
    ]
    assert table["SourceOnly", "average"][0] == "70.0"
    assert table["FedGP", "average"][0] == "87.0 ± 2.8"
    assert "FedGP - SourceOnly: +15.0 points on average (amazon +30.0, dslr +0.0)" in text


def test_losses_against_the_floor_are_negative_and_unknown_ones_left_out():
    text = render([run("SourceOnly", "dslr", 0.9), run("FedGP", "dslr", 0.85), run("FedDA", "dslr", None)])
    assert "FedGP - SourceOnly: dslr -5.0 points" in text
    assert "FedDA - SourceOnly" not in text
    assert cells(text)["FedDA", "dslr"][0] == "-"


def test_privacy_names_methods_where_they_differ():
    sealed = {"bytes_by_channel": {"weights": 1, "atoms": 2, "metrics": 3}, "backends": {"weights": SEALED}}
    alone = {"bytes_by_channel": {"metrics": 3}, "backends": {}}
    text = render(
        [run("FedAvg", "dslr", 0.9), run("FedDaDiL", "dslr", 0.9, **sealed), run("TargetOnly", "dslr", 0.5, **alone)]
    )
    assert "privacy (FedAvg): weights -> Plain, hides nothing" in text
    assert "privacy (FedDaDiL): weights -> Sealed, hides every vector, reveals the sum" in text
    assert "privacy (FedDaDiL): atoms -> from client to client, in the clear" in text
    assert "metrics ->" not in text
    assert "privacy: nothing is sent" in render([run("TargetOnly", "dslr", 0.5, **alone)])


def test_a_narrow_terminal_gets_two_tables_and_loses_nothing():
    runs = [run("FedRFTCA", "caltech10", a, seed) for seed, a in enumerate((0.80, 0.82, 0.87))]
    wide, narrow = render(runs, width=140), render(runs, width=80)
    assert wide.count("caltech10") == 1
    assert narrow.count("caltech10") == 2
    assert {word.strip("─") for word in wide.split()} == {word.strip("─") for word in narrow.split()}
    assert max(len(line) for line in narrow.splitlines()) <= 80


def test_no_runs_make_no_table():
    with pytest.raises(ValueError, match="summaries must hold at least one run"):
        closing_table([])


def test_a_real_run_is_summed_up(tmp_path: Path):
    module, data = build(SourceOnly), Blobs()
    ran = trainer(2, [OracleAccuracy()], tmp_path)
    ran.fit(module, data)
    ran.test(module, data, verbose=False)
    summary = summarise(ran, module, 1.5)
    assert (summary.method, summary.target, summary.seed, summary.rounds) == ("SourceOnly", "webcam", 0, 2)
    assert summary.oracle_accuracy == float(ran.callback_metrics["oracle/target/acc"])
    assert summary.target_score == float(ran.callback_metrics["target/score"])
    assert summary.bytes_by_channel == module.federation.ledger.bytes_by_channel()
    assert summary.backends == {"weights": Plain().describe()}
    assert summary.seconds == module.federation.seconds
    assert (summary.seconds_total, summary.processes) == (1.5, 1)
    record = json.loads(summary.to_json())
    assert record["backends"]["weights"]["backend"] == "Plain"
    assert RunSummary(**(record | {"backends": summary.backends})) == summary
    assert f"{100 * summary.oracle_accuracy:.1f}" in render([summary])


def test_a_round_is_chosen_by_the_score_alone_and_of_equal_ones_the_first(tmp_path: Path):
    module, watcher = build(), OracleAccuracy()
    ran = trainer(1, [watcher], tmp_path, limit_val_batches=0)
    ran.fit(module, Blobs())
    watcher.history = [(0.4, 1.0), (0.5, 0.2), (0.5, 0.9)]
    summary = summarise(ran, module, 1.5)
    assert (summary.selected_accuracy, summary.best_accuracy) == (0.2, 1.0)


def test_a_run_can_be_given_a_name(tmp_path: Path):
    module = build()
    ran = trainer(1, [], tmp_path, limit_val_batches=0)
    ran.fit(module, Blobs())
    assert summarise(ran, module, 1.5, "FedGP(beta=auto)").method == "FedGP(beta=auto)"


def test_without_an_oracle_there_is_no_accuracy(tmp_path: Path):
    module = build()
    ran = trainer(1, [], tmp_path, limit_val_batches=0)
    ran.fit(module, Blobs())
    summary = summarise(ran, module, 1.5)
    assert summary.oracle_accuracy is None
    assert summary.target_score is None


class Diverged(pl.Callback):
    """Logs what numbers of a model that diverged may come to."""

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        numbers = {"acc": math.nan, "f1": math.inf, "r2": -math.inf, "balanced_acc": 0.25}
        pl_module.run.log({f"oracle/target/{name}": number for name, number in numbers.items()})


def test_numbers_that_are_not_finite_are_unknown_and_the_summary_is_still_written(tmp_path: Path):
    module = build()
    ran = trainer(1, [Diverged()], tmp_path)
    ran.fit(module, Blobs())
    assert math.isnan(ran.callback_metrics["oracle/target/acc"])
    summary = summarise(ran, module, 1.5)
    record = json.loads(summary.to_json())
    found = {name: record[f"oracle_{name}"] for name in ("accuracy", "f1", "r2", "balanced_accuracy")}
    assert found == {"accuracy": None, "f1": None, "r2": None, "balanced_accuracy": 0.25}
    assert RunSummary.from_json(summary.to_json()) == summary


def test_a_method_with_many_channels_fits_into_a_log_file():
    sent = {"features": 123_456, "aligner": 1_234_567, "classifier": 9_876, "metrics": 99_000_000}
    texts = render([run("FedRFTCA", "caltech10", a, seed, bytes_by_channel=sent) for seed, a in enumerate((0.9, 1.0))])
    for channel in ("features 0.123", "aligner 1.23", "classifier 0.00988"):
        assert channel in texts


@pytest.mark.parametrize(
    ("backends", "cell"),
    [
        ({"update": SEALED}, "update 1.50 model 2.00 (clear)"),
        ({"update": SEALED, "model": Plain().describe()}, "update 1.50 model 2.00 (clear)"),
        ({"update": SEALED, "model": SEALED}, "update 1.50 model 2.00"),
        ({"update": Plain().describe()}, "update 1.50 model 2.00"),
    ],
)
def test_channels_in_the_clear_are_marked_where_others_are_hidden(backends: dict[str, Description], cell: str) -> None:
    sent = {"update": 1_500_000, "model": 2_000_000}
    ways = {"update": "summed: an update", "model": "in the clear: weights"}
    (row,) = closing_table([run("FedDA", "webcam", 0.5, bytes_by_channel=sent, channels=ways, backends=backends)]).rows
    assert row.cells[5].replace("\n", " ") == cell


def test_numbers_with_noise_are_read_back_whatever_they_are(tmp_path: Path) -> None:
    """An accuracy below 0 ended the table of an experiment, as if another version had written it."""
    module, data = build(SourceOnly), Blobs()
    noise = GaussianMechanism(1.0, 1000.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        ran = trainer(2, [OracleAccuracy()], tmp_path, strategy={"reports": noise})
        ran.fit(module, data)
        ran.test(module, data, verbose=False)
    summary = summarise(ran, module, 1.5)
    numbers = [getattr(summary, f"oracle_{name}") for name in ("accuracy", "f1", "ece", "auc", "balanced_accuracy")]
    assert any(not 0 <= number <= 1 for number in numbers), "all five in [0, 1] in 1e-17 of all runs"
    assert summary.noised
    assert RunSummary.from_json(summary.to_json()) == summary
    assert summary.oracle_confusion is None  # counts of 30 samples would be clipped together with the accuracy
    assert "carry the noise of differential privacy" in render([summary])


def test_counts_do_not_use_up_the_clipping_norm_of_the_accuracy(tmp_path: Path) -> None:
    """All numbers of a report are clipped together: counts of norm 30 would leave an accuracy of .9 as .03 of 1."""
    module, data = build(SourceOnly), Blobs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        exact, noised = (
            trainer(2, [OracleAccuracy()], tmp_path, strategy={"reports": reports})
            for reports in ("exact", GaussianMechanism(10.0, 1e-6))
        )
        for ran in (exact, noised):
            module = build(SourceOnly)
            ran.fit(module, data)
            ran.test(module, data, verbose=False)
    expected, found = (float(ran.callback_metrics["oracle/target/acc"]) for ran in (exact, noised))
    assert found == pytest.approx(expected, abs=1e-3)


def test_a_number_out_of_range_without_noise_is_still_refused() -> None:
    record = json.loads(run("FedAvg", "dslr", -0.25).to_json())
    with pytest.raises(ValueError, match=r"oracle_accuracy must be from 0 to 1, got -0\.25"):
        RunSummary.from_json(json.dumps(record))
    assert RunSummary.from_json(json.dumps(record | {"noised": True})).oracle_accuracy == -0.25
    with pytest.raises(ValueError, match="rounds must be from 0 to inf, got -1"):
        RunSummary.from_json(json.dumps(record | {"noised": True, "rounds": -1}))


class Infinite(pl.Callback):
    """Lets the model diverge after the last step of training, where no loss tells of it."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for param in pl_module.parameters():
            param.data.fill_(math.nan)


def test_a_model_that_predicts_no_numbers_is_summed_up_without_its_probabilities(tmp_path: Path) -> None:
    module, data = build(SourceOnly), Blobs()
    ran = trainer(1, [OracleAccuracy(), Infinite()], tmp_path)
    ran.fit(module, data)
    ran.test(module, data, verbose=False)
    summary = summarise(ran, module, 1.5)
    assert (summary.oracle_confusion, summary.oracle_reliability) == (None, None)
    assert 0 <= (summary.oracle_accuracy or 0) <= 1
    assert RunSummary.from_json(summary.to_json()) == summary


def test_scores_that_are_not_finite_choose_no_round(tmp_path: Path) -> None:
    module, watcher = build(), OracleAccuracy()
    ran = trainer(1, [watcher], tmp_path, limit_val_batches=0)
    ran.fit(module, Blobs())
    watcher.history = [(math.nan, 0.9), (0.5, 0.2), (0.6, math.inf), (0.4, 0.3)]
    summary = summarise(ran, module, 1.5)
    assert (summary.selected_accuracy, summary.best_accuracy) == (0.2, 0.3)
    assert RunSummary.from_json(summary.to_json()) == summary


def test_several_methods_are_told_not_to_be_ranked_by_their_scores() -> None:
    note = "the target score compares rounds of one method, not methods"
    assert note in render([run("FedAvg", "dslr", 0.9), run("FedGP", "dslr", 0.5)])
    assert note not in render([run("FedAvg", "dslr", 0.9), run("FedAvg", "webcam", 0.5)])
    assert note not in render([run("FedAvg", "dslr", 0.9), run("FedGP", "dslr", 0.5, target_score=None)])


def test_rows_of_fewer_seeds_are_named() -> None:
    text = render([run("FedAvg", "dslr", 0.9, 0), run("FedAvg", "dslr", 0.8, 1), run("FedGP", "dslr", 0.5, 1)])
    assert "FedGP on dslr has seed 1 alone, of seeds 0, 1" in text
    assert "FedAvg on dslr has" not in text
