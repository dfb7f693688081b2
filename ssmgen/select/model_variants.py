"""The variants that serve models' calls, and the models that call a variant."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import ModelError, UnsupportedError
from ..spec.kernel import SM90, Arch, DType, KernelSpec, Narrow, Pdl, Problem, entries, flat
from . import registry, tuned
from .catalog import LAUNCHED_BY, OPERATOR_OF, OPERATORS
from .models import Client, Model, Wanted, models


def specs_for(
    problems: Iterable[Problem],
    arch: Arch,
    pdl: Sequence[bool] = (True, False),
    max_batch: int = 1024,
    gpus: Sequence[str | None] = (None,),
) -> list[KernelSpec]:
    """Every variant that can serve calls with these problems on an architecture. Raises UnsupportedError.

    gpus: names of GPUs whose tuned rows are included; None for the rules alone.
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
    """Every model's problems, as `build --all --replay 6` and the tests build them, with the names of the models that have them.

    states: dtypes of recurrent states; by default each model's own.
    """
    found: dict[Problem, list[str]] = {}
    for model in models().values():
        for problem in model.asked(Wanted(states=states, replay=6)):
            found.setdefault(problem, []).append(model.name)
    return found


@functools.lru_cache(maxsize=256)  # engines without a kernel ask at every call
def options_for(spec: KernelSpec, arch: Arch) -> str:
    """Options of `ssmgen build` that build a variant among all variants of a known model's calls; empty if no known model calls it."""
    said, pdl, parts = flat(spec), spec.pdl is not Pdl.OFF, LAUNCHED_BY.get(type(spec), {})  # tools are in no call
    states = (said["state"],) if isinstance(said.get("state"), (DType, Narrow)) else ()
    io = said["x"] if isinstance(said.get("x"), DType) else DType.BF16
    for problem, (rank, tp, wanted) in _posed(states, io).items():
        if type(problem) in parts and _agrees(said, problem, parts[type(problem)]) and _launches(problem, spec, arch, pdl):
            return _options(rank, wanted, tp, arch, pdl)
    return ""


@functools.lru_cache(maxsize=8)
def _posed(states: tuple[Any, ...], io: DType) -> dict[Problem, tuple[Model, int, Wanted]]:
    """Every problem that a known model's calls pose, with its first poser: a rank's share of the model, the number of ranks, the calls."""
    found: dict[Problem, tuple[Model, int, Wanted]] = {}
    own = Wanted(states=states, io=io)
    for tp in (1, 2, 4, 8):
        for model in models().values():
            with contextlib.suppress(ModelError):
                rank = model.divided(tp)
                for wanted in (own, *map(own.of, Client)):
                    for problem in rank.asked(wanted):
                        found.setdefault(problem, (rank, tp, wanted))
    return found


def _agrees(said: Mapping[str, Any], problem: Problem, part: str) -> bool:
    """Whether a spec's fields have the values of a problem, and of the part of it that the spec computes, where both have a field."""
    own = ((entry.field.name if part and entry.part == part else name, entry) for name, entry in entries(type(problem)).items())
    return all(name not in said or said[name] == entry.of(problem) for name, entry in own)


def _launches(problem: Problem, spec: KernelSpec, arch: Arch, pdl: bool) -> bool:
    """Whether calls with a problem may launch a variant, by a rule or as a measured one. Listing all variants takes milliseconds."""
    with contextlib.suppress(UnsupportedError):
        return spec in specs_for([problem], arch, (pdl,), gpus=(None, *tuned.gpus(arch)))
    return False


def _options(model: Model, wanted: Wanted, tp: int, arch: Arch, pdl: bool) -> str:
    parts = [f"--model {model.name}", f"--tp {tp}" * (tp > 1), *(f"--state {s.value}" for s in wanted.states if s is not model.state)]
    parts += [f"--io {wanted.io.value}" * (wanted.io is not DType.BF16), f"--arch {arch}", "--no-pdl" * (not pdl and arch >= SM90)]
    parts.append(f"--caller {wanted.caller.value}" if wanted.caller else "")
    return " ".join(filter(None, parts))
