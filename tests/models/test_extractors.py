"""Small extractors: widths and parameter counts by hand, and refused arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedlit.models import (
    MLP,
    Bottleneck,
    Features,
    Head,
    LeNet,
    Replica,
    SmallCNN,
    feature_width,
    make_classifier,
    make_discriminator,
)
from fedlit.models.extractors import Norm
from refused import refused


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize("unit_norm", [False, True])
def test_head_is_its_matrices_by_hand(unit_norm: bool) -> None:
    """The logits are W3 relu(W2 relu(W1 x)), with x of length 1 if asked; the paper's has 91,210 numbers."""
    network, x = Head(6, 3, [5, 4], unit_norm).double(), torch.randn(7, 6, dtype=torch.float64)
    by_hand = x.numpy() / (np.linalg.norm(x.numpy(), axis=1, keepdims=True) if unit_norm else 1)
    for layer in ("layers.0", "layers.2", "layers.4"):
        weight, bias = (network.get_parameter(f"{layer}.{name}").detach().numpy() for name in ("weight", "bias"))
        by_hand = np.maximum(by_hand, 0) if layer != "layers.0" else by_hand
        by_hand = by_hand @ weight.T + bias
    assert torch.allclose(network(x), torch.from_numpy(by_hand))
    assert count(Head(800, 10)) == 800 * 100 + 100 + 100 * 100 + 100 + 100 * 10 + 10 == 91_210


@pytest.mark.parametrize(
    ("argument", "sizes"), [("in_features", (0, 2)), ("num_classes", (4, 1)), ("hidden", (4, 2, [0]))]
)
def test_head_refuses_widths_below_one(argument: str, sizes: tuple[Any, ...]) -> None:
    with refused(argument):
        Head(*sizes)


def test_mlp_is_its_matrices_by_hand() -> None:
    """The features are relu(W2 relu(W1 x + b1) + b2), with x flattened row by row."""
    network = MLP(6, hidden=[5], out_features=4).double()
    x = torch.randn(3, 2, 3, dtype=torch.float64)
    by_hand = x.numpy().reshape(3, 6)
    for layer in ("layers.0", "layers.2"):
        weight, bias = (network.get_parameter(f"{layer}.{name}").detach().numpy() for name in ("weight", "bias"))
        by_hand = by_hand @ weight.T + bias
        by_hand[by_hand < 0] = 0
    assert torch.allclose(network(x), torch.from_numpy(by_hand))


def test_mlp_normalises_each_layer_before_its_relu() -> None:
    network = MLP(6, hidden=[5, 4], batch_norm=True)
    first, norm, *_ = network.layers
    assert [type(layer) for layer in network.layers] == [nn.Linear, nn.BatchNorm1d, nn.ReLU] * 2
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
    hidden = first(x)
    hidden = ((hidden - hidden.mean(0)) / (hidden.var(0, correction=0) + norm.eps).sqrt()).relu()
    torch.testing.assert_close(network.layers[:3](x), hidden)


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize("size", [8, 28, 32])
def test_cnn_takes_images_of_any_size(norm: Norm, size: int) -> None:
    network = SmallCNN(in_channels=3, width=8, norm=norm)
    assert network(torch.randn(2, 3, size, size)).shape == (2, network.out_features) == (2, 64)


def test_cnn_has_the_parameters_and_buffers_counted_by_hand() -> None:
    convolutions, channels = 9 * (1 * 16 + 16 * 32 + 32 * 32), 16 + 32 + 32
    expected = {"none": (channels, 0), "group": (2 * channels, 0), "batch": (2 * channels, 9)}
    for norm, (others, buffers) in expected.items():
        network = SmallCNN(norm=norm)  # type: ignore[arg-type]
        assert (count(network) - convolutions, len(list(network.buffers()))) == (others, buffers)


@pytest.mark.parametrize(("size", "left"), [(28, 4), (32, 5), (16, 1)])
def test_lenet_has_the_layers_of_the_benchmark_counted_by_hand(size: int, left: int) -> None:
    """A side s becomes (s - 4) / 2 and ((s - 4) / 2 - 4) / 2: 28 -> 12 -> 4 and 32 -> 14 -> 5."""
    network = LeNet(in_channels=3, image_size=size)
    assert count(network) == (75 * 6 + 6) + (150 * 16 + 16) + (16 * left**2 * 120 + 120) + (120 * 84 + 84)
    assert network(torch.randn(2, 3, size, size)).shape == (2, network.out_features)
    if size == 32:  # the number of parameters of the network in PyTorch's tutorial, for CIFAR-10
        assert count(Replica(network, make_classifier(network, 10))) == 62_006


def test_features_pass_unchanged_and_a_classifier_takes_their_width() -> None:
    x = torch.randn(5, 2, 3)
    assert Features(6).out_features == 6
    assert torch.equal(Features(6)(x), x.reshape(5, 6))
    assert repr(Features(6)) == "Features(in_features=6)"
    classifier = make_classifier(Features(), 3)
    assert classifier(Features()(x)).shape == (5, 3)
    assert classifier.in_features == 6
    assert make_classifier(SmallCNN(width=4), 10).in_features == 32


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("in_features", lambda: MLP(0)),
        ("hidden", lambda: MLP(3, [4, 0])),
        ("hidden", lambda: MLP(3, [])),
        ("out_features", lambda: MLP(3, [4], 0)),
        ("dropout", lambda: MLP(3, dropout=1.0)),
        ("in_features", lambda: MLP(6)(torch.randn(5, 7))),
        ("out_features", lambda: Bottleneck(Features(3), 0)),
        ("in_channels", lambda: SmallCNN(in_channels=0)),
        ("width", lambda: SmallCNN(width=0)),
        ("norm", lambda: SmallCNN(norm="layer")),  # type: ignore[arg-type]
        ("width", lambda: SmallCNN(width=6, norm="group")),
        ("in_channels", lambda: LeNet(in_channels=0)),
        ("image_size", lambda: LeNet(image_size=15)),
        ("image_size", lambda: LeNet()(torch.randn(2, 1, 32, 32))),
        ("in_features", lambda: Features(0)),
        ("in_features", lambda: Features(6)(torch.randn(5, 7))),
        ("num_classes", lambda: make_classifier(Features(3), 0)),
        ("width", lambda: make_discriminator(0, 3)),
        ("hidden", lambda: make_discriminator(3, 0)),
    ],
)
def test_bad_values_are_refused(argument: str, call: Callable[[], object]) -> None:
    with refused(argument):
        call()


@pytest.mark.parametrize("extractor", [Features(), nn.Sequential(nn.Linear(2, 2))], ids=["unknown", "none"])
def test_an_extractor_has_to_state_its_width(extractor: nn.Module) -> None:
    with pytest.raises(TypeError, match=r"in_features|out_features"):
        feature_width(extractor)


@pytest.mark.parametrize("hidden", [100, "100"])
def test_widths_of_a_head_are_a_list(hidden: Any) -> None:
    with refused("hidden", TypeError):
        Head(6, 3, hidden=hidden)
