"""mamba3_layer: a Mamba-3 layer's decode step between its projections, as mamba3_state_update on views of the in-projection's output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...calls import checks
from ...calls.operator import operator, run
from .call import FORMS
from .operands import OPERANDS
from .planning import CALLER, Options, views_of
from .row import PARTS, Sizes, sizes_of


def parts_of(projected: Tensor, sizes: Sizes) -> dict[str, Tensor] | None:
    """Views of projected rows by operand, with any axes before the rows; None if no number of groups gives their width."""
    groups = sizes.groups(projected.shape[-1])
    if groups is None:
        return None
    parts = dict(zip(PARTS, projected.split(sizes.widths(groups), -1), strict=True))
    parts |= {name: parts[name].unflatten(-1, (sizes.heads, sizes.headdim)) for name in ("z", "x")}
    return parts | {name: parts[name].unflatten(-1, (sizes.rank, groups, sizes.d_state)) for name in ("B", "C")}


def _views_of(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """As of mamba3_state_update. A row that was not split is an error already."""
    if named["x"] is None:
        checks.check_tensors({name: t for name, t in named.items() if t is not None}, problems)
        return {}
    return views_of(named, options, problems)


LAYER = CALLER._replace(name="mamba3_layer", views_of=_views_of, words=dict.fromkeys(PARTS, "projected"))


@operator(like="projected", **FORMS)
def mamba3_layer(
    projected: Tensor,
    state: Tensor,
    k_state: Tensor,
    v_state: Tensor,
    angle_state: Tensor,
    A_form: str,
    rotary: str,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    B_norm: Tensor | None = None,
    C_norm: Tensor | None = None,
    B_bias: Tensor | None = None,
    C_bias: Tensor | None = None,
    mimo_x: Tensor | None = None,
    mimo_z: Tensor | None = None,
    mimo_o: Tensor | None = None,
    norm_weight: Tensor | None = None,
    *,
    eps: float = 1e-5,
    A_floor: float = 1e-4,
    state_indices: Tensor | None = None,
    dst_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    rand_seed: Tensor | None = None,
    philox_rounds: int = 10,
    pad_slot_id: int = -1,
    zero_padding: bool = True,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """Decode steps of a Mamba-3 layer, from its in-projection's output to its out-projection's input, in one launch.

    This is `mamba3_state_update` on views of the projected row; nothing is copied. H heads of P rows (headdim), N = d_state, G groups of
    heads that share B and C, R ranks, n angles of a head. […] is [batch], or [batch, T] for several tokens.

    projected: […, 2 H P + 2 R G N + 3 H + n], any strides. A row holds z [H P], x [H P], B [R G N], C [R G N], dt [H], A [H], trap [H] and
        angle [n], in this order, as the in_proj of mamba-ssm and flash-linear-attention returns them. dt, A, trap and angle are logits.
        The width gives G
    state: [slots, H, P, N], k_state: [slots, R, H, N], v_state: [slots, H, P], angle_state: [slots, H, n] f32: updated in place.
        SISO states may lack the axis R
    norm_weight: [H P]: each rank's output is RMS-normed over P with eps, before the gate; None: it is not
    out: […, H P]
    A_form, rotary, A_floor, eps, and all other operands: as in mamba3_state_update

    Returns out (new, of projected's dtype, if not given). CPU tensors run the reference implementation.
    Raises ArgumentError, UnsupportedError, CaptureError, NotBuiltError, CompileError, LoadError, LaunchError as mamba3_state_update.
    Source: Mamba-3 (arXiv 2603.15569).
    """
    found = sizes_of(state, k_state, angle_state)
    parts = parts_of(projected, found) if found and isinstance(projected, Tensor) and projected.dim() in (2, 3) else None
    objections = checks.padding_objections(zero_padding, out)
    if parts is None:
        objections += (_said(projected, state, k_state, angle_state, found),)
    elif mimo_x is not None and mimo_o is None:
        objections += ("mimo_x is given without mimo_o; expected both: the out-projection takes the sum over ranks",)
    if out is None and parts is not None:
        out = projected.new_empty((*projected.shape[:-1], state.shape[1] * state.shape[2]))
    if rand_seed is None or philox_rounds == 0:
        rand_seed, philox_rounds = None, 0
    within = dict.fromkeys(parts or {}, projected)
    weights: dict[str, Any] = {"norm_weight": norm_weight}
    if parts is not None and isinstance(norm_weight, Tensor) and norm_weight.shape == (state.shape[1] * state.shape[2],):
        weights, within = {"norm_weight": norm_weight.unflatten(0, state.shape[1:3])}, {**within, "norm_weight": norm_weight}
    tensors = OPERANDS.Tensors(
        state=state, k_state=k_state, v_state=v_state, angle_state=angle_state, **parts or {}, D=D, dt_bias=dt_bias, B_norm=B_norm,
        C_norm=C_norm, B_bias=B_bias, C_bias=C_bias, mimo_x=mimo_x, mimo_z=mimo_z, mimo_o=mimo_o, **weights, out=out,
        state_indices=state_indices, dst_state_indices=dst_state_indices, num_accepted_tokens=num_accepted_tokens, rand_seed=rand_seed,
    )  # fmt: skip
    options = Options(A_form, rotary, True, True, eps, A_floor, pad_slot_id, philox_rounds, zero_padding)
    return run(LAYER, tensors, options, pdl, objections=objections, within=within)


def _said(projected: Any, state: Any, k_state: Any, angle_state: Any, found: Sizes | None) -> str:
    """Why a row cannot be split."""
    if found is None:
        shapes = ", ".join([f"{n} is {_shape(t)}" for n, t in (("state", state), ("k_state", k_state), ("angle_state", angle_state))])
        return f"{shapes}; expected [slots, heads, headdim, d_state], [slots, rank, heads, d_state] and [slots, heads, angles]"
    width = f"{found.fixed()} + {found.group()} groups"
    return f"projected is {_shape(projected)}; expected [batch, {width}] or [batch, tokens, {width}]"


def _shape(t: Any) -> str:
    return str(list(t.shape)) if isinstance(t, Tensor) else f"a {type(t).__name__}"
