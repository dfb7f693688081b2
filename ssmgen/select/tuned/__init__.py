"""Measured choices of variants by GPU: a table shipped with the package, and the user's table, which takes precedence. Needs no GPU.

A row names the variant that was fastest for a problem at a size. It is used only for the GPU, and for the generated code, that were
measured; any other row is stale, and reported as stale. All variants of a problem give the same bits, so a row changes only the time.
Rows of the user's table that cannot be measurements are left out, and a warning names them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import reprlib
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ... import settings
from ...cache.files import plain, read_json
from ...cache.process_lock import process_lock
from ...cache.trust import distrust, make_private
from ...compile.render import code_digest
from ...errors import SpecError, SsmgenError
from ...spec.kernel import Arch, DType, Index, KernelSpec, Problem, entries, text_of
from ..catalog import OPERATOR_OF, OPERATORS, SERVED_BY, name_of, parse

SCHEMA = 3
BEFORE = 2  # the previous schema, with old operator names and problems that list all fields; its rows are converted when read
REACH = 4.0  # a row serves sizes up to this factor away, if no row is nearer
SHIPPED = Path(__file__).parent
SHOWN = 4  # rows that a warning names
LARGEST = 2**62  # of sizes, and of times


class TableError(SsmgenError):
    """A table cannot be read or written."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured choice. Times are microseconds of a launch among cold inputs."""

    operator: str
    problem: str  # its bucket, see `bucket`
    size: int  # of the call, in the operator's unit (registry.unit)
    pdl: bool  # whether the call asked for a dependent launch
    spec: str
    us: float
    rule_us: float  # of the variant that the rules choose, in the same run
    runner_up: str  # differences of the second fastest variant
    runner_up_us: float
    label: str  # description of the measured call, for people
    code: str  # digest of the variant's rendered text
    arch: str
    driver: str
    compiler: str
    date: str

    @property
    def key(self) -> tuple[str, str, bool, int]:
        return self.operator, self.problem, self.pdl, self.size


@dataclass(frozen=True, slots=True)
class Found:
    """A row for a problem, and the variant it names; or why it is not used."""

    row: Row
    exact: bool
    spec: KernelSpec | None
    stale: str = ""


_BULK = frozenset(("state", "x", "v", "o", "out"))  # operands whose bytes count


def bucket(problem: Any, kind: type[Problem] | None = None) -> str:
    """The problem as text, without properties that choices do not depend on: index types, whether slots are given by an index, and the
    dtypes of operands that are small compared with the others. kind: the class of the problem, if `problem` is a spec, which has a
    problem's fields."""
    said = []
    for name, entry in entries(kind or type(problem)).items():
        value = entry.of(problem)
        if (isinstance(value, Index) and (name == "index" or value is not Index.NONE)) or (isinstance(value, DType) and name not in _BULK):
            said.append(f"{name}=any")
        elif value != entry.field.default or "later" not in entry.field.metadata:
            said.append(f"{name}={text_of(value)}")
    return ",".join(said)


def _renewed(row: Row) -> Row:
    """A row of the previous schema, converted to the new form. `staleness` judges its variant."""
    operator = name_of(row.operator)
    try:
        spec = parse(row.spec)
    except SpecError:
        return replace(row, operator=operator)
    return replace(row, operator=operator, problem=bucket(spec, problem_of(operator)), spec=str(spec))


def problem_of(operator: str) -> type[Problem]:
    """The Problem of an operator's calls."""
    return next(kind for kind, name in OPERATOR_OF.items() if name == operator)


def file_name(gpu: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", gpu).strip("_") + ".json"


def overlay_path(gpu: str) -> Path | None:
    """The user's table of a GPU; None without a cache directory."""
    root = settings.cache_dir()
    return None if root is None else root / "tuned" / file_name(gpu)


def read(path: Path) -> dict[tuple[str, str, bool, int], Row]:
    """{key: row} of a file; empty if there is none. Rows that cannot be measurements are left out, and a warning names them. Raises
    TableError."""
    return _table(path)[1]


def _table(path: Path, own: bool = False) -> tuple[str, dict[tuple[str, str, bool, int], Row]]:
    """(GPU, {key: row}) of a file. own: the file is named after its GPU, and rows with unknown variants are wrong, not stale."""
    try:
        content = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return "", {}
    except OSError as e:
        raise TableError(f"{path} cannot be read: {e.strerror or e}") from e
    except ValueError as e:
        raise TableError(f"{path} is not a table of tuned variants: {e}. Remove it, or tune again.") from e
    if wrong := _unlike_a_table(content):
        raise TableError(f"{path} is not a table of tuned variants: {wrong}. Remove it, or tune again.")
    if own and path.name != file_name(content["gpu"]):
        raise TableError(f"{path} is for another GPU, {reprlib.repr(content['gpu'])}. Tune again on this one.")
    rows: dict[tuple[str, str, bool, int], Row] = {}
    faults: list[str] = []
    for number, given in enumerate(content["rows"], 1):
        if fault := _fault(given) or (_illegal(given, content["schema"]) if own else ""):
            faults.append(f"row {number}: {fault}")
        else:
            row = Row(**{f.name: given[f.name] for f in fields(Row)})
            row = row if content["schema"] == SCHEMA else _renewed(row)
            rows[row.key] = row
    if faults:
        more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        what = f"{len(faults)} of {len(content['rows'])} rows of {path}"
        warnings.warn(f"ssmgen ignores {what}: {'; '.join(faults[:SHOWN])}{more}. Remove them, or tune again.", stacklevel=3)
    return content["gpu"], rows


def _unlike_a_table(content: Any) -> str:
    if not isinstance(content, dict) or not {"schema", "gpu", "rows"} <= content.keys():
        return "it is not an object with schema, gpu and rows"
    if type(content["schema"]) is not int or content["schema"] not in (BEFORE, SCHEMA):
        return f"its schema is {reprlib.repr(content['schema'])}; expected {SCHEMA}"
    if fault := _unfit("gpu", content["gpu"], "str"):
        return fault
    return "" if isinstance(content["rows"], list) else "its rows are not a list"


def _fault(row: Any) -> str:
    """Why a row cannot be a measurement; empty if it can."""
    if not isinstance(row, dict) or (missing := [f.name for f in fields(Row) if f.name not in row]):
        return f"{', '.join(missing)} is missing" if isinstance(row, dict) else "it is not an object"
    if faults := [fault for f in fields(Row) if (fault := _unfit(f.name, row[f.name], str(f.type)))]:
        return ", ".join(faults)
    if name_of(row["operator"]) not in OPERATORS:
        return f"operator {reprlib.repr(row['operator'])} does not exist"
    try:
        Arch.parse(row["arch"])
    except SpecError as e:
        return f"arch is {reprlib.repr(row['arch'])}: {e.problems[0]}"
    family = row["spec"].partition(":")[0]
    served = SERVED_BY.get(name_of(family)) == name_of(row["operator"])
    return "" if served else f"its variant is of {reprlib.repr(family)}; expected {row['operator']}"


def _illegal(row: dict[str, Any], schema: int) -> str:
    try:
        spec = parse(row["spec"])
        spec.check(Arch.parse(row["arch"]))
    except SpecError as e:
        return f"its variant is not legal: {plain(reprlib.repr(e.problems[0]))}"
    same = schema != SCHEMA or row["problem"] == bucket(spec, problem_of(name_of(row["operator"])))
    return "" if same else "its variant is for another problem"


def _unfit(name: str, value: Any, kind: str) -> str:
    """How a value does not fit a field of Row, in words. Texts are shown on terminals."""
    shown = f"{name} is {reprlib.repr(value)}; expected"
    if kind == "str":
        return "" if isinstance(value, str) and value == plain(value) else f"{shown} a text of one line"
    if kind == "bool":
        return "" if isinstance(value, bool) else f"{shown} true or false"
    if kind == "int":
        return "" if type(value) is int and 1 <= value <= LARGEST else f"{shown} a whole number of 1 or more"
    return "" if type(value) in (int, float) and 0 < value <= LARGEST else f"{shown} a number above 0"


def write(path: Path, gpu: str, rows: Iterable[Row]) -> None:
    """Replaces a table atomically: readers see the old one or the new one, also after a crash."""
    ordered = sorted(rows, key=lambda r: r.key)
    lines = ",\n".join(json.dumps(asdict(row)) for row in ordered)  # a row to a line: a review shows which changed
    text = f'{{"schema": {SCHEMA}, "gpu": {json.dumps(gpu)}, "rows": [\n{lines}\n]}}\n'
    try:
        make_private(path.parent)
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tuned-")
        with os.fdopen(fd, "w") as file:
            os.fchmod(fd, 0o644)  # data: its folder decides who may read it
            file.write(text)
        os.replace(temporary, path)
    except OSError as e:
        raise TableError(f"{path} cannot be written: {e}") from e


def merge(path: Path, gpu: str, rows: Iterable[Row]) -> None:
    """Adds rows to a table. Processes of one machine wait for each other; processes on several machines with a shared file system may
    overwrite each other's rows. Raises TableError."""
    with process_lock(hashlib.sha256(str(path.resolve()).encode()).hexdigest()):
        write(path, gpu, (read(path) | {row.key: row for row in rows}).values())


def rows_of(gpu: str) -> dict[tuple[str, str, bool, int], Row]:
    """The rows for a GPU by key, the user's over the package's."""
    path = overlay_path(gpu)
    return read(SHIPPED / file_name(gpu)) | (_own(path)[1] if path else {})


@functools.cache
def _own(path: Path) -> tuple[str, dict[tuple[str, str, bool, int], Row]]:
    """(GPU, {key: row}) of a user's table. An unusable table is reported by a warning and treated as missing."""
    try:
        if not os.path.lexists(path):
            return "", {}
        if reason := distrust(path.parent):
            raise TableError(reason)
        return _table(path, own=True)
    except TableError as e:
        warnings.warn(plain(f"ssmgen ignores your tuned variants: {e}"), stacklevel=3)
        return "", {}


def _tables_in(place: Path | None) -> list[Path]:
    try:
        return [place / name for name in sorted(os.listdir(place)) if name.endswith(".json")] if place else []
    except OSError:  # most have none
        return []


@functools.cache
def gpus(arch: Arch | None = None) -> tuple[str, ...]:
    """Names of the GPUs that have tables, of one architecture if given."""
    own = settings.cache_dir()
    found = [_table(file)[0] for file in _tables_in(SHIPPED)] + [_own(file)[0] for file in _tables_in(own and own / "tuned")]
    names = dict.fromkeys(filter(None, found))
    return tuple(gpu for gpu in names if arch is None or any(Arch.parse(row.arch).number == arch.number for row in rows_of(gpu).values()))


@functools.cache
def _by_problem(gpu: str) -> dict[tuple[str, str, bool], list[Row]]:
    found: dict[tuple[str, str, bool], list[Row]] = {}
    for row in rows_of(gpu).values():
        found.setdefault((row.operator, row.problem, row.pdl), []).append(row)
    return found


def forget() -> None:
    """Makes the process read tables again; it reads each one only once."""
    gpus.cache_clear()
    _own.cache_clear()
    _by_problem.cache_clear()


def find(operator: str, problem: Any, size: int, arch: Arch, pdl: bool, gpu: str) -> Iterator[Found]:
    """The rows that might serve a problem, nearest size first, up to a factor of REACH."""
    rows = _by_problem(gpu).get((operator, bucket(problem), pdl), [])
    apart = {row.size: abs(math.log(row.size / max(size, 1))) for row in rows}
    for row in sorted(rows, key=lambda r: (apart[r.size], r.size)):
        if apart[row.size] > math.log(REACH):
            return
        stale = staleness(row, arch)
        yield Found(row, row.size == size, None if stale else _spec_for(row, problem), stale)


def staleness(row: Row, arch: Arch | None = None) -> str:
    """Why a row is not used on an architecture; empty if it is."""
    if arch is not None and Arch.parse(row.arch).number != arch.number:
        return f"it is for {row.arch}"
    try:
        code = code_digest(parse(row.spec), Arch.parse(row.arch))
    except SpecError as e:
        return f"its variant no longer exists: {e.problems[0]}"
    return "" if code == row.code else f"the variant's code has changed since {row.date}"


def alike(spec: KernelSpec) -> list[KernelSpec]:
    """The variants for all problems of the spec's bucket, which differ only in their slot index: a row of it may serve any of them."""
    kinds = [field.name for field in fields(spec) if field.name == "index"]
    return [replace(spec, **dict.fromkeys(kinds, index)) for index in Index] if kinds else [spec]


def _spec_for(row: Row, problem: Any) -> KernelSpec:
    spec = parse(row.spec)
    return replace(spec, **{f.name: getattr(problem, f.name) for f in fields(problem)})
