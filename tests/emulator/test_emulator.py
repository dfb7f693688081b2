"""The emulator: generated kernels on a CPU against float64, and the mistakes it must catch."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from emulated_calls import SM80, SM90, emulate, needs_emulator
from kernel_laws import found_when_planted
from selection import costly
from ssu_cases import BF16, F32, Case, assert_matches, expected, make_call, small_matrix
from subjects import a_mistake_is_found

from ssmgen import emulator
from ssmgen.emulator import EmulatorError, run_source
from ssmgen.families.selective_state_update.spec import space
from ssmgen.spec.arguments import Arguments
from ssmgen.spec.kernel import KernelSpec, Param

pytestmark = needs_emulator


# The whole matrix of the GPU tests.


@costly(10, 30)
@pytest.mark.parametrize("case", small_matrix(), ids=lambda c: c.id)
def test_within_rounding_of_float64(case):
    call = make_call(case, "cpu")
    want = expected(call)
    emulate(call)
    assert_matches(call, want)


@costly(1)
@pytest.mark.parametrize("name", ["m2-bf16-pool", "m1-f32-pool", "m2-d96-f32"])
def test_without_pdl_for_an_old_architecture(name):
    call = make_call(next(c for c in small_matrix() if c.id == name), "cpu")
    want = expected(call)
    emulate(call, arch=SM80)
    assert_matches(call, want)


@costly(1)
@pytest.mark.parametrize(
    "case",
    [
        Case("m2-bf16", heads=2, groups=2, state=BF16, out=F32, batch=2),
        Case("m1-d16", headdim=256, d_state=16, tied=False, z=BF16, out=F32, batch=2),
    ],
    ids=lambda c: c.id,
)
def test_variants_are_bit_equal(case):
    specs = {}
    for spec in space(make_call(case, "cpu").built.problem()[0], SM90):
        specs.setdefault((spec.lanes, spec.vec, spec.ilp > 1, spec.prefetch > 0), spec)
    results = []
    for spec in specs.values():
        call = make_call(case, "cpu")
        emulate(call, spec)
        results.append((call.args[0].contiguous(), call.kwargs["out"]))
        assert all(torch.equal(a, b) for a, b in zip(results[-1], results[0], strict=True)), spec
    assert len(specs) > 8


# Kernels written to be wrong, which the emulator must catch.

PRELUDE = "#define DEVICE inline\nusing u32 = unsigned;\nusing u16 = unsigned short;\n"


class Broken(KernelSpec):
    """Only a parameter list: float* data, const float* weight, int n."""

    def parameters(self) -> list[Param]:
        return [Param.pointer("data", "f32", const=False), Param.pointer("weight", "f32"), Param("n", "int", "i")]


def run_broken(
    body: str, *, grid: int = 1, block: int = 64, declarations: str = "", shared_bytes: int = 0, cluster: int = 1
) -> torch.Tensor:
    data, weight = torch.zeros(4, 64), torch.arange(64, dtype=F32)
    packed = Arguments(Broken(), {"n": 64}).at([data.data_ptr(), weight.data_ptr()])
    source = f'{PRELUDE}{declarations}\nextern "C" __global__ void broken(float* data, const float* weight, int n) {{\n{body}\n}}\n'
    run_source(source, "broken", grid, block, packed, {"data": data, "weight": weight}, ("data",), shared_bytes, cluster=cluster)
    return data


GOOD = "store_u32(data + blockIdx.x * 64 + threadIdx.x, load_u32(weight + threadIdx.x));"


def test_a_sound_kernel_passes():
    assert torch.equal(run_broken(GOOD, grid=4), torch.arange(64, dtype=F32).expand(4, 64))
    body = """
      SHARED(float, tile, 64);
      const unsigned t = threadIdx.x;
      tile[t] = __uint_as_float(load_u32(weight + t));
      __syncthreads();
      float v = tile[63 - t];
      v += __shfl_xor_sync(0xffffffffu, v, 1);
      if (__ballot_sync(0xffffffffu, t < 32) == 0) v = -v;
      __syncthreads();
      tile[t] = v;
      __syncwarp();
      store_u32(data + t, __float_as_uint(tile[t ^ 1]));
    """
    dynamic = "DYNAMIC_SHARED(float, tile); tile[threadIdx.x] = 2.f; store_u32(data + threadIdx.x, __float_as_uint(tile[threadIdx.x]));"
    assert (run_broken(dynamic, shared_bytes=256)[0] == 2).all() and (run_broken(dynamic, shared_bytes=512)[0] == 2).all()
    t = torch.arange(64)
    pair = ((63 - t) + (63 - (t ^ 1))).float()
    assert torch.equal(run_broken(body)[0], torch.where(t < 32, pair, -pair))


def test_atomics_collide_with_nothing():
    body = "atomicAdd(data, 1.f); atomicMax(reinterpret_cast<int*>(data) + 1, int(threadIdx.x));"
    data = run_broken(body, grid=3)
    assert data[0, 0] == 192 and data.view(torch.int32)[0, 1] == 63


BUGS = {
    "load past the end": (
        "load_u32(weight + threadIdx.x + 1);",
        "4-byte load outside of every operand; nearest: element 64 of weight [64] float32",
    ),
    "load before the start": ("load_u32(data - 1);", "nearest: element -1 of data [4, 64] float32"),
    "store past the end": (
        "store_u32(data + 256 + threadIdx.x, 0);",
        "4-byte store outside of every operand; nearest: element 256 of data",
    ),
    "store to an input": ("store_u32(const_cast<float*>(weight), 0);", "store to weight [64] float32, which is read only"),
    "atomic on an input": ("atomicAdd(const_cast<float*>(weight), 1.f);", "atomic to weight [64] float32, which is read only"),
    "misaligned vector": (
        "u32 r[4]; load_4xu32(weight + 1, r);",
        "16-byte load at an address that is not a multiple of 16; nearest: element 1 of weight",
    ),
    "misaligned half": ("load_u16(reinterpret_cast<const char*>(weight) + 1);", "2-byte load at an address that is not a multiple of 2"),
    "two lanes, one address": ("store_u32(data + threadIdx.x / 2, 0);", "also writes, with no barrier between; nearest: element 0 of data"),
    "two blocks, one address": ("store_u32(data + threadIdx.x, 0);", "thread 0 of block 0 also writes"),
    "shuffle of half a warp": (
        "if (threadIdx.x % 32 < 16) __shfl_sync(0xffffffffu, 1, 0); else __syncwarp(0xffff0000u);",
        "divergent shuffle: lane 16 of its mask is elsewhere",
    ),
    "shuffle after lanes have ended": (
        "if (threadIdx.x % 32 >= 16) return; __shfl_xor_sync(0xffffffffu, 1, 1);",
        "shuffle with lane 16, which has ended",
    ),
    "two shuffles at once": (
        "if (threadIdx.x % 2) __shfl_sync(0xffffffffu, 1, 0); else __shfl_sync(0xffffffffu, 2, 0);",
        "divergent shuffle: lane 1 of its mask is elsewhere",
    ),
    "shuffle from outside the mask": (
        "if (threadIdx.x % 32 < 16) __shfl_sync(0xffffu, 1, 20);",
        "shuffle from lane 20, which is not in the mask",
    ),
    "mask without the lane": ("__shfl_sync(0xfffffffeu, 1, 1);", "mask leaves out the lane itself"),
    "barrier in a branch": ("if (threadIdx.x < 32) __syncthreads();", "has ended while others wait at __syncthreads"),
    "two barriers at once": (
        "if (threadIdx.x < 32) __syncthreads(); else __syncthreads();",
        "divergent __syncthreads: others wait at another one",
    ),
    "shared, never written": (
        "SHARED(float, tile, 64); float v = tile[threadIdx.x]; (void)v;",
        "load of tile[0] in shared memory, which nothing has written",
    ),
    "shared, past the end": ("SHARED(float, tile, 32); tile[threadIdx.x] = 1.f;", "store of tile[32] in shared memory; it has 32 elements"),
    "shared, no barrier": (
        "SHARED(float, tile, 64); tile[threadIdx.x] = 1.f; __syncwarp(); float v = tile[63 - threadIdx.x]; (void)v;",
        "in shared memory, which",
    ),
    "shared, written while others read": (
        "SHARED(float, tile, 64); tile[threadIdx.x] = 1.f; __syncthreads(); float v = tile[63 - threadIdx.x]; tile[threadIdx.x] = v;",
        "in shared memory, which thread",
    ),
    "shared, two writers": (
        "SHARED(float, tile, 64); tile[threadIdx.x / 2] = 1.f;",
        "store to tile[0] in shared memory, which thread 0 also writes",
    ),
    "dynamic shared, past the end": (
        "DYNAMIC_SHARED(float, tile); tile[threadIdx.x] = 1.f;",
        "store of tile[16] in shared memory; it has 16 elements",
    ),
    "load before the wait": (
        "load_u32(weight); wait_for_upstream();  // griddepcontrol.wait",
        "4-byte load before the wait for the upstream kernel",
    ),
    "prefetch before the wait": ("prefetch_l2(weight, 64); wait_for_upstream();  // griddepcontrol.wait", "prefetch before the wait"),
    "prefetch past the end": ("prefetch_l2(weight, 512);", "prefetch outside of every operand"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug(bug):
    body, words = BUGS[bug]
    with pytest.raises(EmulatorError) as e:
        run_broken(body + "\n", grid=2, shared_bytes=64)
    assert words in str(e.value) and "block " in str(e.value)


def test_some_thread_of_a_launch_waits():
    """Threads may end early, unless all of them do."""
    run_broken("if (threadIdx.x < n / 2) return; wait_for_upstream();  // griddepcontrol.wait\n")
    with pytest.raises(EmulatorError, match="no thread waits for the upstream kernel"):
        run_broken("if (threadIdx.x < n) return; wait_for_upstream();  // griddepcontrol.wait\n", grid=2)


# Every block gives its number to its peers.
SHARES = """
  SHARED(float, numbers, 4);
  cluster_arrive();
  cluster_wait();
  if (threadIdx.x < 4) store_to_peer(numbers, blockIdx.x % 4, threadIdx.x, float(blockIdx.x));
  cluster_arrive();
  if (threadIdx.x >= 32) return;
  cluster_wait();
  if (threadIdx.x < 4) store_u32(data + blockIdx.x % 4 * 64 + threadIdx.x, __float_as_uint(numbers[threadIdx.x]));
"""


def test_a_cluster_shares():
    data = run_broken(SHARES, grid=4, cluster=4)
    assert torch.equal(data[:, :4], torch.arange(4.0).expand(4, 4)) and not data[:, 4:].any()
    unequal = """
      SHARED(float, own, 1);
      if (threadIdx.x == 0) own[0] = float(blockIdx.x);
      for (u32 i = 0; i <= blockIdx.x; ++i) __syncthreads();
      if (threadIdx.x == 0) store_u32(data + blockIdx.x, __float_as_uint(own[0]));
    """
    assert torch.equal(run_broken(unequal, grid=4, cluster=2)[0, :4], torch.arange(4.0))


WAIT, ARRIVE, PUSH = "  cluster_wait();\n", "  cluster_arrive();\n", "blockIdx.x % 4, threadIdx.x,"
CLUSTER_BUGS = {
    "no barrier before": (f"{ARRIVE}{WAIT}", "", "of a peer that may not have begun"),
    "no barrier behind": (f"{WAIT}  if (threadIdx.x < 4) store_u32", "  if (threadIdx.x < 4) store_u32", "in shared memory, which"),
    "past the cluster": (PUSH, "blockIdx.x % 4, 4 + threadIdx.x,", "store to numbers of block 4 of a cluster of 4"),
    "two writers": (PUSH, "0, threadIdx.x,", "store to numbers[0] in shared memory, which thread 0 also writes"),
    "arrives twice": (ARRIVE, 2 * ARRIVE, "arrives at a barrier of the cluster again without waiting"),
    "waits for nothing": (ARRIVE, "", "waits at a barrier of the cluster without having arrived"),
    "waits elsewhere": (WAIT, f"{WAIT}  if (threadIdx.x < 32) __syncthreads(); else cluster_wait();\n", "without having arrived"),
    "does not come": (WAIT, "  if (blockIdx.x) cluster_wait(); else __syncwarp();\n  if (!blockIdx.x) return;\n", "a peer that has ended"),
}


@pytest.mark.parametrize("bug", CLUSTER_BUGS)
def test_planted_bug_in_a_cluster(bug):
    found_when_planted(SHARES, CLUSTER_BUGS[bug], lambda text: run_broken(text, grid=4, cluster=4))


def test_a_grid_is_made_of_clusters():
    with pytest.raises(EmulatorError, match="a grid of 6 blocks is not made of clusters of 4"):
        run_broken(SHARES, grid=6, cluster=4)


def test_text_that_is_no_cpp_is_an_error_with_the_compiler_s_words():
    with pytest.raises(EmulatorError, match="was not declared"):
        run_broken("no_such_function();")


# Memory and libraries that the emulator keeps.

MIB = 1 << 20


def launch_on(data: torch.Tensor, number: int) -> None:
    """A kernel with `number` parameters, which differs by number. It writes a part of an operand and has shared memory and barriers."""

    class Numbered(KernelSpec):
        def parameters(self) -> list[Param]:
            return [Param.pointer("data", "f32", const=False), *(Param(f"n{i}", "int", "i") for i in range(number))]

    numbers = {f"n{i}": i for i in range(number)}
    body = f"""
      SHARED(float, tile, 8192);
      for (int i = threadIdx.x; i < 8192; i += 256) tile[i] = {number}.f;
      __syncthreads();
      store_u32(data + threadIdx.x, __float_as_uint(tile[8191 - threadIdx.x]));
    """
    source = f'extern "C" __global__ void large(float* data{"".join(f", int {n}" for n in numbers)}) {{{body}}}'
    packed = Arguments(Numbered(), numbers).at([data.data_ptr()])
    run_source(source, "large", 1, 256, packed, {"data": data}, ("data",))
    assert (data[:256] == number).all() and not data[256:].any()


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")


@needs_proc
def test_a_launch_leaves_nothing_behind():
    """No stacks and no records of memory: 48 MiB a launch would be 192. C's allocator may keep a part of freed memory."""

    def resident() -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024 // MIB

    data = torch.zeros(MIB)
    launch_on(data, 1)
    before = resident()
    for number in range(2, 6):
        launch_on(data, number)
    assert resident() - before < 32


@needs_proc
def test_a_kernel_is_unloaded_and_found_again(monkeypatch):
    def loaded() -> set[str]:
        lines = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
        return {words[-1] for words in lines if "ssmgen-emulator-" in words[-1] and "machine" not in words[-1]}

    data = torch.zeros(1024)
    before = loaded()  # libraries held by the frames of errors in earlier tests
    launch_on(data, 23)
    own = loaded() - before
    assert len(own) == 1
    emulator.compile_source.cache_clear()
    gc.collect()
    assert not own & loaded()
    monkeypatch.setattr(emulator, "_compile", None)  # compiled kernels are loaded again
    launch_on(data, 23)
    assert own <= loaded()


# The real kernel, broken by one edit each, which the emulator must catch.

SPLIT_TAIL = Case("split-tail", heads=2, headdim=134, state=BF16, index=torch.int32, split=True, conv_slices=True)
POOL = Case("pool", heads=4, groups=2, state=BF16, index=torch.int32)
CHANNELS = Case("channels", headdim=256, d_state=16, tied=False, z=BF16, index=torch.int64)

EDITS = {
    "no wait": (POOL, "  wait_for_upstream();", "  ", "before the wait for the upstream kernel"),
    "no padding": (POOL, "if (u64(slot) >= u64(slots) || slot == pad_slot_id)", "if (false)", "outside of every operand"),
    "state past the tail": (
        SPLIT_TAIL,
        "int(existing(row_of(step, i)))",
        "int(row_of(step, i) + 100000)",
        "load outside of every operand",
    ),
    "stores past the tail": (SPLIT_TAIL, "exists(row_of(step, i))", "true", "no barrier between"),
    "output past the tail": (SPLIT_TAIL, "lane % kLanes < kIlp && exists(row)", "lane % kLanes < kIlp", "store"),
    "every lane stores the output": (POOL, "if (lane % kLanes < kIlp && exists(row)) store", "store", "no barrier between"),
    "padded destination written": (SPLIT_TAIL, "u64(dst_slot) < u64(slots) && dst_slot != pad_slot_id", "true", "outside of every operand"),
    "wrong team offset": (POOL, "lane % kLanes * kVec;", "lane % kLanes * kVec + 1;", "not a multiple of 16"),
    "a lane skips the sum": (
        POOL,
        "sum_over_team<kLanes>(y, lane)",
        "(lane ? sum_over_team<kLanes>(y, lane) : 0.f)",
        "shuffle with lane 0, which has ended",
    ),
    "unrounded decay": (POOL, "h[j] * decay", "h[j]", "off by"),
    "wrong group": (POOL, "group = head / kHeadsPerGroup", "group = head % 2", "off by"),
    "x of another row": (CHANNELS, "of_owner(dt_x, i)", "of_owner(dt_x, 0)", "off by"),
    "output from the rounded state": (
        Case("r", heads=4, state=BF16, out=F32),
        "y[i][p] = dot(h, c[p]);",
        "pack(h, packed[i][p]); unpack(packed[i][p], h); y[i][p] = dot(h, c[p]);",
        "off by",
    ),
    "no softplus": (CHANNELS, "delta = softplus(delta);", "", "off by"),
    "source slot written": (SPLIT_TAIL, "State* dst = state + dst_slot", "State* dst = state + slot", "changed outside"),
}


@costly(5)
@pytest.mark.parametrize("edit", EDITS)
def test_broken_template(edit):
    a_mistake_is_found("selective_state_update", EDITS[edit], count=1)


def test_no_compiler_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr(emulator, "available", lambda: False)
    with pytest.raises(emulator.EmulatorMissingError, match="install g"):
        emulator.compile_source("// text not seen before", "f")
