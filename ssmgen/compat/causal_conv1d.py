"""causal_conv1d_fn, causal_conv1d_update and causal_conv1d_varlen_states of Dao-AILab's causal-conv1d 1.6; forward only.

Unlike there: every stride, alignment and length is taken as it is, channel-first or channel-last; weight and bias each have their own
dtype. Raises NotImplementedError for another activation than None, "silu" and "swish", as there, and the errors of ssmgen's functions:
ArgumentError (a ValueError) where an operand requires grad while grad is enabled, for one.
"""

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
    """x [batch, dim, length] -> a new tensor like it, or with return_final_states (that, final states [batch, dim, width - 1]).

    Unlike there, width is 1 … 8; states may be given and asked for in every layout and together with seq_idx, where the initial state is
    that of the row's first sequence, and the final one is that of its last. As there, final_states_out is only written with
    return_final_states.
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
    """x [batch, dim] or [batch, dim, length] -> a new tensor like it; conv_state [slots, dim, state_len] in place.

    Unlike there, width is 2 … 8, indices and cache_seqlens may be int64, and a row whose slot is beyond the pool is padding, like one
    whose slot is negative: a zero output, and no state is touched.
    """
    _check_activation(activation)
    return _native_update(
        x, conv_state, weight, bias, activation, cache_seqlens=cache_seqlens, conv_state_indices=conv_state_indices
    )  # fmt: skip


@_takes()
def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last state_len tokens of each packed sequence of x [total, dim], preceded by zeros if it has fewer -> [batch, dim, state_len].

    Plain PyTorch, which Triton is not needed for. As there, no host synchronisation: a CUDA graph can hold it.
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
