"""Products of warpgroups: in the emulator, with the mistakes that it must find, and what ptxas makes of them."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from ssmgen import emulator, nvrtc
from ssmgen.arguments import Arguments
from ssmgen.emulator import EmulatorError, run_source
from ssmgen.errors import CompileError
from ssmgen.render import _environment
from ssmgen.spec import Arch, KernelSpec, Needs, Param

emulated = pytest.mark.skipif(not emulator.available(), reason="needs g++")

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
    needs = Needs(mma=numbers, copies=True, matrices=True, barriers=True, warpgroups=(64, 128))
    return _environment().from_string(LIBRARY + text).render(dtypes={numbers}, needs=needs, clusters=clusters, waits=False, triggers=False)


def product_of(columns: int, by_columns: bool) -> str:
    text = PRODUCT
    for name, value in {"columns": columns, "by_columns": int(by_columns), "step": 2048 if by_columns else 32}.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def run(text: str, a: Tensor, b: Tensor, out: Tensor, block: int = 128, blocks: int = 1, shared: int = 16384) -> Tensor:
    """What the kernel makes of out; blocks: of one cluster."""
    numbers = "bf16" if a.dtype == torch.bfloat16 else "f16"
    named = {"a": a, "b": b, "out": out}
    packed = Arguments(Product(), {}).at([t.data_ptr() for t in named.values()])
    run_source(with_library(text, numbers, blocks > 1), "product", blocks, block, packed, named, ("out",), shared, cluster=blocks)
    return out


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def close(out: Tensor, want: Tensor) -> bool:
    """Sums of 64 products in f32, which are about 8 in size, from exact products."""
    return torch.allclose(out.double(), want, rtol=0, atol=64 * 2.0**-24 * 8)


@emulated
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("by_columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("columns", [64, 128])
def test_a_product(columns, by_columns, dtype):
    a, b = random(64, 64, dtype=dtype), random(64, columns, dtype=dtype)
    out = run(product_of(columns, by_columns), a, b if by_columns else b.T.contiguous(), torch.full((64, columns), torch.nan))
    assert close(out, a.double() @ b.double())


@emulated
def test_32_columns_of_wider_ones():
    """Columns 32 to 63 of 64, by columns, and rows 8 to 39, by rows: matrices may begin within others."""
    for by_columns, begin, part in ((True, 64, slice(32, 64)), (False, 1024, slice(8, 40))):
        text = product_of(64, by_columns).replace("wgmma_64", "wgmma_32").replace("d[64 / 2]", "d[16]")
        a, b = random(64, 64), random(64, 64)
        out = run(text.replace("right + k", f"right + {begin} + k"), a, b if by_columns else b.T.contiguous(), torch.full((64, 32), torch.nan))
        assert close(out, a.double() @ b.double()[:, part])


FENCE, SYNC, COMMIT, WAIT, LANDED = (
    f"  {word};\n" for word in ("fence_for_async()", "__syncthreads()", "wgmma_commit()", "wgmma_wait<0>()", "wgmma_landed(d)")
)
START = "  wgmma_fence();\n"
LEGAL = {
    "the readers' fence": (FENCE + SYNC, SYNC + FENCE),
    "another thread's fence": (FENCE + SYNC, SYNC + "  if (t == 77) fence_for_async();\n" + SYNC),
    "two groups": (COMMIT, COMMIT + "  wgmma_wait<1>();\n"),
    "summed from zero": ("float d[64 / 2];", "float d[64 / 2] = {};"),
    "one group after another": (", k > 0);\n" + COMMIT + WAIT, ", k > 0), wgmma_commit();\n" + WAIT),
    "each waited for": (", k > 0);\n" + COMMIT + WAIT, ", k > 0), wgmma_commit(), wgmma_wait<0>(), wgmma_fence();\n"),
    "registers": (START, "  take_registers<200>();\n" + START),
}


@emulated
@pytest.mark.parametrize("form", LEGAL)
def test_other_legal_forms(form):
    old, new = LEGAL[form]
    text = product_of(64, False)
    assert old in text
    a, b = random(64, 64), random(64, 64)
    assert close(run(text.replace(old, new, 1), a, b.T.contiguous(), torch.full((64, 64), torch.nan)), a.double() @ b.double())


ISSUE = "  for (u32 k = 0; k < 4; ++k) wgmma_64"
NO_FENCE = "with no fence_for_async between"
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
    "stored meanwhile": (WAIT, "  if (t == 40) tile[7] = 0;\n" + WAIT, "store to tile[7] in shared memory, written while a product reads it: thread 0"),
    "copied meanwhile": (WAIT, "  copy_async(tile, 0, b);\n" + WAIT, "copy to tile[0] in shared memory, written while a product reads it: thread 0"),
    "stored without a barrier": (WAIT, WAIT + "  if (t == 127) tile[7] = 0;\n", "has read, with no barrier between"),
    "operand changed": (WAIT, "  left[2][1] ^= 1;\n" + WAIT, "registers of a product's first operand, changed while a product reads them"),
    "sum changed": (WAIT, "  d[3] = 0;\n" + WAIT, "registers that products sum into, changed while they are in flight"),
    "sum changed between": ("d, left[k], right", "(d[0] = k ? 0.f : d[0], d), left[k], right", "changed while they are in flight"),
    "another shape": (COMMIT, "  wgmma_64<0>(reinterpret_cast<float(&)[32]>(d[1]), left[0], right, 1);\n" + COMMIT, "a product of another shape"),
    "no fence of registers": (START, "", "a product with no wgmma_fence since products were last waited for"),
    "no fence since the wait": (WAIT, WAIT + "  wgmma_64<0>(d, left[0], right, 1);\n", "a product with no wgmma_fence since"),
    "operand changed since the fence": (START, START + "  left[3][0] += 1;\n", "first operand, changed since the last wgmma_fence"),
    "sum changed since the fence": (START, START + "  d[0] = 5;\n", "that products sum into, changed since the last wgmma_fence"),
    "any alignment": ("SWIZZLED_SHARED", "DYNAMIC_SHARED", "matrix of tile, which is declared with an alignment of 16 bytes instead of 1024"),
    "begins with another row": ("_rows(tile, 0)", "_rows(tile, 32)", "begins at byte 128 of tile: its rows do not begin with one of every 8"),
    "begins past its rows' end": ("k * 32", "k * 48", "begins at byte 144 of tile: its rows do not begin"),
    "goes on past its rows": ("right + k", "right + 16 + k", "begins at byte 112 of tile: its rows go on behind their 128 bytes"),
    "by columns": ("_64<0>", "_64<1>", "begins at byte 0 of tile, by rows, in a product by columns"),
    "three warps": (ISSUE, "  if (warp != 2)\n" + ISSUE, "all four warps do them all"),
    "one product less": ("k < 4; ++k) wg", "k < (warp == 3 ? 3 : 4); ++k) wg", "has ended after 3 products and changes of registers"),
    "another product": ("right + k", "right + (warp == 3) * 32 + k", "a product that is not what another warp of the warpgroup has asked for"),
    "half a warp": (ISSUE, "  if (t % 32 < 16)\n" + ISSUE, "divergent instruction of a warp"),
    "lanes of their own": ("right + k", "right + (t == 5) * 32 + k", "thread 5 (lane 5): a product that is not the one of lane 0"),
    "registers twice": (START, START + "  give_registers<40>();\n  take_registers<80>();\n", "that has changed its registers before"),
    "registers of some": (START, "  if (warp) take_registers<80>();\n" + START, "that is not what another warp of the warpgroup has asked for"),
}  # fmt: skip


@emulated
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug(bug):
    old, new, words = BUGS[bug]
    text = product_of(64, False)
    if bug.startswith("sum changed since"):  # what is not summed on may be anything
        text = text.replace("k > 0", "1").replace("float d[64 / 2]", "float d[64 / 2] = {}")
    assert old in text
    with pytest.raises(EmulatorError) as e:
        run(text.replace(old, new, 1), random(64, 64), random(64, 64), torch.full((64, 64), torch.nan))
    assert words in str(e.value) and "block 0, thread " in str(e.value)


@emulated
def test_a_block_has_all_four_warps():
    with pytest.raises(EmulatorError, match="a product of a warpgroup, of whose four warps the block has 3"):
        run(product_of(64, False).replace("i += 128", "i += 96"), random(64, 64), random(64, 64), torch.zeros(64, 64), block=96)


@emulated
def test_another_order_in_shared_memory_is_another_product():
    a, b = random(64, 64), random(64, 64)
    out = run(product_of(64, False).replace("(piece ^ row % 8)", "piece"), a, b.T.contiguous(), torch.full((64, 64), torch.nan))
    assert not out.isnan().any() and not torch.allclose(out.double(), a.double() @ b.double(), atol=1)


# out = the sum of four products a b for each of two warpgroups, 64 rows and columns. One thread copies the second operands, which lie as
# they shall in shared memory, through two buffers.
RING = """
extern "C" __global__ void __launch_bounds__(384) product(const void* a, const void* b, float* out) {
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


def run_ring(text: str) -> tuple[Tensor, Tensor]:
    """(what the kernel makes of it, what it should)"""
    a, b = random(2, 4, 64, 64), random(4, 64, 64)
    rows = torch.arange(64)[:, None]
    swizzled = b.view(4, 64, 8, 8)[:, rows, torch.arange(8) ^ rows % 8].contiguous()
    out = run(text, a, swizzled, torch.full((2, 64, 64), torch.nan), block=384)
    return out, (a.double() @ b.double()).sum(1)


@emulated
def test_a_ring_of_bulk_copies_needs_no_fence():
    out, want = run_ring(RING)
    assert close(out / 4, want / 4)


RELEASE = "    if (t % 32 == 0) barrier_arrive(empty, c % 2);\n"
RING_BUGS = {
    "released ahead of the wait": ("    wgmma_wait<0>();\n" + RELEASE, RELEASE + "    wgmma_wait<0>();\n", "copy to tiles[0] in shared memory, wh"),
    "released by one group": ("if (t % 32 == 0)", "if (t < 128 && t % 16 == 0)", "copy to tiles[0] in shared memory, wh"),
    "not waited for": ("barrier_wait(full, c % 2, c / 2 & 1);", "", "product of tiles[0] in shared memory, which thread 256 copies to"),
    "more registers than there are": ("<200>", "<240>", "is of a block whose warpgroups ask for 66560 registers, of which there are 65536"),
    "registers of a part": ("    give_registers<40>();", "    if (t < 320) give_registers<40>();", "all four warps do them all"),
}


@emulated
@pytest.mark.parametrize("bug", RING_BUGS)
def test_planted_bug_in_a_ring(bug):
    old, new, words = RING_BUGS[bug]
    assert old in RING
    with pytest.raises(EmulatorError) as e:
        run_ring(RING.replace(old, new, 1))
    assert words in str(e.value)


# out = a (a b), of which the inner one is stored with rows and columns exchanged: its columns are the second one's rows.
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


def run_twice(text: str) -> tuple[Tensor, Tensor]:
    """(what the kernel makes of it, what it should)"""
    a, b = random(64, 64), random(64, 64)
    inner = (a.double() @ b.double()).bfloat16().double()
    return run(text, a, b.T.contiguous(), torch.full((64, 64), torch.nan)), a.double() @ inner


@emulated
def test_a_product_of_a_stored_product():
    """Sums of the first product that are nearly between two numbers of bf16 may round to the other one, 2^-8 of 32 away."""
    out, want = run_twice(TWICE)
    assert ((out - want).abs() < 64 * 2.0**-24 * 64).float().mean() > 0.95 and torch.allclose(out.double(), want, atol=1)


TWICE_BUGS = {
    "no fence": ("  }\n" + FENCE, "  }\n", f"product of tile[2048] in shared memory, which thread 0 has written, {NO_FENCE}"),
    "no barrier": ("  }\n" + FENCE + SYNC, "  }\n" + FENCE, "has written, with no barrier between"),
    "misaligned": ("2048 + row * 32", "2046 + row * 32", "store of matrices of tile[2046] in shared memory, which does not begin at a multiple of 16"),
    "half a warp": ("    store_m", "    if (lane < 16) store_m", "divergent instruction of a warp: lane 16"),
    "past the end": ("2048 + row * 32", "4096 + row * 32", "store of tile[4096] in shared memory; it has 4096 elements"),
    "rows of two lanes": ("lane / 8 % 2;", "0;", "also writes, with no barrier between"),
}


@emulated
@pytest.mark.parametrize("bug", TWICE_BUGS)
def test_planted_bug_in_stored_matrices(bug):
    old, new, words = TWICE_BUGS[bug]
    assert old in TWICE
    with pytest.raises(EmulatorError) as e:
        run_twice(TWICE.replace(old, new, 1))
    assert words in str(e.value)


# out = what the cluster's other block has copied from a.
PEERS = """
extern "C" __global__ void product(const void* a, const void* b, float* out) {
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
  float r[4];
  load_4_from_peer(numbers, 4 * t, 1 - rank, r);
  for (u32 i = 0; i < 4; ++i) store_u32(out + rank * 512 + 4 * t + i, __float_as_uint(r[i]));
  cluster_arrive();
  cluster_wait();
}
"""


def run_peers(text: str) -> tuple[Tensor, Tensor]:
    """(what the kernel makes of it, what it should)"""
    a = torch.arange(1024.0)
    want = a.view(2, 512).flip(0).clone()
    want[:, :128] += 1
    return run(text, a.view(torch.bfloat16), a, torch.full((2, 512), torch.nan), blocks=2), want


@emulated
def test_each_block_of_a_cluster_has_its_barriers_and_reads_its_peers():
    out, want = run_peers(PEERS)
    assert torch.equal(out, want)


TOGETHER = "  cluster_arrive();\n  cluster_wait();\n"
PEER_BUGS = {
    "no barrier of the cluster": (TOGETHER, "", "load from numbers of a peer that may not have begun: no barrier of the cluster lies before it"),
    "stored behind the barrier": ("  float r[4];", "  numbers[t] = 0.f;\n  float r[4];", "which thread 0 has read, with no barrier between"),
    "ends while a peer reads": (f"{TOGETHER}}}", "}", "load from numbers of a peer that has ended"),
    "past the cluster": ("1 - rank,", "2,", "load from numbers of block 2 of a cluster of 2"),
    "misaligned": ("4 * t, 1", "4 * t + 2, 1", "load of numbers[2] in shared memory, which does not begin at a multiple of 16 bytes"),
    "a barrier of one block": ("if (t == 0) barrier_i", "if (t == 0 && !rank) barrier_i", "block 1, thread 0 (lane 0): load of full[0] in shared memory"),
}


@emulated
@pytest.mark.parametrize("bug", PEER_BUGS)
def test_planted_bug_among_peers(bug):
    old, new, words = PEER_BUGS[bug]
    assert old in PEERS
    with pytest.raises(EmulatorError) as e:
        run_peers(PEERS.replace(old, new, 1))
    assert words in str(e.value)


@pytest.mark.parametrize("text", [product_of(64, False), product_of(128, True), RING, TWICE], ids=["rows", "columns", "ring", "stored"])
def test_ptxas_takes_them(text):
    compiled = nvrtc.compile_cubin(with_library(text.replace("(384)", "(384, 1)")), Arch.parse("sm_90a"), "product")
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
