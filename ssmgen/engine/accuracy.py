"""The distance between a result and its reference."""

from __future__ import annotations

from torch import Tensor


def norm_error(result: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of `expected` (both of one shape), in float64; infinite if an element is not finite."""
    if not result.isfinite().all():
        return float("inf")
    result, expected = result.double(), expected.double()
    return float((result - expected).norm() / expected.norm().clamp(min=1e-30))
