"""SGLang's short convolution of Qwen4-Exp's n-gram layers, whose taps are apart, as in SGLang 0.5.23."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...families.causal_conv1d.call import causal_conv1d
from ...families.causal_conv1d_update.call import causal_conv1d_update
from ..shared.operands import takes as _takes
from ..shared.replacing import NotReplaced, Replacement

_MODULE = "sglang.srt.models.qwen4_exp"


@_takes(x="[tokens, channels]")
def ple_short_conv(self: Any, x: Tensor, forward_batch: Any, batch: Any) -> Tensor:
    """Prompts and decode steps of a convolution whose taps are apart, with SiLU: the method _short_conv of SGLang's Qwen4ExpPLELayer.

    x: [tokens, channels], packed. One kernel reads and advances the windows of the batch's slots; slot 0 is padding. SGLang gathers the
    windows, joins them with padded tokens, calls PyTorch's convolution, and scatters the windows. Verified drafts are SGLang's own method,
    without a warning: with its fusion, the default, SGLang calls fused_qwen4_verify_conv for them.

    Returns a new tensor [tokens, channels]; SiLU comes before the output is rounded.
    """
    if batch.mode.is_target_verify() or not x.shape[0]:
        raise NotReplaced
    engine = import_module(_MODULE)
    pool, slots = engine.get_req_to_token_pool().short_conv_layer_cache(self.layer_id), batch.state_indices
    weight, track = self.conv1d.weight.squeeze(1).to(x.dtype), engine._ple_track_targets(forward_batch, batch)
    if batch.mode.is_decode():
        out = causal_conv1d_update(
            x, pool, weight, None, "silu", conv_state_indices=slots, dilation=self.short_conv_dilation, pad_slot_id=0
        )  # fmt: skip
        if track is not None:
            pool.index_copy_(0, track[0].long(), pool.index_select(0, slots))
        return out
    lengths = batch.lengths
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    kept = None if track is None else _windows_at(x, pool.index_select(0, slots), starts[:-1], track[1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    causal_conv1d(
        x.t(), weight, activation="silu", query_start_loc=starts, conv_states=pool, conv_state_indices=slots,
        has_initial_state=torch.ones_like(lengths, dtype=torch.bool), dilation=self.short_conv_dilation, pad_slot_id=0, out=out.t(),
    )  # fmt: skip
    if track is not None and kept is not None:
        pool.index_copy_(0, track[0].long(), kept)
    return out


def _windows_at(x: Tensor, windows: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
    """The window after this many tokens of each sequence, [sequences, channels, inputs], from the windows before them and all tokens."""
    size = windows.shape[2]
    at = counts[:, None] + torch.arange(size, device=x.device) - size  # below 0: an input before the sequence's tokens
    new = x[(starts[:, None] + at.clamp(min=0)).clamp(max=x.shape[0] - 1)].transpose(1, 2)
    old = windows.gather(2, (at + size).clamp(max=size - 1)[:, None].expand_as(windows))
    return torch.where(at[:, None] >= 0, new, old)


@_takes(
    x="[tokens, channels]", residual="[tokens, channels]", weight="[channels, 1, width]", state="[slots, channels, entries]",
    state_indices="[N]", valid="[tokens]", intermediate="[N, tokens, channels, entries]",
)  # fmt: skip
def fused_qwen4_verify_conv(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    state: Tensor,
    state_indices: Tensor,
    valid: Tensor,
    width: int,
    dilation: int,
    intermediate: Tensor | None,
) -> Tensor:
    """Verified drafts of a dilated convolution: residual + silu(conv(x)), for `width` tokens of each sequence.

    x, residual: [N width, channels]          weight: [channels, 1, taps]          valid: [N width] bool; the output of other tokens is 0
    state: [slots, channels, (taps - 1) dilation], which is only read          state_indices: [N], slot of each sequence
    intermediate: [N or more, width or more, channels, (taps - 1) dilation] of x's dtype, or None; receives the window after each token.
        Those after tokens that are not valid are undefined; SGLang writes zeros there

    Returns a new tensor like x, with the bits of decode steps: SiLU comes before the convolution is rounded, unlike in SGLang.
    Raises ArgumentError (a ValueError) for operands that do not fit, before anything is written.
    """
    count, channels = state_indices.shape[0], x.shape[1]
    if x.shape[0] != count * width:
        problem = f"x has {x.shape[0]} tokens; expected {count} width = {count * width}, width tokens of each sequence"
        raise ArgumentError("sglang's fused_qwen4_verify_conv", [problem])
    windows = state.index_select(0, state_indices).to(x.dtype)  # a step advances them; the pool waits for the tokens that are accepted
    tokens, added = (t.view(count, width, channels).transpose(1, 2) for t in (x, residual))
    out = causal_conv1d_update(
        tokens, windows, weight.squeeze(1), None, "silu", intermediate_conv_window=intermediate, dilation=dilation, residual=added
    )  # fmt: skip
    return torch.where(valid[:, None], out.transpose(1, 2).reshape(x.shape), 0.0)


REPLACEMENTS = [
    Replacement(_MODULE, "Qwen4ExpPLELayer._short_conv", ple_short_conv),
    Replacement("sglang.kernels.ops.mamba.qwen4_short_conv", "fused_qwen4_verify_conv", fused_qwen4_verify_conv),
]
