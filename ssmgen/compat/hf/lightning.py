"""MiniMax's Lightning attention layers in transformers: `patch` replaces their forward, over a prompt and at a step.

Between the layer's projections one call of ssmgen's is made. The state stays where transformers' cache has it, and of its dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...families.chunk_scan import attention
from ...families.linear_attention import call as linear_attention
from .functions import NO_BACKWARD, call
from .replacements import Replacement, attempt
from .roles import Roles

CLASSES = ("MiniMaxLightningAttention",)
"""Classes whose forward is replaced. Their modeling file has no functions to look for."""
ROLES = ("hidden_states", "position_embeddings", "attention_mask", "cache")


def lightning(mixer: Any, hidden_states: Tensor, attention_mask: Tensor | None, cache: Any) -> tuple[Tensor, Tensor]:
    """hidden_states [batch, T, hidden] -> (the layer's output, the state after them [batch, heads, K, V])."""
    batch, tokens, _ = hidden_states.shape
    heads, width = mixer.num_attention_heads, mixer.head_dim
    qkv = mixer.act_fn(mixer.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = (qkv * attention_mask[:, :, None]).to(qkv.dtype)
    q, k, v = qkv.view(batch, tokens, heads, 3 * width).split(width, dim=3)
    state = None if cache is None else cache.get_linear_cache(mixer.layer_idx)
    slope = mixer.slope_rate.flatten()
    if state is not None and tokens == 1:
        out = call(linear_attention.lightning_attn, state, q, k, v, slope, scale=1.0, state_layout="kv")
    else:
        before = None if state is None else state.transpose(-1, -2).contiguous()
        out, last = call(attention.chunk_lightning_attn, q, k, v, slope, scale=1.0, initial_states=before, return_final_states=True)
        state = last.transpose(-1, -2).to(v.dtype).contiguous()
    normed = mixer.norm(out.reshape(batch, tokens, heads * width))
    if cache is not None:
        cache.set_linear_cache(mixer.layer_idx, state)
    return mixer.out_proj(torch.sigmoid(mixer.output_gate(hidden_states)) * normed), state


def run(replacement: Replacement, original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of a mixer's forward."""
    roles = Roles(original, *ROLES)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden_states, _, attention_mask, cache, others = roles(args, kwargs)
        if not is_compiling() and not roles.unknown(others):
            if torch.is_grad_enabled() and any(t.requires_grad for t in (hidden_states, *self.parameters())):
                reason: str | None = NO_BACKWARD
            else:
                result, reason = attempt(replacement, lightning, self, hidden_states, attention_mask, cache)
            if reason is None:
                return result
            replacement.keep(reason)
        return original(self, *args, **kwargs)

    return run
