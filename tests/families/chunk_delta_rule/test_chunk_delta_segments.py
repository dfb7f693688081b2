"""chunk_delta_rule in segments: the laws of its results in the emulator, which sequences are cut, and that wrong kernels are found."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import delta_cases as laws
import pytest
import torch
from chain_cases import written_by
from compiled import compiled
from delta_cases import ADVERSARIAL, BF16, F16, F32, SM90, Sizes, emulated, exact, make, problem_of, same, starts_of
from selection import costly, few

import ssmgen
from ssmgen import emulator
from ssmgen.compile.render import render
from ssmgen.emulator import EmulatorError
from ssmgen.emulator.check import check
from ssmgen.engine.chunks.chain import Backend
from ssmgen.engine.chunks.kernels import of_problem
from ssmgen.engine.chunks.problem import CHUNK
from ssmgen.engine.chunks.segments import LEAST, MOST, by_rule
from ssmgen.errors import ArgumentError
from ssmgen.families.chunk_delta_rule.chain import ChainSpec, candidates
from ssmgen.families.chunk_delta_rule.problem import DeltaProblem
from ssmgen.families.chunk_delta_rule.segments import JoinSpec
from ssmgen.select.models import Role, Wanted, find_model
from ssmgen.select.registry import select
from ssmgen.spec.kernel import Arch, DType, Index, Layout, Pdl

needs_emulator = pytest.mark.skipif(not emulator.available(), reason="needs g++")
SMALL, WIDE = Sizes(heads=2, head_k=32, head_v=32), Sizes(heads=1, head_k=64, head_v=64)
# Sequences of 1, 6, 1, 3, 2, 0 and 5 chunks. The second list has fewer sequences that may be cut than sequences.
RAGGED = (1, 330, 64, 192, 65, 0, 257)
SPARSE = (3,) * 9 + (330, 1, 0, 1, 129)
FORMS = [(SMALL, Backend.WARPS), (WIDE, Backend.WARPGROUPS)]


def variant(form: Any, problem: DeltaProblem) -> Any:
    """The first rule of a form that is legal."""
    return next(s for _, s, _ in candidates(problem, 1, SM90, True) if s and s.backend is form and not s.violations(SM90))


def served(form: Any, segments: int) -> Any:
    return partial(emulated, spec=partial(variant, form), segments=segments)


# Laws.


@costly(1)
@needs_emulator
@pytest.mark.parametrize(("sizes", "form"), FORMS, ids=["warps", "warpgroups"])
@pytest.mark.parametrize("kind", few([{}, *ADVERSARIAL.values()]), ids=["random", *ADVERSARIAL])
def test_errors_are_those_of_one_segment(sizes, form, kind):
    laws.segments_are_as_accurate(served(form, 1), served(form, 4), replace(sizes, heads=1), 7 * CHUNK, **kind)


@costly(1)
@needs_emulator
@pytest.mark.parametrize(("sizes", "form"), FORMS, ids=["warps", "warpgroups"])
@pytest.mark.parametrize("segments", few([3, 2, 5]))
def test_lengths_are_accurate(sizes, form, segments):
    laws.lengths_are_accurate(served(form, segments), sizes, RAGGED)


@costly(1)
@needs_emulator
@pytest.mark.parametrize("lengths", [RAGGED, SPARSE], ids=["all-may-be-cut", "few-may-be-cut"])
@pytest.mark.parametrize(("sizes", "form"), FORMS, ids=["warps", "warpgroups"])
def test_packing_changes_no_bit(sizes, form, lengths):
    laws.packing_changes_no_bit(served(form, 3), sizes, lengths)


@needs_emulator
def test_neighbours_do_not_matter():
    laws.neighbours_do_not_matter(served(Backend.WARPS, 3), SMALL, (5, 330, 70))


@costly(1)
@needs_emulator
@pytest.mark.parametrize("arch", few([Arch(80), SM90]))
@pytest.mark.parametrize("sizes", [Sizes(heads=3, key_heads=3, head_k=48, head_v=16, x=F16), Sizes(heads=1, head_k=160, head_v=64)])
def test_sizes_of_all_kinds(arch, sizes):
    """Blocks of M's rows have a different size, and several batches of them are joined."""
    laws.is_accurate(partial(emulated, arch=arch, segments=4), sizes, 260)


@needs_emulator
def test_two_warpgroups_share_a_block():
    """Each warpgroup has 128 rows of N or M."""
    sizes = Sizes(heads=1, head_k=128, head_v=128)
    spec = variant(Backend.WARPGROUPS, problem_of(**make(sizes, 1, 200), segments=4))
    _, lead, sums, _ = spec.ahead
    assert (lead.tile, sums.tile, spec.tile) == (64, 128, 64)
    laws.is_accurate(served(Backend.WARPGROUPS, 4), sizes, 200)


@needs_emulator
@pytest.mark.parametrize(("sizes", "form"), FORMS, ids=["warps", "warpgroups"])
def test_a_pool_is_touched_where_it_should_be(sizes, form):
    state, layout = (F32, "vk") if form is Backend.WARPS else (BF16, "kv")
    laws.a_pool_is_touched_where_it_should_be(served(form, 2), sizes, state, layout)


@costly(1)
@needs_emulator
@pytest.mark.parametrize("form", list(Backend))
def test_states_may_go_where_they_come_from(form):
    """A first segment reads a state, or has read it, before the last segment overwrites it."""
    run, sizes = served(form, 3), WIDE
    lengths, slots = (330, 0, 200), torch.tensor([2, 0, 1]).int()
    call = make(sizes, sum(lengths)) | {"cu_seqlens": starts_of(lengths, "cpu")}
    before = laws.states(sizes, 3, BF16)
    out, last = run(**call, initial_states=before, return_final_states=True)
    kept = before.clone()
    again, _ = run(**call, initial_states=kept, return_final_states=True, final_states_out=kept)
    assert same(again, out) and same(kept, last)
    pool = torch.empty_like(before)
    pool[slots.long()] = before
    again = run(**call, state=pool, state_indices=slots, has_initial_state=torch.tensor([True] * 3))
    assert same(again, out) and same(pool[slots.long()], last)


@costly(1)
@needs_emulator
@pytest.mark.parametrize("form", list(Backend))
def test_states_at_positions_are_those_on_the_way(form):
    """Positions at segments' ends and within them change no bit of the rest. Positions where no chunk ends leave their rows unchanged."""
    run, lengths = served(form, 3), (330, 70)
    call = make(WIDE, sum(lengths)) | {"cu_seqlens": starts_of(lengths, "cpu"), "return_final_states": True}
    positions = torch.tensor([64, 100, 128, 192, 256, 320, 330, 394, 400])
    kept = torch.full((9, *WIDE.state), laws.NAN)
    more = {"checkpoint_positions": positions, "checkpoints_out": kept}
    out, last = run(**call)
    found, states, kept = run(**call, **more, return_checkpoints=True)
    assert same(found, out) and same(states, last) and kept[1].isnan().all()
    wanted = exact(call, checkpoint_positions=positions, checkpoints_out=kept.clone(), return_checkpoints=True)["checkpoints"]
    rows = [0, 2, 3, 4, 5, 6, 7, 8]
    assert all(laws.error(kept[i], wanted[i]) <= laws.BOUNDS[BF16] for i in rows) and same(kept[6], last[0]) and same(kept[8], last[1])


@needs_emulator
def test_choices_change_no_bit():
    call = make(WIDE, 330) | {"cu_seqlens": starts_of((330,), "cpu"), "return_final_states": True, "segments": 3}

    def given(form: Any, **how: Any) -> Any:
        return emulated(**call, spec=lambda problem: form(**of_problem(problem, DeltaProblem), **how))

    warps = [given(ChainSpec, tile=tile, stages=stages, fetchers=f) for tile, stages, f in ((64, 1, 2), (16, 3, 1))]
    groups = [given(ChainSpec.by_warpgroups, tile=64, stages=stages, pdl=pdl) for stages, pdl in ((2, Pdl.OFF), (4, Pdl.TRIGGER_TOP))]
    for a, b in (warps, groups):
        assert all(same(x, y) for x, y in zip(a, b, strict=True))


@needs_emulator
def test_a_batch_is_its_sequences():
    call = make(SMALL, 2, 330)
    batch, last = emulated(**call, segments=3, return_final_states=True)
    for i in range(2):
        one = {n: t[i : i + 1] if n in laws.PER_TOKEN else t for n, t in call.items()}
        out, own = emulated(**one, segments=3, return_final_states=True)
        assert same(out[0], batch[i]) and same(own[0], last[i])


@needs_emulator
def test_checks_of_variants():
    problem = DeltaProblem(head_k=32, head_v=16, cu_seqlens=Index.I32, pool=True, started=True, index=Index.I64, segments=3)
    assert check(select("chunk_delta_rule", problem, 2, SM90, True), SM90, 4).passed


# Which sequences are cut.


def test_segments_cover_a_sequence():
    for most, least in ((2, 1), (3, 1), (7, 1), (16, LEAST), (3, LEAST)):
        problem = DeltaProblem(head_k=64, head_v=64, segments=most, segment_chunks=least)
        for chunks in range(1, 300):
            segments, first, each = problem.cut(chunks)
            cut = segments > 1
            assert cut == (chunks * CHUNK - CHUNK + 1 >= problem.span) and (cut or first == chunks), (most, least, chunks)
            if cut:
                ahead, behind = problem.lead
                assert segments <= most + 1 and each >= least and first == each * ahead // behind, (most, least, chunks)
                assert (segments - 2) * each < chunks - first <= (segments - 1) * each, (most, least, chunks)


def test_what_is_walked_at_once_is_as_long():
    """128 chunks, where 64 blocks of a prompt leave half of the card idle: 46 while 41 are summed, then 41 and 41."""
    assert DeltaProblem(head_k=128, head_v=128, segments=2, segment_chunks=LEAST).cut(128) == (3, 46, 41)
    assert DeltaProblem(head_k=128, head_v=128, segments=4, segment_chunks=LEAST).cut(128) == (5, 28, 25)


def test_the_rule_looks_at_heads_and_length_alone():
    assert {heads: by_rule(heads, 128) for heads in (1, 2, 4, 8, 12, 16, 22, 23, 32, 33, 34, 64)} == {
        1: 66, 2: 33, 4: 16, 8: 8, 12: 5, 16: 4, 22: 3, 23: 2, 32: 2, 33: 2, 34: 1, 64: 1,
    }  # fmt: skip

    def posed(heads: int, *lead: int, **more: Any) -> DeltaProblem:
        given = {n: torch.empty(*lead, heads, 128, dtype=BF16, device="meta") for n in ("q", "k", "v")}
        return problem_of(**given, g=torch.empty(*lead, heads, device="meta"), beta=torch.empty(*lead, heads, device="meta"), **more)

    long = 3 * LEAST * CHUNK - CHUNK + 1
    for batch in (1, 5):
        assert posed(8, batch, long).segments == 8 and not posed(8, batch, long - 1).divided and not posed(64, batch, long).divided
        assert posed(8, batch, 99, segments=3).segments == 3 and not posed(8, batch, 64, segments=3).divided
        assert not posed(8, batch, 10**5, segments=1).divided
    starts = torch.empty(9, dtype=torch.int32, device="meta")
    assert posed(8, long, cu_seqlens=starts) == replace(posed(8, 10 * long, cu_seqlens=starts))


def test_one_segment_is_the_kernel_that_knows_of_none():
    problem = DeltaProblem(head_k=128, head_v=128)
    spec = select("chunk_delta_rule", problem, 4, SM90, True)
    assert "segment" not in str(spec) and len(spec.kernels) == 2 and "segment" not in render(spec, SM90)
    assert len(select("chunk_delta_rule", replace(problem, segments=4, segment_chunks=16), 4, SM90, True).kernels) == 5


def test_explain_says_it():
    def explained(heads: int, tokens: int, **more: Any) -> str:
        t = {n: torch.empty(1, tokens, heads, 128, dtype=BF16, device="meta") for n in ("q", "k", "v")}
        g = torch.empty(1, tokens, heads, device="meta")
        return str(ssmgen.explain(ssmgen.chunk_gated_delta_rule, **t, g=g, beta=g, arch="sm_90a", **more))

    assert "-> up to 8 segments, warpgroups, 64 rows, 3 stages" in explained(8, 8192)
    assert "-> up to 2 segments, " in explained(64, 8192, segments=2)
    assert "segments: 64 heads of 128 rows fill 132 SMs with fewer than 2 segments" in explained(64, 8192)
    assert "segments: the call asks for one segment, or no sequence has 48 chunks of 64 tokens: no sequence is cut" in explained(8, 2048)


def test_a_workspace_holds_what_segments_leave():
    plain = ssmgen.chunk_delta_rule_workspace(8192, 3, 8, segments=1)
    assert plain == (128 + 3) * 8 * 11136
    # All three sequences, 8192 tokens together, may be cut. N and M, 128 x 128 each, are kept for all nine segments except the last.
    assert ssmgen.chunk_delta_rule_workspace(8192, 3, 8) == plain + 3 * 8 * 8 * 2 * 128 * 128 * 4
    assert ssmgen.chunk_delta_rule_workspace(8192, 3, 8, 64, 128, 2) == plain + 3 * 2 * 8 * (128 + 64) * 64 * 4
    assert ssmgen.chunk_delta_rule_workspace(8192, 3, 64) == (128 + 3) * 64 * 11136
    call = make(SMALL, 1, 200)
    with pytest.raises(ArgumentError, match=r"bytes; expected 154624 or more\. Get the size from"):
        ssmgen.chunk_gated_delta_rule(**call, segments=4, workspace=torch.empty(154623, dtype=torch.uint8))
    with pytest.raises(ArgumentError, match=f"segments is 0; expected an integer from 1 to {MOST}"):
        ssmgen.chunk_gated_delta_rule(**call, segments=0)


def test_models_of_few_heads_build_them():
    model = find_model("qwen3-next-80b-a3b")
    whole, half = (model.divided(tp).asked(Wanted(), Role.SCAN) for tp in (1, 2))
    for asked, segments in ((whole, 2), (half, 4)):
        assert [p.segments for p in asked if getattr(p, "divided", False)] == [segments] * (len(asked) // 2)


# Texts.

SHAPE: dict[str, Any] = {"head_k": 128, "head_v": 128, "pdl": Pdl.TRIGGER_LOADED, "segments": 8, "segment_chunks": LEAST}
SPECS = [
    ChainSpec.by_warpgroups(
        **SHAPE, cu_seqlens=Index.I32, pool=True, started=True, index=Index.I64, checkpoints=Index.I64, state=DType.BF16
    ),
    ChainSpec(**SHAPE, cu_seqlens=Index.I64, initial=True, final=True, layout=Layout.KV, tile=32),
]


@pytest.mark.matrix  # `ssmgen generate --check` checks the default variants
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.stem)
def test_no_variant_spills(spec):
    for part in spec.kernels[1:]:
        resources = compiled(part, SM90).resources
        assert not resources.spills and not resources.stack, part.name


def body_of(part: Any) -> str:
    """A kernel's text without comments."""
    text = re.sub(" *//.*", "", render(part, SM90)).split('extern "C"')[1]
    return text[text.index(") {") :]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.stem)
def test_the_workspace_is_waited_for(spec):
    """Blocks without work wait too: a kernel that ends before the upstream kernel would let the next one begin."""
    for part in spec.kernels[1:]:
        body = body_of(part)
        assert "wait_for_upstream();" in body and getattr(part, "beside", False) == ("workspace" in part.early_operands()), part.name
        leaving = body[: body.index("SHARED(")].split("return;")[:-1]
        assert isinstance(part, JoinSpec) or all("wait_for_upstream();" in text for text in leaving), part.name


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.stem)
def test_sums_go_on_beside_the_first_segments(spec):
    """They start after the upstream kernel has waited for images, which it does not write, and do not end before it does."""
    _, lead, sums, _ = spec.ahead
    for text in body_of(lead).split("allow_dependents();")[:-1]:
        assert "wait_for_upstream();" in text.split("return;")[-1]
    assert not {*written_by(lead)} & {*sums.roles()} - {"images"} and set(sums.early_operands()) == set(sums.operands())
    body = body_of(sums)
    behind = body[body.index("SHARED(") :].split("leave_state(left);")
    assert len(behind) == 2 and "wait_for_upstream" not in behind[0] and behind[1].lstrip().startswith("wait_for_upstream();")


# Mistakes: (kernel, text to replace, replacement, words of the finding; off: a result is wrong)

EDITS = {
    "M: no identity": ("sums", "? 1.f : 0.f", "? 0.f : 0.f", "off"),
    "M: with v": ("sums", "v_tiles, token, tile * kWalkers,", "v_tiles, token, 0,", "off"),
    "first: begun in nothing": ("lead", "if (has_state)", "if (!has_state)", "off"),
    "first: not left": ("lead", "leave_state(left);", "", "off"),
    "first: left as the second's N": ("lead", "u64(candidate) * kSegments", "(u64(candidate) * kSegments + 1)", "off"),
    "first: all tokens": ("lead", "min(whole, cut.first * kChunk)", "whole", "off"),
    "first: no wait": ("lead", "if (warp == 3) {\n      wait_for_upstream();", "if (warp == 3) {", "before the wait"),
    "first: final": ("lead", "if (cut.segments > 1) {", "if (cut.segments > 9) {", "off"),
    "N: tokens of the one behind": ("sums", "(segment - 1) * cut.chunks", "segment * cut.chunks", "off"),
    "sums: state changed in flight": ("sums", "wgmma_wait<0>();\n      wgmma_landed(S);", "", "in flight"),
    "sums: room too early": ("sums", "barrier_init(empty, i, 4 * kWalkers)", "barrier_init(empty, i, 2 * kWalkers)", "before it looks"),
    "join: without M": ("join", "fmaf(S[row], M[i], sum[row])", "sum[row]", "off"),
    "join: without N": ("join", "joined[e] = load(at + (4 * quad + e) * kHeadK);", "joined[e] = 0.f;", "off"),
    "join: no barrier": ("join", "sum[row];\n    __syncthreads();", "sum[row];", "nothing has written"),
    "join: one segment late": ("join", "ask(at + step + to_M);\n    }", "ask(at + to_M);\n    }", "off"),
    "join: no wait": ("join", "wait_for_upstream();", "", "wait for the upstream"),
    "outputs: from the segment's own end": ("chain", "kSegments + segment - 1)", "kSegments + segment)", "off"),
    "outputs: all final": ("chain", "if (segment + 1 == cut.segments) ", "", "also writes"),
    "outputs: tokens of the first segment": ("chain", "origin + before;", "origin;", "also writes"),
}  # fmt: skip


@costly(1)
@needs_emulator
@pytest.mark.parametrize("edit", few(EDITS))
def test_broken_kernels_are_found(edit):
    which, old, new, words = EDITS[edit]

    def change(source: str) -> str:
        if f"delta_{which}_" not in source.split('extern "C"')[1][:200]:
            return source
        assert old in source, "the edit no longer applies"
        return source.replace(old, new)

    def two_stages(problem: DeltaProblem) -> Any:
        return ChainSpec.by_warpgroups(**of_problem(problem, DeltaProblem), tile=64, stages=2, pdl=Pdl.TRIGGER_LOADED)

    # Four segments of three chunks, from a state that lives long.
    call = make(WIDE, 760, gate=0.02, step=0.1) | {"cu_seqlens": starts_of((760,), "cpu"), "state": laws.states(WIDE, 1)}
    call |= {"has_initial_state": torch.tensor([True]), "segments": 4}
    wanted = exact(call)
    try:
        out = emulated(**call, spec=two_stages, change=change)
        assert max(laws.error(out, wanted["out"][0]), laws.error(call["state"], wanted["state"])) <= laws.BOUNDS[BF16], "off"
    except EmulatorError as e:
        assert words in str(e), str(e)
    except AssertionError as e:
        assert words == "off" and "no longer applies" not in str(e)
    else:
        pytest.fail("nothing was found")
