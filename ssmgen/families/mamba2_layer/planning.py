"""A call of mamba2_layer: its operands checked, turned into a problem, and planned. `call.py` has the public function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calls import checks
from ...calls.checks import DTYPES
from ...calls.dispatch import callers
from ...calls.planning import Family
from ...engine.layers import views as layer_views
from ...engine.noise import check_seed
from ...spec.kernel import KernelSpec, Loads
from .operands import OPERANDS
from .reference import mamba2_layer as reference
from .spec import OPERATOR, Mamba2LayerProblem


class Options(NamedTuple):
    """The arguments of a call that are not tensors."""

    eps: float
    group_size: int | None
    norm_before_gate: bool
    dt_softplus: bool
    dt_limit: tuple[float, float] | None
    A_is_log: bool
    pad_slot_id: int
    philox_rounds: int
    update_state: bool = True


def views_of(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands with heads: z, out [batch(, tokens), H, P]; A, D, dt_bias [H, P]; norm_weight [groups, size]; rand_seed [slots].

    Calls of several tokens have a tokens axis. Adds every error to `problems`."""
    check_seed(named, options.update_state, problems)
    if not checks.check_tensors(named, problems):
        return {}
    several = layer_views.asked_for(named, "xBC", options.update_state)
    if several and not layer_views.check_axis(named, "xBC", options.update_state, problems):
        return {}
    if not _check_operands(named, options, problems):
        return {}
    if several:
        layer_views.check_tokens(named, "xBC", "selective_state_update", options.update_state, problems)
    elif named["xBC"].dim() == 3:  # a tokens axis of one
        named = dict(named) | {n: named[n].squeeze(1) for n in OPERANDS.tokenwise if n in named}
    return {} if problems else _with_heads(named, options)


def _check_operands(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> bool:
    """Whether shapes fit: xBC is [batch, channels], or [batch, tokens, channels]. Adds every error to `problems`."""
    checks.check_types(OPERANDS, named, "state", problems)
    state, xBC, window = named["state"], named["xBC"], named["conv_state"]
    if state.dim() != 4 or xBC.dim() not in (2, 3):
        wanted = "[slots, heads, headdim, d_state] and [batch, channels] or [batch, tokens, channels]"
        problems.append(f"state is {list(state.shape)} and xBC {list(xBC.shape)}; expected {wanted}")
        return False
    if window.dtype != xBC.dtype:
        problems.append(f"conv_state is {window.dtype}; expected {xBC.dtype}, the dtype of xBC")
    if "norm_weight" in named and "z" not in named:
        problems.append("norm_weight is given without z; expected both, since a layer's norm has a gate. Pass z.")
    if not _check_shapes(named, options, problems):
        return False
    layer_views.check_memory(named, xBC.shape[0], problems)
    layer_views.check_dense(named, ("z", "out"), problems)
    return True


def _check_shapes(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> bool:
    (_, H, P, N), (*rows, channels) = named["state"].shape, named["xBC"].shape
    inner = H * P
    groups, rest = divmod(channels - inner, 2 * N) if N else (0, 1)
    if not inner or groups < 1 or rest or H % groups:
        problems.append(
            f"xBC is {list(named['xBC'].shape)}; expected {inner} channels of x, and {N} of B and of C for each group of the {H} heads"
        )
        return False
    size = size_of(named, options)
    if inner % size:
        problems.append(f"{inner} channels are not a multiple of norm_group_size {size}; expected whole groups")
        return False
    sizes = {"head": H, "row": P, "head*row": inner, "size": size}
    own = {n: t for n, t in named.items() if n in ("z", "out", "dt", "A", "dt_bias", "D", "norm_weight")}
    fits = checks.check_shapes(OPERANDS, own, sizes, problems, lead=("batch, tokens" if len(rows) == 2 else "batch", rows))
    return layer_views.check_channels(named, "xBC", groups, problems) and fits


def _with_heads(named: Mapping[str, Tensor], options: Options) -> dict[str, Tensor]:
    slots, H, P, _ = named["state"].shape
    size = size_of(named, options)
    views = dict(named) | {n: named[n].unflatten(-1, (H, P)) for n in ("z", "out") if n in named}
    views |= {n: named[n].unsqueeze(-1).expand(H, P) for n in ("A", "D", "dt_bias") if n in named and named[n].dim() == 1}
    if "norm_weight" in named:
        views["norm_weight"] = named["norm_weight"].unflatten(0, (-1, size)).expand(H * P // size, size)
    if "rand_seed" in views:
        views["rand_seed"] = views["rand_seed"].expand(slots)
    return views


def size_of(views: Mapping[str, Tensor], options: Options) -> int:
    """Channels that are normed together: all of a row, if no number is given."""
    _, H, P, _ = views["state"].shape
    return H * P if options.group_size is None else options.group_size


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
