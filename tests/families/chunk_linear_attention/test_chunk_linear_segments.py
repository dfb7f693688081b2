"""chunk_linear_attention in segments: laws of its results in the emulator, which sequences are cut, wrong kernels are found."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import linear_laws as laws
import pytest
import torch
from compiled import compiled
from linear_cases import ADVERSARIAL, BF16, BOUNDS, F16, F32, SM90, Case, emulated, error, exact, make, problem_of, same, starts_of
from selection import costly, few

import ssmgen
from ssmgen import emulator
from ssmgen.compile.render import render
from ssmgen.emulator import EmulatorError
from ssmgen.emulator.check import check
from ssmgen.engine.chunks.chain import Backend
from ssmgen.engine.chunks.kernels import of_problem
from ssmgen.engine.chunks.segments import LEAST
from ssmgen.errors import ArgumentError
from ssmgen.families.chunk_linear_attention.chain import ChainSpec, candidates
from ssmgen.families.chunk_linear_attention.problem import OPERATOR, LinearPromptProblem, Rule, workspace_bytes
from ssmgen.select.models import Role, Wanted, find_model
from ssmgen.select.registry import select
from ssmgen.spec.kernel import Arch, DType, Index, Layout, Pdl

needs_emulator = pytest.mark.skipif(not emulator.available(), reason="needs g++")
SMALL, WIDE = Case(), Case(heads=1, head_k=64, head_v=64)
FORMS = pytest.mark.parametrize(("case", "form"), [(SMALL, Backend.WARPS), (WIDE, Backend.WARPGROUPS)], ids=["warps", "warpgroups"])
RAGGED = (1, 330, 64, 192, 65, 0, 257)  # of 1, 6, 1, 3, 2, no and 5 chunks


def variant(form: Any, problem: LinearPromptProblem) -> Any:
    """The first rule of a form that is legal."""
    return next(s for _, s, _ in candidates(problem, 1, SM90, True) if s and s.backend is form and not s.violations(SM90))


def served(form: Any, segments: int) -> Any:
    return partial(emulated, spec=partial(variant, form), segments=segments)


# Laws.


@costly(1)
@needs_emulator
@FORMS
@pytest.mark.parametrize("kind", few(["random", "near keys, steps of 1", "slow"]))
def test_errors_are_those_of_one_segment(case, form, kind):
    """Errors agree to a twentieth. They start from a state that is still present at the end where decays are slow."""
    case = replace(case, heads=1)
    call = make(case, 1, 400, **ADVERSARIAL.get(kind, {})) | {"initial_states": laws.states(case, 1), "return_final_states": True}
    wanted = exact(case, call)
    whole, cut = served(form, 1)(case, **call), served(form, 4)(case, **call)
    for name, one, several in zip(("out", "final_states"), whole, cut, strict=True):
        assert error(several, wanted[name]) <= 1.05 * error(one, wanted[name]), name


@costly(1)
@needs_emulator
@pytest.mark.parametrize("function", ["chunk_comba", "chunk_gdn2"])
def test_other_rules(function):
    laws.is_accurate(partial(emulated, segments=3), replace(SMALL, function=function), 260)


@costly(1)
@needs_emulator
@pytest.mark.parametrize("arch", few([Arch(80), SM90]))
@pytest.mark.parametrize("case", [Case(heads=3, key_heads=3, head_k=48, head_v=16, x=F16), Case(heads=1, head_k=160, head_v=64)])
def test_sizes_of_all_kinds(arch, case):
    """Blocks of M's rows have a different size, and several batches of them are joined."""
    laws.is_accurate(partial(emulated, arch=arch, segments=4), case, 260)


@needs_emulator
def test_two_warpgroups_share_a_block():
    """Each warpgroup has 128 rows of N or M."""
    case = Case(heads=1, head_k=128, head_v=128)
    spec = variant(Backend.WARPGROUPS, problem_of(case, **make(case, 1, 200), segments=4))
    _, lead, sums, _ = spec.ahead
    assert (lead.tile, sums.tile, spec.tile) == (64, 128, 64)
    laws.is_accurate(served(Backend.WARPGROUPS, 4), case, 200)


@costly(1)
@needs_emulator
@FORMS
def test_packing_changes_no_bit(case, form):
    laws.packing_changes_no_bit(served(form, 3), case, RAGGED)


@needs_emulator
def test_neighbours_do_not_matter():
    laws.neighbours_do_not_matter(served(Backend.WARPS, 3), SMALL, (5, 330, 70))


@costly(1)
@needs_emulator
@FORMS
def test_a_pool_is_touched_where_it_should_be(case, form):
    state, layout = (F32, "vk") if form is Backend.WARPS else (BF16, "kv")
    laws.a_pool_is_touched_where_it_should_be(served(form, 2), case, state, layout)


@costly(1)
@needs_emulator
@FORMS
def test_states_may_go_where_they_come_from(case, form):
    """A first segment reads a state, or has read it, before the last segment overwrites it."""
    run, lengths, slots = served(form, 3), (330, 0, 200), torch.tensor([2, 0, 1]).int()
    call = make(case, sum(lengths)) | {"cu_seqlens": starts_of(lengths, "cpu")}
    before = laws.states(case, 3, BF16)
    out, last = run(case, **call, initial_states=before, return_final_states=True)
    pool = torch.empty_like(before)
    pool[slots.long()] = before
    again = run(case, **call, state=pool, state_indices=slots, has_initial_state=torch.tensor([True] * 3))
    assert same(again, out) and same(pool[slots.long()], last)
    again, _ = run(case, **call, initial_states=before, return_final_states=True, final_states_out=before)
    assert same(again, out) and same(before, last)


@costly(1)
@needs_emulator
@FORMS
def test_states_at_positions_are_those_on_the_way(case, form):
    """Positions at segments' ends and within them change no bit of the rest. Positions where no chunk ends leave their rows unchanged."""
    run, lengths = served(form, 3), (330, 70)
    call = make(case, sum(lengths)) | {"cu_seqlens": starts_of(lengths, "cpu"), "return_final_states": True}
    positions = torch.tensor([64, 100, 128, 192, 256, 320, 330, 394, 400])
    more = {"checkpoint_positions": positions, "checkpoints_out": torch.full((9, *case.state), laws.NAN)}
    out, last = run(case, **call)
    found, states, kept = run(case, **call, **more, return_checkpoints=True)
    assert same(found, out) and same(states, last) and kept[1].isnan().all()
    wanted = exact(case, call, **more | {"checkpoints_out": kept.clone()}, return_checkpoints=True)["checkpoints"]
    rows = [0, 2, 3, 4, 5, 6, 7, 8]
    assert all(error(kept[i], wanted[i]) <= BOUNDS[BF16] for i in rows) and same(kept[6], last[0]) and same(kept[8], last[1])


@needs_emulator
def test_choices_change_no_bit():
    call = make(WIDE, 330) | {"cu_seqlens": starts_of((330,), "cpu"), "return_final_states": True, "segments": 3}

    def given(form: Any, **how: Any) -> Any:
        return emulated(WIDE, **call, spec=lambda problem: form(**of_problem(problem, LinearPromptProblem), **how))

    warps = [given(ChainSpec, tile=tile, stages=stages, fetchers=f) for tile, stages, f in ((64, 1, 2), (16, 3, 1))]
    groups = [given(ChainSpec.by_warpgroups, tile=64, stages=stages, pdl=pdl) for stages, pdl in ((2, Pdl.OFF), (4, Pdl.TRIGGER_TOP))]
    assert all(same(x, y) for a, b in (warps, groups) for x, y in zip(a, b, strict=True))


@needs_emulator
def test_checks_of_variants():
    problem = LinearPromptProblem(
        head_k=32, head_v=16, gk=DType.F32, beta=DType.F32, cu_seqlens=Index.I32, pool=True, started=True, index=Index.I64, segments=3
    )
    assert check(select(OPERATOR, problem, 2, SM90, True), SM90, 4).passed


# Which sequences are cut.


def test_the_rule_is_that_of_the_delta_rule():
    def posed(function: str, heads: int, tokens: int, **more: Any) -> LinearPromptProblem:
        case = Case(function, heads=heads, key_heads=heads, head_k=64, head_v=128)
        call = {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in make(case, 1, 1).items()}
        long = {n: t.expand(1, tokens, *t.shape[2:]).contiguous() if n in case.per_token else t for n, t in call.items()}
        return problem_of(case, **long, **more)

    long = 3 * LEAST * 64 - 63
    for function in ("chunk_kda", "chunk_comba", "chunk_gdn2"):
        assert posed(function, 8, long).segments == 8 and not posed(function, 8, long - 1).divided and not posed(function, 32, long).divided
        assert posed(function, 8, 99, segments=3).segments == 3 and not posed(function, 8, 10**4, segments=1).divided
    assert not posed("chunk_gla", 8, long).divided and not posed("chunk_rwkv7", 8, long).divided
    wrong = LinearPromptProblem(head_k=64, head_v=64, rule=Rule.PLAIN, segments=2).faults()
    assert wrong == ["segments is 2 with rule=plain; expected 1, or rule=delta or old"]


def test_one_segment_is_the_kernel_that_knows_of_none():
    problem = LinearPromptProblem(head_k=128, head_v=128)
    spec = select(OPERATOR, problem, 4, SM90, True)
    assert "segment" not in str(spec) and len(spec.kernels) == 2 and "segment" not in render(spec, SM90)
    assert len(select(OPERATOR, replace(problem, segments=4, segment_chunks=16), 4, SM90, True).kernels) == 5


def test_a_workspace_holds_what_segments_leave():
    sizes = 8192, 3, 8, 128
    plain = ssmgen.chunk_linear_attention_workspace(*sizes, segments=1)
    assert plain == workspace_bytes(*sizes, Rule.DELTA)
    # All three sequences, 8192 tokens together, may be cut. N and M, 128 x 128 each, are kept for all nine segments except the last.
    assert ssmgen.chunk_linear_attention_workspace(*sizes) == plain + 3 * 8 * 8 * 2 * 128 * 128 * 4
    assert ssmgen.chunk_linear_attention_workspace(*sizes, "plain") == workspace_bytes(*sizes, Rule.PLAIN)
    call = make(SMALL, 1, 200)
    needed = ssmgen.chunk_linear_attention_workspace(200, 1, 2, 32, "delta", 32, 4)
    with pytest.raises(ArgumentError, match=rf"needs {needed}: chunk_linear_attention_workspace\(200, 1, 2, 32, 'delta', 32, 4\)"):
        ssmgen.chunk_kda(**call, segments=4, workspace=torch.empty(needed - 1, dtype=torch.uint8))


def test_models_of_few_heads_build_them():
    model = find_model("kimi-linear-48b-a3b")
    whole, half = (model.divided(tp).asked(Wanted(), Role.SCAN) for tp in (1, 2))
    assert not [p for p in whole if getattr(p, "divided", False)]
    assert [p.segments for p in half if getattr(p, "divided", False)] == [4] * (len(half) // 2)


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


# Mistakes: (kernel, text to replace, replacement, words of the finding; off: a result is wrong)

EDITS = {
    "M: with v": ("sums", "tile * kWalkers, head, 0, full", "0, head, 0, full", "off"),
    "M: a column's decay": ("sums", "S[r] = S[r] * __uint", "S[r] = S[r] + 0.f * __uint", "off"),
    "first: no wait": ("lead", "if (warp == 0) {\n      wait_for_upstream();", "if (warp == 0) {", "before the wait"),
    "first: not left": ("lead", "leave_state(left);", "", "off"),
    "sums: state changed in flight": ("sums", "wgmma_wait<0>();\n      wgmma_landed(S);", "", "in flight"),
    "sums: room too early": ("sums", "barrier_init(empty, i, 4 * kWalkers)", "barrier_init(empty, i, 2 * kWalkers)", "before it looks"),
    "join: without M": ("join", "fmaf(S[row], M[i], sum[row])", "sum[row]", "off"),
    "outputs: all final": ("chain", "if (segment + 1 == cut.segments) ", "", "also writes"),
    "outputs: v of the first segment": ("chain", "origin + before;", "origin;", "also writes"),
}  # fmt: skip


@costly(1)
@needs_emulator
@pytest.mark.parametrize("edit", few(EDITS))
def test_broken_kernels_are_found(edit):
    which, old, new, words = EDITS[edit]

    def change(source: str) -> str:
        if f"linear_{which}_" not in source.split('extern "C"')[1][:200]:
            return source
        assert old in source, "the edit no longer applies"
        return source.replace(old, new)

    def two_stages(problem: LinearPromptProblem) -> Any:
        return ChainSpec.by_warpgroups(**of_problem(problem, LinearPromptProblem), tile=64, stages=2, pdl=Pdl.TRIGGER_LOADED)

    # Four segments of three chunks, from a state that lives long.
    call = make(WIDE, 760, gate=0.02, step=0.1) | {"cu_seqlens": starts_of((760,), "cpu"), "state": laws.states(WIDE, 1)}
    call |= {"has_initial_state": torch.tensor([True]), "segments": 4}
    wanted = exact(WIDE, call)
    try:
        out = emulated(WIDE, **call, spec=two_stages, change=change)
        assert max(error(out, wanted["out"][0]), error(call["state"], wanted["state"])) <= BOUNDS[BF16], "off"
    except EmulatorError as e:
        assert words in str(e), str(e)
    except AssertionError as e:
        assert words == "off" and "no longer applies" not in str(e), str(e)
    else:
        pytest.fail("nothing was found")
