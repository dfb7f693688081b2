"""Random operands made from a spec alone, by name and in the kernel's order: strided, and misaligned where the spec is made for that.

The second sequence of a batch is padding, if there are slots. The third one's new state goes nowhere, if states have slots of their own.
"""

from __future__ import annotations

from itertools import cycle, islice

import torch
from torch import Generator, Tensor

from ..calls.checks import TORCH_DTYPES
from ..families.causal_conv1d.spec import ConvLayout, ConvSpec
from ..families.causal_conv1d_update.spec import MAX_TOKENS, Advance, Saved, StateLayout, UpdateSpec
from ..families.causal_conv1d_update.spec import Tokens as Counted
from ..families.combine_splits.spec import CombineSpec
from ..families.gated_rms_norm.spec import NormSpec
from ..families.linear_attention.problem import FROZEN_TOKENS, KEY_VECTORS, OF_KEY_HEADS, Beta, Gate, Tokens, Update
from ..families.linear_attention.spec import LinearAttentionSpec
from ..families.selective_state_update.spec import SsuSpec
from ..families.selective_state_update.tokens_spec import SsuTokensSpec
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
    if spec.philox_rounds:
        made["rand_seed"] = torch.randint(-(2**62), 2**62, (slots,), generator=g)
    return {name: t for name, t in made.items() if t is not None}


def ssu_tokens(spec: SsuTokensSpec, batch: int, seed: int) -> dict[str, Tensor]:
    """Of selective_state_update of several tokens: more than are staged at a time."""
    g = torch.Generator().manual_seed(seed)
    H, P, N, G, most = spec.nheads, spec.headdim, spec.d_state, spec.ngroups, spec.chunk + 1
    counts = list(islice(cycle((3, 2, most, 0)), batch)) if spec.ragged else [most] * batch
    lead = (sum(counts),) if spec.ragged else (batch, most)
    slots, made = _slots_of(spec.index, spec.accepted, spec.update, spec.pool, spec.ragged, counts, g)
    if spec.ragged:
        made["cu_seqlens"] = torch.tensor([0, *counts]).cumsum(0).to(INTEGERS[spec.cu_seqlens])

    def states(dtype: DType, *lead: int) -> Tensor:
        apart = H * P * N + (1 if spec.state_loads is Loads.ELEMENT else 16)
        strides = [apart * lead[-1], apart][-len(lead) :]
        return torch.empty_strided((*lead, H, P, N), (*strides, P * N, N, 1), dtype=TORCH_DTYPES[dtype])

    shapes = {**dict.fromkeys(("x", "z", "out"), (H, P)), **dict.fromkeys(("B", "C"), (G, N)), "dt": (H,)}
    for name in ("x", "z", "out", "B", "C", "dt"):
        if name in spec.operands():
            values = torch.randn(*lead, *shapes[name], generator=g)
            odd = name in ("B", "C") and spec.operand_loads is Loads.ELEMENT
            made[name] = _wide(values, getattr(spec, name), odd, 2 if odd else 1)
    made["out"].fill_(float("nan"))
    made |= {n: torch.randn(H, generator=g).to(TORCH_DTYPES[getattr(spec, n)]) for n in ("D", "dt_bias") if n in spec.operands()}
    made["A"] = -(torch.rand(H, generator=g) + 0.1).to(TORCH_DTYPES[spec.A])
    made["state"] = state = states(spec.state, slots)
    state.copy_(torch.randn(state.shape, generator=g))
    if spec.intermediate_states:  # one column too many; or one too few, where calls may keep fewer than they have tokens
        made["intermediate_states"] = states(spec.intermediate_states, 2 * batch, most + (-1 if spec.ragged else 1)).fill_(7.0)
    if spec.intermediate_indices is not Index.NONE:
        made["intermediate_state_indices"] = _slot_indices(spec.intermediate_indices, batch, 2 * batch, g)
    if spec.parents is not Index.NONE:
        made["parents"] = torch.randint(-1, most, (batch, most), generator=g).to(INTEGERS[spec.parents])
    if spec.philox_rounds:
        made["rand_seed"] = torch.randint(-(2**62), 2**62, (slots,), generator=g)
    return {name: made[name] for name in spec.operands()}


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
    most, made = max(counts), {}
    if spec.cu_seqlens is not Index.NONE:
        made["cu_seqlens"] = torch.tensor([0, *counts]).cumsum(0).to(INTEGERS[spec.cu_seqlens])
    picks = Index.NONE if spec.commit else spec.accepted
    slots, indices = _slots_of(spec.index, picks, spec.update, spec.pool, spec.tokens is Tokens.RAGGED, counts, g)
    if spec.commit:
        indices["num_accepted_tokens"] = torch.tensor(list(islice(cycle((most, most + 1, 2, 0)), len(counts)))).to(INTEGERS[spec.accepted])
    return slots, made | indices


def _slots_of(
    index: Index, accepted: Index, update: Update, pool: PoolMode, ragged: bool, counts: list[int], g: Generator
) -> tuple[int, dict[str, Tensor]]:
    """(size of the pool, the slots of sequences of so many tokens, and the columns that count)"""
    batch, most, made = len(counts), max(counts), {}
    if index is Index.NONE:
        return batch, made
    picks = accepted is not Index.NONE
    in_place = update is Update.FINAL and pool is PoolMode.SINGLE
    columns = 3 if picks and not in_place else 1
    targets = most - ragged if update is Update.EACH else 1
    slots = batch * (columns + targets)
    source, target = torch.randperm(slots, generator=g).to(INTEGERS[index]).split([batch * columns, batch * targets])
    source, target = source.view(batch, columns), target.view(batch, targets)
    target[2:3] = -1
    if picks:
        column = 1 + torch.arange(batch) % columns
        column[1:2] = columns + 1
        made |= {"state_indices": source, "num_accepted_tokens": column.to(INTEGERS[accepted])}
    else:
        source[1:2] = -1
        made["state_indices"] = source[:, 0]
    if pool is PoolMode.SPLIT:
        made["dst_state_indices"] = target if update is Update.EACH else target[:, 0]
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


def _wide(values: Tensor, dtype: DType, odd: bool, step: int = 1) -> Tensor:
    """A slice of a wider tensor of NaN along the last axis: its rows are aligned, or begin at odd places, `step` elements apart."""
    start = 7 if odd else 8
    wide = torch.full((*values.shape[:-1], -(-(start + step * values.shape[-1]) // 8) * 8 + odd), float("nan"), dtype=TORCH_DTYPES[dtype])
    return wide[..., start : start + step * values.shape[-1] : step].copy_(values)


def _runs(values: Tensor, dtype: DType) -> Tensor:
    """The last two axes dense, and gaps between what the others count, which leave everything aligned."""
    apart, strides = values[(0,) * (values.dim() - 2)].numel(), [1, values.shape[-1]]
    for size in reversed(values.shape[:-2]):
        apart = -(-(apart + 1) // 8) * 8
        strides.append(apart)
        apart *= size
    return torch.empty_strided(values.shape, strides[::-1], dtype=TORCH_DTYPES[dtype]).copy_(values)


def _taps(spec: ConvSpec | UpdateSpec, dim: int, g: Generator) -> dict[str, Tensor]:
    weight, bias = torch.randn(dim, spec.width, generator=g), torch.randn(dim, generator=g)
    if spec.taps is Loads.VECTOR:
        made = {"weight": weight.to(TORCH_DTYPES[spec.weight]), "bias": spec.bias and bias.to(TORCH_DTYPES[spec.bias])}
    else:
        made = {"weight": _wide(weight, spec.weight, True), "bias": spec.bias and _wide(bias, spec.bias, True, 2)}
    return {name: t for name, t in made.items() if t is not None}


def _slot_indices(index: Index, batch: int, slots: int, g: Generator) -> Tensor:
    order = torch.randperm(slots, generator=g)[:batch]
    order[1:2] = -1
    return order.to(INTEGERS[index])


def causal_conv1d(spec: ConvSpec, batch: int, seed: int) -> dict[str, Tensor]:
    """Of causal_conv1d: rows of more than a warp's piece; packed sequences of that, of fewer tokens than taps, and of none."""
    g = torch.Generator().manual_seed(seed)
    first, vector = spec.layout is ConvLayout.FIRST, spec.loads is Loads.VECTOR
    counts = list(islice(cycle((spec.piece + 5, 2, 0, 3, spec.piece)), batch))
    rows, length = (1, sum(counts)) if spec.ragged else (batch, 2 * spec.piece + 5)
    dim = 3 if first else 33 * spec.vec + (0 if vector else 1)
    slots = batch if spec.index is Index.NONE else 3 * batch

    def along(values: Tensor) -> Tensor:
        """Like x, [rows, dim, length]."""
        if first:
            return _wide(values, spec.x, spec.shifted or not vector, 1 if vector else 2)
        return _wide(values.transpose(1, 2), spec.x, not vector, 1 if vector or spec.unit else 2).transpose(1, 2)

    def states(count: int) -> Tensor:
        return _wide(torch.randn(count, dim, spec.width - 1, generator=g), spec.x, True)

    made = _taps(spec, dim, g)
    made["x"] = along(torch.randn(rows, dim, length, generator=g))
    made["out"] = along(torch.full((rows, dim, length), float("nan")))
    if spec.seq_idx:  # the last sequence ends with padding
        ids = torch.arange(length) // (spec.piece // 2 + 1)
        ids[-2:] = -1
        made["seq_idx"] = ids.int().repeat(rows, 1).repeat_interleave(2, 1)[:, ::2]
    if spec.ragged:
        made["query_start_loc"] = torch.tensor([0, *counts]).cumsum(0).to(INTEGERS[spec.query_start_loc])
    if spec.initial:
        made["initial_states"] = states(batch)
    if spec.final:
        made["final_states"] = states(batch)
    if spec.pool:
        made["conv_states"] = states(slots)
    if spec.index is not Index.NONE:
        made["conv_state_indices"] = _slot_indices(spec.index, batch, slots, g)
    if spec.started:
        made["has_initial_state"] = torch.arange(batch) % 2 == 0
    return {name: made[name] for name in spec.operands()}


def causal_conv1d_update(spec: UpdateSpec, batch: int, seed: int) -> dict[str, Tensor]:
    """Of causal_conv1d_update: more channels than a block takes, windows longer than they need to be where they may be."""
    g = torch.Generator().manual_seed(seed)
    vector, ragged = spec.loads is Loads.VECTOR, spec.count is Counted.RAGGED
    most = {Counted.FIXED: spec.tokens, Counted.COUNTED: MAX_TOKENS + 1, Counted.RAGGED: spec.tokens + 2}[spec.count]
    counts = list(islice(cycle((most, 2, 0, 1)), batch))
    dim = spec.vec * (spec.threads + 3) + (0 if spec.constants()["whole"] else 1)
    slots = batch if spec.index is Index.NONE else 3 * batch
    extra = {Advance.SHIFT: 2, Advance.ROLL: most, Advance.RING: 2}[spec.advance]
    entries = spec.state_len if spec.layout is StateLayout.RUNS else spec.width - 1 + extra

    def tokens(values: Tensor) -> Tensor:
        """Like x, of [rows, tokens, dim] or, packed, [tokens, dim]."""
        t = _wide(values, spec.x, not vector, 1 if vector else 2)
        return t if ragged else t.transpose(1, 2)

    lead = (sum(counts),) if ragged else (batch, most)
    made = _taps(spec, dim, g)
    made["x"] = tokens(torch.randn(*lead, dim, generator=g))
    made["out"] = tokens(torch.full((*lead, dim), float("nan")))
    state = torch.randn(slots, dim, entries, generator=g)
    made["conv_state"] = {
        StateLayout.RUNS: lambda: _runs(state, spec.x),
        StateLayout.CHANNELS: lambda: _wide(state.transpose(1, 2), spec.x, False).transpose(1, 2),
        StateLayout.ANY: lambda: _wide(state, spec.x, True),
    }[spec.layout]()
    if spec.advance is Advance.RING:
        made["cache_seqlens"] = (torch.arange(batch) * 5).to(INTEGERS[spec.position])
    if spec.advance is Advance.ROLL:  # the third is none that can be
        accepted = 1 + torch.arange(batch - 1, -1, -1) % most
        accepted[2:3] = entries - spec.width + 3
        made["num_accepted_tokens"] = accepted.to(INTEGERS[spec.position])
    if spec.index is not Index.NONE:
        made["conv_state_indices"] = _slot_indices(spec.index, batch, slots, g)
    if ragged:
        made["query_start_loc"] = torch.tensor([0, *counts]).cumsum(0).to(INTEGERS[spec.query_start_loc])
    if spec.saved is not Saved.NO:  # one token too many; or one too few, where sequences are packed
        windows = torch.full((batch, most + (-1 if ragged else 1), dim, spec.width - 1), 7.0)
        made["intermediate_conv_window"] = _runs(windows, spec.x) if spec.saved is Saved.RUNS else _wide(windows, spec.x, True)
    if spec.saved_index is not Index.NONE:
        made["intermediate_state_indices"] = _slot_indices(spec.saved_index, batch, batch, g)
    return {name: made[name] for name in spec.operands()}


def combine_splits(spec: CombineSpec, batch: int, seed: int) -> dict[str, Tensor]:
    """Of combine_splits: as many splits as the spec is for, some of them empty and NaN; entry after entry has one more, if they say so."""
    g = torch.Generator().manual_seed(seed)
    splits = spec.max_splits or 165
    rows = ((batch if spec.indexed else batch + 1), 2, 3)[: spec.axes]
    shape = (*([] if spec.pair else [splits]), *(rows[1:] if spec.indexed else rows))
    odd = spec.loads is Loads.ELEMENT

    def apart(values: Tensor, dtype: DType, columns: bool = True) -> Tensor:
        """With gaps along every axis, that keep columns aligned."""
        gaps = [1 if i < values.dim() - columns else 8 + odd for i in range(values.dim())]
        wide = torch.full([n + gap for n, gap in zip(values.shape, gaps, strict=True)], float("nan"), dtype=TORCH_DTYPES[dtype])
        wide = wide[..., odd:] if columns else wide
        return wide[tuple(slice(n) for n in values.shape)].copy_(values)

    def partial() -> tuple[Tensor, Tensor]:
        o, lse = torch.randn(*shape, spec.d_v, generator=g), 3 * torch.randn(shape, generator=g)
        empty = torch.rand(shape, generator=g) < 0.2
        return apart(o.masked_fill(empty[..., None], float("nan")), spec.o), apart(lse.masked_fill(empty, float("-inf")), DType.F32, False)

    made = dict(zip(("o", "lse"), partial(), strict=True))
    if spec.pair:
        made |= zip(("o_other", "lse_other"), partial(), strict=True)
    if spec.indexed:
        counts = torch.arange(batch) % splits
        counts[-1] = max(0, splits - int(counts[:-1].sum()))
        made["num_splits"] = torch.tensor([0, *counts.cumsum(0).clamp(max=splits).tolist()], dtype=INTEGERS[spec.num_splits])
    if spec.sink:
        made["attn_sink"] = torch.randn(rows[-1], generator=g).to(TORCH_DTYPES[spec.sink])
    if spec.mask:
        made["mask"] = torch.arange(rows[-1]) % 3 != 1
    made["out"] = apart(torch.full((*rows, spec.d_v), 7.0), spec.out)
    if spec.lse_out:
        made["lse_out"] = made["lse"] if spec.in_place else apart(torch.full(rows, 7.0), DType.F32, False)
    return {name: made[name] for name in spec.operands()}


def gated_rms_norm(spec: NormSpec, batch: int, seed: int) -> dict[str, Tensor]:
    """Of gated_rms_norm: groups with gaps between them, three in a row if they may be several; each has a weight of its own then."""
    g = torch.Generator().manual_seed(seed)
    groups, odd = 3 if spec.grouped else 1, spec.loads is Loads.ELEMENT
    shape = {"weight": (groups, spec.size)}
    made = {}
    for role in spec.roles():
        values = torch.randn(shape.get(role, (batch, groups, spec.size)), generator=g)
        made[role] = _wide(values, getattr(spec, role), odd)
    made["out"].fill_(float("nan"))
    return made
