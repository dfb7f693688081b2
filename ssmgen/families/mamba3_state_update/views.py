"""The operands of mamba3_state_update, checked, as views whose shapes do not depend on how the caller passes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...calls import checks
from ...engine.recurrences.mamba3.checks import by_rank, check_company
from ...engine.recurrences.mamba3.problem import MOST_RANK, Rate, Rotary
from ...engine.recurrences.slots import check_slots, slot_shapes
from ...spec.kernel import must
from .operands import OPERANDS, POOLS

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
