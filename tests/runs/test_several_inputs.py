"""Inputs of several tensors: every method does with them what it does with the same numbers in one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import fedlit
import processes
from fedlit import Client, FederatedModule
from fedlit.callbacks import Calibration, OracleAccuracy, Validators
from fedlit.data import FederatedLoader
from fedlit.data.base import Domain, DomainDataModule
from fedlit.export import export_target, target_model
from fedlit.federation import SampleError
from fedlit.methods import FedAvg, SourceOnly
from fedlit.models import MLP
from helpers import trainer, weights
from method_table import METHODS, ONE_PASS
from own_modules import Simple

CLIENTS, TARGET, NUM_CLASSES = ["a", "b", "t"], "t", 10


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Halves:
    left: Tensor
    right: Tensor


FORMS = {
    "tensor": lambda x: x,
    "dict": lambda x: {"right": x[..., 4:], "left": x[..., :4]},
    "tuple": lambda x: (x[..., :4], x[..., 4:]),
    "named tuple": lambda x: Pair(x[..., :4], x[..., 4:]),
    "dataclass": lambda x: Halves(x[..., :4], x[..., 4:]),
    "nested": lambda x: {"both": [x[..., :4], {"right": x[..., 4:]}]},
}
"""Structures of the same six numbers."""


def joined(inputs: Any) -> Tensor:
    """The six numbers of a batch, whatever their structure."""
    if isinstance(inputs, Tensor):
        return inputs
    if isinstance(inputs, Mapping):
        parts = [inputs[key] for key in sorted(inputs)]
    else:
        parts = [getattr(inputs, f.name) for f in fields(inputs)] if is_dataclass(inputs) else list(inputs)
    return torch.cat([joined(part) for part in parts], dim=1)


class Joining(nn.Module):
    """An extractor that puts the parts of its inputs side by side."""

    out_features = 16

    def __init__(self) -> None:
        super().__init__()
        self.network = MLP(6, [16])

    def forward(self, x: Any) -> Tensor:
        return self.network(joined(x))


class Formed(Dataset[Any]):
    """Samples in a form; read a batch at a time, or one by one."""

    def __init__(self, x: Tensor, y: Tensor, form: str) -> None:
        self.x, self.y, self.form = x, y, form
        self.labelled_indices = None if bool((y >= 0).all()) else (y >= 0).nonzero().squeeze(1)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: Any) -> Any:
        return FORMS[self.form](self.x[index]), self.y[index]


class FormedBatches(Formed):
    augments = False

    def batch(self, indices: Tensor) -> Any:
        return self[indices]


def loaders(form: str, labels: int = 0, batched: bool = True) -> list[FederatedLoader]:
    """To train, validate and predict on."""
    generator = torch.Generator().manual_seed(0)
    kind = FormedBatches if batched else Formed
    parts: list[dict[str, Any]] = [{}, {}]
    for place, part in enumerate(parts):
        for shift, name in enumerate(CLIENTS):
            y = torch.randint(NUM_CLASSES, (60,), generator=generator)
            x = torch.randn(60, 6, generator=generator) + y[:, None] / 3 + 0.3 * shift
            if name == TARGET and not place:
                y = torch.where(torch.arange(60) < labels, y, -1)
            part[name] = kind(x, y, form)
    train, val = parts
    return [
        FederatedLoader(train, 16, seed=0),
        FederatedLoader(val, 60, training=False, seed=0),
        FederatedLoader({TARGET: val[TARGET]}, 60, training=False, seed=0),
    ]


def build(name: str, **extra: Any) -> tuple[FederatedModule, int]:
    """A method of the table, and how many labels the target has."""
    method, given, data = METHODS[name]
    labels = {0: 0, 1.0: 60}.get(data.get("target_labels", 0), 30)
    torch.manual_seed(0)
    clients = [*CLIENTS[:2], Client(TARGET, "target", labelled=labels > 0)]
    return method(clients, TARGET, NUM_CLASSES, Joining(), **(given | extra)), labels


def run(name: str, form: str, batched: bool = True, devices: int = 1, **extra: Any) -> dict[str, Any]:
    """What a run of a method logs and predicts, with all that looks at inputs beside it."""
    module, labels = build(name, **extra)
    train, val, predict = loaders(form, labels, batched)
    watching: list[pl.Callback] = [Calibration(), OracleAccuracy(), Validators()]
    strategy = {} if name in ONE_PASS else {"local_steps": 2}
    rounds = 1 if name in ONE_PASS else 2
    fitted = trainer(rounds, watching, strategy=strategy, devices=devices, check_val_every_n_epoch=rounds)
    fitted.fit(module, train, val)
    metrics = {key: float(value) for key, value in fitted.callback_metrics.items()}
    local = [client.name for client in module.federation.local_clients]
    states = {client: weights(module, client) for client in local}
    found = {"metrics": metrics, "weights": states, "predictions": None}
    if devices == 1:
        found["predictions"] = torch.cat([batch[TARGET] for batch in fitted.predict(module, predict)])
    return found


def assert_alike(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    # tau of a client with too few gradients is NaN
    assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=0, abs=0, nan_ok=True)
    for client, state in ours["weights"].items():
        for name, tensor in state.items():
            assert torch.equal(tensor, theirs["weights"][client][name]), (client, name)
    if ours["predictions"] is not None:
        assert torch.equal(ours["predictions"], theirs["predictions"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n != "FedRFTCA" else ()) for n in METHODS])
def test_a_dictionary_of_tensors_trains_validates_and_predicts_as_one_tensor(name: str) -> None:
    one, several = run(name, "tensor", refine=True), run(name, "dict", refine=True)
    assert {"oracle/target/acc", "validator/trust", "validator/iwv"} <= set(one["metrics"])
    assert one["metrics"]["refine/taken"] in (0, 1)
    # samples of sources that nobody trains tell no temperature
    assert ("target/temperature" in one["metrics"]) == METHODS[name][0].requires.sources
    assert_alike(several, one)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("form", "batched"),
    [("dataclass", True), *(pytest.param(*row, marks=pytest.mark.slow)
                            for row in (("tuple", False), ("named tuple", True), ("nested", False)))],
)  # fmt: skip
def test_other_structures_do_as_well(form: str, batched: bool) -> None:
    one = run("KD3A, votes", "tensor", trust_region=1.0)
    assert_alike(run("KD3A, votes", form, batched, trust_region=1.0), one)


@pytest.mark.multiprocess
@pytest.mark.filterwarnings("ignore")
def test_sources_on_other_processes_see_the_targets_samples_as_their_own_are() -> None:
    alone = run("KD3A, votes", "dict")
    for found in processes.results(run, "KD3A, votes", "dict", True, 3, ranks=3):
        assert found["metrics"] == alone["metrics"]


def test_a_network_that_takes_one_tensor_says_so_at_the_start() -> None:
    module = FedAvg(CLIENTS, TARGET, NUM_CLASSES, MLP(6, [8]))
    message = r"does not take the inputs of"
    with pytest.raises(SampleError, match=message):
        trainer(1).fit(module, loaders("dict")[0])
    assert not module.federation.round_idx


def test_vectorised_training_refuses_several_tensors() -> None:
    module = SourceOnly(CLIENTS, TARGET, NUM_CLASSES, Joining(), vectorize=True)
    with pytest.raises(SampleError, match=r"vectorize=True .* client 'a' are a"):
        trainer(1).fit(module, loaders("dict")[0])


def test_clients_of_other_structures_are_refused() -> None:
    train = loaders("dict")[0]
    train.datasets["b"] = Formed(train.datasets["b"].x, train.datasets["b"].y, "tuple")
    with pytest.raises(ValueError, match=r"client 'b' have shape \[0\] \(4,\)"):
        trainer(1).fit(FedAvg(CLIENTS, TARGET, NUM_CLASSES, Joining()), train)


def test_an_export_names_what_it_cannot_trace(tmp_path: Path) -> None:
    module, _ = build("SourceOnly")
    fitted = trainer(1)
    fitted.fit(module, loaders("dict")[0])
    with pytest.raises(TypeError, match=r"several tensors \(\['left'\] \(4,\), .*target_model\(\) in"):
        export_target(module, tmp_path / "model.pt2", Parted())
    inputs = FORMS["dict"](torch.randn(7, 6))
    expected = module.replicas[TARGET].eval()(inputs).softmax(dim=1)
    torch.testing.assert_close(target_model(module)(inputs), expected)


class Parted(DomainDataModule):
    """Two tensors per sample, or one."""

    def __init__(self, form: str = "dict", **kwargs: Any) -> None:
        super().__init__(target=TARGET, seed=0, **kwargs)
        self.form = form
        self.check_roster()

    def domain_names(self) -> list[str]:
        return CLIENTS

    def class_names(self) -> list[str]:
        return [str(label) for label in range(3)]

    def load(self, domain: str) -> Domain:
        generator = torch.Generator().manual_seed(CLIENTS.index(domain))
        y = torch.randint(3, (40,), generator=generator)
        return Domain(FORMS[self.form](torch.randn(40, 6, generator=generator) + y[:, None]), y)


@pytest.mark.parametrize("pool", [False, True])
def test_a_data_module_may_have_several_tensors_per_sample(pool: bool) -> None:
    found = []
    for form in ("tensor", "dict"):
        data = Parted(form, pool_sources=pool)
        torch.manual_seed(0)
        fitted = trainer(2)
        fitted.fit(module := SourceOnly(data.clients, TARGET, 3, Joining()), data)
        found.append((fitted.callback_metrics, [*module.replicas[TARGET].parameters()]))
        assert len(data.plot().axes) == 2
    assert found[0][0] == found[1][0]
    assert all(torch.equal(*pair) for pair in zip(found[0][1], found[1][1], strict=True))
    assert "input ['left'] (4,), ['right'] (2,)" in str(data)


class Mine(Simple):
    """A loss that numbers of other rows would go into unseen."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(Joining(), nn.Linear(16, 3)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0]).mean(dim=0, keepdim=True)
        return F.cross_entropy(logits.expand(len(batch[1]), -1), batch[1])


@pytest.mark.parametrize("form", ["tensor", "dict", "nested"])
def test_a_module_of_ones_own_trains_on_the_labelled_samples_alone(form: str) -> None:
    def fit(form: str, all_samples: bool) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        data = {}
        for name in CLIENTS:
            x, y = torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator)
            if name == TARGET:
                known = torch.arange(16) % 2 == 0
                y = torch.where(known, y, -1)
                if not all_samples:
                    x, y = x[known], y[known]
            data[name] = Formed(x, y, form)
            data[name].labelled_indices = None  # as of a dataset that does not list them
        torch.manual_seed(0)
        clients = [*CLIENTS[:2], Client(TARGET, "target", labelled=True)]
        module = fedlit.Federated(Mine(), clients, TARGET, 3, weighting="uniform")
        trainer(1).fit(module, FederatedLoader(data, 16, seed=0))
        return [*module.replicas["a"].parameters()]

    for ours, theirs in zip(fit(form, True), fit("tensor", False), strict=True):
        torch.testing.assert_close(ours, theirs)
