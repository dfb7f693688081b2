"""Mamba-2 over prompts in the form of drop-in calls: operands, and the expected results in float64 from the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from scan_cases import error
from torch import Tensor
from torch.nn.functional import softplus

BF16, F32 = torch.bfloat16, torch.float32
H, P, N, G = 4, 16, 32, 2
LENGTHS = (17, 0, 1, 40, 6)
TOKENS = sum(LENGTHS)
POOL, SLOTS = (H, P, N), torch.tensor([5, 1, 3, 7, 2], dtype=torch.int32)
UNLIMITED = (0.0, float("inf"))
# Relative L2: a result of bf16 is rounded to 2^-9 of itself, and f32 sums of a few hundred terms lose less than 1e-5. On a card, factors of
# products are rounded to bf16 as well (docs/operators/chunk_scan.md).
ROUNDED = {BF16: 2**-8, F32: 1e-5}


def randn(*shape: int, seed: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(*lead: int, z: bool = False, **more: Any) -> dict[str, Any]:
    """x, B and C are slices of one row, as the convolution leaves them."""
    wide = randn(*lead, H * P + 2 * G * N, seed=1)
    x, B, C = wide.split([H * P, G * N, G * N], -1)
    call: dict[str, Any] = {"x": x.unflatten(-1, (H, P)), "B": B.unflatten(-1, (G, N)), "C": C.unflatten(-1, (G, N))}
    call |= {"dt": randn(*lead, H, seed=2), "A": -0.2 - randn(H, seed=3, dtype=F32).abs()}
    call |= {"D": randn(H, seed=4, dtype=F32), "dt_bias": randn(H, seed=5, dtype=F32), "dt_softplus": True}
    return call | ({"z": randn(*lead, H, P, seed=6)} if z else {}) | more


def states(count: int, dtype: torch.dtype = F32) -> Tensor:
    return randn(count, H, P, N, seed=7, dtype=dtype)


def starts_of(lengths: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def ids_of(lengths: Sequence[int]) -> Tensor:
    """[1, tokens], the sequence of each."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).int()[None]


def _steps(call: dict[str, Any]) -> Tensor:
    dt = call["dt"].cpu().double() + (0 if call.get("dt_bias") is None else call["dt_bias"].cpu().double())
    dt = softplus(dt) if call["dt_softplus"] else dt
    return dt.clamp(*call.get("dt_limit", UNLIMITED))


def _finished(y: Tensor, call: dict[str, Any]) -> Tensor:
    """Adds D x and multiplies by silu(z)."""
    D, z = call.get("D"), call.get("z")
    if D is not None:
        y = y + (D if D.dim() == 2 else D[:, None]).cpu().double() * call["x"].cpu().double()
    return y if z is None else y * z.cpu().double() * torch.sigmoid(z.cpu().double())


def walk(call: dict[str, Any], state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One sequence token by token: (y [T, H, P], the states before the first token and after each [T + 1, H, P, N])."""
    x, A, B, C, dt = (call[n].cpu().double() for n in ("x", "A", "B", "C", "dt"))
    d, S = _steps(call), torch.zeros(H, x.shape[-1], N, dtype=torch.float64) if state is None else state.cpu().double()
    B, C = (t.repeat_interleave(H // G, 1) for t in (B, C))
    each, y = [S], torch.empty_like(x)
    for t in range(len(dt)):
        S = torch.exp(d[t] * A)[:, None, None] * S + torch.einsum("h,hp,hn->hpn", d[t], x[t], B[t])
        y[t] = torch.einsum("hpn,hn->hp", S, C[t])
        each.append(S)
    return _finished(y, call), torch.stack(each)


def tokens_of(call: dict[str, Any], span: slice, row: int | None = None) -> dict[str, Any]:
    per_token = ("x", "dt", "B", "C", "z")
    return {n: (t if row is None else t[row])[span] if n in per_token else t for n, t in call.items()}


def walks(call: dict[str, Any], lengths: Sequence[int], before: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """Packed sequences: (y [tokens, H, P], each one's states), of operands without an axis of the batch."""
    found, start = [], 0
    for i, length in enumerate(lengths):
        found.append(walk(tokens_of(call, slice(start, start + length)), None if before is None else before[i]))
        start += length
    return torch.cat([y for y, _ in found]), [S for _, S in found]


def attention(call: dict[str, Any], ids: Tensor) -> Tensor:
    """One row as in mamba-ssm's documents: y = ((C Bᵀ) * L) (dt x), L_ij = exp(sum of dt A after j, up to i) for j <= i in one sequence;
    ids: [T]. No state is carried from token to token."""
    x, A, B, C = (call[n].cpu().double() for n in ("x", "A", "B", "C"))
    d = _steps(call)
    total = (d * A).cumsum(0)
    mask = (ids[:, None] == ids[None]).tril().cpu()
    decay = (total[:, None] - total[None]).masked_fill(~mask[..., None], -torch.inf).exp()
    scores = torch.einsum("ihn,jhn->ijh", *(t.repeat_interleave(H // G, 1) for t in (C, B)))
    return _finished(torch.einsum("ijh,jh,jhp->ihp", scores * decay, d, x), call)


def row_of(call: dict[str, Any]) -> dict[str, Any]:
    """The call's only row."""
    return tokens_of(call, slice(None), 0)


def chunks_of(lengths: Sequence[int], chunk_size: int, checkpoint: int | None = None) -> tuple[Tensor, ...]:
    """(cu_chunk_seqlens, last_chunk_indices, seq_idx) as vLLM makes them: chunks end with sequences, at multiples of chunk_size of the
    packed tokens, and at a checkpoint."""
    starts = starts_of(lengths).tolist()
    ends = sorted({*starts[1:], *range(chunk_size, starts[-1], chunk_size), *([] if checkpoint is None else [checkpoint])} - {0})
    owner = [max(i for i, s in enumerate(starts[:-1]) if s < end and lengths[i]) for end in ends]
    last = [max((c for c, i in enumerate(owner) if i == s), default=-1) for s in range(len(lengths))]
    return tuple(torch.tensor(t, dtype=torch.int32) for t in ([0, *ends], last, owner))


def vllm_call(lengths: Sequence[int] = LENGTHS, checkpoint: int | None = None, **more: Any) -> dict[str, Any]:
    """vLLM's layers' call: out has more heads than are written."""
    call, (ends, last, owner) = operands(sum(lengths)), chunks_of(lengths, 16, checkpoint)
    out = torch.full((sum(lengths), 2 * H, P), torch.nan, dtype=BF16)[:, :H]
    call |= {"chunk_size": 16, "cu_seqlens": starts_of(lengths), "cu_chunk_seqlens": ends, "last_chunk_indices": last, "seq_idx": owner}
    return call | {"out": out} | more


def sglang_call(**more: Any) -> dict[str, Any]:
    """SGLang's layers' call, and TensorRT-LLM's."""
    call = operands(1, TOKENS, z=True)
    call |= {"chunk_size": 16, "cu_seqlens": starts_of(LENGTHS), "seq_idx": ids_of(LENGTHS), "chunk_indices": SLOTS, "chunk_offsets": SLOTS}
    return call | {"out": torch.full((1, TOKENS, H, P), torch.nan, dtype=BF16), "return_varlen_states": True} | more


def close(found: Tensor, wanted: Tensor, bound: float | None = None) -> bool:
    """Within the rounding of its dtype, or on a card within `bound`."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    if not wanted.any():
        return not found.any()
    return error(found, wanted) <= (bound or ROUNDED[found.dtype])
