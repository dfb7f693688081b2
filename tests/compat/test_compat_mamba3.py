"""mamba-ssm's steps of Mamba-3: the results of ssmgen's own function, and the side effects of the official ones."""

from __future__ import annotations

import pytest
import torch
from mamba3_cases import SISO, make
from torch import Tensor

import ssmgen
from ssmgen.compat.mamba_ssm import mamba3_siso_step, mamba3_step_fn
from ssmgen.errors import ArgumentError, UnsupportedError

STATES = ("state", "k_state", "v_state", "angle_state")


def ready(R: int = 2) -> dict[str, Tensor]:
    """Operands of the step after the norm and the rotation of B and C, whose heads all have rows."""
    torch.manual_seed(0)
    call = make(G=4, R=R, dtype=torch.float32)
    return call | {"A": -call["A"].abs(), "dt": call["dt"].abs(), "trap": call["trap"].sigmoid()}


def own(call: dict[str, Tensor], **more: object) -> Tensor:
    names = ("x", "B", "C", "dt", "A", "trap", "D", "z", "mimo_x", "mimo_z", "mimo_o")
    given = {name: call[name] for name in names if call[name] is not None} | {name: call[name] for name in STATES[:3]}
    how = {"A_form": "ready", "rotary": "pairs", "dt_softplus": False, "trap_sigmoid": False}
    return ssmgen.mamba3_state_update(**given, angle_state=None, angle=None, **how, **more)


def theirs(call: dict[str, Tensor], **more: object) -> Tensor:
    projections = {f"{name}proj": call[f"mimo_{of}"].transpose(0, 1).contiguous() for name, of in (("x", "x"), ("out", "o"), ("z", "z"))}
    given = [call[name] for name in ("state", "k_state", "v_state", "A", "B", "C", "D", "x", "dt", "trap")]
    return mamba3_step_fn(*given, **projections | {"z": call["z"]} | more)


def fresh(call: dict[str, Tensor]) -> dict[str, Tensor]:
    return call | {name: call[name].clone() for name in STATES}


@pytest.mark.parametrize("R", [1, 2, 4])
def test_step_is_ours_and_leaves_k_and_v(R):
    call = ready(R)
    ours, dropped = fresh(call), fresh(call)
    assert torch.equal(own(ours), theirs(dropped)) and torch.equal(ours["state"], dropped["state"])
    assert torch.equal(dropped["k_state"], call["k_state"]) and torch.equal(dropped["v_state"], call["v_state"])


def test_slots_are_read_and_written():
    call, slots = ready(), torch.tensor([2, -1, 0], dtype=torch.int32)
    ours, dropped = fresh(call), fresh(call)
    y = theirs(dropped, state_batch_indices=slots, update_kv_state=True)
    assert torch.equal(y, own(ours, state_indices=slots)) and not y[1].any()
    assert all(torch.equal(ours[name], dropped[name]) for name in STATES) and torch.equal(dropped["v_state"][2], call["x"][0])
    elsewhere = fresh(call)
    theirs(elsewhere, state_batch_indices=slots, state_batch_indices_out=torch.tensor([1, -1, -1], dtype=torch.int32), update_kv_state=True)
    assert torch.equal(elsewhere["state"][1], dropped["state"][2]) and torch.equal(elsewhere["state"][2], call["state"][2])


def test_without_outproj_ranks_are_apart_and_state_out_receives():
    call = ready()
    ours, dropped, out = fresh(call), fresh(call), torch.empty(3, 2, 4, 5)
    state_out = torch.empty_like(call["state"])
    y = theirs(dropped, outproj=None, out=out, state_out=state_out)
    assert y is out and torch.equal(out, own(ours | {"mimo_o": None})) and torch.equal(dropped["state"], call["state"])
    assert torch.equal(state_out, ours["state"])


def test_what_it_lacks_is_an_error():
    call, slots = ready(), torch.tensor([2, 1, 0], dtype=torch.int32)
    for more in ({"rotary_dim": 8}, {"state_batch_indices": slots}, {"update_kv_state": True}):
        with pytest.raises(UnsupportedError):
            theirs(fresh(call), **more)
    with pytest.raises(ArgumentError, match="Bstate is"):
        theirs(fresh(call) | {"k_state": call["k_state"][0]})


@pytest.mark.parametrize("given", [True, False])
def test_siso_step_is_ours(given):
    torch.manual_seed(1)
    call = {name: t for name, t in (make(dtype=torch.float32) | SISO).items() if t is not None}
    call |= {"dt": call["dt"].abs(), "A": -call["A"].abs()}
    states = [call[name].squeeze(1) if name == "k_state" else call[name] for name in ("angle_state", "state", "k_state", "v_state")]
    before = [t.clone() for t in states]
    angles = call["angle"][:, None].expand(-1, 4, -1)
    biases = (call["C_bias"][:, 0], call["B_bias"][:, 0])
    rows = [call[name][:, 0] for name in ("C", "B")]
    more = (call["D"], call["z"], tuple(states) if given else None)
    y, after = mamba3_siso_step(*rows, call["x"], call["A"] * call["dt"], call["dt"], call["trap"], *biases, angles, *more)
    assert all(torch.equal(a, b) for a, b in zip(before, states, strict=True))
    if not given:
        call |= {name: torch.zeros_like(call[name]) for name in STATES}
    skipped = dict.fromkeys(("B_norm", "C_norm", "dt_bias"))
    ours = ssmgen.mamba3_state_update(**call | skipped | {"A_form": "ready", "rotary": "pairs", "dt_softplus": False})
    assert torch.allclose(y, ours, rtol=1e-4, atol=1e-5)
    for found, name in zip(after, ("angle_state", "state", "k_state", "v_state"), strict=True):
        assert torch.allclose(found, call[name].view_as(found), rtol=1e-4, atol=1e-5)
