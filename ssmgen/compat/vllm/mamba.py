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
    """Prompts of Mamba-1: u [D, tokens], packed, or [N, D, T] -> a new tensor laid out like it in memory; ssm_states in place.

    delta, z: like u   A: [D, d_state]   B, C: [G, d_state, tokens] or [N, G, d_state, T], without G too   D, delta_bias: [D]
    query_start_loc: [N + 1], packed sequences   ssm_states: [slots, D, d_state]   cache_indices: [N], each sequence's slot, or its number
    has_initial_state: [N], whether the state in the slot is the one before the first token; None for none
    block_size, cu_chunk_seqlen and last_chunk_indices divide vLLM's work: ignored

    vLLM's own overwrites z, or delta without z, unless it copies them first, and returns that: use what is returned.
    Raises UnsupportedError for states of every block, which block_idx_first_scheduled_token, block_idx_last_scheduled_token and
    initial_state_idx ask for.
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
    """Prompts of Mamba-2, packed: writes out [tokens, H, P], and returns or writes states.

    x, z: [tokens, H, P]   dt: [tokens, H]   B, C: [tokens, G, N]   cu_seqlens: [sequences + 1]   initial_states: [sequences, H, P, N]
    return_intermediate_states: -> [chunks, H, P, N], the states after each of vLLM's chunks, which may end anywhere in a sequence, at
        cu_chunk_seqlens [chunks + 1]
    final_states_out: -> None, and this pool [slots, H, P, N] receives the states after each sequence in final_state_indices [sequences]
    Otherwise -> [sequences, H, P, N], those states. state_dtype: the dtype of the returned states; C's if None
    chunk_size, last_chunk_indices and seq_idx follow from the others or divide vLLM's work: ignored. States between chunks are f32.
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
        _prompts.scan_into_slots(operands, out, final_states_out, slots, initial_states=initial_states, cu_seqlens=cu_seqlens)
        return None
    dtype, positions = _prompts.state_dtype_of(name, state_dtype, C), None
    if return_intermediate_states and cu_chunk_seqlens is not None:
        positions = cu_chunk_seqlens[1:]
    last, after = (dtype, None) if positions is None else (None, dtype)
    states = _prompts.scan(operands, out, initial_states=initial_states, cu_seqlens=cu_seqlens, last=last, positions=positions, after=after)
    return states.last if positions is None else states.after
