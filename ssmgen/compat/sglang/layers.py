"""SGLang's layers that are one kernel each here: Kimi-K3's decode steps and LFM2's, as in SGLang 0.5.23."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...families.causal_conv1d.call import causal_conv1d
from ...families.causal_conv1d_update.call import causal_conv1d_update
from ..shared import kda_layers
from ..shared.gated_delta import first
from ..shared.gated_delta import shaped as _shaped
from ..shared.operands import takes as _takes
from ..shared.replacing import NotReplaced, Replacement

_CONTEXT, _SHORT = "sglang.srt.model_executor.forward_context", "sglang.kernels.ops.mamba.lfm_short_conv"

_TAPS = "[width, H V]"


@_takes(
    mixed_qkv="[B, channels]", a="[B, H K]", b="[B, H]", conv_states="[slots, width - 1, channels]", w_q_t=_TAPS, w_k_t=_TAPS, w_v_t=_TAPS,
    onorm_g="[B, H V]", ssm_states="[slots, H, V, K]", cache_indices="[B]",
)  # fmt: skip
def kda_fused_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_states: Tensor,
    w_q_t: Tensor,
    w_k_t: Tensor,
    w_v_t: Tensor,
    conv_bias: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    onorm_g: Tensor,
    onorm_weight: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    scale: float,
    onorm_eps: float,
    lower_bound: float | None = None,
) -> Tensor:
    """The decode step of Kimi-K3's layer between its projections: convolution, Kimi delta attention, and a gated RMS norm, in one kernel.

    S <- S D + beta (v - S D k) k^T;  o = scale S q, with D = diag(e^g) and beta = sigmoid(b). g is -e^A_log softplus(a + dt_bias), or
    lower_bound sigmoid(e^A_log (a + dt_bias)).

    mixed_qkv: [B, 3 H V], q, k and v consecutive, before their convolution          w_q_t, w_k_t, w_v_t: [width, H V]
    conv_bias: [3 H V]          a: [B, H K], raw gate          b: [B, H], logit of beta          A_log, dt_bias: H and H K elements
    conv_states: [slots, width - 1, 3 H V] of mixed_qkv's dtype; ssm_states: [slots, H, V, K]. Both are updated in place
    lower_bound: a number for the second form of the gate; None for the first
    onorm_g, onorm_weight: [B, H V] and [V], of an RMS norm that the sigmoid of onorm_g gates
    cache_indices: [B], slots; a negative one is padding: a zero output, and no state is touched

    Returns a new tensor [1, B, H, V] of mixed_qkv's dtype. Unlike in SGLang, a separate kernel joins the weights.
    Raises ArgumentError (a ValueError) for operands that do not fit.
    """
    taps = (w_q_t, w_k_t, w_v_t)
    if len({t.shape[0] for t in taps}) > 1:
        raise ArgumentError(
            "sglang's kda_fused_decode",
            [f"taps of q, k and v are {', '.join(str(list(t.shape)) for t in taps)}; expected one shape for all"],
        )
    batch, (H, V, K) = mixed_qkv.shape[0], ssm_states.shape[1:]
    out = torch.empty((1, batch, H, V), dtype=mixed_qkv.dtype, device=mixed_qkv.device)
    kda_layers.decode(
        mixed_qkv, _shaped(a, (batch, H, K)), b, _shaped(onorm_g, (batch, H, V)), conv_states.transpose(1, 2), ssm_states,
        torch.cat([t.t() for t in taps]), conv_bias, A_log, dt_bias, onorm_weight, lower_bound=lower_bound, norm_eps=onorm_eps,
        slots=cache_indices, pad_slot_id=-1, out=out[0], scale=scale,
    )  # fmt: skip
    return out


@_takes(**dict.fromkeys("bcx", "[batch, dim]"), weight="[dim, width]", state="[slots, dim, width - 1]", cache_indices="[batch]")
def fused_lfm_short_conv_decode(b: Tensor, c: Tensor, x: Tensor, weight: Tensor, state: Tensor, cache_indices: Tensor) -> Tensor:
    """The decode step of LFM2's short convolution: out = c conv(b x), one token per sequence, both products rounded.

    b, c, x: [batch, dim], slices of a projection          weight: [dim, width]
    state: [slots, dim, width - 1], the last products b x, updated in place
    cache_indices: [batch], slots; a negative one is padding: a zero output, and no state is touched

    Returns a new tensor [batch, dim]. Raises ArgumentError (a ValueError) for operands that do not fit.
    """
    return _gated(b, c, x, weight, None, state, cache_indices)


@_takes(
    **dict.fromkeys("bcx", "[tokens, dim]"), weight="[dim, width]", state="[slots, dim, width - 1]", query_start_loc="[N + 1]",
    cache_indices="[N]", has_initial_state="[N]",
)  # fmt: skip
def fused_lfm_short_conv_prefill(
    b: Tensor,
    c: Tensor,
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    max_seq_len: int,
) -> Tensor:
    """LFM2's short convolution over packed prompts: out = c conv(b x), both products rounded.

    b, c, x: [tokens, dim], slices of a projection          weight: [dim, width]
    state: [slots, dim, width - 1], receives the last products b x of each prompt
    query_start_loc: [N + 1], start of each prompt          has_initial_state: [N] bool, whether state holds the products before the first
    cache_indices: [N], slots; a negative one is padding: a zero output, and no state is touched

    Returns a new tensor [tokens, dim]. max_seq_len is ignored. Raises ArgumentError (a ValueError) for operands that do not fit.
    """
    return _gated_prompts(b, c, x, weight, None, state, query_start_loc, cache_indices, has_initial_state)


@_takes(hidden_states="[tokens, hidden]")
def lfm2_forward(self: Any, hidden_states: Tensor, forward_batch: Any) -> Tensor:
    """Decode steps, prompts and verified drafts of LFM2's short convolution, from one projection to the next: the method forward of
    SGLang's Lfm2ShortConv and Lfm2MoeShortConv.

    One kernel between the projections, also for drafts to be verified; SGLang has two multiplications and the convolution, and for prompts
    a copy. Empty batches, and drafts without a buffer for their windows, are SGLang's own method, without a warning.
    """
    mode = forward_batch.forward_mode
    if mode.is_idle():
        raise NotReplaced
    step = import_module(_CONTEXT).get_attn_backend().conv_state_metadata(self.layer_idx, forward_batch)
    drafts, kept = 0, getattr(step.layer_cache, "intermediate_conv_window", None)
    if mode.is_target_verify():
        drafts = forward_batch.spec_info.draft_token_num
        if kept is None or step.cache_indices.shape[0] * drafts != hidden_states.shape[0]:
            raise NotReplaced
    elif not mode.is_decode() and step.query_start_loc is None:
        raise NotReplaced
    projected, _ = self.in_proj(hidden_states)
    b, c, x = projected.chunk(3, dim=-1)
    window, slots = step.layer_cache.conv[0], step.cache_indices
    if drafts and kept is not None:
        x, b, c = (t.unflatten(0, (-1, drafts)).transpose(1, 2) for t in (x, b, c))
        convolved = _drafts(x, b, c, self.conv_weight, self.conv_bias, window, slots, kept[0]).transpose(1, 2).flatten(0, 1)
    elif mode.is_decode():
        convolved = _gated(b, c, x, self.conv_weight, self.conv_bias, window, slots)
    else:
        started = step.has_initial_state
        convolved = _gated_prompts(b, c, x, self.conv_weight, self.conv_bias, window, step.query_start_loc, slots, started)
    output: Tensor
    output, _ = self.out_proj(convolved)
    return output


def _gated(b: Tensor, c: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, slots: Tensor) -> Tensor:
    return causal_conv1d_update(
        x, state, weight, bias, conv_state_indices=first(slots, x.shape[0]), input_gate=b, output_gate=c
    )  # fmt: skip


def _drafts(x: Tensor, b: Tensor, c: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, slots: Tensor, kept: Tensor) -> Tensor:
    """x, b, c: [batch, dim, drafts]. kept: [batch or more, drafts or more, dim, width - 1], receives the window after each draft."""
    return causal_conv1d_update(
        x, state[..., : weight.shape[1] - 1], weight, bias, conv_state_indices=slots, input_gate=b, output_gate=c,
        intermediate_conv_window=kept,
    )  # fmt: skip


def _gated_prompts(
    b: Tensor, c: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, starts: Tensor, slots: Tensor,
    started: Tensor | None,
) -> Tensor:  # fmt: skip
    sequences, out = starts.shape[0] - 1, torch.empty(x.shape, dtype=x.dtype, device=x.device)
    causal_conv1d(
        x.t(), weight, bias, query_start_loc=starts, conv_states=state[..., : weight.shape[1] - 1],
        conv_state_indices=first(slots, sequences), has_initial_state=first(started, sequences), input_gate=b.t(), output_gate=c.t(),
        out=out.t(),
    )  # fmt: skip
    return out


_CONV = "sglang.srt.layers.attention.mamba.causal_conv1d"
_CONVOLUTIONS = (
    f"{_CONV}.causal_conv1d_fn", f"{_CONV}.causal_conv1d_update", "sglang.kernels.ops.mamba.causal_conv1d_triton.causal_conv1d_update",
)  # fmt: skip
REPLACEMENTS = [
    Replacement("sglang.kernels.ops.attention.kda_fused_decode", "kda_fused_decode", kda_fused_decode),
    Replacement(_SHORT, "fused_lfm_short_conv_decode", fused_lfm_short_conv_decode),
    Replacement(_SHORT, "fused_lfm_short_conv_prefill", fused_lfm_short_conv_prefill),
    Replacement("sglang.srt.models.lfm2", "Lfm2ShortConv.forward", lfm2_forward, traced=True, needs=_CONVOLUTIONS),
    Replacement(
        "sglang.srt.models.lfm2_moe", "Lfm2MoeShortConv.forward", lfm2_forward, traced=True,
        needs=(*_CONVOLUTIONS, f"{_SHORT}.fused_lfm_short_conv_decode", f"{_SHORT}.fused_lfm_short_conv_prefill"),
    ),
]  # fmt: skip
