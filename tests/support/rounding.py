"""Float64 values with bounds on how far off an f32 computation of them may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

U, TINY = 2.0**-24, 2.0**-126  # one rounding of an f32, relative; below what the approximate functions give zero


@dataclass(frozen=True, eq=False)
class Approx:
    """A float64 value and the error bound of its f32 computation. Every operation propagates its operands' errors and adds its own
    rounding. Powers and roots take 4 U (2 ulp); a power of e is a power of 2 whose argument has two more roundings.
    """

    value: Tensor
    error: Tensor

    @property
    def size(self) -> Tensor:
        return self.value.abs() + self.error

    def __getitem__(self, at: Any) -> Approx:
        return Approx(self.value[at], self.error[at])

    def __neg__(self) -> Approx:
        return Approx(-self.value, self.error)

    def __add__(self, other: Approx) -> Approx:
        value, error = self.value + other.value, self.error + other.error
        return Approx(value, error + U * (value.abs() + error))

    def __mul__(self, other: Approx) -> Approx:
        value, size = self.value * other.value, self.size * other.size
        return Approx(value, size - value.abs() + U * size)

    def moved(self, f: Any, more: Tensor | float, rounding: float) -> Approx:
        """A monotonic function, whose argument is off by `more` besides, and which is rounded by so much itself."""
        value, ends = f(self.value), [f(self.value + sign * (self.error + more)) for sign in (-1, 1)]
        return Approx(value, torch.maximum(*((end - value).abs() + rounding * end.abs() for end in ends)) + TINY)

    def exp(self) -> Approx:
        return self.moved(torch.exp, 2 * U * self.size, 4 * U)

    def sigmoid(self) -> Approx:
        return self.moved(torch.sigmoid, 2 * U * self.size + 4 * U, 3 * U)  # as much in v as e^-v is off; a sum and a reciprocal

    def softplus(self) -> Approx:
        """max(v, 0) + log(1 + e^-|v|): the logarithm has the power's relative error, and 6 U more."""
        log = torch.log1p(torch.exp(-self.value.abs()))
        result = self.moved(lambda v: torch.logaddexp(v, torch.zeros_like(v)), 0.0, U)
        return Approx(result.value, result.error + (2 * U * self.size + 10 * U) * log)


def exact(values: Tensor) -> Approx:
    return Approx(values.double(), torch.zeros_like(values, dtype=torch.float64))


def dot(a: Approx, b: Approx, roundings: int, reach: Tensor | None = None) -> Approx:
    """Sum of products over the last axis, each of which goes through that many roundings; `reach`: of the terms that `a` is a sum of."""
    value, size = a.value * b.value, a.size * b.size
    rounded = roundings * U * (size if reach is None else reach * b.size)
    return Approx(value.sum(-1), (size - value.abs() + rounded).sum(-1))
