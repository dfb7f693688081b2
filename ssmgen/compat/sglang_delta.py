"""SGLang's functions for prompts of gated delta rules, as in SGLang 0.5.23: the one that its Triton backend calls, and that backend's."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

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
    counts, ends = _ends(cu_seqlens)
    first, count = ends - counts, length // _prompts.CHUNK + sequences
    chunk = torch.arange(count, device=v.device)
    owner = torch.searchsorted(ends[:-1], chunk, right=True)
    positions = torch.add(torch.sub(cu_seqlens[:-1], first, alpha=_prompts.CHUNK)[owner], chunk, alpha=_prompts.CHUNK)
    return first.masked_fill(counts <= 0, count - 1), positions  # where a sequence has no tokens, the last row is nobody's


def _ends(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """([N] chunks of each sequence, [N] chunks up to its end)."""
    counts = (cu_seqlens.diff() + (_prompts.CHUNK - 1)) // _prompts.CHUNK
    return counts, counts.cumsum(0)


@_takes(
    "inplace_update", **_prompts.PACKED, **dict.fromkeys(("cache_indices", "track_chunk_idx"), "[N]"), query_start_loc="[N + 1]",
    ssm_states="[slots, HV, V, K]", track_state="[N, HV, V, K]",
)  # fmt: skip
def _extended(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor,
    inplace_update: bool, track_state: Tensor | None, track_chunk_idx: Tensor | None,
) -> tuple[Tensor, None, None]:  # fmt: skip
    """The method with all that it looks at by name."""
    name, tracked, chunk = "sglang's TritonGDNKernel.extend", track_state, track_chunk_idx
    indices = {"cache_indices": cache_indices, "query_start_loc": query_start_loc, "track_chunk_idx": chunk}
    problems = _prompts.objections(v, indices, {"ssm_states": ssm_states, "track_state": tracked})
    sequences = query_start_loc.shape[0] - 1
    problems += [] if (tracked is None) == (chunk is None) else ["track_state and track_chunk_idx go together"]
    if chunk is not None and chunk.shape[0] != sequences:
        problems.append(f"track_chunk_idx is {list(chunk.shape)}, not [N] as query_start_loc [{sequences} + 1] asks for")
    if problems:
        raise ArgumentError(name, problems)
    slots, out, operands = cache_indices[:sequences], _new_output(q, v), _prompts.Operands(q, k, v, g, beta)
    before = None if inplace_update and tracked is None else _prompts.gathered(ssm_states, slots)
    options: dict[str, Any] = {"cu_seqlens": query_start_loc, "use_qk_l2norm": True}
    if inplace_update:
        options |= {"state": ssm_states, "state_indices": slots, "has_initial_state": slots >= 0}
    else:
        options["initial_states"] = before
    if tracked is None or chunk is None or before is None:
        _prompts.scan(operands, out, **options)
        return out, None, None
    positions = torch.add(query_start_loc[:-1], chunk.clamp(min=0), alpha=_prompts.CHUNK)
    _prompts.scan(operands, out, positions=positions, checkpoints=tracked, **options)
    # Ahead of a first chunk is no token whose state it could be.
    torch.where((chunk == 0)[:, None, None, None], before.to(tracked.dtype), tracked, out=tracked)
    return out, None, None


def extend(
    self: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    inplace_update: bool = True,
    **kwargs: Any,
) -> tuple[Tensor, None, None]:
    """(output [1, T, HV, V] of q's dtype, None, None): the method of SGLang's TritonGDNKernel, without states that nobody asked for.

    q, k: [1, T, H, K], which are divided by their norms   v: [1, T, HV, V]   g: [1, T, HV], the log decay   beta: [1, T, HV]
    ssm_states: [slots, HV, V, K], a pool, which receives the states after each sequence, unless inplace_update is False
    cache_indices: [N], slots; a negative one, or none of the pool's, is padding   query_start_loc: [N + 1]
    track_state, with track_chunk_idx [N]: [N, HV, V, K] f32, receives the state of each sequence after so many chunks of 64 tokens;
        what it receives where there is a negative number is undefined. It is rounded to the pool's dtype
    Other keywords are those of other kernels of SGLang: ignored, as there.
    """
    tracked, chunk = kwargs.get("track_state"), kwargs.get("track_chunk_idx")
    found: tuple[Tensor, None, None] = _extended(
        q, k, v, g, beta, ssm_states, cache_indices, query_start_loc, inplace_update, tracked, chunk
    )
    return found


def with_tracked_states(original: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's own method, for calls that ssmgen refuses: it gives all states ahead of chunks, and does not know track_state."""

    @wraps(original)
    def call(*args: Any, track_state: Tensor | None = None, track_chunk_idx: Tensor | None = None, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if track_state is not None and track_chunk_idx is not None and track_state.numel():
            counts, ends = _ends(kwargs["query_start_loc"])
            track_state.copy_(found[2][0, (ends - counts + track_chunk_idx.clamp(min=0)).clamp_(max=found[2].shape[1] - 1)])
        return found

    return call


METHOD = "TritonGDNKernel.extend"
SAYS = {"supports_track_state_snapshot": True}
