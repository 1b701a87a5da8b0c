"""Small feature extractors of time series, shape (batch, channels, samples), trained from scratch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

from torch import Tensor, nn

from fedlit.checks import check, check_at_least, check_one_of
from fedlit.models.extractors import Norm

_GROUPS = 4

_NORMS: dict[str, Callable[[int], list[nn.Module]]] = {
    "batch": lambda channels: [nn.BatchNorm1d(channels)],
    "group": lambda channels: [nn.GroupNorm(_GROUPS, channels)],
    "none": lambda channels: [],
}


def _convolution(fan_in: int | None, fan_out: int, size: int, norm: Norm) -> list[nn.Module]:
    """A convolution that keeps the length, and what normalises it; a bias before that would be subtracted again."""
    padding, bias = size // 2, norm == "none"
    if fan_in is None:
        return [nn.LazyConv1d(fan_out, size, padding=padding, bias=bias), *_NORMS[norm](fan_out)]
    return [nn.Conv1d(fan_in, fan_out, size, padding=padding, bias=bias), *_NORMS[norm](fan_out)]


def _check(in_channels: int | None, width: int, norm: Norm = "none") -> None:
    check_at_least("in_channels", 1 if in_channels is None else in_channels, 1)
    check_at_least("width", width, 1)
    check_one_of("norm", norm, _NORMS)
    check(norm != "group" or not width % _GROUPS, "width", f"a multiple of {_GROUPS} with norm='group'", width)


class SmallCNN1D(nn.Module):
    """Three convolutions over 5 samples, the first two followed by a pooling of 2, and the mean over time.

    Args:
        in_channels: Channels of the signals, at least 1; ``None`` takes those of the data when training starts.
        width: Channels of the first convolution, at least 1; the others have twice as many.
        norm: ``"batch"``, ``"group"`` (4 groups; ``width`` is a multiple of 4) or ``"none"``, as of `SmallCNN`.
    """

    out_features: int

    def __init__(self, in_channels: int | None = None, width: int = 32, norm: Norm = "batch") -> None:
        super().__init__()
        _check(in_channels, width, norm)
        self.in_channels = in_channels
        self.out_features = 2 * width
        self.layers = nn.Sequential(
            *(*_convolution(in_channels, width, 5, norm), nn.ReLU(), nn.MaxPool1d(2)),
            *(*_convolution(width, 2 * width, 5, norm), nn.ReLU(), nn.MaxPool1d(2)),
            *(*_convolution(2 * width, 2 * width, 5, norm), nn.ReLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Features (batch, 2 * width) of signals (batch, in_channels, samples), of 4 samples or more."""
        return cast(Tensor, self.layers(x).mean(dim=-1))


class ResidualBlock1D(nn.Module):
    """Convolutions over 7, 5 and 3 samples, to whose result the input is added."""

    def __init__(self, in_channels: int | None, width: int, norm: Norm) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(*_convolution(in_channels, width, 7, norm), nn.ReLU()),
            *(*_convolution(width, width, 5, norm), nn.ReLU()),
            *_convolution(width, width, 3, norm),
        )
        same = in_channels == width
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(in_channels, width, 1, norm))

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, width, samples), of (batch, in_channels, samples)."""
        return cast(Tensor, (self.layers(x) + self.shortcut(x)).relu())


class ResNet1D(nn.Module):
    """Three residual blocks and the mean over time: the ResNet of Wang et al. for time series.

    Blocks have ``width``, twice and twice as many channels. Convolutions over 7 samples are in place of the paper's 8,
    which cannot be centred.

    Args:
        in_channels: Channels of the signals, at least 1; ``None`` takes those of the data when training starts.
        width: Channels of the first block, at least 1; 64 in the paper.
        norm: ``"batch"`` as in the paper, ``"group"`` (4 groups; ``width`` is a multiple of 4) or ``"none"``.

    References:
        Wang, Yan and Oates, Time series classification from scratch with deep neural networks, IJCNN 2017.
    """

    out_features: int

    def __init__(self, in_channels: int | None = None, width: int = 64, norm: Norm = "batch") -> None:
        super().__init__()
        _check(in_channels, width, norm)
        self.in_channels = in_channels
        self.out_features = 2 * width
        self.blocks = nn.Sequential(
            ResidualBlock1D(in_channels, width, norm),
            ResidualBlock1D(width, 2 * width, norm),
            ResidualBlock1D(2 * width, 2 * width, norm),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Features (batch, 2 * width) of signals (batch, in_channels, samples)."""
        return cast(Tensor, self.blocks(x).mean(dim=-1))


class Recurrent(nn.Module):
    """A linear layer on the channels of each sample, and a GRU or LSTM, whose last output are the features.

    Args:
        in_channels: Channels of the signals, at least 1; ``None`` takes those of the data when training starts.
        width: Width of the linear layer and of the features, at least 1.
        num_layers: Recurrent layers, at least 1.
        cell: ``"gru"`` or ``"lstm"``.
    """

    out_features: int

    def __init__(
        self,
        in_channels: int | None = None,
        width: int = 64,
        num_layers: int = 1,
        cell: Literal["gru", "lstm"] = "gru",
    ) -> None:
        super().__init__()
        _check(in_channels, width)
        check_at_least("num_layers", num_layers, 1)
        check_one_of("cell", cell, ("gru", "lstm"))
        self.in_channels = in_channels
        self.out_features = width
        self.layer = nn.LazyLinear(width) if in_channels is None else nn.Linear(in_channels, width)
        self.recurrent = (nn.GRU if cell == "gru" else nn.LSTM)(width, width, num_layers, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Features (batch, width) of signals (batch, in_channels, samples)."""
        outputs, _ = self.recurrent(self.layer(x.transpose(1, 2)).relu())
        return cast(Tensor, outputs[:, -1])


class WidarNet(nn.Module):
    """The network of Widar3.0 for velocity profiles: a small CNN for each, and a GRU over them.

    Of each profile, 16 convolutions over 5x5 velocities, a max pooling over 2x2 and two layers of 64 units. Dropout is
    between these and after the GRU, whose last output are the features.

    Args:
        width: Units of the GRU, and width of the features, at least 1: 128 in the publication, 4 in that on encrypted
            MMD.
        side: Velocities along each axis, at least 6.
        dropout: Probability in [0, 1) of dropping a unit.

    References:
        Zheng et al., Zero-effort cross-domain gesture recognition with Wi-Fi, MobiSys 2019, section 5.
    """

    out_features: int

    def __init__(self, width: int = 128, side: int = 20, dropout: float = 0.5) -> None:
        super().__init__()
        check_at_least("width", width, 1)
        check_at_least("side", side, 6)
        check(0 <= dropout < 1, "dropout", "a probability in [0, 1)", dropout)
        self.out_features = width
        self.frame = nn.Sequential(
            *(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(16 * ((side - 4) // 2) ** 2, 64), nn.ReLU(), nn.Dropout(dropout)),
            *(nn.Linear(64, 64), nn.ReLU()),
        )
        self.recurrent = nn.GRU(64, width, batch_first=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Features (batch, width) of profiles (batch, frames, side, side)."""
        frames = self.frame(x.flatten(0, 1).unsqueeze(1))
        outputs, _ = self.recurrent(frames.unflatten(0, x.shape[:2]))
        return cast(Tensor, self.dropout(outputs[:, -1]))
