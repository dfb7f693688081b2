"""vLLM's functions for prompts of Mamba-1 and Mamba-2, as in vLLM 0.33."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import ArgumentError, UnsupportedError
from ..shared import mamba1_prompts as _mamba1
from ..shared import mamba_prompts as _prompts
from ..shared.gated_delta import first as _first
from ..shared.operands import takes as _takes

_ROWS, _GROUPS = "[D, tokens] or [N, D, T]", "[d_state, tokens] or [G, d_state, tokens] or [N, d_state, T] or [N, G, d_state, T]"


@_takes(
    **dict.fromkeys(("u", "delta", "z"), _ROWS), **dict.fromkeys(("B", "C"), _GROUPS), ssm_states="[slots, D, d_state]",
    query_start_loc="[N + 1]", cache_indices="[N]", has_initial_state="[N]",
)  # fmt: skip
def selective_scan_fn(
    u: Tensor,
    ssm_states: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_block_id: int = 0,
    block_size: int = 1024,
    block_idx_first_scheduled_token: Tensor | None = None,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    cu_chunk_seqlen: Tensor | None = None,
    last_chunk_indices: Tensor | None = None,
) -> Tensor:
    """Mamba-1 over prompts, per token and channel: h <- exp(delta A) h + delta u B;  out = C h + D u, times silu(z).

    u, delta, z: [dim, tokens], packed, or [N, dim, T]; z None for no gate          A: [dim, d_state] f32, negative
    B, C: [G, d_state, tokens] or [N, G, d_state, T], also without G. u, delta, z, B and C are bf16, f16 or f32, of one dtype
    D, delta_bias: [dim]; None for none          delta_softplus: delta <- log(1 + e^(delta + delta_bias))
    query_start_loc: [N + 1], start of each packed sequence
    ssm_states: [slots, dim, d_state], a pool, receives the state after each sequence          cache_indices: [N], slots; None for 0, 1, …
    has_initial_state: [N] bool, whether the slot holds the state before the first token; None for no
    null_block_id: a slot equal to this, negative or out of the pool is padding: a zero output, and no state is touched

    Returns a new tensor laid out like u. vLLM's function overwrites z, or delta without z, and returns that: use the returned tensor.
    Raises UnsupportedError for states of every block: block_idx_first_scheduled_token, block_idx_last_scheduled_token and
    initial_state_idx; and for complex operands. Raises ArgumentError (a ValueError) if ssm_states is None, and for operands that do not
    fit.

    Ignored arguments:
    block_size, cu_chunk_seqlen, last_chunk_indices: they divide vLLM's work
    """
    name = "vllm's selective_scan_fn"
    if ssm_states is None:
        raise ArgumentError(name, ["ssm_states is None; expected the pool that receives the states. Pass ssm_states."])
    blocks = {
        "block_idx_first_scheduled_token": block_idx_first_scheduled_token,
        "block_idx_last_scheduled_token": block_idx_last_scheduled_token,
        "initial_state_idx": initial_state_idx,
    }
    if given := [n for n, t in blocks.items() if t is not None]:
        raise UnsupportedError(name, [f"{', '.join(given)} is given; expected None: a sequence has one slot, not one per block"])
    sequences = u.shape[0] if query_start_loc is None else query_start_loc.shape[0] - 1
    out: Tensor = _mamba1.scan(
        name, _mamba1.Operands(u, delta, A, B, C, D, z, delta_bias, delta_softplus), cu_seqlens=query_start_loc, state=ssm_states,
        state_indices=_first(cache_indices, sequences), has_initial_state=_first(has_initial_state, sequences),
        pad_slot_id=-1 if null_block_id is None else null_block_id,
    )  # fmt: skip
    return out


@_takes(
    "return_intermediate_states",
    **dict.fromkeys(("x", "z", "out"), "[tokens, H, P]"), **dict.fromkeys(("B", "C"), "[tokens, G, N]"), dt="[tokens, H]",
    cu_seqlens="[N + 1]", cu_chunk_seqlens="[chunks + 1]", initial_states="[N, H, P, d_state]", final_states_out="[slots, H, P, d_state]",
    final_state_indices="[N]",
)  # fmt: skip
def mamba_chunk_scan_combined_varlen(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    cu_seqlens: Tensor,
    cu_chunk_seqlens: Tensor | None,
    last_chunk_indices: Tensor | None,
    seq_idx: Tensor | None,
    out: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_intermediate_states: bool = False,
    state_dtype: torch.dtype | None = None,
    final_states_out: Tensor | None = None,
    final_state_indices: Tensor | None = None,
) -> Tensor | None:
    """Mamba-2 (SSD) over packed prompts, per token: S <- exp(dt A) S + dt x B;  out = C S + D x, times silu(z).

    x, z, out: [tokens, H, P]; out is written, z None for no gate          B, C: [tokens, G, N]. All are bf16, f16 or f32, of one dtype
    dt: [tokens, H]          A: [H], negative          D: [H] or [H, P], dt_bias: [H]; None for none
    dt_softplus: dt <- log(1 + e^(dt + dt_bias)); dt_limit: dt is then clamped to (low, high)
    cu_seqlens: [sequences + 1] int32 or int64, start of each sequence
    initial_states: [sequences, H, P, N], states before the first token; zeros if None

    Returns the states after each sequence, [sequences, H, P, N], of state_dtype, or C's dtype if None. P and N are multiples of 16 up to
    256. Unlike in vLLM, states between chunks are f32.
    Raises ArgumentError (a ValueError) if out is None, for arguments of which one needs or excludes another, and for operands that do not
    fit.
    Raises UnsupportedError for state_dtype other than f32, f16 and bf16.

    States elsewhere:
    return_intermediate_states: returns [chunks, H, P, N] instead, the states after each of vLLM's chunks, which end at cu_chunk_seqlens
        [chunks + 1]
    final_states_out: a pool [slots, H, P, N], which receives the states after each sequence in final_state_indices [sequences]; returns
        None

    Ignored arguments:
    chunk_size, last_chunk_indices, seq_idx: they divide vLLM's work or follow from cu_seqlens
    """
    name = "vllm's mamba_chunk_scan_combined_varlen"
    problems = ["out is None; expected a tensor, since outputs are not returned. Pass out."] if out is None else []
    if final_states_out is not None and return_intermediate_states:
        problems.append("final_states_out is given with return_intermediate_states; expected one of them")
    if final_states_out is not None and final_state_indices is None:
        problems.append("final_states_out is given without final_state_indices; expected both. Pass final_state_indices.")
    if return_intermediate_states and cu_chunk_seqlens is None:
        problems.append(
            "return_intermediate_states is True and cu_chunk_seqlens is None; expected the ends of the chunks. Pass cu_chunk_seqlens."
        )
    if problems:
        raise ArgumentError(name, problems)
    operands = _prompts.Operands(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit)
    if final_states_out is not None and final_state_indices is not None:
        slots = final_state_indices[: cu_seqlens.shape[0] - 1]
        _prompts.run(operands, out, cu_seqlens=cu_seqlens, state=final_states_out, state_indices=slots, initial_states=initial_states)
        return None
    dtype, positions = _prompts.state_dtype_of(name, state_dtype, C), None
    if return_intermediate_states and cu_chunk_seqlens is not None:
        positions = cu_chunk_seqlens[1:]
    last, after = (dtype, None) if positions is None else (None, dtype)
    states = _prompts.scan(operands, out, initial_states=initial_states, cu_seqlens=cu_seqlens, last=last, positions=positions, after=after)
    return states.last if positions is None else states.after
