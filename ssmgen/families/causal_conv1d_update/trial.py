"""Trials of causal_conv1d_update: operands from a spec alone, and the call that takes them."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from ...engine.convolution_calls import Options
from ...engine.convolution_trial import taps
from ...engine.trial import INTEGERS, Trial, boundaries, cycled, ordered, runs, slot_indices, trial, wide
from ...spec.kernel import Index, Loads
from .call import CALLER
from .operands import CHILDREN
from .spec import MAX_TOKENS, Advance, Saved, StateLayout, Tokens, UpdateSpec


def operands(spec: UpdateSpec, batch: int, seed: int) -> dict[str, Tensor]:
    """More channels than a block takes, and windows longer than necessary if the spec allows that."""
    g = torch.Generator().manual_seed(seed)
    vector, ragged = spec.loads is Loads.VECTOR, spec.count is Tokens.RAGGED
    most = {Tokens.FIXED: spec.tokens, Tokens.COUNTED: MAX_TOKENS + 1, Tokens.RAGGED: spec.tokens + 2}[spec.count]
    counts = cycled((most, 2, 0, 1), batch)
    columns = most - (1 if ragged else 0)  # of per-token tensors: too few, if sequences are packed
    dim = spec.vec * (spec.threads + 3) + (0 if spec.constants()["whole"] else 1)
    slots = batch if spec.index is Index.NONE else 3 * batch
    extra = {Advance.SHIFT: 2, Advance.ROLL: most, Advance.RING: 2}[spec.advance]
    entries = spec.state_len if spec.layout is StateLayout.RUNS else spec.reach - 1 + extra

    def tokens(values: Tensor) -> Tensor:
        """Like x, from [rows, tokens, dim] or, packed, [tokens, dim]."""
        t = wide(values, spec.x, not vector, 1 if vector else 2)
        return t if ragged else t.transpose(1, 2)

    lead = (sum(counts),) if ragged else (batch, most)
    made = taps(spec, dim, g)
    made["x"] = tokens(torch.randn(*lead, dim, generator=g))
    made["out"] = tokens(torch.full((*lead, dim), float("nan")))
    made |= {name: tokens(torch.randn(*lead, dim, generator=g)) for name in spec.beside}
    state = torch.randn(slots, dim, entries, generator=g)
    made["conv_state"] = {
        StateLayout.RUNS: lambda: runs(state, spec.x),
        StateLayout.CHANNELS: lambda: wide(state.transpose(1, 2), spec.x, False).transpose(1, 2),
        StateLayout.ANY: lambda: wide(state, spec.x, True),
    }[spec.layout]()
    if spec.advance is Advance.RING:
        made["cache_seqlens"] = (torch.arange(batch) * 5).to(INTEGERS[spec.position])
    if spec.advance is Advance.ROLL:  # the third count is invalid
        accepted = 1 + torch.arange(batch - 1, -1, -1) % most
        accepted[2:3] = entries - spec.reach + 3
        made["num_accepted_tokens"] = accepted.to(INTEGERS[spec.position])
    if spec.index is not Index.NONE:
        made["conv_state_indices"] = slot_indices(spec.index, batch, slots, g)
    if spec.started:
        made["has_initial_state"] = torch.arange(batch) % 2 == 0
    if ragged:
        made["query_start_loc"] = boundaries(counts, spec.query_start_loc)
    if spec.parents is not Index.NONE:
        made["parents"] = torch.randint(-1, most, (batch, columns), generator=g).to(INTEGERS[spec.parents])
    if spec.children is not Index.NONE:  # a token's parent precedes it, so a parent's first listed child is its first child
        for name in CHILDREN:
            made[name] = torch.full((batch, most), -1, dtype=INTEGERS[spec.children])
        for b, t in product(range(batch), range(1, most)):
            parent = int(torch.randint(t, (1,), generator=g))
            children = made["parents_out"][b]
            if children[parent] < 0:
                made["first_children"][b, parent] = t
            else:
                made["next_siblings"][b, children[parent]] = t
            children[parent] = t  # the last of them so far
    if spec.saved is not Saved.NO:  # one token too many; or one too few, if sequences are packed
        windows = torch.full((batch, most + (-1 if ragged else 1), dim, spec.reach - 1), 7.0)
        made["intermediate_conv_window"] = runs(windows, spec.x) if spec.saved is Saved.RUNS else wide(windows, spec.x, True)
    if spec.saved_index is not Index.NONE:
        made["intermediate_state_indices"] = slot_indices(spec.saved_index, batch, batch, g)
    return ordered(spec, made)


def causal_conv1d_update(spec: UpdateSpec, batch: int, seed: int) -> Trial:
    return trial(
        CALLER,
        operands(spec, batch, seed),
        Options(spec.silu, dilation=spec.dilation),
        exact=("conv_state", "intermediate_conv_window", "parents_out"),
    )


TRIALS = {UpdateSpec: causal_conv1d_update}
