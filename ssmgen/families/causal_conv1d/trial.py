"""Trials of causal_conv1d: operands from a spec alone, and the call that takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...engine.convolution_trial import taps
from ...engine.trial import Trial, boundaries, cycled, ordered, slot_indices, trial, wide
from ...spec.kernel import Index, Loads
from .call import CALLER, Options
from .spec import ConvLayout, ConvSpec


def operands(spec: ConvSpec, batch: int, seed: int) -> dict[str, Tensor]:
    """Rows longer than a warp's piece; packed sequences of that length, of fewer tokens than taps, and without tokens."""
    g = torch.Generator().manual_seed(seed)
    first, vector = spec.layout is ConvLayout.FIRST, spec.loads is Loads.VECTOR
    counts = cycled((spec.piece + 5, 2, 0, 3, spec.piece), batch)
    rows, length = (1, sum(counts)) if spec.ragged else (batch, 2 * spec.piece + 5)
    # Channel-last: the last lanes belong to another warp. With words, the warp between the first and the last one reads whole words.
    dim = 3 if first else (65 if spec.words else 33) * spec.vec + (0 if vector or spec.taps is Loads.VECTOR else 1)
    slots = batch if spec.index is Index.NONE else 3 * batch

    def along(values: Tensor) -> Tensor:
        """Like x, [rows, dim, length]."""
        if first:
            return wide(values, spec.x, spec.shifted or not vector, 1 if vector else 2)
        return wide(values.transpose(1, 2), spec.x, not vector, 1 if vector or spec.unit else 2).transpose(1, 2)

    def states(count: int) -> Tensor:
        return wide(torch.randn(count, dim, spec.reach - 1, generator=g), spec.x, True)

    made = taps(spec, dim, g)
    made["x"] = along(torch.randn(rows, dim, length, generator=g))
    made["out"] = along(torch.full((rows, dim, length), float("nan")))
    made |= {name: along(torch.randn(rows, dim, length, generator=g)) for name in spec.beside}
    if spec.seq_idx:  # the last sequence ends with padding
        ids = torch.arange(length) // (spec.piece // 2 + 1)
        ids[-2:] = -1
        made["seq_idx"] = ids.int().repeat(rows, 1).repeat_interleave(2, 1)[:, ::2]
    if spec.ragged:
        made["query_start_loc"] = boundaries(counts, spec.query_start_loc)
    if spec.initial:
        made["initial_states"] = states(batch)
    if spec.final:
        made["final_states"] = states(batch)
    if spec.pool:
        made["conv_states"] = states(slots)
    if spec.index is not Index.NONE:
        made["conv_state_indices"] = slot_indices(spec.index, batch, slots, g)
    if spec.started:
        made["has_initial_state"] = torch.arange(batch) % 2 == 0
    return ordered(spec, made)


def causal_conv1d(spec: ConvSpec, batch: int, seed: int) -> Trial:
    return trial(CALLER, operands(spec, batch, seed), Options(spec.silu, dilation=spec.dilation), exact=("final_states", "conv_states"))


TRIALS = {ConvSpec: causal_conv1d}
