"""Checks the kinds and axes of drop-in functions' arguments. ssmgen's own functions check dtypes and shapes; until then the drop-ins only
make views, and have written nothing."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import wraps
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...calls.checks import aligned, oddity, overlaps_itself
from ...calls.planning import is_memory
from ...errors import ArgumentError
from . import invariance

P = ParamSpec("P")  # type checkers read no assignment of both P and R
R = TypeVar("R")
# By word of an annotation: the type that it allows, and its name in a message. Parameters with other words, or with choices named by
# strings, are checked by the function itself.
_KINDS: Mapping[str, type] = {"Tensor": Tensor, "bool": bool, "int": Integral, "float": Real, "None": type(None)}
_CALLED = {"Tensor": "a tensor", "bool": "True or False", "int": "an integer", "float": "a number", "None": "None"}


def one(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The result of a call that asks for no more than the output."""
    assert isinstance(result, Tensor)
    return result


def two(result: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The results of a call that asks for two."""
    assert isinstance(result, tuple)
    return result


WORD = 4  # bytes: the least that kernels of prompts copy at once
VECTOR = 16  # bytes: where all rows begin at multiples of it, a call may get another form of the kernel, of other bits


@overload
def rows_of(t: Tensor) -> Tensor: ...
@overload
def rows_of(t: Tensor | None) -> Tensor | None: ...
def rows_of(t: Tensor | None) -> Tensor | None:
    """The operand, or a dense copy if its rows are not contiguous or do not begin at multiples of 4 bytes; in an engine's batch-invariant
    mode, of 16 bytes, so that the form of the kernel follows from the widths alone.

    A 16-bit row may begin at an odd element. A traced call copies only rows that are not contiguous: tracers know no addresses.
    """
    if t is None or not t.dim():
        return t
    if t.stride(-1) != 1:
        return t.contiguous()
    return t if _on_words(t) else t.clone(memory_format=torch.contiguous_format)


def written_rows(out: Tensor) -> Tensor:
    """The tensor that a kernel writes: `out`, or a new one to be copied there if rows of `out` begin at odd elements.

    It is `out` too if rows are not contiguous or elements share memory: the call's own checks refuse those.
    """
    if not out.dim() or out.stride(-1) != 1 or _on_words(out) or overlaps_itself(out):
        return out
    return torch.empty_like(out, memory_format=torch.contiguous_format)


def _on_words(t: Tensor) -> bool:
    """Whether contiguous rows begin at multiples of 4 bytes, or of 16 in a batch-invariant mode; True while a tracer runs."""
    if not is_compiling() and invariance.on():
        return not is_memory(type(t)) or aligned(t, t.data_ptr(), VECTOR // t.element_size())
    if is_compiling() or t.element_size() != WORD // 2:
        return True
    start = t.data_ptr() if is_memory(type(t)) else WORD // 2 * int(t.storage_offset())
    # An axis of one may have any distance: the second look, which costs the host 2 us, leaves it out.
    return (start % WORD == 0 and not any(step % 2 for step in t.stride()[:-1])) or aligned(t, start, 2)


def takes(flags: str = "", **shapes: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function check that its arguments have the kinds of its annotations, and that each operand named here has the number of
    axes of one of its shapes, such as "[batch, dim] or [batch, dim, T]".

    flags: names of the arguments that the function branches on. They are checked before the call, because Python accepts any value there

    Raises one ArgumentError that lists all faults. All other arguments are checked only after the function fails, and that error then
    replaces the function's own: a check before each call costs the host 2 us and more.
    """

    def checked(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        decided = [(list(parameters).index(name), name, parameters[name].default) for name in flags.split()]

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            given = len(args)
            for place, name, default in decided:
                flag = args[place] if place < given else kwargs.get(name, default)
                if flag is not True and flag is not False and flag is not default:
                    _check(function, shapes, args, kwargs)
            try:
                return function(*args, **kwargs)
            except Exception:
                _check(function, shapes, args, kwargs)
                raise

        return call

    return checked


def _check(function: Callable[..., Any], shapes: Mapping[str, str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises ArgumentError for arguments of the wrong kind or with the wrong number of axes."""
    signature = inspect.signature(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:  # no such parameter, or one too few: the call itself says so
        return
    problems: list[str] = []
    for name, value in given.items():
        words = str(signature.parameters[name].annotation).split(" | ")
        if not set(words) <= _KINDS.keys():
            continue
        if not isinstance(value, tuple(_KINDS[word] for word in words)) or (isinstance(value, bool) and "bool" not in words):
            found = "None" if value is None else f"a {type(value).__name__}"
            problems.append(f"{name} is {found}; expected {' or '.join(_CALLED[word] for word in words)}")
        elif isinstance(value, Tensor):
            axes = {shape.count(",") + 1 for shape in re.findall(r"\[.*?\]", shapes.get(name, ""))}
            if (odd := oddity(value)) is not None:
                problems.append(f"{name} is {odd}")
            elif axes and value.dim() not in axes:
                problems.append(f"{name} is {list(value.shape)}; expected {shapes[name]}")
    if problems:
        package = function.__module__.partition(".compat.")[2].partition(".")[0]
        raise ArgumentError(f"{package}'s {function.__name__}", problems) from None
