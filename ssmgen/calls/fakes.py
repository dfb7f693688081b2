"""Calls on fake tensors, which have sizes but no memory: what torch.compile, torch.export and FakeTensorMode ask about a call.

Their sizes may be symbols. The checks look at the sizes that the traced call has, on tensors of their own: no symbol is compared, so a
compiled function has no guard from here and is compiled once for all its sizes. Others than the traced ones are checked when they come.
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
    """What is given, with tensors for the checks in place of all tensors; None where nobody knows a size, which follows from what a tensor
    will hold. Of a device that this machine lacks, which nothing can be asked about, all are on meta: the machine that has it will see."""
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
    """Others are refused for that, whatever their sizes."""
    return isinstance(t, Tensor) and t.layout is torch.strided


def _size(n: int | torch.SymInt) -> int | None:
    return n if isinstance(n, int) else getattr(n.node, "hint", None)


def as_tracers_take_it(error: errors.ArgumentError) -> errors.ArgumentError:
    """The error, such that dynamo does not wrap it: to dynamo it is a reason to leave the graph and make the call, which raises it; with
    fullgraph=True it is raised as it is."""
    return error if TracingContext.try_get() is None else _dynamos()(error)


@functools.cache
def _dynamos() -> Callable[[errors.ArgumentError], errors.ArgumentError]:
    from torch._dynamo.exc import Unsupported  # importing it takes a second, which whoever traces has spent

    class ArgumentError(errors.ArgumentError, Unsupported):
        __module__, __qualname__ = errors.ArgumentError.__module__, errors.ArgumentError.__qualname__

        def __init__(self, error: errors.ArgumentError):
            Unsupported.__init__(self, str(error))
            self.problems = error.problems

        def __reduce__(self) -> tuple[Any, ...]:
            again, (_, args, _) = super().__reduce__()
            return again, (errors.ArgumentError, args, {"problems": self.problems})

    return ArgumentError


# What dynamo traces in place of `raise`, which it cannot trace: like the operators, this raises while it is traced, and when it runs.
_library = torch.library.Library("ssmgen", "FRAGMENT")
_library.define("refuse(str operator, str[] problems) -> ()")


@torch.library.impl(_library, "refuse", "CompositeExplicitAutograd")
def _refuse(operator: str, problems: Sequence[str]) -> None:
    raise errors.ArgumentError(operator, problems)


@torch.library.register_fake("ssmgen::refuse", lib=_library)
def _refuse_fake(operator: str, problems: Sequence[str]) -> None:
    raise as_tracers_take_it(errors.ArgumentError(operator, problems))
