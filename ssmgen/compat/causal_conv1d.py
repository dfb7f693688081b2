"""causal_conv1d_fn, causal_conv1d_update and causal_conv1d_varlen_states of Dao-AILab's causal-conv1d 1.6; forward only."""

from __future__ import annotations

import torch
from torch import Tensor

from ..calls.checks import oddity
from ..errors import ArgumentError
from ..families.causal_conv1d.call import causal_conv1d as _native
from ..families.causal_conv1d_update.call import causal_conv1d_update as _native_update
from .shared.operands import takes as _takes


def _check_activation(activation: str | None) -> None:
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError(f"activation is {activation!r}; expected None, 'silu' or 'swish'")


@_takes("return_final_states")
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """A causal convolution per channel: out[:, d, t] = act(bias[d] + sum_j weight[d, j] x[:, d, t - (width - 1) + j]).

    x: [batch, dim, length], channel-first or channel-last in memory, any strides          weight: [dim, width], width 1 … 8
    bias: [dim]; None for none          activation: None, "silu" or its other name "swish"
    initial_states: [batch, dim, width - 1], the inputs before the first token; zeros if None
    return_final_states: also return the last width - 1 inputs, [batch, dim, width - 1]

    x and states have one dtype, f32, f16 or bf16; weight and bias each have their own. Arithmetic is f32.

    Returns a new tensor laid out like x, or (that, final states).
    Unlike causal-conv1d's function, it is forward only, and takes every stride, alignment and length. States may have every layout, and go
    together with seq_idx. Widths are 1 … 8 instead of 2 … 4.
    Raises NotImplementedError for another activation, as causal-conv1d does. Raises ArgumentError (a ValueError) listing every violated
    requirement, before anything is launched, for example if an operand requires grad while grad is enabled.

    Several sequences in a row:
    seq_idx: [batch, length] int32, the sequence of each token: taps reach only tokens of the same sequence; a negative number is padding,
        with a zero output. initial_states belong to the row's first sequence, and final states to its last one

    Given results:
    final_states_out: [batch, dim, width - 1], receives the final states, and is returned; only written with return_final_states
    """
    _check_activation(activation)
    return _native(
        x, weight, bias, activation=activation, seq_idx=seq_idx, initial_states=initial_states,
        return_final_states=return_final_states, final_states_out=final_states_out if return_final_states else None,
    )  # fmt: skip


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """Decode steps of causal_conv1d, per token: out = act(bias + sum_j weight[:, j] window[:, j]).

    The window of a token is the last width - 1 inputs, from conv_state, and the token itself.

    x: [batch, dim] or [batch, dim, T]          weight: [dim, width], width 2 … 8          bias: [dim]; None for none
    conv_state: [slots, dim, state_len] of x's dtype, any strides, updated in place. state_len is width - 1 or more; the last width - 1
        entries are the history
    activation: None, "silu" or its other name "swish"
    conv_state_indices: [batch] int32 or int64, slot of each row; None for slot = row. Slots must be distinct

    x and conv_state have one dtype, f32, f16 or bf16; weight and bias each have their own. Arithmetic is f32.

    Returns a new tensor like x. Unlike causal-conv1d's function, widths are 2 … 8 instead of 2 … 4, indices may be int64, and a row whose
    slot is not in the pool is padding, like one whose slot is negative: a zero output, and no state is touched.
    Raises NotImplementedError for another activation, as causal-conv1d does, and ArgumentError (a ValueError) listing every violated
    requirement, before anything is launched.

    States that are rings:
    cache_seqlens: [batch] int32 or int64, the number of inputs so far: input i is entry i modulo state_len of conv_state
    """
    _check_activation(activation)
    return _native_update(
        x, conv_state, weight, bias, activation, cache_seqlens=cache_seqlens, conv_state_indices=conv_state_indices
    )  # fmt: skip


@_takes()
def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last state_len tokens of each packed sequence: out[b, :, j] = x[cu_seqlens[b + 1] - state_len + j], zeros before its first token.

    x: [total, dim], any dtype
    cu_seqlens: [batch + 1] int32 or int64 on x's device, start of each sequence
    state_len: 0 or more

    Returns [batch, dim, state_len], new, of x's dtype. This is plain PyTorch, so Triton is not needed. Like causal-conv1d's function, it
    does not synchronise with the host: a CUDA graph can hold it.
    Raises ArgumentError (a ValueError) for shapes, dtypes and devices that do not fit.
    """
    problems = [f"{name} is {odd}" for name, t in (("x", x), ("cu_seqlens", cu_seqlens)) if (odd := oddity(t)) is not None]
    if problems:  # which have no sizes
        raise ArgumentError("causal_conv1d_varlen_states", problems)
    if x.dim() != 2 or cu_seqlens.dim() != 1 or not cu_seqlens.numel():
        problems.append(f"x is {list(x.shape)} and cu_seqlens {list(cu_seqlens.shape)}; expected [total, dim] and [batch + 1]")
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.device != x.device:
        problems.append(
            f"cu_seqlens is {cu_seqlens.dtype} on {cu_seqlens.device}; expected int32 or int64 on {x.device}".replace("torch.", "")
        )
    if not isinstance(state_len, int) or not 0 <= state_len < 2**31:
        problems.append(f"state_len is {state_len!r}; expected a length of 0 or more")
    if problems:
        raise ArgumentError("causal_conv1d_varlen_states", problems)
    if len(x) == 0:  # nothing to index
        return x.new_zeros(len(cu_seqlens) - 1, state_len, x.shape[1]).transpose(1, 2)
    token = cu_seqlens[1:, None] - state_len + torch.arange(state_len, device=x.device)
    before = token < cu_seqlens[:-1, None]
    return x[token.clamp(0, len(x) - 1)].masked_fill_(before[..., None], 0).transpose(1, 2)  # where() would copy its zero from the host
