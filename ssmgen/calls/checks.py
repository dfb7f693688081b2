"""Checks of tensors that all operators share. Each check adds sentences to a list, so that one error can report them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..errors import ArgumentError
from ..launch import runtime
from ..spec.kernel import SM90, DType, Index, Loads, Narrow
from ..spec.operands import Table, Types

DTYPES = {torch.float32: DType.F32, torch.float16: DType.F16, torch.bfloat16: DType.BF16}
# Types of states whose rows have scales.
NARROW: dict[torch.dtype, Narrow] = {torch.int16: Narrow.I16, torch.int8: Narrow.I8, torch.float8_e4m3fn: Narrow.E4M3}
STATES: dict[torch.dtype, DType | Narrow] = {**DTYPES, **NARROW}
INDEX = {None: Index.NONE, torch.int32: Index.I32, torch.int64: Index.I64}
Shapes = Mapping[str, tuple[int, ...]]  # of a tensor: words such as "[batch, dim]" -> the sizes that they stand for
TORCH_DTYPES = {ours: theirs for theirs, ours in DTYPES.items()}
STORED_DTYPES: dict[DType | Narrow, torch.dtype] = {ours: theirs for theirs, ours in STATES.items()}


def dtypes_of(views: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Any]:
    """The dtypes of these operands as fields of a problem. Absent operands are left out."""
    return {name: DTYPES[views[name].dtype] for name in names if name in views}


def index_of(views: Mapping[str, Tensor], name: str) -> Index:
    """The type of an index as a field of a problem."""
    return INDEX[views[name].dtype if name in views else None]


def describe(t: Tensor) -> str:
    return f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}"


def oddity(t: Tensor) -> str | None:
    """Why address, shape and strides do not describe a tensor's elements, in words; None if they do."""
    if t.is_nested:  # first: it has no sizes
        return "nested; expected a strided tensor. Pass rows of equal length, or packed rows."
    if t.layout is not torch.strided:
        return f"of layout {str(t.layout).removeprefix('torch.')}; expected strided. Pass its to_dense()."
    if t.is_quantized:
        return f"quantised, {str(t.dtype).removeprefix('torch.')}; expected plain elements. Pass its dequantize()."
    if t.is_neg() or t.is_conj():
        return "a lazy view (negated or conjugated); expected its elements in memory. Pass its resolve_neg().resolve_conj()."
    return None


def check_tensors(tensors: Mapping[str, object], problems: list[str]) -> bool:
    """Whether all of them are tensors with elements in memory. The other checks need that."""
    before = len(problems)
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            problems.append(f"{name} is a {type(t).__name__}; expected a tensor")
        elif not is_compiling() and (odd := oddity(t)) is not None:  # tracers know shapes and dtypes only
            problems.append(f"{name} is {odd}")
    return len(problems) == before


def in_memory(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function of tensors so that it is called only if all elements are in memory. Other tensors have no sizes or strides to read.

    Raises ArgumentError that names every such tensor. Arguments that are not tensors are left to the function's own checks.
    """
    names = tuple(signature(build).parameters)

    @wraps(build)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not is_compiling():  # where tensors are stand-ins, and are returned as they are
            problems = [f"{name} is {odd}" for name, t in _tensors(names, args, kwargs) if (odd := oddity(t)) is not None]
            if problems:
                raise ArgumentError(build.__name__, problems)
        return build(*args, **kwargs)

    return checked


def _tensors(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a call by name, including tensors in rings and pairs."""
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (tuple, list)):
            fields = getattr(value, "_fields", range(len(value)))
            yield from ((f"{name}.{field}", t) for field, t in zip(fields, value, strict=True) if isinstance(t, Tensor))


def check_shape(name: str, t: Tensor, allowed: Shapes, problems: list[str]) -> bool:
    """`allowed` maps shapes in words to sizes; the tensor must have one of them."""
    if tuple(t.shape) in allowed.values():
        return True
    shapes = " or ".join(f"{words} = {list(sizes)}" for words, sizes in allowed.items())
    problems.append(f"{name} is {list(t.shape)}; expected {shapes}")
    return False


def extent(t: Tensor) -> int:
    """Bytes from the first element to the end of the last one."""
    if t.numel() == 0:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.element_size()


def aligned(t: Tensor, pointer: int, elements: int, along: int = -1) -> bool:
    """Whether vectors of `elements` along an axis, at most 16 bytes wide, are contiguous and aligned to their size."""
    width = min(16, elements * t.element_size())
    steps = [s * t.element_size() for a, (n, s) in enumerate(zip(t.shape, t.stride(), strict=True)) if n > 1 and a != along % t.dim()]
    return (t.stride(along) == 1 or t.shape[along] == 1) and all(x % width == 0 for x in (pointer, *steps))


def loads_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], names: Iterable[str], elements: int) -> Loads:
    """How these operands can be loaded, as a field of a problem: by such vectors, if all that are given allow them."""
    every = all(aligned(views[name], pointers[name], elements) for name in names if name in views)
    return Loads.VECTOR if every else Loads.ELEMENT


def check_pdl(pdl: bool | None, views: Mapping[str, Tensor], problems: list[str]) -> None:
    """Reports pdl=True on a device without programmatic dependent launch."""
    if pdl and views and (device := next(iter(views.values())).device).type == "cuda":
        arch = runtime.device_arch(device.index)
        if arch < SM90:
            problems.append(f"pdl is True on {device}, {arch}; expected sm_90 or later. Pass pdl=False or None.")


def padding_objections(zero_padding: bool, out: object) -> tuple[str, ...]:
    """The objection to zero_padding=False without `out`: rows of padding then keep the content of `out`, so `out` must be given."""
    return (
        ()
        if zero_padding or out is not None
        else ("zero_padding is False and out is None; expected out: it keeps its rows that are padding. Pass out.",)
    )


def overlaps_itself(t: Tensor) -> bool:
    """Whether two indices may address the same element. Exact for the strides of views and slices."""
    reach = 1
    for stride, size in sorted((s, n) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1):
        if stride < reach:
            return True
        reach = stride * (size - 1) + reach
    return False


def check_distinct(named: Mapping[str, Tensor], names: Iterable[str], problems: list[str]) -> None:
    """Adds an error for each of these tensors that has two elements at one address. Missing tensors are skipped."""
    problems += [
        f"{name} has strides {list(named[name].stride())}, and two of its elements share memory; expected one address per element. "
        "Pass a contiguous tensor."
        for name in names
        if name in named and overlaps_itself(named[name])
    ]


def check_dense(name: str, t: Tensor, problems: list[str], axes: int = 3, turned: bool = False) -> bool:
    """Whether the last axes are dense; adds an error if not. turned: the last two are in memory the other way round."""
    sizes = t.shape[-axes:]
    rows, n = sizes[-2:]
    dense = [*torch.empty((*sizes[:-2], n, rows) if turned else sizes, device="meta").stride()]
    if turned:
        dense[-2:] = dense[:-3:-1]
    if all(n == 1 or have == want for n, have, want in zip(sizes, t.stride()[-axes:], dense, strict=True)):
        return True
    words = {2: "two", 3: "three"}[axes]
    problems.append(f"{name} has strides {list(t.stride())}; expected dense last {words} axes, {dense}")
    return False


def pages(t: Tensor) -> tuple[int, int]:
    """(bytes from one entry of the first axis to the next, bytes that an entry spans); zeros for a tensor without several entries."""
    if t.dim() == 0 or t.shape[0] < 2:
        return 0, 0
    return t.stride(0) * t.element_size(), extent(t[0])


def alternate(one: tuple[int, int], other: tuple[int, int], apart: int) -> bool:
    """Whether two tensors that begin `apart` bytes from each other share pages: each entry of both lies in its own part of a page."""
    (page, first), (step, second) = one, other
    return page == step > 0 and first <= apart % page <= page - second


def check_overlap(
    written: Mapping[str, tuple[int, int]], read: Mapping[str, tuple[int, int]], problems: list[str],
    paged: Mapping[str, tuple[int, int]] = {},
) -> None:  # fmt: skip
    """No written range [start, end) may overlap another range, unless the two tensors alternate in memory. paged: their `pages`."""
    names = list(written)
    for i, name in enumerate(names):
        start, end = written[name]
        others = {n: written[n] for n in names[i + 1 :]} | dict(read)
        met = [(other, a) for other, (a, b) in others.items() if start < b and a < end]
        problems += [
            f"{name} overlaps {other} in memory; expected separate memory, since {name} is written"
            for other, a in met
            if not alternate(paged.get(name, (0, 0)), paged.get(other, (0, 0)), a - start)
        ]


def check_strides_fit(name: str, t: Tensor, first: int, problems: list[str]) -> None:
    """Strides are 32-bit in the kernels, and so are offsets over the axes from `first` on."""
    reach = sum((n - 1) * s for n, s in zip(t.shape[first:], t.stride()[first:], strict=True))
    if reach >= 2**31 or any(s >= 2**31 for s in t.stride()):
        problems.append(f"{name} has strides {list(t.stride())}; expected strides, and offsets within a row, below 2^31 elements")


# Checks of operand tables.

_TYPES: dict[Types, tuple[torch.dtype, ...]] = {
    Types.FLOAT: (*DTYPES,),
    Types.STATE: (*DTYPES,),
    Types.WEIGHT: (*DTYPES, torch.int8, torch.float8_e4m3fn),
    Types.INDEX: (torch.int32, torch.int64),
    Types.F32: (torch.float32,),
    Types.I32: (torch.int32,),
    Types.I64: (torch.int64,),
    Types.BOOL: (torch.bool,),
    Types.BYTES: (torch.uint8,),
}


def check_types(
    table: Table, tensors: Mapping[str, Tensor], anchor: str, problems: list[str], what: str = "a decode step", scaled: bool = True
) -> None:
    """Checks devices, element types and gradients of a table's operands. `what` names the operation, which has no backward. scaled: whether
    it takes states with scales."""
    device = tensors[anchor].device
    for name, t in tensors.items():
        row = table[name]
        if t.device != device:
            problems.append(f"{name} is on {t.device}, {anchor} is on {device}")
        if scaled and row.scales and t.dtype in NARROW:
            if row.scales not in tensors:
                problems.append(
                    f"{name} is {t.dtype} and {row.scales} is None; expected a float32 scale for each row. Pass {row.scales}.".replace(
                        "torch.", ""
                    )
                )
        elif t.dtype not in _TYPES[row.types]:
            wanted, exact = Types.FLOAT if row.types is Types.STATE else row.types, len(_TYPES[row.types]) == 1
            problems.append(f"{name} is {str(t.dtype).removeprefix('torch.') if exact else t.dtype}; expected {wanted.value}")
        if row.scales and row.scales in tensors and t.dtype not in NARROW:
            problems.append(
                f"{row.scales} is given and {name} is {t.dtype}; expected int16, int8 or float8_e4m3fn. Leave out {row.scales}.".replace(
                    "torch.", ""
                )
            )
        if t.requires_grad and torch.is_grad_enabled():
            problems.append(f"{name} requires grad; expected no gradients, since {what} has no backward. Call it under torch.no_grad().")


def check_shapes(
    table: Table, tensors: Mapping[str, Tensor], sizes: Mapping[str, int], problems: list[str], own: Mapping[str, Shapes] = {},
    lead: tuple[str, Sequence[int]] = ("batch", ()),
) -> bool:  # fmt: skip
    """Whether each operand has a shape that the table allows, for these sizes of the table's words.

    own: shapes that replace the table's for this call; lead: the token axes, in words and sizes. Operands without a shape are skipped.
    """
    fits = []
    for name, t in tensors.items():
        allowed = own[name] if name in own else table.shapes(name, sizes, lead, tuple(t.shape))
        if allowed:
            fits.append(check_shape(name, t, allowed, problems))
    return all(fits)
