"""mamba-ssm's steps of Mamba-3: the results of ssmgen's own function, and the side effects of the official ones."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from mamba3_cases import SISO, make
from torch import Tensor

import ssmgen
from ssmgen.compat.mamba_ssm import apply_rotary_qk_inference_fwd, mamba3_siso_step, mamba3_step_fn
from ssmgen.engine.accuracy import norm_error
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
    for more in ({"state_batch_indices": slots}, {"update_kv_state": True}):
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


# The rotation of a step.


def rotation(dtype: torch.dtype = torch.float32, n: int = 4, far: float = 1.0) -> dict[str, Tensor]:
    batch, R, H, N = 3, 2, 4, 16
    torch.manual_seed(2)
    rows = {name: torch.randn(batch, R, H, N).to(dtype) for name in ("q", "k")}
    angles = {"angle_state": far * torch.randn(batch, H, n), "angle_proj": torch.randn(batch, 1, n).to(dtype).expand(-1, H, -1)}
    return rows | angles | {"dt": torch.rand(batch, H)} | {name: torch.randn(R, H, N) for name in ("bias_q", "bias_k")}


def turned(call: dict[str, Tensor], pairs: bool, sign: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """In float64, with complex numbers."""
    call = {name: t.double() for name, t in call.items()}
    angle = call["angle_state"] + math.pi * call["angle_proj"].tanh() * call["dt"][..., None]
    N = call["q"].shape[-1]
    unit = torch.polar(torch.ones(()).double().expand(angle.shape), sign * angle)
    unit = torch.cat([unit, torch.ones(*angle.shape[:-1], N // 2 - angle.shape[-1])], -1)[:, None]

    def one(name: str) -> Tensor:
        rows = call[name] + call[f"bias_{name}"] if f"bias_{name}" in call else call[name]
        z = torch.complex(rows[..., ::2], rows[..., 1::2]) if pairs else torch.complex(*rows.chunk(2, -1))
        z = z * unit
        return torch.stack([z.real, z.imag], -1).flatten(-2) if pairs else torch.cat([z.real, z.imag], -1)

    return one("q"), one("k"), angle


@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("n", [4, 8, 1])
def test_rotation_is_the_complex_one(n, pairs, conjugate):
    call = rotation(n=n)
    before = {name: t.clone() for name, t in call.items()}
    q, k, angle = apply_rotary_qk_inference_fwd(**call, conjugate=conjugate, rotate_pairwise=pairs)
    exact = turned(call, pairs, -1.0 if conjugate else 1.0)
    assert norm_error(q, exact[0]) < 1e-6 and norm_error(k, exact[1]) < 1e-6
    assert norm_error(angle.cos(), exact[2].cos()) < 1e-6 and norm_error(angle.sin(), exact[2].sin()) < 1e-6 and angle.abs().max() <= 3.1416
    assert all(torch.equal(t, before[name]) for name, t in call.items())
    bare = {name: t for name, t in call.items() if not name.startswith("bias")}
    assert norm_error(apply_rotary_qk_inference_fwd(**bare)[0], turned(bare, True)[0]) < 1e-6


def test_rotation_in_place_and_of_16_bit_rows():
    call = rotation(torch.bfloat16)
    exact = turned(call, True)
    q, k, angle = apply_rotary_qk_inference_fwd(**call, inplace=True)
    assert q is call["q"] and k is call["k"] and angle is call["angle_state"] and q.dtype == torch.bfloat16
    assert norm_error(q, exact[0]) < 2.5e-3 and norm_error(k, exact[1]) < 2.5e-3  # one rounding
    assert norm_error(angle.sin(), exact[2].sin()) < 1e-6


def test_angles_keep_their_precision_over_many_tokens():
    """Each logit is 3: the angles grow by about pi dt a token, and a cache may begin far from zero."""
    call = rotation(far=1e4)
    call["angle_proj"] = torch.full_like(call["angle_state"], 3.0)
    exact = call["angle_state"].double()
    for _ in range(2000):
        exact = exact + math.pi * call["angle_proj"].double().tanh() * call["dt"].double()[..., None]
        call["angle_state"] = apply_rotary_qk_inference_fwd(**call)[2]
    assert norm_error(call["angle_state"].sin(), exact.sin()) < 1e-4


@pytest.mark.parametrize("pairs", [False, True])
def test_rotation_and_step_are_ours_in_one_launch(pairs):
    """Mamba3.step's two calls, and the native one."""
    torch.manual_seed(3)
    call = make(G=4, R=2, dtype=torch.float32)
    call |= {"A": -call["A"].abs(), "dt": call["dt"].abs(), "trap": call["trap"].sigmoid()}
    biases = [call[name].transpose(0, 1) for name in ("C_bias", "B_bias")]
    angles = call["angle"][:, None].expand(-1, 4, -1)
    q, k, angle = apply_rotary_qk_inference_fwd(call["C"], call["B"], call["angle_state"], angles, call["dt"], *biases, False, False, pairs)
    dropped = fresh(call)
    y = theirs(dropped | {"B": k, "C": q})
    skipped = dict.fromkeys(("B_norm", "C_norm", "dt_bias"))
    how = {"A_form": "ready", "rotary": "pairs" if pairs else "halves", "dt_softplus": False, "trap_sigmoid": False}
    ours = fresh(call)
    assert torch.allclose(y, ssmgen.mamba3_state_update(**ours | skipped | how), rtol=1e-4, atol=1e-5)
    assert torch.allclose(ours["k_state"], k, rtol=1e-4, atol=1e-5) and torch.allclose(ours["angle_state"], angle, atol=1e-5)


def test_a_step_rotates_in_its_launch():
    """As state-spaces/mamba#971 proposes: the two calls above, for slots of pools."""
    torch.manual_seed(4)
    call, slots = make(G=1, R=2, dtype=torch.float32), torch.tensor([2, -1, 0], dtype=torch.int32)
    call |= {"A": -call["A"].abs(), "dt": call["dt"].abs(), "trap": call["trap"].sigmoid()}
    call |= {name: call[name].expand(-1, -1, 4, -1) for name in ("B", "C")}
    biases, angles = [call[name].transpose(0, 1) for name in ("C_bias", "B_bias")], call["angle"][:, None].expand(-1, 4, -1)
    before = call["angle_state"].index_select(0, slots.clamp(min=0))
    q, k, angle = apply_rotary_qk_inference_fwd(call["C"], call["B"], before, angles, call["dt"], *biases, rotate_pairwise=False)
    where = {"state_batch_indices": slots, "update_kv_state": True}
    apart, fused = fresh(call), fresh(call)
    want = theirs(apart | {"B": k, "C": q}, **where)
    rotary = dict(zip(("rotary_bias_q", "rotary_bias_k"), biases, strict=True)) | {"rotary_angle_proj": angles}
    rotary |= {"rotary_dim": 8, "rotary_angle_state": fused["angle_state"]}
    y = theirs(fused, **where, **rotary)
    assert torch.allclose(y, want, rtol=1e-4, atol=1e-5) and not y[1].any()
    assert all(torch.allclose(fused[name], apart[name], rtol=1e-4, atol=1e-5) for name in STATES[:3])
    assert torch.allclose(fused["angle_state"][[2, 0]], angle[[0, 2]], atol=1e-5)
    assert torch.equal(fused["angle_state"][1], call["angle_state"][1])
    for change, words in (
        ({"state_batch_indices": None, "update_kv_state": False}, "rotary_dim is given without state_batch_indices"),
        ({"rotary_bias_q": None}, "without all of its operands"),
        ({"rotary_dim": 6}, "rotary_dim is 6; expected 8"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            theirs(fresh(call), **where | rotary | change)


def test_rotation_refuses_what_does_not_fit():
    call = rotation()
    wrong: list[tuple[dict[str, object], str]] = [
        ({"k": call["k"][..., :8]}, r"k is \[3, 2, 4, 8\]; expected \[batch, rank, heads, d_state\] = \[3, 2, 4, 16\]"),
        ({"dt": torch.rand(3, 5)}, r"dt is \[3, 5\]"),
        ({"bias_q": torch.rand(4, 2, 16)}, r"bias_q is \[4, 2, 16\]"),
        ({"q": call["q"][0]}, r"q is \[2, 4, 16\]; expected \[batch, R, H, N\]"),
        ({"angle_state": torch.zeros(3, 4, 9), "angle_proj": torch.zeros(3, 4, 9)}, "expected up to 8 angles"),
        ({"q": torch.zeros(3, 2, 1, 16).expand(-1, -1, 4, -1), "inplace": True}, "q has strides .* expected inplace=False"),
        ({"q": call["q"].clone().requires_grad_()}, "q requires grad"),
        ({"inplace": 1}, "inplace is a int"),
    ]
    for change, words in wrong:
        with pytest.raises(ArgumentError, match=words) as refused:
            apply_rotary_qk_inference_fwd(**call | change)
        assert str(refused.value).startswith("mamba_ssm's apply_rotary_qk_inference_fwd cannot run")


def test_parameters_are_the_published_ones():
    found = inspect.signature(apply_rotary_qk_inference_fwd).parameters.values()
    assert ", ".join([str(p.replace(annotation=p.empty)) for p in found]) == (
        "q, k, angle_state, angle_proj, dt, bias_q=None, bias_k=None, inplace=False, conjugate=False, rotate_pairwise=True"
    )
