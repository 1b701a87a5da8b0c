"""Extractors of time series: parameters counted by hand, lengths, widths found in the data, and refused arguments."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fedlit.models import Recurrent, ResNet1D, SmallCNN1D, WidarNet
from refused import refused

NETWORKS: dict[str, Callable[[int | None], nn.Module]] = {
    "cnn": lambda channels: SmallCNN1D(channels, width=4),
    "cnn, group": lambda channels: SmallCNN1D(channels, width=4, norm="group"),
    "resnet": lambda channels: ResNet1D(channels, width=4),
    "gru": lambda channels: Recurrent(channels, width=4, num_layers=2),
    "lstm": lambda channels: Recurrent(channels, width=4, cell="lstm"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_takes_any_length_and_finds_its_channels(name: str) -> None:
    known, lazy = NETWORKS[name](3), NETWORKS[name](None)
    for length in (4, 33):
        x = torch.randn(2, 3, length)
        assert known(x).shape == lazy(x).shape == (2, known.out_features)
    shapes = [{key: value.shape for key, value in network.state_dict().items()} for network in (known, lazy)]
    assert shapes[0] == shapes[1]


def test_parameters_are_those_counted_by_hand() -> None:
    def count(network: nn.Module) -> int:
        return sum(parameter.numel() for parameter in network.parameters())

    assert count(SmallCNN1D(3, width=4)) == 5 * (3 * 4 + 4 * 8 + 8 * 8) + 2 * (4 + 8 + 8)
    blocks = [(3, 4), (4, 8), (8, 8)]
    convolutions = sum(7 * a * b + (5 + 3) * b * b + (a * b if a != b else 0) for a, b in blocks)
    norms = sum(2 * b * (3 + (a != b)) for a, b in blocks)
    assert count(ResNet1D(3, width=4)) == convolutions + norms
    assert count(Recurrent(3, width=4)) == (3 * 4 + 4) + 3 * (4 * 4 + 4 * 4 + 4 + 4)


def test_the_network_of_widar3_has_the_layers_of_the_publication_counted_by_hand() -> None:
    """A profile of 20x20 becomes 16 of 16x16, then of 8x8: 1024 numbers."""
    network = WidarNet()
    by_hand = (25 * 16 + 16) + (1024 * 64 + 64) + (64 * 64 + 64) + 3 * (64 * 128 + 128 * 128 + 2 * 128)
    assert sum(parameter.numel() for parameter in network.parameters()) == by_hand
    x = torch.rand(2, 7, 20, 20)
    assert WidarNet(width=4)(x).shape == (2, 4)
    network.eval()
    frames = torch.stack([network.frame(x[:, place, None]) for place in range(7)], dim=1)
    torch.testing.assert_close(network(x), network.recurrent(frames)[0][:, -1])


def test_a_gru_is_its_equations_by_hand() -> None:
    network = Recurrent(2, width=3).double()
    x = torch.randn(1, 2, 5, dtype=torch.float64)
    weights = {name: value.detach().numpy() for name, value in network.named_parameters()}
    inputs = np.maximum(x[0].numpy().T @ weights["layer.weight"].T + weights["layer.bias"], 0)

    def sigmoid(z: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-z))

    hidden = np.zeros(3)
    for sample in inputs:
        of_x = np.split(weights["recurrent.weight_ih_l0"] @ sample + weights["recurrent.bias_ih_l0"], 3)
        of_h = np.split(weights["recurrent.weight_hh_l0"] @ hidden + weights["recurrent.bias_hh_l0"], 3)
        reset, update = sigmoid(of_x[0] + of_h[0]), sigmoid(of_x[1] + of_h[1])
        hidden = (1 - update) * np.tanh(of_x[2] + reset * of_h[2]) + update * hidden
    np.testing.assert_allclose(network(x)[0].detach().numpy(), hidden)


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("in_channels", lambda: SmallCNN1D(0)),
        ("width", lambda: ResNet1D(width=0)),
        ("width", lambda: SmallCNN1D(width=6, norm="group")),
        ("norm", lambda: ResNet1D(norm="layer")),  # type: ignore[arg-type]
        ("cell", lambda: Recurrent(cell="rnn")),  # type: ignore[arg-type]
        ("num_layers", lambda: Recurrent(num_layers=0)),
        ("side", lambda: WidarNet(side=5)),
        ("dropout", lambda: WidarNet(dropout=1.0)),
    ],
)
def test_arguments_out_of_range_are_refused(argument: str, make: Callable[[], nn.Module]) -> None:
    with refused(argument):
        make()
