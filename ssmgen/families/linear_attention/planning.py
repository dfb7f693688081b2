"""A linear-attention call: its operands checked, turned into a problem, and planned. `call.py` has the public functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calls import checks
from ...calls.checks import STATES, index_of
from ...calls.dispatch import callers
from ...calls.planning import Family
from ...engine.noise import check_seed
from ...engine.recurrences.attention.operands import KEY_VECTORS, OPERANDS, RINGED, RINGS, SHARED
from ...engine.recurrences.attention.problem import Beta, Delta, Gate, LinearAttentionProblem, Tokens
from ...engine.recurrences.attention.reference import reference
from ...engine.recurrences.attention.switches import Form
from ...engine.recurrences.slots import check_slots, check_tokens, slot_shapes
from ...engine.rows import loaded
from ...spec.kernel import Layout, Loads, PoolMode, Ring, Update
from . import commit, replaying
from .operands import FUNCTIONS
from .spec import OPERATOR, LinearAttentionSpec


class RawInputs(NamedTuple):
    """The raw inputs of a call's tokens, by slot. A speculative step stores them instead of states, and a commit replays them.

    k: [slots, T, HK, K]; v: [slots, T, HV, V]; g: [slots, T, HV], for kda [slots, T, HV, K]; beta: [slots, T, HV], or [slots, T, HV, V] if
    the call's beta has V too. Each has its operand's dtype. Commits of several layers at once add a leading layers axis.
    """

    k: Tensor
    v: Tensor
    g: Tensor | None = None
    beta: Tensor | None = None


def ring_objections(ring: object) -> tuple[str, ...]:
    """The error of a ring that is neither None nor a sequence of four tensors, in words."""
    if ring is None or (isinstance(ring, (tuple, list)) and len(ring) == 4):
        return ()
    count = f" of {len(ring)}" if isinstance(ring, (tuple, list)) else ""
    return (f"ring is a {type(ring).__name__}{count}; expected Ring(k, v, g, beta)",)


class Options(NamedTuple):
    """The arguments of a call that are not tensors."""

    form: Form
    scale: float
    lower_bound: float = 0.0
    layout: str = "vk"
    pad_slot_id: int = -1
    update_state: bool = True
    commit: bool = False  # k, v, g and beta are a ring's; there are neither q nor output
    zero_padding: bool = True
    philox_rounds: int = 0
    ring_ready: bool = False


def token_views(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """Views of the operands in token form. Adds errors to `problems`; the result is usable only if there are none."""
    check_seed(named, options.update_state, problems)
    if not checks.check_tensors(named, problems):
        return {}
    checks.check_types(OPERANDS, named, "state", problems)
    before = len(problems)
    state, q, v = named["state"], named["q"], named["v"]
    ragged = "cu_seqlens" in named
    if state.dim() != 4:
        problems.append(f"state is {list(state.shape)}; expected [slots, heads, {'V, K' if options.layout == 'vk' else 'K, V'}]")
    if q.dim() not in (3, 4):
        problems.append(f"q is {list(q.shape)}; expected [batch, heads, K] or [batch, tokens, heads, K]")
    if v.dim() != q.dim():
        problems.append(f"v is {list(v.shape)} and q is {list(q.shape)}; expected a tokens axis in both or in neither")
    if len(problems) > before:
        return {}
    views = dict(named)
    if options.layout == "kv":
        views["state"] = state = state.transpose(2, 3)
        if "intermediate_states" in named and named["intermediate_states"].dim() == 5:
            views["intermediate_states"] = named["intermediate_states"].transpose(3, 4)
    lead, (H, K), (_, HV, _, state_k) = q.shape[:-2], q.shape[-2:], state.shape
    batch = max(named["cu_seqlens"].numel() - 1, 0) if ragged else lead[0]
    if ragged and len(lead) == 2 and lead[0] != 1:
        problems.append(f"q is {list(q.shape)} with cu_seqlens; expected packed sequences, [tokens, …] or [1, tokens, …]")
    if state_k != K:
        problems.append(
            f"state is {list(named['state'].shape)} in layout {options.layout!r}, of K = {state_k}; expected {K}, the K of q. "
            "Check state_layout."
        )
    if H == 0 or HV % H:
        problems.append(f"state has {HV} heads; expected a multiple of the {H} of q and k")
    T = 1 if len(lead) == 1 else lead[1]
    sizes = {"slot": state.shape[0], "head": HV, "value": state.shape[2], "key": K, "group": H}
    sizes |= {"batch": batch, "starts": batch + 1, "token": T}
    words = {(1, False): "batch", (2, False): "batch, tokens", (1, True): "tokens", (2, True): "1, tokens"}[len(lead), ragged]
    own = _own_shapes(views, sizes, ragged)
    if "ring_position" in views or "ring_flush" in views:
        own |= replaying.shapes(views, lead, options, problems)
    elif any(n in views for n in RINGS):
        own |= _ring_shapes(views, lead, ragged, options.ring_ready, problems)
    elif options.ring_ready:
        problems.append("ring_ready is True without a ring; expected both. Pass ring.")
    fits = [checks.check_shapes(OPERANDS, {n: t for n, t in views.items() if n != "state"}, sizes, problems, own, (words, lead))]
    if len(problems) > before or not all(fits):
        return {}
    if "dt_bias" in views and "gk" in views and views["dt_bias"].dim() == 1:
        views["dt_bias"] = views["dt_bias"].unflatten(0, (HV, K))
    views |= {n: views[n].expand(*lead, *views[n].shape) for n, axes in SHARED.items() if n in views and views[n].dim() == len(axes)}
    if len(lead) == 1:
        views |= {n: views[n].unsqueeze(0 if ragged else 1) for n in OPERANDS.tokenwise if n in views}
    if "rand_seed" in views:
        views["rand_seed"] = views["rand_seed"].expand(state.shape[0])
    _check_layout(views, options, batch, problems)
    return views


Shapes = dict[str, checks.Shapes]  # of each operand


def _own_shapes(views: Mapping[str, Tensor], sizes: Mapping[str, int], ragged: bool) -> Shapes:
    """Allowed shapes of operands that depend on other operands."""
    batch, T, HV, K = sizes["batch"], sizes["token"], sizes["head"], sizes["key"]
    allowed = slot_shapes(views, batch, T, ragged)
    allowed["dt_bias"] = {"[heads, K]": (HV, K), "[heads * K]": (HV * K,)} if "gk" in views else {"[heads]": (HV,)}
    if "intermediate_states" in views:
        kept = views["intermediate_states"]
        at_least = kept.shape[1] if kept.dim() == 5 and (ragged or kept.shape[1] >= T) else T
        by_index = "intermediate_state_indices" in views and kept.dim() == 5
        words = "[rows, tokens or more, heads, V, K]" if by_index else "[batch, tokens or more, heads, V, K]"
        allowed["intermediate_states"] = {words: (kept.shape[0] if by_index else batch, at_least, HV, sizes["value"], K)}
    return allowed


def _ring_shapes(views: Mapping[str, Tensor], lead: Sequence[int], ragged: bool, ready: bool, problems: list[str]) -> Shapes:
    """Allowed shapes of a ring's tensors: [slots, tokens or more, …], the rest as in the operand they keep.

    ragged: with any number of tokens, the same in all. ready: log decays and step sizes are f32.
    """
    T, first = 1 if len(lead) == 1 else lead[1], views.get("ring_k")
    if ragged:
        T = first.shape[1] if first is not None and first.dim() > 1 else 0
    if "state_indices" not in views:
        problems.append("ring is given without state_indices; expected both. Pass state_indices.")
    kept = [n for n in RINGED if n in views]
    if missing := [n for n in kept if f"ring_{n}" not in views]:
        problems.append(f"ring has no {', '.join(missing)}; expected a tensor for each operand of the call that it keeps")
    shapes: Shapes = {}
    for name in kept:
        ring = views.get(f"ring_{name}")
        if ring is None:
            continue
        tokens = ring.shape[1] if ring.dim() > 1 and ring.shape[1] >= T and not ragged else T
        words = "[slots, tokens, …], as many tokens as ring.k," if ragged else "[slots, tokens or more, …]"
        shapes[f"ring_{name}"] = {words: (views["state"].shape[0], tokens, *views[name].shape[len(lead) :])}
        if ready and name not in ("k", "v"):
            if ring.dtype != torch.float32:
                problems.append(f"ring_{name} is {ring.dtype} with ring_ready=True; expected torch.float32")
        elif ring.dtype != views[name].dtype:
            problems.append(f"ring_{name} is {ring.dtype}; expected {views[name].dtype}, the dtype of {name}")
        if ring.dim() > 3 and ring.stride(-1) != 1:
            problems.append(f"ring_{name} has strides {list(ring.stride())}; expected 1 for its last axis")
        checks.check_distinct(views, (f"ring_{name}",), problems)
    problems += [
        f"ring has {n} and the call has none; expected both or neither"
        for n in ("g", "gk", "beta")
        if f"ring_{n}" in views and n not in views
    ]
    return shapes


def _check_layout(views: Mapping[str, Tensor], options: Options, batch: int, problems: list[str]) -> None:
    state, kept, turned = views["state"], views.get("intermediate_states"), options.layout == "kv"
    slots, HV, V, K = state.shape
    checks.check_dense("state", state, problems, 2, turned)
    if slots > 1 and (HV == 1 or state.stride(1) == V * K) and state.stride(0) < HV * V * K:
        problems.append(f"state has slots {state.stride(0)} elements apart, which overlap; expected {state[0].numel()} or more")
    else:
        checks.check_distinct(views, ("state",), problems)
    if kept is not None:
        checks.check_dense("intermediate_states", kept, problems, 3, turned)
        if kept.dtype != state.dtype:
            problems.append(f"intermediate_states is {kept.dtype}; expected {state.dtype}, the dtype of state")
    checks.check_distinct(views, ("intermediate_states", "out", "state_scale"), problems)
    check_slots(views, batch, problems, options.update_state)
    check_tokens(views, problems)
    for name, t in views.items():
        if name not in ("state", "intermediate_states", "cu_seqlens", *RINGS):
            # Offsets over batch and token are 64-bit products of 32-bit strides.
            first = 2 if name in OPERANDS.tokenwise else 1 if name in ("state_scale", "rand_seed") else 0
            checks.check_strides_fit(name, t, first, problems)


def batch_of(views: Mapping[str, Tensor]) -> int:
    if "out" not in views:
        return views["num_accepted_tokens"].shape[0]
    return views["out"].shape[0] if "cu_seqlens" not in views else views["cu_seqlens"].shape[0] - 1


def views_of(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands in token form (see reference.py). Adds every error to `problems`, except errors of addresses."""
    return commit.views_of(named, options.layout, problems) if options.commit else token_views(named, options, problems)


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> LinearAttentionProblem:
    """The problem of checked operands and their addresses."""
    state, form, commits = views["state"], options.form, options.commit
    HV, V, K = state.shape[-3:]
    ragged = "cu_seqlens" in views
    kept, target = views.get("intermediate_states"), views.get("dst_state_indices")
    each = target is not None and target.dim() == 2
    replays = "ring_position" in views
    ring = "ring_k" in views and not replays
    several = commits or ragged or each or ring or kept is not None or views["q"].shape[1] != 1
    lane = min(16 // state.element_size(), K & -K)  # elements of a lane's vector

    along = -1 if options.layout == "vk" else -2
    states = [("state", state), *([("intermediate_states", kept)] if kept is not None else [])]
    wide = lane if options.layout == "vk" else min(16 // state.element_size(), V & -V)
    vectors = [n for n in (*KEY_VECTORS, "ring_k", "ring_gk") if n in views] + (["dt_bias"] if "gk" in views and "dt_bias" in views else [])
    present: dict[str, Any] = {field: STATES[views[name].dtype] for field, name in OPERANDS.fields().items() if name in views}

    problem = LinearAttentionProblem(
        dim_k=K,
        dim_v=V,
        nheads=HV,
        key_heads=views["k"].shape[-2],
        delta=Delta(form.delta),
        layout=Layout(options.layout),
        tokens=Tokens.RAGGED if ragged else Tokens.MANY if several else Tokens.ONE,
        **present,
        gate=Gate(form.gate),
        beta_form=Beta(form.beta),
        beta_rows="beta" in views and views["beta"].dim() == 4 + commits,
        l2norm=form.l2norm,
        index=index_of(views, "state_indices"),
        accepted=index_of(views, "num_accepted_tokens"),
        cu_seqlens=index_of(views, "cu_seqlens"),
        update=Update.NONE if not options.update_state else Update.EACH if each else Update.FINAL,
        pool=PoolMode.SPLIT if target is not None else PoolMode.SINGLE,
        ring=_kind_of(commits, replays, ring, options.ring_ready),
        layers=commits and state.shape[0] > 1,
        intermediates=kept is not None,
        parents=index_of(views, "parents"),
        kept_index=index_of(views, "intermediate_state_indices"),
        state_loads=Loads.VECTOR if all(checks.aligned(t, pointers[n], wide, along) for n, t in states) else Loads.ELEMENT,
        heads_apart=not commits and HV > 1 and state.stride(1) != V * K,
        zero_padding=options.zero_padding,
        philox_rounds=options.philox_rounds,
        position=index_of(views, "ring_position"),
        flush=index_of(views, "ring_flush"),
        kept=replaying.kept_type(views) if replays else None,
        operand_loads=Loads.VECTOR if all(checks.aligned(views[n], pointers[n], lane) for n in vectors) else Loads.ELEMENT,
    )
    found = loaded(problem)
    return found if commits else found.for_tokens(views["q"].shape[1])


def _kind_of(commits: bool, replays: bool, ring: bool, ready: bool) -> Ring:
    if commits or replays:
        return Ring.COMMIT if commits else Ring.REPLAY
    return Ring.NONE if not ring else Ring.READY if ready else Ring.STORE


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
