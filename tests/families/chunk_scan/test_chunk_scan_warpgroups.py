"""chunk_scan by warpgroups: the laws of its results in the emulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import attention_cases
import pytest
import scan_cases as laws
import torch
from compiled import compiled
from emulated_calls import needs_emulator
from kernel_laws import waits_before_any_of
from scan_cases import BF16, BOUNDS, F16, F32, SM90, Sizes, emulated, error, exact, make, same
from selection import costly, few, kept

import ssmgen
from ssmgen.emulator.check import check
from ssmgen.families.chunk_scan.rules import space
from ssmgen.families.chunk_scan.spec import OPERATOR, WITHOUT_DT, Gate, ScanProblem, ScanSpec
from ssmgen.families.chunk_scan.warpgroups import LEAST, WarpgroupScanSpec, warpgroup_space
from ssmgen.select.registry import explain, select
from ssmgen.spec.kernel import Arch, DType, Index, Loads, Pdl

SMALL = Sizes(heads=1, headdim=64, d_state=64)
PART = LEAST * 64  # tokens: with more, a sequence is divided


def variant(parts: int = 1, stages: int = 2, pdl: Pdl = Pdl.TRIGGER_LOADED) -> Callable[[ScanProblem], ScanSpec]:
    """A function that makes a problem's variant."""

    def of(problem: ScanProblem) -> ScanSpec:
        given = {f.name: getattr(problem, f.name) for f in fields(ScanProblem)}
        spec = WarpgroupScanSpec(**given, parts=parts, stages=stages, pdl=pdl)
        assert not spec.violations(SM90)
        return spec

    return of


def by(parts: int = 1, stages: int = 2, **more: Any) -> laws.Scan:
    return partial(emulated, spec=variant(parts, stages), **more)


in_parts = pytest.mark.parametrize("parts", [1, 2])


# Laws.


KINDS: dict[str, tuple[Sizes, int, int, float, dict[str, Any]]] = {  # sizes, parts, tokens, scale of A, and more
    "plain": (SMALL, 1, 130, 1.0, {}),
    "long-memory": (SMALL, 1, 330, 1e-3, {}),
    "strong-decay": (SMALL, 1, 130, 16.0, {"step": 3.0}),  # a chunk's sum is about -3000
    "f16-gate": (replace(SMALL, x=F16), 1, 130, 1.0, {"z": True}),
    "2-parts": (SMALL, 2, 2 * PART, 1e-3, {}),
    "3-parts": (SMALL, 3, 2 * PART + 66, 1e-3, {"z": True}),  # the last of three has a chunk and a part of one
    "a-part-of-3": (SMALL, 3, PART + 1, 0.1, {}),  # and none here
    # Eleven and ten: buffers change sides between the sums and the walk, and phases their parity.
    "odd-parts": (SMALL, 2, 2 * PART + 300, 1e-2, {}),
    "strong-in-parts": (SMALL, 2, PART + 200, 16.0, {"step": 3.0}),
    "model": (Sizes(heads=4, groups=2, headdim=64, d_state=128), 1, 70, 0.1, {}),
    "p128": (Sizes(heads=1, headdim=128, d_state=64), 2, PART + 65, 0.1, {}),
}


@costly(3, 11)
@needs_emulator
@pytest.mark.parametrize("stages", few([4, 2]))
@pytest.mark.parametrize(("sizes", "parts", "tokens", "decay", "more"), KINDS.values(), ids=KINDS)
def test_results_are_those_of_float64(sizes, parts, stages, tokens, decay, more):
    laws.is_accurate(by(parts, stages), sizes, tokens, decay, **more)


pool, elsewhere = laws.a_pool_is_touched_where_it_should_be, laws.states_of_a_pool_may_begin_elsewhere
ends = partial(laws.checkpoints_are_final_states, lengths=(5, 0, 64, 130, 7))
# A name with a slash is another form of a law, which runs with -m matrix.
LAWS: dict[str, tuple[laws.Scan, Callable[[laws.Scan, Sizes], None]]] = {
    "lengths": (by(1, 4), partial(laws.lengths_are_accurate, lengths=(1, 63, 64, 65, 127, 128, 129, 192))),
    "lengths in parts": (by(2, 4), partial(laws.lengths_are_accurate, lengths=(64, PART, PART + 1, 2 * PART))),
    "packing": (by(1, 2), partial(laws.packing_changes_no_bit, lengths=laws.LENGTHS)),
    "packing/4 stages": (by(1, 4), partial(laws.packing_changes_no_bit, lengths=laws.LENGTHS)),
    "packing/2 parts": (by(2, 2), partial(laws.packing_changes_no_bit, lengths=(65, 0, PART + 130))),
    "packing/3 parts": (by(3, 4), partial(laws.packing_changes_no_bit, lengths=(65, 0, PART + 130))),
    "cut at 64": (by(), partial(laws.a_cut_changes_no_bit, tokens=150, at=64)),
    "cut at 128": (by(), partial(laws.a_cut_changes_no_bit, tokens=150, at=128)),
    "pool": (by(2), partial(pool, state=BF16)),
    **{f"pool/{x}, {parts} parts": (by(parts), partial(pool, state=x)) for x in (F32, BF16, F16) for parts in (1, 2)},
    "elsewhere": (by(2), partial(elsewhere, state=F32, index=torch.int32)),
    "elsewhere/i32": (by(), partial(elsewhere, state=F32, index=torch.int32)),
    "elsewhere/bf16, i64": (by(), partial(elsewhere, state=BF16, index=torch.int64)),
    "elsewhere/bf16, i64, 2 parts": (by(2), partial(elsewhere, state=BF16, index=torch.int64)),
    "elsewhere/in order": (by(), partial(elsewhere, state=F32, index=None)),
    "elsewhere/in order, 2 parts": (by(2), partial(elsewhere, state=F32, index=None)),
    "neighbours": (by(), partial(laws.neighbours_do_not_matter, lengths=(65, 0, 64, 3))),
    "neighbours in parts": (by(2), partial(laws.neighbours_do_not_matter, lengths=(PART + 1, 70))),
    "layout": (by(), partial(laws.layout_changes_no_bit, offset=8)),
    "layout in parts": (by(2), partial(laws.layout_changes_no_bit, offset=8)),
    "decoding": (by(), partial(laws.decoding_goes_on, tokens=70)),
    "without tokens": (by(), partial(laws.sequences_without_tokens_keep_states, state=F32)),
    "without tokens in parts": (by(2), partial(laws.sequences_without_tokens_keep_states, state=BF16)),
    "ids": (by(), partial(laws.ids_are_sequences, lengths=(1, 63, 64, 7, 0, 57, 10))),
    "ids go on": (by(), laws.ids_go_on),
    "checkpoints": (by(1, 4), partial(ends, state=F32, ids=True)),
    "checkpoints/f32": (by(1, 4), partial(ends, state=F32, ids=False)),
    "checkpoints/bf16": (by(1, 4), partial(ends, state=BF16, ids=False)),
    "checkpoints of a batch": (by(), laws.checkpoints_of_a_batch),
}


@needs_emulator
@pytest.mark.parametrize("law", kept(LAWS, lambda name: "/" not in name))
def test_laws(law):
    scan, holds = LAWS[law]
    holds(scan, SMALL)


@needs_emulator
def test_a_cut_of_f16_changes_no_bit():
    for at in (64, 128):
        laws.a_cut_changes_no_bit(by(), replace(SMALL, x=F16), 150, at)


@needs_emulator
@pytest.mark.parametrize(("parts", "tokens"), [(1, 200), (2, PART + 130)])
def test_stages_change_no_bit(parts, tokens):
    call = make(SMALL, 1, tokens) | {"return_final_states": True}
    results = [by(parts, stages)(**call) for stages in (2, 4)]
    assert all(same(a, b) for a, b in zip(*results, strict=True))


@needs_emulator
@in_parts
def test_place_in_the_batch_changes_no_bit(parts):
    call, scan = make(SMALL, 3, PART + 1 if parts > 1 else 70), by(parts)
    whole = scan(**call)
    per_token = ("x", "dt", "B", "C")
    assert all(same(scan(**{n: t[i : i + 1] if n in per_token else t for n, t in call.items()})[0], whole[i]) for i in (0, 2))


@needs_emulator
@pytest.mark.parametrize("parts", [2, 3])
def test_ids_and_checkpoints_in_parts(parts):
    """Only the last checkpoint equals bitwise the final state of a call that ends there. Other such calls are divided elsewhere."""
    tokens = PART + 200
    call = make(SMALL, 1, tokens, decay=0.02) | {"initial_states": torch.full((1, 1, 64, 64), 1e30)}
    call["seq_idx"] = (torch.arange(tokens) // 150).int()[None]  # first new sequence within the first part; none starts with a part
    listed = torch.tensor([140, 150, 151, PART, PART + 1, PART + 199, tokens])
    more = {"return_final_states": True, "checkpoint_positions": listed, "return_checkpoints": True}
    wanted, found = exact(call, **more), by(parts, 4)(**call, **more)
    for name, own in zip(("out", "final_states", "checkpoints"), found, strict=True):
        early = {"out": (slice(None), slice(150)), "checkpoints": slice(1)}.get(name, slice(0))  # with a remainder of 1e30
        late = {"out": (slice(None), slice(150, None)), "checkpoints": slice(1, None)}.get(name, slice(None))
        assert error(own[late], wanted[name][late]) <= BOUNDS[BF16], name
        assert name == "final_states" or error(own[early], wanted[name][early]) <= BOUNDS[BF16], name
    plain = by(parts, 4)(**call, return_final_states=True)
    assert all(same(a, b) for a, b in zip(found, plain, strict=False)) and same(found[2][-1], found[1][0])
    same_ids = call | {"seq_idx": torch.full_like(call["seq_idx"], 7)}
    del call["seq_idx"]
    assert same(by(parts, 4)(**same_ids), by(parts, 4)(**call))


@costly(1)
@needs_emulator
@pytest.mark.parametrize("form", attention_cases.FORMS)
def test_linear_attention(form):
    sizes = replace(SMALL, heads=2)
    name, call = attention_cases.make(form, sizes, 2, 130)
    scan = by(function=getattr(ssmgen, name))
    attention_cases.is_accurate(scan, call)
    attention_cases.packing_and_cuts_change_no_bit(scan, form, SMALL, (3, 70, 0, 64), 64)


@needs_emulator
@pytest.mark.parametrize("form", ["log", "slope"])
def test_linear_attention_in_parts(form):
    name, call = attention_cases.make(form, SMALL, 1, PART + 70)
    attention_cases.is_accurate(by(2, function=getattr(ssmgen, name)), call)


# Choices and texts.


SHAPE = {"headdim": 64, "d_state": 64, "stages": 2}
SPECS = [
    WarpgroupScanSpec(**SHAPE, D=DType.F32, dt_bias=DType.BF16, initial=True, final=True),
    WarpgroupScanSpec(
        **SHAPE, parts=2, z=True, cu_seqlens=Index.I32, pool=True, started=True, index=Index.I64, x=DType.F16, state=DType.BF16
    ),
    WarpgroupScanSpec(**SHAPE, parts=3, dt_limit=True, dt_softplus=False, initial=True, state_loads=Loads.ELEMENT),
    WarpgroupScanSpec(**SHAPE, **WITHOUT_DT, gate=Gate.LOG, g=DType.BF16, cu_seqlens=Index.I64, final=True),
    WarpgroupScanSpec(**SHAPE, parts=2, seq_idx=True, checkpoints=Index.I32, initial=True, final=True, D=DType.BF16, dt_bias=DType.BF16),
    WarpgroupScanSpec(
        **SHAPE, cu_seqlens=Index.I32, pool=True, started=True, index=Index.I32, state=DType.BF16, checkpoints=Index.I64, z=True
    ),
]


@costly(1)
@needs_emulator
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.stem)
def test_check_of_variants(spec):
    assert check(spec, SM90, 2 if spec.parts > 1 and spec.cu_seqlens is Index.NONE else 4).passed  # such sequences are long


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.stem)
def test_the_wait_precedes_every_access(spec):
    waits_before_any_of(replace(spec, pdl=Pdl.TRIGGER_LOADED), "load(", "load_u8(", "copy_tile<", "load_vector<", "store_")


@pytest.mark.matrix  # `ssmgen generate --check` checks the default variants
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.stem)
def test_no_variant_spills(spec):
    resources = compiled(spec, SM90).resources
    assert not resources.spills and not resources.stack


def test_what_serves_which_heads():
    """The choice ignores the number of sequences: their bits do not depend on it."""
    problem = ScanProblem(headdim=64, d_state=128, final=True)

    def parts(heads: int, of: ScanProblem = problem) -> int | None:
        spec = select(OPERATOR, of, heads, SM90, True)
        return spec.parts if isinstance(spec, WarpgroupScanSpec) else None

    assert (parts(8), parts(16), parts(24), parts(32), parts(37), parts(128)) == (8, 6, 4, 3, 1, 1)
    assert [parts(16, replace(problem, segments=n)) for n in (1, 3, 1000)] == [1, 3, 8] and parts(128, replace(problem, segments=2)) == 2
    assert [parts(16, replace(problem, **more)) for more in ({"seq_idx": True}, {"checkpoints": Index.I32})] == [6, 6]
    for other in ({"copy": 8}, {"d_state": 96}, {"x": DType.F32}, {"d_state": 256, "z": True}):
        assert parts(32, replace(problem, **other)) is None
    wide = replace(problem, d_state=256)
    assert [parts(heads, wide) for heads in (8, 16, 30, 36, 48, 66, 67)] == [8, 6, 4, 3, 2, 2, 1]
    assert [parts(heads, replace(wide, headdim=128)) for heads in (24, 32, 64)] == [2, 2, 1]
    assert [parts(heads, replace(problem, headdim=32)) for heads in (24, 48)] == [4, 2]
    assert [parts(heads, replace(problem, headdim=80)) for heads in (33, 96)] == [2, 1]
    assert not isinstance(select(OPERATOR, problem, 32, Arch(80), False), WarpgroupScanSpec)
    assert {s.parts for s in warpgroup_space(problem, SM90)} == {1}


def test_blocks_stay_where_sequences_are_many_and_short():
    """More heads of them than SMs, of at most 2048 tokens each; of packed ones 1024, on average, since their lengths are not looked at."""

    def served(heads: int, sequences: int, tokens: int, packed: bool = False, **more: Any) -> ScanSpec:
        lead = (1, sequences * tokens) if packed else (sequences, tokens)
        x, B, A = (torch.empty(*shape, dtype=BF16, device="meta") for shape in ((*lead, heads, 64), (*lead, 1, 128), (heads,)))
        call = {"x": x, "B": B, "C": B, "dt": x[..., 0], "A": A} | more
        if packed:
            call["cu_seqlens"] = torch.empty(sequences + 1, dtype=torch.int32, device="meta")
        found, size, *_ = ssmgen.chunk_scan.build(**call).problem()
        return select(OPERATOR, found, size, SM90, True)

    def stays(*given: Any, **more: Any) -> bool:
        return served(*given, **more).stays

    assert [stays(66, n, 1) for n in (2, 3)] == [False, True] and [stays(133, 1, n) for n in (2048, 2049)] == [True, False]
    assert [stays(67, 2, n, True) for n in (1, 1024, 1025)] == [True, True, False]
    assert [stays(36, 16, n) for n in (1, 768, 769)] == [True, True, False], "few heads: longer sequences are divided"
    assert not stays(36, 16, 1, True), "and any of packed ones may be long"
    assert served(36, 16, 769).parts == 3 and stays(36, 16, 769, segments=1)
    assert str(served(36, 16, 769)) == str(served(36, 1, 1)), "where nothing stays, a call of short sequences is one like others"


def test_what_is_explained():
    problem = ScanProblem(headdim=64, d_state=128)

    def said(heads: int, **more: Any) -> str:
        return str(explain(OPERATOR, replace(problem, **more), heads, SM90, True))

    assert "-> warpgroups, blocks that stay, 4 stages" in said(128, short=True)
    assert "warpgroups, blocks that stay: it is for more than 132 heads of sequences" in said(128) and "-> warpgroups, 4 stages" in said(
        128
    )
    assert "warpgroups, blocks that stay: 6 blocks share a sequence of more than 12 chunks" in said(16)
    assert "-> warpgroups, 6 parts, 4 stages" in said(16)


def test_tuning_chooses_within_a_form():
    """The two forms differ bitwise, and so do divided and whole sequences."""
    problem = ScanProblem(headdim=64, d_state=128)
    assert {s.order for s in space(problem, SM90)} == {("chunk_scan", 1), ("chunk_scan_warpgroups", 1)}
    assert [select(OPERATOR, problem, heads, SM90, True).order[1:] for heads in (16, 24, 128)] == [(6, "ends"), (4, "ends"), (1,)]
