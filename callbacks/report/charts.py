"""Charts of a report: curves over rounds, methods by targets, calibration, classes, and features."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedlit.callbacks.report.svg import (
    BOTTOM,
    COLORS,
    HEIGHT,
    INK,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Drawing,
    Scale,
    color_of,
    dash_of,
    spanning,
)
from fedlit.tables import mean_and_deviation

_MARKED = 24
"""Points up to which a curve's points are marked."""


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

    Args:
        title: Above.
        groups: Names, from top to bottom.
        values: By method, the values over seeds of each group; none where there is no run.
        unit: Below the axis.
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

    Args:
        title: Above.
        bins: By method, rows with the number of samples, their mean probability, and the share that is right.
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
    """Share of each class among the samples: a bar for the true share, and a dot for each method.

    Args:
        title: Above.
        classes: Names.
        predicted: By method, the number of predictions of each class.
        true: Number of samples of each class.
    """
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
    """A confusion matrix: shares of each true class as shades with counts in them.

    Args:
        title: Above.
        classes: Names.
        counts: A row for each true class with a number for each predicted class.
    """
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
    """Samples of several clients in a plane.

    Args:
        title: Above.
        samples: By client, coordinates.
        colors: By client, the index of each sample's class, which gives its colour.
        classes: Names of the colours, which repeat themselves where there are more classes.
        target: The client whose samples are drawn large; those of the others are small and faint.
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
