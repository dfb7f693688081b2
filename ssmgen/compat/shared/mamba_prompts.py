"""Shared by the drop-ins for Mamba-2's prompts: the requested states, the tokens that they follow, and their dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calls.checks import DTYPES
from ...errors import ArgumentError, UnsupportedError
from ...families.chunk_scan.call import chunk_scan
from . import delta_prompts

# Arguments of `takes` for every function modelled on mamba-ssm's.
ROWS, GROUPS = "[batch, T, H, P]", "[batch, T, G, N]"
PADDED = {"x": ROWS, "z": ROWS, "dt": "[batch, T, H]", "B": GROUPS, "C": GROUPS, "initial_states": "[batch, H, P, N]"}
PADDED |= {"seq_idx": "[batch, T]", "cu_seqlens": "[sequences + 1]", "A": "[H]", "D": "[H] or [H, P]", "dt_bias": "[H]"}


class Operands(NamedTuple):
    """The operands of every call."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    dt_softplus: bool
    dt_limit: Any


class States(NamedTuple):
    """last: [sequences, H, P, N], after each sequence; after: [count, H, P, N], after given numbers of tokens. None if not requested."""

    last: Tensor | None
    after: Tensor | None


def scan(
    operands: Operands, out: Tensor, *, cu_seqlens: Tensor | None = None, last: torch.dtype | None = None, positions: Tensor | None = None,
    after: torch.dtype | None = None, **options: Any,
) -> States:  # fmt: skip
    """Runs chunk_scan into out. last, after: the dtypes of the states to return, None for none. options: of `run`."""
    x, inner = operands.x, (*operands.x.shape[-2:], operands.B.shape[-1])
    sequences = x.shape[0] if cu_seqlens is None else max(cu_seqlens.numel() - 1, 0)
    states = States(
        None if last is None else x.new_empty((sequences, *inner), dtype=last),
        None if positions is None else x.new_empty((positions.numel(), *inner), dtype=after),
    )
    run(operands, out, cu_seqlens=cu_seqlens, last=states.last, positions=positions, checkpoints=states.after, **options)
    return states


def run(operands: Operands, out: Tensor, **options: Any) -> None:
    """Runs chunk_scan into out and the given tensors of states, as delta_prompts.run does.

    Limits (0, inf) are dropped with a softplus, which is at least 0: limits need a different kernel.
    """
    *tensors, softplus, limit = operands
    if softplus is True and isinstance(limit, tuple) and all(type(v) in (int, float) for v in limit) and limit == (0, math.inf):
        limit = None
    delta_prompts.run(chunk_scan, tensors, out, dt_softplus=softplus, dt_limit=limit, **options)


def state_dtype_of(name: str, state_dtype: torch.dtype | None, C: Tensor) -> torch.dtype:
    """The dtype that states are returned in; as in mamba-ssm, C's if none is said."""
    dtype = C.dtype if state_dtype is None else state_dtype
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise UnsupportedError(name, [f"state_dtype is {dtype}; expected float32, float16 or bfloat16".replace("torch.", "")])
    return dtype


def starts_of(name: str, x: Tensor, cu_seqlens: Tensor | None, seq_idx: Tensor | None) -> Tensor:
    """cu_seqlens, where return_varlen_states asks for the states of its sequences."""
    problems = [] if x.shape[0] == 1 else [f"x is {list(x.shape)}; expected one row, in which cu_seqlens packs the sequences"]
    if cu_seqlens is None:
        problems.append("return_varlen_states is True and cu_seqlens is None; expected the starts of the sequences. Pass cu_seqlens.")
    if problems or cu_seqlens is None:
        raise ArgumentError(name, problems)
    if seq_idx is None and cu_seqlens.numel() != 2:
        reason = (
            "return_varlen_states is True and seq_idx is None; expected seq_idx: without it, the original mixes sequences within a chunk"
        )
        raise UnsupportedError(name, [reason])
    return cu_seqlens


class Wanted(NamedTuple):
    """Which states an engine's copy of mamba-ssm's function is asked for."""

    chunks: bool  # before each chunk of chunk_size tokens of a row
    final: bool  # after each row, f32
    varlen: bool  # after each sequence of cu_seqlens
    ends: Tensor | None = None  # [count], after these numbers of tokens of the packed row


class Found(NamedTuple):
    """As Wanted: [batch, chunks, H, P, N], [batch, H, P, N], [sequences, H, P, N], [1, count, H, P, N]."""

    chunks: Tensor | None
    final: Tensor | None
    varlen: Tensor | None
    ends: Tensor | None


def combined(
    name: str, wanted: Wanted, operands: Operands, out: Tensor, *, chunk_size: int, initial_states: Tensor | None,
    seq_idx: Tensor | None, cu_seqlens: Tensor | None, state_dtype: torch.dtype | None,
) -> Found:  # fmt: skip
    """Rows [batch, T], parted by seq_idx; or with wanted.varlen the sequences of cu_seqlens, packed in one row, of initial states each."""
    x = operands.x
    dtype = state_dtype_of(name, state_dtype, operands.C)
    starts = starts_of(name, x, cu_seqlens, seq_idx) if wanted.varlen else None
    if wanted.chunks and (isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or not 0 < chunk_size < 2**31):
        raise ArgumentError(name, [f"chunk_size is {chunk_size!r}; expected a number of tokens"])
    if wanted.ends is not None and (wanted.ends.device != x.device or wanted.ends.dtype not in (torch.int32, torch.int64)):
        given = f"{wanted.ends.dtype} on {wanted.ends.device}".replace("torch.", "")
        raise ArgumentError(name, [f"track_end_locs is {given}; expected int32 or int64 on {x.device}"])
    parts = {}
    if wanted.chunks:
        rows, chunks = (torch.arange(n, device=x.device) for n in (x.shape[0], -(-x.shape[1] // chunk_size)))
        parts["chunks"] = (rows[:, None] * x.shape[1] + chunks * chunk_size).flatten()
    if wanted.ends is not None:
        parts["ends"] = wanted.ends
    if wanted.final and wanted.varlen:  # of the row, not of its sequences
        parts["final"] = torch.full((1,), x.shape[1], device=x.device)
    positions, order = None if not parts else torch.cat(list(parts.values())), None
    if len(parts) > 1 and positions is not None:
        positions, order = positions.sort()
    got = scan(
        operands, out, initial_states=initial_states, cu_seqlens=starts, seq_idx=None if wanted.varlen else seq_idx, positions=positions,
        last=dtype if wanted.varlen else torch.float32 if wanted.final else None,
        after=None if not parts else torch.float32 if "final" in parts else dtype,
    )  # fmt: skip
    found: dict[str, Tensor] = {}
    if got.after is not None:
        in_order = [got.after] if order is None else [got.after[r] for r in order.argsort().split([p.numel() for p in parts.values()])]
        found = dict(zip(parts, in_order, strict=True))
    return Found(
        _of_chunks(found["chunks"].to(dtype), x.shape[0], initial_states) if wanted.chunks else None,
        (found["final"] if wanted.varlen else got.last) if wanted.final else None,
        got.last if wanted.varlen else None,
        found["ends"].to(dtype)[None] if wanted.ends is not None else None,
    )


def _of_chunks(states: Tensor, batch: int, initial_states: Tensor | None) -> Tensor:
    """[batch, chunks, H, P, N]. Ahead of a row's first chunk is its initial state, and no token whose state it could be."""
    states = states.unflatten(0, (batch, -1)) if states.numel() else states.view(batch, 0, *states.shape[1:])
    states[:, :1] = 0 if initial_states is None or not initial_states.numel() else initial_states[:batch, None]
    return states


def only(results: Sequence[Tensor | None]) -> Tensor | tuple[Tensor, ...] | None:
    """The results that there are: None, one of them, or a tuple."""
    found = tuple(t for t in results if t is not None)
    return found if len(found) > 1 else found[0] if found else None
