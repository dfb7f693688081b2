"""Functions of tensorrt_llm._torch.modules.mamba: ssd_combined's, and replay_selective_state_update's as of TensorRT-LLM#13453.

Deliberate differences of replay_selective_state_update:
- A sequence whose slot equals pad_slot_id, is negative or is none of the pool's gets a zero output and touches nothing. There, its output
  is left as it was, and other slots than pad_slot_id are taken for slots.
- Products are exact to 2^-24, where TensorRT-LLM rounds factors to bf16; `ssmgen.replay_selective_state_update(…, precision="bf16")` does
  that too. x, B, C, old_x and old_B are of one dtype, f32, f16 or bf16.
- bf16 states are rounded stochastically too, on every GPU, and finite numbers stay finite.
- A count out of 0 … T is 0, and where it is 0 the state is not written.
- One kernel does it all, unless ssmgen is asked for two.

It raises UnsupportedError for the generations before and after this one that keep other tensors, and what
ssmgen.replay_selective_state_update raises.
"""

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
RENAMED = {"old_dt_proc": "old_dt", "old_cumAdt": "old_dA_cumsum"}  # what the second of them was called before
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
    """Writes out [batch, T, H, P] in place, as well as the state and the history.

    state: [slots, H, P, N]   old_x: [slots, T, H, P]   old_B: [slots, 2, T, G, N]   old_dt, old_dA_cumsum: [slots, 2, H, T] f32
    x, z, out: [batch, T, H, P]   B, C: [batch, T, G, N]   D: [H, P]   dt [batch, T, H, P], A [H, P, N] and dt_bias [H, P]: one value per
    head, expanded. As there, axes of one token and of one head may be left out. The caller flips cache_buf_idx and sets
    prev_num_accepted_tokens, both [slots] int32, after every call.

    launch_with_pdl: starts while the kernel ahead in the stream ends, where the device can. That one is a convolution that writes x, B and
        C, and nothing else that is read here, and triggers when all before itself has ended. False: starts when all before it has ended
    use_internal_pdl: says nothing where there is one kernel
    rand_seed: [1] int64
    Arguments with an underscore size kernels that ssmgen does not have, and change no result: ignored.
    The names before the merge are taken too (old_dt_proc, old_cumAdt), and launch_with_pdl and use_internal_pdl right after pad_slot_id.
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
    """Prompts of Mamba-2: writes out [batch, T, H, P], and returns states. x, z: like out; dt [batch, T, H]; B, C [batch, T, G, N].

    return_varlen_states: sequences are packed in one row, as cu_seqlens [sequences + 1] says; initial_states [sequences, H, P, N], and the
        states after each are returned, of state_dtype or else C's. Without it rows are sequences, parted by seq_idx, and initial_states
        [batch, H, P, N]
    return_final_states: [batch, H, P, N] f32, after each row
    out: without it, as before TensorRT-LLM had the argument, a new output is returned before the states
    mamba_ssm_cache_dtype: state_dtype's name at that time
    Returns what is asked for, in the order final, varlen; None for nothing.
    chunk_size, chunk_indices, chunk_offsets and, of packed sequences, seq_idx follow from the others or divide work: ignored.
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
