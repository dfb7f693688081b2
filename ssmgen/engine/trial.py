"""What a variant does on random operands, beside what it should: the trials of a family, and what their operands are made of.

Operands are made from a spec alone, by name: strided, and misaligned where the spec is made for that. The second sequence of a batch is
padding, if there are slots. The third one's new state goes nowhere, if states have slots of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from ..calls.checks import NARROW, STORED_DTYPES, TORCH_DTYPES
from ..calls.planning import Caller
from ..errors import TrialError
from ..spec.arguments import Value
from ..spec.kernel import DType, Index, KernelSpec, Narrow

INTEGERS = {Index.I32: torch.int32, Index.I64: torch.int64}
# Norm error that one rounding to the dtype, and f32 arithmetic, leave; with scales, of rows of normal values.
TOLERANCE: dict[DType | Narrow, float] = {DType.F32: 2e-6, DType.F16: 6e-4, DType.BF16: 5e-3}
TOLERANCE |= {Narrow.I16: 6e-5, Narrow.I8: 1.5e-2, Narrow.E4M3: 4e-2}

Views = dict[str, Tensor]


class Trial(NamedTuple):
    """One call, and what it should do."""

    named: dict[str, Tensor]  # operands as its kernels take them
    views: Views  # the same as the reference takes them
    launch_of: Callable[[KernelSpec], tuple[Mapping[str, Value], int]]  # of one of its kernels: (arguments but pointers, blocks)
    reference: Callable[[Views], None]  # updates what is written, here of float64
    written: tuple[str, ...]
    between: tuple[str, ...] = ()  # of what is written: what one kernel leaves for the next
    exact: tuple[str, ...] = ()  # of what is written: copies of inputs
    slack: Mapping[str, float] = {}  # of what is written: more than one rounding's norm error, for what is rounded on the way there
    tokens: int = 1  # through which an error may grow, at most
    scales: Mapping[str, str] = {}  # {state: its scales}, of those that are written in fewer bits: they are compared as numbers


def trial(
    caller: Caller, named: dict[str, Tensor], options: Any, *, without_noise: Any = None, kept: Collection[str] = (), **more: Any
) -> Trial:
    """The trial of a call with these operands and options, against its reference in float64.

    without_noise: options of the reference, where they differ; kept: what this call does not write, of what such calls write; more: of
    Trial.
    Raises ArgumentError where it is no call.
    """
    family = caller.family
    views = caller.checked(named, options, None)

    def launch_of(part: KernelSpec) -> tuple[Mapping[str, Value], int]:
        return family.values_of(part, views, options), family.grid_of(part, views)

    def reference(updated: Views) -> None:
        caller.reference(updated, options if without_noise is None else without_noise, torch.float64)

    written = tuple(name for name in family.written if name in named and name not in kept)
    return Trial(named, views, launch_of, reference, **{"written": written, **more})


# Parts of operands. Each draws from the generator as often as it says how much it makes, so that a seed says all of a trial.


def ordered(spec: Any, made: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The operands that the kernel takes, in the kernel's order. Raises TrialError for an operand that was not made."""
    operands = spec.operands()
    if missing := [name for name in operands if name not in made]:
        raise TrialError(f"the trial of {spec.family} makes no {', '.join(missing)}, which is an operand of {spec}. Make it in trial.py.")
    return {name: t for name in operands if (t := made[name]) is not None}


def cycled(values: Sequence[int], count: int) -> list[int]:
    """So many of the values, which begin again after the last."""
    return list(islice(cycle(values), count))


def boundaries(counts: Sequence[int], index: Index) -> Tensor:
    """Where sequences of so many tokens begin, one behind the other, and where the last one ends: [sequences + 1]."""
    return torch.tensor([0, *counts]).cumsum(0).to(INTEGERS[index])


def randn(dtype: DType, *shape: int, odd: bool = False, g: Generator) -> Tensor:
    """Normal values, with a gap of 8 elements behind the last axis, or of one: an odd stride, which leaves nothing aligned."""
    wide = torch.randn(*shape[:-1], shape[-1] + (1 if odd else 8), generator=g).to(TORCH_DTYPES[dtype])
    return wide[..., : shape[-1]]


def wide(values: Tensor, dtype: DType, odd: bool, step: int = 1) -> Tensor:
    """A slice of a wider tensor of NaN along the last axis: its rows are aligned, or begin at odd places, `step` elements apart."""
    start = 7 if odd else 8
    wider = torch.full((*values.shape[:-1], -(-(start + step * values.shape[-1]) // 8) * 8 + odd), float("nan"), dtype=TORCH_DTYPES[dtype])
    return wider[..., start : start + step * values.shape[-1] : step].copy_(values)


def runs(values: Tensor, dtype: DType) -> Tensor:
    """The last two axes dense, and gaps between what the others count, which leave everything aligned."""
    apart, strides = values[(0,) * (values.dim() - 2)].numel(), [1, values.shape[-1]]
    for size in reversed(values.shape[:-2]):
        apart = -(-(apart + 1) // 8) * 8
        strides.append(apart)
        apart *= size
    return torch.empty_strided(values.shape, strides[::-1], dtype=TORCH_DTYPES[dtype]).copy_(values)


def states(dtype: DType | Narrow, lead: Sequence[int], inner: Sequence[int], gap: int) -> Tensor:
    """Not filled yet: dense states [inner], `gap` elements between one and the next of those that `lead`, one axis or two, counts."""
    dense = torch.empty(*inner, device="meta")
    apart = dense.numel() + gap
    strides = [apart * lead[-1], apart][-len(lead) :]
    return torch.empty_strided((*lead, *inner), (*strides, *dense.stride()), dtype=STORED_DTYPES[dtype])


def fill(state: Tensor, g: Generator) -> Tensor:
    """Normal values; in fewer bits about a third of the largest."""
    values = torch.randn(state.shape, generator=g)
    if state.dtype in NARROW:
        most = NARROW[state.dtype].largest
        values = (values * (most / 3)).clamp(-most, most)
    return state.copy_(values)


def scales(state: Tensor, g: Generator) -> Tensor:
    """A scale for each row, such that it is of the size of one; rows are not neighbours in memory."""
    wide = torch.rand(*state.shape[:-1], 2, generator=g) + 0.5
    return (wide * (3 / NARROW[state.dtype].largest))[..., 0]


def slot_indices(index: Index, batch: int, slots: int, g: Generator) -> Tensor:
    """[batch] of the slots, none twice; the second sequence's is none of them."""
    order = torch.randperm(slots, generator=g)[:batch]
    order[1:2] = -1
    return order.to(INTEGERS[index])


def slots_of(
    index: Index, accepted: Index, counts: Sequence[int], g: Generator, *, in_place: bool, split: bool, targets: int = 0
) -> tuple[int, dict[str, Tensor]]:
    """(size of the pool, slots of sequences of so many tokens, and with `accepted` the columns of theirs that count).

    in_place: states go back to where they came from; split: to slots of their own, of `targets` tokens each or of the last one.
    """
    batch = len(counts)
    made: dict[str, Tensor] = {}
    if index is Index.NONE:
        return batch, made
    columns, rows = 3 if accepted is not Index.NONE and not in_place else 1, targets or 1
    slots = batch * (columns + rows)
    source, target = torch.randperm(slots, generator=g).to(INTEGERS[index]).split([batch * columns, batch * rows])
    source, target = source.view(batch, columns), target.view(batch, rows)
    target[2:3] = -1
    if accepted is not Index.NONE:
        column = 1 + torch.arange(batch) % columns
        column[1:2] = columns + 1
        made |= {"state_indices": source, "num_accepted_tokens": column.to(INTEGERS[accepted])}
    else:
        source[1:2] = -1
        made["state_indices"] = source[:, 0]
    if split:
        made["dst_state_indices"] = target if targets else target[:, 0]
    return slots, made
