"""Trials of decode layers: the operands that all of them share, for any recurrence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...calls.checks import STORED_DTYPES, TORCH_DTYPES
from ...calls.planning import Caller
from ...spec.kernel import DType, Index, Loads, Narrow
from ..trial import INTEGERS, TOLERANCE, Trial, randn, trial
from .problem import Layer


def lead_of(spec: Layer, batch: int) -> tuple[int, ...]:
    """The axes before the channels."""
    return (batch, spec.conv.tokens) if spec.several else (batch,)


class Maker:
    """Makes the tensors of a layer from one random generator: their contents depend on the order of the calls."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def randn(self, dtype: DType, *shape: int, odd: bool = False) -> Tensor:
        return randn(dtype, *shape, odd=odd, g=self.generator)

    def state(self, dtype: DType | Narrow, slots: int, shape: tuple[int, ...], odd: bool) -> Tensor:
        size = torch.Size(shape).numel()
        pool = torch.randn(slots, size + (1 if odd else 16), generator=self.generator).to(STORED_DTYPES[dtype])
        found: Tensor = pool[:, :size].unflatten(1, shape)
        return found

    def convolution(self, spec: Layer, slots: int, batch: int, channels: int) -> dict[str, Tensor | None]:
        """The operands of the short convolution."""
        element = spec.conv.taps is Loads.ELEMENT
        weight = self.randn(spec.conv.weight, channels, spec.conv.width, odd=True)
        x = TORCH_DTYPES[spec.conv_dtype]
        lies = spec.conv_constants()
        if lies["runs"]:
            window = torch.randn(slots, channels, spec.conv.len, generator=self.generator).to(x)
        else:
            gap = 4 if lies["by_channels"] else 1
            window = torch.randn(slots, spec.conv.len, channels + gap, generator=self.generator).to(x)[..., :channels].transpose(1, 2)
        return {
            "conv_state": window,
            spec.conv_input: self.randn(spec.conv_dtype, *lead_of(spec, batch), channels, odd=spec.conv.loads is Loads.ELEMENT),
            "conv_weight": weight if element else weight.contiguous(),
            "conv_bias": spec.conv.bias and self.randn(spec.conv.bias, channels).contiguous(),
        }

    def windows(self, spec: Layer, rows: int, channels: int) -> Tensor | None:
        """A buffer for the windows after each token, with one spare column."""
        lies = spec.conv_constants()
        if not lies["conv_saves"]:
            return None
        length, gap = spec.conv.width - 1, 0 if lies["saved_runs"] else 1
        row = channels * (length + gap) + -channels * (length + gap) % 8
        wide = torch.full((rows, spec.conv.tokens + 1, row), 7.0, dtype=TORCH_DTYPES[spec.conv_dtype])
        found: Tensor = wide[..., : channels * (length + gap)].unflatten(-1, (channels, length + gap))[..., :length]
        return found

    def states(self, dtype: DType | Narrow, rows: int, tokens: int, shape: tuple[int, ...], odd: bool) -> Tensor:
        """A buffer for the states after each token, with one spare column."""
        size = torch.Size(shape).numel()
        wide = torch.full((rows, tokens + 1, size + (1 if odd else 16)), 7.0, dtype=STORED_DTYPES[dtype])
        found: Tensor = wide[..., :size].unflatten(-1, shape)
        return found

    def rows(self, index: Index, rows: int, batch: int) -> Tensor | None:
        """The buffers' row for each sequence; the third sequence has no valid row."""
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
        self, spec: Any, slots: int, batch: int, kept: DType | Narrow | None, shape: tuple[int, ...], channels: int
    ) -> tuple[int, dict[str, Any]]:
        """(size of the pool, further operands of calls with several tokens), with states of this type and shape after each token."""
        found: dict[str, Any] = {}
        if spec.conv_rolls:
            slots, found = self.accepted(spec.index, spec.accepted, spec.conv.tokens, batch)
        rows = 2 * batch
        return slots, found | {
            "intermediate_states": kept and self.states(kept, rows, spec.conv.tokens, shape, spec.state_loads is Loads.ELEMENT),
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


def layer_trial(caller: Caller, spec: Any, named: dict[str, Tensor], options: Any, without_noise: Any = None) -> Trial:
    """The trial of a layer's call, as `trial` makes it.

    Intermediate results are rounded. The norm's input is rounded once more than in the reference. The convolution's result is rounded as in
    the reference, unless float64 falls on the other side of a tie.
    """
    convolved = TOLERANCE[spec.conv_dtype]
    return trial(
        caller,
        named,
        options,
        without_noise=without_noise,
        kept=("state", "conv_state", "arrivals") if not spec.conv_moves else (),
        exact=("conv_state", "arrivals", "intermediate_conv_window"),
        slack={
            **dict.fromkeys(("state", "intermediate_states"), convolved),
            "out": convolved + (TOLERANCE[spec.out] if spec.norm.weight else 0.0),
        },
        tokens=spec.conv.tokens or 1,
    )
