"""Gated norms of vLLM 0.33 and SGLang 0.5.23, which follow the state updates of their layers. Both engines have two forms:
flash-linear-attention's norm and mamba-ssm's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import UnsupportedError
from ...families.gated_rms_norm.call import gated_rms_norm
from ...families.gated_rms_norm.centred import gated_layer_norm
from .gated_delta import shaped
from .operands import takes


def normed(
    name: str, x: Tensor, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, *, group_size: int | None = None,
    norm_before_gate: bool = True, activation: str = "swish", is_rms_norm: bool = True, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The gated RMS norm of the last axis, or of each group_size neighbours of it, into out; None for a new one like x. Without is_rms_norm
    the mean is subtracted, and a bias added.

    Raises UnsupportedError for a bias of an RMS norm.
    """
    if is_rms_norm and bias is not None:
        raise UnsupportedError(name, ["bias is given; expected None for an RMS norm"])
    rows, gates = (t if t is None or not t.dim() or t.stride(-1) == 1 else t.contiguous() for t in (x, gate))
    assert rows is not None
    how: dict[str, Any] = {"norm_before_gate": norm_before_gate, "activation": activation, "group_size": group_size, "out": out}
    if is_rms_norm:
        return gated_rms_norm(rows, gates, weight, eps, **how)
    return gated_layer_norm(rows, gates, weight, bias, eps, **how)


@takes("prenorm")
def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """Gated RMS norm of the last axis, as layers of delta rules use it: x rsqrt(mean(x^2) + eps) weight act(g).

    x: [*rows, size]          g: the same number of elements, any stride between rows          weight: [size]; None for 1          bias:
        None
    activation: "swish", its other name "silu", or "sigmoid"

    Returns x, overwritten, if x is dense, as the engines' function does; else a new tensor.
    Raises UnsupportedError for a bias, a residual and prenorm, and ArgumentError (a ValueError) for operands that do not fit.

    Ignored arguments:
    residual_in_fp32: only counts with a residual
    """
    name = "the engine's rms_norm_gated"
    if residual is not None or prenorm:
        raise UnsupportedError(name, ["residual or prenorm is given; expected neither: this norm adds and returns nothing else"])
    into = x if x.is_contiguous() else None
    return normed(name, x, shaped(g, tuple(x.shape)), weight, bias, eps, activation=activation, out=into)
