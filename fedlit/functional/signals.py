"""Time series: missing values filled, one rate, windows with their labels, and features of windows."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedlit.checks import check, check_at_least, check_positive
from fedlit.functional.checks import check_shape

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

NUM_BANDS = 5

NUM_FEATURES = 2 + len(QUANTILES) + 1 + NUM_BANDS
"""Of one channel: `window_features`."""

_NO_POWER = 1e-20
"""Added to each power, so that a channel that stands still has a logarithm."""

_LARGEST_FACTOR = 1000

Array = npt.NDArray[np.float64]


def fill_missing(x: Array, longest: int) -> Array:
    """Fill runs of at most ``longest`` missing samples (NaN) by linear interpolation, each channel by itself.

    Runs at the beginning and the end have a value on one side alone, and stay.

    Args:
        x: Samples of C channels, shape (T, C), float64.
        longest: Samples, at least 0.
    """
    check_at_least("longest", longest, 0)
    filled = x.copy()
    for channel in range(x.shape[1]):
        missing = np.isnan(x[:, channel])
        starts, ends = _runs(missing)
        fills = (ends - starts <= longest) & (starts > 0) & (ends < len(x))
        for start, end in zip(starts[fills], ends[fills], strict=True):
            first, last = x[start - 1, channel], x[end, channel]
            filled[start:end, channel] = np.linspace(first, last, end - start + 2)[1:-1]
    return filled


def _runs(marks: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First positions of runs of marked samples, and those behind their last ones."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], marks, [False]])))
    return edges[::2], edges[1::2]


def resample(x: Array, rate: float, new_rate: float) -> Array:
    """Resample to another rate, by a polyphase filter against aliasing (`scipy.signal.resample_poly`).

    The ratio of rates is taken as a fraction of numbers up to 1000. Missing samples (NaN) stay missing; the filter
    takes interpolated values in their place.

    Args:
        x: Samples of C channels, shape (T, C), float64, T at least 1.
        rate: Samples a second, positive.
        new_rate: The same of the result.

    Returns:
        Shape (ceil(T * new_rate / rate), C); sample i is at i / new_rate seconds.
    """
    from scipy.signal import resample_poly  # which takes long to import

    check_positive("rate", rate)
    check_positive("new_rate", new_rate)
    ratio = Fraction(new_rate / rate).limit_denominator(_LARGEST_FACTOR)
    check(0 < ratio <= _LARGEST_FACTOR, "new_rate", f"within {_LARGEST_FACTOR} times of rate ({rate:g})", new_rate)
    if ratio == 1:
        return x
    missing = np.isnan(x)
    usable = ~missing.all(axis=0)
    whole, times = np.zeros_like(x), np.arange(len(x))
    for channel in np.flatnonzero(usable):
        known = ~missing[:, channel]
        whole[:, channel] = np.interp(times, times[known], x[known, channel])
    # with zeros beyond its ends, a recording would begin and end with a jump
    resampled: Array = resample_poly(whole, ratio.numerator, ratio.denominator, axis=0, padtype="line")
    resampled[missing[nearest_samples(len(resampled), len(x), rate, new_rate)]] = np.nan
    return resampled


def nearest_samples(size: int, old_size: int, rate: float, new_rate: float) -> npt.NDArray[np.int64]:
    """Return for each of ``size`` samples at ``new_rate`` the nearest of ``old_size`` at ``rate``, shape (size,)."""
    nearest: npt.NDArray[np.int64] = np.rint(np.arange(size) * (rate / new_rate)).astype(np.int64)
    return nearest.clip(max=old_size - 1)


def on_grid(x: Array, time: Array, rate: float) -> tuple[Array, npt.NDArray[np.int64]]:
    """Interpolate samples with time stamps linearly on regular times from the first one on.

    Args:
        x: Samples of C channels, shape (T, C), float64; next to a missing one (NaN), interpolated ones are missing.
        time: Seconds, shape (T,), increasing.
        rate: Samples a second of the result, close to that of the samples: there is no filter against aliasing.

    Returns:
        Samples, shape (N, C), and for each the index of the nearest one in ``x``, shape (N,).
    """
    check_positive("rate", rate)
    # a last stamp that is a rounding error short of the grid counts as on it
    grid = time[0] + np.arange(int((time[-1] - time[0]) * rate + 0.01) + 1) / rate
    after = np.searchsorted(time, grid).clip(1, max(len(time) - 1, 1)) if len(time) > 1 else np.ones(1, np.int64)
    before = after - 1
    after = np.minimum(after, len(time) - 1)
    span = np.where(after > before, time[after] - time[before], 1.0)
    along = ((grid - time[before]) / span).clip(0.0, 1.0)
    nearest = np.where(along < 0.5, before, after)
    exact = np.abs(grid - time[nearest]) * rate < 1e-6
    values = (1 - along[:, None]) * x[before] + along[:, None] * x[after]
    return np.where(exact[:, None], x[nearest], values), nearest


def cut_windows(x: Tensor, size: int, stride: int) -> Tensor:
    """Return windows of ``size`` samples, ``stride`` apart, shape (n, C, size), a view of ``x``, shape (T, C)."""
    check_at_least("size", size, 1)
    check_at_least("stride", stride, 1)
    return x.unfold(0, size, stride) if len(x) >= size else x.new_empty(0, x.shape[1], size)


def window_labels(labels: Tensor, size: int, stride: int, majority: bool = False) -> Tensor:
    """Return the label of each window, int64, shape (n,); -1 where it has none.

    Args:
        labels: Of each sample, int64, shape (T,), from 0; -1 where there is none.
        size: Samples of a window, at least 1.
        stride: Samples from one window to the next, at least 1.
        majority: Label of more than half of the samples; otherwise, that of all samples.
    """
    check_at_least("size", size, 1)
    check_at_least("stride", stride, 1)
    if len(labels) < size:
        return labels.new_empty(0)
    classes = max(int(labels.max()) + 1, 1)
    # counts of each class up to each sample: a window's counts are differences
    counts = torch.zeros(len(labels) + 1, classes, dtype=torch.int32)
    known = labels >= 0
    counts[1:][known, labels[known]] = 1
    counts = counts.cumsum(0, dtype=torch.int32)
    starts = torch.arange(0, len(labels) - size + 1, stride)
    most, label = (counts[starts + size] - counts[starts]).max(dim=1)
    return torch.where(2 * most > size if majority else most == size, label, -1)


def with_magnitudes(x: Tensor, groups: list[list[int]]) -> Tensor:
    """Append channels of Euclidean length: of windows (n, C, L), the length of each group of channels (indices)."""
    lengths = [torch.linalg.vector_norm(x[:, group], dim=1, keepdim=True) for group in groups]
    return torch.cat([x, *lengths], dim=1)


def window_features(x: Tensor) -> Tensor:
    r"""Features of each channel of windows, for classifiers that are linear.

    Of each channel: mean; standard deviation (of the population); quantiles of 5, 25, 50, 75 and 95 % (linear between
    samples); mean absolute difference of successive samples; natural logarithm of the power in five `band_edges`.

    .. math:: \log\Bigl(10^{-20} + \sum_{k \in B} \frac{2 |X_k|^2}{L^2}\Bigr), \quad
              X_k = \sum_t x_t e^{-2 \pi i k t / L}

    At half the rate (k = L/2), the factor is 1 instead of 2, so that all powers add up to the variance.

    Args:
        x: Windows, shape (n, C, L), floating, L at least 10.

    Returns:
        Shape (n, 13 C): all features of the first channel, then of the second.
    """
    check_shape("x", x, "n", "C", "L")
    check(x.is_floating_point(), "x", "of a floating type", x.dtype, "convert it with x.float()", TypeError)
    length = x.shape[-1]
    mean = x.mean(dim=-1, keepdim=True)
    centred = x - mean
    deviation = centred.square().mean(dim=-1, keepdim=True).sqrt()
    ordered = x.sort(dim=-1).values
    positions = torch.tensor(QUANTILES, dtype=torch.float64) * (length - 1)
    below = positions.long()
    along = (positions - below).to(x)
    quantiles = torch.lerp(ordered[..., below], ordered[..., (below + 1).clamp(max=length - 1)], along)
    change = (x[..., 1:] - x[..., :-1]).abs().mean(dim=-1, keepdim=True)
    edges = band_edges(length)
    # a product with sines and cosines, as a model in ONNX has no transform of real numbers
    phase = torch.outer(torch.arange(length), torch.arange(1, length // 2 + 1)).remainder(length).double()
    phase = phase * (2 * torch.pi / length)
    power = (centred @ phase.cos().to(x)).square() + (centred @ phase.sin().to(x)).square()
    factor = torch.full((length // 2,), 2.0 / length**2, dtype=torch.float64)
    if length % 2 == 0:
        factor[-1] /= 2
    power = power * factor.to(x)
    bands = [power[..., a - 1 : b - 1].sum(dim=-1) for a, b in pairwise(edges)]
    logs = (torch.stack(bands, dim=-1) + _NO_POWER).log()
    return torch.cat([mean, deviation, quantiles, change, logs], dim=-1).flatten(1)


def band_edges(length: int) -> list[int]:
    """Return six edges of five bands of frequency, in cycles a window of ``length`` samples, at least 10.

    A band has the frequencies from its edge up to the next one, which is not in it: from 1 to length / 2, in steps of
    one ratio as far as whole numbers allow.
    """
    check_at_least("length", length, 2 * NUM_BANDS, "samples", "make the windows longer")
    last = length // 2 + 1
    edges = [1]
    for band in range(1, NUM_BANDS):
        ratio = last ** (band / NUM_BANDS)
        edges.append(min(max(round(ratio), edges[-1] + 1), last - NUM_BANDS + band))
    return [*edges, last]
