"""A call of chunk_linear_attention's functions: its operands checked, turned into a problem, and planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calls import checks, prompts
from ...calls.dispatch import callers
from ...calls.naming import WRITTEN_WORDS
from ...calls.planning import Family
from ...engine.chunks.views import (
    attention_fields,
    attention_values,
    check_workspace,
    for_reference,
    grid_of,
    token_views,
    v_sizes,
    writes,
)
from ...engine.recurrences.attention.problem import Gate
from .operands import CHANNELS, FUNCTIONS, OF_OWN_TYPE, OPERANDS, TURNED
from .problem import OPERATOR, LinearPromptProblem, Rule
from .reference import chunk_linear_attention as reference
from .spec import cut_by, workspace_for

WHAT = "linear attention over a prompt"


class Options(NamedTuple):
    """The arguments of a call that are not tensors: rule, gate and the form of beta by their names in problem.py."""

    rule: str
    gate: str = "log"
    beta: str = "plain"
    l2norm: bool = False
    scale: float = 1.0
    lower_bound: float = 0.0
    state_layout: str = "vk"
    pad_slot_id: int = -1
    segments: int | None = None  # None for the rule's number


def views_of(named: Mapping[str, Any], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands as [batch, T, HK, K], [batch, T, HV, K], [batch, T, HV, V], [batch, T, HV], and a dt_bias of gk as [HV, K]; for packed
    sequences, the batch is 1.

    Adds errors to `problems`; the result is usable only if there are none.
    """
    table = TURNED if options.state_layout == "kv" else OPERANDS
    per_channel, beta, named = "gk" in named, named.get("beta"), dict(named)
    if isinstance(beta, Tensor) and isinstance(named["v"], Tensor) and beta.shape == named["v"].shape:
        problems.append(_BETA.format(list(named.pop("beta").shape)))

    def biases(sizes: Mapping[str, int]) -> dict[str, checks.Shapes]:
        heads, key = sizes["head"], sizes["key"]
        return {"dt_bias": {"[HV, K]": (heads, key), "[HV K]": (heads * key,)} if per_channel else {"[HV]": (heads,)}}

    views = token_views(table, named, "v", "q", WHAT, problems, own=biases)
    if not views:
        return {}
    if per_channel and "dt_bias" in views and views["dt_bias"].dim() == 1:
        views["dt_bias"] = views["dt_bias"].unflatten(0, views["gk"].shape[2:])
    prompts.check_strides(table, views, "v", problems)
    v = views["v"]
    sizes = *v_sizes(views), views["q"].shape[3]
    rule, segments = Rule(options.rule), options.segments
    cut = f", {v.shape[3]}{'' if segments is None else f', {segments}'}" if rule.weighs else ""
    said = f"{OPERATOR}_workspace({', '.join(map(str, sizes))}, {options.rule!r}{cut})"
    check_workspace(views, workspace_for(*sizes, v.shape[3], rule, segments, v.shape[1]), said, problems)
    return views


_BETA = (
    "beta is {}, one per value channel; expected one per head: each value channel would need its own triangular inverse. "
    "Call a decode step, which takes it token by token."
)


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> LinearPromptProblem:
    """The problem of checked operands and their addresses. Raises ArgumentError if the workspace is misaligned."""
    wide = [n for n in CHANNELS if n in views and views[n].dim() > 1]
    rule, (_, length, heads, head_v) = Rule(options.rule), views["v"].shape
    return LinearPromptProblem(
        **attention_fields(OPERATOR, OPERANDS, views, pointers, options),
        **checks.dtypes_of(views, OF_OWN_TYPE),
        rule=rule,
        gate=Gate(options.gate),
        read="read" in views,
        write="write" in views,
        loads=checks.loads_of(views, pointers, wide, 8),
        **cut_by(rule, options.segments, heads, head_v, length),
    )


def size_of(views: Mapping[str, Tensor]) -> int:
    """Heads of v; 0 if nothing is to be written."""
    return views["v"].shape[2] if writes(views) else 0


FAMILY = Family(
    OPERATOR,
    written=OPERANDS.written,
    problem_of=problem_of,
    size_of=size_of,
    grid_of=grid_of,
    values_of=lambda spec, views, options: attention_values(spec, views, options, lower_bound=options.lower_bound),
    in_place=OPERANDS.in_place,
)


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    reference(**for_reference(views, options), dtype=dtype)


CALLERS = callers(
    FAMILY, {name: OPERANDS.only(required=function.required) for name, function in FUNCTIONS.items()}, Options, views_of, run_reference,
    words={name: {**WRITTEN_WORDS, **function.words} for name, function in FUNCTIONS.items()},
)  # fmt: skip
