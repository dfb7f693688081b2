"""Kernels of products of warpgroups, and how to run them in the emulator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ssmgen.compile.render import environment
from ssmgen.emulator import run_source
from ssmgen.spec.arguments import Arguments
from ssmgen.spec.kernel import KernelSpec, Needs, Param

Run = Callable[..., Tensor]  # as `run`, which emulates

LIBRARY = """
{% include "lib/types.cuh.j2" %}
{% include "lib/ptx.cuh.j2" %}
{% include "lib/shared.cuh.j2" %}
// What a lane has of 16 rows and 16 columns of a matrix whose rows have 64 numbers.
DEVICE void load_rows(const void* from, u32 column, u32* r) {
  const u32 t = threadIdx.x % 128, *words = static_cast<const u32*>(from) + (t / 32 * 16 + t % 32 / 4) * 32 + column / 2 + t % 4;
  for (u32 i = 0; i < 4; ++i) r[i] = load_u32(words + i % 2 * 8 * 32 + i / 2 * 4);
}
template <u32 Count>
DEVICE void store_sums(float* out, const float (&d)[Count]) {
  const u32 t = threadIdx.x % 128;
  for (u32 i = 0; i < Count; ++i)
    store_u32(out + (t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8) * 2 * Count + i / 4 * 8 + t % 4 * 2 + i % 2, __float_as_uint(d[i]));
}
"""

# out = a b, 64 rows, {columns} columns. b has its columns as rows, of 64 numbers that are summed over, or such rows of {columns}.
PRODUCT = """
extern "C" __global__ void __launch_bounds__(128) product(const void* a, const void* b, float* out) {
  SWIZZLED_SHARED(u32, tile);
  const u32 t = threadIdx.x, warp = t / 32;
  for (u32 i = t; i < {columns} * 8; i += 128) {
    const u32 row = i / 8, piece = i % 8, from = {by_columns} ? row % 64 * ({columns} / 8) + row / 64 * 8 + piece : i;
    copy_async(tile, (row * 8 + (piece ^ row % 8)) * 4, static_cast<const u32*>(b) + from * 4);
  }
  u32 left[4][4];
  for (u32 k = 0; k < 4; ++k) load_rows(a, k * 16, left[k]);
  float d[{columns} / 2];
  const Matrix right = {by_columns} ? matrix_by_columns(tile, 0, 8192) : matrix_by_rows(tile, 0);
  wait_all_copies();
  fence_for_async();
  __syncthreads();
  wgmma_fence();
#pragma unroll
  for (u32 k = 0; k < 4; ++k) wgmma_{columns}<{by_columns}>(d, left[k], right + k * {step}, k > 0);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_landed(d);
  store_sums(out, d);
}
"""


class Product(KernelSpec):
    """Only a parameter list."""

    def parameters(self) -> list[Param]:
        return [Param.pointer("a", "void"), Param.pointer("b", "void"), Param.pointer("out", "f32", const=False)]


def with_library(text: str, numbers: str = "bf16", clusters: bool = False) -> str:
    shared = {"copies": True, "matrices": True, "matrix_turns": True, "places": True, "barriers": True, "meetings": True}
    needs = Needs(mma=numbers, tf32=True, logs=True, warpgroups=(64, 128), panels=True, **shared)
    return environment().from_string(LIBRARY + text).render(dtypes={numbers}, needs=needs, clusters=clusters, waits=False, triggers=False)


def product_of(columns: int, by_columns: bool) -> str:
    text = PRODUCT
    for name, value in {"columns": columns, "by_columns": int(by_columns), "step": 2048 if by_columns else 32}.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def numbers_of(a: Tensor) -> str:
    return "bf16" if a.dtype == torch.bfloat16 else "f16"


def run(text: str, a: Tensor, b: Tensor, out: Tensor, block: int = 128, blocks: int = 1, shared: int = 16384) -> Tensor:
    """The contents of out after the kernel; blocks: of one cluster."""
    named = {"a": a, "b": b, "out": out}
    packed = Arguments(Product(), {}).at([t.data_ptr() for t in named.values()])
    run_source(with_library(text, numbers_of(a), blocks > 1), "product", blocks, block, packed, named, ("out",), shared, cluster=blocks)
    return out


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def close(out: Tensor, want: Tensor) -> bool:
    """Sums of 64 products in f32, which are about 8 in size, from exact products."""
    return torch.allclose(out.double(), want, rtol=0, atol=64 * 2.0**-24 * 8)


def close_twice(out: Tensor, want: Tensor) -> bool:
    """The same of sums that are about 64 in size, of numbers that were rounded to bf16: some may be the next one to either side, which
    changes a column by less than 4 times 2^-8 of 64."""
    error = (out - want).abs()
    return bool((error < 64 * 2.0**-24 * 64).double().mean() > 0.95 and error.max() < 1)


FENCE, SYNC, COMMIT, WAIT, LANDED = (
    f"  {word};\n" for word in ("fence_for_async()", "__syncthreads()", "wgmma_commit()", "wgmma_wait<0>()", "wgmma_landed(d)")
)
NO_FENCE = "with no fence_for_async between"
