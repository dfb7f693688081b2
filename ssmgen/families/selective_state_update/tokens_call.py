"""selective_state_update of several tokens per sequence: its operands checked, turned into a problem, and planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import runtime
from ...calls import checks
from ...calls.checks import DTYPES, INDEX
from ...calls.planning import Caller, Family
from ...spec import Index, Loads, PoolMode
from ..linear_attention.problem import Update
from .reference import selective_state_update as reference
from .tokens_spec import OPERATOR, SsuTokensProblem, SsuTokensSpec

NAMES = (
    "state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "out", "state_indices", "dst_state_indices", "num_accepted_tokens",
    "cu_seqlens", "parents", "intermediate_states", "intermediate_state_indices", "rand_seed",
)  # fmt: skip
_WEIGHTS = ("A", "D", "dt_bias")
_CONTROL = NAMES[10:15] + NAMES[16:]
_TOKENWISE = ("x", "dt", "z", "out", "B", "C")

# What a call says beside its tensors: dt_softplus, dt_limit, pad_slot_id, philox_rounds, update_state.
Options = tuple[Any, ...]


def check_seed(named: Mapping[str, Tensor], update_state: bool, problems: list[str]) -> None:
    """Of calls of one token too."""
    stored = [named.get("intermediate_states"), *([named["state"]] if update_state else [])]
    if "rand_seed" in named and not any(isinstance(t, Tensor) and t.dtype in (torch.float16, torch.bfloat16) for t in stored):
        problems.append("rand_seed is given, and no state is written in float16 or bfloat16")


def is_tied(views: Mapping[str, Tensor]) -> bool:
    """Whether A, dt and dt_bias hold one value per head, seen as [H, P, N], […, H, P] and [H, P]."""

    def shared(name: str, *axes: int) -> bool:
        t = views.get(name)
        return t is None or all(t.stride(a) == 0 or t.shape[a] == 1 for a in axes)

    return shared("A", 1, 2) and shared("dt", -1) and shared("dt_bias", 1)


def token_views(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands as the reference takes them (see there). Adds to `problems`; what comes back is only usable if that is nothing."""
    check_seed(named, options[4], problems)
    if not checks.check_tensors(named, problems):
        return {}
    checks.check_common(named, "state", problems)
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
    _check_layout(views, options[4], batch, ragged, problems)
    return views


def _shapes(named: Mapping[str, Tensor], lead: Sequence[int], batch: int, ragged: bool) -> dict[str, dict[str, tuple[int, ...]]]:
    """{operand: {shape in words: sizes}}"""
    (_, H, P, N), G = named["state"].shape, named["B"].shape[-2]
    words = {(1, False): "[batch", (2, False): "[batch, tokens", (1, True): "[tokens", (2, True): "[1, tokens"}[len(lead), ragged]
    T = 1 if len(lead) == 1 else lead[1]
    row, per_sequence = {f"{words}, heads, headdim]": (*lead, H, P)}, {"[batch]": (batch,)}
    allowed: dict[str, dict[str, tuple[int, ...]]] = {
        **dict.fromkeys(("x", "z", "out"), row),
        "dt": row | {f"{words}, heads]": (*lead, H)},
        **dict.fromkeys(("B", "C"), {f"{words}, groups, d_state]": (*lead, G, N)}),
        "A": {"[heads, headdim, d_state]": (H, P, N), "[heads]": (H,)},
        **dict.fromkeys(("D", "dt_bias"), {"[heads, headdim]": (H, P), "[heads]": (H,)}),
        "cu_seqlens": {"[batch + 1]": (batch + 1,)},
        "rand_seed": {"[1]": (1,), "[slots]": (named["state"].shape[0],)},
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
    return allowed


def _check_layout(views: Mapping[str, Tensor], update_state: bool, batch: int, ragged: bool, problems: list[str]) -> None:
    state, kept = views["state"], views.get("intermediate_states")
    slots, H, P, N = state.shape
    dense = (P * N, N, 1)
    for name, t in (("state", state), ("intermediate_states", kept)):
        if t is not None and any(n > 1 and have != want for n, have, want in zip((H, P, N), t.stride()[-3:], dense, strict=True)):
            problems.append(f"{name} has strides {list(t.stride())}; its last three axes must be dense, {list(dense)}")
    if slots > 1 and state.stride(0) < H * P * N:
        problems.append(f"state has slots {state.stride(0)} elements apart, which overlap")
    for name in ("out", "intermediate_states"):
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
            checks.check_strides_fit(name, t, 2 if name in _TOKENWISE else 0, problems)


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> SsuTokensProblem:
    """The problem that checked operands pose, given where they lie."""
    dt_softplus, dt_limit, _, philox_rounds, update_state = options
    state, kept, target = views["state"], views.get("intermediate_states"), views.get("dst_state_indices")
    _, H, P, N = state.shape
    vector = min(16 // state.element_size(), N & -N)  # elements that a lane owns

    def index(name: str) -> Index:
        return INDEX[views[name].dtype if name in views else None]

    def loads(*names: str) -> Loads:
        aligned = all(checks.aligned(views[n], pointers[n], vector) for n in names if n in views)
        return Loads.VECTOR if aligned else Loads.ELEMENT

    return SsuTokensProblem(
        d_state=N,
        headdim=P,
        nheads=H,
        ngroups=views["B"].shape[2],
        **{n: DTYPES[t.dtype] for n, t in views.items() if n not in (*_CONTROL, "intermediate_states")},
        tied=is_tied(views),
        dt_softplus=dt_softplus,
        dt_limit=dt_limit is not None,
        index=index("state_indices"),
        pool=PoolMode.SPLIT if target is not None else PoolMode.SINGLE,
        state_loads=loads("state", "intermediate_states"),
        operand_loads=loads("B", "C"),
        philox_rounds=philox_rounds,
        cu_seqlens=index("cu_seqlens"),
        accepted=index("num_accepted_tokens"),
        update=Update.NONE if not update_state else Update.EACH if target is not None and target.dim() == 2 else Update.FINAL,
        intermediate_states=None if kept is None else DTYPES[kept.dtype],
        intermediate_indices=index("intermediate_state_indices"),
        parents=index("parents"),
    )


_AXES = {
    "state": {"slot": 0},
    "A": {"head": 0},
    "dt_bias": {"head": 0},
    "D": {"head": 0, "row": 1},
    "state_indices": {"batch": 0, "column": 1},
    "dst_state_indices": {"batch": 0, "token": 1},
    "num_accepted_tokens": {"batch": 0},
    "parents": {"batch": 0, "token": 1},
    "intermediate_states": {"row": 0, "token": 1},
    "intermediate_state_indices": {"batch": 0},
    "rand_seed": {"slot": 0},
}
_COLUMNS = {
    "columns": "state_indices",
    "dst_columns": "dst_state_indices",
    "parent_columns": "parents",
    "kept_columns": "intermediate_states",
}
_TOKEN_AXES = {"batch": 0, "token": 1, "head": 2, "group": 2, "row": 3, "n": 3}


def sequences(views: Mapping[str, Tensor]) -> int:
    return views["cu_seqlens"].shape[0] - 1 if "cu_seqlens" in views else views["x"].shape[0]


def kernel_values(spec: SsuTokensSpec, views: Mapping[str, Tensor], options: Options) -> dict[str, int | float]:
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
    for operand, axis, _ in spec.strides():
        values[f"{operand}_{axis}"] = views[operand].stride(_AXES.get(operand, _TOKEN_AXES)[axis])
    return {p.name: values[p.name] for p in spec.parameters() if p.code != "Q"}


def grid_of(spec: SsuTokensSpec, views: Mapping[str, Tensor]) -> int:
    return sequences(views) * spec.nheads * spec.tiles


FAMILY = Family(
    OPERATOR,
    written=("out", "state", "intermediate_states"),
    problem_of=problem_of,
    size_of=lambda views: sequences(views) if views["x"].numel() else 0,
    grid_of=grid_of,
    values_of=kernel_values,
)


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    dt_softplus, dt_limit, pad_slot_id, philox_rounds, update_state = options
    reference(
        **views, dt_softplus=dt_softplus, dt_limit=dt_limit, pad_slot_id=pad_slot_id, philox_rounds=philox_rounds,
        update_state=update_state, dtype=dtype,
    )  # fmt: skip


# torch.library: what torch.compile and opcheck see.
_library = torch.library.Library("ssmgen", "FRAGMENT")
_library.define(
    "selective_state_update_tokens(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
    "Tensor? dt_bias, Tensor(b!) out, Tensor? state_indices, Tensor? dst_state_indices, Tensor? num_accepted_tokens, Tensor? cu_seqlens, "
    "Tensor? parents, Tensor(c!)? intermediate_states, Tensor? intermediate_state_indices, Tensor? rand_seed, bool dt_softplus, "
    "float[]? dt_limit, int pad_slot_id, int philox_rounds, bool update_state, bool? pdl) -> ()",
    tags=torch.Tag.needs_fixed_stride_order,
)


def _dispatch(given: Sequence[Any], options: Options, pdl: bool | None) -> None:
    dt_softplus, dt_limit, *rest = options
    torch.ops.ssmgen.selective_state_update_tokens(*given, dt_softplus, None if dt_limit is None else list(dt_limit), *rest, pdl)


def _received(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any, bool | None]:
    """(given, options, pdl) of what torch's dispatcher gives."""
    given, (dt_softplus, dt_limit, *rest, pdl) = args[: len(NAMES)], args[len(NAMES) :]
    return given, (dt_softplus, None if dt_limit is None else tuple(dt_limit), *rest), pdl


@torch.library.impl(_library, "selective_state_update_tokens", "CUDA")
@torch.library.impl(_library, "selective_state_update_tokens", "CPU")
def _op(*args: Any) -> None:
    CALLER.plan(*_received(args))()


@torch.library.register_fake("ssmgen::selective_state_update_tokens", lib=_library)
def _fake(*args: Any) -> None:
    CALLER.foresee(*_received(args))


_REQUIRED = frozenset(("state", "x", "dt", "A", "B", "C", "out"))
CALLER = Caller(FAMILY, "selective_state_update", NAMES, _REQUIRED, token_views, run_reference, _dispatch, runtime.Patterns())
