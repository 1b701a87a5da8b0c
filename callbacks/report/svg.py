"""Charts as small SVG pictures in the colour of the surrounding text, readable on light and dark ground.

A report has hundreds of them: matplotlib's files would be ten times as large, and take a hundred times as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

COLORS = ("#3b82c4", "#e07b39", "#3a9d5d", "#c94f5c", "#8f6fc9", "#9a7b4f", "#d165b0", "#2ba3a8", "#b8a02c", "#7d8894")
"""Distinguishable from each other and from a light or dark ground."""
DASHES = ("", "6 3", "8 3 2 3", "2 3")
INK = "currentColor"

WIDTH, HEIGHT = 480, 270
"""Of a chart with its axes; a legend is below."""
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 30, 38
_LETTER, _ROW = 6.1, 16

_STYLE = (
    "<style>text{fill:currentColor;stroke:none}svg{color:#1b1f24;background:#fff}"
    "@media(prefers-color-scheme:dark){svg{color:#e6e8eb;background:#16181c}}</style>"
)


def color_of(place: int) -> str:
    """Colour of the curve at this position."""
    return COLORS[place % len(COLORS)]


def dash_of(place: int) -> str:
    """Dashes that distinguish more curves than there are colours."""
    return DASHES[place // len(COLORS) % len(DASHES)]


def number(value: float) -> str:
    """A coordinate, to a tenth."""
    return f"{value:.1f}".removesuffix(".0")


@dataclass(frozen=True)
class Scale:
    """Pixels of numbers along an axis: ``low`` is at ``start`` and ``high``, which is above it, at ``end``."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a number."""
        low, high, value = (math.log(each) if self.logarithmic else each for each in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def ticks(self, whole: bool = False, number: int = 6) -> list[float]:
        """Round numbers along the axis."""
        from matplotlib.ticker import LogLocator, MaxNLocator

        if self.logarithmic:
            powers = LogLocator(subs=(1,)).tick_values(self.low, self.high)
            inside = [float(each) for each in powers if self.low <= each <= self.high]
            if len(inside) > 1:
                return inside
        locator = MaxNLocator(number, integer=whole, steps=[1, 2, 2.5, 5, 10])
        return [float(each) for each in locator.tick_values(self.low, self.high) if self.low <= each <= self.high]


def spanning(values: Sequence[float], start: float, end: float, logarithmic: bool = False) -> Scale:
    """A scale with all finite values and some room around; from 0 to 1 without any."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if logarithmic and low > 0 and high > 100 * low:
        return Scale(low / (high / low) ** 0.05, high * (high / low) ** 0.05, start, end, True)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return Scale(low - room, high + room, start, end)


@dataclass
class Drawing:
    """A picture in the making; its size is in pixels, and the legend adds to the height."""

    title: str
    width: float = WIDTH
    height: float = HEIGHT
    parts: list[str] = field(default_factory=list)

    def line(self, points: Sequence[tuple[float, float]], **look: str) -> None:
        """Draw a line through points; one that is not finite breaks it."""
        steps, down = [], False
        for x, y in points:
            finite = math.isfinite(x) and math.isfinite(y)
            if finite:
                steps.append(f"{'L' if down else 'M'}{number(x)} {number(y)}")
            down = finite
        if steps:
            self.parts.append(f'<path d="{"".join(steps)}"{_attributes(look)}/>')

    def dots(self, points: Sequence[tuple[float, float]], size: float, color: str, **look: str) -> None:
        """Draw dots of a diameter in pixels; those that are not finite are left out."""
        marks = [f"M{number(x)} {number(y)}h0" for x, y in points if math.isfinite(x) and math.isfinite(y)]
        if marks:
            look = {"stroke": color, "stroke-width": number(size), "stroke-linecap": "round"} | look
            self.parts.append(f'<path d="{"".join(marks)}"{_attributes(look)}/>')

    def box(self, x: float, y: float, width: float, height: float, **look: str) -> None:
        """Draw a rectangle."""
        where = {"x": number(x), "y": number(y), "width": number(width), "height": number(height), "stroke": "none"}
        self.parts.append(f"<rect{_attributes(where | look)}/>")

    def text(self, x: float, y: float, text: str, anchor: str = "start", **look: str) -> None:
        """Write text whose start, middle or end (``anchor``) is at the point."""
        where = {"x": number(x), "y": number(y)}
        if anchor != "start":
            where["text-anchor"] = anchor
        self.parts.append(f"<text{_attributes(where | look)}>{escape(text)}</text>")

    def axes(self, x: Scale, y: Scale, below: str, whole: bool = False, percent: bool = False) -> None:
        """Draw a grid with its numbers, and name the horizontal axis."""
        for value in y.ticks():
            at = y(value)
            self.line([(x.start, at), (x.end, at)], opacity=".18")
            self.text(x.start - 6, at + 4, label_of(value), "end")
        for value in x.ticks(whole, 8):
            self.line([(x(value), y.start), (x(value), y.start + 4)])
            self.text(x(value), y.start + 16, label_of(value), "middle")
        self.line([(x.start, y.end), (x.start, y.start), (x.end, y.start)])
        self.text((x.start + x.end) / 2, y.start + 31, below, "middle")

    def legend(self, entries: Sequence[tuple[str, dict[str, str]]]) -> None:
        """Name the lines, in rows below everything else."""
        row, at = self.height + 10, float(LEFT)
        for name, look in entries:
            needs = 30 + _LETTER * len(name)
            if at > LEFT and at + needs > self.width:
                row, at = row + _ROW, float(LEFT)
            self.line([(at, row - 4), (at + 20, row - 4)], **look)
            self.text(at + 25, row, name)
            at += needs + 12
        self.height = row + 6

    def color_legend(self, names: Iterable[str], width: int = 4) -> None:
        """Name the things that are distinguished by colour alone."""
        self.legend([(name, {"stroke": color_of(at), "stroke-width": str(width)}) for at, name in enumerate(names)])

    def svg(self) -> str:
        """The picture as an element of a page."""
        size = f"0 0 {number(self.width)} {number(self.height)}"
        title = f'<text x="{number(self.width / 2)}" y="16" text-anchor="middle"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" width="{number(self.width)}" role="img" '
            f'fill="none" stroke="currentColor" '
            f'font-family="system-ui,sans-serif" font-size="11"><title>{escape(self.title)}</title>'
            f'{title} font-size="13">{escape(self.title)}</text>{"".join(self.parts)}</svg>'
        )


def standalone(svg: str) -> str:
    """The picture as a file, with its colours and ground."""
    return svg.replace("<title>", f"{_STYLE}<title>", 1)


def label_of(value: float) -> str:
    """Text of a number at an axis."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _attributes(look: dict[str, str]) -> str:
    return "".join(f' {name.replace("_", "-")}="{escape(value)}"' for name, value in look.items() if value != "")
