"""Linear attention with a decay per head over prompts: chunk_scan's kernel without dt, where v is x, k is B and q is C."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...calls.dispatch import callers
from ...calls.naming import WRITTEN_WORDS
from ...calls.operator import operator, run
from ...calls.planning import Family
from ...spec.arguments import Value
from ...spec.operands import Table, plain
from . import call as scan
from .call import SEGMENTS, Options
from .spec import ATTENTION, OPERATOR, ScanProblem, ScanSpec

_T = TypeVar("_T")
_AXES = {"G": "HK", "H": "HV", "P": "V", "N": "K"}  # in messages
_WORDS = {"chunk_simple_gla": ATTENTION, "chunk_lightning_attn": ATTENTION | {"g": "slope"}}
_ROLES = {word: role for words in _WORDS.values() for role, word in words.items()}


@operator(like="v", segments=SEGMENTS)
def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    state: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = -1,
    segments: int | None = None,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Linear attention with a decay per head over whole sequences, per token: S <- e^g S + v k^T;  out = scale S q.

    HV heads of V value and K key channels, multiples of 16 up to 256; HK heads of q and k, of which each serves HV / HK of v. […] is
    [batch, T], or for packed sequences with cu_seqlens [tokens] or [1, tokens]. States are [·, HV, V, K]: those that `simple_gla` goes on
    from, in its layout "vk". Numerics are those of chunk_scan; the scale multiplies the output before it is rounded.

    q, k: […, HK, K], v, out: […, HV, V], bf16, f16 or f32, all of one dtype
    g: […, HV] or [HV], f32, bf16 or f16, log decay of each token or of all, at most 0; None for none
    scale: factor of the output; None for K^-0.5
    cu_seqlens, initial_states, return_final_states, final_states_out, state, state_indices, has_initial_state, pad_slot_id, segments, out,
        pdl: as those of chunk_scan

    Returns out, or (out, final states). CPU tensors run the reference implementation, token by token.
    Raises what chunk_scan raises.
    Source: Yang et al. 2023 (arXiv 2312.06635), with a gate per head; a constant one is RetNet's (Sun et al. 2023, arXiv 2307.08621).
    """
    return _call(
        "chunk_simple_gla", q, k, v, g, scale, cu_seqlens, initial_states, return_final_states, final_states_out, state, state_indices,
        has_initial_state, pad_slot_id, segments, out, pdl,
    )  # fmt: skip


@operator(like="v", segments=SEGMENTS)
def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slope: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    state: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = -1,
    segments: int | None = None,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Lightning attention (MiniMax) over whole sequences, per token: S <- e^-slope S + v k^T;  out = scale S q.

    slope: [HV] f32, bf16 or f16, at least 0: no token changes it
    Otherwise as chunk_simple_gla; the states are those that `lightning_attn` goes on from, in its layout "vk". Some models want scale=1.
    Source: Qin et al. 2024 (arXiv 2401.04658).
    """
    return _call(
        "chunk_lightning_attn", q, k, v, slope, scale, cu_seqlens, initial_states, return_final_states, final_states_out, state,
        state_indices, has_initial_state, pad_slot_id, segments, out, pdl,
    )  # fmt: skip


def _call(
    name: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float | None, cu_seqlens: Tensor | None,
    initial_states: Tensor | None, return_final_states: bool, final: Tensor | None, state: Tensor | None, state_indices: Tensor | None,
    has_initial_state: Tensor | None, pad_slot_id: int, segments: int | None, out: Tensor | None, pdl: bool | None,
) -> Tensor:  # fmt: skip
    if isinstance(v, Tensor) and isinstance(k, Tensor):  # else the checks object
        out = v.new_empty(v.shape) if out is None else out
        if return_final_states and final is None and v.dim() in (3, 4) and k.dim() == v.dim():
            count = v.shape[0] if not isinstance(cu_seqlens, Tensor) else max(cu_seqlens.numel() - 1, 0)
            dtype = initial_states.dtype if isinstance(initial_states, Tensor) else torch.float32
            final = v.new_empty((count, *v.shape[-2:], k.shape[-1]), dtype=dtype)
    if scale is None:
        scale = k.shape[-1] ** -0.5 if isinstance(k, Tensor) and k.dim() and k.shape[-1] else 1.0
    given = (v, g, k, q, cu_seqlens, initial_states, final, state, state_indices, has_initial_state, out)
    returns = ("out", "final_states") if return_final_states and final is not None else ("out",)
    options = Options(pad_slot_id=pad_slot_id, scale=scale, slope=name == "chunk_lightning_attn", segments=segments)
    return run(CALLERS[name], given, options, pdl, returns=returns)


def by_role(named: Mapping[str, _T]) -> dict[str, _T]:
    return {_ROLES.get(name, name): t for name, t in named.items()}


def views_of(words: Mapping[str, str], named: Mapping[str, Any], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands as chunk_scan's, by the function's words. Adds to `problems`; what comes back is only usable if that is nothing."""
    found: list[str] = []
    views = scan.views_of(by_role(named), options, found)
    if options.slope and views.get("g") is not None and views["g"].dim() != 1:
        found.append(f"g is {list(named['slope'].shape)}, not [H]")
    said = {**words, **_AXES}
    problems += [re.sub(rf"\b({'|'.join(said)})\b", lambda m: said[m[0]], problem) for problem in found]
    return {words.get(name, name): t for name, t in views.items()}


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> ScanProblem:
    return scan.problem_of(by_role(views), by_role(pointers), options)


def kernel_values(spec: ScanSpec, views: Mapping[str, Tensor], options: Options) -> dict[str, Value]:
    return scan.kernel_values(spec, by_role(views), options)


def run_reference(views: Mapping[str, Tensor], options: Options, dtype: torch.dtype = torch.float32) -> None:
    named: dict[str, Any] = {"dt": None, "A": None} | by_role(views)
    scan.run_reference(named, options, dtype)


FAMILY = Family(
    OPERATOR,
    written=("out", "final_states", "state"),
    problem_of=problem_of,
    size_of=lambda views: scan.FAMILY.size_of(by_role(views)),
    grid_of=lambda spec, views: scan.FAMILY.grid_of(spec, by_role(views)),
    values_of=kernel_values,
    in_place=scan.FAMILY.in_place,
)


def _table(name: str) -> Table:
    words = _WORDS[name]
    roles = ("x", "g", "B", "C", "cu_seqlens", "initial_states", "final_states", "state", "state_indices", "has_initial_state", "out")
    names = [words.get(role, role) for role in roles]
    return plain(names, ("v", "k", "q", "out", *(("slope",) if "slope" in names else ())), FAMILY.written)


CALLERS = callers(
    FAMILY, {name: _table(name) for name in _WORDS}, Options, {name: partial(views_of, words) for name, words in _WORDS.items()},
    run_reference, "chunk_attention", ("pad_slot_id", "scale", "slope", "segments"),
    {name: {**WRITTEN_WORDS, **words} for name, words in _WORDS.items()},
)  # fmt: skip
