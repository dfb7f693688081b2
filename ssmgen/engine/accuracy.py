"""How far a result is from what it should be."""

from __future__ import annotations

from torch import Tensor


def norm_error(result: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of `expected` (any shape, the same for both), in float64; infinite where a result is not finite."""
    if not result.isfinite().all():
        return float("inf")
    result, expected = result.double(), expected.double()
    return float((result - expected).norm() / expected.norm().clamp(min=1e-30))
