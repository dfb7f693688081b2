"""Reads output of `ssmgen bench … --json`, grouped by the variants that it timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssmgen.bench.formats import load
from ssmgen.bench.rows import op_of, point_of


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """The machine and method of an operator's measurement."""

    op: str
    device: str
    torch: str
    compiler: str
    method: str


@dataclass(frozen=True, slots=True)
class Timing:
    """One case with a time for the variant."""

    run: Run
    case: str
    us: dict[str, float]  # microseconds of a call, by contender
    ours: frozenset[str]  # the contenders that are this variant
    tbs: float | None  # terabytes per second of the variant that is served


def read(paths: Sequence[Path]) -> dict[str, list[Timing]]:
    """{spec: timings}. Raises bench.formats.BenchFileError that names every file that cannot be read."""
    found: dict[str, list[Timing]] = {}
    for report in load(paths).reports if paths else ():
        run = Run(op_of(report), report["device"], report["torch"], report["compiler"], report.get("method", ""))
        for row in report["rows"]:
            for spec, ours in _contenders(row).items():
                timing = Timing(run, point_of(report, row).words, dict(row["us"]), frozenset(ours), row["tbs"])
                found.setdefault(spec, []).append(timing)
    return found


def _contenders(row: Mapping[str, Any]) -> dict[str, set[str]]:
    """{spec: the names of its times in a row}. The time of a call with two kernels counts for both."""
    served = row["specs"] if "specs" in row else [row["spec"]]
    found = {spec: {name for name, us in row["us"].items() if us == row["served_us"]} for spec in served}
    for name, variant in row.get("variants", {}).items():
        for spec in variant["specs"]:
            found.setdefault(spec, set()).add(name)
    return found
