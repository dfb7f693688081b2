"""Shared by the drop-ins for prompts of delta rules: rows as kernels read them, states of several dtypes, and checkpoint positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calls.checks import DTYPES, check_distinct
from ...errors import ArgumentError
from ...families.chunk_delta_rule.call import chunk_delta_rule, chunk_gated_delta_rule
from . import invariance
from .gated_delta import new_output
from .operands import rows_of, written_rows

CHUNK = 64  # tokens, counted from a sequence's start: the places where a state can be asked for

# Arguments of `takes` for every function modelled on flash-linear-attention's.
PACKED = {"q": "[B, T, H, K]", "k": "[B, T, H, K]", "v": "[B, T, HV, V]", "g": "[B, T, HV]", "beta": "[B, T, HV]", "cu_seqlens": "[N + 1]"}


class Operands(NamedTuple):
    """The operands of every call."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None  # None for a plain delta rule
    beta: Tensor


def scan(operands: Operands, out: Tensor, **states: Any) -> None:
    """Writes the delta rule of a prompt into out; further arguments go to `run`."""
    if operands.g is None:
        run(chunk_delta_rule, (*operands[:3], operands.beta), out, **states)
    else:
        run(chunk_gated_delta_rule, operands, out, **states)


def returned(
    function: Callable[..., Any], operands: Sequence[Tensor | None], final: bool, *, out: Tensor | None = None,
    cu_seqlens: Tensor | None = None, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(out, or a new output of q's dtype; the final states, new and f32, or None). operands: q, k and v, and the function's other ones;
    options: of `run`."""
    q, _, v, *_ = operands
    assert q is not None and v is not None  # looked at before
    out = new_output(q, v) if out is None else out
    last = states_of(q, v, sequences_of(v, cu_seqlens), options.get("state_layout", "vk")) if final else None
    run(function, operands, out, last=last, cu_seqlens=cu_seqlens, **options)
    return out, last


def run(
    function: Callable[..., Any], operands: Sequence[Tensor | None], out: Tensor, *, initial_states: Tensor | None = None,
    last: Tensor | None = None, state: Tensor | None = None, positions: Tensor | None = None, checkpoints: Tensor | None = None,
    **options: Any,
) -> None:  # fmt: skip
    """Runs a prompt function into out, final states into `last` or the slots of a pool `state`, states at positions into checkpoints.

    A kernel has one dtype for all states: the pool's, or else the given states' common dtype, or f32 if they differ, from which each is
    rounded once. With a 16-bit pool, initial states must have the pool's dtype.
    """
    given = [t for t in (initial_states, last, checkpoints) if t is not None]
    dtypes = {t.dtype for t in given} if state is None else {state.dtype}
    held = dtypes.pop() if len(dtypes) == 1 else torch.float32
    if initial_states is not None:
        if not initial_states[:1, :1].is_contiguous():
            initial_states = initial_states.contiguous()
        if held == torch.float32 and initial_states.dtype in DTYPES:
            initial_states = initial_states.to(held)
    final, kept = (_as_held(function.__name__, n, t, held) for n, t in (("final_states", last), ("checkpoints", checkpoints)))
    more: dict[str, Any] = {"initial_states": initial_states, "final_states_out": final, "state": state, "checkpoint_positions": positions}
    written = written_rows(out)
    more |= invariance.whole(function) | options | {"checkpoints_out": kept, "out": written}
    rows = [t if t is None or t.dim() < out.dim() else rows_of(t) for t in operands]
    function(*rows, **{name: value for name, value in more.items() if value is not None})
    if written is not out:
        out.copy_(written)
    if last is not None and final is not None and final is not last:
        last.copy_(final)
    if checkpoints is not None and kept is not None and kept is not checkpoints:
        checkpoints.copy_(kept)


def _as_held(function: str, name: str, t: Tensor | None, held: torch.dtype) -> Tensor | None:
    """A tensor that receives states, as the kernel is given it: itself, or a copy of the kernel's dtype.

    Raises ArgumentError for overlapping elements, which a copy hides from the call's own checks.
    """
    if t is None or t.dtype == held or t.dtype not in DTYPES:
        return t
    problems: list[str] = []
    check_distinct({name: t}, (name,), problems)
    if problems:
        raise ArgumentError(function, problems)
    return t.to(held)


def sequences_of(v: Tensor, cu_seqlens: Tensor | None) -> int:
    """Rows of a batch, or packed sequences."""
    return v.shape[0] if cu_seqlens is None else max(cu_seqlens.shape[0] - 1, 0)


def states_of(q: Tensor, v: Tensor, count: int, layout: str = "vk") -> Tensor:
    """New ones, f32: [count, HV, V, K], or of layout "kv" [count, HV, K, V]."""
    last = (v.shape[-1], q.shape[-1])
    return v.new_empty((count, v.shape[-2], *(last if layout == "vk" else last[::-1])), dtype=torch.float32)


def objections(v: Tensor, indices: Mapping[str, Tensor | None], pools: Mapping[str, Tensor | None] | None = None) -> list[str]:
    """The faults of indices and pools that are used in computations before the call, whose own checks would come too late."""
    found = []
    for name, t in indices.items():
        if t is not None and (t.dim() != 1 or t.dtype not in (torch.int32, torch.int64) or t.device != v.device):
            given = f"{t.dtype} {list(t.shape)} on {t.device}".removeprefix("torch.")
            found.append(f"{name} is {given}; expected one axis of int32 or int64 on {v.device}")
    pools = {} if pools is None else pools
    return found + [
        f"{name} is on {t.device}; expected {v.device}, the device of v"
        for name, t in pools.items()
        if t is not None and t.device != v.device
    ]


def gathered(pool: Tensor, slots: Tensor) -> Tensor:
    """A copy of these slots' states; zeros for a slot that is none of the pool's."""
    if not pool.shape[0]:
        return pool.new_zeros((slots.shape[0], *pool.shape[1:]))
    missing = (slots < 0) | (slots >= pool.shape[0])
    return pool[slots.masked_fill(missing, 0)].masked_fill_(missing[:, None, None, None], 0)


def places(
    name: str, v: Tensor, tokens: int, cu_seqlens: Tensor | None, checkpoints: Tensor | None, first: Tensor | None, problems: list[str]
) -> Tensor | None:
    """[count], ascending: positions at multiples of `tokens` after a sequence's start, one for each row of checkpoints; None if there
    are no checkpoints.

    first: [N + 1], the row of each sequence's first position, then the number of positions. Rows from that number on get positions after
    the last sequence, which belong to no sequence.
    Raises ArgumentError for `problems`, and for arguments that contradict each other.
    """
    problems += ["cu_seqlens is None; expected the starts of the packed sequences"] if cu_seqlens is None else []
    if not 0 <= tokens < 2**31 or tokens % CHUNK:
        problems.append(f"checkpoint_every_n_tokens is {tokens}; expected a multiple of {CHUNK}, or 0 for no checkpoints")
    if tokens and (checkpoints is None or first is None):
        problems.append("checkpoint_every_n_tokens is given without buffers; expected state_checkpoints and checkpoint_cu_starts with it")
    if not tokens and not (checkpoints is None and first is None):
        problems.append("state_checkpoints or checkpoint_cu_starts is given without checkpoint_every_n_tokens; expected None")
    if first is not None and cu_seqlens is not None:
        problems += objections(v, {"cu_seqlens": cu_seqlens, "checkpoint_cu_starts": first})
        if first.shape != cu_seqlens.shape or not first.numel():
            found = f"{list(first.shape)} and {list(cu_seqlens.shape)}"
            problems.append(f"checkpoint_cu_starts and cu_seqlens are {found}; expected [N + 1] for both")
    if problems or cu_seqlens is None:
        raise ArgumentError(name, problems)
    if checkpoints is None or first is None:
        return None
    ordinal = torch.arange(1, checkpoints.shape[0] + 1, dtype=first.dtype, device=v.device)
    owner = torch.searchsorted(first[1:], ordinal)
    return torch.add(torch.sub(cu_seqlens, first, alpha=tokens)[owner].long(), ordinal, alpha=tokens)
