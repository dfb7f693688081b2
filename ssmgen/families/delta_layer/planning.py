"""A call of gdn_layer or kda_layer: its operands checked, turned into a problem, and planned. `call.py` has the public functions."""

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
from ...engine.norm_calls import ACTIVATIONS
from ...engine.recurrences.attention.problem import Beta, Gate, Tokens
from ...engine.recurrences.attention.switches import Form
from ...spec.kernel import KernelSpec, Layout, Loads
from ...spec.operands import Table
from .operands import FUNCTIONS
from .problem import DeltaLayerProblem
from .reference import delta_layer as reference
from .spec import OPERATOR


class Options(NamedTuple):
    """The arguments of a call that are not tensors."""

    eps: float
    norm_before_gate: bool
    activation: str
    allow_neg_eigval: bool
    l2norm: bool
    scale: float
    layout: str
    pad_slot_id: int
    update_state: bool = True
    lower_bound: float | None = None  # of the log decay, kda_layer only
    philox_rounds: int = 0

    @property
    def form(self) -> Form:
        """The recurrence."""
        gate = "softplus" if self.lower_bound is None else "bounded"
        return Form("decayed", gate, "twice_sigmoid" if self.allow_neg_eigval else "sigmoid", self.l2norm)


def views_of(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands with heads: state [slots, HV, V, K]; z, out [batch(, tokens), HV, V]; norm_weight [HV, V]; intermediate_states [rows,
    tokens, HV, V, K]; rand_seed [slots]; of kda_layer g [batch(, tokens), HV, K] and dt_bias [HV, K]. Calls of several tokens have a tokens
    axis.

    Adds every error to `problems`.
    """
    check_seed(named, options.update_state, problems)
    if not checks.check_tensors(named, problems):
        return {}
    several = layer_views.asked_for(named, "mixed_qkv", options.update_state)
    if several and not layer_views.check_axis(named, "mixed_qkv", options.update_state, problems):
        return {}
    if not _check_operands(named, options, problems):
        return {}
    if several:
        _check_tokens(named, options, problems)
    elif named["mixed_qkv"].dim() == 3:  # a tokens axis of one
        named = dict(named) | {n: named[n].squeeze(1) for n in _table(named).tokenwise if n in named}
    return {} if problems else _with_heads(named, options)


def _check_tokens(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> None:
    separate = "kda" if "g" in named else "gated_delta_rule"
    if not layer_views.check_tokens(named, "mixed_qkv", separate, options.update_state, problems):
        return
    if "intermediate_states" in named and named["intermediate_states"].dtype != named["state"].dtype:
        problems.append(f"intermediate_states is {named['intermediate_states'].dtype}; expected {named['state'].dtype}, the dtype of state")


def _check_operands(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> bool:
    """Whether shapes fit: mixed_qkv is [batch, channels], or [batch, tokens, channels]. Adds every error to `problems`."""
    checks.check_types(_table(named), named, "state", problems)
    state, qkv, window = named["state"], named["mixed_qkv"], named["conv_state"]
    if state.dim() != 4 or qkv.dim() not in (2, 3):
        wanted = f"[slots, heads, {'K, V' if options.layout == 'kv' else 'V, K'}] and [batch, channels] or [batch, tokens, channels]"
        problems.append(f"state is {list(state.shape)} and mixed_qkv {list(qkv.shape)}; expected {wanted}")
        return False
    _, HV, V, K = _turned(state, options).shape
    key_heads, rest = divmod(qkv.shape[-1] - HV * V, 2 * K) if K else (0, 1)
    if key_heads < 1 or rest or HV % key_heads:
        wanted = f"{HV * V} channels of v, and {K} of q and of k for each key head, where the key heads divide the {HV} heads"
        problems.append(f"mixed_qkv is {list(qkv.shape)}; expected {wanted}")
        return False
    if window.dtype != qkv.dtype:
        problems.append(f"conv_state is {window.dtype}; expected {qkv.dtype}, the dtype of mixed_qkv")
    sizes = {"head": HV, "value": V, "key": K, "head*value": HV * V, "head*key": HV * K}
    own = {n: t for n, t in named.items() if n in ("z", "out", "a", "b", "beta", "g", "A_log", "dt_bias", "norm_weight")}
    lead = ("batch, tokens" if qkv.dim() == 3 else "batch", qkv.shape[:-1])
    fits = checks.check_shapes(_table(named), own, sizes, problems, lead=lead)
    if not (layer_views.check_channels(named, "mixed_qkv", key_heads, problems) and fits):
        return False
    if ("norm_weight" in named) != ("z" in named):
        given, absent = ("z", "norm_weight") if "z" in named else ("norm_weight", "z")
        problems.append(
            f"{given} is given without {absent}; expected both or neither: z gates the norm. Pass {absent}, or leave out {given}."
        )
    if "A_log" not in named and options.lower_bound is None:
        problems.append(
            "A_log and lower_bound are None; expected one of them. Without lower_bound, the log decay is -exp(A_log) softplus(g + dt_bias)."
        )
    layer_views.check_memory(named, qkv.shape[0], problems)
    layer_views.check_dense(named, ("z", "out", "norm_weight"), problems)
    return True


def _table(named: Mapping[str, Tensor]) -> Table:
    """The operands of the function that takes these tensors."""
    return FUNCTIONS["kda_layer" if "g" in named else "gdn_layer"]


def _turned(state: Tensor, options: Options) -> Tensor:
    """[…, V, K], as the reference takes it."""
    return state.transpose(-1, -2) if options.layout == "kv" else state


def _with_heads(named: Mapping[str, Tensor], options: Options) -> dict[str, Tensor]:
    """Views of checked operands, as in `views_of`; with a tokens axis, if they have one."""
    views = dict(named) | {n: _turned(named[n], options) for n in ("state", "intermediate_states") if n in named}
    slots, HV, V, K = views["state"].shape
    if "rand_seed" in named:
        views["rand_seed"] = named["rand_seed"].expand(slots)
    rows = named["mixed_qkv"].dim() - 1
    views |= {n: named[n].unflatten(-1, (HV, V)) for n in ("z", "out") if n in named and named[n].dim() == rows + 1}
    if "g" in named:
        flat = [n for n, axis in (("g", rows), ("dt_bias", 0)) if n in named and named[n].dim() == axis + 1]
        views |= {n: named[n].unflatten(-1, (HV, K)) for n in flat}
    if "norm_weight" in named:
        views["norm_weight"] = named["norm_weight"].expand(HV, V)
    return views


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
