"""Trials of chunk_scan: operands from a spec alone, and the call that takes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...calls.checks import TORCH_DTYPES
from ...engine.chunks.trial import rows, sequences, tokens_of
from ...engine.trial import Trial, ordered, trial
from ...spec.kernel import DType
from .attention import CALLERS
from .call import CALLER, Options
from .spec import CHUNK, Gate, ScanSpec
from .warpgroups import LEAD, LEAST, WarpgroupScanSpec

HEADS, GROUPS = 2, 1
# More than one rounding's norm error: states, M and additions to states are each rounded before a product.
SLACK = {DType.BF16: 4e-3, DType.F16: 6e-4, DType.F32: 1e-5}


def operands(spec: ScanSpec, batch: int, seed: int, tokens: int = 0) -> dict[str, Tensor]:
    """Sequences longer than a chunk, and than one block's part if blocks share them, with at least `tokens` tokens; packed ones also
    shorter, of one token and without tokens."""
    g = torch.Generator().manual_seed(seed)
    least = LEAST * (LEAD[0] + LEAD[1]) // LEAD[1] if spec.ends else LEAST if spec.parts > 1 else 1
    most = max(least * CHUNK + 5, tokens)
    lead, counts = tokens_of(spec, batch, most, CHUNK)
    made = {"x": rows(spec, lead, HEADS, spec.headdim, g)} | {name: rows(spec, lead, GROUPS, spec.d_state, g) for name in ("B", "C")}
    made["out"] = torch.full_like(made["x"], float("nan"))
    if spec.g is not None:
        decays = torch.rand(*lead, HEADS, generator=g) if spec.gate is Gate.LOG else torch.rand(HEADS, generator=g)
        made["g"] = (decays if spec.gate is Gate.SLOPE else -decays).to(TORCH_DTYPES[spec.g])
    if spec.dt is not None and spec.A is not None:
        made["dt"] = torch.randn(*lead, HEADS, generator=g).to(TORCH_DTYPES[spec.dt])
        if not spec.dt_softplus:
            made["dt"] = made["dt"].abs()
        made["A"] = -torch.rand(HEADS, generator=g).to(TORCH_DTYPES[spec.A])
    if spec.D is not None:
        made["D"] = torch.randn(HEADS, generator=g).to(TORCH_DTYPES[spec.D])
    if spec.z:
        made["z"] = rows(spec, lead, HEADS, spec.headdim, g)
    if spec.dt_bias is not None:
        made["dt_bias"] = torch.rand(HEADS, generator=g).to(TORCH_DTYPES[spec.dt_bias])
    if spec.seq_idx:  # the first index, and an index of another row, occur again
        made["seq_idx"] = (torch.arange(lead[1]) // 30 % 2).int().repeat(lead[0], 1)
    made |= sequences(spec, batch, lead, counts, (HEADS, spec.headdim, spec.d_state), CHUNK, g)
    return ordered(spec, made)


def chunk_scan(spec: ScanSpec, batch: int, seed: int, tokens: int = 0) -> Trial:
    named = operands(spec, batch, seed, tokens)
    slack = dict.fromkeys(CALLER.family.written, SLACK[spec.x])
    if spec.attention:
        name = "chunk_lightning_attn" if spec.gate is Gate.SLOPE else "chunk_simple_gla"
        return trial(CALLERS[name], named, Options(scale=0.3, slope=spec.gate is Gate.SLOPE), slack=slack)
    limit = (0.1, 1.5) if spec.dt_limit else None
    return trial(CALLER, named, Options(spec.dt_softplus, limit), slack=slack)


TRIALS: dict[type[ScanSpec], Callable[..., Trial]] = {ScanSpec: chunk_scan, WarpgroupScanSpec: chunk_scan}
