"""SGLang's layers of gated delta rules, whose decode step is one kernel here between the projections, as in SGLang 0.5.23."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from ...families.delta_layer.call import gdn_layer
from ..shared.gated_delta import first
from ..shared.kda_layers import arrivals
from ..shared.operands import takes as _takes
from ..shared.replacing import NotReplaced, Replacement

_QWEN35, _NEXT = "sglang.srt.models.qwen3_5", "sglang.srt.models.qwen3_next"
_CONTEXT = "sglang.srt.model_executor.forward_context"
_FLA = "sglang.kernels.ops.attention.fla"
_STEP = (
    "sglang.kernels.ops.mamba.causal_conv1d_triton.causal_conv1d_update",
    f"{_FLA}.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode",
)


@_takes(hidden_states="[tokens, hidden]")
def qwen35_forward(self: Any, hidden_states: Tensor, forward_batch: Any) -> Tensor:
    """Decode steps of a gated delta rule layer: the method forward of SGLang's Qwen3_5GatedDeltaNet (Qwen3.5, InternS2, Qwen4-Exp).

    One kernel between the projections: convolution, step and gated norm. SGLang has a kernel for each. Prompts, drafts, rings
    (--enable-linear-replayssm) and other decode backends than Triton's are SGLang's own method, without a warning.
    """
    backend = _backend(self, hidden_states, forward_batch)
    qkvz, ba = self._forward_input_proj(hidden_states)
    heads, values = self.attn.num_v_heads, self.attn.v_dim
    qkv, z = qkvz.split((qkvz.shape[1] - values, values), 1)
    b, a = ba.split((heads, heads), 1)
    return _finished(self, forward_batch, backend, qkv, a, b, z)


@_takes(hidden_states="[tokens, hidden]")
def qwen3_next_forward(self: Any, hidden_states: Tensor, forward_batch: Any) -> Tensor:
    """Decode steps of a gated delta rule layer: the method forward of SGLang's Qwen3GatedDeltaNet (Qwen3-Next, GigaChat3.5).

    As qwen35_forward. Its projections are in an order by key heads, which SGLang's own kernel changes before ours.
    """
    backend, attn = _backend(self, hidden_states, forward_batch), self.attn
    if attn.num_v_heads // attn.num_k_heads not in (1, 2, 4):  # SGLang's kernel takes no others
        raise NotReplaced
    split = import_module(_NEXT).fused_qkvzba_split_reshape_cat
    qkv, z, b, a = split(
        *self._forward_input_proj(hidden_states), attn.num_k_heads, attn.num_v_heads, attn.head_k_dim, attn.head_v_dim
    )  # fmt: skip
    return _finished(self, forward_batch, backend, qkv, a, b, z)


def _backend(layer: Any, hidden: Tensor, forward_batch: Any) -> Any:
    """The backend of the layer's states, if this step is one that gdn_layer serves. Looked at before the projections are computed."""
    attn, norm = layer.attn, layer.norm
    if not forward_batch.forward_mode.is_decode() or attn.activation not in ("silu", "swish"):
        raise NotReplaced
    if getattr(norm, "bias", None) is not None or getattr(norm, "group_size", None) not in (None, attn.head_v_dim):
        raise NotReplaced
    backend = import_module(_CONTEXT).get_attn_backend()
    backend = getattr(backend, "linear_attn_backend", backend)
    kernel = getattr(getattr(backend, "kernel_dispatcher", None), "decode_kernel", None)
    if type(kernel).__name__ != "TritonGDNKernel" or backend.forward_metadata.replayssm_write_pos is not None:
        raise NotReplaced
    window = backend.req_to_token_pool.mamba2_layer_cache(attn.layer_id).conv[0]
    if window.dtype != hidden.dtype or backend.forward_metadata.mamba_cache_indices.shape[0] < hidden.shape[0]:
        raise NotReplaced  # the functions that SGLang's method calls say why
    return backend


def _finished(layer: Any, forward_batch: Any, backend: Any, qkv: Tensor, a: Tensor, b: Tensor, z: Tensor) -> Tensor:
    """The layer's output, from its projections [batch, …]."""
    attn, norm = layer.attn, layer.norm
    cache, slots = backend.req_to_token_pool.mamba2_layer_cache(attn.layer_id), backend.forward_metadata.mamba_cache_indices
    window, state = cache.conv[0], cache.temporal
    normed = gdn_layer(
        qkv, a, b, z, window[..., : attn.conv_weights.shape[1] - 1], state, arrivals(state, attn.num_k_heads), attn.conv_weights, attn.bias,
        attn.A_log, attn.dt_bias, norm.weight, norm_eps=norm.eps, norm_before_gate=getattr(norm, "norm_before_gate", True),
        norm_activation=norm.activation, state_indices=first(slots, qkv.shape[0]),
    )  # fmt: skip
    backend._track_mamba_state_decode(forward_batch, window, state, slots, attn.layer_id)
    output: Tensor
    output, _ = layer.out_proj(normed)
    return output


REPLACEMENTS = [
    Replacement(
        _QWEN35, "Qwen3_5GatedDeltaNet.forward", qwen35_forward, traced=True, needs=(*_STEP, f"{_FLA}.layernorm_gated.rms_norm_gated")
    ),
    Replacement(
        _NEXT, "Qwen3GatedDeltaNet.forward", qwen3_next_forward, traced=True, needs=(*_STEP, f"{_FLA}.fused_norm_gate.rms_norm_gated")
    ),
]
