"""The convolution in float64 by torch's own function, independent of ssmgen, for the tests of other packages' forms."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DIM = 12


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 31 * sum(shape))).to(dtype)


def taps(width: int, dtype: torch.dtype = F32) -> tuple[Tensor, Tensor]:
    """(weight, bias)."""
    return randn(DIM, width, seed=1, dtype=dtype), randn(DIM, seed=2, dtype=dtype)


def conv(history: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: object = None) -> tuple[Tensor, Tensor]:
    """(outputs of [..., dim, tokens] after [..., dim, width - 1 or more], how far a sum in f32 may be from them), in float64."""
    width, tokens = weight.shape[1], x.shape[-1]
    inputs = torch.cat([history[..., history.shape[-1] - width + 1 :], x], -1).double()
    weight, bias = weight.double()[:, None], None if bias is None else bias.double()
    out = conv1d(inputs, weight, bias, groups=len(weight)) if tokens else x.double()
    size = conv1d(inputs.abs(), weight.abs(), None if bias is None else bias.abs(), groups=len(weight)) if tokens else x.double()
    return silu(out) if activation else out, 2 * (width + 4) * torch.finfo(F32).eps * size


def close(got: Tensor, want: tuple[Tensor, Tensor]) -> bool:
    """Within the roundings of the f32 sum and one to the dtype."""
    exact, bound = want
    kind = torch.finfo(got.dtype)
    bound = bound + kind.eps / 2 * (exact.abs() + kind.smallest_normal)
    return got.shape == exact.shape and bool(((got.double() - exact).abs() <= bound).all())


def zeros_before(x: Tensor, width: int) -> Tensor:
    return x.new_zeros(*x.shape[:-1], width - 1)
