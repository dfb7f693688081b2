"""Two charts of a panel's times: lines of the share of a ceiling's speed, and bars of how much longer others take."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from .svg import WIDTH, drawing, line, path, rectangle, text

OWN = "ssmgen"
COLOURS = {
    "FlashInfer": "s1",
    "mamba-ssm": "s2",
    "causal-conv1d": "s2",
    "flash-linear-attention": "s3",
    "transformers with": "s2",
    "transformers alone": "s1",
    "PyTorch": "s1",
}


@dataclass(frozen=True, slots=True)
class Panel:
    """Times of one operator in several cases, as docs/data/peers.json has them."""

    name: str
    page: str  # of docs/performance/
    title: str
    card: str
    date: str
    command: str
    x: str  # the quantity on the x axis
    cases: list[str]
    kind: str  # share: lines; else bars
    ceiling: str | None  # the series that moves the same number of bytes and computes nothing
    series: dict[str, list[float | None]]
    extra: dict[str, list[float | None]] = field(default_factory=dict)  # in the table only
    multiple: list[float | None] = field(default_factory=list)  # our time over the time of a multiplication with the same bytes
    shown: list[str] = field(default_factory=list)  # cases of the chart; default: all
    note: str = ""
    unit: str = "us"

    @classmethod
    def of(cls, found: dict[str, Any]) -> Panel:
        return cls(**found)

    def colour(self, name: str) -> str:
        """A peer has one colour on all pages."""
        known = next((colour for begin, colour in COLOURS.items() if name.startswith(begin)), "s4")
        return "s0" if name == OWN else "ceiling" if name == self.ceiling else known


def chart(panel: Panel) -> str:
    return shares(panel) if panel.kind == "share" else bars(panel)


def legend(panel: Panel, x: float, y: float, width: float) -> tuple[list[str], float]:
    """(marks, their height): rows of names, each filled to the width."""
    parts, at, row = [], x, 0
    for name in panel.series:
        wide = 22 + 6.6 * len(name)
        if at > x and at + wide > x + width:
            at, row = x, row + 1
        parts += [rectangle(at, y + 18 * row - 9, 11, 10, panel.colour(name)), text(at + 16, y + 18 * row, name, size=12.5)]
        at += wide + 10
    return parts, 18 * (row + 1)


def title_lines(words: str, most: int = 58) -> list[str]:
    lines = [""]
    for word in words.split():
        if len(lines[-1]) + len(word) >= most:
            lines.append("")
        lines[-1] += f"{word} "
    return [found.strip() for found in lines]


def head(panel: Panel) -> tuple[list[str], float]:
    parts = [text(16, 26 + 19 * i, words, size=15, kind="own") for i, words in enumerate(title_lines(panel.title))]
    y = 26 + 19 * len(parts)
    marks, height = legend(panel, 16, y + 4, WIDTH - 32)
    return parts + marks, y + height


def shares(panel: Panel) -> str:
    """Lines: 100 % is the ceiling's time in the same case."""
    parts, top = head(panel)
    left, right, bottom = 52.0, WIDTH - 20.0, top + 216.0
    parts.append(text(16, top + 8, f"speed, % of the {panel.ceiling}", kind="quiet", size=12))
    plot, y0 = top + 22, bottom
    ceiling = panel.series[panel.ceiling or ""]
    fastest = max(c / us for name in panel.series for us, c in zip(panel.series[name], ceiling, strict=True) if us and c)
    most = 100 * max(1.1, fastest + 0.04)
    x = {case: left + (right - left) * i / max(len(panel.cases) - 1, 1) for i, case in enumerate(panel.cases)}
    for value in range(0, 101, 25):
        y = y0 - (y0 - plot) * value / most
        parts += [line(left, y, right, y), text(left - 8, y + 4, f"{value}", "end", "quiet", 12)]
    parts += [text(x[case], y0 + 18, case, "middle", "quiet", 12) for case in panel.cases]
    parts.append(text((left + right) / 2, y0 + 36, panel.x, "middle", "quiet", 12))
    for name in reversed(panel.series):
        if name == panel.ceiling:
            y = y0 - (y0 - plot) * 100 / most
            parts.append(line(left, y, right, y, "ceiling", 'stroke-width="2" stroke-dasharray="6 4"'))
            continue
        values = [
            (x[c], y0 - (y0 - plot) * 100 * (limit / us) / most)
            for c, us, limit in zip(panel.cases, panel.series[name], ceiling, strict=True)
            if us and limit
        ]
        parts.append(path(values, panel.colour(name)))
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.2" class="{panel.colour(name)}"/>' for px, py in values]
    return drawing(WIDTH, y0 + 48, panel.title, parts)


def bars(panel: Panel) -> str:
    """Horizontal bars, in each case as long as the time over ours; the label has the time."""
    parts, top = head(panel)
    longest = max(len(case) for case in panel.cases)
    left = min(16 + 7.4 * longest + 10, 190.0)
    own = panel.series[OWN]
    cases = [i for i, case in enumerate(panel.cases) if not panel.shown or case in panel.shown]
    ratios = [us[i] / own[i] for us in panel.series.values() for i in cases if us[i] and own[i]]
    most, wide = max(ratios), WIDTH - left - 128.0
    y = top + 6.0
    for i in cases:
        first = y
        for name, us in panel.series.items():
            if us[i] is None:
                continue
            ratio = us[i] / own[i]
            parts.append(rectangle(left, y, wide * ratio / most, 13, panel.colour(name)))
            told = f"{shown(us[i])} {panel.unit}" + ("" if name in (OWN, panel.ceiling) else f", {ratio:.1f} ×")
            parts.append(text(left + wide * ratio / most + 6, y + 11, told, kind="own" if name == OWN else "", size=12))
            y += 16
        words = title_lines(panel.cases[i], 26)
        parts += [text(left - 8, (first + y) / 2 + 2 + 14 * (k - (len(words) - 1) / 2), w, "end", "quiet", 12) for k, w in enumerate(words)]
        y += 9
    return drawing(WIDTH, y + 6, panel.title, parts)


def shown(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def table(panel: Panel) -> str:
    """The panel's times as Markdown. A peer's cell has its time and how many times ours that is."""
    own = panel.series[OWN]
    head = [panel.x, f"ssmgen, {panel.unit}"]
    cells = [[case, f"**{_number(us)}**"] for case, us in zip(panel.cases, own, strict=True)]
    for name, us in panel.series.items():
        if name == panel.ceiling:
            head.append(f"{name}, {panel.unit} (our speed, % of it)")
            found = [f"{_number(a)} ({100 * a / b:.0f})" if a and b else "" for a, b in zip(us, own, strict=True)]
        elif name != OWN:
            head.append(f"{name}, {panel.unit} (×)")
            found = [f"{_number(a)} ({a / b:.2f})" if a and b else "" for a, b in zip(us, own, strict=True)]
        else:
            continue
        cells = [[*row, cell] for row, cell in zip(cells, found, strict=True)]
    if panel.multiple:
        head.append("times a multiplication of the same bytes")
        cells = [[*row, "" if m is None else f"{m:g}"] for row, m in zip(cells, panel.multiple, strict=True)]
    for name, us in panel.extra.items():
        head.append(f"{name}, {panel.unit}")
        cells = [[*row, "" if a is None else _number(a)] for row, a in zip(cells, us, strict=True)]
    rows = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join(rows + [f"| {' | '.join(row)} |" for row in cells])


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return ""
    return f"{value:g}" if value < 100 else f"{value:.1f}".removesuffix(".0")
