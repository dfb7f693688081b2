"""mamba-ssm's scans of Mamba-3's prompts: the results of ssmgen's own steps, in the official order of arguments and states."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import ssmgen
from ssmgen.compat.mamba_ssm import mamba3_mimo, mamba3_siso_combined, mamba3_siso_step
from ssmgen.errors import ArgumentError, UnsupportedError

H, G, P, N, n = 4, 2, 16, 32, 8
POOLS = ("angle_state", "state", "k_state", "v_state")
Call = dict[str, Any]


def operands(batch: int = 2, T: int = 9, R: int = 0) -> Call:
    """SISO without R. All f32."""
    g = torch.Generator().manual_seed(R)

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    ranks = (R,) if R else ()
    call: Call = {name: new(batch, T, *ranks, G, N) for name in ("Q", "K")} | {name: new(batch, T, H, P) for name in ("V", "Z")}
    call |= {"ADT": -new(batch, H, T).abs(), "DT": new(batch, H, T).abs(), "Trap": new(batch, H, T), "D": new(H)}
    call |= {name: new(H, *ranks, N) for name in ("Q_bias", "K_bias")} | {"Angles": new(batch, T, H, n)}
    if R:
        call |= {name: new(H, R, P) for name in ("MIMO_V", "MIMO_Z", "MIMO_Out")}
        call |= {"chunk_size": 64 // R, "rotary_dim_divisor": 4, "dtype": torch.bfloat16}
    return call


def tokens(call: Call, span: slice) -> Call:
    axes = dict.fromkeys(("Q", "K", "V", "Z", "Angles"), 1) | dict.fromkeys(("ADT", "DT", "Trap"), 2)
    return {name: t[(slice(None),) * axes[name] + (span,)] if name in axes else t for name, t in call.items()}


def states(call: Call, R: int = 0) -> tuple[Tensor, ...]:
    batch = call["V"].shape[0]
    return tuple(torch.randn(batch, *shape) for shape in ((H, n), (H, P, N), (*((R,) if R else ()), H, N), (H, P)))


def test_siso_is_its_steps():
    call = operands()
    first = states(call)
    y, *after = mamba3_siso_combined(**call, Input_States=first, return_final_states=True)
    weights = {name: call[name] for name in ("Q_bias", "K_bias", "D")}
    for t in range(9):
        row = {name: call[name][:, t] for name in ("Q", "K", "V", "Z", "Angles")} | {m: call[m][..., t] for m in ("ADT", "DT", "Trap")}
        out, first = mamba3_siso_step(**row, **weights, Input_States=tuple(first))
        assert torch.allclose(out, y[:, t], rtol=1e-4, atol=1e-4)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(after, first, strict=True))


@pytest.mark.parametrize("R", [1, 2, 4])
def test_mimo_is_its_steps(R):
    call = operands(R=R)
    first = states(call, R)
    y, *after = mamba3_mimo(**call, return_state=True, Input_States=first)
    pools = {name: t.clone() for name, t in zip(POOLS, first, strict=True)}
    steps = {"x": "V", "z": "Z", "B": "K", "C": "Q", "angle": "Angles"}
    given = {own: call[theirs] for own, theirs in steps.items()}
    given |= {own: call[theirs].transpose(1, 2) for own, theirs in (("A", "ADT"), ("dt", "DT"), ("trap", "Trap"))}
    weights = {"B_bias": "K_bias", "C_bias": "Q_bias", "D": "D", "mimo_x": "MIMO_V", "mimo_z": "MIMO_Z", "mimo_o": "MIMO_Out"}
    given |= {own: call[theirs] for own, theirs in weights.items()}
    wanted = ssmgen.mamba3_state_update(**given, **pools, A_form="log_decay", rotary="halves", dt_softplus=False)
    assert torch.allclose(y, wanted, rtol=1e-4, atol=1e-4)
    assert all(torch.allclose(t, pools[name], rtol=1e-4, atol=1e-4) for name, t in zip(POOLS, after, strict=True))


@pytest.mark.parametrize("R", [0, 2])
def test_a_cut_prompt_goes_on(R):
    """Also mamba3_mimo, whose original starts again from zeros."""
    call = operands(R=R)
    run: Any = mamba3_mimo if R else mamba3_siso_combined
    name = "return_state" if R else "return_final_states"
    whole, *last = run(**call, **{name: True})
    head, *between = run(**tokens(call, slice(0, 4)), **{name: True})
    tail, *end = run(**tokens(call, slice(4, 9)), **{name: True}, Input_States=tuple(between))
    assert torch.allclose(torch.cat([head, tail], 1), whole, rtol=1e-4, atol=1e-4)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(end, last, strict=True))
    assert not torch.allclose(run(**tokens(call, slice(4, 9))), whole[:, 4:], rtol=1e-2, atol=1e-2)


def test_packed_sequences_have_their_own_last_token():
    call = operands(batch=1, R=2)
    starts = torch.tensor([0, 3, 3, 9], dtype=torch.int32)
    _, _, _, _, v = mamba3_mimo(**call, return_state=True, cu_seqlens=starts)
    assert torch.equal(v[0], call["V"][0, 2]) and torch.equal(v[2], call["V"][0, 8]) and not v[1].any()


@pytest.mark.parametrize("flat", [False, True])
def test_norm_of_the_output(flat):
    call = operands(R=2)
    weight = torch.rand(H * P) + 1 if flat else torch.rand(H, P) + 1
    bare = {"MIMO_Out": None, "Z": None, "MIMO_Z": None}
    plain = mamba3_mimo(**call | bare)
    normed = mamba3_mimo(**call | bare, fuse_pregate_headwise_rms_norm=True, outproj_norm_weight=weight)
    assert normed.shape == (2, 9, 2, H, P)
    scale = torch.rsqrt(plain.square().mean(-1, keepdim=True) + 1e-5)
    assert torch.allclose(normed, plain * scale * weight.view(H, P), rtol=1e-4, atol=1e-4)
    assert torch.equal(mamba3_mimo(**call | bare, outproj_norm_weight=weight), plain)


def test_signatures_are_that_package_s():
    siso = "Q K V ADT DT Trap Q_bias K_bias Angles D Z Input_States chunk_size return_final_states cu_seqlens"
    mimo = (
        "Q K V ADT DT Trap Q_bias K_bias MIMO_V MIMO_Z MIMO_Out Angles D Z chunk_size rotary_dim_divisor dtype return_state cu_seqlens "
        "fuse_pregate_headwise_rms_norm outproj_norm_weight outproj_norm_eps Input_States"
    )
    assert list(inspect.signature(mamba3_siso_combined).parameters) == siso.split()
    assert list(inspect.signature(mamba3_mimo).parameters) == mimo.split()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"rotary_dim_divisor": 3}, UnsupportedError, "rotary_dim_divisor is 3; expected 2 or 4"),
        ({"rotary_dim_divisor": 2}, UnsupportedError, "expected 16 angles"),
        ({"fuse_pregate_headwise_rms_norm": True}, UnsupportedError, "outproj_norm_weight is None"),
        ({"V": torch.zeros(2, 9, H * P)}, ArgumentError, r"V is \[2, 9, 64\]; expected \[batch, T, H, P\]"),
        ({"V": torch.zeros(2, 9, H, P, requires_grad=True)}, ArgumentError, "requires grad"),
    ],
)
def test_what_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        mamba3_mimo(**operands(R=2) | change)
