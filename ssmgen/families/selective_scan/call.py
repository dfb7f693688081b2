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

    dim channels with N states each, 1 … 256; G groups of channels, which share B and C. `selective_state_update` continues from these
    states.

    u, delta, z, out: [batch, T, dim], or for packed sequences with cu_seqlens [tokens, dim] or [1, tokens, dim]
    B, C: [batch, T, G, N] or [batch, T, N], for packed sequences [tokens, G, N] or [tokens, N] (or the former with a batch of one). All are
        bf16, f16 or f32, of one dtype
    A: [dim, N] f32, negative          D, delta_bias: [dim] f32, bf16 or f16, each with its own dtype; or None
    delta_softplus: delta <- log(1 + e^(delta + delta_bias))
    channels_first: they are [batch, dim, T] and [batch, G, N, T] or [batch, N, T]; packed [dim, tokens] and [G, N, tokens] or [N, tokens].
        This only names the axes; strides tell which axis is contiguous
    cu_seqlens: [sequences + 1] int32 or int64 on the device, start of each packed sequence. A sequence may have no tokens; tokens outside
        all sequences get no output. States are then per sequence
    initial_states: [sequences, dim, N] f32, f16 or bf16, states before the first token; zeros if None
    return_final_states: also return the states after the last token, [sequences, dim, N], in final_states_out if that is given (which may
        be initial_states), else new ones of initial_states' dtype or f32
    out: of u's dtype; None for a new one, laid out like u

    States in a pool:
    state: [slots, dim, N], a pool instead of final states: receives the state after each sequence. Without initial_states it also holds
        the state before it, if has_initial_state, [sequences] bool, is true. A sequence without tokens leaves its slot unchanged
    state_indices: [sequences] int32 or int64, slot of each sequence; None for slot = sequence. Slots must be distinct
    pad_slot_id: a sequence whose slot is negative, equals this or is not in the pool gets a zero output and touches no state

    Launch and segments:
    segments: most parts of a sequence that are scanned in parallel, 1 … 1024. The kernel uses at most 8 parts, of 128 tokens or more, and
        only 1 with more than 64 states or without clusters; 1 leaves the sequence whole. None: the sequence's length, dim and N decide,
        whole if there are many channels or the sequence is short. Three or more parts change bits compared to one
    pdl: whether the kernel may start while the previous one in the stream ends; None = if the device can (sm_90 and later)

    Types and precision:

    Any strides are allowed, and nothing is copied; fastest are contiguous channels, or contiguous tokens that begin at multiples of 16
    bytes. All arithmetic is f32; A is only assumed to be negative. The bits do not depend on the batch, on packing or on layout. With
    segments=1 and f32 states, a sequence cut at multiples of 4 tokens gives the same bits as the whole sequence.

    Returns out, or (out, final states). CPU tensors run the reference implementation, token by token.
    Raises ArgumentError listing every violated requirement, before anything is launched; UnsupportedError if no kernel serves the call;
    CaptureError when a kernel would have to be built during a CUDA graph capture; NotBuiltError, CompileError, LoadError, LaunchError.
    Source: Gu & Dao 2023 (arXiv 2312.00752); the arguments follow mamba-ssm and vLLM.
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
