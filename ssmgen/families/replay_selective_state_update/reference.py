"""replay_selective_state_update in plain PyTorch, token by token: the executable specification."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from ...engine.narrow_reference import narrowed, widened
from ...engine.stochastic_reference import stored
from .spec import History


def replay_selective_state_update(
    old_x: Tensor,
    old_B: Tensor,
    old_dt: Tensor,
    prev_num_accepted_tokens: Tensor,
    state: Tensor,
    out: Tensor,
    x: Tensor | None = None,
    dt: Tensor | None = None,
    A: Tensor | None = None,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    old_dA_cumsum: Tensor | None = None,
    cache_buf_idx: Tensor | None = None,
    ring_start: Tensor | None = None,
    state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    rand_seed: Tensor | None = None,
    arrivals: Tensor | None = None,
    state_scale: Tensor | None = None,
    flush: Tensor | None = None,
    *,
    window: int,
    dt_softplus: bool,
    pad_slot_id: int = -1,
    philox_rounds: int = 0,
    zero_padding: bool = True,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Updates `out`, `state` and the history in place. Views as planning.py makes them:

    state: [slots, H, P, N]; out and x, z: [batch, T, H, P] ([1, total, H, P] with cu_seqlens); dt: [batch, T, H]; B, C: [batch, T, G, N]
    old_x: [slots, W, H, P], old_B: [slots, (2,) W, G, N], old_dt, old_dA_cumsum: [slots, (2,) H, W]; A, dt_bias: [H]; D: [H, P]
    Without x: materialize, and out is [batch, H, P, N].
    """
    history = History.CACHE if flush is not None else History.RING if cache_buf_idx is None else History.STEP
    H, G = state.shape[1], old_B.shape[-2]
    batch = out.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    if x is None:
        out.zero_()

    def write_state(slot: int, S: Tensor) -> None:
        noise = _seed_of(rand_seed, slot), philox_rounds, slot
        if state_scale is None:
            state[slot] = stored(S, state.dtype, *noise)
        else:
            state[slot], state_scale[slot] = narrowed(S, state.dtype, *noise)

    for i in range(batch):
        begin, end = (0, out.shape[1]) if cu_seqlens is None else cu_seqlens[i : i + 2].tolist()
        row = i if cu_seqlens is None else 0
        slot = i if state_indices is None else int(state_indices[i])
        if not 0 <= slot < state.shape[0] or slot == pad_slot_id:
            if x is not None and zero_padding:
                out[row, begin:end] = 0
            continue
        if x is not None and end <= begin:
            continue
        counted = int(prev_num_accepted_tokens[slot if flush is None else i])
        valid = counted if 0 < counted <= window - (flush is not None) else 0
        first = 0 if ring_start is None else int(ring_start[slot])
        buffer: tuple[int, ...] = () if cache_buf_idx is None else (int(cache_buf_idx[slot]) & 1,)
        places = [(first + k) % old_x.shape[1] for k in range(valid)]

        def of_heads(t: Tensor) -> Tensor:
            return t.to(dtype).repeat_interleave(H // G, 0)[:, None]  # [H, 1, N]

        S = widened(state[slot], None if state_scale is None else state_scale[slot], dtype)
        past = torch.zeros(H, dtype=dtype, device=state.device)
        for k in places:
            step = old_dt[slot][buffer][:, k].to(dtype)
            if old_dA_cumsum is None:
                assert A is not None, "a ring holds steps alone"
                log = A.to(dtype) * step
            else:
                log, past = old_dA_cumsum[slot][buffer][:, k].to(dtype) - past, old_dA_cumsum[slot][buffer][:, k].to(dtype)
            write = of_heads(old_B[slot][buffer][k]) * (step[:, None] * old_x[slot, k].to(dtype))[..., None]
            S = S * log.exp()[:, None, None] + write
        if x is None:
            out[i] = S
            continue
        assert dt is not None and A is not None and B is not None and C is not None, "they come with x"
        T = end - begin

        emptied = bool(flush[i]) if flush is not None else bool(valid) if history is History.STEP else valid + T > window
        if emptied and flush is None:
            write_state(slot, S)
        sums = torch.zeros(H, dtype=dtype, device=state.device)
        other = tuple(1 - b for b in buffer)
        for t in range(T):
            at = row, begin + t
            place = t if history is History.STEP else (first + valid + t) % old_x.shape[1]
            step = dt[at].to(dtype) + (0 if dt_bias is None else dt_bias.to(dtype))
            step = softplus(step, threshold=80) if dt_softplus else step
            log = A.to(dtype) * step
            S = S * log.exp()[:, None, None] + of_heads(B[at]) * (step[:, None] * x[at].to(dtype))[..., None]
            y = (S * of_heads(C[at])).sum(-1)
            y = y if D is None else y + D.to(dtype) * x[at].to(dtype)
            out[at] = y if z is None else y * silu(z[at].to(dtype))
            sums = sums + log
            if emptied and flush is not None:
                write_state(slot, S)
                continue
            old_x[slot, place] = x[at]
            old_B[slot][other][place] = B[at]
            old_dt[slot][other][:, place] = step.to(old_dt.dtype)
            if old_dA_cumsum is not None:
                old_dA_cumsum[slot][other][:, place] = sums.to(old_dt.dtype)
        if arrivals is not None:
            if cache_buf_idx is not None:
                cache_buf_idx[slot] = buffer[0] ^ 1
            if emptied or history is History.STEP:
                prev_num_accepted_tokens[slot] = 0
                if ring_start is not None:
                    ring_start[slot] = (first + valid) % old_x.shape[1]
                if emptied and rand_seed is not None and rand_seed.numel() > 1:
                    rand_seed[slot] += 1


def _seed_of(rand_seed: Tensor | None, slot: int) -> int:
    if rand_seed is None:
        return 0
    return int(rand_seed[slot if rand_seed.numel() > 1 else 0])
