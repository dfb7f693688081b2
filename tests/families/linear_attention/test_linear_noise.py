"""Stochastic rounding of linear attention's states: the bits of the noise, its mean, and refused calls; kernels through the emulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated_calls import SM90, emulate
from la_cases import BF16, F16, GDN, I32, make_call
from linear_noise_cases import CASES, ROUNDS, assert_rounded, seeded
from selection import costly

import ssmgen
from ssmgen import emulator
from ssmgen.emulator.check import check
from ssmgen.engine.narrow_reference import narrowed
from ssmgen.engine.recurrences.attention.problem import LinearAttentionProblem, Tokens
from ssmgen.errors import ArgumentError
from ssmgen.families.linear_attention.spec import space
from ssmgen.select import registry
from ssmgen.spec.kernel import DType, Index, Layout, Loads, Narrow, PoolMode, Ring, Update

emulated = pytest.mark.skipif(not emulator.available(), reason="needs g++")
pytestmark = pytest.mark.usefixtures("one_thread")


@costly(12)
@emulated
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_kernels_round_with_the_reference_s_noise(case):
    """Bit for bit the noise of `stored`, on the f32 state of the kernel without noise. Padding and unused slots stay."""
    assert_rounded(case, lambda function, given: emulate(function.build(**given)))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_the_reference_rounds_with_this_noise(case):
    assert_rounded(case, lambda function, given: function(**given))


@costly(2)
@emulated
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_variants_are_bit_equal(layout):
    """The noise depends on an element's place in the pool, not on the lanes that hold it."""
    case = replace(GDN, id="variants", heads=2, K=64, V=32, state=BF16, layout=layout)
    states, lanes = [], set()
    problem = replace(make_call(case, "cpu").problem, philox_rounds=ROUNDS)
    for spec in space(problem, SM90):
        if spec.prefetch or (spec.lanes, spec.vec, spec.ilp, spec.row_warps) in lanes or len(lanes) == 12:
            continue
        lanes.add((spec.lanes, spec.vec, spec.ilp, spec.row_warps))
        call = make_call(case, "cpu")
        emulate(call.function.build(**call.kwargs, **seeded(case, call.kwargs["state"].shape[0])), spec)
        states.append(call.kwargs["state"].view(torch.int16).clone())
    assert len(states) > 4 and all(torch.equal(states[0], other) for other in states)


@costly(2)
@emulated
@pytest.mark.parametrize("form", ["tree", "int8", "int16, each", "float8"])
def test_kernels_are_within_rounding_of_float64(form):
    tree = {"tokens": Tokens.MANY, "intermediates": True, "parents": Index.I32, "kept_index": Index.I32, "update": Update.NONE}
    each = {"tokens": Tokens.MANY, "update": Update.EACH, "pool": PoolMode.SPLIT}
    of = {"tree": tree, "int8": {"state": Narrow.I8}, "int16, each": each | {"state": Narrow.I16}, "float8": {"state": Narrow.E4M3}}
    shape: dict[str, Any] = {"dim_k": 64, "dim_v": 32, "nheads": 2, "key_heads": 1, "g": DType.F32, "beta": DType.BF16, "index": Index.I32}
    problem = LinearAttentionProblem(**shape | {"state": DType.BF16} | of[form], philox_rounds=10)
    assert check(registry.select("linear_attention", problem, 3, SM90, True), SM90).passed


# The mean.


@costly(2)
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("function", [ssmgen.gated_delta_rule, ssmgen.kda])
def test_a_step_is_unbiased(function, dtype):
    """The mean of a state over 2000 seeds is the f32 state, within five deviations of a mean of that many roundings."""
    n, H, V, K = 2000, 1, 4, 8
    g = torch.Generator().manual_seed(3)
    start = torch.randn(1, H, V, K, generator=g).to(dtype)
    q, k, v = (torch.randn(1, H, size, generator=g) for size in (K, K, V))
    decay = -torch.rand(1, H, *([K] if function is ssmgen.kda else []), generator=g) / 100
    given = {"q": q, "k": k / K, "v": v, "g": decay, "beta": torch.rand(1, H, generator=g)}
    exact = start.float()
    function(exact, **given)
    pool = start.repeat(n, 1, 1, 1)
    many = {name: t.expand(n, *t.shape[1:]) for name, t in given.items()}
    function(pool, **many, rand_seed=torch.arange(n), philox_rounds=10)
    step = torch.exp2(exact.abs().log2().floor()) * torch.finfo(dtype).eps
    error = (pool.double().mean(0) - exact[0].double()).abs() / step[0]
    assert (error < 5 * 0.5 / n**0.5).all()
    assert (pool != pool[:1]).any()  # seeds differ in their noise
    nearest = (exact.to(dtype).double() - exact.double()).abs() / step
    assert nearest.max() > 5 * 0.5 / n**0.5  # one rounding to nearest is not within that bound


def test_decay_near_one_moves_a_rounded_state():
    """A decay below half a unit in the last place never moves a bf16 state rounded to nearest. With noise its mean decays."""
    steps, n = 40, 128
    state, still = torch.ones(n, 1, 4, 4, dtype=BF16), torch.ones(n, 1, 4, 4, dtype=BF16)
    zero, g = torch.zeros(n, 1, 4), torch.full((n, 1), -1e-3)
    for step in range(steps):
        given = {"q": zero, "k": zero, "v": zero, "g": g, "beta": g * 0}
        ssmgen.gated_delta_rule(still, **given)
        ssmgen.gated_delta_rule(state, **given, rand_seed=torch.arange(n) * steps + step)
    assert (still == 1).all()
    assert abs(float(state.float().mean()) - float(torch.tensor(-1e-3 * steps).exp())) < 0.002


# Arguments.

B, H, V, K, SLOTS = 3, 2, 8, 32, 5


def operands(**change: Any) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    made: dict[str, Any] = {n: torch.randn(B, H, size, generator=g) for n, size in (("q", K), ("k", K), ("v", V))}
    made |= {"g": -torch.rand(B, H, generator=g), "beta": torch.rand(B, H, generator=g), "state_indices": torch.tensor([4, -1, 2])}
    return made | {"state": torch.zeros(SLOTS, H, V, K, dtype=BF16), "rand_seed": torch.tensor([3])} | change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state": torch.zeros(SLOTS, H, V, K)}, "rand_seed is given and no written state is rounded; expected one of float16"),
        ({"update_state": False}, "rand_seed is given and no written state is rounded"),
        ({"rand_seed": torch.tensor([3], dtype=I32)}, "rand_seed is int32; expected int64"),
        ({"rand_seed": torch.tensor([3, 4])}, r"rand_seed is \[2\]; expected \[slots\] = \[5\]"),
        ({"rand_seed": 3}, "rand_seed is a int; expected a tensor"),
        ({"philox_rounds": 33}, "philox_rounds is 33; expected 0 … 32"),
    ],
)
def test_says_what_is_wrong(change, words):
    given = operands(**change)
    with pytest.raises(ArgumentError, match=words):
        ssmgen.gated_delta_rule(**given)
    assert not given["state"].any()


def test_no_rounds_and_no_seed_round_to_nearest():
    states = []
    for change in ({"philox_rounds": 0}, {"rand_seed": None}, {"rand_seed": None, "philox_rounds": 3}):
        given = operands(**change)
        ssmgen.gated_delta_rule(**given)
        states.append(given["state"])
    noisy = operands()
    ssmgen.gated_delta_rule(**noisy)
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2]) and not torch.equal(states[0], noisy["state"])


def test_states_with_scales_take_noise_too():
    exact = operands(state=torch.zeros(SLOTS, H, V, K), rand_seed=None)
    ssmgen.gated_delta_rule(**exact)
    given = operands(state=torch.zeros(SLOTS, H, V, K, dtype=torch.int8), state_scale=torch.ones(SLOTS, H, V))
    ssmgen.gated_delta_rule(**given)
    for slot in (4, 2):
        want, scale = narrowed(exact["state"][slot], torch.int8, 3, 10, slot)
        assert torch.equal(given["state"][slot], want) and torch.equal(given["state_scale"][slot], scale)


PROBLEM = LinearAttentionProblem(
    dim_k=64, dim_v=32, nheads=2, key_heads=1, g=DType.F32, beta=DType.BF16, state=DType.BF16, philox_rounds=10
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state": DType.F32}, "philox_rounds is 10 and no written state is rounded"),
        ({"dim_k": 66, "state_loads": Loads.ELEMENT, "operand_loads": Loads.ELEMENT}, "dim_k is 66 with philox_rounds 10"),
        ({"layout": Layout.KV, "dim_v": 30, "state_loads": Loads.ELEMENT}, "heads are 64 x 30, keys first, with philox_rounds 10"),
        ({"ring": Ring.COMMIT, "tokens": Tokens.MANY, "accepted": Index.I32, "q": None}, "a commit rounds to nearest"),
    ],
)
def test_problems_without_a_variant(change, words):
    assert any(words in fault for fault in replace(PROBLEM, **change).faults())
