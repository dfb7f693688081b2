"""Functions of tensorrt_llm._torch.modules.mamba: ssd_combined's prompt scan, and replay_selective_state_update of TensorRT-LLM#13453."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, UnsupportedError
from ..families.replay_selective_state_update.call import replay_selective_state_update as _native
from .shared import mamba_prompts as _prompts
from .shared.operands import takes as _takes

NAME = "tensorrt_llm's replay_selective_state_update"
RENAMED = {"old_dt_proc": "old_dt", "old_cumAdt": "old_dA_cumsum"}  # parameter -> its former name
PACKED = ("intermediate_update_inputs",)
WINDOWED = ("n_writes", "replay_work_items", "state_scales", "write_checkpoint", "rectangle", "rectangle_for_nowrite", "mode")
FLAGS = 19  # the place of launch_with_pdl before there was a seed, and of the seed since

USE_A_RING = "Call ssmgen.checkpoint_selective_state_update, whose history is one ring. Copy the valid entries to move a history there."


def _either_generation(function: Callable[..., None]) -> Callable[..., None]:
    """Takes the names and the order of arguments from before the merge as well."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        if packed := [name for name in PACKED if name in kwargs]:
            reason = f"{', '.join(packed)} is given, with x, dt and B in one tensor; expected old_x, old_B and old_dt"
            raise UnsupportedError(NAME, [reason])
        if windowed := [name for name in WINDOWED if kwargs.get(name) is not None]:
            raise UnsupportedError(NAME, [f"{', '.join(windowed)} is given; expected a state written in every step. {USE_A_RING}"])
        if twice := [f"{old} and {new}" for old, new in RENAMED.items() if old in kwargs and new in kwargs]:
            raise ArgumentError(NAME, [f"{pair} are both given; expected one: they are the same argument" for pair in twice])
        if len(args) > FLAGS and isinstance(args[FLAGS], bool):
            args = (*args[:FLAGS], None, 10, *args[FLAGS:])
        return function(*args, **{RENAMED.get(name, name): value for name, value in kwargs.items() if name not in WINDOWED})

    return call


def _axes(t: Any, n: int, at: int) -> Any:
    """A view with n axes, the new ones of size 1."""
    while isinstance(t, Tensor) and 0 < t.dim() < n:
        t = t.unsqueeze(at)
    return t


@_either_generation
@_takes("launch_with_pdl use_internal_pdl")
def replay_selective_state_update(
    state: Tensor,
    old_x: Tensor,
    old_B: Tensor,
    old_dt: Tensor,
    old_dA_cumsum: Tensor,
    cache_buf_idx: Tensor,
    prev_num_accepted_tokens: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    out: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    rand_seed: Tensor | None = None,
    philox_rounds: int = 10,
    launch_with_pdl: bool = False,
    use_internal_pdl: bool = True,
    _block_size_m: int | None = None,
    _num_warps: int | None = None,
    _num_stages: int | None = None,
    _precompute_num_warps: int | None = None,
    _precompute_num_stages: int | None = None,
    _heads_per_block: int | None = None,
) -> None:
    """One speculative step of Mamba-2: replays the accepted tokens of the last step on the state, then computes this step's T tokens.

    Per token: state <- exp(dt A) state + dt x B;  out = C state + D x, times silu(z). Only the replayed tokens change the stored state. T
    is up to 32.

    state: [slots, H, P, N] f32, f16 or bf16, updated in place
    old_x: [slots, T, H, P]          old_B: [slots, 2, T, G, N]: inputs of the last step, updated in place
    old_dt, old_dA_cumsum: [slots, 2, H, T] f32: dt after its softplus, and the running sum of dt A; updated in place
    cache_buf_idx: [slots] int32, which of the two halves holds the last step. The caller flips it after every call
    prev_num_accepted_tokens: [slots] int32, 0 … T, tokens to replay. The caller sets it after every call
    x, z, out: [batch, T, H, P]; out is written; z None for no gate          B, C: [batch, T, G, N]
    dt: [batch, T, H, P]          A: [H, P, N], negative          D, dt_bias: [H, P]. dt, A and dt_bias have one value per head, expanded
    dt_softplus: dt <- log(1 + e^(dt + dt_bias))
    state_batch_indices: [batch] int32 or int64, slot of each sequence; None for slot = sequence

    x, B, C, old_x and old_B have one dtype, f32, f16 or bf16. Axes of one token and of one head may be left out.

    Returns None. Differences from TensorRT-LLM's function:
    - A sequence whose slot equals pad_slot_id, is negative or is not in the pool gets a zero output and touches nothing. TensorRT-LLM
      leaves its output unchanged, and only knows pad_slot_id.
    - Products are exact to 2^-24; TensorRT-LLM rounds factors to bf16, as ssmgen.replay_selective_state_update(…, precision="bf16") does.
    - bf16 states are rounded stochastically too, on every GPU, and finite numbers stay finite.
    - A count out of 0 … T counts as 0, and with a count of 0 the state is not written.
    - One kernel does everything, instead of two.

    Raises UnsupportedError for arguments of earlier and later generations: intermediate_update_inputs; replay_work_items, n_writes, mode
    and their like; old_x of two buffers or with another number of tokens than x. Raises ArgumentError (a ValueError) if out is None, if an
    argument is given under two names, and for operands that do not fit.

    Stochastic rounding:
    rand_seed: [1] int64 on the device: f16 and bf16 states are rounded with Philox noise of philox_rounds rounds; None: to nearest

    Launch:
    launch_with_pdl: starts while the previous kernel in the stream ends, where the device can. That kernel must be a convolution that
        writes x, B and C, and nothing else that is read here, and must trigger after all work before it has ended. False: starts after its
        end
    use_internal_pdl: only matters with two kernels

    Older names and ignored arguments:
    old_dt_proc, old_cumAdt: older names of old_dt and old_dA_cumsum. launch_with_pdl and use_internal_pdl may also follow pad_slot_id
    _block_size_m, _num_warps, _num_stages, _precompute_num_warps, _precompute_num_stages, _heads_per_block: ignored; they size kernels of
        TensorRT-LLM
    """
    state, A = _axes(state, 4, 1), _axes(A, 3, 0)
    x, dt, B, C, z, out = (_axes(t, 4, 1) for t in (x, dt, B, C, z, out))
    D, dt_bias = (_axes(t, 2, 0) for t in (D, dt_bias))
    if out is None:
        raise ArgumentError(NAME, ["out is None; expected a tensor, since nothing is returned. Pass out."])
    if isinstance(old_x, Tensor) and old_x.dim() == 5:
        raise UnsupportedError(NAME, [f"old_x is {list(old_x.shape)}, of two buffers; expected one. {USE_A_RING}"])
    if isinstance(old_x, Tensor) and isinstance(x, Tensor) and old_x.dim() == x.dim() == 4 and old_x.shape[1] != x.shape[1]:
        reason = (
            f"x has {x.shape[1]} tokens and the history room for {old_x.shape[1]}; "
            f"expected equal numbers, with a state written in every step. {USE_A_RING}"
        )
        raise UnsupportedError(NAME, [reason])
    _native(
        state, old_x, old_B, old_dt, old_dA_cumsum, cache_buf_idx, prev_num_accepted_tokens, x, dt, A, B, C, D, z, dt_bias, dt_softplus,
        state_indices=state_batch_indices, rand_seed=rand_seed, philox_rounds=philox_rounds, pad_slot_id=pad_slot_id,
        after_conv=bool(launch_with_pdl), internal_pdl=bool(use_internal_pdl), out=out, pdl=None if launch_with_pdl else False,
    )  # fmt: skip


incremental_selective_state_update = replay_selective_state_update  # its name before the merge


@_takes("return_final_states return_varlen_states", **_prompts.PADDED, out=_prompts.ROWS)
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
    state_dtype: torch.dtype | None = None,
    mamba_ssm_cache_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, ...] | None:
    """Mamba-2 (SSD) over prompts, per token: S <- exp(dt A) S + dt x B;  out = C S + D x, times silu(z).

    H heads of P rows (headdim), N = d_state, multiples of 16 up to 256; G groups of heads that share B and C.

    x, z, out: [batch, T, H, P]; z None for no gate          B, C: [batch, T, G, N]. All are bf16, f16 or f32, of one dtype
    dt: [batch, T, H]          A: [H], negative          D: [H] or [H, P], dt_bias: [H]; None for none
    dt_softplus: dt <- log(1 + e^(dt + dt_bias)); dt_limit: dt is then clamped to (low, high)
    initial_states: [batch, H, P, N], or [sequences, H, P, N] of packed sequences, f32, f16 or bf16; zeros if None
    out: is written; None: a new output is returned, before the states
    return_final_states: also return the states after each row, [batch, H, P, N] f32

    Returns the requested results in the order output, final states, states of packed sequences: one tensor, a tuple, or None.
    Unlike TensorRT-LLM's function, it keeps states between chunks in f32.
    Raises UnsupportedError for several packed sequences without seq_idx, and for state_dtype other than f32, f16 and bf16. Raises
    ArgumentError (a ValueError) if state_dtype is given under both names, and for operands that do not fit or require grad.

    Packed sequences:
    return_varlen_states: sequences are packed in one row, and the states after each are returned, [sequences, H, P, N]
    cu_seqlens: [sequences + 1] int32 or int64, start of each packed sequence
    seq_idx: [batch, T] int32: without return_varlen_states, the state restarts from zero where it changes; with it, it must be given for
        several sequences, and is not read
    state_dtype: dtype of the states of packed sequences; None for C's. Its older name mamba_ssm_cache_dtype is taken too

    Ignored arguments:
    chunk_size, chunk_indices, chunk_offsets: they divide TensorRT-LLM's work
    """
    name = "tensorrt_llm's mamba_chunk_scan_combined"
    if state_dtype is not None and mamba_ssm_cache_dtype is not None:
        raise ArgumentError(name, ["state_dtype and mamba_ssm_cache_dtype are both given; expected one: they are the same argument"])
    dtype = mamba_ssm_cache_dtype if state_dtype is None else state_dtype
    wanted = _prompts.Wanted(False, return_final_states, return_varlen_states)
    written = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    found = _prompts.combined(
        name, wanted, _prompts.Operands(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit), written, chunk_size=chunk_size,
        initial_states=initial_states, seq_idx=seq_idx, cu_seqlens=cu_seqlens, state_dtype=dtype,
    )  # fmt: skip
    return _prompts.only((written if out is None else None, found.final, found.varlen))
