"""Small extractors: widths, parameter counts by hand, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fedlit.models import MLP, Features, LeNet, Replica, SmallCNN, feature_width, make_classifier
from fedlit.models.extractors import Norm


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


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


@pytest.mark.parametrize(
    ("hidden", "out_features", "width", "parameters"),
    [
        ((64, 64), None, 64, 10 * 64 + 64 + 64 * 64 + 64),
        ([8], 3, 3, 10 * 8 + 8 + 8 * 3 + 3),
        ([], 7, 7, 10 * 7 + 7),
    ],
)
def test_mlp_has_the_width_and_parameters_it_says(
    hidden: list[int], out_features: int | None, width: int, parameters: int
) -> None:
    network = MLP(10, hidden, out_features)
    assert network.out_features == width
    assert network(torch.randn(2, 10)).shape == (2, width)
    assert count(network) == parameters


def test_mlp_normalises_each_layer_before_its_relu() -> None:
    network = MLP(6, hidden=[5, 4], batch_norm=True)
    first, norm, *_ = network.layers
    kinds = [nn.Linear, nn.BatchNorm1d, nn.ReLU] * 2
    assert [type(layer) for layer in network.layers] == kinds
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
    hidden = first(x)
    hidden = ((hidden - hidden.mean(0)) / (hidden.var(0, correction=0) + norm.eps).sqrt()).relu()
    torch.testing.assert_close(network.layers[:3](x), hidden)


def test_mlp_drops_units_in_training_only() -> None:
    network = MLP(4, [1000], dropout=0.5)
    x = torch.randn(1, 4)
    network.eval()
    full = network(x)
    assert torch.equal(full, network(x))
    network.train()
    kept = network(x)[full > 0] > 0
    assert 0.4 < kept.float().mean() < 0.6


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize("size", [8, 16, 28, 32])
def test_cnn_takes_images_of_any_size(norm: Norm, size: int) -> None:
    network = SmallCNN(in_channels=3, width=8, norm=norm)
    assert network(torch.randn(2, 3, size, size)).shape == (2, network.out_features)
    assert network.out_features == 64


def test_cnn_has_the_parameters_counted_by_hand() -> None:
    convolutions = 9 * (1 * 16 + 16 * 32 + 32 * 32)
    channels = 16 + 32 + 32
    assert count(SmallCNN(norm="none")) == convolutions + channels  # biases
    assert count(SmallCNN(norm="group")) == count(SmallCNN(norm="batch")) == convolutions + 2 * channels


def test_only_batch_norm_keeps_statistics() -> None:
    assert not dict(SmallCNN(norm="group").named_buffers())
    assert not dict(SmallCNN(norm="none").named_buffers())
    assert len(dict(SmallCNN(norm="batch").named_buffers())) == 9


@pytest.mark.parametrize(("size", "left"), [(28, 4), (32, 5), (16, 1)])
def test_lenet_has_the_layers_of_the_benchmark_counted_by_hand(size: int, left: int) -> None:
    """A side s becomes (s - 4) / 2 and ((s - 4) / 2 - 4) / 2: 28 -> 12 -> 4 and 32 -> 14 -> 5."""
    network = LeNet(in_channels=3, image_size=size)
    assert count(network) == (75 * 6 + 6) + (150 * 16 + 16) + (16 * left**2 * 120 + 120) + (120 * 84 + 84)
    assert network(torch.randn(2, 3, size, size)).shape == (2, network.out_features)
    assert make_classifier(network, 10).in_features == 84


def test_lenet_on_cifar_has_the_62006_parameters_of_the_well_known_network() -> None:
    """3x32x32 images and 10 classes: the number that PyTorch's own tutorial network has."""
    network = LeNet(in_channels=3, image_size=32)
    assert count(Replica(network, make_classifier(network, 10))) == 62_006


def test_lenet_names_the_side_it_expected_and_got() -> None:
    with pytest.raises(ValueError, match="image_size is 28, but the images have 32x32 pixels"):
        LeNet()(torch.randn(2, 1, 32, 32))


def test_features_pass_unchanged() -> None:
    x = torch.randn(5, 2, 3)
    network = Features(6)
    assert network.out_features == 6
    assert torch.equal(network(x), x.reshape(5, 6))
    assert repr(network) == "Features(in_features=6)"


def test_features_name_the_width_they_expected_and_got() -> None:
    with pytest.raises(ValueError, match=r"in_features is 6, but an input of shape \(7,\) has 7 values"):
        Features(6)(torch.randn(5, 7))


def test_features_and_a_classifier_take_the_width_of_the_data() -> None:
    network = Features()
    classifier = make_classifier(network, 3)
    with pytest.raises(TypeError, match=r"Features was made without in_features, .* give in_features"):
        feature_width(network)
    assert classifier(network(torch.randn(5, 2, 3))).shape == (5, 3)
    assert classifier.in_features == 6


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MLP(0), "in_features must be at least 1, got 0"),
        (lambda: MLP(3, [4, 0]), "width of layer 1 must be at least 1, got 0"),
        (lambda: MLP(3, []), "hidden must name at least one layer"),
        (lambda: MLP(3, dropout=1.0), r"dropout must be in \[0, 1\), got 1.0"),
        (lambda: SmallCNN(in_channels=0), "in_channels must be at least 1, got 0"),
        (lambda: SmallCNN(norm="layer"), "norm must be 'batch', 'group' or 'none', got 'layer'"),  # type: ignore[arg-type]
        (lambda: SmallCNN(width=6, norm="group"), "width must be a multiple of 4 with norm='group', got 6"),
        (lambda: LeNet(in_channels=0), "in_channels must be at least 1, got 0"),
        (lambda: LeNet(image_size=15), "image_size must be at least 16 pixels, .* got 15"),
        (lambda: Features(0), "in_features must be at least 1, got 0"),
        (lambda: make_classifier(Features(3), 0), "num_classes must be at least 1, got 0"),
    ],
)
def test_bad_values_are_refused_by_name(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_replica_is_the_classifier_of_the_extractor() -> None:
    extractor = MLP(4, [8])
    classifier = make_classifier(extractor, 3)
    replica = Replica(extractor, classifier)
    x = torch.randn(5, 4)
    assert torch.equal(replica(x), extractor(x) @ classifier.weight.T + classifier.bias)
    assert [name.split(".")[0] for name, _ in replica.named_children()] == ["extractor", "classifier"]


def test_classifier_fits_the_extractor() -> None:
    classifier = make_classifier(SmallCNN(width=4), 10)
    assert (classifier.in_features, classifier.out_features) == (32, 10)


def test_classifier_needs_an_extractor_that_says_its_width() -> None:
    with pytest.raises(TypeError, match=r"integer attribute out_features.*got None on Sequential"):
        make_classifier(nn.Sequential(nn.Linear(2, 2)), 3)
