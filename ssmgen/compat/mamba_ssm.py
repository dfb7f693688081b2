"""mamba_ssm.ops' functions, forward only: selective_scan_interface's selective_scan_fn, and of triton selective_state_update,
ssd_combined's mamba_chunk_scan_combined, layernorm_gated's layernorm_fn and rmsnorm_fn, and of Mamba-3 mamba3_step_fn and mamba3_siso_step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import UnsupportedError as _UnsupportedError
from ..families.mamba3_state_update.call import mamba3_state_update as _mamba3
from ..families.selective_state_update.call import selective_state_update as _native
from .shared import engine_norms as _norms
from .shared import mamba1_prompts as _mamba1
from .shared import mamba_prompts as _prompts
from .shared.operands import takes as _takes


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
    """As in mamba-ssm 2.3: state [slots, dim, N] or [slots, H, P, N] in place; returns a new tensor like x.

    A row whose index is negative gets a zero output. Unlike there, D and dt_bias may be None, and softplus is accurate for very
    negative arguments. Raises ssmgen.errors.ArgumentError.
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
    """As ops.cute.mamba3's step, with the slots of state-spaces/mamba#971: state [batch or slots, H, P, N] in place; returns out.

    Bstate: [batch or slots, R, H, N]; Xstate: [batch or slots, H, P]   A, dt, trap: [batch, H], after their activations
    B, C: [batch, R, H, N], biased and rotated   D: [H]   x, z: [batch, H, P]   xproj, outproj, zproj: [R, H, P]
    out: [batch, H, P], or without outproj [batch, R, H, P]; a new one if it is not given
    state_out: receives the new state; None: state does
    update_kv_state: Bstate and Xstate become B and x, which needs state_batch_indices. Without it they stay, and the caller copies, as
        Mamba3.step does
    state_batch_indices, state_batch_indices_out: [batch], slots to read and to write; negative ones are padding
    tile_D and num_warps divide work there: ignored

    Raises UnsupportedError for slots without update_kv_state or with state_out, and for a rotation inside (rotary_dim): call
    ssmgen.mamba3_state_update, which also norms. Raises ssmgen.errors.ArgumentError.
    """
    name, slots = "mamba_ssm's mamba3_step_fn", state_batch_indices is not None
    problems = [
        *([f"rotary_dim is {rotary_dim}; expected 0. Call ssmgen.mamba3_state_update, which rotates."] if rotary_dim else []),
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
        state, Bstate, Xstate, None, x, B, C, dt, A, trap, None, "ready", "pairs", D, z, dt_softplus=False, trap_sigmoid=False,
        mimo_x=of_x, mimo_z=of_z if z is not None else None, mimo_o=of_o, state_indices=state_batch_indices,
        dst_state_indices=state_batch_indices_out, out=out,
    )  # fmt: skip


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
    """As ops.triton.mamba3's step: one token from Input_States, or from zeros; returns (a new tensor like V, [Angle, SSM, K, V]).

    Q, K: [batch, G, N], normed, without their biases [H, N]   V, Z: [batch, H, P]   ADT: [batch, H], A dt   DT, Trap: [batch, H], dt after
    its softplus, and a logit   Angles: [batch, H, angles], logits; neighbours rotate   D: [H]
    Input_States: angle [batch, H, angles], SSM [batch, H, P, N], K [batch, H, N], V [batch, H, P]; they stay, and new ones are returned

    Unlike there, angles are returned from -pi to pi, and everything is computed in f32. Raises ssmgen.errors.ArgumentError.
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
    """x, z: [*rows, channels] -> a new tensor like x: the norm of all channels, or of each group_size, gated by silu(z).

    weight, bias: [channels]   norm_before_gate: the gate is applied after the norm, else before it
    is_rms_norm: without the mean. Raises UnsupportedError for a bias of such a norm; and the errors of ssmgen.gated_layer_norm.
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
    """As layernorm_fn with is_rms_norm."""
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
    """As in mamba-ssm 2.3: u [batch, D, T] -> a new tensor like it, or (that, the states after the last token [batch, D, N] f32).

    delta, z: like u   A: [D, N]   B, C: [batch, N, T] or [batch, G, N, T]   D, delta_bias: [D]

    Raises UnsupportedError for A, B or C that are complex, and B or C that are the same for all tokens, [D, N]; and what
    ssmgen.selective_scan raises: ArgumentError (a ValueError) where an operand requires grad while grad is enabled, for one.
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
    """As in mamba-ssm 2.3: x [batch, T, H, P] -> a new tensor like it, or (that[, final states][, states of packed sequences]).

    dt: [batch, T, H]   A: [H]   B, C: [batch, T, G, N]   D: [H] or [H, P]   z: like x   dt_bias: [H]   initial_states: [batch, H, P, N]
    seq_idx: [batch, T] int32: where it changes, the state restarts from zero   dt_limit: clamps steps, after the softplus
    return_final_states: [batch, H, P, N] f32, after each row's last token
    return_varlen_states: [sequences, H, P, N] of state_dtype or else C's, after each sequence of cu_seqlens [sequences + 1], of one packed
        row; those without tokens have zeros. cu_seqlens has no other use: seq_idx separates sequences
    chunk_size divides work there: ignored, and any is taken

    Unlike there, a row's first token goes on from initial_states whatever its seq_idx, and so do the states of packed sequences; states
    between chunks are f32, and state_dtype is only a result's dtype.
    Raises UnsupportedError for packed sequences without seq_idx, and the errors of ssmgen.chunk_scan: ArgumentError (a ValueError) where an
    operand requires grad while grad is enabled, for one.
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
