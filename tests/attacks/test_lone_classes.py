"""A class that one source alone has: what the others read of it in sums by class, which masks do not hide."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import backends
from fedlit.callbacks import Validators
from fedlit.federation import ChannelError, Federation, RosterError, Schedule, Summed
from fedlit.federation.lone_classes import class_sources, find_lone_classes
from fedlit.federation.transport import Transport
from fedlit.functional import random_fourier_features, sample_frequencies
from fedlit.methods import FedAvg, FedDaDiL, FedJDA, FedRFTCAClosedForm
from fedlit.models import Features
from fedlit.privacy import GaussianMechanism, PairwiseMasking, Plain, PrivacyWarning, QuorumError
from helpers import loader, same, trainer, weights
from refused import refused, slow
from thread_transport import on_ranks

WIDTH, CLASSES, N = 4, 3, 3
MASKED: dict[str, Any] = {"privacy": PairwiseMasking(colluders=0)}
Data = dict[str, TensorDataset]

# of each client, samples of each class; "a" alone has class 2
LONE = {"a": (6, 5, 7), "b": (8, 4, 0), "t": (5, 5, 5)}
SHARED = {"a": (6, 5, 7), "b": (8, 4, 2), "t": (5, 5, 5)}


class Raw(nn.Identity):
    out_features = WIDTH


def samples(numbers: dict[str, tuple[int, ...]], moved: float = 0.0) -> Data:
    """Float64 samples in [-1, 1]; those of class 2 at "a" can be moved."""
    draws, data = torch.Generator().manual_seed(0), {}
    for name, counts in numbers.items():
        y = torch.repeat_interleave(torch.arange(CLASSES), torch.tensor(counts))
        x = 2 * torch.rand(len(y), WIDTH, generator=draws, dtype=torch.float64) - 1
        x[(y == 2) & (name == "a")] += moved
        data[name] = TensorDataset(x, y)
    return data


def read(monkeypatch: pytest.MonkeyPatch, channel: str) -> list[dict[str, dict[str, Tensor]]]:
    """What clients read of means over a channel from here on, one entry for each mean."""
    found, mean = [], Federation.mean

    def noted(federation: Federation, name: str, *args: Any, **kwargs: Any) -> Any:
        received = mean(federation, name, *args, **kwargs)
        if name == channel:
            found.append(received)
        return received

    monkeypatch.setattr(Federation, "mean", noted)
    return found


def closed_form(data: Data, strategy: Any = MASKED, method: Any = FedRFTCAClosedForm, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    given = {"num_frequencies": N, "num_components": 2, "unit_norm": False, "gamma": 0.3}
    module = method([*data], "t", CLASSES, Raw(), **(given | kwargs))
    trainer(1, precision="64-true", strategy=strategy).fit(module, loader(data, 8))
    return module


def dictionary(data: Data, strategy: Any = MASKED, **kwargs: Any) -> FedDaDiL:
    torch.manual_seed(0)
    module = FedDaDiL([*data], "t", CLASSES, Features(WIDTH), atom_size=6, num_atoms=2, unit_norm=False, **kwargs)
    trainer(1, precision="64-true", strategy=strategy).fit(module, loader(data, 64))
    return module


def validated(data: Data, strategy: Any = MASKED, score: str = "class_means", **kwargs: Any) -> FedAvg:
    torch.manual_seed(0)
    module = FedAvg([*data], "t", CLASSES, Features(WIDTH))
    run = trainer(1, [Validators([score], **kwargs)], precision="64-true", strategy=strategy)
    run.fit(module, loader(data, 64), loader(data, 64, training=False, guarded="t"))
    return module


def features(data: Data, name: str) -> tuple[Tensor, Tensor]:
    x, y = data[name].tensors
    return random_fourier_features(x, sample_frequencies(N, WIDTH, 1.0, seed=0).double()), y


def test_the_target_reads_the_mean_of_a_lone_class_where_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack, as before: one division, or a difference of two sums where the class itself is not there."""
    data = samples(LONE)
    found = read(monkeypatch, "moments")
    closed_form(data, lone_classes="send")
    by_class = found[0]["t"]["by_class"].double()
    phi, y = features(data, "a")
    secret = phi[y == 2].mean(dim=0)
    torch.testing.assert_close(by_class[:-1, 2] / by_class[-1, 2], secret, atol=2e-5, rtol=0)
    rest = found[0]["t"]["first"].double() - by_class[:-1, :2].sum(dim=1)
    torch.testing.assert_close(rest / (1 - by_class[-1, :2].sum()), secret, atol=2e-5, rtol=0)


@pytest.mark.parametrize("method", [FedRFTCAClosedForm, FedJDA])
def test_no_moment_holds_a_sample_of_a_lone_class(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data, found = samples(LONE), read(monkeypatch, "moments")
    with pytest.warns(PrivacyWarning, match=r"classes \[2\] client 'a' alone"):
        module = closed_form(data, method=method)
    mean = {name: tensor.double() for name, tensor in found[0]["t"].items()}
    first, second, by_class, total = 0.0, 0.0, 0.0, 18 + 12
    rows, columns = torch.triu_indices(2 * N, 2 * N)
    for name, number in (("a", 18), ("b", 12)):  # each a mean over classes 0 and 1, by the number of all samples
        phi, y = features(data, name)
        phi, y = phi[y < 2], y[y < 2]
        first = first + number / total * phi.mean(dim=0)
        second = second + number / total * N * (phi.T @ phi / len(y))[rows, columns]
        known = F.one_hot(y, CLASSES).double()
        by_class = by_class + number / total * torch.cat([phi, torch.ones(len(y), 1)], dim=1).T @ known / len(y)
    for entry, expected in (("first", first), ("second", second), ("by_class", by_class)):
        torch.testing.assert_close(mean[entry], expected, atol=2e-6, rtol=0)
    assert not mean["by_class"][:, 2].any()
    torch.testing.assert_close(mean["by_class"][:-1].sum(dim=1), mean["first"], atol=1e-5, rtol=0)
    closed_form(samples(LONE, moved=9.0), method=method)
    assert all(torch.equal(found[0]["t"][entry], found[1]["t"][entry]) for entry in mean)
    state = weights(module, "t")
    assert all(bool(tensor.isfinite().all()) for tensor in state.values())
    with torch.no_grad():
        predicted = module(data["a"].tensors[0]).argmax(dim=1)
    assert int(predicted.max()) < 2


@pytest.mark.parametrize(("lone_classes", "reads"), [("send", True), ("leave_out", False)])
def test_atoms_start_without_the_moments_of_a_lone_class(
    lone_classes: Any, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, found = samples(LONE), read(monkeypatch, "class_moments")
    with pytest.warns(PrivacyWarning, match=r"classes \[2\] client 'a' alone"):
        module = dictionary(data, lone_classes=lone_classes)
    (x, y), other = data["a"].tensors, found[0]["b"]["moments"].double()
    secret = torch.cat([x[y == 2].mean(dim=0), x[y == 2].square().mean(dim=0)])
    assert bool(other[2].any()) == reads
    if reads:
        torch.testing.assert_close(other[2, :-1] / other[2, -1], secret, atol=2e-5, rtol=0)
    else:
        rows = []
        for x, y in (data[name].tensors for name in "ab"):
            x, y = x[y < 2], y[y < 2]
            known = F.one_hot(y, CLASSES).double()
            rows.append(torch.cat([known.T @ x, known.T @ x.square(), known.sum(dim=0)[:, None]], dim=1) / len(y))
        torch.testing.assert_close(other, (rows[0] + rows[1]) / 2, atol=2e-6, rtol=0)
    dictionary(samples(LONE, moved=0.5), lone_classes=lone_classes)
    assert torch.equal(found[0]["b"]["moments"], found[1]["b"]["moments"]) != reads
    assert all(bool(tensor.isfinite().all()) for tensor in weights(module, "b").values())


@pytest.mark.parametrize("score", ["class_means", "trust"])
@pytest.mark.parametrize(("lone_classes", "reads"), [("send", True), ("leave_out", False)])
def test_scores_compare_no_means_of_a_lone_class(
    score: str, lone_classes: Any, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = read(monkeypatch, "class_means")
    module = validated(samples(LONE), score=score, lone_classes=lone_classes)
    assert bool(found[0]["t"]["sums"][2].any()) == bool(found[0]["t"]["shares"][2].any()) == reads
    assert found[0]["t"]["sums"][:2].any()
    assert ("validation_classes" in module.federation.ledger.bytes_by_channel()) != reads


def trained(make: Any, data: Data, strategy: Any, **kwargs: Any) -> tuple[dict[str, Tensor], set[str]]:
    module = make(data, strategy, **kwargs)
    return weights(module, "t"), {*module.federation.ledger.bytes_by_channel()}


@pytest.mark.parametrize("make", [closed_form, slow(dictionary)])
@pytest.mark.parametrize(
    ("numbers", "strategy", "asked"),
    [
        (SHARED, MASKED, True),  # no class is lone
        (LONE, {}, False),  # nothing is hidden
        (LONE, MASKED | {"differential_privacy": GaussianMechanism(100.0, 1e-6)}, False),  # noise is for that
    ],
)
def test_otherwise_results_are_the_bits_of_before(make: Any, numbers: Any, strategy: Any, asked: bool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*leaves them out")
        left_out, channels = trained(make, samples(numbers), strategy)
    sent, others = trained(make, samples(numbers), strategy, lone_classes="send")
    if "differential_privacy" not in strategy:  # whose noise is new each time
        assert same(left_out, sent)
    assert ("class_sources" in channels) == asked
    assert "class_sources" not in others


def test_a_source_that_alone_has_each_of_its_classes_adds_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"a": (6, 5, 0), "b": (8, 4, 0), "c": (0, 0, 9), "t": (5, 5, 5)}
    found = read(monkeypatch, "moments")
    module = closed_form(samples(numbers))
    assert float(found[0]["t"]["by_class"][-1].sum()) == pytest.approx(23 / 32, abs=1e-5)
    solved: list[dict[str, Tensor]] = []
    solve = FedRFTCAClosedForm.solve
    monkeypatch.setattr(FedRFTCAClosedForm, "solve", lambda self, mean: solved.append(mean) or solve(self, mean))
    closed_form(samples(numbers))
    without = {name: counts for name, counts in numbers.items() if name != "c"}
    closed_form({name: samples(numbers)[name] for name in without})
    for entry, expected in solved[1].items():
        torch.testing.assert_close(solved[0][entry], expected, atol=5e-6, rtol=0)
    assert all(bool(tensor.isfinite().all()) for tensor in weights(module, "t").values())


@pytest.mark.parametrize("make", [closed_form, slow(dictionary), validated])
def test_sources_without_a_class_in_common_cannot_send_any(make: Any) -> None:
    data = samples({"a": (6, 5, 0), "b": (0, 0, 9), "t": (5, 5, 5)})
    with pytest.raises(RosterError, match="no class is at two sources"):
        make(data)
    make(data, lone_classes="send")


def test_a_source_that_is_not_heard_counts_for_no_class(monkeypatch: pytest.MonkeyPatch) -> None:
    data = samples({"a": (6, 5, 7), "b": (8, 4, 0), "c": (3, 3, 3), "t": (5, 5, 5)})
    found = read(monkeypatch, "moments")
    closed_form(data, MASKED | {"heard": {"moments": Schedule([["a", "b", "t"]])}})
    closed_form(data)
    assert [bool(each["t"]["by_class"][:, 2].any()) for each in found] == [False, True]


def sums_of(
    transport: Transport,
    counts: dict[str, list[float]],
    backend: Any,
    dropped: Sequence[str],
) -> dict[str, list[float]]:
    """Samples of each class in all that is sent, as local clients read it; the server loses one vector of a channel."""
    transport.losable = True
    names = [*counts, "t"]
    moments = Summed("moments", "class sums", "sources", fixed=True)
    federation = Federation(
        names, "t", channels=[moments, class_sources(moments)], transport=transport,
        placement=[[], *([name] for name in names)], privacy={"moments": backend}, seed=0,
    )  # fmt: skip
    gather_each = federation._messenger.gather_each

    def without(channel: str, messages: Any, sizes: Any, take: Any) -> None:
        lost = {"class_sources": dropped[0], "moments": dropped[1]}[channel]
        gather_each(
            channel, messages, sizes, lambda name, got: None if name == lost and "sum" in got else take(name, got)
        )

    federation._messenger.gather_each = without  # type: ignore[method-assign]
    mine = {name: torch.tensor(own) for name, own in counts.items() if federation.is_local(name)}
    found = find_lone_classes(federation, "class_sources", mine, "nothing follows")
    sent = {name: {"sums": torch.where(found[name], 0.0, own.double())} for name, own in mine.items()}
    return {name: total["sums"].tolist() for name, total in federation.sum("moments", sent).items()}


LOSING = PairwiseMasking(threshold=3, colluders=0)
COUNTS: dict[str, list[float]] = {
    "a": [3, 5, 7],
    "b": [1, 2, 0],
    "c": [4, 0, 0],
    "d": [2, 0, 0],
}  # at four, two and one of the sources


def sums(backend: Any, *dropped: str, counts: dict[str, list[float]] = COUNTS) -> dict[str, list[float]]:
    ranks = on_ranks(lambda transport: sums_of(transport, counts, backend, dropped), len(counts) + 2)
    return {name: read for rank in ranks for name, read in rank.items()}


@pytest.mark.filterwarnings("ignore:of the classes", "ignore:.*sums")
@pytest.mark.parametrize("name", ["masking", *map(slow, ("paillier", "threshold"))])
def test_a_source_that_drops_out_after_the_first_sum_leaves_no_class_to_another(name: str) -> None:
    """Or that the server reports: without "b", the second class of the total was the samples of "a" alone."""
    backend = LOSING if name == "masking" else backends.backend(name)
    assert sums(backend, "", "")["t"] == [10, 7, 0]
    for lost in ("b", "c"):  # whoever it is, as nobody knows who has the class
        with pytest.raises(QuorumError, match="may be without 0"):
            sums(backend, "", lost)


def test_a_sum_is_not_sent_without_a_client_of_the_sum_that_it_rests_on() -> None:
    federation = Federation(["a", "b", "c", "d", "t"], "t", privacy=PairwiseMasking(), seed=0)
    ones = {name: {"x": torch.ones(2)} for name in "abcd"}
    federation.sum("first", ones)
    federation.bind("second", "first", 0)
    with pytest.raises(QuorumError, match="'d'"):
        federation.sum("second", ones, among=["a", "b", "c"])
    assert "second" not in federation.ledger.bytes_by_channel()
    federation.bind("second", "first", 1)
    federation.sum("second", ones, among=["a", "b", "c"])


@pytest.mark.filterwarnings("ignore:of the classes", "ignore:.*sums")
def test_sources_may_drop_out_while_each_class_is_at_two_others() -> None:
    assert sums(LOSING, "", "b", counts=COUNTS | {"c": [4, 9, 0]})["t"] == [9, 14, 0]
    assert sums(LOSING, "a", "a")["t"] == [7, 0, 0]


@pytest.mark.filterwarnings("ignore:of the classes", "ignore:.*sums")
def test_a_source_that_the_first_sum_is_said_to_lack_sends_no_class_that_it_may_have_alone() -> None:
    """Its classes were counted at nobody, and so sent: the third class of the total was the samples of "a" alone."""
    assert sums(LOSING, "a", "")["t"] == [10, 0, 0]
    assert sums(LOSING, "b", "")["t"] == [10, 0, 0]


@pytest.mark.filterwarnings("ignore:of the classes", "ignore:.*sums")
def test_a_source_that_claims_a_class_leaves_another_alone_with_it() -> None:
    """Nothing prevents it: of the third class "b" has next to nothing, which "a" cannot know."""
    assert sums(LOSING, "", "", counts=COUNTS | {"b": [1, 2, 1e-9]})["t"] == [10, 7, 7]


def over_threads(transport: Transport, counts: dict[str, list[int]]) -> dict[str, list[bool]]:
    """Sources a, b, c and the target t, the server apart."""
    names = ["a", "b", "c", "t"]
    moments = Summed("moments", "class sums", "sources", fixed=True)
    federation = Federation(
        names, "t", channels=[moments, class_sources(moments)], transport=transport,
        placement=[[], *([name] for name in names)], privacy={"moments": PairwiseMasking()}, seed=0,
    )  # fmt: skip
    mine = {name: torch.tensor(own) for name, own in counts.items() if federation.is_local(name)}
    found = find_lone_classes(federation, "class_sources", mine, "nothing follows")
    assert federation.ledger.bytes_by_channel()["class_sources"] > 0
    federation.mean("moments", {name: {"sums": own.double()} for name, own in mine.items()})
    return {name: classes.tolist() for name, classes in found.items()}


@pytest.mark.filterwarnings("ignore:of the classes")
def test_all_clients_and_no_server_know_which_classes_are_lone() -> None:
    counts = {"a": [3, 0, 2, 5, 0], "b": [1, 0, 0, 2, 0], "c": [0, 9, 0, 4, 0]}
    ranks = on_ranks(lambda transport: over_threads(transport, counts), 5)
    assert ranks[0] == {}
    for rank, name in enumerate("abct", start=1):
        assert ranks[rank] == {name: [False, True, True, False, False]}
    counts = {"a": [3, 0, 0], "b": [0, 1, 0], "c": [0, 0, 9]}
    with pytest.raises(RosterError, match="no class is at two sources"):
        on_ranks(lambda transport: over_threads(transport, counts), 5)


def test_the_first_sum_has_the_backend_of_the_second() -> None:
    moments, others = Summed("moments", "sums", "sources"), Summed("weights", "weights", "sources")

    def channels(**choices: Any) -> Any:
        given = {"channels": [moments, class_sources(moments), others], "seed": 0}
        return Federation(["a", "b", "c", "t"], "t", **(given | choices)).channels

    noise, masked = GaussianMechanism(1.0, 1.0), PairwiseMasking()
    found = channels(privacy={"moments": masked, "weights": Plain()}, differential_privacy={"moments": noise})[
        "class_sources"
    ]
    assert found.backend is masked
    assert found.mechanism is noise
    assert not channels(privacy={"moments": Plain(), "weights": masked})["class_sources"].hides
    for choices in ({"privacy": {"class_sources": Plain()}}, {"heard": {"class_sources": Schedule([["a"]])}}):
        with refused(next(iter(choices)), ChannelError):
            channels(**choices)


@pytest.mark.parametrize("make", [closed_form, dictionary, validated])
def test_what_is_neither_left_out_nor_sent_is_refused(make: Any) -> None:
    with refused("lone_classes"):
        make(samples(SHARED), lone_classes="keep")
