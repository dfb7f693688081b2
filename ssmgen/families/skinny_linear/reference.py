"""skinny_linear in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from .operands import BIASES, OUTS, SCALES, WEIGHTS


def skinny_linear(x: Tensor, *, dtype: torch.dtype = torch.float32, **named: Tensor) -> None:
    """x: [rows, K]; weight: [N, K]; bias, scale: [N]; out: [rows, N]; likewise weight_1 and others. Computes in `dtype`; rounds once."""
    for weight, bias, scale, out in zip(WEIGHTS, BIASES, SCALES, OUTS, strict=True):
        if weight in named:
            y = x.to(dtype) @ named[weight].to(dtype).t()
            y = y * named[scale].to(dtype) if scale in named else y
            named[out].copy_(y + named[bias].to(dtype) if bias in named else y)
