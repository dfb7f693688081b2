"""A call of the replay functions: its operands checked, turned into a problem, and planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calls import checks
from ...calls.checks import DTYPES, NARROW, STATES, index_of, loads_of
from ...calls.dispatch import callers
from ...calls.operator import run
from ...calls.planning import Family
from ...calls.scalars import one_of
from ...engine.recurrences.slots import check_pool, check_room
from .operands import BETWEEN, OPERANDS
from .problem import MAX_TOKENS, History, ReplayProblem
from .reference import replay_selective_state_update as reference
from .spec import OPERATOR, ReplaySpec


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


PRECISIONS = {"f32": 3, "bf16x2": 2, "bf16": 1}
PRECISION = one_of(f"one of {', '.join(map(repr, PRECISIONS))}", *PRECISIONS)


def call(name: str, tensors: Any, options: Options, pdl: bool | None) -> Tensor:
    """The result of the public function `name`. Makes an output, and the tensors between two kernels, if they are missing."""
    named = tensors._asdict()
    objections = checks.padding_objections(options.zero_padding, named["out"])
    if named["out"] is None and isinstance(named["x"], Tensor):
        named["out"] = torch.empty_like(named["x"], memory_format=torch.contiguous_format)
    if options.two_kernels:
        named |= _between(named, options)
    return run(CALLERS[name], OPERANDS.Tensors(**named), options, pdl, objections=objections)


def _between(given: Mapping[str, Any], options: Options) -> dict[str, Tensor]:
    """The tensors from the first of two kernels to the second: mix [batch, H, tokens, window + tokens] and sums [batch, H, tokens], f32.

    Empty if the operands are wrong; the checks report that.
    """
    named = {n: t for n, t in given.items() if t is not None}
    try:
        batch = named["cu_seqlens"].numel() - 1 if "cu_seqlens" in named else named["x"].shape[0]
        tokens, window = room_of(named, options)
        mix = named["x"].new_empty((batch, named["state"].shape[1], tokens, window + tokens), dtype=torch.float32)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError):
        return {}
    return {"mix": mix, "sums": mix.new_empty(mix.shape[:3])}


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> ReplayProblem:
    """The problem of checked operands and their addresses."""
    state = views["state"]
    _, H, P, N = state.shape
    materialize = options.materialize
    tokens, window = room_of(views, options)
    vectors = [n for n in OPERANDS.gathered if not (materialize and n == "out")]
    states = ["state", *(["out"] if materialize else [])]

    types: dict[str, Any] = {field: STATES[views[name].dtype] for field, name in OPERANDS.fields().items() if name in views}
    types["x"] = DTYPES[views["old_x"].dtype]
    if not materialize or "state_scale" in views:
        types["out"] = DTYPES[views["out"].dtype]
    return ReplayProblem(
        d_state=N,
        headdim=P,
        nheads=H,
        ngroups=views["old_B"].shape[-2],
        **types,
        dt_softplus=options.dt_softplus,
        history=history_of(views),
        tokens=tokens,
        window=window,
        materialize=materialize,
        cu_seqlens=index_of(views, "cu_seqlens"),
        index=index_of(views, "state_indices"),
        advance="arrivals" in views,
        two_kernels=options.two_kernels,
        internal_pdl=options.internal_pdl,
        after_conv=options.after_conv,
        philox_rounds=options.philox_rounds if "rand_seed" in views else 0,
        terms=PRECISIONS[options.precision],
        state_loads=loads_of(views, pointers, states, N),
        operand_loads=loads_of(views, pointers, vectors, 8),
        zero_padding=options.zero_padding,
    )


def history_of(views: Mapping[str, Tensor]) -> History:
    return History.STEP if "cache_buf_idx" in views else History.CACHE if "flush" in views else History.RING


def batch_of(views: Mapping[str, Tensor]) -> int:
    return views["cu_seqlens"].shape[0] - 1 if "cu_seqlens" in views else views["out"].shape[0]


def kernel_values(spec: ReplaySpec, views: Mapping[str, Tensor], options: Options) -> dict[str, int | float]:
    """Every kernel argument that is not a pointer."""
    values: dict[str, int | float] = {
        "slots": views["state"].shape[0],
        "pad_slot_id": options.pad_slot_id,
        "window": window_of(views, options),
    }
    values |= {"ring": views["old_x"].shape[1], "tokens": views["out"].shape[1], "total_tokens": views["out"].shape[1]}
    if "state_indices" in views:
        values["state_indices_batch"] = views["state_indices"].stride(0)
    own = [name for name in spec.operands() if not (options.materialize and name == "out")]
    values |= OPERANDS.stride_values(spec, views, int("cache_buf_idx" not in views), own)
    values["out_slot"] = views["out"].stride(0)
    if "rand_seed" in views:
        values["rand_seed_slot"] = int(views["rand_seed"].numel() > 1)
    return values


FAMILY = Family(
    OPERATOR,
    OPERANDS.written,
    problem_of,
    size_of=lambda views: batch_of(views) if views["out"].numel() else 0,
    grid_of=lambda spec, views: batch_of(views) * spec.blocks,
    values_of=kernel_values,
)


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    rounds = options.philox_rounds if "rand_seed" in views else 0
    how: dict[str, Any] = {"dt_softplus": options.dt_softplus, "pad_slot_id": options.pad_slot_id, "philox_rounds": rounds}
    views = {name: t for name, t in views.items() if name not in BETWEEN}
    how["zero_padding"] = options.zero_padding
    reference(**{**views, **how}, window=window_of(views, options), dtype=dtype)


FUNCTIONS = (OPERATOR, "checkpoint_selective_state_update", "materialize_selective_state")
CALLERS = callers(FAMILY, dict.fromkeys(FUNCTIONS, OPERANDS), Options, views_of, run_reference)
