"""The variants that serve models' calls, and the models that call a variant."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import ModelError
from ..spec.kernel import SM90, Arch, DType, KernelSpec, Narrow, Pdl, Problem, flat
from . import registry
from .catalog import OPERATOR_OF, OPERATORS
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
    said = flat(spec)
    own: dict[str, Any] = {"states": (said["state"],)} if isinstance(said.get("state"), (DType, Narrow)) else {}
    own |= {"io": said["x"]} if isinstance(said.get("x"), DType) else {}
    for tp in (1, 2, 4, 8):
        for model in models().values():
            with contextlib.suppress(ModelError):
                rank = model.divided(tp)
                for wanted in (Wanted(**own), *(Wanted(**own).of(caller) for caller in Client)):
                    alike = (p for p in rank.asked(wanted) if all(said.get(name, value) == value for name, value in flat(p).items()))
                    if any(spec in specs_for([p], arch, (said["pdl"] is not Pdl.OFF,)) for p in alike):
                        return _options(rank, wanted, tp, arch, said["pdl"] is not Pdl.OFF)
    return ""


def _options(model: Model, wanted: Wanted, tp: int, arch: Arch, pdl: bool) -> str:
    parts = [f"--model {model.name}", f"--tp {tp}" * (tp > 1), *(f"--state {s.value}" for s in wanted.states if s is not model.state)]
    parts += [f"--io {wanted.io.value}" * (wanted.io is not DType.BF16), f"--arch {arch}", "--no-pdl" * (not pdl and arch >= SM90)]
    parts.append(f"--caller {wanted.caller.value}" if wanted.caller else "")
    return " ".join(filter(None, parts))


def default_problems() -> list[tuple[str, Problem]]:
    """(model, problem) for each distinct problem, with the first model that has it."""
    return [(names[0], problem) for problem, names in problems_by_models().items()]
