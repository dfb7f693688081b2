"""Which projection's weight comes behind a norm, so that the norm's kernel can ask L2 for it while memory has little to do.

PREFETCHES switches it on, for decode steps of Mamba-2 layers: no result changes. It is off, as it has not been measured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor
from torch.compiler import is_compiling

PREFETCHES = False


class Given(threading.local):
    """What a norm gave last in this thread, and which."""

    result: Callable[[], Tensor | None] = staticmethod(lambda: None)
    norm: Any = None


_given = Given()
_behind: WeakKeyDictionary[Any, Callable[[], Tensor | None]] = WeakKeyDictionary()  # the weight behind each norm


def gave(norm: Any, result: Tensor) -> Tensor:
    """The norm's result."""
    if PREFETCHES:
        _given.result, _given.norm = ref(result), ref(norm)
    return result


def reads(projection: Any, hidden_states: Tensor) -> None:
    """Learns that a projection is called with this: with what a norm gave last, or with something else."""
    if PREFETCHES and not is_compiling() and _given.result() is hidden_states and (norm := _given.norm()) is not None:
        weight = weight_of(projection, hidden_states)
        if weight is not None:
            _behind[norm] = ref(weight)


def weight_of(projection: Any, beside: Tensor) -> Tensor | None:
    """The weight of a projection, if it can be asked for: one tensor, without gaps, on the other's device."""
    weight = getattr(projection, "weight", None)
    found = PREFETCHES and isinstance(weight, Tensor) and weight.is_contiguous() and weight.device == beside.device
    return weight if found else None


def behind(norm: Any, x: Tensor) -> dict[str, Tensor]:
    """What rms_norm is told of it, of tokens that are alone in their sequences: a prompt leaves memory no time."""
    if not PREFETCHES or (x.dim() > 2 and x.shape[-2] != 1):
        return {}
    weight = _behind.get(norm, lambda: None)()
    return {} if weight is None or weight.device != x.device else {"prefetch": weight}
