"""Trials of chunk_delta_rule: operands from a spec alone, and the call that takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...calls.checks import TORCH_DTYPES
from ...engine.chunks.problem import CHUNK, cut_from
from ...engine.chunks.trial import rows, sequences, tokens_of
from ...engine.trial import Trial, trial
from ...spec.kernel import DType, Layout
from .chain import ChainSpec
from .operands import OPERANDS
from .planning import CALLERS, Options
from .problem import OPERATOR, Gate
from .spec import workspace_for

HEADS, KEY_HEADS = 2, 1
# More than one rounding's norm error: T, P, states and additions to states are each rounded before a product. Without decay errors stay.
SLACK = {DType.BF16: 1e-2, DType.F16: 1.6e-3}


def operands(spec: ChainSpec, batch: int, seed: int, tokens: int = 0) -> dict[str, Tensor]:
    """Sequences longer than a chunk, or long enough to be cut into segments, with at least `tokens` tokens; packed ones also shorter, of
    one token and without tokens."""
    g = torch.Generator().manual_seed(seed)
    length = max((cut_from(spec.segment_chunks) if spec.divided else 1) * CHUNK + 5, tokens)
    lead, counts = tokens_of(spec, batch, length, CHUNK)

    def gates(dtype: DType) -> Tensor:
        return torch.rand(*lead, HEADS, generator=g).to(TORCH_DTYPES[dtype])

    made = {name: rows(spec, lead, KEY_HEADS, spec.head_k, g) for name in ("q", "k")} | {"v": rows(spec, lead, HEADS, spec.head_v, g)}
    if not spec.l2norm:  # longer keys than 1 make the state grow
        made["k"] /= spec.head_k**0.5
    made["out"] = torch.full_like(made["v"], float("nan"))
    if spec.g is not None:
        made["g"] = gates(spec.g) * (-0.2 if spec.gate is Gate.LOG else 1)
    for name, dtype in (("A_log", spec.A_log), ("dt_bias", spec.dt_bias)):
        if dtype is not None:
            made[name] = -torch.rand(HEADS, generator=g).to(TORCH_DTYPES[dtype])
    made["beta"] = gates(spec.beta)
    state = (spec.head_k, spec.head_v) if spec.layout is Layout.KV else (spec.head_v, spec.head_k)
    made |= sequences(spec, batch, lead, counts, (HEADS, *state), CHUNK, g)
    segments = spec.segments if spec.divided else 1
    size = workspace_for(lead[0] * lead[1], batch, HEADS, spec.head_k, spec.head_v, segments, lead[1])
    made["workspace"] = torch.full((size,), 0xFF, dtype=torch.uint8)
    used = {name for part in spec.kernels for name in part.operands()}
    return {name: made[name] for name in OPERANDS.names if name in used}


def chunk_delta_rule(spec: ChainSpec, batch: int, seed: int, tokens: int = 0) -> Trial:
    options = Options(spec.gate.value, spec.beta_form.value, spec.l2norm, spec.head_k**-0.5, spec.layout.value, segments=spec.segments)
    name = OPERATOR if spec.gate is Gate.NONE else "chunk_gated_delta_rule"
    named = operands(spec, batch, seed, tokens)
    return trial(CALLERS[name], named, options, slack=dict.fromkeys(OPERANDS.written, SLACK[spec.x]), between=("workspace",))


TRIALS = {ChainSpec: chunk_delta_rule}
