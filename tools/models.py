"""Compares every model with its peers in `docs/models.md`, from the files of `bench models` in docs/data: `python -m tools.models`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssmgen.bench.models import COLUMNS, losses, results_of, worst_of
from ssmgen.bench.models_page import headline, load, peers_of, plot

ROOT = Path(__file__).parents[1]
DATA, PAGE = ROOT / "docs" / "data", ROOT / "docs" / "models.md"
SUFFIX = "-models.json.gz"

HEAD = """# Every model and its peers

<!-- python -m tools.models -->

`ssmgen bench models` times four cases of each model of `ssmgen models`: the decode step of 1 and of 64 sequences, a prompt of 4096 tokens,
and 16 packed prompts of 256. It times every other package that is installed and serves the case, in the same run. Times are microseconds
on the device, with cold inputs ([method](guides/benchmarks.md#method)). A ratio is ssmgen's time over the fastest peer's: below 1, ssmgen
is faster. The model with the worst ratio comes first. A test fails if a saved ratio is above 1.
"""
NONE = """docs/data lacks a complete measurement so far: `python -m tools.measure CARD-models` makes one. The [lab notes](lab/models.md)
have 146 of the 176 cases on an H200; every ratio there is below 1.
"""


def reports(data: Path = DATA) -> dict[str, dict[str, Any]]:
    """{card: its measurements}, by name. Raises BenchFileError."""
    return {path.name.removesuffix(SUFFIX).upper(): load(path) for path in sorted(data.glob(f"*{SUFFIX}"))}


def pages(measured: Mapping[str, Mapping[str, Any]], folder: Path = PAGE.parent) -> dict[Path, str]:
    """{path: its text} of the page and of a plot for each card."""
    lines = [HEAD] if measured else [HEAD, NONE]
    found = {}
    for card, report in measured.items():
        name = f"models-{card.lower()}.svg"
        lines += [f"## {card}", "", f"{headline(report)} {report['device']}, torch {report['torch']}, {str(report.get('date'))[:10]}; "]
        lines[-1] += f"{peers_of(report)}. {len(losses(report))} of the ratios are above 1."
        drawn = str(plot(report))
        lines += ["", f"![Ratios to the fastest peer, by model]({name})", ""] if drawn else [""]
        found |= {folder / name: drawn} if drawn else {}
        lines += [*_table(report), ""]
    return {folder / PAGE.name: "\n".join(lines)} | found


def _table(report: Mapping[str, Any]) -> list[str]:
    head = "".join(f" {column.words}, us | fastest peer, us | ratio |" for column in COLUMNS.values())
    lines = [f"| model |{head} worst |", "|---|" + "---:|---:|---:|" * len(COLUMNS) + "---:|"]
    for name, columns in results_of(report).items():
        cells = ""
        for key in COLUMNS:
            result = columns.get(key)
            if result is None:
                cells += " | | |"
                continue
            theirs = "" if result.fastest is None else f"{result.fastest} {result.peers[result.fastest]:.1f}"
            ratio = "" if result.ratio is None else f"{result.ratio:.2f}"
            cells += f" **{result.us:.1f}** | {theirs} | {ratio} |"
        worst = worst_of(columns.values())
        lines.append(f"| {name} |{cells} {'' if worst is None else f'{worst:.2f}'} |")
    return lines


def refresh() -> list[Path]:
    """Writes the page and the plots from the existing data; returns their paths."""
    texts = pages(reports())
    for path, text in texts.items():
        path.write_text(text)
    return list(texts)


if __name__ == "__main__":
    print(*refresh(), sep="\n")
