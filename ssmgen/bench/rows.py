"""One schema for the reports of all operators: a flat row per case, and the cases that failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from . import bench_of, benchmarks


class Point(NamedTuple):
    """Which case a row of a report is, in words."""

    case: str  # all but the size: common to the points of one curve
    size_of: str  # "batch", or another unit of `size`
    size: str
    ceiling: str | None  # which of the report's ceilings_tbs bounds it; None where the data is in the L2 cache

    @property
    def words(self) -> str:
        return f"{self.case}, {self.size_of} {self.size}"


@dataclass(frozen=True, slots=True)
class Peer:
    """Another package's time of the same case. `ratio` is of our time to that: below 1, ours is less."""

    us: float
    ratio: float
    host_us: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A case: device microseconds per call, host microseconds per eager call. None: not measured, or it would compare unequal work."""

    op: str
    case: str
    size_of: str
    size: str
    us: float
    tbs: float
    copy: str | None = None  # the base of copy_ratio: a copy of the same slots, or an elementwise multiplication of equal bytes
    copy_us: float | None = None
    copy_ratio: float | None = None
    share: float | None = None  # of the ceiling measured in the same run
    host_us: float | None = None
    host_bound_us: float | None = None
    sm_mhz: int | None = None  # the SM clock after the last replay
    compile_s: float
    state_error: float | None = None
    out_error: float | None = None
    spec: str
    rule: str
    device: str
    date: str | None = None
    peers: Mapping[str, Peer] = field(default_factory=dict)  # by package
    others: Mapping[str, float] = field(default_factory=dict)  # microseconds of our further contenders: without PDL, in two kernels, …


@dataclass(frozen=True, slots=True)
class Failure:
    """A case that was not timed, or with an empty case and size an operator's whole benchmark."""

    op: str
    case: str
    size_of: str
    size: str
    error: str

    @property
    def words(self) -> str:
        return ", ".join(filter(None, (f"{self.op} {self.case}".strip(), f"{self.size_of} {self.size}".strip())))


def op_of(report: Mapping[str, Any]) -> str:
    """The operator that was timed. Reports of release 0.1 may leave it out, of the one whose benchmark says so."""
    op: str = report["op"] if "op" in report else next(op for op in benchmarks() if bench_of(op).nameless)
    return op


def point_of(report: Mapping[str, Any], row: Mapping[str, Any]) -> Point:
    bench, at = bench_of(op_of(report)), {**report, **row}
    return Point(bench.words(at), bench.size_of, bench.size(at), None if row.get("hot") else bench.ceiling)


def rows_of(report: Mapping[str, Any]) -> list[Row]:
    """A report's rows in the order in which they were measured."""
    return [_row(report, row) for row in report["rows"]]


def failures_of(report: Mapping[str, Any]) -> list[Failure]:
    op = op_of(report)
    return [Failure(op, *point_of(report, case)[:3], case["error"]) for case in report.get("failed", ())]


def _row(report: Mapping[str, Any], row: Mapping[str, Any]) -> Row:
    point = point_of(report, row)
    us, host = row["us"], row["host_us"]
    copies = [us[name] for name in ("copy_pdl", "copy") if name in us]
    ratio = row["mul_ratio"] if "mul" in us else row["copy_ratio"]
    copied = "multiplication" if "mul" in us else "slot copy"
    return Row(
        op=op_of(report),
        case=point.case,
        size_of=point.size_of,
        size=point.size,
        us=row["served_us"],
        tbs=row["tbs"],
        copy=None if ratio is None else copied,
        copy_us=None if ratio is None else us["mul"] if "mul" in us else min(copies),
        copy_ratio=ratio,
        share=row["tbs"] / report["ceilings_tbs"][point.ceiling] if point.ceiling else None,
        host_us=host.get("ssmgen"),
        host_bound_us=host.get("ssmgen_bound"),
        sm_mhz=row.get("sm_mhz"),
        compile_s=row["compile_seconds"],
        state_error=row.get("state_error"),
        out_error=row.get("out_error"),
        spec="; ".join(row["specs"]) if "specs" in row else row["spec"],
        rule=row["rule"],
        device=report["device"],
        date=report.get("date"),
        others=_others(row),
        peers={name.partition(".")[0]: Peer(us[name], ratio, host.get(name)) for name, ratio in row["peer_ratio"].items()},
    )


def _others(row: Mapping[str, Any]) -> dict[str, float]:
    """The times that no other field has."""
    first = row.get("served", "ssmgen_pdl" if "ssmgen_pdl" in row["us"] else "ssmgen")
    known = {first, "copy", "copy_pdl", "mul", *row["peer_ratio"]}
    return {"no PDL" if name == "ssmgen" else name: us for name, us in row["us"].items() if name not in known}


def by_case(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The points of each curve."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.case, []).append(row)
    return found


def peers_of(rows: Iterable[Row]) -> list[str]:
    """The packages that rows were compared with, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.peers))


def flat(rows: Iterable[Row], failures: Iterable[Failure] = ()) -> Iterator[dict[str, Any]]:
    """Rows as dictionaries of plain values, all with the same keys: the fields of Row, three keys per peer, and the reason of a failure."""
    rows, failures = list(rows), list(failures)
    last = ("spec", "rule", "device", "date")
    own = [f.name for f in fields(Row) if f.name not in (*last, "peers", "others")]
    theirs = [f"{peer}_{name}" for peer in peers_of(rows) for name in ("us", "ratio", "host_us")]
    empty: dict[str, Any] = dict.fromkeys([*own, *theirs, *last, "failed"])
    for row in rows:
        values = {name: getattr(row, name) for name in (*own, *last)}
        values |= {f"{peer}_{f.name}": getattr(found, f.name) for peer, found in row.peers.items() for f in fields(Peer)}
        yield empty | values
    for failure in failures:
        yield empty | {name: getattr(failure, name) for name in ("op", "case", "size_of", "size")} | {"failed": failure.error}
