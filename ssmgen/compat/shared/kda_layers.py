"""Kimi-K3's decode layer in one kernel, as both engines have one: operands, and counts that stay with a pool."""

from __future__ import annotations

import torch
from torch import Tensor

from ...families.delta_layer.call import kda_layer
from . import noise
from .gated_delta import first

# By where a pool of states lies and how many counts it needs: [slots, heads] zeros, which each launch leaves as zeros.
_ARRIVALS: dict[tuple[torch.device, int, int, int], Tensor] = {}


def decode(
    mixed_qkv: Tensor, g: Tensor, beta: Tensor, z: Tensor | None, window: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None,
    A_log: Tensor, dt_bias: Tensor, norm_weight: Tensor | None, *, lower_bound: float | None, norm_eps: float, slots: Tensor,
    pad_slot_id: int, out: Tensor, scale: float | None = None,
) -> None:  # fmt: skip
    """One token per sequence: convolution, step and norm, into out [batch, H, V].

    weight: [channels, width], made from the engine's weight in this call, so that a CUDA graph's replay makes it again and sees reloaded
    weights
    """
    kda_layer(
        mixed_qkv, g, beta, z, window, state, arrivals(state, state.shape[1]), weight, bias, A_log.reshape(-1), dt_bias.reshape(-1),
        norm_weight, lower_bound=lower_bound, norm_eps=norm_eps, scale=scale, state_indices=first(slots, mixed_qkv.shape[0]),
        pad_slot_id=pad_slot_id, out=out, **noise.of(state),
    )  # fmt: skip


def arrivals(state: Tensor, heads: int) -> Tensor:
    """Counts for a pool [slots, H, V, K] with this number of key heads. New ones in each replay of a graph whose capture found none."""
    slots = state.shape[0]
    key = (state.device, state.data_ptr(), slots, heads)
    found = _ARRIVALS.get(key)
    if found is None:
        found = torch.zeros((slots, heads), dtype=torch.int32, device=state.device)
        if not (state.is_cuda and torch.cuda.is_current_stream_capturing()):
            _ARRIVALS[key] = found
    return found
