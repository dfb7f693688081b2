"""Shared by the drop-ins for Mamba-1's prompts: operands in the layout that the kernel reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ...errors import UnsupportedError
from ...families.selective_scan.call import selective_scan
from . import invariance

# Arguments of `takes` for every function modelled on mamba-ssm's. `scan` refuses its constant B and C.
_ROWS, _GROUPS = "[batch, D, T]", "[batch, N, T] or [batch, G, N, T] or [D, N]"
PADDED = {"u": _ROWS, "delta": _ROWS, "z": _ROWS, "A": "[D, N]", "B": _GROUPS, "C": _GROUPS, "D": "[D]", "delta_bias": "[D]"}


class Operands(NamedTuple):
    """The operands of every call; the channel axis comes before the token axis."""

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
    """Calls ssmgen.selective_scan, or `run` if given, and returns its result.

    The kernels need one memory order of channels and tokens for u, delta and z: delta or z is copied once if its order differs from u's. A
    matrix product may leave delta in another order than a projection leaves u.
    Raises UnsupportedError for operands that ssmgen does not take, and the errors of selective_scan.
    """
    u, delta, A, B, C, D, z, delta_bias, softplus = operands
    reasons = [f"{n} is complex; expected real, like ssmgen's states" for n, t in (("A", A), ("B", B), ("C", C)) if t.is_complex()]
    reasons += [f"{n} is [D, N], the same for all tokens; expected values per token" for n, t in (("B", B), ("C", C)) if t.dim() < u.dim()]
    if reasons:
        raise UnsupportedError(name, reasons)
    delta, z = _laid_out_like(u, delta), None if z is None else _laid_out_like(u, z)
    if run is None:
        states |= invariance.whole(selective_scan)
    return (run or selective_scan)(u, delta, A, B, C, D, z, delta_bias, delta_softplus=softplus, channels_first=True, **states)


def _laid_out_like(u: Tensor, t: Tensor) -> Tensor:
    """t with tokens contiguous in memory if u's are, else with channels contiguous."""
    if (t.stride(-1) == 1) == (u.stride(-1) == 1):
        return t
    return t.contiguous() if u.stride(-1) == 1 else t.transpose(-1, -2).contiguous().transpose(-1, -2)
