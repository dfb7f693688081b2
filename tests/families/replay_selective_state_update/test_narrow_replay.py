"""Replay on states in fewer bits: kernels, emulated, against float64; and steps through the public functions on the CPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from emulated_calls import SM90, needs_emulator, run_as_emulated
from narrow_cases import RINGED, assert_rounded_once, bits, caught_up, ringed, ringed_tokens, trials_are_bit_equal
from selection import costly
from torch import Tensor

import ssmgen
from ssmgen.calls.checks import NARROW
from ssmgen.compat.flashinfer import checkpointing_ssu
from ssmgen.emulator.check import check
from ssmgen.engine.narrow_reference import widened
from ssmgen.errors import ArgumentError
from ssmgen.families.replay_selective_state_update.problem import History, ReplayProblem
from ssmgen.families.replay_selective_state_update.spec import space
from ssmgen.select import registry
from ssmgen.spec.kernel import DType, Index, Loads, Narrow

H, P, N, _, R, T, SLOTS = RINGED
pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = {"nheads": 2, "headdim": 32, "d_state": 64, "ngroups": 1, "D": DType.BF16, "dt_bias": DType.BF16, "index": Index.I32}
RING = {"history": History.RING, "window": 16}
FORMS = {
    "ring": RING, "step": {"z": DType.BF16}, "two kernels": {"two_kernels": True}, "noise": RING | {"philox_rounds": 4, "advance": True},
    "materialize": {"materialize": True, "out": DType.F32}, "odd": {"headdim": 40, "state_loads": Loads.ELEMENT, "d_state": 32},
}  # fmt: skip


def problem(state: Narrow, form: str) -> ReplayProblem:
    return ReplayProblem(**(SHAPE | {"state": state} | FORMS[form]))


@costly(3)
@needs_emulator
@pytest.mark.parametrize(
    ("state", "form"), [(Narrow.I8, form) for form in FORMS] + [(t, f) for t in (Narrow.I16, Narrow.E4M3) for f in ("noise", "odd")]
)
def test_kernels_are_within_rounding_of_float64(state, form):
    for batch in (1, 4000):  # as the rules have it for few heads, and for many
        spec = registry.select("replay_selective_state_update", problem(state, form), batch, SM90, True)
        assert check(spec, SM90, batch=5).passed, spec


@costly(1)
@needs_emulator
@pytest.mark.parametrize("state", [Narrow.I8, Narrow.I16], ids=lambda t: t.value)
def test_variants_leave_the_same_bits(state):
    specs = [s for s in space(replace(problem(state, "ring"), philox_rounds=3), SM90) if not s.prefetch and not s.min_blocks]
    random.Random(2).shuffle(specs)
    trials_are_bit_equal([*{(s.warps, s.helpers): s for s in specs}.values()][:4], 4)


@needs_emulator
@pytest.mark.parametrize("dtype", list(NARROW))
def test_a_state_that_is_written_is_rounded_once(dtype, monkeypatch):
    """The error is half a step from float64, plus the error of f32 arithmetic. Tokens are f32: all their bits count against a step of
    int16."""
    run_as_emulated(monkeypatch)
    call = ringed(dtype, 1)
    for i, count in enumerate((2, 3, 5)):
        call |= ringed_tokens(20 + i)
        call["prev_num_accepted_tokens"].fill_(count)
        exact, before = caught_up(call), call["state"].clone()
        checkpointing_ssu(**call)
        if count + 2 * T > R:
            assert_rounded_once(call, exact)
        else:
            assert torch.equal(bits(call["state"]), bits(before))


@pytest.mark.parametrize("dtype", list(NARROW))
def test_steps_are_those_of_a_recurrence_that_rounds_where_the_state_is_written(dtype):
    call, pick = ringed(dtype), random.Random(0)
    exact = {slot: widened(call["state"][slot], call["state_scale"][slot], torch.float64) for slot in (3, 0, 4)}
    history: dict[int, list] = {slot: [] for slot in exact}
    for i in range(12):
        call |= ringed_tokens(10 + i)
        checkpointing_ssu(**call)
        for row, slot in enumerate(exact):
            count, stored = pick.randint(0, T), None
            if len(history[slot]) + 2 * T > R:
                for token in history[slot]:
                    exact[slot] = after(exact[slot], *token)
                got = widened(call["state"][slot], call["state_scale"][slot], torch.float64)
                most = exact[slot].abs().amax(-1, keepdim=True)
                step = exact[slot].abs() / 8 + most / 2**14 if dtype == torch.float8_e4m3fn else most / NARROW[dtype].largest
                assert ((got - exact[slot]).abs() <= 0.51 * step + 1e-6 * most).all()
                stored, history[slot] = got, []
                call["ring_start"][slot] = (call["ring_start"][slot] + call["prev_num_accepted_tokens"][slot]) % R
                call["prev_num_accepted_tokens"][slot] = 0
            new = [(call["x"][row, t], call["dt"][row, t, :, 0], call["A"], call["B"][row, t]) for t in range(T)]
            S = exact[slot]  # as it was before it was rounded, where it was written
            for t, token in enumerate([*history[slot], *new]):
                S = after(S, *token)
                if t >= len(history[slot]):
                    at = t - len(history[slot])
                    assert torch.allclose(call["out"][row, at].double(), (S * call["C"][row, at].double()).sum(-1), rtol=1e-4, atol=1e-4)
            history[slot] += new[:count]
            exact[slot] = exact[slot] if stored is None else stored
            call["prev_num_accepted_tokens"][slot] += count


def after(S: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor) -> Tensor:
    return S * (dt * A).double().exp()[:, None, None] + (dt[:, None] * x).double()[..., None] * B.double()


def test_materialized_states_are_numbers():
    call = ringed(torch.int8)
    given = {n: call[n] for n in ("state", "state_scale", "ring_start", "prev_num_accepted_tokens")}
    given |= {"old_x": call["x_cache"].transpose(1, 2), "old_B": call["B_cache"].transpose(1, 2), "old_dt": call["dt_cache"]}
    found = ssmgen.materialize_selective_state(**given, A=call["A"], max_tokens=T)
    assert found.dtype == torch.float32 and torch.equal(found, widened(call["state"], call["state_scale"], torch.float32))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state_scale": None}, "state is int8 and state_scale is None; expected a float32 scale for each row"),
        ({"state_scale": torch.ones(SLOTS, H)}, r"state_scale is \[5, 2\]; expected \[slots, heads, headdim\]"),
        ({"state_scale": torch.ones(SLOTS, H, P).double()}, "state_scale is float64; expected float32"),
    ],
)
def test_says_what_is_wrong(change, words):
    call = ringed(torch.int8)
    before = call["state"].clone()
    with pytest.raises(ArgumentError, match=words):
        checkpointing_ssu(**call | change)
    assert torch.equal(call["state"], before)
