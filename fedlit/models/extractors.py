"""Small feature extractors, trained from scratch. Each has the width of its features in ``out_features``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, cast

import torch.nn.functional as F
from torch import Tensor, nn

from fedlit.checks import check, check_at_least, check_one_of, refuse
from fedlit.models.replica import feature_width


class MLP(nn.Module):
    """Fully connected layers, each followed by a ReLU.

    Inputs of any shape are flattened. The last layer has a ReLU too, so the features are not negative.

    Args:
        in_features: Number of values in one flattened input, at least 1; ``None`` takes that of the data when training
            starts.
        hidden: Width of each hidden layer; may be empty if ``out_features`` is given.
        out_features: Width of the features; ``None`` takes the last hidden layer as it is.
        dropout: Probability in [0, 1) of dropping a unit after each layer.
        batch_norm: Normalise the outputs of each layer before its ReLU (BatchNorm); methods share its statistics by
            ``local_norm`` and ``batchnorm_average``, and `AdaBN` needs it.

    """

    out_features: int

    def __init__(
        self,
        in_features: int | None = None,
        hidden: Sequence[int] = (64, 64),
        out_features: int | None = None,
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        widths = [*hidden] if out_features is None else [*hidden, out_features]
        check(bool(widths), "hidden", "at least one width, unless out_features is given", hidden)
        for width in hidden:
            check_at_least("hidden", width, 1, "unit in each layer")
        for argument, size in (("out_features", out_features), ("in_features", in_features)):
            check_at_least(argument, 1 if size is None else size, 1)
        check(0 <= dropout < 1, "dropout", "a probability in [0, 1)", dropout)
        self.in_features = in_features
        self.out_features = widths[-1]
        layers: list[nn.Module] = []
        for fan_in, fan_out in zip([in_features, *widths], widths, strict=False):
            layers.append(nn.LazyLinear(fan_out) if fan_in is None else nn.Linear(fan_in, fan_out))
            layers += [nn.BatchNorm1d(fan_out), nn.ReLU()] if batch_norm else [nn.ReLU()]
            if dropout:
                layers.append(nn.Dropout(dropout))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Features (batch, out_features) of inputs (batch, ...)."""
        return cast(Tensor, self.layers(_flat(x, self.in_features)))


class Bottleneck(nn.Module):
    """An extractor and a linear layer that narrows its features, which can then have any sign.

    Args:
        extractor: Turns inputs into features, and has their width in ``out_features``.
        out_features: Width of the narrowed features, at least 1.
    """

    out_features: int

    def __init__(self, extractor: nn.Module, out_features: int) -> None:
        super().__init__()
        check_at_least("out_features", out_features, 1)
        self.extractor = extractor
        self.out_features = out_features
        self.layer = nn.Linear(feature_width(extractor), out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Features (batch, out_features) of inputs."""
        return cast(Tensor, self.layer(self.extractor(x)))


class Head(nn.Module):
    """A classifier of fully connected layers, with a ReLU after each but the last.

    Args:
        in_features: Width of its inputs: of an extractor's features, or with FedRF-TCA of the aligned ones (m).
        num_classes: Logits for each input, at least 2.
        hidden: Width of each hidden layer.
        unit_norm: Scale inputs to length 1 first, as the published code of FedRF-TCA does with the aligned features.
    """

    def __init__(
        self, in_features: int, num_classes: int, hidden: Sequence[int] = (100, 100), unit_norm: bool = False
    ) -> None:
        super().__init__()
        is_list = isinstance(hidden, Sequence) and not isinstance(hidden, str)
        check(is_list, "hidden", "a list of widths", hidden, "give [100] for one hidden layer of 100", TypeError)
        for argument, size in (("in_features", in_features), *(("hidden", width) for width in hidden)):
            check_at_least(argument, size, 1)
        check_at_least("num_classes", num_classes, 2)
        self.unit_norm = unit_norm
        widths = [in_features, *hidden]
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, num_classes) of inputs (batch, in_features)."""
        return cast(Tensor, self.layers(F.normalize(x, dim=1) if self.unit_norm else x))


def _flat(x: Tensor, in_features: int | None) -> Tensor:
    """Inputs (batch, ...) as (batch, in_features)."""
    flat = x.flatten(1)
    if in_features is not None and flat.shape[1] != in_features:
        refuse("in_features", f"the number of values of an input, {flat.shape[1]}", in_features)
    return flat


Norm = Literal["batch", "group", "none"]

_GROUPS = 4

_NORMS: dict[str, Callable[[int], list[nn.Module]]] = {
    "batch": lambda channels: [nn.BatchNorm2d(channels)],
    "group": lambda channels: [nn.GroupNorm(_GROUPS, channels)],
    "none": lambda channels: [],
}


class SmallCNN(nn.Module):
    """Three 3x3 convolutions and two poolings, for images of 8x8 to 32x32 pixels.

    The last pooling averages over 2x2 cells whatever the image size, so images of any size from 4x4 fit.

    Args:
        in_channels: 1 for grey images, 3 for colour.
        width: Channels of the first convolution, at least 1; the others have twice as many.
        norm: ``"batch"`` (its statistics are averaged between clients like weights), ``"group"`` (4 groups, no
            statistics, better for clients with different data; ``width`` is a multiple of 4) or ``"none"``.
    """

    out_features: int

    def __init__(self, in_channels: int = 1, width: int = 16, norm: Norm = "batch") -> None:
        super().__init__()
        check_at_least("in_channels", in_channels, 1)
        check_at_least("width", width, 1)
        check_one_of("norm", norm, _NORMS)
        check(norm != "group" or not width % _GROUPS, "width", f"a multiple of {_GROUPS} with norm='group'", width)
        self.in_channels = in_channels
        self.out_features = 8 * width
        layers: list[nn.Module] = []
        for fan_in, fan_out, pool in [
            (in_channels, width, None),
            (width, 2 * width, nn.MaxPool2d(2)),
            (2 * width, 2 * width, nn.AdaptiveAvgPool2d(2)),
        ]:
            # a bias before a normalisation would be subtracted again
            convolution = nn.Conv2d(fan_in, fan_out, 3, padding=1, bias=norm == "none")
            layers += [convolution, *_NORMS[norm](fan_out), nn.ReLU()]
            if pool is not None:
                layers.append(pool)
        self.layers = nn.Sequential(*layers, nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        """Features (batch, 8 * width) of images (batch, in_channels, height, width)."""
        return cast(Tensor, self.layers(x))


class LeNet(nn.Module):
    """Two 5x5 convolutions, each followed by a pooling, and two fully connected layers: LeNet-5 as NIID-Bench has it.

    With the linear classifier that follows, this is the network of "two convolutional layers and three fully connected
    layers" of FedGP's experiments on Fashion-MNIST: 6 and 16 channels, widths 120 and 84, ReLUs and max pooling.

    Args:
        in_channels: 1 for grey images, 3 for colour.
        image_size: Side of the images in pixels, at least 16; 28 for MNIST and its relatives, 32 for CIFAR.

    References:
        LeCun, Bottou, Bengio and Haffner, Gradient-based learning applied to document recognition, 1998.
        Li, Diao, Chen and He, Federated learning on non-IID data silos, ICDE 2022 (NIID-Bench).
    """

    out_features: int

    def __init__(self, in_channels: int = 1, image_size: int = 28) -> None:
        super().__init__()
        check_at_least("in_channels", in_channels, 1)
        check_at_least("image_size", image_size, 16, "pixels", "two poolings leave one of them")
        self.in_channels = in_channels
        self.image_size = image_size
        self.out_features = 84
        side = ((image_size - 4) // 2 - 4) // 2  # no convolution is padded
        self.layers = nn.Sequential(
            *(nn.Conv2d(in_channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
            *(nn.Linear(16 * side**2, 120), nn.ReLU()),
            *(nn.Linear(120, self.out_features), nn.ReLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Features (batch, 84) of images (batch, in_channels, image_size, image_size)."""
        if x.shape[-2:] != (self.image_size, self.image_size):
            refuse("image_size", f"the side of the images, {x.shape[-2]}x{x.shape[-1]} pixels", self.image_size)
        return cast(Tensor, self.layers(x))


class Features(nn.Module):
    """The identity, for features computed beforehand: inputs are flattened and passed on.

    Args:
        in_features: Number of values in one flattened input, at least 1; ``None`` takes that of the data when training
            starts, which does for methods whose one layer is a linear classifier.
    """

    out_features: int | None

    def __init__(self, in_features: int | None = None) -> None:
        super().__init__()
        check_at_least("in_features", 1 if in_features is None else in_features, 1)
        self.in_features = in_features
        self.out_features = in_features

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (batch, ...) as (batch, in_features)."""
        return _flat(x, self.in_features)

    def extra_repr(self) -> str:
        """The width, for `print`."""
        return f"in_features={self.in_features}"
