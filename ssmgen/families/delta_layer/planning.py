"""What gdn_layer and kda_layer share: their operands checked, turned into a problem, and planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calls import checks
from ...calls.checks import DTYPES, INDEX
from ...calls.planning import Family
from ...calls.scalars import POSITIVE
from ...engine import layer_views
from ...spec import KernelSpec, Loads
from ..gated_rms_norm.call import ACTIVATION, ACTIVATIONS
from ..linear_attention.problem import Beta, Gate, Layout
from ..linear_attention.views import Form
from .reference import delta_layer as reference
from .spec import DeltaLayerProblem, DeltaLayerSpec

TOKENWISE = ("mixed_qkv", "a", "b", "g", "beta", "z", "out")  # operands with a tokens axis, where the call has several

SCALARS = {"norm_eps": POSITIVE, "norm_activation": ACTIVATION}


class Options(NamedTuple):
    """What a call says beside its tensors."""

    eps: float
    norm_before_gate: bool
    activation: str
    allow_neg_eigval: bool
    l2norm: bool
    scale: float
    layout: str
    pad_slot_id: int
    update_state: bool = True
    lower_bound: float | None = None  # of kda_layer, of the log decay

    @property
    def form(self) -> Form:
        """The recurrence."""
        gate = "softplus" if self.lower_bound is None else "bounded"
        return Form("decayed", gate, "twice_sigmoid" if self.allow_neg_eigval else "sigmoid", self.l2norm)


def result_and_scale(
    out: Tensor | None, scale: float | None, mixed_qkv: Tensor, state: Tensor, state_layout: str
) -> tuple[Tensor | None, float]:
    """What a call has where it does not say: a new output of the input's dtype, and K^-0.5. Of operands that are not checked yet."""
    headed = isinstance(state, Tensor) and state.dim() == 4
    keys, values = (2, 3) if state_layout == "kv" else (3, 2)
    if out is None and isinstance(mixed_qkv, Tensor):
        out = mixed_qkv.new_empty((*mixed_qkv.shape[:-1], *([state.shape[1] * state.shape[values]] if headed else [])))
    if scale is None:
        scale = state.shape[keys] ** -0.5 if headed and state.shape[keys] else 1.0
    return out, scale


def views_of(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands with heads: state [slots, HV, V, K]; z, out [batch, HV, V]; norm_weight [HV, V]; of kda_layer g [batch, HV, K] and
    dt_bias [HV, K].

    Adds to `problems` all that is wrong.
    """
    if not checks.check_tensors(named, problems) or not check_operands(named, options, problems) or problems:
        return {}
    if named["mixed_qkv"].dim() == 3:  # a tokens axis of one
        named = dict(named) | {n: named[n].squeeze(1) for n in TOKENWISE if n in named}
    return with_heads(named, options)


def check_operands(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> bool:
    """Whether shapes fit: mixed_qkv is [batch, channels], or [batch, tokens, channels]. Adds to `problems` all that is wrong."""
    checks.check_common(named, "state", problems)
    state, qkv, window = named["state"], named["mixed_qkv"], named["conv_state"]
    if state.dim() != 4 or qkv.dim() not in (2, 3):
        wanted = f"[slots, heads, {'K, V' if options.layout == 'kv' else 'V, K'}] and [batch, channels] or [batch, tokens, channels]"
        problems.append(f"state is {list(state.shape)} and mixed_qkv {list(qkv.shape)}, not {wanted}")
        return False
    _, HV, V, K = turned(state, options).shape
    key_heads, rest = divmod(qkv.shape[-1] - HV * V, 2 * K) if K else (0, 1)
    if key_heads < 1 or rest or HV % key_heads:
        wanted = f"{HV * V} channels of v, and {K} of q and of k for each of the key heads, which divide the {HV} heads"
        problems.append(f"mixed_qkv is {list(qkv.shape)}: not {wanted}")
        return False
    if window.dtype != qkv.dtype:
        problems.append(f"conv_state is {window.dtype} and mixed_qkv {qkv.dtype}: the window holds what comes in")
    allowed = _shapes(qkv.shape[:-1], HV, V, K, "g" in named)
    fits = [checks.check_shape(n, named[n], shapes, problems) for n, shapes in allowed.items() if n in named]
    if not all([*fits, layer_views.check_channels(named, "mixed_qkv", key_heads, problems)]):
        return False
    if ("norm_weight" in named) != ("z" in named):
        given, absent = ("z", "norm_weight") if "z" in named else ("norm_weight", "z")
        problems.append(f"{given} is given without {absent}: the norm of a layer has a gate, and nothing else has")
    if "A_log" not in named and options.lower_bound is None:
        problems.append("A_log is missing: without lower_bound the log decay is -e^A_log softplus(g + dt_bias)")
    layer_views.check_memory(named, qkv.shape[0], problems)
    layer_views.check_dense(named, ("z", "out", "norm_weight"), problems)
    return True


def _shapes(rows: Sequence[int], HV: int, V: int, K: int, by_channel: bool) -> dict[str, dict[str, tuple[int, ...]]]:
    """Of operands by name, those that are allowed, in words; rows: [batch], or [batch, tokens]. by_channel: kda_layer's."""
    words = "[batch, tokens" if len(rows) == 2 else "[batch"
    return {
        **dict.fromkeys(("z", "out"), {f"{words}, heads * V]": (*rows, HV * V), f"{words}, heads, V]": (*rows, HV, V)}),
        **dict.fromkeys(("a", "b", "beta"), {f"{words}, heads]": (*rows, HV)}),
        "g": {f"{words}, heads * K]": (*rows, HV * K), f"{words}, heads, K]": (*rows, HV, K)},
        "A_log": {"[heads]": (HV,)},
        "dt_bias": {"[heads * K]": (HV * K,), "[heads, K]": (HV, K)} if by_channel else {"[heads]": (HV,)},
        "norm_weight": {"[V]": (V,)},
    }


def turned(state: Tensor, options: Options) -> Tensor:
    """[…, V, K], as the reference takes it."""
    return state.transpose(-1, -2) if options.layout == "kv" else state


def with_heads(named: Mapping[str, Tensor], options: Options) -> dict[str, Tensor]:
    """Views of checked operands, as of `views_of`; with a tokens axis, where they have one."""
    views = dict(named) | {n: turned(named[n], options) for n in ("state", "intermediate_states") if n in named}
    _, HV, V, K = views["state"].shape
    rows = named["mixed_qkv"].dim() - 1
    views |= {n: named[n].unflatten(-1, (HV, V)) for n in ("z", "out") if n in named and named[n].dim() == rows + 1}
    if "g" in named:
        flat = [n for n, axis in (("g", rows), ("dt_bias", 0)) if n in named and named[n].dim() == axis + 1]
        views |= {n: named[n].unflatten(-1, (HV, K)) for n in flat}
    if "norm_weight" in named:
        views["norm_weight"] = named["norm_weight"].expand(HV, V)
    return views


def problem_of(
    kind: type[DeltaLayerProblem], views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options
) -> DeltaLayerProblem:
    """The problem of a kind of layer that checked operands pose, given where they lie."""
    return kind(**problem_fields(views, pointers, options), **layer_views.conv_fields(views, pointers, "mixed_qkv"))


def problem_fields(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> dict[str, Any]:
    """Of either problem: of the recurrence, but for the ways in which tokens come and states go, and of the norm."""
    state = views["state"]
    _, HV, V, K = state.shape
    along, row = (-2, V) if options.layout == "kv" else (-1, K)
    vector = min(16 // state.element_size(), row & -row)  # elements that a lane reads at once
    lane = min(16 // state.element_size(), K & -K)  # key channels that a lane has next to each other
    by_channel = [name for name in ("g", "dt_bias") if name in views and "g" in views]
    states = [name for name in ("state", "intermediate_states") if name in views]
    g = DTYPES[views["g" if by_channel else "a"].dtype]
    norm = (V, options.norm_before_gate, _activation(options))
    return {
        "dim_k": K,
        "dim_v": V,
        "nheads": HV,
        "key_heads": views["arrivals"].shape[1],
        "layout": Layout(options.layout),
        **dict.fromkeys(("q", "k", "v"), DTYPES[views["mixed_qkv"].dtype]),
        **{name: DTYPES[views[name].dtype] if name in views else None for name in ("state", "out", "A_log", "dt_bias")},
        "gk" if by_channel else "g": g,
        "beta": DTYPES[views["beta" if by_channel else "b"].dtype],
        "gate": Gate(options.form.gate),
        "beta_form": Beta(options.form.beta),
        "l2norm": options.l2norm,
        "index": INDEX[views["state_indices"].dtype if "state_indices" in views else None],
        "state_loads": Loads.VECTOR if all(checks.aligned(views[n], pointers[n], vector, along) for n in states) else Loads.ELEMENT,
        "operand_loads": Loads.VECTOR if all(checks.aligned(views[n], pointers[n], lane) for n in by_channel) else Loads.ELEMENT,
        **(layer_views.norm_fields(views, pointers, *norm) if "norm_weight" in views else {}),
    }


def _activation(options: Options) -> str:
    return ACTIVATIONS[options.activation].value


_AXES = {
    "state": ("slot",), "g": ("batch", "head"), "gk": ("batch", "head", "n"), "beta": ("batch", "head"), "A_log": ("head",),
    "dt_bias": ("head", "n"), "z": ("batch", "head"), "out": ("batch", "head", "row"), "state_indices": ("batch",),
}  # fmt: skip


def kernel_values(call_names: Mapping[str, str], spec: KernelSpec, views: Mapping[str, Tensor], options: Options) -> dict[str, int | float]:
    """Every argument of one of the kernels that is not a pointer."""
    return layer_views.kernel_values(spec, views, _AXES, scalars(options), call_names)


def scalars(options: Options) -> dict[str, int | float]:
    """Arguments of kernels that the options say."""
    given = {"pad_slot_id": options.pad_slot_id, "scale": float(options.scale), "eps": float(options.eps)}
    return given | {"lower_bound": float(options.lower_bound or 0.0)}


def family_of(operator: str, problem: type[DeltaLayerProblem], spec: type[DeltaLayerSpec]) -> Family:
    return Family(
        operator,
        written=layer_views.WRITTEN,
        problem_of=partial(problem_of, problem),
        size_of=lambda views: views["out"].shape[0],
        grid_of=layer_views.grid_of,
        values_of=partial(kernel_values, spec.call_names),
    )


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    how = (options.eps, options.norm_before_gate, _activation(options), options.scale, options.lower_bound or 0.0, options.pad_slot_id)
    reference(views, options.form, *how, update_state=options.update_state, dtype=dtype)
