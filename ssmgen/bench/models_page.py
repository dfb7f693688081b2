"""Results of `ssmgen bench models` as a table, a page, a plot and flat rows, and the reader of saved results."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from ..cache.files import plain, plain_values, read_json
from .charts import CHARACTER, MARKS, brief, log_axis
from .formats import FAULTS, BenchFileError, CasesFailedError, csv_of, write_page
from .models import COLUMNS, Result, faults_of, losses, results_of, worst_of
from .report import head

TEMPLATE = "models.html.j2"
COLOURS = dict(zip(COLUMNS, ("#7a808c", "#a12f8f", "#0b63ce", "#c4500a"), strict=True))  # legible on light and on dark
SHAPES = dict(zip(COLUMNS, MARKS.values(), strict=True))
WIDTH, LINE, TOP = 860, 15, 46  # of the plot
STYLE = "text{font:11px system-ui,sans-serif;fill:#7a808c}.rule{stroke:#7a808c;stroke-opacity:.25}.one{stroke:#7a808c;stroke-width:1.5}"


def load(path: Path) -> dict[str, Any]:
    """Results that `--json` printed, plain or gzipped. Raises BenchFileError that names the faults."""
    try:
        value: dict[str, Any] = plain_values(read_json(path, regular=False))
        found = list(itertools.islice(faults_of(value), FAULTS))
    except OSError as e:
        raise BenchFileError(plain(f"{path} cannot be read: {e.strerror or e}")) from e
    except (ValueError, RecursionError) as e:
        found = [str(e)]
    if found:
        raise BenchFileError(plain(f"{path} is not what `ssmgen bench models --json` prints: {'; '.join(found)}"))
    return value


def headline(report: Mapping[str, Any]) -> str:
    """The worst ratio, in words."""
    found = [result for columns in results_of(report).values() for result in columns.values() if result.ratio is not None]
    if not found:
        return "No peer was timed."
    worst = max(found, key=lambda result: result.ratio or 0)
    return f"The worst of {len(found)} ratios is {worst.ratio:.2f}: {worst.words}. {len(losses(report))} are above 1."


def table(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(headings, a line per model, the worst ratio first)"""
    head = ["model"]
    for column in COLUMNS.values():
        head += [f"{column.words}, us", "fastest peer, us", "ratio"]
    lines = []
    for name, columns in results_of(report).items():
        line = [name]
        for key in COLUMNS:
            line += _cells(columns.get(key))
        lines.append([*line, _number(worst_of(columns.values()), 2)])
    return [*head, "worst"], lines


def _cells(result: Result | None) -> list[str]:
    if result is None:
        return ["-", "-", "-"]
    theirs = "-" if result.fastest is None else f"{result.fastest} {result.peers[result.fastest]:.1f}"
    return [f"{result.us:.1f}", theirs, _number(result.ratio, 2)]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def as_text(report: Mapping[str, Any]) -> str:
    """The table, beneath the worst ratio."""
    heading, lines = table(report)
    short = [heading[0], *["us", "fastest peer", "ratio"] * len(COLUMNS), heading[-1]]
    widths = [max(len(row[i]) for row in [short, *lines]) for i in range(len(short))]
    text = []
    for row in [short, *lines]:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        text.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    over = [" " * widths[0]]
    for i, column in enumerate(COLUMNS.values()):
        over.append(column.words.rjust(sum(widths[1 + 3 * i : 4 + 3 * i]) + 4))
    failed = [f"not timed: {', '.join(entry['models'])}, {entry['column']}: {entry['error']}" for entry in report["failed"]]
    lead = [*head(report), f"peers: {peers_of(report)}", headline(report), ""]
    return "\n".join([*lead, "  ".join(over), *text, *failed])


def peers_of(report: Mapping[str, Any]) -> str:
    """The packages and their versions."""
    return ", ".join(f"{name} {version}".strip() for name, version in report["peers"].items()) or "none"


def flat(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row per model, column and peer."""
    for columns in results_of(report).values():
        for result in columns.values():
            own = {"model": result.model, "column": result.column, "us": result.us, "copy_us": result.copy_us}
            for peer, us in result.peers.items() or [("", None)]:
                yield own | {"peer": peer, "peer_us": us, "ratio": None if us is None else result.us / us}


def as_csv(report: Mapping[str, Any]) -> str:
    return csv_of(("model", "column", "us", "copy_us", "peer", "peer_us", "ratio"), flat(report))


def plot(report: Mapping[str, Any]) -> Markup:
    """Ratios to the fastest peer, a line per model, the worst first: an SVG file by itself. Empty where no peer was timed."""
    found = {name: columns for name, columns in results_of(report).items() if worst_of(columns.values()) is not None}
    ratios = [result.ratio for columns in found.values() for result in columns.values() if result.ratio is not None]
    if not ratios:
        return Markup("")
    axis = log_axis([*ratios, 1.0])
    left, bottom = 12 + max(map(len, found)) * CHARACTER, TOP + len(found) * LINE
    place = {value: left + axis.place(value) * (WIDTH - left - 16) for value in {*ratios, *axis.ticks, 1.0}}
    parts = [f"<style>{STYLE}</style>"]
    x = left
    for column in COLUMNS.values():
        parts.append(_mark(column.name, x + 6, 12, column.words))
        parts.append(f'<text x="{x + 14:.1f}" y="16">{escape(column.words)}</text>')
        x += 34 + len(column.words) * CHARACTER * 0.86
    for tick in dict.fromkeys([*axis.ticks, 1.0]):
        kind = "one" if tick == 1 else "rule"
        parts.append(f'<line class="{kind}" x1="{place[tick]:.1f}" x2="{place[tick]:.1f}" y1="{TOP - 8}" y2="{bottom}"/>')
        parts.append(f'<text x="{place[tick]:.1f}" y="{TOP - 12}" text-anchor="middle">{brief(tick)}</text>')
    for i, (name, columns) in enumerate(found.items()):
        y = TOP + (i + 0.5) * LINE
        parts.append(f'<text x="{left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<line class="rule" x1="{left:.1f}" x2="{WIDTH - 16}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts += [_mark(result.column, place[result.ratio], y, result.words) for result in columns.values() if result.ratio is not None]
    title = "Ratio of ssmgen's time to the fastest peer's, by model; left of 1 ssmgen is faster"
    shape = f'viewBox="0 0 {WIDTH} {bottom + 10}" role="img" aria-label="{escape(title)}"'
    return Markup(f'<svg xmlns="http://www.w3.org/2000/svg" {shape}><title>{escape(title)}</title>{"".join(parts)}</svg>')


def _mark(column: str, x: float, y: float, tip: str) -> str:
    where = f'd="{SHAPES[column]}" fill="{COLOURS[column]}" transform="translate({x:.1f},{y:.1f})"'
    return f"<path {where}><title>{escape(tip)}</title></path>"


def as_html(report: Mapping[str, Any]) -> str:
    """The page: one file."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    heading, lines = table(report)
    return environment.get_template(TEMPLATE).render(
        head=head(report), peers=peers_of(report), worst=headline(report), plot=plot(report), heading=heading, lines=lines,
        failed=report["failed"], method=report.get("method", ""),
    )  # fmt: skip


def show(report: Mapping[str, Any], form: str, page: Path | None = None) -> None:
    """Prints the report as "table", "json" or "csv", or writes the page. Raises CasesFailedError where a cell was not timed."""
    if form == "html":
        write_page(page, as_html(report))
        print(headline(report))
    else:
        print({"table": as_text, "csv": as_csv}[form](report) if form in ("table", "csv") else json.dumps(report, indent=1))
    if report["failed"]:
        raise CasesFailedError(f"{len(report['failed'])} not timed: {_names(report['failed'])}")


def _names(failed: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(f"{', '.join(entry['models'])}, {entry['column']}: {entry['error']}" for entry in failed)
