"""vLLM's layers of Kimi delta attention in steps with prompts, whose states stay in their pool, as in vLLM 0.33."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calls.operator import call_of
from ...families.causal_conv1d.call import causal_conv1d
from ...families.causal_conv1d_update.call import causal_conv1d_update
from ...families.chunk_linear_attention.call import chunk_kda
from ...families.linear_attention.call import kda
from ..shared import invariance, noise
from ..shared.gated_delta import first, first_column, on_a_pool, shaped, unpacked
from ..shared.operands import VECTOR, rows_of
from ..shared.operands import takes as _takes
from ..shared.replacing import NotReplaced, Replacement
from . import flashkda

_LAYERS, _GRAPHS = "vllm.model_executor.layers.mamba", "vllm.compilation.breakable_cudagraph"
_LINEAR, _KIMI, _GLM = f"{_LAYERS}.gdn.kimi_gdn_linear_attn", "vllm.models.kimi_k3.nvidia.kda", "vllm.models.glm5next.common.kda"
_BAILING = "vllm.model_executor.models.bailing_moe_v3"
_OPERANDS = {"g1": "[1, tokens, H, K]", "beta": "[1, tokens, H]", "core_attn_out": "[1, tokens, H, V]"}


@_takes(**_OPERANDS, mixed_qkv="[tokens, channels]")
def kimi_linear_forward(self: Any, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor) -> None:
    """Convolution, Kimi delta attention and norm of a step with prompts of Kimi-Linear: the method _forward of vLLM's layer.

    mixed_qkv: [tokens, 3 H K], q, k and v consecutive          g1: [1, tokens, H, K], raw gate          beta: [1, tokens, H], logit
    core_attn_out: [1, tokens, H, V], receives the output, after the layer's gated norm with the gate g2

    One convolution for q, k and v, whose output's slices the scan reads; it reads and writes states in their pool by slots. vLLM has three
    convolutions, and copies states before and after the scan. Tokens of drafts in such a step are gathered, and their outputs scattered, as
    in vLLM. Steps without prompts are vLLM's own method, without a warning.
    """
    step = _step(_LINEAR, self.prefix)
    window, weight = _window(self, import_module(_LINEAR).is_conv_state_dim_first()), self.conv1d.weight.squeeze(1)
    _scan(self, step, mixed_qkv, g1, beta, core_attn_out, window, weight, self.conv1d.bias, self.gate_lower_bound)
    core_attn_out.copy_(self.o_norm(core_attn_out, g2))


@_takes(**_OPERANDS, mixed_qkv="[tokens, channels]")
def kimi_k3_forward(self: Any, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor) -> None:
    """The same of Kimi-K3, with vLLM's backends FlashKDA and Triton. States inside prompts go to vLLM's prefix cache as the layer does.

    Where drafts and prompts are consecutive in a step, nothing is gathered or scattered. Drafts with RecoverSSM are vLLM's own method.
    """
    step = _step(_KIMI, self.prefix)
    if self.kda_prefill_backend not in ("flashkda", "triton") or (step.num_spec_decodes and self.use_recoverssm):
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


@_takes(q_proj_states="[tokens, H K]", k_proj_states="[tokens, H K]", v_proj_states="[tokens, H V]", **_OPERANDS)
def bailing_v3_forward(
    self: Any, q_proj_states: Tensor, k_proj_states: Tensor, v_proj_states: Tensor, g1: Tensor, beta: Tensor, core_attn_out: Tensor
) -> None:
    """The same of Bailing V3, whose gates are log decays and step sizes, and whose norm comes after this method.

    Its three convolutions have a weight each. vLLM also clears the states of new sequences, and reads a mask on the host for that.
    """
    step = _step(_BAILING, self.prefix)
    windows = _window(self, import_module(_BAILING).is_conv_state_dim_first()).chunk(3, dim=-2)
    parts = ((q_proj_states, self.q_conv1d), (k_proj_states, self.k_conv1d), (v_proj_states, self.v_conv1d))
    convolutions = [_Conv(x, window, conv.weight.squeeze(1), conv.bias) for (x, conv), window in zip(parts, windows, strict=True)]
    _run(step, convolutions, g1, beta, core_attn_out, self.kv_cache[1][..., : self.head_dim], {})


def _step(module: str, prefix: str) -> Any:
    """The metadata of the layer's step. Raises NotReplaced without prompts, and for drafts in the batch-invariant mode."""
    step = import_module(module).get_forward_context().attn_metadata
    step = step.get(prefix) if isinstance(step, dict) else None
    if step is None or not step.num_prefills or (step.num_spec_decodes and (step.num_decodes or invariance.on())):
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
    """Convolution and scan of a step, also of its drafts, from raw gates and logits, into the first rows of out."""
    starts, state = step.non_spec_query_start_loc, layer.kv_cache[1]
    raw = {"A_log": layer.A_log.reshape(-1), "dt_bias": layer.dt_bias.reshape(-1), "lower_bound": bound, "beta_sigmoid": True}
    places = None if kept is None else torch.add(starts[:-1], step.checkpoint.checkpoint_offsets)
    (prompts,) = _run(
        step, [_Conv(mixed, window, weight, bias)], g, beta, out, state, {"checkpoint_positions": places, "checkpoints_out": kept}, **raw
    )
    if kept is not None:
        layer._checkpoint_exporter.export(
            step.checkpoint, raw_qkv=prompts, conv_state=window, recurrent_checkpoint=kept, recurrent_state=state, cu_seqlens=starts
        )


class _Conv(NamedTuple):
    """A convolution: its tokens [tokens, channels], windows [slots, channels, entries], weight and bias."""

    x: Tensor
    window: Tensor
    weight: Tensor
    bias: Tensor | None


class _Part(NamedTuple):
    """The drafts of a step, or its other tokens: convolutions, gates and step sizes; out: a tensor for the outputs of these tokens."""

    convolutions: list[_Conv]
    g: Tensor
    beta: Tensor
    out: Tensor

    def convolved(self, state: Tensor) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """(an output per convolution; q, k and v as views of these outputs, gates and step sizes: [1, tokens, ...])"""
        first, widths = self.convolutions[0].x, [conv.x.shape[1] for conv in self.convolutions]
        all_of_them = torch.empty((first.shape[0], sum(widths)), dtype=first.dtype, device=first.device)
        q, k, v = (t[None] for t in unpacked("vllm's layer of Kimi delta attention", all_of_them, state))
        gate, step_size = shaped(self.g[None], (*v.shape[:3], k.shape[3])), shaped(self.beta[None], tuple(v.shape[:3]))
        return list(all_of_them.split(widths, 1)), (q, k, v, gate, step_size)


def _part(convolutions: list[_Conv], g: Tensor, beta: Tensor, out: Tensor, where: slice | Tensor) -> _Part:
    """The tokens at these places: views for consecutive ones, otherwise copies and a new tensor for outputs."""
    if isinstance(where, slice):
        return _Part([conv._replace(x=conv.x[where]) for conv in convolutions], g[0, where], beta[0, where], out[0, where])
    found = torch.empty((where.shape[0], *out.shape[2:]), dtype=out.dtype, device=out.device)
    gathered = [conv._replace(x=conv.x.index_select(0, where)) for conv in convolutions]
    return _Part(gathered, g[0].index_select(0, where), beta[0].index_select(0, where), found)


def _places(step: Any) -> tuple[slice | Tensor | None, slice | Tensor]:
    """Places of the drafts of a step, None without drafts, and of its other tokens. Only Kimi-K3's metadata knows slices."""
    if not step.num_spec_decodes:
        return None, slice(step.num_actual_tokens)
    begin, other = getattr(step, "spec_token_start", None), getattr(step, "non_spec_token_start", None)
    if begin is None or other is None:
        return step.spec_token_indx, step.non_spec_token_indx
    return slice(begin, begin + step.num_spec_decode_tokens), slice(other, other + step.num_prefill_tokens + step.num_decode_tokens)


def _run(
    step: Any, convolutions: list[_Conv], g: Tensor, beta: Tensor, out: Tensor, state: Tensor, kept: dict[str, Any], **gates: Any
) -> list[Tensor]:
    """Convolutions of q, k and v, together or each, and the recurrence on the pool, of drafts and of prompts.

    kept: the scan's arguments for states inside prompts   gates: arguments of the gates

    Returns the prompts' tokens before each convolution.
    """
    inputs = convolutions[0].x
    if invariance.on() and any(conv.x.shape[1] * inputs.element_size() % VECTOR for conv in convolutions):
        raise NotReplaced  # where prompts begin in the step decides about the form of their kernel
    gates |= {"use_qk_l2norm": True}
    drafted, others = _places(step)
    prompts = _part(convolutions, g, beta, out, others)
    # All objections come here, while windows and states are as they were.
    launches = _prompts(step, prompts, state, kept | gates)
    if drafted is not None:
        drafts = _part(convolutions, g, beta, out, drafted)
        launches = [*_drafts(step, drafts, state, gates), *launches]
    for launch in launches:
        launch()
    if drafted is not None and isinstance(drafted, Tensor):
        out[0].index_copy_(0, drafted, drafts.out)
    if isinstance(others, Tensor):
        out[0].index_copy_(0, others, prompts.out)
    return [conv.x for conv in prompts.convolutions]


def _prompts(step: Any, part: _Part, state: Tensor, options: dict[str, Any]) -> list[Callable[[], Any]]:
    """The launches for prompts, and for decode rows, which are prompts of one token."""
    starts = step.non_spec_query_start_loc
    sequences = starts.shape[0] - 1
    slots, started = first(step.non_spec_state_indices_tensor, sequences), first(step.has_initial_state, sequences)
    convolved, operands = part.convolved(state)
    q, k, v, gate, step_size = operands
    scan = call_of(
        chunk_kda, q, k, v, rows_of(gate), step_size, cu_seqlens=starts, state=state, state_indices=slots, has_initial_state=started,
        pad_slot_id=0, out=part.out[None], **options, **invariance.whole(chunk_kda),
    ).plan()  # fmt: skip
    convs = [
        call_of(
            causal_conv1d, x.t(), weight, bias, activation="silu", query_start_loc=starts,
            conv_states=window[..., : weight.shape[1] - 1], conv_state_indices=slots, has_initial_state=started, pad_slot_id=0,
            out=rows.t(),
        ).plan()
        for (x, window, weight, bias), rows in zip(part.convolutions, convolved, strict=True)
    ]  # fmt: skip
    return [*convs, scan]


def _drafts(step: Any, part: _Part, state: Tensor, gates: dict[str, Any]) -> list[Callable[[], Any]]:
    """The launches for drafts, which continue from the state after the last accepted token and keep one after each token."""
    sequences = step.num_spec_decodes
    starts, table = first(step.spec_query_start_loc, sequences + 1), first(step.spec_state_indices_tensor, sequences)
    accepted = first(step.num_accepted_tokens, sequences)
    convolved, operands = part.convolved(state)
    pool = on_a_pool("vllm's layer of Kimi delta attention", operands[2], state, True, starts, table, accepted)
    rule = call_of(kda, state, *operands, out=part.out[None], **gates, **pool, **noise.of(state)).plan()
    convs = [
        call_of(
            causal_conv1d_update, x, window, weight, bias, "silu", conv_state_indices=first_column(table, sequences),
            num_accepted_tokens=accepted, query_start_loc=starts, pad_slot_id=0, out=rows,
        ).plan()
        for (x, window, weight, bias), rows in zip(part.convolutions, convolved, strict=True)
    ]  # fmt: skip
    return [*convs, rule]


def eager_break(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as vLLM's decorator of these methods makes it: it runs eagerly between the segments of a breakable CUDA graph."""
    decorated: Callable[..., Any] = import_module(_GRAPHS).eager_break_during_capture(function)
    return decorated


_CONVS = tuple(f"{_LAYERS}.ops.causal_conv1d.{name}" for name in ("causal_conv1d_fn", "causal_conv1d_update"))
_THEIRS = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
_OF_KIMI = (*_CONVS, f"{_THEIRS}.chunk.chunk_kda_with_fused_gate", f"{_THEIRS}.fused_recurrent.fused_recurrent_kda")
_OF_GLM = "vllm.models.glm5next.nvidia.ops.third_party.kda.kernels"
_OF_BAILING = "vllm.third_party.flash_linear_attention.ops.kda"
REPLACEMENTS = [
    Replacement(_LINEAR, "KimiGatedDeltaNetAttention._forward", kimi_linear_forward, needs=_OF_KIMI, decorated=eager_break),
    Replacement(
        _KIMI, "KimiK3DeltaAttention._forward", kimi_k3_forward, needs=(*_OF_KIMI, f"{_KIMI}._flashkda_prefill"), decorated=eager_break
    ),
    Replacement(
        _BAILING, "BailingMoeV3KimiDeltaAttention._forward", bailing_v3_forward,
        needs=(*_CONVS, f"{_OF_BAILING}.chunk_kda", f"{_OF_BAILING}.fused_recurrent_kda_fwd"),
    ),
    Replacement(
        _GLM, "Glm5NextLinearAttention._forward", glm_forward, decorated=eager_break,
        needs=(
            *_CONVS, f"{_OF_GLM}.chunk_kda_with_fused_gate", f"{_OF_GLM}.fused_recurrent_kda",
            f"{_GLM}.Glm5NextLinearAttention._flashkda_prefill",
        ),
    ),
]  # fmt: skip
