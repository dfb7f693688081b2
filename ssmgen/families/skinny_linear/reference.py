"""skinny_linear in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from .operands import BIASES, OUTS, WEIGHTS


def skinny_linear(x: Tensor, *, dtype: torch.dtype = torch.float32, **named: Tensor) -> None:
    """x: [rows, K]; weight: [N, K]; bias: [N]; out: [rows, N]; likewise weight_1 and others. Computes in `dtype`; rounds once."""
    for weight, bias, out in zip(WEIGHTS, BIASES, OUTS, strict=True):
        if weight in named:
            y = x.to(dtype) @ named[weight].to(dtype).t()
            named[out].copy_(y + named[bias].to(dtype) if bias in named else y)
