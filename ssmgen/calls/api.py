"""The functions that take any operator: `warm`, `bind`, `explain`, `supported` and `is_warm`. Each builds the call that they ask about."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, SpecError
from ..launch import runtime
from ..select import registry
from ..select.catalog import OPERATOR_OF
from ..select.registry import Explanation
from ..spec.family import records
from ..spec.kernel import SM90, Arch, KernelSpec
from . import sharded
from .operator import Call, Operator
from .scalars import integer, shown

FUNCTIONS = tuple(family.part(place) for family in records() for place in family.functions.values())


def _checked(operator: Any) -> Operator:
    if not any(operator is f for f in FUNCTIONS):
        known = ", ".join(f"ssmgen.{f.__name__}" for f in FUNCTIONS)
        raise ArgumentError("ssmgen", [f"operator is {getattr(operator, '__name__', shown(operator))}; expected one of {known}"])
    found: Operator = operator
    return found


def _call(operator: Any, args: Any, kwargs: Any) -> Call:
    found = _checked(operator)
    if sharded.is_sharded((*args, *kwargs.values())):
        args, kwargs = (), sharded.local_arguments(found, found.names, *found.scalars.checked(args, kwargs))
    return found.build(*args, **kwargs)


def explain(operator: Callable[..., Any], *args: Any, arch: str | None = None, **kwargs: Any) -> Explanation:
    """Which variant serves a call, by which rule, and why each other does not; str() of it is readable.

    args, kwargs: the arguments of the call; only shapes, strides and addresses of the tensors are read. arch: such as "sm_90a", for tensors
    that are not on a GPU, or to ask about another architecture. Raises ArgumentError for a call with invalid arguments.
    """
    call = _call(operator, args, kwargs)
    problem, batch, device, pdl = call.problem()
    found = registry.explain(OPERATOR_OF[type(problem)], problem, batch, *_target(device, arch, pdl))
    if found.chosen:
        call.check_grid(found.chosen.spec)
    return found


def supported(operator: Callable[..., Any], *args: Any, arch: str | None = None, **kwargs: Any) -> tuple[bool, list[str]]:
    """(whether a call is served, the reasons why not): errors in its arguments, or limits of the kernels. Never raises."""
    try:
        reasons = explain(operator, *args, arch=arch, **kwargs).reasons
    except ArgumentError as e:
        reasons = e.problems
    except Exception as e:  # such as the TypeError that the call raises for an unknown keyword
        reasons = [f"{type(e).__name__}: {e}"]
    return not reasons, reasons


def _target(device: torch.device, arch: str | None, pdl: bool | None) -> tuple[Arch, bool, str | None]:
    """(architecture, whether to use programmatic dependent launch, the GPU if it is of that architecture)"""
    if arch is None and device.type != "cuda":
        raise ArgumentError(
            "ssmgen", [f"the tensors are on {device}, which has no CUDA architecture; expected arch. Pass one, for example arch='sm_90a'."]
        )
    target = runtime.device_arch(device.index) if arch is None else _arch(arch)
    here = device.type == "cuda" and target == runtime.device_arch(device.index)
    return target, target >= SM90 if pdl is None else pdl, runtime.device_name(device.index) if here else None


def _arch(name: str) -> Arch:
    try:
        return Arch.parse(name)
    except (SpecError, TypeError):
        raise ArgumentError("ssmgen", [f"arch is {shown(name)}; expected one such as sm_80, sm_90a, sm_100a or sm_120"]) from None


_SIZE = integer("", 0)


def _sizes(batches: Any) -> list[int]:
    """The further batch sizes as a list. Raises ArgumentError if `batches` is not an iterable of sizes."""
    sizes = list(batches) if isinstance(batches, Iterable) else [batches, None]
    if not all(map(_SIZE.holds, sizes)):
        raise ArgumentError("ssmgen", [f"batches is {shown(batches)}; expected batch sizes such as (1, 8, 64)"])
    return sizes


def _specs(operator: Callable[..., Any], batches: Iterable[int], args: Any, kwargs: Any) -> tuple[list[KernelSpec], int]:
    """(the variants that serve a call at its own and at the further batch sizes, device)"""
    batches = _sizes(batches)
    call = _call(operator, args, kwargs)
    problem, batch, device, pdl = call.problem()
    if device.type != "cuda":
        raise ArgumentError("ssmgen", [f"the tensors are on {device}; expected a CUDA device, where kernels are loaded"])
    sizes = [n for n in (batch, *batches) if n > 0]
    specs = [registry.select(OPERATOR_OF[type(problem)], problem, n, *_target(device, None, pdl)) for n in sizes]
    for spec in specs[: batch > 0]:
        call.check_grid(spec)
    return list(dict.fromkeys(part for spec in specs for part in spec.kernels)), device.index


def size_of(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """The size of a call in the operator's unit (`registry.unit`). The rules choose a variant by it."""
    size: int = _call(operator, args, kwargs).problem()[1]
    return size


def warm(operator: Callable[..., Any], *args: Any, batches: Iterable[int] = (), **kwargs: Any) -> int:
    """Compiles and loads the kernels of a call: `warming.warm` for one operator."""
    specs, device = _specs(operator, batches, args, kwargs)
    todo = [s for s in specs if not runtime.is_loaded(s, runtime.device_arch(device))]
    with ThreadPoolExecutor(max_workers=8) as pool:  # NVRTC releases the GIL
        list(pool.map(lambda s: runtime.load(s, device, operator.__name__), todo))
    return len(todo)


def is_warm(operator: Callable[..., Any], *args: Any, batches: Iterable[int] = (), **kwargs: Any) -> bool:
    """Whether all kernels of the call are loaded, at its own and at the further batch sizes."""
    specs, device = _specs(operator, batches, args, kwargs)
    return all(runtime.is_loaded(s, runtime.device_arch(device)) for s in specs)


class BoundCall:
    """A call with its tensors: `bound()` launches it again on the current stream and returns `out`.

    Keeps the tensors, and reads their addresses only once: do not resize them or change their storage.
    """

    __slots__ = ("_keep", "_plan", "out")

    def __init__(self, plan: Callable[[], None], out: Tensor, keep: Any):
        self._plan, self.out, self._keep = plan, out, keep

    def __call__(self) -> Tensor:
        self._plan()
        return self.out


def bind(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> BoundCall:
    """Checks, selects and loads once, for callers that decode into the same tensors repeatedly. Raises the errors of the call.

    For DTensors, bind the results of DTensor.to_local(): a bound call communicates nothing, and its result belongs to this rank.
    """
    _checked(operator)
    if sharded.is_sharded((*args, *kwargs.values())):
        raise ArgumentError(operator.__name__, ["an argument is a DTensor; expected this rank's tensors. Pass DTensor.to_local()."])
    call = _call(operator, args, kwargs)
    return BoundCall(call.plan(), call.result, call)
