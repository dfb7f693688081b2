"""flashinfer.mamba.checkpointing_ssu, as in FlashInfer's main branch, where the history is a ring. Import it from `compat.flashinfer`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import ArgumentError
from ...families.replay_selective_state_update.call import checkpoint_selective_state_update as _native
from ..shared.operands import takes as _takes

NAME = "flashinfer's checkpointing_ssu"


def _tokens_first(cache: Any) -> Any:
    """[slots, H, R, P] as [slots, R, H, P]; any other shape stays, for the checks to name."""
    return cache.transpose(1, 2) if isinstance(cache, Tensor) and cache.dim() == 4 else cache


@_takes("enable_pdl")
def checkpointing_ssu(
    state: Tensor,
    x_cache: Tensor,
    B_cache: Tensor,
    dt_cache: Tensor,
    ring_start: Tensor,
    prev_num_accepted_tokens: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    out: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: Tensor | None = None,
    rand_seed: Tensor | None = None,
    philox_rounds: int = 10,
    d_split: int | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    enable_pdl: bool = False,
    cb_scaled: Tensor | None = None,
    cumAdt_vec: Tensor | None = None,
    cb_old: Tensor | None = None,
    precompute_heads_per_cta: int = 0,
    algorithm: str = "auto",
    *,
    zero_padding: bool = True,
) -> Tensor:
    """Writes out in place, and returns it; also the history, and the state of slots that must make room.

    state: [slots, H, P, N]   x_cache: [slots, H, R, P]   B_cache: [slots, G, R, N]   dt_cache: [slots, H, R] f32
    state_scale: [slots, H, P] f32, of an int8 or float8_e4m3fn state, and here of an int16 one too; written where the state is
    x, z, out: [batch, T, H, P]   B, C: [batch, T, G, N]   D: [H, P]   dt [batch, T, H, P], A [H, P, N] and dt_bias [H, P]: one value per
    head, expanded. With cu_seqlens [batch + 1], batch is 1 and T counts the tokens of all sequences, none longer than max_seqlen.
    The caller moves ring_start and sets prev_num_accepted_tokens, both [slots] int32: a step of T tokens catches up where
    prev_num_accepted_tokens + 2 T > R (of packed sequences, T is max_seqlen plus the sequence's own length instead of 2 T).

    enable_pdl: starts while the previous kernel of the stream ends, and waits for it before it reads anything; if the device can
    d_split, precompute_heads_per_cta, algorithm, and the scratch cb_scaled, cumAdt_vec and cb_old choose among FlashInfer's kernels and
    change no result: ignored.

    zero_padding: ssmgen's own: False keeps the output of padded sequences

    Unlike there: a padded sequence, which is also one whose slot is negative or none of the pool's, gets a zero output; products are exact
    to 2^-24, not of factors rounded to bf16; the window R - T is up to 32, and T may be longer; each operand except x, B, C and the
    history has its own dtype; states of all types but f32 are rounded stochastically too.
    Raises what ssmgen.checkpoint_selective_state_update does.
    """
    problems = ["out is None; expected a tensor, as in FlashInfer"] if out is None else []
    if algorithm not in ("auto", "monolith", "two-kernel"):
        problems.append(f"algorithm is {algorithm!r}; expected 'auto', 'monolith' or 'two-kernel'")
    if (cu_seqlens is None) != (max_seqlen is None):
        problems.append("one of cu_seqlens and max_seqlen is None; expected both or neither")
    given, result = (x, dt, B, C, z, out), out
    if cu_seqlens is not None:
        for name, t in zip(("x", "dt", "B", "C", "z", "out"), given, strict=True):
            if isinstance(t, Tensor) and (t.dim() != 4 or t.shape[0] != 1):
                problems.append(f"{name} is {list(t.shape)}; expected 4 axes with cu_seqlens, the first of size 1")
    if problems:
        raise ArgumentError(NAME, problems)
    if cu_seqlens is not None:
        x, dt, B, C = (t.squeeze(0) if isinstance(t, Tensor) else t for t in (x, dt, B, C))
        z = z.squeeze(0) if isinstance(z, Tensor) else z
        result = result.squeeze(0) if isinstance(result, Tensor) else result
    seed = rand_seed.reshape(1) if isinstance(rand_seed, Tensor) and rand_seed.numel() == 1 else rand_seed
    _native(
        state, _tokens_first(x_cache), _tokens_first(B_cache), dt_cache, ring_start, prev_num_accepted_tokens, x, dt, A, B, C, D, z,
        dt_bias, dt_softplus, state_indices=state_batch_indices, cu_seqlens=cu_seqlens, state_scale=state_scale, rand_seed=seed,
        philox_rounds=philox_rounds, max_tokens=max_seqlen, pad_slot_id=pad_slot_id,
        zero_padding=zero_padding, out=result, pdl=None if enable_pdl else False,
    )  # fmt: skip
    return out
