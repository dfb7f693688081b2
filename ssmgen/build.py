"""Many specs -> cubins, in parallel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from . import registry
from .cache import Cache, Entry
from .errors import SpillError, SsmgenError
from .kernels import OPERATOR_OF, OPERATORS
from .models import models
from .spec import SM90, Arch, DType, KernelSpec, Problem


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


def specs_for(
    problems: Iterable[Problem],
    arch: Arch,
    pdl: Sequence[bool] = (True, False),
    max_batch: int = 1024,
    gpus: Sequence[str | None] = (None,),
) -> list[KernelSpec]:
    """Every variant that calls with these problems can be served by on an architecture. Raises UnsupportedError.

    gpus: names of those whose tuned rows are to be served, too; None for the rules alone.
    """
    found: dict[KernelSpec, None] = {}
    for problem in problems:
        for wanted in pdl if arch >= SM90 else (False,):
            operator = OPERATOR_OF[type(problem)]
            largest = getattr(OPERATORS[operator], "MAX_SIZE", max_batch)
            specs = [s for gpu in gpus for s in registry.variants(operator, problem, arch, wanted, largest, gpu)]
            found.update(dict.fromkeys(part for spec in specs for part in spec.kernels))
    return list(found)


def problems_by_models(states: tuple[DType, ...] = ()) -> dict[Problem, list[str]]:
    """Every model's problems, as `build --all --replay 6` and the tests take them, with the names of the models that pose them.

    states: of recurrent states; each model's own if none is given.
    """
    found: dict[Problem, list[str]] = {}
    for model in models().values():
        for problem in (*model.problems(states), *model.convolutions(), *model.replays(states), *model.norms(), *model.layers(states)):
            found.setdefault(problem, []).append(model.name)
    return found


def default_problems() -> list[tuple[str, Problem]]:
    """(model, problem) of every model; of those with the same problem, the first."""
    return [(names[0], problem) for problem, names in problems_by_models().items()]
