"""flashinfer.cascade's functions, as in FlashInfer 0.7.2.

LSEs are of base 2, and -inf where there is nothing; v f32, f16 or bf16, head_dim 1 … 1024, any number of heads,
splits and rows. Each raises what ssmgen.combine_splits raises. Deliberate differences:
- Values with weight 0 may be anything, also NaN. An LSE of +inf or NaN gives weight 0, like -inf.
- merge_state_in_place takes s of f32 only. FlashInfer converts others, and loses the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...families.combine_splits.call import combine_splits
from ..shared.operands import takes as _takes
from ..shared.operands import two as _two


def _f32(s: Tensor) -> Tensor:
    """LSEs in f32; a tensor that is not floating point stays, for the checks to name."""
    return s.to(torch.float32) if s.is_floating_point() else s


@_takes(v_a="[n, heads, head_dim]", s_a="[n, heads]", s_b="[n, heads]")
def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """v_a, v_b: [n, heads, head_dim]; s_a, s_b: [n, heads]. Returns (v, s)."""
    return _two(combine_splits((v_a, v_b), (_f32(s_a), _f32(s_b)), lse_base=2, return_lse=True))


@_takes(s_other="[n, heads]", mask="[n]")
def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """v, v_other: [n, heads, head_dim]; s, s_other: [n, heads]; mask: [n] bool or uint8, rows to merge. Writes v and s."""
    if mask is not None:
        mask = (mask.view(torch.bool) if mask.dtype is torch.uint8 else mask).unsqueeze(-1)
    combine_splits((v, v_other), (s, _f32(s_other)), lse_base=2, mask=mask, out=v, lse_out=s)


@_takes(v="[n, states, heads, head_dim]", s="[n, states, heads]")
def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """v: [n, states, heads, head_dim]; s: [n, states, heads]. Returns ([n, heads, head_dim], [n, heads])."""
    return _two(combine_splits(v.transpose(0, 1), _f32(s).transpose(0, 1), lse_base=2, return_lse=True))


@_takes(s="[states, heads]")
def variable_length_merge_states(v: Tensor, s: Tensor, indptr: Tensor) -> tuple[Tensor, Tensor]:
    """v: [states of all, heads, head_dim]; s: [states of all, heads]; indptr: [n + 1]. Returns ([n, heads, head_dim], [n, heads])."""
    return _two(combine_splits(v, _f32(s), indptr, lse_base=2, return_lse=True))
