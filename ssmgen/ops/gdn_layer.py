"""gdn_layer: a gated delta rule layer's decode step between its projections, on torch tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import runtime
from ..kernels.gdn_layer import OPERATOR, GdnLayerProblem
from ..kernels.linear_attention_problem import Beta, Gate, Layout
from ..reference.gdn_layer import gdn_layer as reference
from ..spec import KernelSpec, Loads
from . import checks, layer_views
from .calls import Call, operator
from .checks import DTYPES, INDEX
from .gated_rms_norm import ACTIVATIONS
from .linear_attention_views import Form
from .planning import Caller, Family

NAMES = (
    "mixed_qkv", "state", "conv_state", "conv_weight", "conv_bias", "a", "b", "A_log", "dt_bias", "z", "norm_weight", "out",
    "state_indices", "arrivals",
)  # fmt: skip


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

    @property
    def form(self) -> Form:
        """The recurrence."""
        return Form("decayed", "softplus", "twice_sigmoid" if self.allow_neg_eigval else "sigmoid", self.l2norm)


@operator(like="mixed_qkv")
def gdn_layer(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    z: Tensor | None,
    conv_state: Tensor,
    state: Tensor,
    arrivals: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor | None,
    norm_weight: Tensor | None = None,
    *,
    norm_eps: float = 1e-6,
    norm_before_gate: bool = True,
    norm_activation: str = "silu",
    allow_neg_eigval: bool = False,
    use_qk_l2norm: bool = True,
    scale: float | None = None,
    state_layout: str = "vk",
    state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """A decode step of a gated delta rule layer (Qwen3-Next, Qwen3.5), from what its in-projections give to what its out-projection takes.

    q, k, v <- silu(convolution of mixed_qkv); y, state <- gated_delta_rule(state, q, k, v, a, b) with a raw gate and a logit for beta;
    out = the gated RMS norm of y and z, of each head. HK key heads (of q and k) and HV heads of v and the state, a multiple of HK; K key
    channels and V value channels per head; channels = 2 HK K + HV V, in the order q, k, v. One kernel does all of it, or one behind it
    norms. The same bits as causal_conv1d_update with SiLU, gated_delta_rule and gated_rms_norm, one after the other, with y of out's
    dtype. Floating tensors may be f32, f16 or bf16, each its own, but for mixed_qkv and conv_state, which go together; arithmetic is f32.

    mixed_qkv: [batch, channels]; a, b: [batch, HV]; views of the in-projections' outputs, with any strides
    z, out: [batch, HV V] or [batch, HV, V]; the channels of a head are dense
    conv_state: [slots, channels, width - 1 or width], updated in place, the newest input last; any strides
    state: [slots, HV, V, K], updated in place; its last three axes must be dense
    arrivals: [slots, HK] int32 of zeros, kept by the caller with the states: counts, within a launch, the blocks that have read a window
    conv_weight: [channels, width], width 2 … 8; conv_bias: [channels] or None
    A_log, dt_bias: [HV]; the log decay is -e^A_log softplus(a + dt_bias), without dt_bias where that is None
    norm_weight: [V], for all heads; None: no norm, and no z
    norm_before_gate: z gates what is normed already; norm_activation: "silu" or its other name "swish"; "sigmoid"
    allow_neg_eigval: beta is twice the sigmoid of b; use_qk_l2norm: q and k are divided by sqrt(|x|^2 + 1e-6) first
    scale, state_layout, state_indices, pad_slot_id: as in gated_delta_rule, of both states. A padded row gets a zero output
    pdl: whether the kernels may start while the ones ahead of them in the stream end; None = where the device can (sm_90 and later)

    Returns out (new, of mixed_qkv's dtype, if not given). CPU tensors run the reference implementation.
    Raises ArgumentError listing every violated requirement, before anything is launched; UnsupportedError; CaptureError when a kernel
    would have to be built during a CUDA graph capture; NotBuiltError, CompileError, LoadError, LaunchError.
    Source: Yang et al. 2024 (arXiv 2412.06464).
    """
    headed = isinstance(state, Tensor) and state.dim() == 4
    keys, values = (2, 3) if state_layout == "kv" else (3, 2)
    if out is None and isinstance(mixed_qkv, Tensor):
        out = mixed_qkv.new_empty(*mixed_qkv.shape[:1], *([state.shape[1] * state.shape[values]] if headed else []))
    if scale is None:
        scale = state.shape[keys] ** -0.5 if headed and state.shape[keys] else 1.0
    given = (
        mixed_qkv, state, conv_state, conv_weight, conv_bias, a, b, A_log, dt_bias, z, norm_weight, out, state_indices, arrivals,
    )  # fmt: skip
    options = Options(norm_eps, norm_before_gate, norm_activation, allow_neg_eigval, use_qk_l2norm, scale, state_layout, pad_slot_id)
    return Call(CALLER, given, options, pdl)


def _check_options(options: Options, problems: list[str]) -> None:
    def number(value: object) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

    if not number(options.eps) or options.eps <= 0:
        problems.append(f"norm_eps is {options.eps!r}, not a positive number")
    if not number(options.scale):
        problems.append(f"scale is {options.scale!r}, not a number")
    if options.layout not in ("vk", "kv"):
        problems.append(f"state_layout is {options.layout!r}, not 'vk' or 'kv'")
    if not isinstance(options.activation, str) or options.activation not in ACTIVATIONS:
        problems.append(f"norm_activation is {options.activation!r}, not 'silu', 'swish' or 'sigmoid'")
    switches = {"norm_before_gate": options.norm_before_gate, "allow_neg_eigval": options.allow_neg_eigval, "use_qk_l2norm": options.l2norm}
    problems += [f"{name} is {value!r}, not True or False" for name, value in switches.items() if value not in (True, False)]


def views_of(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands with heads: state [slots, HV, V, K]; z, out [batch, HV, V]; norm_weight [HV, V].

    Adds to `problems` all that is wrong.
    """
    _check_options(options, problems)
    if not checks.check_tensors(named, problems):
        return {}
    checks.check_common(named, "state", problems)
    state, qkv, window = named["state"], named["mixed_qkv"], named["conv_state"]
    if state.dim() != 4 or qkv.dim() != 2:
        wanted = f"[slots, heads, {'K, V' if options.layout == 'kv' else 'V, K'}] and [batch, channels]"
        problems.append(f"state is {list(state.shape)} and mixed_qkv {list(qkv.shape)}, not {wanted}")
        return {}
    turned = state.transpose(2, 3) if options.layout == "kv" else state
    (_, HV, V, K), (batch, channels) = turned.shape, qkv.shape
    key_heads, rest = divmod(channels - HV * V, 2 * K) if K else (0, 1)
    if key_heads < 1 or rest or HV % key_heads:
        wanted = f"{HV * V} channels of v, and {K} of q and of k for each of the key heads, which divide the {HV} heads"
        problems.append(f"mixed_qkv is {list(qkv.shape)}: not {wanted}")
        return {}
    if window.dtype != qkv.dtype:
        problems.append(f"conv_state is {window.dtype} and mixed_qkv {qkv.dtype}: the window holds what comes in")
    allowed = {
        **dict.fromkeys(("z", "out"), {"[batch, heads * V]": (batch, HV * V), "[batch, heads, V]": (batch, HV, V)}),
        **dict.fromkeys(("a", "b"), {"[batch, heads]": (batch, HV)}),
        **dict.fromkeys(("A_log", "dt_bias"), {"[heads]": (HV,)}),
        "norm_weight": {"[V]": (V,)},
    }
    fits = [checks.check_shape(n, named[n], shapes, problems) for n, shapes in allowed.items() if n in named]
    if not all([*fits, layer_views.check_channels(named, "mixed_qkv", key_heads, problems)]):
        return {}
    if ("norm_weight" in named) != ("z" in named):
        given, absent = ("z", "norm_weight") if "z" in named else ("norm_weight", "z")
        problems.append(f"{given} is given without {absent}: the norm of a layer has a gate, and nothing else has")
    layer_views.check_memory(named, batch, problems)
    layer_views.check_dense(named, ("z", "out", "norm_weight"), problems)
    if problems:
        return {}
    views = dict(named) | {"state": turned}
    views |= {n: named[n].unflatten(1, (HV, V)) for n in ("z", "out") if n in named and named[n].dim() == 2}
    if "norm_weight" in named:
        views["norm_weight"] = named["norm_weight"].expand(HV, V)
    return views


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> GdnLayerProblem:
    """The problem that checked operands pose, given where they lie."""
    state = views["state"]
    _, HV, V, K = state.shape
    along, row = (-2, V) if options.layout == "kv" else (-1, K)
    vector = min(16 // state.element_size(), row & -row)  # elements that a lane reads at once
    activation = ACTIVATIONS[options.activation].value
    return GdnLayerProblem(
        dim_k=K,
        dim_v=V,
        nheads=HV,
        key_heads=views["arrivals"].shape[1],
        layout=Layout(options.layout),
        **dict.fromkeys(("q", "k", "v"), DTYPES[views["mixed_qkv"].dtype]),
        **{name: DTYPES[views[name].dtype] if name in views else None for name in ("state", "out", "A_log", "dt_bias")},
        g=DTYPES[views["a"].dtype],
        beta=DTYPES[views["b"].dtype],
        gate=Gate.SOFTPLUS,
        beta_form=Beta(options.form.beta),
        l2norm=options.l2norm,
        index=INDEX[views["state_indices"].dtype if "state_indices" in views else None],
        state_loads=Loads.VECTOR if checks.aligned(state, pointers["state"], vector, along) else Loads.ELEMENT,
        **layer_views.conv_fields(views, pointers, "mixed_qkv"),
        **(layer_views.norm_fields(views, pointers, V, options.norm_before_gate, activation) if "norm_weight" in views else {}),
    )


_AXES = {
    "state": ("slot",), "g": ("batch", "head"), "beta": ("batch", "head"), "A_log": ("head",), "dt_bias": ("head",),
    "z": ("batch", "head"), "out": ("batch", "head", "row"), "state_indices": ("batch",),
}  # fmt: skip


def kernel_values(spec: KernelSpec, views: Mapping[str, Tensor], options: Options) -> dict[str, int | float]:
    """Every argument of one of the kernels that is not a pointer."""
    given = {"pad_slot_id": options.pad_slot_id, "scale": float(options.scale), "eps": float(options.eps)}
    return layer_views.kernel_values(spec, views, _AXES, given, {"g": "a", "beta": "b"})


FAMILY = Family(
    OPERATOR,
    written=layer_views.WRITTEN,
    problem_of=problem_of,
    size_of=lambda views: views["out"].shape[0],
    grid_of=layer_views.grid_of,
    values_of=kernel_values,
)


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    activation = ACTIVATIONS[options.activation].value
    how = (options.eps, options.norm_before_gate, activation, options.scale, options.pad_slot_id)
    reference(views, options.form, *how, dtype=dtype)


# torch.library: what torch.compile and opcheck see.
_library = torch.library.Library("ssmgen", "FRAGMENT")
_library.define(
    "gdn_layer(Tensor mixed_qkv, Tensor(a!) state, Tensor(b!) conv_state, Tensor conv_weight, Tensor? conv_bias, Tensor a, Tensor b, "
    "Tensor A_log, Tensor? dt_bias, Tensor? z, Tensor? norm_weight, Tensor(c!) out, Tensor? state_indices, Tensor(d!) arrivals, "
    "float eps, bool norm_before_gate, str activation, bool allow_neg_eigval, bool l2norm, float scale, str layout, int pad_slot_id, "
    "bool? pdl) -> ()",
    tags=torch.Tag.needs_fixed_stride_order,
)


def _dispatch(given: Sequence[Any], options: Options, pdl: bool | None) -> None:
    torch.ops.ssmgen.gdn_layer(*given, *options, pdl)


@torch.library.impl(_library, "gdn_layer", "CUDA")
@torch.library.impl(_library, "gdn_layer", "CPU")
def _op(*args: Any) -> None:
    given, options, pdl = args[: len(NAMES)], Options(*args[len(NAMES) : -1]), args[-1]
    CALLER.plan(given, options, pdl)()


@torch.library.register_fake("ssmgen::gdn_layer", lib=_library)
def _fake(*args: Any) -> None:
    return None


_required = frozenset(("mixed_qkv", "state", "conv_state", "conv_weight", "a", "b", "A_log", "out", "arrivals"))
CALLER = Caller(FAMILY, OPERATOR, NAMES, _required, views_of, run_reference, _dispatch, runtime.Signatures())
