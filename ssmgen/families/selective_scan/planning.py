"""A call of selective_scan: its operands checked, turned into a problem, and planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calls import checks, prompts
from ...calls.checks import DTYPES
from ...calls.dispatch import callers
from ...calls.naming import WRITTEN_WORDS
from ...calls.planning import Family
from ...spec.arguments import Value
from .operands import KEYS, OPERANDS, ROWS
from .problem import OPERATOR, Order, SelectiveProblem, asked
from .reference import selective_scan as reference
from .spec import SelectiveSpec

_LAST = {Order.FIRST: 1, Order.LAST: -1}  # which axis of a view is contiguous


class Options(NamedTuple):
    """The arguments of a call that are not tensors."""

    delta_softplus: bool = False
    channels_first: bool = False
    pad_slot_id: int = -1
    segments: int | None = None


def views_of(named: Mapping[str, Any], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands as [batch, T, dim] and [batch, T, G, N]; for packed sequences, the batch is 1.

    Adds errors to `problems`; the result is usable only if there are none.
    """
    if not checks.check_tensors(named, problems):
        return {}
    checks.check_types(OPERANDS, named, "u", problems, "the scan of a prompt")
    u, ragged, first = named["u"], "cu_seqlens" in named, options.channels_first
    words = "dim, T" if first else "T, dim"
    if u.dim() not in ((2, 3) if ragged else (3,)) or (ragged and u.dim() == 3 and u.shape[0] != 1):
        packed = words.replace("T", "tokens")
        wanted = f"[{packed}] or [1, {packed}], as cu_seqlens is given" if ragged else f"[batch, {words}]"
        problems.append(f"u is {list(u.shape)}; expected {wanted}")
        return {}
    if named["A"].dim() != 2:
        problems.append(f"A is {list(named['A'].shape)}; expected [dim, N]")
        return {}
    views = dict(named)
    for name in ROWS:
        if name in views and views[name].dim() == u.dim():
            views[name] = _with_batch(views[name].transpose(-1, -2) if first else views[name], 3)
    for name in KEYS:
        if views[name].dim() == u.dim():
            views[name] = views[name].unsqueeze(-3 if first else -2)
        if views[name].dim() == u.dim() + 1:
            views[name] = _with_batch(views[name].movedim(-1, -3) if first else views[name], 4)
    if not _shapes_fit(named, views, problems, words):
        return {}
    prompts.check_strides(OPERANDS, views, "u", problems)
    return views


def _with_batch(t: Tensor, axes: int) -> Tensor:
    return t if t.dim() == axes else t.unsqueeze(0)


def _shapes_fit(named: Mapping[str, Tensor], views: Mapping[str, Tensor], problems: list[str], words: str) -> bool:
    (batch, length, dim), (_, N) = views["u"].shape, views["A"].shape
    sequences = prompts.sequences_of(views, "u")
    if sequences < 0:
        problems.append("cu_seqlens is empty; expected [sequences + 1]")
        return False
    others = {name: t for name, t in views.items() if name not in (*ROWS, *KEYS)}
    sizes = {"dim": dim, "n": N, **prompts.sizes_of(views, sequences)}
    fits = [checks.check_shapes(OPERANDS, others, sizes, problems)]
    for name in ROWS[1:]:
        if name in views and views[name].shape != views["u"].shape:
            problems.append(f"{name} is {list(named[name].shape)}; expected {list(named['u'].shape)}, the shape of u [..., {words}]")
            fits.append(False)
    G = views["B"].shape[2] if views["B"].dim() == 4 else 1
    for name in KEYS:
        if tuple(views[name].shape) != (batch, length, G, N):
            axes = "G, N, T] or […, N, T" if words == "dim, T" else "T, G, N] or […, T, N"
            problems.append(f"{name} is {list(named[name].shape)}; expected […, {axes}], as u is {list(named['u'].shape)} and N is {N}")
            fits.append(False)
    prompts.states_go_together(views, sequences, problems)
    if G < 1 or dim % G:
        problems.append(f"u has {dim} channels; expected a multiple of the {G} groups of B")
        fits.append(False)
    return all(fits)


def _order(views: Mapping[str, Tensor], names: Sequence[str]) -> Order:
    """The axis along which more of these operands are contiguous; the first one in a tie."""
    there = [views[n] for n in names if n in views]
    first = sum(t.stride(1) == 1 and t.stride(-1) != 1 for t in there)
    last = sum(t.stride(-1) == 1 and t.stride(1) != 1 for t in there)
    return Order.FIRST if first > last else Order.LAST


def _together(views: Mapping[str, Tensor], pointers: Mapping[str, int], names: Sequence[str], order: Order) -> int:
    """Bytes per copy that all of these operands of one dtype allow, from the start of any group; 0 for single elements."""
    copied = [n for n in names if n in views]
    one = views[copied[0]].element_size()
    sizes = [size for size in (16, 8, 4) if size >= one]
    if order is Order.FIRST and "cu_seqlens" in views:  # packed sequences may begin at any token
        sizes = [one] if one == 4 else []
    if order is Order.LAST and names is ROWS and (groups := views["B"].shape[2]) > 1:
        sizes = [size for size in sizes if views["u"].shape[2] // groups * one % size == 0]
    fit = (s for s in sizes if all(checks.aligned(views[n], pointers[n], s // one, _LAST[order]) for n in copied))
    return next(fit, 0)


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> SelectiveProblem:
    """The problem of checked operands and their addresses."""
    _, longest, dim = views["u"].shape
    order, key_layout = _order(views, ROWS), _order(views, KEYS)
    return SelectiveProblem(
        d_state=views["A"].shape[1],
        layout=order,
        copy=_together(views, pointers, ROWS, order),
        key_layout=key_layout,
        key_copy=_together(views, pointers, KEYS, key_layout),
        x=DTYPES[views["u"].dtype],
        **checks.dtypes_of(views, ("D", "delta_bias")),
        z="z" in views,
        delta_softplus=options.delta_softplus,
        **asked(options.segments, dim, views["A"].shape[1], longest),
        **prompts.fields_of(views, pointers, 4),
    )


def kernel_values(spec: SelectiveSpec, views: Mapping[str, Tensor], options: Options) -> dict[str, Value]:
    """Every kernel argument that is not a pointer."""
    _, length, dim = views["u"].shape
    channels = dim // views["B"].shape[2]
    values: dict[str, Value] = {"tokens": length, "groups": views["B"].shape[2], "group_channels": channels}
    values |= {"blocks": -(-channels // spec.channels), "pad_slot_id": options.pad_slot_id}
    return values | {**prompts.values_of(views), **OPERANDS.stride_values(spec, views)}


def grid_of(spec: SelectiveSpec, views: Mapping[str, Tensor]) -> int:
    groups, dim = views["B"].shape[2], views["u"].shape[2]
    return prompts.sequences_of(views, "u") * groups * -(-dim // groups // spec.channels) * spec.parts


def size_of(views: Mapping[str, Tensor]) -> int:
    """Channels of all sequences; 0 if nothing is to be written."""
    writes = views["u"].numel() or any(n in views for n in ("final_states", "state"))
    return prompts.sequences_of(views, "u") * views["u"].shape[2] if writes else 0


FAMILY = Family(
    OPERATOR,
    written=OPERANDS.written,
    problem_of=problem_of,
    size_of=size_of,
    grid_of=grid_of,
    values_of=kernel_values,
    in_place=OPERANDS.in_place,
)


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    named: dict[str, Any] = dict(views)
    reference(**named, delta_softplus=options.delta_softplus, pad_slot_id=options.pad_slot_id, dtype=dtype)


(CALLER,) = callers(FAMILY, {OPERATOR: OPERANDS}, Options, views_of, run_reference, words={OPERATOR: WRITTEN_WORDS}).values()
