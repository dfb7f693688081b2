"""Prompts of chunk_delta_rule and of chunk_linear_attention in segments: the laws of their results in the emulator, and that wrong
kernels are found."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import prompt_laws as laws
import pytest
import torch
from compiled import compiled
from emulated_calls import needs_emulator, written_by
from kernel_laws import edited, found
from prompt_cases import (
    ADVERSARIAL,
    BF16,
    BOUNDS,
    F16,
    F32,
    OF_HEADS,
    SM90,
    Case,
    emulated,
    error,
    exact,
    make,
    problem_of,
    same,
    starts_of,
    states,
    variant,
)
from selection import costly, few

from ssmgen.compile.render import render
from ssmgen.emulator.check import check
from ssmgen.engine.chunks.chain import Backend
from ssmgen.engine.chunks.kernels import of_problem
from ssmgen.engine.chunks.problem import CHUNK
from ssmgen.engine.chunks.segments import LEAST
from ssmgen.families.chunk_delta_rule.chain import ChainSpec as DeltaChain
from ssmgen.families.chunk_delta_rule.problem import DeltaProblem
from ssmgen.families.chunk_delta_rule.spec import JoinSpec
from ssmgen.families.chunk_linear_attention.chain import ChainSpec as LinearChain
from ssmgen.families.chunk_linear_attention.problem import LinearPromptProblem
from ssmgen.select.registry import select
from ssmgen.spec.kernel import Arch, DType, Index, Layout, Pdl

DELTA, KDA = Case("chunk_gated_delta_rule"), Case("chunk_kda")
WIDE = {"heads": 1, "head_k": 64, "head_v": 64}
CHAINS = {DeltaProblem: DeltaChain, LinearPromptProblem: LinearChain}
# Sequences of 1, 6, 1, 3, 2, 0 and 5 chunks. The second list has fewer sequences that may be cut than sequences.
RAGGED = (1, 330, 64, 192, 65, 0, 257)
SPARSE = (3,) * 9 + (330, 1, 0, 1, 129)
FORMS = {
    "delta-warps": (DELTA, Backend.WARPS),
    "delta-warpgroups": (replace(DELTA, **WIDE), Backend.WARPGROUPS),
    "kda-warps": (KDA, Backend.WARPS),
    "kda-warpgroups": (replace(KDA, **WIDE), Backend.WARPGROUPS),
}
forms = pytest.mark.parametrize(("case", "form"), FORMS.values(), ids=FORMS)
both = pytest.mark.parametrize("case", [DELTA, KDA], ids=["delta", "kda"])


def served(form: Any, segments: int) -> Any:
    return partial(emulated, spec=partial(variant, form), segments=segments)


# Laws.


@costly(2, 10)
@needs_emulator
@forms
@pytest.mark.parametrize("kind", few(["random", *OF_HEADS]))
def test_errors_are_those_of_one_segment(case, form, kind):
    laws.segments_are_as_accurate(served(form, 1), served(form, 4), replace(case, heads=1), 7 * CHUNK, **ADVERSARIAL.get(kind, {}))


@costly(1, 5)
@needs_emulator
@forms
@pytest.mark.parametrize("segments", few([3, 2, 5]))
def test_lengths_are_accurate(case, form, segments):
    laws.lengths_are_accurate(served(form, segments), case, RAGGED)


@costly(1)
@needs_emulator
@pytest.mark.parametrize("function", ["chunk_comba", "chunk_gdn2"])
def test_other_rules(function):
    laws.is_accurate(partial(emulated, segments=3), Case(function), 260)


@costly(1, 3)
@needs_emulator
@pytest.mark.parametrize("arch", few([Arch(80), SM90]))
@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "chunk_kda"])
@pytest.mark.parametrize("sizes", [Case(heads=3, key_heads=3, head_k=48, head_v=16, x=F16), Case(heads=1, head_k=160, head_v=64)])
def test_sizes_of_all_kinds(arch, function, sizes):
    """Blocks of M's rows have a different size, and several batches of them are joined."""
    laws.is_accurate(partial(emulated, arch=arch, segments=4), replace(sizes, function=function), 260)


@needs_emulator
@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "chunk_kda"])
def test_two_warpgroups_share_a_block(function):
    """Each warpgroup has 128 rows of N or M."""
    case = Case(function, heads=1, head_k=128, head_v=128)
    spec = variant(Backend.WARPGROUPS, problem_of(case, **make(case, 1, 200), segments=4))
    _, lead, sums, _ = spec.ahead
    assert (lead.tile, sums.tile, spec.tile) == (64, 128, 64)
    laws.is_accurate(served(Backend.WARPGROUPS, 4), case, 200)


@costly(1, 4)
@needs_emulator
@pytest.mark.parametrize("lengths", [RAGGED, SPARSE], ids=["all-may-be-cut", "few-may-be-cut"])
@forms
def test_packing_changes_no_bit(case, form, lengths):
    laws.packing_changes_no_bit(served(form, 3), case, lengths)


@costly(1)
@needs_emulator
@both
def test_neighbours_do_not_matter(case):
    laws.neighbours_do_not_matter(served(Backend.WARPS, 3), case, (5, 330, 70))


@costly(2)
@needs_emulator
@forms
def test_a_pool_is_touched_where_it_should_be(case, form):
    state, layout = (F32, "vk") if form is Backend.WARPS else (BF16, "kv")
    laws.a_pool_is_touched_where_it_should_be(served(form, 2), case, state, layout)


@costly(1)
@needs_emulator
@forms
def test_states_may_go_where_they_come_from(case, form):
    """A first segment reads a state, or has read it, before the last segment overwrites it."""
    laws.states_may_go_where_they_come_from(served(form, 3), case, (330, 0, 200))


@costly(2)
@needs_emulator
@forms
def test_states_at_positions_are_those_on_the_way(case, form):
    laws.states_at_positions_are_those_on_the_way(served(form, 3), case)


@costly(1)
@needs_emulator
@both
def test_choices_change_no_bit(case):
    case = replace(case, **WIDE)
    call = make(case, 330) | {"cu_seqlens": starts_of((330,), "cpu"), "return_final_states": True, "segments": 3}

    def given(how: dict[str, Any]) -> Any:
        return emulated(case, **call, spec=lambda problem: made(problem, **how))

    warps = [given({"tile": tile, "stages": stages, "fetchers": f}) for tile, stages, f in ((64, 1, 2), (16, 3, 1))]
    choices = ((2, Pdl.OFF), (4, Pdl.TRIGGER_TOP))
    groups = [given({"backend": Backend.WARPGROUPS, "tile": 64, "stages": stages, "pdl": pdl}) for stages, pdl in choices]
    assert all(same(x, y) for a, b in (warps, groups) for x, y in zip(a, b, strict=True))


def made(problem: Any, *, backend: Backend = Backend.WARPS, **how: Any) -> Any:
    """A variant of a problem."""
    spec = CHAINS[type(problem)]
    return (spec if backend is Backend.WARPS else spec.by_warpgroups)(**of_problem(problem, type(problem)), **how)


@needs_emulator
def test_a_batch_is_its_sequences():
    call = make(DELTA, 2, 330)
    batch, last = emulated(DELTA, **call, segments=3, return_final_states=True)
    for i in range(2):
        out, own = emulated(DELTA, **laws.cut(DELTA, call, slice(i, i + 1)), segments=3, return_final_states=True)
        assert same(out[0], batch[i]) and same(own[0], last[i])


PACKED: dict[str, Any] = {"cu_seqlens": Index.I32, "pool": True, "started": True, "index": Index.I64}
PROBLEMS = {
    "chunk_delta_rule": DeltaProblem(head_k=32, head_v=16, **PACKED, segments=3),
    "chunk_linear_attention": LinearPromptProblem(head_k=32, head_v=16, gk=DType.F32, beta=DType.F32, **PACKED, segments=3),
}


@needs_emulator
@pytest.mark.parametrize("operator", PROBLEMS)
def test_checks_of_variants(operator):
    assert check(select(operator, PROBLEMS[operator], 2, SM90, True), SM90, 4).passed


# Texts.

SHAPE: dict[str, Any] = {"head_k": 128, "head_v": 128, "pdl": Pdl.TRIGGER_LOADED, "segments": 8, "segment_chunks": LEAST}
IN_POOL: dict[str, Any] = PACKED | {"checkpoints": Index.I64, "state": DType.BF16}
DENSE: dict[str, Any] = {"cu_seqlens": Index.I64, "initial": True, "final": True, "layout": Layout.KV, "tile": 32}
OF_DELTA = [DeltaChain.by_warpgroups(**SHAPE, **IN_POOL), DeltaChain(**SHAPE, **DENSE)]
OF_LINEAR = [LinearChain.by_warpgroups(**SHAPE, **IN_POOL), LinearChain(**SHAPE, **DENSE)]


@pytest.mark.matrix  # `ssmgen generate --check` checks the default variants
@pytest.mark.parametrize("spec", [*OF_DELTA, *OF_LINEAR], ids=lambda s: s.stem)
def test_no_variant_spills(spec):
    for part in spec.kernels[1:]:
        resources = compiled(part, SM90).resources
        assert not resources.spills and not resources.stack, part.name


def body_of(part: Any) -> str:
    """A kernel's text without comments."""
    text = re.sub(" *//.*", "", render(part, SM90)).split('extern "C"')[1]
    return text[text.index(") {") :]


@pytest.mark.parametrize("spec", OF_DELTA, ids=lambda s: s.stem)
def test_the_workspace_is_waited_for(spec):
    """Blocks without work wait too: a kernel that ends before the upstream kernel would let the next one begin."""
    for part in spec.kernels[1:]:
        body = body_of(part)
        assert "wait_for_upstream();" in body and getattr(part, "beside", False) == ("workspace" in part.early_operands()), part.name
        leaving = body[: body.index("SHARED(")].split("return;")[:-1]
        assert isinstance(part, JoinSpec) or all("wait_for_upstream();" in text for text in leaving), part.name


@pytest.mark.parametrize("spec", OF_DELTA, ids=lambda s: s.stem)
def test_sums_go_on_beside_the_first_segments(spec):
    """They start after the upstream kernel has waited for images, which it does not write, and do not end before it does."""
    _, lead, sums, _ = spec.ahead
    for text in body_of(lead).split("allow_dependents();")[:-1]:
        assert "wait_for_upstream();" in text.split("return;")[-1]
    assert not {*written_by(lead)} & {*sums.roles()} - {"images"} and set(sums.early_operands()) == set(sums.operands())
    body = body_of(sums)
    behind = body[body.index("SHARED(") :].split("store_segment_state(left);")
    assert len(behind) == 2 and "wait_for_upstream" not in behind[0] and behind[1].lstrip().startswith("wait_for_upstream();")


# Mistakes: (kernel, text to replace, replacement, words of the finding; off: a result is wrong)

EDITS = {
    "first: not left": ("lead", "store_segment_state(left);", "", "off"),
    "sums: state changed in flight": ("sums", "wgmma_wait<0>();\n      wgmma_landed(S);", "", "in flight"),
    "sums: room too early": ("sums", "barrier_init(empty, i, 4 * kConsumers)", "barrier_init(empty, i, 2 * kConsumers)", "before it looks"),
    "join: without M": ("join", "fmaf(S[row], M[i], sum[row])", "sum[row]", "off"),
    "outputs: all final": ("chain", "if (segment + 1 == cut.segments) ", "", "also writes"),
    "outputs: tokens of the first segment": ("chain", "origin + before;", "origin;", "also writes"),
}
OF_HEADS_ONLY = {
    "M: no identity": ("sums", "? 1.f : 0.f", "? 0.f : 0.f", "off"),
    "M: with v": ("sums", "v_tiles, token, tile * kConsumers,", "v_tiles, token, 0,", "off"),
    "first: begun in nothing": ("lead", "if (has_state)", "if (!has_state)", "off"),
    "first: left as the second's N": ("lead", "u64(candidate) * kSegments", "(u64(candidate) * kSegments + 1)", "off"),
    "first: all tokens": ("lead", "min(whole, cut.first * kChunk)", "whole", "off"),
    "first: no wait": ("lead", "if (warp == 3) {\n      wait_for_upstream();", "if (warp == 3) {", "before the wait"),
    "first: final": ("lead", "if (cut.segments > 1) {", "if (cut.segments > 9) {", "off"),
    "N: tokens of the one behind": ("sums", "(segment - 1) * cut.chunks", "segment * cut.chunks", "off"),
    "join: without N": ("join", "joined[e] = load(at + (4 * quad + e) * kHeadK);", "joined[e] = 0.f;", "off"),
    "join: no barrier": ("join", "sum[row];\n    __syncthreads();", "sum[row];", "nothing has written"),
    "join: one segment late": ("join", "load_M(at + step + to_M);\n    }", "load_M(at + to_M);\n    }", "off"),
    "join: no wait": ("join", "wait_for_upstream();", "", "wait for the upstream"),
    "outputs: from the segment's own end": ("chain", "kSegments + segment - 1)", "kSegments + segment)", "off"),
}
OF_CHANNELS = {
    "M: with v": ("sums", "tile * kConsumers, head, 0, full", "0, head, 0, full", "off"),
    "M: a column's decay": ("sums", "S[r] = S[r] * __uint", "S[r] = S[r] + 0.f * __uint", "off"),
    "first: no wait": ("lead", "if (warp == 0) {\n      wait_for_upstream();", "if (warp == 0) {", "before the wait"),
}
MISTAKES = {
    f"{case.function}: {name}": (case, edit)
    for case, own in ((DELTA, OF_HEADS_ONLY), (KDA, OF_CHANNELS))
    for name, edit in (EDITS | own).items()
}


@costly(2)
@needs_emulator
@pytest.mark.parametrize("mistake", few(MISTAKES))
def test_broken_kernels_are_found(mistake):
    case, (which, old, new, words) = MISTAKES[mistake]
    case, name = replace(case, **WIDE), "delta" if case.per_head else "linear"
    two_stages = partial(made, backend=Backend.WARPGROUPS, tile=64, stages=2, pdl=Pdl.TRIGGER_LOADED)
    # Four segments of three chunks, from a state that lives long.
    call = make(case, 760, gate=0.02, step=0.1) | {"cu_seqlens": starts_of((760,), "cpu"), "state": states(case, 1)}
    call |= {"has_initial_state": torch.tensor([True]), "segments": 4}
    wanted = exact(case, call)

    def change(source: str) -> str:
        return edited(old, new)(source) if f"{name}_{which}_" in source.split('extern "C"')[1][:200] else source

    with found(words):
        out = emulated(case, **call, spec=two_stages, change=change)
        assert max(error(out, wanted["out"][0]), error(call["state"], wanted["state"])) <= BOUNDS[BF16]
