"""SGLang's functions for prompts of Mamba-1 and Mamba-2, as in SGLang 0.5.23."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...families.selective_scan.call import selective_scan as _selective_scan
from ..shared import invariance
from ..shared import mamba_prompts as _prompts
from ..shared.operands import takes as _takes

METHOD = "MambaMixer1._selective_scan"


def one_head(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    out: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """The operands of a step of heads of one row in one group, without the axes of rows and groups: the heads become rows.

    A block of the kernel takes rows of one head; heads of one row would give it one row each.
    state: [slots, dim, 1, N]   x, dt, z, out: [batch, dim, 1]   A: [dim, 1, N]   B, C: [batch, 1, N]   D, dt_bias: [dim, 1]
    """
    x, dt = (t if t.dim() < 3 else t.squeeze(2) for t in (x, dt))
    z, out = (t if t is None or t.dim() < 3 else t.squeeze(2) for t in (z, out))
    D, dt_bias = (t if t is None or t.dim() < 2 else t.squeeze(1) for t in (D, dt_bias))
    A = A[:, None].expand(-1, B.shape[-1]) if A.dim() == 1 else A
    state, A, B, C = (t.squeeze(-2) for t in (state, A, B, C))
    return state, x, dt, A, B, C, D, z, dt_bias, out


@_takes(x="[T, D]", dt="[T, D]", B="[T, N]", C="[T, N]", h0="[D, N]")
def selective_scan(*, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
    """Mamba-1 over one sequence, per token and channel: h <- exp(dt A) h + dt x B;  out = C h, with dt after its softplus.

    x, dt: [T, D]          A: [D, N], negative          B, C: [T, N]          h0: [D, N], the state before the first token

    Returns (the state after the last token [D, N] of h0's dtype, out [T, D]). Arguments are keywords.
    Raises ArgumentError (a ValueError) listing every violated requirement, before anything is launched.
    """
    how: dict[str, Any] = {"initial_states": h0[None], "return_final_states": True} | invariance.whole(_selective_scan)
    y, states = _selective_scan(x[None], dt[None], A, B[None], C[None], **how)
    return states[0], y[0]


@_takes(
    "return_final_states return_varlen_states return_intermediate_states return_track_states",
    **_prompts.PADDED,
    out=_prompts.ROWS,
    track_seq_idx="[count]",
    track_end_locs="[count]",
)
def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    out: Tensor | None = None,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    return_intermediate_states: bool = False,
    state_dtype: torch.dtype | None = None,
    return_track_states: bool = False,
    track_seq_idx: Tensor | None = None,
    track_end_locs: Tensor | None = None,
) -> Tensor | tuple[Tensor | None, ...] | None:
    """Mamba-2 (SSD) over prompts, per token: S <- exp(dt A) S + dt x B;  out = C S + D x, times silu(z).

    H heads of P rows (headdim), N = d_state, multiples of 16 up to 256; G groups of heads that share B and C.

    x, z, out: [batch, T, H, P]; z None for no gate          B, C: [batch, T, G, N]. All are bf16, f16 or f32, of one dtype
    dt: [batch, T, H]          A: [H], negative          D: [H] or [H, P], dt_bias: [H]; None for none
    dt_softplus: dt <- log(1 + e^(dt + dt_bias)); dt_limit: dt is then clamped to (low, high)
    initial_states: [batch, H, P, N], or [sequences, H, P, N] of packed sequences, f32, f16 or bf16; zeros if None
    out: is written; None: a new output is returned, before the states
    return_final_states: also return the states after each row, [batch, H, P, N] f32

    Returns the requested results, in the order output, intermediate, final and varlen states; None for nothing.
    Unlike in SGLang, states between chunks are f32.
    Raises UnsupportedError for several packed sequences without seq_idx, and for state_dtype other than f32, f16 and bf16. Raises
    ArgumentError (a ValueError) for return_track_states without return_varlen_states, and for operands that do not fit or require grad.

    Packed sequences:
    return_varlen_states: sequences are packed in one row, and the states after each are returned, [sequences, H, P, N]
    cu_seqlens: [sequences + 1] int32 or int64, start of each packed sequence
    seq_idx: [batch, T] int32: without return_varlen_states, the state restarts from zero where it changes; with it, it must be given for
        several sequences, and is not read
    state_dtype: dtype of all states but the final ones; None for C's

    States at positions, for prefix caches:
    return_intermediate_states: the states before each chunk of chunk_size tokens of a row, [batch, chunks, H, P, N]; the first is the
        initial state
    return_track_states: returns these states, the varlen states, and [1, count, H, P, N], the states after track_end_locs [count] tokens of
        the packed row; the last is None without track_end_locs or track_seq_idx

    Ignored arguments:
    chunk_indices, chunk_offsets: they follow from the others
    """
    name = "sglang's mamba_chunk_scan_combined"
    if return_track_states and not return_varlen_states:
        raise ArgumentError(
            name,
            [
                "return_track_states is True without return_varlen_states; expected both, for packed sequences. "
                "Pass return_varlen_states=True."
            ],
        )
    tracked = return_track_states and track_seq_idx is not None and track_end_locs is not None and track_end_locs.numel() > 0
    chunks, final = return_track_states or return_intermediate_states, return_final_states and not return_track_states
    wanted = _prompts.Wanted(chunks, final, return_varlen_states, track_end_locs if tracked else None)
    written = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    found = _prompts.combined(
        name, wanted, _prompts.Operands(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit), written, chunk_size=chunk_size,
        initial_states=initial_states, seq_idx=seq_idx, cu_seqlens=cu_seqlens, state_dtype=state_dtype,
    )  # fmt: skip
    if return_track_states:
        return found.chunks, found.varlen, found.ends
    return _prompts.only((found.chunks, found.final, found.varlen))
