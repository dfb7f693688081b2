"""Linear attention on narrow states: emulated kernels against float64; steps through the public functions; and refused calls."""

from __future__ import annotations

import random

import pytest
import torch
from emulated_calls import SM90, needs_emulator
from narrow_cases import trials_are_bit_equal
from selection import costly
from torch import Tensor

import ssmgen
from ssmgen.calls.checks import NARROW
from ssmgen.emulator.check import check
from ssmgen.engine.narrow_reference import narrowed, widened
from ssmgen.engine.recurrences.attention.problem import Delta, Gate, LinearAttentionProblem, Tokens
from ssmgen.errors import ArgumentError
from ssmgen.families.linear_attention.spec import space
from ssmgen.select import registry
from ssmgen.spec.kernel import DType, Index, Layout, Loads, Narrow, PoolMode, Update

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = {"dim_k": 64, "dim_v": 32, "nheads": 2, "key_heads": 1, "index": Index.I32}
EACH = {"tokens": Tokens.MANY, "update": Update.EACH, "pool": PoolMode.SPLIT}
FORMS = {
    "gated delta rule": {"g": DType.F32, "beta": DType.BF16, "l2norm": True, "gate": Gate.SOFTPLUS, "A_log": DType.F32},
    "kda": {"gk": DType.BF16, "beta": DType.BF16, "dim_v": 40},
    "low rank, odd": {"delta": Delta.OLD, "read": DType.BF16, "write": DType.BF16, "gk": DType.F32, "state_loads": Loads.ELEMENT},
    "simple": {"delta": Delta.NONE, "g": DType.F32, "pool": PoolMode.SPLIT},
    "several": {"g": DType.F32, "beta": DType.BF16, "tokens": Tokens.MANY},
    "packed": {"g": DType.F32, "beta": DType.BF16, "tokens": Tokens.RAGGED, "cu_seqlens": Index.I32},
    "each": {"g": DType.F32, "beta": DType.BF16} | EACH,
}  # fmt: skip


def problem(state: Narrow, form: str) -> LinearAttentionProblem:
    return LinearAttentionProblem(**(SHAPE | {"state": state} | FORMS[form]))


@costly(2)
@needs_emulator
@pytest.mark.parametrize(
    ("state", "form"),
    [(Narrow.I8, form) for form in FORMS] + [(t, f) for t in (Narrow.I16, Narrow.E4M3) for f in ("low rank, odd", "several")],
)
def test_kernels_are_within_rounding_of_float64(state, form):
    for batch in (1, 100_000):  # as the rules have it for few heads, and for many
        spec = registry.select("linear_attention", problem(state, form), batch, SM90, True)
        assert check(spec, SM90).passed, spec


@costly(1)
@needs_emulator
@pytest.mark.parametrize("state", [Narrow.I8, Narrow.E4M3], ids=lambda t: t.value)
def test_variants_are_bit_equal(state):
    specs = [s for s in space(problem(state, "gated delta rule"), SM90) if not s.prefetch]
    random.Random(3).shuffle(specs)
    trials_are_bit_equal([*{(s.lanes, s.vec): s for s in specs}.values()][:5], 3)


B, H, V, K, SLOTS = 3, 2, 8, 32, 5
SLOT = torch.tensor([4, -1, 2])


def operands(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    made = {n: torch.randn(B, H, size, generator=g) for n, size in (("q", K), ("k", K), ("v", V))}
    made["k"] /= K**0.5
    return made | {"g": -torch.rand(B, H, generator=g), "beta": torch.rand(B, H, generator=g), "state_indices": SLOT}


@pytest.mark.parametrize("dtype", list(NARROW))
def test_a_step_is_that_of_f32_rounded(dtype):
    exact = torch.randn(SLOTS, H, V, K, generator=torch.Generator().manual_seed(5))
    state, scale = narrowed(exact, dtype)
    numbers, before, given = widened(state, scale, torch.float32), state.clone(), operands()
    want_out = ssmgen.gated_delta_rule(numbers, **given)
    out = ssmgen.gated_delta_rule(state, **given, state_scale=scale)
    assert torch.equal(out, want_out) and not out[1].any()
    want, want_scale = narrowed(numbers[[4, 2]], dtype)
    assert torch.equal(state[[4, 2]].float(), want.float()) and torch.equal(scale[[4, 2]], want_scale)
    assert torch.equal(state[[0, 1, 3]].float(), before[[0, 1, 3]].float())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state_scale": None}, "state is int8 and state_scale is None; expected a float32 scale for each row"),
        ({"state_scale": torch.ones(SLOTS, H, K)}, r"state_scale is \[5, 2, 32\]; expected \[slots, heads, V\] = \[5, 2, 8\]"),
        ({"state": torch.zeros(SLOTS, H, V, K)}, "; expected int16, int8 or float8_e4m3fn. Leave out state_scale"),
        (
            {"intermediate_states": torch.zeros(B, 1, H, V, K, dtype=torch.int8)},
            "intermediate_states is int8|intermediate_states is torch.int8",
        ),
    ],
)
def test_says_what_is_wrong(change, words):
    state = torch.zeros(SLOTS, H, V, K, dtype=torch.int8)
    given = operands() | {"state": state, "state_scale": torch.ones(SLOTS, H, V)} | change
    with pytest.raises(ArgumentError, match=words):
        ssmgen.gated_delta_rule(**given)
    assert not state.any()


def test_keys_first_states_are_not_served():
    wanted = LinearAttentionProblem(**SHAPE, state=Narrow.I8, g=DType.F32, beta=DType.F32, layout=Layout.KV)
    assert any(
        "; expected layout=vk, ring=none and intermediates=no with it" in reason
        for reason in registry.explain("linear_attention", wanted, 4, SM90, True).reasons
    )
