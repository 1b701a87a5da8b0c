"""GALA: its steps against steps by hand, its weights, and what it is without a discrepancy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from adversaries import LR, NAMES, Extractor, fit, shifted
from fedlit.federation import Client, Schedule
from fedlit.methods import GALA, FedAvg
from helpers import batches_of, descend_, weights

RATIO, RISE, TAU, LAMBDA = 0.5, 0.7, 0.3, 0.6


def gala(names: Any = None, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    names = NAMES if names is None else names
    given: dict[str, Any] = {"extractor": Extractor(), "classifier": nn.Linear(4, 2).double(), "weighting": "uniform"}
    given |= {"optimizer": lambda params: SGD(params, lr=LR), "discrepancy_weight": LAMBDA} | kwargs
    return GALA(names, "c2", 2, given.pop("extractor"), given.pop("classifier"), **given)


def distance(net: Any, one: Tensor, other: Tensor) -> float:
    with torch.no_grad():
        return float((net.extractor(one).float().mean(dim=0) - net.extractor(other).float().mean(dim=0)).norm())


def test_two_rounds_are_those_of_its_equations() -> None:
    """Two sources, which are two groups of one each, in whatever way they are dealt."""
    data = shifted((24, 16, 24))
    module = gala(target_lr_ratio=RATIO, classifier_lr=RISE, temperature=TAU)
    start: Any = fit(module, data, batch_size=8, rounds=2)
    common, judges = copy.deepcopy(start["c2"]), []
    for round_idx in range(2):
        nets = {name: copy.deepcopy(common) for name in NAMES}
        apart = [distance(common, data[name].tensors[0], data["c2"].tensors[0]) for name in NAMES[:-1]]
        attention = torch.softmax(-torch.tensor(apart) / (sum(apart) / 2) / TAU, dim=0).tolist()
        for name in NAMES[:-1]:
            for x, y in batches_of(data, name, round_idx):
                descend_(F.cross_entropy(nets[name](x), y), nets[name].parameters(), LR)
        for x, _ in batches_of(data, "c2", round_idx) if judges else ():
            features, raised = nets["c2"].extractor(x), copy.deepcopy(judges)
            one, two = (judge(features.detach()).softmax(dim=1) for judge in raised)
            up = (one - two).abs().sum(dim=1).mean()
            descend_(up, [param for judge in raised for param in judge.parameters()], -RISE)
            one, two = (judge(features).softmax(dim=1) for judge in raised)
            loss = LAMBDA * (one - two).abs().sum(dim=1).mean()
            descend_(loss, nets["c2"].extractor.parameters(), RATIO * LR)
        judges = [copy.deepcopy(nets[name].classifier) for name in NAMES[:-1]]
        with torch.no_grad():
            rows = zip(
                common.parameters(),
                nets["c2"].parameters(),
                nets["c0"].parameters(),
                nets["c1"].parameters(),
                strict=True,
            )
            for param, own, *theirs in rows:
                step = sum(share * (their - param) for share, their in zip(attention, theirs, strict=True))
                param.copy_(own + step)
    for name in NAMES:
        torch.testing.assert_close(weights(module, name), common.state_dict(), atol=1e-7, rtol=0)  # means are float32
    assert module.trainer.callback_metrics["attention/c0"] == pytest.approx(attention[0], abs=1e-6)


def test_without_discrepancy_at_a_high_temperature_it_is_fedavg_over_the_sources() -> None:
    data = shifted((24, 16, 24))
    torch.manual_seed(0)
    networks = Extractor(), nn.Linear(4, 2).double()
    module = gala(temperature=1e9, discrepancy_weight=0.0, extractor=networks[0], classifier=networks[1])
    fit(module, data, batch_size=8, rounds=3)
    plain = FedAvg(NAMES, "c2", 2, *networks, weighting="uniform", optimizer=lambda p: SGD(p, lr=LR))
    fit(plain, data, batch_size=8, rounds=3)
    for name in NAMES:
        torch.testing.assert_close(weights(module, name), weights(plain, name), atol=1e-8, rtol=0)


def test_the_nearer_source_counts_more_and_a_small_temperature_takes_it_alone() -> None:
    """c1 is drawn around the target's centre plus .5, c0 around that plus 1."""
    shares = []
    for temperature in (10.0, 0.1, 1e-3):
        module = gala(temperature=temperature)
        fit(module, shifted((24, 24, 24)), batch_size=8)
        shares.append(float(module.trainer.callback_metrics["attention/c1"]))
    assert 0.5 < shares[0] < shares[1] < shares[2] == pytest.approx(1.0)


def test_sources_that_were_away_keep_their_classifier_and_a_round_without_the_target_changes_nothing() -> None:
    module = gala()
    presence = [["c0", "c1", "c2"], ["c0", "c1"], ["c0", "c2"]]
    fit(module, shifted((24, 16, 20)), batch_size=8, rounds=1)
    first = {name: copy.deepcopy(state) for name, state in module._classifiers.items()}
    after_one = weights(module, "c2")
    module = gala()
    fit(module, shifted((24, 16, 20)), batch_size=8, rounds=2, strategy={"participation": Schedule(presence)})
    assert all(torch.equal(weights(module, "c2")[key], value) for key, value in after_one.items())
    module = gala()
    fit(module, shifted((24, 16, 20)), batch_size=8, rounds=3, strategy={"participation": Schedule(presence)})
    kept = module._classifiers
    assert not torch.equal(kept["c0"]["weight"], first["c0"]["weight"])
    assert [*kept] == ["c0", "c1"]
    assert torch.equal(kept["c1"]["weight"], first["c1"]["weight"])


def test_one_source_has_none_to_agree_with() -> None:
    with pytest.raises(ValueError, match=r"clients must be of at least two sources.*FedDANN"):
        gala(["c0", "c2"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"align_magnitudes": True}, "align_magnitudes must be False for GALA"),
        ({"classifier": nn.Linear(4, 2).double().requires_grad_(False)}, "nothing is trained"),
        ({"extractor": Extractor().requires_grad_(False)}, "the extractor has nothing to train"),
    ],
)
def test_what_it_could_not_train_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gala(**given)


def test_another_run_of_a_module_starts_without_the_classifiers_of_the_first() -> None:
    """With a labelled target, which trains in the first round; of the same weights both runs are one."""
    data = shifted((24, 16, 20))
    names = [Client("c0"), Client("c1"), Client("c2", "target", labelled=True)]
    module, fresh = gala(names), gala(names)
    fit(module, data, batch_size=8)
    fresh.load_state_dict(module.state_dict())
    for each in (module, fresh):
        fit(each, data, batch_size=8)
    for name in NAMES:
        torch.testing.assert_close(weights(module, name), weights(fresh, name), atol=0, rtol=0)


def test_classifiers_on_the_target_leave_its_statistics_as_they_are() -> None:
    """With layers of normalisation that stay at home, which the sources' classifiers come without."""
    head = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    module = gala(classifier=head, local_norm=True)
    fit(module, shifted((24, 16, 24)), batch_size=8, rounds=3)
    assert len(module._classifiers["c0"]) == 2
    assert int(module.replicas["c2"].classifier[0].num_batches_tracked) == 0  # unlabelled, it trains the extractor
    assert int(module.replicas["c0"].classifier[0].num_batches_tracked) == 9
