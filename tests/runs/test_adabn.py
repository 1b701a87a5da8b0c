"""BatchNorm statistics: of AdaBN and AutoDIAL, and their means by variances or second moments, next to all data."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from backends import backend
from fedlit import Client, FederatedModule, Run
from fedlit.federation import RosterError, Schedule
from fedlit.functional import mixture_variance
from fedlit.methods import AdaBN, FedAvg, FedGP, SourceOnly
from fedlit.privacy import FixedPoint, GaussianMechanism, PairwiseMasking, PrivacyError
from helpers import layers, loader, same, shards, trainer, weights

STATISTICS = ("running_mean", "running_var", "num_batches_tracked", "other_mean", "other_var", "heard")


def shifted(target_size: int = 40) -> dict[str, TensorDataset]:
    """Three clients at different places, of 40 samples; the target's can be fewer."""
    data = {name: (x + 2 * i, y) for i, (name, each) in enumerate(shards(3).items()) for x, y in [each.tensors]}
    x, _ = data["c2"]
    data["c2"] = (x[:target_size], torch.full((target_size,), -1))  # nobody knows
    return {name: TensorDataset(*tensors) for name, tensors in data.items()}


def network() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return layers(6, nn.BatchNorm1d(5), nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU()), nn.Linear(6, 2)


def fit(
    method: type[FederatedModule] = AdaBN, rounds: int = 2, strategy: Any = None, data: Any = None, **kwargs: Any
) -> Any:
    kwargs.setdefault("optimizer", lambda params: SGD(params, lr=0.1))
    module = method(["c0", "c1", "c2"], "c2", 2, *network(), **kwargs)
    trainer(rounds, strategy=strategy or {}).fit(module, loader(data or shifted()))
    return module


fitted = cache(fit)


def parts(state: dict[str, Tensor], statistics: bool) -> dict[str, Tensor]:
    return {name: t for name, t in state.items() if (name.rpartition(".")[2] in STATISTICS) == statistics}


def test_all_but_statistics_is_source_only_to_the_last_bit() -> None:
    ours, theirs = fitted(), fit(SourceOnly)
    for client in ("c0", "c1", "c2"):
        assert same(parts(weights(ours, client), False), parts(weights(theirs, client), False))
    own = [parts(weights(ours, client), True) for client in ("c0", "c1", "c2")]
    means = [each["extractor.0.running_mean"] for each in own]
    assert bool((means[0] < means[1]).all() & (means[1] < means[2]).all())  # as the clients' samples lie


@pytest.mark.parametrize("arguments", [{}, {"pass_per_layer": True}])
def test_the_target_predicts_by_the_statistics_of_its_samples_layer_after_layer(arguments: dict[str, Any]) -> None:
    module = fitted(**arguments)
    x = shifted()["c2"].tensors[0]
    first, linear, second, _ = module.replicas["c2"].extractor

    def normalised(inputs: Tensor, layer: nn.BatchNorm1d) -> Tensor:
        spread = (inputs.var(0, correction=0) + layer.eps).sqrt()
        return (inputs - inputs.mean(0)) / spread * layer.weight + layer.bias

    features = normalised(linear(normalised(x, first)), second).relu()
    torch.testing.assert_close(module.eval()(x), module.replicas["c2"].classifier(features), atol=1e-4, rtol=1e-4)
    assert first.running_mean.tolist() == pytest.approx(x.mean(dim=0).tolist(), abs=1e-5)


def test_a_target_that_comes_back_takes_statistics_for_the_model_that_it_fetches() -> None:
    schedule = Schedule([["c0", "c1", "c2"], ["c0", "c1"], ["c0", "c1", "c2"]])
    module, all_there = fit(rounds=3, strategy={"participation": schedule}), fit(rounds=3)
    assert same(weights(module, "c2"), weights(all_there, "c2"))


MASKED = PairwiseMasking(FixedPoint(20, 256.0), colluders=0)


@pytest.mark.parametrize(("privacy", "weighting"), [(None, "sqrt"), (MASKED, "samples")])
def test_each_side_receives_the_moments_of_the_other(privacy: Any, weighting: Any) -> None:
    data = shifted()
    data["c1"] = TensorDataset(*(tensor[:24] for tensor in data["c1"].tensors))
    module = fit(mixing=0.8, data=data, strategy={"privacy": privacy}, weighting=weighting)
    shares = torch.tensor([40.0, 24.0]) ** (1.0 if weighting == "samples" else 0.5)
    for name, target in module.mixed_layers("c2").items():
        sources = [module.mixed_layers(client)[name] for client in ("c0", "c1")]
        for source in sources:
            torch.testing.assert_close(source.other_mean, target.running_mean)
            torch.testing.assert_close(source.other_var, target.running_var, atol=1e-4, rtol=1e-4)
        means, variances = (torch.stack([getattr(s, f"running_{kind}") for s in sources]) for kind in ("mean", "var"))
        torch.testing.assert_close(target.other_mean, shares / shares.sum() @ means, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(target.other_var, mixture_variance(means, variances, shares), atol=1e-4, rtol=1e-4)
        assert target.share == 0.8
        assert not target.share.requires_grad


def test_a_step_of_the_target_lowers_the_weighted_entropy_of_its_predictions() -> None:
    data = shifted()
    extractor, head = network()
    x = data["c2"].tensors[0]
    p = head(extractor(x)).softmax(dim=1)
    loss = 0.3 * -(p * p.log()).sum(dim=1).mean()
    gradient = torch.autograd.grad(loss, [head.weight])[0]

    class Noted(AdaBN):
        def on_round_end(self, run: Run) -> None:
            self.note = weights(self, "c2")["classifier.weight"]
            super().on_round_end(run)

    module = Noted(["c0", "c1", "c2"], "c2", 2, *network(), mixing="learned", entropy_weight=0.3,
                   optimizer=lambda params: SGD(params, lr=0.1))  # fmt: skip
    trainer(1).fit(module, loader(data, batch_size=64))
    torch.testing.assert_close(module.note, head.weight.detach() - 0.1 * gradient)
    everyone = [weights(module, client)["classifier.weight"] for client in ("c0", "c1", "c2")]
    assert torch.equal(everyone[0], everyone[2])  # the target's share is in the mean
    assert not torch.equal(everyone[0], module.note)


def test_shares_are_learned_averaged_and_kept_within_their_range() -> None:
    module = fit(rounds=4, mixing="learned", optimizer=lambda params: SGD(params, lr=1.0))
    shares, others = ([float(layer.share) for layer in module.mixed_layers(name).values()] for name in ("c0", "c2"))
    assert shares == others
    assert all(0.5 <= share <= 1 for share in shares)
    assert any(share < 1 for share in shares)


def test_shares_of_1_and_no_entropy_train_like_adabn_with_the_target_in_the_mean() -> None:
    with_target = fit(mixing=1.0, entropy_weight=0.0, rounds=1, weighting="uniform")
    plain = fit(rounds=1, weighting="uniform")
    start = network()[1].weight.detach()
    mean = weights(plain, "c2")["classifier.weight"]
    # the target takes no step, so that the mean of all three has two thirds of the sources'
    torch.testing.assert_close(weights(with_target, "c2")["classifier.weight"], start + (mean - start) * 2 / 3)


def test_a_target_of_one_sample_has_no_variance() -> None:
    with pytest.raises(RosterError, match="variance"):
        fit(data=shifted(target_size=1))


SIZES = {"c0": 20, "c1": 14, "c2": 9}
MEAN, VARIANCE = "extractor.running_mean", "extractor.running_var"


def spread() -> dict[str, TensorDataset]:
    """Clients of 20, 14 and 9 samples at different places, each with a scale of its own."""
    given = shards(3, 20)
    return {
        name: TensorDataset((i + 0.5) * x[:size] + 3 * i, y[:size])
        for i, (name, size) in enumerate(SIZES.items())
        for x, y in [given[name].tensors]
    }


def averaged(
    method: type[FederatedModule] = FedAvg, rounds: int = 1, strategy: Any = None, lr: float = 0.0, **kwargs: Any
) -> FederatedModule:
    """A run in which statistics alone move, to those of a client's data in its first round."""
    torch.manual_seed(0)
    names: list[Client | str] = ["c0", "c1", Client("c2", role="target", labelled=True)]
    extractor = nn.BatchNorm1d(5, momentum=None)
    extractor.out_features = 5  # type: ignore[assignment]
    kwargs.setdefault("batchnorm_average", "moments")
    module = method(names, "c2", 2, extractor, optimizer=lambda params: SGD(params, lr=lr), **kwargs)
    trainer(rounds, strategy=strategy or {}).fit(module, loader(spread(), batch_size=64))
    return module


def own(name: str) -> tuple[Tensor, Tensor]:
    """Mean and variance of a client's samples, as BatchNorm takes them."""
    x = spread()[name].tensors[0]
    return x.mean(dim=0), x.var(dim=0)


def mixture(shares: dict[str, float]) -> tuple[Tensor, Tensor]:
    means, variances = (torch.stack(each) for each in zip(*map(own, shares), strict=True))
    parts = torch.tensor(list(shares.values()))
    return parts / parts.sum() @ means, mixture_variance(means, variances, parts)


@pytest.mark.parametrize(
    ("strategy", "tolerance", "weighting"),
    [
        (dict, 1e-5, "samples"),
        (lambda: {"privacy": PairwiseMasking(FixedPoint(20, 256.0))}, 2e-5, "sqrt"),
        (lambda: {"privacy": backend("ckks")}, 1e-3, "samples"),
        (lambda: {"differential_privacy": GaussianMechanism(1e4, noise_multiplier=1e-12)}, 1e-4, "samples"),
    ],
)
def test_moments_give_the_variance_of_all_clients_data_together(
    strategy: Any, tolerance: float, weighting: str
) -> None:
    shares = {name: size ** (1.0 if weighting == "samples" else 0.5) for name, size in SIZES.items()}
    state = weights(averaged(strategy=strategy(), weighting=weighting), "c0")
    mean, variance = mixture(shares)
    torch.testing.assert_close(state[MEAN], mean, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(state[VARIANCE], variance, atol=20 * tolerance, rtol=tolerance)


def test_variances_lack_the_spread_of_the_means() -> None:
    state = weights(averaged(batchnorm_average="variances", weighting="uniform"), "c0")
    mean, variance = mixture(dict.fromkeys(SIZES, 1.0))
    torch.testing.assert_close(state[MEAN], mean)
    torch.testing.assert_close(state[VARIANCE], torch.stack([own(name)[1] for name in SIZES]).mean(dim=0))
    assert bool((state[VARIANCE] < 0.6 * variance).all())


def test_second_moments_past_the_bound_stop_training_with_advice() -> None:
    masked: dict[str, Any] = {"strategy": {"privacy": PairwiseMasking()}, "weighting": "uniform"}
    averaged(batchnorm_average="variances", **masked)
    with pytest.raises(PrivacyError, match=r"largest number is [4-9]\d"):
        averaged(**masked)


@pytest.mark.parametrize("privacy", [None, PairwiseMasking(FixedPoint(20, 256.0), colluders=0)], ids=["open", "hidden"])
def test_combined_updates_mix_statistics_too(privacy: Any) -> None:
    module = averaged(FedGP, strategy={"privacy": privacy}, beta=0.75, weighting="uniform")
    mean, variance = mixture({"c0": 0.375, "c1": 0.375, "c2": 0.25})
    for client in SIZES:
        state = weights(module, client)
        torch.testing.assert_close(state[MEAN], mean, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(state[VARIANCE], variance, atol=1e-3, rtol=1e-4)


def test_noise_makes_no_variance_negative_and_its_effect_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", lambda size: b"\1" * size)
    noise = {"differential_privacy": GaussianMechanism(clip_norm=1.0, noise_multiplier=5.0)}
    with pytest.warns(UserWarning, match=f"running variances.*{VARIANCE}"):
        module = averaged(rounds=2, strategy=noise, batchnorm_average="variances")
    state = weights(module, "c0")
    assert (state[VARIANCE] >= 0).all()
    assert (state[VARIANCE] == 0).any()
    x = spread()["c0"].tensors[0]
    assert module.replicas["c0"].eval()(x).isfinite().all()
