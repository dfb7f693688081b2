"""vLLM's layer of OLMo-Hybrid's gated delta rules, as in vLLM 0.33: convolution and recurrence from raw gates, for all steps."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...calls.operator import call_of
from ...families.causal_conv1d_update.call import causal_conv1d_update
from ...families.linear_attention.call import gated_delta_rule
from ..shared import noise
from ..shared.gated_delta import first, unpacked
from ..shared.operands import takes as _takes
from ..shared.replacing import NotReplaced, Replacement
from . import gdn

_LAYERS, _FLA = "vllm.model_executor.layers.mamba", "vllm.third_party.flash_linear_attention.ops"
_MODULE, _METHOD = f"{_LAYERS}.gdn.olmo_gdn_linear_attn", "OlmoHybridGatedDeltaNetAttention._forward_core"


@_takes(mixed_qkv="[tokens, channels]", b="[tokens, HV]", a="[tokens, HV]", core_attn_out="[tokens, HV, V]")
def olmo_forward_core(self: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
    """Convolution and gated delta rule of OLMo-Hybrid, into core_attn_out: the method _forward_core of vLLM's layer.

    mixed_qkv: [tokens, 2 HK K + HV V]   a, b: [tokens, HV], raw gate and logit of beta   core_attn_out: [tokens, HV, V]

    q, k and v are slices of the convolution's output, gates are computed in the recurrence's kernels, and prompts read and write the pool.
    vLLM makes dense copies of q, k and v, has a kernel for gates, and gathers and scatters the states of prompts. Decode steps between
    prompts run as decode steps, and in vLLM as prompts of one token.
    The profiling run, and drafts in the batch-invariant mode, are vLLM's own method, without a warning.
    """
    engine, step, twice = import_module(_MODULE), gdn.step_of(_MODULE, self.prefix), bool(self.allow_neg_eigval)
    if step.num_prefills and step.flashinfer_checkpoint_plan is not None:
        raise NotReplaced  # vLLM's layer keeps no states inside prompts
    if step.num_prefills:
        gdn.with_prompts(self, engine, step, mixed_qkv, b, a, core_attn_out, twice)
        return
    window, state, tokens = gdn.window_of(self, engine), self.kv_cache[1], step.num_actual_tokens
    mixed_qkv, a, b, out = (t[:tokens] for t in (mixed_qkv, a, b, core_attn_out))
    if step.spec_sequence_masks is not None:
        gdn.drafted(self, step, window, mixed_qkv, a, b, out, twice, None)()
        return
    if not step.num_decodes:
        raise NotReplaced
    slots, weight = first(step.non_spec_state_indices_tensor, tokens), self.conv1d.weight.squeeze(1)
    convolved = torch.empty_like(mixed_qkv, memory_format=torch.contiguous_format)
    rule = call_of(
        gated_delta_rule, state, *unpacked(f"vllm's {_METHOD}", convolved, state), a, b, self.A_log, self.dt_bias, use_qk_l2norm=True,
        beta_sigmoid=True, allow_neg_eigval=twice, state_indices=slots, pad_slot_id=0, out=out, **noise.of(state),
    ).plan()  # fmt: skip
    causal_conv1d_update(
        mixed_qkv, window[..., : weight.shape[1] - 1], weight, self.conv1d.bias, self.activation, conv_state_indices=slots, pad_slot_id=0,
        out=convolved,
    )  # fmt: skip
    rule()


REPLACEMENTS = [
    Replacement(
        _MODULE, _METHOD, olmo_forward_core,
        needs=(
            f"{_LAYERS}.ops.causal_conv1d.causal_conv1d_fn", f"{_LAYERS}.ops.causal_conv1d.causal_conv1d_update",
            f"{_FLA}.chunk.chunk_gated_delta_rule", f"{_FLA}.fused_recurrent.fused_recurrent_gated_delta_rule",
        ),
    ),
]  # fmt: skip
