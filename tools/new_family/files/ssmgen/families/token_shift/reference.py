"""token_shift in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def token_shift(
    state: Tensor, x: Tensor, mix: Tensor, *, out: Tensor, state_indices: Tensor | None = None, pad_slot_id: int = -1,
    dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """state: [slots, dim]; x, out: [batch, dim]; mix: [dim]. Computes in `dtype`; writes out, rounded once, and the state."""
    for b, row in enumerate(x):
        slot = b if state_indices is None else int(state_indices[b])
        if not 0 <= slot < state.shape[0] or slot == pad_slot_id:
            out[b] = 0
            continue
        now, past = row.to(dtype), state[slot].to(dtype)
        out[b] = (now + mix.to(dtype) * (past - now)).to(out.dtype)
        state[slot] = row
