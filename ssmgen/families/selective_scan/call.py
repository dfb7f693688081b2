"""selective_scan: Mamba-1 over prompts, on torch tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from ...calls.operator import operator, run
from ...engine.chunks.segments import SEGMENTS
from ...engine.new_tensors import new_like
from .operands import OPERANDS
from .planning import CALLER, Options


@operator(like="u", segments=SEGMENTS)
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    delta_softplus: bool = False,
    channels_first: bool = False,
    cu_seqlens: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    state: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = -1,
    segments: int | None = None,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Whole sequences of Mamba-1, per token and channel: h <- exp(delta A) h + delta u B;  out = C h + D u, times silu(z).

    dim channels with N states each, 1 … 256; G groups of channels, which share B and C. The states are those that
    `selective_state_update` goes on from. All arithmetic is f32; nothing is assumed of A but its sign. The bits do not depend on the batch,
    on packing or on layout, and with segments=1 a sequence cut at multiples of 4 tokens, with f32 states, gives those of the whole.

    u, delta, z, out: [batch, T, dim], or for packed sequences with cu_seqlens [tokens, dim] or [1, tokens, dim]
    B, C: [batch, T, G, N] or [batch, T, N], of packed sequences [tokens, G, N] or [tokens, N] (or the former with a batch of one)
        All are bf16, f16 or f32, of one dtype. Any strides are taken as they are, and nothing is copied; fastest are contiguous channels,
        or contiguous tokens that begin at multiples of 16 bytes
    channels_first: they are [batch, dim, T] and [batch, G, N, T] or [batch, N, T]; packed [dim, tokens] and [G, N, tokens] or [N, tokens].
        This says only what the axes are: what lies contiguous is seen from strides
    A: [dim, N] f32, negative          D, delta_bias: [dim] f32, bf16 or f16, each its own; None for none
    delta_softplus: delta <- log(1 + e^(delta + delta_bias))
    cu_seqlens: [sequences + 1] int32 or int64 on the device, where each packed sequence starts. A sequence may have no tokens; tokens of no
        sequence get no output. States are then per sequence
    initial_states: [sequences, dim, N] f32, f16 or bf16, states before the first token; zeros if None
    return_final_states: also return the states after the last token, [sequences, dim, N], in final_states_out if that is given (which may
        be initial_states), else new ones of initial_states' dtype or f32
    state: [slots, dim, N], a pool in place of final states: receives the state after each sequence. Without initial_states it holds the
        one before it too, where has_initial_state, [sequences] bool, is true. A sequence without tokens leaves its slot alone
    state_indices: [sequences] int32 or int64, slot of each sequence; None for slot = sequence. Slots must be distinct
    pad_slot_id: a sequence whose slot is negative, equals it or is no slot of the pool gets a zero output and touches no state
    segments: parts of a sequence that are walked side by side, 1 … 1024 at most (8 are the most there are, of 128 tokens or more; of more
        than 64 states, or where there are no clusters, 1); 1 leaves it whole. None: as its own length, dim and N say: whole where
        channels are many, or it is short. Three or more have other bits than one
    out: of u's dtype; None for a new one, laid out like u
    pdl: whether the kernel may start while the previous one in the stream ends; None = where the device can (sm_90 and later)

    Returns out, or (out, final states). CPU tensors run the reference implementation, token by token.
    Raises ArgumentError listing every violated requirement, before anything is launched; UnsupportedError for what no kernel serves;
    CaptureError when a kernel would have to be built during a CUDA graph capture; NotBuiltError, CompileError, LoadError, LaunchError.
    Source: Gu & Dao 2023 (arXiv 2312.00752); the arguments are those of mamba-ssm and vLLM.
    """
    final = final_states_out
    if isinstance(u, Tensor):
        out = new_like(u) if out is None else out
        if return_final_states and final is None and u.dim() in (2, 3) and isinstance(A, Tensor) and A.dim() == 2:
            dtypes = [t.dtype for t in (initial_states, state) if isinstance(t, Tensor)]
            count = u.shape[0] if not isinstance(cu_seqlens, Tensor) else max(cu_seqlens.numel() - 1, 0)
            final = u.new_empty((count, *A.shape), dtype=dtypes[0] if dtypes else torch.float32)
    tensors = OPERANDS.Tensors(
        u, delta, A, B, C, D, z, delta_bias, cu_seqlens, initial_states, final, state, state_indices, has_initial_state, out
    )
    returns = ("out", "final_states") if return_final_states and final is not None else ("out",)
    return run(CALLER, tensors, Options(delta_softplus, channels_first, pad_slot_id, segments), pdl, returns=returns)
