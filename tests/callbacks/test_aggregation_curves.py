"""AggregationCurves on a method that logs known numbers, and on FedGP itself."""

from __future__ import annotations

import math
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from matplotlib.figure import Figure

from commands import rows as rows_of
from fedlit import Client, Run
from fedlit.callbacks import AggregationCurves
from fedlit.methods import FedAvg, FedGP
from fedlit.models import MLP
from refused import slow
from small_federation import NUM_CLASSES, TARGET, Blobs, build, trainer

SOURCES = ["amazon", "dslr", "caltech"]


class Logs(FedAvg):
    """Logs the `numbers` of each round."""

    def on_round_end(self, run: Run) -> None:
        super().on_round_end(run)
        self.run.log(numbers(run.clock.round_idx))


def numbers(round_idx: int) -> dict[str, float]:
    """Nothing in round 0; dslr is absent from round 2; caltech's distance is negative."""
    if round_idx == 0:
        return {}
    found = {"beta": 0.5 / round_idx, "target_variance": 10.0 / round_idx}
    for place, source in enumerate(SOURCES):
        if source == "dslr" and round_idx == 2:
            continue
        found |= {f"beta/{source}": 0.25 * place, f"distance/{source}": 1.0 + round_idx - 3 * place}
        found |= {f"tau/{source}": 0.125 * round_idx}
    return found


def expected(rounds: range) -> dict[int, dict[str, float]]:
    return {round_idx: pytest.approx(numbers(round_idx)) for round_idx in rounds if round_idx}


def curves(figure: Figure) -> dict[str, dict[str, dict[int, float]]]:
    """By panel and label, the finite points of each line."""
    return {
        axis.get_title(): {
            str(line.get_label()): {int(x): float(y) for x, y in zip(*line.get_data(), strict=True) if np.isfinite(y)}
            for line in axis.lines
        }
        for axis in figure.axes
    }


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> tuple[AggregationCurves, Path]:
    logger, callback = CSVLogger(tmp_path_factory.mktemp("drawn")), AggregationCurves()
    trainer(5, [callback], Path(logger.root_dir), logger=logger).fit(build(Logs), Blobs())
    return callback, Path(logger.log_dir)


@pytest.fixture(scope="module")
def drawn(logged: tuple[AggregationCurves, Path]) -> Figure:
    return logged[0].plot()


def test_the_table_holds_what_was_logged_and_is_empty_where_nothing_was(logged):
    callback, folder = logged
    assert callback.rounds == expected(range(5))
    rows = rows_of(folder / "aggregation_curves.csv")
    kinds = [f"{kind}/{source}" for kind in ("beta", "distance", "tau") for source in SOURCES]
    assert list(rows[0]) == ["round", "beta", "target_variance", *kinds]
    assert [int(row["round"]) for row in rows] == [1, 2, 3, 4]
    for row in rows:
        found = {name: float(value) for name, value in row.items() if value and name != "round"}
        assert found == pytest.approx(numbers(int(row["round"])))
    assert [name for name, value in rows[1].items() if not value] == ["beta/dslr", "distance/dslr", "tau/dslr"]
    assert (folder / "aggregation_curves.png").read_bytes().startswith(b"\x89PNG")


def test_lines_are_the_numbers_and_are_interrupted_where_a_source_was_absent(drawn):
    beta, distance, tau = curves(drawn).values()
    assert beta["mean of sources"] == pytest.approx({r: 0.5 / r for r in range(1, 5)})
    assert beta["dslr"] == {1: 0.25, 3: 0.25, 4: 0.25}
    assert beta["caltech"] == dict.fromkeys(range(1, 5), 0.5)
    assert distance["amazon"] == {r: 1.0 + r for r in range(1, 5)}
    assert distance[r"target variance $\sigma^2$"] == pytest.approx({r: 10 / r for r in range(1, 5)})
    assert tau["amazon"] == {r: 0.125 * r for r in range(1, 5)}


def test_estimates_that_no_logarithm_shows_are_drawn(drawn):
    """Of dslr, 1 + r - 3 <= 0 in round 1 (it is absent from round 2); of caltech, 1 + r - 6 <= 0 in rounds 1 to 4."""
    axis = drawn.axes[1]
    assert axis.get_yscale() == "symlog"
    _, distance, _ = curves(drawn).values()
    assert distance["dslr"] == {1: -1.0, 3: 1.0, 4: 2.0}
    assert distance["caltech"] == {1: -4.0, 2: -3.0, 3: -2.0, 4: -1.0}


def test_what_was_never_logged_has_no_panel():
    callback = AggregationCurves()
    callback.rounds = {0: {"beta": 0.5}}
    assert list(curves(callback.plot())) == [r"weight of the source, $\beta$"]
    callback.rounds = {0: {"beta": 0.5, "target_variance": 2.0}}
    assert len(callback.plot().axes) == 2
    with pytest.raises(ValueError, match="at least one collected round"):
        AggregationCurves().plot()


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.usefixtures("undrawn")
def test_a_resumed_run_has_the_rounds_before(tmp_path):
    saving = ModelCheckpoint(tmp_path, filename="mid", every_n_train_steps=10, save_top_k=-1)  # of 12 steps
    first: list[pl.Callback] = [AggregationCurves(), saving]
    trainer(3, first, tmp_path / "stopped", enable_checkpointing=True).fit(build(Logs), Blobs())
    callback = AggregationCurves()
    run = trainer(4, [callback], tmp_path / "resumed")
    run.fit(build(Logs), Blobs(), ckpt_path=str(tmp_path / "mid.ckpt"))
    assert callback.rounds == expected(range(4))
    rows = rows_of(tmp_path / "resumed" / "aggregation_curves.csv")
    assert [int(row["round"]) for row in rows] == [1, 2, 3]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("federated", [True, slow(False)])
def test_another_fit_forgets_the_one_before(tmp_path, federated):
    callback = AggregationCurves()
    trainer(3, [callback], tmp_path, federated).fit(build(Logs, weighting="uniform"), Blobs())
    trainer(2, [callback], tmp_path, federated).fit(build(Logs, weighting="uniform"), Blobs())
    assert callback.rounds == expected(range(2))


def test_a_method_that_logs_none_is_named_and_nothing_is_written(tmp_path):
    with pytest.warns(UserWarning, match="FedAvg logged none of beta"):
        trainer(1, [AggregationCurves()], tmp_path).fit(build(FedAvg), Blobs())
    assert not list(tmp_path.rglob("aggregation_curves.*"))


@pytest.mark.usefixtures("undrawn")
def test_fedgp_is_drawn(tmp_path):
    callback = AggregationCurves()
    torch.manual_seed(0)
    clients = [*SOURCES, Client(TARGET, role="target", labelled=True)]
    module = FedGP(clients, TARGET, NUM_CLASSES, MLP(5, [8]), beta="auto")
    trainer(2, [callback], tmp_path).fit(module, Blobs())
    assert sorted(callback.rounds) == [0, 1]
    for row in callback.rounds.values():
        mean = math.fsum(row[f"beta/{source}"] for source in SOURCES) / 3
        assert row["beta"] == pytest.approx(mean)
        assert row["target_variance"] > 0
    assert len(callback.plot().axes) >= 2
