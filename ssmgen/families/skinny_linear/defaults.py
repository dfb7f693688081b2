"""Default variants of skinny_linear: one weight and several, up to 8 rows and up to 16, both kinds of kernels, weights of 8
bits, the norm before a product, activations, multipliers and residuals after it, the other branches."""

from __future__ import annotations

from ...spec.kernel import SM90, DType, Loads, Narrow
from ...variants.defaults import Default
from .problem import SkinnyProblem

DEFAULTS = {
    "an in-projection": Default(SkinnyProblem(k=4096), 18560, SM90),
    "an out-projection, 16 rows": Default(SkinnyProblem(k=8192, rows=16), 4096, SM90),
    "q, k and v, with biases": Default(SkinnyProblem(k=2048, bias=DType.BF16, weights=3), 4096, SM90),
    "relu2, not aligned, a part of a piece, f32 results": Default(
        SkinnyProblem(k=1000, x=DType.F16, out=DType.F32, loads=Loads.ELEMENT, relu2=True), 4096, SM90
    ),
    "f32": Default(SkinnyProblem(k=2048, x=DType.F32, out=DType.F32), 4096),
    "f32, relu2, two weights with biases, not aligned": Default(
        SkinnyProblem(k=200, x=DType.F32, out=DType.F32, bias=DType.F32, weights=2, rows=16, loads=Loads.ELEMENT, relu2=True), 1024
    ),
    "an in-projection, int8": Default(SkinnyProblem(k=4096, narrow=Narrow.I8, scale=DType.F32), 18560, SM90),
    "an out-projection, 16 rows, e4m3": Default(SkinnyProblem(k=8192, rows=16, narrow=Narrow.E4M3, scale=DType.F32), 4096, SM90),
    "f16, int8, two weights, a part of a piece": Default(
        SkinnyProblem(k=1040, x=DType.F16, out=DType.F16, weights=2, narrow=Narrow.I8, scale=DType.F16), 4096, SM90
    ),
    "e4m3 on older cards": Default(SkinnyProblem(k=2048, narrow=Narrow.E4M3, scale=DType.F32), 4096),
    "an MLP's norm, gate and up": Default(SkinnyProblem(k=4096, weights=2, gated=True, norm=DType.BF16), 2 * 14336, SM90),
    "an MLP's up, relu2": Default(SkinnyProblem(k=4096, relu2=True), 21504, SM90),
    "an MLP's down, with the residual": Default(SkinnyProblem(k=14336, residual=DType.BF16), 4096, SM90),
    "norm, q, k and v, 16 rows, not aligned, int8": Default(
        SkinnyProblem(k=2048, bias=DType.F32, weights=3, rows=16, norm=DType.F32, narrow=Narrow.I8, scale=DType.F32, loads=Loads.ELEMENT),
        4096,
        SM90,
    ),
    "several products, with residuals": Default(SkinnyProblem(k=2048, weights=2, residual=DType.F32), 4096, SM90),
    "an in-projection with multipliers": Default(SkinnyProblem(k=3072, scale=DType.F32), 6680, SM90),
    "an MLP's gate and up, with multipliers": Default(SkinnyProblem(k=3072, weights=2, gated=True, scale=DType.F32), 2 * 12288, SM90),
    "f32, norm, gate and up, residual": Default(
        SkinnyProblem(k=2048, x=DType.F32, out=DType.F32, weights=2, gated=True, norm=DType.F32, residual=DType.F32), 4096
    ),
}
