"""vLLM's layer of gated delta rules, as in vLLM 0.33: steps with prompts, whose states stay in their pool, and decode steps."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...calls.operator import call_of
from ...errors import ArgumentError
from ...families.causal_conv1d.call import causal_conv1d
from ...families.causal_conv1d_update.call import causal_conv1d_update
from ...families.delta_layer.call import gdn_layer
from ...families.linear_attention.call import gated_delta_rule
from ..shared import delta_prompts as _prompts
from ..shared import invariance, noise
from ..shared.gated_delta import first, first_column, on_a_pool, unpacked
from ..shared.kda_layers import arrivals
from ..shared.operands import VECTOR
from ..shared.operands import takes as _takes
from ..shared.replacing import NotReplaced, Replacement

_LAYERS = "vllm.model_executor.layers.mamba"
_MODULE, _METHOD = f"{_LAYERS}.gdn.qwen_gdn_linear_attn", "QwenGatedDeltaNetAttention._forward_core"
_NAME, _DECODE = f"vllm's {_METHOD}", "QwenGatedDeltaNetAttention._forward_core_decode_non_spec"


@_takes(mixed_qkv="[tokens, channels]", b="[tokens, HV]", a="[tokens, HV]", core_attn_out="[tokens, HV, V]")
def forward_core(self: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
    """Convolution and gated delta rule of a step with prompts, into core_attn_out: the method _forward_core of vLLM's layer.

    mixed_qkv: [tokens, 2 HK K + HV V]   a, b: [tokens, HV], raw gate and logit of beta   core_attn_out: [tokens, HV, V]
    Prompts read and write the layer's pool by slots, and q, k and v are slices of the convolution's output. vLLM copies both. Tokens of
    drafts in such a step are gathered, and their outputs scattered, as in vLLM.
    Steps without prompts, and other backends than FlashInfer's and Triton's are vLLM's own method, without a warning.
    """
    engine = import_module(_MODULE)
    step = engine.get_forward_context().attn_metadata
    step = step.get(self.prefix) if isinstance(step, dict) else None
    if step is None or not step.num_prefills or step.num_decodes != step.num_decode_tokens:
        raise NotReplaced
    drafts = step.spec_sequence_masks is not None
    if drafts and (step.num_decodes or invariance.on()):
        raise NotReplaced
    if invariance.on() and mixed_qkv.shape[1] * mixed_qkv.element_size() % VECTOR:
        raise NotReplaced  # where prompts begin in the step decides about the form of their kernel
    if self.chunk_gated_delta_rule.gdn_prefill_backend not in ("flashinfer", "triton"):
        raise NotReplaced
    window, state = self.kv_cache[:2]
    if not engine.is_conv_state_dim_first():
        window = window.transpose(-1, -2)
    tokens, steps, plan = step.num_actual_tokens, step.num_decodes, step.flashinfer_checkpoint_plan
    mixed_qkv, a, b, whole = (t[:tokens] for t in (mixed_qkv, a, b, core_attn_out))
    verified = _verified(self, step, window, state, mixed_qkv, a, b, whole) if drafts else None
    out = whole
    if verified is not None:
        mixed_qkv, a, b = (t.index_select(0, step.non_spec_token_indx) for t in (mixed_qkv, a, b))
        out = torch.empty((mixed_qkv.shape[0], *whole.shape[1:]), dtype=whole.dtype, device=whole.device)
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
    if verified is not None:
        verified()
    if decode is not None:
        decode()
    prompts()
    if plan is not None:
        self._checkpoint_exporter.export(
            step.checkpoint, raw_qkv=mixed_qkv, conv_state=window, recurrent_checkpoint=kept, recurrent_state=state, cu_seqlens=starts,
            recurrent_rows=plan.rows,
        )  # fmt: skip
    if verified is not None:
        whole.index_copy_(0, step.non_spec_token_indx, out)


def _verified(
    self: Any, step: Any, window: Tensor, state: Tensor, mixed_qkv: Tensor, a: Tensor, b: Tensor, out: Tensor
) -> Callable[[], None]:
    """The launches for the drafts of a step with prompts, whose objections come now; out: of all tokens of the step."""
    where, table, starts = step.spec_token_indx, step.spec_state_indices_tensor, step.spec_query_start_loc
    sequences = step.num_spec_decodes
    starts, table, accepted = first(starts, sequences + 1), first(table, sequences), first(step.num_accepted_tokens, sequences)
    rows, a, b = (t.index_select(0, where) for t in (mixed_qkv, a, b))
    convolved = torch.empty_like(rows)
    found = torch.empty((1, rows.shape[0], *out.shape[1:]), dtype=out.dtype, device=out.device)
    conv = call_of(
        causal_conv1d_update, rows, window, self.conv1d.weight.squeeze(1), self.conv1d.bias, self.activation,
        conv_state_indices=first_column(table, sequences), num_accepted_tokens=accepted, query_start_loc=starts, pad_slot_id=0,
        out=convolved,
    ).plan()  # fmt: skip
    q, k, v = (t[None] for t in unpacked(_NAME, convolved, state))
    rule = call_of(
        gated_delta_rule, state, q, k, v, a[None], b[None], self.A_log, self.dt_bias, use_qk_l2norm=True, beta_sigmoid=True, out=found,
        **on_a_pool(_NAME, v, state, True, starts, table, accepted), **noise.of(state),
    ).plan()  # fmt: skip

    def launch() -> None:
        conv()
        rule()
        out.index_copy_(0, where, found[0])

    return launch


@_takes(mixed_qkv="[tokens, channels]", b="[tokens, HV]", a="[tokens, HV]", core_attn_out="[tokens, HV, V]")
def forward_decode(self: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, attn_metadata: Any) -> None:
    """Convolution and gated delta rule of a decode step, into core_attn_out: the method _forward_core_decode_non_spec of vLLM's layer.

    Operands as in forward_core. One kernel; vLLM has two. In the batch-invariant mode, and with another activation than SiLU, it is
    vLLM's own method, without a warning.
    """
    if invariance.on() or self.activation not in ("silu", "swish"):
        raise NotReplaced
    window, state = self.kv_cache[:2]
    if not import_module(_MODULE).is_conv_state_dim_first():
        window = window.transpose(-1, -2)
    tokens, weight = attn_metadata.num_actual_tokens, self.conv1d.weight.squeeze(1)
    mixed_qkv, a, b, out = (t[:tokens] for t in (mixed_qkv, a, b, core_attn_out))
    q, _, _ = unpacked(f"vllm's {_DECODE}", mixed_qkv, state)
    gdn_layer(
        mixed_qkv, a, b, None, window[..., : weight.shape[1] - 1], state, arrivals(state, q.shape[1]), weight, self.conv1d.bias, self.A_log,
        self.dt_bias, state_indices=first(attn_metadata.non_spec_state_indices_tensor, tokens), pad_slot_id=0, out=out,
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
            f"{_LAYERS}.ops.causal_conv1d.causal_conv1d_fn", f"{_LAYERS}.ops.causal_conv1d.causal_conv1d_update",
            f"{_FLA}.chunk.chunk_gated_delta_rule", f"{_MODULE}.fi_chunk_gated_delta_rule",
            f"{_FLA}.fused_sigmoid_gating.fused_sigmoid_gating_delta_rule_update",
        ),
    ),
    Replacement(
        _MODULE, _DECODE, forward_decode,
        needs=(
            f"{_LAYERS}.ops.causal_conv1d.causal_conv1d_update",
            f"{_FLA}.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode",
        ),
    ),
]  # fmt: skip
