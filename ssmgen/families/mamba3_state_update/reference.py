"""Decode steps of Mamba-3 in plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...engine.recurrences.mamba3.reference import OF_WEIGHTS, Carried, one_token
from ...engine.recurrences.reference import start_slot
from ...engine.stochastic_reference import stored

POOL_OF = {"S": "state", "k": "k_state", "v": "v_state", "angle": "angle_state"}
OF_TOKENS = ("x", "z", "B", "C", "dt", "A", "trap", "angle", "out")


def reference(views: Mapping[str, Tensor], options: Any, dtype: torch.dtype = torch.float32) -> None:
    """Operands as views: state [slots, H, P, N], k_state [slots, R, H, N], v_state [slots, H, P], angle_state [slots, H, angles]; x, z
    [batch, H, P]; B, C [batch, R, G, N]; out [batch, R or 1, H, P]; several tokens have an axis of tokens after the batch.
    options: the call's, see planning.py.

    Computes in `dtype`, carries all states through a call's tokens unrounded, and rounds what it writes once; the state stochastically, if
    there is a seed.
    """
    several = views["x"].dim() == 4
    by_token = {n: views[n] if several else views[n].unsqueeze(1) for n in OF_TOKENS if n in views}
    weights = {n: views[n].to(dtype) for n in OF_WEIGHTS if n in views}
    pools = {name: views[pool] for name, pool in POOL_OF.items() if pool in views}
    target, out, slots = views.get("dst_state_indices"), by_token["out"], views["state"].shape[0]

    def valid(slot: int) -> bool:
        return 0 <= slot < slots and ("state_indices" not in views or slot != options.pad_slot_id)

    def keep(slot: int, new: Carried) -> None:
        if not valid(slot):
            return
        for name, pool in pools.items():
            if name == "S":
                seed = int(views["rand_seed"][slot]) if options.philox_rounds else 0
                pool[slot] = stored(new[name], pool.dtype, seed, options.philox_rounds, slot)
            else:
                pool[slot] = new[name].to(pool.dtype)

    for b in range(out.shape[0]):
        slot = start_slot(views, b)
        if not valid(slot):
            if options.zero_padding:
                out[b] = 0
            continue
        carried = {name: pool[slot].to(dtype) for name, pool in pools.items()}
        for t in range(out.shape[1]):
            token = {name: each[b, t].to(dtype) for name, each in by_token.items() if name != "out"}
            carried, y = one_token(carried, token, weights, options)
            out[b, t] = y.to(out.dtype)
            if target is not None and target.dim() == 2:
                keep(int(target[b, t]), carried)
        if target is None or target.dim() == 1:
            keep(slot if target is None else int(target[b]), carried)
