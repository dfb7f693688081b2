"""Operands and options of a linear-attention call, and their checks: kernels and reference share the views in token form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from ...calls import checks
from ...engine.noise import check_seed
from ...engine.recurrences.attention.operands import OPERANDS, RINGED, RINGS, SHARED
from ...engine.recurrences.attention.switches import Form


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
        own |= _ring_shapes(views, lead, ragged, problems)
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


Shapes = dict[str, dict[str, tuple[int, ...]]]  # allowed shapes of each operand, by a name in words


def _own_shapes(views: Mapping[str, Tensor], sizes: Mapping[str, int], ragged: bool) -> Shapes:
    """Allowed shapes of operands that depend on other operands."""
    batch, T, HV, K = sizes["batch"], sizes["token"], sizes["head"], sizes["key"]
    allowed: Shapes = {
        "dt_bias": {"[heads, K]": (HV, K), "[heads * K]": (HV * K,)} if "gk" in views else {"[heads]": (HV,)},
        "state_indices": {"[batch]": (batch,)},
        "dst_state_indices": {"[batch]": (batch,)},
    }
    if "num_accepted_tokens" in views:
        columns = views["state_indices"].shape[-1] if "state_indices" in views and views["state_indices"].dim() else 0
        allowed["state_indices"] = {"[batch, columns], of which num_accepted_tokens picks one,": (batch, columns)}
    if "dst_state_indices" in views and views["dst_state_indices"].dim() == 2:
        allowed["dst_state_indices"] |= {"[batch, tokens]": (batch, views["dst_state_indices"].shape[1] if ragged else T)}
    if "intermediate_states" in views:
        kept = views["intermediate_states"]
        at_least = kept.shape[1] if kept.dim() == 5 and (ragged or kept.shape[1] >= T) else T
        by_index = "intermediate_state_indices" in views and kept.dim() == 5
        words = "[rows, tokens or more, heads, V, K]" if by_index else "[batch, tokens or more, heads, V, K]"
        allowed["intermediate_states"] = {words: (kept.shape[0] if by_index else batch, at_least, HV, sizes["value"], K)}
    if "parents" in views:
        allowed["parents"] = {"[batch, tokens]": (batch, views["parents"].shape[-1] if ragged and views["parents"].dim() == 2 else T)}
    return allowed


def _ring_shapes(views: Mapping[str, Tensor], lead: Sequence[int], ragged: bool, problems: list[str]) -> Shapes:
    """Allowed shapes of a ring's tensors: [slots, tokens or more, …], the rest as in the operand they keep."""
    T = 1 if len(lead) == 1 else lead[1]
    if ragged:
        problems.append("ring is given with cu_seqlens; expected the same number of tokens in each sequence. Leave out one.")
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
        tokens = ring.shape[1] if ring.dim() > 1 and ring.shape[1] >= T else T
        shapes[f"ring_{name}"] = {"[slots, tokens or more, …]": (views["state"].shape[0], tokens, *views[name].shape[len(lead) :])}
        if ring.dtype != views[name].dtype:
            problems.append(f"ring_{name} is {ring.dtype}; expected {views[name].dtype}, the dtype of {name}")
        if ring.dim() > 3 and ring.stride(-1) != 1:
            problems.append(f"ring_{name} has strides {list(ring.stride())}; expected 1 for its last axis")
        if checks.overlaps_itself(ring):
            problems.append(
                f"ring_{name} has strides {list(ring.stride())}, and two of its elements share memory; expected one address per element. "
                "Pass a contiguous tensor."
            )
    problems += [
        f"ring has {n} and the call has none; expected both or neither"
        for n in ("g", "gk", "beta")
        if f"ring_{n}" in views and n not in views
    ]
    return shapes


def _check_layout(views: Mapping[str, Tensor], options: Options, batch: int, problems: list[str]) -> None:
    state, out, kept = views["state"], views["out"], views.get("intermediate_states")
    slots, HV, V, K = state.shape
    dense = (V * K, K, 1) if options.layout == "vk" else (V * K, 1, V)
    for name, t, axes, words in (("state", state, 2, "two"), ("intermediate_states", kept, 3, "three")):
        sizes = (HV, V, K)[-axes:]
        if t is not None and any(n > 1 and have != want for n, have, want in zip(sizes, t.stride()[-axes:], dense[-axes:], strict=True)):
            problems.append(f"{name} has strides {list(t.stride())}; expected dense last {words} axes, {list(dense[-axes:])}")
    if slots > 1 and (HV == 1 or state.stride(1) == V * K) and state.stride(0) < HV * V * K:
        problems.append(f"state has slots {state.stride(0)} elements apart, which overlap; expected {state[0].numel()} or more")
    elif checks.overlaps_itself(state):
        problems.append(
            f"state has strides {list(state.stride())}, and two of its states share memory; expected one address per element. "
            "Pass a contiguous tensor."
        )
    if kept is not None:
        if kept.dtype != state.dtype:
            problems.append(f"intermediate_states is {kept.dtype}; expected {state.dtype}, the dtype of state")
        if checks.overlaps_itself(kept):
            problems.append(
                f"intermediate_states has strides {list(kept.stride())}, and two of its states share memory; "
                "expected one address per element. Pass a contiguous tensor."
            )
    else:
        problems += [
            f"{n} is given without intermediate_states; expected both. Pass intermediate_states, or leave out {n}."
            for n in ("parents", "intermediate_state_indices")
            if n in views
        ]
    for name, t in (("out", out), ("state_scale", views.get("state_scale"))):
        if t is not None and checks.overlaps_itself(t):
            problems.append(
                f"{name} has strides {list(t.stride())}, and two of its elements share memory; expected one address per element. "
                "Pass a contiguous tensor."
            )
    source, target = views.get("state_indices"), views.get("dst_state_indices")
    if source is None:
        if slots < batch:
            problems.append(
                f"state has {slots} slots; expected {batch}, one per sequence of the batch. Pass a larger state, or state_indices."
            )
        problems += [
            f"{n} is given without state_indices; expected both. Pass state_indices, or leave out {n}."
            for n in ("dst_state_indices", "num_accepted_tokens")
            if n in views
        ]
    elif target is not None and source.dtype != target.dtype:
        problems.append(f"state_indices is {source.dtype} and dst_state_indices is {target.dtype}; expected one dtype for both")
    if target is not None and not options.update_state:
        problems.append("dst_state_indices is given with update_state=False, which writes no state; expected one of them. Leave out one.")
    if "num_accepted_tokens" in views and target is None and options.update_state and views["state_indices"].shape[1] > 1:
        problems.append(
            f"num_accepted_tokens is given with {views['state_indices'].shape[1]} columns of state_indices; expected a slot to write. "
            "Pass dst_state_indices, or update_state=False."
        )
    if "cu_seqlens" in views and views["cu_seqlens"].stride(0) != 1:
        problems.append(f"cu_seqlens has stride {views['cu_seqlens'].stride(0)}; expected 1. Pass cu_seqlens.contiguous().")
    for name, t in views.items():
        if name not in ("state", "intermediate_states", "cu_seqlens", *RINGS):
            # Offsets over batch and token are 64-bit products of 32-bit strides.
            first = 2 if name in OPERANDS.tokenwise else 1 if name in ("state_scale", "rand_seed") else 0
            checks.check_strides_fit(name, t, first, problems)
