"""The operands of mamba3_chunk_scan, checked, as views whose shapes do not depend on how the caller passes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from ...calls import checks, prompts
from ...engine.recurrences.mamba3.checks import by_rank, check_company
from ...engine.recurrences.mamba3.problem import MOST_RANK, Rate, Rotary
from ...spec.kernel import must
from ...spec.operands import LEAD
from .operands import INITIAL, OPERANDS, POOLS
from .prepare import words_of
from .warpgroups import COLUMNS, TILE

Views = Mapping[str, Tensor]


class Options(NamedTuple):
    """The arguments of a call that are not tensors."""

    A_form: str = Rate.HEAVY.value
    rotary: str = Rotary.PAIRS.value
    dt_softplus: bool = True
    trap_sigmoid: bool = True
    eps: float = 1e-5
    A_floor: float = 1e-4
    pad_slot_id: int = -1
    final: bool = False  # the pools are new tensors for the final states: sequences without tokens fill theirs too
    segments: int | None = None  # most parts of a sequence; None: the rule decides


def is_prepared(x: Tensor, B: Tensor, angle: Tensor | None, B_norm: Tensor | None, mimo_x: Tensor | None) -> bool:
    """Whether some variant of a call has a workspace: warpgroups have one for angles and norms."""
    return x.shape[-1] == TILE and B.shape[-1] in COLUMNS and mimo_x is None and (isinstance(angle, Tensor) or isinstance(B_norm, Tensor))


def views_of(given: Views, options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands as kernels and the reference take them: [batch, T, …], with an axis of ranks; packed sequences are a batch of one. Adds
    every error to `problems`; the result is usable only if there are none."""
    if not checks.check_tensors(given, problems):
        return {}
    checks.check_types(OPERANDS, given, "x", problems, "the scan of a prompt")
    workspace, given = given.get("workspace"), {name: t for name, t in given.items() if name != "workspace"}
    _check_company(given, problems)
    x, ragged = given["x"], "cu_seqlens" in given
    if x.dim() not in ((3, 4) if ragged else (4,)) or (ragged and x.dim() == 4 and x.shape[0] != 1):
        packed = "[tokens, heads, headdim] or [1, tokens, heads, headdim], as cu_seqlens is given"
        problems.append(f"x is {list(x.shape)}; expected {packed if ragged else '[batch, T, heads, headdim]'}")
        return {}
    lead = x.shape[:-2]
    B = given["B"]
    if B.dim() - len(lead) not in (2, 3):
        problems.append(f"B is {list(B.shape)}; expected […, rank, groups, d_state] or […, groups, d_state], as x is {list(x.shape)}")
        return {}
    sizes = {"head": x.shape[-2], "row": x.shape[-1], "group": B.shape[-2], "n": B.shape[-1], "batch": 1, "token": lead[-1]}
    sizes |= {"rank": B.shape[-3] if B.dim() - len(lead) == 3 else 1, "angle": given["angle"].shape[-1] if "angle" in given else 0}
    sequences = given["cu_seqlens"].numel() - 1 if ragged else lead[0]
    if sequences < 0:
        problems.append("cu_seqlens is empty; expected [sequences + 1]")
        return {}
    sizes |= prompts.sizes_of(given, sequences)
    problems += must(1 <= sizes["rank"] <= MOST_RANK, f"B is {list(B.shape)}; expected 1 … {MOST_RANK} ranks")
    problems += must(sizes["rank"] == 1 or "mimo_x" in given, f"B is {list(B.shape)} without mimo_x; expected mimo_x for several ranks")
    if not sizes["group"] or sizes["head"] % sizes["group"]:
        problems.append(f"B is {list(B.shape)} but heads {sizes['head']} is not a multiple of its groups {sizes['group']}")
    words = "batch, T" if len(lead) == 2 and not ragged else "tokens" if len(lead) == 1 else "1, tokens"
    if not checks.check_shapes(OPERANDS, given, sizes, problems, _own_shapes(given, sizes, lead, words), (words, lead)):
        return {}
    prompts.states_go_together(given, sequences, problems)
    _check_states(given, problems)
    views = {name: t if name == "out" else OPERANDS.view(name, t, sizes, len(lead)) for name, t in given.items()}
    if not by_rank(given):
        views["out"] = views["out"].unsqueeze(len(lead))
    if len(lead) == 1:
        views |= {name: t.unsqueeze(0) for name, t in views.items() if OPERANDS[name].forms[0][0] == LEAD}
    prompts.check_strides(OPERANDS, views, "x", problems)
    if workspace is not None:
        numbers = words_of(sizes["angle"], views["x"].shape[0] * sizes["token"], sequences, sizes["head"], sizes["group"])
        if workspace.dim() != 1 or not workspace.is_contiguous() or workspace.numel() < numbers:
            wanted = f"[{numbers} or more], dense. Get the size from mamba3_chunk_scan_workspace"
            problems.append(f"workspace is {list(workspace.shape)} with strides {list(workspace.stride())}; expected {wanted}")
        views["workspace"] = workspace
    return views


def _check_company(given: Views, problems: list[str]) -> None:
    """Operands that need others, or have their type."""
    check_company(given, problems)
    rotates = ("angle",) if "angle" in given else ()
    for names in (POOLS, INITIAL):
        needed = (*names[:3], *(names[3:] if rotates else ()))
        if any(name in given for name in names) and (missing := [name for name in needed if name not in given]):
            have = ", ".join(name for name in names if name in given)
            problems.append(f"{have} is given without {', '.join(missing)}; expected all of {', '.join(needed)}")
        if names[3] in given and not rotates:
            problems.append(f"{names[3]} is given without angle; expected both or neither")


def _check_states(given: Views, problems: list[str]) -> None:
    """Pools and initial states have the same types."""
    for pool, initial in zip(POOLS[1:3], INITIAL[1:3], strict=True):
        if pool in given and initial in given:
            problems += prompts.unlike(given, pool, [initial])


def _own_shapes(given: Views, sizes: Mapping[str, int], lead: tuple[int, ...], words: str) -> dict[str, checks.Shapes]:
    """The shape of out, which other operands decide."""
    apart = by_rank(given)
    said = f"[{words}, rank, heads, headdim], as there is no mimo_o," if apart else f"[{words}, heads, headdim]"
    return {"out": {said: (*lead, *((sizes["rank"],) if apart else ()), sizes["head"], sizes["row"])}}
