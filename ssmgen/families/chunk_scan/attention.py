"""Linear attention with a decay per head over prompts: chunk_scan's kernel without dt, where v is x, k is B and q is C."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ...calls.dispatch import callers
from ...calls.naming import WRITTEN_WORDS
from ...calls.operator import operator, run
from ...calls.prompts import States
from ...engine.recurrences.attention.switches import scale_of
from .call import FAMILY, SEGMENTS, Options, run_reference, views_of
from .operands import ATTENTIONS, WORDS


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

    HV heads of V value and K key channels, multiples of 16 up to 256; HK heads of q and k, each for HV / HK heads of v. […] is
    [batch, T], or for packed sequences with cu_seqlens [tokens] or [1, tokens]. States are [·, HV, V, K]; `simple_gla` continues from
    them, in its layout "vk". Numerics are as in chunk_scan; the scale multiplies the output before it is rounded.

    q, k: […, HK, K]          v, out: […, HV, V]; bf16, f16 or f32, all of one dtype
    g: […, HV] or [HV], f32, bf16 or f16, log decay of each token or of all, at most 0; None for none
    scale: factor of the output; None for K^-0.5
    cu_seqlens, initial_states, return_final_states, final_states_out, state, state_indices, has_initial_state, pad_slot_id, segments, out,
        pdl: as in chunk_scan

    Returns out, or (out, final states). CPU tensors run the reference implementation, token by token.
    Raises the same errors as chunk_scan.
    Source: Yang et al. 2023 (arXiv 2312.06635), with a gate per head; a constant one is RetNet's (Sun et al. 2023, arXiv 2307.08621).
    """
    states = States(
        cu_seqlens, initial_states, return_final_states, final_states_out, state, state_indices, has_initial_state, None, None, False, out
    )
    options = Options(pad_slot_id=pad_slot_id, scale=scale_of(scale, k), segments=segments)
    return _call("chunk_simple_gla", {"x": v, "g": g, "B": k, "C": q}, states, options, pdl)


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
    Otherwise as chunk_simple_gla; `lightning_attn` continues from these states, in its layout "vk". Some models want scale=1.
    Source: Qin et al. 2024 (arXiv 2401.04658).
    """
    states = States(
        cu_seqlens, initial_states, return_final_states, final_states_out, state, state_indices, has_initial_state, None, None, False, out
    )
    options = Options(pad_slot_id=pad_slot_id, scale=scale_of(scale, k), slope=True, segments=segments)
    return _call("chunk_lightning_attn", {"x": v, "g": slope, "B": k, "C": q}, states, options, pdl)


def _call(
    name: str, tokens: dict[str, Tensor | None], states: States, options: Options, pdl: bool | None
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """The result of a function, from its operands by chunk_scan's names."""
    behind = states.operands(tokens["x"], tokens["B"])
    tensors = ATTENTIONS[name].Tensors(**tokens, **{role: t for role, t in behind.items() if role in ATTENTIONS[name].rows})
    return run(CALLERS[name], tensors, options, pdl, returns=states.returns(behind))


CALLERS = callers(
    FAMILY, ATTENTIONS, Options, {name: partial(views_of, table) for name, table in ATTENTIONS.items()}, run_reference, "chunk_attention",
    ("pad_slot_id", "scale", "slope", "segments"), {name: {**WRITTEN_WORDS, **words} for name, words in WORDS.items()},
)  # fmt: skip
