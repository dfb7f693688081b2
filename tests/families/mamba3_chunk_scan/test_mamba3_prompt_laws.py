"""The laws of mamba3_chunk_scan's reference, in float64, and its calls on CPU tensors."""

from __future__ import annotations

import math

import mamba3_prompt_cases as cases
import pytest
import torch
from mamba3_cases import POOLS
from mamba3_prompt_cases import INITIAL, NAN, Call, cut, exact, make, starts_of, states
from torch import Tensor

import ssmgen
from ssmgen.engine.recurrences.mamba3.problem import Rotary
from ssmgen.errors import ArgumentError
from ssmgen.families.chunk_scan import call as mamba2
from ssmgen.families.mamba3_state_update import planning as step

pytestmark = pytest.mark.usefixtures("one_thread")


def near(a: Tensor, b: Tensor, bound: float = 1e-12) -> bool:
    return bool((a.reshape(b.shape) - b).abs().max() <= bound * b.abs().max().clamp(min=1))


def alike(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Angles count by their sines and cosines."""
    turned = near(a["angle_state"].cos(), b["angle_state"].cos()) and near(a["angle_state"].sin(), b["angle_state"].sin())
    return turned and all(near(a[name], b[name]) for name in POOLS[:3])


def test_trap_of_one_without_rotation_is_mamba2():
    """The same x, z, D, dt and A; B and C are normed already."""
    call = make(2, 70) | {"A_form": "ready"}
    call = {name: t for name, t in call.items() if name not in ("B_norm", "C_norm", "B_bias", "C_bias")}
    A = -torch.rand(2) - 0.1
    call |= {"A": A.expand(2, 70, 2), "trap": torch.full_like(call["trap"], 60.0), "angle": torch.zeros_like(call["angle"])}
    found = exact(call, return_final_states=True)
    given = {name: call[name] for name in ("x", "dt", "B", "C", "D", "z", "dt_bias")}
    built = ssmgen.chunk_scan.build(**given, A=A, dt_softplus=True, return_final_states=True)
    views = mamba2.CALLER.checked(built.operands, built.options, None)
    wanted = {name: t.double() for name, t in views.items()}
    mamba2.CALLER.reference(wanted, built.options, torch.float64)
    assert near(found["out"], wanted["out"]) and near(found["state"], wanted["final_states"])


def test_rank_one_of_ones_is_siso_with_dimensions_permuted():
    call, N = make(2, 9), 32
    ones = torch.ones(2, 1, 16)
    order = torch.stack([torch.arange(N // 2), torch.arange(N // 2) + N // 2], 1).flatten()  # where neighbours come from
    halves = call | dict.fromkeys(cases.SISO, ones) | {"rotary": "halves"}
    pairs = call | {name: call[name][..., order] for name in ("B", "C", "B_norm", "C_norm", "B_bias", "C_bias")}
    one, other = exact(halves, return_final_states=True), exact(pairs, return_final_states=True)
    assert near(one["out"], other["out"]) and near(one["state"][..., order], other["state"])
    assert near(one["k_state"][..., order], other["k_state"])


@pytest.mark.parametrize("R", [1, 4])
def test_cut_anywhere_is_the_whole(R):
    call, T = make(2, 23, R=R), 23
    first = dict(zip(INITIAL, states(call, 2), strict=True))
    whole = exact(call | first, return_final_states=True)
    for at in (0, 1, 2, 11, 22, 23):
        head = exact(cut(call, slice(None), slice(0, at)) | first, return_final_states=True)
        between = dict(zip(INITIAL, (head[name] for name in POOLS), strict=True))
        shapes = {name: t.float() for name, t in between.items()}
        tail = exact(cut(call, slice(None), slice(at, T)) | shapes, between, return_final_states=True)
        assert near(torch.cat([head["out"], tail["out"]], 1), whole["out"]) and alike(tail, whole), at


@pytest.mark.parametrize("R", [1, 2])
def test_steps_go_on_where_the_prompt_ended(R):
    call = make(2, 9, R=R)
    whole = exact(call, return_final_states=True)
    head = exact(cut(call, slice(None), slice(0, 6)), return_final_states=True)
    pools = {name: head[name] for name in POOLS}
    rest = cut(call, slice(None), slice(6, 9)) | {name: t.float() for name, t in pools.items()}
    built = ssmgen.mamba3_state_update.build(**rest)
    views = step.CALLER.checked(built.operands, built.options, None)
    doubled = {name: t.double() if t.is_floating_point() else t for name, t in views.items()}
    doubled |= {name: t.reshape(doubled[name].shape).clone() for name, t in pools.items()}
    step.CALLER.reference(doubled, built.options, torch.float64)
    assert near(doubled["out"], whole["out"][:, 6:]) and alike(doubled, whole)


def test_prompt_of_one_token_is_a_step():
    call = make(3, 1)
    first = states(call, 3)
    y, *after = ssmgen.mamba3_chunk_scan(**call, **dict(zip(INITIAL, first, strict=True)), return_final_states=True)
    pools = {name: t.clone() for name, t in zip(POOLS, first, strict=True)}
    assert torch.equal(ssmgen.mamba3_state_update(**cut(call, slice(None), 0), **pools), y[:, 0])
    assert all(torch.equal(t, pools[name]) for name, t in zip(POOLS, after, strict=True))


def test_swaps_change_the_result():
    """Every one of these is a port that runs, and is wrong."""
    call = make(2, 9, H=2, R=2)
    y = exact(call)["out"]
    first = states(call, 2)
    from_states = exact(call | dict(zip(INITIAL, first, strict=True)))["out"]
    wrong = {
        "pairs for halves": {"rotary": "pairs"},
        "softplus for the heavy tail": {"A_form": "softplus"},
        "a logit for a number": {"trap_sigmoid": False},
        "A dt for A": {"A_form": "log_decay"},
        "dt without softplus": {"dt_softplus": False},
        "heads for ranks": {"B_bias": call["B_bias"].transpose(0, 1).contiguous()},
        "no norm": {"B_norm": None, "C_norm": None},
        "B for C": {"B": call["C"], "C": call["B"]},
        "another angle": {"angle": call["angle"].flip(1)},
    }
    assert [name for name, change in wrong.items() if near(exact(call | change)["out"], y, 1e-3)] == []
    lost = {
        "k of another rank": {"initial_k": first[1].flip(1)},
        "no v": {"initial_v": torch.zeros_like(first[2])},
        "no angle": {"initial_angles": torch.zeros_like(first[3])},
    }
    given = dict(zip(INITIAL, first, strict=True))
    assert [name for name, change in lost.items() if near(exact(call | given | change)["out"], from_states, 1e-3)] == []


# Calls.


def paged(call: Call, slots: int = 6) -> tuple[Tensor, dict[str, Tensor]]:
    """(pages of NaN, the four pools in them)"""
    shapes = {name: t.shape[1:] for name, t in zip(POOLS, states(call, 1), strict=True)}
    page, pools, start = torch.full((slots, sum(s.numel() for s in shapes.values()) + 24), NAN), {}, 8
    for name, shape in shapes.items():
        pools[name] = page[:, start : start + shape.numel()].unflatten(1, shape)
        start += shape.numel()
    return page, pools


def test_pools_are_touched_where_they_should_be():
    """NaN in unused slots, in slots of sequences that start from zeros, and in slots of sequences without tokens."""
    call, lengths = make(19), (5, 0, 9, 3)
    page, pools = paged(call)
    slots, started = torch.tensor([4, 1, 0, -1], dtype=torch.int32), torch.tensor([True, True, False, True])
    begin = states(call, 1)
    for name, t in zip(POOLS, begin, strict=True):
        pools[name][4] = t[0]
    before = page.clone()
    how = {"cu_seqlens": starts_of(*lengths), "state_indices": slots, "has_initial_state": started}
    y = ssmgen.mamba3_chunk_scan(**call | pools | how)
    alone = ssmgen.mamba3_chunk_scan(**cut(call, None, slice(0, 5)), **dict(zip(INITIAL, begin, strict=True)), return_final_states=True)
    fresh = ssmgen.mamba3_chunk_scan(**cut(call, None, slice(5, 14)), return_final_states=True)
    assert torch.equal(y[:5], alone[0][0]) and all(torch.equal(pools[n][4], t[0]) for n, t in zip(POOLS, alone[1:], strict=True))
    assert torch.equal(y[5:14], fresh[0][0]) and all(torch.equal(pools[n][0], t[0]) for n, t in zip(POOLS, fresh[1:], strict=True))
    assert not y[14:17].any()
    rest = [1, 2, 3, 5]
    assert torch.equal(page[rest].nan_to_num(7), before[rest].nan_to_num(7)) and page[:, :8].isnan().all() and page[:, -16:].isnan().all()


def test_new_final_states_of_no_tokens_are_the_initial_ones():
    call = make(5)
    first = states(call, 2)
    _, *after = ssmgen.mamba3_chunk_scan(
        **call, cu_seqlens=starts_of(0, 5), **dict(zip(INITIAL, first, strict=True)), return_final_states=True
    )
    assert all(torch.equal(t[0], begin[0]) for t, begin in zip(after, first, strict=True))
    assert not ssmgen.mamba3_chunk_scan(**call, cu_seqlens=starts_of(0, 5), return_final_states=True)[1][0].any()


def test_given_pools_are_returned():
    call = make(2, 3)
    pools = dict(zip(POOLS, states(call, 2), strict=True))
    _, *after = ssmgen.mamba3_chunk_scan(**call, **pools, return_final_states=True)
    assert all(t is pools[name] for t, name in zip(after, POOLS, strict=True))


def test_rows_without_angles_have_three_states():
    call = make(2, 3) | {"angle": None}
    assert [t.dim() for t in ssmgen.mamba3_chunk_scan(**call, return_final_states=True)] == [4, 4, 3, 3]


def test_angles_are_stored_within_a_turn_and_any_is_read():
    call = make(1, 40)
    first = states(call, 1)
    turned = (*first[:3], first[3] + 2000 * math.pi)
    _, _, _, _, angle = ssmgen.mamba3_chunk_scan(**call, **dict(zip(INITIAL, turned, strict=True)), return_final_states=True)
    wanted = exact(call | dict(zip(INITIAL, first, strict=True)), return_final_states=True)["angle_state"]
    assert angle.abs().max() <= 3.1415928 and torch.allclose(angle.double().cos(), wanted.cos(), atol=2e-3)


def test_outputs_of_each_rank():
    call = make(2, 5, R=2)
    apart = ssmgen.mamba3_chunk_scan(**{name: t for name, t in call.items() if name != "mimo_o"})
    summed = (apart * call["mimo_o"].transpose(0, 1)).sum(2)
    assert apart.shape == (2, 5, 2, 2, 16) and torch.allclose(summed, ssmgen.mamba3_chunk_scan(**call), atol=1e-5)


def test_everything_wrong_is_in_one_message():
    call = make(2, 5)
    pools = dict(zip(POOLS, states(call, 2), strict=True))
    given = call | pools | {"C": call["C"].half(), "angle": None, "k_state": None, "A_form": "tail"}
    given |= {"has_initial_state": torch.ones(3, dtype=torch.bool)}
    with pytest.raises(ArgumentError) as e:
        ssmgen.mamba3_chunk_scan(**given)
    said = [p.split(" is ")[0] for p in e.value.problems]
    assert said[:1] == ["A_form"] and {"C", "angle_state", "has_initial_state", "state, v_state, angle_state"} <= {*said}


def test_initial_states_and_flags_do_not_go_together():
    call = make(2, 5)
    pools = dict(zip(POOLS, states(call, 2), strict=True)) | dict(zip(INITIAL, states(call, 2), strict=True))
    with pytest.raises(ArgumentError, match="initial_states and has_initial_state are both given"):
        ssmgen.mamba3_chunk_scan(**call, **pools, has_initial_state=torch.ones(2, dtype=torch.bool))


def test_ranks_need_their_factors():
    call = {name: t for name, t in make(2, 5, R=2).items() if name not in cases.SISO}
    with pytest.raises(ArgumentError, match="expected mimo_x for several ranks"):
        ssmgen.mamba3_chunk_scan(**call)


def test_what_serves_a_call_is_explained():
    found = ssmgen.explain(ssmgen.mamba3_chunk_scan, **make(2, 70, x=torch.bfloat16), arch="sm_90a")
    assert found.chosen.spec.stages == 2 and found.chosen.spec.rotary is Rotary.PAIRS
    refused = ssmgen.explain(ssmgen.mamba3_chunk_scan, **make(2, 70), arch="sm_90a")
    assert refused.chosen is None and "expected bf16 or f16, for tensor cores" in refused.reasons[0]
