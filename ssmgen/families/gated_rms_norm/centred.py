"""gated_layer_norm: the gated norm that subtracts the mean, with a bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...calls.checks import DTYPES
from ...calls.dispatch import callers
from ...calls.operator import operator, run
from ...calls.planning import Family
from ...calls.scalars import NOT_NEGATIVE, integer
from ...engine.norm import Activation
from ...engine.norm_calls import ACTIVATION, ACTIVATIONS
from ...engine.norm_kernel import NormProblem
from .call import Options, grid_of, kernel_values, loaded, size_of, views_of
from .operands import FUNCTIONS
from .reference import gated_rms_norm as reference
from .spec import OPERATOR

TABLE = FUNCTIONS["gated_layer_norm"]


@operator(like="x", eps=NOT_NEGATIVE, activation=ACTIVATION, group_size=integer("an integer"))
def gated_layer_norm(
    x: Tensor,
    gate: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    norm_before_gate: bool = False,
    activation: str = "silu",
    group_size: int | None = None,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """out = n(x act(gate)) weight + bias; with norm_before_gate, out = (n(x) weight + bias) act(gate). n(v) = (v - mean) rsqrt(var + eps).

    Mean and variance are over a group: the last axis, or each `group_size` neighbours of it. The variance divides by the element count.
    Arithmetic is f32; the mean is subtracted before squares are summed. Neither the variant nor the batch size changes a bit.

    bias: as weight: [size], for all groups, or [groups * size] or [groups, size]; f32, f16 or bf16; None for 0
    All other arguments, the result and the errors: as in gated_rms_norm.
    Source: Ba et al. 2016 (arXiv 1607.06450); Dao & Gu 2024 (arXiv 2405.21060).
    """
    if out is None and isinstance(x, Tensor):
        out = x.new_empty(x.shape)
    tensors = TABLE.Tensors(x=x, gate=gate, weight=weight, bias=bias, out=out)
    return run(CALLER, tensors, Options(eps, norm_before_gate, activation, group_size), pdl)


def layer_views_of(named: Mapping[str, Any], options: Options, problems: list[str]) -> dict[str, Tensor]:
    return views_of(named, options, problems, "the gated layer norm")


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> NormProblem:
    """The problem of checked operands and their addresses."""
    gated = "gate" in views
    problem: dict[str, Any] = {
        "size": views["x"].shape[-1],
        **{name: DTYPES[views[name].dtype] if name in views else None for name in TABLE.names},
        "centred": True,
        "norm_first": gated and options.norm_before_gate,
        "activation": ACTIVATIONS[options.activation] if gated else Activation.SILU,
        "grouped": views["x"].shape[1] > 1,
    }
    return loaded(problem, views, pointers)


FAMILY = Family(OPERATOR, TABLE.written, problem_of, size_of, grid_of, kernel_values, TABLE.in_place)


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    activation = ACTIVATIONS[options.activation].value
    how: dict[str, Any] = {"eps": options.eps, "norm_before_gate": options.norm_before_gate, "activation": activation, "centred": True}
    reference(**{**views, **how}, dtype=dtype)


(CALLER,) = callers(FAMILY, {"gated_layer_norm": TABLE}, Options, layer_views_of, run_reference, "gated_layer_norm").values()
