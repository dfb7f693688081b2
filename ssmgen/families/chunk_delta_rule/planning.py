"""A call of chunk_delta_rule's functions: its operands checked, turned into a problem, and planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calls import checks, prompts
from ...calls.dispatch import callers
from ...calls.naming import WRITTEN_WORDS
from ...calls.planning import Family
from ...engine.chunks.segments import asked
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
from .operands import FUNCTIONS, OF_GATES, OPERANDS, TURNED
from .problem import OPERATOR, DeltaProblem, Gate
from .reference import chunk_delta_rule as reference
from .spec import workspace_for


class Options(NamedTuple):
    """The arguments of a call that are not tensors. Gate and form of beta are names in problem.py; segments: None for the rule's number."""

    gate: str = "none"
    beta: str = "plain"
    l2norm: bool = False
    scale: float = 1.0
    state_layout: str = "vk"
    pad_slot_id: int = -1
    segments: int | None = None


def views_of(named: Mapping[str, Any], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands as [batch, T, HK, K], [batch, T, HV, V], [batch, T, HV]; for packed sequences, the batch is 1.

    Adds errors to `problems`; the result is usable only if there are none.
    """
    table = TURNED if options.state_layout == "kv" else OPERANDS
    if views := token_views(table, named, "v", "q", "the delta rule of a prompt", problems):
        prompts.check_strides(table, views, "v", problems)
        sizes = *v_sizes(views), views["q"].shape[3], views["v"].shape[3]
        segments, length = options.segments, views["v"].shape[1]
        said = f"{OPERATOR}_workspace({', '.join(map(str, sizes))}{'' if segments is None else f', {segments}'})"
        check_workspace(views, workspace_for(*sizes, segments, length), said, problems)
    return views


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> DeltaProblem:
    """The problem of checked operands and their addresses. Raises ArgumentError if the workspace is misaligned."""
    _, length, heads, head_v = views["v"].shape
    return DeltaProblem(
        **attention_fields(OPERATOR, OPERANDS, views, pointers, options),
        **checks.dtypes_of(views, OF_GATES),
        gate=Gate(options.gate),
        **asked(options.segments, heads, head_v, length),
    )


def size_of(views: Mapping[str, Tensor]) -> int:
    """Heads of v, of all sequences; 0 if nothing is to be written."""
    return views["v"].shape[2] * prompts.sequences_of(views, "v") if writes(views) else 0


FAMILY = Family(
    OPERATOR,
    written=OPERANDS.written,
    problem_of=problem_of,
    size_of=size_of,
    grid_of=grid_of,
    values_of=attention_values,
    in_place=OPERANDS.in_place,
)


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    reference(**for_reference(views, options), dtype=dtype)


CALLERS = callers(FAMILY, FUNCTIONS, Options, views_of, run_reference, words=dict.fromkeys(FUNCTIONS, WRITTEN_WORDS))
