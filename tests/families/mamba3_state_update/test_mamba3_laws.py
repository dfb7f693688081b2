"""The laws of mamba3_state_update's reference, in float64, and its calls on CPU tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from mamba3_cases import NAN, POOLS, SISO, Call, make, rows, step
from torch import Tensor

import ssmgen
from ssmgen.engine.recurrences.mamba.reference import reference as mamba2
from ssmgen.engine.recurrences.mamba3.problem import Rotary
from ssmgen.errors import ArgumentError


def near(a: Tensor, b: Tensor, bound: float = 1e-12) -> bool:
    return bool((a - b).abs().max() <= bound * b.abs().max().clamp(min=1))


def textbook(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(output, rotated state, angle) by the complex recurrence of the paper: k and q stay, and the state turns with each token.

    Two neighbours are a complex number. The state of this form is S turned back by the angle, so its transition is alpha e^(-i delta).
    """
    x, H, n = call["x"], call["x"].shape[1], call["angle"].shape[-1]
    dt = torch.log1p((call["dt"] + call["dt_bias"]).exp())
    u = call["A"]
    alpha = (-torch.where(u >= 0, 1 + u, 1 / (1 - u)).clamp(min=1e-4) * dt).exp()
    lam = 1 / (1 + (-call["trap"]).exp())
    delta = math.pi * torch.tanh(call["angle"])[:, None] * dt[..., None]
    theta = call["angle_state"] + delta

    def paired(t: Tensor) -> Tensor:
        return torch.view_as_complex(t.contiguous().unflatten(-1, (-1, 2)))

    def turn(t: Tensor, by: Tensor) -> Tensor:
        return torch.cat([t[..., :n] * torch.polar(torch.ones_like(by), by), t[..., n:]], -1)

    def ready(name: str) -> Tensor:
        t = call[name][:, 0]
        t = t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt() * call[f"{name}_norm"]
        return paired(t.repeat_interleave(H // t.shape[1], 1) + call[f"{name}_bias"][:, 0])

    k, q, past = ready("B"), ready("C"), turn(paired(call["k_state"][:, 0]), -call["angle_state"])
    S = turn(paired(call["state"]), -call["angle_state"][..., None, :])
    S = alpha[..., None, None] * turn(
        S + ((1 - lam) * dt)[..., None, None] * call["v_state"][..., None] * past[:, :, None], -delta[..., None, :]
    )
    S = S + (lam * dt)[..., None, None] * x[..., None] * k[:, :, None]
    y = (S * q[:, :, None].conj()).real.sum(-1) + call["D"][:, None] * x
    return y * call["z"] * call["z"].sigmoid(), turn(S, theta[..., None, :]), theta


def test_reference_is_the_complex_recurrence():
    torch.manual_seed(0)
    call = make() | SISO | {"rotary": "pairs"}
    # alpha turns with the token; the past pair (v, k) turned with it, too
    out, states = step(call)
    y, S, theta = textbook(call)
    assert near(out, y) and near(states["state"], torch.view_as_real(S).flatten(-2))
    assert near(states["angle_state"].cos(), theta.cos()) and states["angle_state"].abs().max() <= math.pi


def test_reference_is_mamba2_without_its_additions():
    """trap = 1, no angles, no biases: B as normed, dt after its softplus."""
    torch.manual_seed(1)
    call = make() | SISO | dict.fromkeys(("B_norm", "C_norm", "B_bias", "C_bias"))
    call |= {
        "trap": torch.full_like(call["trap"], 60.0),
        "angle": torch.zeros_like(call["angle"]),
        "angle_state": torch.zeros_like(call["angle_state"]),
    }
    out, states = step(call)
    u = call["A"]
    state, y = call["state"].clone(), torch.empty_like(out)
    for b in range(3):  # A of Mamba-2 does not depend on the token
        A = -torch.where(u[b] >= 0, 1 + u[b], 1 / (1 - u[b]))
        H, P, N = state.shape[1:]
        views = {"state": state[b : b + 1], "out": y[b : b + 1], "x": call["x"][b : b + 1], "z": call["z"][b : b + 1]}
        views |= {"dt": call["dt"][b : b + 1, :, None].expand(1, H, P), "A": A[:, None, None].expand(H, P, N)}
        views |= {name: call[name][b : b + 1, 0] for name in ("B", "C")} | {
            name: call[name][:, None].expand(H, P) for name in ("D", "dt_bias")
        }
        mamba2(**views, dt_softplus=True, dtype=torch.float64)
    assert near(out, y) and near(states["state"], state)


def test_rank_one_of_ones_is_siso_with_dimensions_permuted():
    torch.manual_seed(2)
    call, N = make(), 16
    ones = torch.ones(4, 1, 5, dtype=torch.float64)
    mimo = call | dict.fromkeys(("mimo_x", "mimo_z", "mimo_o"), ones)
    order = torch.stack([torch.arange(N // 2), torch.arange(N // 2) + N // 2], 1).flatten()  # where neighbours come from
    siso = (
        call
        | SISO
        | {"rotary": "pairs"}
        | {name: call[name][..., order] for name in ("state", "k_state", "B", "C", "B_norm", "C_norm", "B_bias", "C_bias")}
    )
    (y, after), (y_siso, after_siso) = step(mimo), step(siso)
    assert (
        near(y, y_siso)
        and near(after["state"][..., order], after_siso["state"])
        and near(after["k_state"][..., order], after_siso["k_state"])
    )


@pytest.mark.parametrize("R", [2, 4, 8])
def test_equal_ranks_are_one_rank(R):
    torch.manual_seed(R)
    one = make() | {"mimo_x": torch.ones(4, 1, 5).double(), "mimo_o": torch.ones(4, 1, 5).double(), "mimo_z": torch.ones(4, 1, 5).double()}
    same = {name: one[name].repeat_interleave(R, 1) for name in ("k_state", "B", "C", "B_bias", "C_bias", "mimo_z")}
    many = one | same | {name: one[name].repeat_interleave(R, 1) / R for name in ("mimo_x", "mimo_o")} | {"D": one["D"] * R}
    (y, after), (y_many, after_many) = step(one), step(many)
    # each of R ranks of x / R reads the whole state, and the outputs' mean is taken
    assert near(y, y_many) and near(after["state"], after_many["state"])


def test_a_rotated_frame_leaves_the_output():
    torch.manual_seed(3)
    call = make(R=2)
    by = rows(3, 4, 4)

    def turned(t: Tensor, angle: Tensor) -> Tensor:
        u, w = t[..., :4], t[..., 8:12]
        return torch.cat([u * angle.cos() - w * angle.sin(), t[..., 4:8], u * angle.sin() + w * angle.cos(), t[..., 12:]], -1)

    moved = {
        "angle_state": call["angle_state"] + by,
        "state": turned(call["state"], by[:, :, None]),
        "k_state": turned(call["k_state"], by[:, None]),
    }
    assert near(step(call)[0], step(call, **moved)[0])


def test_swaps_change_the_result():
    """Every one of these is a port that runs, and is wrong."""
    torch.manual_seed(4)
    call = make(H=2, R=2)
    y = step(call)[0]
    wrong = {
        "pairs for halves": {"rotary": "pairs"},
        "softplus for the heavy tail": {"A_form": "softplus"},
        "a logit for a number": {"trap_sigmoid": False},
        "A dt for A": {"A_form": "log_decay"},
        "a raw A": {"A_form": "ready"},
        "dt without softplus": {"dt_softplus": False},
        "heads for ranks": {"B_bias": call["B_bias"].transpose(0, 1).contiguous()},
        "k of another rank": {"k_state": call["k_state"].flip(1)},
        "no norm": {"B_norm": None, "C_norm": None},
        "B for C": {"B": call["C"], "C": call["B"]},
    }
    assert [name for name, change in wrong.items() if near(step(call, **change)[0], y, 1e-3)] == []


# Calls.


def small(**changes: Any) -> Call:
    torch.manual_seed(5)
    return {name: t for name, t in (make(dtype=torch.float32) | SISO | changes).items() if t is not None}


def test_any_angle_is_read():
    call = small()
    turned = call | {"angle_state": call["angle_state"] + 2 * math.pi * 1000}
    y, there = (ssmgen.mamba3_state_update(**{name: t.clone() if name in POOLS else t for name, t in c.items()}) for c in (call, turned))
    assert torch.allclose(y, there, rtol=1e-2, atol=1e-2)  # an f32 of 6283 is within 2.5e-4


def test_four_pools_in_one_page():
    call = small()
    sizes = {name: call[name][0].numel() for name in POOLS}
    page = torch.full((6, sum(sizes.values()) + 24), NAN)
    slots = torch.tensor([4, 0, 2], dtype=torch.int32)
    paged, start = {}, 8
    for name in POOLS:
        paged[name] = page[:, start : start + sizes[name]].unflatten(1, call[name].shape[1:])
        paged[name][slots.long()] = call[name]
        start += sizes[name]
    y = ssmgen.mamba3_state_update(**call | paged, state_indices=slots)
    assert torch.equal(y, ssmgen.mamba3_state_update(**call)) and all(torch.equal(paged[n][slots.long()], call[n]) for n in POOLS)
    assert page[[1, 3, 5]].isnan().all() and page[:, :8].isnan().all() and page[:, -16:].isnan().all()


def test_pools_that_meet_in_a_page_are_refused():
    call = small()
    page = torch.zeros(3, 400)
    call["state"] = page[:, : 4 * 5 * 16].unflatten(1, (4, 5, 16))
    with pytest.raises(ArgumentError, match="state overlaps v_state in memory"):
        ssmgen.mamba3_state_update(**call | {"v_state": page[:, 300:320].unflatten(1, (4, 5))})


def test_rows_out_of_the_pool_are_zero_and_touch_nothing():
    call = small() | {"state_indices": torch.tensor([-1, 9, 3], dtype=torch.int64), "pad_slot_id": 3}
    before = {name: call[name].clone() for name in POOLS}
    assert ssmgen.mamba3_state_update(**call).count_nonzero() == 0 and all(torch.equal(before[name], call[name]) for name in POOLS)


def test_everything_wrong_is_in_one_message():
    call = small(angle=None, C=torch.zeros(3, 1, 2, 16).half(), dst_state_indices=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ArgumentError) as e:
        ssmgen.mamba3_state_update(
            **call | {"angle": None, "k_state": call["k_state"].transpose(2, 3).contiguous().transpose(2, 3), "A_form": "tail"}
        )
    assert [p.split(" is ")[0].split(" has ")[0] for p in e.value.problems] == [
        "A_form",
        "angle_state",
        "C",
        "k_state",
        "dst_state_indices",
    ]


def test_ranks_need_their_factors():
    call = {name: t for name, t in (make(R=2, dtype=torch.float32) | SISO).items() if t is not None}
    with pytest.raises(ArgumentError, match="expected mimo_x for several ranks"):
        ssmgen.mamba3_state_update(**call)


def test_what_serves_a_call_is_explained():
    found = ssmgen.explain(ssmgen.mamba3_state_update, **small(), arch="sm_90a")
    assert found.chosen.spec.tiles == 1 and found.chosen.spec.rotary is Rotary.HALVES
