"""RF-TCA of a federation in closed form, against RF-TCA and linear discriminant analysis of the pooled data."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedlit.callbacks import OracleAccuracy
from fedlit.federation import SERVER, DivergedError, Everyone, Federation, RosterError, Schedule, UniformSubset
from fedlit.functional import linear_discriminant, random_fourier_features, rf_tca, sample_frequencies
from fedlit.methods import FedRFTCA, FedRFTCAClosedForm
from fedlit.models import MLP, Features
from fedlit.privacy import CKKS, FixedPoint, GaussianMechanism, PairwiseMasking, Plain
from helpers import digits, loader, same, shards, trainer, weights

N, M = 6, 4


class Raw(nn.Identity):
    """Features computed beforehand."""

    out_features = 5


def build(names: list[str], **kwargs: Any) -> FedRFTCAClosedForm:
    torch.manual_seed(0)
    given = {"num_frequencies": N, "num_components": M, "unit_norm": False, "bandwidth": 2.0, "gamma": 0.1}
    return FedRFTCAClosedForm(names, names[-1], 2, kwargs.pop("extractor", None) or Raw(), **(given | kwargs))


def fit(
    data: dict[str, TensorDataset], batch_size: int = 8, strategy: dict[str, Any] | None = None, **kwargs: Any
) -> FedRFTCAClosedForm:
    module = build(list(data), **kwargs)
    trainer(20, strategy=strategy or {}).fit(module, loader(data, batch_size))
    return module


def domains(num_clients: int = 3) -> dict[str, TensorDataset]:
    """Clients of 40, 33, 26, ... samples; the last is the target."""
    data = shards(num_clients, 40)
    return {
        name: TensorDataset(shard.tensors[0][: 40 - 7 * i] + 0.3 * i, shard.tensors[1][: 40 - 7 * i])
        for i, (name, shard) in enumerate(data.items())
    }


def pooled(data: dict[str, TensorDataset]) -> tuple[Tensor, Tensor, Tensor]:
    """All sources' samples and labels, and the target's samples."""
    shards = list(data.values())
    return (
        torch.cat([shard.tensors[0] for shard in shards[:-1]]),
        torch.cat([shard.tensors[1] for shard in shards[:-1]]),
        shards[-1].tensors[0],
    )


def projector(aligner: Tensor) -> Tensor:
    """W W^T, which no sign of an eigenvector changes."""
    return aligner.double() @ aligner.double().T


@pytest.mark.parametrize("gamma", [0.1, None])
def test_the_aligner_is_rf_tca_of_the_pooled_data(gamma: float | None) -> None:
    data = domains()
    module = fit(data, gamma=gamma)
    xs, _, xt = pooled(data)
    omega = sample_frequencies(N, 5, 2.0, seed=0)
    if gamma is None:
        gap = random_fourier_features(xs, omega).mean(dim=0) - random_fourier_features(xt, omega).mean(dim=0)
        gamma = float(gap.square().sum())
    expected = rf_tca(xs.double(), xt.double(), M, gamma, omega.double()).aligner
    for name in data:
        got = weights(module, name)["aligner.weight"].T
        # weights are float32, and so are random features of float32 samples
        torch.testing.assert_close(projector(got), projector(expected), atol=1e-4 * float(expected.norm()) ** 2, rtol=0)


def test_it_is_the_same_to_float64_before_it_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = {name: TensorDataset(d.tensors[0].double(), d.tensors[1]) for name, d in domains().items()}
    module = build(list(data))
    seen: list[Tensor] = []

    def spy(second: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        seen.append(second)
        return linear_discriminant(second, *rest)

    monkeypatch.setattr("fedlit.methods.fedrf_tca_closed_form.linear_discriminant", spy)
    trainer(1, precision="64-true").fit(module, loader(data))
    xs, _, xt = pooled(data)
    omega = sample_frequencies(N, 5, 2.0, seed=0)
    result = rf_tca(xs, xt, M, 0.1, omega.double())
    torch.testing.assert_close(seen[0].abs(), (result.source.T @ result.source / len(xs)).abs(), atol=1e-9, rtol=1e-7)


def test_the_classifier_is_linear_discriminant_analysis_of_the_pooled_aligned_sources() -> None:
    """scikit-learn pools its classes' shrunk covariances by their shares, which is the shrunk pooled covariance."""
    data = domains()
    module = fit(data, shrinkage=0.2)
    xs, ys, xt = pooled(data)
    replica = module.replicas["c2"]
    with torch.no_grad():
        fs, ft = (replica.aligner(replica.random_features(x)).double().numpy() for x in (xs, xt))
        logits = module(xt).double().numpy()
    oracle = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.2).fit(fs, ys.numpy())
    expected = oracle.decision_function(ft)  # of two classes: the difference of their logits
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(logits[:, 1] - logits[:, 0], expected, rtol=1e-3, atol=1e-3)


def test_neither_batch_size_nor_cut_nor_order_of_clients_matters() -> None:
    data = domains()
    reference = projector(weights(fit(data), "c2")["aligner.weight"].T)
    x, y = data["c0"].tensors
    cut = {
        "c0": TensorDataset(x[:13], y[:13]),
        "c1": data["c1"],
        "c3": TensorDataset(x[13:], y[13:]),
        "c2": data["c2"],
    }
    swapped = {"c1": data["c1"], "c0": data["c0"], "c2": data["c2"]}
    for given, batch_size in ((data, 1), (data, 64), (cut, 8), (swapped, 8)):
        module = fit(given, batch_size)
        got = weights(module, "c2")
        torch.testing.assert_close(projector(got["aligner.weight"].T), reference, rtol=1e-3, atol=1e-3)
        xt = data["c2"].tensors[0]
        torch.testing.assert_close(module(xt), fit(data)(xt), rtol=1e-3, atol=1e-3)


def test_everyone_ends_with_the_same_model_after_one_round() -> None:
    data = domains()
    module = fit(data)  # of up to 20 epochs
    assert module.federation.round_idx == 1
    assert module.trainer.current_epoch == 1
    assert same(weights(module, "c0"), weights(module, "c2"))
    assert same(weights(module, "c1"), weights(module, "c2"))


def test_a_run_of_several_rounds_per_epoch_stops_too() -> None:
    data = domains()
    ours = fit(data, strategy={"rounds_per_epoch": 3})
    assert same(weights(ours, "c0"), weights(fit(data), "c0"))
    assert len([e for e in ours.federation.ledger if e.channel == "moments"]) == 3


def test_bytes_are_booked_once_and_do_not_depend_on_the_data() -> None:
    def used(data: dict[str, TensorDataset]) -> dict[str, int]:
        bytes_by_channel = fit(data).federation.ledger.bytes_by_channel()
        return {channel: bytes_by_channel[channel] for channel in ("moments", "model")}

    data = domains()
    doubled = {name: TensorDataset(*(torch.cat([t, t]) for t in d.tensors)) for name, d in data.items()}
    assert used(data) == used(doubled)
    numbers = N * (2 * N + 1) + 2 * N * 3 + 2
    assert 3 * 8 * numbers < used(data)["moments"] < 3 * (8 * numbers + 300)  # two up, one down
    assert 2 * 4 * (2 * N * M + (M + 1) * 2) < used(data)["model"] < 2 * (4 * (2 * N * M + (M + 1) * 2) + 200)


@pytest.mark.parametrize(
    ("backend", "tolerance"),
    [(Plain(FixedPoint()), 1e-3), (PairwiseMasking(colluders=0), 1e-3), (CKKS, 1e-2)],
    ids=["grid", "masking", "ckks"],
)
def test_private_sums_give_the_same_model_within_the_error_of_their_numbers(backend: Any, tolerance: float) -> None:
    if backend is CKKS:
        pytest.importorskip("tenseal")
        backend = backend()
    data = domains()
    module, plain = fit(data, strategy={"privacy": backend}), fit(data)
    assert {e.channel.split("/")[0] for e in module.federation.ledger if e.receiver == SERVER} == {"moments"}
    x = data["c2"].tensors[0]
    with torch.no_grad():
        expected, got = plain(x), module(x)
    assert float((got - expected).norm() / expected.norm()) < tolerance


def test_uniform_weights_count_every_source_alike() -> None:
    """As if the smaller source were copied until it is as large; only ratios of sizes matter to the logits."""
    base = shards(3, 20)

    def repeated(name: str, size: int, times: int) -> TensorDataset:
        return TensorDataset(*(torch.cat([tensor[:size]] * times) for tensor in base[name].tensors))

    small = {"c0": repeated("c0", 20, 1), "c1": repeated("c1", 10, 1), "c2": repeated("c2", 10, 3)}
    equal = {"c0": repeated("c0", 20, 1), "c1": repeated("c1", 10, 2), "c2": repeated("c2", 10, 4)}
    x = base["c2"].tensors[0]
    with torch.no_grad():
        uniform, by_samples = fit(small, weighting="uniform")(x), fit(small, weighting="samples")(x)
        expected = fit(equal, weighting="samples")(x)
    torch.testing.assert_close(uniform, expected, rtol=1e-3, atol=1e-3)
    assert float((by_samples - expected).detach().abs().max()) > 1e-2


@pytest.mark.parametrize("trouble", ["local_steps", "drop_last", "limit"])
def test_a_pass_that_is_not_complete_is_refused_with_advice(trouble: str) -> None:
    data = domains()
    module = build(list(data))
    strategy = {"local_steps": 1} if trouble == "local_steps" else {}
    limit = {"limit_train_batches": 2} if trouble == "limit" else {}
    given = loader(data, 8, drop_last=trouble == "drop_last")
    with pytest.raises(RosterError, match=r"cover \d+ of \d+ training samples: give drop_last=False"):
        trainer(1, strategy=strategy, **limit).fit(module, given)


@pytest.mark.parametrize("there", [["c2"], ["c0", "c1"]])
def test_without_a_source_or_the_target_there_is_an_error_and_no_empty_model(there: list[str]) -> None:
    with pytest.raises(RosterError, match="moments of the target and at least one source"):
        fit(domains(), strategy={"participation": Schedule([there])})


def test_absent_sources_are_left_out() -> None:
    data = domains()
    module = fit(data, strategy={"participation": Schedule([["c0", "c2"]])})
    alone = fit({"c0": data["c0"], "c2": data["c2"]})
    assert same(weights(module, "c2"), weights(alone, "c2"))
    assert same(weights(module, "c0"), weights(alone, "c2"))
    assert not same(weights(module, "c1"), weights(alone, "c2"))


def test_a_subset_with_masking_needs_two_sources() -> None:
    module = fit(
        domains(4), strategy={"participation": UniformSubset(at_least=2), "privacy": PairwiseMasking(colluders=0)}
    )
    assert module.federation.round_idx == 1


def test_after_a_warm_up_the_trained_extractor_is_used() -> None:
    data = domains()
    module = fit(data, extractor=nn.Linear(5, 5), warmup_rounds=2, bandwidth=1.0)
    assert module.federation.round_idx == 3
    torch.manual_seed(0)
    start = nn.Linear(5, 5)
    state = {name: weights(module, name) for name in data}
    assert same(state["c0"], state["c2"])
    assert not torch.equal(state["c0"]["extractor.weight"], start.weight)
    xs, _, xt = pooled(data)
    zs, zt = (x @ state["c0"]["extractor.weight"].T + state["c0"]["extractor.bias"] for x in (xs, xt))
    expected = rf_tca(zs.double(), zt.double(), M, 0.1, sample_frequencies(N, 5, 1.0, seed=0).double()).aligner
    torch.testing.assert_close(
        projector(state["c2"]["aligner.weight"].T), projector(expected), atol=1e-4 * float(expected.norm()) ** 2, rtol=0
    )


def test_in_a_plain_trainer_it_solves_the_same() -> None:
    data = domains()
    module = build(list(data))
    trainer(3, federated=False).fit(module, loader(data))
    assert same(weights(module, "c0"), weights(fit(data), "c0"))


def test_nothing_is_trained_and_dropout_is_off() -> None:
    data = domains()
    torch.manual_seed(0)
    module = fit(data, extractor=MLP(5, [5], dropout=0.5))
    torch.manual_seed(0)
    network = MLP(5, [5])
    start = network.state_dict()
    ours = weights(module, "c1")
    assert all(torch.equal(ours[f"extractor.{name}"], tensor) for name, tensor in start.items())
    without = fit(data, extractor=network)
    assert same(ours, weights(without, "c1"))


def test_an_extractor_that_nobody_trains_is_told_at_the_start_with_the_way_out() -> None:
    data = domains(3)
    with pytest.warns(UserWarning, match=r"stays at its first weights. Give warmup_rounds=19"):
        fit(data, extractor=MLP(5, [4]))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*stays at its first weights")
        fit(data)
        fit(data, extractor=MLP(5, [4]).requires_grad_(False))


def test_embedded_digits_are_told_apart_far_better_than_by_chance() -> None:
    data = digits()
    torch.manual_seed(0)
    module = FedRFTCAClosedForm(
        data.clients, data.target, data.num_classes, Features(64), num_frequencies=200, num_components=50
    )
    run = trainer(20, [OracleAccuracy()])
    run.fit(module, data)
    accuracy = run.test(module, data, verbose=False)[0]["oracle/target/acc"]
    print(f"target accuracy on digits: {accuracy:.3f}")
    assert accuracy > 0.4  # of ten classes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"num_components": 13},
            r"num_components \(m\) must be between 1 and .* \(2N = 12\), got 13",
        ),
        ({"num_components": 0}, r"num_components \(m\) must be between 1"),
        ({"shrinkage": 0.0}, r"shrinkage must be in \(0, 1\], got 0.0"),
        ({"shrinkage": 1.5}, r"shrinkage must be in \(0, 1\], got 1.5"),
        ({"gamma": 0.0}, "gamma must be positive and finite, or null .*, got 0.0"),
        ({"gamma": float("inf")}, "gamma must be positive and finite, or null .*, got inf"),
        ({"gamma": float("nan")}, "gamma must be positive and finite, or null .*, got nan"),
        ({"local_norm": True}, "local_norm=True leaves clients with different extractors"),
        ({"bandwidth": -1.0}, "bandwidth"),
        ({"kernel": "rbf"}, "kernel"),
    ],
)
def test_bad_arguments_are_refused_at_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(["c0", "c1"], **arguments)


# -------------------------------------------------------------------- what leaves a client in the warm-up


def test_the_warm_up_sends_as_much_as_that_of_the_trained_method_and_no_frequencies() -> None:
    data = domains()
    torch.manual_seed(0)
    trained = FedRFTCA(
        list(data), "c2", 2, nn.Linear(5, 5), num_frequencies=N, num_components=M, warmup_rounds=2, classifier_period=1
    )
    trainer(3, strategy={"participation": Everyone()}).fit(trained, loader(data))
    closed = fit(data, extractor=nn.Linear(5, 5), warmup_rounds=2, bandwidth=1.0)
    used = [module.federation.ledger.bytes_by_channel()["weights"] for module in (trained, closed)]
    assert used[0] == used[1] > 0
    names = {"extractor.weight", "extractor.bias", "aligner.weight", "classifier.weight", "classifier.bias"}
    for module in (trained, closed):
        state = module.run.weights.of("c0")
        assert set(state) == names
        assert all(tensor.is_floating_point() for tensor in state.values())


def test_a_warm_up_under_differential_privacy_ends_in_a_model() -> None:
    """Integers and switches in the payload, which noise cannot be added to, would be refused."""
    data = domains()
    mechanism = GaussianMechanism(clip_norm=0.1, noise_multiplier=1e-6)
    noisy = fit(
        data,
        strategy={"differential_privacy": {"weights": mechanism}},
        extractor=nn.Linear(5, 5),
        warmup_rounds=2,
        bandwidth=1.0,
    )
    assert noisy.federation.round_idx == 3
    for account in noisy.federation.accounts.values():
        assert set(account.clients) == {"c0", "c1"}
    state = weights(noisy, "c2")
    assert all(tensor.isfinite().all() for tensor in state.values())
    torch.manual_seed(0)
    start = nn.Linear(5, 5)
    moved = torch.cat([(state[f"extractor.{name}"] - t.detach()).flatten() for name, t in start.named_parameters()])
    assert 0 < float(moved.norm()) <= 2 * 0.1 * 1.01  # two rounds of at most the clip


def test_a_source_that_is_away_at_the_end_of_the_warm_up_has_its_extractor_in_the_pass() -> None:
    data = domains()
    schedule = Schedule([["c0", "c2"], ["c0", "c1", "c2"]])
    module = fit(data, strategy={"participation": schedule}, extractor=nn.Linear(5, 5), warmup_rounds=1, bandwidth=1.0)
    assert same(weights(module, "c1"), weights(module, "c0"))
    fetched = [e for e in module.federation.ledger if e.channel == "weights" and e.round_idx == 1]
    assert [(e.sender, e.receiver) for e in fetched] == [("server", "c1")]


# -------------------------------------------------------------------- failures


def failures(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """What is told to all processes rather than raised on one of them."""
    told: list[Exception] = []
    original = Federation.fail

    def spy(self: Federation, error: Any) -> None:
        told.append(error)
        original(self, error)

    monkeypatch.setattr(Federation, "fail", spy)
    return told


def test_more_components_than_the_data_have_rank_is_an_error_that_every_process_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two different samples at each client: random features span few dimensions."""
    data = {
        name: TensorDataset(shard.tensors[0][:2].repeat(10, 1), shard.tensors[1][:2].repeat(10))
        for name, shard in shards(2, 20).items()
    }
    module = build(list(data), num_components=12)
    told = failures(monkeypatch)
    with pytest.raises(RosterError, match="RF-TCA cannot be solved for these data: num_components"):
        trainer(1).fit(module, loader(data))
    assert [type(error) for error in told] == [RosterError]


def test_a_solver_that_fails_is_an_error_that_every_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Any:
        raise ValueError("no solution")

    monkeypatch.setattr("fedlit.methods.fedrf_tca_closed_form.rf_tca_from_sums", refuse)
    data = domains()
    module = build(list(data))
    told = failures(monkeypatch)
    with pytest.raises(RosterError, match="RF-TCA cannot be solved for these data: no solution"):
        trainer(1).fit(module, loader(data))
    assert len(told) == 1
    assert "model" not in module.federation.ledger.bytes_by_channel()


def test_features_that_are_not_finite_are_an_error_that_every_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Root(Raw):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.sqrt())

    data = domains()
    for name, shard in data.items():
        shard.tensors[0].abs_().mul_(-1.0 if name == "c1" else 1.0)
    module = build(list(data), extractor=Root())
    told = failures(monkeypatch)
    with pytest.raises(DivergedError, match="the features of client 'c1' hold NaN or infinity: scale its inputs"):
        trainer(1).fit(module, loader(data))
    assert {type(error) for error in told[:1]} == {DivergedError}
    assert not {"moments", "model"} & set(module.federation.ledger.bytes_by_channel())


def test_a_class_that_no_source_has_is_never_predicted() -> None:
    data = domains()
    torch.manual_seed(0)
    module = FedRFTCAClosedForm(
        list(data), "c2", 3, Raw(), num_frequencies=N, num_components=M, unit_norm=False, bandwidth=2.0, gamma=0.1
    )
    trainer(1).fit(module, loader(data))
    replica = module.replicas["c2"]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for scale in (1.0, 10.0, 1e3):
            logits = module(scale * torch.randn(200, 5, generator=generator))
            assert logits.isfinite().all()
            assert not (logits.argmax(dim=1) == 2).any()
        # aligned features of other places than random features have: a small prior would not do
        far = replica.classifier(1e4 * torch.randn(200, M, generator=generator))
    assert float(far[:, :2].max(dim=1).values.min()) < -100
    assert not (far.argmax(dim=1) == 2).any()
    two = fit(data)
    with torch.no_grad():
        x = data["c2"].tensors[0]
        torch.testing.assert_close(module(x)[:, :2], two(x))
