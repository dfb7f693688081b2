"""chunk_linear_attention: its reference, its checks, and the laws that hold for both kernels together, on the CPU and in the emulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import linear_laws as laws
import pytest
import torch
from linear_cases import ADVERSARIAL, BF16, F16, F32, FUNCTIONS, Case, error, exact, make, public, recurrence, same, starts_of

import ssmgen
from ssmgen.errors import ArgumentError
from ssmgen.families.chunk_linear_attention.problem import Rule, workspace_bytes

SMALL = Case()
each = pytest.mark.parametrize("case", [replace(SMALL, function=name) for name in FUNCTIONS], ids=FUNCTIONS)
KDA, RWKV7 = SMALL, replace(SMALL, function="chunk_rwkv7")  # chunks of 64 tokens and of 32
both = pytest.mark.parametrize("case", [KDA, RWKV7], ids=["kda", "rwkv7"])


# The reference.


@each
@pytest.mark.parametrize("kind", [{}, *ADVERSARIAL.values()], ids=["random", *ADVERSARIAL])
def test_the_reference_does_what_formulas_say(case, kind):
    call = make(case, 5, **kind)
    before = laws.states(case, 1)
    out, states = recurrence(case, call, before[0])
    wanted = exact(case, laws.tokens_of(case, call, slice(None)), initial_states=before, return_final_states=True)
    assert error(wanted["out"][0], out) < 1e-12 and error(wanted["final_states"][0], states[-1]) < 1e-12


@each
def test_gates_are_what_formulas_say(case):
    for more in laws.gates(case, 5):
        call = make(case, 1, 5) | more
        out, _ = recurrence(case, {n: t[0] if n in case.per_token and t is not None else t for n, t in call.items()})
        assert error(exact(case, call)["out"][0], out) < 1e-12, more.keys()


@each
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_tokens_do_what_decode_steps_do(case, layout):
    """Both references compute in f32, one token after the other; what is rounded at the end may fall to either side, and w v is rounded."""
    call = make(case, 2, 9) | {"state_layout": layout}
    before = laws.states(case, 2)
    before = before.mT.contiguous() if layout == "kv" else before
    out, last = public(case, **call, initial_states=before, return_final_states=True)
    state = before.clone()
    near = 5e-3 if case.function == "chunk_gdn2" else 1e-3
    assert error(out, case.decode(state, **call).double()) < near and error(last, state.double()) < near


@each
def test_a_scale_is_a_factor_of_the_output(case):
    call = make(case, 1, 5)
    plain = public(case, **call, scale=1.0)
    assert same(public(case, **call, scale=0.25), plain / 4)
    assert same(public(case, **call), public(case, **call, scale=1.0 if case.function == "chunk_rwkv7" else 32**-0.5))


# Laws of the functions.


@both
def test_packing_changes_no_bit(case):
    laws.packing_changes_no_bit(public, case, (65, 0, 7, 33))


@both
def test_a_pool_is_touched_where_it_should_be(case):
    laws.a_pool_is_touched_where_it_should_be(public, case, BF16, "kv")


@each
def test_decoding_goes_on(case):
    laws.decoding_goes_on(public, case, 33)


@both
def test_checkpoints_are_final_states(case):
    laws.checkpoints_are_final_states(public, case, BF16, (65, 0, 40))


def test_two_calls_of_gdn2_weigh_what_they_are_given():
    """The product is made anew in every call, also in one that was bound, whose tensors have changed."""
    case = replace(SMALL, function="chunk_gdn2")
    call = make(case, 1, 5)
    first = public(case, **call)
    bound = ssmgen.bind(ssmgen.chunk_gdn2, **call)
    call["w"].mul_(0.5)
    second = public(case, **call)
    assert not same(first, second) and same(bound(), second)


# Checks.


def operands(function: str = "chunk_kda", **changes: Any) -> dict[str, Any]:
    return make(replace(SMALL, function=function), 2, 5) | changes


@pytest.mark.parametrize(
    ("function", "changes", "words"),
    [
        ("chunk_kda", {"v": torch.zeros(2, 5, 32)}, "v is [2, 5, 32], not [batch, T, HV, V]"),
        ("chunk_kda", {"cu_seqlens": torch.zeros(3).int()}, "not [tokens, HV, V] or [1, tokens, HV, V], as cu_seqlens asks for"),
        ("chunk_kda", {"g": torch.zeros(2, 5, 2)}, "g is [2, 5, 2], not […, HV, K] = [2, 5, 2, 32]"),
        ("chunk_kda", {"g": None}, "g is a NoneType, not a tensor"),
        ("chunk_kda", {"g": torch.zeros(2, 5, 2, 64)[..., ::2]}, "g has strides [640, 128, 64, 2]; its rows must be contiguous"),
        ("chunk_kda", {"k": torch.zeros(2, 5, 1, 32)}, "k is float32, v is bfloat16"),
        ("chunk_kda", {"dt_bias": torch.zeros(2, 32)}, "dt_bias is given without A_log"),
        ("chunk_kda", {"dt_bias": torch.zeros(2), "A_log": torch.zeros(2)}, "dt_bias is [2], not [HV, K] = [2, 32] or [HV K] = [64]"),
        ("chunk_kda", {"allow_neg_eigval": True}, "allow_neg_eigval doubles the sigmoid of beta: give beta_sigmoid too"),
        ("chunk_kda", {"beta": torch.zeros(2, 5, 2, 32)}, "beta is [2, 5, 2, 32], one per value channel, which has no form in chunks"),
        ("chunk_comba", {"beta": torch.zeros(2, 5, 2, 32)}, "one per value channel, which has no form in chunks"),
        ("chunk_comba", {"p": torch.zeros(2, 5, 1, 16).bfloat16()}, "p is [2, 5, 1, 16], not […, HK, K] = [2, 5, 1, 32]"),
        ("chunk_comba", {"g": torch.zeros(2, 5, 2, 32)}, "g is [2, 5, 2, 32], not […, HV] = [2, 5, 2]"),
        ("chunk_gla", {"gv": torch.zeros(2, 5, 2, 32)}, "gv, a log decay per value channel, has no form in chunks"),
        ("chunk_gdn2", {"b": torch.zeros(2, 5, 1, 32)}, "b is [2, 5, 1, 32], not […, HV, K] = [2, 5, 2, 32]"),
        ("chunk_gdn2", {"w": torch.zeros(2, 5, 2)}, "w is [2, 5, 2], not […, HV, V] = [2, 5, 2, 32]"),
        ("chunk_gdn2", {"w": None}, "w is a NoneType, not a tensor"),
        ("chunk_gdn2", {"w": torch.zeros(2, 5, 2, 32).int()}, "w is torch.int32, not float32, float16 or bfloat16"),
        ("chunk_gdn2", {"w": torch.zeros(2, 5, 2, 32, requires_grad=True)}, "w requires grad, and linear attention over a prompt has no"),
        ("chunk_rwkv7", {"r": torch.zeros(2, 5, 32).bfloat16()}, "r is [2, 5, 32], not […, HK, K] as v [2, 5, 2, 32] asks for"),
        ("chunk_rwkv7", {"kk": torch.zeros(2, 5, 1, 32)}, "kk is float32, v is bfloat16"),
        ("chunk_rwkv7", {"a": torch.zeros(2, 5, 2, 32)}, "a is [2, 5, 2, 32], not […, HK, K] = [2, 5, 1, 32]"),
        ("chunk_dplr_delta_rule", {"b": None}, "b is a NoneType, not a tensor"),
        ("chunk_kda", {"q": torch.zeros(2, 5, 3, 32).bfloat16()}, "v has 2 heads, which is not a multiple of the 3 key heads"),
        ("chunk_kda", {"state_indices": torch.zeros(2).int()}, "state_indices is given without state"),
        ("chunk_kda", {"state": torch.zeros(2, 2, 32, 16)}, "state is [2, 2, 32, 16], not [slots, HV, V, K] = [slots, 2, 32, 32]"),
        ("chunk_kda", {"state_layout": "kvv"}, "state_layout is 'kvv', not 'vk' or 'kv'"),
        ("chunk_kda", {"return_checkpoints": True}, "return_checkpoints asks for states after tokens, and checkpoint_positions"),
        ("chunk_kda", {"workspace": torch.zeros(9)}, "workspace is [9] float32, not dense bytes: [139776 or more] uint8"),
        (
            "chunk_rwkv7",
            {"workspace": torch.zeros(9, dtype=torch.uint8)},
            "and this call needs 139776: chunk_linear_attention_workspace(10, 2, 2, 32, 'low_rank')",
        ),
        ("chunk_kda", {"v": torch.zeros(2, 5, 2, 32, requires_grad=True)}, "v requires grad, and linear attention over a prompt has no"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_words(function, changes, words):
    call = operands(function, **changes)
    with pytest.raises(ArgumentError) as e:
        getattr(ssmgen, function)(**call)
    assert words in str(e.value)
    with pytest.raises(ArgumentError) as e:
        ssmgen.explain(getattr(ssmgen, function), **call, arch="sm_90a")
    assert words in str(e.value)


def test_everything_wrong_is_in_one_message():
    with pytest.raises(ArgumentError) as e:
        ssmgen.chunk_kda(**operands(g=torch.zeros(2, 5), beta=torch.zeros(2, 5, 2, 32), state_indices=torch.zeros(2)))
    assert len(e.value.problems) == 4


def test_a_workspace_is_as_large_as_its_rule_needs():
    assert ssmgen.chunk_linear_attention_workspace(640, 3, 2, 128) == workspace_bytes(640, 3, 2, 128, Rule.DELTA) == 13 * 2 * 59904
    assert ssmgen.chunk_linear_attention_workspace(640, 3, 2, 128, "low_rank") == 23 * 2 * 59904
    assert ssmgen.chunk_linear_attention_workspace(640, 3, 2, 128, "plain") == 13 * 2 * 38400
    with pytest.raises(ArgumentError, match="rule is 'kda', not one of plain, delta, old, low_rank"):
        ssmgen.chunk_linear_attention_workspace(640, 3, 2, 128, "kda")


@both
def test_boundaries_that_make_no_sense_are_sequences_without_tokens(case):
    out = torch.full((20, 2, 32), -7.0).bfloat16()
    public(case, **make(case, 20), cu_seqlens=torch.tensor([5, 3, 21, -4, 2]), out=out)
    assert (out == -7.0).all()


@both
@pytest.mark.parametrize("state", [F32, F16])
def test_states_of_sequences_without_tokens(case, state):
    """Dense ones go through, those in a pool stay where they are."""
    call, before = make(case, 0), laws.states(case, 2, state)
    starts = starts_of((0, 0), "cpu")
    _, after = public(case, **call, cu_seqlens=starts, initial_states=before, return_final_states=True)
    pool = before.clone()
    public(case, **call, cu_seqlens=starts, state=pool, has_initial_state=torch.tensor([True, False]))
    assert same(after, before) and same(pool, before)


@each
@torch.no_grad()
def test_compiled_by_torch(case):
    call = make(case, 2, 5)
    before = laws.states(case, 2)

    def layer(before: torch.Tensor, **call: Any) -> Any:
        out, state = getattr(ssmgen, case.function)(**call, initial_states=before, return_final_states=True)
        return out * 2, state + 1

    wanted = layer(before, **call)
    assert all(same(a, b) for a, b in zip(torch.compile(layer, fullgraph=True, backend="eager")(before, **call), wanted, strict=True))
