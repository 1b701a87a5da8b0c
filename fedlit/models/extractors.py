"""Small feature extractors, trained from scratch. Each has the width of its features in ``out_features``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

from torch import Tensor, nn

from fedlit.models.replica import feature_width


def _check_at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


class MLP(nn.Module):
    """Fully connected layers, each followed by a ReLU.

    Inputs of any shape are flattened. The last layer has a ReLU too, so the features are not negative.

    Args:
        in_features: Number of values in one flattened input, at least 1; ``None`` takes that of the data when training
            starts.
        hidden: Width of each hidden layer; may be empty if ``out_features`` is given.
        out_features: Width of the features; ``None`` takes the last hidden layer as it is.
        dropout: Probability in [0, 1) of dropping a unit after each layer.
        batch_norm: Normalise the outputs of each layer before its ReLU (BatchNorm); what clients do with its statistics
            is set by ``local_norm`` and ``batchnorm_average`` of methods, and `AdaBN` needs it.

    Raises:
        ValueError: If a width is below 1, there is no layer, or ``dropout`` is outside [0, 1); when called, if inputs
            have another number of values than ``in_features``.
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
        if not widths:
            raise ValueError("hidden must name at least one layer unless out_features is given, got none")
        _check_at_least_one(**{f"width of layer {i}": width for i, width in enumerate(widths)})
        if in_features is not None:
            _check_at_least_one(in_features=in_features)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}: it is the probability of dropping a unit")
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
        flat = x.flatten(1)
        if self.in_features is not None and flat.shape[1] != self.in_features:
            raise ValueError(
                f"in_features must be the number of values of an input, {flat.shape[1]}, got {self.in_features}"
            )
        return cast(Tensor, self.layers(flat))


class Bottleneck(nn.Module):
    """An extractor and a linear layer that narrows its features, which can then have any sign.

    Args:
        extractor: Turns inputs into features, and has their width in ``out_features``.
        out_features: Width of the narrowed features, at least 1.

    Raises:
        TypeError: If the extractor does not state its width.
        ValueError: If the width is below 1.
    """

    out_features: int

    def __init__(self, extractor: nn.Module, out_features: int) -> None:
        super().__init__()
        _check_at_least_one(out_features=out_features)
        self.extractor = extractor
        self.out_features = out_features
        self.layer = nn.Linear(feature_width(extractor), out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Features (batch, out_features) of inputs."""
        return cast(Tensor, self.layer(self.extractor(x)))


Norm = Literal["batch", "group", "none"]

_GROUPS = 4


def _norm(kind: Norm, channels: int) -> list[nn.Module]:
    if kind == "batch":
        return [nn.BatchNorm2d(channels)]
    if kind == "group":
        return [nn.GroupNorm(_GROUPS, channels)]
    return []


class SmallCNN(nn.Module):
    """Three 3x3 convolutions and two poolings, for images of 8x8 to 32x32 pixels.

    The last pooling averages over 2x2 cells whatever the image size, so images of any size from 4x4 fit.

    Args:
        in_channels: 1 for grey images, 3 for colour.
        width: Channels of the first convolution, at least 1; the others have twice as many.
        norm: ``"batch"`` (its statistics are averaged between clients like weights), ``"group"`` (4 groups, no
            statistics, better for clients with different data) or ``"none"``.

    Raises:
        ValueError: If a number is below 1, ``norm`` is unknown, or ``width`` is not a multiple of 4 with group norm.
    """

    out_features: int

    def __init__(self, in_channels: int = 1, width: int = 16, norm: Norm = "batch") -> None:
        super().__init__()
        _check_at_least_one(in_channels=in_channels, width=width)
        if norm not in ("batch", "group", "none"):
            raise ValueError(f"norm must be 'batch', 'group' or 'none', got {norm!r}")
        if norm == "group" and width % _GROUPS:
            raise ValueError(f"width must be a multiple of {_GROUPS} with norm='group', got {width}")
        self.in_channels = in_channels
        self.out_features = 8 * width
        layers: list[nn.Module] = []
        for fan_in, fan_out, pool in [
            (in_channels, width, None),
            (width, 2 * width, nn.MaxPool2d(2)),
            (2 * width, 2 * width, nn.AdaptiveAvgPool2d(2)),
        ]:
            # a bias before a normalisation would be subtracted again
            layers += [nn.Conv2d(fan_in, fan_out, 3, padding=1, bias=norm == "none"), *_norm(norm, fan_out), nn.ReLU()]
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

    Raises:
        ValueError: If a number is too small; later, if an image has another size.

    References:
        LeCun, Bottou, Bengio and Haffner, Gradient-based learning applied to document recognition, 1998.
        Li, Diao, Chen and He, Federated learning on non-IID data silos, ICDE 2022 (NIID-Bench).
    """

    out_features: int

    def __init__(self, in_channels: int = 1, image_size: int = 28) -> None:
        super().__init__()
        _check_at_least_one(in_channels=in_channels)
        if image_size < 16:
            raise ValueError(
                f"image_size must be at least 16 pixels, of which two poolings leave one, got {image_size}"
            )
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
            raise ValueError(
                f"image_size is {self.image_size}, but the images have {x.shape[-2]}x{x.shape[-1]} pixels: set "
                "image_size to the side of the data's images"
            )
        return cast(Tensor, self.layers(x))


class Features(nn.Module):
    """The identity, for features computed beforehand: inputs are flattened and passed on.

    Args:
        in_features: Number of values in one flattened input, at least 1; ``None`` takes that of the data when training
            starts, which does for methods whose one layer is a linear classifier.

    Raises:
        ValueError: If ``in_features`` is below 1; later, if an input has another width.
    """

    out_features: int | None

    def __init__(self, in_features: int | None = None) -> None:
        super().__init__()
        if in_features is not None:
            _check_at_least_one(in_features=in_features)
        self.in_features = in_features
        self.out_features = in_features

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (batch, ...) as (batch, in_features)."""
        flat = x.flatten(1)
        if self.in_features is not None and flat.shape[1] != self.in_features:
            raise ValueError(
                f"in_features is {self.in_features}, but an input of shape {tuple(x.shape[1:])} has {flat.shape[1]} "
                "values: set in_features to the width of the data"
            )
        return flat

    def extra_repr(self) -> str:
        """The width, for `print`."""
        return f"in_features={self.in_features}"
