"""Products of warpgroups: in the emulator, with the mistakes that it must find, and ptxas's code for them."""

from __future__ import annotations

import re

import pytest
import torch
from emulated_calls import needs_emulator
from product_cases import COMMIT, FENCE, LANDED, NO_FENCE, SYNC, WAIT, close, product_of, random, run, with_library

from ssmgen.compile import nvrtc
from ssmgen.emulator import EmulatorError
from ssmgen.errors import CompileError
from ssmgen.spec.kernel import Arch


@needs_emulator
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("by_columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("columns", [64, 128])
def test_a_product(columns, by_columns, dtype):
    a, b = random(64, 64, dtype=dtype), random(64, columns, dtype=dtype)
    out = run(product_of(columns, by_columns), a, b if by_columns else b.T.contiguous(), torch.full((64, columns), torch.nan))
    assert close(out, a.double() @ b.double())


@needs_emulator
def test_32_columns_of_wider_ones():
    """Columns 32 to 63 of 64, by columns, and rows 8 to 39, by rows: matrices may begin within others."""
    for by_columns, begin, part in ((True, 64, slice(32, 64)), (False, 1024, slice(8, 40))):
        text = product_of(64, by_columns).replace("wgmma_64", "wgmma_32").replace("d[64 / 2]", "d[16]")
        a, b = random(64, 64), random(64, 64)
        text = text.replace("right + k", f"right + {begin} + k")
        out = run(text, a, b if by_columns else b.T.contiguous(), torch.full((64, 32), torch.nan))
        assert close(out, a.double() @ b.double()[:, part])


START = "  wgmma_fence();\n"
LEGAL = {
    "the readers' fence": (FENCE + SYNC, SYNC + FENCE),
    "another thread's fence": (FENCE + SYNC, SYNC + "  if (t == 77) fence_for_async();\n" + SYNC),
    "two groups": (COMMIT, COMMIT + "  wgmma_wait<1>();\n"),
    "summed from zero": ("float d[64 / 2];", "float d[64 / 2] = {};"),
    "one group after another": (", k > 0);\n" + COMMIT + WAIT, ", k > 0), wgmma_commit();\n" + WAIT),
    "each waited for": (", k > 0);\n" + COMMIT + WAIT, ", k > 0), wgmma_commit(), wgmma_wait<0>(), wgmma_fence();\n"),
    "two sums": (
        COMMIT + WAIT + LANDED,
        COMMIT
        + "  float e[32];\n  wgmma_64<0>(e, left[0], right, 0);\n"
        + COMMIT
        + "  wgmma_wait<1>();\n"
        + LANDED
        + "  left[1][0] = round_2xbf16(d[0], d[1]);\n"
        + WAIT
        + "  wgmma_landed(e);\n",
    ),
    "registers": (START, "  take_registers<200>();\n" + START),
}


@needs_emulator
@pytest.mark.parametrize("form", LEGAL)
def test_other_legal_forms(form):
    old, new = LEGAL[form]
    text = product_of(64, False)
    assert old in text
    a, b = random(64, 64), random(64, 64)
    assert close(run(text.replace(old, new, 1), a, b.T.contiguous(), torch.full((64, 64), torch.nan)), a.double() @ b.double())


ISSUE = "  for (u32 k = 0; k < 4; ++k) wgmma_64"
SUMMED = "uses what products in flight sum up: nobody has waited for them"
REST = COMMIT + WAIT + LANDED + "  store_sums(out, d);\n"
BUGS = {
    "no wait": (WAIT, "", "names as landed what products in flight sum up"),
    "no wait, and unnamed": (WAIT + LANDED, "", SUMMED),
    "waits for one group less": ("wait<0>", "wait<1>", "names as landed what products in flight sum up"),
    "rounded before the wait": (WAIT, "  left[0][0] = round_2xbf16(d[0] * 2.f, 1.f);\n" + WAIT, SUMMED),
    "shuffled before the wait": (WAIT, "  __shfl_sync(~0u, d[1], 0);\n" + WAIT, SUMMED),
    "shared before the wait": (WAIT, "  SHARED(float, f, 128);\n  f[t] = 3.f - d[1];\n" + WAIT, SUMMED),
    "exponential before the wait": (WAIT, "  rcp_approx(-d[5]);\n" + WAIT, SUMMED),
    "no commit": (COMMIT, "", "waits for products that nobody has committed"),
    "nothing to wait for": (WAIT, WAIT + WAIT, "waits for products, and none are in flight"),
    "ends without a commit": (REST, "", "has ended with products that it has not committed"),
    "ends without a wait": (REST, COMMIT, "has ended without waiting for its products"),
    "no fence for async": (FENCE, "", f"product of tile[0] in shared memory, which thread 0 has written, {NO_FENCE}"),
    "fenced before the copies land": ("  wait_all_copies();\n" + FENCE, FENCE + "  wait_all_copies();\n", f"has written, {NO_FENCE}"),
    "fenced by some": (FENCE, "  if (t < 120) fence_for_async();\n", f"which thread 120 has written, {NO_FENCE}"),
    "no barrier": (SYNC, "", "has written, with no barrier between"),
    "no wait for the copies": ("  wait_all_copies();\n", "", "copies to, and that thread has not waited for the copy"),
    "nothing there": ("i < 64 * 8", "i < 60 * 8", "product of tile[1936] in shared memory, which nothing has written"),
    "past the end": ("_rows(tile, 0)", "_rows(tile, 4096)", "product of tile[4096] in shared memory; it has 4096 elements"),
    "stored meanwhile": ("", "  if (t == 40) tile[7] = 0;\n", "store to tile[7] in shared memory, written while a product reads it"),
    "copied meanwhile": ("", "  copy_async(tile, 0, b);\n", "copy to tile[0] in shared memory, written while a product reads it"),
    "stored without a barrier": (WAIT, WAIT + "  if (t == 127) tile[7] = 0;\n", "has read, with no barrier between"),
    "operand changed": (WAIT, "  left[2][1] ^= 1;\n" + WAIT, "registers of a product's first operand, changed while a product reads them"),
    "sum changed": (WAIT, "  d[3] = 0;\n" + WAIT, "registers that products sum into, changed while they are in flight"),
    "sum changed between": ("d, left[k], right", "(d[0] = k ? 0.f : d[0], d), left[k], right", "changed while they are in flight"),
    "another shape": ("", "  wgmma_8<0>(reinterpret_cast<float(&)[4]>(d[8]), left[0], right, 1);\n", "a product of another shape"),
    "no fence of registers": (START, "", "a product with no wgmma_fence since products were last waited for"),
    "no fence since the wait": (WAIT, WAIT + "  wgmma_64<0>(d, left[0], right, 1);\n", "a product with no wgmma_fence since"),
    "operand changed since the fence": (START, START + "  left[3][0] += 1;\n", "first operand, changed since the last wgmma_fence"),
    "sum changed since the fence": (START, START + "  d[0] = 5;\n", "that products sum into, changed since the last wgmma_fence"),
    "any alignment": ("SWIZZLED_SHARED", "DYNAMIC_SHARED", "matrix of tile, which is declared with an alignment of 16 bytes instead"),
    "begins with another row": ("_rows(tile, 0)", "_rows(tile, 32)", "at byte 128 of tile: its rows do not begin with one of every 8"),
    "begins past its rows' end": ("k * 32", "k * 48", "begins at byte 144 of tile: its rows do not begin"),
    "goes on past its rows": ("right + k", "right + 16 + k", "begins at byte 112 of tile: its rows go on behind their 128 bytes"),
    "by columns": ("_64<0>", "_64<1>", "begins at byte 0 of tile, by rows, in a product by columns"),
    "three warps": (ISSUE, "  if (warp != 2)\n" + ISSUE, "all four warps do them all"),
    "one product less": ("k < 4; ++k) wg", "k < (warp == 3 ? 3 : 4); ++k) wg", "has ended after 3 products and changes of registers"),
    "another product": ("right + k", "right + (warp == 3) * 32 + k", "a product that is not what another warp of the warpgroup"),
    "half a warp": (ISSUE, "  if (t % 32 < 16)\n" + ISSUE, "divergent instruction of a warp"),
    "lanes of their own": ("right + k", "right + (t == 5) * 32 + k", "thread 5 (lane 5): a product that is not the one of lane 0"),
    "registers twice": (START, START + "  give_registers<40>();\n  take_registers<80>();\n", "that has changed its registers before"),
    "registers of some": (START, "  if (warp) take_registers<80>();\n" + START, "a product that is not what another warp"),
}  # fmt: skip


@needs_emulator
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug(bug):
    old, new, words = BUGS[bug]
    text = product_of(64, False)
    if not old:  # between the commit and the wait
        old, new = WAIT, new + WAIT
    if bug.startswith("sum changed since"):  # values that are not summed on may be anything
        text = text.replace("k > 0", "1").replace("float d[64 / 2]", "float d[64 / 2] = {}")
    assert old in text
    with pytest.raises(EmulatorError) as e:
        run(text.replace(old, new, 1), random(64, 64), random(64, 64), torch.full((64, 64), torch.nan))
    assert words in str(e.value) and "block 0, thread " in str(e.value)


@needs_emulator
def test_a_block_has_all_four_warps():
    with pytest.raises(EmulatorError, match="a product of a warpgroup, of whose four warps the block has 3"):
        run(product_of(64, False).replace("i += 128", "i += 96"), random(64, 64), random(64, 64), torch.zeros(64, 64), block=96)


@needs_emulator
def test_another_order_in_shared_memory_is_another_product():
    a, b = random(64, 64), random(64, 64)
    out = run(product_of(64, False).replace("(piece ^ row % 8)", "piece"), a, b.T.contiguous(), torch.full((64, 64), torch.nan))
    assert not out.isnan().any() and not torch.allclose(out.double(), a.double() @ b.double(), atol=1)


@pytest.mark.parametrize("text", [product_of(64, False), product_of(128, True)], ids=["rows", "columns"])
def test_ptxas_takes_them(text):
    compiled = nvrtc.compile_cubin(with_library(text), Arch.parse("sm_90a"), "product")
    assert not compiled.resources.spills


SERIALISED = {
    "sum used in flight": (COMMIT, COMMIT + "  d[0] += 1;\n", "C7517", r"> +\d+ \| .*add\.rn\.f32"),
    "no wait": (WAIT, "", "C7517", r"> +\d+ \|"),
    "registers without a number of blocks": (START, "  take_registers<200>();\n" + START, "'setmaxnreg' ignored", "blocks"),
}


@pytest.mark.parametrize("form", SERIALISED)
def test_products_that_ptxas_waits_for_at_once_are_refused(form):
    old, new, words, line = SERIALISED[form]
    with pytest.raises(CompileError) as e:
        nvrtc.compile_cubin(with_library(product_of(64, False).replace(old, new, 1)), Arch.parse("sm_90a"), "product")
    assert words in str(e.value) and "wgmma_landed" in str(e.value) and re.search(line, str(e.value))
