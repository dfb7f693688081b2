"""Results on a terminal: a rich table per operator and kind of case. A ratio below 1 says that ours is faster."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .report import head
from .rows import Row, by_case, op_of, peers_of, rows_of
from .suite import Suite, rows_and_failures

SAME = 0.01  # ratios as near to 1 as this are neither faster nor slower


def print_tables(suite: Suite, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    shown: list[str] = []
    for report in suite.reports:
        if (lines := head(report)) != shown:
            console.print(Text("\n".join(lines), style="dim"))
            shown = lines
        rows = rows_of(report)
        console.print(Text(f"\n{op_of(report)}", style="bold"))
        for case, group in by_case(rows).items():
            console.print(_table(case, group, peers_of(group)))
    for failure in rows_and_failures(suite)[1]:
        console.print(Text(f"not timed: {failure.words}: {failure.error}", style="red"))


def _table(case: str, rows: Sequence[Row], peers: Sequence[str]) -> Table:
    copy = next((row.copy for row in rows if row.copy), None)
    table = Table(title=case, title_justify="left", title_style="cyan", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(rows[0].size_of, justify="right", no_wrap=True, min_width=6)
    for name in ("us", "TB/s", "ceiling", *(["x copy" if copy == "slot copy" else "x mul"] if copy else [])):
        table.add_column(name, justify="right", no_wrap=True, min_width=7)
    for peer in peers:
        table.add_column(f"{peer} us", justify="right", min_width=7)
        table.add_column("ratio", justify="right", no_wrap=True, min_width=5)
    for name in ("host us", "bound", *(f"{peer} host" for peer in peers), "compile s", "MHz"):
        table.add_column(name, justify="right", min_width=5)
    table.add_column("rule", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*_cells(row, peers, bool(copy)))
    return table


def _cells(row: Row, peers: Sequence[str], copied: bool) -> list[Text]:
    cells = [Text(row.size), Text(f"{row.us:.2f}", style="bold"), number(row.tbs), number(row.share)]
    cells += [number(row.copy_ratio, 3)] if copied else []
    for peer in peers:
        found = row.peers.get(peer)
        cells += [number(found and found.us), ratio(found and found.ratio)]
    cells += [number(row.host_us), number(row.host_bound_us)]
    cells += [number(row.peers[peer].host_us if peer in row.peers else None) for peer in peers]
    return [*cells, number(row.compile_s), number(row.sm_mhz, 0), Text(row.rule, style="dim")]


def number(value: float | None, digits: int = 2) -> Text:
    return Text("-", style="dim") if value is None else Text(f"{value:.{digits}f}")


def ratio(value: float | None) -> Text:
    """Green below 1, red above it."""
    if value is None:
        return number(None)
    return Text(f"{value:.2f}", style="" if abs(value - 1) <= SAME else "green" if value < 1 else "red")
