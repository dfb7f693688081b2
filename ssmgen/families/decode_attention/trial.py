"""Trials of decode_attention: operands from a spec alone, and the call that takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...calls.checks import TORCH_DTYPES
from ...engine.trial import TOLERANCE, Trial, cycled, ordered, trial
from ...spec.kernel import DType
from .call import CALLER, Options
from .spec import DecodeAttentionSpec

KV_HEADS, ROOM = 2, 200
POSITIONS = (150, -1, 0, 7, ROOM - 1, 33, ROOM)
"""Of the sequences of a batch: the second one, and the last one of a round, are padding."""


def operands(spec: DecodeAttentionSpec, batch: int, seed: int) -> dict[str, Tensor]:
    """Views of a shared product, and caches whose rows from `position` on are NaN."""
    g = torch.Generator().manual_seed(seed)
    heads, d = KV_HEADS * spec.group, spec.head_dim

    def drawn(dtype: DType | None, *shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(TORCH_DTYPES[dtype or DType.F32])

    at = cycled(POSITIONS, batch)
    product = drawn(spec.x, batch, (heads + 2 * KV_HEADS) * d + 8)
    q, k, v, _ = product.split([heads * d, KV_HEADS * d, KV_HEADS * d, 8], dim=1)
    made: dict[str, Tensor | None] = {name: t.unflatten(1, (-1, d)) for name, t in (("q", q), ("k", k), ("v", v))}
    for name in ("key_cache", "value_cache"):
        cache = drawn(spec.cache, batch, KV_HEADS, ROOM, d)
        for b, p in enumerate(at):
            cache[b, :, max(p, 0) :] = float("nan")
        made[name] = cache
    made["position"] = torch.tensor(at)
    if spec.rotary:
        angle = 6 * torch.rand(batch, spec.rotary // 2, generator=g).repeat(1, 2)
        both = torch.cat([angle.cos(), angle.sin()], dim=1).to(TORCH_DTYPES[spec.angles or DType.F32])
        made["cos"], made["sin"] = both.split(spec.rotary, dim=1)
    if spec.norm:
        made |= {"q_norm": 0.3 * drawn(spec.norm, d) + 1, "k_norm": 0.3 * drawn(spec.norm, d) + 1}
    if spec.gate:
        made["gate"] = drawn(spec.gate, batch, heads, 2 * d)[..., d:]
    made["out"] = torch.full((batch, heads + 1, d), float("nan"), dtype=TORCH_DTYPES[spec.x])[:, :heads]
    return ordered(spec, made)


def decode_attention(spec: DecodeAttentionSpec, batch: int, seed: int) -> Trial:
    options = Options(1e-5, spec.unit_offset, 0.75, None)
    # The reference's caches are in f64, so that its new key and value are not rounded.
    slack = {"out": TOLERANCE[spec.x] + TOLERANCE[spec.cache], "key_cache": 2 * TOLERANCE[spec.cache]}
    return trial(CALLER, operands(spec, batch, seed), options, slack=slack)


TRIALS = {DecodeAttentionSpec: decode_attention}
