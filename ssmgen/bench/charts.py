"""Plots as SVG text. Colours are the page's: an element only says which class it is of, so that light and dark are the style sheet's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 280, 184
BROAD = 400  # width of plots that lie on their side
LEFT, RIGHT, TOP = 40, 8, 10
LEVEL, SLANTED = 24, 66  # room below the axis: for labels that fit side by side, and for others
CHARACTER = 6.8  # width of one in a label
STEPS = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)  # of a logarithmic axis, in a decade
MARKS = {  # around (0, 0), by shape; shapes tell curves apart where colours do not
    "circle": "M-3.6,0a3.6,3.6 0 1,0 7.2,0a3.6,3.6 0 1,0 -7.2,0",
    "square": "M-3.2,-3.2h6.4v6.4h-6.4z",
    "triangle": "M0,-4.2L4,3.2H-4z",
    "diamond": "M0,-4.4L4.4,0L0,4.4L-4.4,0z",
}


@dataclass(frozen=True)
class Curve:
    name: str
    style: str  # class of the style sheet
    mark: str | None  # None: a line without marks
    values: Sequence[float | None]  # one per label; None: not measured


@dataclass(frozen=True)
class Axis:
    low: float
    high: float
    ticks: Sequence[float]
    log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def share_axis(values: Sequence[float]) -> Axis:
    high = max(1.0, *values) * 1.06
    if high > 4:  # of no ceiling that was measured with them: quarters would be more than anyone reads
        return zero_axis(values)
    return Axis(0.0, high, [t / 4 for t in range(int(high * 4) + 1)])


def log_axis(values: Sequence[float]) -> Axis:
    low, high = min(values) / 1.25, max(values) * 1.25
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    choices = [[t for d in decades for s in steps if low <= (t := s * 10.0**d) <= high] for steps in STEPS]
    fitting = [ticks for ticks in choices if len(ticks) <= 6]
    return Axis(low, high, max(fitting, key=len, default=choices[-1]), log=True)


def zero_axis(values: Sequence[float]) -> Axis:
    """An axis that begins at 0, with a few ticks."""
    high = max(values) * 1.05
    unit = 10.0 ** math.floor(math.log10(high))
    step = next(s * unit for s in (0.2, 0.5, 1.0, 2.0) if high / (s * unit) <= 6)
    return Axis(0.0, high, [i * step for i in range(int(high / step) + 1)])


def brief(value: float) -> str:
    """Three digits, and none that say nothing."""
    return f"{value:.0f}" if value >= 99.5 else f"{value:.3g}"


def curves(title: str, labels: Sequence[str], lines: Sequence[Curve], axis: Axis, percent: bool = False) -> Markup:
    """Values over labels, which are evenly spaced. title: for those who do not see it."""
    step = (WIDTH - LEFT - RIGHT) / max(1, len(labels))
    slanted = max(map(len, labels)) * CHARACTER > step
    bottom = HEIGHT - (SLANTED if slanted else LEVEL)
    xs = [LEFT + step * (i + 0.5) for i in range(len(labels))]

    def y(value: float) -> float:
        return bottom - axis.place(value) * (bottom - TOP)

    def said(value: float) -> str:
        return f"{value:.0%}" if percent else brief(value)

    parts = []
    for tick in axis.ticks:
        kind = "ceiling" if percent and tick == 1 else "grid"
        parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y(tick) + 3.5:.1f}" text-anchor="end">{said(tick)}</text>')
    for x, label in zip(xs, labels, strict=True):
        place = f'x="{x:.1f}" y="{bottom + 15:.1f}" text-anchor="middle"'
        if slanted:
            place = f'transform="translate({x + 4:.1f},{bottom + 11:.1f}) rotate(-38)" text-anchor="end"'
        parts.append(f'<text class="tick" {place}>{escape(label)}</text>')
    for line in lines:
        points = [(x, y(v), label, v) for x, v, label in zip(xs, line.values, labels, strict=True) if v is not None]
        path = " ".join(f"{x:.1f},{height:.1f}" for x, height, *_ in points)
        parts.append(f'<polyline class="line {line.style}" points="{path}"/>')
        for x, height, label, value in points:
            if line.mark is None:
                break
            tip = escape(f"{line.name}, {label}: {said(value)}{'' if percent else ' us'}")
            shape = f'<path class="mark {line.style}" d="{MARKS[line.mark]}" transform="translate({x:.1f},{height:.1f})">'
            parts.append(f"{shape}<title>{tip}</title></path>")
    return _svg(title, WIDTH, HEIGHT, parts)


def bars(title: str, names: Sequence[str], styles: Sequence[str], samples: Sequence[Sequence[float]]) -> Markup:
    """A bar per name: the median of its samples, with a line from the least to the most."""
    left, row = 12 + max(map(len, names)) * CHARACTER, 26
    high = max(map(max, samples))
    room = BROAD - left - 46
    parts = []
    for i, (name, style, values) in enumerate(zip(names, styles, samples, strict=True)):
        y, median = i * row + 4, statistics.median(values)
        least, length, most = (left + room * v / high for v in (min(values), median, max(values)))
        tip = escape(f"{name}: {min(values):.1f} … {max(values):.1f} us")
        parts.append(f'<text class="tick" x="{left - 6:.1f}" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<rect class="bar {style}" x="{left:.1f}" y="{y}" width="{length - left:.1f}" height="18" rx="2"><title>{tip}</title></rect>'
        )
        parts.append(f'<line class="range" x1="{least:.1f}" x2="{most:.1f}" y1="{y + 9}" y2="{y + 9}"/>')
        parts.append(f'<text class="value" x="{most + 5:.1f}" y="{y + 13}">{median:.1f}</text>')
    return _svg(title, BROAD, len(names) * row + 8, parts)


def strip(title: str, values: Sequence[float], unit: str) -> Markup:
    """A dot per value on a line from 0."""
    axis, y = zero_axis(values), 28
    left, right = 14, BROAD - 24

    def x(value: float) -> float:
        return left + axis.place(value) * (right - left)

    parts = [f'<line class="grid" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>']
    for tick in axis.ticks:
        parts.append(f'<text class="tick" x="{x(tick):.1f}" y="{y + 24}" text-anchor="middle">{brief(tick)}</text>')
    for value in values:
        tip = escape(f"{value:.3f} {unit}")
        parts.append(f'<circle class="dot ours" cx="{x(value):.1f}" cy="{y}" r="4.5"><title>{tip}</title></circle>')
    return _svg(title, BROAD, 60, parts)


def _svg(title: str, width: float, height: float, parts: Sequence[str]) -> Markup:
    return Markup(f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>')
