"""Results as tables, one per operator and kind of case: rich ones on a terminal, plain ones elsewhere. A ratio below 1: ours is faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .report import head
from .rows import Row, by_case, op_of, peers_of, rows_of
from .suite import Suite, rows_and_failures

SAME = 0.01  # ratios as near to 1 as this are neither faster nor slower
LAST = "rule"  # the column that is aligned to the left


class Column(NamedTuple):
    heading: str
    cells: Sequence[Text]
    least: int = 5  # characters of its width
    whole: bool = True  # the heading is never broken into lines


def as_text(suite: Suite) -> str:
    """Every operator's tables, without colours."""
    blocks: list[str] = []
    shown: list[str] = []
    for report in suite.reports:
        if (lines := head(report)) != shown:
            blocks.append("\n".join(lines))
            shown = lines
        blocks.append("\n\n".join([op_of(report), *(_plain(case, rows) for case, rows in by_case(rows_of(report)).items())]))
    if failures := rows_and_failures(suite)[1]:
        blocks.append("\n".join(f"not timed: {failure.words}: {failure.error}" for failure in failures))
    return "\n\n".join(blocks)


def _plain(case: str, rows: Sequence[Row]) -> str:
    lines = [""] * (1 + len(rows))
    for column in columns(rows):
        cells = [column.heading, *(str(cell) for cell in column.cells)]
        width = max(map(len, cells))
        lines = [line + (cell if column.heading == LAST else f"{cell:>{width}}") + "  " for line, cell in zip(lines, cells, strict=True)]
    return "\n".join([case, *(line.rstrip() for line in lines)])


def print_tables(suite: Suite, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    shown: list[str] = []
    for report in suite.reports:
        if (lines := head(report)) != shown:
            console.print(Text("\n".join(lines), style="dim"))
            shown = lines
        console.print(Text(f"\n{op_of(report)}", style="bold"))
        for case, rows in by_case(rows_of(report)).items():
            console.print(_rich(case, rows))
    for failure in rows_and_failures(suite)[1]:
        console.print(Text(f"not timed: {failure.words}: {failure.error}", style="red"))


def _rich(case: str, rows: Sequence[Row]) -> Table:
    table = Table(title=case, title_justify="left", title_style="cyan", box=SIMPLE_HEAD, pad_edge=False)
    found = list(columns(rows))
    for column in found[:-1]:
        table.add_column(column.heading, justify="right", no_wrap=column.whole, min_width=column.least)
    table.add_column(LAST, no_wrap=True, overflow="ellipsis")
    for cells in zip(*(column.cells for column in found), strict=True):
        table.add_row(*cells)
    return table


def columns(rows: Sequence[Row]) -> Iterator[Column]:
    """The columns of a table of the rows of one case."""
    copy, peers = next((row.copy for row in rows if row.copy), None), peers_of(rows)
    yield Column(rows[0].size_of, [Text(row.size) for row in rows], 6)
    yield Column("us", [Text(f"{row.us:.2f}", style="bold") for row in rows], 7)
    yield Column("TB/s", [number(row.tbs) for row in rows], 7)
    yield Column("ceiling", [number(row.share) for row in rows], 7)
    if copy:
        yield Column("x copy" if copy == "slot copy" else "x mul", [number(row.copy_ratio, 3) for row in rows], 7)
    for name in dict.fromkeys(name for row in rows for name in row.others):
        yield Column(name, [number(row.others.get(name)) for row in rows])
    for peer in peers:
        found = [row.peers.get(peer) for row in rows]
        yield Column(f"{peer} us", [number(p.us if p else None) for p in found], 7, False)
        yield Column("ratio", [ratio(p.ratio if p else None) for p in found])
    yield Column("host us", [number(row.host_us) for row in rows], whole=False)
    yield Column("bound", [number(row.host_bound_us) for row in rows], whole=False)
    for peer in peers:
        yield Column(f"{peer} host", [number(row.peers[peer].host_us if peer in row.peers else None) for row in rows], whole=False)
    yield Column("compile s", [number(row.compile_s) for row in rows], whole=False)
    yield Column("MHz", [number(row.sm_mhz, 0) for row in rows], whole=False)
    yield Column(LAST, [Text(row.rule, style="dim") for row in rows])


def number(value: float | None, digits: int = 2) -> Text:
    return Text("-", style="dim") if value is None else Text(f"{value:.{digits}f}")


def ratio(value: float | None) -> Text:
    """Green below 1, red above it."""
    if value is None:
        return number(None)
    return Text(f"{value:.2f}", style="" if abs(value - 1) <= SAME else "green" if value < 1 else "red")
