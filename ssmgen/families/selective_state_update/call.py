"""selective_state_update: decode steps of Mamba-1 and Mamba-2 on torch tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from ...calls.checks import padding_objections
from ...calls.operator import operator, run
from ...engine.noise import seeded
from ...engine.recurrences.mamba.operands import OPERANDS
from .planning import CALLER, Options


@operator(like="x")
def selective_state_update(
    state: Tensor,
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
    dt_limit: tuple[float, float] | None = None,
    state_indices: Tensor | None = None,
    dst_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    parents: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    update_state: bool = True,
    state_scale: Tensor | None = None,
    intermediate_state_scales: Tensor | None = None,
    rand_seed: Tensor | None = None,
    philox_rounds: int = 10,
    pad_slot_id: int = -1,
    zero_padding: bool = True,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """Decode steps, per token: state <- exp(dt A) state + dt x B;  out = C state + D x, times silu(z).

    H heads of P rows (headdim), N = d_state, G groups of heads that share B and C. Without heads (Mamba-1) drop the H and G axes. […] is
    [batch] for one token per sequence, [batch, T] for several, or [tokens] (also [1, tokens]) for packed sequences with cu_seqlens.

    state: [slots, H, P, N], updated in place          x, dt, z, out: […, H, P]; dt also […, H]
    A: [H, P, N] or [H], negative                      B, C: […, G, N]
    D, dt_bias: [H, P] or [H], or None                 z: None for no gate
    dt_softplus: dt <- log(1 + e^(dt + dt_bias)); dt_limit: dt is then clamped to (low, high)
    state_indices: [batch] int32 or int64, slot of each row; None for slot = row
    pad_slot_id: a row is padding if its slot is negative, equals this or is not in the pool. Padding gets a zero output and touches no
        state
    out: like x; None for a new one
    pdl: whether the kernel may start while the previous one in the stream ends (it waits before it reads anything); None = if
        the device can (sm_90 and later)

    Types and precision:

    Every floating tensor may be f32, f16 or bf16, each with its own dtype. Arithmetic is f32, the state is carried from token to token in
    f32, and the output uses the new state before rounding. All tensors may be strided views; only the last three axes of states must be
    dense.

    Several tokens:

    Several tokens, and all arguments in this section, need heads, with A, dt and dt_bias tied: [H], or views with stride 0.

    cu_seqlens: [batch + 1] int32 or int64, start of each packed sequence; ends with the number of tokens. A sequence may have none
    dst_state_indices: [batch], the slot of the new state, None for in place; or [batch, T], a slot for the state after each token.
        Slots must be distinct, else rows race
    num_accepted_tokens: [batch] int32 or int64, from 1, with state_indices [batch, columns]: the sequence starts from the slot in that
        column of state_indices. A count out of range makes the row padding
    intermediate_states: [rows, T or more, H, P, N], of f32, f16 or bf16: receives the state after each token, in row
        intermediate_state_indices[b], [batch] int32 or int64, or b
    update_state: False writes no slot of the pool
    parents: [batch, T] int32 or int64, a draft tree: token t continues from the rounded state after token parents[b, t], as stored in
        intermediate_states, which it needs. If parents[b, t] is not an earlier token whose state is stored, token t continues from the
        unrounded state after token t - 1. For packed sequences, parents and dst_state_indices may have any number of columns
    zero_padding: False leaves the output of padding unchanged; pass `out`

    Written states: dst_state_indices [batch, T] names a slot for the state after each token. dst_state_indices [batch] names the slot for
    the state after the last token; without dst_state_indices this is the slot read. intermediate_states, if given, receives the state after
    each token in that token's column, whether or not the pool is written. Slots and rows out of range, slots equal to pad_slot_id, and
    columns past the last one are not written. With parents, a row whose row of intermediate_states is out of range is padding. A sequence
    that is padding, or has no tokens, writes nothing.

    States in fewer bits:
    state_scale: [slots, H, P] f32, only for a state of int16, int8 or float8_e4m3fn: the state is its elements times their row's scale.
        Updated in place, with the state: the row's largest magnitude over 32767, 127 or 448, so that its largest element is that number
    intermediate_state_scales: [rows, T or more, H, P] f32, the scales of intermediate_states, whose dtype may differ from the pool's

    Stochastic rounding:
    rand_seed: [1] or [slots] int64, on the device: states, except f32 ones, are rounded stochastically, with Philox noise of philox_rounds
        rounds (0: to nearest). Rounding is unbiased for subnormal numbers too; finite numbers stay finite. The noise equals Triton's
        randint4x(seed of the slot written, element): element number slot H P N + (h P + p) N + n takes word n % 4 of the counter of the
        first of its four neighbours. Intermediate states take the seed and the elements of the slot read, in a separate stream per token.
        The same seed draws the same noise: change it between calls

    Returns out (new, of x's dtype, if not given). CPU tensors run the reference implementation.
    Raises ArgumentError listing every violated requirement, before anything is launched; UnsupportedError; CaptureError when a
    kernel would have to be built during a CUDA graph capture; NotBuiltError, CompileError, LoadError, LaunchError.
    Source: Gu & Dao 2023 (arXiv 2312.00752), Dao & Gu 2024 (arXiv 2405.21060); draft trees: SGLang.
    """
    objections = padding_objections(zero_padding, out)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format) if isinstance(x, Tensor) else x  # the checks object to x
    rand_seed, philox_rounds = seeded(rand_seed, philox_rounds)
    tensors = OPERANDS.Tensors(
        state, x, dt, A, B, C, D, z, dt_bias, out, state_indices, dst_state_indices, num_accepted_tokens, cu_seqlens, parents,
        intermediate_states, intermediate_state_indices, rand_seed, state_scale, intermediate_state_scales,
    )  # fmt: skip
    options = Options(dt_softplus, dt_limit, pad_slot_id, philox_rounds, update_state, zero_padding)
    return run(CALLER, tensors, options, pdl, objections=objections)
