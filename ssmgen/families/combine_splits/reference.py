"""Partial attention outputs merged by their log-sum-exps, in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

LEAST_WEIGHT = 2.0**-126  # relative to the largest weight; a split below this is left out


def _entries(o: Tensor, num_splits: Tensor | None) -> Iterator[tuple[slice, tuple[int | slice, ...]]]:
    """(splits, place in the output) of each entry."""
    if num_splits is None:
        yield slice(None), ()
        return
    bounds = [min(max(n, 0), o.shape[0]) for n in num_splits.tolist()]
    for b, (begin, end) in enumerate(pairwise(bounds)):
        yield slice(begin, max(begin, end)), (b,)


def combine_splits(
    o: Tensor,
    lse: Tensor,
    *,
    out: Tensor,
    o_other: Tensor | None = None,
    lse_other: Tensor | None = None,
    num_splits: Tensor | None = None,
    attn_sink: Tensor | None = None,
    mask: Tensor | None = None,
    lse_out: Tensor | None = None,
    natural: bool = True,
    natural_out: bool = True,
    empty_lse: float = -math.inf,
    skip_single: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    """o: [splits, *rows, d_v], lse: [splits, *rows], or two splits without that axis in o, lse and o_other, lse_other; with num_splits
    [batch + 1], out is [batch, *rows, d_v], lse_out [batch, *rows]; attn_sink and mask have its shape. Computes in `dtype`; writes out and
    lse_out, each rounded once.
    """
    if o_other is not None and lse_other is not None:
        o, lse = torch.stack([o, o_other]), torch.stack([lse, lse_other])
    unit, unit_out = (1.0 if n else math.log(2) for n in (natural, natural_out))
    for some, where in _entries(o, num_splits):
        if skip_single and some.stop - some.start == 1:
            continue
        partial, logs = o[some].to(dtype), lse[some].to(dtype) * unit
        rows = out[where].shape[:-1]
        logs = torch.where(logs.isfinite(), logs, -math.inf)
        most = logs.amax(0) if len(logs) else logs.new_full(rows, -math.inf)
        empty = most == -math.inf
        weight = torch.exp(logs - torch.where(empty, 0, most))
        weight = torch.where(weight < LEAST_WEIGHT, 0, weight)
        total = (weight[..., None] * torch.where(weight[..., None] > 0, partial, 0)).sum(0)
        weights = weight.sum(0)
        sunk = weights if attn_sink is None else weights + torch.exp(attn_sink[where].to(dtype) - most)
        written = torch.ones(rows, dtype=torch.bool, device=o.device) if mask is None else mask[where]
        result = torch.where(empty[..., None], 0, total / torch.where(empty, 1, sunk)[..., None])
        out[where] = torch.where(written[..., None], result.to(out.dtype), out[where])
        if lse_out is not None:
            logsum = torch.where(empty, empty_lse, (most + torch.log(weights)) / unit_out)
            lse_out[where] = torch.where(written, logsum.to(lse_out.dtype), lse_out[where])
