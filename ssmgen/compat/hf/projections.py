"""The projections of transformers' mixers, for a decode step and for a prompt, and the lower bounds of their gates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import scaled


def in_proj(mixer: Any, hidden_states: Tensor) -> Tensor:
    projected: Tensor = mixer.in_proj(hidden_states)
    return projected


def falcon_h1(mixer: Any, hidden_states: Tensor) -> Tensor:
    """The product and all of its multipliers, in one launch where the model is accelerated."""
    vector, first = mixer.mup_vector, mixer.ssm_in_multiplier
    dtype = torch.promote_types(hidden_states.dtype, vector.dtype)
    found = None
    if isinstance(first, (int, float)) and not is_compiling() and not vector.is_inference():
        values = (id(vector), vector._version, first)
        found = scaled.product(mixer.in_proj, hidden_states, values, lambda: vector.flatten().float() * first, dtype)
    if found is not None:
        return found
    projected: Tensor = mixer.in_proj(hidden_states * mixer.ssm_in_multiplier) * mixer.mup_vector
    return projected


def qkv(mixer: Any, hidden_states: Tensor) -> Tensor:
    """[batch, T, channels of q, k and v]"""
    return joined([projection(hidden_states) for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj)])


def joined(parts: list[Tensor]) -> Tensor:
    """torch.cat(parts, dim=-1), without a copy for one row of results that are neighbours in memory."""
    first, width = parts[0], sum(part.shape[-1] for part in parts)
    if is_compiling() or first.numel() != first.shape[-1]:
        return torch.cat(parts, dim=-1)
    at, memory = first.storage_offset(), first.untyped_storage()._cdata
    for part in parts:
        if part.storage_offset() != at or part.untyped_storage()._cdata != memory or part.dtype != first.dtype or part.requires_grad:
            return torch.cat(parts, dim=-1)
        at += part.numel()
    return first.as_strided((*first.shape[:-1], width), (*[width] * (first.dim() - 1), 1))


def qwen3_next(mixer: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
    """(mixed q, k and v; z; b; a), each [batch, T, ·]"""
    query, key, value, z, b, a = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(hidden_states), mixer.in_proj_ba(hidden_states))
    mixed = torch.cat([t.flatten(2) for t in (query, key, value)], dim=-1)
    return mixed, z.flatten(2), b, a


def qwen3_5(mixer: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
    """(mixed q, k and v; z; b; a), each [batch, T, ·]"""
    projections = (mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a)
    return tuple(projection(hidden_states) for projection in projections)


def kimi(mixer: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """(the raw gate, z), both of low rank."""
    gate = mixer.forget_gate
    return gate.f_b_proj(gate.f_a_proj(hidden_states)), mixer.g_b_proj(mixer.g_a_proj(hidden_states))


def bailing(mixer: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """(the raw gate, z)"""
    return mixer.forget_gate.f_proj(hidden_states), mixer.g_proj(hidden_states)


def no_bound(gate: Any) -> float | None:
    return None


def glm_bound(gate: Any) -> float | None:
    bound: float | None = gate.safe_gate_lower_bound
    return bound


def bailing_bound(gate: Any) -> float | None:
    bound: float | None = gate.lower_bound if gate.safe_gate else None
    return bound
