"""Products of copied and stored operands: a ring of bulk copies, stored matrices, and loads between the blocks of a cluster."""

from __future__ import annotations

import pytest
import torch
from emulated_calls import needs_emulator
from kernel_laws import found_when_planted
from product_cases import FENCE, NO_FENCE, SYNC, Run, close, close_twice, product_of, random, run, with_library
from torch import Tensor

from ssmgen.compile import nvrtc
from ssmgen.emulator import EmulatorError
from ssmgen.spec.kernel import Arch

# out = a^T, 8 rows and columns, of f32.
TURN = """
extern "C" __global__ void __launch_bounds__(32) product(const void* a, const void* b, float* out) {
  const u32 word = transpose_matrix(load_u32(static_cast<const u32*>(a) + threadIdx.x));
  store_u32(out + 2 * threadIdx.x, word << 16), store_u32(out + 2 * threadIdx.x + 1, word & 0xffff0000u);
}
"""


def is_turned(run: Run = run) -> bool:
    a = random(8, 8)
    return torch.equal(run(TURN, a, a, torch.full((8, 8), torch.nan), block=32), a.T.float())


@needs_emulator
def test_a_matrix_is_turned():
    assert is_turned()


# out = the sum of four products a b for each of two warpgroups, 64 rows and columns. One thread copies the second operands, which lie as
# they shall in shared memory, through two buffers.
RING = """
extern "C" __global__ void __launch_bounds__(384, 1) product(const void* a, const void* b, float* out) {
  SWIZZLED_SHARED(u32, tiles);
  SHARED(u64, full, 2);
  SHARED(u64, empty, 2);
  const u32 t = threadIdx.x, group = t / 128;
  if (t == 0)
    for (u32 s = 0; s < 2; ++s) barrier_init(full, s, 1), barrier_init(empty, s, 8);
  __syncthreads();
  if (group == 2) {
    give_registers<40>();
    for (u32 c = 0; c < 4 && t == 256; ++c) {
      barrier_wait(empty, c % 2, c / 2 + 1 & 1);
      barrier_arrive_expecting(full, c % 2, 8192);
      copy_bulk(tiles, c % 2 * 2048, static_cast<const u32*>(b) + c * 2048, 8192, full, c % 2);
    }
    return;
  }
  take_registers<200>();
  float d[32];
  u32 left[4][4];
  for (u32 c = 0; c < 4; ++c) {
    for (u32 k = 0; k < 4; ++k) load_rows(static_cast<const u32*>(a) + (group * 4 + c) * 2048, k * 16, left[k]);
    barrier_wait(full, c % 2, c / 2 & 1);
    wgmma_fence();
#pragma unroll
    for (u32 k = 0; k < 4; ++k) wgmma_64<1>(d, left[k], matrix_by_columns(tiles, c % 2 * 2048, 0) + k * 2048, c + k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    if (t % 32 == 0) barrier_arrive(empty, c % 2);
  }
  wgmma_landed(d);
  store_sums(out + group * 4096, d);
}
"""


def run_ring(text: str, run: Run = run) -> tuple[Tensor, Tensor]:
    """(the kernel's result, the expected result)"""
    a, b = random(2, 4, 64, 64), random(4, 64, 64)
    rows = torch.arange(64)[:, None]
    swizzled = b.view(4, 64, 8, 8)[:, rows, torch.arange(8) ^ rows % 8].contiguous()
    out = run(text, a, swizzled, torch.full((2, 64, 64), torch.nan), block=384)
    return out, (a.double() @ b.double()).sum(1)


@needs_emulator
def test_a_ring_of_bulk_copies_needs_no_fence():
    out, want = run_ring(RING)
    assert close(out / 4, want / 4)


RING_WAIT, RELEASE = "    wgmma_wait<0>();\n", "    if (t % 32 == 0) barrier_arrive(empty, c % 2);\n"
RING_BUGS = {
    "released ahead of the wait": (RING_WAIT + RELEASE, RELEASE + RING_WAIT, "copy to tiles[0] in shared memory, wh"),
    "released by one group": ("if (t % 32 == 0)", "if (t < 128 && t % 16 == 0)", "copy to tiles[0] in shared memory, wh"),
    "not waited for": ("barrier_wait(full, c % 2, c / 2 & 1);", "", "product of tiles[0] in shared memory, which thread 256 copies to"),
    "more registers than there are": ("<200>", "<240>", "is of a block whose warpgroups ask for 66560 registers, of which it has 64512"),
    "registers of a part": ("    give_registers<40>();", "    if (t < 320) give_registers<40>();", "all four warps do them all"),
}


@needs_emulator
@pytest.mark.parametrize("bug", RING_BUGS)
def test_planted_bug_in_a_ring(bug):
    found_when_planted(RING, RING_BUGS[bug], lambda text: run_ring(text))


# out = a (a b). The inner product is stored transposed: its columns are the second product's rows.
STORED = """
  const u32 lane = t % 32;
  for (u32 q = 0; q < 4; ++q) {
    const u32 row = q * 16 + lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
    u32 r[4];
    for (u32 i = 0; i < 4; ++i) r[i] = round_2xbf16(d[8 * q + 2 * i], d[8 * q + 2 * i + 1]);
    store_matrices_transposed(tile, 2048 + row * 32 + (piece ^ row % 8) * 4, r[0], r[1], r[2], r[3]);
  }
  fence_for_async();
  __syncthreads();
  wgmma_fence();
#pragma unroll
  for (u32 k = 0; k < 4; ++k) wgmma_64<0>(d, left[k], matrix_by_rows(tile, 2048) + k * 32, k > 0);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_landed(d);
  store_sums(out, d);
"""
TWICE = product_of(64, False).replace("  store_sums(out, d);\n", STORED)


def run_twice(text: str, run: Run = run) -> tuple[Tensor, Tensor]:
    """(the kernel's result, the expected result)"""
    a, b = random(64, 64), random(64, 64)
    inner = (a.double() @ b.double()).bfloat16().double()
    return run(text, a, b.T.contiguous(), torch.full((64, 64), torch.nan)), a.double() @ inner


@needs_emulator
def test_a_product_of_a_stored_product():
    assert close_twice(*run_twice(TWICE))


@needs_emulator
def test_a_warpgroup_meets_at_a_barrier_by_number():
    """The block has another warp, which has ended."""
    text = TWICE.replace(SYNC, "  meet(1, 128);\n").replace("warp = t / 32;", "warp = t / 32;\n  if (t >= 128) return;")
    assert text.count("meet(1, 128)") == 2

    def wider(*arguments):
        return run(*arguments, block=160)

    assert close_twice(*run_twice(text, wider))
    with pytest.raises(EmulatorError, match=f"which thread 0 has written, {NO_FENCE}"):
        run_twice(text.replace("  }\n" + FENCE, "  }\n", 1).replace(FENCE, "", 1), wider)


TWICE_BUGS = {
    "no fence": ("  }\n" + FENCE, "  }\n", f"product of tile[2048] in shared memory, which thread 0 has written, {NO_FENCE}"),
    "no barrier": ("  }\n" + FENCE + SYNC, "  }\n" + FENCE, "has written, with no barrier between"),
    "misaligned": ("2048 + row * 32", "2046 + row * 32", "store of matrices of tile[2046] in shared memory, which does not"),
    "half a warp": ("    store_m", "    if (lane < 16) store_m", "divergent instruction of a warp: lane 16"),
    "past the end": ("2048 + row * 32", "4096 + row * 32", "store of tile[4096] in shared memory; it has 4096 elements"),
    "rows of two lanes": ("lane / 8 % 2;", "0;", "also writes, with no barrier between"),
}


@needs_emulator
@pytest.mark.parametrize("bug", TWICE_BUGS)
def test_planted_bug_in_stored_matrices(bug):
    found_when_planted(TWICE, TWICE_BUGS[bug], lambda text: run_twice(text))


# out = the values that the cluster's other block has copied from a.
PEERS = """
extern "C" __global__ void __cluster_dims__(2, 1, 1) product(const void* a, const void* b, float* out) {
  ALIGNED_SHARED(float, numbers, 512);
  SHARED(u64, full, 1);
  const u32 t = threadIdx.x, rank = blockIdx.x;
  if (t == 0) barrier_init(full, 0, 1);
  __syncthreads();
  if (t == 0) barrier_arrive_expecting(full, 0, 2048), copy_bulk(numbers, 0, static_cast<const u32*>(a) + rank * 512, 2048, full, 0);
  barrier_wait(full, 0, 0);
  numbers[t] = numbers[t] + 1.f;
  cluster_arrive();
  cluster_wait();
  u32 r[4];
  load_4_from_peer(numbers, 4 * t, 1 - rank, r);
  for (u32 i = 0; i < 4; ++i) store_u32(out + rank * 512 + 4 * t + i, r[i]);
  cluster_arrive();
  cluster_wait();
}
"""


def run_peers(text: str, run: Run = run) -> tuple[Tensor, Tensor]:
    """(the kernel's result, the expected result)"""
    a = torch.arange(1024.0)
    want = a.view(2, 512).flip(0).clone()
    want[:, :128] += 1
    return run(text, a.view(torch.bfloat16), a, torch.full((2, 512), torch.nan), blocks=2), want


@needs_emulator
def test_each_block_of_a_cluster_has_its_barriers_and_reads_its_peers():
    out, want = run_peers(PEERS)
    assert torch.equal(out, want)


@needs_emulator
def test_a_block_stores_to_its_peers():
    sent = """  load_4_shared(numbers, 4 * t, r);
  store_4_to_peer(numbers, 4 * t, 1 - rank, r);
  cluster_arrive();
  cluster_wait();
  load_4_shared(numbers, 4 * t, r);
"""
    first = "  cluster_arrive();\n  cluster_wait();\n"  # all blocks load the values before any block overwrites them
    text = PEERS.replace("  load_4_from_peer(numbers, 4 * t, 1 - rank, r);\n", sent.replace("  store_4", f"{first}  store_4"))
    out, want = run_peers(text)
    assert torch.equal(out, want)
    with pytest.raises(EmulatorError, match="with no barrier between"):
        run_peers(text.replace(f"{first}  store_4", "  store_4"))


TOGETHER = "  cluster_arrive();\n  cluster_wait();\n"
PEER_BUGS = {
    "no barrier of the cluster": (TOGETHER, "", "load from numbers of a peer that may not have begun: no barrier of the"),
    "stored behind the barrier": ("  u32 r[4];", "  numbers[t] = 0.f;\n  u32 r[4];", "has read, with no barrier between"),
    "ends while a peer reads": (f"{TOGETHER}}}", "}", "load from numbers of a peer that has ended"),
    "past the cluster": ("1 - rank,", "2,", "load from numbers of block 2 of a cluster of 2"),
    "misaligned": ("4 * t, 1", "4 * t + 2, 1", "load of four words of numbers[2] in shared memory, which does not begin at a multiple"),
    "a barrier of one block": ("if (t == 0) barrier_i", "if (t + rank == 0) barrier_i", "block 1, thread 0 (lane 0): load of full[0]"),
}


@needs_emulator
@pytest.mark.parametrize("bug", PEER_BUGS)
def test_planted_bug_among_peers(bug):
    found_when_planted(PEERS, PEER_BUGS[bug], lambda text: run_peers(text))


@pytest.mark.parametrize("text", [RING, TWICE, PEERS], ids=["ring", "stored", "peers"])
def test_ptxas_takes_them(text):
    assert not nvrtc.compile_cubin(with_library(text, clusters=text is PEERS), Arch.parse("sm_90a"), "product").resources.spills
