"""SGLang's functions for prompts of Mamba-1 and Mamba-2, as in SGLang 0.5.23."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...families.causal_conv1d.call import causal_conv1d
from ...families.selective_scan.call import selective_scan as _selective_scan
from ..shared import invariance
from ..shared import mamba_prompts as _prompts
from ..shared.gated_delta import first as _first
from ..shared.operands import takes as _takes
from ..shared.replacing import Replacement

METHOD, PREFILL = "MambaMixer1._selective_scan", "MambaMixer1._forward_prefill"


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
    x="[tokens, D]", gate="[tokens, D]", out="[tokens, D]", conv_state="[slots, D, state_len]", ssm_state="[slots, D, 1, N]",
    conv_weights="[D, width]", state_indices="[sequences]", query_start_loc="[sequences + 1]",
)  # fmt: skip
def mamba1_prompts(
    self: Any,
    *,
    x: Tensor,
    gate: Tensor,
    out: Tensor,
    A: Tensor,
    conv_state: Tensor,
    ssm_state: Tensor,
    conv_weights: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor,
    metadata: Any,
    use_triton_causal_conv: bool,
) -> None:
    """Convolution and scan of Mamba-1's prompts, into out: the method _forward_prefill of SGLang's MambaMixer1.

    h <- exp(dt A) h + dt x B;  y = (C h + D x) silu(gate), per token and channel; dt is the softplus of the layer's projection.

    x, gate, out: [tokens, D], packed          A: [D, N], negative          query_start_loc: [sequences + 1], start of each sequence
    conv_state, ssm_state: [slots, D, state_len] and [slots, D, 1, N], pools, updated in place          state_indices: [sequences], slots

    All sequences in two launches, besides the layer's projections, without a number from the GPU. SGLang has a loop over sequences, with
    three synchronisations each. Padding is as in the other functions. Raises ArgumentError for operands that do not fit.
    """
    mixed, sequences, width = metadata.mixed_metadata, query_start_loc.shape[0] - 1, conv_weights.shape[1]
    slots = _first(state_indices, sequences)
    started = None if mixed is None else _first(mixed.has_initial_states, sequences)
    rows, windows, held = x.to(conv_state.dtype), conv_state[..., : width - 1], ssm_state.squeeze(2)
    weight, bias = conv_weights.to(conv_state.dtype), self.conv1d.bias
    bias = None if bias is None else bias.to(conv_state.dtype)
    places = slots.clamp(min=0)
    convolved, before = torch.empty_like(rows, memory_format=torch.contiguous_format), windows[places]
    causal_conv1d(
        rows.t(), weight, bias, activation=self.activation, query_start_loc=query_start_loc, conv_states=windows,
        conv_state_indices=slots, has_initial_state=started, out=convolved.t(),
    )  # fmt: skip
    try:
        convolved = convolved.to(x.dtype)
        dt, B, C = self._ssm_params(convolved)
        if any(t.dtype != x.dtype for t in (dt, B, C)):
            convolved, dt, B, C, gate = (t.float() for t in (convolved, dt, B, C, gate))
        into = out if out.dtype == convolved.dtype else torch.empty_like(convolved)
        _selective_scan(
            convolved, dt, A, B, C, self.D, gate, delta_softplus=True, cu_seqlens=query_start_loc, state=held, state_indices=slots,
            has_initial_state=started, out=into, **invariance.whole(_selective_scan),
        )  # fmt: skip
    except Exception:
        windows[places] = before  # as they were, for SGLang's own method
        raise
    if into is not out:
        out.copy_(into)


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
        the packed row; the last is None without track_end_locs. Without track_seq_idx, SGLang tracks no sequence: the first is None too,
        which SGLang's layer does not read then

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
    chunks = return_intermediate_states if not return_track_states else track_seq_idx is not None
    final = return_final_states and not return_track_states
    wanted = _prompts.Wanted(chunks, final, return_varlen_states, track_end_locs if tracked else None)
    written = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    found = _prompts.combined(
        name, wanted, _prompts.Operands(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit), written, chunk_size=chunk_size,
        initial_states=initial_states, seq_idx=seq_idx, cu_seqlens=cu_seqlens, state_dtype=state_dtype,
    )  # fmt: skip
    if return_track_states:
        return found.chunks, found.varlen, found.ends
    return _prompts.only((found.chunks, found.final, found.varlen))


_PLACE = "sglang.srt.layers.attention.mamba"
REPLACEMENTS = [
    Replacement(f"{_PLACE}.mamba1", METHOD, selective_scan),
    Replacement(
        f"{_PLACE}.mamba1", PREFILL, mamba1_prompts,
        needs=(
            f"{_PLACE}.mamba1.{METHOD}", f"{_PLACE}.causal_conv1d.causal_conv1d_fn",
            "sglang.kernels.ops.mamba.causal_conv1d_triton.causal_conv1d_fn",
        ),
    ),
]  # fmt: skip
