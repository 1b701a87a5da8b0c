"""Labels of any unit: networks learn them standardised, by statistics that clients sum, and predict in their unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import mean_squared_error, r2_score
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, TensorDataset

import fedlit
from backends import backend
from fedlit import Client, FederatedModule
from fedlit.callbacks import OracleAccuracy, TargetPredictions
from fedlit.data import HeartDisease
from fedlit.data.base import Domain
from fedlit.export import export_target, target_model
from fedlit.federation import ChannelError, RosterError
from fedlit.methods import FedAvg, FedDANN, SourceOnly
from fedlit.models import MLP, Features
from fedlit.privacy import FixedPoint, GaussianMechanism, PairwiseMasking, Plain
from helpers import QUIET, build, descend_, loader, normalised_head, same, samples_of, trainer, weights
from method_table import METHODS, one_of_each
from own_modules import Simple
from site_runs import merged, start
from stars import plain, struck

NAMES = ["c0", "c1", "c2"]
CHANNEL = "label_statistics"


class Hearts(HeartDisease):
    """Heart rates in another unit: ``factor`` times the numbers, and ``offset``."""

    def __init__(self, factor: float = 1.0, offset: float = 0.0, **kwargs: Any) -> None:
        self.factor, self.offset = factor, offset
        super().__init__(**({"predict": "heart_rate", "seed": 0} | kwargs))

    def load(self, domain: str) -> Domain:
        found = super().load(domain)
        return Domain(found.x, found.y.double() * self.factor + self.offset)


def numbers(offset: float = 1e6, factor: float = 1e3, outputs: int = 1, seed: int = 0) -> dict[str, TensorDataset]:
    """Three clients of 60, 40 and 50 samples; labels are linear in the inputs, with an own level at each."""
    generator = torch.Generator().manual_seed(seed)
    data = {}
    for level, (name, size) in enumerate(zip(NAMES, (60, 40, 50), strict=True)):
        x = torch.randn(size, 5, generator=generator)
        y = x[:, :outputs].double() + 0.5 * level
        data[name] = TensorDataset(x, (offset + factor * y).squeeze(1))
    return data


def module_of(method: type[FederatedModule] = SourceOnly, outputs: int = 1, **kwargs: Any) -> FederatedModule:
    torch.manual_seed(0)
    given: dict[str, Any] = {"task": "regression", "optimizer": lambda params: Adam(params, lr=0.02)}
    return method(NAMES, "c2", outputs, MLP(5, [8]), **(given | kwargs))


def fitted(
    data: Mapping[str, TensorDataset], rounds: int = 2, run: pl.Trainer | None = None, **kwargs: Any
) -> FederatedModule:
    module = module_of(**kwargs)
    (run or trainer(rounds)).fit(module, loader(dict(data), 16), loader(dict(data), 64, training=False))
    return module


def pooled(data: Mapping[str, TensorDataset], clients: Sequence[str] = ("c0", "c1")) -> np.ndarray:
    return np.concatenate([data[name].tensors[1].double().reshape(len(data[name]), -1).numpy() for name in clients])


@pytest.mark.parametrize(
    "name", ["plain", "grid", "masking", *(pytest.param(n, marks=pytest.mark.slow) for n in ("paillier", "ckks"))]
)
def test_the_scale_is_that_of_all_samples_of_the_sources_under_every_backend(name: str) -> None:
    """Seven outputs: of deviation 1 at 1e9, of thousands, tiny, one outlier, of two levels, constant, and 0."""
    privacy = {"plain": None, "grid": Plain(FixedPoint())}[name] if name in ("plain", "grid") else backend(name)
    data = {}
    rng = np.random.default_rng(0)
    for level, client in enumerate(NAMES):
        z = rng.standard_normal((40 + 20 * level, 7))
        y = z * [1, 1e3, 1e-6, 1, 1, 0, 0] + [1e9, 5e3, 0, 0, 100 * level, 12345.678, 0]
        y[0, 3] += 1e5 * (level == 0)
        data[client] = TensorDataset(torch.randn(len(y), 5), torch.from_numpy(y))
    module = fitted(data, 1, trainer(1, strategy={"privacy": privacy}), outputs=7)
    (scale, *others) = module.task.scales.values()  # type: ignore[union-attr]
    assert len(others) == 2
    assert all(torch.equal(scale.mean, each.mean) and torch.equal(scale.deviation, each.deviation) for each in others)
    mean, deviation = pooled(data).mean(axis=0), pooled(data).std(axis=0)
    deviation[-2:] = 1.0  # labels that are all alike keep their unit
    np.testing.assert_allclose(scale.deviation.numpy(), deviation, rtol=1e-3)
    assert (np.abs(scale.mean.numpy() - mean) / deviation).max() < 1e-3
    if name == "plain":
        np.testing.assert_allclose(scale.deviation.numpy(), deviation, rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "counted"), [("SourceOnly", 0), ("FedAvg", 20), ("FedDANN", 20), ("FinetuneOffline", 0)]
)
def test_labels_of_a_target_count_where_it_learns_from_them(name: str, counted: int) -> None:
    method, arguments, _ = METHODS[name]
    data = Hearts(1e3, 1e6, target_labels=20)
    module = build(method, data, extractor=MLP(data.in_features, [8]), task="regression", **arguments)  # type: ignore[arg-type]
    trainer(1).fit(module, data)
    sources = [client.name for client in data.clients if not client.is_target]
    parts = [data.labels(source)[data.split(source).train] for source in sources]
    parts.append(data.labels(data.target)[data.split(data.target).labelled[:counted]])
    y = torch.cat(parts).numpy()
    scale = module.task.scales["cleveland"]  # type: ignore[union-attr]
    np.testing.assert_allclose([float(scale.mean), float(scale.deviation)], [y.mean(), y.std()], rtol=1e-9)


REGRESSING = {
    name: row
    for name, row in METHODS.items()
    if row[0].requires.tasks != ("classification",)
    and name not in ("FedDANN, conditional", "AdaBN, mixing")  # which are about classes
}


def hearts_of(name: str, factor: float, offset: float) -> tuple[FederatedModule, Hearts, pl.Trainer]:
    method, arguments, of_data = METHODS[name]
    data = Hearts(factor, offset, **of_data)
    given = dict(arguments)
    if "classifier" in given:
        given["classifier"] = normalised_head(8, 1)
    torch.manual_seed(0)
    module = build(
        method, data, extractor=MLP(data.in_features, [8]), task="regression",
        optimizer=lambda params: SGD(params, lr=0.05), **given,
    )  # type: ignore[arg-type]  # fmt: skip
    run = trainer(2, [OracleAccuracy()], strategy={"local_steps": 3})
    run.fit(module, data)
    return module, data, run


@pytest.mark.parametrize("name", one_of_each(REGRESSING))
def test_a_thousand_times_the_labels_and_a_million_more_train_alike(name: str) -> None:
    module, data, run = hearts_of(name, 1.0, 0.0)
    other, others, rerun = hearts_of(name, 1e3, 1e6)
    for client in data.clients:
        for key, tensor in weights(module, client.name).items():
            torch.testing.assert_close(weights(other, client.name)[key], tensor, atol=2e-5, rtol=2e-5)
    metrics, again = run.callback_metrics, rerun.callback_metrics
    trained = [client for client in data.clients if not client.is_target and module.requires.sources]
    for key in ("oracle/target/r2", *(f"source/{client.name}/r2" for client in trained), "train/loss"):
        assert float(again[key]) == pytest.approx(float(metrics[key]), abs=1e-4)
    assert float(again["oracle/target/loss"]) == pytest.approx(1e6 * float(metrics["oracle/target/loss"]), rel=1e-3)
    x = torch.randn(7, data.in_features)
    torch.testing.assert_close(other(x), 1e3 * module(x) + 1e6, atol=0.1, rtol=0)
    assert others.labels(data.target).mean() > 9e5


class OwnLoss(SourceOnly):
    """A method of somebody's, which knows nothing of tasks."""

    def loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        return F.mse_loss(self.replicas[client](batch[0])[:, 0].double(), batch[1])


def test_a_loss_that_a_method_writes_itself_reads_standardised_labels() -> None:
    data = numbers()
    ours, theirs = fitted(data, 5), fitted(data, 5, method=OwnLoss)
    for key, tensor in weights(ours, "c2").items():
        torch.testing.assert_close(weights(theirs, "c2")[key], tensor, atol=1e-5, rtol=1e-5)
    x = data["c2"].tensors[0]
    torch.testing.assert_close(theirs(x), ours(x), atol=1.0, rtol=0)


def test_whatever_a_user_sees_is_in_the_unit_of_the_labels(tmp_path: Path) -> None:
    data = Hearts(1e3, 1e6, transductive=True)
    module = build(
        SourceOnly, data, extractor=MLP(data.in_features, [8]), task="regression",
        optimizer=lambda params: Adam(params, lr=0.02),
    )  # type: ignore[arg-type]  # fmt: skip
    run = trainer(3, [OracleAccuracy(), TargetPredictions(tmp_path / "predictions.csv")])
    run.fit(module, data)
    x, y = samples_of(data, data.target)
    first = module.replicas[data.target](x).detach().double()[:, 0]
    train = torch.cat([data.labels(c.name)[data.split(c.name).train] for c in data.clients if not c.is_target])
    expected = first * train.std(correction=0) + train.mean()
    torch.testing.assert_close(module(x)[:, 0], expected, atol=1e-3, rtol=0)
    assert module(x).dtype == torch.float64
    (predicted,) = run.predict(module, data)  # type: ignore[misc]
    torch.testing.assert_close(predicted[data.target][:, 0], expected, atol=1e-3, rtol=0)
    run.test(module, data, verbose=False)
    error = mean_squared_error(y.numpy(), expected.numpy())
    assert float(run.callback_metrics["oracle/target/loss"]) == pytest.approx(error, rel=1e-5)
    written = np.loadtxt(tmp_path / "predictions.csv", delimiter=",", skiprows=1)[:, 1]
    np.testing.assert_allclose(written, expected.numpy(), atol=1e-3)
    torch.testing.assert_close(target_model(module)(x)[:, 0], expected, atol=1e-3, rtol=0)
    export_target(module, tmp_path / "target.pt2", data.input_shape)
    torch.testing.assert_close(
        torch.export.load(tmp_path / "target.pt2").module()(x)[:, 0], expected, atol=1e-3, rtol=0
    )
    assert "float64: the numbers, in the unit of the labels" in (tmp_path / "target.pt2.md").read_text()


def sent(module: FederatedModule) -> int:
    return module.federation.ledger.bytes_by_channel().get(CHANNEL, 0)


@pytest.fixture(scope="module")
def two_rounds(tmp_path_factory: pytest.TempPathFactory) -> tuple[FederatedModule, Path]:
    """A module after two rounds, and its checkpoint."""
    run, path = trainer(2), tmp_path_factory.mktemp("run") / "two.ckpt"
    module = fitted(numbers(), run=run)
    run.save_checkpoint(path)
    return module, path


def test_a_run_that_resumes_sends_nothing_again_and_trains_the_same(two_rounds: tuple[FederatedModule, Path]) -> None:
    half, path = two_rounds
    resumed, whole = module_of(), module_of()
    trainer(4).fit(resumed, loader(numbers(), 16), ckpt_path=path)
    trainer(4).fit(whole, loader(numbers(), 16))
    assert same(weights(resumed, "c2"), weights(whole, "c2"))
    assert sent(resumed) == sent(whole) == sent(half) > 0
    kept = torch.load(path, weights_only=True)["clients"]
    assert kept["c0"]["label_scale"] == kept["c2"]["label_scale"] == half.task.scales["c0"].state()  # type: ignore[union-attr]


def test_a_checkpoint_brings_the_unit_of_its_labels(two_rounds: tuple[FederatedModule, Path]) -> None:
    (trained, path), data, module = two_rounds, numbers()["c2"], module_of()
    x = data.tensors[0]
    (found,) = trainer(1).predict(module, loader({"c2": data}, 64, training=False), ckpt_path=path)  # type: ignore[misc]
    torch.testing.assert_close(found["c2"], trained(x).detach())
    loaded = SourceOnly.load_from_checkpoint(
        path, clients=NAMES, extractor=MLP(5, [8]), weights_only=True, optimizer=lambda params: Adam(params, lr=0.02)
    )
    torch.testing.assert_close(loaded(x), trained(x))
    assert {sent(module), sent(loaded)} <= {0, sent(trained)}  # which the checkpoint has noted


@pytest.mark.parametrize(
    "state", [{"mean": [0.0], "deviation": [0.0]}, {"mean": [0.0, 1.0], "deviation": [1.0, 1.0]}, [1]]
)
def test_a_scale_that_is_none_is_refused(state: Any, two_rounds: tuple[FederatedModule, Path], tmp_path: Path) -> None:
    checkpoint, path = torch.load(two_rounds[1], weights_only=True), tmp_path / "run.ckpt"
    checkpoint["clients"]["c1"]["label_scale"] = state
    torch.save(checkpoint, path)
    with pytest.raises(RosterError, match=r"scale of labels must have the"):
        trainer(3).fit(module_of(), loader(numbers(), 16), ckpt_path=path)


@pytest.mark.multiprocess
def test_three_processes_give_what_one_gives() -> None:
    arguments = ("--method", "FedAvg", "--numbers", "--own", "--rounds", "2", "--steps", "4")
    (alone,) = start(*arguments)
    results = start(*arguments, "--devices", "3")
    assert merged(results) == alone["weights"]
    assert {name: scale for each in results for name, scale in each["scales"].items()} == alone["scales"]
    for result in results:
        assert result["ledger"] == alone["ledger"]
        assert result["metrics"] == alone["metrics"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_site_that_comes_back_with_nothing_has_the_scale_of_all(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    arguments = ("--method", "FedAvg", "--numbers", "--own", "--everyone", "--rounds", "8", "--steps", "2")
    kept = ("--checkpoints", str(tmp_path / "kept"), "--pause", "0.3", "--again", "none")
    ended = struck(tmp_path, "clean:local steps:4:kill", *arguments, *kept, back=True)
    for name in ("server", "blended", "fonts", "back"):
        assert not ended[name].error, ended[name].error
    back, others = plain(ended["back"].result), plain(ended["blended"].result)
    assert back["scales"]["clean"] == others["scales"]["blended"]
    assert back["weights"]["clean"] == others["weights"]["blended"]


def test_labels_are_left_as_they_are_if_one_says_so() -> None:
    data = numbers(100.0, 1.0)
    module = fitted(data, 1, scale_labels=False)
    assert CHANNEL not in module.federation.channels
    first = module_of(scale_labels=False)
    first.configure_model()
    x = data["c2"].tensors[0]
    assert abs(float(first(x).mean())) < 1
    torch.testing.assert_close(module(x), module.replicas["c2"](x).double())


class Numbers(Simple):
    """Somebody's, which scales by itself."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1)))
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return 1e6 + 1e3 * self.net(x)[:, 0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(float(batch[1].mean()))
        return F.mse_loss(self.net(batch[0])[:, 0].double(), (batch[1] - 1e6) / 1e3)

    def configure_optimizers(self) -> Any:
        return Adam(self.parameters(), lr=0.1)


def test_a_module_of_ones_own_is_given_labels_as_they_are_and_its_numbers_are_taken_so() -> None:
    torch.manual_seed(0)
    data = numbers()
    module = fedlit.Federated(Numbers(), NAMES, "c2", 1, task="regression")
    run = trainer(12, [OracleAccuracy()])
    run.fit(module, loader(dict(data), 16), loader(dict(data), 64, training=False))
    assert min(module.replicas["c0"].extractor.seen) > 9e5
    assert CHANNEL not in module.federation.channels
    x, y = data["c2"].tensors
    expected = r2_score(y.numpy(), module(x).detach()[:, 0].numpy())
    assert float(run.callback_metrics["oracle/target/r2"]) == pytest.approx(expected, abs=1e-6)
    assert float(run.callback_metrics["source/r2"]) > 0.8


def test_a_module_of_ones_own_is_loaded_again_and_takes_no_scale(tmp_path: Path) -> None:
    data, path = numbers(), tmp_path / "run.ckpt"
    module, run = fedlit.Federated(Numbers(), NAMES, "c2", 1, task="regression"), trainer(1)
    run.fit(module, loader(dict(data), 16))
    run.save_checkpoint(path)
    again = fedlit.Federated.load_from_checkpoint(path, clients=NAMES, module=Numbers(), weights_only=True)
    x = data["c2"].tensors[0]
    torch.testing.assert_close(again(x), module(x))
    with pytest.raises(ValueError, match=r"Federated takes no scale_labels: training_step of"):
        fedlit.Federated(Numbers(), NAMES, "c2", 1, task="regression", scale_labels=True)


def test_a_loader_of_another_kind_is_warned_of() -> None:
    data = numbers(0.0, 1.0)
    from lightning.pytorch.utilities import CombinedLoader

    batches = CombinedLoader({name: DataLoader(each, 16) for name, each in data.items()}, "min_size")
    module = module_of(FedAvg, weighting="uniform")
    with pytest.warns(UserWarning, match=r"labels are learnt in the unit"):
        pl.Trainer(**QUIET, max_epochs=1).fit(module, batches)


def test_labels_whose_deviation_is_too_small_to_be_found_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"labels of client 'c0' differ by"):
        fitted(numbers(0.0, 1e-25))


def unlabelled() -> dict[str, TensorDataset]:
    data = numbers()
    data["c1"].tensors[1][3] = torch.nan
    return data


NOISE = GaussianMechanism(clip_norm=1.0, noise_multiplier=1.0)


@pytest.mark.parametrize(
    ("data", "run", "outputs", "message"),
    [
        (unlabelled(), {}, 1, r"source 'c1' have no label \(NaN in row 3"),
        (numbers(outputs=2), {}, 1, r"labels of client 'c0' .* num_classes=2"),
        (numbers(), {"precision": "bf16-true"}, 1, r"precision='bf16-true' rounds labels of client 'c0'"),
        (numbers(), {"strategy": {"differential_privacy": NOISE}}, 1, "cannot blur channel .*scale_labels=False and"),
    ],
)
def test_labels_without_a_scale_are_refused(data: Any, run: dict[str, Any], outputs: int, message: str) -> None:
    with pytest.raises(RosterError, match=message):
        fitted(data, run=trainer(1, **run), outputs=outputs)


def test_a_lone_source_cannot_hide_its_statistics() -> None:
    data = {name: numbers(0.0, 1.0)[name] for name in ("c0", "c2")}

    def run(method: type[FederatedModule], labelled: bool, **kwargs: Any) -> FederatedModule:
        clients = [Client("c0"), Client("c2", role="target", labelled=labelled)]
        module = method(clients, "c2", 1, MLP(5, [8]), task="regression", **kwargs)
        trainer(1, strategy={"privacy": PairwiseMasking(colluders=0)}).fit(module, loader(data, 16))
        return module

    with pytest.raises(ChannelError, match=r"\['c0'\] alone can send over channel 'label_statistics'"):
        run(FedDANN, labelled=False)
    assert sent(run(FedDANN, labelled=False, scale_labels=False)) == 0
    module = run(FedAvg, labelled=True)  # a target that learns from labels sends the statistics of its own, too
    y = pooled(data, ("c0", "c2"))
    assert float(module.task.scales["c0"].mean) == pytest.approx(y.mean(), abs=1e-3)  # type: ignore[union-attr]


def test_one_step_of_each_source_is_one_of_its_mean_squared_error() -> None:
    """Of labels less the mean of all sources' training labels, over their deviation; features are the inputs."""
    data = Hearts(batch_size=1000)
    given: dict[str, Any] = {"extractor": Features(data.in_features), "classifier": nn.Linear(data.in_features, 1)}
    given |= {"optimizer": lambda params: SGD(params, lr=0.01), "weighting": "uniform", "task": "regression"}
    module, first = build(SourceOnly, data, **given), build(SourceOnly, data, **given)  # type: ignore[arg-type]
    trainer(1).fit(module, data)
    first.configure_model()
    sources = ("cleveland", "hungary", "switzerland")
    everything = torch.cat([samples_of(data, client, "train")[1] for client in sources])
    for client in sources:
        x, y = samples_of(data, client, "train")
        y = (y - everything.mean()) / everything.std(correction=0)
        replica = first.replicas[client]
        descend_(((replica(x)[:, 0] - y) ** 2).mean(), replica.parameters(), 0.01)
    nets = [module.replicas[data.target], *(first.replicas[source] for source in sources)]
    for ours, *theirs in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs).mean(dim=0))
