"""gated_rms_norm: the norm after a state update, with the gate of its layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calls import checks
from ...calls.checks import DTYPES
from ...calls.dispatch import callers
from ...calls.operator import operator, run
from ...calls.planning import Family
from ...calls.scalars import NOT_NEGATIVE, integer
from ...engine.norm import Activation
from ...engine.norm_calls import ACTIVATION, ACTIVATIONS
from ...engine.norm_kernel import MAX_GROUP, NormProblem
from ...spec.arguments import divisor
from ...spec.kernel import Loads
from .operands import FUNCTIONS, OPERANDS, SHARED
from .reference import gated_rms_norm as reference
from .spec import OPERATOR, NormSpec

TABLE = FUNCTIONS[OPERATOR]
_GATED = FUNCTIONS["gated_layer_norm"].names  # gated_rms_norm has these too, except a bias


class Options(NamedTuple):
    """The arguments of a call that are not tensors."""

    eps: float = 1e-5
    norm_before_gate: bool = False
    activation: str = "silu"
    group_size: int | None = None


@operator(like="x", eps=NOT_NEGATIVE, activation=ACTIVATION, group_size=integer("an integer"))
def gated_rms_norm(
    x: Tensor,
    gate: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 1e-5,
    *,
    norm_before_gate: bool = False,
    activation: str = "silu",
    group_size: int | None = None,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """out = v rsqrt(mean(v^2) + eps) weight, with v = x act(gate); with norm_before_gate, out = x rsqrt(mean(x^2) + eps) weight act(gate).

    The mean is over a group: the last axis, or each `group_size` neighbours of it. Arithmetic is f32, in one order of summation, and
    the result is rounded once; neither the variant nor the batch size changes a bit.

    x, gate, out: [*rows, groups, size], or [*rows, groups * size] with group_size; f32, f16 or bf16 each. The last axis is contiguous; rows
        and groups may have any stride. Several axes of rows must merge into one, dense or with one stride
    size: 1 … 16384; sizes that are not a multiple of 4 are loaded and stored element by element
    gate: None for the plain norm of each group
    weight: [size], for all groups, or [groups * size] or [groups, size]; f32, f16 or bf16; None for 1
    norm_before_gate: False as in Mamba-2 layers, True as in gated delta rule and KDA layers
    activation: "silu" or its other name "swish"; "sigmoid"
    out: x's shape; may be x or gate itself; None for a new one of x's dtype
    pdl: whether the kernel may start while the previous one in the stream ends; None = if the device can (sm_90 and later)

    Returns out. CPU tensors run the reference implementation.
    Raises ArgumentError listing every violated requirement, before anything is launched; UnsupportedError; CaptureError when a
    kernel would have to be built during a CUDA graph capture; NotBuiltError, CompileError, LoadError, LaunchError.
    Source: Zhang & Sennrich 2019 (arXiv 1910.07467); Dao & Gu 2024 (arXiv 2405.21060); Yang et al. 2024 (arXiv 2412.06464).
    """
    if out is None and isinstance(x, Tensor):
        out = x.new_empty(x.shape)
    tensors = TABLE.Tensors(x=x, gate=gate, weight=weight, out=out)
    return run(CALLER, tensors, Options(eps, norm_before_gate, activation, group_size), pdl)


def _groups_of(x: Tensor, group_size: int | None, problems: list[str]) -> tuple[int, int] | None:
    """(groups in a row, size of a group)"""
    if x.dim() == 0:
        problems.append("x is []; expected [*rows, groups, size]")
        return None
    size = x.shape[-1] if group_size is None else group_size
    if not 1 <= size <= MAX_GROUP:
        problems.append(f"x is {list(x.shape)}, with groups of {size} elements; expected 1 … {MAX_GROUP}")
        return None
    if x.shape[-1] % size:
        problems.append(f"x is {list(x.shape)} and group_size {size}; expected a divisor of the last axis")
        return None
    if size != x.shape[-1] or group_size is not None:
        return x.shape[-1] // size, size
    return x.shape[-2] if x.dim() > 2 else 1, size


def _in_rows(name: str, t: Tensor, groups: int, size: int, problems: list[str]) -> Tensor:
    """[*rows, groups, size], or the same with the last two in one axis, as [rows, groups, size]."""
    apart = t.dim() > 2 and t.shape[-2:] == (groups, size)
    lead = t.dim() - (2 if apart else 1)
    axes = [(n, s) for n, s in zip(t.shape[:lead], t.stride()[:lead], strict=True) if n != 1]
    if any(outer != inner * n for (_, outer), (n, inner) in pairwise(axes)):
        problems.append(
            f"{name} has strides {list(t.stride())}; expected one distance between rows over its axes {list(t.shape[:lead])}. "
            "Pass a contiguous tensor."
        )
        return t  # merged into one axis, they would end beyond its memory
    rows = math.prod(t.shape[:lead])
    step = axes[-1][1] if axes else t.stride(lead - 1) if lead else groups * size
    return t.as_strided((rows, groups, size), (step, t.stride(-2) if apart else size, 1))


def views_of(named: Mapping[str, Any], options: Any, problems: list[str], what: str = "the gated norm") -> dict[str, Tensor]:
    """The weight and the bias as [groups, size]; the other operands, which are like x, as [rows, groups, size]. Adds errors to `problems`;
    the result is usable only if there are none."""
    if not checks.check_tensors(named, problems):
        return {}
    checks.check_types(OPERANDS, named, "x", problems, what)
    x = named["x"]
    found = _groups_of(x, options.group_size, problems)
    like_x: checks.Shapes = {"the shape of x": tuple(x.shape)}
    others = {name: t for name, t in named.items() if name not in ("x", *SHARED)}
    if not checks.check_shapes(OPERANDS, others, {}, problems, dict.fromkeys(others, like_x)) or found is None:
        return {}
    groups, size = found
    weights = {name: named[name] for name in SHARED if name in named}
    if not checks.check_shapes(OPERANDS, weights, {"size": size, "group": groups, "group*size": groups * size}, problems):
        return {}
    for name, t in named.items():
        if t.stride(-1) != 1:
            problems.append(f"{name} has strides {list(t.stride())}; expected 1 for its last axis. Pass a contiguous tensor.")
        if any(s >= 2**32 for s in t.stride()):
            problems.append(f"{name} has strides {list(t.stride())}; expected strides below 2^32 elements")
    checks.check_distinct(named, OPERANDS.written, problems)
    if x.numel() // size >= 2**31:
        problems.append(f"x is {list(x.shape)}; expected fewer than 2^31 groups in all rows")
    views = {name: _in_rows(name, t, groups, size, problems) for name, t in named.items() if name not in SHARED}
    for name in SHARED:
        if name in named:
            w = named[name]
            apart = w.stride(0) if w.dim() == 2 else size if w.numel() > size else 0
            views[name] = w.as_strided((groups, size), (apart, 1))
    return {name: views[name] for name in named}


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options, centred: bool = False) -> NormProblem:
    """The problem of checked operands and their addresses. centred: the mean is subtracted."""
    gated = "gate" in views
    problem: dict[str, Any] = {
        "size": views["x"].shape[-1],
        **{name: DTYPES[views[name].dtype] if name in views else None for name in _GATED},
        "centred": centred,
        "norm_first": gated and options.norm_before_gate,
        "activation": ACTIVATIONS[options.activation] if gated else Activation.SILU,
        "grouped": views["x"].shape[1] > 1,
    }
    return loaded(problem, views, pointers)


def loaded(problem: Mapping[str, Any], views: Mapping[str, Tensor], pointers: Mapping[str, int]) -> NormProblem:
    """The problem of these fields, completed by how operands at these addresses can be loaded."""
    plain = NormProblem(**problem)
    aligned = not plain.partial and all(checks.aligned(t, pointers[name], plain.widest) for name, t in views.items())
    return NormProblem(**problem, loads=Loads.VECTOR if aligned else Loads.ELEMENT)


def grid_of(spec: NormSpec, views: Mapping[str, Tensor]) -> int:
    return -(-size_of(views) // spec.teams)


def kernel_values(spec: NormSpec, views: Mapping[str, Tensor], options: Any) -> dict[str, int | float]:
    """Every kernel argument that is not a pointer."""
    values: dict[str, int | float] = {"units": size_of(views), "eps": options.eps} | divisor("groups", views["out"].shape[1])
    return values | OPERANDS.stride_values(spec, views)


def size_of(views: Mapping[str, Tensor]) -> int:
    """Groups of all rows."""
    return views["out"].shape[0] * views["out"].shape[1]


FAMILY = Family(OPERATOR, TABLE.written, problem_of, size_of, grid_of, kernel_values, TABLE.in_place)


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32, centred: bool = False) -> None:
    activation = ACTIVATIONS[options.activation].value
    how: dict[str, Any] = {"eps": options.eps, "norm_before_gate": options.norm_before_gate, "activation": activation, "centred": centred}
    reference(**{**views, **how}, dtype=dtype)


(CALLER,) = callers(FAMILY, {OPERATOR: TABLE}, Options, views_of, run_reference).values()
