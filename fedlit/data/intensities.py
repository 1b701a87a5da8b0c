"""Intensities of images: which values of a file are read, and what they become before a network sees them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedlit.checks import check
from fedlit.data.samples import check_data

Window: TypeAlias = tuple[float, float] | Literal["file"]
"""Level and width, or that of each DICOM file."""

Normalise: TypeAlias = Literal["client", "quantiles"]

NEEDS_RANGE = "give window=[level, width] in the unit of the values, or normalise='client' or 'quantiles'"
"""Way out for values whose range is not known."""

_GRID = 32
"""Pixels of an image's side, at most, that quantiles are computed of."""

_ENDS = (0.01, 0.99)
"""Quantiles that become 0 and 1."""


_rounded_folders: set[Path] = set()
"""Folders of whose rounded values a warning was given, so that one stands for all of them."""


class Scale(NamedTuple):
    """Subtracts ``low`` from values and divides them by ``span``; ``clips`` what is outside [0, 1] then."""

    low: float = 0.0
    span: float = 255.0
    clips: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Scale values of any shape, to float32."""
        x = x.float() / self.span if self.low == 0 else (x.float() - self.low) / self.span
        return x.clamp(0.0, 1.0) if self.clips else x


BYTES = Scale()
"""Of 8 bits."""


@dataclass(frozen=True)
class Reading:
    """What is read of a file.

    Args:
        stored: Grey values as they are stored, in place of 8 bits of colours. Colours are of 8 bits all the same.
        window: Window that values are to be looked at through.
    """

    stored: bool = False
    window: Window | None = None

    @property
    def scale(self) -> Scale:
        """Of values that were read, before they are normalised."""
        if not isinstance(self.window, tuple):
            return Scale(span=1.0) if self.stored else BYTES
        level, width = self.window
        return Scale(level - width / 2, width, clips=True)

    def values(self, channels: int) -> str:
        """What values of images are, in words."""
        if not self.stored:
            return "Pixels of images, red, green and blue, from 0 to 255"
        what = (
            "Grey values of images" if channels == 1 else "Values of images in 3 channels, equal where they are grey,"
        )
        if self.window == "file":
            return f"{what} from 0 to 1 by the window of their file"
        return f"{what} in the unit of their files (of DICOM after rescaling, and with white as the largest)"

    def steps(self, normalise: Normalise | None) -> str:
        """What is done to values before a network sees them, in words."""
        how = {
            None: "normalises them",
            "client": "standardises them with mean and deviation of the target's training images",
            "quantiles": "makes 1 % and 99 % quantiles of the target's training images 0 and 1 and normalises them",
        }[normalise]
        if not isinstance(self.window, tuple):
            return how
        return f"takes them by the window of level {self.window[0]:g} and width {self.window[1]:g} and {how}"


def checked_window(window: Any) -> Window | None:
    """Return a window, which may be a list, or refuse it."""
    if window is None or window == "file":
        return cast("Window | None", window)
    fits = isinstance(window, list | tuple) and len(window) == 2
    fits = fits and all(isinstance(each, int | float) and math.isfinite(each) for each in window) and window[1] > 0
    check(fits, "window", "[level, width] with a positive width, or 'file'", window)
    return float(window[0]), float(window[1])


def moments(batches: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel of images, shapes (n, c, height, width), as two of shape (3,), float64.

    The deviation of a constant channel is 1, which has nothing to scale.
    """
    total = squares = torch.zeros(())
    number, shift = 0, None
    for x in batches:
        x = x.double()
        # about a value in their midst, as squares of large values with small differences cancel
        shift = x.mean(dim=(0, 2, 3), keepdim=True) if shift is None else shift
        x = x - shift
        total, squares = total + x.sum(dim=(0, 2, 3)), squares + x.square().sum(dim=(0, 2, 3))
        number += x.numel() // x.shape[1]
    assert shift is not None
    mean = total / number
    deviation = (squares / number - mean.square()).clamp(min=0).sqrt()
    mean = mean + shift.flatten()
    is_constant = deviation <= 1e-9 * mean.abs().clamp(min=1e-30)
    return mean.expand(3).clone(), deviation.masked_fill(is_constant, 1.0).expand(3).clone()


def quantile_scale(batches: Iterable[Tensor]) -> Scale:
    """Scale by which the 1 % and 99 % quantiles of all values become 0 and 1, of 32 x 32 pixels of each image."""
    grids = []
    for x in batches:
        step = -(-x.shape[-1] // _GRID)
        grids.append(x[..., ::step, ::step].flatten())
    values = torch.cat(grids).sort().values
    low, high = (float(values[round(end * (len(values) - 1))]) for end in _ENDS)
    if low == high:  # of a background with few other pixels
        low, high = float(values[0]), float(values[-1])
    return Scale(low, high - low or 1.0, clips=True)


def as_float32(values: npt.NDArray[Any], path: Path) -> npt.NDArray[np.float32]:
    """Return stored values of a file in 32 bits; refuse those that are not finite, and warn if whole ones are rounded.

    Raises:
        DatasetLayoutError: If a value is NaN or infinite, or becomes so.
    """
    with np.errstate(over="ignore"):
        found = values.astype(np.float32)
    way_out = "replace NaN, infinity and what is beyond 3.4e38"
    check_data(bool(np.isfinite(found).all()), str(path), "an image of finite values", "others", way_out)
    rounded = found != values
    if path.parent not in _rounded_folders and rounded.any() and bool((values == np.rint(values)).all()):
        _rounded_folders.add(path.parent)
        warnings.warn(
            f"whole numbers of {str(path)!r}, such as {values[rounded][0]}, are rounded to 24 bits, so that others may "
            "become equal to them; files in its folder are not named each: subtract what the values have in common, or "
            "divide them, and save them as floats of 32 bits",
            stacklevel=2,
        )
    return found
