"""Products of f32 numbers, which the tensor cores truncate to tf32; and words of shared memory at known distances, in the emulator."""

from __future__ import annotations

import pytest
import torch
from emulated_calls import needs_emulator
from product_cases import Run, random, run
from torch import Tensor

from ssmgen.emulator import EmulatorError

# out = a b^T + 1, a of 16 rows and 8 columns and b of 8: by one warp of four, through shared memory, and log2 of the words of row 3 of a.
PRODUCT = """
extern "C" __global__ void __launch_bounds__(128) product(const float* a, const float* b, float* out) {
  ALIGNED_SHARED(u32, words, 256);
  const u32 t = threadIdx.x, quad = t / 4, part = t % 4;
  if (t >= 32) return;
  u32 quads[2][4];
  load_4xu32(a + 4 * t, quads[0]);
  if (t < 16) load_4xu32(b + 4 * t, quads[1]);
  const Place own = place_in(words, 4 * t);
  store_quad(own, 0, quads[0]);
  if (t < 16) store_quad(own + 64, 64, quads[1]);
  __syncwarp();
  const Place row = place_in(words, 8 * quad + part);
  const auto number = [&](int ahead) { return __uint_as_float(load_word(row, ahead)); };
  float d[4] = {1.f, 1.f, 1.f, 1.f};
  mma_tf32(d, number(0), number(64), number(4), number(68), number(128), number(132));
  for (u32 i = 0; i < 4; ++i) store_u32(out + (quad + i / 2 * 8) * 8 + 2 * part + i % 2, __float_as_uint(d[i]));
  load_quad(place_in(words, 24), 4 * int(t % 2), quads[0]);
  if (t < 2)
    for (u32 i = 0; i < 4; ++i) store_u32(out + 128 + 4 * t + i, __float_as_uint(log2_approx(__uint_as_float(quads[0][i]))));
}
"""


def run_tf32(text: str, launch: Run) -> tuple[Tensor, Tensor]:
    """(the result, the expected result). Numbers are truncated to tf32; their lower bits are ones, so rounding would change them."""
    a, b = (random(rows, 8, dtype=torch.float32).abs() + 0.1 for rows in (16, 8))
    seen = [(t.view(torch.int32) & ~0x1FFF).view(torch.float32).double() for t in (a, b)]
    given = [(t.view(torch.int32) | 0x1FFF).view(torch.float32) for t in (a, b)]
    out = launch(text, *given, torch.full((17, 8), torch.nan))
    return out.double(), torch.cat([seen[0] @ seen[1].T + 1, given[0][3:4].double().log2()])


@needs_emulator
def test_a_product_of_what_tf32_has_of_numbers():
    out, want = run_tf32(PRODUCT, run)
    assert torch.allclose(out, want, rtol=2.0**-21, atol=2.0**-22)


BUGS = {
    "not aligned": ("load_quad(place_in(words, 24), 4 *", "load_quad(place_in(words, 24), 2 *", "does not begin at a multiple of 16"),
    "not ordered": ("  __syncwarp();\n", "", "shared memory"),
    "not written": ("number(132)", "number(192)", "shared memory"),
}


@needs_emulator
@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_found(bug):
    old, new, message = BUGS[bug]
    assert old in PRODUCT
    with pytest.raises(EmulatorError, match=message):
        run_tf32(PRODUCT.replace(old, new), run)
