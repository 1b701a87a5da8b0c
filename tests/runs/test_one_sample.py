"""A batch of one sample, on which BatchNorm cannot be trained: told before the first round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedlit import FederatedModule
from fedlit.federation import RosterError
from fedlit.methods import FedAvg, FedRFTCAClosedForm, SourceOnly
from fedlit.models import Bottleneck, Features, SmallCNN
from helpers import build, digits, loader, shards, trainer


def normed(width: int = 5) -> nn.Module:
    network = nn.Sequential(nn.Linear(width, 6), nn.BatchNorm1d(6))
    network.out_features = 6  # type: ignore[assignment]
    return network


def run(
    extractor: nn.Module,
    method: type[FederatedModule] = SourceOnly,
    classifier: nn.Module | None = None,
    size: int = 9,
    rounds: int = 1,
    federated: bool = True,
    strategy: dict[str, Any] | None = None,
    arguments: dict[str, Any] | None = None,
    **kwargs: Any,
) -> FederatedModule:
    torch.manual_seed(0)
    data = shards(3, size=12)
    data["c1"] = torch.utils.data.TensorDataset(*(tensor[:size] for tensor in data["c1"].tensors))
    module = method(["c0", "c1", "c2"], "c2", 2, extractor, classifier, **(arguments or {}))
    how = {"strategy": strategy or {}} if federated else {}
    trainer(rounds, federated=federated, **how).fit(module, loader(data, **({"batch_size": 4} | kwargs)))
    return module


CURE = "set drop_last=True, which leaves the last batch out, or another batch_size, or use GroupNorm"


@pytest.mark.parametrize("federated", [True, False])
def test_client_samples_and_way_out_are_told_before_the_first_round(federated: bool) -> None:
    message = rf"client 'c1' trains on 9 samples with batch_size=4, which makes a batch of 1 sample, .*: {CURE}"
    with pytest.raises(RosterError, match=message):
        run(normed(), federated=federated)
    with pytest.raises(RosterError, match=message):  # in the classifier, too
        run(Features(5), classifier=nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2)))
    with pytest.raises(RosterError, match=r"with batch_size=1, .*: raise batch_size, or"):
        run(normed(), batch_size=1, drop_last=True)


def test_what_trains_on_one_sample_is_left_alone() -> None:
    still = normed().eval()
    assert run(still, arguments={"optimizer": lambda params: torch.optim.SGD(params, 0.1)}).federation.round_idx == 1
    group = nn.Sequential(nn.Linear(5, 4), nn.GroupNorm(2, 4))
    group.out_features = 4  # type: ignore[assignment]
    assert run(group).federation.round_idx == 1


def test_pixels_of_one_image_are_many_values() -> None:
    data = shards(3, size=5)
    images = {
        name: torch.utils.data.TensorDataset(torch.randn(5, 1, 8, 8), each.tensors[1]) for name, each in data.items()
    }
    torch.manual_seed(0)
    module = SourceOnly(list(data), "c2", 2, SmallCNN(1, width=4))
    trainer(1).fit(module, loader(images, batch_size=4))
    assert module.federation.round_idx == 1
    torch.manual_seed(0)
    module = SourceOnly(list(data), "c2", 2, Bottleneck(SmallCNN(1, width=4), 2), nn.Sequential(nn.BatchNorm1d(2)))
    with pytest.raises(RosterError, match="client 'c0' trains on 5 samples"):
        trainer(1).fit(module, loader(images, batch_size=4))


def test_clients_that_do_not_train_may_have_one_sample() -> None:
    data = shards(3, size=8)
    data["c2"] = torch.utils.data.TensorDataset(*(tensor[:5] for tensor in data["c2"].tensors))
    torch.manual_seed(0)
    module = SourceOnly(list(data), "c2", 2, normed())
    trainer(1).fit(module, loader(data, batch_size=4))
    assert module.federation.round_idx == 1
    sizes = [len(digits().split(name).train) for name in ("clean", "blended", "fonts")]
    batch = next(number for number in range(30, 400) if any(size % number == 1 for size in sizes))
    digital = digits(batch_size=batch, target_labels=1.0)
    closed = build(FedRFTCAClosedForm, digital, extractor=normed(64), num_frequencies=8, num_components=4)
    trainer(1).fit(closed, digital)
    assert closed.federation.round_idx == 1
    with pytest.raises(RosterError, match=f"with batch_size={batch}, which makes a batch of 1 sample"):
        trainer(1).fit(build(FedAvg, digital, extractor=normed(64)), digital)
