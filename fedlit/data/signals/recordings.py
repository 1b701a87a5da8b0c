"""Recordings of signals as their owner has them, and windows of them at one rate."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedlit.checks import check, check_at_least, check_positive
from fedlit.data.samples import check_data, refuse_data
from fedlit.data.tables.values import some
from fedlit.federation.labels import UNLABELLED

Numbers = npt.NDArray[Any]

SAME_RATE = 0.02
"""Share by which rates differ that are one rate, of clocks that run somewhat apart."""

_GAP = 1.5
"""Periods from one sample to the next from which on samples are missing between them."""

_ROUNDING = 1e-6
"""Periods by which a step may differ from what its time stamps say in decimals."""


@dataclass(frozen=True)
class Recording:
    """A recording of several channels, without a break but for gaps between time stamps.

    Args:
        name: File or part of one, which differs from other recordings' of a client.
        x: Samples, shape (T, C); NaN where one is missing.
        channels: Names of the C channels.
        labels: Index in ``classes`` of each sample, shape (T,), -1 where it has none; ``None`` without labels.
        classes: Names of the classes that occur.
        time: Seconds of each sample, shape (T,), if it has time stamps.
        rate: Samples a second; ``None`` where they are not known, or follow from time stamps.
    """

    name: str
    x: Numbers
    channels: tuple[str, ...]
    labels: npt.NDArray[np.int64] | None = None
    classes: tuple[str, ...] = ()
    time: npt.NDArray[np.float64] | None = None
    rate: float | None = None

    def selected(self, channels: Sequence[str]) -> Recording:
        """Return the channels of these names, in this order."""
        if tuple(channels) == self.channels:
            return self
        missing = [name for name in channels if name not in self.channels]
        way_out = "name the channels that all recordings have in channels, or rename them in the file"
        check_data(not missing, f"channels of {self.name}", f"{[*channels]}", f"none called {some(missing)}", way_out)
        return replace(self, x=self.x[:, [self.channels.index(name) for name in channels]], channels=tuple(channels))

    @property
    def unlabelled(self) -> bool:
        """Whether no sample has a label."""
        return self.labels is None or bool((self.labels == UNLABELLED).all())


@dataclass(frozen=True)
class Windows:
    """Windows of a client.

    Args:
        x: Shape (n, C, L), float32.
        y: Classes, int64, shape (n,); -1 in recordings without labels.
        recording: Index of each window's recording in ``names``, shape (n,).
        start: Index of each window's first sample in its recording, at the rate of windows, shape (n,).
        names: Of recordings.
        rate: Samples a second; ``None`` if it is not known.
    """

    x: Tensor
    y: Tensor
    recording: Tensor
    start: Tensor
    names: tuple[str, ...]
    rate: float | None

    def texts(self) -> list[str]:
        """Return each window's recording, and where it begins, in seconds or (without a rate) in samples."""
        starts = self.start.tolist() if self.rate is None else [round(n / self.rate, 6) for n in self.start.tolist()]
        return [f"{self.names[index]}@{start}" for index, start in zip(self.recording.tolist(), starts, strict=True)]


@dataclass(frozen=True)
class WindowRules:
    """How windows are cut; `SignalModule` documents the arguments."""

    window: float
    stride: float | None
    in_seconds: bool
    rate: float | None
    recorded_rate: float | None
    fill: float
    majority: bool

    def __post_init__(self) -> None:
        check_positive("window", self.window)
        if self.stride is not None:
            check_positive("stride", self.stride)
        for name in ("rate", "recorded_rate"):
            if getattr(self, name) is not None:
                check_positive(f"{name} (samples a second)", getattr(self, name))
        check_at_least("fill", self.fill, 0)
        if not self.in_seconds:
            for name in ("window", "stride", "fill"):
                value = getattr(self, name)
                whole = value is None or float(value).is_integer()
                check(whole, name, "a whole number of samples with unit='samples'", value, "or give unit='seconds'")
            check_at_least("window", self.window, 2, "samples")

    def samples(self, length: float, rate: float | None) -> int:
        """Return a number of samples of a ``length``, in seconds or samples."""
        if not self.in_seconds:
            return round(length)
        assert rate is not None
        return round(length * rate)

    def sizes(self, rate: float | None) -> tuple[int, int]:
        """Return samples of a window and of a stride."""
        size = self.samples(self.window, rate)
        way_out = f"at {rate} samples a second; see whether that is the rate, or the unit of time stamps is another"
        check_at_least("window", size, 2, "samples", way_out)
        return size, max(1, size // 2 if self.stride is None else self.samples(self.stride, rate))

    # ---------------------------------------------------------------- one rate

    def at_rate(self, recording: Recording) -> tuple[list[tuple[int, Recording]], float | None]:
        """Return parts without a gap, each with the index of its first sample, at the rate of windows; and that."""
        from fedlit.functional.signals import on_grid  # whose libraries other data have no use for

        given = recording.time if recording.time is None else _increasing(recording)
        if given is None:
            rate = recording.rate or self.recorded_rate
            way_out = "give recorded_rate, or time, the column of time stamps"
            what = f"rate of {recording.name}"
            needs = self.in_seconds or self.rate is not None
            check_data(rate is not None or not needs, what, "known for seconds, and for another rate", None, way_out)
            filled = replace(recording, x=self._filled(recording, rate), rate=rate)
            new_rate = rate if self.rate is None else self.rate
            return [(0, _resampled(filled, rate, new_rate))], new_rate
        time, kept = given
        recording = replace(recording, x=recording.x[kept], labels=_at(recording.labels, kept))
        rate = _rate_of(time)
        new_rate = rate if self.rate is None else self.rate
        grid = new_rate if abs(new_rate / rate - 1) <= SAME_RATE else rate
        longest = max(_GAP, self.samples(self.fill, rate) + 1 + (_GAP - 1)) / rate
        bounds = [0, *(np.flatnonzero(np.diff(time) > longest * (1 + _ROUNDING)) + 1).tolist(), len(time)]
        parts = []
        filled_x = self._filled(recording, rate)
        for first, end in pairwise(bounds):
            x, nearest = on_grid(filled_x[first:end], time[first:end], grid)
            part = replace(recording, x=x, labels=_at(_at(recording.labels, slice(first, end)), nearest), time=None)
            parts.append((round((time[first] - time[0]) * new_rate), _resampled(part, grid, new_rate)))
        return parts, new_rate

    def _filled(self, recording: Recording, rate: float | None) -> npt.NDArray[np.float64]:
        from fedlit.functional.signals import fill_missing

        x = recording.x.astype(np.float64)
        x[~np.isfinite(x)] = np.nan
        longest = self.samples(self.fill, rate)
        return fill_missing(x, longest) if longest else x

    # ---------------------------------------------------------------- windows

    def cut(self, client: str, recordings: Sequence[Recording], classes: Sequence[str], is_target: bool) -> Windows:
        """Return the windows of a client's ``recordings``, with classes as numbers.

        Windows without a class are left out, but of the target's recordings without any label.

        Raises:
            DatasetLayoutError: If no window is left, or recordings have different rates.
        """
        from fedlit.functional.signals import cut_windows, window_labels

        number = {name: index for index, name in enumerate(classes)}
        xs, ys, owners, starts = [], [], [], []
        rate_of: dict[str, float | None] = {}
        short, holes = [], []
        for index, recording in enumerate(recordings):
            parts, rate = self.at_rate(recording)
            rate_of[recording.name] = rate
            _check_one_rate(client, rate_of)
            size, stride = self.sizes(rate)
            if max(len(part.x) for _, part in parts) < size:
                short.append(f"{recording.name} ({max(len(part.x) for _, part in parts)} samples)")
            codes = torch.tensor([number.get(name, UNLABELLED) for name in recording.classes] + [UNLABELLED])
            cut_here, whole_here = 0, 0
            for first, part in parts:
                x = cut_windows(torch.from_numpy(part.x).float(), size, stride)
                y = torch.full((len(x),), UNLABELLED)
                kept = torch.ones(len(x), dtype=torch.bool)
                if not (is_target and recording.unlabelled):
                    labels = np.full(len(part.x), UNLABELLED) if part.labels is None else part.labels
                    y = window_labels(codes[torch.from_numpy(labels)], size, stride, self.majority)
                    kept = y != UNLABELLED
                whole = x.isfinite().all(dim=2).all(dim=1)
                cut_here, whole_here = cut_here + int(kept.sum()), whole_here + int((kept & whole).sum())
                kept &= whole
                xs.append(x[kept].contiguous())
                ys.append(y[kept])
                starts.append(first + stride * kept.nonzero().squeeze(1))
                owners.append(torch.full((len(ys[-1]),), index))
            if whole_here < cut_here:
                holes.append(f"{cut_here - whole_here} of {cut_here} of {recording.name} ({_missing_in(parts)})")
            if len(parts) > 1:
                holes.append(f"those across {len(parts) - 1} gaps between the time stamps of {recording.name}")
        found = {name for each in recordings for name in each.classes}
        what = f"no window has one of the classes {[*classes]} (label_rule), of labels {sorted(found)}"
        self._tell(client, short, holes, what if not sum(map(len, ys)) else "")
        names = tuple(each.name for each in recordings)
        rate = next(iter(rate_of.values()))
        return Windows(torch.cat(xs), torch.cat(ys), torch.cat(owners), torch.cat(starts), names, rate)

    def _tell(self, client: str, short: Sequence[str], holes: Sequence[str], empty: str) -> None:
        """Warn of what is left out, or refuse a client of which nothing is left."""
        unit = "seconds" if self.in_seconds else "samples"
        reasons = []
        if short:
            reasons.append(
                f"recordings that are shorter than a window ({self.window:g} {unit}): {some(short)}. Give a shorter "
                "window, or a larger fill if gaps cut them"
            )
        if holes:
            way_out = f"Give fill, the longest run of missing values that is filled ({self.fill:g} {unit} now), or "
            reasons.append(f"windows with missing values: {some(holes)}. {way_out}leave channels out of channels")
        if empty:
            refuse_data(
                f"recordings of client {client!r}", "of at least one window", "none", "; ".join([*reasons, empty])
            )
        if reasons:
            warnings.warn(f"left out of client {client!r}: {'; '.join(reasons)}", stacklevel=2)


def _check_one_rate(client: str, rate_of: dict[str, float | None]) -> None:
    (first, expected), *_ = rate_of.items()
    name, rate = [*rate_of.items()][-1]
    shown = f"{expected} of {first} and {rate} of {name}"
    way_out = f"give rate, to which all are resampled, such as rate={min(rate or 1, expected or 1):g}"
    what = f"rate of client {client!r} (samples a second)"
    check_data(same_rate(rate, expected), what, "the same in all recordings", shown, way_out)


def same_rate(rate: float | None, other: float | None) -> bool:
    """Return whether rates of windows are equal, or both unknown."""
    return rate == other or bool(rate and other and abs(rate / other - 1) < 1e-6)


def _missing_in(parts: Sequence[tuple[int, Recording]]) -> str:
    """Channels with missing values, and the longest run."""
    shares: dict[str, int] = {}
    for _, part in parts:
        for name, share in zip(part.channels, np.isnan(part.x).sum(axis=0), strict=True):
            shares[name] = shares.get(name, 0) + int(share)
    return f"samples missing by channel: {some(f'{name} {count}' for name, count in shares.items() if count)}"


def _at(values: Any, index: Any) -> Any:
    return None if values is None else values[index]


def _increasing(recording: Recording) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]] | None:
    """Time stamps without repeated ones, and which are kept."""
    time = recording.time
    assert time is not None
    what = f"time stamps of {recording.name}"
    wrong = np.flatnonzero(~np.isfinite(time))
    check_data(not len(wrong), what, "in all rows", f"none at samples {some(wrong.tolist())}", "fill them in")
    steps = np.diff(time)
    back = np.flatnonzero(steps < 0) + 1
    way_out = "sort the rows by time, or give recording, the column that names separate recordings"
    shown = f"back at samples {some(back.tolist())} (from 0)"
    check_data(not len(back), what, "increasing from row to row", shown, way_out)
    kept = np.concatenate([[True], steps > 0])
    way_out = "sort the rows by client and time, or leave the recording out"
    check_data(int(kept.sum()) > 1, what, "at least two different ones", int(kept.sum()), way_out)
    rule, shown = "different ones for at least half of the samples", f"{int(kept.sum())} of {len(time)} samples"
    way_out = "stamps are coarser than samples: leave time out and give recorded_rate"
    check_data(2 * int(kept.sum()) >= len(time), what, rule, shown, way_out)
    if not kept.all():
        warnings.warn(
            f"{what}: {int((~kept).sum())} repeat the one before, and their samples are left out", stacklevel=2
        )
    return time[kept], kept


def _rate_of(time: npt.NDArray[np.float64]) -> float:
    """Samples a second where no sample is missing; a whole number if it is within half a percent of one."""
    steps = np.diff(time)
    # of stamps that jitter, short steps are left out as long ones are, which alone would make the rate too high
    usual = np.abs(steps / np.median(steps) - 1) <= _GAP - 1 + _ROUNDING
    rate = 1 / float(steps[usual].mean())
    return float(round(rate)) if round(rate) and abs(rate / round(rate) - 1) < 0.005 else float(f"{rate:.3g}")


def _resampled(recording: Recording, rate: float | None, new_rate: float | None) -> Recording:
    if rate is None or new_rate is None or rate == new_rate:
        return recording
    from fedlit.functional.signals import nearest_samples, resample

    x = resample(recording.x, rate, new_rate)
    nearest = nearest_samples(len(x), len(recording.x), rate, new_rate)
    return replace(recording, x=x, labels=_at(recording.labels, nearest), rate=new_rate)
