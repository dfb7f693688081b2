"""`ssmgen bench models`: every model's decode step and prompt, and the same on every peer that can be imported.

The operators' benchmarks (`Bench`) make the cases, in the shapes that their `of_model` gives. Models of one shape share a row. `faults_of`
checks a file of results, `losses` names the cases at which a peer is faster, and `models_page.py` shows the results.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from ..cache.store import shared_cache
from ..calls import api
from ..calls.operator import call_of
from ..errors import SsmgenError
from ..launch import runtime
from ..select import registry
from ..select.catalog import OPERATOR_OF
from ..select.models import Model, Role, asks, find_model, models
from ..spec.kernel import SM90, Arch
from . import autotuners, bench_of, timing
from . import report as reports
from .axes import At
from .case import Case
from .engine import Bench, peers_of
from .progress import PRINTING, Watch
from .schema import HEAD, NAME, RATIO, TEXT, TIME, by_name, list_of, object_of

ROUNDS = 3
LEAST = 12  # launches of a graph
JOBS = 8  # kernels that are compiled at once
TOKENS = 4096  # of a prompt, and of all packed sequences


class Column(NamedTuple):
    """A case that every model has; prompts, if an operator scans them."""

    name: str
    words: str
    batch: int = 0  # sequences of a decode step; 0: a prompt
    sequences: int = 1  # of a prompt of TOKENS


COLUMNS = {
    column.name: column
    for column in (
        Column("step_1", "decode step, batch 1", batch=1),
        Column("step_64", "decode step, batch 64", batch=64),
        Column("prompt", f"prompt of {TOKENS} tokens"),
        Column("packed", f"16 packed prompts of {TOKENS // 16}", sequences=16),
    )
}


@dataclass
class Cell:
    """A column of all models that have one shape: one measurement."""

    column: Column
    op: str
    at: At
    names: list[str] = field(default_factory=list)

    @property
    def bench(self) -> Bench:
        return bench_of(self.op)

    @property
    def words(self) -> str:
        return f"{', '.join(self.names)}: {self.column.words}"


def options_of(model: Model, column: Column) -> tuple[str, dict[str, Any]] | None:
    """(operator, options of its benchmark) of a model's column; None for prompts of a model whose prompts no operator scans."""
    if column.batch:
        return model.function, {**_own(model.function, model), "batches": (column.batch,)}
    op = next((op for op, ask in asks().items() if ask.role is Role.SCAN and ask.used_by(model)), None)
    if op is None:
        return None
    own = _own(op, model)
    (*heads, _, _) = own["shapes"][0]  # sequences and their tokens are last in every benchmark of prompts
    shape = (*heads, column.sequences, TOKENS // column.sequences)
    return op, {**own, "shapes": (shape,), "packed": column.sequences > 1}


def _own(op: str, model: Model) -> Mapping[str, Any]:
    found = bench_of(op).of_model(model, 1, True)
    assert found is not None, f"the benchmark of {op} has no options for {model.name}"
    return found


def cells(names: Sequence[str] = (), columns: Sequence[str] = ()) -> list[Cell]:
    """The measurements, column by column, of these models and columns; all, if none is named. Raises ModelError for an unknown model."""
    found: dict[str, Cell] = {}
    chosen = list(dict.fromkeys(find_model(name).name for name in names)) or list(models())
    for column, name in itertools.product([COLUMNS[name] for name in columns] or COLUMNS.values(), chosen):
        model = models()[name]
        case = options_of(model, column)
        if case is None:
            continue
        op, options = case
        alike = str(replace(model, name="", hidden=None, source="", verified=True))
        cell = found.setdefault(f"{column.name} {alike}", Cell(column, op, bench_of(op).points(**options)[0]))
        cell.names.append(name)
    return list(found.values())


def run(
    names: Sequence[str] = (), *, columns: Sequence[str] = (), rounds: int = ROUNDS, peers: bool = True, watch: Watch = PRINTING,
    device: torch.device | str = "cuda", ahead: AbstractContextManager[None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The whole report, as JSON would hold it. A cell that fails is one of `failed`, with the reason. Raises SsmgenError without a GPU.

    A KeyboardInterrupt ends the run: `failed` then also has the cells that were not reached.
    ahead: entered while our kernels are compiled (`peers_ahead.compiling`).
    """
    report, work = reports.begin(" ".join(str(__doc__).split())), cells(names, columns)
    began = time.perf_counter()
    versions: dict[str, str] = {}
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")  # later runs find the choices of the peers' autotuners
    with ahead or contextlib.nullcontext():
        _compile(work, device)
    report["seconds"] = {"compiling": time.perf_counter() - began}
    watch.begins("models", len(work))
    for i, cell in enumerate(work):
        watch.case(cell.words)
        try:
            row = _named(cell) | measured(cell, torch.device(device), rounds, peers)
        except (SsmgenError, torch.OutOfMemoryError) as e:
            report["failed"].append({**_named(cell), "error": str(e)})
            watch.ends(f"{cell.words}: FAILED: {e}")
        except KeyboardInterrupt:
            report["failed"] += [{**_named(rest), "error": reports.NOT_REACHED} for rest in work[i:]]
            break
        else:
            report["rows"].append(row)
            versions |= {peer: version_of(peer) for peer in row["peers"]}
            said = [f"{row['us'] / us:.2f} x {peer}" for peer, us in row["peers"].items()]
            watch.ends(", ".join([f"{cell.words}: {row['us']:.1f} us", *said]))
        torch.cuda.empty_cache()
    report["peers"] = versions
    report["seconds"]["all"] = time.perf_counter() - began
    return report


def _named(cell: Cell) -> dict[str, Any]:
    return {"models": cell.names, "column": cell.column.name, "op": cell.op}


@torch.no_grad()
@autotuners.shorter()
def measured(cell: Cell, device: torch.device, rounds: int, peers: bool) -> dict[str, Any]:
    """Microseconds of a cell's launch, of a copy of the same size, and of each peer. Raises SsmgenError where a result is wrong."""
    case = cell.bench.made(cell.at, device)
    case.gate(pdl=None)
    contenders = {"ssmgen": case.bound(pdl=None)} | _copies(case)
    found = peers_of(case, cell.bench.peers) if peers else {}
    us = timing.device_us(contenders | found, case.sets, rounds, captures=1, least=LEAST)
    arch = runtime.device_arch(case.device.index)
    chosen = api.explain(case.function, **case.arguments(0), arch=str(arch)).chosen
    copies = [us[name] for name in ("copy", "copy_pdl", "mul") if name in us]
    row: dict[str, Any] = {"us": us["ssmgen"], "copy_us": min(copies, default=None), "case": cell.bench.words(_fields(cell))}
    row |= {"peers": {name.partition(".")[0]: us[name] for name in found}, "sm_mhz": timing.sm_mhz()}
    return row | ({} if chosen is None else {"spec": str(chosen.spec), "rule": chosen.rule})


def _copies(case: Case) -> dict[str, timing.Launch]:
    """A copy of the same size, or a multiplication."""
    if case.copied:
        return reports.slot_copies(*case.copied, (False,))
    return {name: case.beside[name] for name in ("mul",) if name in case.beside}


def _fields(cell: Cell) -> dict[str, Any]:
    return {**cell.bench.named(cell.at), **{axis.name: getattr(cell.at, axis.name) for axis in cell.bench.axes if axis.head}}


def _compile(work: Sequence[Cell], device: torch.device | str) -> None:
    """Compiles the kernels of all cells, several at once. An error here comes again where the cell is timed."""
    index = torch.device(device).index or 0
    arch, gpu = runtime.device_arch(index), runtime.device_name(index) if torch.cuda.is_available() else None
    specs = dict.fromkeys(spec for cell in work for spec in variants_of(cell, arch, gpu))
    with ThreadPoolExecutor(max_workers=JOBS) as pool:  # NVRTC releases the GIL
        for job in [pool.submit(shared_cache().get, spec, arch) for spec in specs]:
            with contextlib.suppress(SsmgenError):
                job.result()


def variants_of(cell: Cell, arch: Arch, gpu: str | None) -> list[Any]:
    """The kernels of a cell's call, on tensors without memory; none where no kernel serves it."""
    case = cell.bench.made(cell.at, "meta")
    with contextlib.suppress(SsmgenError):
        problem, size, *_ = call_of(case.function, **case.arguments(0)).problem()
        return list(registry.select(OPERATOR_OF[type(problem)], problem, size, arch, arch >= SM90, gpu).kernels)
    return []


@cache
def version_of(module: str) -> str:
    """The version of an imported package; empty if its metadata are missing."""
    for name in importlib.metadata.packages_distributions().get(module, ()):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


# The schema of a file.

_NAMED = {"models": list_of(NAME), "column": NAME, "op": NAME}
_ROW = {**_NAMED, "case": TEXT, "us": TIME, "peers": by_name(TIME), "spec?": TEXT, "rule?": TEXT}
_REPORT = object_of(
    {
        **HEAD,
        "peers": by_name(TEXT),
        "seconds": by_name(RATIO),
        "rows": list_of(object_of(_ROW)),
        "failed": list_of(object_of({**_NAMED, "error": TEXT})),
    }
)


def faults_of(value: Any) -> Iterator[str]:
    """Every fault of a file's value."""
    yield from _REPORT.faults("", value) if isinstance(value, dict) else ["it is not an object"]
    if isinstance(value, dict) and isinstance(value.get("rows"), list):
        columns = [row.get("column") for row in value["rows"] if isinstance(row, dict)]
        yield from (f"column {json.dumps(name)} does not exist" for name in dict.fromkeys(columns) if name not in COLUMNS)


class Result(NamedTuple):
    """One model's time in one column. `ratio` is our time over the fastest peer's; None without a peer."""

    model: str
    column: str
    us: float
    copy_us: float | None
    peers: Mapping[str, float]

    @property
    def fastest(self) -> str | None:
        return min(self.peers, key=self.peers.__getitem__, default=None)

    @property
    def ratio(self) -> float | None:
        return None if self.fastest is None else self.us / self.peers[self.fastest]

    @property
    def words(self) -> str:
        """The comparison with the fastest peer."""
        if self.fastest is None or self.ratio is None:
            return f"{self.model}, {COLUMNS[self.column].words}: {self.us:.1f} us"
        theirs = f"{self.fastest} {self.peers[self.fastest]:.1f} us"
        return f"{self.model}, {COLUMNS[self.column].words}: {self.us:.1f} us, {theirs}, ratio {self.ratio:.2f}"


def results_of(report: Mapping[str, Any]) -> dict[str, dict[str, Result]]:
    """{model: {column: its result}}, the model with the worst ratio first, and models without a peer last."""
    found: dict[str, dict[str, Result]] = {}
    for row in report["rows"]:
        for name in row["models"]:
            cell = Result(name, row["column"], row["us"], row.get("copy_us"), row["peers"])
            found.setdefault(name, {})[row["column"]] = cell
    return dict(sorted(found.items(), key=lambda item: -(worst_of(item[1].values()) or 0)))


def worst_of(results: Any) -> float | None:
    """The worst ratio of some results, None where there is none."""
    return max((result.ratio for result in results if result.ratio is not None), default=None)


def losses(report: Mapping[str, Any]) -> list[str]:
    """Every result at which a peer is faster, in words, the worst first."""
    found = [result for columns in results_of(report).values() for result in columns.values()]
    lost = [result for result in found if result.ratio is not None and result.ratio > 1]
    return [result.words for result in sorted(lost, key=lambda result: -(result.ratio or 0))]


def stitched(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One report of several runs, each of some models. Raises ValueError if they are of different machines."""
    first, *_ = parts
    for name in ("device", "torch", "compiler"):
        if len(found := dict.fromkeys(part[name] for part in parts)) > 1:
            raise ValueError(f"these results have more than one {name}: {', '.join(found)}")
    seconds = {name: sum(part["seconds"].get(name, 0.0) for part in parts) for name in first["seconds"]}
    return {
        **first,
        "peers": {peer: version for part in parts for peer, version in part["peers"].items()},
        "seconds": seconds,
        **{name: [entry for part in parts for entry in part[name]] for name in ("rows", "failed")},
    }


def missing(report: Mapping[str, Any]) -> list[str]:
    """Models and columns without a result, in words."""
    found = results_of(report)
    return [f"{name}, {column.words}" for name in models() for column in COLUMNS.values() if column.name not in found.get(name, {})]
