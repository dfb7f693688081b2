"""Operands that the trials of all chunked prompt families make: tokens of sequences of several lengths, and their states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from ...calls.checks import TORCH_DTYPES
from ...spec.kernel import Index, Loads
from ..trial import INTEGERS, boundaries, cycled, slot_indices


def tokens_of(spec: Any, batch: int, longest: int, chunk: int) -> tuple[tuple[int, int], list[int]]:
    """(sizes of the axes of tokens, tokens of each sequence). Packed sequences have different lengths, some less than a chunk or empty."""
    counts = cycled((longest, 3, 0, chunk, 1), batch)
    return (1, sum(counts)) if spec.ragged else (batch, longest), counts


def rows(spec: Any, lead: tuple[int, ...], heads: int, channels: int, g: Generator, divisor: float = 1.0) -> Tensor:
    """A slice of a wider tensor. Its tokens begin at multiples of the bytes that kernels copy at once."""
    gap = spec.copy // TORCH_DTYPES[spec.x].itemsize
    wide = torch.randn(*lead, heads, channels + gap, generator=g) / divisor
    return wide.to(TORCH_DTYPES[spec.x])[..., gap:]


def sequences(
    spec: Any, batch: int, lead: tuple[int, int], counts: list[int], state: tuple[int, ...], chunk: int, g: Generator
) -> dict[str, Tensor]:  # fmt: skip
    """The starts of sequences, their slots, and their states. state: the shape of one state."""
    made = {"has_initial_state": torch.arange(batch) % 3 == 0}
    if spec.ragged:
        made["cu_seqlens"] = boundaries(counts, spec.cu_seqlens)
    slots = batch if spec.index is Index.NONE else 3 * batch
    counted = {"initial_states": batch, "final_states": batch, "state": slots}
    if spec.marked:  # before, at and after the end of each row's first chunk, and out of range
        total = lead[0] * lead[1]
        near = [s + t for s in range(0, total, lead[1]) for t in (1, chunk - 1, chunk, chunk + 1) if s + t <= total]
        made["checkpoint_positions"] = torch.tensor(sorted({0, *near, total, total + 1})).to(INTEGERS[spec.checkpoints])
        counted["checkpoints"] = made["checkpoint_positions"].numel()
    made |= {name: _states(spec, count, state, g) for name, count in counted.items()}
    if spec.index is not Index.NONE:
        made["state_indices"] = slot_indices(spec.index, batch, slots, g)
    return made


def _states(spec: Any, count: int, shape: tuple[int, ...], g: Generator) -> Tensor:
    """Pairs of numbers are aligned to pairs, or begin at odd places."""
    odd, inner = spec.state_loads is Loads.ELEMENT, torch.Size(shape).numel()
    wide = torch.randn(count, inner + (1 if odd else 2), generator=g).to(TORCH_DTYPES[spec.state])
    return wide[:, 1 if odd else 0 :][:, :inner].view(count, *shape)
