"""What mamba2_layer checks of its operands and tells its kernels, of one token per sequence and of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calls import checks
from ...calls.checks import DTYPES, INDEX
from ...engine import layer_views
from .reference import mamba2_layer as reference

NAMES = (
    "xBC", "state", "conv_state", "conv_weight", "conv_bias", "dt", "A", "D", "z", "dt_bias", "norm_weight", "out", "state_indices",
    "rand_seed", "arrivals",
)  # fmt: skip
REQUIRED = frozenset(("xBC", "state", "conv_state", "conv_weight", "dt", "A", "out", "arrivals"))
TOKENWISE = ("xBC", "dt", "z", "out")


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
    update_state: bool = True

    def dispatched(self) -> tuple[Any, ...]:
        """As torch's dispatcher takes them, which knows no tuples."""
        return self._replace(dt_limit=None if self.dt_limit is None else list(self.dt_limit))

    @classmethod
    def received(cls, given: Sequence[Any]) -> Options:
        """Of what the dispatcher gives."""
        options = cls(*given)
        return options._replace(dt_limit=None if options.dt_limit is None else tuple(options.dt_limit))


def check_operands(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> bool:
    """Whether shapes fit: xBC is [batch, channels], or [batch, tokens, channels]. Adds to `problems` all that is wrong."""
    checks.check_common(named, "state", problems)
    state, xBC, window = named["state"], named["xBC"], named["conv_state"]
    if state.dim() != 4 or xBC.dim() not in (2, 3):
        wanted = "[slots, heads, headdim, d_state] and [batch, channels] or [batch, tokens, channels]"
        problems.append(f"state is {list(state.shape)} and xBC {list(xBC.shape)}, not {wanted}")
        return False
    if window.dtype != xBC.dtype:
        problems.append(f"conv_state is {window.dtype} and xBC {xBC.dtype}: the window holds what comes in")
    if "norm_weight" in named and "z" not in named:
        problems.append("norm_weight is given without z: the norm of a layer has a gate")
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
            f"xBC is {list(named['xBC'].shape)}: not {inner} channels of x, and {N} of B and of C for each group of the {H} heads"
        )
        return False
    size = size_of(named, options)
    if inner % size:
        problems.append(f"norm_group_size is {size}, which does not divide {inner} channels")
        return False
    words = "[batch, tokens" if len(rows) == 2 else "[batch"
    allowed = {
        **dict.fromkeys(("z", "out"), {f"{words}, heads * headdim]": (*rows, inner)}),
        "dt": {f"{words}, heads]": (*rows, H)},
        **dict.fromkeys(("A", "dt_bias"), {"[heads]": (H,)}),
        "D": {"[heads]": (H,), "[heads, headdim]": (H, P)},
        "norm_weight": {"[heads * headdim]": (inner,), "[norm_group_size]": (size,)},
    }
    fits = [checks.check_shape(n, named[n], shapes, problems) for n, shapes in allowed.items() if n in named]
    return all([*fits, layer_views.check_channels(named, "xBC", groups, problems)])


def with_heads(named: Mapping[str, Tensor], options: Options) -> dict[str, Tensor]:
    """z, out [batch(, tokens), H, P]; A, D, dt_bias [H, P]; norm_weight [groups, size]; rand_seed [slots]."""
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
    """Channels that are normed together: all of a row where no such number is given."""
    _, H, P, _ = views["state"].shape
    return H * P if options.group_size is None else options.group_size


def lane_vector(views: Mapping[str, Tensor]) -> int:
    """Elements of a state that a lane owns."""
    state = views["state"]
    return min(16 // state.element_size(), state.shape[3] & -state.shape[3])


def problem_fields(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> dict[str, Any]:
    """Of either problem: of the recurrence, but for the ways in which the state is read and written, and of the norm."""
    _, H, P, N = views["state"].shape
    normed = "norm_weight" in views
    dtype = {name: DTYPES[views[name].dtype] for name in ("state", "dt", "A", "out")}
    dtype |= {name: DTYPES[views[name].dtype] if name in views else None for name in ("D", "dt_bias")}
    norm = layer_views.norm_fields(views, pointers, size_of(views, options), options.norm_before_gate, "silu") if normed else {}
    return {
        "d_state": N,
        "headdim": P,
        "nheads": H,
        "ngroups": views["arrivals"].shape[1],
        **dict.fromkeys(("x", "B", "C"), DTYPES[views["xBC"].dtype]),
        **dtype,
        "z": DTYPES[views["z"].dtype] if "z" in views and not normed else None,
        "dt_softplus": options.dt_softplus,
        "dt_limit": options.dt_limit is not None,
        "A_is_log": options.A_is_log,
        "index": INDEX[views["state_indices"].dtype if "state_indices" in views else None],
        "philox_rounds": options.philox_rounds,
        **norm,
    }


def scalars(options: Options) -> dict[str, int | float]:
    """Arguments of kernels that the options say."""
    low, high = (0.0, 0.0) if options.dt_limit is None else options.dt_limit
    return {"pad_slot_id": options.pad_slot_id, "eps": float(options.eps), "dt_min": float(low), "dt_max": float(high)}


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    eps, _, first, *rest = options
    reference(views, eps, first, *rest, dtype=dtype)
