"""Default variants of token_shift: both branches of its template, in slots and not."""

from __future__ import annotations

from ...spec.kernel import DType, Index, Loads
from ...variants.defaults import Default
from .spec import FEW, TokenShiftProblem

DEFAULTS = {
    "few rows": Default(TokenShiftProblem(dim=4096, x=DType.BF16, mix=DType.BF16, index=Index.I32, loads=Loads.VECTOR), FEW),
    "many rows, not aligned": Default(
        TokenShiftProblem(dim=90, x=DType.F16, mix=DType.F32, index=Index.NONE, loads=Loads.ELEMENT), FEW + 1
    ),
}
