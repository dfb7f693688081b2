"""Checks and arguments that the calls of all chunked prompt families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...calls import checks, prompts
from ...errors import ArgumentError
from ...spec.arguments import Value
from ...spec.kernel import Layout
from ...spec.operands import LEAD, Table
from ..recurrences.attention.problem import Beta
from ..tiles import maps
from .kernels import Counts
from .problem import chunks_of

Views = Mapping[str, Tensor]
Own = Callable[[Mapping[str, int]], Mapping[str, checks.Shapes]]  # from a call's sizes by the table's words
ALIGNMENT = 16  # of the workspace: images are copied 16 bytes at once


def token_views(
    table: Table, named: Mapping[str, Any], like: str, key: str, what: str, problems: list[str], groups: str = "key heads",
    own: Own = lambda sizes: {},
) -> dict[str, Tensor]:  # fmt: skip
    """The operands as [batch, T, heads, …]; packed sequences become a batch of 1. Adds to `problems`; the views are usable only if it adds
    nothing.

    like: an operand with an axis of heads; key: an operand with an axis of groups, which messages call `groups`; own: shapes that the table
    does not have; `what` is the name of the call in messages.
    """
    if not checks.check_tensors(named, problems):
        return {}
    checks.check_types(table, {n: t for n, t in named.items() if n != "workspace"}, like, problems, what)
    views, x, ragged, words = dict(named), named[like], "cu_seqlens" in named, table[like].forms[0]
    if x.dim() not in ((3, 4) if ragged else (4,)) or (ragged and x.dim() == 4 and x.shape[0] != 1):
        packed = f"{table.label(words, 'tokens')} or {table.label(words, '1, tokens')}, as cu_seqlens is given"
        problems.append(f"{like} is {list(x.shape)}; expected {packed if ragged else table.label(words, 'batch, T')}")
        return {}
    if x.dim() == 3:
        views |= {n: t.unsqueeze(0) for n, t in views.items() if (form := table[n].forms[0])[0] == LEAD and t.dim() == len(form)}
    if views[key].dim() != 4:
        wanted = f"{table.label(table[key].forms[0], '…')}, as {like} is {list(x.shape)}"
        problems.append(f"{key} is {list(views[key].shape)}; expected {wanted}")
        return {}
    sequences, lead = prompts.sequences_of(views, like), views[like].shape[:2]
    if sequences < 0:
        problems.append("cu_seqlens is empty; expected [sequences + 1]")
        return {}
    (heads, value), (shared, size) = views[like].shape[2:], views[key].shape[2:]
    sizes = {"head": heads, "value": value, "group": shared, "key": size, "batch": lead[0], "token": lead[1]}
    sizes |= prompts.sizes_of(views, sequences)
    rest = {n: t for n, t in views.items() if n not in (like, "workspace")}
    fits = checks.check_shapes(table, rest, sizes, problems, own(sizes), ("…", lead))
    if shared < 1 or heads % shared:
        problems.append(f"{like} has {heads} heads; expected a multiple of the {shared} {groups}")
        fits = False
    prompts.states_go_together(views, sequences, problems)
    return views if fits else {}


# For calls with a workspace.


def v_sizes(views: Views) -> tuple[int, int, int]:
    """(tokens of all sequences, sequences, heads of v)"""
    batch, length, heads, _ = views["v"].shape
    return batch * length, prompts.sequences_of(views, "v"), heads


def check_workspace(views: Views, wanted: int, said: str, problems: list[str]) -> None:
    """Checks that the workspace has the type and size that a call needs. wanted: bytes; said: the function that returns the size."""
    workspace, v = views["workspace"], views["v"]
    if workspace.device != v.device:
        problems.append(f"workspace is on {workspace.device}; expected {v.device}, the device of v")
    if workspace.dtype != torch.uint8 or workspace.dim() != 1 or not workspace.is_contiguous():
        problems.append(f"workspace is {checks.describe(workspace)}; expected dense bytes, [{wanted} or more] uint8")
    elif workspace.numel() < wanted:
        problems.append(f"workspace has {workspace.numel()} bytes; expected {wanted} or more. Get the size from {said}.")


def check_alignment(operator: str, pointers: Mapping[str, int]) -> None:
    """Raises ArgumentError if the address of the workspace is not aligned."""
    if pointers["workspace"] % ALIGNMENT:
        raise ArgumentError(
            operator,
            [
                f"workspace begins at {pointers['workspace'] % ALIGNMENT} bytes past a multiple of {ALIGNMENT}; expected a multiple. "
                "Pass a whole torch.empty(...)."
            ],
        )


def attention_fields(operator: str, table: Table, views: Views, pointers: Mapping[str, int], options: Any) -> dict[str, Any]:
    """The fields that the problems of all attentions over prompts share. Raises ArgumentError if the workspace is misaligned."""
    check_alignment(operator, pointers)
    states = prompts.fields_of(views, pointers, 2)
    return {
        "head_k": views["q"].shape[3],
        "head_v": views["v"].shape[3],
        "x": checks.DTYPES[views["v"].dtype],
        "beta_form": Beta(options.beta),
        "l2norm": options.l2norm,
        "layout": Layout(options.state_layout) if "state" in states else Layout.VK,
        "copy": prompts.together(views, pointers, table.alike("v")),
        **states,
    }


def counts_of(views: Views, chunk: int) -> Counts:
    """The sizes of a launch. chunk: tokens of one."""
    tokens, sequences, heads = v_sizes(views)
    return Counts(chunks_of(tokens, sequences, chunk), sequences, heads, heads // views["q"].shape[2], tokens)


def grid_of(spec: Any, views: Views) -> int:
    blocks: int = spec.blocks(counts_of(views, spec.chunk))
    return blocks


def attention_values(spec: Any, views: Views, options: Any, **more: Value) -> dict[str, Value]:
    """All arguments of a kernel except pointers. more: arguments that not all families have."""
    counts = counts_of(views, spec.chunk)
    values: dict[str, Value] = {"tokens": views["v"].shape[1], "sequences": counts.sequences, "heads": counts.heads}
    values |= {"group_heads": counts.group_heads, **spec.counted(counts)}
    values |= {"scale": options.scale, "pad_slot_id": options.pad_slot_id, **more, **prompts.values_of(views)}
    return values | {**spec.table.stride_values(spec, views), **maps(views, spec.mapped, spec.chunk)}


def for_reference(views: Views, options: Any) -> dict[str, Any]:
    """The arguments of a reference, which computes token by token: without workspace and segments."""
    how = options._asdict()
    how["beta_form"] = how.pop("beta")
    del how["segments"]
    return {**how, **{n: t for n, t in views.items() if n != "workspace"}}


def writes(views: Views) -> bool:
    """Whether there is anything to write."""
    return prompts.sequences_of(views, "v") > 0 and bool(views["v"].numel() or any(n in views for n in ("final_states", "state")))
