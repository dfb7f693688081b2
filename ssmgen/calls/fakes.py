"""Calls on fake tensors, which have sizes but no memory: torch.compile, torch.export and FakeTensorMode make such calls.

Sizes may be symbols. The checks run on tensors with the sizes of the traced call and compare no symbol. This adds no guards to a compiled
function, and one compilation serves all sizes. Other sizes are checked when the call runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode

from .. import errors


@contextmanager
def of_plain_sizes(given: Sequence[Any]) -> Iterator[tuple[Any, ...] | None]:
    """The given values, with a tensor of plain sizes for each tensor; None if a size is unknown because it depends on a tensor's content.

    If this machine lacks the tensors' device, which then cannot be queried, all tensors are on meta: the machine that has the device checks
    it.
    """
    asked = {id(t): [_size(n) for n in (*t.shape, *t.stride())] for t in given if _is_strided(t)}
    sizes = {key: [n for n in found if n is not None] for key, found in asked.items()}
    elsewhere = any(isinstance(t, Tensor) and t.is_cuda for t in given) and not torch.cuda.is_available()

    def stand_in(t: Any) -> Any:
        if id(t) not in sizes:
            return t
        known, axes = sizes[id(t)], t.dim()
        device = "meta" if elsewhere else t.device
        return torch.empty_strided(known[:axes], known[axes:], dtype=t.dtype, device=device, requires_grad=t.requires_grad)

    with FakeTensorMode():
        yield None if any(None in found for found in asked.values()) else tuple(map(stand_in, given))


def _is_strided(t: Any) -> bool:
    """Whether it is a strided tensor. Other layouts are refused whatever their sizes."""
    return isinstance(t, Tensor) and t.layout is torch.strided


def _size(n: int | torch.SymInt) -> int | None:
    return n if isinstance(n, int) else getattr(n.node, "hint", None)


def as_tracers_take_it(error: errors.ArgumentError) -> errors.ArgumentError:
    """The error in a form that Dynamo does not wrap. Dynamo then breaks the graph and makes the call, which raises the error. With
    fullgraph=True Dynamo raises it unchanged."""
    return error if TracingContext.try_get() is None else _dynamos()(error)


@functools.cache
def _dynamos() -> Callable[[errors.ArgumentError], errors.ArgumentError]:
    from torch._dynamo.exc import Unsupported  # importing it takes a second, which tracing has already spent

    class ArgumentError(errors.ArgumentError, Unsupported):
        __module__, __qualname__ = errors.ArgumentError.__module__, errors.ArgumentError.__qualname__

        def __init__(self, error: errors.ArgumentError):
            Unsupported.__init__(self, str(error))
            self.problems = error.problems

        def __reduce__(self) -> tuple[Any, ...]:
            again, (_, args, _) = super().__reduce__()
            return again, (errors.ArgumentError, args, {"problems": self.problems})

    return ArgumentError


# Dynamo cannot trace `raise`; it traces this operator instead, which raises both while it is traced and when it runs.
_library = torch.library.Library("ssmgen", "FRAGMENT")
_library.define("refuse(str operator, str[] problems) -> ()")


@torch.library.impl(_library, "refuse", "CompositeExplicitAutograd")
def _refuse(operator: str, problems: Sequence[str]) -> None:
    raise errors.ArgumentError(operator, problems)


@torch.library.register_fake("ssmgen::refuse", lib=_library)
def _refuse_fake(operator: str, problems: Sequence[str]) -> None:
    raise as_tracers_take_it(errors.ArgumentError(operator, problems))
