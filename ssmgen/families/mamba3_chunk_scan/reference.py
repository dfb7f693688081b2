"""Mamba-3 over prompts in plain PyTorch, token by token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...calls.prompts import spans
from ...engine.recurrences.mamba3.reference import OF_WEIGHTS, Carried, one_token
from .operands import INITIAL, POOLS
from .views import Options

_OF_TOKENS = ("x", "z", "B", "C", "dt", "A", "trap", "angle")
_CARRIED = ("S", "k", "v", "angle")  # in the order of the pools


def reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    """Operands as views: x, z [batch, T, H, P]; B, C [batch, T, R, G, N]; out [batch, T, R or 1, H, P]; states [·, H, P, N], [·, R, H, N],
    [·, H, P], [·, H, angles].

    Computes in `dtype`, carries all states through a sequence's tokens unrounded, and rounds what it writes once.
    """
    out, starts = views["out"], views.get("cu_seqlens")
    pools = {own: views[name] for own, name in zip(_CARRIED, POOLS, strict=True) if name in views}
    initial = {own: views[name] for own, name in zip(_CARRIED, INITIAL, strict=True) if name in views}
    weights = {name: views[name].to(dtype) for name in OF_WEIGHTS if name in views}
    tokens = {name: views[name] for name in _OF_TOKENS if name in views}
    slots, started = views.get("state_indices"), views.get("has_initial_state")
    for s, (row, span) in enumerate(spans(views["x"], starts)):
        slot = s if slots is None else int(slots[s])
        if pools and not (0 <= slot < pools["S"].shape[0] and (slots is None or slot != options.pad_slot_id)):
            out[row, span] = 0
            continue
        if pools and span.stop == span.start and not options.final:
            continue
        if initial:
            carried = {name: t[s].to(dtype) for name, t in initial.items()}
        elif started is not None and bool(started[s]):
            carried = {name: t[slot].to(dtype) for name, t in pools.items()}
        else:
            carried = _zeros(views, dtype)
        for t in range(span.start, span.stop):
            token = {name: each[row, t].to(dtype) for name, each in tokens.items()}
            carried, y = one_token(carried, token, weights, options)
            out[row, t] = y.to(out.dtype)
        for name, pool in pools.items():
            pool[slot] = carried[name].to(pool.dtype)


def _zeros(views: Mapping[str, Tensor], dtype: torch.dtype) -> Carried:
    (heads, rows), (ranks, _, n) = views["x"].shape[2:], views["B"].shape[2:]
    shapes = {"S": (heads, rows, n), "k": (ranks, heads, n), "v": (heads, rows)}
    shapes |= {"angle": (heads, views["angle"].shape[-1])} if "angle" in views else {}
    return {name: views["x"].new_zeros(shape, dtype=dtype) for name, shape in shapes.items()}
