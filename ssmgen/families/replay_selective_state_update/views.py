"""The operands of the replay functions, checked, as views that kernels and the reference share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calls import checks
from ...calls.checks import NARROW
from ...engine.recurrences.slots import check_pool, check_room
from .operands import BETWEEN, OPERANDS
from .problem import MAX_TOKENS


class Options(NamedTuple):
    """The arguments of a call that are not tensors."""

    dt_softplus: bool = False
    pad_slot_id: int = -1
    philox_rounds: int = 10
    precision: str = "f32"
    after_conv: bool = False
    max_tokens: int | None = None
    two_kernels: bool = False
    internal_pdl: bool = True
    materialize: bool = False
    zero_padding: bool = True


def views_of(named: Mapping[str, Any], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands as the reference takes them. Adds every error to `problems`."""
    if options.philox_rounds == 0 and "rand_seed" in named:
        problems.append("rand_seed is given and philox_rounds is 0; expected 1 … 10 rounds. Pass philox_rounds, or leave out rand_seed.")
    needed = ("A",) if options.materialize and "cache_buf_idx" not in named else () if options.materialize else ("x", "dt", "A", "B", "C")
    problems += [f"{name} is None; expected a tensor" for name in needed if named.get(name) is None]
    if not checks.check_tensors(named, problems) or not all(name in named for name in needed):
        return {}
    given = {name: t for name, t in named.items() if name not in BETWEEN}  # the call allocates these itself
    checks.check_types(OPERANDS, given, "state", problems)
    state, old_x, old_B = named["state"], named["old_x"], named["old_B"]
    step, ragged, materialize = "cache_buf_idx" in named, "cu_seqlens" in named, options.materialize
    cached = "flush" in named
    if state.dim() != 4:
        problems.append(f"state is {list(state.shape)}; expected [slots, heads, headdim, d_state]")
        return {}
    if old_x.dim() != 4 or old_B.dim() != (5 if step else 4):
        problems.append(
            f"old_x is {list(old_x.shape)} and old_B is {list(old_B.shape)}; expected [slots, W, heads, headdim] and "
            + ("[slots, 2, W, groups, d_state]" if step else "[slots, R, groups, d_state]")
        )
        return {}
    slots, H, P, N = state.shape
    W, G = old_x.shape[1], old_B.shape[-2]
    if G == 0 or H % G:
        problems.append(f"old_B is {list(old_B.shape)} but heads {H} is not a multiple of its groups {G}")
    views, T, batch, lead, words = dict(named), 0, slots, (), ""
    if materialize:
        batch = named["state_indices"].numel() if "state_indices" in named else slots
    else:
        if named["x"].dim() != (3 if ragged else 4):
            problems.append(
                f"x is {list(named['x'].shape)}; expected " + ("[tokens, heads, headdim]" if ragged else "[batch, T, heads, headdim]")
            )
            return {}
        if ragged:
            batch = max(0, named["cu_seqlens"].numel() - 1)
            views |= {n: named[n].unsqueeze(0) for n in ("x", "dt", "B", "C", "z", "out") if n in named}
        else:
            batch, T = named["x"].shape[:2]
        lead, words = tuple(views["x"].shape[:2]), "tokens" if ragged else "batch, T"
        if "dt" in views and views["dt"].dim() == 4:
            if views["dt"].shape[3] != P or (P > 1 and views["dt"].stride(3) != 0):
                problems.append(
                    f"dt is {list(named['dt'].shape)} with strides {list(named['dt'].stride())}; "
                    "expected headdim with stride 0 for its last axis. Pass dt[..., None].expand(...)."
                )
            views["dt"] = views["dt"][..., 0] if views["dt"].shape[3] else views["dt"]
    for name in ("A", "dt_bias"):
        if name in views and views[name].dim() > 1:
            t = views[name]
            if any(n > 1 and s != 0 for n, s in zip(t.shape[1:], t.stride()[1:], strict=True)):
                problems.append(
                    f"{name} is {list(t.shape)} with strides {list(t.stride())}; "
                    "expected one value per head, with stride 0 on the other axes"
                )
            while views[name].dim() > 1 and views[name].shape[-1]:
                views[name] = views[name][..., 0]
    if "D" in views and views["D"].dim() == 1:
        views["D"] = views["D"].unsqueeze(-1).expand(-1, P)
    sizes = {"slot": slots, "head": H, "row": P, "n": N, "group": G, "batch": batch, "starts": batch + 1}
    sizes |= {"buffer": 2, "entry": W} if step else {"ringed": W}
    own: dict[str, dict[str, tuple[int, ...]]] = {"prev_num_accepted_tokens": {"[batch]": (batch,)} if cached else {"[slots]": (slots,)}}
    if materialize:
        own["out"] = {"[batch, heads, headdim, d_state]": (batch, H, P, N)}
    fits = checks.check_shapes(
        OPERANDS, {n: t for n, t in views.items() if n not in ("state", "rand_seed", *BETWEEN)}, sizes, problems,
        own, (words, lead),
    )  # fmt: skip
    _check_dtypes(named, problems)
    _check_sizes(named, W, T, step, options, problems)
    if not fits:
        return {}
    _check_layout(views, batch, problems)
    return views


def _check_dtypes(named: Mapping[str, Tensor], problems: list[str]) -> None:
    alike = named.get("x", named["old_x"]).dtype
    for name in ("B", "C", "old_x", "old_B"):
        if name in named and named[name].dtype != alike:
            problems.append(f"{name} is {named[name].dtype}; expected {alike}, the dtype of {'x' if 'x' in named else 'old_x'}")
    if "x" not in named and named["out"].dtype != named["state"].dtype and named["state"].dtype not in NARROW:
        problems.append(f"out is {named['out'].dtype}; expected {named['state'].dtype}, the dtype of state")
    if "rand_seed" in named:
        seeds, slots = named["rand_seed"], named["state"].shape[0]
        if tuple(seeds.shape) not in ((1,), (slots,)):
            problems.append(f"rand_seed is {list(seeds.shape)}; expected [1] or [slots] = [{slots}]")
        if named["state"].dtype == torch.float32:
            problems.append("rand_seed is given with a float32 state, which is not rounded; expected None. Leave out rand_seed.")


def _check_sizes(named: Mapping[str, Tensor], W: int, T: int, step: bool, options: Options, problems: list[str]) -> None:
    if step:
        if "old_dA_cumsum" not in named:
            problems.append("old_dA_cumsum is None with cache_buf_idx; expected both. Pass old_dA_cumsum.")
        if T > W:
            problems.append(f"x has {T} tokens; expected at most W = {W}, the room of the history")
        window = W
    elif "flush" in named:
        odd = [n for n in ("ring_start", "arrivals", "cu_seqlens") if n in named]
        odd += ["max_tokens"] if options.max_tokens is not None else []
        odd += ["after_conv"] if options.after_conv else []
        odd += ["two_kernels"] if options.two_kernels else []
        problems += [f"{name} is given with flush; expected one of them. Leave out {name}." for name in odd]
        if "cu_seqlens" not in named and T != 1:
            problems.append(f"x has {T} tokens; expected 1 with flush")
        window = W
    else:
        if "ring_start" not in named:
            problems.append("cache_buf_idx and ring_start are None; expected one of them")
        if options.max_tokens is None and "cu_seqlens" in named:
            problems.append("max_tokens is None with cu_seqlens; expected a number: the window is R - max_tokens. Pass max_tokens.")
        most = T if options.max_tokens is None else options.max_tokens
        if most < T:
            problems.append(f"x has {T} tokens; expected at most max_tokens = {most}")
        window = W - most
        if window < 1:
            problems.append(f"the ring has {W} entries for steps of {most} tokens; expected {most + 1} or more, to leave a window")
    if window > MAX_TOKENS:
        problems.append(f"the window has {window} entries; expected at most {MAX_TOKENS}")
    if T > MAX_TOKENS:
        problems.append(f"x has {T} tokens; expected at most {MAX_TOKENS}")


def _check_layout(views: Mapping[str, Tensor], batch: int, problems: list[str]) -> None:
    for name in ("state", "out") if "x" not in views else ("state",):
        check_pool(name, views[name], problems)
    checks.check_distinct(views, ("out", "old_x", "old_B", "old_dt", "old_dA_cumsum", "state_scale"), problems)
    for name in ("cache_buf_idx", "ring_start", "prev_num_accepted_tokens", "arrivals", "rand_seed", "cu_seqlens", "flush"):
        if name in views and views[name].numel() > 1 and views[name].stride(0) != 1:
            problems.append(f"{name} has stride {views[name].stride(0)}; expected 1. Pass {name}.contiguous().")
    check_room(views, batch, problems)
    for name, t in views.items():
        if name != "state" and not (name == "out" and "x" not in views):
            checks.check_strides_fit(name, t, 0 if name in ("A", "D", "dt_bias") else 1, problems)


def eights(n: int) -> int:
    return max(8, -(-n // 8) * 8)


def window_of(views: Mapping[str, Tensor], options: Options) -> int:
    """Entries that the history can hold between steps."""
    W = views["old_x"].shape[1]
    if "cache_buf_idx" in views or "flush" in views:
        return W
    return W - (views["x"].shape[1] if options.max_tokens is None else options.max_tokens)


def room_of(views: Mapping[str, Tensor], options: Options) -> tuple[int, int]:
    """(tokens, entries of the history) that a kernel has room for."""
    window = window_of(views, options)
    if options.materialize:
        return eights(1), eights(window)
    if "cu_seqlens" not in views:
        return eights(views["x"].shape[1]), eights(window)
    return eights(window if options.max_tokens is None else options.max_tokens), eights(window)
