"""Mamba-3's scans of prompts, as in mamba_ssm.ops.triton.mamba3 and mamba_ssm.ops.tilelang.mamba3, forward only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...families.mamba3_chunk_scan.call import mamba3_chunk_scan
from ..shared.operands import rows_of, takes

_HEADS, _STEPS, _ANGLES = "[batch, T, H, P]", "[batch, H, T]", "[batch, T, H, angles]"
_SISO, _MIMO, _FACTORS = "[batch, T, G, N]", "[batch, T, R, G, N]", "[H, R, P]"
States = tuple[Tensor, Tensor, Tensor, Tensor]


def _rows(t: Tensor | None) -> Any:
    """Rows as kernels copy them, on a GPU in bf16 if they are f32, as mamba-ssm's functions round them."""
    return t if t is None else rows_of(t.bfloat16() if t.dtype == torch.float32 and t.is_cuda else t)


def _scanned(V: Tensor, steps: tuple[Tensor, Tensor, Tensor], inputs: States | None, final: bool, **more: Any) -> Any:
    """The call, whose states come and go in mamba-ssm's order: angle, state, k, v. steps: ADT, DT and Trap."""
    adt, dt, trap = (t.transpose(1, 2) for t in steps)
    names = ("initial_angles", "initial_states", "initial_k", "initial_v")
    before: dict[str, Any] = {} if inputs is None else dict(zip(names, (inputs[0].float(), *inputs[1:]), strict=True))
    found = mamba3_chunk_scan(
        _rows(V), dt=dt, A=adt, trap=trap, A_form="log_decay", dt_softplus=False, return_final_states=final, **before, **more
    )
    if not final:
        return found
    out, state, k, v, angle = found
    return out, angle, state, k, v


@takes(
    "return_final_states", Q=_SISO, K=_SISO, V=_HEADS, ADT=_STEPS, DT=_STEPS, Trap=_STEPS, Q_bias="[H, N]", K_bias="[H, N]", Angles=_ANGLES,
    Z=_HEADS,
)  # fmt: skip
def mamba3_siso_combined(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    Angles: Tensor,
    D: Tensor | None = None,
    Z: Tensor | None = None,
    Input_States: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    chunk_size: int = 64,
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Mamba-3 with one rank (SISO) over prompts, which adds biases to Q and K and rotates them, per token and head:

        angle <- angle + pi tanh(Angles) DT;  k, q <- K + K_bias, Q + Q_bias, rotated by angle
        state <- e^ADT state + (1 - s) DT e^ADT v' k' + s DT V k,   with s = sigmoid(Trap), and v', k' of the token before
        out = state q + D V, times silu(Z)

    H heads of P rows, up to 128, N = d_state, up to 256, both multiples of 16; G groups of heads that share Q and K.

    Q, K: [batch, T, G, N], normed          Q_bias, K_bias: [H, N]          V, Z: [batch, T, H, P]; Z None for no gate
    ADT, DT, Trap: [batch, H, T]: A dt, dt after its softplus, and a logit          D: [H]; None for none
    Angles: [batch, T, H, angles], logits; angle i rotates elements 2i and 2i + 1
    Input_States: angle [sequences, H, angles], state [sequences, H, P, N], k [sequences, H, N] and v [sequences, H, P], before the first
        token; None for zeros. They stay. Each has its own dtype
    chunk_size: ignored; any is taken
    return_final_states: also return the states after the last token, in the same order
    cu_seqlens: [sequences + 1] int32 or int64, start of each packed sequence, with a batch of one

    Returns a new tensor like V, or (that, angle, state, k, v), which are new. On a GPU, f32 Q, K, V and Z are rounded to bf16, as in
    mamba_ssm.ops.triton. Unlike there, dt, trap and angles stay f32, angles are returned from -pi to pi in f32, k in V's dtype if there are
    no Input_States, and a packed sequence without tokens passes its states on.
    Raises ArgumentError (a ValueError) listing every violated requirement, before anything is launched, for example if an operand requires
    grad while grad is enabled.
    """
    return _scanned(  # type: ignore[no-any-return]
        V, (ADT, DT, Trap), Input_States, return_final_states, B=_rows(K), C=_rows(Q), angle=Angles, rotary="pairs", D=D, z=_rows(Z),
        B_bias=K_bias, C_bias=Q_bias, cu_seqlens=cu_seqlens,
    )  # fmt: skip


@takes(
    "return_state fuse_pregate_headwise_rms_norm", Q=_MIMO, K=_MIMO, V=_HEADS, ADT=_STEPS, DT=_STEPS, Trap=_STEPS, Q_bias="[H, R, N]",
    K_bias="[H, R, N]", MIMO_V=_FACTORS, MIMO_Z=_FACTORS, MIMO_Out=_FACTORS, Angles=_ANGLES, Z=_HEADS,
)  # fmt: skip
def mamba3_mimo(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    MIMO_V: Tensor,
    MIMO_Z: Tensor | None,
    MIMO_Out: Tensor | None,
    Angles: Tensor,
    D: Tensor | None,
    Z: Tensor | None,
    chunk_size: int,
    rotary_dim_divisor: int,
    dtype: torch.dtype,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    fuse_pregate_headwise_rms_norm: bool = False,
    outproj_norm_weight: Tensor | None = None,
    outproj_norm_eps: float = 1e-5,
    Input_States: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Mamba-3 with R ranks (MIMO) over prompts, which adds biases to Q and K and rotates them, per token and head:

        angle <- angle + pi tanh(Angles) DT;  k, q <- K + K_bias, Q + Q_bias, rotated by angle
        state <- e^ADT state + (1 - s) DT e^ADT (v' MIMO_V) k' + s DT (V MIMO_V) k,   with s = sigmoid(Trap), and v', k' of the token before
        out = the sum over ranks of (state q + D V MIMO_V) silu(Z MIMO_Z) MIMO_Out

    H heads of P rows, up to 128, N = d_state, up to 256, both multiples of 16; G groups of heads that share Q and K; R ranks, 1 … 8.

    Q, K: [batch, T, R, G, N], normed          Q_bias, K_bias: [H, R, N]          V, Z: [batch, T, H, P]; Z None for no gate
    ADT, DT, Trap: [batch, H, T]: A dt, dt after its softplus, and a logit          D: [H]; None for none
    MIMO_V, MIMO_Z, MIMO_Out: [H, R, P]; MIMO_Z goes with Z. Without MIMO_Out ranks are not summed, and out is [batch, T, R, H, P]
    Angles: [batch, T, H, N / rotary_dim_divisor], logits; angle i rotates elements i and i + N / 2
    chunk_size, dtype: ignored; any are taken
    return_state: also return the states after the last token: angle [sequences, H, angles], state [sequences, H, P, N], k
        [sequences, R, H, N] and v [sequences, H, P]
    cu_seqlens: [sequences + 1] int32 or int64, start of each packed sequence, with a batch of one
    fuse_pregate_headwise_rms_norm: each rank's output is RMS-normed over P with outproj_norm_eps, times outproj_norm_weight, [H, P] or
        [H P], before the gate
    Input_States: states before the first token, in the order of the returned ones; None for zeros. They stay. mamba-ssm has no such
        argument (state-spaces/mamba#976)

    Returns a new tensor like V, or (that, angle, state, k, v), which are new. On a GPU, f32 Q, K, V and Z are rounded to bf16. Unlike in
    mamba_ssm.ops.tilelang, dt, trap and weights stay as they are given, and v of packed sequences is of each one's last token.
    Raises UnsupportedError for a norm without its weight, and for another number of angles. Raises ArgumentError (a ValueError) for
    operands that do not fit, or that require grad while grad is enabled.
    """
    wanted = Q.shape[-1] // rotary_dim_divisor if rotary_dim_divisor in (2, 4) else 0
    problems = [
        *([f"rotary_dim_divisor is {rotary_dim_divisor}; expected 2 or 4"] if not wanted else []),
        *([f"Angles is {list(Angles.shape)}; expected {wanted} angles"] if wanted and Angles.shape[-1] != wanted else []),
        *(
            ["outproj_norm_weight is None with fuse_pregate_headwise_rms_norm; expected both"]
            if fuse_pregate_headwise_rms_norm and outproj_norm_weight is None
            else []
        ),
    ]
    if problems:
        raise UnsupportedError("mamba_ssm's mamba3_mimo", problems)
    weight = outproj_norm_weight if fuse_pregate_headwise_rms_norm else None
    return _scanned(  # type: ignore[no-any-return]
        V, (ADT, DT, Trap), Input_States, return_state, B=_rows(K), C=_rows(Q), angle=Angles, rotary="halves", D=D, z=_rows(Z),
        B_bias=K_bias, C_bias=Q_bias, mimo_x=MIMO_V, mimo_z=MIMO_Z if Z is not None else None, mimo_o=MIMO_Out, cu_seqlens=cu_seqlens,
        norm_weight=None if weight is None else weight.reshape(V.shape[-2:]), eps=outproj_norm_eps,
    )  # fmt: skip
