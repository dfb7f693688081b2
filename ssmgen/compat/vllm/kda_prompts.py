"""vLLM's layers of Kimi delta attention in steps with prompts, whose states stay in their pool, as in vLLM 0.33."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...calls.operator import call_of
from ...families.causal_conv1d.call import causal_conv1d
from ...families.chunk_linear_attention.call import chunk_kda
from ..shared import invariance
from ..shared.gated_delta import first, shaped, unpacked
from ..shared.operands import VECTOR, rows_of
from ..shared.operands import takes as _takes
from ..shared.replacing import NotReplaced, Replacement
from . import flashkda

_LAYERS, _GRAPHS = "vllm.model_executor.layers.mamba", "vllm.compilation.breakable_cudagraph"
_LINEAR, _KIMI, _GLM = f"{_LAYERS}.gdn.kimi_gdn_linear_attn", "vllm.models.kimi_k3.nvidia.kda", "vllm.models.glm5next.common.kda"
_OPERANDS = {"g1": "[1, tokens, H, K]", "beta": "[1, tokens, H]", "core_attn_out": "[1, tokens, H, V]"}


@_takes(**_OPERANDS, mixed_qkv="[tokens, channels]")
def kimi_linear_forward(self: Any, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor) -> None:
    """Convolution, Kimi delta attention and norm of a step with prompts of Kimi-Linear: the method _forward of vLLM's layer.

    mixed_qkv: [tokens, 3 H K], q, k and v consecutive          g1: [1, tokens, H, K], raw gate          beta: [1, tokens, H], logit
    core_attn_out: [1, tokens, H, V], receives the output, after the layer's gated norm with the gate g2

    One convolution for q, k and v, whose output's slices the scan reads; it reads and writes states in their pool by slots. vLLM has three
    convolutions, and copies states before and after the scan. Other steps, also with drafts, are vLLM's own method, without a warning.
    """
    step = _step(_LINEAR, self.prefix)
    window, weight = _window(self, import_module(_LINEAR).is_conv_state_dim_first()), self.conv1d.weight.squeeze(1)
    _scan(self, step, mixed_qkv, g1, beta, core_attn_out, window, weight, self.conv1d.bias, self.gate_lower_bound)
    core_attn_out.copy_(self.o_norm(core_attn_out, g2))


@_takes(**_OPERANDS, mixed_qkv="[tokens, channels]")
def kimi_k3_forward(self: Any, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor) -> None:
    """The same of Kimi-K3, with vLLM's backends FlashKDA and Triton. States inside prompts go to vLLM's prefix cache as the layer does."""
    step = _step(_KIMI, self.prefix)
    if self.kda_prefill_backend not in ("flashkda", "triton"):
        raise NotReplaced
    kept = _kept(self, step, _KIMI, 2)
    window, weight = _window(self, import_module(_KIMI).is_conv_state_dim_first()), self.conv1d.weight.squeeze(1)
    _scan(self, step, mixed_qkv, g1, beta, core_attn_out, window, weight, self.conv1d.bias, self.gate_lower_bound, kept)
    core_attn_out.copy_(self.o_norm(core_attn_out, g2))


@_takes(**_OPERANDS, qkv_proj_states="[tokens, channels]")
def glm_forward(self: Any, qkv_proj_states: Tensor, g1: Tensor, beta: Tensor, core_attn_out: Tensor) -> None:
    """The same of GLM5-Next, whose norm comes after this method. The first step is vLLM's own: it joins the convolutions' weights."""
    step, weight = _step(_GLM, self.prefix), self._merged_conv_weight
    if weight is None or self.kda_prefill_backend not in ("flashkda", "triton"):
        raise NotReplaced
    bounded = self.kda_safe_gate or self.kda_prefill_backend == "flashkda"
    kept, window = _kept(self, step, _GLM, 1), _window(self, self._conv_state_dim_first)
    bound = self.kda_lower_bound if bounded else None
    _scan(self, step, qkv_proj_states, g1, beta, core_attn_out, window, weight, self.q_conv1d.bias, bound, kept)


def _step(module: str, prefix: str) -> Any:
    """The metadata of the layer's step. Raises NotReplaced for a step without prompts, or with drafts."""
    step = import_module(module).get_forward_context().attn_metadata
    step = step.get(prefix) if isinstance(step, dict) else None
    if step is None or not step.num_prefills or step.num_spec_decodes or step.spec_sequence_masks is not None:
        raise NotReplaced
    return step


def _window(layer: Any, dim_first: bool) -> Tensor:
    window: Tensor = layer.kv_cache[0]
    return window if dim_first else window.transpose(-1, -2)


def _kept(layer: Any, step: Any, module: str, place: int) -> Tensor | None:
    """The buffer for states inside prompts, one of vLLM's workspaces; None without a checkpoint. Raises NotReplaced for positions of which
    the scan keeps no state."""
    checkpoint = step.checkpoint
    if checkpoint is None:
        return None
    if layer.kda_prefill_backend != "flashkda" or not flashkda.aligned(checkpoint):
        raise NotReplaced
    kept: Tensor = import_module(module).current_workspace_manager().get_simultaneous(*layer._flashkda_buffer_specs)[place]
    return kept[: checkpoint.checkpoint_offsets.shape[0]]


def _scan(
    layer: Any, step: Any, mixed: Tensor, g: Tensor, beta: Tensor, out: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None,
    bound: float | None, kept: Tensor | None = None,
) -> None:  # fmt: skip
    """Convolution and scan of all sequences of a step, into the first rows of out."""
    if invariance.on() and mixed.shape[1] * mixed.element_size() % VECTOR:
        raise NotReplaced  # where prompts begin in the step decides about the form of their kernel
    tokens, starts, state = step.num_actual_tokens, step.non_spec_query_start_loc, layer.kv_cache[1]
    mixed, g, beta, out = mixed[:tokens], g[:, :tokens], beta[:, :tokens], out[:, :tokens]
    sequences = starts.shape[0] - 1
    slots, started = first(step.non_spec_state_indices_tensor, sequences), first(step.has_initial_state, sequences)
    convolved = torch.empty_like(mixed, memory_format=torch.contiguous_format)
    q, k, v = (t[None] for t in unpacked("vllm's layer of Kimi delta attention", convolved, state))
    gate, logit = shaped(g, (1, tokens, v.shape[2], k.shape[3])), shaped(beta, (1, tokens, v.shape[2]))
    places = None if kept is None else torch.add(starts[:-1], step.checkpoint.checkpoint_offsets)
    # The scan's objections come here, while window and states are as they were.
    scan = call_of(
        chunk_kda, q, k, v, rows_of(gate), logit, layer.A_log.reshape(-1), layer.dt_bias.reshape(-1), lower_bound=bound,
        use_qk_l2norm=True, beta_sigmoid=True, cu_seqlens=starts, state=state, state_indices=slots, has_initial_state=started,
        pad_slot_id=0, checkpoint_positions=places, checkpoints_out=kept, out=out, **invariance.whole(chunk_kda),
    ).plan()  # fmt: skip
    causal_conv1d(
        mixed.t(), weight, bias, activation="silu", query_start_loc=starts, conv_states=window[..., : weight.shape[1] - 1],
        conv_state_indices=slots, has_initial_state=started, pad_slot_id=0, out=convolved.t(),
    )  # fmt: skip
    scan()
    if kept is not None:
        layer._checkpoint_exporter.export(
            step.checkpoint, raw_qkv=mixed, conv_state=window, recurrent_checkpoint=kept, recurrent_state=state, cu_seqlens=starts
        )


def eager_break(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as vLLM's decorator of these methods makes it: it runs eagerly between the segments of a breakable CUDA graph."""
    decorated: Callable[..., Any] = import_module(_GRAPHS).eager_break_during_capture(function)
    return decorated


_CONV, _DELTA = f"{_LAYERS}.ops.causal_conv1d.causal_conv1d_fn", "ops.third_party.kda"
_CHUNK = f"vllm.models.kimi_k3.nvidia.{_DELTA}.chunk.chunk_kda_with_fused_gate"
REPLACEMENTS = [
    Replacement(
        _LINEAR, "KimiGatedDeltaNetAttention._forward", kimi_linear_forward, needs=(_CONV, _CHUNK), decorated=eager_break
    ),
    Replacement(
        _KIMI, "KimiK3DeltaAttention._forward", kimi_k3_forward, needs=(_CONV, _CHUNK, f"{_KIMI}._flashkda_prefill"), decorated=eager_break
    ),
    Replacement(
        _GLM, "Glm5NextLinearAttention._forward", glm_forward, decorated=eager_break,
        needs=(
            _CONV, f"vllm.models.glm5next.nvidia.{_DELTA}.kernels.chunk_kda_with_fused_gate",
            f"{_GLM}.Glm5NextLinearAttention._flashkda_prefill",
        ),
    ),
]  # fmt: skip
