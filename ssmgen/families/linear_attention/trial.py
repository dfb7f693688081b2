"""Trials of linear attention: operands from a spec alone, and the call that takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from ...calls.checks import TORCH_DTYPES
from ...engine.recurrences.attention.operands import KEY_VECTORS, OF_KEY_HEADS
from ...engine.recurrences.attention.problem import FROZEN_TOKENS, Beta, Gate, Tokens
from ...engine.recurrences.attention.switches import Form
from ...engine.trial import INTEGERS, Trial, boundaries, cycled, fill, ordered, scales, slot_indices, slots_of, states, trial
from ...spec.kernel import DType, Index, Loads, PoolMode, Ring, Update
from .planning import CALLERS, Options
from .spec import LinearAttentionSpec

LOWER_BOUND = -5.0  # for bounded log decays


def tokens_of(spec: LinearAttentionSpec, batch: int) -> list[int]:
    """Tokens of each sequence: more than are staged at a time, if a call has several tokens."""
    if spec.tokens is Tokens.ONE:
        return [1] * batch
    most = FROZEN_TOKENS - 1 if spec.frozen else spec.chunk + 1
    return [most] * batch if spec.tokens is Tokens.MANY else cycled((3, 2, most, 0), batch)


def operands(spec: LinearAttentionSpec, batch: int, seed: int) -> dict[str, Tensor]:
    """Random operands of a linear-attention function, or of a commit, by name and in the kernel's order."""
    g = torch.Generator().manual_seed(seed)
    counts = tokens_of(spec, batch)
    slots, made = _slots(spec, counts, g)
    layers = (2,) if spec.layers else ()
    lead = {Tokens.ONE: (batch,), Tokens.MANY: (batch, max(counts)), Tokens.RAGGED: (sum(counts),)}[spec.tokens]
    lead = (*layers, slots, max(counts)) if spec.commit else lead
    state = _states(spec, *layers, slots, apart=spec.heads_apart)
    made["state"] = fill(state, g)
    if spec.scaled:
        made["state_scale"] = scales(state, g)
    made["out"] = _placed(spec, "out", torch.full((*lead, spec.nheads, spec.dim_v), float("nan")))
    if spec.philox_rounds:
        made["rand_seed"] = torch.randint(-(2**62), 2**62, (slots,), generator=g)
    if spec.intermediates:  # one column too many; or one too few, if calls may keep fewer states than they have tokens
        by_index, ragged = spec.kept_index is not Index.NONE, spec.tokens is Tokens.RAGGED
        rows, columns = 2 * batch if by_index else batch, max(counts) + (-1 if ragged else 1)
        made["intermediate_states"] = _states(spec, rows, columns).fill_(7.0)
    if spec.kept_index is not Index.NONE:
        made["intermediate_state_indices"] = slot_indices(spec.kept_index, batch, 2 * batch, g)
    if spec.parents is not Index.NONE:
        made["parents"] = torch.randint(-1, max(counts), (batch, max(counts)), generator=g).to(INTEGERS[spec.parents])
    if spec.replays:
        made |= _replayed(spec, batch, slots, g)
    for name in [] if spec.replays else spec.ringed():
        tokens = max(counts) + (-1 if spec.tokens is Tokens.RAGGED else 1)  # one too few, if a ring may be shorter than a sequence
        kept = torch.full(_shape(spec, name, (slots, tokens), layers), 7.0)
        made[f"ring_{name}"] = _placed(spec, name, kept, dense=True, dtype=spec.ring_type(name))
    for name in [n for n in spec.operands() if n not in made]:
        made[name] = _placed(spec, name, _values(spec, name, _shape(spec, name, lead, layers), g))
    return ordered(spec, made)


def _replayed(spec: LinearAttentionSpec, batch: int, slots: int, g: Generator) -> dict[str, Tensor]:
    """Rings of more tokens than are loaded at a time. The third sequence fills its ring, and the fourth one's number is out of range."""
    length = 7
    made = {"ring_position": torch.tensor(cycled((5, 0, length - 1, length, 1), batch)).to(INTEGERS[spec.position])}
    if spec.flush is not Index.NONE:
        made["ring_flush"] = torch.tensor(cycled((0, 0, 0, 0, 1), batch)).to(INTEGERS[spec.flush])
    for name in spec.ringed():
        shape = _shape(spec, name, (slots, length), ())
        values = -torch.rand(shape, generator=g) if name in ("g", "gk") else _values(spec, name, shape, g)
        made[f"ring_{name}"] = _placed(spec, name, values, dense=True, dtype=spec.ring_type(name))
    return made


def _slots(spec: LinearAttentionSpec, counts: list[int], g: Generator) -> tuple[int, dict[str, Tensor]]:
    """(size of the pool, integer operands)"""
    most, made = max(counts), {}
    if spec.cu_seqlens is not Index.NONE:
        made["cu_seqlens"] = boundaries(counts, spec.cu_seqlens)
    accepted, split = Index.NONE if spec.commit else spec.accepted, spec.pool is PoolMode.SPLIT
    in_place, ragged = spec.update is Update.FINAL and not split, spec.tokens is Tokens.RAGGED
    targets = most - ragged if spec.update is Update.EACH else 0
    slots, indices = slots_of(spec.index, accepted, counts, g, in_place=in_place, split=split, targets=targets)
    if spec.commit:
        indices["num_accepted_tokens"] = torch.tensor(cycled((most, most + 1, 2, 0), len(counts))).to(INTEGERS[spec.accepted])
    return slots, made | indices


def _states(spec: LinearAttentionSpec, *lead: int, apart: bool = False) -> Tensor:
    inner = (spec.dim_k, spec.dim_v) if spec.interleaved else (spec.dim_v, spec.dim_k)
    gap = 1 if spec.state_loads is Loads.ELEMENT else 16
    return states(spec.state, (*lead, spec.nheads), inner, gap) if apart else states(spec.state, lead, (spec.nheads, *inner), gap)


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
        length: float = 0.8 * spec.dim_k**-0.5
        return length * normal
    if name == "gv" or (name in ("g", "gk") and spec.gate is Gate.LOG):
        return -uniform
    factor = name in ("alpha", "erase", "w") or (name == "beta" and spec.beta_form is Beta.PLAIN)
    return uniform if factor or (name in ("g", "gk") and spec.gate is Gate.SLOPE) else normal


def _placed(spec: LinearAttentionSpec, name: str, values: Tensor, dense: bool = False, dtype: DType | None = None) -> Tensor:
    """A slice of a wider tensor of NaN. Its rows are aligned, or begin at odd offsets with stride 2 if the spec allows that."""
    vector = name in KEY_VECTORS or (name == "dt_bias" and spec.gk is not None)
    odd = vector and spec.operand_loads is Loads.ELEMENT
    start, step = (7 if odd else 8), (2 if odd and not dense else 1)
    wide = torch.full((*values.shape[:-1], start + step * values.shape[-1]), float("nan"), dtype=TORCH_DTYPES[dtype or getattr(spec, name)])
    return wide[..., start::step].copy_(values)


def linear_attention(spec: LinearAttentionSpec, batch: int, seed: int) -> Trial:
    form = Form(spec.delta.value, spec.gate.value, spec.beta_form.value, spec.l2norm)
    update = spec.update is not Update.NONE
    said: dict[str, Any] = {"update_state": update, "commit": spec.commit, "zero_padding": spec.zero_padding}
    said |= {"philox_rounds": spec.philox_rounds, "ring_ready": spec.ring is Ring.READY}
    options = Options(form, spec.dim_k**-0.5, LOWER_BOUND, spec.layout.value, **said)
    return trial(
        CALLERS["gated_delta_rule_commit" if spec.commit else "gated_delta_rule"],  # checks and launches are the same for all recurrences
        operands(spec, batch, seed),
        options,
        kept=() if update else ("state", "state_scale"),
        scales={"state": "state_scale"} if spec.scaled else {},
        tokens=max(tokens_of(spec, batch)),
    )


TRIALS = {LinearAttentionSpec: linear_attention}
