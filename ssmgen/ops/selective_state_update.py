"""selective_state_update: one decode step of Mamba-1 and Mamba-2 on torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter

from .. import runtime
from ..errors import ArgumentError
from ..kernels.selective_state_update import OPERATOR, SsuProblem, SsuSpec
from ..reference.selective_state_update import selective_state_update as reference
from ..spec import Index, Loads, PoolMode
from . import checks
from .checks import DTYPES
from .planning import Family, check_overlap, new_signature

_OPTIONAL = ("D", "z", "dt_bias")
_NAMES = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "out", "state_indices", "dst_state_indices")
_MAY_BE_ABSENT = (*_OPTIONAL, "state_indices", "dst_state_indices")
_signatures = runtime.Signatures()
_find = _signatures.find


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
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """One decode step: state <- exp(dt A) state + dt x B;  out = C state + D x, times silu(z).

    H heads of P rows (headdim), N = d_state, G groups of heads that share B and C. Without heads (Mamba-1) drop the H and G axes.
    Every floating tensor may be f32, f16 or bf16, each its own; arithmetic is f32, and the output comes from the new state before
    that is rounded. All tensors may be strided views; only the last three axes of `state` must be dense.

    state: [slots, H, P, N], updated in place          x, dt, z, out: [batch, H, P]; dt also [batch, H]
    A: [H, P, N] or [H], negative                      B, C: [batch, G, N]
    D, dt_bias: [H, P] or [H], or None                 z: None for no gate
    dt_softplus: dt <- log(1 + e^(dt + dt_bias)); dt_limit: then clamped to (low, high)
    state_indices: [batch] int32 or int64, slot of each row; None for slot = row
    dst_state_indices: likewise, where the new state goes; None for in place. Slots must be distinct, else rows race
    pad_slot_id: a row whose slot is negative, equals it or is no slot of the pool gets a zero output and touches no state; such a
        destination is not written
    pdl: whether the kernel may start while the one ahead of it in the stream ends (it waits before it reads anything); None =
        where the device can (sm_90 and later)

    Returns out (new, of x's dtype, if not given). CPU tensors run the reference implementation.
    Raises ArgumentError listing every violated requirement, before anything is launched; UnsupportedError; CaptureError when a
    kernel would have to be built during a CUDA graph capture; NotBuiltError, CompileError, LoadError, LaunchError.
    Source: Gu & Dao 2023 (arXiv 2312.00752), Dao & Gu 2024 (arXiv 2405.21060).
    """
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format) if isinstance(x, Tensor) else x  # the checks object to x
    given = (state, x, dt, A, B, C, D, z, dt_bias, out, state_indices, dst_state_indices)
    if is_compiling():
        _dispatch(given, dt_softplus, dt_limit, pad_slot_id, pdl)
        return out
    _plan(given, dt_softplus, dt_limit, pad_slot_id, pdl)()
    return out


def _plan(given: tuple[Any, ...], dt_softplus: bool, dt_limit: Any, pad_slot_id: int, pdl: bool | None) -> Callable[[], None]:
    """What runs a call. Everything up to `find` is paid at every call."""
    _, x, _, _, _, _, D, z, dt_bias, _, source, target = given
    try:
        key = (x.shape, D is None, z is None, dt_bias is None, source is None, target is None, dt_softplus, dt_limit, pad_slot_id, pdl)
        plan = _find(key, given)
    except (AttributeError, TypeError):  # not tensors, or a limit that cannot be hashed: the checks say which
        key = plan = None
    if plan is not None:
        return plan
    if any(isinstance(t, Tensor) and type(t) not in (Tensor, Parameter) for t in given):  # fake, distributed, wrapped: theirs to say
        return partial(_dispatch, given, dt_softplus, dt_limit, pad_slot_id, pdl)
    return _prepare(key, given, dt_softplus, dt_limit, pad_slot_id, pdl)


def _dispatch(given: tuple[Any, ...], dt_softplus: bool, dt_limit: tuple[float, float] | None, pad_slot_id: int, pdl: bool | None) -> None:
    """The call through torch's dispatcher, which comes back here with plain tensors, or traces it."""
    limit = None if dt_limit is None else list(dt_limit)
    torch.ops.ssmgen.selective_state_update(*given, dt_softplus, limit, pad_slot_id, pdl)


def _prepare(key: Any, given: tuple[Any, ...], dt_softplus: bool, dt_limit: Any, pad_slot_id: int, pdl: bool | None) -> Callable[[], None]:
    """What runs a call of a kind not seen before: checks, selects, compiles, loads; the next such call finds the plan."""
    named = _named(given)
    views = _checked_views(named, dt_limit, pdl)
    if not views["state"].is_cuda:
        return _reference_plan(views, named, dt_softplus, dt_limit, pad_slot_id)
    signature = new_signature(FAMILY, OPERATOR, views, named, (dt_softplus, dt_limit, pad_slot_id), pdl, given)
    plan = signature.add(tuple(t.data_ptr() for t in named.values()))
    _signatures.add(key, signature)
    return plan


def _named(given: tuple[Any, ...]) -> dict[str, Any]:
    """The operands by name, without the optional ones that are absent."""
    return {name: t for name, t in zip(_NAMES, given, strict=True) if t is not None or name not in _MAY_BE_ABSENT}


def _checked_views(named: dict[str, Tensor], dt_limit: Any, pdl: bool | None) -> dict[str, Tensor]:
    """The operands in headed form. Raises ArgumentError for everything that is wrong but where they lie."""
    problems: list[str] = []
    if dt_limit is not None and not (isinstance(dt_limit, tuple) and len(dt_limit) == 2 and dt_limit[0] <= dt_limit[1]):
        problems.append(f"dt_limit is {dt_limit!r}, not a tuple (low, high)")
    views = headed_views(named, problems)
    checks.check_pdl(pdl, views, problems)
    if problems:
        raise ArgumentError(OPERATOR, problems)
    return views


def _reference_plan(
    views: dict[str, Tensor], named: dict[str, Tensor], dt_softplus: bool, dt_limit: Any, pad_slot_id: int
) -> Callable[[], None]:
    """For CPU tensors; made for each call, since it holds them."""
    check_overlap(FAMILY, OPERATOR, views, {name: t.data_ptr() for name, t in named.items()})

    def run() -> None:
        with torch.no_grad():
            reference(**views, dt_softplus=dt_softplus, dt_limit=dt_limit, pad_slot_id=pad_slot_id)

    return run


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
        problems.append(f"x is {list(x.shape)}, not {wanted} as state {list(named['state'].shape)} asks for")
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
        elif name not in ("state", "state_indices", "dst_state_indices"):
            views[name] = t.unsqueeze(1)
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


def problem_of(views: dict[str, Tensor], pointers: dict[str, int], dt_softplus: bool, dt_limit: bool) -> SsuProblem:
    """The problem that checked operands pose, given where they lie."""
    state = views["state"]
    _, H, P, N = state.shape

    def shared(name: str, *axes: int) -> bool:
        t = views.get(name)
        return t is None or all(t.stride(a) == 0 or t.shape[a] == 1 for a in axes)

    tied = shared("A", 1, 2) and shared("dt", 2) and shared("dt_bias", 1)
    vector = min(16 // state.element_size(), N & -N)  # elements that a lane owns

    def aligned(name: str) -> bool:
        return checks.aligned(views[name], pointers[name], vector)

    operands = ("B", "C") if tied else ("A", "B", "C")
    index = views.get("state_indices")
    dtype = {name: DTYPES[views[name].dtype] for name in ("state", "x", "dt", "A", "B", "C", "out")}
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
        index=Index.NONE if index is None else Index.I32 if index.dtype == torch.int32 else Index.I64,
        pool=PoolMode.SPLIT if "dst_state_indices" in views else PoolMode.SINGLE,
        state_loads=Loads.VECTOR if aligned("state") else Loads.ELEMENT,
        operand_loads=Loads.VECTOR if all(map(aligned, operands)) else Loads.ELEMENT,
    )


def kernel_values(spec: SsuSpec, views: dict[str, Tensor], pad_slot_id: int, dt_limit: Sequence[float] | None) -> dict[str, int | float]:
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
    problem_of=lambda views, pointers, options: problem_of(views, pointers, options[0], options[1] is not None),
    size_of=lambda views: views["x"].shape[0],
    grid_of=lambda spec, views: views["x"].shape[0] * spec.nheads * spec.tiles,
    values_of=lambda spec, views, options: kernel_values(spec, views, options[2], options[1]),
)


# Hooks for warm(), is_warm() and bind(): the arguments of the public function -> its plan.


def plan_call(*args: Any, **kwargs: Any) -> tuple[Callable[[], None], Tensor]:
    """(plan, out) of a call, without running it."""
    given, options = _operands(*args, **kwargs)
    return _plan(given, *options), given[9]


def problem_of_call(*args: Any, **kwargs: Any) -> tuple[SsuProblem, int, torch.device, bool | None]:
    """(problem, batch, device, pdl as asked for) of a call. Raises ArgumentError."""
    given, (dt_softplus, dt_limit, _, pdl) = _operands(*args, **kwargs)
    named = _named(given)
    views = _checked_views(named, dt_limit, pdl)
    problem = problem_of(views, {n: t.data_ptr() for n, t in named.items()}, dt_softplus, dt_limit is not None)
    return problem, views["x"].shape[0], views["state"].device, pdl


def _operands(
    state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, *, dt_limit=None, state_indices=None,
    dst_state_indices=None, pad_slot_id=-1, out=None, pdl=None,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
    """(tensors in the order of _NAMES, options) of the public function's arguments."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    return (state, x, dt, A, B, C, D, z, dt_bias, out, state_indices, dst_state_indices), (dt_softplus, dt_limit, pad_slot_id, pdl)


# torch.library: what torch.compile and opcheck see. define + impl costs 2.5 us a call where custom_op costs 33.
_library = torch.library.Library("ssmgen", "FRAGMENT")
_library.define(
    "selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
    "Tensor? dt_bias, Tensor(b!) out, Tensor? state_indices, Tensor? dst_state_indices, bool dt_softplus, float[]? dt_limit, "
    "int pad_slot_id, bool? pdl) -> ()",
    tags=torch.Tag.needs_fixed_stride_order,
)


@torch.library.impl(_library, "selective_state_update", "CUDA")
@torch.library.impl(_library, "selective_state_update", "CPU")
def _op(*args: Any) -> None:
    *given, dt_softplus, dt_limit, pad_slot_id, pdl = args
    state, x, dt, A, B, C, D, z, dt_bias, out, state_indices, dst_state_indices = given
    selective_state_update(
        state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit=None if dt_limit is None else tuple(dt_limit), out=out,
        state_indices=state_indices, dst_state_indices=dst_state_indices, pad_slot_id=pad_slot_id, pdl=pdl,
    )  # fmt: skip


@torch.library.register_fake("ssmgen::selective_state_update", lib=_library)
def _fake(*args: Any) -> None:
    return None
