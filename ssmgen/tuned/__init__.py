"""Measured choices of variants by GPU: a table that the package brings, and one of the user's over it. Needs no GPU.

A row says which variant was fastest for a problem at a size. It is only believed for the GPU, and for the generated code, that was
measured; a row that is not is stale, and says so. Every variant of a problem gives the same bits, so a row changes times and nothing else.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from .. import config
from ..cache import distrust, make_private
from ..errors import SpecError, SsmgenError
from ..kernels import FAMILIES
from ..render import code_digest
from ..spec import Arch, DType, Index, KernelSpec, parse_spec, text_of

SCHEMA = 2
REACH = 4.0  # a row serves sizes up to this factor away, if none is nearer
SHIPPED = Path(__file__).parent


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
    rule_us: float  # of what the rules would have served, in the same run
    runner_up: str  # what the second best has otherwise
    runner_up_us: float
    label: str  # what was measured, for people
    code: str  # digest of what the variant was rendered to
    arch: str
    driver: str
    compiler: str
    date: str

    @property
    def key(self) -> tuple[str, str, bool, int]:
        return self.operator, self.problem, self.pdl, self.size


@dataclass(frozen=True, slots=True)
class Found:
    """A row for a problem, and the variant it names; or why it is not believed."""

    row: Row
    exact: bool
    spec: KernelSpec | None
    stale: str = ""


_BULK = frozenset(("state", "x", "v", "o", "out"))  # operands whose bytes count


def bucket(problem: Any) -> str:
    """The problem as text, without what choices do not depend on: the types of indices, whether slots are given by one, and the types of
    operands that are small beside the rest."""
    given = {f.name: getattr(problem, f.name) for f in fields(problem)}
    for name, value in given.items():
        if (isinstance(value, Index) and (name == "index" or value is not Index.NONE)) or (isinstance(value, DType) and name not in _BULK):
            given[name] = "any"
    return ",".join(f"{name}={text_of(value)}" for name, value in given.items())


def file_name(gpu: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", gpu).strip("_") + ".json"


def overlay_path(gpu: str) -> Path | None:
    """The user's table of a GPU; None without a cache directory."""
    root = config.cache_dir()
    return None if root is None else root / "tuned" / file_name(gpu)


def read(path: Path) -> dict[tuple[str, str, bool, int], Row]:
    """{key: row} of a file; nothing if there is none. Raises TableError."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise TableError(f"{path} cannot be read: {e}") from e
    try:
        content = json.loads(text)
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {content['schema']}, not {SCHEMA}")
        rows = [Row(**{f.name: row[f.name] for f in fields(Row)}) for row in content["rows"]]
    except (ValueError, KeyError, TypeError) as e:
        raise TableError(f"{path} is not a table of tuned variants ({type(e).__name__}: {e}). Remove it, or tune again.") from e
    return {row.key: row for row in rows}


def write(path: Path, gpu: str, rows: Iterable[Row]) -> None:
    """Publishes a table at once: whoever reads meanwhile sees the old one or the new one, and so does who comes after a crash."""
    ordered = sorted(rows, key=lambda r: r.key)
    lines = ",\n".join(json.dumps(asdict(row)) for row in ordered)  # a row to a line: a review shows which changed
    text = f'{{"schema": {SCHEMA}, "gpu": {json.dumps(gpu)}, "rows": [\n{lines}\n]}}\n'
    try:
        make_private(path.parent)
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tuned-")
        with os.fdopen(fd, "w") as file:
            os.fchmod(fd, 0o644)  # data: that it may be read is for its directory to say
            file.write(text)
        os.replace(temporary, path)
    except OSError as e:
        raise TableError(f"{path} cannot be written: {e}") from e


def rows_of(gpu: str) -> dict[tuple[str, str, bool, int], Row]:
    """The rows for a GPU by key, the user's over the package's. A user's table that cannot be read is left out, with a warning."""
    found = read(SHIPPED / file_name(gpu))
    overlay = overlay_path(gpu)
    if overlay is not None and overlay.exists():
        try:
            if reason := distrust(overlay.parent):
                raise TableError(reason)
            found |= read(overlay)
        except TableError as e:
            warnings.warn(f"ssmgen ignores your tuned variants: {e}", stacklevel=2)
    return found


def _gpu_of(path: Path) -> str | None:
    """Whose table a file is; None, with a warning, if that cannot be read."""
    try:
        return str(json.loads(path.read_text())["gpu"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        warnings.warn(f"ssmgen ignores {path}, which is not a table of tuned variants ({type(e).__name__}: {e})", stacklevel=2)
        return None


@functools.cache
def gpus(arch: Arch | None = None) -> tuple[str, ...]:
    """Names of the GPUs, of an architecture, that there are tables for."""
    own = config.cache_dir()
    places = [place for place in (SHIPPED, own and own / "tuned") if place and place.is_dir()]
    found = dict.fromkeys(gpu for place in places for file in sorted(place.glob("*.json")) if (gpu := _gpu_of(file)))
    return tuple(gpu for gpu in found if arch is None or any(Arch.parse(row.arch).number == arch.number for row in rows_of(gpu).values()))


@functools.cache
def _by_problem(gpu: str) -> dict[tuple[str, str, bool], list[Row]]:
    found: dict[tuple[str, str, bool], list[Row]] = {}
    for row in rows_of(gpu).values():
        found.setdefault((row.operator, row.problem, row.pdl), []).append(row)
    return found


def forget() -> None:
    """Tables are read once in a process; after this, again."""
    gpus.cache_clear()
    _by_problem.cache_clear()


def find(operator: str, problem: Any, size: int, arch: Arch, pdl: bool, gpu: str) -> Iterator[Found]:
    """The rows that might serve a problem, the nearest size first; those beyond REACH are not among them."""
    rows = _by_problem(gpu).get((operator, bucket(problem), pdl), [])
    apart = {row.size: abs(math.log(row.size / max(size, 1))) for row in rows}
    for row in sorted(rows, key=lambda r: (apart[r.size], r.size)):
        if apart[row.size] > math.log(REACH):
            return
        stale = staleness(row, arch)
        yield Found(row, row.size == size, None if stale else _spec_for(row, problem), stale)


def staleness(row: Row, arch: Arch | None = None) -> str:
    """Why a row is not believed on an architecture; empty if it is."""
    if arch is not None and Arch.parse(row.arch).number != arch.number:
        return f"it is of {row.arch}"
    try:
        code = code_digest(parse_spec(row.spec, FAMILIES), Arch.parse(row.arch))
    except SpecError as e:
        return f"its variant is no more: {e.problems[0]}"
    return "" if code == row.code else f"the variant's code has changed since {row.date}"


def alike(spec: KernelSpec) -> list[KernelSpec]:
    """The variant for each problem of its bucket that differs in its slot index: what a row of it may serve."""
    kinds = [field.name for field in fields(spec) if field.name == "index"]
    return [replace(spec, **dict.fromkeys(kinds, index)) for index in Index] if kinds else [spec]


def _spec_for(row: Row, problem: Any) -> KernelSpec:
    spec = parse_spec(row.spec, FAMILIES)
    return replace(spec, **{f.name: getattr(problem, f.name) for f in fields(problem)})
