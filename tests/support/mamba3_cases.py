"""Calls of mamba3_state_update in float64, for the laws of its reference, and their runs."""

from __future__ import annotations

from typing import Any

import torch
from ssu_cases import Memory
from torch import Tensor

from ssmgen.families.mamba3_state_update import planning

NAN = float("nan")
POOLS = ("state", "k_state", "v_state", "angle_state")
WRITTEN = (*POOLS, "out")
SISO = dict.fromkeys(("mimo_x", "mimo_z", "mimo_o"))  # of a call without ranks
Call = dict[str, Any]


def rows(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def make(
    batch: int = 3, H: int = 4, P: int = 5, N: int = 16, G: int = 2, R: int = 1, n: int = 4, dtype: torch.dtype = torch.float64
) -> Call:
    """A call whose slots are its rows."""

    def new(*shape: int) -> Tensor:
        return rows(*shape, dtype=dtype)

    pools = {"state": new(batch, H, P, N), "k_state": new(batch, R, H, N), "v_state": new(batch, H, P), "angle_state": new(batch, H, n)}
    call = {"x": new(batch, H, P), "z": new(batch, H, P), "B": new(batch, R, G, N), "C": new(batch, R, G, N), "angle": new(batch, n)}
    call |= {name: new(batch, H) for name in ("dt", "A", "trap")} | {"D": new(H), "dt_bias": new(H), "B_norm": new(N), "C_norm": new(N)}
    call |= {name: new(H, R, N) for name in ("B_bias", "C_bias")} | {name: new(H, R, P) for name in ("mimo_x", "mimo_z", "mimo_o")}
    return pools | call | {"A_form": "heavy", "rotary": "halves"}


def step(call: Call, **changes: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """(output, states after it) in float64; the call's own states stay."""
    call = call | changes
    call = {name: value for name, value in call.items() if value is not None}
    names = planning.CALLER.names
    given = {name: value.clone() if name in POOLS else value for name, value in call.items() if name in names}
    given["out"] = (
        torch.full_like(call["x"], NAN)
        if "mimo_o" in call or "mimo_x" not in call
        else torch.full_like(call["mimo_x"][None].expand(call["x"].shape[0], *call["mimo_x"].shape).transpose(1, 2), NAN)
    )
    options = planning.Options(**{name: value for name, value in call.items() if name not in names})
    problems: list[str] = []
    plain = {name: value.float() if value.is_floating_point() else value for name, value in given.items()}
    shapes = planning.views_of(plain, options, problems)
    assert not problems, problems
    views = {
        name: given[name].reshape(view.shape) if name in POOLS or name == "out" else view_like(given[name], plain[name], view)
        for name, view in shapes.items()
    }
    planning.run_reference(views, options, torch.float64)
    return views["out"].squeeze(1), {name: given[name] for name in POOLS if name in given}


def view_like(t: Tensor, plain: Tensor, view: Tensor) -> Tensor:
    """The float64 tensor in the shape and strides of the view of its float32 twin."""
    t = t.contiguous()
    return t if plain.shape == view.shape else t.as_strided(view.shape, view.stride())


def on_card(named: dict[str, Tensor]) -> tuple[dict[str, Tensor], Memory]:
    """The operands on the card, with their strides; the written ones between poison."""
    memory = Memory("cuda")
    found = {}
    for name, t in named.items():
        if name in WRITTEN:
            found[name] = memory.view(name, tuple(t.shape), tuple(t.stride()), t.dtype).copy_(t)
        else:
            room = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")
            axes = tuple(0 if t.stride(a) == 0 else slice(None) for a in range(t.dim()))
            room[axes].copy_(t[axes])
            found[name] = room
    memory.seal()
    return found, memory
