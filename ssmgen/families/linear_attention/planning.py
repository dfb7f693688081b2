"""A linear-attention call: its operands checked, turned into a problem, and planned. `call.py` has the public functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...calls import checks
from ...calls.checks import INDEX, STATES
from ...calls.dispatch import callers
from ...calls.planning import Family
from ...engine.recurrences.attention.operands import KEY_VECTORS, OPERANDS
from ...engine.recurrences.attention.problem import Beta, Delta, Gate, LinearAttentionProblem, Tokens
from ...engine.recurrences.attention.reference import reference
from ...engine.rows import loaded
from ...spec.kernel import Index, Layout, Loads, PoolMode, Ring, Update
from . import commit
from .operands import FUNCTIONS
from .spec import OPERATOR, LinearAttentionSpec
from .views import Options, token_views


def batch_of(views: Mapping[str, Tensor]) -> int:
    if "out" not in views:
        return views["num_accepted_tokens"].shape[0]
    return views["out"].shape[0] if "cu_seqlens" not in views else views["cu_seqlens"].shape[0] - 1


def views_of(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands in token form (see reference.py). Adds every error to `problems`, except errors of addresses."""
    return commit.views_of(named, options.layout, problems) if options.commit else token_views(named, options, problems)


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> LinearAttentionProblem:
    """The problem of checked operands and their addresses."""
    if options.commit:
        return commit.problem_of(views, pointers, options)
    state, form = views["state"], options.form
    _, HV, V, K = state.shape
    ragged = "cu_seqlens" in views
    kept, target = views.get("intermediate_states"), views.get("dst_state_indices")
    each = target is not None and target.dim() == 2
    ring = "ring_k" in views
    several = ragged or each or ring or kept is not None or views["q"].shape[1] != 1
    lane = min(16 // state.element_size(), K & -K)  # elements of a lane's vector

    along = -1 if options.layout == "vk" else -2
    states = [("state", state), *([("intermediate_states", kept)] if kept is not None else [])]
    wide = lane if options.layout == "vk" else min(16 // state.element_size(), V & -V)
    vectors = [n for n in (*KEY_VECTORS, "ring_k", "ring_gk") if n in views] + (["dt_bias"] if "gk" in views and "dt_bias" in views else [])
    present: dict[str, Any] = {field: STATES[views[name].dtype] for field, name in OPERANDS.fields().items() if name in views}

    def index(name: str) -> Index:
        return INDEX[views[name].dtype if name in views else None]

    problem = LinearAttentionProblem(
        dim_k=K,
        dim_v=V,
        nheads=HV,
        key_heads=views["q"].shape[2],
        delta=Delta(form.delta),
        layout=Layout(options.layout),
        tokens=Tokens.RAGGED if ragged else Tokens.MANY if several else Tokens.ONE,
        **present,
        gate=Gate(form.gate),
        beta_form=Beta(form.beta),
        beta_rows="beta" in views and views["beta"].dim() == 4,
        l2norm=form.l2norm,
        index=index("state_indices"),
        accepted=index("num_accepted_tokens"),
        cu_seqlens=index("cu_seqlens"),
        update=Update.NONE if not options.update_state else Update.EACH if each else Update.FINAL,
        pool=PoolMode.SPLIT if target is not None else PoolMode.SINGLE,
        ring=Ring.NONE if not ring else Ring.READY if options.ring_ready else Ring.STORE,
        intermediates=kept is not None,
        parents=index("parents"),
        kept_index=index("intermediate_state_indices"),
        state_loads=Loads.VECTOR if all(checks.aligned(t, pointers[n], wide, along) for n, t in states) else Loads.ELEMENT,
        heads_apart=HV > 1 and state.stride(1) != V * K,
        zero_padding=options.zero_padding,
        philox_rounds=options.philox_rounds,
        operand_loads=Loads.VECTOR if all(checks.aligned(views[n], pointers[n], lane) for n in vectors) else Loads.ELEMENT,
    )
    return loaded(problem).for_tokens(views["q"].shape[1])


_COLUMNS = {
    "columns": "state_indices",
    "dst_columns": "dst_state_indices",
    "rows_kept": "intermediate_states",
    "parent_columns": "parents",
    "ring_rows": "ring_k",
}


def kernel_values(spec: LinearAttentionSpec, views: Mapping[str, Tensor], options: Options) -> dict[str, int | float]:
    """Every kernel argument that is not a pointer."""
    values: dict[str, int | float] = {
        "slots": views["state"].shape[1 if options.commit else 0],
        "pad_slot_id": options.pad_slot_id,
        "scale": float(options.scale),
        "lower_bound": float(options.lower_bound),
    }
    if options.commit:
        values |= {"most_tokens": views["k"].shape[2], "sequences": batch_of(views)}
    else:
        values |= dict.fromkeys(("tokens", "total_tokens"), views["out"].shape[1])
        for name, operand in _COLUMNS.items():
            if operand in views and views[operand].dim() > 1:
                values[name] = views[operand].shape[1]
        if "intermediate_states" in views:
            values["kept_rows"] = views["intermediate_states"].shape[0]
    return values | OPERANDS.stride_values(spec, views, int(options.commit))


def grid_of(spec: LinearAttentionSpec, views: Mapping[str, Tensor]) -> int:
    layers = views["state"].shape[0] if spec.commit else 1
    return layers * batch_of(views) * spec.nheads * spec.tiles


FAMILY = Family(
    OPERATOR,
    written=OPERANDS.written,
    problem_of=problem_of,
    size_of=lambda views: batch_of(views) if views["v"].numel() else 0,
    grid_of=grid_of,
    values_of=kernel_values,
)


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    form, scale, lower_bound, layout, pad_slot_id, update_state, is_commit, zero_padding, philox_rounds, ring_ready = options
    if is_commit:
        commit.reference(views, form, pad_slot_id, lower_bound, dtype)
    else:
        how: dict[str, Any] = {"scale": scale, "lower_bound": lower_bound, "pad_slot_id": pad_slot_id, "update_state": update_state}
        how |= {"zero_padding": zero_padding, "philox_rounds": philox_rounds, "keys_first": layout == "kv"}
        how["ring_ready"] = ring_ready
        reference(views, form, **how, dtype=dtype)


_TABLES = {name: OPERANDS.only(required=function.tensors) for name, function in FUNCTIONS.items()}
_WORDS = {name: function.words for name, function in FUNCTIONS.items()}
CALLERS = callers(FAMILY, _TABLES, Options, views_of, run_reference, words=_WORDS)
