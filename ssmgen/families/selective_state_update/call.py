"""selective_state_update: decode steps of Mamba-1 and Mamba-2 on torch tensors. The module beside plans those of several tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ... import runtime
from ...calls import checks
from ...calls.checks import DTYPES, INDEX
from ...calls.planning import Caller, Family
from ...calls.public import Call, operator
from ...spec import Loads, PoolMode
from . import tokens_call as several
from .reference import selective_state_update as reference
from .spec import OPERATOR, SsuProblem, SsuSpec

_OPTIONAL = ("D", "z", "dt_bias")
_NAMES = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "out", "state_indices", "dst_state_indices", "rand_seed")


@operator(like="x")
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    *,
    dt_limit: tuple[float, float] | None = None,
    state_indices: Tensor | None = None,
    dst_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    parents: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    update_state: bool = True,
    rand_seed: Tensor | None = None,
    philox_rounds: int = 10,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """Decode steps, per token: state <- exp(dt A) state + dt x B;  out = C state + D x, times silu(z).

    H heads of P rows (headdim), N = d_state, G groups of heads that share B and C. Without heads (Mamba-1) drop the H and G axes.
    […] is [batch] for one token per sequence, [batch, T] for several, or [tokens] (also [1, tokens]) for packed sequences with cu_seqlens.
    Several tokens, and all arguments that belong to them, need heads, with A, dt and dt_bias tied: [H], or views with stride 0.
    Every floating tensor may be f32, f16 or bf16, each its own; arithmetic is f32, the state is carried from token to token in f32, and
    the output comes from the new state before that is rounded. All tensors may be strided views; only the last three axes of states must
    be dense.

    state: [slots, H, P, N], updated in place          x, dt, z, out: […, H, P]; dt also […, H]
    A: [H, P, N] or [H], negative                      B, C: […, G, N]
    D, dt_bias: [H, P] or [H], or None                 z: None for no gate
    dt_softplus: dt <- log(1 + e^(dt + dt_bias)); dt_limit: then clamped to (low, high)
    state_indices: [batch] int32 or int64, slot of each row; None for slot = row. With num_accepted_tokens: [batch, columns]
    dst_state_indices: [batch], where the new state goes, None for in place; or [batch, T], a slot for the state after each token.
        Slots must be distinct, else rows race
    num_accepted_tokens: [batch] int32 or int64, from 1: the sequence starts from the slot in that column of state_indices
    cu_seqlens: [batch + 1] int32 or int64, where each packed sequence starts; ends with the number of tokens. A sequence may have none
    intermediate_states: [rows, T or more, H, P, N], of f32, f16 or bf16: receives the state after each token, in row
        intermediate_state_indices[b], [batch] int32 or int64, or b
    parents: [batch, T] int32 or int64, a draft tree: token t goes on from the state after token parents[b, t], as intermediate_states
        (which it needs) holds it, rounded; where that is no earlier token, or none whose state is kept, from the state after token
        t - 1, unrounded. Of packed sequences, parents and dst_state_indices may have any number of columns
    rand_seed: [1] or [slots] int64, on the device: f16 and bf16 states are rounded stochastically, with Philox noise of so many rounds
        (philox_rounds 0: to nearest), without bias for subnormal numbers too; what is finite stays finite. The noise is that of Triton's
        randint4x(seed of the slot written, element): element number slot H P N + (h P + p) N + n takes word n % 4 of the counter of the
        first of its four neighbours. Intermediate states take the seed and the elements of the slot read, in streams of their own per
        token. The same seed draws the same noise: change it between calls
    pad_slot_id: a row whose slot is negative, equals it or is no slot of the pool, or whose count of accepted tokens is out of range, gets
        a zero output and touches no state; nor does, with parents, one whose row of intermediate_states is not there
    pdl: whether the kernel may start while the one ahead of it in the stream ends (it waits before it reads anything); None =
        where the device can (sm_90 and later)

    Which states are written: after each token, the slot in its column of a dst_state_indices [batch, T]. After the last token, the slot
    dst_state_indices [batch], or without any dst_state_indices the slot read. update_state=False: neither of these. After each token, its
    column of intermediate_states, if given, whatever becomes of the pool. A slot or a row of intermediate_states that is not there (or, of
    slots, is pad_slot_id) is not written, nor is a column past the last one; a sequence that is padding, or has no tokens, writes nothing.

    Returns out (new, of x's dtype, if not given). CPU tensors run the reference implementation.
    Raises ArgumentError listing every violated requirement, before anything is launched; UnsupportedError; CaptureError when a
    kernel would have to be built during a CUDA graph capture; NotBuiltError, CompileError, LoadError, LaunchError.
    Source: Gu & Dao 2023 (arXiv 2312.00752), Dao & Gu 2024 (arXiv 2405.21060); draft trees: SGLang.
    """
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format) if isinstance(x, Tensor) else x  # the checks object to x
    if rand_seed is None or philox_rounds == 0:
        rand_seed, philox_rounds = None, 0
    one = cu_seqlens is None and num_accepted_tokens is None and parents is None and intermediate_states is None
    if one and update_state and intermediate_state_indices is None and not (isinstance(x, Tensor) and x.dim() > 3):
        single = (state, x, dt, A, B, C, D, z, dt_bias, out, state_indices, dst_state_indices, rand_seed)
        return cast(Tensor, Call(CALLER, single, (dt_softplus, dt_limit, pad_slot_id, philox_rounds), pdl))
    given = (
        state, x, dt, A, B, C, D, z, dt_bias, out, state_indices, dst_state_indices, num_accepted_tokens, cu_seqlens, parents,
        intermediate_states, intermediate_state_indices, rand_seed,
    )  # fmt: skip
    return cast(Tensor, Call(several.CALLER, given, (dt_softplus, dt_limit, pad_slot_id, philox_rounds, update_state), pdl))


def _views(named: Mapping[str, Tensor], options: tuple[Any, ...], problems: list[str]) -> dict[str, Tensor]:
    several.check_seed(named, True, problems)
    return headed_views(dict(named), problems)


def headed_views(named: dict[str, Tensor], problems: list[str]) -> dict[str, Tensor]:
    """The operands as [slots, H, P, N], [batch, H, P], [H, P, N], [batch, G, N], [H, P]: views, with stride 0 for what is shared.

    Adds to `problems` all that is wrong with dtypes, devices, shapes and strides; what comes back is only usable if that is nothing.
    """
    if not checks.check_tensors(named, problems):
        return {}
    checks.check_common(named, "state", problems)
    state, x, B = named["state"], named["x"], named["B"]
    if state.dim() not in (3, 4):
        problems.append(f"state is {list(state.shape)}, not [slots, heads, headdim, d_state] or [slots, dim, d_state]")
        return {}
    views = dict(named)
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
    allowed: dict[str, dict[str, tuple[int, ...]]]
    row: dict[str, tuple[int, ...]]
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
        }  # fmt: skip
        if G == 0 or H % G:
            problems.append(f"B is {list(B.shape)} but heads {H} is not a multiple of its groups {G}")
    else:
        row = {"[batch, dim]": (batch, P)}
        allowed = dict.fromkeys(("x", "dt", "z", "out"), row) | {
            "A": {"[dim, d_state]": (P, N)},
            **dict.fromkeys(("B", "C"), {"[batch, d_state]": (batch, N)}),
            **dict.fromkeys(("D", "dt_bias"), {"[dim]": (P,)}),
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
    state, x, out = views["state"], views["x"], views["out"]
    slots, H, P, N = state.shape
    dense = (P * N, N, 1)
    if any(n > 1 and have != want for n, have, want in zip((H, P, N), state.stride()[1:], dense, strict=True)):
        problems.append(f"state has strides {list(state.stride())}; its last three axes must be dense, {list(dense)}")
    elif slots > 1 and state.stride(0) < H * P * N:
        problems.append(f"state has slots {state.stride(0)} elements apart, which overlap")
    if checks.overlaps_itself(out):
        problems.append(f"out has strides {list(out.stride())}: two of its elements share memory")
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


def problem_of(
    views: Mapping[str, Tensor], pointers: Mapping[str, int], dt_softplus: bool, dt_limit: bool, philox_rounds: int = 0
) -> SsuProblem:
    """The problem that checked operands pose, given where they lie."""
    state = views["state"]
    _, H, P, N = state.shape
    tied = several.is_tied(views)
    vector = min(16 // state.element_size(), N & -N)  # elements that a lane owns

    def aligned(name: str) -> bool:
        return checks.aligned(views[name], pointers[name], vector)

    operands = ("B", "C") if tied else ("A", "B", "C")
    dtype: dict[str, Any] = {name: DTYPES[views[name].dtype] for name in ("state", "x", "dt", "A", "B", "C", "out")}
    dtype |= {name: DTYPES[views[name].dtype] if name in views else None for name in _OPTIONAL}
    return SsuProblem(
        d_state=N,
        headdim=P,
        nheads=H,
        ngroups=views["B"].shape[1],
        **dtype,
        tied=tied,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        index=INDEX[views["state_indices"].dtype if "state_indices" in views else None],
        pool=PoolMode.SPLIT if "dst_state_indices" in views else PoolMode.SINGLE,
        state_loads=Loads.VECTOR if aligned("state") else Loads.ELEMENT,
        operand_loads=Loads.VECTOR if all(map(aligned, operands)) else Loads.ELEMENT,
        philox_rounds=philox_rounds,
    )


def kernel_values(spec: SsuSpec, views: Mapping[str, Tensor], pad_slot_id: int, dt_limit: Sequence[float] | None) -> dict[str, int | float]:
    """Every kernel argument that is not a pointer."""
    axis_number = {"slot": 0, "batch": 0}
    values: dict[str, int | float] = {"slots": views["state"].shape[0], "pad_slot_id": pad_slot_id}
    for operand, axis, _ in spec.strides():
        names = {"A": ("head", "row", "n"), "D": ("head", "row"), "dt_bias": ("head", "row")}.get(operand, ("batch", "head", "row"))
        names = ("batch", "group", "n") if operand in ("B", "C") else names
        values[f"{operand}_{axis}"] = views[operand].stride(axis_number[axis] if axis in axis_number else names.index(axis))
    if dt_limit is not None:
        values["dt_min"], values["dt_max"] = map(float, dt_limit)
    return values


FAMILY = Family(
    OPERATOR,
    written=("out", "state"),
    problem_of=lambda views, pointers, options: problem_of(views, pointers, options[0], options[1] is not None, options[3]),
    size_of=lambda views: views["x"].shape[0],
    grid_of=lambda spec, views: views["x"].shape[0] * spec.nheads * spec.tiles,
    values_of=lambda spec, views, options: kernel_values(spec, views, options[2], options[1]),
)


def _refer(views: Mapping[str, Tensor], options: tuple[Any, ...], dtype: torch.dtype = torch.float32) -> None:
    dt_softplus, dt_limit, pad_slot_id, philox_rounds = options
    how: dict[str, Any] = {"dt_softplus": dt_softplus, "dt_limit": dt_limit, "pad_slot_id": pad_slot_id, "philox_rounds": philox_rounds}
    reference(**{**views, **how}, dtype=dtype)


# torch.library: what torch.compile and opcheck see. define + impl costs 2.5 us a call where custom_op costs 33.
_library = torch.library.Library("ssmgen", "FRAGMENT")
_library.define(
    "selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
    "Tensor? dt_bias, Tensor(b!) out, Tensor? state_indices, Tensor? dst_state_indices, Tensor? rand_seed, bool dt_softplus, "
    "float[]? dt_limit, int pad_slot_id, int philox_rounds, bool? pdl) -> ()",
    tags=torch.Tag.needs_fixed_stride_order,
)


def _dispatch(given: Sequence[Any], options: tuple[Any, ...], pdl: bool | None) -> None:
    """The call through torch's dispatcher, which comes back below with plain tensors, or traces it."""
    dt_softplus, dt_limit, *rest = options
    torch.ops.ssmgen.selective_state_update(*given, dt_softplus, None if dt_limit is None else list(dt_limit), *rest, pdl)


def _received(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any, bool | None]:
    """(given, options, pdl) of what torch's dispatcher gives."""
    given, (dt_softplus, dt_limit, *rest, pdl) = args[: len(_NAMES)], args[len(_NAMES) :]
    return given, (dt_softplus, None if dt_limit is None else tuple(dt_limit), *rest), pdl


@torch.library.impl(_library, "selective_state_update", "CUDA")
@torch.library.impl(_library, "selective_state_update", "CPU")
def _op(*args: Any) -> None:
    CALLER.plan(*_received(args))()


@torch.library.register_fake("ssmgen::selective_state_update", lib=_library)
def _fake(*args: Any) -> None:
    CALLER.foresee(*_received(args))


_required = frozenset(("state", "x", "dt", "A", "B", "C", "out"))
CALLER = Caller(FAMILY, OPERATOR, _NAMES, _required, _views, _refer, _dispatch, runtime.Patterns())
