"""Curves over communication rounds as pictures that can be read on light and dark ground."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = ("#3b82c4", "#e07b39", "#3a9d5d", "#c94f5c", "#8f6fc9", "#9a7b4f", "#d165b0", "#2ba3a8")
"""All are told apart, and from the ground, whether it is light or dark."""
_DASHES = ("-", "--", "-.", ":")
_MARKERS = "osD^vP*X<>"

_INK = "#010203"
"""A colour that nothing else has: in the picture it becomes that of the text around."""
_STYLE = (
    "<style>svg { color: #1b1f24; background: #ffffff; } "
    "@media (prefers-color-scheme: dark) { svg { color: #e6e8eb; background: #16181c; } }</style>"
)

_WIDTH, _HEIGHT = 6.4, 3.6
_LETTERS = 84
"""Of a legend that fit beside one another in this width."""


@dataclass(frozen=True)
class Line:
    """One curve.

    Args:
        label: In the legend.
        points: Values by round. A line leads over rounds without one, and is broken where a value is not finite.
        place: Among those that the picture compares, which gives it its colour; ``None`` is the colour of the text.
        emphasis: Whether it is an oracle's or a sum, and is drawn broad and dashed.
    """

    label: str
    points: Mapping[int, float]
    place: int | None
    emphasis: bool = False


@dataclass(frozen=True)
class Panel:
    """Curves, each with at least one point, on the same axes.

    Without limits the vertical axis has what the values need. It may be logarithmic where that is asked for: it is, if
    the values are positive and span two orders of magnitude.
    """

    title: str
    lines: Sequence[Line]
    limits: tuple[float, float] | None = None
    logarithmic: bool = False


def draw(panel: Panel) -> bytes:
    """A panel as an SVG picture; the same panel gives the same bytes."""
    from matplotlib import style
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    ink = ("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color", "grid.color")
    settings = dict.fromkeys(ink, _INK) | {
        "svg.hashsalt": "fedlit",  # identifiers are drawn at random otherwise
        "svg.fonttype": "none",
        "text.parse_math": False,  # names come from files
    }
    with style.context(["default", settings]):
        columns = max(1, min(len(panel.lines), _LETTERS // (max(len(line.label) for line in panel.lines) + 7)))
        height = _HEIGHT + 0.22 * math.ceil(len(panel.lines) / columns)
        figure = Figure(figsize=(_WIDTH, height), layout="constrained", facecolor="none")
        axis = figure.subplots()
        axis.set_facecolor("none")
        handles = [_draw(axis, line, place, len(panel.lines)) for place, line in enumerate(panel.lines)]
        axis.set_title(panel.title, fontsize=11)
        axis.set_xlabel("communication round, the first is 0")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axis.grid(alpha=0.18)
        axis.spines[["top", "right"]].set_visible(False)
        if panel.limits is not None:
            axis.set_ylim(*panel.limits)
        elif panel.logarithmic and _spans_orders(panel.lines):
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        labels = [line.label for line in panel.lines]
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _on_any_ground(file.getvalue().decode()).encode()


def _draw(axis: Axes, line: Line, place: int, number: int) -> Any:
    rounds = sorted(line.points)
    values = [line.points[round_idx] if math.isfinite(line.points[round_idx]) else math.nan for round_idx in rounds]
    look: dict[str, Any] = {"color": _INK, "linewidth": 1.3, "linestyle": ":"}
    if line.emphasis:
        look |= {"linewidth": 2.2, "linestyle": "--"}
    if line.place is not None:
        look |= {
            "color": _COLORS[line.place % len(_COLORS)],
            "linestyle": _DASHES[line.place // len(_COLORS) % len(_DASHES)],
        }
    # of equal curves one should see that they are several: markers on top are smaller, and in long curves take turns
    step = max(number, math.ceil(len(rounds) / 12)) if len(rounds) > 24 else 1
    look |= {
        "marker": _MARKERS[place % len(_MARKERS)],
        "markersize": 6.5 - 2.5 * place / number,
        "markevery": slice(place * step // number, None, step),
    }
    return axis.plot(rounds, values, **look)[0]


def _spans_orders(lines: Sequence[Line]) -> bool:
    values = [value for line in lines for value in line.points.values() if math.isfinite(value)]
    return bool(values) and min(values) > 0 and max(values) > 100 * min(values)


def _on_any_ground(svg: str) -> str:
    """Leave out what names addresses elsewhere, and give text and axes the colour that the reader's ground needs."""
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return re.sub(r"(<svg[^>]*>)", rf"\1{_STYLE}", svg, count=1).replace(_INK, "currentColor")
