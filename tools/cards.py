"""The page of all operators on several cards, `docs/cards.md`, from the files of `bench all` in docs/data: `python -m tools.cards`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ssmgen.bench.formats import load
from ssmgen.bench.rows import Row, rows_of
from ssmgen.bench.suite import Suite

ROOT = Path(__file__).parents[1]
DATA, PAGE = ROOT / "docs" / "data", ROOT / "docs" / "cards.md"
SUFFIX = "-all.json.gz"

HEAD = """# All operators, by card

<!-- python -m tools.cards -->

Results of `ssmgen bench all --quick` on each card, from `docs/data/CARD-all.json.gz`. Inputs are cold.
[How times are taken](guides/benchmarks.md#method).

- **us (TB/s)**: device time, and the bytes that the case reads and writes per time.
- **× copy**: the time over a copy of the same slots, or over a multiplication of the same bytes. In brackets: percent of the card's
  ceiling, which torch's multiplication reached in the same run. Calls within the L2 cache lack a percentage.

Prompts (`chunk_…`, `selective_scan`) compute more than they move, so the copy is not their goal. Variants come from that day's tuned
table, otherwise from the rules ([the rules' loss](lab/tuning.md)). An empty cell was not measured.
"""


def suites(data: Path = DATA) -> dict[str, Suite]:
    """{card: its measurements}, by name. Raises BenchFileError."""
    return {path.name.removesuffix(SUFFIX).upper(): load([path]) for path in sorted(data.glob(f"*{SUFFIX}"))}


def page_of(measured: Mapping[str, Suite]) -> str:
    """The page's text."""
    return "\n".join([HEAD, *_cards(measured), *_tables(measured)])


def _cards(measured: Mapping[str, Suite]) -> list[str]:
    lines = ["| card | ceiling in place, out of place, TB/s | torch | measured |", "|---|---|---|---|"]
    for card, suite in measured.items():
        reports = suite.reports
        ceilings = [f"{_span([r['ceilings_tbs'][name] for r in reports])}" for name in ("in_place", "out_of_place")]
        days = sorted({str(r["date"])[:10] for r in reports})
        torch = ", ".join(dict.fromkeys(str(r["torch"]) for r in reports))
        lines.append(
            f"| {card}: {', '.join(dict.fromkeys(r['device'] for r in reports))} | {', '.join(ceilings)} | {torch} | {', '.join(days)} |"
        )
    return [*lines, ""]


def _span(values: list[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} … {high}"


def _tables(measured: Mapping[str, Suite]) -> list[str]:
    found: dict[str, dict[tuple[str, str, str], dict[str, Row]]] = {}
    for card, suite in measured.items():
        for row in (row for report in suite.reports for row in rows_of(report)):
            found.setdefault(row.op, {}).setdefault((row.case, row.size_of, row.size), {})[card] = row
    lines = []
    for op in sorted(found):
        head = "".join(f" {card}, us (TB/s) | × copy (%) |" for card in measured)
        lines += [f"## {op}", "", f"| case |{head}", "|---|" + "---:|---:|" * len(measured)]
        for (case, size_of, size), rows in found[op].items():
            lines.append(f"| {case}, {size_of} {size} |" + "".join(_cells(rows.get(card)) for card in measured))
        lines.append("")
    return lines


def _cells(row: Row | None) -> str:
    if row is None:
        return " | |"
    share = "" if row.share is None else f" ({100 * row.share:.0f})"
    ratio = "" if row.copy_ratio is None else f"{row.copy_ratio:.2f}"
    return f" **{row.us:.2f}** ({row.tbs:.2f}) | {ratio}{share} |"


def refresh(data: Path = DATA, page: Path = PAGE) -> Path:
    """Writes the page from the existing data; returns its path."""
    page.write_text(page_of(suites(data)))
    return page


if __name__ == "__main__":
    print(refresh())
