"""A call of selective_state_update: its operands checked, turned into a problem, and planned. `call.py` has the public function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...calls.checks import STATES, index_of, loads_of
from ...calls.dispatch import callers
from ...calls.planning import Family
from ...engine.recurrences.mamba.operands import OPERANDS
from ...engine.recurrences.mamba.problem import SsuProblem
from ...engine.recurrences.mamba.reference import reference
from ...engine.rows import loaded
from ...spec.kernel import PoolMode, Update
from .spec import OPERATOR, SsuSpec
from .views import Options, is_tied, views_of


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> SsuProblem:
    """The problem of checked operands and their addresses."""
    dt_softplus, dt_limit, _, philox_rounds, update_state, zero_padding = options
    state, target = views["state"], views.get("dst_state_indices")
    _, H, P, N = state.shape
    tied = is_tied(views)
    vector = min(16 // state.element_size(), N & -N)  # elements per lane

    several = views["x"].dim() == 4
    types: dict[str, Any] = {field: STATES[views[name].dtype] for field, name in OPERANDS.fields().items() if name in views}
    problem = SsuProblem(
        d_state=N,
        headdim=P,
        nheads=H,
        ngroups=views["B"].shape[-2],
        **types,
        tied=tied,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit is not None,
        index=index_of(views, "state_indices"),
        pool=PoolMode.SPLIT if target is not None else PoolMode.SINGLE,
        state_loads=loads_of(views, pointers, ("state", "intermediate_states"), vector),
        operand_loads=loads_of(views, pointers, ("B", "C") if tied or several else ("A", "B", "C"), vector),
        philox_rounds=philox_rounds,
        several=several,
        cu_seqlens=index_of(views, "cu_seqlens"),
        accepted=index_of(views, "num_accepted_tokens"),
        update=Update.NONE if not update_state else Update.EACH if target is not None and target.dim() == 2 else Update.FINAL,
        intermediate_indices=index_of(views, "intermediate_state_indices"),
        parents=index_of(views, "parents"),
        zero_padding=zero_padding,
    )
    return loaded(problem)


_COLUMNS = {
    "columns": "state_indices",
    "dst_columns": "dst_state_indices",
    "parent_columns": "parents",
    "kept_columns": "intermediate_states",
}


def kernel_values(spec: SsuSpec, views: Mapping[str, Tensor], options: Options) -> dict[str, int | float]:
    """Every kernel argument that is not a pointer."""
    _, dt_limit, pad_slot_id, *_ = options
    values: dict[str, int | float] = {"slots": views["state"].shape[0], "pad_slot_id": pad_slot_id}
    values |= dict.fromkeys(("tokens", "total_tokens"), views["x"].shape[1])
    for count, of in _COLUMNS.items():
        if of in views and views[of].dim() > 1:
            values[count] = views[of].shape[1]
    if "intermediate_states" in views:
        values["kept_rows"] = views["intermediate_states"].shape[0]
    if dt_limit is not None:
        values["dt_min"], values["dt_max"] = map(float, dt_limit)
    return values | OPERANDS.stride_values(spec, views)


def sequences(views: Mapping[str, Tensor]) -> int:
    return views["cu_seqlens"].shape[0] - 1 if "cu_seqlens" in views else views["x"].shape[0]


FAMILY = Family(
    OPERATOR,
    OPERANDS.written,
    problem_of,
    size_of=lambda views: sequences(views) if views["x"].numel() else 0,
    grid_of=lambda spec, views: sequences(views) * spec.nheads * spec.tiles,
    values_of=kernel_values,
)


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    dt_softplus, dt_limit, pad_slot_id, philox_rounds, update_state, zero_padding = options
    reference(
        **views, dt_softplus=dt_softplus, dt_limit=dt_limit, pad_slot_id=pad_slot_id, philox_rounds=philox_rounds,
        update_state=update_state, zero_padding=zero_padding, dtype=dtype,
    )  # fmt: skip


(CALLER,) = callers(FAMILY, {OPERATOR: OPERANDS}, Options, views_of, run_reference).values()
