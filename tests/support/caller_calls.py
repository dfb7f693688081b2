"""The calls that vLLM's, SGLang's and TensorRT-LLM's layers make of ssmgen's functions, with the shapes of a model and in the dtypes of a
bf16 checkpoint: a prompt of two packed sequences, then a decode step."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import ssmgen
from ssmgen.compat import sglang, trtllm, vllm
from ssmgen.compat.sglang import delta as sglang_delta
from ssmgen.engine.recurrences.attention.problem import Gate

BF16, F32 = torch.bfloat16, torch.float32
TOKENS, BATCH, PAGES = 6, 2, 4
STARTS, SLOTS = torch.tensor([0, 2, 6], dtype=torch.int32), torch.tensor([2, 1], dtype=torch.int32)
GOES_ON = torch.ones(BATCH, dtype=torch.bool)
LOWER = {Gate.BOUNDED: -5.0}


def bf16(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=BF16)


def f32(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=F32)


def _convolutions(engine: ModuleType, model: Any) -> None:
    """vLLM's windows have contiguous channels; SGLang's have contiguous tokens."""
    channels = model.conv_channels
    weight, bias = bf16(channels, model.conv_width), bf16(channels) if model.conv_bias else None
    length = model.conv_width - 1
    windows = bf16(PAGES, length, channels).transpose(1, 2) if engine is vllm else bf16(PAGES, channels, length)
    packed = {"cache_indices": SLOTS, "has_initial_state": GOES_ON, "query_start_loc": STARTS, "activation": "silu"}
    engine.causal_conv1d_fn(bf16(TOKENS, channels).t(), weight, bias, conv_states=windows, **packed)
    engine.causal_conv1d_update(bf16(BATCH, channels), windows, weight, bias, "silu", conv_state_indices=SLOTS)


# Mamba-1


def _vllm_mamba1(model: Any) -> None:
    """D is in the checkpoint's dtype in a step, and in f32 over prompts."""
    _convolutions(vllm, model)
    dim, N = model.headdim, model.d_state
    A, bias, pool = f32(dim, N), f32(dim), f32(PAGES, dim, N)
    u, delta, z = (bf16(TOKENS, dim).t() for _ in range(3))
    B, C = (bf16(TOKENS, N).t() for _ in range(2))
    vllm.selective_scan_fn(
        u, pool, delta, A, B, C, f32(dim), z, bias, delta_softplus=True, query_start_loc=STARTS, cache_indices=SLOTS,
        has_initial_state=GOES_ON,
    )  # fmt: skip
    x, z, dt = bf16(BATCH, dim), bf16(BATCH, dim), bf16(dim, BATCH).t()
    B, C = (bf16(BATCH, N) for _ in range(2))
    vllm.selective_state_update(pool, x, dt, A, B, C, bf16(dim), bias, z, dt_softplus=True, state_batch_indices=SLOTS, out=bf16(BATCH, dim))


def _sglang_mamba1(model: Any) -> None:
    """The scan of a prompt is a loop over sequences in f32; a step has a head for each channel: neither is built."""
    _convolutions(sglang, model)


# Mamba-2


def _mamba2_operands(model: Any, *lead: int) -> dict[str, Tensor]:
    H, P, N, G = model.nheads, model.headdim, model.d_state, model.ngroups
    given = {"x": bf16(*lead, H, P), "dt": bf16(*lead, H), "A": f32(H), "B": bf16(*lead, G, N), "C": bf16(*lead, G, N)}
    return given | {"D": bf16(H), "dt_bias": bf16(H)}


def _mamba2_step(engine: ModuleType, model: Any) -> None:
    """A, D, dt and dt_bias are expanded, as the layers do it."""
    H, P, N = model.nheads, model.headdim, model.d_state
    given = _mamba2_operands(model, BATCH)
    given |= {n: given[n][..., None].expand(*given[n].shape, P) for n in ("dt", "D", "dt_bias")}
    given["A"] = given["A"][:, None, None].expand(H, P, N)
    engine.selective_state_update(f32(PAGES, H, P, N), **given, dt_softplus=True, state_batch_indices=SLOTS, out=bf16(BATCH, H, P))


def _vllm_mamba2(model: Any) -> None:
    _convolutions(vllm, model)
    H, P, N = model.nheads, model.headdim, model.d_state
    pool = f32(PAGES, H, P, N)
    for states in (None, f32(BATCH, H, P, N)):
        vllm.mamba_chunk_scan_combined_varlen(
            **_mamba2_operands(model, TOKENS), chunk_size=256, cu_seqlens=STARTS, dt_softplus=True, state_dtype=F32,
            cu_chunk_seqlens=STARTS, last_chunk_indices=SLOTS, seq_idx=SLOTS, out=bf16(TOKENS, H, P), initial_states=states,
            final_states_out=pool, final_state_indices=SLOTS,
        )  # fmt: skip
    _mamba2_step(vllm, model)


def _packed_scan(model: Any) -> dict[str, Any]:
    """The scan of a prompt as SGLang's and TensorRT-LLM's layers call it."""
    ids = torch.tensor([[0, 0, 1, 1, 1, 1]], dtype=torch.int32)
    more = {"chunk_size": 256, "cu_seqlens": STARTS, "seq_idx": ids, "dt_softplus": True, "return_varlen_states": True}
    return _mamba2_operands(model, 1, TOKENS) | more | {"out": bf16(1, TOKENS, model.nheads, model.headdim), "state_dtype": F32}


def _sglang_mamba2(model: Any) -> None:
    _convolutions(sglang, model)
    for states in (None, f32(BATCH, model.nheads, model.headdim, model.d_state)):
        sglang.mamba_chunk_scan_combined(**_packed_scan(model), initial_states=states, return_final_states=False)
    _mamba2_step(sglang, model)


def _trtllm_mamba2(model: Any) -> None:
    """Its convolutions are not replaced; its step is called through FlashInfer's name."""
    for states in (None, f32(BATCH, model.nheads, model.headdim, model.d_state)):
        trtllm.mamba_chunk_scan_combined(**_packed_scan(model), initial_states=states)
    given = _mamba2_operands(model, BATCH)
    pool = f32(PAGES, model.nheads, model.headdim, model.d_state)
    ssmgen.selective_state_update(pool, **given, dt_softplus=True, state_indices=SLOTS)


# Delta rules


def _rows(model: Any, *lead: int) -> dict[str, Tensor]:
    q, k = (bf16(*lead, model.key_heads, model.dim_k) for _ in range(2))
    return {"q": q, "k": k, "v": bf16(*lead, model.nheads, model.dim_v)}


def _pool(model: Any) -> Tensor:
    return f32(PAGES, model.nheads, model.dim_v, model.dim_k)


def _weights(model: Any) -> dict[str, Tensor]:
    return {"A_log": f32(model.nheads), "dt_bias": bf16(model.nheads)}


def _packed_row(model: Any) -> Tensor:
    """q, k and v as the convolution leaves them."""
    return bf16(BATCH, 2 * model.key_heads * model.dim_k + model.nheads * model.dim_v)


def _gdn_prompt(model: Any) -> dict[str, Tensor]:
    return _rows(model, 1, TOKENS) | {"g": f32(1, TOKENS, model.nheads), "beta": f32(1, TOKENS, model.nheads), "cu_seqlens": STARTS}


def _gdn_step(engine: ModuleType, model: Any) -> None:
    H, pool = model.nheads, _pool(model)
    gate = {"a": bf16(BATCH, H), "b": bf16(BATCH, H)} | _weights(model)
    engine.fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=_packed_row(model), **gate, scale=model.dim_k**-0.5, initial_state=pool, out=bf16(BATCH, 1, H, model.dim_v),
        ssm_state_indices=SLOTS, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


def _gdn_layer(engine: ModuleType, model: Any) -> None:
    """The plugins' decode steps: SGLang's from one projection to the next, vLLM's without the norm."""
    H, channels, length = model.nheads, model.conv_channels, model.conv_width - 1
    windows = bf16(PAGES, length, channels).transpose(1, 2) if engine is vllm else bf16(PAGES, channels, length)
    z, norm = (None, None) if engine is vllm else (bf16(BATCH, H * model.dim_v), bf16(model.dim_v))
    ssmgen.gdn_layer(
        _packed_row(model), bf16(BATCH, H), bf16(BATCH, H), z, windows, _pool(model),
        torch.zeros((PAGES, model.key_heads), dtype=torch.int32), bf16(channels, model.conv_width), None, *_weights(model).values(), norm,
        state_indices=SLOTS,
    )  # fmt: skip


def _vllm_gdn(model: Any) -> None:
    _convolutions(vllm, model)
    states = _pool(model)[:BATCH]
    for norm in (False, True):  # OLMo-Hybrid's q and k are not of length one
        vllm.chunk_gated_delta_rule(**_gdn_prompt(model), initial_state=states, output_final_state=True, use_qk_l2norm_in_kernel=norm)
    vllm.fi_chunk_gated_delta_rule(**_gdn_prompt(model), initial_state=states, output_final_state=True, use_qk_l2norm_in_kernel=False)
    _gdn_step(vllm, model)
    _gdn_layer(vllm, model)
    vllm.fused_sigmoid_gating_delta_rule_update(**_sigmoid_step(model), ssm_state_indices=SLOTS, initial_state=_pool(model))


def _sigmoid_step(model: Any) -> dict[str, Any]:
    """The decode rows of a batch that also has prompts, as packed sequences of one token."""
    H = model.nheads
    gate = {"a": bf16(1, BATCH, H), "b": bf16(1, BATCH, H)} | _weights(model)
    return _rows(model, 1, BATCH) | gate | {"cu_seqlens": torch.arange(BATCH + 1, dtype=torch.int32), "use_qk_l2norm_in_kernel": True}


def _sglang_gdn(model: Any) -> None:
    """Its layers call a method of their backend over prompts."""
    _convolutions(sglang, model)
    given = {n: t for n, t in _gdn_prompt(model).items() if n != "cu_seqlens"}
    sglang_delta.extend(None, **given, ssm_states=_pool(model), cache_indices=SLOTS, query_start_loc=STARTS)
    _gdn_step(sglang, model)
    _gdn_layer(sglang, model)


# Kimi delta attention


def _kda_raw(model: Any, *lead: int) -> dict[str, Any]:
    H, K = model.nheads, model.dim_k
    return {"raw_g": bf16(*lead, H, K), "raw_beta": bf16(*lead, H), "A_log": f32(H), "dt_bias": f32(H * K)}


def _vllm_kda(model: Any) -> None:
    _convolutions(vllm, model)
    raw, states = _kda_raw(model, 1, TOKENS), _pool(model)[:BATCH]
    raw["g_bias"] = raw.pop("dt_bias")
    vllm.chunk_kda_with_fused_gate(
        **_rows(model, 1, TOKENS),
        **raw,
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=STARTS,
        lower_bound=LOWER.get(model.gate),
    )
    vllm.fused_recurrent_kda_packed_decode(
        mixed_qkv=_packed_row(model), **_kda_raw(model, 1, BATCH), scale=model.dim_k**-0.5, initial_state=_pool(model),
        lower_bound=LOWER.get(model.gate), out=bf16(1, BATCH, model.nheads, model.dim_v), state_indices=SLOTS,
    )  # fmt: skip


def _sglang_kda(model: Any) -> None:
    _convolutions(sglang, model)
    H, K = model.nheads, model.dim_k
    gate = {"A_log": f32(H), "dt_bias": f32(H * K)}
    sglang.chunk_kda(
        **_rows(model, 1, TOKENS), g=bf16(1, TOKENS, H, K), beta=bf16(1, TOKENS, H), **gate, beta_is_raw=True, initial_state=_pool(model),
        initial_state_indices=SLOTS, cu_seqlens=STARTS, use_qk_l2norm_in_kernel=True, lower_bound=LOWER.get(model.gate),
    )  # fmt: skip
    if model.gate is Gate.BOUNDED:
        sglang.fused_sigmoid_gating_delta_rule_update(
            **_rows(model, 1, BATCH), a=bf16(1, BATCH, H, K), b=bf16(1, BATCH, H), **gate, softplus_beta=1.0, softplus_threshold=20.0,
            initial_state_source=_pool(model), initial_state_indices=SLOTS, cu_seqlens=torch.arange(BATCH + 1, dtype=torch.int32),
            use_qk_l2norm_in_kernel=True, is_kda=True, lower_bound=-5.0,
        )  # fmt: skip
        return
    sglang.fused_recurrent_kda_packed_decode(
        mixed_qkv=_packed_row(model), a=bf16(BATCH, H * K), b=bf16(BATCH, H), **gate, scale=K**-0.5, initial_state=_pool(model),
        out=bf16(BATCH, 1, H, model.dim_v), ssm_state_indices=SLOTS, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


# Lightning attention


def _lightning(engine: ModuleType, model: Any) -> None:
    H, K = model.nheads, model.dim_k
    q, k, v = (bf16(1, H, TOKENS, K) for _ in range(3))
    slope = f32(H, 1, 1)
    engine.lightning_attention(q, k, v, slope, 256, kv_history=f32(1, H, K, K))
    rows = (bf16(BATCH, H, 1, K) for _ in range(3))
    engine.linear_decode_forward_triton(*rows, f32(PAGES, H, K, K), slope, SLOTS, 32)


def _sglang_lightning(model: Any) -> None:
    """MiniMax's layers make the same calls as vLLM's; Bailing's call `seg_la_fwd`."""
    _lightning(sglang, model)
    H, K = model.nheads, model.dim_k
    meta = SimpleNamespace(batch_size=BATCH, q_offsets=STARTS, s_offsets=SLOTS, s_scales=GOES_ON, mask=None)
    for tokens in (TOKENS, BATCH):
        q, k, v = (bf16(tokens, H, K) for _ in range(3))
        sglang.seg_la_fwd(q, k, v, f32(PAGES, H, K, K), f32(H, 1, 1), meta, softmax_scale=K**-0.5)


CALLS: dict[str, tuple[str, Callable[[Any], None], int]] = {
    "vllm-mamba1": ("falcon-mamba-7b", _vllm_mamba1, 4),
    "vllm-mamba2": ("nemotron-h-8b", _vllm_mamba2, 5),
    "vllm-gdn": ("qwen3-next-80b-a3b", _vllm_gdn, 7),
    "vllm-kda": ("kimi-linear-48b-a3b", _vllm_kda, 4),
    "vllm-kda-bounded": ("glm5-next", _vllm_kda, 4),
    "vllm-lightning": ("minimax-text-01", lambda model: _lightning(vllm, model), 2),
    "sglang-mamba1": ("falcon-mamba-7b", _sglang_mamba1, 2),
    "sglang-mamba2": ("nemotron-h-8b", _sglang_mamba2, 5),
    "sglang-gdn": ("qwen3-next-80b-a3b", _sglang_gdn, 5),
    "sglang-kda": ("kimi-linear-48b-a3b", _sglang_kda, 4),
    "sglang-kda-bounded": ("glm5-next", _sglang_kda, 4),
    "sglang-lightning": ("minimax-text-01", _sglang_lightning, 3),
    "trtllm-mamba2": ("nemotron-h-8b", _trtllm_mamba2, 3),
}
"""{engine and family: (model, its calls, problems that these pose)}"""
