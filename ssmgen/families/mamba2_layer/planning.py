"""A call of mamba2_layer: its operands checked, turned into a problem, and planned. `call.py` has the public function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...calls import checks
from ...calls.checks import DTYPES
from ...calls.dispatch import callers
from ...calls.planning import Family
from ...engine.layers import views as layer_views
from ...spec.kernel import KernelSpec, Loads
from .operands import OPERANDS
from .reference import mamba2_layer as reference
from .spec import OPERATOR, Mamba2LayerProblem
from .views import Options, size_of, views_of


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> Mamba2LayerProblem:
    """The problem of checked operands and their addresses."""
    state = views["state"]
    _, H, P, N = state.shape
    vector = min(16 // state.element_size(), N & -N)  # state elements per lane
    aligned = all(checks.aligned(views[n], pointers[n], vector) for n in ("state", "intermediate_states") if n in views)
    dtypes: dict[str, Any] = {field: DTYPES[views[name].dtype] for field, name in OPERANDS.fields().items() if name in views}
    dtypes |= {"z": None} if "norm_weight" in views else {}  # the norm kernel applies the gate
    dtypes |= dict.fromkeys(("x", "B", "C"), DTYPES[views["xBC"].dtype])
    return Mamba2LayerProblem(
        d_state=N,
        headdim=P,
        nheads=H,
        ngroups=views["arrivals"].shape[1],
        **dtypes,
        dt_softplus=options.dt_softplus,
        dt_limit=options.dt_limit is not None,
        A_is_log=options.A_is_log,
        state_loads=Loads.VECTOR if aligned else Loads.ELEMENT,
        philox_rounds=options.philox_rounds,
        several=views["xBC"].dim() == 3,
        **layer_views.control_fields(views, options.update_state),
        conv=layer_views.conv_of(views, pointers, "xBC"),
        norm=layer_views.norm_of(views, pointers, size_of(views, options), options.norm_before_gate, "silu"),
    )


def kernel_values(spec: KernelSpec, views: Mapping[str, Tensor], options: Options) -> dict[str, int | float]:
    """Every argument of one of the kernels that is not a pointer."""
    low, high = (0.0, 0.0) if options.dt_limit is None else options.dt_limit
    given = {"pad_slot_id": options.pad_slot_id, "eps": float(options.eps), "dt_min": float(low), "dt_max": float(high)}
    return layer_views.kernel_values(spec, views, OPERANDS, given)


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    reference(views, options.eps, options.norm_before_gate, *options[3:], dtype=dtype)


FAMILY = Family(
    OPERATOR,
    written=OPERANDS.written,
    problem_of=problem_of,
    size_of=lambda views: views["out"].shape[0],
    grid_of=layer_views.grid_of,
    values_of=kernel_values,
)


(CALLER,) = callers(FAMILY, {OPERATOR: OPERANDS}, Options, views_of, run_reference).values()
