"""Weights for trials of short convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from ..calls.checks import TORCH_DTYPES
from ..spec.kernel import Loads
from .trial import wide


def taps(spec: Any, dim: int, g: Generator) -> dict[str, Tensor]:
    """Weight and bias for either convolution."""
    weight, bias = torch.randn(dim, spec.width, generator=g), torch.randn(dim, generator=g)
    if spec.taps is Loads.VECTOR:
        made = {"weight": weight.to(TORCH_DTYPES[spec.weight]), "bias": spec.bias and bias.to(TORCH_DTYPES[spec.bias])}
    else:
        made = {"weight": wide(weight, spec.weight, True), "bias": spec.bias and wide(bias, spec.bias, True, 2)}
    return {name: t for name, t in made.items() if t is not None}
