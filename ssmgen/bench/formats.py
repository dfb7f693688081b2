"""Writes a benchmark's results as text, rich tables, JSON, CSV or a page, and reads them back from files."""

from __future__ import annotations

import csv
import io
import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cache.files import FileError, plain, plain_values, read_json
from ..errors import SsmgenError, bullets
from .rows import flat
from .schema import faults_of, is_suite
from .suite import Suite, rows_and_failures, stitched

FAULTS, LONGEST = 5, 200  # of a file, and characters of one, in a message


class BenchFileError(SsmgenError):
    """Files that hold no reports of `ssmgen bench`."""


class CasesFailedError(SsmgenError):
    """Some cases, or some operators' whole benchmarks, were not timed."""


def load(paths: Sequence[Path]) -> Suite:
    """Results that `--json` wrote, of one operator or of several, plain or gzipped. Their texts have no control characters, so that they
    may go to a terminal. Raises BenchFileError that names every wrong file and its faults."""
    found, wrong, unreadable = [], [], []
    for path in paths:
        try:
            found.append(_read(path))
        except OSError as e:
            unreadable.append(plain(f"{path}: {e.strerror or e}"))
        except ValueError as e:
            wrong.append(plain(f"{path}: {e}"))
    if unreadable:
        raise BenchFileError(f"these files cannot be read:\n{bullets(unreadable + wrong)}")
    if wrong:
        raise BenchFileError(f"these files are not what `ssmgen bench … --json` writes:\n{bullets(wrong)}")
    return stitched(found)


def _read(path: Path) -> Suite:
    try:
        value = plain_values(read_json(path, regular=False))  # a pipe is as good
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e
    if isinstance(value, dict) and value.get("rows") and all(isinstance(row, dict) and "column" in row for row in value["rows"]):
        raise ValueError("it holds results of `ssmgen bench models`; show it with `ssmgen bench models --saved`")
    if faults := list(itertools.islice(faults_of(value), FAULTS + 1)):
        shown = [fault if len(fault) <= LONGEST else f"{fault[:LONGEST]}…" for fault in faults[:FAULTS]]
        raise ValueError("; ".join(shown + (["and more"] if len(faults) > FAULTS else [])))
    return Suite(value["reports"], value["failed"]) if is_suite(value) else Suite([value])


def check(suite: Suite) -> None:
    """Raises CasesFailedError that names all that failed, if anything did."""
    if failures := rows_and_failures(suite)[1]:
        what = f"{len(failures)} not timed:"
        raise CasesFailedError(f"{what}\n{bullets([f'{failure.words}: {failure.error}' for failure in failures])}")


def as_csv(suite: Suite) -> str:
    """The flat rows of all reports, a header first; unknown values are empty."""
    rows = list(flat(*rows_and_failures(suite)))
    return csv_of(list(rows[0]), rows) if rows else ""


def csv_of(names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()})
    return text.getvalue().rstrip("\n")


def write_page(page: Path | None, text: str) -> None:
    """Writes a page to the file that --html names. Raises FileError."""
    assert page is not None
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as e:
        raise FileError(f"{page} cannot be written: {e.strerror or e}") from e


def as_json(suite: Suite, alone: bool) -> str:
    """alone: the one report by itself, as a benchmark of one operator prints it."""
    value: Mapping[str, Any] = suite.reports[0] if alone else suite.as_dict()
    return json.dumps(value, indent=1)


def show(suite: Suite, form: str, alone: bool = False, page: Path | None = None) -> None:
    """Prints the suite as "table", "json" or "csv", or writes the page. A table is rich on a terminal and plain text elsewhere."""
    if form == "html":
        from .html import as_html

        write_page(page, as_html(suite))
    elif form == "table" and sys.stdout.isatty():
        from .table import print_tables

        print_tables(suite)
    elif form == "table":
        from .table import as_text

        print(as_text(suite))
    else:
        print(as_csv(suite) if form == "csv" else as_json(suite, alone))
