"""Operands and options of a linear-attention call, and their checks: kernels and reference share the views in token form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...calls import checks
from ...engine.noise import check_seed
from ...engine.recurrences.attention.operands import OPERANDS, RINGED, RINGS, SHARED
from ...engine.recurrences.attention.switches import Form
from ...engine.recurrences.slots import check_slots, check_tokens, slot_shapes


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
    if any(n in views for n in RINGS):
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
