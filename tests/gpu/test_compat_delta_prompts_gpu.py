"""Drop-ins for prompts of delta rules and linear attentions on a card: the results of CPU tensors, without a synchronisation, and in CUDA
graphs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from card_calls import serves_as_on_the_host
from delta_oracles import BF16, CHUNK, F32, HK, HV, SLOTS, K, V, checkpointed, operands, randn, starts_of, states, vllm_call
from engine_calls import pages
from torch import Tensor
from torch.nn.functional import logsigmoid

from ssmgen.compat import fla, flashinfer, sglang, vllm
from ssmgen.compat.sglang import delta as sglang_delta

pytestmark = pytest.mark.gpu

BOUND = 6e-3 + 2**-9  # of the kernel against float64, and the rounding of the reference
LENGTHS = (200, 0, 1, 128)
STARTS = starts_of(LENGTHS)


def packed(**more: Any) -> dict[str, Any]:
    return operands(1, sum(LENGTHS)) | {"cu_seqlens": STARTS} | more


def alpha(**more: Any) -> dict[str, Any]:
    """FlashInfer's call: the gate is the decay itself, and the batch axis is absent."""
    call = operands(sum(LENGTHS))
    return call | {"g": call["g"].exp(), "cu_seqlens": STARTS, "output_final_state": True} | more


def raw() -> dict[str, Any]:
    more = {"g": randn(2, 150, HV, seed=6), "beta": randn(2, 150, HV, seed=8), "A_log": randn(HV, seed=4, dtype=F32)}
    more |= {"dt_bias": randn(HV, seed=5, dtype=F32), "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    return operands(2, 150, unit=False) | more | {"use_qk_l2norm_in_kernel": True, "output_final_state": True}


def in_place() -> dict[str, Any]:
    pool = pages(9, HV, V, K, gap=8)
    return alpha(initial_state=pool, output_state=pool, state_indices=SLOTS)


def backend(pool: Tensor, **more: Any) -> dict[str, Any]:
    """SGLang's method with tracked states: one after a chunk, one before the first chunk."""
    tracked = {"track_state": torch.zeros(4, HV, V, K), "track_chunk_idx": torch.tensor([2, 0, 0, 1], dtype=torch.int32)}
    call = operands(1, sum(LENGTHS), unit=False) | {"ssm_states": pool, "cache_indices": SLOTS, "query_start_loc": STARTS}
    return call | {"self": None} | tracked | more


def per_channel(names: str, **more: Any) -> dict[str, Any]:
    """Packed operands of a rule that decays per key channel; operands used as keys have length about one."""
    tokens = sum(LENGTHS)
    call = operands(1, tokens) | {"g": logsigmoid(randn(1, tokens, HV, K, seed=2, dtype=F32) + 3)}
    keys = (randn(1, tokens, 3, HV, K, seed=9, dtype=F32) / K**0.5).bfloat16()
    call |= {"a": -keys[:, :, 0], "b": keys[:, :, 0], "r": keys[:, :, 1], "key": keys[:, :, 2], "p": keys[:, :, 0, :HK]}
    call |= {"erase": randn(1, tokens, HV, K, seed=10).sigmoid(), "write": randn(1, tokens, HV, V, seed=11).sigmoid()}
    call |= {"raw": randn(1, tokens, HV, K, seed=12), "logit": randn(1, tokens, HV, seed=13), "head": call["g"][..., 0].contiguous()}
    call |= {"A_log": randn(HV, seed=4, dtype=F32), "dt_bias": randn(HV * K, seed=5, dtype=F32)}
    words = [word.partition("=") for word in names.split()]
    return {name: call[other or name] for name, _, other in words} | {"cu_seqlens": STARTS} | more


def of_attention(**more: Any) -> dict[str, Any]:
    """Lightning attention's: rows of heads."""
    rows = {n: randn(2, HV, 150, width, seed=s) for s, (n, width) in enumerate((("q", K), ("k", K), ("v", V)))}
    return rows | {"ed": torch.linspace(0.01, 0.5, HV), "kv_history": randn(2, HV, K, V, seed=7, dtype=F32)} | more


def lightning_drafts(s_offsets: Tensor, **call: Any) -> Tensor:
    """SGLang's verification of drafts, whose slots are an attribute of its metadata."""
    meta = SimpleNamespace(batch_size=3, q_offsets=None, s_offsets=s_offsets, s_scales=None, mask=None)
    return sglang.seg_la_fwd(**call, meta=meta)


def of_drafts() -> dict[str, Any]:
    rows = {n: randn(12, HV, width, seed=s) for s, (n, width) in enumerate((("q", K), ("k", K), ("v", V)))}
    rows |= {"s": states(9, layout="kv"), "s_offsets": SLOTS[:3].clone(), "caches": torch.zeros(4, 5, HV, K, V)}
    return rows | {"decay_scales": torch.linspace(0.01, 0.5, HV), "cache_indices": torch.tensor([3, 1, 0], dtype=torch.int32)}


FINAL, KEPT = {"output_final_state": True}, {"initial_state": states(4, layout="kv"), "output_final_state": True}
RAW = {"use_qk_l2norm_in_kernel": True, "lower_bound": -5.0}

WAYS = {
    "fla-kda": (fla.chunk_kda, lambda: per_channel("q k v g beta", **KEPT)),
    "fla-kda-raw": (
        fla.chunk_kda,
        lambda: per_channel(
            "q k v g=raw beta=logit A_log dt_bias", use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, **RAW, **KEPT,
        ),
    ),
    "fla-gdn2": (fla.chunk_gdn2, lambda: per_channel("q k v g b=erase w=write", **KEPT)),
    "fla-comba": (fla.chunk_comba, lambda: per_channel("q k v p g=head beta", **KEPT)),
    "fla-gla": (fla.chunk_gla, lambda: per_channel("q k v g", **KEPT)),
    "fla-rwkv7": (fla.chunk_rwkv7, lambda: per_channel("r w=g k=key v a b", **KEPT)),
    "fla-simple_gla": (fla.chunk_simple_gla, lambda: per_channel("q k v g=head", **KEPT)),
    "vllm-kda": (vllm.chunk_kda, lambda: per_channel("q k v g beta", initial_state=states(4), **FINAL)),
    "vllm-kimi": (
        vllm.chunk_kda_with_fused_gate,
        lambda: per_channel("q k v raw_g=raw raw_beta=logit A_log g_bias=dt_bias", initial_state=states(4), **FINAL, **RAW),
    ),
    "sglang-kda": (
        sglang.chunk_kda,
        lambda: per_channel(
            "q k v g beta", initial_state=pages(9, HV, V, K, gap=8), initial_state_indices=SLOTS, output_intermediate_states=True
        ),
    ),
    "sglang-kda-tracked": (
        sglang.chunk_kda,
        lambda: per_channel(
            "q k v g=raw beta=logit A_log dt_bias", initial_state=states(9), initial_state_indices=SLOTS, beta_is_raw=True,
            track_state=torch.zeros(4, HV, V, K), track_chunk_idx=torch.tensor([2, 0, 0, 1], dtype=torch.int32), **RAW,
        ),
    ),
    "lightning": (vllm.lightning_attention, of_attention),
    "sglang-lightning-drafts": (lightning_drafts, of_drafts),
    "fla-rows": (fla.chunk_gated_delta_rule, raw),
    "fla-packed": (
        fla.chunk_gated_delta_rule, lambda: packed(initial_state=states(4, BF16, "kv"), output_final_state=True),
    ),
    "fla-delta": (fla.chunk_delta_rule, lambda: {n: t for n, t in packed(output_final_state=True).items() if n != "g"}),
    "flashinfer": (flashinfer.chunk_gated_delta_rule, lambda: alpha(initial_state=states(4, BF16), **checkpointed(LENGTHS))),
    "flashinfer-pool": (flashinfer.chunk_gated_delta_rule, in_place),
    "vllm": (vllm.chunk_gated_delta_rule, lambda: vllm_call(LENGTHS, initial_state=states(4, BF16))),
    "vllm-flashinfer": (vllm.fi_chunk_gated_delta_rule, lambda: vllm_call(LENGTHS, initial_state=states(4), **checkpointed(LENGTHS))),
    "sglang": (
        sglang.chunk_gated_delta_rule,
        lambda: packed(initial_state=pages(9, HV, V, K, gap=8), initial_state_indices=SLOTS, use_qk_l2norm_in_kernel=True),
    ),
    "sglang-read": (
        sglang.chunk_gated_delta_rule,
        lambda: packed(initial_state=states(9, BF16), initial_state_indices=SLOTS, inplace_update=False),
    ),
    "sglang-backend": (sglang_delta.extend, lambda: backend(pages(9, HV, V, K, gap=8))),
    "sglang-backend-read": (sglang_delta.extend, lambda: backend(states(9, BF16), inplace_update=False)),
}  # fmt: skip
WRITTEN = ("initial_state", "output_state", "state_checkpoints", "ssm_states", "track_state", "caches")


def results(got: Any, call: dict[str, Any]) -> Iterator[Tensor]:
    """Every tensor that is returned or written; SGLang's states before chunks are limited to the chunks that exist."""
    chunks = sum(-(-length // CHUNK) for length in LENGTHS)
    for t in got if isinstance(got, tuple) else (got,):
        if t is not None:
            yield t[:, :chunks] if t.dim() == 5 else t
    yield from (call[n] for n in WRITTEN if call.get(n) is not None)


@pytest.mark.parametrize("way", WAYS)
def test_prompts_on_a_card(way):
    serves_as_on_the_host(*WAYS[way], results, BOUND)
