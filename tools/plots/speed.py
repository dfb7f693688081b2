"""The README's picture: a decode step compared with a copy of its state, and prompts compared with their peers."""

from __future__ import annotations

from collections.abc import Mapping

from .charts import OWN, Panel, shown
from .svg import drawing, line, path, rectangle, text

PROMPTS = (  # panel, its case, the row's name
    ("prompt-mamba2", "128 heads, 1 × 8192", "Mamba-2"),
    ("prompt-gdn", "64 heads, 1 × 8192", "Gated delta rule"),
    ("prompt-linear", "chunk_kda, 32, 8192", "KDA"),
    ("prompt-linear", "chunk_rwkv7, 32, 8192", "RWKV-7"),
)
SHORT = {"flash-linear-attention 0.6": "fla 0.6"}


def speed(panels: Mapping[str, Panel]) -> str:
    """Left: lines in % of the copy's speed. Right: us for prompts of 8192 tokens, with the time of a copy of the same bytes if measured."""
    return drawing(880, 340, "Speed of a decode step and of prompts", [*_steps(panels["mamba2-bf16"]), *_prompts(panels, 436)])


def halves(panels: Mapping[str, Panel]) -> dict[str, str]:
    """The same as two files, for a page that may be narrow."""
    return {
        "speed-steps": drawing(430, 340, "Speed of a decode step", _steps(panels["mamba2-bf16"], legend=2)),
        "speed-prompts": drawing(444, 340, "Time of prompts", _prompts(panels, 0)),
    }


def _steps(panel: Panel, legend: int = 4) -> list[str]:
    parts = [
        text(20, 28, "Decode step, Mamba-2", size=15, kind="own"),
        text(20, 47, "speed, % of a bare copy of the state", kind="quiet", size=12.5),
    ]
    left, right, top, bottom = 56.0, 396.0, 66.0, 274.0
    ceiling = panel.series[panel.ceiling or ""]
    for value in (0, 25, 50, 75, 100):
        y = bottom - (bottom - top) * value / 105
        dashed = ("ceiling", 'stroke-width="2" stroke-dasharray="6 4"') if value == 100 else ("grid", "")
        parts += [line(left, y, right, y, *dashed), text(left - 8, y + 4, f"{value}", "end", "quiet", 12)]
    x = [left + (right - left) * i / (len(panel.cases) - 1) for i in range(len(panel.cases))]
    for name in reversed(panel.series):
        if name == panel.ceiling:
            continue
        points = [
            (px, bottom - (bottom - top) * 100 * (c or 0) / (us or 1) / 105)
            for px, us, c in zip(x, panel.series[name], ceiling, strict=True)
        ]
        parts.append(path(points, panel.colour(name)))
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.2" class="{panel.colour(name)}"/>' for px, py in points]
    parts += [text(px, bottom + 18, case, "middle", "quiet", 12) for px, case in zip(x, panel.cases, strict=True)]
    parts.append(text((left + right) / 2, bottom + 35, "sequences", "middle", "quiet", 12))
    at = 20.0
    for name in panel.series if legend == 4 else [name for name in panel.series if name != panel.ceiling]:
        parts += [rectangle(at, 317, 11, 10, panel.colour(name)), text(at + 16, 326, name, size=12)]
        at += 30 + 6.6 * len(name)
    return parts


def _prompts(panels: Mapping[str, Panel], x0: float) -> list[str]:
    left, wide, y = x0 + 138.0, 190.0, 66.0
    parts = [
        text(x0 + 20, 28, "Prompt of 8192 tokens", size=15, kind="own"),
        text(x0 + 20, 47, "time; ssmgen's is the unit of length", kind="quiet", size=12.5),
    ]
    for name, case, told in PROMPTS:
        panel = panels[name]
        i = panel.cases.index(case)
        own = panel.series[OWN][i] or 1.0
        found = [(who, us[i]) for who, us in panel.series.items() if us[i] and not who.startswith("FlashQLA")]
        parts.append(text(left - 10, y + 9 * len(found) + 3, told, "end", size=12.5))
        for who, us in found:
            parts.append(rectangle(left, y, wide * (us or 0) / own / 6, 14, panel.colour(who)))
            words = f"{shown(us or 0)} us" if who == OWN else f"{SHORT.get(who, who)} {shown(us or 0)}"
            parts.append(text(left + wide * (us or 0) / own / 6 + 6, y + 11, words, kind="own" if who == OWN else "", size=12))
            y += 18
        if panel.multiple and (times := panel.multiple[i]):
            x = left + wide / times / 6
            parts.append(line(x, y - 18 * len(found) - 3, x, y - 18 * len(found) + 17, "ceiling", 'stroke-width="2.5"'))
        y += 10
    parts += [
        line(x0 + 44, 315, x0 + 44, 329, "ceiling", 'stroke-width="2.5"'),
        text(x0 + 54, 326, "a copy of the bytes that are read and written", size=12),
    ]
    return parts
