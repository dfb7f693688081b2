"""skinny_linear on torch tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calls import checks
from ...calls.checks import DTYPES, NARROW
from ...calls.dispatch import by_name, callers
from ...calls.operator import operator, run
from ...calls.planning import Family
from ...calls.scalars import NOT_NEGATIVE, one_of
from ...errors import ArgumentError
from ...spec.kernel import Loads
from .operands import BIASES, LISTS, MOST, OPERANDS, OUTS, RESIDUALS, SCALES, WEIGHTS, WORDS
from .problem import MAX_K, OPERATOR, ROWS, SkinnyProblem
from .reference import skinny_linear as reference
from .spec import FmaSpec, tiles_of

GATED, RELU2 = "silu_and_mul", "relu2"  # activations


class Options(NamedTuple):
    """The arguments that are not tensors."""

    activation: str | None = None
    eps: float = 1e-6


@operator(like="x", activation=one_of(f"{GATED!r}, {RELU2!r} or None", GATED, RELU2, None), eps=NOT_NEGATIVE)
def skinny_linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor] | None = None,
    *,
    scale: Tensor | Sequence[Tensor] | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    activation: str | None = None,
    residual: Tensor | Sequence[Tensor] | None = None,
    out: Tensor | Sequence[Tensor] | None = None,
    pdl: bool | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """out = x weight^T * scale + bias + residual, for 1 to 16 rows of x: the products of a decode step, at the speed of memory.

    The weights are constant: the kernel loads them before the previous kernel in the stream has ended, if that kernel allows it (`pdl`). A
    weight must not be an output of that kernel. Sums are f32, in one order: a row of x has the same bits in every batch and in every
    variant. Tensor cores multiply weights of 16 and 8 bits from sm_90 on; f32 weights, and older GPUs, have another order of sums. Weights
    of 8 bits are converted to x's type, exactly; a sum is scaled in f32, and rounded once.

    x: [*rows, K] f32, f16 or bf16, 1 … 16 rows in all. K is contiguous, and rows have one distance; K is a multiple of 8, or of 16 if
        weights have 8 bits
    weight: [N, K] of x's dtype, or int8 or float8_e4m3fn with scales for x in f16 or bf16; K contiguous, rows at multiples of 16 bytes;
        N is a multiple of 8. Or up to four weights of one dtype and equal K, whose products share a launch: q, k and v of attention, gate
        and up of an MLP
    bias: [N] f32, f16 or bf16; one for each weight, of one dtype; None for 0
    scale: [N] f32 or x's dtype, contiguous; one for each weight, of one dtype; None for 1, except with weights of 8 bits, which need one
    norm_weight: [K] f32, f16 or bf16, at a multiple of 16 bytes: the product is of x rsqrt(mean(x^2) + eps) norm_weight, with the bits of
        rms_norm before it
    activation: "silu_and_mul": one output, silu(gate) * up, of two weights of equal N, which give gate and up. "relu2": max(y, 0)^2 of each
        product y, with its scale and bias
    residual: [*rows, N] f32, f16 or bf16, one for each output, of one dtype; is added last, in f32. It may be out
    out: [*rows, N] of x's dtype or f32, one for each weight (or for both, with an activation), of one dtype; None for new ones of x's dtype
    pdl: whether the kernel may start while the previous one in the stream ends; None = if the device can (sm_90 and later)

    Returns out; of several outputs, a tuple. CPU tensors run the reference implementation.
    Raises ArgumentError listing every violated requirement, before anything is launched; UnsupportedError; CaptureError when a
    kernel would have to be built during a CUDA graph capture; NotBuiltError, CompileError, LoadError, LaunchError.
    """
    lists = {name: _listed(given) for name, given in zip(LISTS, (weight, bias, scale, residual, out), strict=True)}
    objections = _objections(activation, lists)
    weights, outputs = lists["weight"], 1 if activation == GATED else len(lists["weight"])
    if out is None and isinstance(x, Tensor) and x.dim():
        sized = [isinstance(w, Tensor) and w.dim() > 0 for w in weights[:outputs]]
        lists["out"] = [x.new_empty((*x.shape[:-1], w.shape[0])) if known else None for w, known in zip(weights, sized, strict=False)]
    named = {operand: t for name, given in lists.items() for operand, t in zip(LISTS[name], given, strict=False)}
    returns = (*OUTS[: max(1, min(outputs, MOST))],)
    tensors = OPERANDS.Tensors(x=x, norm_weight=norm_weight, **named)
    return run(CALLER, tensors, Options(activation, eps), pdl, returns=returns, objections=objections)


def _listed(given: Any) -> list[Any]:
    return [*given] if isinstance(given, (tuple, list)) else [] if given is None else [given]


def _objections(activation: str | None, lists: Mapping[str, list[Any]]) -> tuple[str, ...]:
    """Errors in the numbers of tensors."""
    count, found = len(lists["weight"]), []
    gated = activation == GATED
    if gated and count != 2:
        found.append(f"activation is {activation!r} and weight has {count} tensors; expected 2, gate and up")
    elif not 1 <= count <= MOST:
        found.append(f"weight has {count} tensors; expected 1 … {MOST}")
    for name, given in lists.items():
        of_output = gated and name in ("residual", "out")
        expected, words = (1, "one for both weights") if of_output else (count, f"{count}, one per weight")
        if name != "weight" and given and len(given) != expected:
            found.append(f"{name} has {len(given)} tensors; expected {words}")
    return tuple(found)


def _in_rows(name: str, t: Tensor, problems: list[str]) -> Tensor:
    """[*rows, K] as [rows, K]."""
    axes = [(n, s) for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n != 1]
    if t.numel() and any(outer != inner * n for (_, outer), (n, inner) in pairwise(axes)):
        problems.append(f"{name} has strides {list(t.stride())}; expected one distance between all rows of {list(t.shape[:-1])}")
        return t
    return t.as_strided((math.prod(t.shape[:-1]), t.shape[-1]), (axes[-1][1] if axes else t.shape[-1], t.stride(-1)))


def _check_weights(named: Mapping[str, Tensor], k: int, gated: bool, problems: list[str]) -> bool:
    """Whether the shapes of weights, of the tensors that go with them, and of outputs fit x."""
    fits = True
    lead = tuple(named["x"].shape[:-1])
    if "norm_weight" in named:
        fits &= checks.check_shape("norm_weight", named["norm_weight"], {"[K]": (k,)}, problems)
    for weight, bias, scale, residual, out in zip(*LISTS.values(), strict=True):
        if weight not in named:
            continue
        w = named[weight]
        if w.dim() != 2 or w.shape[1] != k or w.shape[0] % 8 or not w.shape[0]:
            problems.append(f"{weight} is {list(w.shape)}; expected [N, K] with K = {k} and N a positive multiple of 8")
            fits = False
            continue
        n = w.shape[0]
        for name in (bias, scale):
            if name in named:
                fits &= checks.check_shape(name, named[name], {"[N]": (n,)}, problems)
        if out not in named and not (gated and out != "out"):
            problems.append(f"{out} is None; expected a tensor for each weight")
            fits = False
        for name in (residual, out):
            if name in named:
                fits &= checks.check_shape(name, named[name], {"[*rows, N]": (*lead, n)}, problems)
    if gated and fits and "weight_1" in named and named["weight"].shape != named["weight_1"].shape:
        shapes = f"{list(named['weight_1'].shape)} and weight[0] is {list(named['weight'].shape)}"
        problems.append(f"weight_1 is {shapes}; expected gate and up of one shape")
        fits = False
    return fits


def _check_dtypes(named: Mapping[str, Tensor], problems: list[str]) -> None:
    """Checks dtypes that depend on x's, and on each other."""
    x = named["x"].dtype
    narrow = [n for n in WEIGHTS if n in named and named[n].dtype in NARROW]
    dtype = "" if not narrow else str(named[narrow[0]].dtype).removeprefix("torch.")
    if narrow and "scale" not in named:
        problems.append(f"weight is {dtype} and scale is None; expected a scale for each of its rows. Pass scale.")
    if narrow and x not in (torch.float16, torch.bfloat16):
        problems.append(f"weight is {dtype} and x is {x}; expected x in float16 or bfloat16. Convert x.".replace("torch.", ""))
    wide, either = [n for n in WEIGHTS if n not in narrow], (x, torch.float32)
    rules = ((wide, (x,), "x's dtype"), (SCALES, either, "float32 or x's dtype"), (OUTS, either, "x's dtype or float32"))
    for names, allowed, words in rules:
        given = [n for n in names if n in named and named[n].dtype not in allowed]
        problems += [f"{n} is {named[n].dtype}; expected {words}".replace("torch.", "") for n in given]
    for names in (WEIGHTS if narrow else [], BIASES, SCALES, RESIDUALS, OUTS):
        if len(kinds := {str(named[n].dtype).removeprefix("torch.") for n in names if n in named}) > 1:
            problems.append(f"{names[0]} has tensors of {' and '.join(sorted(kinds))}; expected one dtype")


def views_of(named: Mapping[str, Any], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """x and outputs as [rows, …]. Adds errors to `problems`; the result is usable only if there are none."""
    if not checks.check_tensors(named, problems):
        return {}
    checks.check_types(OPERANDS, named, "x", problems, "this product")
    x = named["x"]
    step = 16 if named["weight"].dtype in NARROW else 8
    if not x.dim() or x.shape[-1] % step or not step <= x.shape[-1] <= MAX_K:
        problems.append(f"x is {list(x.shape)}; expected [*rows, K] with K a multiple of {step} up to {MAX_K}")
        return {}
    if not _check_weights(named, x.shape[-1], options.activation == GATED, problems):
        return {}
    rows = math.prod(x.shape[:-1])
    if rows > ROWS[-1]:
        problems.append(f"x is {list(x.shape)}, {rows} rows; expected at most {ROWS[-1]}. Use torch.nn.functional.linear for more.")
    _check_dtypes(named, problems)
    for name, t in named.items():
        if t.stride(-1) != 1 and t.shape[-1] > 1:
            problems.append(f"{name} has strides {list(t.stride())}; expected a contiguous last axis")
        if any(s >= 2**32 for s in t.stride()):
            problems.append(f"{name} has strides {list(t.stride())}; expected strides below 2^32 elements")
    problems += [
        f"{n} has rows {named[n].stride(0)} elements apart; expected rows at multiples of 16 bytes"
        for n in WEIGHTS
        if n in named and named[n].stride(0) * named[n].element_size() % 16
    ]
    checks.check_distinct(named, OUTS, problems)
    return {name: _in_rows(name, t, problems) if name in ("x", *RESIDUALS, *OUTS) else t for name, t in named.items()}


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> SkinnyProblem:
    """The problem of checked operands and their addresses. Raises ArgumentError for weights that do not begin at a multiple of 16 bytes."""
    x = views["x"]
    if wrong := [name for name in (*WEIGHTS, "norm_weight") if name in views and pointers[name] % 16]:
        names = [WORDS.get(name, name) for name in wrong]
        raise ArgumentError(
            OPERATOR, [f"{name} does not begin at a multiple of 16 bytes; expected an aligned weight. Copy it." for name in names]
        )
    rows = x.shape[0]
    types = {name: DTYPES[views[name].dtype] for name in ("bias", "scale", "residual") if name in views}
    return SkinnyProblem(
        k=x.shape[1],
        x=DTYPES[x.dtype],
        out=DTYPES[views["out"].dtype],
        narrow=NARROW.get(views["weight"].dtype),
        norm=DTYPES[views["norm_weight"].dtype] if "norm_weight" in views else None,
        gated=options.activation == GATED,
        relu2=options.activation == RELU2,
        weights=sum(name in views for name in WEIGHTS),
        rows=next((most for most in ROWS if rows <= most), ROWS[-1]),
        loads=Loads.VECTOR if checks.aligned(x, pointers["x"], 16 // x.element_size()) else Loads.ELEMENT,
        **types,
    )


def size_of(views: Mapping[str, Tensor]) -> int:
    """Rows of all weights; 0 if x has none."""
    return sum(views[name].shape[0] for name in WEIGHTS if name in views) if views["x"].shape[0] else 0


def grid_of(spec: Any, views: Mapping[str, Tensor]) -> int:
    counts = [views[name].shape[0] for name in WEIGHTS if name in views]
    counts = [sum(counts)] if spec.gated else counts
    if isinstance(spec, FmaSpec):
        return -(-sum(-(-n // spec.tile) for n in counts) // spec.warps)
    return sum(map(tiles_of, counts))


def kernel_values(spec: Any, views: Mapping[str, Tensor], options: Options) -> dict[str, int | float]:
    """Every kernel argument that is not a pointer."""
    values: dict[str, int | float] = {name.replace("weight", "n"): views[name].shape[0] for name in WEIGHTS if name in views}
    return values | {"rows": views["x"].shape[0], "eps": options.eps} | OPERANDS.stride_values(spec, views)


FAMILY = Family(OPERATOR, OPERANDS.written, problem_of, size_of, grid_of, kernel_values, OPERANDS.in_place)
(CALLER,) = callers(FAMILY, {OPERATOR: OPERANDS}, Options, views_of, by_name(reference), words={OPERATOR: WORDS}).values()
