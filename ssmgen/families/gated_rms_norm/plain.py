"""rms_norm: the norm between layers, which first adds a layer's output to its residual."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calls.checks import DTYPES
from ...calls.dispatch import callers
from ...calls.operator import operator, run
from ...calls.scalars import NOT_NEGATIVE, integer
from ...engine.norm_kernel import NormProblem
from .call import FAMILY as GATED
from .call import loaded, views_of
from .operands import FUNCTIONS
from .reference import rms_norm as reference

TABLE = FUNCTIONS["rms_norm"]


class Options(NamedTuple):
    """The arguments of a call that are not tensors."""

    eps: float = 1e-6
    group_size: int | None = None
    unit_offset: bool = False
    round_before_weight: bool = False


@operator(like="x", eps=NOT_NEGATIVE, group_size=integer("an integer"))
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    residual_out: Tensor | None = None,
    unit_offset: bool = False,
    round_before_weight: bool = False,
    group_size: int | None = None,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """out = v rsqrt(mean(v^2) + eps) weight, with v = x; with a residual, v = residual_out = residual + x.

    The mean is over a group: the last axis, or each `group_size` neighbours of it. Arithmetic is f32, in one order of summation;
    neither the variant nor the batch size changes a bit. The sum is rounded to residual_out's dtype, then to out's dtype, and then normed,
    as in a model that rounds the input of its norm.

    x, residual, out, residual_out: [*rows, groups, size], or [*rows, groups * size] with group_size; f32, f16 or bf16 each. The last axis
        is contiguous; rows and groups may have any stride. Several axes of rows must merge into one, dense or with one stride
    size: 1 … 16384; sizes that are not a multiple of 4 are loaded and stored element by element
    weight: [size], for all groups, or [groups * size] or [groups, size]; f32, f16 or bf16; None for 1
    unit_offset: multiplies by 1 + weight, as models do whose weights are around 0
    round_before_weight: rounds the normalised value to out's dtype before the weight, as in models that multiply in this dtype
    out: x's shape; may be x or residual itself; None for a new one of x's dtype
    residual_out: goes with residual; may be residual itself; None for a new one of the dtype that PyTorch gives residual + x
    pdl: whether the kernel may start while the previous one in the stream ends; None = if the device can (sm_90 and later)

    Returns out, with a residual (out, residual_out). CPU tensors run the reference implementation.
    Raises ArgumentError listing every violated requirement, before anything is launched; UnsupportedError; CaptureError when a
    kernel would have to be built during a CUDA graph capture; NotBuiltError, CompileError, LoadError, LaunchError.
    Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
    """
    if isinstance(x, Tensor):
        out = x.new_empty(x.shape) if out is None else out
        if residual_out is None and isinstance(residual, Tensor):
            residual_out = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    options = Options(eps, group_size, unit_offset, round_before_weight)
    returns = ("out",) if residual_out is None else ("out", "residual_out")
    tensors = TABLE.Tensors(x=x, residual=residual, weight=weight, out=out, residual_out=residual_out)
    return run(CALLER, tensors, options, pdl, returns=returns)


def plain_views_of(named: Mapping[str, Any], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """Like `views_of`, with a residual."""
    if ("residual" in named) != ("residual_out" in named):
        problems.append("one of residual and residual_out is missing; expected both: residual_out receives residual + x")
    if "weight" not in named and (options.unit_offset or options.round_before_weight):
        problems.append("unit_offset or round_before_weight is True and weight is None; expected a weight")
    return views_of(named, options, problems, "the norm")


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> NormProblem:
    """The problem of checked operands and their addresses."""
    dtypes = {name: DTYPES[views[name].dtype] if name in views else None for name in TABLE.names}
    problem = {
        "size": views["x"].shape[-1],
        **{name: dtypes[name] for name in ("x", "residual", "weight", "out")},
        "gate": None,
        "sum": dtypes["residual_out"],
        "grouped": views["x"].shape[1] > 1,
        "unit_offset": options.unit_offset,
        "rounded": options.round_before_weight and views["out"].dtype != torch.float32,
    }
    return loaded(problem, views, pointers)


FAMILY = GATED._replace(written=TABLE.written, problem_of=problem_of, in_place=TABLE.in_place)


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    how: dict[str, Any] = {"eps": options.eps, "unit_offset": options.unit_offset, "rounded": options.round_before_weight}
    reference(**{**views, **how}, dtype=dtype)


(CALLER,) = callers(FAMILY, {"rms_norm": TABLE}, Options, plain_views_of, run_reference, "rms_norm").values()
