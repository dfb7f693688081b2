"""A call of gdn_layer or kda_layer: its operands checked, turned into a problem, and planned. `call.py` has the public functions."""

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
from ...engine.norm_calls import ACTIVATIONS
from ...engine.recurrences.attention.problem import Beta, Gate, Tokens
from ...spec.kernel import KernelSpec, Layout, Loads
from .operands import FUNCTIONS
from .problem import DeltaLayerProblem
from .reference import delta_layer as reference
from .spec import OPERATOR
from .views import Options, views_of


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> DeltaLayerProblem:
    """The problem of checked operands and their addresses."""
    state = views["state"]
    _, HV, V, K = state.shape
    along, row = (-2, V) if options.layout == "kv" else (-1, K)
    vector = min(16 // state.element_size(), row & -row)  # elements per load of a lane
    lane = min(16 // state.element_size(), K & -K)  # neighbouring key channels of a lane
    by_channel = [name for name in ("g", "dt_bias") if name in views and "g" in views]
    states = [name for name in ("state", "intermediate_states") if name in views]
    table = FUNCTIONS["kda_layer" if by_channel else "gdn_layer"]
    dtypes: dict[str, Any] = {field: DTYPES[views[name].dtype] for field, name in table.fields().items() if name in views}
    dtypes |= dict.fromkeys(("q", "k", "v"), DTYPES[views["mixed_qkv"].dtype])
    return DeltaLayerProblem(
        dim_k=K,
        dim_v=V,
        nheads=HV,
        key_heads=views["arrivals"].shape[1],
        layout=Layout(options.layout),
        tokens=Tokens.MANY if views["mixed_qkv"].dim() == 3 else Tokens.ONE,
        **dtypes,
        gate=Gate(options.form.gate),
        beta_form=Beta(options.form.beta),
        l2norm=options.l2norm,
        intermediates="intermediate_states" in views,
        state_loads=Loads.VECTOR if all(checks.aligned(views[n], pointers[n], vector, along) for n in states) else Loads.ELEMENT,
        operand_loads=Loads.VECTOR if all(checks.aligned(views[n], pointers[n], lane) for n in by_channel) else Loads.ELEMENT,
        philox_rounds=options.philox_rounds,
        **layer_views.control_fields(views, options.update_state),
        conv=layer_views.conv_of(views, pointers, "mixed_qkv"),
        norm=layer_views.norm_of(views, pointers, V, options.norm_before_gate, _activation(options)),
    )


def _activation(options: Options) -> str:
    return ACTIVATIONS[options.activation].value


def kernel_values(spec: KernelSpec, views: Mapping[str, Tensor], options: Options) -> dict[str, int | float]:
    """Every argument of one of the kernels that is not a pointer."""
    given = {"pad_slot_id": options.pad_slot_id, "scale": float(options.scale), "eps": float(options.eps)}
    given |= {"lower_bound": float(options.lower_bound or 0.0)}
    return layer_views.kernel_values(spec, views, FUNCTIONS["gdn_layer" if "a" in views else "kda_layer"], given)


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    how = (options.eps, options.norm_before_gate, _activation(options), options.scale, options.lower_bound or 0.0, options.pad_slot_id)
    noise: dict[str, Any] = {"philox_rounds": options.philox_rounds, "keys_first": options.layout == "kv"}
    reference(views, options.form, *how, update_state=options.update_state, **noise, dtype=dtype)


FAMILY = Family(
    OPERATOR,
    written=FUNCTIONS["gdn_layer"].written,
    problem_of=problem_of,
    size_of=lambda views: views["out"].shape[0],
    grid_of=layer_views.grid_of,
    values_of=kernel_values,
)


CALLERS = callers(FAMILY, FUNCTIONS, Options, views_of, run_reference)
