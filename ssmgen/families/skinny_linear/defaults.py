"""Default variants of skinny_linear: one weight and several, up to 8 rows and up to 16, both kinds of kernels, the other branches."""

from __future__ import annotations

from ...spec.kernel import SM90, DType, Loads
from ...variants.defaults import Default
from .problem import SkinnyProblem

DEFAULTS = {
    "an in-projection": Default(SkinnyProblem(k=4096), 18560, SM90),
    "an out-projection, 16 rows": Default(SkinnyProblem(k=8192, rows=16), 4096, SM90),
    "q, k and v, with biases": Default(SkinnyProblem(k=2048, bias=DType.BF16, weights=3), 4096, SM90),
    "not aligned, a part of a piece, f32 results": Default(
        SkinnyProblem(k=1000, x=DType.F16, out=DType.F32, loads=Loads.ELEMENT), 4096, SM90
    ),
    "f32": Default(SkinnyProblem(k=2048, x=DType.F32, out=DType.F32), 4096),
    "f32, two weights with biases, not aligned": Default(
        SkinnyProblem(k=200, x=DType.F32, out=DType.F32, bias=DType.F32, weights=2, rows=16, loads=Loads.ELEMENT), 1024
    ),
}
