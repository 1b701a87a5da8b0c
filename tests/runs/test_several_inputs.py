"""Inputs of several tensors: every method does with them what it does with the same numbers in one tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedlit
import processes
import several_inputs
from fedlit import Client
from fedlit.data import FederatedLoader
from fedlit.data.base import Domain, DomainDataModule
from fedlit.export import export_target, target_model
from fedlit.federation import SampleError
from fedlit.methods import FedAvg, SourceOnly
from fedlit.models import MLP
from helpers import trainer
from method_table import METHODS
from own_modules import Simple
from several_inputs import CLIENTS, FORMS, NUM_CLASSES, TARGET, Formed, Joining, loaders, run

SHOWN = ("FedAvg", "FedDANN", "FedMMD", "FedRFTCA")


def assert_alike(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["metrics"] == theirs["metrics"]
    for client, state in ours["weights"].items():
        for name, tensor in state.items():
            assert torch.equal(tensor, theirs["weights"][client][name]), (client, name)
    if ours["predictions"] is not None:
        assert torch.equal(ours["predictions"], theirs["predictions"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SHOWN else pytest.mark.slow) for n in METHODS])
def test_a_dictionary_of_tensors_trains_validates_and_predicts_as_one_tensor(name: str) -> None:
    one, several = run(name, "tensor", refine=True), run(name, "dict", refine=True)
    assert {"oracle/target/acc", "target/temperature", "validator/trust", "validator/iwv"} <= set(one["metrics"])
    assert one["metrics"]["refine/taken"] in (0, 1)
    assert_alike(several, one)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("tensor", "dict")])
def test_other_structures_do_as_well(form: str) -> None:
    one = run("KD3A, votes", "tensor", trust_region=1.0)
    assert_alike(run("KD3A, votes", form, trust_region=1.0), one)
    if form != "dataclass":
        assert_alike(run("KD3A, votes", form, False, trust_region=1.0), one)


@pytest.mark.multiprocess
@pytest.mark.filterwarnings("ignore")
def test_sources_on_other_processes_see_the_targets_samples_as_their_own_are() -> None:
    alone = run("KD3A, votes", "dict")
    for found in processes.results(several_inputs.run, "KD3A, votes", "dict", True, 3, ranks=3):
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
    train.datasets["b"] = Formed(train.datasets["b"].x, train.datasets["b"].y, "list")
    with pytest.raises(ValueError, match=r"client 'b' have shape \[0\] \(4,\)"):
        trainer(1).fit(FedAvg(CLIENTS, TARGET, NUM_CLASSES, Joining()), train)


def test_an_export_names_what_it_cannot_trace(tmp_path: Path) -> None:
    module, _ = several_inputs.build("SourceOnly")
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
