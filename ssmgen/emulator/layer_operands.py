"""Random operands of decode layers, made from a spec alone: strided, and misaligned where the spec is made for that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..calls.checks import TORCH_DTYPES
from ..engine.short_conv import ShortConv, ShortConvTokens
from ..families.causal_conv1d_update.spec import Saved, StateLayout
from ..families.delta_layer.spec import DeltaLayerSpec
from ..families.delta_layer.tokens_spec import DeltaLayerTokensSpec
from ..families.linear_attention.problem import Layout
from ..families.mamba2_layer.spec import Mamba2LayerSpec
from ..families.mamba2_layer.tokens_spec import Mamba2LayerTokensSpec
from ..spec import DType, Index, Loads

INTEGERS = {Index.I32: torch.int32, Index.I64: torch.int64}


def lead_of(spec: ShortConv, batch: int) -> tuple[int, ...]:
    """Axes ahead of the channels."""
    return (batch, spec.conv_tokens) if isinstance(spec, ShortConvTokens) else (batch,)


class Maker:
    """Of tensors of a layer."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def randn(self, dtype: DType, *shape: int, odd: bool = False) -> Tensor:
        """With a gap behind the last axis, or an odd one."""
        wide = torch.randn(*shape[:-1], shape[-1] + (1 if odd else 8), generator=self.generator).to(TORCH_DTYPES[dtype])
        return wide[..., : shape[-1]]

    def state(self, dtype: DType, slots: int, shape: tuple[int, ...], odd: bool) -> Tensor:
        size = torch.Size(shape).numel()
        pool = torch.randn(slots, size + (1 if odd else 16), generator=self.generator).to(TORCH_DTYPES[dtype])
        return pool[:, :size].unflatten(1, shape)

    def convolution(self, spec: ShortConv, slots: int, batch: int, channels: int) -> dict[str, Tensor | None]:
        """What the short convolution reads and moves on."""
        element = spec.conv_taps is Loads.ELEMENT
        weight = self.randn(spec.conv_weight, channels, spec.conv_width, odd=True)
        x = TORCH_DTYPES[spec.conv_dtype]
        if spec.conv_layout is StateLayout.RUNS:
            window = torch.randn(slots, channels, spec.conv_len, generator=self.generator).to(x)
        else:
            gap = 1 if spec.conv_layout is StateLayout.ANY else 4
            window = torch.randn(slots, spec.conv_len, channels + gap, generator=self.generator).to(x)[..., :channels].transpose(1, 2)
        return {
            "conv_state": window,
            spec.conv_input: self.randn(spec.conv_dtype, *lead_of(spec, batch), channels, odd=spec.conv_loads is Loads.ELEMENT),
            "conv_weight": weight if element else weight.contiguous(),
            "conv_bias": spec.conv_bias and self.randn(spec.conv_bias, channels).contiguous(),
        }

    def windows(self, spec: ShortConvTokens, rows: int, channels: int) -> Tensor | None:
        """After each token: one column too many."""
        if spec.conv_windows is Saved.NO:
            return None
        length, gap = spec.conv_width - 1, 0 if spec.conv_windows is Saved.RUNS else 1
        row = channels * (length + gap) + -channels * (length + gap) % 8
        wide = torch.full((rows, spec.conv_tokens + 1, row), 7.0, dtype=TORCH_DTYPES[spec.conv_dtype])
        return wide[..., : channels * (length + gap)].unflatten(-1, (channels, length + gap))[..., :length]

    def states(self, dtype: DType, rows: int, tokens: int, shape: tuple[int, ...], odd: bool) -> Tensor:
        """Likewise."""
        size = torch.Size(shape).numel()
        wide = torch.full((rows, tokens + 1, size + (1 if odd else 16)), 7.0, dtype=TORCH_DTYPES[dtype])
        return wide[..., :size].unflatten(-1, shape)

    def rows(self, index: Index, rows: int, batch: int) -> Tensor | None:
        """Of those buffers; the third sequence's is none of them."""
        if index is Index.NONE:
            return None
        chosen = torch.randperm(rows, generator=self.generator)[:batch].to(INTEGERS[index])
        chosen[2:3] = rows
        return chosen

    def accepted(self, index: Index, count: Index, tokens: int, batch: int) -> tuple[int, dict[str, Tensor]]:
        """(size of the pool, slots of each token and counts): the second sequence's count is out of range."""
        slots = 2 * batch * tokens
        source, target = torch.randperm(slots, generator=self.generator).to(INTEGERS[index]).view(2, batch, tokens).unbind()
        target[2:3, 0] = -1
        counts = 1 + torch.arange(batch) % tokens
        counts[1:2] = tokens + 1
        return slots, {"state_indices": source, "dst_state_indices": target, "num_accepted_tokens": counts.to(INTEGERS[count])}

    def several(
        self, spec: Any, slots: int, batch: int, kept: DType | None, shape: tuple[int, ...], channels: int
    ) -> tuple[int, dict[str, Any]]:
        """(size of the pool, what calls of several tokens have beside), with states of this type and shape after each token."""
        found: dict[str, Any] = {}
        if spec.conv_rolls:
            slots, found = self.accepted(spec.index, spec.accepted, spec.conv_tokens, batch)
        rows = 2 * batch
        return slots, found | {
            "intermediate_states": kept and self.states(kept, rows, spec.conv_tokens, shape, spec.state_loads is Loads.ELEMENT),
            "intermediate_conv_window": self.windows(spec, rows, channels),
            "intermediate_state_indices": self.rows(spec.rows_index, rows, batch),
        }

    def slots(self, index: Index, slots: int, batch: int) -> dict[str, Tensor]:
        """The second sequence is padding."""
        if index is Index.NONE:
            return {}
        chosen = torch.randperm(slots, generator=self.generator)[:batch].to(INTEGERS[index])
        chosen[1:2] = -1
        return {"state_indices": chosen}


def mamba2_layer(spec: Mamba2LayerSpec | Mamba2LayerTokensSpec, batch: int, seed: int) -> dict[str, Tensor]:
    """Of mamba2_layer, by name."""
    make = Maker(seed)
    H, P, N, G = spec.nheads, spec.headdim, spec.d_state, spec.ngroups
    slots, inner, lead = batch if spec.index is Index.NONE else 3 * batch, spec.nheads * spec.headdim, lead_of(spec, batch)
    channels, odd = inner + 2 * G * N, spec.norm_loads is Loads.ELEMENT
    gate = spec.norm_gate if spec.norm else spec.z
    several: dict[str, Any] = {}
    if isinstance(spec, Mamba2LayerTokensSpec):
        slots, several = make.several(spec, slots, batch, spec.intermediate_states, (H, P, N), channels)
    made: dict[str, Any] = {
        "state": make.state(spec.state, slots, (H, P, N), spec.state_loads is Loads.ELEMENT),
        **make.convolution(spec, slots, batch, channels),
        "dt": make.randn(spec.dt, *lead, H),
        "A": -(torch.rand(H, generator=make.generator) + 0.1).to(TORCH_DTYPES[spec.A]),
        "D": spec.D and make.randn(spec.D, H),
        "z": gate and make.randn(gate, *lead, inner, odd=odd),
        "dt_bias": spec.dt_bias and make.randn(spec.dt_bias, H),
        "norm_weight": spec.norm and make.randn(spec.norm, inner),
        "out": torch.full((*lead, inner + (1 if odd else 8)), float("nan"), dtype=TORCH_DTYPES[spec.out])[..., :inner],
        "arrivals": torch.zeros(slots, G, dtype=torch.int32),
        **(several if "state_indices" in several else several | make.slots(spec.index, slots, batch)),
    }
    if spec.philox_rounds:
        made["rand_seed"] = torch.randint(-(2**62), 2**62, (slots,), generator=make.generator)
    return {name: t for name, t in made.items() if t is not None}


def delta_layer(spec: DeltaLayerSpec | DeltaLayerTokensSpec, batch: int, seed: int) -> dict[str, Tensor]:
    """Of gdn_layer or kda_layer, by name: z and out with heads, g and dt_bias with heads and channels."""
    make = Maker(seed)
    HV, HK, V, K = spec.nheads, spec.key_heads, spec.dim_v, spec.dim_k
    slots, lead, channels = batch if spec.index is Index.NONE else 3 * batch, lead_of(spec, batch), 2 * HK * K + HV * V
    odd = spec.norm_loads is Loads.ELEMENT
    held = (HV, V, K) if spec.layout is Layout.VK else (HV, K, V)
    apart = spec.operand_loads is Loads.ELEMENT
    if spec.gk:
        gates = {"g": make.randn(spec.gk, *lead, HV, K, odd=apart), "beta": make.randn(spec.beta, *lead, HV)}
    else:
        gates = {"a": make.randn(spec.g, *lead, HV), "b": make.randn(spec.beta, *lead, HV)}
    several: dict[str, Any] = {}
    if isinstance(spec, DeltaLayerTokensSpec):
        slots, several = make.several(spec, slots, batch, spec.state if spec.intermediates else None, held, channels)
    made: dict[str, Any] = {
        "state": make.state(spec.state, slots, held, spec.state_loads is Loads.ELEMENT),
        **make.convolution(spec, slots, batch, channels),
        **gates,
        "A_log": spec.A_log and make.randn(spec.A_log, HV),
        "dt_bias": spec.dt_bias and make.randn(spec.dt_bias, HV, *([K] if spec.gk else []), odd=apart),
        "z": make.randn(spec.norm_gate, *lead, HV, V, odd=odd) if spec.norm else None,
        "norm_weight": spec.norm and make.randn(spec.norm, V),
        "out": make.randn(spec.out, *lead, HV, V, odd=odd).fill_(float("nan")),
        "arrivals": torch.zeros(slots, HK, dtype=torch.int32),
        **(several if "state_indices" in several else several | make.slots(spec.index, slots, batch)),
    }
    return {name: t for name, t in made.items() if t is not None}
