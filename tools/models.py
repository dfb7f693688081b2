"""Compares every model with its peers in `docs/models.md`, from the files of `bench models` in docs/data: `python -m tools.models`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssmgen.bench.models import COLUMNS, Result, results_of
from ssmgen.bench.models_page import headline, load, peers_of, plot

ROOT = Path(__file__).parents[1]
DATA, PAGE = ROOT / "docs" / "data", ROOT / "docs" / "models.md"
SUFFIX = "-models.json.gz"
PEERS = {"mamba_ssm": "m", "flashinfer": "i", "fla": "f"}  # their letters in the table

HEAD = """# Every model and its peers

<!-- python -m tools.models -->

`ssmgen bench models` times four cases of each model of `ssmgen models`: the decode step of 1 and of 64 sequences, a prompt of 4096 tokens,
and 16 packed prompts of 256. It times every other package that is installed and serves the case, in the same run. Times are microseconds
on the device, with cold inputs ([method](guides/benchmarks.md#method)). A number in brackets is ssmgen's time over the fastest peer's (m:
mamba-ssm, i: FlashInfer, f: flash-linear-attention): below 1, ssmgen is faster. The model with the worst ratio comes first. A test fails if
a saved ratio is above 1. [Notes on these times](lab/models.md).
"""
NONE = """docs/data lacks a complete measurement: `python -m tools.measure CARD-models` makes one.
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
        lines[-1] += f"{peers_of(report)}."
        drawn = str(plot(report))
        lines += ["", f"![Ratios to the fastest peer, by model]({name})", ""] if drawn else [""]
        found |= {folder / name: drawn} if drawn else {}
        lines += [*_table(report), ""]
    return {folder / PAGE.name: "\n".join(lines)} | found


def _table(report: Mapping[str, Any]) -> list[str]:
    """A line per shape; models of one shape share their measurements."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, columns in results_of(report).items():
        alike.setdefault(tuple(_cell(columns.get(key)) for key in COLUMNS), []).append(name)
    lines = [f"| model |{''.join(f' {column.words} |' for column in COLUMNS.values())}", "|---|" + "---:|" * len(COLUMNS)]
    return lines + [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in alike.items()]


def _cell(result: Result | None) -> str:
    """A time, its ratio to the fastest peer's, and that peer's letter."""
    if result is None:
        return ""
    if result.ratio is None or result.fastest is None:
        return f"{result.us:.1f}"
    return f"{result.us:.1f}&nbsp;({result.ratio:.2f}&nbsp;{PEERS[result.fastest]})"


def refresh() -> list[Path]:
    """Writes the page and the plots from the existing data; returns their paths."""
    texts = pages(reports())
    for path, text in texts.items():
        path.write_text(text)
    return list(texts)


if __name__ == "__main__":
    print(*refresh(), sep="\n")
