"""vLLM's layer of gated delta rules with prompts among its sequences, as in vLLM 0.33: states stay in their pool."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...calls.operator import call_of
from ...errors import ArgumentError
from ...families.causal_conv1d.call import causal_conv1d
from ...families.linear_attention.call import gated_delta_rule
from ..shared import delta_prompts as _prompts
from ..shared import invariance, noise
from ..shared.gated_delta import first, unpacked
from ..shared.operands import VECTOR
from ..shared.operands import takes as _takes
from ..shared.replacing import NotReplaced, Replacement

_LAYERS = "vllm.model_executor.layers.mamba"
_MODULE, _METHOD = f"{_LAYERS}.gdn.qwen_gdn_linear_attn", "QwenGatedDeltaNetAttention._forward_core"
_NAME = f"vllm's {_METHOD}"


@_takes(mixed_qkv="[tokens, channels]", b="[tokens, HV]", a="[tokens, HV]", core_attn_out="[tokens, HV, V]")
def forward_core(self: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
    """Convolution and gated delta rule of a step with prompts, into core_attn_out: the method _forward_core of vLLM's layer.

    mixed_qkv: [tokens, 2 HK K + HV V]   a, b: [tokens, HV], raw gate and logit of beta   core_attn_out: [tokens, HV, V]
    Prompts read and write the layer's pool by slots, and q, k and v are slices of the convolution's output. vLLM copies both.
    Steps without prompts, steps with drafts, and other backends than FlashInfer's and Triton's are vLLM's own method, without a warning.
    """
    engine = import_module(_MODULE)
    step = engine.get_forward_context().attn_metadata
    step = step.get(self.prefix) if isinstance(step, dict) else None
    if step is None or step.spec_sequence_masks is not None or not step.num_prefills or step.num_decodes != step.num_decode_tokens:
        raise NotReplaced
    if invariance.on() and mixed_qkv.shape[1] * mixed_qkv.element_size() % VECTOR:
        raise NotReplaced  # where prompts begin in the step decides about the form of their kernel
    if self.chunk_gated_delta_rule.gdn_prefill_backend not in ("flashinfer", "triton"):
        raise NotReplaced
    window, state = self.kv_cache[:2]
    if not engine.is_conv_state_dim_first():
        window = window.transpose(-1, -2)
    tokens, steps, plan = step.num_actual_tokens, step.num_decodes, step.flashinfer_checkpoint_plan
    mixed_qkv, a, b, out = (t[:tokens] for t in (mixed_qkv, a, b, core_attn_out))
    convolved, gates = torch.empty_like(mixed_qkv, memory_format=torch.contiguous_format), (self.A_log, self.dt_bias)
    kept, places = _checkpoints(self, engine, step, mixed_qkv[None, steps:], state)
    # The scans' objections come here, while window and states are as they were.
    prompts = call_of(
        _prompts.chunk_gated_delta_rule, *(t[None, steps:] for t in (*unpacked(_NAME, convolved, state), a, b)), *gates,
        use_qk_l2norm=True, beta_sigmoid=True, cu_seqlens=step.prefill_query_start_loc, state=state,
        state_indices=step.prefill_state_indices, has_initial_state=step.prefill_has_initial_state, pad_slot_id=0,
        checkpoint_positions=places, checkpoints_out=kept, out=out[None, steps:],
        **invariance.whole(_prompts.chunk_gated_delta_rule),
    ).plan()  # fmt: skip
    slots = step.non_spec_state_indices_tensor
    decode = None
    if steps:
        rows = (t[:steps] for t in (*unpacked(_NAME, convolved, state), a, b))
        decode = call_of(
            gated_delta_rule, state, *rows, *gates, use_qk_l2norm=True, beta_sigmoid=True, state_indices=slots[:steps], pad_slot_id=0,
            out=out[:steps], **noise.of(state),
        ).plan()  # fmt: skip
    weight, starts = self.conv1d.weight.squeeze(1), step.non_spec_query_start_loc
    sequences = starts.shape[0] - 1
    causal_conv1d(
        mixed_qkv.t(), weight, self.conv1d.bias, activation=self.activation, query_start_loc=starts,
        conv_states=window[..., : weight.shape[1] - 1], conv_state_indices=first(slots, sequences),
        has_initial_state=first(step.has_initial_state, sequences), pad_slot_id=0, out=convolved.t(),
    )  # fmt: skip
    if decode is not None:
        decode()
    prompts()
    if plan is not None:
        self._checkpoint_exporter.export(
            step.checkpoint, raw_qkv=mixed_qkv, conv_state=window, recurrent_checkpoint=kept, recurrent_state=state, cu_seqlens=starts,
            recurrent_rows=plan.rows,
        )  # fmt: skip


def _checkpoints(layer: Any, engine: Any, step: Any, prompts: Tensor, state: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(rows of vLLM's workspace that receive states inside prompts, after how many tokens), both None without a plan for them."""
    plan = step.flashinfer_checkpoint_plan
    if plan is None:
        return None, None
    (buffer,) = engine.current_workspace_manager().get_simultaneous(layer._checkpoint_buffer_spec)
    if buffer.dtype != state.dtype:
        raise ArgumentError(_NAME, [f"checkpoints are {buffer.dtype}; expected {state.dtype}, the dtype of states"])
    kept = buffer[: plan.num_checkpoints]
    return kept, _prompts.places(_NAME, prompts, plan.every_n_tokens, step.prefill_query_start_loc, kept, plan.cu_starts, [])


_FLA = "vllm.third_party.flash_linear_attention.ops"
REPLACEMENTS = [
    Replacement(
        _MODULE, _METHOD, forward_core,
        needs=(
            f"{_LAYERS}.ops.causal_conv1d.causal_conv1d_fn", f"{_FLA}.chunk.chunk_gated_delta_rule",
            f"{_MODULE}.fi_chunk_gated_delta_rule", f"{_FLA}.fused_sigmoid_gating.fused_sigmoid_gating_delta_rule_update",
        ),
    )
]  # fmt: skip
