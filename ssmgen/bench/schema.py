"""The schema of a report of `ssmgen bench`, field by field: files of results are checked before they are used."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import bench_of, benchmarks
from .rows import op_of


class Kind(NamedTuple):
    """The kind of a field's value. faults: (where it stands, value) -> what is wrong with it."""

    faults: Callable[[str, Any], Iterator[str]]


Fields = Mapping[str, Kind]  # by name; one that ends with "?" may be missing


def _kind(words: str, holds: Callable[[Any], bool]) -> Kind:
    def faults(where: str, value: Any) -> Iterator[str]:
        if not holds(value):
            yield f"{where} is {reprlib.repr(value)}; expected {words}"

    return Kind(faults)


def _number(words: str, low: float, high: float) -> Kind:
    return _kind(words, lambda value: type(value) in (int, float) and low <= value <= high)


def maybe(kind: Kind) -> Kind:
    return Kind(lambda where, value: iter(()) if value is None else kind.faults(where, value))


def list_of(kind: Kind, length: int | None = None) -> Kind:
    """A list whose items are of one kind: of a given number of items, or of any number."""

    def faults(where: str, value: Any) -> Iterator[str]:
        if not isinstance(value, list) or (length is not None and len(value) != length):
            yield f"{where} is {reprlib.repr(value)}; expected a list" + (f" of {length}" if length is not None else "")
            return
        for i, item in enumerate(value):
            yield from kind.faults(f"{where}[{i}]", item)

    return Kind(faults)


def by_name(kind: Kind, *needed: str) -> Kind:
    def faults(where: str, value: Any) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{where} is {reprlib.repr(value)}; expected an object"
            return
        yield from (f"{where}.{name} is missing" for name in needed if name not in value)
        for name, item in value.items():
            yield from kind.faults(f"{where}.{name}", item)

    return Kind(faults)


def object_of(fields: Fields, others: bool = True) -> Kind:
    """An object with these names. others: it may have any others too."""

    def faults(where: str, value: Any) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{where} is {reprlib.repr(value)}; expected an object"
            return
        for name, kind in fields.items():
            if (plain := name.rstrip("?")) in value:
                yield from kind.faults(f"{where}.{plain}".lstrip("."), value[plain])
            elif plain == name:
                yield f"{where}.{name} is missing".lstrip(".")
        if not others:
            yield from (
                f"{where}: {reprlib.repr(name)} is unknown; expected one of {', '.join(fields)}" for name in value if name not in fields
            )

    return Kind(faults)


TEXT = _kind("a text", lambda value: isinstance(value, str))
NAME = _kind("a text that is not empty", lambda value: isinstance(value, str) and bool(value.strip()))
FLAG = _kind("true or false", lambda value: isinstance(value, bool))
COUNT = _kind("a whole number from 0 to 10^15", lambda value: type(value) is int and 0 <= value <= 10**15)
# Nothing that was measured comes near these bounds: with numbers beyond them, axes overflow.
TIME = _number("a time from 1e-9 to 1e15", 1e-9, 1e15)
SPEED = _number("a number from 0.001 to 1000", 1e-3, 1e3)
PART = _number("a number from 0 to 1e15", 0, 1e15)
RATIO = _number("a number from 1e-9 to 1e9", 1e-9, 1e9)
ERROR = maybe(PART)


@dataclass(frozen=True)
class Report:
    """The fields of an operator's report. case: fields that name a case; head: of the report; row: further fields of timed cases.

    copied: the slot copy bounds it; otherwise a multiplication.
    """

    case: Fields
    head: Fields
    row: Fields
    copied: bool
    times: tuple[str, ...]  # contenders that every row has


COPY: dict[str, Kind] = {"copy_ratio": maybe(RATIO), "ceiling_fraction?": maybe(PART), "copy_us?": maybe(TIME)}
MUL: dict[str, Kind] = {"mul_ratio": RATIO}

FAILED = {"op": TEXT, "error": TEXT}
ROW: Fields = {
    "served_us": TIME, "tbs": PART, "host_us": by_name(TIME), "peer_ratio": by_name(RATIO), "compile_seconds": TIME, "rule": TEXT,
    "sm_mhz?": maybe(COUNT),
    "state_error?": ERROR, "out_error?": ERROR, "spec?": TEXT, "specs?": list_of(TEXT),
    "variants?": by_name(object_of({"specs": list_of(TEXT)})),
}  # fmt: skip
HEAD: Fields = {
    "device": NAME, "torch": NAME, "compiler": NAME, "date?": TEXT, "ssmgen?": TEXT, "method?": TEXT, "op?": TEXT,
    "sm_mhz?": maybe(COUNT),
    "ceilings_tbs": object_of({"in_place": SPEED, "out_of_place": SPEED}, others=False),
}  # fmt: skip


def faults_of(value: Any) -> Iterator[str]:
    """The faults of a file's value: of one report, or of several with the operators that failed."""
    if not isinstance(value, dict):
        yield f"it is {reprlib.repr(value)}; expected an object"
    elif is_suite(value):
        yield from list_of(Kind(_of_report)).faults("reports", value["reports"])
        yield from list_of(object_of(FAILED)).faults("failed", value["failed"])
    else:
        yield from _of_report("", value)


def is_suite(value: Mapping[str, Any]) -> bool:
    """Whether a file's object is of several reports."""
    return {"reports", "failed"} <= value.keys()


def _of_report(where: str, report: Any) -> Iterator[str]:
    if not isinstance(report, dict):
        yield f"{where} is {reprlib.repr(report)}; expected an object"
        return
    op, dot = op_of(report), f"{where}." if where else ""
    if not isinstance(op, str) or op not in benchmarks():
        yield f"{dot}op is {reprlib.repr(op)}; expected one of {', '.join(benchmarks())}"
        return
    form = bench_of(op).form
    of_fields = object_of({**form.case, **ROW, **form.row, "us": by_name(TIME, *form.times)})

    def row(where: str, value: Any) -> Iterator[str]:
        """Faults of its fields; if there are none, faults of their combination."""
        wrong = list(of_fields.faults(where, value))
        yield from wrong or _between(where, value, form)

    rows, failed = list_of(Kind(row)), list_of(object_of({**form.case, "error": TEXT}))
    yield from object_of({**HEAD, **form.head, "rows": rows, "failed?": failed}).faults(where, report)


def _between(where: str, row: Mapping[str, Any], form: Report) -> Iterator[str]:
    us = row["us"]
    if "spec" not in row and not row.get("specs"):
        yield f"{where} has neither spec nor specs"
    yield from (f"{where}.us.{name} is missing; peer_ratio needs it" for name in row["peer_ratio"] if name not in us)
    if form.copied and "mul" in us:
        yield f"{where}.us.mul is not a contender of this operator"
    if form.copied and row["copy_ratio"] is not None and not {"copy", "copy_pdl"} & us.keys():
        yield f"{where}.us has no copy; copy_ratio needs it"
