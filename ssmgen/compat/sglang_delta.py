"""SGLang's function for prompts of gated delta rules, as in SGLang 0.5.23."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ArgumentError, UnsupportedError
from . import delta_prompts as _prompts
from .gated_delta import new_output as _new_output
from .operands import takes as _takes


@_takes("head_first inplace_update", **_prompts.PACKED, initial_state="[slots, HV, V, K]", initial_state_indices="[N]")
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[Tensor, None, Tensor]:
    """(output [B, T, HV, V] of q's dtype, None, states before each chunk [B, chunks, HV, V, K] of the pool's dtype).

    q, k: [B, T, H, K]   v: [B, T, HV, V]   g: [B, T, HV], the log decay   beta: [B, T, HV]
    initial_state: [slots, HV, V, K], a pool, which receives the states after each sequence, unless inplace_update is False
    initial_state_indices: [N], slots; a negative one, or none of the pool's, is padding   cu_seqlens: [N + 1], with B = 1; else N is B
    Chunks are of 64 tokens from each sequence's start, and their states lie behind each other as the sequences do; SGLang's caches of
    prefixes pick theirs from them. There are as many as T tokens of N sequences can have, and what is behind the last one is undefined.
    Raises UnsupportedError without a pool and its indices, and with head_first.
    """
    reasons = [] if not head_first else ["head_first=True: operands are [B, T, heads, …]"]
    needed = {"initial_state": initial_state, "initial_state_indices": initial_state_indices}
    reasons += [f"{what} is None: ssmgen's states are a pool" for what, t in needed.items() if t is None]
    if reasons or initial_state is None or initial_state_indices is None:
        raise UnsupportedError("sglang's chunk_gated_delta_rule", reasons)
    indices = {"initial_state_indices": initial_state_indices, "cu_seqlens": cu_seqlens}
    if problems := _prompts.objections(v, indices, {"initial_state": initial_state}):
        raise ArgumentError("sglang's chunk_gated_delta_rule", problems)
    sequences = _prompts.sequences_of(v, cu_seqlens)
    slots = initial_state_indices[:sequences]
    before, out = _prompts.gathered(initial_state, slots), _new_output(q, v)
    rows, positions = _chunks(v, cu_seqlens)
    chunks = initial_state.new_empty((positions.numel(), *initial_state.shape[1:]))
    pool = {"state": initial_state, "state_indices": slots} if inplace_update else {}
    _prompts.scan(
        _prompts.Operands(q, k, v, g, beta), out, initial_states=before, cu_seqlens=cu_seqlens, scale=scale,
        use_qk_l2norm=use_qk_l2norm_in_kernel, positions=positions, checkpoints=chunks, **pool,
    )  # fmt: skip
    if chunks.numel():
        chunks.index_copy_(0, rows, before)  # ahead of a first chunk is no token whose state it could be
    return out, None, chunks.unflatten(0, (v.shape[0], positions.numel() // max(v.shape[0], 1)))


def _chunks(v: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """([N] row of each sequence's first chunk, [count] after how many tokens each chunk begins, ascending)."""
    batch, length = v.shape[:2]
    if cu_seqlens is None:
        each = -(-length // _prompts.CHUNK)
        start, chunk = (torch.arange(n, device=v.device) for n in (batch, each))
        return start * each, (start[:, None] * length + chunk * _prompts.CHUNK).flatten()
    sequences = cu_seqlens.shape[0] - 1
    if sequences < 1:
        return cu_seqlens[:0], cu_seqlens[:0]
    counts = (cu_seqlens.diff() + (_prompts.CHUNK - 1)) // _prompts.CHUNK
    ends = counts.cumsum(0)
    first, count = ends - counts, length // _prompts.CHUNK + sequences
    chunk = torch.arange(count, device=v.device)
    owner = torch.searchsorted(ends[:-1], chunk, right=True)
    positions = torch.add(torch.sub(cu_seqlens[:-1], first, alpha=_prompts.CHUNK)[owner], chunk, alpha=_prompts.CHUNK)
    return first.masked_fill(counts <= 0, count - 1), positions  # where a sequence has no tokens, the last row is nobody's
