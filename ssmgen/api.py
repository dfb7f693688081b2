"""What is common to all operators: preparing them, and binding a call to its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from . import runtime
from .errors import ArgumentError
from .ops import selective_state_update as _ssu

_MODULES = {_ssu.selective_state_update: _ssu}


def _module(operator: Callable[..., Any]) -> Any:
    try:
        return _MODULES[operator]
    except (KeyError, TypeError):
        known = ", ".join(f"ssmgen.{f.__name__}" for f in _MODULES)
        raise ArgumentError("ssmgen", [f"{operator!r} is not an operator of ssmgen; known: {known}"]) from None


def warm(operator: Callable[..., Any], *args: Any, batches: Iterable[int] = (), **kwargs: Any) -> int:
    """Compiles (in parallel) and loads what a call needs, without launching it, so that it can be captured in a CUDA graph.

    args, kwargs: those of the call; tensors are looked at, not read or written. batches: further batch sizes that the same call
    will be made with. Returns the number of kernels that were not loaded before.
    Raises what the call would raise.
    """
    specs, device = _module(operator).specs_for_call(list(batches), *args, **kwargs)
    arch = runtime.device_arch(device.index)
    todo = [s for s in specs if not runtime.is_loaded(s, arch)]
    with ThreadPoolExecutor(max_workers=8) as pool:  # NVRTC releases the GIL
        list(pool.map(lambda s: runtime.load(s, device.index, operator.__name__), todo))
    return len(todo)


def is_warm(operator: Callable[..., Any], *args: Any, batches: Iterable[int] = (), **kwargs: Any) -> bool:
    """Whether the call, at this and the further batch sizes, would compile and load nothing."""
    specs, device = _module(operator).specs_for_call(list(batches), *args, **kwargs)
    return all(runtime.is_loaded(s, runtime.device_arch(device.index)) for s in specs)


class BoundCall:
    """A call with its tensors: `bound()` launches it again on the current stream and returns `out`.

    Holds the tensors, and reads where they lie only once: do not resize them or change their storage.
    """

    __slots__ = ("_keep", "_plan", "out")

    def __init__(self, plan: Callable[[], None], out: Tensor, keep: Any):
        self._plan, self.out, self._keep = plan, out, keep

    def __call__(self) -> Tensor:
        self._plan()
        return self.out


def bind(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> BoundCall:
    """Checks, selects and loads once, for callers that decode into the same tensors again and again. Raises what the call would."""
    plan, out = _module(operator).plan_call(*args, **kwargs)
    return BoundCall(plan, out, (args, kwargs))
