"""RunSummary and the closing table, on numbers worked out by hand."""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from rich.console import Console

from fedlit.callbacks import OracleAccuracy, RunSummary, closing_table, summarise
from fedlit.methods import SourceOnly
from fedlit.privacy import Description, GaussianMechanism, Plain, PrivacyWarning
from refused import refused
from small_federation import Blobs, build, trainer
from summaries import summary

MASKED = Description("Masked", "the server", "every vector", "the sum", "none", "none", 8.0, "0")


def run(method: str, target: str, accuracy: float | None, seed: int = 0, **fields: Any) -> RunSummary:
    defaults = {
        "rounds": 10,
        "bytes_by_channel": {"weights": 1_500_000, "metrics": 2000, "oracle": 1000},
        "seconds": {"local": 1.25, "exchange": 0.5},
        "seconds_total": 3.0,
        "backends": {"weights": Plain().describe()},
    }
    return summary(method, target, accuracy, seed, **(defaults | fields))


def render(summaries: list[RunSummary], width: int = 140) -> str:
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


def test_seeds_are_a_mean_and_a_sample_standard_deviation():
    """Accuracies 80, 82 and 87 %: mean 83, deviations -3, -1, 4, so std = sqrt(26 / 2) = 3.606."""
    runs = [run("FedAvg", "webcam", a, seed, rounds=seed) for seed, a in enumerate((0.80, 0.82, 0.87))]
    text = render([*runs, run("FedAvg", "webcam", None, 3, rounds=3)])
    assert cells(text)["FedAvg", "webcam"][:3:2] == ["83.0 ± 3.6", "1.5"]
    assert "mean ± standard deviation over seeds" in text


def test_an_average_is_taken_within_each_seed_first():
    """Seed 0: (80 + 90) / 2 = 85; seed 1: (84 + 94) / 2 = 89; mean 87, std = sqrt((4 + 4) / 1) = 2.83.

    Seed 2 has no dslr, and is left out. Over SourceOnly, which has seed 0 alone: amazon 80 - 50 = 30, dslr 90 - 90 = 0.
    """
    scores = {"amazon": (0.80, 0.84, 0.10), "dslr": (0.90, 0.94)}
    runs = [run("SourceOnly", "amazon", 0.50), run("SourceOnly", "dslr", 0.90)]
    runs += [run("FedGP", target, score, seed) for target, some in scores.items() for seed, score in enumerate(some)]
    text = render(runs)
    table = cells(text)
    assert list(table) == [
        (method, target) for method in ("SourceOnly", "FedGP") for target in ("amazon", "dslr", "average")
    ]
    assert table["SourceOnly", "average"][0] == "70.0"
    assert table["FedGP", "average"][0] == "87.0 ± 2.8"
    assert "FedGP - SourceOnly: +15.0 points on average (amazon +30.0, dslr +0.0)" in text
    assert "FedGP on dslr has seeds 0, 1 alone, of seeds 0, 1, 2" in text
    assert "FedGP on amazon has" not in text


def test_a_method_that_lacks_a_target_has_no_average():
    runs = [run("FedAvg", target, score) for target, score in (("amazon", 0.5), ("dslr", 0.9))]
    text = render([*runs, run("FedGP", "amazon", 0.5, selected_accuracy=0.5, best_accuracy=0.5)])
    assert cells(text)["FedAvg", "average"][0] == "70.0"
    assert ("FedGP", "average") not in cells(text)
    assert "FedGP has no run on dslr, and no average over targets" in text
    assert "on validation samples" not in text


def test_scores_of_other_samples_are_no_difference():
    runs = [
        run(method, "dslr", 0.5, oracle_confusion=[[size, size], [0, 2 * size]], classes=["a", "b"])
        for method, size in (("SourceOnly", 10), ("FedAvg, 20 labels", 5), ("FedMMD", 10))
    ]
    text = " ".join(render(runs).split())
    assert "FedMMD - SourceOnly: dslr +0.0 points" in text
    assert "FedAvg, 20 labels - SourceOnly" not in text
    assert "fewer samples than the 40 of others, without those whose labels they train on" in text
    assert "differences may be of the samples: FedAvg, 20 labels 20" in text
    assert "fewer samples" not in render(runs[::2])


def test_losses_against_the_floor_are_negative_and_unknown_ones_left_out():
    text = render([run("SourceOnly", "dslr", 0.9), run("FedGP", "dslr", 0.85), run("FedDA", "dslr", None)])
    assert "FedGP - SourceOnly: dslr -5.0 points" in text
    assert "FedDA - SourceOnly" not in text
    assert cells(text)["FedDA", "dslr"][0] == "-"


def test_privacy_names_methods_where_they_differ():
    masked = {"bytes_by_channel": {"weights": 1, "atoms": 2, "metrics": 3}, "backends": {"weights": MASKED}}
    alone = {"bytes_by_channel": {"metrics": 3}, "backends": {}}
    text = render(
        [run("FedAvg", "dslr", 0.9), run("FedDaDiL", "dslr", 0.9, **masked), run("TargetOnly", "dslr", 0.5, **alone)]
    )
    assert "privacy (FedAvg): weights -> Plain, hides nothing" in text
    assert "privacy (FedDaDiL): weights -> Masked, hides every vector, reveals the sum" in text
    assert "privacy (FedDaDiL): atoms -> from client to client, in the clear" in text
    assert "metrics ->" not in text
    assert "privacy: nothing is sent" in render([run("TargetOnly", "dslr", 0.5, **alone)])


def test_a_narrow_terminal_gets_two_tables_and_loses_nothing():
    sent = {"features": 123_456, "aligner": 1_234_567, "classifier": 9_876, "metrics": 99_000_000}
    runs = [run("FedRFTCA", "caltech10", a, seed, bytes_by_channel=sent) for seed, a in enumerate((0.80, 0.82, 0.87))]
    wide, narrow = render(runs, width=140), render(runs, width=80)
    assert [text.count("caltech10") for text in (wide, narrow)] == [1, 2]
    assert {word.strip("─") for word in wide.split()} == {word.strip("─") for word in narrow.split()}
    assert max(len(line) for line in narrow.splitlines()) <= 80
    assert all(channel in wide for channel in ("features 0.123", "aligner 1.23", "classifier 0.00988"))


def test_no_runs_make_no_table():
    with refused("summaries"):
        closing_table([])


@pytest.mark.parametrize(
    ("backends", "cell"),
    [
        ({"update": MASKED}, "update 1.50\nmodel 2.00 (clear)"),
        ({"update": MASKED, "model": Plain().describe()}, "update 1.50\nmodel 2.00 (clear)"),
        ({"update": MASKED, "model": MASKED}, "update 1.50\nmodel 2.00"),
        ({"update": Plain().describe()}, "update 1.50\nmodel 2.00"),
    ],
)
def test_plaintext_channels_are_marked_where_others_are_hidden(backends, cell):
    sent = {"update": 1_500_000, "model": 2_000_000}
    declared = {"update": "summed: an update", "model": "in the clear: weights"}
    fields = {"bytes_by_channel": sent, "channels": declared, "backends": backends}
    ((*_, found, _, _, _, _, _),) = closing_table([run("FedDA", "webcam", 0.5, **fields)]).texts()
    assert found == cell


def test_several_methods_are_not_ranked_by_their_scores():
    note = "the target score compares rounds of one method, not methods"
    assert note in render([run("FedAvg", "dslr", 0.9), run("FedGP", "dslr", 0.5)])
    assert note not in render([run("FedAvg", "dslr", 0.9), run("FedAvg", "webcam", 0.5)])
    assert note not in render([run("FedAvg", "dslr", 0.9), run("FedGP", "dslr", 0.5, target_score=None)])


def trained(folder: Path, *callbacks: Any, rounds: int = 1, test: bool = False, **kwargs: Any) -> RunSummary:
    module, data = build(SourceOnly), Blobs()
    done = trainer(rounds, list(callbacks), folder, **kwargs)
    done.fit(module, data)
    if test:
        done.test(module, data, verbose=False)
    found = summarise(done, module, 1.5)
    assert RunSummary.from_json(found.to_json()) == found
    return found


def test_a_real_run_is_summed_up(tmp_path):
    module, data = build(SourceOnly), Blobs()
    ran = trainer(2, [OracleAccuracy()], tmp_path)
    ran.fit(module, data)
    ran.test(module, data, verbose=False)
    found = summarise(ran, module, 1.5)
    assert (found.method, found.target, found.seed, found.rounds) == ("SourceOnly", "webcam", 0, 2)
    assert found.oracle_accuracy == float(ran.callback_metrics["oracle/target/acc"])
    assert found.target_score == float(ran.callback_metrics["target/score"])
    assert found.bytes_by_channel == module.federation.ledger.bytes_by_channel()
    assert found.backends == {"weights": Plain().describe()}
    assert found.seconds == module.federation.seconds
    assert (found.seconds_total, found.processes) == (1.5, 1)
    record = json.loads(found.to_json())
    assert record["backends"]["weights"]["backend"] == "Plain"
    assert RunSummary(**(record | {"backends": found.backends})) == found
    assert f"{100 * found.oracle_accuracy:.1f}" in render([found])
    assert summarise(ran, module, 1.5, "FedGP(beta=auto)").method == "FedGP(beta=auto)"


@pytest.mark.parametrize(
    ("history", "selected", "best"),
    [
        ([(0.4, 1.0), (0.5, 0.2), (0.5, 0.9)], 0.2, 1.0),  # by the score alone, and of equal ones the first
        ([(math.nan, 0.9), (0.5, 0.2), (0.6, math.inf), (0.4, 0.3)], 0.2, 0.3),
        ([], None, None),
    ],
)
def test_a_round_is_chosen_by_finite_scores(tmp_path, history, selected, best):
    class Watcher(OracleAccuracy):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.history = history

    found = trained(tmp_path, Watcher(), limit_val_batches=0)
    assert (found.selected_accuracy, found.best_accuracy) == (selected, best)


class Diverged(pl.Callback):
    """Logs metrics of a diverged model, and makes the weights such ones after the last step, where no loss shows it."""

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        numbers = {"acc": math.nan, "f1": math.inf, "r2": -math.inf, "balanced_acc": 0.25}
        pl_module.run.log({f"oracle/target/{name}": number for name, number in numbers.items()})

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for param in pl_module.parameters():
            param.data.fill_(math.nan)


def test_numbers_that_are_not_finite_are_unknown_and_the_summary_is_still_written(tmp_path):
    record = json.loads(trained(tmp_path, Diverged()).to_json())
    found = {name: record[f"oracle_{name}"] for name in ("accuracy", "f1", "r2", "balanced_accuracy")}
    assert found == {"accuracy": None, "f1": None, "r2": None, "balanced_accuracy": 0.25}


def test_a_model_without_probabilities_is_summed_up_without_their_scores(tmp_path):
    found = trained(tmp_path, OracleAccuracy(), Diverged(), test=True)
    assert (found.oracle_confusion, found.oracle_reliability) == (None, None)
    assert 0 <= (found.oracle_accuracy or 0) <= 1


@pytest.mark.filterwarnings("ignore::fedlit.privacy.PrivacyWarning")
def test_numbers_with_noise_are_read_back_whatever_they_are(tmp_path):
    noise = GaussianMechanism(1.0, 1000.0)
    found = trained(tmp_path, OracleAccuracy(), rounds=2, test=True, strategy={"reports": noise})
    numbers = [getattr(found, f"oracle_{name}") for name in ("accuracy", "f1", "ece", "auc", "balanced_accuracy")]
    assert any(not 0 <= number <= 1 for number in numbers), "all five in [0, 1] in 1e-17 of all runs"
    assert found.noised
    assert found.oracle_confusion is None  # counts of 30 samples would be clipped together with the accuracy
    assert "carry the noise of differential privacy" in render([found])


def test_counts_do_not_use_up_the_clipping_norm_of_the_accuracy(tmp_path):
    """All numbers of a report are clipped together: counts of norm 30 would leave an accuracy of .9 as .03 of 1."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        exact, noised = (
            trained(tmp_path, OracleAccuracy(), rounds=2, test=True, strategy={"reports": reports})
            for reports in ("exact", GaussianMechanism(10.0, 1e-6))
        )
    assert noised.oracle_accuracy == pytest.approx(exact.oracle_accuracy, abs=1e-3)


def test_only_noise_excuses_a_number_out_of_range():
    record = json.loads(run("FedAvg", "dslr", -0.25).to_json())
    with refused("oracle_accuracy"):
        RunSummary.from_json(json.dumps(record))
    assert RunSummary.from_json(json.dumps(record | {"noised": True})).oracle_accuracy == -0.25
    with refused("rounds"):
        RunSummary.from_json(json.dumps(record | {"noised": True, "rounds": -1}))
