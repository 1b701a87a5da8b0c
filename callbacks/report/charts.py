"""Charts of a report as small SVG pictures in the colour of the surrounding text, readable on light and dark ground.

A report has hundreds of them: matplotlib's files would be ten times as large, and take a hundred times as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from fedlit.tables import mean_and_deviation

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

_MARKED = 24
"""Points up to which a curve's points are marked."""


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


@dataclass(frozen=True)
class Line:
    """One curve."""

    label: str  # in the legend
    # values by round. A line leads over rounds without one, and is broken where a value is not finite.
    points: Mapping[int, float]
    place: int | None = None  # position that gives it its colour; ``None`` is the colour of the text
    emphasis: bool = False  # whether it is drawn broad and dashed, as oracles and sums are
    spread: Mapping[int, float] = field(default_factory=dict)  # standard deviation by round, drawn as a band


@dataclass(frozen=True)
class Panel:
    """Curves, each with at least one point, on the same axes."""

    title: str  # above
    lines: Sequence[Line]  # the curves
    limits: tuple[float, float] | None = None  # of the vertical axis; ``None`` is the range of the values
    # whether that axis is logarithmic if the values are positive and span two orders of magnitude
    logarithmic: bool = False

    def draw(self) -> str:
        """The picture, with the same bytes each time."""
        drawing = Drawing(self.title)
        rounds = [at for line in self.lines for at in line.points]
        values = [
            value + way * line.spread.get(at, 0.0)
            for line in self.lines
            for at, value in line.points.items()
            for way in (-1, 1)
        ]
        x = Scale(min(rounds), max(rounds), LEFT + 8, WIDTH - RIGHT - 8)
        if x.low == x.high:
            x = Scale(x.low - 1, x.high + 1, x.start, x.end)
        bottom = HEIGHT - BOTTOM
        logarithmic = self.logarithmic and not any(line.spread for line in self.lines)
        y = Scale(*self.limits, bottom, TOP) if self.limits else spanning(values, bottom, TOP, logarithmic)
        drawing.axes(x, y, "communication round, the first is 0", whole=True)
        for line in self.lines:
            _band(drawing, line, x, y)
        for place, line in enumerate(self.lines):
            points = [(x(at), _place(y, value)) for at, value in sorted(line.points.items())]
            drawing.line(points, **_look(line))
            if len(points) <= _MARKED:  # smaller dots on top show that equal curves are several
                size = 6.5 - 3 * place / len(self.lines)
                drawing.dots(points, size, INK if line.place is None else color_of(line.place))
        drawing.legend([(line.label, _look(line)) for line in self.lines])
        return drawing.svg()


def _place(y: Scale, value: float) -> float:
    return y(value) if math.isfinite(value) and (value > 0 or not y.logarithmic) else math.nan


def _look(line: Line) -> dict[str, str]:
    look = {"stroke": "", "stroke-dasharray": "2 3", "stroke-width": "1.4"}
    if line.emphasis:
        look |= {"stroke-dasharray": "6 3", "stroke-width": "2.4"}
    if line.place is not None:
        look |= {"stroke": color_of(line.place), "stroke-dasharray": dash_of(line.place)}
    return look


def _band(drawing: Drawing, line: Line, x: Scale, y: Scale) -> None:
    inside = [at for at in sorted(line.points) if at in line.spread and math.isfinite(line.points[at])]
    if len(inside) < 2 or line.place is None:
        return
    low, high = (
        [(x(at), min(max(y(line.points[at] + way * line.spread[at]), y.end), y.start)) for at in inside]
        for way in (-1, 1)
    )
    drawing.line([*high, *reversed(low), high[0]], stroke="none", fill=color_of(line.place), fill_opacity=".16")


def dots(title: str, groups: Sequence[str], values: Mapping[str, Sequence[Sequence[float]]], unit: str) -> str:
    """Mean and spread of several methods in several groups: a dot, and a line of a standard deviation to either side.

    ``values`` has, by method, the values over seeds of each group; ``unit`` is below the axis.
    """
    row, gap = 15, 14
    inner = row * len(values) + gap
    left = min(230.0, 24 + 6.4 * max(map(len, groups)))
    height = TOP + inner * len(groups)
    drawing = Drawing(title, height=height + BOTTOM)
    found = [(*mean_and_deviation(each),) for some in values.values() for each in some if each]
    ends = [mean + way * (spread or 0.0) for mean, spread in found for way in (-1, 1)]
    x = spanning(ends, left, WIDTH - RIGHT - 40)
    for value in x.ticks(number=8):
        drawing.line([(x(value), TOP), (x(value), height)], opacity=".18")
        drawing.text(x(value), height + 16, f"{value:.4g}", "middle")
    drawing.text((x.start + x.end) / 2, height + 32, unit, "middle")
    for at, group in enumerate(groups):
        top = TOP + at * inner
        drawing.line([(12, top), (WIDTH - RIGHT, top)], opacity=".35")
        drawing.text(left - 10, top + inner / 2 + 4, group, "end")
        for place, some in enumerate(values.values()):
            if not some[at]:
                continue
            mean, spread = mean_and_deviation(some[at])
            y = top + gap / 2 + row * (place + 0.5)
            color = color_of(place)
            if spread is not None:
                drawing.line([(x(mean - spread), y), (x(mean + spread), y)], stroke=color, stroke_width="2")
            drawing.dots([(x(mean), y)], 8, color)
            drawing.text(x(mean + (spread or 0)) + 8, y + 4, f"{mean:.1f}" if abs(mean) >= 10 else f"{mean:.3f}")
    drawing.color_legend(values)
    return drawing.svg()


def reliability(title: str, bins: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Share of right predictions by their probability: a line for each method, and the diagonal of calibration.

    ``bins`` has, by method, rows with the number of samples, their mean probability, and the share that is right.
    """
    drawing = Drawing(title, height=HEIGHT + 20)
    x = Scale(0, 1, LEFT + 8, WIDTH - RIGHT - 8)
    y = Scale(0, 1, HEIGHT + 20 - BOTTOM, TOP)
    drawing.axes(x, y, "probability of the predicted class; dots are as large as there are samples")
    drawing.line([(x(0), y(0)), (x(1), y(1))], stroke_dasharray="2 3")
    for place, rows in enumerate(bins.values()):
        total = sum(count for count, *_ in rows)
        some = [(x(sure), y(right), count) for count, sure, right in rows if count]
        look = {"stroke": color_of(place), "stroke-dasharray": dash_of(place), "stroke-width": "1.2"}
        drawing.line([(across, up) for across, up, _ in some], **look)
        for across, up, count in some:
            drawing.dots([(across, up)], 3 + 14 * math.sqrt(count / total), color_of(place), opacity=".8")
    drawing.color_legend(bins)
    return drawing.svg()


def shares(title: str, classes: Sequence[str], predicted: Mapping[str, Sequence[int]], true: Sequence[int]) -> str:
    """Share of each class among the samples: a bar for the number that is ``true``, and a dot for each method."""
    drawing = Drawing(title)
    every = {name: [100 * each / max(1, sum(counts)) for each in counts] for name, counts in predicted.items()}
    bars = [100 * each / max(1, sum(true)) for each in true]
    bottom = HEIGHT - BOTTOM
    y = Scale(0, 1.05 * max(*bars, *(value for some in every.values() for value in some), 1), bottom, TOP)
    for value in y.ticks():
        drawing.line([(LEFT, y(value)), (WIDTH - RIGHT, y(value))], opacity=".18")
        drawing.text(LEFT - 6, y(value) + 4, f"{value:.4g}", "end")
    step = (WIDTH - RIGHT - LEFT) / len(classes)
    room = max(1, int(step / 6.2))
    for at, name in enumerate(classes):
        left = LEFT + at * step
        drawing.box(left + 0.12 * step, y(bars[at]), 0.76 * step, bottom - y(bars[at]), fill=INK, fill_opacity=".14")
        drawing.line([(left + 0.12 * step, y(bars[at])), (left + 0.88 * step, y(bars[at]))])
        for place, some in enumerate(every.values()):
            across = left + step * (0.5 + 0.6 * (place + 0.5 - len(every) / 2) / len(every))
            drawing.dots([(across, y(some[at]))], 6, color_of(place))
        if room > 2 or len(name) <= room:
            drawing.text(left + step / 2, bottom + 16, name if len(name) <= room else name[: room - 1] + "…", "middle")
    drawing.line([(LEFT, bottom), (WIDTH - RIGHT, bottom)])
    drawing.text((LEFT + WIDTH - RIGHT) / 2, bottom + 31, "dots: predicted; bars: true (ORACLE)", "middle")
    drawing.color_legend(every)
    return drawing.svg()


def confusion(title: str, classes: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """A confusion matrix: shares of each true class (a row of ``counts``) as shades with counts in them."""
    size = min(34.0, 300 / max(1, len(classes)))
    small = size < 18
    letters = max(map(len, classes))
    left = min(170.0, 26 + 6.2 * letters)
    drawing = Drawing(title, left + size * len(classes) + 16, 46 + size * len(classes))
    drawing.width = max(drawing.width, 7 * len(title) + 20)
    top = 30
    shown = [name if 6.2 * len(name) <= left - 24 else f"{name[: int((left - 34) / 6.2)]}..." for name in classes]
    for row, cells in enumerate(counts):
        y = top + row * size
        if not small:
            drawing.text(left - 6, y + size / 2 + 4, shown[row], "end")
        for column, count in enumerate(cells):
            if not count:
                continue
            share, color = count / sum(cells), color_of(2 if row == column else 1)
            drawing.box(left + column * size, y, size, size, fill=color, fill_opacity=f"{0.08 + 0.72 * share:.2f}")
            if not small:
                drawing.text(left + (column + 0.5) * size, y + size / 2 + 4, str(count), "middle")
    end = size * len(classes)
    drawing.line([(left, top), (left + end, top), (left + end, top + end), (left, top + end), (left, top)])
    drawing.text(left + end / 2, top + end + 14, "predicted, in the same order", "middle")
    return drawing.svg()


def points(
    title: str,
    samples: Mapping[str, Sequence[tuple[float, float]]],
    colors: Mapping[str, Sequence[int]],
    classes: Sequence[str],
    target: str,
) -> str:
    """Samples of several clients in a plane, coloured by the index of their class; those of the target are large.

    Colours repeat themselves where there are more classes.
    """
    drawing = Drawing(title, 440, 340)
    every = [point for some in samples.values() for point in some]
    x = spanning([across for across, _ in every], 14, 426)
    y = spanning([up for _, up in every], 330, TOP)
    for name in sorted(samples, key=lambda name: name == target):  # the target's on top
        size, opacity = (6.0, ".9") if name == target else (3.5, ".4")
        for place in sorted(set(colors[name])):
            some = [
                (x(across), y(up))
                for (across, up), color in zip(samples[name], colors[name], strict=True)
                if color == place
            ]
            drawing.dots(some, size, color_of(place), opacity=opacity)
    if len(classes) <= len(COLORS):  # repeated colours only show which samples are near
        drawing.color_legend(classes, 5)
    return drawing.svg()
