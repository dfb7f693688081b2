"""Linear attention on keys-first states whose rows' lanes lie across warps: laws of the lane map, and the kernels through the emulator."""

from __future__ import annotations

import random
from dataclasses import replace

import decode_cases as laws
import la_cases as of
import pytest
from decode_cases import assert_matches
from emulated_calls import SM80, SM90, emulate, needs_emulator
from la_cases import BF16, F16, F32, GDN, I32, RAW, Call, Case, expected, make_call
from selection import costly

from ssmgen.engine.recurrences.attention.problem import LinearAttentionProblem
from ssmgen.engine.rows import across_warps
from ssmgen.families.linear_attention.spec import LinearAttentionSpec, candidates, space
from ssmgen.spec.kernel import DType, Index, Layout, Loads

pytestmark = pytest.mark.usefixtures("one_thread")

KV = replace(GDN, layout="kv", out=F32)
LARGE = 3000  # sequences, whose states the rules take across warps
NINE = replace(KV, tokens=9, batch=2, heads=2)
SMALL = {"heads": 2, "group": 1, "K": 64, "V": 32, "index": None, "batch": 2, "out": F32, "layout": "kv"}
PROBLEM = LinearAttentionProblem(
    dim_k=128, dim_v=128, nheads=4, key_heads=2, g=DType.BF16, beta=DType.BF16, index=Index.I32, layout=Layout.KV, state=DType.BF16
)


@pytest.mark.parametrize("state", [DType.F32, DType.BF16, DType.F16])
@pytest.mark.parametrize("loads", Loads)
def test_rules_of_any_shape_are_legal(state, loads):
    shapes = [(k, v) for k in (8, 32, 40, 64, 96, 128, 160, 192, 256, 384, 512, 1024) for v in (2, 8, 20, 32, 64, 72, 96, 128, 256)]
    for k, v in shapes:
        problem = replace(PROBLEM, dim_k=k, dim_v=v, state=state, state_loads=loads)
        for arch, batch in ((SM90, 1), (SM90, 3000), (SM80, 64)):
            found = [spec for _, spec, _ in candidates(problem, batch, arch, arch is SM90) if spec]
            assert found and not [words for spec in found for words in spec.violations(arch)], (k, v)


@pytest.mark.parametrize("piece", [64, 128, 256])
@pytest.mark.parametrize(("state", "dim_k"), [(DType.BF16, 64), (DType.BF16, 128), (DType.F32, 128), (DType.F32, 96)])
def test_neighbouring_lanes_read_whole_pieces(state, dim_k, piece):
    """16 bytes each; shorter ones where rows do not make up such pieces, and none where elements are gathered or rows are contiguous."""
    problem = replace(PROBLEM, dim_k=dim_k, state=state)

    def read(rows: int) -> int:
        how = across_warps(replace(problem, dim_v=rows), piece)
        passes = dim_k // (how["lanes"] * how["vec"])
        assert passes in (1, 3) and passes * how["lanes"] * how["vec"] == dim_k
        return 32 * how["row_warps"] // how["lanes"] * how["ilp"] * state.size

    assert read(256) == piece and read(64 // state.size) == 64 and read(3 * 64 // state.size) == 64
    assert not across_warps(replace(problem, dim_v=20), piece) and not across_warps(problem, 0)
    assert not across_warps(replace(problem, layout=Layout.VK), piece)
    assert not across_warps(replace(problem, state_loads=Loads.ELEMENT), piece)


VARIED = [
    Case("gdn-ragged", **RAW, **SMALL | {"index": I32, "batch": 5}, state=BF16, lengths=(9, 2, 1, 0, 3), dst="token", kept=2),
    Case("kda", rule="kda", **RAW, **SMALL), Case("gla-f16-t3", rule="gla", **SMALL, state=F16, tokens=3),
    Case("rwkv7-k96-t2", rule="rwkv7", **SMALL | {"K": 96, "V": 40}, tokens=2), Case("rwkv6", rule="rwkv6", **SMALL, state=BF16),
    Case("gdn-tree", **RAW, **SMALL, state=BF16, tokens=9, kept=0, parents=I32, rows=I32),
    Case("comba-k128v72", rule="comba", **RAW, **SMALL | {"K": 128, "V": 72}, state=BF16),
]  # fmt: skip


@costly(1)
@needs_emulator
@pytest.mark.parametrize("case", VARIED, ids=lambda c: c.id)
def test_variants_are_bit_equal(case):
    """Variants with rows across warps equal variants with neighbouring lanes, for all warps, passes, steps and prefetched blocks."""
    found = list(space(make_call(case, "cpu").problem, SM90))
    random.Random(3).shuffle(found)
    plain, across = next(s for s in found if not s.row_warps), [s for s in found if s.row_warps]
    kinds = {(s.row_warps > 1, s.passes > 1, s.tile > s.rows_per_step, s.prefetch > 0): s for s in across}
    laws.variants_are_equal(of, case, [plain, *list(kinds.values())[:4]])


def across(call: Call) -> LinearAttentionSpec:
    """The variant that many such sequences take, without a prefetch."""
    found = next(spec for _, spec, _ in candidates(call.problem, LARGE, SM90, True) if spec)
    assert found.row_warps
    return replace(found, prefetch=0)


@needs_emulator
def test_prefetch_asks_for_every_tile_ahead():
    """Not contiguous tiles, but pieces that make up the heads of the pool, and nothing outside of it."""
    for ahead in (1, 3):
        call = make_call(replace(KV, V=128, heads=2, state=BF16, batch=4), "cpu")
        want = expected(call)
        spec = replace(across(call), prefetch=ahead)
        assert spec.row_warps and spec.tiles == 2
        emulate(call, spec)
        assert_matches(call, want)


EDITS = {
    "no barrier behind the sums": (KV, "__syncthreads();\n    const float held", "const float held", "in shared memory"),
    "no barrier behind what rows share": (KV, "__syncthreads();\n    float added_of", "float added_of", "in shared memory"),
    "no barrier behind a token's products": (KV, "__syncthreads();\n    const float k_norm", "const float k_norm", "in shared memory"),
    "one warp's sums": (KV, "parts[(warp * Passes + p) * n", "parts[(0 * Passes + p) * n", "in shared memory"),
    "another row's sum": (NINE, "first_in_block + part % kIlp, kStepRows)", "first_in_block + (part + 1) % kIlp, kStepRows)", "off by"),
}  # fmt: skip


@needs_emulator
@pytest.mark.parametrize("edit", EDITS)
def test_broken_template(edit):
    case, *edit = EDITS[edit]
    laws.a_mistake_is_found(of, case, tuple(edit), across)
