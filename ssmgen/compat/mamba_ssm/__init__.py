"""Functions of mamba_ssm.ops, as in mamba-ssm 2.3, forward only: Mamba-1's and Mamba-2's decode step and scans of prompts, Mamba-3's decode
steps and scans of prompts, and gated norms; and a patch of its layer Mamba3. Each function states how it differs from the original.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError as _UnsupportedError
from ...families.mamba3_state_update.call import mamba3_state_update as _mamba3
from ...families.selective_state_update.call import selective_state_update as _native
from ..shared import engine_norms as _norms
from ..shared import mamba1_prompts as _mamba1
from ..shared import mamba_prompts as _prompts
from ..shared.operands import takes as _takes
from .mamba3 import apply_rotary_qk_inference_fwd as apply_rotary_qk_inference_fwd
from .mamba3 import patch_mamba3 as patch_mamba3
from .mamba3_prompts import mamba3_mimo as mamba3_mimo
from .mamba3_prompts import mamba3_siso_combined as mamba3_siso_combined


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
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """One decode step of Mamba-1 or Mamba-2: state <- exp(dt A) state + dt x B;  out = C state + D x, times silu(z).

    H heads of P rows, N = d_state, G groups of heads that share B and C. Mamba-1 has dim channels instead of [H, P].

    state: [slots, H, P, N] or [slots, dim, N], updated in place
    x, z: [batch, H, P] or [batch, dim]; z None for no gate          dt: like x, or [batch, H]
    A: [H, P, N] or [dim, N], negative; or [H]          B, C: [batch, G, N] or [batch, N]
    D, dt_bias: [H, P] or [dim], or [H]; None for none
    dt_softplus: dt <- log(1 + e^(dt + dt_bias))
    state_batch_indices: [batch] int32 or int64, slot of each row; None for slot = row. Slots must be distinct

    Every floating tensor is f32, f16 or bf16, each with its own dtype. Arithmetic is f32.

    Returns a new tensor like x. Unlike mamba-ssm's function, D and dt_bias may be None, softplus is accurate for very negative arguments,
    and a row whose slot is negative or not in the pool gets a zero output and touches no state.
    Raises ArgumentError (a ValueError) listing every violated requirement, before anything is launched, for example if an operand requires
    grad while grad is enabled.
    """
    return _native(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_indices=state_batch_indices)


@_takes("update_kv_state", state="[slots, H, P, N]", Bstate="[slots, R, H, N]", Xstate="[slots, H, P]", xproj="[R, H, P]")
def mamba3_step_fn(
    state: Tensor,
    Bstate: Tensor,
    Xstate: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    x: Tensor,
    dt: Tensor,
    trap: Tensor,
    xproj: Tensor,
    outproj: Tensor | None = None,
    state_out: Tensor | None = None,
    out: Tensor | None = None,
    z: Tensor | None = None,
    zproj: Tensor | None = None,
    tile_D: int = 64,
    num_warps: int = 2,
    *,
    state_batch_indices: Tensor | None = None,
    state_batch_indices_out: Tensor | None = None,
    update_kv_state: bool = False,
    rotary_dim: int = 0,
    rotary_bias_q: Tensor | None = None,
    rotary_bias_k: Tensor | None = None,
    rotary_angle_proj: Tensor | None = None,
    rotary_angle_state: Tensor | None = None,
) -> Tensor:
    """One decode step of Mamba-3 with R ranks, whose B and C are biased and rotated already, or with rotary_dim are not, per head:

        state <- e^(A dt) state + (1 - trap) dt e^(A dt) (Xstate xproj) Bstate + trap dt (x xproj) B
        out = the sum over ranks of (state C + D x xproj) silu(z zproj) outproj

    H heads of P rows, N = d_state. With state_batch_indices, […] is a pool's [slots], else [batch].

    state: […, H, P, N], updated in place          Bstate: […, R, H, N]          Xstate: […, H, P]: B and x of the token before
    A, dt, trap: [batch, H], after their activations          B, C: [batch, R, H, N]          D: [H]
    x, z: [batch, H, P]; z None for no gate          xproj, outproj, zproj: [R, H, P]
    out: [batch, H, P], or without outproj [batch, R, H, P]; None for a new one

    Every floating tensor is f32, f16 or bf16. Arithmetic is f32. Returns out.
    Unlike in mamba_ssm.ops.cute, states may lie in a pool (state-spaces/mamba#971).
    Raises UnsupportedError for slots without update_kv_state or with state_out, for update_kv_state or rotary_dim without slots, and for a
    part of rotary_dim's operands. Raises ArgumentError (a ValueError) for operands that do not fit.

    States in a pool:
    state_batch_indices, state_batch_indices_out: [batch] int32 or int64, slots to read and to write, the latter None for the same slots. A
        row whose slot is negative or not in the pool is padding: a zero output, and no state is touched
    update_kv_state: Bstate and Xstate become B and x; needed with slots. Without it they stay, and the caller copies, as Mamba3.step does
    state_out: like state, receives the new state, and state stays; None for in place

    B and C that are normed alone; the launch adds the biases and rotates:
    rotary_dim: twice the number n of angles of a head; 0: B and C are ready, and the other four arguments are ignored
    rotary_bias_q, rotary_bias_k: [R, H, N]          rotary_angle_proj: [batch, H, n], logits
    rotary_angle_state: [slots, H, n] f32, updated in place, stored from -pi to pi. Angle i turns the elements i and i + N / 2

    Ignored arguments:
    tile_D, num_warps: they divide the original's work
    """
    name, slots = "mamba_ssm's mamba3_step_fn", state_batch_indices is not None
    rotation, problems = _rotation(slots, rotary_dim, rotary_bias_q, rotary_bias_k, rotary_angle_proj, rotary_angle_state)
    problems += [
        *(["state_out is given with state_batch_indices; expected state_batch_indices_out"] if slots and state_out is not None else []),
        *(
            ["update_kv_state is False with state_batch_indices; expected True: the update is in place"]
            if slots and not update_kv_state
            else []
        ),
        *(["update_kv_state is True without state_batch_indices; expected both"] if update_kv_state and not slots else []),
    ]
    if problems:
        raise _UnsupportedError(name, problems)
    if state_out is not None:
        state = state_out.copy_(state)
    if not update_kv_state:
        Bstate, Xstate = Bstate.clone(), Xstate.clone()
    of_x, of_o, of_z = (None if t is None else t.transpose(0, 1) for t in (xproj, outproj, zproj))
    return _mamba3(
        state, Bstate, Xstate, x=x, B=B, C=C, dt=dt, A=A, trap=trap, A_form="ready", rotary="halves", D=D, z=z, dt_softplus=False,
        trap_sigmoid=False, mimo_x=of_x, mimo_z=of_z if z is not None else None, mimo_o=of_o, state_indices=state_batch_indices,
        dst_state_indices=state_batch_indices_out, out=out, **rotation,
    )  # fmt: skip


def _rotation(
    slots: bool, rotary_dim: int, bias_q: Tensor | None, bias_k: Tensor | None, proj: Tensor | None, state: Tensor | None
) -> tuple[dict[str, Any], list[str]]:
    """(the operands of a step that adds biases and rotates, the reasons why it cannot)"""
    if not rotary_dim:
        return {"angle_state": None, "angle": None}, []
    problems = [] if slots else ["rotary_dim is given without state_batch_indices; expected both: angles lie in a pool"]
    if bias_q is None or bias_k is None or proj is None or state is None:
        return {}, [*problems, "rotary_dim is given without all of its operands; expected two biases, an angle_proj and an angle_state"]
    if rotary_dim != 2 * state.shape[-1]:
        problems.append(f"rotary_dim is {rotary_dim}; expected {2 * state.shape[-1]}, twice the angles of a head")
    return {"angle_state": state, "angle": proj, "B_bias": bias_k.transpose(0, 1), "C_bias": bias_q.transpose(0, 1)}, problems


@_takes(Q="[batch, G, N]", K="[batch, G, N]", V="[batch, H, P]", Q_bias="[H, N]", K_bias="[H, N]", Angles="[batch, H, angles]")
def mamba3_siso_step(
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
) -> tuple[Tensor, list[Tensor]]:
    """One decode step of Mamba-3 with one rank (SISO), which adds biases to Q and K and rotates them, per head:

        angle <- angle + pi tanh(Angles) DT;  k, q <- K + K_bias, Q + Q_bias, rotated by angle
        state <- e^ADT state + (1 - s) DT e^ADT v' k' + s DT V k,   with s = sigmoid(Trap), and v', k' of the token before
        out = state q + D V, times silu(Z)

    H heads of P rows, N = d_state, G groups of heads that share Q and K.

    Q, K: [batch, G, N], normed          Q_bias, K_bias: [H, N]          V, Z: [batch, H, P]; Z None for no gate
    ADT, DT, Trap: [batch, H]: A dt, dt after its softplus, and a logit          D: [H]; None for none
    Angles: [batch, H, angles], logits; angle i rotates elements 2i and 2i + 1
    Input_States: angle [batch, H, angles] f32, state [batch, H, P, N], k [batch, H, N] and v [batch, H, P]; None for zeros. They stay

    Every floating tensor is f32, f16 or bf16.

    Returns (a new tensor like V, [angle, state, k, v], which are new). Unlike in mamba_ssm.ops.triton, angles are returned from -pi to pi,
    and all arithmetic is f32.
    Raises ArgumentError (a ValueError) listing every violated requirement, before anything is launched.
    """
    if Input_States is None:
        batch, H, P = V.shape
        found = [V.new_zeros(batch, H, n, dtype=torch.float32) for n in (Angles.shape[-1], Q.shape[-1])]
        states = [found[0], V.new_zeros(batch, H, P, Q.shape[-1], dtype=torch.float32), found[1], torch.zeros_like(V)]
    else:
        states = [t.clone() for t in Input_States]
    angle, state, k, v = states
    out = _mamba3(
        state, k, v, angle, V, K, Q, DT, ADT, Trap, Angles, "log_decay", "pairs", D, Z, dt_softplus=False, B_bias=K_bias, C_bias=Q_bias,
    )  # fmt: skip
    return out, states


@_takes("norm_before_gate is_rms_norm")
def layernorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Tensor:
    """Gated layer norm or RMS norm: out = norm(x) weight + bias, times silu(z).

    With norm_before_gate=False, x is multiplied by silu(z) before the norm.

    x, z: [*rows, channels]; z None for no gate          weight, bias: [channels]; bias None for none. f32, f16 or bf16 each
    eps: is added to the variance, or to the mean square
    group_size: channels of a group, over which the norm is; None for all channels
    norm_before_gate: True by default here, False in Mamba-2's layers
    is_rms_norm: does not subtract the mean

    Returns a new tensor like x. Arithmetic is f32, and the result is rounded once.
    Raises UnsupportedError for a bias of an RMS norm, and ArgumentError (a ValueError) for operands that do not fit or require grad.
    """
    return _norms.normed(
        "mamba_ssm's layernorm_fn", x, z, weight, bias, eps, group_size=group_size, norm_before_gate=norm_before_gate,
        is_rms_norm=is_rms_norm,
    )  # fmt: skip


@_takes("norm_before_gate")
def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """Gated RMS norm: out = x rsqrt(mean(x^2) + eps) weight, times silu(z).

    With norm_before_gate=False, x is multiplied by silu(z) before the norm.

    x, z: [*rows, channels]; z None for no gate          weight: [channels]. f32, f16 or bf16 each
    bias: None
    group_size: channels of a group, over which the mean is; None for all channels

    Returns a new tensor like x. Arithmetic is f32, and the result is rounded once.
    Raises UnsupportedError for a bias, and ArgumentError (a ValueError) for operands that do not fit or require grad.
    """
    return _norms.normed("mamba_ssm's rmsnorm_fn", x, z, weight, bias, eps, group_size=group_size, norm_before_gate=norm_before_gate)


@_takes("return_last_state", **_mamba1.PADDED)
def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-1 over prompts, per token and channel: h <- exp(delta A) h + delta u B;  out = C h + D u, times silu(z).

    dim channels with N states each, 1 … 256; G groups of channels, which share B and C.

    u, delta, z: [batch, dim, T]; z None for no gate          B, C: [batch, N, T] or [batch, G, N, T]; bf16, f16 or f32, one dtype
    A: [dim, N] f32, negative          D, delta_bias: [dim] f32, bf16 or f16; None for none
    delta_softplus: delta <- log(1 + e^(delta + delta_bias))
    return_last_state: also return the states after the last token, [batch, dim, N] f32

    Returns a new tensor like u, or (that, the last states). Arithmetic is f32. If delta or z has another memory order of channels and
    tokens than u, it is copied once.

    Unlike mamba-ssm's function, it is forward only, and refuses two kinds of operands: it raises UnsupportedError for complex A, B or C,
    and for B or C [dim, N], the same for all tokens. Raises ArgumentError (a ValueError) listing every violated requirement, before
    anything is launched, for example if an operand requires grad while grad is enabled.
    """
    operands = _mamba1.Operands(u, delta, A, B, C, D, z, delta_bias, delta_softplus)
    found: Tensor | tuple[Tensor, Tensor] = _mamba1.scan("mamba_ssm's selective_scan_fn", operands, return_final_states=return_last_state)
    return found


@_takes("return_final_states return_varlen_states", **_prompts.PADDED)
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
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Mamba-2 (SSD) over prompts, per token: S <- exp(dt A) S + dt x B;  out = C S + D x, times silu(z).

    H heads of P rows (headdim), N = d_state, multiples of 16 up to 256; G groups of heads that share B and C.

    x, z: [batch, T, H, P]; z None for no gate          B, C: [batch, T, G, N]. All are bf16, f16 or f32, of one dtype
    dt: [batch, T, H]          A: [H], negative          D: [H] or [H, P], dt_bias: [H]; None for none
    chunk_size: ignored; any is taken
    dt_softplus: dt <- log(1 + e^(dt + dt_bias)); dt_limit: dt is then clamped to (low, high)
    initial_states: [batch, H, P, N] f32, f16 or bf16, states before the first token; zeros if None
    return_final_states: also return the states after each row's last token, [batch, H, P, N] f32

    Returns a new tensor like x, or a tuple: (that[, final states][, states of packed sequences]).
    Unlike mamba-ssm's function, it is forward only, states between chunks are f32, and a row's first token continues from initial_states
    whatever its seq_idx.
    Raises UnsupportedError for several packed sequences without seq_idx, and for state_dtype other than f32, f16 and bf16. Raises
    ArgumentError (a ValueError) listing every violated requirement, before anything is launched, for example if an operand requires grad
    while grad is enabled.

    Packed sequences:
    seq_idx: [batch, T] int32, the sequence of each token; if it differs from the previous token's, the state restarts from zero
    return_varlen_states: also return the states after each sequence of cu_seqlens, [sequences, H, P, N]; needs one packed row, and seq_idx.
        The states of a sequence without tokens are zeros. The first sequence continues from initial_states
    cu_seqlens: [sequences + 1] int32 or int64, start of each sequence of the row. It only serves return_varlen_states
    state_dtype: dtype of the states of packed sequences; None for C's
    """
    name = "mamba_ssm's mamba_chunk_scan_combined"
    starts = _prompts.starts_of(name, x, cu_seqlens, seq_idx) if return_varlen_states else None
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    last, varlen = _prompts.scan(
        _prompts.Operands(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit), out, initial_states=initial_states, seq_idx=seq_idx,
        last=torch.float32 if return_final_states else None, positions=None if starts is None else starts[1:],
        after=None if starts is None else _prompts.state_dtype_of(name, state_dtype, C),
    )  # fmt: skip
    if starts is not None and varlen is not None:  # a sequence without tokens ends where the previous one does
        varlen.masked_fill_((starts[1:] <= starts[:-1])[:, None, None, None], 0)
    more = [t for t in (last, varlen) if t is not None]
    return (out, *more) if more else out
