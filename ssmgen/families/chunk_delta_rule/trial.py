"""Trials of chunk_delta_rule: operands from a spec alone, and what becomes of them."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from ...calls.checks import TORCH_DTYPES
from ...engine.chunks.problem import CHUNK, cut_from
from ...engine.trial import INTEGERS, Trial, boundaries, cycled, slot_indices, trial
from ...spec.kernel import DType, Index, Layout, Loads
from .chain import ChainSpec
from .operands import OPERANDS
from .planning import CALLERS, Options
from .problem import OPERATOR, Gate
from .segments import workspace_for

HEADS, KEY_HEADS = 2, 1
# More than one rounding's norm error: of T, P, states, and what is added to them, each before its product. Without decay they stay.
SLACK = {DType.BF16: 1e-2, DType.F16: 1.6e-3}


def operands(spec: ChainSpec, batch: int, seed: int, tokens: int = 0) -> dict[str, Tensor]:
    """Sequences of more than a chunk, or of enough to be cut into segments, and of so many tokens at least; packed ones also of less, of
    one token and of none."""
    g = torch.Generator().manual_seed(seed)
    length = max((cut_from(spec.segment_chunks) if spec.divided else 1) * CHUNK + 5, tokens)
    counts = cycled((length, 3, 0, CHUNK, 1), batch)
    lead = (1, sum(counts)) if spec.ragged else (batch, length)
    slots = batch if spec.index is Index.NONE else 3 * batch

    def rows(heads: int, channels: int) -> Tensor:
        """A slice of a wider tensor, whose tokens begin at multiples of so many bytes as are copied at once."""
        gap = spec.copy // TORCH_DTYPES[spec.x].itemsize
        wide = torch.randn(*lead, heads, channels + gap, generator=g).to(TORCH_DTYPES[spec.x])
        return wide[..., gap:]

    def gates(dtype: DType) -> Tensor:
        return torch.rand(*lead, HEADS, generator=g).to(TORCH_DTYPES[dtype])

    made = {"q": rows(KEY_HEADS, spec.head_k), "k": rows(KEY_HEADS, spec.head_k), "v": rows(HEADS, spec.head_v)}
    if not spec.l2norm:  # longer keys than 1 make the state grow
        made["k"] /= spec.head_k**0.5
    made["out"] = torch.full_like(made["v"], float("nan"))
    if spec.g is not None:
        made["g"] = gates(spec.g) * (-0.2 if spec.gate is Gate.LOG else 1)
    for name, dtype in (("A_log", spec.A_log), ("dt_bias", spec.dt_bias)):
        if dtype is not None:
            made[name] = -torch.rand(HEADS, generator=g).to(TORCH_DTYPES[dtype])
    made["beta"] = gates(spec.beta)
    if spec.ragged:
        made["cu_seqlens"] = boundaries(counts, spec.cu_seqlens)
    counted = {"initial_states": batch, "final_states": batch, "state": slots}
    if spec.marked:  # before, at and behind each row's first chunk's end, and nowhere
        total = lead[0] * lead[1]
        near = [s + t for s in range(0, total, lead[1]) for t in (1, CHUNK - 1, CHUNK, CHUNK + 1) if s + t <= total]
        made["checkpoint_positions"] = torch.tensor(sorted({0, *near, total, total + 1})).to(INTEGERS[spec.checkpoints])
        counted["checkpoints"] = made["checkpoint_positions"].numel()
    made |= {name: _states(spec, count, g) for name, count in counted.items()}
    if spec.index is not Index.NONE:
        made["state_indices"] = slot_indices(spec.index, batch, slots, g)
    made["has_initial_state"] = torch.arange(batch) % 3 == 0
    segments = spec.segments if spec.divided else 1
    size = workspace_for(lead[0] * lead[1], batch, HEADS, spec.head_k, spec.head_v, segments, lead[1])
    made["workspace"] = torch.full((size,), 0xFF, dtype=torch.uint8)
    used = {name for part in spec.kernels for name in part.operands()}
    return {name: made[name] for name in OPERANDS.names if name in used}


def _states(spec: ChainSpec, count: int, g: Generator) -> Tensor:
    """Pairs of numbers lie at multiples of two, or at odd places."""
    inner = HEADS * spec.head_v * spec.head_k
    odd = spec.state_loads is Loads.ELEMENT
    wide = torch.randn(count, inner + (1 if odd else 2), generator=g).to(TORCH_DTYPES[spec.state])
    shape = (spec.head_k, spec.head_v) if spec.layout is Layout.KV else (spec.head_v, spec.head_k)
    return wide[:, 1 if odd else 0 :][:, :inner].view(count, HEADS, *shape)


def chunk_delta_rule(spec: ChainSpec, batch: int, seed: int, tokens: int = 0) -> Trial:
    options = Options(spec.gate.value, spec.beta_form.value, spec.l2norm, spec.head_k**-0.5, spec.layout.value, segments=spec.segments)
    name = OPERATOR if spec.gate is Gate.NONE else "chunk_gated_delta_rule"
    named = operands(spec, batch, seed, tokens)
    return trial(CALLERS[name], named, options, slack=dict.fromkeys(OPERANDS.written, SLACK[spec.x]), between=("workspace",))


TRIALS = {ChainSpec: chunk_delta_rule}
