"""The operands of selective_state_update, checked, as views of one shape for all ways to give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from ...calls import checks
from ...engine.recurrences.mamba.checks import check_seed

NAMES = (
    "state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "out", "state_indices", "dst_state_indices", "num_accepted_tokens",
    "cu_seqlens", "parents", "intermediate_states", "intermediate_state_indices", "rand_seed", "state_scale", "intermediate_state_scales",
)  # fmt: skip
OF_SEVERAL = (*NAMES[12:17], NAMES[19])  # operands of calls of several tokens alone
CONTROL = NAMES[10:15] + NAMES[16:]
SCALES = {"state": "state_scale", "intermediate_states": "intermediate_state_scales"}  # of states in fewer bits
_TOKENWISE = ("x", "dt", "z", "out", "B", "C")


class Options(NamedTuple):
    """What a call says beside its tensors."""

    dt_softplus: bool
    dt_limit: tuple[float, float] | None
    pad_slot_id: int
    philox_rounds: int
    update_state: bool
    zero_padding: bool = True


def views_of(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands as the reference takes them, with a tokens axis where there may be several. Adds to `problems` all that is wrong with
    dtypes, devices, shapes and strides; what comes back is only usable if that is nothing."""
    update_state = options[4]
    check_seed(named, update_state, problems)
    if not checks.check_tensors(named, problems):
        return {}
    checks.check_common(named, "state", problems, narrow=SCALES)
    if "intermediate_state_scales" in named and "intermediate_states" not in named:
        problems.append("intermediate_state_scales is given without intermediate_states")
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
    """Operands of one token, as [slots, H, P, N], [batch, H, P], [H, P, N], [batch, G, N], [H, P], with stride 0 for what is shared."""
    state, x, B = named["state"], named["x"], named["B"]
    if state.dim() not in (3, 4):
        problems.append(f"state is {list(state.shape)}, not [slots, heads, headdim, d_state] or [slots, dim, d_state]")
        return {}
    views = dict(named)
    allowed: dict[str, dict[str, tuple[int, ...]]]
    row: dict[str, tuple[int, ...]]
    heads = state.dim() == 4
    if not heads:
        views["state"] = state = state.unsqueeze(1)
    _, H, P, N = state.shape
    if x.dim() != (3 if heads else 2):
        wanted = "[batch, heads, headdim]" if heads else "[batch, dim]"
        tokens = "; several tokens need heads" if x.dim() == 3 and not heads else ""
        problems.append(f"x is {list(x.shape)}, not {wanted} as state {list(named['state'].shape)} asks for{tokens}")
        return {}
    batch = x.shape[0]
    if heads:
        if B.dim() != 3:
            problems.append(f"B is {list(B.shape)}, not [batch, groups, d_state]")
            return {}
        G = B.shape[1]
        row = {"[batch, heads, headdim]": (batch, H, P)}
        allowed = {
            "x": row, "z": row, "out": row,
            "dt": row | {"[batch, heads]": (batch, H)},
            "A": {"[heads, headdim, d_state]": (H, P, N), "[heads]": (H,)},
            "B": {"[batch, groups, d_state]": (batch, G, N)},
            "C": {"[batch, groups, d_state]": (batch, G, N)},
            "D": {"[heads, headdim]": (H, P), "[heads]": (H,)},
            "dt_bias": {"[heads, headdim]": (H, P), "[heads]": (H,)},
            "state_scale": {"[slots, heads, headdim]": (state.shape[0], H, P)},
        }  # fmt: skip
        if G == 0 or H % G:
            problems.append(f"B is {list(B.shape)} but heads {H} is not a multiple of its groups {G}")
    else:
        row = {"[batch, dim]": (batch, P)}
        allowed = dict.fromkeys(("x", "dt", "z", "out"), row) | {
            "A": {"[dim, d_state]": (P, N)},
            **dict.fromkeys(("B", "C"), {"[batch, d_state]": (batch, N)}),
            **dict.fromkeys(("D", "dt_bias"), {"[dim]": (P,)}),
            "state_scale": {"[slots, dim]": (state.shape[0], P)},
        }
    allowed |= dict.fromkeys(("state_indices", "dst_state_indices"), {"[batch]": (batch,)})
    allowed["rand_seed"] = {"[1]": (1,), "[slots]": (state.shape[0],)}
    fits = [checks.check_shape(name, t, allowed[name], problems) for name, t in named.items() if name != "state"]
    if not all(fits):
        return {}
    for name, t in named.items():
        if heads:
            if name in ("dt", "D", "dt_bias") and t.dim() == len(allowed[name]["[batch, heads]" if name == "dt" else "[heads]"]):
                views[name] = t.unsqueeze(-1).expand(*t.shape, P)
            elif name == "A" and t.dim() == 1:
                views[name] = t[:, None, None].expand(H, P, N)
        elif name in ("A", "D", "dt_bias"):
            views[name] = t.unsqueeze(0)
        elif name not in ("state", "state_indices", "dst_state_indices", "rand_seed"):
            views[name] = t.unsqueeze(1)
    if "rand_seed" in views:
        views["rand_seed"] = views["rand_seed"].expand(state.shape[0])
    _check_layout(views, problems)
    return views


def _check_layout(views: dict[str, Tensor], problems: list[str]) -> None:
    state, x = views["state"], views["x"]
    slots, H, P, N = state.shape
    dense = (P * N, N, 1)
    if any(n > 1 and have != want for n, have, want in zip((H, P, N), state.stride()[1:], dense, strict=True)):
        problems.append(f"state has strides {list(state.stride())}; its last three axes must be dense, {list(dense)}")
    elif slots > 1 and state.stride(0) < H * P * N:
        problems.append(f"state has slots {state.stride(0)} elements apart, which overlap")
    for name in ("out", "state_scale"):
        if name in views and checks.overlaps_itself(views[name]):
            problems.append(f"{name} has strides {list(views[name].stride())}: two of its elements share memory")
    source, target = views.get("state_indices"), views.get("dst_state_indices")
    if source is None and slots < x.shape[0]:
        problems.append(f"state has {slots} slots for a batch of {x.shape[0]}, and there are no state_indices")
    if target is not None:
        if source is None:
            problems.append("dst_state_indices is given without state_indices")
        elif source.dtype != target.dtype:
            problems.append(f"state_indices is {source.dtype} and dst_state_indices is {target.dtype}")
    for name, t in views.items():
        if name != "state":
            checks.check_strides_fit(name, t, 0 if name in ("A", "D", "dt_bias") else 1, problems)


def _token_views(named: Mapping[str, Tensor], update_state: bool, problems: list[str]) -> dict[str, Tensor]:
    """Operands of several tokens, with a tokens axis behind the batch's; see the reference."""
    state, x, B = named["state"], named["x"], named["B"]
    ragged = "cu_seqlens" in named
    if state.dim() != 4:
        problems.append(f"state is {list(state.shape)}, not [slots, heads, headdim, d_state]: several tokens need heads")
    if x.dim() not in (3, 4):
        problems.append(f"x is {list(x.shape)}, not [batch, tokens, heads, headdim]" + (" or packed, [tokens, …]" if ragged else ""))
    elif B.dim() != x.dim():
        problems.append(f"B is {list(B.shape)} and x is {list(x.shape)}: both with a tokens axis, or neither")
    elif ragged and x.dim() == 4 and x.shape[0] != 1:
        problems.append(f"x is {list(x.shape)} with cu_seqlens: sequences are packed, as [tokens, …] or [1, tokens, …]")
    if state.dim() != 4 or x.dim() not in (3, 4) or B.dim() != x.dim():
        return {}
    lead, (_, H, P, N), G = x.shape[:-2], state.shape, B.shape[-2]
    batch = max(named["cu_seqlens"].numel() - 1, 0) if ragged else lead[0]
    if G == 0 or H % G:
        problems.append(f"B is {list(B.shape)} but heads {H} is not a multiple of its groups {G}")
    allowed = _shapes(named, lead, batch, ragged)
    fits = [checks.check_shape(name, t, allowed[name], problems) for name, t in named.items() if name != "state"]
    if not all(fits):
        return {}
    views = dict(named)
    if views["dt"].dim() == x.dim() - 1:
        views["dt"] = views["dt"].unsqueeze(-1).expand(*lead, H, P)
    views |= {n: views[n][:, None].expand(H, P) for n in ("D", "dt_bias") if n in views and views[n].dim() == 1}
    if views["A"].dim() == 1:
        views["A"] = views["A"][:, None, None].expand(H, P, N)
    if len(lead) == 1:
        views |= {n: views[n].unsqueeze(0 if ragged else 1) for n in _TOKENWISE if n in views}
    if "rand_seed" in views:
        views["rand_seed"] = views["rand_seed"].expand(state.shape[0])
    _check_layout_of_tokens(views, update_state, batch, ragged, problems)
    return views


def _shapes(named: Mapping[str, Tensor], lead: Sequence[int], batch: int, ragged: bool) -> dict[str, dict[str, tuple[int, ...]]]:
    """{operand: {shape in words: sizes}}"""
    (_, H, P, N), G = named["state"].shape, named["B"].shape[-2]
    words = {(1, False): "[batch", (2, False): "[batch, tokens", (1, True): "[tokens", (2, True): "[1, tokens"}[len(lead), ragged]
    T = 1 if len(lead) == 1 else lead[1]
    row: dict[str, tuple[int, ...]] = {f"{words}, heads, headdim]": (*lead, H, P)}
    per_sequence: dict[str, tuple[int, ...]] = {"[batch]": (batch,)}
    allowed: dict[str, dict[str, tuple[int, ...]]] = {
        **dict.fromkeys(("x", "z", "out"), row),
        "dt": row | {f"{words}, heads]": (*lead, H)},
        **dict.fromkeys(("B", "C"), {f"{words}, groups, d_state]": (*lead, G, N)}),
        "A": {"[heads, headdim, d_state]": (H, P, N), "[heads]": (H,)},
        **dict.fromkeys(("D", "dt_bias"), {"[heads, headdim]": (H, P), "[heads]": (H,)}),
        "cu_seqlens": {"[batch + 1]": (batch + 1,)},
        "rand_seed": {"[1]": (1,), "[slots]": (named["state"].shape[0],)},
        "state_scale": {"[slots, heads, headdim]": (named["state"].shape[0], H, P)},
        **dict.fromkeys(("state_indices", "dst_state_indices", "num_accepted_tokens", "intermediate_state_indices"), per_sequence),
    }
    if "num_accepted_tokens" in named:
        columns = named["state_indices"].shape[-1] if "state_indices" in named and named["state_indices"].dim() else 0
        allowed["state_indices"] = {"[batch, columns], of which num_accepted_tokens picks one,": (batch, columns)}
    for name in ("dst_state_indices", "parents"):
        if name in named and (name == "parents" or named[name].dim() == 2):
            columns = named[name].shape[1] if ragged and named[name].dim() == 2 else T
            allowed[name] = (per_sequence if name != "parents" else {}) | {"[batch, tokens]": (batch, columns)}
    if "intermediate_states" in named:
        kept = named["intermediate_states"].shape
        by_index = "intermediate_state_indices" in named
        rows = kept[0] if len(kept) == 5 and (by_index or kept[0] >= batch) else batch
        columns = kept[1] if len(kept) == 5 and (ragged or kept[1] >= T) else T
        words = "[rows, tokens or more" if by_index else "[batch or more, tokens or more"
        allowed["intermediate_states"] = {f"{words}, heads, headdim, d_state]": (rows, columns, H, P, N)}
        allowed["intermediate_state_scales"] = {"[rows, tokens, heads, headdim] as intermediate_states": (rows, columns, H, P)}
    return allowed


def _check_layout_of_tokens(views: Mapping[str, Tensor], update_state: bool, batch: int, ragged: bool, problems: list[str]) -> None:
    state, kept = views["state"], views.get("intermediate_states")
    slots, H, P, N = state.shape
    dense = (P * N, N, 1)
    for name, t in (("state", state), ("intermediate_states", kept)):
        if t is not None and any(n > 1 and have != want for n, have, want in zip((H, P, N), t.stride()[-3:], dense, strict=True)):
            problems.append(f"{name} has strides {list(t.stride())}; its last three axes must be dense, {list(dense)}")
    if slots > 1 and state.stride(0) < H * P * N:
        problems.append(f"state has slots {state.stride(0)} elements apart, which overlap")
    for name in ("out", "intermediate_states", *SCALES.values()):
        if name in views and checks.overlaps_itself(views[name]):
            problems.append(f"{name} has strides {list(views[name].stride())}: two of its elements share memory")
    source, target = views.get("state_indices"), views.get("dst_state_indices")
    if source is None:
        if slots < batch:
            problems.append(f"state has {slots} slots for a batch of {batch}, and there are no state_indices")
        problems += [f"{n} is given without state_indices" for n in ("dst_state_indices", "num_accepted_tokens") if n in views]
    elif target is not None and source.dtype != target.dtype:
        problems.append(f"state_indices is {source.dtype} and dst_state_indices is {target.dtype}")
    if target is not None and not update_state:
        problems.append("dst_state_indices is given, and update_state is False")
    if "num_accepted_tokens" in views and source is not None and target is None and update_state and source.shape[1] > 1:
        problems.append(
            "num_accepted_tokens picks where to start; say with dst_state_indices where the new state goes, or update_state=False"
        )
    if kept is None:
        problems += [f"{n} is given without intermediate_states" for n in ("parents", "intermediate_state_indices") if n in views]
    if ragged and views["cu_seqlens"].stride(0) != 1:
        problems.append("cu_seqlens is not contiguous")
    for name, t in views.items():
        if name not in ("state", "intermediate_states", "cu_seqlens"):
            # Offsets over batch and token are 64-bit products of 32-bit strides.
            first = 2 if name in (*_TOKENWISE, "intermediate_state_scales") else 1 if name == "state_scale" else 0
            checks.check_strides_fit(name, t, first, problems)
