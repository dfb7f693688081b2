"""chunk_linear_attention: its reference, and the laws that hold for both kernels together, on the CPU and in the emulator."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import linear_laws as laws
import pytest
import torch
from linear_cases import ADVERSARIAL, BF16, F16, F32, FUNCTIONS, SM90, Case, emulated, error, exact, make, public, recurrence, same
from selection import costly, few

from ssmgen import emulator
from ssmgen.emulator.check import check
from ssmgen.engine.chunks.chain import Backend
from ssmgen.families.chunk_linear_attention.chain import candidates
from ssmgen.families.chunk_linear_attention.problem import OPERATOR, LinearPromptProblem, Rule
from ssmgen.select.registry import select
from ssmgen.spec.kernel import DType, Index, Layout

SMALL = Case()
each = pytest.mark.parametrize("case", [replace(SMALL, function=name) for name in FUNCTIONS], ids=FUNCTIONS)
KDA, RWKV7 = SMALL, replace(SMALL, function="chunk_rwkv7")  # chunks of 64 tokens and of 32
both = pytest.mark.parametrize("case", [KDA, RWKV7], ids=["kda", "rwkv7"])
needs_emulator = pytest.mark.skipif(not emulator.available(), reason="needs g++")
by_both = pytest.mark.parametrize("run", [public, pytest.param(emulated, marks=needs_emulator)], ids=["reference", "emulated"])


def served_by(form: Backend) -> Any:
    """A function that runs a call in the emulator with the first variant of a form."""

    def spec(problem: LinearPromptProblem) -> Any:
        return next(s for _, s, _ in candidates(problem, 1, SM90, True) if s and s.backend is form and not s.violations(SM90))

    return partial(emulated, spec=spec)


# The reference.


@costly(7)
@each
@pytest.mark.parametrize("kind", ["random", "near keys, steps of 1", "one channel at once"])
def test_the_reference_does_what_formulas_say(case, kind):
    call = make(case, 5, **ADVERSARIAL.get(kind, {}))
    before = laws.states(case, 1)
    out, states = recurrence(case, call, before[0])
    wanted = exact(case, laws.tokens_of(case, call, slice(None)), initial_states=before, return_final_states=True)
    assert error(wanted["out"][0], out) < 1e-12 and error(wanted["final_states"][0], states[-1]) < 1e-12


@costly(7)
@each
def test_gates_are_what_formulas_say(case):
    for more in laws.gates(case, 5):
        call = make(case, 1, 5) | more
        out, _ = recurrence(case, {n: t[0] if n in case.per_token and t is not None else t for n, t in call.items()})
        assert error(exact(case, call)["out"][0], out) < 1e-12, more.keys()


@costly(7)
@each
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_tokens_do_what_decode_steps_do(case, layout):
    """Both references compute in f32, one token after the other. The final rounding may go either way, and w v is rounded."""
    call = make(case, 2, 9) | {"state_layout": layout}
    before = laws.states(case, 2)
    before = before.mT.contiguous() if layout == "kv" else before
    out, last = public(case, **call, initial_states=before, return_final_states=True)
    state = before.clone()
    near = 5e-3 if case.function == "chunk_gdn2" else 1e-3
    assert error(out, case.decode(state, **call).double()) < near and error(last, state.double()) < near


@costly(7)
@each
def test_a_scale_is_a_factor_of_the_output(case):
    call = make(case, 1, 5)
    plain = public(case, **call, scale=1.0)
    assert same(public(case, **call, scale=0.25), plain / 4)
    assert same(public(case, **call), public(case, **call, scale=1.0 if case.function == "chunk_rwkv7" else 32**-0.5))


# Laws of both kernels together.


@costly(7)
@needs_emulator
@each
@pytest.mark.parametrize("kind", few(["random", "near keys, steps of 1", "no decay", "-5", "one channel never", "one channel at once"]))
def test_results_are_those_of_float64(case, kind):
    laws.is_accurate(emulated, case, 100, **ADVERSARIAL.get(kind, {}))


@needs_emulator
@both
@pytest.mark.parametrize("kind", ["near keys", "slow", "-40"])
def test_results_of_other_data(case, kind):
    laws.is_accurate(emulated, case, 130, **ADVERSARIAL[kind])


@costly(1)
@needs_emulator
@pytest.mark.parametrize("function", ["chunk_gdn2", "chunk_comba", "chunk_dplr_delta_rule"])
@pytest.mark.parametrize("kind", [{}, ADVERSARIAL["near keys, steps of 1"]], ids=["random", "near keys"])
def test_sizes_that_are_no_powers_of_two(function, kind):
    laws.is_accurate(emulated, Case(function, heads=3, key_heads=3, head_k=48, head_v=16, x=F16), 70, **kind)


@costly(1)
@needs_emulator
@pytest.mark.parametrize("function", ["chunk_kda", "chunk_gla", "chunk_rwkv7"])
@pytest.mark.parametrize("form", list(Backend))
def test_many_tokens(function, form):
    """Without decay errors add up."""
    laws.is_accurate(served_by(form), Case(function, head_k=64, head_v=64, heads=1), 300, **ADVERSARIAL["slow"])


@needs_emulator
@pytest.mark.parametrize("form", list(Backend))
@pytest.mark.parametrize("heads", [1, 4])
def test_keys_that_are_nearly_one_from_zeros(form, heads):
    laws.is_accurate_from_zeros(served_by(form), Case(head_k=64, head_v=64, heads=heads, key_heads=heads), 260)


@costly(2)
@needs_emulator
@each
def test_lengths_are_accurate(case):
    laws.lengths_are_accurate(emulated, case, (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65))


@costly(2)
@by_both
@both
def test_packing_changes_no_bit(case, run):
    laws.packing_changes_no_bit(run, case, (65, 0, 7, 33))


@costly(1)
@needs_emulator
@each
def test_a_cut_changes_no_bit(case):
    for at in {case.chunk, 64}:
        laws.a_cut_changes_no_bit(emulated, case, 100, at)


@costly(2)
@by_both
@both
@pytest.mark.parametrize(("state", "layout"), [(F32, "vk"), (BF16, "kv")])
def test_a_pool_is_touched_where_it_should_be(case, run, state, layout):
    laws.a_pool_is_touched_where_it_should_be(run, case, state, layout)


@costly(1)
@needs_emulator
@each
def test_neighbours_do_not_matter(case):
    laws.neighbours_do_not_matter(emulated, case, (5, 64, 40))


@costly(1)
@needs_emulator
@both
@pytest.mark.parametrize(("state", "index"), [(BF16, torch.int64), (F32, None)], ids=["bf16-i64", "in-order"])
def test_states_of_a_pool_may_begin_elsewhere(case, state, index):
    laws.states_of_a_pool_may_begin_elsewhere(emulated, case, state, index)


@costly(1)
@needs_emulator
@each
@pytest.mark.parametrize("offset", [8, 2])
def test_layout_changes_no_bit(case, offset):
    laws.layout_changes_no_bit(emulated, case, offset)


@costly(1)
@needs_emulator
@both
@pytest.mark.parametrize("state", [F32, F16])
def test_order_of_states_changes_no_bit(case, state):
    laws.order_of_states_changes_no_bit(emulated, case, state)


@costly(1)
@needs_emulator
@pytest.mark.parametrize("function", ["chunk_kda", "chunk_comba", "chunk_gla"])
def test_gates_agree(function):
    laws.gates_agree(emulated, replace(SMALL, function=function))


@costly(2)
@by_both
@both
def test_decoding_goes_on(case, run):
    laws.decoding_goes_on(run, case, 33)


@costly(2)
@by_both
@both
def test_checkpoints_are_final_states(case, run):
    laws.checkpoints_are_final_states(run, case, BF16, (65, 0, 40))


@costly(1)
@needs_emulator
@each
def test_batches_change_no_bit(case):
    laws.batches_change_no_bit(emulated, case)


@costly(1)
@needs_emulator
@pytest.mark.parametrize(
    "problem",
    [
        LinearPromptProblem(
            head_k=32, head_v=16, gk=DType.F32, beta=DType.F32, cu_seqlens=Index.I32, pool=True, started=True, index=Index.I64
        ),
        LinearPromptProblem(
            rule=Rule.OLD, head_k=16, head_v=32, x=DType.F16, g=DType.F16, read=True, beta=DType.F16, copy=4, initial=True, final=True,
            layout=Layout.KV, l2norm=True,
        ),
        LinearPromptProblem(rule=Rule.LOW_RANK, head_k=32, head_v=16, gk=DType.BF16, read=True, alpha=DType.BF16, checkpoints=Index.I32),
    ],
    ids=["pool", "dense", "checkpoints"],
)  # fmt: skip
def test_checks_of_variants(problem):
    assert check(select(OPERATOR, problem, 2, SM90, True), SM90, 4).passed
