"""Conformal intervals in real runs: against numpy on residuals in one place, on any backend, and in what they leave."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import Adam
from torch.utils.data import TensorDataset

import processes
from backends import backend
from fedlit.callbacks import ConformalIntervals, OracleAccuracy, TargetPredictions, closing_table, summarise
from fedlit.callbacks.report.run import blocks_of
from fedlit.callbacks.report.run_folder import RunFolder
from fedlit.data import FederatedLoader
from fedlit.data.base import Domain
from fedlit.export import export_target
from fedlit.federation import ChannelError, RosterError
from fedlit.methods import FedAvg, FedDANN
from fedlit.models import MLP
from fedlit.privacy import FixedPoint, GaussianMechanism, PairwiseMasking, Plain
from helpers import samples_of, trainer
from refused import refused
from small_federation import Blobs, build
from two_numbers import NAMES, PLANTS, Measured


class Plants(Measured):
    """With noise, of which the last plant has four times as much."""

    def load(self, domain: str) -> Domain:
        place = PLANTS.index(domain)
        generator = torch.Generator().manual_seed(place)
        x = torch.randn(100 + 40 * place, 3, generator=generator)
        noise = (2.0 if domain == "turin" else 0.5) * torch.randn(len(x), 2, generator=generator)
        y = (x[:, :2] + noise).double() * torch.tensor([1e3, 0.01]) + torch.tensor([1e6, 0.0])
        return Domain(x, y)


def plants(**given: Any) -> Plants:
    return Plants(**({"target": "turin", "val_fraction": 0.3, "seed": 0} | given))


def fit(
    folder: Path, rounds: int = 2, alpha: float = 0.1, method: Any = FedAvg, callbacks: Any = (), **kwargs: Any
) -> Any:
    data = kwargs.pop("data", None) or plants()
    torch.manual_seed(0)
    module = method(
        data.clients, data.target, 2, MLP(data.in_features, [8]), task="regression",
        optimizer=lambda params: Adam(params, lr=0.05),
    )  # fmt: skip
    watching = [ConformalIntervals(alpha), OracleAccuracy(), TargetPredictions(str(folder / "p.csv")), *callbacks]
    run = trainer(rounds, watching, **kwargs)
    run.fit(module, data)
    return run, module, data


def residuals(module: Any, data: Any, client: str, stage: str = "val") -> Any:
    x, y = samples_of(data, client, stage)
    with torch.no_grad():
        return (module.task.in_unit(client, module.replicas[client](x)) - y).abs().numpy()


def radius_of(module: Any) -> Any:
    return module.run.outputs.intervals.radius.numpy()


@pytest.mark.parametrize(("alpha", "method"), [(0.1, FedAvg), (0.25, FedDANN)])
def test_the_radius_is_that_of_all_residuals_in_one_place(alpha: float, method: Any, tmp_path: Path) -> None:
    run, module, data = fit(tmp_path, alpha=alpha, method=method)
    pooled = np.sort(np.concatenate([residuals(module, data, name) for name in ("essen", "lyon")]), axis=0)
    exact = pooled[math.ceil((1 - alpha) * (len(pooled) + 2)) - 1]
    found = radius_of(module)
    assert (found >= exact).all()
    assert (found - exact <= 2.0 ** np.floor(np.log2(exact)) / 256).all()
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    assert [logged[f"target/radius/{name}"] for name in NAMES] == pytest.approx(found.tolist())
    assert logged["target/radius"] == pytest.approx(found.mean())
    shares = (residuals(module, data, "turin") <= found).mean(axis=0)
    assert [logged[f"oracle/target/coverage/{name}"] for name in NAMES] == pytest.approx(shares.tolist())
    assert logged["oracle/target/coverage"] == pytest.approx(shares.mean())


def test_new_samples_of_the_sources_are_held_and_those_of_another_target_are_not(tmp_path: Path) -> None:
    run, module, data = fit(tmp_path, rounds=10, data=plants(test_fraction=0.3))
    held = np.concatenate([residuals(module, data, name, "test") for name in ("essen", "lyon")]) <= radius_of(module)
    assert held.mean() > 0.8  # of 72 samples and two numbers, on average of seeds at least 0.9
    run.test(module, data, verbose=False)
    summary = summarise(run, module, 1.0)
    assert summary.oracle_coverage is not None
    assert summary.oracle_coverage < 0.7  # four times the noise
    assert (summary.alpha, set(summary.oracle_outputs["wear"])) == (0.1, {"r2", "rmse", "mae", "coverage"})
    assert type(summary).from_json(summary.to_json()) == summary
    share = f"{100 * summary.oracle_coverage:.1f}%"
    note = (
        f"to hold 90% of samples like the sources' hold {share} of the target's (oracle), for which nothing is promised"
    )
    assert any(note in line for line in closing_table([summary]).footnotes)
    final = {name: float(value) for name, value in run.callback_metrics.items()}
    blocks = blocks_of(RunFolder("run", summary, {}, {}, final, None, None, {}, ()), "run")
    (text,) = [each.text for each in blocks if "Intervals" in str(getattr(each, "text", ""))]
    assert "radius/wear" in text
    assert "at least 90% of new samples" in text
    assert f"they hold {share} (ORACLE)" in text
    assert "nothing is promised" in text


@pytest.mark.parametrize(
    "name", ["masking", "grid", *(pytest.param(n, marks=pytest.mark.slow) for n in ("paillier", "bfv", "ckks"))]
)
def test_every_backend_finds_the_same_radius(name: str, tmp_path: Path) -> None:
    privacy = Plain(FixedPoint(16)) if name == "grid" else backend(name)
    channels = ("weights", "label_statistics")
    _, plain, _ = fit(tmp_path)
    _, module, _ = fit(tmp_path, strategy={"privacy": dict.fromkeys(channels, Plain()) | {"intervals": privacy}})
    assert (radius_of(module) == radius_of(plain)).all()
    sent = [entry for entry in module.federation.ledger if entry.channel == "intervals"]
    if name == "masking":
        assert module.federation.channels["intervals"].description.backend == "PairwiseMasking"
        assert {entry.receiver for entry in sent} == {"server", *PLANTS}


def test_predictions_checkpoints_and_files_have_the_intervals(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="last")
    _, module, data = fit(tmp_path, callbacks=[saver], enable_checkpointing=True)
    radius = radius_of(module)
    again = FedAvg(data.clients, data.target, 2, MLP(data.in_features, [8]), task="regression")
    trainer(1, [TargetPredictions(str(tmp_path / "p.csv"))]).predict(again, data, ckpt_path=saver.best_model_path)
    with (tmp_path / "p.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["id", *NAMES, "wear_lower", "wear_upper", "heat_lower", "heat_upper"]
    table = np.array(rows, dtype=float)[:, 1:]
    for place in (0, 1):
        lower, upper = table[:, 2 + 2 * place], table[:, 3 + 2 * place]
        np.testing.assert_allclose(lower, table[:, place] - radius[place], rtol=1e-9)
        np.testing.assert_allclose(upper, table[:, place] + radius[place], rtol=1e-9)
    export_target(again, tmp_path / "target.pt2", data)
    files = {"fedlit.json": ""}
    torch.export.load(tmp_path / "target.pt2", extra_files=files)
    about = json.loads(files["fedlit.json"])["intervals"]
    assert (about["alpha"], about["radius"]) == (0.1, radius.tolist())
    card = (tmp_path / "target.pt2.md").read_text()
    assert f"Intervals: wear ± {radius[0]:.6g} and heat ± {radius[1]:.6g}." in card
    assert "nothing is promised" in card
    assert "nothing is promised" in about["promise"]


@pytest.mark.slow
def test_onnx_has_the_intervals_in_its_metadata(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    _, module, data = fit(tmp_path, rounds=1)
    export_target(module, tmp_path / "target.onnx", data)
    properties = {each.key: each.value for each in onnx.load(tmp_path / "target.onnx").metadata_props}
    assert json.loads(properties["fedlit.intervals"])["radius"] == radius_of(module).tolist()


def test_without_intervals_files_are_as_before(tmp_path: Path) -> None:
    data = plants()
    module = FedAvg(data.clients, data.target, 2, MLP(data.in_features, [8]), task="regression")
    run = trainer(1, [TargetPredictions(str(tmp_path / "p.csv"))])
    run.fit(module, data)
    run.predict(module, data)
    assert (tmp_path / "p.csv").read_text().splitlines()[0] == "id,wear,heat"
    export_target(module, tmp_path / "target.pt2", data)
    assert "Intervals" not in (tmp_path / "target.pt2.md").read_text()


class Kept(pl.Callback):
    """Remembers whether there are intervals while a round trains."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen.append(pl_module.run.outputs.intervals is not None)


def test_intervals_are_those_of_the_weights_that_were_validated(tmp_path: Path) -> None:
    """A round forgets them, with the callback or without, and a run that ends without a validation has none."""
    kept, saver = Kept(), ModelCheckpoint(tmp_path, filename="last")
    _, module, data = fit(tmp_path, callbacks=[kept, saver], enable_checkpointing=True)
    assert not any(kept.seen)
    assert module.run.outputs.intervals is not None
    more = trainer(3, limit_val_batches=0)
    more.fit(module, data, ckpt_path=saver.best_model_path)
    assert module.run.outputs.intervals is None
    with pytest.warns(UserWarning, match="no intervals"):
        _, module, _ = fit(tmp_path, rounds=3, check_val_every_n_epoch=2)
    assert module.run.outputs.intervals is None


def test_a_network_that_has_diverged_has_intervals_without_end(tmp_path: Path) -> None:
    run, module, data = fit(tmp_path, rounds=1)
    with torch.no_grad():
        next(module.replicas["essen"].parameters()).fill_(torch.nan)
    run.validate(module, data, verbose=False)
    assert (radius_of(module) == np.inf).all()


class FewLeft(Plants):
    """Sources of which one has no validation samples."""

    def val_dataloader(self) -> Any:
        own = {name: TensorDataset(*samples_of(self, name, "val")) for name in ("lyon", "turin")}
        return FederatedLoader(own, batch_size=64, training=False, guarded="turin", seed=0)


def test_a_source_without_validation_samples_does_not_count(tmp_path: Path) -> None:
    data = FewLeft(target="turin", val_fraction=0.3, seed=0)
    _, module, _ = fit(tmp_path, data=data)
    exact = np.sort(residuals(module, data, "lyon"), axis=0)
    exact = exact[math.ceil(0.9 * (len(exact) + 1)) - 1]
    assert (radius_of(module) >= exact).all()
    assert (radius_of(module) <= exact * (1 + 1 / 256)).all()


@pytest.mark.parametrize("alpha", [0.0, 1.0, 1.5, math.nan])
def test_a_share_that_is_none_is_refused(alpha: float) -> None:
    with refused("alpha"):
        ConformalIntervals(alpha)


def test_what_has_no_intervals_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RosterError, match=r"at least 198 validation samples .* have 72: raise"):
        fit(tmp_path, alpha=0.01)
    with pytest.raises(ValueError, match="task='regression'"):
        trainer(1, [ConformalIntervals()]).fit(build(), Blobs())
    with pytest.raises(ValueError, match="before OracleAccuracy"):
        trainer(1, [OracleAccuracy(), ConformalIntervals()]).fit(fit(tmp_path)[1], plants())
    with refused("fraction_bits"):
        fit(tmp_path, strategy={"privacy": Plain(FixedPoint(12))})
    noise = GaussianMechanism(clip_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(ChannelError, match="cannot blur channel 'intervals'"):
        fit(tmp_path, strategy={"differential_privacy": {"weights": noise, "intervals": noise}})


@pytest.mark.parametrize("state", [[1.0], {"alpha": 2.0, "radius": [1.0, 1.0]}, {"alpha": 0.1, "radius": [-1.0, 1.0]}])
def test_intervals_of_a_checkpoint_that_are_none_are_refused(state: Any, tmp_path: Path) -> None:
    run, module, data = fit(tmp_path, rounds=1)
    run.save_checkpoint(tmp_path / "x.ckpt")
    stored = torch.load(tmp_path / "x.ckpt", weights_only=True)
    stored["clients"]["turin"]["intervals"] = state
    torch.save(stored, tmp_path / "x.ckpt")
    with refused("intervals", RosterError):
        run.predict(module, data, ckpt_path=str(tmp_path / "x.ckpt"))


def seen(folder: Path, devices: int, placement: Any = None) -> dict[str, Any]:
    """What this process has of a run on so many, through masks."""
    strategy = {"privacy": PairwiseMasking(colluders=0), "placement": placement}
    run, module, _ = fit(folder, devices=devices, strategy=strategy)
    logged = {key: float(value) for key, value in run.callback_metrics.items() if "grad_norm" not in key}
    intervals = module.run.outputs.intervals
    local = module.federation.is_local(module.target)
    return {"logged": logged, "own": None if not local else intervals.state()}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("placement", [None, [[], PLANTS]], ids=str)
def test_two_processes_find_what_one_finds(placement: Any, tmp_path: Path) -> None:
    (alone,) = processes.results(seen, tmp_path, 1, ranks=1)
    first, second = processes.results(seen, tmp_path, 2, placement, ranks=2)
    assert first["logged"] == second["logged"] == alone["logged"]
    assert (first["own"] or second["own"]) == alone["own"]
