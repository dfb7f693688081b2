"""mamba3_state_update: decode steps of Mamba-3 on torch tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from ...calls.checks import padding_objections
from ...calls.operator import operator, run
from ...calls.scalars import NOT_NEGATIVE, one_of
from ...engine.noise import seeded
from ...engine.recurrences.mamba3.problem import Rate, Rotary
from .operands import OPERANDS
from .planning import CALLER, Options

FORMS = {
    "A_form": one_of("'heavy', 'softplus', 'ready' or 'log_decay'", *[rate.value for rate in Rate]),
    "rotary": one_of("'pairs' or 'halves'", *[rotary.value for rotary in Rotary]),
    "eps": NOT_NEGATIVE,
    "A_floor": NOT_NEGATIVE,
}


@operator(like="x", **FORMS)
def mamba3_state_update(
    state: Tensor,
    k_state: Tensor,
    v_state: Tensor,
    angle_state: Tensor | None,
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
    state_indices: Tensor | None = None,
    dst_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    rand_seed: Tensor | None = None,
    philox_rounds: int = 10,
    pad_slot_id: int = -1,
    zero_padding: bool = True,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """Decode steps of Mamba-3, from the in-projection's output to the out-projection's input, per token and head:

        k, q <- rotated(norm(B) + B_bias), rotated(norm(C) + C_bias) by angle_state + pi tanh(angle) dt
        state <- e^(A dt) state + (1 - trap) dt e^(A dt) (v mimo_x) k + trap dt (x mimo_x) k,   first k and v: of the token before
        out = the sum over ranks of (state q + D x mimo_x) silu(z mimo_z) mimo_o

    H heads of P rows (headdim), N = d_state, a multiple of 4; G groups of heads that share B and C; R ranks, 1 … 8 (SISO: 1, without
    the axis R and without mimo_*); n angles of a head, up to N / 2. […] is [batch], or [batch, T] for several tokens. Every floating
    tensor may be f32, f16 or bf16. C has the type of B, C_norm of B_norm, C_bias of B_bias, mimo_z and mimo_o of mimo_x. Arithmetic is
    f32; for one token, four ranks and a bf16 state, tensor cores multiply sums of two terms of bf16, 2^-18 from a number, if P is a
    multiple of 16 up to 128 and N is a multiple of 32 up to 128. States are carried from token to token in f32, and the output
    uses the new state before it is rounded.

    state: [slots, H, P, N], k_state: [slots, R, H, N], v_state: [slots, H, P], angle_state: [slots, H, n] f32: updated in place. Slots
        may lie at any distance, so all four may share a page. k is the last token's normed, biased and rotated row, and v is its x.
        Before a sequence's first token the first three are zeros. Angles are radians, stored from -pi to pi; any value is read
    x, z: […, H, P]     out: […, H, P] or […, H P]     B, C: […, R, G, N]     dt, A, trap: […, H]     angle: […, n] or […, H, n], logits
    angle_state, angle: None for rows that do not rotate (or have rotated already)
    D, dt_bias: [H], or None          z: None for no gate
    dt_softplus: dt <- log(1 + e^(dt + dt_bias)); trap_sigmoid: trap is a logit, else a number from 0 to 1
    A_form: "heavy": A <- -max(1 + A if A >= 0 else 1 / (1 - A), A_floor); "softplus": A <- -max(log(1 + e^A), A_floor). The published
        checkpoints say in no config which one they were trained with; state-spaces/mamba3-* have "heavy". "ready": A is negative already;
        "log_decay": A is A dt
    rotary: the elements that angle i rotates: "pairs": 2i and 2i + 1 (official SISO); "halves": i and i + N / 2 (official MIMO)
    B_norm, C_norm: [N], weights of RMS norms over N with eps; both None if B and C are normed already
    B_bias, C_bias: [H, R, N], added after the norm, or both None
    mimo_x, mimo_z, mimo_o: [H, R, P], needed by several ranks; mimo_z goes with z. Without mimo_o ranks are not summed, and out is
        […, R, H, P]
    norm_weight: [H, P]: each rank's output is RMS-normed over P with eps, before the gate; None: it is not
    state_indices: [batch] int32 or int64, slot of each row; None for slot = row. With num_accepted_tokens: [batch, columns]
    dst_state_indices: [batch], the slot of the new states, None for in place; or [batch, T], a slot for the states after each token.
        Slots must be distinct, else rows race; slots out of range or equal to pad_slot_id are not written
    num_accepted_tokens: [batch] int32 or int64, from 1: the sequence starts from the slot in that column of state_indices
    rand_seed: [1] or [slots] int64, on the device: a state of 16 bits is rounded with noise, as in selective_state_update
    pad_slot_id: a row is padding if its slot is negative, equals this or is not in the pool, or if its count of accepted tokens is out of
        range. Padding gets a zero output and touches no state
    zero_padding: False leaves the output of padding unchanged; pass `out`
    pdl: whether the kernel may start while the previous one in the stream ends (it waits before it reads anything); None = if
        the device can (sm_90 and later)

    Returns out (new, of x's dtype, if not given). CPU tensors run the reference implementation.
    Raises ArgumentError listing every violated requirement, before anything is launched; UnsupportedError; CaptureError when a
    kernel would have to be built during a CUDA graph capture; NotBuiltError, CompileError, LoadError, LaunchError.
    Source: Mamba-3 (arXiv 2603.15569).
    """
    objections = padding_objections(zero_padding, out)
    if out is None and isinstance(x, Tensor):
        by_rank = isinstance(mimo_x, Tensor) and mimo_o is None and isinstance(k_state, Tensor)
        rank = (k_state.shape[1] if k_state.dim() == 4 else 1,) if by_rank else ()
        out = torch.empty((*x.shape[:-2], *rank, *x.shape[-2:]), dtype=x.dtype, device=x.device) if rank else x.new_empty(x.shape)
    rand_seed, philox_rounds = seeded(rand_seed, philox_rounds)
    tensors = OPERANDS.Tensors(
        state, k_state, v_state, angle_state, x, B, C, dt, A, trap, angle, D, z, dt_bias, B_norm, C_norm, B_bias, C_bias, mimo_x, mimo_z,
        mimo_o, norm_weight, out, state_indices, dst_state_indices, num_accepted_tokens, rand_seed,
    )  # fmt: skip
    options = Options(A_form, rotary, dt_softplus, trap_sigmoid, eps, A_floor, pad_slot_id, philox_rounds, zero_padding)
    return run(CALLER, tensors, options, pdl, objections=objections)
