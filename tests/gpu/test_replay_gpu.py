"""The replay functions on a card: against float64 at models' shapes, many steps, variants, far offsets, rounding, graphs."""

from __future__ import annotations

import random
from dataclasses import replace

import launch_laws
import pytest
import replay_runs as laws
import torch
from bits import same
from card_calls import arch, launch, prepare
from replay_cases import (
    BF16,
    F16,
    F32,
    HISTORY,
    I32,
    RAGGED,
    RING,
    SHAPES,
    STEP,
    Call,
    assert_matches,
    expected,
    make,
    shaped,
)
from replay_runs import Run
from varying import named, vary

from ssmgen.families.replay_selective_state_update import planning as op
from ssmgen.families.replay_selective_state_update import spec as family
from ssmgen.select import registry
from ssmgen.spec.kernel import KernelSpec

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BOTH = pytest.mark.parametrize("base", [STEP, RING], ids=lambda c: c.id)


def chosen(call: Call) -> KernelSpec:
    return registry.select(op.OPERATOR, call.problem, op.FAMILY.size_of(call.views), arch(), arch().number >= 90)


def equal(a: Call, b: Call) -> list[str]:
    """Names of results that differ."""
    return [n for n, t in a.results().items() if not same(t, b.results()[n])]


# Against float64. Outputs are f32, so that bits dropped by the tensor cores would show.


@pytest.mark.parametrize(("precision", "scale"), [("bf16x2", 2.0**4), ("bf16", 2.0**12)])
@BOTH
def test_fewer_terms_are_as_exact_as_they_say(base, precision, scale):
    """A product of f16 operands is off by 2^-16 or 2^-8 at most, which is 2^3 or 2^11 of the bound; and it is off by more than f32 is."""
    case = replace(base, tokens=6, x=F16, **shaped("h16"))
    call, exact = make(replace(case, precision=precision), DEVICE), make(case, DEVICE)
    want = expected(call)
    call.run()
    exact.run()
    assert_matches(call, want, scale)
    assert_matches(exact, want)
    with pytest.raises(AssertionError, match="is off by"):
        assert_matches(call, want)


@BOTH
def test_every_count(base):
    laws.every_count_is_taken(replace(base, state=BF16, **shaped("h16")), DEVICE)


RUNS = [
    *vary(STEP, run={}, run_ragged=RAGGED, run_advance={"arrivals": True, "z": F32}, run_t8={"tokens": 8, "x": F32}, run_t1={"tokens": 1}),
    *vary(STEP, run_t16={"tokens": 16, "window": 16, **RAGGED}, run_t32={"tokens": 32, "window": 32}, run_two={"two_kernels": True}),
    *vary(RING, run={}, run_ragged=RAGGED, run_advance={"arrivals": True, "z": F32}, run_w16={"window": 16, "tokens": 3, **RAGGED}),
    *vary(RING, run_t8={"tokens": 8}, run_advance_ragged={"arrivals": True, **RAGGED}, run_w32={"window": 32, "tokens": 6, **RAGGED}),
    *vary(RING, run_two={"two_kernels": True, "window": 16, "arrivals": True}),
]


@pytest.mark.parametrize("shape", SHAPES)
@named(*RUNS)
def test_twenty_steps_of_random_acceptance_equal_the_sequential_recurrence(case, shape):
    laws.steps_equal_the_recurrence(replace(case, batch=6, **shaped(shape)), DEVICE)


@named(*vary(STEP, seeds={"state": F16}), *vary(RING, seeds={"state": BF16}))
def test_seeds_count_the_states_that_were_written(case):
    laws.seeds_count_the_states_that_were_written(replace(case, **shaped("h16")), DEVICE)


@named(*vary(STEP, f32={}, bf16={"state": BF16}), *vary(RING, f32={}, f16={"state": F16}))
def test_materialize_equals_what_the_next_step_writes(case):
    """Bit for bit: both catch up with the same entries."""
    run = Run(replace(case, batch=5, window=8, tokens=8, **shaped("h16")), DEVICE)
    run.step()
    before = {n: t.clone() for n, t in run.kwargs.items() if isinstance(t, torch.Tensor)}
    states = run.materialized()
    assert all(same(run.kwargs[n], t) for n, t in before.items())
    counts = run.kwargs["prev_num_accepted_tokens"].tolist()
    x, dt, B, C = (torch.zeros(5, 8, *s, dtype=t, device=DEVICE) for s, t in (((16, 64), BF16), ((16,), BF16), *[((1, 128), BF16)] * 2))
    index = torch.tensor(run.slots, dtype=I32, device=DEVICE)[:5]
    given = {n: t[: len(index)] for n, t in {"x": x, "dt": dt, "B": B, "C": C}.items()}
    run.function(**run.kwargs | given | {"state_indices": index, "out": None})
    for i, slot in enumerate(index.tolist()):
        want = states[i] if counts[slot] else before["state"][slot]
        assert same(run.kwargs["state"][slot], want)


# Variants.

VARIED = [
    replace(STEP, id="step-bf16", state=BF16, tokens=6, z=BF16, **shaped("h16")),
    replace(STEP, id="step-f32-ragged", **RAGGED, **shaped("h24p80")),
    replace(STEP, id="step-t16-philox", state=F16, tokens=16, window=16, seeds="slots", arrivals=True, **shaped("h32g2")),
    replace(STEP, id="step-t32", state=BF16, tokens=32, window=32, **shaped("h16")),
    replace(RING, id="ring-advance", state=BF16, window=16, arrivals=True, seeds="one", **shaped("h16")),
    replace(STEP, id="by-group-bf16", state=BF16, out=BF16, tokens=6, z=BF16, **shaped("h16")),
    replace(STEP, id="by-group-f16-ragged", state=F16, out=BF16, **RAGGED, **shaped("h24p80")),
    replace(RING, id="by-group-philox-advance", state=BF16, out=F16, window=16, arrivals=True, seeds="slots", **shaped("h16")),
    replace(RING, id="ring-odd-f32", layout="odd", state_gap=3, **RAGGED, **shaped("h24p80")),
]


@named(*VARIED)
def test_variants_are_bit_equal(case):
    """One kernel and two, with all warps, helpers, bounds, prefetches and edges, with the convolution before them or not."""
    kinds = [{}, {"after_conv": True}, {"two_kernels": True}, {"two_kernels": True, "after_conv": True}]
    variants = []
    for i, kind in enumerate(kinds):
        specs = list(family.space(make(replace(case, **kind), DEVICE).problem, arch()))
        assert specs, f"no variant of {kind}"
        grouped = [spec for spec in specs if spec.by_group]
        picked = random.Random(i).sample(specs, min(8, len(specs))) + random.Random(i).sample(grouped, min(6, len(grouped)))
        picked += [spec for spec in specs if spec.prefetch_inputs][::4]
        variants += [(kind, spec) for spec in (*picked, chosen(make(replace(case, **kind), DEVICE)))]
    prepare([spec for _, spec in variants])
    want, first = expected(make(case, DEVICE)), None
    for kind, spec in variants:
        call = make(replace(case, **kind), DEVICE)
        launch(spec, op.FAMILY, call.views, call.options, call.operands)()
        torch.cuda.synchronize()
        first = first or call
        assert not equal(first, call), f"{spec} differs from {variants[0][1]} in {equal(first, call)}"
    assert_matches(first, want)


@BOTH
def test_batch_size_and_position_change_nothing(base):
    """The last sequence of 70, and the same one alone, for which other rules hold."""
    case = replace(base, batch=70, index=None, accepted=(3,), state=BF16, window=6, **shaped("h16"))
    call, alone = make(case, DEVICE), make(case, DEVICE)
    call.run()
    per_token = {n: alone.kwargs[n][69:] for n in ("x", "B", "C", "dt", "out")}
    index = torch.tensor([69], dtype=I32, device=DEVICE)
    alone.function(**alone.kwargs | per_token | {"state_indices": index})
    for name in ("out", "state", *(n for n in HISTORY if n in call.kwargs)):
        assert same(call.kwargs[name][69], alone.kwargs[name][69]), name


# Offsets above 2^31 elements.


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("gap", [2**30 + 64, 2**30 + 3], ids=["aligned", "odd"])
@pytest.mark.parametrize("name", ["state", "old_x", "old_B", "old_dt", "x", "B", "out"])
def test_far_apart(name, gap):
    """Slots or sequences: the last of three is beyond 2^31 elements, and the results equal those on dense tensors."""
    torch.cuda.empty_cache()
    case = replace(STEP, batch=3, index=None, accepted=(3, 0, 5), state=BF16, layout="odd" if gap % 2 else "slices", **shaped("h16"))
    near, call = make(case, DEVICE), make(case, DEVICE)
    dense = call.kwargs[name]
    strides = (gap, *(dense.stride()[1:] if name == "state" else torch.empty(dense.shape[1:], device="meta").stride()))
    extent = 1 + sum((n - 1) * s for n, s in zip(dense.shape, strides, strict=True))
    assert extent > 2**31
    far = torch.zeros(extent, dtype=dense.dtype, device=DEVICE).as_strided(dense.shape, strides)
    far.copy_(dense)
    near.run()
    call.function(**call.kwargs | {name: far})
    found = call.results() | ({name: far} if name in call.results() else {})
    assert not [n for n, t in near.results().items() if not same(t, found[n])]
    del far, found
    torch.cuda.empty_cache()


# Repetition, graphs, plans.


def test_ten_thousand_launches_are_equal():
    case = replace(STEP, state=BF16, seeds="slots", arrivals=True, batch=32, **shaped("h16"))
    cases = case, replace(case, ring=True), replace(case, two_kernels=True), replace(case, **RAGGED)
    launch_laws.launches_write_the_same_bits([make(c, DEVICE) for c in cases], 2500)


@BOTH
@pytest.mark.parametrize("two", [False, True], ids=["one", "two"])
def test_the_first_launch_may_be_in_a_graph(base, two):
    case = replace(base, x=F16, z=F32, D=F16, A=BF16, dt=F32, heads=12, groups=3, two_kernels=two)
    launch_laws.the_first_launch_may_be_in_a_graph("replay", case)
