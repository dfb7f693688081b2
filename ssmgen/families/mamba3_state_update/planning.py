"""A call of mamba3_state_update: its operands checked, turned into a problem, and planned. `call.py` has the public function."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...calls import checks
from ...calls.checks import DTYPES, index_of
from ...calls.dispatch import callers
from ...calls.planning import Family
from ...engine.recurrences.mamba3.problem import Mamba3Problem, Rate, Rotary
from ...spec.kernel import Index, Loads, PoolMode, Update
from .operands import OPERANDS
from .reference import reference
from .spec import OPERATOR, Mamba3Spec
from .views import Options, views_of

_ROWS = tuple([row.name for row in OPERANDS if row.forms[0][-1] == "n" and row.name != "state"])
# {operand: its first axis whose stride only some kernels take}: for the others it is dense from there on.
_INNER = {row.name: loose[0] for row in OPERANDS if (loose := [each.partition("?")[0] for each in row.strides.split() if "loose" in each])}
_TYPED = {"row_norm": "B_norm", "row_bias": "B_bias", "mimo": "mimo_x"}


def _dense(t: Tensor, first: int) -> bool:
    """Whether the axes from `first` on are contiguous."""
    reach = 1
    for size, stride in zip(reversed(t.shape[first:]), reversed(t.stride()[first:]), strict=True):
        if size > 1 and stride != reach:
            return False
        reach *= size
    return True


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> Mamba3Problem:
    """The problem of checked operands and their addresses."""
    state, target = views["state"], views.get("dst_state_indices")
    _, H, P, N = state.shape
    angles = views["angle_state"].shape[-1] if "angle_state" in views else 0
    typed = {field: name for field, name in (OPERANDS.fields() | _TYPED).items() if name in views}
    together = 4 if not angles or options.rotary == Rotary.PAIRS.value else 2  # neighbours that a lane loads of a row

    vector = min(16 // state.element_size(), N & -N)
    aligned = all(checks.aligned(views[n], pointers[n], together) for n in _ROWS if n in views)
    dense = all(_dense(views[n], OPERANDS.axis_of(n, axis, views[n].dim())) for n, axis in _INNER.items() if n in views)

    return Mamba3Problem(
        d_state=N,
        headdim=P,
        nheads=H,
        ngroups=views["B"].shape[-2],
        rank=views["k_state"].shape[1],
        angles=angles,
        rotary=Rotary(options.rotary) if angles else Rotary.PAIRS,
        rate=Rate(options.A_form),
        dt_softplus=options.dt_softplus,
        trap_sigmoid=options.trap_sigmoid,
        by_rank="mimo_x" in views and "mimo_o" not in views,
        index=index_of(views, "state_indices"),
        pool=PoolMode.SPLIT if target is not None else PoolMode.SINGLE,
        state_loads=Loads.VECTOR if checks.aligned(state, pointers["state"], vector) else Loads.ELEMENT,
        operand_loads=Loads.VECTOR if aligned and dense else Loads.ELEMENT,
        philox_rounds=options.philox_rounds,
        several=views["x"].dim() == 4,
        accepted=index_of(views, "num_accepted_tokens"),
        update=Update.EACH if target is not None and target.dim() == 2 else Update.FINAL,
        zero_padding=options.zero_padding,
        **{field: DTYPES[views[name].dtype] for field, name in typed.items()},
    )


def kernel_values(spec: Mamba3Spec, views: Mapping[str, Tensor], options: Options) -> dict[str, int | float]:
    """Every kernel argument that is not a pointer."""
    values: dict[str, int | float] = {"slots": views["state"].shape[0], "pad_slot_id": options.pad_slot_id}
    values |= {"tokens": views["x"].shape[1], "eps": options.eps, "A_floor": options.A_floor}
    if spec.accepted is not Index.NONE:
        values["columns"] = views["state_indices"].shape[1]
    return values | OPERANDS.stride_values(spec, views)


FAMILY = Family(
    OPERATOR,
    OPERANDS.written,
    problem_of,
    size_of=lambda views: views["x"].shape[0] if views["x"].numel() else 0,
    grid_of=lambda spec, views: views["x"].shape[0] * spec.nheads,
    values_of=kernel_values,
)


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    reference(views, options, dtype)


(CALLER,) = callers(FAMILY, {OPERATOR: OPERANDS}, Options, views_of, run_reference).values()
