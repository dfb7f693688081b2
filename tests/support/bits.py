"""Comparisons of tensors: bit for bit, NaN too, and by relative errors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[t.element_size()])


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def all_same(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
    return all(same(x, y) for x, y in zip(a, b, strict=True))


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative L2."""
    found = found.detach().cpu().double().reshape(wanted.shape)
    return float((found - wanted).norm() / wanted.norm())
