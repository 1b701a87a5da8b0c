"""AdaBN and AutoDIAL: whose statistics a client has, what is sent, and what mixing makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from fedlit import Client, FederatedModule
from fedlit.federation import RosterError, Schedule
from fedlit.functional import mixture_variance
from fedlit.methods import AdaBN, SourceOnly
from fedlit.models import MixedBatchNorm, SmallCNN
from fedlit.privacy import FixedPoint, PairwiseMasking
from fedlit.run.run import Run
from helpers import build, digits, loader, same, shards, trainer, weights

STATISTICS = ("running_mean", "running_var", "num_batches_tracked", "other_mean", "other_var", "heard")


def shifted(target_size: int = 40) -> dict[str, TensorDataset]:
    """Three clients at different places, of 40 samples; the target's can be fewer."""
    data = {name: (x + 2 * i, y) for i, (name, each) in enumerate(shards(3).items()) for x, y in [each.tensors]}
    x, _ = data["c2"]
    data["c2"] = (x[:target_size], torch.full((target_size,), -1))  # nobody knows
    return {name: TensorDataset(*tensors) for name, tensors in data.items()}


def network() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    extractor = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU())
    extractor.out_features = 6  # type: ignore[assignment]
    return extractor, nn.Linear(6, 2)


def fit(
    method: type[FederatedModule] = AdaBN, rounds: int = 2, strategy: Any = None, data: Any = None, **kwargs: Any
) -> Any:
    kwargs.setdefault("optimizer", lambda params: SGD(params, lr=0.1))
    module = method(["c0", "c1", "c2"], "c2", 2, *network(), **kwargs)
    trainer(rounds, strategy=strategy or {}).fit(module, loader(data or shifted()))
    return module


def parts(state: dict[str, Tensor], statistics: bool) -> dict[str, Tensor]:
    return {name: t for name, t in state.items() if (name.rpartition(".")[2] in STATISTICS) == statistics}


def test_all_but_statistics_is_source_only_to_the_last_bit() -> None:
    ours, theirs = fit(), fit(SourceOnly)
    for client in ("c0", "c1", "c2"):
        assert same(parts(weights(ours, client), False), parts(weights(theirs, client), False))
    own = [parts(weights(ours, client), True) for client in ("c0", "c1", "c2")]
    means = [each["extractor.0.running_mean"] for each in own]
    assert bool((means[0] < means[1]).all() & (means[1] < means[2]).all())  # as the clients' samples lie


@pytest.mark.parametrize("pass_per_layer", [False, True])
def test_the_target_predicts_by_the_statistics_of_its_samples_layer_after_layer(pass_per_layer: bool) -> None:
    """40 samples are one batch, so that a pass for every layer gives the same as one for all."""
    module = fit(pass_per_layer=pass_per_layer)
    x = shifted()["c2"].tensors[0]
    first, linear, second, _ = module.replicas["c2"].extractor

    def normalised(inputs: Tensor, layer: nn.BatchNorm1d) -> Tensor:
        spread = (inputs.var(0, correction=0) + layer.eps).sqrt()
        return (inputs - inputs.mean(0)) / spread * layer.weight + layer.bias

    features = normalised(linear(normalised(x, first)), second).relu()
    torch.testing.assert_close(module.eval()(x), module.replicas["c2"].classifier(features), atol=1e-4, rtol=1e-4)
    assert first.running_mean.tolist() == pytest.approx(x.mean(dim=0).tolist(), abs=1e-5)


def test_predictions_forget_shift_and_scale_of_the_targets_features() -> None:
    """The network's first layer is BatchNorm."""
    data, other = shifted(), shifted()
    x, y = data["c2"].tensors
    other["c2"] = TensorDataset(x * torch.tensor([3.0, 0.5, 1.0, 10.0, 2.0]) - 7.0, y)
    one, two = fit(data=data).eval(), fit(data=other).eval()
    torch.testing.assert_close(one(x), two(other["c2"].tensors[0]), atol=1e-3, rtol=1e-3)
    plain = fit(SourceOnly, data=data).eval()
    assert not torch.allclose(plain(x), plain(other["c2"].tensors[0]), atol=0.1)


def test_it_sends_less_than_source_only_and_nothing_of_the_targets() -> None:
    ours, theirs = (fit(method).federation.ledger for method in (AdaBN, SourceOnly))
    assert ours.bytes_by_channel()["weights"] < theirs.bytes_by_channel()["weights"]
    assert not [entry for entry in ours if entry.sender == "c2" and entry.channel != "metrics"]


def test_a_warm_up_leaves_the_target_with_statistics_too() -> None:
    """The same as without, as both are rounds of FedAvg over the sources."""
    module, plain = fit(warmup_rounds=2), fit()
    for client in ("c0", "c1", "c2"):
        assert same(weights(module, client), weights(plain, client))


def test_a_target_that_comes_back_takes_statistics_for_the_model_that_it_fetches() -> None:
    schedule = Schedule([["c0", "c1", "c2"], ["c0", "c1"], ["c0", "c1", "c2"]])
    module, all_there = fit(rounds=3, strategy={"participation": schedule}), fit(rounds=3)
    assert same(weights(module, "c2"), weights(all_there, "c2"))


def test_regression_has_statistics_too() -> None:
    data = {name: TensorDataset(each.tensors[0], each.tensors[0][:, :1]) for name, each in shifted().items()}
    extractor, _ = network()
    module = AdaBN(["c0", "c1", "c2"], "c2", 1, extractor, task="regression")
    trainer(1).fit(module, loader(data))
    assert module(data["c2"].tensors[0]).shape == (40, 1)


# -------------------------------------------------------------------- AutoDIAL


def layers(module: AdaBN, client: str) -> dict[str, MixedBatchNorm]:
    return module.mixed_layers(client)


@pytest.mark.parametrize(
    "privacy", [None, PairwiseMasking(FixedPoint(20, 256.0), colluders=0)], ids=["plain", "masking"]
)
@pytest.mark.parametrize("weighting", ["samples", "sqrt", "uniform"])
def test_each_side_hears_the_moments_of_the_other(privacy: Any, weighting: Any) -> None:
    data = shifted()
    data["c1"] = TensorDataset(*(tensor[:24] for tensor in data["c1"].tensors))
    module = fit(mixing=0.8, data=data, strategy={"privacy": privacy}, weighting=weighting)
    shares = torch.tensor([40.0, 24.0]) ** {"samples": 1.0, "sqrt": 0.5, "uniform": 0.0}[weighting]
    for name, target in layers(module, "c2").items():
        sources = [layers(module, client)[name] for client in ("c0", "c1")]
        for source in sources:
            torch.testing.assert_close(source.other_mean, target.running_mean)
            torch.testing.assert_close(source.other_var, target.running_var, atol=1e-4, rtol=1e-4)
        means, variances = (torch.stack([getattr(s, f"running_{kind}") for s in sources]) for kind in ("mean", "var"))
        torch.testing.assert_close(target.other_mean, shares / shares.sum() @ means, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(target.other_var, mixture_variance(means, variances, shares), atol=1e-4, rtol=1e-4)
        assert target.share == 0.8
        assert not target.share.requires_grad


def test_a_step_of_the_target_lowers_the_weighted_entropy_of_its_predictions() -> None:
    """One full batch, before anything is heard: the gradient of the loss written out, on the same network."""
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
    shares = {
        client: [float(layer.share.detach()) for layer in layers(module, client).values()] for client in ("c0", "c2")
    }
    assert shares["c0"] == shares["c2"]
    assert all(0.5 <= share <= 1 for share in shares["c0"])
    assert any(share < 1 for share in shares["c0"])


def test_shares_of_1_and_no_entropy_train_like_adabn_with_the_target_in_the_mean() -> None:
    """A client alone against BatchNorm by hand is in the tests of the layer."""
    with_target = fit(mixing=1.0, entropy_weight=0.0, rounds=1, weighting="uniform")
    plain = fit(rounds=1, weighting="uniform")
    start = network()[1].weight.detach()
    mean = weights(plain, "c2")["classifier.weight"]
    # the target takes no step, so that the mean of all three has two thirds of the sources'
    torch.testing.assert_close(weights(with_target, "c2")["classifier.weight"], start + (mean - start) * 2 / 3)


def test_labels_of_the_target_are_not_used() -> None:
    states = []
    for labels in (0, 30):
        data = digits(flatten=False, target_labels=labels)
        torch.manual_seed(0)
        module = build(AdaBN, data, extractor=SmallCNN(1, width=4), mixing=0.9)
        trainer(1, strategy={"local_steps": 2}).fit(module, data)
        states.append(weights(module, "fonts"))
    assert same(*states)


# -------------------------------------------------------------------- bad input


def test_networks_without_batchnorm_are_refused_by_name() -> None:
    message = r"neither extractor SmallCNN nor classifier Linear has one .*: take a network with BatchNorm"
    for norm in ("none", "group"):
        with pytest.raises(ValueError, match=message):
            AdaBN(["a", "b"], "b", 2, SmallCNN(1, width=4, norm=norm))
    untracked = nn.Sequential(nn.BatchNorm1d(5, track_running_stats=False))
    with pytest.raises(ValueError, match="neither extractor Sequential nor classifier Linear has one"):
        AdaBN(["a", "b"], "b", 2, untracked, nn.Linear(5, 2))
    AdaBN(["a", "b"], "b", 2, nn.Identity(), nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2)))  # it may be anywhere


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixing": 0.4}, r"mixing \(alpha\) must be .* in \[0.5, 1\], 'learned', or null .*, got 0.4"),
        ({"mixing": 1.5}, "got 1.5"),
        ({"mixing": float("nan")}, "got nan"),
        ({"mixing": "auto"}, "got 'auto'"),
        ({"entropy_weight": -1.0}, "entropy_weight must be at least 0 and finite, got -1.0"),
        ({"entropy_weight": float("inf")}, "at least 0 and finite, got inf"),
        ({"mixing": 0.8, "task": "regression"}, "lowers the entropy of classes, which task='regression' lacks"),
        ({"local_norm": True}, "local_norm=True keeps scales and shifts at home too"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaBN(["c0", "c1", "c2"], "c2", 2, *network(), **arguments)


@pytest.mark.parametrize("mixing", [None, "learned"])
def test_a_batch_of_one_sample_is_told_before_the_first_round(mixing: Any) -> None:
    data = shifted()
    data["c1"] = TensorDataset(*(tensor[:33] for tensor in data["c1"].tensors))
    with pytest.raises(
        RosterError, match="client 'c1' trains on 33 samples with batch_size=8, which makes a batch of 1"
    ):
        fit(data=data, mixing=mixing)


def test_a_target_of_one_sample_has_no_variance() -> None:
    with pytest.raises(RosterError, match="AdaBN takes the variance of the target's samples, and 'c2' has 1"):
        fit(data=shifted(target_size=1))


def test_other_loaders_are_refused() -> None:
    clients = [Client("c0", num_samples=40), Client("c2", role="target", num_samples=40)]
    module = AdaBN(clients, "c2", 2, *network())
    batch = {name: tuple(each.tensors) for name, each in shifted().items() if name != "c1"}
    with pytest.raises(TypeError, match="AdaBN reads training samples from a FederatedLoader, got DataLoader"):
        trainer(1, federated=False).fit(module, torch.utils.data.DataLoader([batch], batch_size=None))


def test_entropy_is_that_of_torch() -> None:
    module = AdaBN(["c0", "c1", "c2"], "c2", 2, *network(), mixing=1.0, entropy_weight=2.0)
    module.configure_model()
    x = shifted()["c2"].tensors[0]
    p = module.replicas["c2"](x).softmax(dim=1)
    expected = -2.0 * F.kl_div(torch.full_like(p, 0.5).log(), p, reduction="batchmean") + 2.0 * torch.log(
        torch.tensor(2.0)
    )
    torch.testing.assert_close(module.loss(module.target, (x, None)), expected)
