"""How causal_conv1d and causal_conv1d_update are launched on a card: far offsets, repetition, graphs, plans, dependent launches."""

from __future__ import annotations

from dataclasses import replace

import launch_laws as laws
import pytest
import torch
from card_calls import arch, far, launch, needs_pdl, waits_for_its_producer
from conv_cases import BF16, FIRST, I64, LAST, POOL, ROLL, SHORT, STATEFUL, UpdateCase, make
from conv_laws import LAST_AXIS, Draw, equal
from ssu_cases import F16, F32
from varying import named

import ssmgen
from ssmgen.errors import ArgumentError
from ssmgen.select import registry

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
forward, update = ssmgen.causal_conv1d, ssmgen.causal_conv1d_update


# Offsets above 2^31 elements.


@pytest.mark.parametrize("gap", [2**30 + 64, 2**30 + 3], ids=["aligned", "odd"])
@LAST_AXIS
def test_pool_above_2_31_elements(last, gap, room):
    draw = Draw(DEVICE, BF16, last)
    inner = (1, draw.dim) if last else (3, 1)
    pool, near = far((3, draw.dim, 3), (gap, *inner)), draw.states(3)
    slots, has = draw.ints([2, 0], I64), torch.tensor([True, True], device=DEVICE)
    pool.copy_(near)
    starts = draw.ints([0, 2, 40])
    x = draw.tokens(length=40)
    options = {"query_start_loc": starts, "conv_state_indices": slots, "has_initial_state": has}
    assert equal(forward(x, *draw.weights, conv_states=pool, **options), forward(x, *draw.weights, conv_states=near, **options))
    assert equal(pool, near)
    for tokens in (1, 3):
        x = draw.tokens(2, length=tokens)
        got, want = (update(x, state, *draw.weights, "silu", conv_state_indices=slots) for state in (pool, near))
        assert equal(got, want) and equal(pool, near)
    got, want = (
        update(x[..., 0], state, *draw.weights, conv_state_indices=slots, cache_seqlens=draw.ints([5, 7])) for state in (pool, near)
    )
    assert equal(got, want) and equal(pool, near)


@LAST_AXIS
def test_batches_above_2_31_elements_apart(last, room):
    draw = Draw(DEVICE, BF16, last)
    inner = (1, draw.dim) if last else (40, 1)
    x, out = (far((2, draw.dim, 40), (2**31 + 64, *inner)) for _ in range(2))
    x.copy_(draw.tokens(2, length=40))
    near = x.contiguous() if not last else x.transpose(1, 2).contiguous().transpose(1, 2)
    assert equal(forward(x, *draw.weights, out=out), forward(near, *draw.weights))
    state = draw.states(2)
    kept = state.clone()
    assert equal(update(x[..., :3], state, *draw.weights, out=out[..., :3]), update(near[..., :3], kept, *draw.weights))
    assert equal(state, kept)


@pytest.mark.parametrize("kind", ["tokens", "channels", "elements"])
def test_tokens_above_2_31_elements_apart(kind, room):
    """Far tokens of neighbouring channels, far channels of neighbouring tokens, and far distances in both."""
    draw = Draw(DEVICE, BF16, kind != "channels")
    length = 600
    strides = {"tokens": (1, 2**22), "channels": (2**31 // 20, 1), "elements": (3, 2**22 + 1)}[kind]
    x, starts = far((draw.dim, length), strides), draw.ints([0, 530, 530, length])
    x.copy_(draw.tokens(length=length))
    near = draw.tokens(length=length).copy_(x)
    out = far((draw.dim, length), strides)
    packed = {"query_start_loc": starts, "initial_states": draw.states(3), "return_final_states": True}
    for options in ({}, packed):
        lead = (lambda t: t) if options else (lambda t: t[None])
        got, want = forward(lead(x), *draw.weights, **options, out=lead(out)), forward(lead(near), *draw.weights, **options)
        assert all(equal(a, b) for a, b in zip(got, want, strict=True))
    if kind != "channels":
        state = draw.states(3)
        kept = state.clone()
        got = update(x.t(), state, *draw.weights, query_start_loc=starts, out=out.t())
        assert equal(got, update(near.t(), kept, *draw.weights, query_start_loc=starts)) and equal(state, kept)


# Repetition, graphs, streams.


def test_ten_thousand_launches_are_equal():
    cases = replace(LAST, id="l", lengths=SHORT, **POOL), replace(FIRST, id="f", **STATEFUL), UpdateCase("u")
    laws.launches_write_the_same_bits([make(case, DEVICE) for case in cases], 10_000)


FRESH = {"x": F32, "weight": F16, "bias": F16, "width": 5}  # dtypes that no other test has


@named(
    *[replace(LAST, id="last", **FRESH, **STATEFUL), replace(FIRST, id="first", **FRESH), UpdateCase("update", **FRESH)],
    *[replace(LAST, id="last-pool", lengths=SHORT, **POOL, **FRESH | {"width": 6}), UpdateCase("tokens", tokens=2, **FRESH | {"width": 6})],
    UpdateCase("roll", ROLL, tokens=4, **FRESH | {"width": 7}),
)
def test_the_first_launch_may_be_in_a_graph(case):
    laws.the_first_launch_may_be_in_a_graph("causal_conv1d", case)


@pytest.mark.parametrize("case", [FIRST, UpdateCase("u", tokens=2)], ids=["forward", "update"])
def test_a_call_like_one_before_is_looked_at_again(case):
    laws.a_call_like_one_before_is_looked_at_again("causal_conv1d", case, shifted="x")
    if case is FIRST:
        call = make(case, DEVICE)
        with pytest.raises(ArgumentError, match="out overlaps x"):
            call.function(**call.kwargs | {"out": call.kwargs["x"]})


# Programmatic dependent launch.


def chain(pdl: bool, last: bool) -> list[torch.Tensor]:
    """A forward and updates that continue from its final states. Each update reads the output of the one before."""
    draw = Draw(DEVICE, BF16, last, dim=512)
    out, state = forward(draw.tokens(4, length=100), *draw.weights, activation="silu", return_final_states=True, pdl=pdl)
    x, outs = out[..., -1].clone(), [out]
    for _ in range(12):
        x = update(x, state, *draw.weights, "silu", pdl=pdl)
        outs.append(x)
        out, state = forward(x[..., None], *draw.weights, initial_states=state, return_final_states=True, pdl=pdl)
        outs.append(out)
    torch.cuda.synchronize()
    return [*outs, state]


@needs_pdl
@LAST_AXIS
def test_pdl_on_and_off_are_bit_equal_on_a_chain(last):
    laws.pdl_changes_no_bit(lambda pdl: chain(pdl, last))


@needs_pdl
@named(
    replace(FIRST, id="first", **STATEFUL),
    replace(FIRST, id="first-packed", lengths=(3, 300, 9), pool=True),
    replace(LAST, id="last", **STATEFUL),
    replace(LAST, id="last-packed", lengths=(3, 50, 9), pool=True),
    UpdateCase("update", index=None),
    UpdateCase("update-channels", index=None, state="channels", tokens=3, extra=2),
)
def test_pdl_waits_for_a_producer_that_triggers_early(case):
    """The upstream kernel still writes x when this one starts. Without its wait this kernel reads too early."""
    call = make(case, DEVICE)
    spec = registry.select(call.op.OPERATOR, call.problem, call.op.FAMILY.size_of(call.views), arch(), True)
    hasty = launch(spec, call.op.FAMILY, call.views, call.options, call.operands, hasty=spec.kernels)
    state = next(n for n in ("conv_states", "conv_state", "final_states") if n in call.views)
    kept, written = make(call.case, DEVICE).views[state], call.memory.buffers["x"][0]
    waits_for_its_producer(lambda pdl: call.run(pdl=pdl), hasty, written, call.views[state], call.kwargs["out"], kept)
