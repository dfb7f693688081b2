"""Many specs -> cubins, in parallel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from . import registry
from .cache import Cache, Entry
from .errors import SpillError, SsmgenError
from .kernels import OPERATOR_OF
from .kernels.row_engine import RowProblem
from .models import models
from .spec import SM90, Arch, KernelSpec


@dataclass(frozen=True, slots=True)
class Built:
    """One variant's outcome: an entry or an error."""

    spec: KernelSpec
    arch: Arch
    entry: Entry | None
    hit: bool
    error: SsmgenError | None


def build(
    work: Sequence[tuple[KernelSpec, Arch]],
    cache: Cache,
    jobs: int | None = None,
    max_spill: int = 0,
    done: Callable[[Built], None] = lambda built: None,
) -> list[Built]:
    """Compiles what is missing; `done` sees each outcome as it comes. A variant that spills more than max_spill bytes is an error.

    Threads suffice: NVRTC releases the GIL.
    """

    def one(spec: KernelSpec, arch: Arch) -> Built:
        try:
            entry, hit = cache.get(spec, arch)
        except SsmgenError as e:
            return Built(spec, arch, None, False, e)
        r = entry.resources
        error = SpillError(str(spec), str(arch), r.spills, r.registers) if r.spills > max_spill else None
        return Built(spec, arch, entry, hit, error)

    results = []
    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        for future in as_completed([pool.submit(one, spec, arch) for spec, arch in dict.fromkeys(work)]):
            results.append(future.result())
            done(results[-1])
    order = {pair: i for i, pair in enumerate(dict.fromkeys(work))}
    return sorted(results, key=lambda b: order[b.spec, b.arch])


def specs_for(problems: Iterable[RowProblem], arch: Arch, pdl: Sequence[bool] = (True, False), max_batch: int = 1024) -> list[KernelSpec]:
    """Every variant that calls with these problems can be served by on an architecture. Raises UnsupportedError."""
    found: dict[KernelSpec, None] = {}
    for problem in problems:
        for wanted in pdl if arch >= SM90 else (False,):
            found.update(dict.fromkeys(registry.variants(OPERATOR_OF[type(problem)], problem, arch, wanted, max_batch)))
    return list(found)


def default_problems() -> list[tuple[str, RowProblem]]:
    """(model, problem) of every model, as `build --all` and the tests take them."""
    return [(model.name, problem) for model in models().values() for problem in model.problems()]
