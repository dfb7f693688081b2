"""A report of `python -m tools.demo` as a table: on a terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .measure import ACCELERATED, FUSED, FUSED_GRAPH, GRAPH, PATCHED, PLAIN, Row
from .packages import PACKAGES
from .presets import SHARED
from .prompts import WITHOUT, PromptRow
from .run import Report


class Column(NamedTuple):
    title: str
    cell: Callable[[Any], str | None]  # of a row; None: not measured
    note: str = ""  # key of the row's note with the reason

    @property
    def is_words(self) -> bool:
        return self.title in ("family", "as wide as")


def _ms(way: str) -> Callable[[Row | PromptRow], str | None]:
    return lambda row: f"{row.ms[way]:.2f}" if way in row.ms else None


def _speedup(way: str) -> Callable[[Row | PromptRow], str | None]:
    return lambda row: None if (value := row.speedup(way)) is None else f"{value:.1f} ×"


def _over_floor(way: str) -> Callable[[Row], str | None]:
    return lambda row: None if (value := row.over_floor(way)) is None else f"{value:.2f}"


def _kernels(way: str) -> Callable[[Row | PromptRow], str | None]:
    return lambda row: str(row.kernels[way]) if way in row.kernels else None


def _memory(way: str) -> Callable[[PromptRow], str | None]:
    return lambda row: f"{row.memory[way] / 2**30:.2f}" if way in row.memory else None


def _apart(way: str) -> Callable[[PromptRow], str | None]:
    return lambda row: f"{row.apart[way]:.1e}" if way in row.apart else None


_MODEL = (
    Column("family", lambda row: row.family),
    Column("as wide as", lambda row: row.like),
    Column("layers", lambda row: str(row.layers) if row.served == row.layers else f"{row.served} of {row.layers}"),
    Column("batch", lambda row: str(row.batch)),
)
COLUMNS = (
    *_MODEL,
    Column("transformers ms", _ms(PLAIN)),
    Column("packages ms", _ms(PACKAGES), f"{PACKAGES} ms"),
    Column("patched ms", _ms(PATCHED)),
    Column("", _speedup(PATCHED)),
    Column("fused ms", _ms(FUSED), f"{FUSED} ms"),
    Column("", _speedup(FUSED), f"{FUSED} ms"),
    Column("graph ms", _ms(GRAPH), f"{GRAPH} ms"),
    Column("", _speedup(GRAPH), f"{GRAPH} ms"),
    Column("fused graph ms", _ms(FUSED_GRAPH), f"{FUSED_GRAPH} ms"),
    Column("", _speedup(FUSED_GRAPH), f"{FUSED_GRAPH} ms"),
    Column("accelerate ms", _ms(ACCELERATED), f"{ACCELERATED} ms"),
    Column("", _speedup(ACCELERATED), f"{ACCELERATED} ms"),
    Column("× floor", _over_floor(ACCELERATED), f"{ACCELERATED} ms"),
    Column("kernels", _kernels(PLAIN), f"{PLAIN} kernels"),
    Column("packages kernels", _kernels(PACKAGES), f"{PACKAGES} kernels"),
    Column("patched kernels", _kernels(PATCHED), f"{PATCHED} kernels"),
    Column("fused kernels", _kernels(FUSED), f"{FUSED} kernels"),
    Column("same tokens", lambda row: f"{row.same}/{row.tokens}"),
)
PROMPT_COLUMNS = (
    *_MODEL,
    Column("prompt", lambda row: str(row.length)),
    Column("transformers ms", _ms(PLAIN), f"{PLAIN} ms"),
    Column("packages ms", _ms(PACKAGES), f"{PACKAGES} ms"),
    Column("patched ms", _ms(PATCHED)),
    Column("", _speedup(PATCHED)),
    Column("fused ms", _ms(FUSED)),
    Column("", _speedup(FUSED)),
    Column("without ms", lambda row: None if row.without is None else f"{row.without:.2f}", WITHOUT),
    Column("kernels", _kernels(PLAIN), f"{PLAIN} kernels"),
    Column("packages kernels", _kernels(PACKAGES), f"{PACKAGES} kernels"),
    Column("patched kernels", _kernels(PATCHED), f"{PATCHED} kernels"),
    Column("fused kernels", _kernels(FUSED), f"{FUSED} kernels"),
    Column("GiB", _memory(PLAIN), f"{PLAIN} memory"),
    Column("packages GiB", _memory(PACKAGES), f"{PACKAGES} memory"),
    Column("patched GiB", _memory(PATCHED)),
    Column("fused GiB", _memory(FUSED)),
    Column("packages difference", _apart(PACKAGES)),
    Column("difference", _apart(PATCHED)),
    Column("fused difference", _apart(FUSED)),
    Column("same tokens", lambda row: ", ".join(f"{way} {same}/{row.tokens}" for way, same in row.same.items()) or None),
)


class Shown(NamedTuple):
    """A table: its measured quantity and the meaning of its columns, in words; its columns and its rows."""

    words: str
    meant: str
    columns: tuple[Column, ...]
    rows: Sequence[Row | PromptRow]


def shown(report: Report) -> Shown:
    """The table of a report: decode steps or prompts."""
    if report.prompts:
        words = "Milliseconds, kernels, and memory in addition to the weights, of a pass over a prompt that ends with its first new token"
        meant = (
            "Fused: patch(fuse=True), if it changes prompts. Without: the recurrent layers return their input. "
            "Difference: of that token's logits, relative. Same tokens: equal greedy tokens after the prompt. Both are relative to "
            "transformers' own functions, or to the packages if those have no result."
        )
        return Shown(words, meant, _of(PROMPT_COLUMNS, report.prompts), report.prompts)
    words = "Milliseconds and kernels per token of greedy decoding"
    return Shown(words, "Fused: families whose layers are fused.", _of(COLUMNS, report.rows), report.rows)


def _of(columns: tuple[Column, ...], rows: Sequence[Row | PromptRow]) -> tuple[Column, ...]:
    """The columns; columns of packages only if transformers calls any package."""
    if any(PACKAGES in row.ms or f"{PACKAGES} ms" in row.notes for row in rows):
        return columns
    return tuple(column for column in columns if not column.title.startswith(PACKAGES))


def caption(report: Report) -> str:
    facts, table = report.facts, shown(report)
    installed = ", ".join(facts["kernel_packages"])
    peers = f"transformers may use {installed}" if installed else "No package of kernels for transformers is installed"
    return (
        f"{facts['device']}, torch {facts['torch']}, transformers {facts['transformers']}, {facts['date'][:10]}. "
        f"{table.words}; bf16, random weights. Layers are as wide as the named model's and fewer; "
        "where it says so, only some of them have a function of ssmgen's. Experts are few, and the vocabulary is of "
        f"{SHARED['vocab_size']} tokens, so that the head does not count. {table.meant} {peers}."
    )


def as_markdown(report: Report) -> str:
    """The caption, the table, footnotes and failures. Speedups are in the same cells as their times."""
    _, _, columns, rows = shown(report)
    cells = _Cells(columns)
    titled = [column for column in columns if column.title]
    lines = ["| " + " | ".join(column.title for column in titled) + " |"]
    lines += ["|" + "|".join("---" if column.is_words else "---:" for column in titled) + "|"]
    lines += ["| " + " | ".join(_joined(columns, cells.of(row))) + " |" for row in rows]
    parts = [caption(report), "\n".join(lines) if rows else "", "\n".join(cells.footnotes()), "\n".join(failures(report))]
    return "\n\n".join(filter(None, parts))


def _joined(columns: tuple[Column, ...], texts: list[str]) -> list[str]:
    """Texts of untitled columns are appended, in parentheses, to the cell before them, without line breaks."""
    found: list[str] = []
    for column, text in zip(columns, texts, strict=True):
        if column.title:
            found.append(text)
        elif text and text != found[-1]:  # one footnote explains why both are missing
            found[-1] += f" ({text})".replace(" ", "\N{NO-BREAK SPACE}")
    return found


def kernel_lists(report: Report, width: int = 100) -> Iterator[str]:
    """A text for each prompt and way whose kernels were listed, longest first; names are cut at `width`."""
    for row in report.prompts:
        for way, launches in row.by_kernel.items():
            total, count = sum(k.us for k in launches.values()), sum(k.count for k in launches.values())
            head = f"{row.family}, batch {row.batch}, a prompt of {row.length}, {way}: {count} launches, {total / 1e3:.2f} ms"
            yield "\n".join(["", head, *(f"{k.us / 1e3:9.3f} ms {k.count:5} {name[:width]}" for name, k in launches.items())])


def print_table(report: Report, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    _, _, columns, rows = shown(report)
    cells = _Cells(columns)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column.title, justify="left" if column.is_words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(text, style="green" if text.endswith("×") else "") for text in cells.of(row)))
    console.print(Text(caption(report), style="dim"))
    if rows:
        console.print(table)
    for text in cells.footnotes():
        console.print(Text(text, style="dim"))
    for text in failures(report):
        console.print(Text(text, style="red"))


def failures(report: Report) -> list[str]:
    return [f"not measured: {failure.words}: {failure.error}" for failure in report.failed]


class _Cells:
    """The texts of rows, with a number for each reason why one is missing."""

    def __init__(self, columns: tuple[Column, ...]) -> None:
        self.columns = columns
        self.reasons: dict[str, int] = {}

    def of(self, row: Row | PromptRow) -> list[str]:
        return [self._text(column, row) for column in self.columns]

    def _text(self, column: Column, row: Row | PromptRow) -> str:
        text = column.cell(row)
        if text is not None:
            return text
        reason = row.notes.get(column.note)
        if reason is None:  # a way that the family does not have
            return ""
        return f"- ({self.reasons.setdefault(reason, len(self.reasons) + 1)})"

    def footnotes(self) -> Iterator[str]:
        return (f"({number}) {reason}" for reason, number in self.reasons.items())
