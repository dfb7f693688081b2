"""What `ssmgen bench … --json` printed, by the variants that it timed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..errors import ReportError


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """Where and how a file's rows were measured."""

    file: str
    device: str
    torch: str
    compiler: str
    method: str


@dataclass(frozen=True, slots=True)
class Timing:
    """One case that a variant took part in."""

    run: Run
    case: tuple[tuple[str, str], ...]  # what was run
    us: dict[str, float]  # microseconds of a call, by contender
    ours: frozenset[str]  # the contenders that are this variant; none if the file does not tell
    tbs: float | None  # terabytes per second of what is served


def read(paths: Sequence[Path]) -> dict[str, list[Timing]]:
    """{spec: timings}. Raises ReportError that names every file that cannot be read."""
    found: dict[str, list[Timing]] = {}
    problems = []
    for path in paths:
        try:
            timings = list(_timings(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            problems.append(f"{path} is not what `ssmgen bench … --json` prints ({type(e).__name__}: {e})")
            continue
        for spec, timing in timings:
            found.setdefault(spec, []).append(timing)
    if problems:
        raise ReportError(problems)
    return found


def _timings(path: Path) -> Iterator[tuple[str, Timing]]:
    report = json.loads(path.read_text())
    run = Run(path.name, report["device"], report["torch"], report["compiler"], report["method"])
    for row in report["rows"]:
        case = tuple((key, in_words(row[key])) for key in takewhile(lambda key: key != "us", row))
        for spec, ours in _contenders(row).items():
            yield spec, Timing(run, case, dict(row["us"]), frozenset(ours), row.get("tbs"))


def _contenders(row: dict[str, Any]) -> dict[str, set[str]]:
    """{spec: names under which a row has its time}. A call of two kernels has the time of both."""
    served = row["specs"] if "specs" in row else [row["spec"]]
    found = {spec: {name for name, us in row["us"].items() if us == row["served_us"]} for spec in served}
    for name, variant in row.get("variants", {}).items():
        for spec in variant["specs"]:
            found.setdefault(spec, set()).add(name)
    return found


def in_words(value: Any) -> str:
    """A field's value, as specs and pages have it."""
    value = getattr(value, "value", value)  # of an enum
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " x ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
