"""One token of Mamba-3 in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from ..reference import softplus
from .problem import Rate, Rotary

Carried = dict[str, Tensor]  # S [H, P, N], k [R, H, N], v [H, P], and if rows rotate, the angle [H, angles], of one sequence


class Activations(Protocol):
    """The options of a call that change a token's numbers."""

    @property
    def A_form(self) -> str: ...  # noqa: N802
    @property
    def rotary(self) -> str: ...
    @property
    def dt_softplus(self) -> bool: ...
    @property
    def trap_sigmoid(self) -> bool: ...
    @property
    def eps(self) -> float: ...
    @property
    def A_floor(self) -> float: ...  # noqa: N802


def rotated(rows: Tensor, angle: Tensor, rotary: Rotary) -> Tensor:
    """rows [H, R, N], of which the first pairs turn by angle [H, angles]."""
    first = torch.arange(angle.shape[-1], device=rows.device) * (2 if rotary is Rotary.PAIRS else 1)
    second = first + (1 if rotary is Rotary.PAIRS else rows.shape[-1] // 2)
    u, w, out = rows[..., first], rows[..., second], rows.clone()
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    out[..., first], out[..., second] = u * cos - w * sin, u * sin + w * cos
    return out


def normed(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis."""
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * weight


def one_token(old: Carried, token: Mapping[str, Tensor], weights: Mapping[str, Tensor], options: Activations) -> tuple[Carried, Tensor]:
    """(the states after a token, its output [R, H, P], or [1, H, P] if ranks are summed).

    token: x, z [H, P]; B, C [R, G, N]; dt, A, trap [H]; angle [H, angles].
    """
    x, H, rate = token["x"], token["x"].shape[0], Rate(options.A_form)
    dt = token["dt"] + weights.get("dt_bias", 0)
    dt = softplus(dt) if options.dt_softplus else dt
    A = token["A"]
    if rate is Rate.SOFTPLUS:
        A = -softplus(A).clamp(min=options.A_floor)
    elif rate is Rate.HEAVY:
        A = -(A.clamp(min=0) + 1 / (1 - A.clamp(max=0))).clamp(min=options.A_floor)
    trap = token["trap"].sigmoid() if options.trap_sigmoid else token["trap"]
    decay = torch.exp(A if rate is Rate.LOG_DECAY else A * dt)
    new: Carried = {"v": x}
    if "angle" in old:
        angle = old["angle"] + math.pi * token["angle"].tanh() * dt[:, None]
        new["angle"] = angle - 2 * math.pi * torch.round(angle / (2 * math.pi))

    def ready(name: str) -> Tensor:
        """[R, G, N] -> [H, R, N]"""
        rows = normed(token[name], weights[f"{name}_norm"], options.eps) if f"{name}_norm" in weights else token[name]
        rows = rows.repeat_interleave(H // rows.shape[1], 1).transpose(0, 1) + weights.get(f"{name}_bias", 0)
        return rotated(rows, new["angle"], Rotary(options.rotary)) if "angle" in new else rows

    k, q = ready("B"), ready("C")
    of_x = weights["mimo_x"] if "mimo_x" in weights else torch.ones_like(x)[:, None]  # [H, R, P]
    S = decay[:, None, None] * old["S"]
    S = S + torch.einsum("h,hrp,rhn->hpn", (1 - trap) * dt * decay, old["v"][:, None] * of_x, old["k"])
    S = S + torch.einsum("h,hrp,hrn->hpn", trap * dt, x[:, None] * of_x, k)
    new |= {"S": S, "k": k.transpose(0, 1)}
    y = torch.einsum("hpn,hrn->hrp", S, q)
    if "D" in weights:
        y = y + weights["D"][:, None, None] * x[:, None] * of_x
    if "norm_weight" in weights:
        y = normed(y, weights["norm_weight"][:, None], options.eps)
    if "z" in token:
        gate = token["z"][:, None] * weights.get("mimo_z", 1)
        y = y * gate * gate.sigmoid()
    if "mimo_o" in weights:
        y = (y * weights["mimo_o"]).sum(1, keepdim=True)
    return new, y.transpose(0, 1)


OF_WEIGHTS = ("D", "dt_bias", "B_norm", "C_norm", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o", "norm_weight")
