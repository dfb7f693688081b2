"""mamba2_layer: a Mamba-2 layer's decode step between its projections, on torch tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import runtime
from ..kernels.mamba2_layer import OPERATOR, Mamba2LayerProblem
from ..reference.mamba2_layer import mamba2_layer as reference
from ..spec import KernelSpec, Loads
from . import checks, layer_views
from . import selective_state_update_tokens as several
from .calls import Call, operator
from .checks import DTYPES, INDEX
from .planning import Caller, Family

NAMES = (
    "xBC", "state", "conv_state", "conv_weight", "conv_bias", "dt", "A", "D", "z", "dt_bias", "norm_weight", "out", "state_indices",
    "rand_seed", "arrivals",
)  # fmt: skip


class Options(NamedTuple):
    """What a call says beside its tensors."""

    eps: float
    group_size: int | None
    norm_before_gate: bool
    dt_softplus: bool
    dt_limit: tuple[float, float] | None
    A_is_log: bool
    pad_slot_id: int
    philox_rounds: int


@operator(like="xBC")
def mamba2_layer(
    xBC: Tensor,
    dt: Tensor,
    z: Tensor | None,
    conv_state: Tensor,
    state: Tensor,
    arrivals: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    *,
    norm_eps: float = 1e-5,
    norm_group_size: int | None = None,
    norm_before_gate: bool = False,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] | None = None,
    A_is_log: bool = False,
    state_indices: Tensor | None = None,
    rand_seed: Tensor | None = None,
    philox_rounds: int = 10,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """A decode step of a Mamba-2 layer, from what its in-projection gives to what its out-projection takes.

    x, B, C <- silu(convolution of xBC); state <- exp(dt A) state + dt x B; y = C state + D x; out = the gated RMS norm of y and z.
    H heads of P rows (headdim), N = d_state, G groups of heads that share B and C; channels = H P + 2 G N, in the order x, B, C. One
    kernel convolves and updates the states, and one behind it norms. The same bits as causal_conv1d_update with SiLU,
    selective_state_update and gated_rms_norm, one after the other. Floating tensors may be f32, f16 or bf16, each its own, but for
    xBC and conv_state, which go together; arithmetic is f32.

    xBC: [batch, channels]; dt: [batch, H]; z, out: [batch, H P]: views of the in-projection's output, with any strides
    conv_state: [slots, channels, width - 1 or width], updated in place, the newest input last; any strides
    state: [slots, H, P, N], updated in place; its last three axes must be dense
    arrivals: [slots, G] int32 of zeros, kept by the caller with the states: counts, within a launch, the blocks that have read a window
    conv_weight: [channels, width], width 2 … 8; conv_bias: [channels] or None
    A: [H], negative, or with A_is_log what checkpoints hold, log(-A); D: [H] or [H, P]; dt_bias: [H]
    norm_weight: [H P], or [norm_group_size] for all groups; None: no norm, and y is multiplied by silu(z), where there is a z
    norm_group_size: channels that are normed together, None for all of a row; norm_before_gate: z gates what is normed already
    dt_softplus, dt_limit, state_indices, rand_seed, philox_rounds, pad_slot_id: as in selective_state_update, of both states. A padded row
        gets a zero output
    pdl: whether the kernels may start while the ones ahead of them in the stream end; None = where the device can (sm_90 and later)

    Returns out (new, of xBC's dtype, if not given). CPU tensors run the reference implementation.
    Raises ArgumentError, UnsupportedError, CaptureError, NotBuiltError, CompileError, LoadError, LaunchError as selective_state_update.
    Source: Dao & Gu 2024 (arXiv 2405.21060); the norm: state-spaces/mamba.
    """
    if out is None and isinstance(state, Tensor) and isinstance(xBC, Tensor):
        out = xBC.new_empty(*xBC.shape[:1], *([state.shape[1] * state.shape[2]] if state.dim() == 4 else []))
    if rand_seed is None or philox_rounds == 0:
        rand_seed, philox_rounds = None, 0
    given = (
        xBC, state, conv_state, conv_weight, conv_bias, dt, A, D, z, dt_bias, norm_weight, out, state_indices, rand_seed, arrivals,
    )  # fmt: skip
    options = Options(norm_eps, norm_group_size, norm_before_gate, dt_softplus, dt_limit, A_is_log, pad_slot_id, philox_rounds)
    return Call(CALLER, given, options, pdl)


def _check_options(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> None:
    def number(value: object, kind: type | tuple[type, ...]) -> bool:
        return isinstance(value, kind) and not isinstance(value, bool)

    several.check_options(named, (options.dt_softplus, options.dt_limit, options.pad_slot_id, options.philox_rounds), problems)
    eps, size = options.eps, options.group_size
    if not number(eps, (int, float)) or not 0 <= eps < math.inf:
        problems.append(f"norm_eps is {eps!r}, not a number from 0 on")
    if size is not None and not (number(size, int) and size > 0):
        problems.append(f"norm_group_size is {size!r}, not a positive integer or None")
    switches = {"norm_before_gate": options.norm_before_gate, "dt_softplus": options.dt_softplus, "A_is_log": options.A_is_log}
    problems += [f"{name} is {value!r}, not True or False" for name, value in switches.items() if value not in (True, False)]


def views_of(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands with heads: z, out [batch, H, P]; A, D, dt_bias [H, P]; norm_weight [groups, size]. Adds to `problems`."""
    _check_options(named, options, problems)
    if not checks.check_tensors(named, problems):
        return {}
    checks.check_common(named, "state", problems)
    state, xBC, window = named["state"], named["xBC"], named["conv_state"]
    if state.dim() != 4 or xBC.dim() != 2:
        wanted = "[slots, heads, headdim, d_state] and [batch, channels]"
        problems.append(f"state is {list(state.shape)} and xBC {list(xBC.shape)}, not {wanted}")
        return {}
    if window.dtype != xBC.dtype:
        problems.append(f"conv_state is {window.dtype} and xBC {xBC.dtype}: the window holds what comes in")
    if "norm_weight" in named and "z" not in named:
        problems.append("norm_weight is given without z: the norm of a layer has a gate")
    if not _check_shapes(named, options, problems):
        return {}
    layer_views.check_memory(named, xBC.shape[0], problems)
    layer_views.check_dense(named, ("z", "out"), problems)
    return {} if problems else _with_heads(named, options)


def _check_shapes(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> bool:
    (_, H, P, N), (batch, channels) = named["state"].shape, named["xBC"].shape
    inner = H * P
    groups, rest = divmod(channels - inner, 2 * N) if N else (0, 1)
    if groups < 1 or rest or H % groups:
        problems.append(
            f"xBC is {list(named['xBC'].shape)}: not {inner} channels of x, and {N} of B and of C for each group of the {H} heads"
        )
        return False
    size = _size(named, options)
    if inner % size:
        problems.append(f"norm_group_size is {size}, which does not divide {inner} channels")
        return False
    allowed = {
        **dict.fromkeys(("z", "out"), {"[batch, heads * headdim]": (batch, inner)}),
        "dt": {"[batch, heads]": (batch, H)},
        **dict.fromkeys(("A", "dt_bias"), {"[heads]": (H,)}),
        "D": {"[heads]": (H,), "[heads, headdim]": (H, P)},
        "norm_weight": {"[heads * headdim]": (inner,), "[norm_group_size]": (size,)},
    }
    fits = [checks.check_shape(n, named[n], shapes, problems) for n, shapes in allowed.items() if n in named]
    return all([*fits, layer_views.check_channels(named, "xBC", groups, problems)])


def _with_heads(named: Mapping[str, Tensor], options: Options) -> dict[str, Tensor]:
    slots, H, P, _ = named["state"].shape
    size = _size(named, options)
    views = dict(named) | {n: named[n].unflatten(1, (H, P)) for n in ("z", "out") if n in named}
    views |= {n: named[n].unsqueeze(-1).expand(H, P) for n in ("A", "D", "dt_bias") if n in named and named[n].dim() == 1}
    if "norm_weight" in named:
        views["norm_weight"] = named["norm_weight"].unflatten(0, (-1, size)).expand(H * P // size, size)
    if "rand_seed" in views:
        views["rand_seed"] = views["rand_seed"].expand(slots)
    return views


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> Mamba2LayerProblem:
    """The problem that checked operands pose, given where they lie."""
    state = views["state"]
    _, H, P, N = state.shape
    normed = "norm_weight" in views
    vector = min(16 // state.element_size(), N & -N)  # elements that a lane owns
    dtype = {name: DTYPES[views[name].dtype] for name in ("state", "dt", "A", "out")}
    dtype |= {name: DTYPES[views[name].dtype] if name in views else None for name in ("D", "dt_bias")}
    norm = layer_views.norm_fields(views, pointers, _size(views, options), options.norm_before_gate, "silu") if normed else {}
    return Mamba2LayerProblem(
        d_state=N,
        headdim=P,
        nheads=H,
        ngroups=views["arrivals"].shape[1],
        **dict.fromkeys(("x", "B", "C"), DTYPES[views["xBC"].dtype]),
        **dtype,
        z=DTYPES[views["z"].dtype] if "z" in views and not normed else None,
        dt_softplus=options.dt_softplus,
        dt_limit=options.dt_limit is not None,
        A_is_log=options.A_is_log,
        index=INDEX[views["state_indices"].dtype if "state_indices" in views else None],
        state_loads=Loads.VECTOR if checks.aligned(state, pointers["state"], vector) else Loads.ELEMENT,
        philox_rounds=options.philox_rounds,
        **layer_views.conv_fields(views, pointers, "xBC"),
        **norm,
    )


def _size(views: Mapping[str, Tensor], options: Options) -> int:
    """Channels that are normed together: all of a row where no such number is given, or where what is given is none."""
    size, (_, H, P, _) = options.group_size, views["state"].shape
    return size if isinstance(size, int) and size > 0 else H * P


_AXES = {
    "state": ("slot",), "dt": ("batch", "head"), "A": ("head", "row"), "D": ("head", "row"), "dt_bias": ("head", "row"),
    "rand_seed": ("slot",), "z": ("batch", "head", "row"), "out": ("batch", "head", "row"), "state_indices": ("batch",),
}  # fmt: skip


def kernel_values(spec: KernelSpec, views: Mapping[str, Tensor], options: Options) -> dict[str, int | float]:
    """Every argument of one of the kernels that is not a pointer."""
    low, high = (0.0, 0.0) if options.dt_limit is None else options.dt_limit
    given = {"pad_slot_id": options.pad_slot_id, "eps": float(options.eps), "dt_min": float(low), "dt_max": float(high)}
    return layer_views.kernel_values(spec, views, _AXES, given)


FAMILY = Family(
    OPERATOR,
    written=layer_views.WRITTEN,
    problem_of=problem_of,
    size_of=lambda views: views["out"].shape[0],
    grid_of=layer_views.grid_of,
    values_of=kernel_values,
)


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    eps, _, first, *rest = options
    reference(views, eps, first, *rest, dtype=dtype)


# torch.library: what torch.compile and opcheck see.
_library = torch.library.Library("ssmgen", "FRAGMENT")
_library.define(
    "mamba2_layer(Tensor xBC, Tensor(a!) state, Tensor(b!) conv_state, Tensor conv_weight, Tensor? conv_bias, Tensor dt, Tensor A, "
    "Tensor? D, Tensor? z, Tensor? dt_bias, Tensor? norm_weight, Tensor(c!) out, Tensor? state_indices, Tensor? rand_seed, "
    "Tensor(d!) arrivals, float eps, int? group_size, bool norm_before_gate, bool dt_softplus, float[]? dt_limit, bool A_is_log, "
    "int pad_slot_id, int philox_rounds, bool? pdl) -> ()",
    tags=torch.Tag.needs_fixed_stride_order,
)


def _dispatch(given: Sequence[Any], options: Options, pdl: bool | None) -> None:
    limit = None if options.dt_limit is None else list(options.dt_limit)
    torch.ops.ssmgen.mamba2_layer(*given, *options._replace(dt_limit=limit), pdl)


@torch.library.impl(_library, "mamba2_layer", "CUDA")
@torch.library.impl(_library, "mamba2_layer", "CPU")
def _op(*args: Any) -> None:
    options = Options(*args[len(NAMES) : -1])
    limit = None if options.dt_limit is None else tuple(options.dt_limit)
    CALLER.plan(args[: len(NAMES)], options._replace(dt_limit=limit), args[-1])()


@torch.library.register_fake("ssmgen::mamba2_layer", lib=_library)
def _fake(*args: Any) -> None:
    return None


_required = frozenset(("xBC", "state", "conv_state", "conv_weight", "dt", "A", "out", "arrivals"))
CALLER = Caller(FAMILY, OPERATOR, NAMES, _required, views_of, run_reference, _dispatch, runtime.Signatures())
