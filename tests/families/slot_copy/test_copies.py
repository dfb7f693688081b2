"""Asynchronous copies, and matrices from shared memory: in the emulator, with the mistakes that it must find, and in SASS."""

from __future__ import annotations

import re

import pytest
import torch
from emulated_calls import needs_emulator
from kernel_laws import found_when_planted
from selection import costly
from torch import Tensor

from ssmgen.compile import nvrtc
from ssmgen.compile.render import environment
from ssmgen.emulator import run_source
from ssmgen.engine.tiles import maps
from ssmgen.spec.arguments import Arguments
from ssmgen.spec.kernel import Arch, KernelSpec, Needs, Param
from ssmgen.variants import inspect

LIBRARY = """
{% include "lib/types.cuh.j2" %}
{% include "lib/ptx.cuh.j2" %}
{% include "lib/shared.cuh.j2" %}
"""

# out = a b, 32 rows, 64 and 16 columns: 16 columns of a and rows of b at once, through two buffers. Rows that a does not have are zero.
PRODUCT = """
extern "C" __global__ void product(const bf16* a, const bf16* b, float* out, u32 rows) {
  ALIGNED_SHARED(u32, A, 2 * 32 * 8);
  ALIGNED_SHARED(u32, B, 2 * 16 * 8);
  const u32 t = threadIdx.x, lane = t % 32, warp = t / 32, half = t % 2, row = t / 2;
  const auto ask = [&](u32 chunk) {
    copy_async(A, chunk % 2 * 256 + row * 8 + half * 4, a + row * 64 + chunk * 16 + half * 8, row < rows ? 16 : 0);
    if (t < 32) copy_async(B, chunk % 2 * 128 + t * 4, b + chunk * 256 + t * 8);
    commit_copies();
  };
  float sums[2][4] = {};
  ask(0);
  for (u32 chunk = 0; chunk < 4; ++chunk) {
    if (chunk < 3) ask(chunk + 1);
    else commit_copies();
    wait_copies<1>();
    __syncthreads();
    u32 left[4], right[4];
    load_matrices(left, A, chunk % 2 * 256 + (warp * 16 + lane % 16) * 8 + lane / 16 * 4);
    load_matrices_transposed(right, B, chunk % 2 * 128 + lane % 16 * 8 + lane / 16 * 4);
    for (u32 n = 0; n < 2; ++n) mma_bf16(sums[n], left[0], left[1], left[2], left[3], right[2 * n], right[2 * n + 1]);
    __syncthreads();
  }
  wait_all_copies();
  for (u32 i = 0; i < 8; ++i)
    store_u32(out + (warp * 16 + lane / 4 + i / 2 % 2 * 8) * 16 + i / 4 * 8 + lane % 4 * 2 + i % 2, __float_as_uint(sums[i / 4][i % 4]));
}
"""


class Product(KernelSpec):
    """Only a parameter list."""

    def parameters(self) -> list[Param]:
        return [Param.pointer("a", "bf16"), Param.pointer("b", "bf16"), Param.pointer("out", "f32", const=False), Param.u32("rows")]


def with_library(text: str, barriers: bool = False) -> str:
    nothing = dict.fromkeys(("clusters", "waits", "triggers"), False)
    needs = Needs(mma="bf16", copies=True, matrices=True, barriers=barriers, meetings=True)
    return environment().from_string(LIBRARY + text).render(dtypes={"bf16"}, needs=needs, **nothing)


def operands(rows: int = 30) -> dict[str, Tensor]:
    a, b = (torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16() for shape in ((rows, 64), (64, 16)))
    return {"a": a, "b": b, "out": torch.full((32, 16), torch.nan)}


def run(text: str, rows: int = 30, block: int = 64) -> tuple[Tensor, Tensor]:
    """(the kernel's result for random operands, their product)"""
    named = operands(rows)
    packed = Arguments(Product(), {"rows": rows}).at([t.data_ptr() for t in named.values()])
    run_source(with_library(text), "product", 1, block, packed, named, ("b", "out"))
    want = torch.zeros(32, 16)
    want[:rows] = named["a"].float() @ named["b"].float()
    return named["out"], want


@needs_emulator
@pytest.mark.parametrize(("array", "size"), [("ALIGNED_SHARED(u32,", 4), ("ALIGNED_SHARED(u16,", 2), ("SHARED(Quad,", 16)])
def test_a_product_through_two_buffers(array, size):
    """Sizes of arrays, and positions in them, count elements of every type."""
    text = PRODUCT.replace("ALIGNED_SHARED(u32,", array)
    for numbers in (r"2 \* (32|16) \* 8(?=\))", r"chunk % 2 \* (256|128) \+ [^,\n]*?(?=, [ab] |\);)"):
        text, found = re.subn(numbers, lambda m: f"({m[0]}) * 4 / {size}", text)
        assert found in (2, 4)
    for rows in (30, 32):
        out, want = run(text, rows)
        assert torch.allclose(out, want, atol=1e-5) and not out[rows:].any()


@needs_emulator
def test_copies_of_4_and_8_bytes():
    """Copies of 4 bytes to each element, in reverse; then of 8 of which every other thread's has 2 bytes, and zeros."""
    out, _ = run("""
      extern "C" __global__ void product(const bf16* a, const bf16* b, float* out, u32 rows) {
        SHARED(u32, tile, 64);
        SHARED(u64, pairs, 64);
        const u32 t = threadIdx.x;
        copy_async<4>(tile, 63 - t, a + 2 * t);
        copy_async<8>(pairs, t, a + 4 * t, t % 2 ? 2 : 8);
        wait_all_copies();
        __syncthreads();
        store_u32(out + t, tile[63 - t] != load_u32(a + 2 * t));
        store_u32(out + 64 + t, pairs[t] != (load_u64(a + 4 * t) & (t % 2 ? 0xffff : ~u64(0))));
      }
    """)
    assert not out.view(-1)[:128].view(torch.int32).any()


WAIT, SYNC = "    wait_copies<1>();\n", "    __syncthreads();\n"
UNWAITED, UNORDERED = ", and that thread has not waited for the copy", ", with no barrier between"
BUGS = {
    "no wait": (WAIT, "", f"load of A[0] in shared memory, which thread 0 copies to{UNWAITED}"),
    "waits for one group less": ("<1>", "<2>", f"load of A[0] in shared memory, which thread 0 copies to{UNWAITED}"),
    "no group": ("    commit_copies();\n  };", "  };", UNWAITED),
    "no empty group": ("    else commit_copies();\n", "", UNWAITED),
    "no barrier behind the wait": (WAIT + SYNC, WAIT, f"in shared memory, which thread 16 has written{UNORDERED}"),
    "a barrier ahead of the wait": (WAIT + SYNC, SYNC + WAIT, f"in shared memory, which thread 16 has written{UNORDERED}"),
    "reused while others read": (SYNC + "  }", "  }", f"has read{UNORDERED}"),
    "reused while in flight": ("A, chunk % 2 * 256", "A, 0", f"copy to A[0] in shared memory, which thread 0 copies to{UNWAITED}"),
    "written while in flight": ("  ask(0);", "  ask(0); A[0] = 0;", f"store to A[0] in shared memory, which thread 0 copies to{UNWAITED}"),
    "never waited for": ("  wait_all_copies();", "  ask(0);", "thread 0 (lane 0): has ended without waiting for its copy to A[0]"),
    "misaligned source": ("half * 8", "half * 7", "16-byte copy at an address that is not a multiple of 16; nearest: element 7 of a"),
    "source past the end": ("row < rows ?", "true ?", "16-byte copy outside of every operand; nearest: element 1920 of a [30, 64]"),
    "source written meanwhile": (
        "  ask(0);",
        "  ask(0); store_u16(const_cast<bf16*>(b) + t, 0);",
        "copy to B[0] of what has been written since it was asked for; nearest: element 0 of b",
    ),
    "ahead of the upstream": ("  ask(0);", "  ask(0);  // griddepcontrol.wait", "16-byte copy before the wait for the upstream kernel"),
    "misaligned place": ("+ half * 4, a", "+ half * 2, a", "copy of A[2] in shared memory, which does not begin at a multiple of 16 bytes"),
    "place past the end": ("2 * 32 * 8", "32 * 8", "copy of A[256] in shared memory; it has 256 elements"),
    "more than fits": ("? 16 : 0", "? 32 : 0", "copy of 32 bytes to 16"),
    "array of any alignment": ("ALIGNED_SHARED(u32, A", "SHARED(u32, A", "copy of A, which is declared with an alignment of 4 bytes"),
    "matrices of nothing": ("if (t < 32) copy", "if (t < 28) copy", "load of B[112] in shared memory, which nothing has written"),
    "matrices past the end": ("(warp * 16 + lane", "(warp * 64 + lane", "load of A[512] in shared memory; it has 512 elements"),
    "misaligned matrices": ("lane / 16 * 4);", "lane / 16 * 2);", "load of matrices of A[2] in shared memory, which does not begin at"),
    "matrices for half a warp": ("    load_matrices(", "    if (lane < 16) load_matrices(", "divergent instruction of a warp: lane 16"),
}  # fmt: skip


@costly(3)
@needs_emulator
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug(bug):
    found_when_planted(PRODUCT, BUGS[bug], lambda text: run(text))


# out[t] = the sum of b's elements 4 t, 4 t + 256, …: one thread copies 512 bytes at once for 64 others, through two buffers.
RING = """
extern "C" __global__ void product(const bf16* a, const bf16* b, float* out, u32 rows) {
  SHARED(u64, full, 2);
  SHARED(u64, empty, 2);
  ALIGNED_SHARED(u64, tile, 2 * 64);
  const u32 t = threadIdx.x;
  if (t == 0)
    for (u32 s = 0; s < 2; ++s) barrier_init(full, s, 1), barrier_init(empty, s, 64);
  __syncthreads();
  if (t > 64) return;
  float sum = 0;
  for (u32 c = 0; c < 4; ++c) {
    if (t == 64) {
      barrier_wait(empty, c % 2, c / 2 + 1 & 1);
      barrier_arrive_expecting(full, c % 2, 512);
      copy_bulk(tile, c % 2 * 64, b + c * 256, 512, full, c % 2);
    } else {
      barrier_wait(full, c % 2, c / 2 & 1);
      sum += __uint_as_float(u32(tile[c % 2 * 64 + t]) << 16);
      barrier_arrive(empty, c % 2);
    }
  }
  if (t < 64) store_u32(out + t, __float_as_uint(sum));
}
"""


@needs_emulator
def test_a_ring_of_bulk_copies():
    out, _ = run(RING, block=96)
    b = operands()["b"].float()
    assert torch.allclose(out.view(-1)[:64], b.view(4, 64, 4)[:, :, 0].sum(0), atol=1e-6)


@needs_emulator
def test_lanes_meet_behind_a_barrier_that_the_last_of_them_completes():
    out, _ = run("""
      extern "C" __global__ void product(const bf16* a, const bf16* b, float* out, u32 rows) {
        SHARED(u64, all, 1);
        const u32 t = threadIdx.x;
        if (t == 0) barrier_init(all, 0, 64);
        __syncthreads();
        barrier_arrive(all, 0);
        barrier_wait(all, 0, 0);
        store_u32(out + t, __shfl_xor_sync(~0u, t, 1));
      }
    """)
    assert torch.equal(out.view(-1)[:64].view(torch.int32), torch.arange(64, dtype=torch.int32) ^ 1)


READ, RELEASE = "      sum += __uint_as_float(u32(tile[c % 2 * 64 + t]) << 16);\n", "      barrier_arrive(empty, c % 2);\n"
RING_BUGS = {
    "no wait for what is full": ("barrier_wait(full, c % 2, c / 2 & 1);", "", "load of tile[0] in shared memory, which nothing has"),
    "no wait for what is empty": ("barrier_wait(empty, c % 2, c / 2 + 1 & 1);", "", "arrives at full[0], at which all 1 have arrived"),
    "parity of the others": ("c / 2 + 1 & 1", "c / 2 & 1", "thread 64 for phase 0 of empty[0], which nobody ends: 64 of 64 have not"),
    "parity that never turns": ("full, c % 2, c / 2 & 1", "full, c % 2, 0", "empty[0], and nothing keeps others from ending phase 1"),
    "an arrival is missing": ("      barrier_arrive(empty", "      if (t) barrier_arrive(empty", "nobody ends: 1 of 64 have not arrived"),
    "more bytes than come": ("c % 2, 512);\n      copy", "c % 2, 528);\n      copy", "528 bytes are expected and 512 were asked for"),
    "nothing expected": ("barrier_arrive_expecting(full, c % 2, 512)", "barrier_arrive(full, c % 2)", "in shared memory, which"),
    "reused too early": ("empty, s, 64", "empty, s, 1", "empty[0], and nothing keeps others from ending phase 1"),
    "released before it is read": (f"{READ}{RELEASE}", f"{RELEASE}{READ}", "copy to tile[0] in shared memory, which thread 0 has read"),
    "misaligned source": ("b + c * 256", "b + c * 256 + 4", "16-byte copy at an address that is not a multiple of 16; nearest: element 4"),
    "source past the end": ("b + c * 256", "b + 8 + c * 256", "512-byte copy outside of every operand; nearest: element 776 of b"),
    "odd size": ("b + c * 256, 512", "b + c * 256, 504", "bulk copy of 504 bytes, which is no multiple of 16"),
    "not prepared": ("  if (t == 0)\n", "  if (t == 96)\n", "in shared memory, which nothing has written"),
    "no barrier behind the preparation": ("  __syncthreads();\n", "", "in shared memory, which thread 0 has written"),
    "waits beside the others": (
        "if (t > 64) return;",
        "for (u32 c = 0; t > 64 && c < 4; ++c) barrier_wait(full, c % 2, c / 2);\n  if (t > 64) return;",
        "thread 65 (lane 1): waits for phase 0 of full[0], and nothing keeps others from ending phase 1 before it looks",
    ),
    "nobody waits": ("c < 4", "c < (t == 64 ? 4 : 3)", "thread 64 (lane 0): has ended, and nobody has waited for its copy to tile[64]"),
}  # fmt: skip


@costly(3)
@needs_emulator
@pytest.mark.parametrize("bug", RING_BUGS)
def test_planted_bug_in_a_ring(bug):
    found_when_planted(RING, RING_BUGS[bug], lambda text: run(text, block=96))


# Two of three warps meet, each in its own place; the third is elsewhere, and then meets one of them.
MEETINGS = """
extern "C" __global__ void product(const bf16* a, const bf16* b, float* out, u32 rows) {
  SHARED(float, own, 96);
  const u32 t = threadIdx.x;
  own[t] = float(t);
  if (t < 32) {
    meet(1, 64);
    meet(2, 64);
    store_u32(out + t, __float_as_uint(own[t + 32] + own[t + 64]));
  } else if (t < 64) {
    meet(1, 64);
    store_u32(out + t, __float_as_uint(own[t - 32]));
  } else {
    meet(2, 64);
    store_u32(out + t, __float_as_uint(own[t - 64]));
  }
}
"""


@needs_emulator
def test_some_warps_meet():
    t = torch.arange(32.0)
    assert torch.equal(run(MEETINGS, block=96)[0].view(-1)[:96], torch.cat([2 * t + 96, t, t]))


THIRD = "  } else {\n    meet(2, 64);"
MEETING_BUGS = {
    "does not come": ("  } else {", "  } else if (t > 96) {", "waits at barrier 2, at which 32 of 64 threads are and no more will come"),
    "comes to another": (THIRD, THIRD.replace("2", "3"), "waits at barrier 2, at which 32 of 64 threads are and no more will come"),
    "for too few": ("meet(1, 64)", "meet(1, 32)", "with more than the 32 threads that it is for"),
    "for other numbers": (THIRD, THIRD.replace("64", "96"), "for 96 threads, others for 64"),
    "what it has not met": ("own[t - 32]", "own[t + 32]", "load of own[64] in shared memory, which thread 64 has written"),
    "half a warp": ("meet(2, 64)", "meet(2, 48)", "48 threads are to meet, which are no whole warps"),
    "no barrier": ("meet(2, 64)", "meet(0, 64)", "0 is that of __syncthreads"),
}  # fmt: skip


@costly(3)
@needs_emulator
@pytest.mark.parametrize("bug", MEETING_BUGS)
def test_planted_bug_in_a_meeting(bug):
    found_when_planted(MEETINGS, MEETING_BUGS[bug], lambda text: run(text, block=96), count=-1)


@costly(1)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120"])
def test_ptxas_takes_them(arch):
    compiled = nvrtc.compile_cubin(with_library(PRODUCT), Arch.parse(arch), "product")
    assert not compiled.resources.spills
    try:
        text = inspect.sass(compiled.cubin)
    except inspect.DisassemblerMissingError as e:
        pytest.skip(str(e))
    assert all(word in text for word in ("LDGSTS", "LDGDEPBAR", "LDSM.16.M88.4", "LDSM.16.MT88.4", "HMMA.16816"))


@costly(1)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120"])
def test_ptxas_takes_barriers(arch):
    compiled = nvrtc.compile_cubin(with_library(RING, barriers=True), Arch.parse(arch), "product")
    try:
        text = inspect.sass(compiled.cubin)
    except inspect.DisassemblerMissingError as e:
        pytest.skip(str(e))
    assert "UBLKCP" in text and "SYNCS" in text


# out = 64 columns of 96 tokens of one head of a, in boxes of 32 tokens; tokens from `rows` on are zero.
BOXES = """
extern "C" __global__ void product(const bf16* a, const bf16* b, float* out, u32 rows, const __grid_constant__ TensorMap a_tiles) {
  SHARED(u64, full, 1);
  SWIZZLED_SHARED(u32, tiles);
  const u32 t = threadIdx.x;
  if (t == 0) barrier_init(full, 0, 1);
  __syncthreads();
  for (u32 c = 0; c < 3; ++c) {
    if (t == 0) {
      barrier_arrive_expecting(full, 0, 4096);
      copy_box(tiles, 0, a_tiles, c * 32, 1, 1, 0, full, 0);
    }
    barrier_wait(full, 0, c % 2);
    for (u32 i = t; i < 32 * 32; i += 64) {
      const u32 row = i / 32, word = i % 32;
      store_u32(out + (c * 32 + row) * 32 + word, tiles[row * 32 + (word / 4 ^ row % 8) * 4 + word % 4]);
    }
    __syncthreads();
  }
}
"""


class Boxes(Product):
    """The same, with a tensor map."""

    def parameters(self) -> list[Param]:
        return [*super().parameters(), Param.tiles("a_tiles")]


def run_boxes(source: str, length: int = 80) -> tuple[Tensor, Tensor]:
    """(the copy, its source [length, heads 2, 128 columns])"""
    a = torch.randn(1, length, 2, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    out, b = torch.full((96, 32), float("nan")), torch.zeros(1)
    values = {"rows": length, **maps({"a": a}, {"a": 64}, 32)}
    packed = Arguments(Boxes(), values).at([a.data_ptr(), b.data_ptr(), out.data_ptr()])
    nothing = dict.fromkeys(("clusters", "waits", "triggers"), False)
    text = environment().from_string(LIBRARY).render(needs=Needs(barriers=True, maps=True), dtypes={"bf16"}, **nothing)
    run_source(text + source, "product", 1, 64, packed, {"a": a, "out": out}, ("out",), 4096)
    return out.view(torch.bfloat16).view(96, 64), a[0]


@needs_emulator
def test_boxes_are_swizzled_and_end_with_their_tensor():
    out, a = run_boxes(BOXES)
    assert torch.equal(out[:80], a[:, 1, 64:]) and not out[80:].any()


BOX_BUGS = {
    "bytes of a smaller box": ("full, 0, 4096", "full, 0, 2048", "2048 bytes are expected and 4096 were asked for"),
    "no wait": ("    barrier_wait(full, 0, c % 2);\n", "", "in shared memory, which"),
    "not at a swizzle's beginning": ("copy_box(tiles, 0,", "copy_box(tiles, 128,", "does not begin at a multiple of 1024 bytes"),
    "read while the next one comes": ("    __syncthreads();\n  }", "  }", "has not waited for the copy"),
}


@costly(3)
@needs_emulator
@pytest.mark.parametrize("bug", BOX_BUGS)
def test_planted_bug_of_boxes(bug):
    found_when_planted(BOXES, BOX_BUGS[bug], lambda text: run_boxes(text))
