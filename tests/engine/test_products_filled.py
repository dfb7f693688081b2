"""Products of two operands in shared memory, which a warp fills by copies that a barrier waits for."""

from __future__ import annotations

import pytest
import torch
from emulated_calls import needs_emulator
from product_cases import NO_FENCE, Run, close, numbers_of, random, run, with_library
from torch import Tensor

from ssmgen.compile import nvrtc
from ssmgen.emulator import EmulatorError
from ssmgen.spec.kernel import Arch

# out = the sum of three products a b of 64 rows and columns, through two buffers.
FILLED = """
extern "C" __global__ void __launch_bounds__(160) product(const void* a, const void* b, float* out) {
  SWIZZLED_SHARED(u32, tiles);
  SHARED(u64, full, 2);
  SHARED(u64, empty, 2);
  const u32 t = threadIdx.x, lane = t % 32;
  if (t == 0)
    for (u32 s = 0; s < 2; ++s) barrier_init(full, s, 32), barrier_init(empty, s, 4);
  __syncthreads();
  if (t >= 128) {
    for (u32 c = 0; c < 3; ++c) {
      if (c > 1) barrier_wait(empty, c % 2, 0);
      for (u32 i = lane; i < 1024; i += 32) {
        const u32 row = i / 8 % 64, piece = i % 8;
        const u32* const from = static_cast<const u32*>(i < 512 ? a : b) + c * 2048 + row * 32 + piece * 4;
        copy_async(tiles, c % 2 * 4096 + i / 512 * 2048 + row * 32 + (piece ^ row % 8) * 4, from);
      }
      barrier_arrive_with_copies(full, c % 2);
    }
    wait_all_copies();
    return;
  }
  float d[32];
  for (u32 c = 0; c < 3; ++c) {
    const Matrix left = {left}(tiles, c % 2 * 4096{next_of_left}), right = {right}(tiles, c % 2 * 4096 + 2048{next_of_right});
    barrier_wait(full, c % 2, c / 2);
    fence_for_async();
    wgmma_fence();
#pragma unroll
    for (u32 k = 0; k < 4; ++k) wgmma_64_shared<{forms}>(d, left + k * {step_of_left}, right + k * {step_of_right}, c + k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    __syncwarp();
    if (lane == 0) barrier_arrive(empty, c % 2);
  }
  wgmma_landed(d);
  store_sums(out, d);
}
"""


def filled(left: bool, right: bool) -> str:
    """The kernel; of an operand by columns, or by rows."""
    text = FILLED.replace("{forms}", f"{int(left)}, {int(right)}")
    for name, by_columns in (("left", left), ("right", right)):
        text = text.replace(f"{{{name}}}", "matrix_by_columns" if by_columns else "matrix_by_rows")
        text = text.replace(f"{{next_of_{name}}}", ", 0" if by_columns else "").replace(
            f"{{step_of_{name}}}", "2048" if by_columns else "32"
        )
    return text


def run_filled(
    text: str, left: bool = False, right: bool = False, dtype: torch.dtype = torch.bfloat16, run: Run = run
) -> tuple[Tensor, Tensor]:
    """(the kernel's result, the expected result)"""
    a, b = random(3, 64, 64, dtype=dtype), random(64, 3, 64, dtype=dtype).transpose(0, 1)
    named = (a.mT if left else a).contiguous(), (b if right else b.mT).contiguous()
    assert numbers_of(a) == ("bf16" if dtype is torch.bfloat16 else "f16")
    return run(text, *named, torch.full((64, 64), torch.nan), block=160, shared=32768), (a.double() @ b.double()).sum(0)


@needs_emulator
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("left", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("right", [False, True], ids=["by-rows", "by-columns"])
def test_a_product_of_what_is_copied(left, right, dtype):
    out, want = run_filled(filled(left, right), left, right, dtype)
    assert close(out / 3, want / 3)


TEXT = filled(False, False)
COPIES_WAIT, WAIT = "    wait_all_copies();\n", "    barrier_wait(full, c % 2, c / 2);\n"
ARRIVE, FENCE = "      barrier_arrive_with_copies(full, c % 2);\n", "    fence_for_async();\n"
NEGATED = """
    for (u32 i = 0; i < 4; ++i) {
      u32 words[4];
      load_4_shared(tiles, c % 2 * 4096 + (i * 128 + t) * 4, words);
      for (u32 w = 0; w < 4; ++w) words[w] ^= 0x80008000u;
      store_4_shared(tiles, c % 2 * 4096 + (i * 128 + t) * 4, words);
    }
    fence_for_async();
    meet(1, 128);
"""


@needs_emulator
@pytest.mark.parametrize(
    ("old", "new", "sign"),
    [(COPIES_WAIT, "", 1), (ARRIVE, "      commit_copies();\n" + ARRIVE, 1), (FENCE, NEGATED + FENCE, -1)],
    ids=["only-the-barrier-waits", "in-groups-too", "stored-again"],
)
def test_other_legal_forms(old, new, sign):
    assert old in TEXT
    out, want = run_filled(TEXT.replace(old, new))
    assert close(sign * out / 3, want / 3)


RELEASE = "    __syncwarp();\n    if (lane == 0) barrier_arrive(empty, c % 2);\n"
LEFT = "matrix_by_rows(tiles, c % 2 * 4096)"
ALSO = {
    "fenced by those who copy": (ARRIVE, "      fence_for_async();\n" + ARRIVE),
    "arrives ahead of its copies": (ARRIVE, ""),
    "nobody waits": (COPIES_WAIT, ""),
}  # changed first
BUGS = {
    "no wait": (WAIT, "", "product of tiles[0] in shared memory, which thread 128 copies to, and that thread has not waited"),
    "no wait for the last": (WAIT, "    if (c < 2) barrier_wait(full, c % 2, c / 2);\n", "product of tiles["),
    "the phase before": ("full, c % 2, c / 2", "full, c % 2, 0", "waits for phase 0 of full[0] by its parity, and the next is over too"),
    "no fence": (FENCE, "", f"has written, {NO_FENCE}"),
    "fenced by those who copy": (FENCE + "    wgmma_fence", "    wgmma_fence", f"has written, {NO_FENCE}"),
    "arrives ahead of its copies": (
        "      for (u32 i = lane",
        ARRIVE + "      for (u32 i = lane",
        "copies to, and that thread has not waited",
    ),
    "some do not arrive": (ARRIVE, "      if (lane)\n" + ARRIVE, "which nobody ends: 1 of 32 have not arrived"),
    "arrives twice": (ARRIVE, ARRIVE + ARRIVE, "arrives at full[0], at which all 32 have arrived and copies are in flight"),
    "released ahead of the wait": (
        "    wgmma_wait<0>();\n" + RELEASE,
        RELEASE + "    wgmma_wait<0>();\n",
        "copy to tiles[0] in shared memory, wh",
    ),
    "copies of their own": (COPIES_WAIT, "    copy_async(tiles, 0, b);\n", "in shared memory, wh"),
    "nobody waits": ("c < 3; ++c) {\n    const", "c < 2; ++c) {\n    const", "has ended, and nobody has waited for its copy to tiles["),
    "no arrival": (
        ARRIVE + "    }\n" + COPIES_WAIT,
        "      if (c < 2) barrier_arrive_with_copies(full, c % 2);\n    }\n",
        "without waiting for its copy",
    ),
    "by columns": ("<0, 0>", "<1, 0>", "matrix that begins at byte 0 of tiles, by rows, in a product by columns"),
    "past its rows": ("left + k", "left + 16 + k", "begins at byte 112 of tiles: its rows go on behind their 128 bytes"),
    "another first operand": ("left + k", "left + (t / 32 == 3) * 32 + k", "that is not what another warp of the warpgroup"),
    "past the end": (LEFT, "matrix_by_rows(tiles, 8192)", "product of tiles[8192] in shared memory; it has 8192 elements"),
    "stored meanwhile": (
        "    wgmma_wait<0>();\n",
        "    if (t == 40) tiles[7] = 0;\n    wgmma_wait<0>();\n",
        "written while a product reads it",
    ),
    "misaligned": (
        FENCE,
        NEGATED.replace("* 4, words", "* 4 + 2, words") + FENCE,
        "load of four words of tiles[2] in shared memory, which does not",
    ),
    "misaligned store": (
        FENCE,
        NEGATED.replace("t) * 4, words);\n    }", "t) * 4 + 1, words);\n    }") + FENCE,
        "store of four words of tiles[",
    ),
    "stored with no fence": (FENCE, FENCE + NEGATED.replace("fence_for_async();", ""), f"has written, {NO_FENCE}"),
}


@needs_emulator
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug(bug):
    old, new, words = BUGS[bug]
    text = TEXT.replace(*ALSO.get(bug, (ARRIVE, ARRIVE)))
    assert old in text
    with pytest.raises(EmulatorError) as e:
        run_filled(text.replace(old, new, 1))
    assert words in str(e.value)


@pytest.mark.parametrize(
    "text", [filled(False, False), filled(True, True), TEXT.replace(FENCE, NEGATED)], ids=["rows", "columns", "stored"]
)
def test_ptxas_takes_them(text):
    compiled = nvrtc.compile_cubin(with_library(text), Arch.parse("sm_90a"), "product")
    assert not compiled.resources.spills
