"""Mamba-3 models: their shapes, and the problems of their decode steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ....select.models import Model
from ....spec.kernel import DType, Index, PoolMode
from .problem import Mamba3Problem, Rate, Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba3Model(Model):
    """kind: mamba3. Its layers lack a short convolution; the kernel norms B and C, and gates."""

    conv_bias: ClassVar[bool] = False

    headdim: int
    d_state: int
    ngroups: int = 1
    rank: int = 1
    angles: int
    rate: Rate  # no config says it
    norm: bool = False  # of the output, before the gate

    @staticmethod
    def read(row: dict[str, Any]) -> dict[str, Any]:
        return Model.read(row) | {"rate": Rate(row["rate"])}

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.headdim, self.d_state, self.ngroups

    @property
    def conv_channels(self) -> int:
        return 0

    @property
    def rotary(self) -> Rotary:
        """Official SISO layers rotate neighbours, MIMO layers halves."""
        return Rotary.PAIRS if self.rank == 1 else Rotary.HALVES

    def divided(self, tp: int) -> Mamba3Model:
        """Groups that cannot be divided are replicated."""
        groups = self.ngroups // tp if self.ngroups % tp == 0 else max(1, self.ngroups // tp)
        return replace(self, nheads=self._share(self.nheads, "heads", tp), ngroups=groups)

    def problem(self, state: DType, index: Index, pool: PoolMode, io: DType = DType.BF16, tokens: int = 1, **more: Any) -> Mamba3Problem:
        """Projections in `io`; biases, D, mimo_* in f32, as their modules make them. more: other fields of the problem."""
        operands: dict[str, Any] = dict.fromkeys(("k_state", "v_state", "x", "B", "dt", "A", "trap", "angle", "z", "row_norm", "out"), io)
        return Mamba3Problem(
            d_state=self.d_state,
            headdim=self.headdim,
            nheads=self.nheads,
            ngroups=self.ngroups,
            rank=self.rank,
            angles=self.angles,
            rotary=self.rotary,
            rate=self.rate,
            state=state,
            D=DType.F32,
            dt_bias=DType.F32,
            row_bias=DType.F32,
            mimo=DType.F32 if self.rank > 1 else None,
            norm_weight=io if self.norm else None,
            index=index,
            pool=pool,
            several=tokens > 1,
            **operands,
            **more,
        )
