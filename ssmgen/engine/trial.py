"""Trials: the result of a variant on random operands, and its reference. Families build their trials from the functions here.

Operands are made from a spec alone, by name: strided, and misaligned if the spec is made for that. If there are slots, the second sequence
of a batch is padding. The third sequence's new state is not stored, if states are written to separate slots.
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
# Norm error left by one rounding to the dtype and by f32 arithmetic. For types with scales: of rows of normal values.
TOLERANCE: dict[DType | Narrow, float] = {DType.F32: 2e-6, DType.F16: 6e-4, DType.BF16: 5e-3}
TOLERANCE |= {Narrow.I16: 6e-5, Narrow.I8: 1.5e-2, Narrow.E4M3: 4e-2}

Views = dict[str, Tensor]


class Trial(NamedTuple):
    """One call, and its expected results."""

    named: dict[str, Tensor]  # operands in the form that its kernels take
    views: Views  # the same operands in the form that the reference takes
    launch_of: Callable[[KernelSpec], tuple[Mapping[str, Value], int]]  # of one of its kernels: (arguments except pointers, blocks)
    reference: Callable[[Views], None]  # updates the written operands, here in float64
    written: tuple[str, ...]
    between: tuple[str, ...] = ()  # written operands that pass data from one kernel to the next
    exact: tuple[str, ...] = ()  # written operands that are copies of inputs
    slack: Mapping[str, float] = {}  # written operand -> tolerance, if intermediate rounding adds to the error of one rounding
    tokens: int = 1  # the largest number of tokens through which an error may grow
    scales: Mapping[str, str] = {}  # {state: its scales}, for written states with scales: they are compared after scaling


def trial(
    caller: Caller, named: dict[str, Tensor], options: Any, *, without_noise: Any = None, kept: Collection[str] = (), **more: Any
) -> Trial:
    """The trial of a call with these operands and options, against its reference in float64.

    without_noise: options of the reference, if they differ; kept: outputs of the family that this call does not write; more: fields of
    Trial.
    Raises ArgumentError if the call is not valid.
    """
    family = caller.family
    views = caller.checked(named, options, None)

    def launch_of(part: KernelSpec) -> tuple[Mapping[str, Value], int]:
        return family.values_of(part, views, options), family.grid_of(part, views)

    def reference(updated: Views) -> None:
        caller.reference(updated, options if without_noise is None else without_noise, torch.float64)

    written = tuple(name for name in family.written if name in named and name not in kept)
    return Trial(named, views, launch_of, reference, **{"written": written, **more})


# Parts of operands. The number of draws from the generator depends only on the requested sizes, so a seed fixes the whole trial.


def ordered(spec: Any, made: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The operands that the kernel takes, in the kernel's order. Raises TrialError for an operand that was not made."""
    operands = spec.operands()
    if missing := [name for name in operands if name not in made]:
        raise TrialError(f"the trial of {spec.family} makes no {', '.join(missing)}; expected all operands of {spec}. Make it in trial.py.")
    return {name: t for name in operands if (t := made[name]) is not None}


def cycled(values: Sequence[int], count: int) -> list[int]:
    """The first `count` values, repeated from the start after the last."""
    return list(islice(cycle(values), count))


def boundaries(counts: Sequence[int], index: Index) -> Tensor:
    """The starts of consecutive sequences with these numbers of tokens, and the end of the last one: [sequences + 1]."""
    return torch.tensor([0, *counts]).cumsum(0).to(INTEGERS[index])


def randn(dtype: DType, *shape: int, odd: bool = False, g: Generator) -> Tensor:
    """Normal values. A gap of 8 elements follows the last axis; with odd, a gap of one, so that nothing is aligned."""
    wide = torch.randn(*shape[:-1], shape[-1] + (1 if odd else 8), generator=g).to(TORCH_DTYPES[dtype])
    return wide[..., : shape[-1]]


def wide(values: Tensor, dtype: DType, odd: bool, step: int = 1) -> Tensor:
    """A slice along the last axis of a wider tensor of NaN. Rows are aligned, or start at odd places; elements are `step` apart."""
    start = 7 if odd else 8
    wider = torch.full((*values.shape[:-1], -(-(start + step * values.shape[-1]) // 8) * 8 + odd), float("nan"), dtype=TORCH_DTYPES[dtype])
    return wider[..., start : start + step * values.shape[-1] : step].copy_(values)


def runs(values: Tensor, dtype: DType) -> Tensor:
    """The last two axes are dense; gaps along the other axes keep everything aligned."""
    apart, strides = values[(0,) * (values.dim() - 2)].numel(), [1, values.shape[-1]]
    for size in reversed(values.shape[:-2]):
        apart = -(-(apart + 1) // 8) * 8
        strides.append(apart)
        apart *= size
    return torch.empty_strided(values.shape, strides[::-1], dtype=TORCH_DTYPES[dtype]).copy_(values)


def states(dtype: DType | Narrow, lead: Sequence[int], inner: Sequence[int], gap: int) -> Tensor:
    """Uninitialised: dense states [inner], with `gap` elements between consecutive states. `lead` is one axis or two."""
    dense = torch.empty(*inner, device="meta")
    apart = dense.numel() + gap
    strides = [apart * lead[-1], apart][-len(lead) :]
    return torch.empty_strided((*lead, *inner), (*strides, *dense.stride()), dtype=STORED_DTYPES[dtype])


def fill(state: Tensor, g: Generator) -> Tensor:
    """Normal values; for types with scales, times a third of the largest number."""
    values = torch.randn(state.shape, generator=g)
    if state.dtype in NARROW:
        most = NARROW[state.dtype].largest
        values = (values * (most / 3)).clamp(-most, most)
    return state.copy_(values)


def scales(state: Tensor, g: Generator) -> Tensor:
    """A scale for each row, so that the scaled numbers are near one; scales are not contiguous in memory."""
    wide = torch.rand(*state.shape[:-1], 2, generator=g) + 0.5
    return (wide * (3 / NARROW[state.dtype].largest))[..., 0]


def slot_indices(index: Index, batch: int, slots: int, g: Generator) -> Tensor:
    """[batch] distinct slots; the second sequence has no valid slot."""
    order = torch.randperm(slots, generator=g)[:batch]
    order[1:2] = -1
    return order.to(INTEGERS[index])


def slots_of(
    index: Index, accepted: Index, counts: Sequence[int], g: Generator, *, in_place: bool, split: bool, targets: int = 0
) -> tuple[int, dict[str, Tensor]]:
    """(size of the pool, slots of sequences with `counts` tokens; if `accepted`, also the column with each one's start).

    in_place: states return to their source slots; split: to separate slots, one for each of `targets` tokens or for the last token.
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
