"""The gated norm in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}


def gated_norm(
    x: Tensor,
    *,
    out: Tensor,
    gate: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    norm_before_gate: bool = False,
    activation: str = "silu",
    centred: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    """x, gate, out: [rows, groups, size]; weight, bias: [groups, size]. centred: the mean is subtracted. Computes in `dtype`; writes out,
    rounded once."""
    v = x.to(dtype)
    factor = 1 if gate is None else ACTIVATIONS[activation](gate.to(dtype))
    if not norm_before_gate:
        v = v * factor
    if centred:
        v = v - v.mean(-1, keepdim=True)
    v = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        v = v * weight.to(dtype)
    if bias is not None:
        v = v + bias.to(dtype)
    out.copy_(v * factor if norm_before_gate else v)
