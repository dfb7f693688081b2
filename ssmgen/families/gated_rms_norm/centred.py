"""gated_layer_norm: the gated norm that subtracts the mean, with a bias."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ...calls.dispatch import callers
from ...calls.operator import operator, run
from ...calls.scalars import NOT_NEGATIVE, integer
from ...engine.norm_calls import ACTIVATION
from .call import FAMILY as GATED
from .call import Options, problem_of, run_reference, views_of
from .operands import FUNCTIONS

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


FAMILY = GATED._replace(written=TABLE.written, problem_of=partial(problem_of, centred=True), in_place=TABLE.in_place)
(CALLER,) = callers(
    FAMILY, {"gated_layer_norm": TABLE}, Options, partial(views_of, what="the gated layer norm"), partial(run_reference, centred=True),
    "gated_layer_norm",
).values()  # fmt: skip
