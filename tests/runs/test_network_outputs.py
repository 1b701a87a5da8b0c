"""Networks are tried on a sample before a run: what they make is what methods need, or its shape is named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import fedlit
from faulty_samples import CLIENTS, NUM_CLASSES, TARGET, WIDTH, load, parts
from fedlit import FederatedModule
from fedlit.data import FederatedLoader
from fedlit.federation import SampleError
from fedlit.methods import FedAvg, FedDAN, FedDANN
from fedlit.models import MLP
from helpers import trainer
from own_modules import Simple


class Made(nn.Module):
    """A linear layer whose features are changed, of a width that may be wrong."""

    def __init__(self, change: Callable[[Tensor], Any] = lambda features: features, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 8)
        self.change = change
        self.out_features = width

    def forward(self, x: Tensor) -> Any:
        return self.change(self.linear(x))


class Cast(nn.Module):
    """A network in another precision that takes and gives single precision."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 8).to(kind)
        self.kind = kind
        self.out_features = 8

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.linear(x.to(self.kind)).float()
        return features


def fit(extractor: nn.Module, method: type[FederatedModule] = FedAvg, **arguments: Any) -> FederatedModule:
    module = method(CLIENTS, TARGET, NUM_CLASSES, extractor, **arguments)
    trainer(1, strategy={"local_steps": 2}).fit(module, load(parts()))
    return module


ODD = {
    "a tuple": (Made(lambda features: (features, features)), "makes a tuple"),
    "a dictionary": (Made(lambda features: {"pooled": features}), "makes a dict"),
    "an axis more": (Made(lambda features: features.unsqueeze(1)), r"makes torch.float32 of shape \(2, 1, 8\)"),
    "no axis of samples": (Made(lambda features: features.mean(0)), r"makes torch.float32 of shape \(8,\)"),
    "another width": (Made(width=9), r"with out_features=9, and makes torch.float32 of shape \(2, 8\)"),
}


@pytest.mark.parametrize("method", [FedAvg, FedDANN, FedDAN])
@pytest.mark.parametrize("name", ODD)
def test_features_of_another_form_are_refused_before_the_first_step(name: str, method: type[FederatedModule]) -> None:
    extractor, message = ODD[name]
    with pytest.raises(
        ValueError, match=rf"extractor Made must make one tensor .*{message}, of 2 samples of client 'a'"
    ):
        fit(extractor, method)


def test_a_classifier_of_another_width_is_named() -> None:
    message = r"classifier Linear must make outputs of"
    with pytest.raises(ValueError, match=message):
        fit(MLP(WIDTH, [8]), classifier=nn.Linear(8, 4))
    with pytest.raises(ValueError, match=r"classifier Linear must make .* of"):
        fit(MLP(WIDTH, [8]), classifier=nn.Linear(7, 3))


def test_a_network_that_does_not_take_inputs_of_this_shape_is_refused_by_client() -> None:
    extractor = nn.Sequential(nn.Linear(WIDTH + 1, 8))
    extractor.out_features = 8  # type: ignore[assignment]
    message = r"extractor Sequential does not take the"
    with pytest.raises(SampleError, match=message):
        fit(extractor)


def test_a_classifier_may_pool_what_the_extractor_makes() -> None:
    class Pooled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mean(1))

    fit(Made(lambda features: features.unsqueeze(1)), classifier=Pooled(8, NUM_CLASSES))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
def test_an_extractor_in_another_precision_trains_if_its_forward_converts(kind: torch.dtype) -> None:
    extractor = Cast(kind)
    before = extractor.linear.weight.detach().clone()
    after = fit(extractor).replicas["a"].extractor.linear.weight
    assert after.dtype == kind
    assert not torch.equal(after, before)


@pytest.mark.parametrize("change", [Tensor.detach, torch.no_grad()(lambda features: features.mul(1))])
def test_an_extractor_that_gets_no_gradient_is_named(change: Callable[[Tensor], Tensor]) -> None:
    with pytest.warns(UserWarning, match=r"extractor Made have no gradient, .*'linear.weight'"):
        fit(Made(change))


def evaluate(module: FederatedModule) -> None:
    data = {name: TensorDataset(*each) for name, each in parts().items()}
    trainer(1).validate(module, FederatedLoader(data, 8, training=False), verbose=False)


@pytest.mark.parametrize("wrapped", [True, False])
def test_probabilities_in_place_of_logits_are_named(wrapped: bool) -> None:
    for last, is_wrong in ((nn.Softmax(1), True), (nn.LogSoftmax(1), False), (nn.Identity(), False)):
        head = nn.Sequential(nn.Linear(8, NUM_CLASSES), last)
        module: FederatedModule = FedAvg(CLIENTS, TARGET, NUM_CLASSES, Made(), classifier=head)
        if wrapped:
            module = fedlit.Federated(
                Simple(nn.Sequential(nn.Linear(WIDTH, NUM_CLASSES), last)), CLIENTS, TARGET, NUM_CLASSES
            )
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            evaluate(module)
        assert any("outputs of the network are probabilities" in str(each.message) for each in told) == is_wrong


@pytest.mark.parametrize("persistent", [True, False])
def test_a_mask_with_infinity_is_no_divergence(persistent: bool) -> None:
    extractor = Made()
    extractor.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1), persistent=persistent)
    if not persistent:
        assert torch.equal(fit(extractor).replicas["a"].extractor.mask, extractor.mask)
        return
    with pytest.raises(ValueError, match=r"\['extractor.mask'\] of client 'a' have NaN"):
        fit(extractor)


class Broken(Dataset[Any]):
    """A dataset with one file that cannot be read."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        if index == 10:
            raise OSError("image file is truncated")
        return self.x[index], self.y[index]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_a_dataset_notes_whose_sample_it_is(num_workers: int) -> None:
    data = {name: TensorDataset(*each) for name, each in parts().items()} | {"b": Broken(*parts()["b"])}
    module = FedAvg(CLIENTS, TARGET, NUM_CLASSES, MLP(WIDTH, [8]))
    with pytest.raises(OSError, match="image file is truncated") as found:
        trainer(1).fit(module, FederatedLoader(data, 8, num_workers=num_workers))
    told = f"{found.value} {getattr(found.value, '__notes__', '')}"
    assert "row 10 of client 'b'" in told
