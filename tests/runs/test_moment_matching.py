"""FedDAN and FedCORAL: steps against autograd of the joint loss, what is sent and known, and who sits out."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from fedlit import functional as fn
from fedlit.federation import DivergedError, Schedule
from fedlit.methods import FedCORAL, FedDAN
from fedlit.methods.mean_matching import MomentMatching
from fedlit.privacy import PairwiseMasking
from helpers import descend_, fit, unequal

LR = 0.5
WIDTH = 3
shifted = partial(unequal, shift=0.4, scale=0.3, dtype=torch.float64)
METHODS: dict[str, tuple[type[MomentMatching], dict[str, Any]]] = {
    "FedDAN": (FedDAN, {"num_frequencies": 20}),
    "FedCORAL": (FedCORAL, {}),
    "FedCORAL, scaled": (FedCORAL, {"feature_variance": "mean"}),
}
ASKS = ("FedDAN", "FedCORAL, scaled")
"""Those that learn the scale of the features."""


class Linear(nn.Linear):
    """An extractor of 5 numbers to 3 features, in double precision."""

    def __init__(self) -> None:
        super().__init__(5, WIDTH, dtype=torch.float64)


def build(name: str, clients: list[str], **kwargs: Any) -> MomentMatching:
    torch.manual_seed(0)
    method, arguments = METHODS[name]
    given: dict[str, Any] = {"average": "classifier", "optimizer": lambda params: SGD(params, lr=LR)}
    classifier = nn.Linear(WIDTH, 2, dtype=torch.float64)
    return method(clients, clients[-1], 2, Linear(), classifier, **(arguments | given | kwargs))


def distance(name: str, match: str, features: list[Tensor], seed: int) -> Tensor:
    """The joint loss of the sources' features and, last, the target's, by the functions for all samples together."""
    *sources, target = features
    if name == "FedDAN":
        unit = fn.sample_frequencies(20, WIDTH, 1.0, seed=seed)
        frequencies = fn.mixture_frequencies(unit, fn.kernel_ladder(torch.cat(sources), target))
        means = [fn.random_fourier_features(z, frequencies).mean(0) for z in features]
        gaps = [own - means[-1] for own in means[:-1]]
        if match == "pooled":
            return torch.stack(gaps).mean(0).square().sum()
        return torch.stack([gap.square().sum() for gap in gaps]).mean()
    if name == "FedCORAL, scaled":
        variance = torch.cov(torch.cat(features).detach().T).trace() / WIDTH
        return distance("FedCORAL", match, [z / variance.sqrt() for z in features], seed)
    if match == "pairwise":
        return torch.stack([fn.coral_loss(z, target) for z in sources]).mean()
    # torch's covariance of samples with weights: sources count alike, whatever the size of their batches
    shares = torch.cat([torch.full((len(z),), 1 / len(z) / len(sources), dtype=torch.float64) for z in sources])
    covariance = torch.cov(torch.cat(sources).T, aweights=shares.detach())
    return (covariance - torch.cov(target.T)).square().sum() / (4 * WIDTH**2)


@pytest.mark.parametrize(("sizes", "every"), [((12, 7, 9), "step"), ((12, 7, 9), "round"), ((11, 8), "step")])
@pytest.mark.parametrize("match", ["pooled", "pairwise"])
@pytest.mark.parametrize("name", METHODS)
def test_all_clients_gradients_together_are_that_of_the_joint_loss(
    name: str, match: Any, sizes: tuple[int, ...], every: Any
) -> None:
    data = shifted(*sizes)
    module = build(name, list(data), match=match, mmd_weight=3.0, every=every)
    snapshots = fit(module, data)
    features, total = [], torch.zeros((), dtype=torch.float64)
    for client, samples in data.items():
        replica = snapshots.start[client]
        features.append(replica.extractor(samples.tensors[0]))
        if client != module.target.name:
            total = total + F.cross_entropy(replica.classifier(features[-1]), samples.tensors[1])
    joint = distance(name, match, features, module.federation.seed)
    (total + 3.0 * joint).backward()
    for client in data:
        for key, param in snapshots.start[client].extractor.named_parameters():
            expected = (param - LR * param.grad).detach()
            got = snapshots.rounds[0][client][f"extractor.{key}"]
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, msg=f"{client} {key}")
            assert float(param.grad.abs().max()) > 1e-4 or key == "bias"  # CORAL's target: it moves the mean alone
    logged = float(module.trainer.callback_metrics["target/loss"])
    if match == "pooled" or len(sizes) == 2:
        assert logged == pytest.approx(3.0 * float(joint), rel=1e-6)
    if name in ASKS:
        z = torch.cat(features).detach()
        middle = fn.kernel_ladder(z, z[:0], num_kernels=1)
        torch.testing.assert_close(module.replicas["c0"].reference, middle, rtol=1e-12, atol=0)


def test_between_exchanges_the_others_stay_and_ones_own_mean_moves() -> None:
    data = shifted(12, 7, 9)
    module = build("FedDAN", list(data), every="round", num_kernels=1, bandwidth=3.0)
    snapshots = fit(module, data, strategy={"local_steps": 2})
    frequencies = fn.mixture_frequencies(fn.sample_frequencies(20, WIDTH, 1.0, seed=module.federation.seed), [3.0])

    def mean(client: str, extractor: nn.Module) -> Tensor:
        return fn.random_fourier_features(extractor(data[client].tensors[0]), frequencies).mean(0)

    first = torch.stack([mean(client, snapshots.start[client].extractor) for client in ("c0", "c1")]).mean(0).detach()
    extractor = copy.deepcopy(snapshots.start["c2"].extractor)
    for _ in range(2):
        descend_((first - mean("c2", extractor)).square().sum(), extractor.parameters(), LR)
    for key, param in extractor.named_parameters():
        torch.testing.assert_close(
            snapshots.rounds[0]["c2"][f"extractor.{key}"], param.detach(), rtol=1e-12, atol=1e-12
        )
    assert len([entry for entry in module.federation.ledger if entry.channel == "moments"]) == 6  # up and down, once


@pytest.mark.parametrize("name", METHODS)
def test_without_the_target_or_without_sources_nothing_is_matched(name: str) -> None:
    data = shifted(12, 7, 9)
    alone = fit(build(name, list(data), mmd_weight=0.0), data)
    for present in (["c0", "c1"], ["c2"]):
        snapshots = fit(build(name, list(data)), data, strategy={"participation": Schedule([present])})
        start = snapshots.start["c2"].state_dict()["extractor.weight"]
        assert torch.equal(snapshots.rounds[0]["c2"]["extractor.weight"], start)
        if "c0" in present:
            ours, theirs = (each.rounds[0]["c0"]["extractor.weight"] for each in (snapshots, alone))
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_clients_whose_epoch_is_over_sit_out(name: str) -> None:
    """Sources of 3 and 2 batches, a target of 2: after the second nobody is matched, and the longer source goes on."""
    data = shifted(18, 12, 12)
    module = build(name, list(data))
    snapshots = fit(module, data, batch_size=6)
    up = [e for e in module.federation.ledger if e.channel == "moments" and e.receiver == "server"]
    assert [(entry.sender, entry.messages) for entry in up] == [("c0", 2), ("c1", 2), ("c2", 2)]
    assert [float(snapshots.rounds[0][client]["share"]) for client in data] == [0, 0, 0]


@pytest.mark.parametrize(("sizes", "matched"), [((12, 13, 12), ["c0", "c2"]), ((12, 12, 13), []), ((13, 12), [])])
def test_a_batch_of_one_sample_has_no_covariance(sizes: Any, matched: list[str]) -> None:
    """The third batch of 13 samples in batches of 6 has one."""
    data = shifted(*(size + 6 if size == 12 else size for size in sizes))
    module = build("FedCORAL", list(data))
    with pytest.warns(UserWarning, match=r"\['c\d'\] have a batch of 1") as caught:
        snapshots = fit(module, data, batch_size=6, rounds=2)
    assert len([each for each in caught if "covariance" in str(each.message)]) == 1
    assert [client for client in data if snapshots.rounds[0][client]["share"]] == matched
    assert all(bool(value.isfinite().all()) for state in snapshots.rounds[-1].values() for value in state.values())


@pytest.mark.parametrize(("name", "argument"), [("FedDAN", "bandwidth"), ("FedCORAL, scaled", "feature_variance")])
def test_features_that_are_all_alike_have_no_scale(name: str, argument: str) -> None:
    data = {name: TensorDataset(torch.ones_like(d.tensors[0]), d.tensors[1]) for name, d in shifted(6, 6, 6).items()}
    message = (
        rf"the features of all samples of \['c0', 'c1', 'c2'\] are alike in round 0, .* give {argument}, a smaller"
    )
    with pytest.raises(DivergedError, match=message):
        fit(build(name, list(data)), data)


def test_a_client_with_one_sample_is_in_the_scale_though_it_has_no_covariance() -> None:
    data = shifted(6, 1, 6)
    module = build("FedCORAL, scaled", list(data))
    with pytest.warns(UserWarning, match=r"\['c1'\] have a batch of 1 sample"):
        snapshots = fit(module, data)
    z = torch.cat([snapshots.start[name].extractor(data[name].tensors[0]).detach() for name in data])
    assert module.pair_distance("c0") == pytest.approx(2 * float(torch.cov(z.T).trace()), rel=1e-12)


def test_what_a_backend_cannot_hide_is_not_sent() -> None:
    data = shifted(12, 7, 9)
    alone = fit(build("FedDAN", list(data), mmd_weight=0.0, average="all"), data)
    strategy = {"privacy": {name: PairwiseMasking(colluders=0) for name in ("scale", "moments", "weights")}}
    strategy["participation"] = Schedule([["c0", "c2"]])
    module = build("FedDAN", list(data), match="pairwise", average="all")
    with pytest.warns(UserWarning, match="sends no mean over channel 'moments'"):
        snapshots = fit(module, data, strategy=strategy)
    assert float(snapshots.rounds[0]["c2"]["share"]) == 0
    assert alone.start.keys() == snapshots.start.keys()
