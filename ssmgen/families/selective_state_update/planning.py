"""A call of selective_state_update: its operands checked, turned into a problem, and planned. `call.py` has the public function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calls import checks
from ...calls.checks import STATES, index_of, loads_of
from ...calls.dispatch import callers
from ...calls.planning import Family
from ...engine.noise import check_seed
from ...engine.recurrences.mamba.operands import OF_SEVERAL, OPERANDS
from ...engine.recurrences.mamba.problem import SsuProblem
from ...engine.recurrences.mamba.reference import reference
from ...engine.recurrences.slots import check_pool, check_slots, check_tokens, slot_shapes
from ...engine.rows import loaded
from ...spec.kernel import PoolMode, Update
from .spec import OPERATOR, SsuSpec

_WEIGHTS = ("A", "D", "dt_bias")


class Options(NamedTuple):
    """The arguments of a call that are not tensors."""

    dt_softplus: bool
    dt_limit: tuple[float, float] | None
    pad_slot_id: int
    philox_rounds: int
    update_state: bool
    zero_padding: bool = True


def views_of(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands as the reference takes them, with a tokens axis if there may be several tokens. Adds every error of dtypes, devices,
    shapes and strides to `problems`; the result is usable only if there are none."""
    update_state = options.update_state
    check_seed(named, update_state, problems)
    if not checks.check_tensors(named, problems):
        return {}
    checks.check_types(OPERANDS, named, "state", problems)
    if "intermediate_state_scales" in named and "intermediate_states" not in named:
        problems.append(
            "intermediate_state_scales is given without intermediate_states; expected both. "
            "Pass intermediate_states, or leave out the scales."
        )
        named = {n: t for n, t in named.items() if n != "intermediate_state_scales"}
    several = named["x"].dim() > 3 or not update_state or any(name in named for name in OF_SEVERAL)
    return _token_views(named, update_state, problems) if several else _headed_views(dict(named), problems)


def is_tied(views: Mapping[str, Tensor]) -> bool:
    """Whether A, dt and dt_bias hold one value per head, seen as [H, P, N], […, H, P] and [H, P]."""

    def shared(name: str, *axes: int) -> bool:
        t = views.get(name)
        return t is None or all(t.stride(a) == 0 or t.shape[a] == 1 for a in axes)

    return shared("A", 1, 2) and shared("dt", -1) and shared("dt_bias", 1)


def _headed_views(named: dict[str, Tensor], problems: list[str]) -> dict[str, Tensor]:
    """Operands of one token, as [slots, H, P, N], [batch, H, P], [H, P, N], [batch, G, N], [H, P], with stride 0 along shared axes."""
    state, x, B = named["state"], named["x"], named["B"]
    if state.dim() not in (3, 4):
        problems.append(f"state is {list(state.shape)}; expected [slots, heads, headdim, d_state] or [slots, dim, d_state]")
        return {}
    heads = state.dim() == 4
    sizes = dict(zip(("slot", "head", "row", "n") if heads else ("slot", "dim", "n"), state.shape, strict=True))
    if x.dim() != (3 if heads else 2):
        wanted = "[batch, heads, headdim]" if heads else "[batch, dim]"
        tokens = ". Several tokens need heads." if x.dim() == 3 and not heads else ""
        problems.append(f"x is {list(x.shape)}; expected {wanted}, as state is {list(state.shape)}{tokens}")
        return {}
    if heads and B.dim() != 3:
        problems.append(f"B is {list(B.shape)}; expected [batch, groups, d_state]")
        return {}
    sizes |= {"batch": x.shape[0]} | ({"group": B.shape[1]} if heads else {})
    if heads:
        check_groups(B, sizes, problems)
    if not checks.check_shapes(OPERANDS, named, sizes, problems, lead=("batch", x.shape[:1])):
        return {}
    views = {name: OPERANDS.view(name, t, sizes) for name, t in named.items()}
    _check_layout(views, problems)
    return views


def check_groups(B: Tensor, sizes: Mapping[str, int], problems: list[str]) -> None:
    """Whether heads divide into B's groups."""
    if sizes["group"] == 0 or sizes["head"] % sizes["group"]:
        problems.append(f"B is {list(B.shape)} but heads {sizes['head']} is not a multiple of its groups {sizes['group']}")


def _check_layout(views: dict[str, Tensor], problems: list[str]) -> None:
    check_pool("state", views["state"], problems)
    checks.check_distinct(views, ("out", "state_scale"), problems)
    check_slots(views, views["x"].shape[0], problems)
    for name, t in views.items():
        if name != "state":
            checks.check_strides_fit(name, t, 0 if name in _WEIGHTS else 1, problems)


def _token_views(named: Mapping[str, Tensor], update_state: bool, problems: list[str]) -> dict[str, Tensor]:
    """Operands of several tokens, with a tokens axis after the batch axis; see the reference."""
    state, x, B = named["state"], named["x"], named["B"]
    ragged = "cu_seqlens" in named
    if state.dim() != 4:
        problems.append(f"state is {list(state.shape)}; expected [slots, heads, headdim, d_state], since several tokens need heads")
    if x.dim() not in (3, 4):
        problems.append(f"x is {list(x.shape)}; expected [batch, tokens, heads, headdim]" + (" or packed, [tokens, …]" if ragged else ""))
    elif B.dim() != x.dim():
        problems.append(f"B is {list(B.shape)} and x is {list(x.shape)}; expected a tokens axis in both or in neither")
    elif ragged and x.dim() == 4 and x.shape[0] != 1:
        problems.append(f"x is {list(x.shape)} with cu_seqlens; expected packed sequences, [tokens, …] or [1, tokens, …]")
    if state.dim() != 4 or x.dim() not in (3, 4) or B.dim() != x.dim():
        return {}
    lead = x.shape[:-2]
    sizes = dict(zip(("slot", "head", "row", "n"), state.shape, strict=True)) | {"group": B.shape[-2]}
    sizes["batch"] = max(named["cu_seqlens"].numel() - 1, 0) if ragged else lead[0]
    sizes |= {"starts": sizes["batch"] + 1, "token": 1 if len(lead) == 1 else lead[1]}
    words = {(1, False): "batch", (2, False): "batch, tokens", (1, True): "tokens", (2, True): "1, tokens"}[len(lead), ragged]
    check_groups(B, sizes, problems)
    if not checks.check_shapes(OPERANDS, named, sizes, problems, _own_shapes(named, sizes, ragged), (words, lead)):
        return {}
    views = {n: OPERANDS.view(n, t, sizes, len(lead)) if n in OPERANDS.tokenwise or n in _WEIGHTS else t for n, t in named.items()}
    if len(lead) == 1:
        views |= {n: views[n].unsqueeze(0 if ragged else 1) for n in OPERANDS.tokenwise if n in views}
    if "rand_seed" in views:
        views["rand_seed"] = views["rand_seed"].expand(state.shape[0])
    _check_layout_of_tokens(views, update_state, sizes["batch"], problems)
    return views


def _own_shapes(named: Mapping[str, Tensor], sizes: Mapping[str, int], ragged: bool) -> dict[str, checks.Shapes]:
    """Shapes that other operands of a call of several tokens decide: {operand: {shape in words: sizes}}"""
    batch, T = sizes["batch"], sizes["token"]
    row = (sizes["head"], sizes["row"])
    allowed = slot_shapes(named, batch, T, ragged)
    if "intermediate_states" in named:
        kept = named["intermediate_states"].shape
        by_index = "intermediate_state_indices" in named
        rows = kept[0] if len(kept) == 5 and (by_index or kept[0] >= batch) else batch
        columns = kept[1] if len(kept) == 5 and (ragged or kept[1] >= T) else T
        words = "[rows, tokens or more" if by_index else "[batch or more, tokens or more"
        allowed["intermediate_states"] = {f"{words}, heads, headdim, d_state]": (rows, columns, *row, sizes["n"])}
        allowed["intermediate_state_scales"] = {"[rows, tokens, heads, headdim] as intermediate_states": (rows, columns, *row)}
    return allowed


def _check_layout_of_tokens(views: Mapping[str, Tensor], update_state: bool, batch: int, problems: list[str]) -> None:
    check_pool("state", views["state"], problems)
    if "intermediate_states" in views:
        checks.check_dense("intermediate_states", views["intermediate_states"], problems)
    checks.check_distinct(views, ("out", "intermediate_states", *OPERANDS.scales.values()), problems)
    check_slots(views, batch, problems, update_state)
    check_tokens(views, problems)
    for name, t in views.items():
        if name not in ("state", "intermediate_states", "cu_seqlens"):
            # Offsets over batch and token are 64-bit products of 32-bit strides.
            first = 2 if name in (*OPERANDS.tokenwise, "intermediate_state_scales") else 1 if name == "state_scale" else 0
            checks.check_strides_fit(name, t, first, problems)


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
