"""The chart and the tables of docs/guides/state_formats.md, from docs/data/state_accuracy.json."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from .svg import WIDTH, drawing, line, text

DATA = Path(__file__).parents[2] / "docs" / "data" / "state_accuracy.json"
NAME = "state-formats"
TITLE = "KL divergence of decode from exact logits"
YARDSTICK = "float32, inputs in bfloat16"
# Formats of the chart, and their colours; dashed: rounded with noise. The table has all formats.
LINES = {
    "int8": "s3", "int8, noise": "s3", "bfloat16": "s1", "bfloat16, noise": "s1", "float16": "s4", "float16, noise": "s4", "int16": "s2",
    YARDSTICK: "ceiling",
}  # fmt: skip
LEAST, MOST = -9, 0  # powers of ten of the chart
HIGH, LEFT = 190.0, 58.0


def data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DATA.read_text())
    return found


def values(rows: list[dict[str, Any]], model: str, name: str) -> dict[float, dict[str, Any]]:
    """The rows of a model and a format by decay."""
    return {row["decay"]: row for row in rows if (row["model"], row["format"]) == (model, name)}


def models(rows: list[dict[str, Any]]) -> list[str]:
    return [*dict.fromkeys(row["model"] for row in rows)]


def curve(points: list[tuple[float, float]], kind: str, dashed: bool) -> str:
    dash = ' stroke-dasharray="7 4"' if dashed else ""
    return f'<path d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in points)}" class="{kind} line"{dash}/>'


def legend(y: float) -> tuple[list[str], float]:
    """(marks, their height): two columns."""
    parts = []
    for i, (name, kind) in enumerate(LINES.items()):
        x, at = 16 + 250 * (i % 2), y + 18 * (i // 2)
        parts.append(curve([(x, at - 4), (x + 30, at - 4)], kind, "noise" in name or name == YARDSTICK))
        parts.append(text(x + 38, at, name, size=12.5))
    return parts, 18 * math.ceil(len(LINES) / 2)


def chart() -> str:
    """A panel for each model: KL over decays, one line per format."""
    rows = data()["rows"]
    parts, high = legend(54)
    parts.insert(0, text(16, 26, TITLE, size=15, kind="own"))
    top = 54.0 + high
    for model in models(rows):
        top += 26
        parts.append(text(16, top, model, kind="own"))
        plot, bottom, right = top + 12, top + 12 + HIGH, WIDTH - 20.0
        decays = [*values(rows, model, YARDSTICK)]
        x = {decay: LEFT + 20 + (right - LEFT - 40) * i / (len(decays) - 1) for i, decay in enumerate(decays)}

        def y_of(kl: float, bottom: float = bottom) -> float:
            return bottom - HIGH * (min(max(math.log10(kl), LEAST), MOST) - LEAST) / (MOST - LEAST)

        for power in range(LEAST, MOST + 1, 3):
            y = y_of(10.0**power)
            parts += [line(LEFT, y, right, y), text(LEFT - 8, y + 4, f"1e{power}" if power else "1", "end", "quiet", 12)]
        for name, kind in LINES.items():
            found = values(rows, model, name)
            points = [(x[decay], y_of(found[decay]["kl"])) for decay in decays]
            parts.append(curve(points, kind, "noise" in name or name == YARDSTICK))
            parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.8" class="{kind}"/>' for px, py in points]
        parts += [text(x[decay], bottom + 18, f"{decay:g}", "middle", "quiet", 12) for decay in decays]
        top = plot + HIGH + 22
    parts.append(text((LEFT + WIDTH - 20) / 2, top + 14, "decay per token", "middle", "quiet", 12))
    return drawing(WIDTH, top + 28, TITLE, parts)


def table(model: str) -> str:
    """KL of each format and decay, and the share of tokens whose likeliest next token is the exact one."""
    rows = data()["rows"]
    decays = [*values(rows, model, YARDSTICK)]
    names = [*dict.fromkeys(row["format"] for row in rows if row["model"] == model)]
    lines = [f"| state | {' | '.join(f'{decay:g}' for decay in decays)} |", "|---|" + "---:|" * len(decays)]
    for name in names:
        found = values(rows, model, name)
        cells = [f"{found[decay]['kl']:.1e} ({100 * found[decay]['agree']:.1f})" for decay in decays]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
