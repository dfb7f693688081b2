"""chunk_scan by warpgroups in the emulator: states of 256 columns, which two warpgroups hold, and headdims that are not a multiple of
64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import attention_cases
import pytest
import scan_cases as laws
import torch
from compiled import compiled
from emulated_calls import needs_emulator
from kernel_laws import edited, found
from scan_cases import BF16, F16, F32, SM90, Sizes, emulated, make, same
from selection import costly, few
from test_chunk_scan_warpgroups import PART, variant

import ssmgen
from ssmgen.emulator.check import check
from ssmgen.families.chunk_scan.ends import EndsSpec
from ssmgen.families.chunk_scan.spec import WITHOUT_DT, Gate, ScanProblem, ScanSpec
from ssmgen.families.chunk_scan.warpgroups import UNDIVIDED, WarpgroupScanSpec
from ssmgen.spec.kernel import DType, Index, Loads

WIDE = Sizes(heads=1, headdim=64, d_state=256)
SIZES = {
    "n256": WIDE,
    "p80": Sizes(heads=2, headdim=80, d_state=64),
    "p32": Sizes(heads=2, headdim=32, d_state=64),
    "p144-n256": replace(WIDE, headdim=144),
}
of_sizes = pytest.mark.parametrize("size", SIZES)
of_few_sizes = pytest.mark.parametrize("size", few(SIZES))


def made(parts: int = 1, stages: int = 2, stays: bool = False) -> Callable[[ScanProblem], ScanSpec]:
    def of(problem: ScanProblem) -> ScanSpec:
        spec = replace(variant(1, stages)(problem), parts=parts, ends=parts > 1, stays=stays)
        assert not (violated := spec.violations(SM90)), violated
        return spec

    return of


def by(parts: int = 1, stages: int = 2, stays: bool = False, **more: Any) -> laws.Scan:
    return partial(emulated, spec=made(parts, stages, stays), **more)


@costly(6, 8)
@needs_emulator
@of_sizes
@pytest.mark.parametrize(
    ("parts", "tokens", "decay", "more"),
    [
        (1, 130, 1.0, {}),
        (1, 330, 1e-3, {}),
        (1, 130, 16.0, {"step": 3.0}),
        (2, PART + 400, 1e-3, {}),
        (3, 2 * PART + 266, 0.1, {}),
        (2, 2 * PART, 16.0, {"step": 3.0}),
    ],
    ids=["plain", "long-memory", "strong-decay", "2-parts", "3-parts", "strong-in-parts"],
)
def test_results_are_those_of_float64(size, parts, tokens, decay, more):
    laws.is_accurate(by(parts), SIZES[size], tokens, decay, **more)


@needs_emulator
def test_a_gate_and_f16():
    laws.is_accurate(by(stages=4), replace(SIZES["p80"], x=F16), 130, 1.0, z=True)
    laws.is_accurate(by(), replace(WIDE, x=F16), 130, 1.0)
    laws.is_accurate(by(), Sizes(heads=4, groups=2, headdim=96, d_state=256), 70, 0.1)
    laws.is_accurate(by(stages=4), Sizes(heads=4, groups=2, headdim=112, d_state=128), 70, 0.1)


pool_bf16 = partial(laws.a_pool_is_touched_where_it_should_be, state=BF16)
LAWS: dict[str, tuple[laws.Scan, Callable[[laws.Scan, Sizes], None]]] = {
    "lengths": (by(), partial(laws.lengths_are_accurate, lengths=(1, 63, 64, 65, 127, 129, 192))),
    "lengths-in-parts": (by(2), partial(laws.lengths_are_accurate, lengths=(64, 12 * 64, 12 * 64 + 1, 2 * PART))),
    "pool": (by(), pool_bf16),
    "pool-in-parts": (by(2), pool_bf16),
    "pool-stays": (by(stays=True), pool_bf16),
    "neighbours": (by(), partial(laws.neighbours_do_not_matter, lengths=(65, 0, 64, 3))),
}
LAWS_OF_FEW = {
    "packing": (by(), partial(laws.packing_changes_no_bit, lengths=laws.LENGTHS)),
    "packing-in-parts": (by(2), partial(laws.packing_changes_no_bit, lengths=(65, 0, PART + 400))),
    "packing-stays": (by(stays=True), partial(laws.packing_changes_no_bit, lengths=laws.LENGTHS)),
    "cut-64": (by(), partial(laws.a_cut_changes_no_bit, tokens=150, at=64)),
    "cut-128": (by(), partial(laws.a_cut_changes_no_bit, tokens=150, at=128)),
    "elsewhere": (by(), partial(laws.states_of_a_pool_may_begin_elsewhere, state=F32, index=torch.int32)),
    "decoding": (by(), partial(laws.decoding_goes_on, tokens=70)),
    "checkpoints": (by(), partial(laws.checkpoints_are_final_states, state=F32, ids=False, lengths=(5, 0, 64, 130, 7))),
    "checkpoints-ids": (by(), partial(laws.checkpoints_are_final_states, state=F32, ids=True, lengths=(5, 0, 64, 130, 7))),
    "ids": (by(), partial(laws.ids_are_sequences, lengths=(1, 63, 64, 7, 0, 57, 10))),
    "ids-go-on": (by(), laws.ids_go_on),
}


@costly(8, 8)
@needs_emulator
@of_sizes
@pytest.mark.parametrize("law", LAWS)
def test_laws(size, law):
    scan, holds = LAWS[law]
    holds(scan, SIZES[size])


@costly(11, 5)
@needs_emulator
@of_few_sizes
@pytest.mark.parametrize("law", LAWS_OF_FEW)
def test_laws_of_few_sizes(size, law):
    scan, holds = LAWS_OF_FEW[law]
    holds(scan, SIZES[size])


@needs_emulator
@pytest.mark.parametrize("size", ["p80", "p32"])
def test_layout_changes_no_bit(size):
    laws.layout_changes_no_bit(by(), SIZES[size], 8)


@needs_emulator
@pytest.mark.parametrize("form", few(attention_cases.FORMS))
@of_few_sizes
def test_linear_attention(form, size):
    name, call = attention_cases.make(form, replace(SIZES[size], heads=2), 2, 130)
    attention_cases.is_accurate(by(function=getattr(ssmgen, name)), call)


@costly(2)
@needs_emulator
@of_sizes
def test_blocks_that_stay_have_the_bits_of_others(size):
    """Persistent blocks, and parts that may divide longer sequences, change no bit: no sequence here is divided."""
    sizes = replace(SIZES[size], heads=2)
    call = make(sizes, 2, 140) | {"return_final_states": True}
    call["initial_states"] = torch.randn(2, 2, sizes.headdim, sizes.d_state, generator=torch.Generator().manual_seed(1))
    wanted = by()(**call)
    for scan in (by(stays=True), by(2), by(3)):
        assert all(same(a, b) for a, b in zip(scan(**call), wanted, strict=True))


@needs_emulator
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("d_state", [64, 256])
def test_the_longest_sequence_that_is_not_divided(d_state, parts):
    """It has the bits of a whole one; one more token, and it has not."""
    for tokens, alike in ((UNDIVIDED * 64, True), (UNDIVIDED * 64 + 1, False)):
        call = make(replace(WIDE, d_state=d_state), 1, tokens, decay=1e-2) | {"return_final_states": True}
        assert same(by(parts)(**call)[1], by()(**call)[1]) == alike


SHAPE = {"headdim": 80, "d_state": 256, "stages": 2}
SPECS = [
    WarpgroupScanSpec(**SHAPE, D=DType.F32, dt_bias=DType.BF16, initial=True, final=True),
    WarpgroupScanSpec(
        **SHAPE, parts=2, ends=True, cu_seqlens=Index.I32, pool=True, started=True, index=Index.I64, x=DType.F16, state=DType.BF16
    ),
    WarpgroupScanSpec(**SHAPE, parts=3, ends=True, dt_limit=True, dt_softplus=False, initial=True, state_loads=Loads.ELEMENT),
    WarpgroupScanSpec(**SHAPE, **WITHOUT_DT, gate=Gate.LOG, g=DType.BF16, cu_seqlens=Index.I64, final=True, stays=True),
    WarpgroupScanSpec(
        **SHAPE, parts=2, ends=True, seq_idx=True, checkpoints=Index.I32, initial=True, final=True, D=DType.BF16, dt_bias=DType.BF16
    ),
    WarpgroupScanSpec(
        **SHAPE | {"d_state": 128}, cu_seqlens=Index.I32, pool=True, started=True, index=Index.I32, state=DType.BF16, z=True, stays=True,
        checkpoints=Index.I64,
    ),
]  # fmt: skip


@costly(1)
@needs_emulator
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.stem)
def test_check_of_variants(spec):
    assert check(spec, SM90, 2 if spec.parts > 1 and spec.cu_seqlens is Index.NONE else 4).passed  # such sequences are long


@pytest.mark.matrix
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.stem)
def test_no_variant_spills(spec):
    resources = compiled(spec, SM90).resources
    assert not resources.spills and not resources.stack


def test_what_is_refused():
    parts = WarpgroupScanSpec(headdim=64, d_state=256, stages=2, parts=2)
    assert any("parts and d_state" in words for words in parts.violations(SM90))
    for sizes in ({"headdim": 80}, {"d_state": 256}):
        spec = EndsSpec.of(replace(parts, **{"headdim": 64, "d_state": 128} | sizes, parts=1, cu_seqlens=Index.I32))
        assert any("; expected a divisor of headdim, and d_state of at most 128" in words for words in spec.violations(SM90))


# Mistakes. (sizes, parts, text to replace, replacement, words of the finding; off: a result is wrong)
EDITS = {
    "y: sums of other tokens given": ("n256", 1, "half ? of_state[4 * j + e] : of_state[16 + 4 * j + e]", "of_state[4 * j + e]", "off"),
    "y: sums taken too early": ("n256", 1, "meet(2 + own_warp, 64);", "", "which nothing has written"),
    "y: in one place for all chunks": ("n256", 1, "kAtShared + buffer * 4096", "kAtShared", "with no barrier"),
    "y: where others of the warp still read": (
        "n256", 1, "__syncwarp();  // a warp stores y over the sums that it has taken", "", "with no barrier",
    ),
    "C: free too early": ("n256", 1, "barrier_init(empty_C, i, 12)", "barrier_init(empty_C, i, 4)", "while a product reads it"),
    "C: no wait for room": ("n256", 1, "        wait_empty_C(i);\n", "", "copies to"),
    "columns: both the first half": ("n256", 1, "half = warp / 4 - 2;", "half = 0 * warp;", "tiles["),
    "M: prepared not waited for": (
        "n256", 1, "      wait_prepared(i);\n      wgmma_fence();  // after", "      wgmma_fence();  // after", "tiles[",
    ),
    "a stage: free too early": ("n256", 1, "barrier_init(empty, i, 12)", "barrier_init(empty, i, 4)", "with no barrier between"),
    "parts: exchanged in a stage in use": ("n256", 2, "meet(1, 256);", "", "has read, with no barrier"),
    "parts: other columns": ("n256", 2, "half * (kOwn / 8 * 512) + ", "", "with no barrier"),
    "parts: the first block goes on alone": ("n256", 2, "phase < (behind ? 2 : 1)", "phase < 1", "nobody ends"),
    "rows: none left out": (
        "p80", 1, "rows = tile * kTile + piece * 8 < kHeadDim ? length - n * kChunk : 0", "rows = length - n * kChunk", "out",
    ),
    "rows: of the first block": ("p80", 1, "x_tiles, tile * kTile, token", "x_tiles, 0, token", "off"),
    "states: none left out": ("p80", 1, "if (held) {\n", "{\n", "final_states"),
}  # fmt: skip


@needs_emulator
@pytest.mark.parametrize("edit", few(EDITS))
def test_broken_kernels_are_found(edit):
    size, parts, old, new, words = EDITS[edit]
    with found(words):
        laws.is_accurate(by(parts, change=edited(old, new)), SIZES[size], 330 if parts == 1 else PART + 400, 0.1)
