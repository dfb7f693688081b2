"""What drop-ins for Mamba-1's prompts have in common: operands laid out as the kernel reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ...errors import UnsupportedError
from ...families.selective_scan.call import selective_scan

# Of `takes`: what all that look like mamba-ssm's function have. Its constant B and C are refused in words of their own.
_ROWS, _GROUPS = "[batch, D, T]", "[batch, N, T] or [batch, G, N, T] or [D, N]"
PADDED = {"u": _ROWS, "delta": _ROWS, "z": _ROWS, "A": "[D, N]", "B": _GROUPS, "C": _GROUPS, "D": "[D]", "delta_bias": "[D]"}


class Operands(NamedTuple):
    """What every call has; channels lie ahead of tokens."""

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    delta_bias: Tensor | None
    delta_softplus: bool


def scan(name: str, operands: Operands, run: Callable[..., Any] | None = None, **states: Any) -> Any:
    """What ssmgen.selective_scan returns, or `run` in its place.

    Its kernels have one order of channels and tokens in memory for u, delta and z: what lies otherwise than u is copied, once, as a product
    leaves delta where a projection left u.
    Raises UnsupportedError for what is no operand of ssmgen's, and what selective_scan raises.
    """
    u, delta, A, B, C, D, z, delta_bias, softplus = operands
    reasons = [f"{n} is complex: ssmgen's states are real" for n, t in (("A", A), ("B", B), ("C", C)) if t.is_complex()]
    reasons += [f"{n} is [D, N], the same for all tokens: ssmgen's are per token" for n, t in (("B", B), ("C", C)) if t.dim() < u.dim()]
    if reasons:
        raise UnsupportedError(name, reasons)
    delta, z = _laid_out_like(u, delta), None if z is None else _laid_out_like(u, z)
    return (run or selective_scan)(u, delta, A, B, C, D, z, delta_bias, delta_softplus=softplus, channels_first=True, **states)


def _laid_out_like(u: Tensor, t: Tensor) -> Tensor:
    """t with the tokens of a channel behind each other in memory, or the channels of a token, as u has them."""
    if (t.stride(-1) == 1) == (u.stride(-1) == 1):
        return t
    return t.contiguous() if u.stride(-1) == 1 else t.transpose(-1, -2).contiguous().transpose(-1, -2)
