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
    """One sequence of Mamba-1, of steps dt after their softplus: (the state after it [D, N] of h0's dtype, outputs [T, D]).

    x, dt: [T, D]   A: [D, N]   B, C: [T, N]   h0: [D, N], the state before it
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
    """Prompts of Mamba-2: writes out [batch, T, H, P], and returns states. x, z: like out; dt [batch, T, H]; B, C [batch, T, G, N].

    return_varlen_states: sequences are packed in one row, as cu_seqlens [sequences + 1] says; initial_states [sequences, H, P, N], and the
        states after each are returned. Without it rows are sequences, parted by seq_idx; initial_states [batch, H, P, N]
    return_final_states: [batch, H, P, N] f32, after each row
    return_intermediate_states: [batch, chunks, H, P, N], before each chunk of chunk_size tokens of a row; the first is the initial state
    return_track_states: those, the varlen states, and [1, count, H, P, N], after track_end_locs [count] tokens of the packed row; None
        without track_end_locs or track_seq_idx
    state_dtype: the dtype of all states except the final ones; C's if None
    Returns what is asked for, in the order intermediate, final, varlen; None for nothing.
    chunk_indices, chunk_offsets and, of packed sequences, seq_idx follow from the others: ignored. States between chunks are f32.
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
