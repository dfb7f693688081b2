"""Trials of combine_splits: operands from a spec alone, and the call that takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...calls.checks import TORCH_DTYPES
from ...engine.trial import INTEGERS, Trial, ordered, trial
from ...spec.kernel import DType, Loads
from .call import CALLER, Options
from .spec import CombineSpec


def operands(spec: CombineSpec, batch: int, seed: int) -> dict[str, Tensor]:
    """The spec's number of splits, some of them empty and NaN. With num_splits, each entry has one more than the entry before."""
    g = torch.Generator().manual_seed(seed)
    splits = spec.max_splits or 165
    rows = ((batch if spec.indexed else batch + 1), 2, 3)[: spec.axes]
    shape = (*([] if spec.pair else [splits]), *(rows[1:] if spec.indexed else rows))
    odd = spec.loads is Loads.ELEMENT

    def apart(values: Tensor, dtype: DType, columns: bool = True) -> Tensor:
        """A tensor of these values with gaps along every axis that keep columns aligned."""
        gaps = [1 if i < values.dim() - columns else 8 + odd for i in range(values.dim())]
        wide = torch.full([n + gap for n, gap in zip(values.shape, gaps, strict=True)], float("nan"), dtype=TORCH_DTYPES[dtype])
        wide = wide[..., odd:] if columns else wide
        return wide[tuple(slice(n) for n in values.shape)].copy_(values)

    def partial() -> tuple[Tensor, Tensor]:
        o, lse = torch.randn(*shape, spec.d_v, generator=g), 3 * torch.randn(shape, generator=g)
        empty = torch.rand(shape, generator=g) < 0.2
        return apart(o.masked_fill(empty[..., None], float("nan")), spec.o), apart(lse.masked_fill(empty, float("-inf")), DType.F32, False)

    made = dict(zip(("o", "lse"), partial(), strict=True))
    if spec.pair:
        made |= zip(("o_other", "lse_other"), partial(), strict=True)
    if spec.indexed:
        counts = torch.arange(batch) % splits
        counts[-1] = max(0, splits - int(counts[:-1].sum()))
        made["num_splits"] = torch.tensor([0, *counts.cumsum(0).clamp(max=splits).tolist()], dtype=INTEGERS[spec.num_splits])
    if spec.sink:
        made["attn_sink"] = torch.randn(rows[-1], generator=g).to(TORCH_DTYPES[spec.sink])
    if spec.mask:
        made["mask"] = torch.arange(rows[-1]) % 3 != 1
    made["out"] = apart(torch.full((*rows, spec.d_v), 7.0), spec.out)
    if spec.lse_out:
        made["lse_out"] = made["lse"] if spec.in_place else apart(torch.full(rows, 7.0), DType.F32, False)
    return ordered(spec, made)


def combine_splits(spec: CombineSpec, batch: int, seed: int) -> Trial:
    return trial(CALLER, operands(spec, batch, seed), Options("2", "e", skip_single=spec.skip_single))


TRIALS = {CombineSpec: combine_splits}
