"""Speculative decoding of Mamba-2 by replay: the public functions. `planning.py` implements them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...calls.operator import operator
from ...calls.scalars import integer
from .operands import OPERANDS
from .planning import PRECISION, Options, call

_OF_STEPS = {"precision": PRECISION, "philox_rounds": integer("0 … 10", 0, 10)}


@operator(like="x", **_OF_STEPS)
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
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    *,
    state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state_scale: Tensor | None = None,
    rand_seed: Tensor | None = None,
    philox_rounds: int = 10,
    arrivals: Tensor | None = None,
    pad_slot_id: int = -1,
    zero_padding: bool = True,
    precision: str = "f32",
    after_conv: bool = False,
    two_kernels: bool = False,
    internal_pdl: bool = True,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """T draft tokens of Mamba-2 on a state from before the last step.

    First the state is advanced over the accepted tokens of the last step, whose inputs the history holds, and written: state <- exp(dt A)
    state + dt x B for each. Then the outputs of the new tokens, out = C state + D x times silu(z), are computed without their states, and
    their inputs become the history.

    H heads of P rows (headdim), N = d_state, G groups of heads that share B and C; T and W up to 32.

    state: [slots, H, P, N], updated in place                      old_x: [slots, W, H, P], W >= T
    x, z, out: [batch, T, H, P]; dt: [batch, T, H] or [batch, T, H, P] with equal P; B, C: [batch, T, G, N]
    A, dt_bias: [H] or expanded from it; D: [H] or [H, P]          cu_seqlens: [batch + 1]; then x is [tokens, H, P], and so on
    old_x: [slots, W, H, P], W >= T          old_B: [slots, 2, W, G, N]          old_dt, old_dA_cumsum: [slots, 2, H, W] f32
    cache_buf_idx: [slots] int32, the buffer of the last step, 0 or 1; the other buffer receives this step's inputs
    prev_num_accepted_tokens: [slots] int32, how many entries of the history count; a number out of 0 … W counts as 0
    state_indices: [batch] int32 or int64, slot of each sequence; None for slot = sequence. Slots must be distinct, else they race
    pad_slot_id: a sequence whose slot is negative, equals this or is not in the pool gets a zero output and touches no other tensor
    zero_padding: False leaves the output of such a sequence unchanged; pass `out`
    pdl: whether the kernel may start while the previous one in the stream ends; None = if the device can (sm_90 and later)

    Bookkeeping in the kernel:
    arrivals: [slots] int32 of zeros, kept by the caller: the kernel then does the bookkeeping of the slots it serves. It flips
        cache_buf_idx, sets prev_num_accepted_tokens to 0, and adds 1 to each per-slot seed that it has used; the caller then adds the
        number of accepted tokens. Without `arrivals` the caller does all this between the steps

    Rounding and states in fewer bits:
    rand_seed: [1] or [slots] int64: states, except f32 ones, are rounded stochastically (Philox-4x32, `philox_rounds`), by the seed and the
        element's place in the pool; None for rounding to nearest. Finite numbers stay finite
    state_scale: [slots, H, P] f32, for a state of int16, int8 or float8_e4m3fn: the state is its elements times the scale of their row;
        written with the state. See selective_state_update

    Kernels and precision:
    precision: of products: "f32" (exact to 2^-24), "bf16x2" (2^-16) or "bf16" (2^-8, as in other packages)
    two_kernels: the first kernel prepares the products of the tokens with each other and with the history, for several heads of a group at
        a time; the second one updates the states and computes the outputs
    internal_pdl: with two kernels, whether the second may start while the first one ends
    after_conv: the previous kernel in the stream is this package's causal_conv1d_update, of x, B and C: all other inputs are read before it
        ends

    x, B, C and their history are of one dtype, f32, f16 or bf16; each other floating tensor may have its own. Arithmetic is f32, in
    `precision`. A block keeps a step in 48 KiB of shared memory: with f16 or f32 operands, or N = 256, T and W are at most 16 or 24
    (beyond, an UnsupportedError is raised).

    Returns out (new, of x's dtype, if not given). CPU tensors run the reference implementation.
    Raises ArgumentError listing every violated requirement, before anything is launched; UnsupportedError; CaptureError when a
    kernel would have to be built during a CUDA graph capture; NotBuiltError, CompileError, LoadError, LaunchError.
    Source: NVIDIA/TensorRT-LLM#13453; Dao & Gu 2024 (arXiv 2405.21060).
    """
    tensors = OPERANDS.Tensors(
        state, old_x, old_B, old_dt, old_dA_cumsum, cache_buf_idx, None, prev_num_accepted_tokens, x, dt, A, B, C, D, z, dt_bias, out,
        state_indices, cu_seqlens, rand_seed, arrivals, state_scale,
    )  # fmt: skip
    options = Options(
        dt_softplus, pad_slot_id, philox_rounds, precision, after_conv, None, two_kernels, internal_pdl, zero_padding=zero_padding
    )
    return call("replay_selective_state_update", tensors, options, pdl)


@operator(like="x", **_OF_STEPS, max_tokens=integer("a positive integer", 1))
def checkpoint_selective_state_update(
    state: Tensor,
    old_x: Tensor,
    old_B: Tensor,
    old_dt: Tensor,
    ring_start: Tensor | None,
    prev_num_accepted_tokens: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    *,
    state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state_scale: Tensor | None = None,
    rand_seed: Tensor | None = None,
    philox_rounds: int = 10,
    arrivals: Tensor | None = None,
    flush: Tensor | None = None,
    max_tokens: int | None = None,
    pad_slot_id: int = -1,
    zero_padding: bool = True,
    precision: str = "f32",
    after_conv: bool = False,
    two_kernels: bool = False,
    internal_pdl: bool = True,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """replay_selective_state_update with a longer history, so that most steps need not write the state.

    The history is a ring of R entries: old_x [slots, R, H, P], old_B [slots, R, G, N], old_dt [slots, H, R] f32. ring_start [slots]
    int32 is its first entry, and prev_num_accepted_tokens [slots] int32 entries count; the new tokens are stored after them. If these
    entries and the new tokens exceed the window, R - T, the state is advanced over all entries that count, and the next history begins at
    the first new token. The window is at most 32.
    arrivals: if the state was advanced, the kernel moves ring_start and sets prev_num_accepted_tokens to 0; the caller adds the number of
        accepted tokens. Without `arrivals` the caller does both: a step of T tokens advances the state if prev_num_accepted_tokens + T >
        window
    max_tokens: the T of the window, if it differs from x's T; needed with cu_seqlens
    flush: [batch] bool, for T = 1: the caller decides which states are written. prev_num_accepted_tokens is then [batch], 0 … R - 1 (other
        numbers count as 0), ring_start is None, and entries begin at the first one. If flush is set, the state is advanced over the entries
        and the new token, and written, and nothing is stored to the history. Otherwise the token is stored after the entries. Not with
        cu_seqlens, arrivals, max_tokens, after_conv or two_kernels
    All other arguments, and the errors: as in replay_selective_state_update.
    Source: NVIDIA/TensorRT-LLM#14203, flashinfer-ai/flashinfer#3975; `flush`: ReplaySSM of vLLM 0.33.
    """
    tensors = OPERANDS.Tensors(
        state, old_x, old_B, old_dt, None, None, ring_start, prev_num_accepted_tokens, x, dt, A, B, C, D, z, dt_bias, out,
        state_indices, cu_seqlens, rand_seed, arrivals, state_scale, flush,
    )  # fmt: skip
    options = Options(
        dt_softplus, pad_slot_id, philox_rounds, precision, after_conv, max_tokens, two_kernels, internal_pdl, zero_padding=zero_padding
    )
    return call("checkpoint_selective_state_update", tensors, options, pdl)


@operator(like="state", precision=PRECISION, max_tokens=integer("an integer from 0 on", 0))
def materialize_selective_state(
    state: Tensor,
    old_x: Tensor,
    old_B: Tensor,
    old_dt: Tensor,
    prev_num_accepted_tokens: Tensor,
    *,
    old_dA_cumsum: Tensor | None = None,
    cache_buf_idx: Tensor | None = None,
    ring_start: Tensor | None = None,
    A: Tensor | None = None,
    state_indices: Tensor | None = None,
    state_scale: Tensor | None = None,
    max_tokens: int = 0,
    pad_slot_id: int = -1,
    precision: str = "f32",
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """The states of slots after the accepted tokens of their histories: out = state, then out <- exp(dt A) out + dt x B per token.

    For a prefix cache, or a move to another pool.

    state, old_x, old_B, old_dt, prev_num_accepted_tokens: of replay_selective_state_update, with its old_dA_cumsum and cache_buf_idx; or of
        checkpoint_selective_state_update, with its ring_start, A and max_tokens. None of them is changed
    state_indices: [batch] int32 or int64; None for all slots. An index that is not in the pool, or equals pad_slot_id, gives zeros
    out: [batch, H, P, N] of the state's dtype; each state is dense, with any stride between states

    States in fewer bits:
    state_scale: [slots, H, P] f32, the scales of the state's rows; out is then f32, f16 or bf16

    Returns out (new, if not given). Raises the same errors as replay_selective_state_update.
    """
    if out is None and isinstance(state, Tensor):
        slots = state_indices.numel() if isinstance(state_indices, Tensor) else len(state) if state.dim() else 0
        out = torch.empty((slots, *state.shape[1:]), dtype=state.dtype if state_scale is None else torch.float32, device=state.device)
    rate = A if cache_buf_idx is None else None
    tensors = OPERANDS.Tensors(
        state=state, old_x=old_x, old_B=old_B, old_dt=old_dt, old_dA_cumsum=old_dA_cumsum, cache_buf_idx=cache_buf_idx,
        ring_start=ring_start, prev_num_accepted_tokens=prev_num_accepted_tokens, A=rate, out=out, state_indices=state_indices,
        state_scale=state_scale,
    )  # fmt: skip
    options = Options(False, pad_slot_id, 0, precision, False, max_tokens, materialize=True)
    return call("materialize_selective_state", tensors, options, pdl)


FUNCTIONS = (replay_selective_state_update, checkpoint_selective_state_update, materialize_selective_state)
