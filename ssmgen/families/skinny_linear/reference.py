"""skinny_linear in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from .operands import BIASES, OUTS, RESIDUALS, SCALES, WEIGHTS


def skinny_linear(
    x: Tensor,
    *,
    activation: str | None = None,
    eps: float = 1e-6,
    norm_weight: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    **named: Tensor,
) -> None:
    """x: [rows, K]; weight: [N, K]; bias, scale: [N]; residual, out: [rows, N]; likewise weight_1 and others; norm_weight: [K].

    Computes in `dtype`; rounds x's norm to x's dtype, and results once."""
    v = x.to(dtype)
    if norm_weight is not None:
        v = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps) * norm_weight.to(dtype)
        v = v.to(x.dtype).to(dtype)
    found: list[Tensor] = []
    for weight, bias, scale in zip(WEIGHTS, BIASES, SCALES, strict=True):
        if weight in named:
            y = v @ named[weight].to(dtype).t()
            y = y * named[scale].to(dtype) if scale in named else y
            found.append(y + named[bias].to(dtype) if bias in named else y)
    if activation == "silu_and_mul":
        gate, up = found
        found = [torch.nn.functional.silu(gate) * up]
    elif activation == "relu2":
        found = [y.relu().square() for y in found]
    for y, residual, out in zip(found, RESIDUALS, OUTS, strict=False):
        named[out].copy_(y + named[residual].to(dtype) if residual in named else y)
