"""How far a benchmark is: a line per case, or on a terminal a display as well."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column


class Watch:
    """Hears how a benchmark goes on; this one passes on the line that each case ends with."""

    def __init__(self, say: Callable[[str], None] = print):
        self.say = say

    def begins(self, op: str, cases: int) -> None:
        """An operator's benchmark starts; it has this number of cases."""

    def case(self, words: str) -> None:
        """The next case is being made and checked."""

    def timing(self, contenders: int) -> None:
        """The case is correct, and this number of contenders are replayed in turn."""

    def ends(self, line: str) -> None:
        """The case has been timed, or failed."""
        self.say(line)


PRINTING = Watch()


class Display(Watch):
    """Keeps one line at the bottom of a terminal: operator, case, the current phase, cases so far, elapsed time."""

    def __init__(self, console: Console):
        words = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
        columns = (words, BarColumn(bar_width=16), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console, transient=True, expand=True)
        self.task: Any = None
        self.op = self.words = ""
        super().__init__(lambda line: self.progress.console.print(line, highlight=False, markup=False, soft_wrap=True))

    def begins(self, op: str, cases: int) -> None:
        self.op = op
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.task = self.progress.add_task(op, total=cases)

    def case(self, words: str) -> None:
        self.words = words
        self._show("checking")

    def timing(self, contenders: int) -> None:
        self._show(f"timing {contenders} contenders")

    def ends(self, line: str) -> None:
        super().ends(line)
        self.progress.advance(self.task)

    def _show(self, doing: str) -> None:
        self.progress.update(self.task, description=f"{self.op}: {doing}: {self.words}")


@contextlib.contextmanager
def watching() -> Iterator[Watch]:
    """Shows progress on stderr: a display where that is a terminal, and a line per measured case everywhere."""
    console = Console(stderr=True)
    if not (sys.stderr.isatty() and console.is_interactive):
        yield Watch(lambda line: click.echo(line, err=True))
        return
    display = Display(console)
    with display.progress:
        yield display
