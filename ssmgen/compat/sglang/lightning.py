"""SGLang's function of Lightning attention by segments, as in SGLang 0.5.23: its backend calls it for prompts and for decode steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError, UnsupportedError
from ...families.chunk_scan.attention import chunk_lightning_attn
from ...families.linear_attention.call import lightning_attn
from ..shared import delta_prompts as _prompts
from ..shared import invariance
from ..shared.gated_delta import new_output as _new_output
from ..shared.lightning import scatter
from ..shared.operands import takes as _takes


@_takes(q="[tokens, H, K]", k="[tokens, H, K]", v="[tokens, H, V]", s="[slots, H, K, V]")
def seg_la_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    decay_scales: Tensor,
    meta: Any,
    caches: Tensor | None = None,
    cache_indices: Tensor | None = None,
    track_lens: Tensor | None = None,
    track_state_indices: Tensor | None = None,
    softmax_scale: float | None = None,
) -> Tensor:
    """Lightning attention over prompts, drafts or one token per sequence: S <- e^-s S + v k^T;  o = softmax_scale S q, None for K^-0.5.

    q, k: [tokens, H, K], packed          v: [tokens, H, V]          decay_scales: H elements, the slopes s
    s: [slots, H, K, V], a pool, updated in place
    meta: SGLang's SegLaMeta: batch_size sequences, q_offsets [N + 1] where they begin, s_offsets [N] their slots, and s_scales [N], whether
        their states are read. If there are no more tokens than sequences, each has one token, and continues from its state

    Returns output [tokens, H, V] of q's dtype. A sequence whose slot is negative or out of the pool touches no state; its output in a
    prompt is computed from zeros. The states of a prompt are transposed before the kernel and after it.
    Raises UnsupportedError for trees of drafts, meta.mask. Raises ArgumentError (a ValueError) for operands that do not fit.

    Verification of drafts:
    caches: [rows, T or more, H, K, V] of s's dtype: receives the state after each token, of q.shape[0] / N tokens per sequence; s is only
        read. Ignored with one token per sequence, as in SGLang
    cache_indices: [N], each sequence's row of caches

    States at positions, for prefix caches:
    track_lens, track_state_indices: [N]: the state after track_lens tokens of each prompt, 1 or more, goes to that slot. A count above the
        prompt's length requests none. These tokens are computed twice
    """
    name = "sglang's seg_la_fwd"
    mask = getattr(meta, "mask", None)
    reasons = [] if mask is None else ["meta.mask is given; expected None: ssmgen's drafts of Lightning attention are no trees"]
    if reasons := reasons + invariance.one_function_for_both():
        raise UnsupportedError(name, reasons)
    count, slots, starts, read = meta.batch_size, meta.s_offsets, meta.q_offsets, meta.s_scales
    slope = decay_scales.reshape(-1)
    if q.shape[0] <= count:
        out = _new_output(q, v)
        lightning_attn(s, q, k, v, slope, scale=softmax_scale, state_layout="kv", state_indices=slots[: q.shape[0]], out=out)
        return out
    if caches is not None:
        return _verified((q, k, v, slope), s, slots, count, caches, cache_indices, softmax_scale)
    tracked = None if track_lens is None or track_state_indices is None else (track_lens, track_state_indices)
    indices = {"meta.s_offsets": slots, "meta.q_offsets": starts}
    indices |= {} if tracked is None else dict(zip(("track_lens", "track_state_indices"), tracked, strict=True))
    rows = [(what, t, count + (what == "meta.q_offsets")) for what, t in indices.items()] + [("meta.s_scales", read, count)]
    problems = _prompts.objections(v, indices, {"s": s}) or [
        f"{what} is {list(t.shape)}; expected one per sequence, {count}" for what, t, n in rows if t.shape[0] < n
    ]
    if problems:
        raise ArgumentError(name, problems)
    slots, starts, read = slots[:count], starts[: count + 1], read[:count] > 0
    before = _prompts.gathered(s, slots).masked_fill_(~read[:, None, None, None], 0)
    out, after = _new_output(q, v), s.new_empty((count, s.shape[1], s.shape[3], s.shape[2]))
    before = before.transpose(-1, -2)
    _prompts.run(chunk_lightning_attn, (q, k, v, slope), out, initial_states=before, last=after, cu_seqlens=starts, scale=softmax_scale)
    if tracked is not None:
        lens, places = (t[:count] for t in tracked)
        inner = _inner(q, k, v, slope, before, starts, lens.clamp(min=0), torch.empty_like(after))
        nowhere = (lens <= 0) | (lens > starts.diff()) | (slots < 0)
        scatter(s, places.masked_fill(nowhere, -1), inner.transpose(-1, -2))
    scatter(s, slots, after.transpose(-1, -2))
    return out


def _verified(
    operands: tuple[Tensor, Tensor, Tensor, Tensor], s: Tensor, slots: Tensor, count: int, caches: Tensor, rows: Tensor | None,
    scale: float | None,
) -> Tensor:  # fmt: skip
    """The outputs [tokens, H, V] of drafts, whose states go to caches. operands: q, k, v and slopes; rows: of caches, one per sequence.

    Raises ArgumentError.
    """
    *tokens, slope = operands
    problems = ["cache_indices is None; expected a tensor [N] with caches"] if rows is None else []
    if tokens[0].shape[0] % count:
        problems.append(f"q has {tokens[0].shape[0]} tokens for {count} sequences with caches; expected a multiple")
    if problems or rows is None:
        raise ArgumentError("sglang's seg_la_fwd", problems)
    q, k, v = (t.unflatten(0, (count, -1)) for t in tokens)
    out = _new_output(tokens[0], tokens[2])
    lightning_attn(
        s, q, k, v, slope, scale=scale, state_layout="kv", state_indices=slots[:count], intermediate_states=caches,
        intermediate_state_indices=rows[:count], update_state=False, out=out.unflatten(0, (count, -1)),
    )  # fmt: skip
    return out


def _inner(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, before: Tensor, starts: Tensor, lens: Tensor, after: Tensor) -> Tensor:
    """`after`, which receives the states after `lens` tokens of each sequence.

    The kernel gives states at ends of sequences. Here, each one is cut in two, and the second part is padding.
    """
    cuts = torch.minimum(starts[:-1] + lens, starts[1:])
    edges = torch.cat([torch.stack([starts[:-1], cuts], 1).flatten(), starts[-1:]])
    slot = torch.arange(lens.shape[0], dtype=torch.int32, device=q.device)
    slots = torch.stack([slot, torch.full_like(slot, -1)], 1).flatten()
    after.copy_(before)
    _prompts.run(
        chunk_lightning_attn,
        (q, k, v, slope),
        _new_output(q, v),
        state=after,
        state_indices=slots,
        has_initial_state=slots >= 0,
        cu_seqlens=edges,
    )
    return after
