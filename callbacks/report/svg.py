"""Charts as small SVG pictures, drawn in the colour of the text around: they can be read on light and dark ground.

They are written by hand as a report has some hundred of them: what matplotlib writes is ten times as much, and takes a
hundred times as long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

COLORS = ("#3b82c4", "#e07b39", "#3a9d5d", "#c94f5c", "#8f6fc9", "#9a7b4f", "#d165b0", "#2ba3a8", "#b8a02c", "#7d8894")
"""All can be distinguished from one another, and from the ground, whether it is light or dark."""
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
    """Of the one that is compared at this place."""
    return COLORS[place % len(COLORS)]


def dash_of(place: int) -> str:
    """Of a line, where there are more than colours."""
    return DASHES[place // len(COLORS) % len(DASHES)]


def number(value: float) -> str:
    """A coordinate, to a tenth."""
    return f"{value:.1f}".removesuffix(".0")


@dataclass(frozen=True)
class Scale:
    """Where numbers are along an axis.

    Args:
        low: Number at ``start``.
        high: Number at ``end``; above ``low``, and both positive if logarithmic.
        start: Place of ``low``, in pixels.
        end: Place of ``high``.
        logarithmic: Whether equal ways are equal ratios.
    """

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Where a number is, in pixels."""
        low, high, value = (math.log(each) if self.logarithmic else each for each in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def ticks(self, whole: bool = False, most: int = 6) -> list[float]:
        """Round numbers along the axis."""
        from matplotlib.ticker import LogLocator, MaxNLocator

        if self.logarithmic:
            powers = LogLocator(subs=(1,)).tick_values(self.low, self.high)
            inside = [float(each) for each in powers if self.low <= each <= self.high]
            if len(inside) > 1:
                return inside
        locator = MaxNLocator(most, integer=whole, steps=[1, 2, 2.5, 5, 10])
        return [float(each) for each in locator.tick_values(self.low, self.high) if self.low <= each <= self.high]


def spanning(values: Sequence[float], start: float, end: float, logarithmic: bool = False) -> Scale:
    """A scale on which all finite values are, with some room around; at least one is finite, or it is from 0 to 1."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if logarithmic and low > 0 and high > 100 * low:
        return Scale(low / (high / low) ** 0.05, high * (high / low) ** 0.05, start, end, True)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return Scale(low - room, high + room, start, end)


@dataclass
class Drawing:
    """What is drawn so far.

    Args:
        title: Above.
        width: In pixels.
        height: In pixels; grows by the legend.
    """

    title: str
    width: float = WIDTH
    height: float = HEIGHT
    parts: list[str] = field(default_factory=list)

    def line(self, points: Sequence[tuple[float, float]], **look: str) -> None:
        """A line through points, which a point that is not finite breaks."""
        words, down = [], False
        for x, y in points:
            finite = math.isfinite(x) and math.isfinite(y)
            if finite:
                words.append(f"{'L' if down else 'M'}{number(x)} {number(y)}")
            down = finite
        if words:
            self.parts.append(f'<path d="{"".join(words)}"{_attributes(look)}/>')

    def dots(self, points: Sequence[tuple[float, float]], size: float, color: str, **look: str) -> None:
        """Round dots of a diameter in pixels; those that are not finite are left out."""
        words = [f"M{number(x)} {number(y)}h0" for x, y in points if math.isfinite(x) and math.isfinite(y)]
        if words:
            look = {"stroke": color, "stroke-width": number(size), "stroke-linecap": "round"} | look
            self.parts.append(f'<path d="{"".join(words)}"{_attributes(look)}/>')

    def box(self, x: float, y: float, width: float, height: float, **look: str) -> None:
        """A rectangle."""
        where = {"x": number(x), "y": number(y), "width": number(width), "height": number(height), "stroke": "none"}
        self.parts.append(f"<rect{_attributes(where | look)}/>")

    def text(self, x: float, y: float, words: str, anchor: str = "start", **look: str) -> None:
        """Words, at the start, the middle or the end of which the point is."""
        where = {"x": number(x), "y": number(y)}
        if anchor != "start":
            where["text-anchor"] = anchor
        self.parts.append(f"<text{_attributes(where | look)}>{escape(words)}</text>")

    def axes(self, x: Scale, y: Scale, below: str, whole: bool = False, percent: bool = False) -> None:
        """A grid, numbers at it, and what the horizontal axis has."""
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
        """What each line is, in rows below all else."""
        row, at = self.height + 10, float(LEFT)
        for words, look in entries:
            needs = 30 + _LETTER * len(words)
            if at > LEFT and at + needs > self.width:
                row, at = row + _ROW, float(LEFT)
            self.line([(at, row - 4), (at + 20, row - 4)], **look)
            self.text(at + 25, row, words)
            at += needs + 12
        self.height = row + 6

    def svg(self) -> str:
        """The picture, to be put into a page."""
        size = f"0 0 {number(self.width)} {number(self.height)}"
        title = f'<text x="{number(self.width / 2)}" y="16" text-anchor="middle"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" width="{number(self.width)}" role="img" '
            f'fill="none" stroke="currentColor" '
            f'font-family="system-ui,sans-serif" font-size="11"><title>{escape(self.title)}</title>'
            f'{title} font-size="13">{escape(self.title)}</text>{"".join(self.parts)}</svg>'
        )


def standalone(svg: str) -> str:
    """The same as a file, with a ground and colours of its own."""
    return svg.replace("<title>", f"{_STYLE}<title>", 1)


def label_of(value: float) -> str:
    """A number at an axis."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _attributes(look: dict[str, str]) -> str:
    return "".join(f' {name.replace("_", "-")}="{escape(value)}"' for name, value in look.items() if value != "")
