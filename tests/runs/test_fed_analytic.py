"""FedAnalytic's heads against those of the pooled data, by scikit-learn and by hand, and AFL's law of aggregation."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from sklearn.preprocessing import normalize
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from backends import BACKENDS, backend
from fedlit.federation import RosterError, Schedule
from fedlit.functional import (
    LabelMoments,
    RidgePath,
    diagonal_discriminant,
    random_fourier_features,
    sample_frequencies,
)
from fedlit.methods import FedAnalytic
from fedlit.methods.fed_analytic import PENALTIES
from fedlit.privacy import GaussianMechanism, RobustPlain
from helpers import loader, trainer
from refused import refused

CLASSES, WIDTH = 3, 5
Data = dict[str, TensorDataset]


class Raw(nn.Identity):
    """Features computed beforehand."""

    out_features = WIDTH


def domains(sizes: tuple[int, ...] = (40, 23, 31), seed: int = 0) -> Data:
    """Sources of unequal sizes and a target, whose classes are moved each its own way, in float64."""
    draws = torch.Generator().manual_seed(seed)
    means = torch.randn(CLASSES, WIDTH, generator=draws, dtype=torch.float64)
    data = {}
    for name, size in zip((*"abcdef"[: len(sizes) - 1], "t"), sizes, strict=True):
        labels = torch.arange(size) % CLASSES
        moved = means + 0.4 * torch.randn(CLASSES, WIDTH, generator=draws, dtype=torch.float64)
        data[name] = TensorDataset(
            moved[labels] + torch.randn(size, WIDTH, generator=draws, dtype=torch.float64), labels
        )
    return data


def fit(data: Data, precision: str = "64-true", strategy: dict[str, Any] | None = None, **kwargs: Any) -> FedAnalytic:
    torch.manual_seed(0)
    module = FedAnalytic([*data], "t", CLASSES, Raw(), **kwargs)
    trainer(3, precision=precision, strategy=strategy or {}).fit(module, loader(data, 8))
    return module


def head(module: FedAnalytic, client: str = "t") -> tuple[np.ndarray, np.ndarray]:
    linear = module.replicas[client].classifier.linear
    return linear.weight.detach().numpy(), linear.bias.detach().numpy()


def pooled(data: Data, but: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Features at length 1 and labels of all sources, but one."""
    x, y = (
        np.concatenate([data[name].tensors[i].numpy() for name in data if name not in ("t", but)]) for i in range(2)
    )
    return normalize(x), y


def ridge(x: np.ndarray, y: np.ndarray, penalty: float) -> Ridge:
    return Ridge(alpha=penalty * len(x)).fit(x, np.eye(CLASSES)[y])


# ---------------------------------------------------------------- the heads


def test_the_ridge_is_that_of_the_pooled_data_and_logits_are_outputs_over_their_error_by_class():
    data = domains()
    x, y = pooled(data)
    expected = ridge(x, y, 0.01)
    variance = np.square(np.eye(CLASSES)[y] - expected.predict(x)).sum(axis=1).mean() / CLASSES
    module = fit(data, penalty=0.01)
    for client in "abt":
        weight, bias = head(module, client)
        np.testing.assert_allclose(weight * variance, expected.coef_, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(bias * variance, expected.intercept_, rtol=1e-5, atol=1e-6)


def test_the_discriminant_is_that_of_the_pooled_data():
    data = domains()
    expected = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.3).fit(*pooled(data))
    weight, bias = head(fit(data, head="lda", shrinkage=0.3))
    np.testing.assert_allclose(weight, expected.coef_, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(bias, expected.intercept_, rtol=1e-4, atol=1e-5)
    y = pooled(data)[1]
    _, equal = head(fit(data, head="lda", shrinkage=0.3, class_shares="equal"))
    np.testing.assert_allclose(equal, bias - np.log(np.bincount(y) / len(y)) - np.log(CLASSES), rtol=1e-5, atol=1e-5)


def test_diagonal_gaussian_classes_are_those_of_the_pooled_data():
    data = domains()
    x, y = pooled(data)
    shares = np.bincount(y) / len(y)
    own = np.stack([x[y == label].var(axis=0) for label in range(CLASSES)])
    variances = 0.8 * own + 0.2 * shares @ own
    means = np.stack([x[y == label].mean(axis=0) for label in range(CLASSES)])
    expected = np.log(shares) + norm.logpdf(x[:, None], means, np.sqrt(variances)).sum(axis=2)
    module = fit(data, head="qda_diagonal", shrinkage=0.2)
    logits = module.replicas["t"].classifier(torch.from_numpy(5 * x)).detach().numpy()  # whatever their length
    np.testing.assert_allclose(logits - logits[:, :1], expected - expected[:, :1], rtol=1e-4, atol=1e-4)


def test_random_features_take_the_place_of_features():
    data = domains()
    x, y = pooled(data)
    omega = sample_frequencies(20, WIDTH, 0.7, seed=0)
    rows = random_fourier_features(torch.from_numpy(x), omega.double()).numpy()
    expected = ridge(rows, y, 0.001)
    module = fit(data, num_frequencies=20, bandwidth=0.7)
    weight, _ = head(module)
    np.testing.assert_allclose(
        weight / np.linalg.norm(weight), expected.coef_ / np.linalg.norm(expected.coef_), atol=1e-6
    )
    again = fit(domains(seed=9), num_frequencies=20, bandwidth=2.0)
    again.replicas["t"].load_state_dict(module.replicas["t"].state_dict())
    assert torch.equal(again.replicas["t"].classifier.frequencies, omega.double())


def moments(x: Tensor, y: Tensor) -> LabelMoments:
    n = len(x)
    return LabelMoments(x.T @ x / n, x.mean(0), x.T @ y / n, y.mean(0))


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_merging_local_solutions_by_the_absolute_aggregation_law_has_the_same_result(order):
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(60, WIDTH, generator=draws, dtype=torch.float64)
    x -= x.mean(0)  # without a mean the intercept takes no part
    labels = torch.randint(CLASSES, (60,), generator=draws)
    y = nn.functional.one_hot(labels, CLASSES).double()
    gamma, parts = 0.5, torch.randperm(60, generator=draws).split([7, 20, 33])
    local = []
    for part in parts:
        regularised = x[part].T @ x[part] + gamma * torch.eye(WIDTH, dtype=torch.float64)
        local.append((regularised, torch.linalg.solve(regularised, x[part].T @ y[part])))
    merged, weight = local[order[0]]
    for each in order[1:]:  # equation 10 of AFL
        other, solution = local[each]
        weight = torch.linalg.solve(merged + other, merged @ weight + other @ solution)
        merged = merged + other
    found, _ = RidgePath(moments(x, y)).at(3 * gamma / 60)
    torch.testing.assert_close(found.T, weight, rtol=1e-9, atol=1e-12)
    cleaned = torch.linalg.solve(merged - 3 * gamma * torch.eye(WIDTH, dtype=torch.float64), merged @ weight)
    torch.testing.assert_close(cleaned, torch.linalg.lstsq(x, y).solution, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kwargs", [{}, {"head": "lda"}, {"head": "qda_diagonal"}], ids=str)
def test_any_number_and_partition_of_clients_has_the_same_head(kwargs):
    data = domains()
    x, y = (torch.cat([data[name].tensors[i] for name in "ab"]) for i in range(2))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
    parts = order.split([5, 17, 30, len(x) - 52])
    other = {name: TensorDataset(x[part], y[part]) for name, part in zip("abcd", parts, strict=True)} | {"t": data["t"]}
    for first, second in zip(head(fit(data, **kwargs)), head(fit(other, **kwargs)), strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "kwargs", [{}, {"penalty": "leave_one_out"}, {"head": "lda"}, {"head": "qda_diagonal"}], ids=str
)
def test_under_every_backend_the_head_is_that_of_the_open_sum(name, kwargs):
    """Small keys: of arithmetic, not of secrecy."""
    data = domains((40, 23, 35, 31), seed=5)
    hidden = fit(data, strategy={"privacy": backend(name)}, **kwargs)
    for first, second in zip(head(fit(data, **kwargs)), head(hidden), strict=True):
        assert np.abs(first - second).max() < 1e-3 * np.abs(first).max()


def test_medians_of_moments_are_warned_of():
    with pytest.warns(UserWarning, match="what FedAnalytic solves for can be far off. Give"):
        fit(domains(), strategy={"privacy": {"moments": RobustPlain()}})


def test_moments_below_the_grid_of_a_backend_are_told():
    small = {
        name: TensorDataset(1e-3 * each.tensors[0], each.tensors[1]) for name, each in domains((40, 23, 35)).items()
    }
    with pytest.warns(UserWarning, match=r"features of client 'a' have a mean square of .*set unit_norm"):
        fit(small, strategy={"privacy": backend("masking")}, unit_norm=False, penalty=1e-9)


# ---------------------------------------------------------------- the penalty


def test_the_penalty_is_the_one_of_least_error_on_sources_that_were_left_out():
    data = domains((40, 23, 35, 31), seed=5)
    errors = []
    for penalty in PENALTIES:
        squared = 0.0
        for name in "abc":
            model = ridge(*pooled(data, but=name), penalty)
            x, y = (each.numpy() for each in data[name].tensors)
            squared += np.square(np.eye(CLASSES)[y] - model.predict(normalize(x))).sum()
        errors.append(squared / (40 + 23 + 35))
    best = int(np.argmin(errors))
    assert 0 < best < len(PENALTIES) - 1
    module = fit(data, penalty="leave_one_out")
    assert module.chosen_penalty == PENALTIES[best]
    x, y = pooled(data)
    weight, _ = head(module)
    np.testing.assert_allclose(
        weight * errors[best] / CLASSES, ridge(x, y, PENALTIES[best]).coef_, rtol=1e-4, atol=1e-5
    )


def test_classes_of_one_source_alone_are_left_out_of_both_sums_where_these_are_hidden():
    data = domains((40, 23, 35, 31), seed=5)
    x, y = data["b"].tensors
    data["b"] = TensorDataset(x, torch.where(y == 2, 3, y))
    masked = {"privacy": backend("masking")}
    torch.manual_seed(0)
    module = FedAnalytic([*data], "t", 4, Raw(), penalty="leave_one_out")
    with pytest.warns(UserWarning, match="client 'b' alone has samples"):
        trainer(1, precision="64-true", strategy=masked).fit(module, loader(data, 8))
    kept = dict(data)
    there = data["b"].tensors[1] != 3
    kept["b"] = TensorDataset(*(each[there] for each in data["b"].tensors))
    weight, _ = head(module)
    assert not weight[3].any()  # and the source weighs as before
    shares = {"a": 40, "b": 23, "c": 35}
    rows = np.concatenate([normalize(kept[name].tensors[0].numpy()) for name in shares])
    labels = np.concatenate([kept[name].tensors[1].numpy() for name in shares])
    weights = np.concatenate([np.full(len(kept[name]), size / len(kept[name])) for name, size in shares.items()])
    alpha = module.chosen_penalty * weights.sum()
    expected = Ridge(alpha=alpha).fit(rows, np.eye(4)[labels], sample_weight=weights).coef_
    np.testing.assert_allclose(weight / np.linalg.norm(weight), expected / np.linalg.norm(expected), atol=1e-3)


# ---------------------------------------------------------------- mistakes, noise


def test_a_single_source_cannot_be_left_out_and_gaussian_classes_have_no_penalty():
    with refused("penalty", RosterError):
        FedAnalytic(["a", "t"], "t", CLASSES, Raw(), penalty="leave_one_out")
    with refused("penalty"):
        FedAnalytic(["a", "b", "t"], "t", CLASSES, Raw(), penalty="leave_one_out", head="lda")


@pytest.mark.parametrize(
    "given",
    [{"penalty": None}, {"penalty": True}, {"num_frequencies": 2.5}, {"num_frequencies": True}, {"shrinkage": "a"}],
    ids=str,
)
def test_what_is_no_number_is_refused(given):
    with refused(*given, TypeError):
        FedAnalytic(["a", "b", "t"], "t", CLASSES, Raw(), **given)


def test_a_source_that_alone_takes_part_cannot_be_left_out():
    with pytest.raises(RosterError, match=r"at least 2 source\(s\), but only \['a', 't'\] participate"):
        fit(domains(), penalty="leave_one_out", strategy={"participation": Schedule([["a", "t"]])})


def test_errors_are_of_the_sources_that_could_be_left_out():
    """One that has sent nothing changes neither penalty nor probabilities."""
    data = domains((30, 30, 31, 31), seed=5)
    lone = TensorDataset(data["c"].tensors[0], torch.full((31,), 3))
    masked = {"privacy": backend("masking")}
    found = []
    for each in (data | {"c": lone}, {name: data[name] for name in "abt"}):
        torch.manual_seed(0)
        module = FedAnalytic([*each], "t", 4, Raw(), penalty="leave_one_out", weighting="uniform")
        trainer(1, precision="64-true", strategy=masked if "c" in each else {}).fit(module, loader(each, 8))
        found.append((module.chosen_penalty, *head(module)))
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-2, atol=1e-2)


def test_a_source_of_classes_that_no_other_has_does_not_count_where_it_is_left_out():
    """Heads of the others are wrong on them, and least so with a penalty that leaves nothing of the head."""
    data = domains((40, 23, 35, 31))
    x, y = data["c"].tensors
    data["c"] = TensorDataset(x, y + CLASSES)
    errors = []
    for penalty in PENALTIES:
        squared = 0.0
        for name in "ab":
            rows, labels = pooled(data, but=name)
            model = Ridge(alpha=penalty * len(rows)).fit(rows, np.eye(2 * CLASSES)[labels])
            x, y = (each.numpy() for each in data[name].tensors)
            squared += np.square(np.eye(2 * CLASSES)[y] - model.predict(normalize(x))).sum()
        errors.append(squared)
    module = FedAnalytic([*data], "t", 2 * CLASSES, Raw(), penalty="leave_one_out")
    trainer(1, precision="64-true").fit(module, loader(data, 8))
    assert module.chosen_penalty == PENALTIES[int(np.argmin(errors))] < PENALTIES[-1]


def test_where_all_sources_have_classes_of_their_own_none_is_left_out():
    data = domains((40, 23, 35, 31))
    for place, name in enumerate("abc"):
        data[name] = TensorDataset(data[name].tensors[0], torch.full((len(data[name]),), place))
    with pytest.raises(RosterError, match=r"no source has at least 90% of its samples .* give a number as penalty"):
        fit(data, penalty="leave_one_out")


def test_a_blurred_mean_takes_a_fixed_penalty():
    noise = {"differential_privacy": GaussianMechanism(1.0, noise_multiplier=1e-3)}
    with pytest.raises(ValueError, match="give a number as penalty"):
        fit(domains(), penalty="leave_one_out", strategy=noise)


@pytest.mark.parametrize("kwargs", [{}, {"head": "lda"}, {"head": "qda_diagonal"}], ids=str)
def test_clipping_alone_changes_no_head(kwargs):
    clipped = fit(domains((33, 33, 31)), strategy={"differential_privacy": GaussianMechanism(1.0, 1e-9)}, **kwargs)
    plain = fit(domains((33, 33, 31)), **kwargs)
    outputs = [
        module.replicas["t"].classifier(torch.from_numpy(pooled(domains())[0])).softmax(dim=1).detach().numpy()
        for module in (clipped, plain)
    ]
    assert np.abs(outputs[0] - outputs[1]).max() < 0.05  # clients' clipping factors differ


@pytest.mark.parametrize(("name", "norm"), [("ridge", 2.0), ("lda", 2.0), ("qda_diagonal", 5**0.5)])
def test_moments_of_features_of_length_1_are_within_a_clipping_norm_of_2(name, norm):
    """Products and means have length 1 at most; sums by class, with shares and squares, the root of 2, or of 3."""
    whole = fit(domains(), head=name, strategy={"differential_privacy": GaussianMechanism(norm, 1e-12)})
    np.testing.assert_allclose(head(whole)[0], head(fit(domains(), head=name))[0], rtol=1e-4, atol=1e-5)


def test_one_mechanism_for_all_channels_blurs_the_moments_and_leaves_the_head_of_them_alone():
    for noise in (GaussianMechanism(1.0, 1e-9), {"moments": GaussianMechanism(1.0, 1e-9)}):
        module = fit(domains(), strategy={"differential_privacy": noise})
        assert all(np.array_equal(head(module, name)[0], head(module)[0]) for name in domains())
        assert np.linalg.norm(head(module)[0]) > 1
        assert {*module.federation.epsilon("message")} == {*domains()} - {"t"}
    with pytest.raises(ValueError, match=r"cannot blur channel .model.* computed from the moments"):
        fit(domains(), strategy={"differential_privacy": {"model": GaussianMechanism(1.0, 1.0)}})


@pytest.mark.parametrize("kind", ["lda", "qda_diagonal"])
def test_features_that_do_not_vary_within_classes_are_told(kind):
    constant = {name: TensorDataset(torch.ones(9, WIDTH).double(), torch.arange(9) % CLASSES) for name in "abt"}
    with pytest.raises(RosterError, match="the head cannot be solved for these data"):
        fit(constant, head=kind)


@pytest.mark.parametrize("kwargs", [{}, {"head": "lda"}, {"head": "qda_diagonal"}], ids=str)
def test_noise_on_the_sums_moves_the_head_as_little_as_it_is(kwargs):
    plain, _ = head(fit(domains(), **kwargs))
    little = fit(domains(), strategy={"differential_privacy": GaussianMechanism(1e3, noise_multiplier=1e-9)}, **kwargs)
    np.testing.assert_allclose(head(little)[0], plain, rtol=1e-2, atol=1e-2)
    some = fit(domains(), strategy={"differential_privacy": GaussianMechanism(50.0, noise_multiplier=1e-3)}, **kwargs)
    assert np.isfinite(head(some)[0]).all()


def test_squared_errors_of_moments_are_those_of_samples():
    x, y = (torch.from_numpy(each) for each in pooled(domains()))
    hot = nn.functional.one_hot(y, CLASSES).double()
    weight, bias = torch.randn(CLASSES, WIDTH, dtype=torch.float64), torch.randn(CLASSES, dtype=torch.float64)
    direct = (hot - x @ weight.T - bias).square().sum(dim=1).mean()
    assert moments(x, hot).squared_error(weight, bias) == pytest.approx(float(direct))


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("first", lambda: LabelMoments(torch.eye(3), torch.zeros(2), torch.zeros(3, 2), torch.ones(2))),
        ("second", lambda: LabelMoments(torch.full((3, 3), torch.nan), *map(torch.zeros, (3, (3, 2), 2)))),
        ("penalty", lambda: RidgePath(moments(torch.eye(3), torch.eye(3))).at(0.0)),
        ("squares", lambda: diagonal_discriminant(torch.ones(2, 3), torch.ones(3, 3), torch.ones(3) / 3)),
        ("squares", lambda: diagonal_discriminant(torch.zeros(3, 3), torch.zeros(3, 3), torch.ones(3) / 3)),
        ("shrinkage", lambda: diagonal_discriminant(torch.ones(3, 3), torch.ones(3, 3), torch.ones(3) / 3, 0.0)),
    ],
)
def test_moments_that_do_not_fit_are_refused(argument, call):
    with refused(argument):
        call()
