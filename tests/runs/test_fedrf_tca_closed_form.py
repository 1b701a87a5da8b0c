"""RF-TCA and JDA of a federation in closed form, against those and discriminant analysis of the pooled data."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedlit.federation import DivergedError, RosterError, Schedule
from fedlit.functional import JointAligner, jda, jda_from_sums, random_fourier_features, rf_tca, sample_frequencies
from fedlit.methods import FedJDA, FedRFTCAClosedForm
from fedlit.models import MLP
from fedlit.privacy import CKKS
from helpers import loader, same, trainer, weights

N, M, CLASSES = 6, 4, 3
Data = dict[str, TensorDataset]


class Raw(nn.Identity):
    """Features computed beforehand."""

    out_features = 5


def domains() -> Data:
    """Two sources of unequal size and a target, whose classes are moved each its own way, in float64."""
    draws = torch.Generator().manual_seed(0)
    means = torch.randn(CLASSES, 5, generator=draws, dtype=torch.float64)
    data = {}
    for name, size in (("a", 40), ("b", 23), ("t", 31)):
        labels = torch.arange(size) % CLASSES
        moved = means + 0.6 * torch.randn(CLASSES, 5, generator=draws, dtype=torch.float64)
        noise = torch.randn(size, 5, generator=draws, dtype=torch.float64)
        data[name] = TensorDataset(moved[labels] + 0.6 * noise, labels)
    return data


def fit(
    data: Data, method: type[FedRFTCAClosedForm] = FedRFTCAClosedForm, batch_size: int = 8, **kwargs: Any
) -> FedRFTCAClosedForm:
    torch.manual_seed(0)
    given = {"num_frequencies": N, "num_components": M, "unit_norm": False, "bandwidth": 2.0, "gamma": 0.3}
    run = {key: kwargs.pop(key) for key in ("strategy", "limit_train_batches") if key in kwargs}
    batches = loader(data, batch_size, drop_last=kwargs.pop("drop_last", False))
    extractor = kwargs.pop("extractor", None) or Raw()
    module = method(list(data), "t", kwargs.pop("num_classes", CLASSES), extractor, **(given | kwargs))
    trainer(5, precision="64-true", **run).fit(module, batches)
    return module


def pooled(data: Data) -> tuple[Tensor, Tensor, Tensor]:
    """Random features and labels of all sources, and the target's features."""
    omega = sample_frequencies(N, 5, 2.0, seed=0).double()
    x, y = (torch.cat([data[name].tensors[i] for name in data if name != "t"]) for i in range(2))
    return random_fourier_features(x, omega), y, random_fourier_features(data["t"].tensors[0], omega)


def projector(aligner: Tensor) -> Tensor:
    """W W^T, which no sign of an eigenvector changes."""
    return aligner.double() @ aligner.double().T


def assert_rf_tca(module: FedRFTCAClosedForm, xs: Tensor, xt: Tensor, gamma: float) -> None:
    omega = sample_frequencies(N, 5, 2.0, seed=0).double()
    expected = projector(rf_tca(xs, xt, M, gamma, omega).aligner)
    for name in ("a", "t"):
        found = projector(weights(module, name)["aligner.weight"].T)
        torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.norm()), rtol=0)


@pytest.mark.parametrize("gamma", [0.1, None])
def test_the_aligner_is_rf_tca_of_the_pooled_data(gamma: float | None) -> None:
    data = domains()
    source, _, target = pooled(data)
    module = fit(data, gamma=gamma)
    if gamma is None:
        gamma = float((source.mean(dim=0) - target.mean(dim=0)).square().sum())
    xs = torch.cat([data[name].tensors[0] for name in ("a", "b")])
    assert_rf_tca(module, xs, data["t"].tensors[0], gamma)


@pytest.mark.parametrize("scaling", ["unit", "constraint"])
def test_every_iteration_of_jda_is_that_of_the_pooled_data(scaling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = domains()
    solved: list[JointAligner] = []

    def spy(*arguments: Any, **choices: Any) -> JointAligner:
        solved.append(jda_from_sums(*arguments, **choices))
        return solved[-1]

    monkeypatch.setattr("fedlit.methods.fedrf_tca_closed_form.jda_from_sums", spy)
    source, labels, target = pooled(data)
    made = set()
    for iterations in (1, 2, 3, 10):
        fit(data, FedJDA, num_iterations=iterations, scaling=scaling)
        choices = {"num_iterations": iterations, "labelling": "class_mean", "scaling": scaling}
        expected = jda(source, labels, target, M, 0.3, **choices)  # type: ignore[arg-type]
        torch.testing.assert_close(solved[-1].aligner, expected.aligner, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(solved[-1].eigenvalues, expected.eigenvalues)
        # batches come in another order than the samples
        torch.testing.assert_close(solved[-1].pseudo_labels.bincount(), expected.pseudo_labels.bincount())
        assert solved[-1].num_iterations == expected.num_iterations
        made.add(expected.num_iterations)
    assert len(made) > 2


@pytest.mark.parametrize("method", [FedJDA, FedRFTCAClosedForm])
def test_everyone_predicts_by_linear_discriminant_analysis_of_the_aligned_sources(method: Any) -> None:
    data = domains()
    module = fit(data, method, shrinkage=0.2)
    assert module.federation.round_idx == 1
    assert same(weights(module, "a"), weights(module, "t"))
    source, labels, target = pooled(data)
    aligner = module.replicas["t"].aligner
    with torch.no_grad():
        fs, ft = (aligner(rows).numpy() for rows in (source, target))
        logits = module(data["t"].tensors[0]).numpy()
    oracle = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.2).fit(fs, labels.numpy())
    expected = oracle.decision_function(ft)
    np.testing.assert_allclose(logits - logits[:, :1], expected - expected[:, :1], rtol=1e-4, atol=1e-4)


def test_neither_batch_size_nor_cut_nor_order_of_clients_matters() -> None:
    data = domains()
    xt, (x, y) = data["t"].tensors[0], data["a"].tensors
    expected = fit(data)(xt)
    cut = {"a": TensorDataset(x[:13], y[:13]), "b": data["b"], "c": TensorDataset(x[13:], y[13:]), "t": data["t"]}
    swapped = {name: data[name] for name in ("b", "a", "t")}
    for given, batch_size in ((data, 1), (data, 64), (cut, 8), (swapped, 8)):
        torch.testing.assert_close(fit(given, batch_size=batch_size)(xt), expected, rtol=1e-5, atol=1e-5)


def test_messages_are_those_of_rf_tca_and_do_not_depend_on_the_data() -> None:
    data = domains()
    doubled = {name: TensorDataset(*(torch.cat([t, t]) for t in each.tensors)) for name, each in data.items()}
    used = [module.federation.ledger.bytes_by_channel() for module in (fit(data), fit(data, FedJDA), fit(doubled))]
    assert used[0] == used[1] == used[2]
    numbers = N * (2 * N + 1) + 2 * N * (CLASSES + 1) + CLASSES
    assert 3 * 8 * numbers < used[0]["moments"] < 3 * (8 * numbers + 300)  # two up, one down
    assert "model" in used[0]


def test_encrypted_sums_do_not_bring_a_class_into_being_that_no_source_has() -> None:
    pytest.importorskip("tenseal")
    data = domains()
    module = fit(data, FedJDA, strategy={"privacy": CKKS()}, num_classes=CLASSES + 1)
    plain = fit(data, FedJDA)
    x = data["t"].tensors[0]
    with torch.no_grad():
        found, expected = (weights(each, "t")["aligner.weight"] for each in (module, plain))
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
        agree = (module(x)[:, :CLASSES].argmax(dim=1) == plain(x).argmax(dim=1)).double().mean()
    assert float(agree) > 0.9


@pytest.mark.parametrize(
    "incomplete", [{"strategy": {"local_steps": 1}}, {"drop_last": True}, {"limit_train_batches": 2}]
)
def test_a_pass_that_is_not_complete_is_refused_with_advice(incomplete: dict[str, Any]) -> None:
    with pytest.raises(RosterError, match=r"cover \d+ of \d+"):
        fit(domains(), **incomplete)


@pytest.mark.parametrize("there", [["t"], ["a", "b"]])
def test_without_a_source_or_the_target_there_is_an_error_and_no_empty_model(there: list[str]) -> None:
    with pytest.raises(RosterError, match="moments"):
        fit(domains(), strategy={"participation": Schedule([there])})


def test_absent_sources_are_left_out() -> None:
    data = domains()
    module = fit(data, strategy={"participation": Schedule([["a", "t"]])})
    alone = fit({"a": data["a"], "t": data["t"]})
    assert same(weights(module, "t"), weights(alone, "t"))
    assert same(weights(module, "a"), weights(alone, "t"))
    assert not same(weights(module, "b"), weights(alone, "t"))


def test_after_a_warm_up_the_trained_extractor_is_used() -> None:
    data = domains()
    module = fit(data, extractor=nn.Linear(5, 5), warmup_rounds=2)
    assert module.federation.round_idx == 3
    torch.manual_seed(0)
    start = nn.Linear(5, 5)
    extractor = module.replicas["a"].extractor
    assert not torch.allclose(extractor.weight, start.weight.double())
    with torch.no_grad():
        zs = torch.cat([extractor(data[name].tensors[0]) for name in ("a", "b")])
        assert_rf_tca(module, zs, extractor(data["t"].tensors[0]), 0.3)


def test_an_extractor_that_nobody_trains_is_warned_of_at_the_start() -> None:
    with pytest.warns(UserWarning, match="warmup_rounds=4"):
        fit(domains(), extractor=MLP(5, [4]))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*stays at its first weights")
        fit(domains())
        fit(domains(), extractor=MLP(5, [4]).requires_grad_(False))


@pytest.mark.parametrize(("method", "components"), [(FedJDA, M), (FedRFTCAClosedForm, 12)])
def test_data_that_have_no_solution_say_so(method: Any, components: int) -> None:
    data = {name: TensorDataset(d.tensors[0][:1].repeat(9, 1), d.tensors[1][:9]) for name, d in domains().items()}
    with pytest.raises(RosterError, match="cannot be solved"):
        fit(data, method, num_components=components)


def test_features_that_are_not_finite_are_an_error() -> None:
    class Root(Raw):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.sqrt())

    data = domains()
    for name, shard in data.items():
        shard.tensors[0].abs_().mul_(-1.0 if name == "b" else 1.0)
    with pytest.raises(DivergedError, match="features of client 'b'"):
        fit(data, extractor=Root())
