"""Shared by the engines' gated delta rules: operands of several layouts, on a pool of states [slots, HV, V, K]."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor

from ...errors import ArgumentError, UnsupportedError
from ...families.linear_attention.call import gated_delta_rule, kda
from . import noise


@overload
def first(t: Tensor, n: int) -> Tensor: ...
@overload
def first(t: Tensor | None, n: int) -> Tensor | None: ...
def first(t: Tensor | None, n: int) -> Tensor | None:
    """The first n rows: engines pass buffers that are made for more sequences than there are."""
    return t if t is None or t.shape[0] == n else t[:n]


@overload
def first_column(t: Tensor, n: int) -> Tensor: ...
@overload
def first_column(t: Tensor | None, n: int) -> Tensor | None: ...
def first_column(t: Tensor | None, n: int) -> Tensor | None:
    """The first n rows of an index, and only its first column if it has columns; with zero columns it stays, for the checks to name."""
    return first(t, n) if t is None or t.dim() == 1 or not t.shape[1] else t[:n, 0]


def of_one_type(read: Tensor | None, write: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Two indices as a kernel takes them, which has one type: the wider, so that no slot wraps around into the pool."""
    if read is None or write is None or read.dtype == write.dtype or {read.dtype, write.dtype} != {torch.int32, torch.int64}:
        return read, write
    return read.long(), write.long()


def new_output(q: Tensor, v: Tensor) -> Tensor:
    """Dense, of q's dtype and v's shape."""
    return torch.empty_like(v, dtype=q.dtype, memory_format=torch.contiguous_format)


def shaped(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor in this shape; where it has it, itself: a view costs the host a microsecond. Itself as well where it has another number of
    elements, for the checks to name."""
    return t if t.shape == shape or t.numel() != math.prod(shape) else t.reshape(shape)


# Arguments of `takes`, for the functions of both engines.
PACKED = {"ssm_state_indices": "[B]"}
POOL = {"ssm_state_indices": "[N] or [N, T]", "num_accepted_tokens": "[N]", "cu_seqlens": "[N + 1]"}
LOGITS = {"q": "[B, T, HK, K]", "k": "[B, T, HK, K]", "v": "[B, T, HV, V]"}


def unpacked(name: str, mixed_qkv: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k [B, HK, K], v [B, HV, V]): views of rows of mixed_qkv [B, 2 HK K + HV V], for a pool [slots, HV, V, K]."""
    if mixed_qkv.dim() != 2 or state.dim() != 4:
        shapes = f"{list(mixed_qkv.shape)} and {list(state.shape)}"
        raise ArgumentError(name, [f"mixed_qkv and the pool of states are {shapes}; expected [B, channels] and [slots, HV, V, K]"])
    _, HV, V, K = state.shape
    keys, rest = divmod(mixed_qkv.shape[1] - HV * V, 2 * K) if K else (0, 0)
    if keys <= 0 or rest:
        problem = f"mixed_qkv has {mixed_qkv.shape[1]} channels; expected 2 HK K + HV V with K = {K}, HV = {HV}, V = {V}"
        raise ArgumentError(name, [problem])
    B = mixed_qkv.shape[0]
    q, k, v = mixed_qkv.split((keys * K, keys * K, HV * V), 1)
    return q.view(B, keys, K), k.view(B, keys, K), v.view(B, HV, V)


def packed_decode(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float, initial_state: Tensor, out: Tensor,
    ssm_state_indices: Tensor, use_qk_l2norm_in_kernel: bool, pad_slot_id: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One token per sequence, with its q, k and v consecutive in a row of mixed_qkv [B, 2 HK K + HV V]."""
    name = "fused_recurrent_gated_delta_rule_packed_decode"
    q, k, v = unpacked(name, mixed_qkv, initial_state)
    gated_delta_rule(
        initial_state, q, k, v, a, b, A_log, dt_bias, use_qk_l2norm=use_qk_l2norm_in_kernel, beta_sigmoid=True, scale=scale,
        state_indices=first(ssm_state_indices, q.shape[0]), pad_slot_id=pad_slot_id, out=of_one_token(name, out),
        **noise.of(initial_state),
    )  # fmt: skip
    return out, initial_state


def of_one_token(name: str, out: Tensor) -> Tensor:
    """out [B, 1, HV, V] as [B, HV, V]."""
    if out.dim() != 4 or out.shape[1] != 1:
        raise ArgumentError(name, [f"out is {list(out.shape)}; expected [B, 1, HV, V]"])
    return out[:, 0]


def from_logits(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, is_kda: bool,
    lower_bound: float | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """The gated delta rule of a raw gate a and a logit b of beta, or KDA, whose gate is per key channel -> a new tensor [B, T, HV, V].

    state: [slots, HV, V, K], or [slots, page] of pages that begin with it, as vLLM's warm-up has it
    q, k: [B, T, HK, K]   v: [B, T, HV, V]; with cu_seqlens, the tokens of all rows are concatenated
    a: the elements of [B, T, HV], for KDA [B, T, HV, K], in any split of axes; b: the elements of [B, T, HV]
    """
    shape, K = v.shape, k.shape[-1]
    if options.get("cu_seqlens") is not None and shape[0] != 1:
        q, k, v = (t.flatten(0, 1)[None] for t in (q, k, v))
    lead = tuple(v.shape[:3])
    if state.dim() == 2 and state.shape[1] >= (size := math.prod((*v.shape[2:], K))):
        state = state[:, :size].unflatten(1, (*v.shape[2:], K))
    function: Callable[..., Tensor] = partial(kda, lower_bound=lower_bound) if is_kda else gated_delta_rule
    gate = shaped(a, (*lead, K) if is_kda else lead)
    out = function(
        state, q, k, v, gate, shaped(b, lead), shaped(A_log, (A_log.numel(),)), shaped(dt_bias, (dt_bias.numel(),)), beta_sigmoid=True,
        out=new_output(q, v), **noise_of(state, options), **options,
    )  # fmt: skip
    return shaped(out, shape)


def noise_of(state: Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that round the states of a call with these options, if noise is asked for."""
    written = options.get("update_state", True) or options.get("intermediate_states") is not None
    return noise.of(state, written=written)


def on_a_pool(
    name: str, v: Tensor, state: Tensor | None, in_place: bool, cu_seqlens: Tensor | None, indices: Tensor | None, accepted: Tensor | None
) -> dict[str, Any]:
    """Where vLLM's states are read and written, as ssmgen's gated delta rules take it. Slots of 0 and below are padding."""
    needed = {"initial_state": state, "ssm_state_indices": indices}
    reasons = [f"{what} is None; expected a pool of states" for what, t in needed.items() if t is None]
    if not in_place:
        reasons.append("inplace_final_state is False; expected True: ssmgen updates the pool in place")
    if indices is not None and indices.dim() == 1 and accepted is not None:
        reasons.append("num_accepted_tokens is given with ssm_state_indices of one axis; expected [batch, tokens], to pick a column")
    if reasons or indices is None:
        raise UnsupportedError(name, reasons)
    sequences = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    read, write = first(indices, sequences), None
    if read.dim() == 2:
        write = read[:, : v.shape[1]] if cu_seqlens is None else read
        read = read if accepted is not None else first_column(read, sequences)
    return {
        "state_indices": read, "dst_state_indices": write, "num_accepted_tokens": first(accepted, sequences), "cu_seqlens": cu_seqlens,
        "pad_slot_id": 0,
    }  # fmt: skip
