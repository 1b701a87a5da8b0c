"""KD3A and Co-MDA: votes, shares and means by hand, and the same from models as through secure sums."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from fedlit import Client, FederatedModule
from fedlit.callbacks.privacy_report import report
from fedlit.federation import RosterError, Schedule
from fedlit.functional import between_class_variance, consensus_focus, knowledge_vote
from fedlit.methods import KD3A, CoMDA
from fedlit.methods.co_mda import easiest
from fedlit.methods.taught_target import on_grid
from fedlit.models import MLP, Replica, SmallCNN, Twins
from fedlit.privacy import CKKS, FixedPoint, PairwiseMasking, Plain
from fedlit.run.run import Run
from helpers import build, digits, loader, same, shards, trainer, weights

NAMES = ["c0", "c1", "c2", "c3"]
SOURCES, TARGET = NAMES[:3], "c3"


def make(method: type[FederatedModule], names: Sequence[Client | str] = NAMES, **kwargs: Any) -> Any:
    """Two classes, three sources whose models differ, and a target."""
    torch.manual_seed(0)
    given = {"warmup_rounds": 0, "optimizer": lambda params: SGD(params, lr=0.3)} | kwargs
    return method(names, TARGET, 2, given.pop("extractor", None) or MLP(5, [6]), **given)  # type: ignore[arg-type]


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

    def told(self, round_idx: int) -> Tensor:
        """Probabilities of the sources for the target's samples, shape (3, n_T, C)."""
        inputs = data()[TARGET].tensors[0]
        with torch.no_grad():
            return torch.stack([on_grid(self.before[round_idx][name](inputs).softmax(dim=1)) for name in SOURCES])


class WatchedKD3A(Watched, KD3A):
    pass


class WatchedCoMDA(Watched, CoMDA):
    pass


# ---------------------------------------------------------------- models and votes


FORMS: dict[str, tuple[type[FederatedModule], dict[str, Any]]] = {
    "KD3A": (KD3A, {"gate": 0.6}),
    "KD3A, soft": (KD3A, {"gate": (0.6, 0.8), "vote": "soft"}),
    "KD3A, samples": (KD3A, {"gate": 0.6, "weighting": "samples"}),
    "CoMDA": (CoMDA, {"forget_rate": 0.3}),
}


@pytest.mark.parametrize("name", FORMS)
def test_models_and_votes_give_the_same_to_the_last_bit(name: str) -> None:
    method, arguments = FORMS[name]
    models = fitted(method, 4, exchange="models", **arguments)
    votes = fitted(method, 4, exchange="votes", **arguments)
    assert models._lessons.keys() == votes._lessons.keys()
    assert all(torch.equal(models._lessons[key], votes._lessons[key]) for key in models._lessons)
    assert all(same(weights(models, client), weights(votes, client)) for client in NAMES)
    sent = [set(module.federation.ledger.bytes_by_channel()) - {"metrics"} for module in (models, votes)]
    assert "teacher" in sent[0] - sent[1]
    assert "samples" in sent[1] - sent[0]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("backend", [Plain(FixedPoint()), PairwiseMasking(colluders=0)], ids=["grid", "masked"])
def test_hidden_answers_are_those_in_the_clear_to_the_last_bit(name: str, backend: Any) -> None:
    """In the first round: later ones follow means of weights, which the grid rounds."""
    method, arguments = FORMS[name]
    clear = fitted(method, 1, exchange="votes", **arguments)
    hidden = fitted(method, 1, exchange="votes", strategy={"privacy": backend}, **arguments)
    assert clear._lessons
    assert all(torch.equal(clear._lessons[key], hidden._lessons[key]) for key in clear._lessons)
    if method is KD3A:
        shares = [[float(module._kept[client]["share"]) for client in NAMES] for module in (clear, hidden)]
        exact = "weighting" not in arguments  # a share of samples is no number of the grid
        assert shares[0] == (shares[1] if exact else pytest.approx(shares[1], abs=1e-6))


@pytest.mark.parametrize("name", FORMS)
def test_sums_by_ckks_are_near_those_in_the_clear(name: str) -> None:
    """Which are near 0, and no votes, where nobody is confident."""
    pytest.importorskip("tenseal")
    method, arguments = FORMS[name]
    clear = fitted(method, 1, exchange="votes", **arguments)
    hidden = fitted(method, 1, exchange="votes", strategy={"privacy": CKKS()}, **arguments)
    for key, lesson in clear._lessons.items():
        torch.testing.assert_close(hidden._lessons[key], lesson, atol=1e-3, rtol=0)
    if name == "KD3A":
        assert 0 < float(clear._lessons["weights"].mean()) < 1
        assert all(torch.equal(clear._lessons[key], hidden._lessons[key]) for key in clear._lessons)


@pytest.mark.parametrize("exchange", ["models", "votes"])
@pytest.mark.parametrize("method", [KD3A, CoMDA])
def test_a_round_under_way_resumes(method: type[FederatedModule], exchange: str, tmp_path: Path) -> None:
    """What the target was told, what sources have seen, and what is kept of each, go along in the checkpoint."""
    arguments = {"exchange": exchange} | ({"gate": 0.6} if method is KD3A else {})
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    straight = make(method, **arguments)
    trainer(4, [saving], enable_checkpointing=True).fit(straight, loader(data()))
    resumed = make(method, **arguments)
    trainer(4).fit(resumed, loader(data()), ckpt_path=str(tmp_path / "step=7.ckpt"))  # of 3 steps in a round
    assert all(same(weights(straight, client), weights(resumed, client)) for client in NAMES)
    assert straight.federation.ledger == resumed.federation.ledger
    saved = torch.load(tmp_path / "step=7.ckpt", weights_only=True)
    assert saved["federation"]["batch_idx"] == 1
    assert [name for name, own in saved["clients"].items() if own["kept"]] == (
        [TARGET] if exchange == "models" else [*SOURCES, TARGET][: 4 if method is KD3A else 3]
    )


def test_samples_are_told_once_and_to_who_was_away_later() -> None:
    schedule = Schedule([["c0", "c1", "c3"], ["c0", "c1", "c3"], NAMES, NAMES])
    module = fitted(KD3A, 4, gate=0.6, exchange="votes", strategy={"participation": schedule})
    told = [(e.round_idx, e.receiver) for e in module.federation.ledger if e.channel == "samples"]
    assert sorted(told) == [(0, "c0"), (0, "c1"), (2, "c2")]
    inputs = data()[TARGET].tensors[0]
    assert all(torch.equal(module._samples[name]["inputs"], inputs) for name in SOURCES)


@pytest.mark.parametrize("method", [KD3A, CoMDA])
def test_the_privacy_report_says_who_sees_what(method: type[FederatedModule]) -> None:
    masked = {"strategy": {"privacy": PairwiseMasking(colluders=0)}}
    for exchange, channel, words in (
        (
            "votes",
            "samples",
            "the inputs of all training samples of the target (exchange='models' sends none), from the",
        ),
        ("models", "teacher", "the whole model of each source, from the sources to the target, every round"),
    ):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            module = fitted(method, 1, exchange=exchange, **(masked if exchange == "votes" else {}))
        samples = [str(each.message) for each in warned if "sends single samples" in str(each.message)]
        assert len(samples) == (exchange == "votes")
        assert all(f"{words} target to the sources, once. Receivers can keep them" in text for text in samples)
        found = {each.channel: each for each in report(module.federation).channels}
        assert words in found[channel].sent
        assert found[channel].description is None
        assert found[channel].sent.startswith("single samples, in the clear" if samples else "in the clear")
        hidden = [name for name, each in found.items() if each.description and "Masking" in each.description.backend]
        assert bool(hidden) == (exchange == "votes")


@pytest.mark.parametrize(("method", "exchange"), [(KD3A, "models"), (KD3A, "votes"), (CoMDA, "votes")])
def test_asking_moves_nothing_at_the_teachers(method: type[FederatedModule], exchange: str) -> None:
    """Statistics stand still, there is no dropout, and every layer is in the mode that it was in."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6).eval()  # one that was told to stand still
    network = nn.Sequential(nn.Linear(5, 6), norm, nn.BatchNorm1d(6), nn.Dropout(0.5))
    network.out_features = 6  # type: ignore[assignment]
    module = make(method, extractor=network, exchange=exchange)
    trainer(1).fit(module, loader(data()))
    replica = module.replicas["c0"].train()
    replica.extractor[1].eval()
    before = weights(module, "c0")
    inputs = data()[TARGET].tensors[0]
    with torch.no_grad():
        expected = copy.deepcopy(replica).eval()(inputs).softmax(dim=1)
    torch.testing.assert_close(module.answers(replica, [inputs[:10], inputs[10:]]), expected, atol=2e-6, rtol=0)
    assert same(before, weights(module, "c0"))
    assert [part.training for part in replica.extractor] == [True, False, True, True]


def test_a_round_without_the_target_or_without_sources_exchanges_nothing() -> None:
    schedule = Schedule([NAMES, SOURCES, ["c3"], NAMES])
    for method, channel in ((KD3A, "votes"), (CoMDA, "mixture")):
        module = fitted(method, 4, exchange="votes", strategy={"participation": schedule})
        booked = {entry.round_idx for entry in module.federation.ledger if entry.channel == channel}
        assert booked == {0, 3}


@pytest.mark.parametrize("method", [KD3A, CoMDA])
def test_the_target_starts_a_round_after_its_sources(method: type[FederatedModule]) -> None:
    module = fitted(method, 1)
    torch.manual_seed(0)
    start = MLP(5, [6]).state_dict()
    if method is CoMDA:  # where nobody gives it an extractor
        assert all(torch.equal(module.replicas[TARGET].extractor.state_dict()[key], start[key]) for key in start)
    assert {client.name for client in module.learners(0)} == {*SOURCES}
    assert {client.name for client in module.learners(1)} == {*NAMES}


# ---------------------------------------------------------------- KD3A


@pytest.mark.parametrize("soft", [False, True])
def test_the_target_learns_the_votes_of_the_sources_models(soft: bool) -> None:
    module = fitted(WatchedKD3A, 2, gate=0.6, vote="soft" if soft else "hard")
    vote = knowledge_vote(module.told(1), 0.6, soft)
    assert vote.kept.any()
    assert not vote.kept.all()
    known = slice(None) if soft else vote.kept
    assert torch.equal(module._lessons["targets"][known], vote.targets[known])
    assert torch.equal(module._lessons["weights"], vote.weights)


@pytest.mark.parametrize("rule", ["leave_one_out", "shapley"])
def test_extractors_are_averaged_by_focus_and_classifiers_stay(rule: Any) -> None:
    arguments = {} if rule == "leave_one_out" else {"focus": rule}
    module = fitted(WatchedKD3A, 1, gate=0.6, momentum=0.5, **arguments)
    told = module.told(0)
    focus = consensus_focus(told, 0.6, rule)
    target_share = float(knowledge_vote(told, 0.6).kept.double().mean()) / 4
    shares = [*((1 - target_share) * focus / focus.sum()).tolist(), target_share]
    assert sum(shares) == pytest.approx(1)
    assert [float(module._kept[name]["share"]) for name in NAMES] == pytest.approx(shares, abs=1e-12)
    before = module.before[0]
    for key in before["c0"].extractor.state_dict():
        mean = sum(s * before[name].extractor.state_dict()[key] for s, name in zip(shares, NAMES, strict=True))
        for name in NAMES:
            torch.testing.assert_close(module.replicas[name].extractor.state_dict()[key], mean)
    for name in NAMES:
        assert same(module.replicas[name].classifier.state_dict(), before[name].classifier.state_dict())


def test_shares_follow_with_momentum_and_those_of_samples_are_the_papers() -> None:
    module = fitted(WatchedKD3A, 2, gate=0.6, momentum=0.75)
    sizes = fitted(WatchedKD3A, 2, gate=0.6, momentum=0.75, weighting="samples")
    for each, by_size in ((module, False), (sizes, True)):
        rounds = []
        for round_idx in range(2):
            told = each.told(round_idx)
            focus = consensus_focus(told, 0.6)  # all clients have 24 samples
            own = 1 / 4 if by_size else float(knowledge_vote(told, 0.6).kept.double().mean()) / 4
            rounds.append(torch.tensor([*((1 - own) * focus / focus.sum()).tolist(), own]))
        expected = 0.75 * rounds[0] + 0.25 * rounds[1]
        shares = torch.tensor([float(each._kept[name]["share"]) for name in NAMES])
        torch.testing.assert_close(shares, expected, atol=1e-6, rtol=0)


def test_the_mean_of_batchnorm_statistics_keeps_the_spread_of_the_means() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))
    network.out_features = 6  # type: ignore[assignment]
    for bn in ("moments", "mean"):
        module = fitted(WatchedKD3A, 1, gate=0.6, bn=bn, extractor=copy.deepcopy(network))
        shares = torch.tensor([float(module._kept[name]["share"]) for name in NAMES])[:, None]
        norms = [module.before[0][name].extractor[1] for name in NAMES]
        means, variances = (torch.stack([getattr(n, f"running_{what}") for n in norms]) for what in ("mean", "var"))
        mean = (shares * means).sum(dim=0)
        spread = (shares * (means - mean).square()).sum(dim=0) if bn == "moments" else 0.0
        got = module.replicas[TARGET].extractor[1]
        torch.testing.assert_close(got.running_mean, mean)
        torch.testing.assert_close(got.running_var, (shares * variances).sum(dim=0) + spread, atol=1e-6, rtol=1e-5)
        assert float((shares * (means - mean).square()).sum()) > 0.05


def test_parameters_of_one_number_are_averaged_too() -> None:
    class Scaled(nn.Module):
        out_features = 5

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    module = fitted(WatchedKD3A, 1, gate=0.6, extractor=Scaled())
    shares = [float(module._kept[name]["share"]) for name in NAMES]
    each = [float(module.before[0][name].extractor.scale) for name in NAMES]
    mean = sum(share * scale for share, scale in zip(shares, each, strict=True))
    assert float(module.replicas["c2"].extractor.scale) == pytest.approx(mean)


def test_where_nobody_is_confident_the_target_learns_nothing_and_sources_count_alike() -> None:
    module = fitted(KD3A, 2, gate=0.999999)
    assert not module._lessons["weights"].any()
    assert [float(module._kept[name]["share"]) for name in NAMES] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    inputs = data()[TARGET].tensors[0][:8]
    loss = module.loss(module.target, (inputs, None))
    assert loss == 0
    loss.backward()
    assert all(param.grad is not None and not param.grad.any() for param in module.replicas[TARGET].parameters())


def test_the_targets_loss_is_that_of_the_votes_on_its_batch() -> None:
    """Without mixtures: the mean over the batch of weight times cross-entropy, with the rows of the batch's samples."""
    seen: list[tuple[Tensor, float]] = []

    class Losses(KD3A):
        def loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
            loss = super().loss(client, batch)
            if client.is_target and self._lessons:
                rows = [int((x == everything).all(dim=1).nonzero()) for x in batch[0]]
                own = -self.replicas[client](batch[0]).detach().log_softmax(dim=1)
                lesson = self._lessons["targets"][rows], self._lessons["weights"][rows]
                seen.append((loss.detach(), float(((own * lesson[0]).sum(dim=1) * lesson[1]).mean())))
            return loss

    everything = data()[TARGET].tensors[0]
    fitted(Losses, 3, gate=0.6, mixup=0.0)
    fitted(Losses, 3, gate=0.6, mixup=0.0, strategy={"local_steps": 2})
    assert len(seen) == 2 * 3 + 2 * 2
    assert [float(loss) for loss, _ in seen] == pytest.approx([by_hand for _, by_hand in seen], rel=1e-5)


def test_labelled_samples_of_the_target_are_learnt_beside() -> None:
    names = [*SOURCES, Client(TARGET, role="target", labelled=True)]
    module = make(KD3A, names, gate=0.999999)
    trainer(2).fit(module, loader(data()))
    inputs, labels = (tensor[:6] for tensor in data()[TARGET].tensors)
    labels = torch.where(torch.arange(6) < 4, labels, -1)
    expected = F.cross_entropy(module.replicas[TARGET](inputs[:4]), labels[:4])
    module.run.samples.positions = lambda client: torch.arange(6)
    torch.testing.assert_close(module.loss(module.target, (inputs, labels)), expected)


def test_a_source_that_was_away_fetches_the_newest_extractor() -> None:
    schedule = Schedule([NAMES, ["c0", "c1", "c3"], NAMES])
    away = fitted(KD3A, 2, gate=0.6, strategy={"participation": schedule})
    ours, theirs = (away.replicas[name].extractor.state_dict() for name in ("c2", "c0"))
    assert not same(ours, theirs)
    caught: dict[str, Any] = {}

    class Caught(KD3A):
        def on_round_start(self, run: Run) -> None:
            super().on_round_start(run)
            if run.clock.round_idx == 2:
                caught.update({name: copy.deepcopy(self.replicas[name].extractor.state_dict()) for name in NAMES})

    fitted(Caught, 3, gate=0.6, strategy={"participation": schedule})
    assert all(same(caught["c2"], caught[name]) for name in NAMES)
    assert same(caught["c0"], theirs)


def test_a_gate_rises_over_the_rounds_of_a_run() -> None:
    module = fitted(WatchedKD3A, 4, gate=(0.5, 0.9))
    vote = knowledge_vote(module.told(3), 0.5 + 0.4 * 3 / 4)
    assert torch.equal(module._lessons["weights"], vote.weights)
    assert not torch.equal(vote.weights, knowledge_vote(module.told(3), 0.5).weights)


# ---------------------------------------------------------------- Co-MDA


def mixture_by_hand(module: WatchedCoMDA, rounds: int, ensemble: float, sharpness: float) -> Tensor:
    """M after so many rounds: moving means, corrected, weighted by a softmax of how far apart their classes are."""
    moved = torch.zeros(3, 24, 2, dtype=torch.float64)
    for round_idx in range(rounds):
        moved = ensemble * moved + (1 - ensemble) * module.told(round_idx).double()
    corrected = moved / (1 - ensemble**rounds)
    spread = torch.stack([between_class_variance(each) for each in corrected])
    return ((sharpness * spread).softmax(dim=0)[:, None, None] * corrected).sum(dim=0)


@pytest.mark.parametrize(("ensemble", "sharpness"), [(0.6, 5.0), (0.0, 5.0), (0.6, 0.0)])
def test_the_targets_mixture_by_hand(ensemble: float, sharpness: float) -> None:
    """Moving means count from their first round as they should; an ensemble of 0 has none, sharpness 0 no weights."""
    module = fitted(WatchedCoMDA, 3, ensemble=ensemble, sharpness=sharpness)
    expected = mixture_by_hand(module, 3, ensemble, sharpness)
    torch.testing.assert_close(module._lessons["mixture"].double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(expected.sum(dim=1), torch.ones(24, dtype=torch.float64), atol=1e-5, rtol=0)


def test_a_single_source_is_its_own_mixture() -> None:
    names = ["c0", Client(TARGET, role="target", labelled=False)]
    module = make(CoMDA, names, ensemble=0.0)
    trainer(1).fit(module, loader({name: data()[name] for name in ("c0", TARGET)}))
    with torch.no_grad():
        expected = module.replicas["c0"].eval()(data()[TARGET].tensors[0]).softmax(dim=1)
    torch.testing.assert_close(module._lessons["mixture"], expected, atol=1e-5, rtol=0)


def test_too_sharp_weights_are_told() -> None:
    with pytest.raises(RosterError, match=r"the weights of all sources are 0 .*: lower sharpness \(500.0\)"):
        fitted(CoMDA, 2, sharpness=500.0)


class Turn(CoMDA):
    """A run that stands where a test says."""

    share = 0.0

    def lesson(self) -> dict[str, Tensor]:
        return self._lessons

    def own_share(self) -> float:
        return self.share


def at_work(share: float = 0.0, **kwargs: Any) -> Turn:
    module = make(Turn, mixup=0.0, **kwargs)
    module.configure_model()
    module.share = share
    module.federation.round_idx = 11  # the forget rate has risen
    generator = torch.Generator().manual_seed(3)
    module._lessons = {"mixture": torch.randn(8, 2, generator=generator).softmax(dim=1)}
    return module


def test_each_network_learns_what_the_other_finds_easy() -> None:
    module = at_work(forget_rate=0.5)
    inputs = data()[TARGET].tensors[0][:8]
    twins = module.twins
    labels = module._lessons["mixture"].argmax(dim=1)
    expected = torch.zeros(())
    for own, peer in ((twins.own, twins.peer), (twins.peer, twins.own)):
        losses = F.cross_entropy(peer(inputs), labels, reduction="none")
        least = losses.sort().indices[:4]
        expected = expected + F.cross_entropy(own(inputs[least]), labels[least])
    torch.testing.assert_close(module.loss(module.target, (inputs, None)), expected)


def test_the_two_networks_are_alike() -> None:
    """Changing places changes neither loss nor prediction; their classifiers differ from the start."""
    module = at_work(share=0.4, forget_rate=0.5)
    inputs = data()[TARGET].tensors[0][:8]
    twins = module.twins
    assert not torch.equal(twins.classifier.weight, twins.peer.classifier.weight)
    before, predicted = module.loss(module.target, (inputs, None)), twins(inputs)
    twins.extractor, twins.peer.extractor = twins.peer.extractor, twins.extractor
    twins.classifier, twins.peer.classifier = twins.peer.classifier, twins.classifier
    torch.testing.assert_close(module.loss(module.target, (inputs, None)), before)
    torch.testing.assert_close(twins(inputs), predicted)


def test_at_the_end_of_a_run_networks_follow_themselves_and_leave_nothing_out() -> None:
    module = at_work(share=1.0, forget_rate=0.5)
    inputs = data()[TARGET].tensors[0][:8]
    assert module.kept_share() == 1.0
    twins = module.twins
    expected = sum(F.cross_entropy(net(inputs), net(inputs).argmax(dim=1)) for net in (twins.own, twins.peer))
    torch.testing.assert_close(module.loss(module.target, (inputs, None)), expected)


def test_twins_predict_the_mean_of_their_probabilities() -> None:
    torch.manual_seed(0)
    twins = Twins(Replica(MLP(5, [6]), nn.Linear(6, 3)), nn.Linear(6, 3))
    x = torch.randn(4, 5)
    expected = (twins.own(x).softmax(dim=1) + twins.peer(x).softmax(dim=1)) / 2
    torch.testing.assert_close(twins(x).exp(), expected)
    with torch.no_grad():
        next(twins.extractor.parameters()).add_(1.0)
    twins.start_peer_()
    assert same(twins.extractor.state_dict(), twins.peer.extractor.state_dict())
    assert not torch.equal(twins.own(x), twins.peer(x))


def test_after_a_warm_up_both_networks_start_from_it() -> None:
    module = fitted(CoMDA, 2, warmup_rounds=1)  # round 1 is the sources' alone
    before = fitted(CoMDA, 1, warmup_rounds=1)
    shared = before.replicas[TARGET].extractor.state_dict()
    twins = module.replicas[TARGET]
    assert same(twins.extractor.state_dict(), shared)
    assert same(twins.peer.extractor.state_dict(), shared)


def test_a_run_too_short_for_the_two_networks_is_told() -> None:
    said = r"the target of CoMDA has 14 local steps after the warm-up, which may be too few: .* Plan more rounds"
    with pytest.warns(UserWarning, match=said):
        fitted(CoMDA, 4, strategy={"local_steps": 7}, warmup_rounds=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="CoMDA")
        fitted(CoMDA, 3, strategy={"local_steps": 100}, warmup_rounds=0)


def test_the_share_that_is_left_out_rises_and_falls() -> None:
    module = make(CoMDA, forget_rate=0.2)
    module.configure_model()
    trainer(40).fit(module, loader(data()))
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


def test_images_with_batchnorm_train_with_both() -> None:
    for method in (KD3A, CoMDA):
        module = build(method, digits(flatten=False), extractor=SmallCNN(1, width=2), warmup_rounds=1)
        trainer(4, strategy={"local_steps": 1}, limit_val_batches=0).fit(module, digits(flatten=False))
        assert all(tensor.isfinite().all() for tensor in weights(module, "fonts").values())


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        (KD3A, {"gate": 1.0}, r"gate must be in \[0, 1\), got 1.0"),
        (KD3A, {"gate": (0.9, -0.1)}, r"gate must be in \[0, 1\), got -0.1"),
        (KD3A, {"gate": (0.9, 0.9, 0.9)}, r"gate must be a number, or the first and the last of a run, got \(0.9"),
        (KD3A, {"vote": "loud"}, r"vote must be one of \('hard', 'soft'\), got 'loud'"),
        (KD3A, {"focus": "all"}, r"focus must be one of \('leave_one_out', 'shapley'\), got 'all'"),
        (
            KD3A,
            {"focus": "shapley", "exchange": "votes"},
            "focus='shapley' needs the votes of single sources, .* or exchange='models'",
        ),
        (KD3A, {"mixup": -1.0}, r"mixup \(beta\) must be at least 0 and finite, got -1.0"),
        (KD3A, {"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        (KD3A, {"bn": "none"}, r"bn must be one of \('moments', 'mean'\), got 'none'"),
        (KD3A, {"weighting": "sqrt"}, r"weighting must be one of \('samples', 'uniform'\), got 'sqrt'"),
        (KD3A, {"exchange": "letters"}, "exchange must be 'models' or 'votes', got 'letters'"),
        (KD3A, {"exchange": "models", "local_norm": True}, "exchange='models' needs whole models at the target"),
        (CoMDA, {"ensemble": 1.0}, r"ensemble must be in \[0, 1\), got 1.0"),
        (CoMDA, {"forget_rate": -0.1}, r"forget_rate must be in \[0, 1\), got -0.1"),
        (CoMDA, {"sharpness": float("inf")}, "sharpness must be at least 0 and finite, got inf"),
        (CoMDA, {"mixup": float("nan")}, r"mixup \(beta\) must be at least 0 and finite, got nan"),
    ],
)
def test_arguments_out_of_range_are_refused(method: type[FederatedModule], arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(method, **arguments)


def test_training_data_without_an_order_are_refused() -> None:
    """Answers are about samples of a dataset, which others than a `FederatedLoader` do not tell."""
    found = [{name: (x.tensors[0][:8], x.tensors[1][:8]) for name, x in data().items()}]
    with pytest.raises(TypeError, match="CoMDA reads training samples from a FederatedLoader, got DataLoader"):
        trainer(1, federated=False).fit(make(CoMDA), DataLoader(found, batch_size=None))
