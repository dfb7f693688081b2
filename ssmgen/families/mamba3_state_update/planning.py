"""A call of mamba3_state_update: its operands checked, turned into a problem, and planned. `call.py` has the public function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...calls import checks
from ...calls.checks import DTYPES, index_of
from ...calls.dispatch import callers
from ...calls.planning import Family
from ...engine.recurrences.mamba3.checks import by_rank, check_company
from ...engine.recurrences.mamba3.problem import MOST_RANK, Mamba3Problem, Rate, Rotary
from ...engine.recurrences.slots import check_slots, slot_shapes
from ...spec.kernel import Index, Loads, PoolMode, Update, must
from .operands import OPERANDS, POOLS
from .reference import reference
from .spec import OPERATOR, Mamba3Spec

_DENSE = ("k_state", "v_state", "angle_state", "B_norm", "C_norm", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o", "norm_weight")


class Options(NamedTuple):
    """The arguments of a call that are not tensors."""

    A_form: str = Rate.HEAVY.value
    rotary: str = Rotary.PAIRS.value
    dt_softplus: bool = True
    trap_sigmoid: bool = True
    eps: float = 1e-5
    A_floor: float = 1e-4
    pad_slot_id: int = -1
    philox_rounds: int = 0
    zero_padding: bool = True


def views_of(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands as the reference takes them: with an axis of ranks, and with an axis of tokens if there may be several. Adds every error
    of dtypes, devices, shapes and strides to `problems`; the result is usable only if there are none."""
    if not checks.check_tensors(named, problems):
        return {}
    checks.check_types(OPERANDS, named, "state", problems)
    _check_company(named, problems)
    state, x, B = named["state"], named["x"], named["B"]
    if state.dim() != 4 or x.dim() not in (3, 4):
        problems.append(f"state is {list(state.shape)}; expected [slots, heads, headdim, d_state]" if state.dim() != 4 else _said_of_x(x))
        return {}
    lead = x.shape[:-2]
    several = len(lead) == 2
    if B.dim() - len(lead) not in (2, 3):
        problems.append(f"B is {list(B.shape)} and x is {list(x.shape)}; expected both with an axis of tokens, or neither")
        return {}
    k = named["k_state"]
    sizes = dict(zip(("slot", "head", "row", "n"), state.shape, strict=True))
    sizes |= {"batch": lead[0], "token": lead[1] if several else 1, "group": B.shape[-2], "rank": k.shape[1] if k.dim() == 4 else 1}
    sizes["angle"] = named["angle_state"].shape[-1] if "angle_state" in named and named["angle_state"].dim() else 0
    problems += must(1 <= sizes["rank"] <= MOST_RANK, f"k_state is {list(k.shape)}; expected 1 … {MOST_RANK} ranks")
    if sizes["group"] == 0 or sizes["head"] % sizes["group"]:
        problems.append(f"B is {list(B.shape)} but heads {sizes['head']} is not a multiple of its groups {sizes['group']}")
    words = "batch, tokens" if several else "batch"
    if not checks.check_shapes(OPERANDS, named, sizes, problems, _own_shapes(named, sizes, lead, words), (words, lead)):
        return {}
    as_given = ("out", "state_indices", "dst_state_indices")
    views = {name: t if name in as_given else OPERANDS.view(name, t, sizes, len(lead)) for name, t in named.items()}
    if not by_rank(named):
        out = views["out"]
        views["out"] = (out if out.dim() == x.dim() else out.unflatten(-1, x.shape[-2:])).unsqueeze(len(lead))
    if not several and "num_accepted_tokens" in named:
        problems.append(f"num_accepted_tokens is given and x is {list(named['x'].shape)}; expected [batch, tokens, heads, headdim]")
    _check_layout(views, sizes, problems)
    return views


def _said_of_x(x: Tensor) -> str:
    return f"x is {list(x.shape)}; expected [batch, heads, headdim] or [batch, tokens, heads, headdim]"


def _check_company(named: Mapping[str, Tensor], problems: list[str]) -> None:
    """Operands that need others, or have their type."""
    check_company(named, problems, pairs=(("angle_state", "angle"),))
    if named["k_state"].dim() == 4 and named["k_state"].shape[1] > 1 and "mimo_x" not in named:
        problems.append(f"k_state is {list(named['k_state'].shape)} without mimo_x; expected mimo_x for several ranks")
    if "rand_seed" in named and named["state"].dtype not in (torch.float16, torch.bfloat16):
        problems.append(f"rand_seed is given and state is {named['state'].dtype}; expected float16 or bfloat16".replace("torch.", ""))


def _own_shapes(named: Mapping[str, Tensor], sizes: Mapping[str, int], lead: tuple[int, ...], words: str) -> dict[str, checks.Shapes]:
    """Shapes that other operands of a call decide: {operand: {shape in words: sizes}}"""
    own = (sizes["head"], sizes["row"])
    out: checks.Shapes = {f"[{words}, rank, heads, headdim], as there is no mimo_o,": (*lead, sizes["rank"], *own)}
    if not by_rank(named):
        out = {f"[{words}, heads, headdim]": (*lead, *own), f"[{words}, heads * headdim]": (*lead, own[0] * own[1])}
    allowed: dict[str, checks.Shapes] = {"out": out}
    return allowed | slot_shapes(named, sizes["batch"], sizes["token"] if len(lead) == 2 else None)


def _check_layout(views: Mapping[str, Tensor], sizes: Mapping[str, int], problems: list[str]) -> None:
    checks.check_dense("state", views["state"], problems)
    for name in _DENSE:
        if name in views and views[name].shape[-1] > 1 and views[name].stride(-1) != 1:
            problems.append(f"{name} has strides {list(views[name].stride())}; expected a last stride of 1")
    checks.check_distinct(views, (*POOLS, "out"), problems)
    check_slots(views, sizes["batch"], problems)
    for name, t in views.items():
        if name != "state":
            first = 1 if name in POOLS else 2 if name in OPERANDS.tokenwise and views["x"].dim() == 4 else 1
            checks.check_strides_fit(name, t, first if name in (*POOLS, *OPERANDS.tokenwise) else 0, problems)


_ROWS = tuple([row.name for row in OPERANDS if row.forms[0][-1] == "n" and row.name != "state"])
# {operand: its first axis whose stride only some kernels take}: for the others it is dense from there on.
_INNER = {row.name: loose[0] for row in OPERANDS if (loose := [each.partition("?")[0] for each in row.strides.split() if "loose" in each])}
_TYPED = {"row_norm": "B_norm", "row_bias": "B_bias", "mimo": "mimo_x"}


def _dense(t: Tensor, first: int) -> bool:
    """Whether the axes from `first` on are contiguous."""
    reach = 1
    for size, stride in zip(reversed(t.shape[first:]), reversed(t.stride()[first:]), strict=True):
        if size > 1 and stride != reach:
            return False
        reach *= size
    return True


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> Mamba3Problem:
    """The problem of checked operands and their addresses."""
    state, target = views["state"], views.get("dst_state_indices")
    _, H, P, N = state.shape
    angles = views["angle_state"].shape[-1] if "angle_state" in views else 0
    typed = {field: name for field, name in (OPERANDS.fields() | _TYPED).items() if name in views}
    together = 4 if not angles or options.rotary == Rotary.PAIRS.value else 2  # neighbours that a lane loads of a row

    vector = min(16 // state.element_size(), N & -N)
    aligned = all(checks.aligned(views[n], pointers[n], together) for n in _ROWS if n in views)
    dense = all(_dense(views[n], OPERANDS.axis_of(n, axis, views[n].dim())) for n, axis in _INNER.items() if n in views)

    return Mamba3Problem(
        d_state=N,
        headdim=P,
        nheads=H,
        ngroups=views["B"].shape[-2],
        rank=views["k_state"].shape[1],
        angles=angles,
        rotary=Rotary(options.rotary) if angles else Rotary.PAIRS,
        rate=Rate(options.A_form),
        dt_softplus=options.dt_softplus,
        trap_sigmoid=options.trap_sigmoid,
        by_rank="mimo_x" in views and "mimo_o" not in views,
        index=index_of(views, "state_indices"),
        pool=PoolMode.SPLIT if target is not None else PoolMode.SINGLE,
        state_loads=Loads.VECTOR if checks.aligned(state, pointers["state"], vector) else Loads.ELEMENT,
        operand_loads=Loads.VECTOR if aligned and dense else Loads.ELEMENT,
        philox_rounds=options.philox_rounds,
        several=views["x"].dim() == 4,
        accepted=index_of(views, "num_accepted_tokens"),
        update=Update.EACH if target is not None and target.dim() == 2 else Update.FINAL,
        zero_padding=options.zero_padding,
        **{field: DTYPES[views[name].dtype] for field, name in typed.items()},
    )


def kernel_values(spec: Mamba3Spec, views: Mapping[str, Tensor], options: Options) -> dict[str, int | float]:
    """Every kernel argument that is not a pointer."""
    values: dict[str, int | float] = {"slots": views["state"].shape[0], "pad_slot_id": options.pad_slot_id}
    values |= {"tokens": views["x"].shape[1], "eps": options.eps, "A_floor": options.A_floor}
    if spec.accepted is not Index.NONE:
        values["columns"] = views["state_indices"].shape[1]
    return values | OPERANDS.stride_values(spec, views)


FAMILY = Family(
    OPERATOR,
    OPERANDS.written,
    problem_of,
    size_of=lambda views: views["x"].shape[0] if views["x"].numel() else 0,
    grid_of=lambda spec, views: views["x"].shape[0] * spec.nheads,
    values_of=kernel_values,
)


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    reference(views, options, dtype)


(CALLER,) = callers(FAMILY, {OPERATOR: OPERANDS}, Options, views_of, run_reference).values()
