"""chunk_delta_rule and chunk_linear_attention: the errors of their functions, and the kernels that serve them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from prompt_cases import BF16, FUNCTIONS, SM90, Case, candidates, make, problem_of, public, same
from selection import costly

import ssmgen
from ssmgen.compile.occupancy import LIMITS
from ssmgen.errors import ArgumentError, UnsupportedError
from ssmgen.families.chunk_delta_rule.problem import DeltaProblem
from ssmgen.families.chunk_linear_attention.problem import LinearPromptProblem, Rule, workspace_bytes
from ssmgen.select.models import Role, Wanted, models
from ssmgen.select.registry import select
from ssmgen.spec.kernel import Arch

DELTA, KDA = Case("chunk_gated_delta_rule"), Case("chunk_kda")
each = pytest.mark.parametrize("case", [Case(name) for name in FUNCTIONS], ids=FUNCTIONS)
both = pytest.mark.parametrize("case", [DELTA, KDA], ids=["delta", "kda"])
OPERATORS = {DeltaProblem: "chunk_delta_rule", LinearPromptProblem: "chunk_linear_attention"}
both_problems = pytest.mark.parametrize("problem", OPERATORS, ids=OPERATORS.values())


def chosen(problem: Any, heads: int, arch: Arch, pdl: bool) -> Any:
    return select(OPERATORS[type(problem)], problem, heads, arch, pdl)


# Checks.


def operands(function: str = "chunk_kda", **changes: Any) -> dict[str, Any]:
    return make(Case(function), 2, 5) | changes


WRONG_IN_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"v": torch.zeros(2, 5, 32)}, "v is [2, 5, 32]; expected [batch, T, HV, V]"),
    ({"cu_seqlens": torch.zeros(3).int()}, "v is [2, 5, 2, 32]; expected [tokens, HV, V] or [1, tokens, HV, V]"),
    ({"q": torch.zeros(2, 5, 3, 32).bfloat16()}, "v has 2 heads; expected a multiple of the 3"),
    ({"q": torch.zeros(2, 5, 32).bfloat16()}, "q is [2, 5, 32]; expected […, HK, K], as v is [2, 5, 2, 32]"),
    ({"k": torch.zeros(2, 5, 1, 16).bfloat16()}, "k is [2, 5, 1, 16]; expected […, HK, K] = [2, 5, 1, 32]"),
    ({"k": torch.zeros(2, 5, 1, 32)}, "k is float32; expected bfloat16, the dtype of v"),
    ({"beta": torch.zeros(2, 5)}, "beta is [2, 5]; expected […, HV] = [2, 5, 2]"),
    ({"g": None}, "g is a NoneType; expected a tensor"),
    ({"dt_bias": torch.zeros(2, 32)}, "dt_bias is given without A_log"),
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
]
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (
        "chunk_gated_delta_rule",
        {"A_log": torch.zeros(2), "linear_gate": True},
        "linear_gate=True is given with A_log or dt_bias; expected either",
    ),
    ("chunk_gated_delta_rule", {"workspace": torch.zeros(9)}, "workspace is [9] float32; expected dense bytes, [44544 or more] uint8"),
    (
        "chunk_gated_delta_rule",
        {"workspace": torch.zeros(9, dtype=torch.uint8)},
        "bytes; expected 44544 or more. Get the size from",
    ),
    (
        "chunk_gated_delta_rule",
        {"v": torch.zeros(2, 5, 2, 32, requires_grad=True)},
        "v requires grad; expected no gradients, since the delta rule of a prompt has no",
    ),
    ("chunk_kda", {"g": torch.zeros(2, 5, 2)}, "g is [2, 5, 2]; expected […, HV, K] = [2, 5, 2, 32]"),
    ("chunk_kda", {"g": torch.zeros(2, 5, 2, 64)[..., ::2]}, "g has strides [640, 128, 64, 2]; expected contiguous rows"),
    ("chunk_kda", {"dt_bias": torch.zeros(2), "A_log": torch.zeros(2)}, "dt_bias is [2]; expected [HV, K] = [2, 32] or [HV K] = [64]"),
    ("chunk_kda", {"beta": torch.zeros(2, 5, 2, 32)}, "beta is [2, 5, 2, 32], one per value channel; expected one per head"),
    ("chunk_comba", {"beta": torch.zeros(2, 5, 2, 32)}, "beta is [2, 5, 2, 32], one per value channel; expected one per head"),
    ("chunk_comba", {"p": torch.zeros(2, 5, 1, 16).bfloat16()}, "p is [2, 5, 1, 16]; expected […, HK, K] = [2, 5, 1, 32]"),
    ("chunk_comba", {"g": torch.zeros(2, 5, 2, 32)}, "g is [2, 5, 2, 32]; expected […, HV] = [2, 5, 2]"),
    ("chunk_gla", {"gv": torch.zeros(2, 5, 2, 32)}, "gv, a log decay per value channel, is given; expected None"),
    ("chunk_gdn2", {"b": torch.zeros(2, 5, 1, 32)}, "b is [2, 5, 1, 32]; expected […, HV, K] = [2, 5, 2, 32]"),
    ("chunk_gdn2", {"w": torch.zeros(2, 5, 2)}, "w is [2, 5, 2]; expected […, HV, V] = [2, 5, 2, 32]"),
    ("chunk_gdn2", {"w": None}, "w is a NoneType; expected a tensor"),
    ("chunk_gdn2", {"w": torch.zeros(2, 5, 2, 32).int()}, "w is torch.int32; expected float32, float16 or bfloat16"),
    ("chunk_gdn2", {"w": torch.zeros(2, 5, 2, 32, requires_grad=True)}, "w requires grad; expected no gradients"),
    ("chunk_rwkv7", {"r": torch.zeros(2, 5, 32).bfloat16()}, "r is [2, 5, 32]; expected […, HK, K], as v is [2, 5, 2, 32]"),
    ("chunk_rwkv7", {"kk": torch.zeros(2, 5, 1, 32)}, "kk is float32; expected bfloat16, the dtype of v"),
    ("chunk_rwkv7", {"a": torch.zeros(2, 5, 2, 32)}, "a is [2, 5, 2, 32]; expected […, HK, K] = [2, 5, 1, 32]"),
    ("chunk_dplr_delta_rule", {"b": None}, "b is a NoneType; expected a tensor"),
    ("chunk_kda", {"workspace": torch.zeros(9)}, "workspace is [9] float32; expected dense bytes, [147968 or more] uint8"),
    (
        "chunk_rwkv7",
        {"workspace": torch.zeros(9, dtype=torch.uint8)},
        "bytes; expected 94720 or more. Get the size from",
    ),
    ("chunk_kda", {"v": torch.zeros(2, 5, 2, 32, requires_grad=True)}, "v requires grad; expected no gradients"),
]
CASES = [(case.function, *wrong) for case in (DELTA, KDA) for wrong in WRONG_IN_BOTH] + WRONG


@pytest.mark.parametrize(("function", "changes", "words"), CASES, ids=[f"{function}: {words[:40]}" for function, _, words in CASES])
def test_what_is_wrong_in_words(function, changes, words):
    call = operands(function, **changes)
    with pytest.raises(ArgumentError) as e:
        getattr(ssmgen, function)(**call)
    assert words in str(e.value)
    with pytest.raises(ArgumentError) as e:
        ssmgen.explain(getattr(ssmgen, function), **call, arch="sm_90a")
    assert words in str(e.value)


@both
def test_everything_wrong_is_in_one_message(case):
    wrong = {"g": torch.zeros(2, 5), "beta": torch.zeros(3), "state_indices": torch.zeros(2)}
    with pytest.raises(ArgumentError) as e:
        public(case, **operands(case.function, **wrong))
    assert len(e.value.problems) == 4


def test_a_workspace_is_as_large_as_its_rule_needs():
    assert ssmgen.chunk_linear_attention_workspace(640, 3, 2, 128) == workspace_bytes(640, 3, 2, 128, Rule.DELTA) == 13 * 2 * 61952
    assert ssmgen.chunk_linear_attention_workspace(640, 3, 2, 128, "low_rank") == 23 * 2 * 40448
    assert ssmgen.chunk_linear_attention_workspace(640, 3, 2, 128, "plain") == 13 * 2 * 38400
    with pytest.raises(ArgumentError, match="rule is 'kda'; expected one of plain, delta, old, low_rank"):
        ssmgen.chunk_linear_attention_workspace(640, 3, 2, 128, "kda")


def test_a_workspace_may_be_used_again_and_lies_at_a_multiple_of_16_bytes():
    memory, call = torch.empty(10**6, dtype=torch.uint8), operands(DELTA.function)
    assert problem_of(DELTA, **call, workspace=memory) == problem_of(DELTA, **call)
    with pytest.raises(ArgumentError, match="bytes past a multiple of 16"):
        problem_of(DELTA, **call, workspace=memory[8:])
    with pytest.raises(ArgumentError, match="out overlaps workspace in memory"):
        public(DELTA, **call, out=memory[:1280].view(BF16).view(2, 5, 2, 32), workspace=memory)


# Choices.


def refused(problem: Any, arch: Arch = SM90) -> str:
    with pytest.raises(UnsupportedError) as e:
        chosen(problem, 1, arch, False)
    return str(e.value)


@both
def test_what_no_kernel_serves_in_words(case):
    odd = operands(case.function, v=torch.zeros(2, 5, 2, 33).bfloat16()[..., 1:])
    assert "the tokens or heads of q, k, v or out begin at an odd element" in refused(problem_of(case, **odd))
    wide = {n: t.float() if n in case.per_token else t for n, t in operands(case.function).items()}
    assert "q, k and v are f32; expected bf16 or f16, for tensor cores" in refused(problem_of(case, **wide))


@both_problems
def test_which_sizes_no_kernel_serves(problem):
    assert "K is 72; expected 16 … 256 in steps of 16" in refused(problem(head_k=72, head_v=64))
    assert "V is 272; expected 16 … 256 in steps of 16" in refused(problem(head_k=64, head_v=272))
    assert "arch is sm_75; expected sm_80 or later" in refused(problem(head_k=64, head_v=16), Arch(75))


@costly(4)
@each
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_100a", "sm_120"])
def test_every_size_is_served_where_there_is_shared_memory_for_it(case, arch):
    where, step = Arch.parse(arch), 16 if case.per_head else 48
    for head_k in range(16, 257, step):
        for head_v in range(16, 257, step):
            sizes = replace(case, head_k=head_k, head_v=head_v)
            problem = problem_of(sizes, **make(sizes, 1, 2))
            small = arch in ("sm_86", "sm_120") and head_k > 192 and not case.per_head
            if small and case.chunk == 64 and case.rule.reads:
                assert f"bytes of shared memory; expected at most 101376 on {arch}" in refused(problem, where)
                continue
            spec = chosen(problem, 1, where, False)
            prepare, chain = spec.kernels
            assert chain is spec and not prepare.violations(where)
            rules = [s for _, s, _ in candidates(problem, 1, where, False) if s and not s.grouped]
            assert rules[-1].shared_bytes == min(s.shared_bytes for s in rules) <= LIMITS[where.number].shared


@both
def test_the_first_kernel_is_of_what_images_hang_on(case):
    """Calls that differ only in their states therefore share it."""
    call, more = operands(case.function), [{}, {"return_final_states": True}, {"state": torch.zeros(2, 2, 32, 32).bfloat16()}]
    kernels = [chosen(problem_of(case, **call, **states), 2, SM90, True).kernels for states in more]
    assert len({first for first, _ in kernels}) == 1 and len({second for _, second in kernels}) == 3


@pytest.mark.parametrize(
    ("problem", "kinds"), [(DeltaProblem, {"gated_delta_rule"}), (LinearPromptProblem, {"kda", "rwkv7"})], ids=["delta", "linear"]
)
def test_every_model_of_these_recurrences_builds_its_prompts(problem, kinds):
    for model in models().values():
        asked = [p for p in model.asked(Wanted(intermediates=True), Role.SCAN) if isinstance(p, problem)]
        assert bool(asked) == (model.kind in kinds), model.name
        for one in asked:
            assert (one.head_k, one.head_v) == model.shape[1::-1] and not one.faults()
            for arch in ("sm_80", "sm_90a"):
                chosen(one, model.nheads, Arch.parse(arch), arch == "sm_90a")


def test_what_is_built_for_models_is_what_they_ask():
    """KDA as transformers calls it, and RWKV-7 with its own operands."""
    wide = {"heads": 32, "key_heads": 32, "head_k": 128, "head_v": 128}
    kimi = Case(**wide)
    call = make(kimi, 1, 2)
    call["beta"] = call["beta"].bfloat16()
    asked = models()["kimi-linear-48b-a3b"].asked(Wanted(), Role.SCAN)
    assert problem_of(kimi, **call, return_final_states=True) in asked
    raw = {"g": call["g"].bfloat16(), "A_log": torch.zeros(32), "dt_bias": torch.zeros(32, 128), "beta_sigmoid": True}
    assert problem_of(kimi, **call | raw, initial_states=torch.zeros(1, 32, 128, 128), return_final_states=True) in asked
    small = Case("chunk_rwkv7", **wide | {"head_k": 64, "head_v": 64})
    call = make(small, 1, 2)
    assert problem_of(small, **call | {"w": call["w"].bfloat16()}, return_final_states=True) in models()["rwkv7-1.5b"].asked(
        Wanted(), Role.SCAN
    )


@both
def test_without_sequences_there_is_nothing_to_launch(case):
    for starts, tokens, final in (([0], 20, True), ([0, 0], 0, False)):
        call = make(case, tokens) | {"cu_seqlens": torch.tensor(starts), "return_final_states": final}
        assert case.build(**call).problem()[1] == 0
    some = replace(case, heads=4)
    assert some.build(**make(some, 1, 3)).problem()[1] == 4


def test_two_calls_of_gdn2_weigh_what_they_are_given():
    """Every call computes the product again, also a bound call whose tensors have changed."""
    case = replace(KDA, function="chunk_gdn2")
    call = make(case, 1, 5)
    first = public(case, **call)
    bound = ssmgen.bind(ssmgen.chunk_gdn2, **call)
    call["w"].mul_(0.5)
    second = public(case, **call)
    assert not same(first, second) and same(bound(), second)
