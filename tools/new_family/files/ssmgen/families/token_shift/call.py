"""token_shift on torch tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from ...calls import checks
from ...calls.checks import DTYPES, INDEX
from ...calls.dispatch import by_name, callers
from ...calls.operator import operator, run
from ...calls.planning import Family
from ...spec.kernel import Loads
from .reference import token_shift as reference
from .spec import OPERANDS, OPERATOR, TokenShiftProblem, TokenShiftSpec


class Options(NamedTuple):
    """Arguments of a call that are not tensors."""

    pad_slot_id: int = -1


@operator(like="x")
def token_shift(
    state: Tensor, x: Tensor, mix: Tensor, *, state_indices: Tensor | None = None, pad_slot_id: int = -1, out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor:  # fmt: skip
    """out = x + mix (previous - x), channel by channel; the state, which is the previous token, becomes x.

    state: [slots, dim] of x's dtype, in place          x, out: [batch, dim] f32, f16 or bf16; mix: [dim]
    Rows may have any distance; their channels are contiguous.
    state_indices: [batch] int32 or int64, slot of each row; None for slot = row. Slots must be distinct, else rows race
    pad_slot_id: a row whose slot is negative, equals this or is not in the pool gets a zero output and touches no state
    pdl: whether the kernel may start while the previous one in the stream ends; None = if the device can

    Returns out. CPU tensors run the reference implementation.
    Raises ArgumentError, UnsupportedError, CaptureError, NotBuiltError, CompileError, LoadError, LaunchError.
    Source: Peng et al. 2023 (arXiv 2305.13048).
    """
    if out is None and isinstance(x, Tensor):
        out = x.new_empty(x.shape)
    return run(CALLER, OPERANDS.Tensors(state, x, mix, state_indices, out), Options(pad_slot_id), pdl)


def views_of(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> dict[str, Tensor]:
    if not checks.check_tensors(named, problems):
        return {}
    checks.check_types(OPERANDS, named, "state", problems)
    state, x = named["state"], named["x"]
    if state.dim() != 2 or x.dim() != 2:
        problems.append(f"state is {list(state.shape)} and x is {list(x.shape)}; expected [slots, dim] and [batch, dim]")
        return {}
    (slots, dim), batch = state.shape, x.shape[0]
    fits = checks.check_shapes(OPERANDS, named, {"slot": slots, "batch": batch, "dim": dim}, problems)
    for name in ("state", "x", "out", "mix"):
        if named[name].dim() and named[name].stride(-1) != 1 and dim > 1:
            problems.append(f"{name} has strides {list(named[name].stride())}; expected contiguous channels")
    problems += [
        f"{n} is {named[n].dtype}; expected {x.dtype}, the dtype of x".replace("torch.", "")
        for n in ("state", "out")
        if named[n].dtype != x.dtype
    ]
    problems += [f"{n} has rows that share memory" for n in OPERANDS.written if checks.overlaps_itself(named[n])]
    if "state_indices" not in named and slots < batch:
        problems.append(f"state has {slots} slots; expected {batch} or more. Pass a larger state, or state_indices.")
    return dict(named) if fits else {}


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> TokenShiftProblem:
    x, dim = views["x"], views["x"].shape[1]
    vector = min(16 // x.element_size(), dim & -dim)
    aligned = [checks.aligned(views[n], pointers[n], vector) for n in ("state", "x", "mix", "out")]
    return TokenShiftProblem(
        dim=dim,
        x=DTYPES[x.dtype],
        mix=DTYPES[views["mix"].dtype],
        index=INDEX[views["state_indices"].dtype if "state_indices" in views else None],
        loads=Loads.VECTOR if vector * x.element_size() >= 4 and all(aligned) else Loads.ELEMENT,
    )


def kernel_values(spec: TokenShiftSpec, views: Mapping[str, Tensor], options: Options) -> dict[str, int | float]:
    """Every kernel argument that is not a pointer."""
    values = {"slots": views["state"].shape[0], "pad_slot_id": options.pad_slot_id} | OPERANDS.stride_values(spec, views)
    return {p.name: values[p.name] for p in spec.parameters() if p.code != "Q"}


FAMILY = Family(
    OPERATOR,
    OPERANDS.written,
    problem_of,
    size_of=lambda views: views["x"].shape[0],
    grid_of=lambda spec, views: views["x"].shape[0] * spec.blocks,
    values_of=kernel_values,
)
(CALLER,) = callers(FAMILY, {OPERATOR: OPERANDS}, Options, views_of, by_name(reference)).values()
