"""KD3A and Co-MDA: votes, shares and means by hand, and the same from models as through secure sums."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from fedlit import Client, FederatedModule, Run
from fedlit.callbacks.privacy_report import report
from fedlit.federation import FederationError
from fedlit.functional import between_class_variance, consensus_focus, knowledge_vote
from fedlit.methods import KD3A, CoMDA
from fedlit.methods.co_mda import easiest
from fedlit.methods.taught_target import on_grid
from fedlit.models import MLP
from helpers import layers, loader, same, shards, trainer, weights

NAMES = ["c0", "c1", "c2", "c3"]
SOURCES, TARGET = NAMES[:3], "c3"


def make(method: type[FederatedModule], names: Sequence[Client | str] = NAMES, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    given = {"warmup_rounds": 0, "optimizer": lambda params: SGD(params, lr=0.3)} | kwargs
    return method(names, TARGET, 2, copy.deepcopy(given.pop("extractor", None)) or MLP(5, [6]), **given)  # type: ignore[arg-type]


def data() -> dict[str, Any]:
    found = shards(4, 24)
    for k, name in enumerate(SOURCES):  # each source has a domain, and an opinion, of its own
        found[name].tensors[0][:, k] += 2.0
    return found


def fitted(method: type[FederatedModule], rounds: int = 3, **kwargs: Any) -> Any:
    strategy = kwargs.pop("strategy", {})
    module = make(method, **kwargs)
    trainer(rounds, strategy=strategy).fit(module, loader(data()))
    return module


class Watched(FederatedModule):
    """Remembers what the clients' networks were when each round ended, before anything was exchanged."""

    def on_round_end(self, run: Run) -> None:
        if not hasattr(self, "before"):
            self.before: list[dict[str, Any]] = []
        self.before.append({name: copy.deepcopy(self.replicas[name]).eval() for name in NAMES})
        super().on_round_end(run)

    def answers_of(self, round_idx: int) -> Tensor:
        """Probabilities of the sources for the target's samples, shape (3, n_T, C)."""
        inputs = data()[TARGET].tensors[0]
        with torch.no_grad():
            return torch.stack([on_grid(self.before[round_idx][name](inputs).softmax(dim=1)) for name in SOURCES])


class WatchedKD3A(Watched, KD3A):
    pass


class WatchedCoMDA(Watched, CoMDA):
    pass


def noisy() -> nn.Module:
    """A network whose teachers would change, if they were asked as they are trained."""
    torch.manual_seed(0)
    return layers(6, nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))


FORMS: dict[str, tuple[type[FederatedModule], dict[str, Any]]] = {
    "KD3A": (KD3A, {"gate": 0.6}),
    "KD3A, soft": (KD3A, {"gate": (0.6, 0.8), "vote": "soft"}),
    "KD3A, samples": (KD3A, {"gate": 0.6, "weighting": "samples"}),
    "KD3A, noisy": (KD3A, {"gate": 0.6, "extractor": noisy()}),
    "CoMDA": (CoMDA, {"forget_rate": 0.3}),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "CoMDA" else pytest.mark.slow) for n in FORMS])
def test_models_and_votes_give_the_same_to_the_last_bit(name: str) -> None:
    method, arguments = FORMS[name]
    models = fitted(method, 3, exchange="models", **arguments)
    votes = fitted(method, 3, exchange="votes", **arguments)
    assert all(same(weights(models, client), weights(votes, client)) for client in NAMES)
    sent = [set(module.federation.ledger.bytes_by_channel()) - {"metrics"} for module in (models, votes)]
    assert "teacher" in sent[0] - sent[1]
    assert "samples" in sent[1] - sent[0]


@pytest.mark.parametrize("exchange", ["votes", "models"])
def test_votes_warn_that_they_send_single_samples_and_the_report_says_who_sees_what(exchange: str) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        module = fitted(KD3A, 1, exchange=exchange)
    assert sum("sends single samples" in str(each.message) for each in warned) == (exchange == "votes")
    sent = {each.channel: each.sent for each in report(module.federation).channels}
    if exchange == "votes":
        assert "the inputs of all training samples of the target" in sent["samples"]
    else:
        assert "the whole model of each source" in sent["teacher"]


def test_the_target_starts_a_round_after_its_sources() -> None:
    module = fitted(CoMDA, 1)
    torch.manual_seed(0)
    assert same(module.replicas[TARGET].extractor.state_dict(), MLP(5, [6]).state_dict())
    assert {client.name for client in module.learners(0)} == {*SOURCES}
    assert {client.name for client in module.learners(1)} == {*NAMES}


@pytest.mark.parametrize(("vote", "gate"), [("hard", 0.6), ("soft", 0.6), ("hard", (0.5, 0.9))])
def test_the_targets_loss_is_that_of_the_sources_votes_on_its_batch(vote: str, gate: Any) -> None:
    seen: list[tuple[float, float]] = []
    everything = data()[TARGET].tensors[0]

    class Losses(WatchedKD3A):
        def loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
            loss = super().loss(client, batch)
            last = self.federation.round_idx - 1
            if client.is_target and last >= 0:
                first, end = gate if isinstance(gate, tuple) else (gate, gate)
                found = knowledge_vote(self.answers_of(last), first + (end - first) * last / 3, vote == "soft")
                rows = [int((x == everything).all(dim=1).nonzero()) for x in batch[0]]
                own = -self.replicas[client](batch[0]).detach().log_softmax(dim=1)
                each = (own * found.targets[rows]).nan_to_num().sum(dim=1) * found.weights[rows]
                seen.append((float(loss.detach()), float(each.mean())))
            return loss

    fitted(Losses, 3, gate=gate, vote=vote, mixup=0.0)
    assert len(seen) == 2 * 3
    assert [loss for loss, _ in seen] == pytest.approx([by_hand for _, by_hand in seen], rel=1e-5)
    assert len({loss for loss, _ in seen}) > 1


@pytest.mark.parametrize(
    ("focus", "momentum", "weighting"),
    [
        ("leave_one_out", 0.5, "uniform"),
        ("shapley", 0.5, "uniform"),
        ("leave_one_out", 0.75, "uniform"),
        ("leave_one_out", 0.75, "samples"),
    ],
)
def test_extractors_are_averaged_by_shares_and_classifiers_stay(focus: Any, momentum: float, weighting: Any) -> None:
    """Shares follow focus with momentum; all clients have 24 samples, of which ``samples`` makes the target's share."""
    module = fitted(WatchedKD3A, 2, gate=0.6, momentum=momentum, focus=focus, weighting=weighting)
    rounds = []
    for round_idx in range(2):
        answers = module.answers_of(round_idx)
        of_sources = consensus_focus(answers, 0.6, focus)
        own = 1 / 4 if weighting == "samples" else float(knowledge_vote(answers, 0.6).kept.double().mean()) / 4
        rounds.append(torch.tensor([*((1 - own) * of_sources / of_sources.sum()).tolist(), own]))
    check_average(module, (momentum * rounds[0] + (1 - momentum) * rounds[1]).tolist())


def test_where_nobody_is_confident_the_target_learns_nothing_and_sources_count_alike() -> None:
    module = fitted(WatchedKD3A, 2, gate=0.999999)
    check_average(module, [1 / 3, 1 / 3, 1 / 3, 0])
    loss = module.loss(module.target, (data()[TARGET].tensors[0][:8], None))
    assert loss == 0
    loss.backward()
    assert all(param.grad is not None and not param.grad.any() for param in module.replicas[TARGET].parameters())


def check_average(module: Any, shares: list[float]) -> None:
    before = module.before[-1]
    for key in before["c0"].extractor.state_dict():
        mean = sum(s * before[name].extractor.state_dict()[key] for s, name in zip(shares, NAMES, strict=True))
        for name in NAMES:
            torch.testing.assert_close(
                module.replicas[name].extractor.state_dict()[key], mean, atol=1e-6, rtol=1e-5, check_dtype=False
            )
    for name in NAMES:
        assert same(module.replicas[name].classifier.state_dict(), before[name].classifier.state_dict())


@pytest.mark.parametrize("bn", ["moments", "mean"])
def test_the_mean_of_batchnorm_statistics_keeps_the_spread_of_the_means(bn: Any) -> None:
    network = layers(6, nn.Linear(5, 6), nn.BatchNorm1d(6))
    module = fitted(WatchedKD3A, 1, gate=0.999999, bn=bn, extractor=network)  # sources count alike
    norms = [module.before[0][name].extractor[1] for name in SOURCES]
    means, variances = (torch.stack([getattr(n, f"running_{what}") for n in norms]) for what in ("mean", "var"))
    spread = means.var(dim=0, correction=0)
    got = module.replicas[TARGET].extractor[1]
    torch.testing.assert_close(got.running_mean, means.mean(dim=0))
    expected = variances.mean(dim=0) + (spread if bn == "moments" else 0.0)
    torch.testing.assert_close(got.running_var, expected, atol=1e-6, rtol=1e-5)
    assert float(spread.sum()) > 0.05


@pytest.mark.parametrize(("ensemble", "sharpness"), [(0.6, 5.0), (0.0, 5.0), (0.6, 0.0)])
def test_the_targets_mixture_by_hand(ensemble: float, sharpness: float) -> None:
    """Moving means, corrected for their first rounds, weighted by a softmax of how far apart their classes are."""
    taught: list[Tensor] = []

    class Taught(WatchedCoMDA):
        def pseudo_labels(self) -> dict[str, Tensor]:
            found = super().pseudo_labels()
            if self.federation.round_idx == 2:
                taught.append(found["mixture"])
            return found

    module = fitted(Taught, 3, ensemble=ensemble, sharpness=sharpness)
    moved = torch.zeros(3, 24, 2, dtype=torch.float64)
    for round_idx in range(2):
        moved = ensemble * moved + (1 - ensemble) * module.answers_of(round_idx).double()
    corrected = moved / (1 - ensemble**2)
    spread = torch.stack([between_class_variance(each) for each in corrected])
    expected = ((sharpness * spread).softmax(dim=0)[:, None, None] * corrected).sum(dim=0)
    found = torch.cat(taught).double()
    assert len(found) == 24  # in the order of the batches
    torch.testing.assert_close(
        found[found[:, 0].argsort()], expected[expected[:, 0].argsort()], atol=1e-5, rtol=0, check_dtype=False
    )


def test_too_sharp_weights_are_refused() -> None:
    with pytest.raises(FederationError, match="lower sharpness"):
        fitted(CoMDA, 2, sharpness=500.0)


class Turn(CoMDA):
    """A run that stands where a test says."""

    share = 0.0

    def pseudo_labels(self) -> dict[str, Tensor]:
        return {"mixture": self.mixture}

    def own_share(self) -> float:
        return self.share


def at_work(share: float = 0.0, **kwargs: Any) -> Turn:
    module = make(Turn, mixup=0.0, **kwargs)
    module.configure_model()
    module.share = share
    module.federation.round_idx = 11  # the forget rate has risen
    module.mixture = torch.randn(8, 2, generator=torch.Generator().manual_seed(3)).softmax(dim=1)
    return module


def test_each_network_learns_what_the_other_finds_easy() -> None:
    module, inputs = at_work(forget_rate=0.5), data()[TARGET].tensors[0][:8]
    twins, labels = module.twins, module.mixture.argmax(dim=1)
    expected = torch.zeros(())
    for own, peer in ((twins.own, twins.peer), (twins.peer, twins.own)):
        losses = F.cross_entropy(peer(inputs), labels, reduction="none")
        least = losses.sort().indices[:4]
        expected = expected + F.cross_entropy(own(inputs[least]), labels[least])
    torch.testing.assert_close(module.loss(module.target, (inputs, None)), expected)


def test_the_two_networks_are_alike() -> None:
    module, inputs = at_work(share=0.4, forget_rate=0.5), data()[TARGET].tensors[0][:8]
    twins = module.twins
    assert not torch.equal(twins.classifier.weight, twins.peer.classifier.weight)
    before, predicted = module.loss(module.target, (inputs, None)), twins(inputs)
    twins.extractor, twins.peer.extractor = twins.peer.extractor, twins.extractor
    twins.classifier, twins.peer.classifier = twins.peer.classifier, twins.classifier
    torch.testing.assert_close(module.loss(module.target, (inputs, None)), before)
    torch.testing.assert_close(twins(inputs), predicted)
    mean = (twins.own(inputs).softmax(dim=1) + twins.peer(inputs).softmax(dim=1)) / 2
    torch.testing.assert_close(twins(inputs).exp(), mean)


def test_at_the_end_of_a_run_networks_follow_themselves_and_leave_nothing_out() -> None:
    module, inputs = at_work(share=1.0, forget_rate=0.5), data()[TARGET].tensors[0][:8]
    assert module.kept_share() == 1.0
    expected = sum(
        F.cross_entropy(net(inputs), net(inputs).argmax(dim=1)) for net in (module.twins.own, module.twins.peer)
    )
    torch.testing.assert_close(module.loss(module.target, (inputs, None)), expected)


def test_after_a_warm_up_both_networks_start_from_it() -> None:
    module = fitted(CoMDA, 2, warmup_rounds=1)  # round 1 is the sources' alone
    shared = fitted(CoMDA, 1, warmup_rounds=1).replicas[TARGET].extractor.state_dict()
    twins = module.replicas[TARGET]
    assert same(twins.extractor.state_dict(), shared)
    assert same(twins.peer.extractor.state_dict(), shared)


def test_the_share_that_is_left_out_rises_and_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make(CoMDA, forget_rate=0.2)
    monkeypatch.setattr(module, "share_over", lambda: module.federation.round_idx / 40)
    shares = []
    for round_idx in (1, 6, 11, 20, 30, 39):
        module.federation.round_idx = round_idx
        shares.append((module.own_share(), module.kept_share()))
    expected = [(0, 1), (0, 0.9), (0, 0.8), (0, 0.8), (0.5, 0.9), (0.95, 0.99)]
    assert shares == [pytest.approx(each) for each in expected]


def test_the_easiest_samples_are_those_of_least_loss() -> None:
    losses = torch.tensor([0.5, 0.1, 0.9, 0.1, 0.3])
    assert easiest(losses, 0.6).tolist() == [1, 3, 4]
    assert easiest(losses, 0.61).tolist() == [0, 1, 3, 4]
    assert easiest(losses, 1.0).tolist() == [0, 1, 2, 3, 4]
    assert easiest(losses, 0.01).tolist() == [1, 3]
    assert easiest(losses[:1], 0.5).tolist() == [0]
