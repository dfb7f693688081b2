"""vLLM's prompts of Bailing 2.5's Lightning attention, as in vLLM 0.33: all sequences of a step in one scan."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...families.chunk_scan.attention import chunk_lightning_attn
from ..shared import delta_prompts as _prompts
from ..shared.gated_delta import first
from ..shared.lightning import scatter
from ..shared.operands import takes as _takes
from ..shared.replacing import Replacement

_MODULE, _CLEAR, _MIX = (
    "vllm.model_executor.layers.mamba.linear.bailing_linear_attn", "clear_linear_attention_cache_for_new_sequences",
    "linear_attention_prefill_and_mix",
)  # fmt: skip


def clear_linear_attention_cache_for_new_sequences(kv_cache: Tensor, state_indices_tensor: Tensor, attn_metadata: Any) -> None:
    """Nothing: linear_attention_prefill_and_mix starts new sequences from zeros. vLLM reads each sequence's lengths on the host."""


@_takes(q="[tokens, H, K]", k="[tokens, H, K]", v="[tokens, H, V]", kv_cache="[slots, H, K, V]")
def linear_attention_prefill_and_mix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    state_indices_tensor: Tensor,
    attn_metadata: Any,
    slope_rate: Tensor,
    block_size: int,
    decode_fn: Callable[..., Tensor],
    prefix_fn: Callable[..., Tensor],
    layer_idx: int | None = None,
) -> Tensor:
    """Lightning attention of a step with prompts, per token: S <- e^-s S + v k^T;  o = S q.

    q, k, v: [tokens, H, size], decode steps first          slope_rate: H elements, the slopes s, at least 0
    kv_cache: [slots, H, K, V], a pool, updated in place          state_indices_tensor: slots, if attn_metadata has none for prompts
    attn_metadata: the step's, with num_decodes, num_prefills, query_start_loc and seq_lens. A prompt with nothing before it starts at zero
    decode_fn: serves the decode steps          block_size, prefix_fn, layer_idx: ignored

    Returns a new output [tokens, H V] of q's dtype. The prompts' states are gathered and transposed, scanned in one call, and scattered,
    without a number from the GPU. vLLM has a loop over prompts, with copies and synchronisations for each.
    Raises ArgumentError (a ValueError) for operands that do not fit.
    """
    steps, starts = attn_metadata.num_decodes, attn_metadata.query_start_loc
    starts = starts[steps : steps + attn_metadata.num_prefills + 1]
    count, own = starts.shape[0] - 1, getattr(attn_metadata, "state_indices_tensor_p", None)
    slots = first(state_indices_tensor[steps:] if own is None else own, count)
    lengths = attn_metadata.seq_lens[steps : steps + count]
    indices = {"state indices": slots, "query_start_loc": starts, "seq_lens": lengths}
    if problems := _prompts.objections(v, indices, {"kv_cache": kv_cache}):
        raise ArgumentError(f"vllm's {_MIX}", problems)
    fresh = lengths <= starts.diff()
    before = _prompts.gathered(kv_cache, slots).masked_fill_(fresh[:, None, None, None], 0).transpose(-1, -2)
    out = torch.empty(v.shape, dtype=q.dtype, device=v.device)
    after = kv_cache.new_empty(before.shape)
    _prompts.run(
        chunk_lightning_attn, (q, k, v, slope_rate.reshape(-1)), out, initial_states=before, last=after, cu_seqlens=starts, scale=1.0
    )  # fmt: skip
    scatter(kv_cache, slots, after.transpose(-1, -2))
    if count_d := attn_metadata.num_decode_tokens:
        out[:count_d] = decode_fn(q, k, v, kv_cache, state_indices_tensor, attn_metadata).view(out[:count_d].shape)
    return out.flatten(1)


def _after_clearing(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """vLLM's own function, for calls that ssmgen refuses: the states of new sequences are cleared first, which ours leaves out."""

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        clear = getattr(import_module(_MODULE), _CLEAR)
        if hasattr(clear, "__wrapped__"):
            given = dict(zip(("q", "k", "v", "kv_cache", "state_indices_tensor", "attn_metadata"), args, strict=False)) | kwargs
            clear.__wrapped__(given["kv_cache"], given["state_indices_tensor"], given["attn_metadata"])
        return original(*args, **kwargs)

    return call


REPLACEMENTS = [
    Replacement(_MODULE, _CLEAR, clear_linear_attention_cache_for_new_sequences, needs=(f"{_MODULE}.{_MIX}",)),
    Replacement(
        _MODULE, _MIX, linear_attention_prefill_and_mix, behind=_after_clearing,
        needs=("vllm.model_executor.layers.lightning_attn.lightning_attention",),
    ),
]  # fmt: skip
