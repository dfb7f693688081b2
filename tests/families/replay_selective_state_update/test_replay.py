"""The replay functions without a GPU: the reference, runs of many steps, bookkeeping, errors, registration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import replay_runs as laws
import torch
from bits import same
from guarded_call import refused
from replay_cases import (
    BF16,
    BOUND,
    F16,
    F32,
    HISTORY,
    I32,
    I64,
    RAGGED,
    RING,
    STEP,
    Call,
    Case,
    assert_matches,
    at_shapes,
    bound_of,
    exact_outputs,
    expected,
    make,
    matrix,
)
from replay_runs import Run
from selection import costly
from varying import named, vary

import ssmgen
from ssmgen.engine.accuracy import norm_error
from ssmgen.engine.stochastic_reference import stored
from ssmgen.families.replay_selective_state_update.spec import ReplayProblem

BOTH = pytest.mark.parametrize("base", [STEP, RING], ids=lambda c: c.id)


def checked(case: Case, seed: int = 0) -> Call:
    call = make(case, "cpu", seed)
    want = expected(call)
    call.run()
    assert_matches(call, want)
    return call


# One step.


@costly(16)
@named(*matrix())
def test_reference_is_within_rounding_of_float64(case):
    checked(case)


@pytest.mark.matrix
@named(*[c for c in (*matrix(), *at_shapes()) if c.out != F32])
def test_exact_outputs_rounded_are_well_within_their_bound(case):
    """No kernel is nearer than they are: of outputs that a few large ones make up, their rounding alone may be off by more."""
    call = make(case, "cpu", sealed=False)
    rows = [row for exact in exact_outputs(call) for row in (exact if case.lengths else exact[None])]
    assert len(rows) == sum(T if case.lengths else 1 for slot, T in zip(call.slot_of, call.lengths(), strict=True) if slot >= 0)
    nearest = max(norm_error(row.to(case.out), row) for row in rows)
    assert nearest < 0.95 * bound_of(call, "out")


@BOTH
def test_every_count(base):
    laws.every_count_is_taken(replace(base, state=F16), "cpu")


def test_counts_out_of_range_are_none():
    """The outputs of one sequence on one state, at all invalid counts."""
    outs = []
    for count in (0, -1, 9, 2**31 - 1, -(2**31)):
        call = make(replace(STEP, batch=1, accepted=(count,)), "cpu")
        call.run()
        outs.append(call.kwargs["out"])
    assert all(same(outs[0], other) for other in outs[1:]) and outs[0].isfinite().all()


@BOTH
def test_a_sequence_without_tokens_touches_nothing(base):
    case = replace(base, lengths=(0, 0, 0, 0), arrivals=True, accepted=(5, 2))
    call = make(case, "cpu")
    call.run()
    assert not call.memory.untouched({}), "something was written"


@BOTH
def test_a_padded_sequence_gets_zeros_and_touches_nothing(base):
    case = replace(base, batch=3, arrivals=True)
    call = make(case, "cpu")
    call.kwargs["state_indices"].copy_(torch.tensor([-1, call.kwargs["state"].shape[0], 2**31 - 1]))
    call.run()
    assert not call.memory.untouched({"out": None, "state_indices": None}) and not call.kwargs["out"].any()


@pytest.mark.parametrize("seeds", ["one", "slots"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
def test_the_noise_is_of_the_seed_and_the_place_in_the_pool(dtype, seeds):
    """The state is the f32 state, rounded with the noise of its slot, not with the noise of its sequence."""
    call, wide = (make(replace(STEP, state=dtype, seeds=s, accepted=(3, 8)), "cpu") for s in (seeds, ""))
    exact = wide.kwargs["state"].float()
    call.run()
    wide.function(**wide.kwargs | {"state": exact})
    seed = call.kwargs["rand_seed"].tolist()
    for slot in (s for s in call.slot_of if s >= 0):
        want = stored(exact[slot], dtype, seed[slot if seeds == "slots" else 0], 10, slot)
        assert same(call.kwargs["state"][slot], want), f"slot {slot}"
        assert not same(want, stored(exact[slot], dtype, seed[slot if seeds == "slots" else 0] + 1, 10, slot))


# Many steps: outputs and states follow the accepted tokens, whatever the history was.

RUNS = [
    *vary(STEP, run={}, run_ragged=RAGGED, run_advance={"arrivals": True, "z": F32}, run_t8={"tokens": 8, "x": F32}, run_t1={"tokens": 1}),
    *vary(RING, run={}, run_ragged=RAGGED, run_advance={"arrivals": True, "z": F32}, run_w16={"window": 16, "tokens": 3, **RAGGED}),
    *vary(RING, run_t1={"tokens": 1, "arrivals": True}, run_t8={"tokens": 8}, run_advance_ragged={"arrivals": True, **RAGGED}),
]


@costly(2)
@named(*RUNS)
def test_twenty_steps_of_random_acceptance_equal_the_sequential_recurrence(case):
    laws.steps_equal_the_recurrence(replace(case, batch=5), "cpu")


def test_the_run_notices_one_token_too_many():
    """The comparison is worth something: the same run where one count is off by one."""
    run = Run(replace(STEP, batch=5), "cpu")
    run.step()
    assert run.out_error <= 1e-5
    changed = run.host["prev_num_accepted_tokens"]
    changed[changed > 0] -= 1
    run.kwargs["prev_num_accepted_tokens"].copy_(changed)
    run.materialized()
    assert run.state_error > 1e-3


@named(*vary(RING, seeds={"state": BF16}), *vary(STEP, seeds={"state": F16}))
def test_seeds_count_the_states_that_were_written(case):
    laws.seeds_count_the_states_that_were_written(case, "cpu")


@named(*vary(STEP, bf16={"state": BF16}), *vary(RING, f16={"state": F16}))
def test_materialize_gives_the_state_of_what_was_accepted_and_changes_nothing(case):
    run = Run(replace(case, batch=5), "cpu")
    run.step()  # which writes no state, so that the result is rounded once
    before = {n: t.clone() for n, t in run.kwargs.items() if isinstance(t, torch.Tensor)}
    states = run.materialized()
    assert run.state_error <= BOUND[case.state] + BOUND[F32] and states.dtype == case.state
    assert all(same(run.kwargs[n], t) for n, t in before.items())
    out = torch.full((len(run.slots), 2, *states.shape[1:]), float("nan"), dtype=states.dtype)
    assert run.materialized(out=out[:, 1]).data_ptr() == out[:, 1].data_ptr()
    assert same(out[:, 1], states) and out[:, 0].isnan().all()


def test_materialize_of_no_slot_is_zero():
    run = Run(replace(STEP, batch=5, tokens=3), "cpu")
    run.step()
    index = torch.tensor([-1, run.slots[0], 99, run.slots[1]], dtype=I32)
    names = ("state", *HISTORY, "prev_num_accepted_tokens", "cache_buf_idx")
    given = {n: run.kwargs[n] for n in names}
    some = ssmgen.materialize_selective_state(**given, state_indices=index, pad_slot_id=run.slots[1])
    every = ssmgen.materialize_selective_state(**given)
    assert not some[[0, 2, 3]].any() and same(some[1], every[run.slots[0]]) and some[1].any()


# Errors.

MATERIALIZE = ("state", *HISTORY, "prev_num_accepted_tokens", "cache_buf_idx", "ring_start", "state_indices", "pad_slot_id", "precision")


def bad(case: Case, change: dict[str, Any], function: Any = None) -> str:
    call = make(case, "cpu")
    if function is not ssmgen.materialize_selective_state:
        return call.refused(change)
    kwargs = {n: v for n, v in call.kwargs.items() if n in (*MATERIALIZE, "A", "max_tokens")}
    return refused(call.memory, function, kwargs, change)


SMALL = replace(STEP, id="small", batch=3)
PACKED = replace(STEP, id="packed", lengths=(3, 0, 4))
LONG = replace(RING, id="long", batch=3)
POOLED = ("state", *HISTORY, "cache_buf_idx", "prev_num_accepted_tokens")


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        (SMALL, {"state": None}, "state is a NoneType; expected a tensor"),
        (SMALL, {"state": lambda k: k["state"][0]}, "state is [4, 16, 32]; expected [slots, heads, headdim, d_state]"),
        (replace(SMALL, headdim=32), {"state": lambda k: k["state"].transpose(2, 3)}, "expected dense last three axes, [1024, 32, 1]"),
        (SMALL, {"state": lambda k: k["state"].double()}, "state is torch.float64; expected float32, float16 or bfloat16"),
        (SMALL, {"state": lambda k: k["state"][:1].expand(9, -1, -1, -1)}, "which overlap"),
        (SMALL, {"old_x": lambda k: k["old_x"][0]}, "old_x is [8, 4, 16]"),
        (SMALL, {"old_x": lambda k: k["old_x"][:, :4]}, "x has 5 tokens; expected at most W ="),
        (SMALL, {"old_x": lambda k: k["old_x"].float()}, "old_x is torch.float32; expected torch.bfloat16, the dtype of x"),
        (SMALL, {"old_x": lambda k: k["old_x"][:1].expand(9, -1, -1, -1)}, "two of its elements share memory"),
        (SMALL, {"old_B": lambda k: k["old_B"][:, :1]}, "old_B is [9, 1, 8, 2, 32]"),
        (SMALL, {"old_dt": lambda k: k["old_dt"].half()}, "old_dt is float16; expected float32"),
        (SMALL, {"old_dA_cumsum": None}, "old_dA_cumsum is None with cache_buf_idx; expected both. Pass old_dA_cumsum."),
        (SMALL, {"cache_buf_idx": lambda k: k["cache_buf_idx"].long()}, "cache_buf_idx is int64; expected int32"),
        (SMALL, {"cache_buf_idx": lambda k: k["cache_buf_idx"][::2]}, "cache_buf_idx is [5]"),
        (SMALL, {"prev_num_accepted_tokens": lambda k: torch.zeros(18, dtype=I32)[::2]}, "prev_num_accepted_tokens has stride "
            "2; expected 1"),
        (SMALL, {"x": lambda k: k["x"][0]}, "x is [5, 4, 16]; expected [batch, T, heads, headdim]"),
        (SMALL, {"x": lambda k: k["x"].float()}, "B is torch.bfloat16; expected torch.float32, the dtype of x"),
        (SMALL, {"B": lambda k: k["B"][:, :, :1]}, "B is [3, 5, 1, 32]; expected [batch, T, groups, d_state]"),
        (SMALL, {"dt": lambda k: torch.zeros(3, 5, 4, 16)}, "; expected headdim with stride 0 for its last axis. Pass dt"),
        (SMALL, {"A": lambda k: torch.zeros(4, 16, 32)}, "; expected one value per head, with stride 0 on the other axes"),
        (SMALL, {"A": None}, "A is None; expected a tensor"),
        (SMALL, {"D": lambda k: torch.zeros(4, 3)}, "D is [4, 3]; expected [heads, headdim] = [4, 16]"),
        (SMALL, {"z": lambda k: torch.zeros(3, 5, 4)}, "z is [3, 5, 4]; expected [batch, T, heads, headdim]"),
        (SMALL, {"out": lambda k: k["out"][:2]}, "out is [2, 5, 4, 16]"),
        (SMALL, {"out": lambda k: k["x"]}, "out overlaps x in memory"),
        (SMALL, {"out": lambda k: k["out"][:1].expand(3, -1, -1, -1)}, "out has strides"),
        (SMALL, {"state_indices": None, **{n: lambda k, n=n: k[n][:2] for n in POOLED}}, "state has 2 slots; expected 3, one per sequence"),
        (SMALL, {"state_indices": torch.zeros(4, dtype=I32)}, "state_indices is [4]; expected [batch] = [3]"),
        (SMALL, {"state_indices": torch.zeros(3)}, "state_indices is torch.float32; expected int32 or int64"),
        (SMALL, {"rand_seed": torch.zeros(9, dtype=I64)}, "rand_seed is given with a float32 state, which is not rounded; expected None"),
        (replace(SMALL, state=F16), {"rand_seed": torch.zeros(3, dtype=I64)}, "rand_seed is [3]; expected [1] or [slots] = [9]"),
        (replace(SMALL, state=F16), {"rand_seed": torch.zeros(9, dtype=I32)}, "rand_seed is int32; expected int64"),
        (replace(SMALL, state=F16, seeds="one"), {"philox_rounds": 11}, "philox_rounds is 11; expected 0 … 10"),
        (replace(SMALL, state=F16, seeds="one"), {"philox_rounds": 0}, "rand_seed is given and philox_rounds is 0; expected 1 … 10 rounds"),
        (SMALL, {"arrivals": torch.zeros(3, dtype=I32)}, "arrivals is [3]; expected [slots] = [9]"),
        (SMALL, {"precision": "tf32"}, "precision is 'tf32'; expected one of 'f32', 'bf16x2', 'bf16'"),
        (SMALL, {"pdl": "yes"}, "pdl is 'yes'"),
        (SMALL, {"dt_bias": lambda k: k["dt_bias"].requires_grad_()}, "dt_bias requires grad"),
        (SMALL, {"z": torch.zeros(3, 5, 4, 16, device="meta")}, "z is on meta, state is on cpu"),
        (PACKED, {"x": lambda k: k["x"][None]}, "x is [1, 9, 4, 16]; expected [tokens, heads, headdim]"),
        (PACKED, {"cu_seqlens": torch.zeros(3, dtype=I32)}, "state_indices is [3]; expected [batch] = [2]"),
        (PACKED, {"cu_seqlens": torch.zeros(4)}, "cu_seqlens is torch.float32; expected int32 or int64"),
        (LONG, {"ring_start": None}, "cache_buf_idx and ring_start are None; expected one of them"),
        (LONG, {"ring_start": torch.zeros(2, dtype=I32)}, "ring_start is [2]; expected [slots] = [9]"),
        (LONG, {"max_tokens": 4}, "x has 5 tokens; expected at most max_tokens ="),
        (LONG, {"max_tokens": 13}, "the ring has 13 entries for steps of 13 tokens; expected "),
        (LONG, {"old_B": lambda k: k["old_B"][:, :5]}, "old_B is [9, 5, 2, 32]"),
        (replace(LONG, lengths=(2, 3)), {"max_tokens": None}, "max_tokens is None with cu_seqlens; "
            "expected a number: the window is R - max_tokens"),
        (replace(LONG, window=33), {}, "the window has 33 entries; expected at most"),
        (replace(SMALL, window=33), {}, "the window has 33 entries; expected at most"),
        (replace(LONG, tokens=33), {}, "x has 33 tokens; expected at most"),
    ],
)  # fmt: skip
def test_bad_input(case, change, words, monkeypatch):
    if not change:  # the case itself is wrong, and is made all the same
        monkeypatch.setattr(Call, "__post_init__", lambda call: None)
    assert words in bad(case, change)


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        (SMALL, {"out": torch.zeros(3, 4, 16, 32, dtype=F16)}, "out is torch.float16; expected"),
        (SMALL, {"out": torch.zeros(3, 4, 16, 31)}, "out is [3, 4, 16, 31]; expected [batch, heads, headdim, d_state]"),
        (
            SMALL,
            {"out": torch.zeros(3, 4, 32, 16).transpose(2, 3)},
            "expected dense last three axes, [512, 32, 1]",
        ),
        (SMALL, {"out": lambda k: k["state"][:3]}, "out overlaps state in memory"),
        (SMALL, {"state_indices": torch.zeros(3)}, "state_indices is torch.float32"),
        (LONG, {"A": None}, "A is None; expected a tensor"),
    ],
)
def test_bad_input_of_materialize(case, change, words):
    assert words in bad(case, change, ssmgen.materialize_selective_state)


def test_everything_wrong_in_one_message():
    wrong = {
        "precision": "f64", "pdl": 3, "old_dt": lambda k: k["old_dt"].half(), "state_indices": torch.zeros(5), "D": torch.zeros(3, 3),
        "arrivals": torch.zeros(2), "rand_seed": torch.zeros(2), "C": lambda k: k["C"].float(), "old_dA_cumsum": None,
    }  # fmt: skip
    assert bad(SMALL, wrong).count("\n  - ") >= 9


def test_a_long_stride_is_refused():
    x = torch.empty_strided((3, 5, 4, 16), (2**33, 2**32, 16, 1), device="meta", dtype=BF16)
    assert "below 2^31" in bad(SMALL, {"x": x})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"d_state": 48}, "d_state is 48; expected 32 … 256 in steps of 32"),
        ({"d_state": 288}, "d_state is 288; expected 32 … 256 in steps of 32"),
        ({"headdim": 12}, "headdim is 12; expected a multiple of 8"),
        ({"ngroups": 3}, "nheads is 4; expected a multiple of ngroups 3"),
        ({"tokens": 40}, "tokens is 40 and window 8; expected multiples of 8, up to 32"),
        ({"window": 12}, "tokens is 8 and window 12; expected multiples of 8, up to 32"),
        ({"philox_rounds": 10}, "philox_rounds is 10 with an f32 state, which is not rounded; expected 0"),
        ({"terms": 4}, "terms is 4; expected 1 … 3"),
        ({"materialize": True, "advance": True}, "materialize is yes with advance, after_conv or two_kernels; expected none of them"),
        ({"headdim": 2**16, "d_state": 256, "nheads": 128}, "one slot of the state has 2^31 elements or more"),
    ],
)
def test_what_no_variant_serves(change, words):
    problem = ReplayProblem(d_state=32, headdim=16, nheads=4, ngroups=2)
    assert not problem.faults()
    assert any(words in fault for fault in replace(problem, **change).faults())
