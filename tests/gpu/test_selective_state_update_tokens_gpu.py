"""selective_state_update of several tokens, and stochastic rounding, on a card."""

from __future__ import annotations

from dataclasses import replace

import launch_laws
import pytest
import ssu_token_cases
import torch
from bits import bits, same
from decode_cases import tokens_equal_single_steps
from ssu_cases import BF16, F16, F32, ulp
from ssu_token_cases import Case, make_call, matrix
from torch import Tensor

import ssmgen
from ssmgen.engine.stochastic_reference import philox, stored
from ssmgen.launch import runtime
from ssmgen.select.catalog import OPERATOR_OF, OPERATORS

pytestmark = pytest.mark.gpu

I32, I64 = torch.int32, torch.int64
SMALL = {"heads": 4, "groups": 2, "headdim": 64, "d_state": 128, "index": None, "batch": 3, "out": F32}


def written(call) -> list[Tensor]:
    return [call.kwargs[n] for n in ("state", "out", "intermediate_states") if n in call.kwargs]


@pytest.mark.parametrize("name", ["t4-bf16", "tree-f32", "ragged-each", "noisy-kept", "noisy-f16"])
def test_pdl_changes_nothing(name):
    case = next(c for c in matrix() if c.id == name)
    results = []
    for pdl in (False, True, True):
        call = make_call(case, "cuda")
        for _ in range(4):
            ssmgen.selective_state_update(**call.kwargs, pdl=pdl)
        results.append([bits(t).clone() for t in written(call)])
        assert all(torch.equal(a, b) for a, b in zip(results[-1], results[0], strict=True))


@pytest.mark.parametrize(
    "case",
    [
        Case("f32-kept", **SMALL, tokens=9, kept=F32, z=True), Case("n96-tree", **SMALL | {"d_state": 96}, kept=F16, parents=I32),
        Case("noisy", **SMALL, state=F16, kept=BF16, seed="slots"), Case("noisy-one", **SMALL, tokens=None, state=BF16, seed="slots"),
    ],
    ids=lambda c: c.id,
)  # fmt: skip
def test_variants_are_bit_equal(case):
    call = make_call(case, "cuda")
    operator = OPERATORS[OPERATOR_OF[type(call.problem)]]
    specs = list(operator.space(call.problem, runtime.device_arch(torch.cuda.current_device())))
    layouts = {(s.lanes, s.vec): s for s in specs}
    launch_laws.variants_are_bit_equal("several_tokens", case, [*layouts.values(), *launch_laws.some(specs, 20)])
    assert len(layouts) > 1


@pytest.mark.parametrize("case", [Case("gate", z=True), Case("bare", D=False, dt_bias=False, softplus=False, x=F16)], ids=lambda c: c.id)
def test_token_t_equals_single_steps(case):
    case = replace(case, **SMALL, tokens=17, kept=F32)
    tokens_equal_single_steps(ssu_token_cases, case, ssu_token_cases.one_token, "cuda", lambda call: call.run())


@pytest.mark.parametrize("name", ["t4-no-update", "tree-t9", "t4-kept-f32-of-bf16", "noisy-kept-only"])
def test_a_pool_that_is_not_updated_keeps_its_bits(name):
    call = make_call(next(c for c in matrix() if c.id == name), "cuda")
    before = bits(call.kwargs["state"]).clone()
    call.run()
    assert torch.equal(bits(call.kwargs["state"]), before)


@pytest.mark.usefixtures("room")
def test_states_and_intermediates_above_2_31_elements():
    """Uses the last slot of a pool, and the last row of a buffer, each with more than 2^31 elements."""
    H, P, N, T = 128, 64, 128, 3
    slots = 2**31 // (H * P * N) + 3
    call = make_call(Case("c", heads=H, groups=8, tokens=T, batch=1, index=None, state=BF16, kept=BF16, seed="one"), "cuda")
    small = call.kwargs
    pool = torch.zeros(slots, H, P, N, dtype=BF16, device="cuda")
    kept = torch.zeros(slots // T + 2, T, H, P, N, dtype=BF16, device="cuda")
    pool[slots - 1] = small["state"][0]
    plain = {n: v for n, v in small.items() if n not in ("rand_seed", "philox_rounds")}
    last = torch.tensor([slots - 1], device="cuda"), torch.tensor([len(kept) - 1], device="cuda")
    big = plain | {"state": pool, "intermediate_states": kept, "state_indices": last[0], "intermediate_state_indices": last[1]}
    ssmgen.selective_state_update(**plain)
    out = small["out"].clone()
    ssmgen.selective_state_update(**big)
    assert same(out, small["out"]) and same(pool[-1], small["state"][0]) and same(kept[-1], small["intermediate_states"][0, :T])
    assert not pool[:-1].any() and not kept[:-1].any()


# Stochastic rounding.


@pytest.mark.parametrize("name", ["noisy-bf16", "noisy-f16", "noisy-each", "noisy-kept", "noisy-odd", "noisy-ragged"])
@pytest.mark.parametrize("seed", [0, 42, 123456, 2**31 - 1])
def test_noise_is_that_of_the_seed_and_the_element(name, seed):
    """Bit for bit: the f32 states of the same call without noise, rounded by the reference."""
    case = next(c for c in matrix() if c.id == name)
    call, plain = make_call(case, "cuda"), make_call(replace(case, seed="", state=F32, kept=F32 if case.kept else None), "cuda")
    plain.kwargs["state"].copy_(call.kwargs["state"])
    call.kwargs["rand_seed"].fill_(seed)
    call.run()
    plain.run()
    for s in call.sequences:
        for slot in s.targets.values():
            assert same(call.kwargs["state"][slot], stored(plain.kwargs["state"][slot], case.state, seed, case.rounds, slot))
        columns = call.kwargs["intermediate_states"].shape[1] if case.kept else 0
        for t in range(min(s.tokens, columns) if s.slot >= 0 and s.kept >= 0 else 0):
            exact = plain.kwargs["intermediate_states"][s.kept, t]
            assert same(call.kwargs["intermediate_states"][s.kept, t], stored(exact, case.kept, seed, case.rounds, s.slot, 1 + t))


@pytest.mark.parametrize("rounds", [1, 4, 10])
def test_philox_is_triton_s(rounds):
    triton = pytest.importorskip("triton")
    import triton.language as tl

    @triton.jit
    def draw(seed, counters, out, n_rounds: tl.constexpr):
        i = tl.arange(0, 64)
        a, b, c, d = tl.randint4x(tl.load(seed), tl.load(counters + i), n_rounds)
        tl.store(out + 4 * i, a.to(tl.int64))
        tl.store(out + 4 * i + 1, b.to(tl.int64))
        tl.store(out + 4 * i + 2, c.to(tl.int64))
        tl.store(out + 4 * i + 3, d.to(tl.int64))

    counters = torch.cat([torch.arange(0, 128, 4), 2**32 - 64 + torch.arange(0, 64, 4), 5 * 2**40 + torch.arange(0, 64, 4)]).cuda()
    for seed in (0, 42, 123456, 2**31 - 1):
        out = torch.zeros(64, 4, dtype=I64, device="cuda")
        draw[(1,)](torch.tensor([seed], device="cuda"), counters, out, rounds)
        assert torch.equal(out & 0xFFFFFFFF, torch.stack(philox(seed, counters, rounds), -1))


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("scale", [1.0, 2.0**-17, 2.0**-22], ids=["normal", "mixed", "subnormal"])
def test_unbiased(dtype, scale):
    """2^22 elements of states, each an x times a B, which f32 holds: the mean error fits the sum of that number of roundings."""
    B, H, P, N = 8, 64, 64, 128
    g = torch.Generator("cuda").manual_seed(1)
    x, b = torch.randn(B, H, P, device="cuda", generator=g), scale * torch.randn(B, 1, N, device="cuda", generator=g)
    state, ones = torch.zeros(B, H, P, N, device="cuda", dtype=dtype), torch.ones(B, H, device="cuda")
    ssmgen.selective_state_update(state, x, ones, -ones[0], b, b, rand_seed=torch.arange(B, device="cuda"))
    exact = x[..., None] * b[:, :, None]
    step = ulp(exact.double(), dtype)
    error = (state.double() - exact.double()) / step
    assert error.abs().max() < 1
    for signed in (error, error * exact.sign()):
        assert abs(float(signed.mean())) < 5 * 0.5 / state.numel() ** 0.5


def test_a_graph_draws_fresh_noise_when_its_seed_changes():
    call = make_call(Case("c", **SMALL, tokens=2, state=BF16, seed="one", kept=BF16, update=False), "cuda")
    ssmgen.warm(ssmgen.selective_state_update, **call.kwargs)
    graph, kept, seed = torch.cuda.CUDAGraph(), call.kwargs["intermediate_states"], call.kwargs["rand_seed"]
    with torch.cuda.graph(graph):
        ssmgen.selective_state_update(**call.kwargs)
    results = []
    for value in (1, 1, 2):
        seed.fill_(value)
        graph.replay()
        results.append(kept.clone())
    assert same(results[0], results[1]) and not same(results[0], results[2])
