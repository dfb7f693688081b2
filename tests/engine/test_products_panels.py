"""Products with a triangle that is kept as panels of 16 columns. Only the panels' rows from the diagonal on are copied."""

from __future__ import annotations

import pytest
import torch
from emulated_calls import needs_emulator
from kernel_laws import found_when_planted
from product_cases import NO_FENCE, Run, close, random, run, with_library
from torch import Tensor

from ssmgen.compile import nvrtc
from ssmgen.spec.kernel import Arch

# out = a b^T of 64 rows and columns, b a lower triangle, in panels of whose rows above the diagonal nothing is copied: they are cleared.
PANELS = """
extern "C" __global__ void __launch_bounds__(128) product(const void* a, const void* b, float* out) {
  SWIZZLED_SHARED(u32, tiles);
  SHARED(u64, full, 1);
  const u32 t = threadIdx.x;
  if (t == 0) barrier_init(full, 0, 1);
  for (u32 i = t; i < 2048; i += 128)
    if (i % 512 / 8 < i / 512 * 16) tiles[i] = 0;
  fence_for_async();
  __syncthreads();
  if (t == 0) {
    const u32* from = static_cast<const u32*>(b);
    barrier_arrive_expecting(full, 0, 5120);
    for (u32 c = 0; c < 4; ++c) {
      copy_bulk(tiles, c * 512 + c * 128, from, 2048 - 512 * c, full, 0);
      from += 512 - 128 * c;
    }
  }
  u32 left[4][4];
  for (u32 k = 0; k < 4; ++k) load_rows(a, k * 16, left[k]);
  float d[32];
  const Matrix right = matrix_by_short_rows(tiles, 0);
  barrier_wait(full, 0, 0);
  wgmma_fence();
#pragma unroll
  for (u32 k = 0; k < 4; ++k) wgmma_64<0>(d, left[k], right + k * 2048, k > 0);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_landed(d);
  store_sums(out, d);
}
"""
PRODUCT = "wgmma_64<0>(d, left[k], right + k * 2048, k > 0)"


def panels_of(triangle: Tensor) -> Tensor:
    """[64, 64] -> 5120 bytes: of each 16 columns the rows from the diagonal on, whose halves change places in every other four rows."""
    panels = []
    for c in range(4):
        rows = torch.arange(16 * c, 64)[:, None]
        halves = triangle[16 * c :, 16 * c : 16 * c + 16].reshape(-1, 2, 8)
        panels.append(halves[rows - 16 * c, torch.arange(2) ^ rows // 4 % 2].flatten())
    return torch.cat(panels)


def run_panels(text: str, dtype: torch.dtype = torch.bfloat16, run: Run = run) -> tuple[Tensor, Tensor]:
    """(the kernel's result, the expected result)"""
    a, b = random(64, 64, dtype=dtype), random(64, 64, dtype=dtype).tril()
    return run(text, a, panels_of(b), torch.full((64, 64), torch.nan)), a.double() @ b.double().T


@needs_emulator
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_a_triangle_in_panels(dtype):
    assert close(*run_panels(PANELS, dtype))


@needs_emulator
def test_as_first_operand():
    """Its product with itself."""
    out, _ = run_panels(PANELS.replace(PRODUCT, "wgmma_64_shared<0, 0>(d, right + k * 2048, right + k * 2048, k > 0)"))
    b = random(64, 64).tril().double()
    assert close(out, b @ b.T)


@needs_emulator
def test_its_place_in_memory():
    """Another order gives a different product: the emulator swizzles halves as the hardware does."""
    a, b = random(64, 64), random(64, 64).tril()
    panels = panels_of(b).view(-1, 4, 16)
    plain = torch.cat([b[16 * c :, 16 * c : 16 * c + 16].flatten() for c in range(4)]).view(-1, 4, 16)
    assert torch.equal(panels[::2], plain[::2]) and torch.equal(panels[1::2], plain[1::2].roll(8, -1))
    out = run(PANELS, a, plain.flatten(), torch.full((64, 64), torch.nan))
    assert not torch.allclose(out.double(), a.double() @ b.double().T, atol=1)


BUGS = {
    "nothing above the diagonal": ("< i / 512 * 16", "< 0", "product of tiles[512] in shared memory, which nothing has written"),
    "cleared by whom it takes": ("  fence_for_async();\n", "", NO_FENCE),
    "begins with another row": ("_rows(tiles, 0)", "_rows(tiles, 32)", "at byte 128 of tiles: its rows do not begin with one of every 8"),
    "goes on past its rows": ("_rows(tiles, 0)", "_rows(tiles, 4)", "begins at byte 16 of tiles: its rows go on behind their 32 bytes"),
    "by columns": ("wgmma_64<0>", "wgmma_64<1>", "begins at byte 0 of tiles, by rows, in a product by columns"),
    "past the end": ("_rows(tiles, 0)", "_rows(tiles, 4096)", "product of tiles[4096] in shared memory; it has 4096 elements"),
    "bytes that nobody expects": ("5120", "5136", "nobody ends"),
    "no wait for the copies": ("  barrier_wait(full, 0, 0);\n", "", "which thread 0 copies to, and that thread has not waited"),
}


@needs_emulator
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_in_panels(bug):
    found_when_planted(PANELS, BUGS[bug], lambda text: run_panels(text))


def test_ptxas_takes_them():
    assert not nvrtc.compile_cubin(with_library(PANELS), Arch.parse("sm_90a"), "product").resources.spills
