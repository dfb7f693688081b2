"""Commits of a ring: the views and reference of calls that replay accepted tokens into the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...calls import checks
from ...engine.recurrences.attention.operands import OPERANDS, RINGED
from ...engine.recurrences.attention.reference import one_token
from ...engine.recurrences.slots import check_room, check_target


def views_of(named: Mapping[str, Tensor], layout: str, problems: list[str]) -> dict[str, Tensor]:
    """The operands with a layer axis in front of all but the indices: state [L, slots, HV, V, K]; k [L, slots, T, HK, K]; v
    [L, slots, T, HV, V]; g, beta [L, slots, T, HV]; gk [L, slots, T, HV, K]; A_log [L, HV]; dt_bias [L, HV] or [L, HV, K].
    """
    if not checks.check_tensors(named, problems):
        return {}
    checks.check_types(OPERANDS, named, "state", problems, scaled=False)
    state, k = named["state"], named["k"]
    layered = state.dim() == 5
    if state.dim() not in (4, 5) or k.dim() != state.dim():
        problems.append(
            f"state is {list(state.shape)} and ring.k is {list(k.shape)}; expected [slots, heads, V, K] and [slots, tokens, key heads, K], "
            "or both with a layers axis in front"
        )
        return {}
    views = {
        n: t if layered or n in ("state_indices", "dst_state_indices", "num_accepted_tokens") else t.unsqueeze(0) for n, t in named.items()
    }
    if layout == "kv":
        views["state"] = views["state"].transpose(3, 4)
    L, slots, HV, V, state_k = views["state"].shape
    T, H, K = views["k"].shape[2:]
    batch = named["num_accepted_tokens"].numel()
    if state_k != K:
        problems.append(f"state is {list(state.shape)} in layout {layout!r}, of K = {state_k}; expected {K}, the K of ring.k")
    if H == 0 or HV % H:
        problems.append(f"state has {HV} heads; expected a multiple of the {H} of ring.k")
    sizes = {"head": HV, "group": H, "key": K, "value": V, "batch": batch}
    bias = {"[layers, heads, K]": (L, HV, K), "[layers, heads * K]": (L, HV * K)} if "gk" in named else {"[layers, heads]": (L, HV)}
    own: dict[str, checks.Shapes] = {
        "g": {"[layers, slots, tokens, heads]": (L, slots, T, HV)}, "A_log": {"[layers, heads]": (L, HV)}, "dt_bias": bias,
    }  # fmt: skip
    ring = {n: t for n, t in views.items() if n != "state"}
    fits = checks.check_shapes(OPERANDS, ring, sizes, problems, own, ("layers, slots, tokens", (L, slots, T)))
    if problems or not fits:
        return {}
    if "gk" in views and "dt_bias" in views and views["dt_bias"].dim() == 2:
        views["dt_bias"] = views["dt_bias"].unflatten(1, (HV, K))
    if checks.check_dense("state", views["state"], problems, 3, layout == "kv"):
        checks.check_distinct(views, ("state",), problems)
    check_room(views, batch, problems, slots)
    check_target(views, problems)
    for name, t in views.items():
        if name != "state":
            checks.check_strides_fit(name, t, {"A_log": 1, "dt_bias": 1}.get(name, 0 if t.dim() == 1 else 2), problems)
    return views


def reference(views: Mapping[str, Tensor], form: Any, pad_slot_id: int, lower_bound: float, dtype: torch.dtype = torch.float32) -> None:
    """Replays accepted tokens: state [L, slots, …] as above. Counts out of range and invalid slots leave it unchanged."""
    state = views["state"]
    tokenwise = [n for n in RINGED if n in views]
    for b, accepted in enumerate(views["num_accepted_tokens"].tolist()):
        slot = int(views["state_indices"][b]) if "state_indices" in views else b
        if not 0 <= slot < state.shape[1] or slot == pad_slot_id or not 0 < accepted <= views["k"].shape[2]:
            continue
        for layer in range(state.shape[0]):
            S = state[layer, slot].to(dtype)
            weights = {n: views[n][layer].to(dtype) for n in ("A_log", "dt_bias") if n in views}
            for t in range(accepted):
                x = {n: views[n][layer, slot, t].to(dtype) for n in tokenwise}
                x["k"] = x["q"] = x["k"].repeat_interleave(S.shape[0] // x["k"].shape[0], 0)
                S, _ = one_token(S, x | weights, form, 1.0, lower_bound)
            target = int(views["dst_state_indices"][b]) if "dst_state_indices" in views else slot
            if 0 <= target < state.shape[1] and target != pad_slot_id:
                state[layer, target] = S.to(state.dtype)
