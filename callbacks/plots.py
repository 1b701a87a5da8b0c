"""Helpers of callbacks that draw with matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def colors_of(number: int) -> list[Any]:
    """Colours that distinguish so many things."""
    import matplotlib as mpl

    if number <= 10:
        return [mpl.colormaps["tab10"](place) for place in range(number)]
    return [mpl.colormaps["turbo"](0.04 + 0.92 * place / (number - 1)) for place in range(number)]


def over_rounds(axis: Axes) -> None:
    """Make the horizontal axis one of communication rounds."""
    axis.set_xlabel("round")
    axis.locator_params(axis="x", integer=True)
    axis.grid(alpha=0.25)
