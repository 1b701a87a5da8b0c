"""Networks are tried before a run: what they make is what methods need, and a batch of one sample suits BatchNorm."""

from __future__ import annotations

import re
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
from fedlit.federation import RosterError, SampleError
from fedlit.methods import FedAvg, FedDAN, FedRFTCA, FedRFTCAClosedForm, SourceOnly
from fedlit.models import MLP, Bottleneck, Features, Head, SmallCNN
from helpers import build, digits, layers, loader, shards, trainer, unequal
from own_modules import Simple
from refused import refused


class Made(nn.Module):
    """A linear layer whose features are changed, of a width that may be wrong."""

    def __init__(self, change: Callable[[Tensor], Any] = lambda features: features, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 8)
        self.change = change
        self.out_features = width

    def forward(self, x: Tensor) -> Any:
        return self.change(self.linear(x))


def fit(extractor: nn.Module, method: type[FederatedModule] = FedAvg, **arguments: Any) -> FederatedModule:
    module = method(CLIENTS, TARGET, NUM_CLASSES, extractor, **arguments)
    trainer(1, strategy={"local_steps": 2}).fit(module, load(parts()))
    return module


ODD = {
    "a tuple": (Made(lambda features: (features, features)), "makes a tuple"),
    "a dictionary": (Made(lambda features: {"pooled": features}), "makes a dict"),
    "an axis more": (Made(lambda features: features.unsqueeze(1)), r"makes torch.float32 of shape \(2, 1, 8\)"),
    "no axis of samples": (Made(lambda features: features.mean(0)), r"makes torch.float32 of shape \(8,\)"),
    "another width": (Made(width=9), r"makes torch.float32 of shape \(2, 8\)"),
}


@pytest.mark.parametrize("method", [FedAvg, FedDAN])
@pytest.mark.parametrize("name", ODD)
def test_features_of_another_form_are_refused_before_the_first_step(name: str, method: type[FederatedModule]) -> None:
    extractor, made = ODD[name]
    with refused("extractor") as caught:
        fit(extractor, method)
    assert re.search(rf"Made, which {made}, of 2 samples of client 'a'", str(caught.value))


@pytest.mark.parametrize(
    ("extractor", "classifier", "error", "message"),
    [
        (MLP(WIDTH, [8]), nn.Linear(8, 4), ValueError, "^classifier must be"),
        (MLP(WIDTH, [8]), nn.Linear(7, 3), ValueError, "^classifier must be"),
        (layers(8, nn.Linear(WIDTH + 1, 8)), None, SampleError, "extractor Sequential does not take the"),
    ],
)
def test_networks_that_do_not_fit_together_or_to_inputs_are_named(
    extractor: nn.Module, classifier: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fit(extractor, classifier=classifier)


def test_a_classifier_of_aligned_features_with_other_outputs_than_classes_is_refused() -> None:
    sizes = {"num_frequencies": 8, "num_components": 4}
    fit(MLP(WIDTH, [8]), FedRFTCA, classifier=Head(4, NUM_CLASSES), **sizes)
    with refused("classifier") as caught:
        fit(MLP(WIDTH, [8]), FedRFTCA, classifier=Head(4, NUM_CLASSES + 1), **sizes)
    assert f"outputs of shape (2, {NUM_CLASSES})" in str(caught.value)


def test_a_classifier_may_pool_what_the_extractor_makes() -> None:
    class Pooled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mean(1))

    fit(Made(lambda features: features.unsqueeze(1)), classifier=Pooled(8, NUM_CLASSES))


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


def normed(width: int = 5) -> nn.Module:
    return layers(6, nn.Linear(width, 6), nn.BatchNorm1d(6))


def run(
    extractor: nn.Module, classifier: nn.Module | None = None, data: Any = None, federated: bool = True, **kwargs: Any
) -> None:
    """A round of the two sources."""
    torch.manual_seed(0)
    module = SourceOnly(["c0", "c1", "c2"], "c2", 2, extractor, classifier)
    batches = loader(data or unequal(12, 9, 12), **({"batch_size": 4} | kwargs))
    trainer(1, federated=federated).fit(module, batches)
    assert module.federation.round_idx == 1


CURE = "set drop_last=True, which leaves the last batch out, or another batch_size, or use GroupNorm"


@pytest.mark.parametrize("federated", [True, False])
def test_client_samples_and_way_out_are_told_before_the_first_round(federated: bool) -> None:
    message = rf"client 'c1' trains on 9 samples with batch_size=4, which makes a batch of 1 sample, .*: {CURE}"
    with pytest.raises(RosterError, match=message):
        run(normed(), federated=federated)
    with pytest.raises(RosterError, match=message):  # in the classifier, too
        run(Features(5), nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2)))
    with pytest.raises(RosterError, match=r"with batch_size=1, .*: raise batch_size, or"):
        run(normed(), batch_size=1, drop_last=True)


def test_what_trains_on_one_sample_or_does_not_train_is_left_alone() -> None:
    run(normed().eval())
    run(layers(4, nn.Linear(5, 4), nn.GroupNorm(2, 4)))
    run(normed(), data=unequal(8, 8, 5))
    sizes = [len(digits().split(name).train) for name in ("clean", "blended", "fonts")]
    batch = next(number for number in range(30, 400) if any(size % number == 1 for size in sizes))
    data = digits(batch_size=batch, target_labels=1.0)
    closed = build(FedRFTCAClosedForm, data, extractor=normed(64), num_frequencies=8, num_components=4)
    trainer(1).fit(closed, data)
    assert closed.federation.round_idx == 1
    with pytest.raises(RosterError, match=f"with batch_size={batch}, which makes a batch of 1 sample"):
        trainer(1).fit(build(FedAvg, data, extractor=normed(64)), data)


def test_pixels_of_one_image_are_many_values() -> None:
    images = {name: TensorDataset(torch.randn(5, 1, 8, 8), each.tensors[1]) for name, each in shards(3, 5).items()}
    run(SmallCNN(1, width=4), data=images)
    with pytest.raises(RosterError, match="client 'c0' trains on 5 samples"):
        run(Bottleneck(SmallCNN(1, width=4), 2), nn.Sequential(nn.BatchNorm1d(2)), images)
