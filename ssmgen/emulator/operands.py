"""Random operands made from a spec alone, by name and in the kernel's order: strided, and misaligned where the spec is made for that.

The second sequence of a batch is padding, if there are slots. The third one's new state goes nowhere, if states have slots of their own.
"""

from __future__ import annotations

from itertools import cycle, islice

import torch
from torch import Generator, Tensor

from ..kernels.linear_attention import LinearAttentionSpec
from ..kernels.linear_attention_problem import FROZEN_TOKENS, KEY_VECTORS, OF_KEY_HEADS, Beta, Gate, Tokens, Update
from ..kernels.selective_state_update import SsuSpec
from ..ops.checks import TORCH_DTYPES
from ..spec import DType, Index, Loads, PoolMode

INTEGERS = {Index.I32: torch.int32, Index.I64: torch.int64}


def ssu(spec: SsuSpec, batch: int, seed: int) -> dict[str, Tensor]:
    """Of selective_state_update."""
    g = torch.Generator().manual_seed(seed)
    B, H, P, N, G = batch, spec.nheads, spec.headdim, spec.d_state, spec.ngroups
    slots = batch if spec.index is Index.NONE else 3 * batch

    def randn(dtype: DType, *shape: int, odd: bool = False) -> Tensor:
        values = torch.randn(*shape, generator=g).to(TORCH_DTYPES[dtype])
        if not odd:
            return values
        wide = torch.empty(*shape[:-1], shape[-1] + 1, dtype=values.dtype)  # rows that start at odd places
        wide[..., 1:] = values
        return wide[..., 1:]

    odd = spec.operand_loads is Loads.ELEMENT
    shape, gap = (slots, H, P, N), 1 if spec.state_loads is Loads.ELEMENT else 0
    state = torch.empty_strided(shape, (H * P * N + gap, P * N, N, 1), dtype=TORCH_DTYPES[spec.state])
    state.copy_(randn(spec.state, *shape))

    decay = -(torch.rand(H, 1 if spec.tied else P, 1 if spec.tied else N, generator=g) + 0.1).to(TORCH_DTYPES[spec.A])
    if odd and not spec.tied:
        decay = torch.nn.functional.pad(decay, (1, 0))[..., 1:]
    step = randn(spec.dt, B, H, 1 if spec.tied else P)
    made = {
        "state": state,
        "x": randn(spec.x, B, H, P),
        "dt": step.expand(B, H, P) if spec.tied else step,
        "A": decay.expand(H, P, N) if spec.tied else decay,
        "B": randn(spec.B, B, G, N, odd=odd),
        "C": randn(spec.C, B, G, N, odd=odd),
        "D": spec.D and randn(spec.D, H, P),
        "z": spec.z and randn(spec.z, B, H, P),
        "dt_bias": spec.dt_bias and randn(spec.dt_bias, H, 1 if spec.tied else P).expand(H, P),
        "out": torch.full((B, H, P), float("nan"), dtype=TORCH_DTYPES[spec.out]),
    }
    if spec.index is not Index.NONE:
        order = torch.randperm(slots, generator=g).to(INTEGERS[spec.index])
        source = order[:B].clone()
        if B > 1:
            source[1] = -1
        made["state_indices"] = source
        if spec.pool is PoolMode.SPLIT:
            made["dst_state_indices"] = torch.where(source < 0, source, order[B : 2 * B])
    return {name: t for name, t in made.items() if t is not None}


def tokens_of(spec: LinearAttentionSpec, batch: int) -> list[int]:
    """How many each sequence has: more than are staged at a time, where a call has several."""
    if spec.tokens is Tokens.ONE:
        return [1] * batch
    most = FROZEN_TOKENS - 1 if spec.frozen else spec.chunk + 1
    return [most] * batch if spec.tokens is Tokens.MANY else list(islice(cycle((3, 2, most, 0)), batch))


def linear_attention(spec: LinearAttentionSpec, batch: int, seed: int) -> dict[str, Tensor]:
    """Of a linear-attention function, or of a commit."""
    g = torch.Generator().manual_seed(seed)
    counts = tokens_of(spec, batch)
    slots, made = _slots(spec, counts, g)
    layers = (2,) if spec.layers else ()
    lead = {Tokens.ONE: (batch,), Tokens.MANY: (batch, max(counts)), Tokens.RAGGED: (sum(counts),)}[spec.tokens]
    lead = (*layers, slots, max(counts)) if spec.commit else lead
    state = _states(spec, *layers, slots)
    made["state"] = state.copy_(torch.randn(state.shape, generator=g))
    made["out"] = _placed(spec, "out", torch.full((*lead, spec.nheads, spec.dim_v), float("nan")))
    if spec.intermediates:  # one column too many; or one too few, where calls may keep fewer than they have tokens
        made["intermediate_states"] = _states(spec, batch, max(counts) + (-1 if spec.tokens is Tokens.RAGGED else 1)).fill_(7.0)
    for name in spec.ringed():
        made[f"ring_{name}"] = _placed(spec, name, torch.full(_shape(spec, name, (slots, max(counts) + 1), layers), 7.0), dense=True)
    for name in [n for n in spec.operands() if n not in made]:
        made[name] = _placed(spec, name, _values(spec, name, _shape(spec, name, lead, layers), g))
    return {name: made[name] for name in spec.operands()}


def _slots(spec: LinearAttentionSpec, counts: list[int], g: Generator) -> tuple[int, dict[str, Tensor]]:
    """(size of the pool, what is int)"""
    batch, most, made = len(counts), max(counts), {}
    if spec.cu_seqlens is not Index.NONE:
        made["cu_seqlens"] = torch.tensor([0, *counts]).cumsum(0).to(INTEGERS[spec.cu_seqlens])
    if spec.commit:
        made["num_accepted_tokens"] = torch.tensor(list(islice(cycle((most, most + 1, 2, 0)), batch))).to(INTEGERS[spec.accepted])
    if spec.index is Index.NONE:
        return batch, made
    picks = spec.accepted is not Index.NONE and not spec.commit
    in_place = spec.update is Update.FINAL and spec.pool is PoolMode.SINGLE
    columns = 3 if picks and not in_place else 1
    targets = most - (spec.tokens is Tokens.RAGGED) if spec.update is Update.EACH else 1
    slots = batch * (columns + targets)
    source, target = torch.randperm(slots, generator=g).to(INTEGERS[spec.index]).split([batch * columns, batch * targets])
    source, target = source.view(batch, columns), target.view(batch, targets)
    target[2:3] = -1
    if picks:
        accepted = 1 + torch.arange(batch) % columns
        accepted[1:2] = columns + 1
        made |= {"state_indices": source, "num_accepted_tokens": accepted.to(INTEGERS[spec.accepted])}
    else:
        source[1:2] = -1
        made["state_indices"] = source[:, 0]
    if spec.pool is PoolMode.SPLIT:
        made["dst_state_indices"] = target if spec.update is Update.EACH else target[:, 0]
    return slots, made


def _states(spec: LinearAttentionSpec, *lead: int) -> Tensor:
    """Dense states with a gap between them."""
    inner = (spec.dim_k, spec.dim_v) if spec.interleaved else (spec.dim_v, spec.dim_k)
    dense = spec.dim_k * spec.dim_v
    apart = spec.nheads * dense + (1 if spec.state_loads is Loads.ELEMENT else 16)
    strides = [apart * lead[-1], apart][-len(lead) :]
    return torch.empty_strided((*lead, spec.nheads, *inner), (*strides, dense, inner[1], 1), dtype=TORCH_DTYPES[spec.state])


def _shape(spec: LinearAttentionSpec, name: str, lead: tuple[int, ...], layers: tuple[int, ...]) -> tuple[int, ...]:
    if name in KEY_VECTORS:
        return (*lead, spec.key_heads if name in OF_KEY_HEADS else spec.nheads, spec.dim_k)
    if name in spec.row_scalars():
        return (*lead, spec.nheads, spec.dim_v)
    if name == "dt_bias" and spec.gk is not None:
        return (*layers, spec.nheads, spec.dim_k)
    return (*layers, spec.nheads) if name in spec.weights() or spec.gate is Gate.SLOPE else (*lead, spec.nheads)


def _values(spec: LinearAttentionSpec, name: str, shape: tuple[int, ...], g: Generator) -> Tensor:
    """Keys are shorter than 1, so that no delta rule diverges; log decays are negative."""
    normal, uniform = torch.randn(shape, generator=g), torch.rand(shape, generator=g)
    if name in ("k", "read", "write"):
        return 0.8 * spec.dim_k**-0.5 * normal
    if name == "gv" or (name in ("g", "gk") and spec.gate is Gate.LOG):
        return -uniform
    factor = name in ("alpha", "erase", "w") or (name == "beta" and spec.beta_form is Beta.PLAIN)
    return uniform if factor or (name in ("g", "gk") and spec.gate is Gate.SLOPE) else normal


def _placed(spec: LinearAttentionSpec, name: str, values: Tensor, dense: bool = False) -> Tensor:
    """A slice of a wider tensor of NaN: its rows are aligned, or begin at odd places and, if they may, are every second element."""
    vector = name in KEY_VECTORS or (name == "dt_bias" and spec.gk is not None)
    odd = vector and spec.operand_loads is Loads.ELEMENT
    start, step = (7 if odd else 8), (2 if odd and not dense else 1)
    wide = torch.full((*values.shape[:-1], start + step * values.shape[-1]), float("nan"), dtype=TORCH_DTYPES[getattr(spec, name)])
    return wide[..., start::step].copy_(values)
