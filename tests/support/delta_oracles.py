"""Prompts of delta rules in the form of drop-in calls: operands, and the expected results token by token in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from prompt_oracles import BF16, F32, close, randn, starts_of
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

__all__ = ["BF16", "F32", "close", "randn", "starts_of"]

HK, HV, K, V = 2, 4, 32, 16
CHUNK = 64
LENGTHS = (66, 0, 1, 64)
TOKENS = sum(LENGTHS)
POOL, SLOTS = (HV, V, K), torch.tensor([5, 1, 3, 7], dtype=torch.int32)
UNTOUCHED = 7.0
WRITTEN = ("initial_state", "output_state", "state_checkpoints", "core_attn_out", "ssm_states", "track_state")


def operands(*lead: int, unit: bool = True) -> dict[str, Tensor]:
    """q, k and v are slices of one row, as the convolution leaves them; g the log decay, f32; beta bf16. unit: q, k are of length one."""
    wide = randn(*lead, 2 * HK * K + HV * V, seed=1)
    if unit:
        keys = wide[..., : 2 * HK * K].unflatten(-1, (2 * HK, K)).float()
        wide[..., : 2 * HK * K] = (keys / keys.norm(dim=-1, keepdim=True)).flatten(-2).to(BF16)
    q, k, v = wide.split([HK * K, HK * K, HV * V], -1)
    call = {"q": q.unflatten(-1, (HK, K)), "k": k.unflatten(-1, (HK, K)), "v": v.unflatten(-1, (HV, V))}
    return call | {"g": logsigmoid(randn(*lead, HV, seed=2, dtype=F32) + 2), "beta": randn(*lead, HV, seed=3).sigmoid()}


# Checkpoints of whole chunks, as FlashInfer's callers ask for them; and one row more than needed.
STARTS = starts_of([length // CHUNK for length in LENGTHS], torch.int64)
KEPT = {"state_checkpoints": torch.zeros(3, *POOL), "checkpoint_cu_starts": STARTS, "checkpoint_every_n_tokens": CHUNK}
# Operands that functions write, under all of their names.


def states(count: int, dtype: torch.dtype = F32, layout: str = "vk") -> Tensor:
    return randn(count, HV, *((V, K) if layout == "vk" else (K, V)), seed=7, dtype=dtype)


def gates(raw: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """The log decay of a raw gate."""
    return -A_log.double().exp() * softplus(raw.double() + dt_bias.double())


def walk(call: dict[str, Any], before: Tensor | None = None, norm: bool = False, scale: float = K**-0.5) -> tuple[Tensor, Tensor]:
    """One sequence: (outputs [T, HV, V], states [HV, V, K] before the first token and after each [T + 1, …])."""
    q, k, v = (call[n].cpu().double() for n in "qkv")
    if norm:
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    q, k = (t.repeat_interleave(HV // HK, 1) for t in (q, k))
    S = torch.zeros(HV, V, K, dtype=torch.float64) if before is None else before.cpu().double()
    a, beta = (torch.ones(v.shape[:2], dtype=torch.float64) if t is None else t.cpu().double() for t in (call.get("g"), call.get("beta")))
    a = a if call.get("g") is None else a.exp()
    each, out = [S], torch.empty_like(v)
    for t in range(v.shape[0]):
        S = S * a[t, :, None, None]
        S = S + (beta[t, :, None] * (v[t] - (S * k[t, :, None]).sum(-1)))[..., None] * k[t, :, None]
        out[t] = scale * (S * q[t, :, None]).sum(-1)
        each.append(S)
    return out, torch.stack(each)


def walks(call: dict[str, Any], lengths: Sequence[int] = LENGTHS, before: Tensor | None = None, **more: Any) -> tuple[Tensor, list[Tensor]]:
    """Packed sequences [1, tokens, …] or [tokens, …]: (outputs [tokens, HV, V], each one's states)."""
    flat = {n: call[n].flatten(0, -3 if n in "qkv" else -2) for n in ("q", "k", "v", "g", "beta") if call.get(n) is not None}
    found, start = [], 0
    for i, length in enumerate(lengths):
        sequence = {n: t[start : start + length] for n, t in flat.items()}
        found.append(walk(sequence, None if before is None else before[i], **more))
        start += length
    return torch.cat([y for y, _ in found]), [S for _, S in found]


def vllm_call(lengths: Sequence[int] = LENGTHS, **more: Any) -> dict[str, Any]:
    """As vLLM's layers call either of its functions: q and k are of length one already."""
    call: dict[str, Any] = operands(1, sum(lengths))
    return call | {"cu_seqlens": starts_of(lengths), "output_final_state": True, "use_qk_l2norm_in_kernel": False} | more


def chunks_of(lengths: Sequence[int] = LENGTHS) -> list[tuple[int, int]]:
    """(sequence, tokens before the chunk) of every chunk, as SGLang's prefix caches count them."""
    return [(i, c * CHUNK) for i, length in enumerate(lengths) for c in range(-(-length // CHUNK))]


def flashinfer_call(lengths: Sequence[int] = LENGTHS, **more: Any) -> dict[str, Any]:
    """Packed without an axis of the batch; the gate is the decay itself."""
    call = operands(sum(lengths))
    return call | {"g": call["g"].exp(), "beta": call["beta"].float(), "cu_seqlens": starts_of(lengths, torch.int64)} | more


def checkpointed(lengths: Sequence[int] = LENGTHS, dtype: torch.dtype = F32, every: int = CHUNK) -> dict[str, Any]:
    """Checkpoint arguments of FlashInfer's and vLLM's calls: one row per `every` tokens of a sequence, and one unused row."""
    counts = [length // every for length in lengths]
    rows = torch.full((sum(counts) + 1, *POOL), UNTOUCHED, dtype=dtype)
    return {"state_checkpoints": rows, "checkpoint_cu_starts": starts_of(counts, torch.int64), "checkpoint_every_n_tokens": every}


def logs(call: dict[str, Any]) -> dict[str, Any]:
    """FlashInfer's call with the log decay."""
    return call | {"g": None if call["g"] is None else call["g"].double().log()}


def sglang_call(lengths: Sequence[int] = LENGTHS, **more: Any) -> dict[str, Any]:
    """The call of SGLang's Triton kernels: the states are a pool, which the caller must pass."""
    call: dict[str, Any] = operands(1, sum(lengths), unit=False) | {"cu_seqlens": starts_of(lengths), "head_first": False}
    return call | {"initial_state_indices": SLOTS[: len(lengths)], "use_qk_l2norm_in_kernel": True} | more


# SGLang's method: the number of chunks after which each sequence's state is wanted; -1 for none.
TRACKED = torch.tensor([1, -1, 0, 0], dtype=torch.int32)


def extend_call(pool: Tensor, **more: Any) -> dict[str, Any]:
    """As SGLang's backend calls them."""
    call: dict[str, Any] = {n: t for n, t in sglang_call().items() if n in ("q", "k", "v", "g", "beta")}
    return call | {"ssm_states": pool, "cache_indices": SLOTS, "query_start_loc": starts_of(LENGTHS), "layer_id": 3} | more


def assert_refused(function: Callable[..., Any], call: dict[str, Any], kind: type[Exception], words: str) -> None:
    """The call raises this error with these words, and writes nothing."""
    written = [t for n in WRITTEN if (t := call.get(n)) is not None]
    before = [t.clone() for t in written]
    with pytest.raises(kind, match=words):
        function(**call)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(written, before, strict=True))
