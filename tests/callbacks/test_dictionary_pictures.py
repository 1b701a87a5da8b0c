"""DictionaryPictures on a small dictionary: what is collected, written, drawn, and kept at home."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import matplotlib as mpl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import Adam

from commands import rows as rows_of
from fedlit import Run
from fedlit.callbacks import DictionaryPictures
from fedlit.federation import Schedule
from fedlit.methods import FedAvg, FedDaDiL
from fedlit.models import MLP, Features
from fedlit.run.component import Component
from small_federation import CLIENTS, NUM_CLASSES, TARGET, Blobs, trainer


def build(**kwargs: Any) -> FedDaDiL:
    torch.manual_seed(0)
    given: dict[str, Any] = {"num_atoms": 2, "atom_size": 16, "unit_norm": False, "penalty": 0.1}
    given |= {"atom_lr": 0.05, "simplex_lr": 0.05}
    return FedDaDiL(
        CLIENTS, TARGET, NUM_CLASSES, Features(5), optimizer=lambda params: Adam(params), **(given | kwargs)
    )


class Watch(pl.Callback, Component):
    """What a client's coordinates and cost were after each round, read where they live."""

    def __init__(self) -> None:
        self.rounds: list[tuple[list[float], float]] = []

    def on_round_end(self, run: Run) -> None:
        target: Any = run.replicas[run.target]
        cost = run.trainer.callback_metrics.get("target/loss", math.nan)
        self.rounds.append((target.coordinates.tolist(), float(cost)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[DictionaryPictures, FedDaDiL, Watch, Path]:
    callback, watch, module, folder = DictionaryPictures(), Watch(), build(), tmp_path_factory.mktemp("trained")
    trainer(3, [callback, watch], folder).fit(module, Blobs())
    return callback, module, watch, folder


def test_each_client_has_a_table_and_a_picture_and_the_atoms_have_one(trained):
    *_, watch, folder = trained
    assert {path.name for path in folder.iterdir()} == {
        "dictionary_atoms.png",
        *(f"dictionary_{client}.{kind}" for client in CLIENTS for kind in ("csv", "png")),
    }
    rows = rows_of(folder / f"dictionary_{TARGET}.csv")
    assert [int(row["round"]) for row in rows] == [1, 2], "round 0 gathers the class moments"
    for row in rows:
        coordinates, cost = watch.rounds[int(row["round"])]
        assert [float(row["coordinate_1"]), float(row["coordinate_2"])] == pytest.approx(coordinates)
        assert float(row["transport_cost"]) == pytest.approx(cost, rel=1e-6)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.glob("*.png"))


def test_the_target_is_drawn_next_to_its_reconstruction_by_predicted_classes(trained):
    callback, module, *_ = trained
    figure = callback.plot_client(module, TARGET)
    samples, points = figure.axes[2].collections[:2]
    assert len(samples.get_offsets()) == 30
    assert len(points.get_offsets()) == 16
    assert np.isfinite(samples.get_offsets()).all()
    x = Blobs().parts["val"][TARGET].tensors[0]
    predicted = module(x).argmax(dim=1).tolist()
    colors = [mpl.colormaps["tab10"](label)[:3] for label in predicted]
    np.testing.assert_allclose(samples.get_facecolors()[:, :3], colors)
    _, labels = module.reconstruct(module.target)
    colors = [mpl.colormaps["tab10"](label)[:3] for label in labels.argmax(dim=1).tolist()]
    np.testing.assert_allclose(points.get_facecolors()[:, :3], colors)
    both = torch.cat([x, module.reconstruct(module.target)[0]]).double()
    scores = both - both.mean(dim=0)
    scores = scores @ torch.linalg.svd(scores, full_matrices=False).Vh[:2].T  # of all together, by singular vectors
    np.testing.assert_allclose(np.abs(samples.get_offsets()), scores[:30].abs(), atol=1e-4)


def test_bars_are_shares_of_label_mass(trained):
    callback, module, *_ = trained
    (axis,) = callback.plot_atoms(module).axes
    heights = np.array([[bar.get_height() for bar in bars] for bars in axis.containers])
    labels = module.replicas[module.target].dictionary.labels.detach()
    np.testing.assert_allclose(heights.T, labels.mean(dim=1), atol=1e-6)
    np.testing.assert_allclose(heights.sum(axis=0), 1, atol=1e-6)


@pytest.mark.usefixtures("undrawn")
def test_sources_have_no_plane_and_absent_ones_no_cost(tmp_path):
    callback, module = DictionaryPictures(), build()
    everyone_else = [client for client in CLIENTS if client != "dslr"]
    run = trainer(3, [callback], tmp_path, strategy={"participation": Schedule([CLIENTS, everyone_else, CLIENTS])})
    run.fit(module, Blobs())
    assert len(callback.plot_client(module, "dslr").axes) == 2
    assert math.isnan(callback.rounds["dslr"][1][-1])
    assert callback.rounds["dslr"][2][-1] > 0
    with pytest.raises(ValueError, match="'nowhere'"):
        callback.plot_client(module, "nowhere")


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_resumed_run_has_the_rounds_before(tmp_path):
    def run(folder: str, checkpoint: Path | None = None) -> DictionaryPictures:
        callback = DictionaryPictures()
        saver = ModelCheckpoint(tmp_path / folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        engine = trainer(3, [callback, saver], tmp_path / folder, enable_checkpointing=True, limit_val_batches=0)
        engine.fit(build(), Blobs(), ckpt_path=None if checkpoint is None else str(checkpoint))
        return callback

    straight = run("straight")
    resumed = run("resumed", tmp_path / "straight" / "step=10.ckpt")  # in the middle of a round of 4 steps
    assert resumed.rounds == straight.rounds


def test_other_methods_are_refused(tmp_path):
    other = FedAvg(CLIENTS, TARGET, NUM_CLASSES, MLP(5, [8]))
    with pytest.raises(TypeError, match="FedDaDiL learns, got FedAvg"):
        trainer(1, [DictionaryPictures()], tmp_path).fit(other, Blobs())


def test_fast_dev_run_writes_nothing(tmp_path):
    trainer(1, [DictionaryPictures()], tmp_path, fast_dev_run=True).fit(build(), Blobs())
    assert not list(tmp_path.rglob("dictionary_*"))
