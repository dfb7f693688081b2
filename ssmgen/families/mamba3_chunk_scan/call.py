"""mamba3_chunk_scan: Mamba-3 over prompts, on torch tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...calls.operator import operator, run
from ...calls.scalars import NOT_NEGATIVE, one_of
from ...engine.chunks.segments import SEGMENTS
from ...engine.recurrences.mamba3.problem import Rate, Rotary
from .operands import OPERANDS, POOLS
from .planning import CALLER
from .prepare import words_of
from .views import Options, is_prepared

FORMS = {
    "A_form": one_of("'heavy', 'softplus', 'ready' or 'log_decay'", *[rate.value for rate in Rate]),
    "rotary": one_of("'pairs' or 'halves'", *[rotary.value for rotary in Rotary]),
    "eps": NOT_NEGATIVE,
    "A_floor": NOT_NEGATIVE,
    "segments": SEGMENTS,
}


@operator(like="x", **FORMS)
def mamba3_chunk_scan(
    x: Tensor,
    B: Tensor,
    C: Tensor,
    dt: Tensor,
    A: Tensor,
    trap: Tensor,
    angle: Tensor | None,
    A_form: str,
    rotary: str,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = True,
    trap_sigmoid: bool = True,
    A_floor: float = 1e-4,
    B_norm: Tensor | None = None,
    C_norm: Tensor | None = None,
    B_bias: Tensor | None = None,
    C_bias: Tensor | None = None,
    mimo_x: Tensor | None = None,
    mimo_z: Tensor | None = None,
    mimo_o: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-5,
    cu_seqlens: Tensor | None = None,
    initial_states: Tensor | None = None,
    initial_k: Tensor | None = None,
    initial_v: Tensor | None = None,
    initial_angles: Tensor | None = None,
    return_final_states: bool = False,
    state: Tensor | None = None,
    k_state: Tensor | None = None,
    v_state: Tensor | None = None,
    angle_state: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = -1,
    segments: int | None = None,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Whole sequences of Mamba-3, from the in-projection's output to the out-projection's input, per token and head:

        k, q <- rotated(norm(B) + B_bias), rotated(norm(C) + C_bias) by the sum of pi tanh(angle) dt up to this token
        S <- e^(A dt) S + (1 - trap) dt e^(A dt) (v mimo_x) k + trap dt (x mimo_x) k,   first k and v: of the token before
        out = the sum over ranks of (S q + D x mimo_x) silu(z mimo_z) mimo_o

    H heads of P rows (headdim), a multiple of 16 up to 128; N = d_state, a multiple of 16 up to 256; G groups of heads that share B and C;
    R ranks, 1 … 8 (SISO: 1, without the axis R and without mimo_*); n angles of a head, up to N / 2. […] is [batch, T], or for packed
    sequences with cu_seqlens [tokens] or [1, tokens]. `mamba3_state_update` continues from these states.

    x, z, out: […, H, P]       B, C: […, R, G, N]; bf16 or f16, all of one dtype
    dt, A, trap: […, H]        angle: […, n] or […, H, n], logits; None for rows that do not rotate (or have rotated already)
    A_form, rotary, D, dt_bias, dt_softplus, trap_sigmoid, A_floor, eps and all weights: as in mamba3_state_update. Without mimo_o ranks
        are not summed, and out is […, R, H, P]
    cu_seqlens: [sequences + 1] int32 or int64 on the device, start of each packed sequence. A sequence may have no tokens; tokens outside
        all sequences get no output. States are then per sequence
    out: None for a new one, dense

    States:
    initial_states, initial_k, initial_v, initial_angles: [sequences, H, P, N], [sequences, R, H, N], [sequences, H, P] and
        [sequences, H, n] f32, states before the first token; zeros if all are None. initial_angles goes with angle
    return_final_states: also return the states after the last token, in the order of the pools below: the pools if they are given, else
        new tensors, of the dtypes of the initial states, or f32 for S and x's dtype for k and v

    States in pools:
    state, k_state, v_state, angle_state: [slots, H, P, N], [slots, R, H, N], [slots, H, P] and [slots, H, n] f32, as in
        mamba3_state_update: receive the states after each sequence, in place. Slots may lie at any distance, so all four may share a page.
        Without initial states they also hold the states before it, if has_initial_state, [sequences] bool, is true. A sequence without
        tokens leaves its slot unchanged
    state_indices: [sequences] int32 or int64, slot of each sequence; None for slot = sequence. Slots must be distinct
    pad_slot_id: a sequence whose slot is negative, equals this or is not in the pool gets a zero output and touches no state

    Launch and segments:
    segments: most parts of a sequence that blocks of a cluster scan at once, from sm_90 on, 1 … 1024 (the kernel uses at most 8, each of
        one chunk or more). None, 1 or 2 give the bits of a whole sequence, three or more do not
    workspace: [numbers] float32, angles and norms from one kernel to the next, for a call with angle or B_norm, without mimo_x, and with
        heads of 64 x 64 or 64 x 128: mamba3_chunk_scan_workspace returns the numbers. It may be used again as soon as the call is in its
        stream; None for a new one
    pdl: whether a kernel may start while the previous one in the stream ends; None = if the device can (sm_90 and later)

    Types and precision:

    dt, A, trap, angle, weights and states may each be f32, f16 or bf16. Tokens, ranks, heads and groups may have any stride; rows are
    contiguous, and rows of x, B, C, z and out begin at multiples of 4 bytes (fastest: of 16). Products are of x's dtype, summed in f32;
    rotated rows are rounded to it once. dt, decays, angles and the state between chunks of 64 / R tokens, rounded down, are f32. The bits
    do not depend on the batch or on packing. With up to two segments, a sequence cut at multiples of the chunk, with f32 states,
    gives the same bits as the whole sequence. A call without states rounds like one with k_state and v_state of x's dtype. With x of f16,
    the state, and x mimo_x and the products of rows with their weights, must stay within f16's range.

    Returns out, or (out, state, k_state, v_state[, angle_state]). CPU tensors run the reference implementation, token by token; there x may
    be f32.
    Raises ArgumentError listing every violated requirement, before anything is launched; UnsupportedError if no kernel serves the call;
    CaptureError when a kernel would have to be built during a CUDA graph capture; NotBuiltError, CompileError, LoadError, LaunchError.
    Source: Mamba-3 (arXiv 2603.15569).
    """
    given = (state, k_state, v_state, angle_state)
    final = return_final_states and all(pool is None for pool in given)
    if isinstance(x, Tensor) and isinstance(B, Tensor) and x.dim() >= 3 and B.dim() >= x.dim():
        if out is None:
            rank = (B.shape[-3],) if isinstance(mimo_x, Tensor) and mimo_o is None and B.dim() > x.dim() else ()
            rank = (1,) if isinstance(mimo_x, Tensor) and mimo_o is None and not rank else rank
            out = torch.empty((*x.shape[:-2], *rank, *x.shape[-2:]), dtype=x.dtype, device=x.device) if rank else x.new_empty(x.shape)
        if workspace is None and is_prepared(x, B, angle, B_norm, mimo_x):
            workspace = x.new_empty(_numbers(x, B, angle, cu_seqlens), dtype=torch.float32)
        if final:
            state, k_state, v_state, angle_state = _made(x, B, angle, cu_seqlens, initial_states, initial_k, initial_v)
    tensors = OPERANDS.Tensors(
        x, B, C, dt, A, trap, angle, D, z, dt_bias, B_norm, C_norm, B_bias, C_bias, mimo_x, mimo_z, mimo_o, norm_weight, cu_seqlens,
        initial_states, initial_k, initial_v, initial_angles, state, k_state, v_state, angle_state, state_indices, has_initial_state,
        workspace, out,
    )  # fmt: skip
    options = Options(A_form, rotary, dt_softplus, trap_sigmoid, eps, A_floor, pad_slot_id, final, segments)
    returns = tuple(name for name in POOLS if getattr(tensors, name) is not None) if return_final_states else ()
    return run(CALLER, tensors, options, pdl, returns=("out", *returns))


def mamba3_chunk_scan_workspace(tokens: int, sequences: int, heads: int, angles: int, groups: int = 1) -> int:
    """Float32 numbers of a workspace for calls of up to `tokens` tokens in all (batch times T), `sequences` sequences and `heads` heads.

    angles: of a head; 0 for a call without them. groups: of B.
    """
    return words_of(angles, tokens, sequences, heads, groups)


def _numbers(x: Tensor, B: Tensor, angle: Tensor | None, starts: Tensor | None) -> int:
    """The numbers of a call's workspace."""
    *lead, heads, _ = x.shape
    sequences = max(starts.numel() - 1, 0) if isinstance(starts, Tensor) else lead[0]
    tokens = lead[-1] if len(lead) == 1 else lead[0] * lead[-1]
    angles = angle.shape[-1] if isinstance(angle, Tensor) and angle.dim() else 0
    return words_of(angles, tokens, sequences, heads, B.shape[-2])


class _Final(NamedTuple):
    state: Tensor
    k_state: Tensor
    v_state: Tensor
    angle_state: Tensor | None


def _made(
    x: Tensor, B: Tensor, angle: Tensor | None, starts: Tensor | None, S: Tensor | None, k: Tensor | None, v: Tensor | None
) -> _Final:
    """New tensors for final states. S, k, v: the initial ones, for their dtypes."""
    sequences = max(starts.numel() - 1, 0) if isinstance(starts, Tensor) else x.shape[0]
    (heads, rows), n = x.shape[-2:], B.shape[-1]
    ranks = (B.shape[-3],) if B.dim() > x.dim() else ()
    of_k = tuple(k.shape[1:]) if isinstance(k, Tensor) and k.dim() else (*ranks, heads, n)

    def new(like: Tensor | None, dtype: torch.dtype, *shape: int) -> Tensor:
        return x.new_empty((sequences, *shape), dtype=like.dtype if isinstance(like, Tensor) else dtype)

    angles = new(None, torch.float32, heads, angle.shape[-1]) if isinstance(angle, Tensor) and angle.dim() else None
    return _Final(
        new(S, torch.float32, heads, rows, n), new(k, x.dtype, *of_k), new(v, x.dtype, heads, rows), angles
    )  # fmt: skip
