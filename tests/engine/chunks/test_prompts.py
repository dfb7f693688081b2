"""chunk_delta_rule and chunk_linear_attention: their references, and the laws that hold for both kernels together, on the CPU and in the
emulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import prompt_laws as laws
import pytest
import torch
from emulated_calls import needs_emulator
from prompt_cases import (
    ADVERSARIAL,
    BF16,
    F16,
    F32,
    FUNCTIONS,
    SM90,
    Case,
    emulated,
    error,
    exact,
    make,
    public,
    recurrence,
    same,
    states,
    variant,
)
from selection import costly

from ssmgen.emulator.check import check
from ssmgen.engine.chunks.chain import Backend
from ssmgen.engine.recurrences.attention.problem import Gate
from ssmgen.families.chunk_delta_rule import problem as delta_rule
from ssmgen.families.chunk_delta_rule.problem import DeltaProblem
from ssmgen.families.chunk_linear_attention.problem import LinearPromptProblem, Rule
from ssmgen.select.registry import select
from ssmgen.spec.kernel import DType, Index, Layout

DELTA, KDA, RWKV7 = Case("chunk_gated_delta_rule"), Case(), Case("chunk_rwkv7")  # chunks of 64 tokens, and of 32
UNEVEN = Case(heads=3, key_heads=3, head_k=48, head_v=16, x=F16)
WIDE = Case(heads=1, head_k=64, head_v=64)
each = pytest.mark.parametrize("case", [Case(name) for name in FUNCTIONS], ids=FUNCTIONS)
three = pytest.mark.parametrize("case", [DELTA, KDA, RWKV7], ids=["delta", "kda", "rwkv7"])
by_both = pytest.mark.parametrize("run", [public, pytest.param(emulated, marks=needs_emulator)], ids=["reference", "emulated"])


def served_by(backend: Backend) -> Any:
    """A function that runs a call in the emulator with the first variant of a backend."""
    return partial(emulated, spec=partial(variant, backend))


def raw_gates(case: Case, tokens: int) -> list[dict[str, Any]]:
    """Gates other than the decay itself, which decode steps do not take."""
    return [more for more in laws.gates(case, tokens) if "linear_gate" not in more]


# The references.


@costly(8)
@each
@pytest.mark.parametrize("kind", ["random", "near keys, steps of 1", "one channel at once"])
def test_the_reference_does_what_formulas_say(case, kind):
    call = make(case, 5, **ADVERSARIAL.get(kind, {}))
    before = states(case, 1)
    out, after = recurrence(case, call, before[0])
    wanted = exact(case, laws.tokens_of(case, call, slice(None)), initial_states=before, return_final_states=True)
    assert error(wanted["out"][0], out) < 1e-12 and error(wanted["final_states"][0], after[-1]) < 1e-12


@costly(7)
@each
def test_gates_are_what_formulas_say(case):
    for more in raw_gates(case, 5):
        call = make(case, 1, 5) | more
        out, _ = recurrence(case, laws.cut(case, call, 0))
        assert error(exact(case, call)["out"][0], out) < 1e-12, more.keys()


@costly(8)
@pytest.mark.parametrize("case", [Case(name) for name in ("chunk_delta_rule", *FUNCTIONS)], ids=lambda case: case.function)
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_tokens_do_what_decode_steps_do(case, layout):
    """Both references compute in f32, one token after the other. The final rounding may go either way, and w v is rounded."""
    for more in raw_gates(case, 9):
        call = make(case, 1, 9) | more | {"state_layout": layout}
        before = states(case, 1)
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


@costly(9, 24)
@needs_emulator
@each
@pytest.mark.parametrize("kind", ["random", *ADVERSARIAL])
def test_results_are_those_of_float64(case, kind):
    laws.is_accurate(emulated, case, 100, **ADVERSARIAL.get(kind, {}))


@costly(4, 12)
@needs_emulator
@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "chunk_gdn2", "chunk_comba", "chunk_dplr_delta_rule"])
@pytest.mark.parametrize("kind", ["random", "near keys", "near keys, steps of 1", "no decay", "steps of 2", "slow", "fast"])
def test_sizes_that_are_no_powers_of_two(function, kind):
    laws.is_accurate(emulated, replace(UNEVEN, function=function), 130, **ADVERSARIAL.get(kind, {}))


@costly(2)
@needs_emulator
@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "chunk_kda", "chunk_gla", "chunk_rwkv7"])
@pytest.mark.parametrize("backend", list(Backend))
def test_many_tokens(function, backend):
    """Without decay errors add up: above all the roundings of T, and any bias that shrinks it."""
    tokens, kind = (700, "steps of 2") if function == "chunk_gated_delta_rule" else (300, "slow")
    laws.is_accurate(served_by(backend), replace(WIDE, function=function), tokens, **ADVERSARIAL[kind])


@needs_emulator
@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize("heads", [1, 4])
def test_keys_that_are_nearly_one_from_zeros(backend, heads):
    laws.is_accurate_from_zeros(served_by(backend), replace(WIDE, heads=heads, key_heads=heads), 260)


def a_cut_changes_no_bit(run: Any, case: Case) -> None:
    for at in {case.chunk, 64, 128}:
        laws.a_cut_changes_no_bit(run, case, 150, at)


Law = Callable[[Any, Case], None]
LAWS: dict[str, Law] = {
    "lengths": partial(laws.lengths_are_accurate, lengths=(0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65)),
    "cut": a_cut_changes_no_bit,
    "neighbours": partial(laws.neighbours_do_not_matter, lengths=(5, 64, 70)),
    **{f"layout, {n} off": partial(laws.layout_changes_no_bit, offset=n) for n in (8, 4, 2)},
    "batches": laws.batches_change_no_bit,
}


@costly(8, 20)
@needs_emulator
@each
@pytest.mark.parametrize("law", LAWS)
def test_laws(case, law):
    LAWS[law](emulated, case)


@pytest.mark.parametrize("law", ["lengths", "cut", "batches"])
def test_laws_of_the_reference(law):
    LAWS[law](public, DELTA)


elsewhere = laws.states_of_a_pool_may_begin_elsewhere
LAWS_OF_BOTH: dict[str, Law] = {
    "packing": partial(laws.packing_changes_no_bit, lengths=(65, 0, 7, 33, 64, 130)),
    "pool": partial(laws.a_pool_is_touched_where_it_should_be, state=F32, layout="vk"),
    "pool, bf16": partial(laws.a_pool_is_touched_where_it_should_be, state=BF16, layout="kv"),
    "elsewhere, bf16": partial(elsewhere, state=BF16, index=torch.int64),
    "elsewhere, in order": partial(elsewhere, state=F32, index=None),
    **{f"order of states, {x}": partial(laws.order_of_states_changes_no_bit, state=x) for x in (F32, F16)},
    "decoding": lambda run, case: laws.decoding_goes_on(run, case, 33 if case is RWKV7 else 70),
    "checkpoints": partial(laws.checkpoints_are_final_states, state=BF16, lengths=(65, 0, 130)),
    **{f"without tokens, {x}": partial(laws.sequences_without_tokens_keep_states, state=x) for x in (F32, BF16, F16)},
    "boundaries": laws.boundaries_that_make_no_sense_are_sequences_without_tokens,
}


@costly(16, 24)
@by_both
@three
@pytest.mark.parametrize("law", LAWS_OF_BOTH)
def test_laws_of_both(case, run, law):
    LAWS_OF_BOTH[law](run, case)


@costly(2)
@needs_emulator
@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "chunk_kda", "chunk_comba", "chunk_gla"])
def test_gates_agree(function):
    laws.gates_agree(emulated, Case(function))


@by_both
def test_linear_gates_agree(run):
    laws.linear_gates_agree(run, DELTA)


POOL: dict[str, Any] = {"cu_seqlens": Index.I32, "pool": True, "started": True, "index": Index.I64}
DENSE: dict[str, Any] = {"x": DType.F16, "beta": DType.F16, "copy": 4, "initial": True, "final": True, "layout": Layout.KV, "l2norm": True}
PROBLEMS = {
    "delta-pool": DeltaProblem(head_k=32, head_v=16, g=DType.F32, gate=delta_rule.Gate.LOG, **POOL),
    "delta-dense": DeltaProblem(head_k=16, head_v=32, **DENSE),
    "linear-pool": LinearPromptProblem(head_k=32, head_v=16, gk=DType.F32, beta=DType.F32, gate=Gate.LOG, **POOL),
    "linear-dense": LinearPromptProblem(rule=Rule.OLD, head_k=16, head_v=32, g=DType.F16, read=True, **DENSE),
    "linear-checkpoints": LinearPromptProblem(
        rule=Rule.LOW_RANK, head_k=32, head_v=16, gk=DType.BF16, read=True, alpha=DType.BF16, checkpoints=Index.I32
    ),
}


@costly(2)
@needs_emulator
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_checks_of_variants(problem):
    operator = "chunk_delta_rule" if isinstance(problem, DeltaProblem) else "chunk_linear_attention"
    assert check(select(operator, problem, 2, SM90, True), SM90, 4).passed
