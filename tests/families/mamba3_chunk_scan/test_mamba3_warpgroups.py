"""mamba3_chunk_scan's warpgroups: within rounding of float64, laws of bits, mistakes in the text, and where they are chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from bits import all_same, error, same
from compiled import compiled
from kernel_laws import edited, found
from mamba3_cases import POOLS
from mamba3_prompt_cases import INITIAL, NAN, Call, cut, emulated, exact, make, packing_changes_no_bit, starts_of, states, variant
from selection import costly
from test_mamba3_chunk_scan import BOUND, CASES, SM90, STATE, chosen

import ssmgen
from ssmgen import emulator
from ssmgen.errors import ArgumentError
from ssmgen.families.mamba3_chunk_scan.rules import candidates, parts_of
from ssmgen.families.mamba3_chunk_scan.spec import OPERATOR
from ssmgen.families.mamba3_chunk_scan.warpgroups import Mamba3WarpgroupsSpec
from ssmgen.select.registry import select
from ssmgen.spec.kernel import Arch, DType, Pdl, changed

pytestmark = pytest.mark.usefixtures("one_thread")
needs_emulator = pytest.mark.skipif(not emulator.available(), reason="needs g++")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
OUTPUTS = ("out", *POOLS)
BOUNDS = (BOUND, STATE, STATE, STATE, 1e-5)
SHAPES: dict[str, dict[str, Any]] = {
    "published": {"N": 128, "n": 32},
    "all angles": {"N": 128, "n": 64, "G": 2},
    "halves, angles that are not a multiple of four": {"N": 128, "n": 30, "rotary": "halves"},
    "few angles": {"N": 128, "n": 3},
    "64 columns": {"N": 64, "n": 16},
    "64 columns, halves, all angles, f16": {"N": 64, "n": 32, "rotary": "halves", "x": F16},
    "no rotation": {"N": 128, "without": ("angle",)},
    "no norm": {"N": 128, "n": 32, "without": ("B_norm", "C_norm")},
    "bare": {"N": 64, "without": ("angle", "B_norm", "C_norm", "B_bias", "C_bias", "z", "D", "dt_bias")},
}


def by_warpgroups(**how: Any) -> Any:
    return variant(Mamba3WarpgroupsSpec, **how)


def shaped(name: str, *lead: int, seed: int = 0) -> Call:
    how = dict(SHAPES[name])
    without, rotary = how.pop("without", ()), how.pop("rotary", "pairs")
    call = make(*lead, P=64, **({"x": BF16, "n": 4} | how), seed=seed) | {"rotary": rotary}
    return {n: None if n in without else t for n, t in call.items()}


def published(*lead: int, seed: int = 0) -> Call:
    return shaped("published", *lead, seed=seed)


def begun(call: Call, count: int = 1, k: torch.dtype = F32) -> Call:
    """With initial states."""
    angle = call["angle"]
    full = call if angle is not None else call | {"angle": torch.zeros(*call["dt"].shape[:-1], 1)}
    first = dict(zip(INITIAL, states(full, count, k=k), strict=True))
    return call | (first if angle is not None else {n: t for n, t in first.items() if n != "initial_angles"})


@costly(8)
@needs_emulator
@pytest.mark.parametrize("name", SHAPES)
def test_within_rounding_of_float64_in_any_number_of_spans(name):
    """Several chunks, so that all memory is used again; and less than one."""
    for T in (290, 20):
        call = begun(shaped(name, 1, T))
        wanted = exact(call, return_final_states=True)
        names = [n for n in OUTPUTS if n in wanted]
        whole = emulated(**call, return_final_states=True, spec=by_warpgroups())
        for t, n in zip([t for t in whole if t is not None], names, strict=True):
            assert error(t, wanted[n]) < BOUNDS[OUTPUTS.index(n)], (n, T)
        for spans in (2, 3, 4):
            shared = emulated(**call, return_final_states=True, spec=by_warpgroups(spans=spans))
            assert all(a is b is None or same(a, b) for a, b in zip(whole, shared, strict=True)), spans


@needs_emulator
@pytest.mark.parametrize("spans", [1, 3])
def test_pools_of_poison_in_place(spans):
    """Packed prompts of a pool whose other slots are NaN; one begins from a state, one from NaN under the mask."""
    lengths = (1, 64, 200, 0, 65)
    call = published(sum(lengths))
    slots = torch.tensor([5, 0, 7, 1, 3])
    pools = {n: torch.full_like(t, NAN) for n, t in zip(POOLS, states(call, 8, k=BF16), strict=True)}
    for n, t in zip(POOLS, states(call, 8, k=BF16), strict=True):
        pools[n][5] = t[5]
    how = {"cu_seqlens": starts_of(*lengths), "state_indices": slots, "has_initial_state": slots == 5}
    wanted = exact(call | pools | how)
    out = emulated(**call, **pools, **how, spec=by_warpgroups(spans=spans, pdl=Pdl.TRIGGER_LOADED))
    assert error(out, wanted["out"]) < BOUND
    for slot in (5, 0, 7, 3):
        for n, bound in zip(POOLS, (STATE, STATE, STATE, 1e-5), strict=True):
            assert error(pools[n][slot], wanted[n][slot]) < bound, (n, slot)
    assert all(pools[n][[1, 2, 4, 6]].isnan().all() for n in POOLS)


@needs_emulator
def test_packing_changes_no_bit():
    packing_changes_no_bit(published(1 + 64 + 130), (1, 0, 64, 130), spec=by_warpgroups(spans=2))


@needs_emulator
@pytest.mark.parametrize("at", [64, 128])
def test_a_prompt_cut_at_a_chunk_keeps_its_bits(at):
    """f32 states, k and v of x's type. An angle from the cache rounds the same: the cut is at a chunk's start."""
    call = published(1, 200)
    whole = emulated(**call, return_final_states=True, spec=by_warpgroups())
    first, *last = emulated(**cut(call, slice(None), slice(0, at)), return_final_states=True, spec=by_warpgroups())
    then = emulated(
        **cut(call, slice(None), slice(at, None)), **dict(zip(INITIAL, last, strict=True)), return_final_states=True, spec=by_warpgroups()
    )
    assert same(torch.cat([first, then[0]], 1), whole[0]) and all_same(then[1:], whole[1:])


EDITS = {
    "no wait for a chunk": ("wait_for<kStages>(full, n);", "", "shared memory"),
    "no wait for room": ("wait_for_last<kStages>(empty, n);", "", "shared memory"),
    "no wait for M": ("wait_for<2>(prepared, n);", "", "shared memory|off"),
    "no wait for M's memory": ("wait_for_last<2>(consumed, n);", "", "shared memory"),
    "no meeting before numbers": ("meet(3, 32 * kWriters);", "", "shared memory"),
    "no meeting before the first numbers": ("meet(5, 32 * (kHolders + kWriters));", "", "shared memory"),
    "no meeting around weighted x": ("meet(4, 32 * kHolders);", "", "shared memory"),
    "no wait for copies": ("wait_copies<0>();", "", "has not waited for the copy"),
    "no fence": ("fence_for_async();", "", "fence"),
    "numbers of too few chunks": ("kNumbers = 4", "kNumbers = 2", "off|shared memory"),
    "k of too few chunks": ("kKept = kStages + 1", "kKept = 1", "off|shared memory"),
    "k of another token": ("+ 1 != count", "+ 2 != count", "off|shared memory|nothing has written"),
    "no pending pair": ("delta = pending[n % kNumbers]", "delta = 0.f", "off"),
    "columns of later tokens": ("at < row ?", "at <= row ?", "off"),
    "the weight of another block": ("* 3 + kRow - 1)", "* 3)", "off|nothing has written"),
    "no rotation at the chunk's start": ("3.14159274f, at_start)", "3.14159274f, 0.f)", "off"),
    "no sum of the chunk's angles": ("turned(start[p], radians(sum[p]))", "start[p]", "off"),
    "the norm of q for k": ("scale[i].word[is_k]", "scale[i].word[0]", "off"),
    "one norm's weights for both": ("load_weights(norms, is_k * kState", "load_weights(norms, 0", "off"),
    "y of the other rows": ("own_piece = 2 * warp + lane / 8 % 2", "own_piece = 2 * warp + 1 - lane / 8 % 2", "off"),
    "no upstream": ("  wait_for_upstream();", "  ", "before the wait for the upstream kernel"),
}


@costly(6)
@needs_emulator
@pytest.mark.parametrize("name", EDITS)
def test_mistakes_are_found(name):
    old, new, words = EDITS[name]
    call = begun(published(1, 330), k=BF16)
    wanted = exact(call, return_final_states=True)
    with found(words):
        results = emulated(
            **call, return_final_states=True, change=edited(old, new, "kHolders"), spec=by_warpgroups(pdl=Pdl.TRIGGER_LOADED)
        )
        for t, n, bound in zip(results, OUTPUTS, BOUNDS, strict=True):
            assert error(t, wanted[n]) < bound, n


AHEAD_EDITS = {
    "a barrier too few": ("__syncthreads();  // steps and tangents", "//", "shared memory"),
    "no sum of the tokens before": ("angles[i] = wrapped(before[p] + sum)", "angles[i] = sum", "off"),
    "dt of another head": ("deltas, warp * kDeltaWords + t + i", "deltas, t + i", "off"),
    "logits of another head": ("load_logits(t + kSpan, warp)", "load_logits(t + kSpan, 0)", "off"),
    "tangents of other tokens": ("tanh[i][p] = tanhs[(t + i)", "tanh[i][p] = tanhs[i", "off"),
    "the sum of another chunk": ("sequence + n) * heads", "sequence) * heads", "also writes"),
    "one row for both norms": ("is_k ? row_B : row_C", "row_B", "off"),
    "no upstream": ("  wait_for_upstream();", "  ", "before the wait for the upstream kernel"),
}

PACKED_EDITS = {
    "no barrier before the chunk is searched": ("found[2] = 0;\n  __syncthreads();", "found[2] = 0;", "shared memory"),
    "a chunk of every later sequence": ("item - before < chunks", "true", "shared memory"),
    "the chunk of another sequence": ("+ sequence) : 0;  // the block's chunk", ") : 0;", "off"),
}


def of_angles() -> tuple[Call, Call]:
    """Two blocks of heads, each head with own angles; and packed sequences, whose heads share the angles."""
    call = make(1, 200, H=9, G=9, P=64, N=64, n=16, x=BF16)
    call |= {"angle": torch.randn(1, 200, 9, 16, generator=torch.Generator().manual_seed(8))}
    return call, published(1 + 64 + 130) | {"cu_seqlens": starts_of(1, 0, 64, 130)}


@costly(6)
@needs_emulator
@pytest.mark.parametrize("name", [*AHEAD_EDITS, *PACKED_EDITS])
def test_mistakes_of_angles_and_norms_are_found(name):
    old, new, words = (AHEAD_EDITS | PACKED_EDITS)[name]
    change = edited(old, new, "SHARED(u32, found" if name in PACKED_EDITS else "kDeltaWords")
    with found(words):
        for call in of_angles():
            wanted = exact(call, return_final_states=True)
            results = emulated(**call, return_final_states=True, change=change, spec=by_warpgroups(pdl=Pdl.TRIGGER_LOADED))
            for t, n, bound in zip(results, OUTPUTS, (BOUND, STATE, STATE, STATE, 1e-4), strict=True):
                assert error(t, wanted[n]) < bound, n


@costly(6)
@needs_emulator
def test_correct_texts_pass_the_same():
    for call, last in ((begun(published(1, 330), k=BF16), 1e-5), *((call, 1e-4) for call in of_angles())):
        wanted = exact(call, return_final_states=True)
        results = emulated(**call, return_final_states=True, spec=by_warpgroups(pdl=Pdl.TRIGGER_LOADED))
        assert all(error(t, wanted[n]) < bound for t, n, bound in zip(results, OUTPUTS, (*BOUNDS[:4], last), strict=True))


SISO = CASES["published-siso"]


def test_where_warpgroups_are_chosen():
    """For one rank of the published head size on sm_90a, whatever the call's sequences are: one problem has one order of sums."""
    for size in (1, 24, 44, 45, 66, 67, 10_000):
        spec = select(OPERATOR, SISO, size, SM90, True)
        assert isinstance(spec, Mamba3WarpgroupsSpec) and spec.spans == (3 if size <= 44 else 2 if size <= 66 else 1), size
    for arch in ("sm_80", "sm_90", "sm_100a", "sm_120"):
        assert not isinstance(chosen(SISO, Arch.parse(arch)), Mamba3WarpgroupsSpec), arch
    for change in (
        {"headdim": 32}, {"d_state": 96, "angles": 24}, {"copy": 8}, {"norm_weight": DType.F32}, {"rank": 2, "mimo": DType.F32},
        {"mimo": DType.F32}, {"segments": 3},
    ):  # fmt: skip
        assert not isinstance(chosen(replace(SISO, **change)), Mamba3WarpgroupsSpec), change
    assert not isinstance(chosen(CASES["published-mimo"]), Mamba3WarpgroupsSpec)


def test_two_segments_have_a_whole_sequence_s_kernel():
    """Two parts have a whole sequence's bits, by any variant; warpgroups have no parts."""
    two, mimo = replace(SISO, segments=2), replace(CASES["published-mimo"], segments=2)
    assert parts_of(two, SM90) == 1 and parts_of(two, Arch(100, "a")) == parts_of(mimo, SM90) == 2
    assert isinstance(select(OPERATOR, two, 24, SM90, True), Mamba3WarpgroupsSpec)


def test_violations_in_words():
    spec = chosen(SISO)
    for change, words in (
        ({"stages": 1}, "stages is 1; expected 2 or 3, with warps of several roles"),
        ({"copy": 4}, "x, B, C, z and out are contiguous and aligned for 4 bytes; expected 16"),
        ({"d_state": 32, "angles": 8}, "d_state is 32; expected 64 or 128"),
        ({"headdim": 32}, "headdim is 32; expected 64, the rows of a warpgroup"),
        ({"norm_weight": DType.F32}, "norm_weight is given; expected none: a row of y belongs to four warps"),
        ({"rank": 2, "mimo": DType.F32}, "rank is 2 with mimo_x; expected 1 without"),
    ):
        assert words in str(replace(spec, **change).violations(SM90)), change
    assert "arch is sm_100a; expected sm_90a for warpgroup products" in spec.violations(Arch(100, "a"))


def test_calls_that_neither_rotate_nor_norm_have_one_kernel():
    assert [part.family for part in chosen(SISO).kernels] == ["mamba3_chunk_scan_prepare", "mamba3_chunk_scan_warpgroups"]
    bare = chosen(changed(SISO, angles=0, angle=None, row_norm=None))
    assert isinstance(bare, Mamba3WarpgroupsSpec) and bare.kernels == (bare,) and "workspace" not in bare.operands()


def test_published_shapes_fit_in_registers():
    for _, spec, _ in candidates(SISO, 24, SM90, True):
        if isinstance(spec, Mamba3WarpgroupsSpec):
            for part in spec.kernels:
                resources = compiled(part, SM90).resources
                assert not resources.spills and not resources.stack, spec


def test_a_workspace_may_be_given():
    """The function returns its size; the emulator allows no access after it."""
    call = published(2, 70)
    numbers = ssmgen.mamba3_chunk_scan_workspace(140, 2, 2, 32)
    assert numbers == 140 * 2 * 32 + 140 * 2 + 2 * 32 * (140 // 64 + 2)
    assert ssmgen.mamba3_chunk_scan.build(**call).operands["workspace"].numel() == numbers
    built = ssmgen.mamba3_chunk_scan.build(**call, workspace=torch.empty(numbers))
    assert built.operands["workspace"].numel() == numbers
    assert "workspace" not in ssmgen.mamba3_chunk_scan.build(**call | {"angle": None, "B_norm": None, "C_norm": None}).operands
    assert "workspace" not in ssmgen.mamba3_chunk_scan.build(**make(2, 70, R=4, x=BF16)).operands
    for wrong, words in (
        (torch.empty(numbers - 1), r"workspace is \[9495\] with strides \[1\]; expected \[9496 or more\], dense"),
        (torch.empty(numbers, dtype=torch.uint8), "workspace is uint8; expected float32"),
    ):
        with pytest.raises(ArgumentError, match=words):
            ssmgen.mamba3_chunk_scan(**call, workspace=wrong)
