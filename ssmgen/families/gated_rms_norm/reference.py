"""gated_rms_norm and rms_norm in plain PyTorch: layers end with the first one."""

from __future__ import annotations

import torch
from torch import Tensor

from ...engine.norm_reference import gated_norm as gated_rms_norm

__all__ = ["gated_rms_norm", "rms_norm"]


def rms_norm(
    x: Tensor,
    *,
    out: Tensor,
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    residual_out: Tensor | None = None,
    eps: float = 1e-6,
    unit_offset: bool = False,
    rounded: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    """x, residual, out, residual_out: [rows, groups, size]; weight: [groups, size]. Computes in `dtype`, and rounds to the
    dtypes of out and residual_out where rms_norm does."""
    v = x.to(dtype)
    if residual is not None and residual_out is not None:
        s = (residual.to(dtype) + v).to(residual_out.dtype)
        v = s.to(out.dtype).to(dtype)
        residual_out.copy_(s)
    v = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    if rounded:
        v = v.to(out.dtype).to(dtype)
    if weight is not None:
        v = v * (1 + weight.to(dtype) if unit_offset else weight.to(dtype))
    out.copy_(v)
