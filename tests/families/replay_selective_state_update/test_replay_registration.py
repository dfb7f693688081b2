"""Replay: operands that a call allocates, and calls that are answered without a launch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bits import same
from replay_cases import BF16, F16, F32, HISTORY, KEPT, RING, STEP, make
from replay_runs import Run

import ssmgen
from ssmgen.errors import ArgumentError, UnsupportedError
from ssmgen.families.replay_selective_state_update import planning as op
from ssmgen.families.replay_selective_state_update.spec import History, ReplayProblem
from ssmgen.select import registry
from ssmgen.spec.kernel import Arch, DType, Index

SMALL = replace(STEP, id="small", batch=3)


def test_two_kernels_on_a_cpu_are_the_reference():
    one, two = make(SMALL, "cpu"), make(replace(SMALL, two_kernels=True), "cpu")
    one.run()
    two.run()
    assert all(same(a, b) for a, b in zip(one.results().values(), two.results().values(), strict=True))


def test_two_kernels_allocate_what_is_between_them():
    call = make(replace(SMALL, out=SMALL.x, two_kernels=True), "cpu")
    made = call.function.build(**call.kwargs | {"out": None})
    x, (mix, sums) = call.kwargs["x"], made.given[-2:]
    assert made.result.shape == x.shape and mix.dtype == sums.dtype == F32
    assert mix.shape == (x.shape[0], x.shape[2], call.problem.tokens, call.problem.tokens + call.problem.window)
    assert sums.shape == mix.shape[:3]
    with pytest.raises(ArgumentError, match="x is None; expected a tensor"):
        call.function(**call.kwargs | {"x": None})


def test_out_is_allocated_like_x():
    call = make(replace(SMALL, out=BF16), "cpu")
    out = call.function(**call.kwargs | {"out": None})
    assert out.shape == call.kwargs["x"].shape and out.dtype == BF16 and out.is_contiguous()
    again = make(replace(SMALL, out=BF16), "cpu")
    assert again.run() is again.kwargs["out"] and same(again.kwargs["out"], out)


# The kernel that serves a call.


def test_explain_of_a_call_without_a_gpu():
    call = make(replace(SMALL, state=BF16, z=F16), "cpu")
    spec = ssmgen.explain(call.function, **call.kwargs, arch="sm_90a").chosen.spec
    assert (spec.d_state, spec.headdim, spec.nheads, spec.ngroups, spec.tokens, spec.window) == (32, 16, 4, 2, 8, 8)
    assert (spec.state, spec.x, spec.z, spec.out) == (DType.BF16, DType.BF16, DType.F16, DType.F32)
    assert spec.history.value == "step" and not spec.materialize and spec.terms == 3
    run = Run(replace(RING, batch=3), "cpu")
    given = {n: run.kwargs[n] for n in ("state", *HISTORY[:3], "prev_num_accepted_tokens", "ring_start", "A")}
    spec = ssmgen.explain(ssmgen.materialize_selective_state, **given, max_tokens=5, arch="sm_80").chosen.spec
    assert spec.materialize and spec.history.value == "ring" and spec.window == 8


def test_supported():
    call = make(SMALL, "cpu")
    assert ssmgen.supported(call.function, **call.kwargs, arch="sm_80") == (True, [])
    yes, reasons = ssmgen.supported(call.function, **call.kwargs, arch="sm_75")
    assert not yes and any("arch is sm_75; expected sm_80 or later for bf16 arithmetic" in reason for reason in reasons)
    yes, reasons = ssmgen.supported(call.function, **call.kwargs | {"precision": "f8", "pdl": 7}, arch="sm_90a")
    assert not yes and len(reasons) == 2
    odd = make(replace(SMALL, d_state=48), "cpu")
    yes, reasons = ssmgen.supported(odd.function, **odd.kwargs, arch="sm_90a")
    assert not yes and any("d_state is 48; expected 32" in reason for reason in reasons)
    with pytest.raises(UnsupportedError):
        registry.select(op.OPERATOR, odd.problem, 3, Arch.parse("sm_90a"), True)


def test_results_name_all_that_may_be_written():
    call = make(replace(STEP, state=BF16, seeds="slots", arrivals=True), "cpu")
    assert set(call.results()) == {n for n in op.FAMILY.written if n in call.views} and set(KEPT) - {"ring_start"} < set(call.results())


def test_large_batches_have_their_inputs_asked_for_ahead():
    """Steps of bf16 states without a gate prefetch their inputs from 4096 heads on: the measured rule."""
    plain = ReplayProblem(d_state=128, headdim=64, nheads=16, ngroups=1, index=Index.I32, state=DType.BF16)
    others = {"z": DType.BF16}, {"state": DType.F32}, {"cu_seqlens": Index.I32}, {"history": History.RING, "window": 16}
    calls = [(plain, 255), (plain, 256), *((replace(plain, **more), 256) for more in others)]
    ahead = [registry.select(op.OPERATOR, problem, batch, Arch.parse("sm_90a"), True).prefetch_inputs for problem, batch in calls]
    assert ahead == [False, True, False, False, False, False]
