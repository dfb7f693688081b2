"""chunk_delta_rule: its reference, and the laws that hold for both kernels together, on the CPU and in the emulator; checks and choices."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import delta_cases as laws
import pytest
import torch
from delta_cases import ADVERSARIAL, BF16, F16, F32, PER_TOKEN, SM90, Sizes, emulated, exact, make, problem_of, same, views_of
from delta_images import Images, images_are_right, images_of, pack, spans_of, unpack
from selection import costly
from torch import Tensor

import ssmgen
from ssmgen import emulator
from ssmgen.compile.occupancy import LIMITS
from ssmgen.emulator.check import check
from ssmgen.engine.chunks.chain import Backend
from ssmgen.engine.chunks.problem import CHUNK
from ssmgen.errors import ArgumentError, UnsupportedError
from ssmgen.families.chunk_delta_rule.chain import candidates
from ssmgen.families.chunk_delta_rule.prepare import PrepareSpec
from ssmgen.families.chunk_delta_rule.problem import OPERATOR, DeltaProblem, Gate
from ssmgen.select.models import Role, Wanted, models
from ssmgen.select.registry import select
from ssmgen.spec.kernel import Arch, DType, Index, Layout

SMALL = Sizes()
UNEVEN = Sizes(heads=3, key_heads=3, head_k=48, head_v=16, x=F16)
needs_emulator = pytest.mark.skipif(not emulator.available(), reason="needs g++")
GATED, PLAIN = (ssmgen.chunk_gated_delta_rule, ssmgen.chunk_delta_rule), (emulated, partial(emulated, function=ssmgen.chunk_delta_rule))
by_both = pytest.mark.parametrize(
    "run", [ssmgen.chunk_gated_delta_rule, pytest.param(emulated, marks=needs_emulator)], ids=["reference", "emulated"]
)


# The reference, and the computation by chunks that the kernels follow.


def by_chunks(views: dict[str, Tensor], images: Images) -> tuple[Tensor, Tensor]:
    """(out, last states) in float64, from images of chunks, as the chain makes them."""
    q, k, v = (views[n].double() for n in ("q", "k", "v"))
    heads, each = v.shape[2], v.shape[2] // q.shape[2]
    out, spans = torch.zeros_like(v), spans_of(views)
    last = torch.zeros(len(spans), heads, v.shape[3], q.shape[3], dtype=torch.float64)
    if "initial_states" in views:
        last.copy_(views["initial_states"])
    for s, (row, begin, end) in enumerate(spans):
        for n, start in enumerate(range(begin, end, CHUNK)):
            at, span = (row * v.shape[1] + begin) // CHUNK + s + n, slice(start, min(start + CHUNK, end))
            for h in range(heads):
                S, (Q, K, U) = last[s, h], (t[row, span, i] for t, i in ((q, h // each), (k, h // each), (v, h)))
                T, P, c_x, c_u, c_o = (t[at, h][: len(U)] for t in (images.T, images.P, images.c_x, images.c_u, images.c_o))
                U = T[:, : len(U)] @ (U + c_x[:, None] * (K @ S.T))
                out[row, span, h] = c_o[:, None] * (Q @ S.T) + P[:, : len(U)] @ U
                last[s, h] = images.decay[at, h] * S + (c_u[:, None] * U).T @ K
    return out, last


@pytest.mark.parametrize("kind", [{}, *ADVERSARIAL.values()], ids=["random", *ADVERSARIAL])
def test_chunks_say_what_tokens_do(kind):
    call = make(SMALL, 150, **kind) | {"cu_seqlens": laws.starts_of((70, 0, 1, 64, 15), "cpu"), "return_final_states": True}
    call["initial_states"] = laws.states(SMALL, 5)
    built = ssmgen.chunk_gated_delta_rule.build(**call)
    out, last = by_chunks(views_of(built), images_of(views_of(built), built.options))
    wanted = exact(call)
    assert laws.error(out, wanted["out"]) < 1e-10 and laws.error(last, wanted["final_states"]) < 1e-10


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"A_log": torch.tensor([0.5, -1.0]), "dt_bias": torch.tensor([0.1, 0.2]), "scale": 0.3},
        {"beta_sigmoid": True, "allow_neg_eigval": True, "state_layout": "kv"},
    ],
    ids=["plain", "raw", "logit-kv"],
)
def test_tokens_do_what_decode_steps_do(more):
    """Both references compute in f32, one token after the other. The final rounding may go either way."""
    call = make(SMALL, 2, 9) | more
    before = laws.states(SMALL, 2)
    before = before.mT.contiguous() if "state_layout" in more else before
    out, last = ssmgen.chunk_gated_delta_rule(**call, initial_states=before, return_final_states=True)
    state = before.clone()
    assert laws.error(out, ssmgen.gated_delta_rule(state, **call).double()) < 1e-3 and laws.error(last, state.double()) < 1e-6
    plain = {n: t for n, t in call.items() if n not in ("g", "A_log", "dt_bias")}
    out, last = ssmgen.chunk_delta_rule(**plain, initial_states=before, return_final_states=True)
    state = before.clone()
    assert laws.error(out, ssmgen.delta_rule(state, **plain).double()) < 1e-3 and laws.error(last, state.double()) < 1e-6


def test_images_are_kept_and_read_again():
    built = ssmgen.chunk_gated_delta_rule.build(**make(SMALL, 137), cu_seqlens=laws.starts_of((130, 7), "cpu"))
    wanted = images_of(views_of(built), built.options)
    assert wanted.served.tolist() == [64, 64, 2, 7]
    found = pack(wanted, BF16)
    assert len(found) == ssmgen.chunk_delta_rule_workspace(137, 2, SMALL.heads) == built.operands["workspace"].numel()
    images_are_right(unpack(found, wanted, BF16), wanted, BF16)
    worse = unpack(found, wanted, BF16)
    worse.T[1, 0, 3, 3] += 1
    with pytest.raises(AssertionError):
        images_are_right(worse, wanted, BF16)


# Laws of both kernels.


@costly(1)
@needs_emulator
@pytest.mark.parametrize("form", list(Backend))
def test_steps_of_two_over_many_tokens(form):
    """Without decay errors add up: above all the roundings of T, and any bias that shrinks it."""

    def spec(problem: DeltaProblem) -> Any:
        return next(s for _, s, _ in candidates(problem, 1, SM90, True) if s and s.backend is form and not s.violations(SM90))

    laws.is_accurate(partial(emulated, spec=spec), replace(SMALL, head_k=64, head_v=64), 700, **ADVERSARIAL["beta 2"])


@costly(3)
@needs_emulator
@pytest.mark.parametrize("sizes", [SMALL, UNEVEN], ids=["bf16", "f16-uneven"])
@pytest.mark.parametrize("kind", [{}, *ADVERSARIAL.values()], ids=["random", *ADVERSARIAL])
def test_results_are_those_of_float64(sizes, kind):
    laws.is_accurate(emulated, sizes, 130, **kind)


@costly(2)
@by_both
def test_lengths_are_accurate(run):
    laws.lengths_are_accurate(run, SMALL, (0, 1, 15, 16, 17, 63, 64, 65))


@costly(2)
@by_both
def test_packing_changes_no_bit(run):
    laws.packing_changes_no_bit(run, SMALL, (65, 0, 7, 64, 130))


@costly(2)
@by_both
@pytest.mark.parametrize("cut", [64, 128])
def test_a_cut_changes_no_bit(run, cut):
    laws.a_cut_changes_no_bit(run, SMALL, 150, cut)


@costly(2)
@by_both
@pytest.mark.parametrize(("state", "layout"), [(F32, "vk"), (BF16, "kv")])
def test_a_pool_is_touched_where_it_should_be(run, state, layout):
    laws.a_pool_is_touched_where_it_should_be(run, SMALL, state, layout)


@costly(2)
@by_both
def test_neighbours_do_not_matter(run):
    laws.neighbours_do_not_matter(run, SMALL, (5, 64, 70))


@costly(2)
@by_both
@pytest.mark.parametrize(("state", "index"), [(BF16, torch.int64), (F32, None)], ids=["bf16-i64", "in-order"])
def test_states_of_a_pool_may_begin_elsewhere(run, state, index):
    laws.states_of_a_pool_may_begin_elsewhere(run, SMALL, state, index)


@costly(1)
@needs_emulator
@pytest.mark.parametrize("offset", [8, 4, 2])
def test_layout_changes_no_bit(offset):
    laws.layout_changes_no_bit(emulated, SMALL, offset)


@costly(2)
@by_both
@pytest.mark.parametrize("state", [F32, F16])
def test_order_of_states_changes_no_bit(run, state):
    laws.order_of_states_changes_no_bit(run, SMALL, state)


@costly(1)
@pytest.mark.parametrize("runs", [GATED, pytest.param(PLAIN, marks=needs_emulator)], ids=["reference", "emulated"])
def test_gates_agree(runs):
    laws.gates_agree(*runs, SMALL)


@costly(2)
@by_both
def test_decoding_goes_on(run):
    laws.decoding_goes_on(run, SMALL, 70)


@costly(2)
@by_both
def test_checkpoints_are_final_states(run):
    laws.checkpoints_are_final_states(run, SMALL, BF16, (65, 0, 130))


@costly(2)
@by_both
def test_checkpoints_of_a_batch(run):
    laws.checkpoints_of_a_batch(run, SMALL)


@costly(2)
@by_both
@pytest.mark.parametrize("state", [F32, BF16])
def test_states_of_sequences_without_tokens(run, state):
    """Dense states pass through; states in a pool stay unchanged."""
    call, before = make(SMALL, 0), laws.states(SMALL, 2, state)
    starts = torch.zeros(3, dtype=torch.int32)
    _, after = run(**call, cu_seqlens=starts, initial_states=before, return_final_states=True)
    pool = before.clone()
    run(**call, cu_seqlens=starts, state=pool, has_initial_state=torch.tensor([True, False]))
    assert same(after, before) and same(pool, before)


@costly(2)
@by_both
def test_boundaries_that_make_no_sense_are_sequences_without_tokens(run):
    call = make(SMALL, 20)
    out = torch.full_like(call["v"], -7.0)
    run(**call, cu_seqlens=torch.tensor([5, 3, 21, -4, 2]), out=out)
    assert (out == -7.0).all()
    assert not run(**call, cu_seqlens=torch.tensor([3]), return_final_states=True)[1].numel(), "no sequences at all"


@costly(1)
@needs_emulator
@pytest.mark.parametrize(
    "problem",
    [
        DeltaProblem(head_k=32, head_v=16, g=DType.F32, gate=Gate.LOG, cu_seqlens=Index.I32, pool=True, started=True, index=Index.I64),
        DeltaProblem(head_k=16, head_v=32, x=DType.F16, beta=DType.F16, copy=4, initial=True, final=True, layout=Layout.KV, l2norm=True),
    ],
    ids=["pool", "dense"],
)
def test_checks_of_variants(problem):
    assert check(select(OPERATOR, problem, 2, SM90, True), SM90, 4).passed


# Checks and choices.


def operands(**changes: Any) -> dict[str, Any]:
    return make(SMALL, 2, 5) | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"v": torch.zeros(2, 5, 32)}, "v is [2, 5, 32]; expected [batch, T, HV, V]"),
        ({"cu_seqlens": torch.zeros(3).int()}, "v is [2, 5, 2, 32]; expected [tokens, HV, V] or [1, tokens, HV, V]"),
        ({"q": torch.zeros(2, 5, 3, 32).bfloat16()}, "v has 2 heads; expected a multiple of the 3"),
        ({"q": torch.zeros(2, 5, 32).bfloat16()}, "q is [2, 5, 32]; expected […, HK, K], as v is [2, 5, 2, 32]"),
        ({"k": torch.zeros(2, 5, 1, 16).bfloat16()}, "k is [2, 5, 1, 16]; expected […, HK, K] = [2, 5, 1, 32]"),
        ({"k": torch.zeros(2, 5, 1, 32)}, "k is float32; expected bfloat16, the dtype of v"),
        ({"beta": torch.zeros(2, 5)}, "beta is [2, 5]; expected […, HV] = [2, 5, 2]"),
        ({"g": None}, "g is a NoneType; expected a tensor"),
        ({"dt_bias": torch.zeros(2)}, "dt_bias is given without A_log"),
        ({"A_log": torch.zeros(2), "linear_gate": True}, "linear_gate=True is given with A_log or dt_bias; expected either"),
        ({"allow_neg_eigval": True}, "allow_neg_eigval is True and beta_sigmoid is False; expected both"),
        ({"state_indices": torch.zeros(2).int()}, "state_indices is given without state"),
        ({"state": torch.zeros(2, 2, 32, 16)}, "state is [2, 2, 32, 16]; expected [slots, HV, V, K] = [2, 2, 32, 32]"),
        (
            {"v": torch.zeros(2, 5, 2, 16).bfloat16(), "state": torch.zeros(2, 2, 16, 32), "state_layout": "kv"},
            "state is [2, 2, 16, 32]; expected [slots, HV, K, V] = [2, 2, 32, 16]",
        ),
        ({"state_layout": "kvv"}, "state_layout is 'kvv'; expected 'vk' or 'kv'"),
        (
            {"state": torch.zeros(2, 2, 32, 32), "return_final_states": True},
            "final_states_out is given with state, which receives the final states",
        ),
        ({"out": torch.zeros(1, 5, 2, 32).bfloat16().expand(2, 5, 2, 32)}, "two of its elements share memory"),
        ({"return_checkpoints": True}, "return_checkpoints is True and checkpoint_positions is None"),
        ({"workspace": torch.zeros(9)}, "workspace is [9] float32; expected dense bytes, [44544 or more] uint8"),
        ({"workspace": torch.zeros(9, dtype=torch.uint8)}, "bytes; expected 44544 or more. Get the size from"),
        (
            {"v": torch.zeros(2, 5, 2, 32, requires_grad=True)},
            "v requires grad; expected no gradients, since the delta rule of a prompt has no backward",
        ),
    ],
)
def test_what_is_wrong_in_words(changes, words):
    with pytest.raises(ArgumentError) as e:
        ssmgen.chunk_gated_delta_rule(**operands(**changes))
    assert words in str(e.value)


def test_everything_wrong_is_in_one_message():
    with pytest.raises(ArgumentError) as e:
        ssmgen.chunk_gated_delta_rule(**operands(g=torch.zeros(2, 5), beta=torch.zeros(3), state_indices=torch.zeros(2)))
    assert len(e.value.problems) == 4


def test_a_workspace_may_be_used_again_and_lies_at_a_multiple_of_16_bytes():
    memory = torch.empty(10**6, dtype=torch.uint8)
    assert problem_of(**operands(), workspace=memory) == problem_of(**operands())
    with pytest.raises(ArgumentError, match="bytes past a multiple of 16"):
        problem_of(**operands(), workspace=memory[8:])
    with pytest.raises(ArgumentError, match="out overlaps workspace in memory"):
        ssmgen.chunk_gated_delta_rule(**operands(), out=memory[:1280].view(BF16).view(2, 5, 2, 32), workspace=memory)


def refused(problem: DeltaProblem, arch: Arch = SM90) -> str:
    with pytest.raises(UnsupportedError) as e:
        select(OPERATOR, problem, 1, arch, False)
    return str(e.value)


def test_what_no_kernel_serves_in_words():
    odd = make(SMALL, 2, 5)
    odd["v"] = torch.zeros(2, 5, 2, 33).bfloat16()[..., 1:]
    assert "the tokens or heads of q, k, v or out begin at an odd element" in refused(problem_of(**odd))
    wide = {n: t.float() for n, t in make(SMALL, 2, 5).items() if n in PER_TOKEN}
    assert "q, k and v are f32; expected bf16 or f16, for tensor cores" in refused(problem_of(**wide))
    assert "K is 72; expected 16 … 256 in steps of 16" in refused(DeltaProblem(head_k=72, head_v=64))
    assert "V is 272; expected 16 … 256 in steps of 16" in refused(DeltaProblem(head_k=64, head_v=272))
    assert "arch is sm_75; expected sm_80 or later" in refused(DeltaProblem(head_k=64, head_v=16), Arch(75))


@costly(1)
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_100a", "sm_120"])
def test_every_size_is_served_where_there_is_shared_memory_for_it(arch):
    where = Arch.parse(arch)
    for head_k in range(16, 257, 16):
        for head_v in range(16, 257, 16):
            problem = DeltaProblem(head_k=head_k, head_v=head_v, g=DType.F32, gate=Gate.LOG)
            spec = select(OPERATOR, problem, 1, where, False)
            prepare, chain = spec.kernels
            assert isinstance(prepare, PrepareSpec) and chain is spec and not prepare.violations(where)
            rules = [s for _, s, _ in candidates(problem, 1, where, False) if s and not s.grouped]
            assert rules[-1].shared_bytes == min(s.shared_bytes for s in rules) <= LIMITS[where.number].shared


def test_the_first_kernel_is_of_what_images_hang_on():
    """Calls that differ only in their states therefore share it."""
    call = make(SMALL, 2, 5)
    some = [
        problem_of(**call),
        problem_of(**call, return_final_states=True),
        problem_of(**call, state=torch.zeros(2, 2, 32, 32).bfloat16()),
    ]
    kernels = [select(OPERATOR, problem, 2, SM90, True).kernels for problem in some]
    assert len({first for first, _ in kernels}) == 1 and len({second for _, second in kernels}) == 3


def test_every_model_of_a_gated_delta_rule_builds_its_prompts():
    for model in models().values():
        asked = [p for p in model.asked(Wanted(), Role.SCAN) if isinstance(p, DeltaProblem)]
        assert bool(asked) == (model.kind == "gated_delta_rule"), model.name
        for problem in asked:
            assert (problem.head_k, problem.head_v) == model.shape[1::-1] and not problem.faults()
            for arch in ("sm_80", "sm_90a"):
                select(OPERATOR, problem, model.nheads, Arch.parse(arch), arch == "sm_90a")


def test_without_sequences_there_is_nothing_to_launch():
    for starts, tokens, final in (([0], 20, True), ([0, 0], 0, False)):
        call = make(SMALL, tokens) | {"cu_seqlens": torch.tensor(starts), "return_final_states": final}
        assert ssmgen.chunk_gated_delta_rule.build(**call).problem()[1] == 0
    some = replace(SMALL, heads=4)
    assert ssmgen.chunk_gated_delta_rule.build(**make(some, 1, 3)).problem()[1] == 4
