"""Mamba models: their shapes, and the problems of their decode steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ....errors import ModelError
from ....select.models import Model
from ....spec.kernel import DType, Index, Narrow, PoolMode, Update
from .problem import SsuProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaModel(Model):
    """kind: mamba1 (one head of `headdim` channels) or mamba2."""

    conv_bias: ClassVar[bool] = True

    headdim: int
    d_state: int
    ngroups: int = 1
    gate: bool = False  # z goes through the kernel
    dt_limit: bool = False  # of prompts' steps, in transformers
    whole_groups: bool = True  # each is one rank's

    @staticmethod
    def read(row: dict[str, Any]) -> dict[str, Any]:
        """A row of Mamba-1 says `dim` of its one head."""
        if row["kind"] == "mamba1":
            row = {"nheads": 1, "headdim": row["dim"], "gate": True} | {field: value for field, value in row.items() if field != "dim"}
        return Model.read(row)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.headdim, self.d_state, self.ngroups

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: x in Mamba-1; x, B and C in Mamba-2."""
        return self.headdim if self.kind == "mamba1" else self.nheads * self.headdim + 2 * self.ngroups * self.d_state

    @property
    def norm_shape(self) -> tuple[int, int] | None:
        """(groups, elements of each) of the gated norm of Mamba-2, whose groups are the groups of B and C; else None."""
        if self.kind == "mamba1" or self.gate or not self.whole_groups:
            return None
        return self.ngroups, self.nheads * self.headdim // self.ngroups

    def divided(self, tp: int) -> MambaModel:
        """Groups that cannot be divided are replicated, as serving engines do."""
        if self.kind == "mamba1":
            return replace(self, headdim=self._share(self.headdim, "channels", tp))
        groups = self.ngroups // tp if self.ngroups % tp == 0 else max(1, self.ngroups // tp)
        return replace(self, nheads=self._share(self.nheads, "heads", tp), ngroups=groups, whole_groups=self.ngroups % tp == 0)

    def problem(
        self,
        state: DType | Narrow,
        index: Index,
        pool: PoolMode,
        io: DType = DType.BF16,
        tokens: int = 1,
        intermediates: bool = False,
        update_state: bool = True,
        **more: Any,
    ) -> SsuProblem:
        """intermediates: of the state's type; more: other fields of the problem. Raises ModelError for several tokens of Mamba-1."""
        mamba1 = self.kind == "mamba1"
        several = tokens > 1 or intermediates or not update_state
        if several and mamba1:
            raise ModelError(f"{self.name} is a Mamba-1 model; expected --tokens 1, since it takes one token at a time")
        if several:
            more |= {"update": Update.FINAL if update_state else Update.NONE, "intermediate_states": state if intermediates else None}
        return SsuProblem(
            several=several,
            d_state=self.d_state,
            headdim=self.headdim,
            nheads=self.nheads,
            ngroups=self.ngroups,
            state=state,
            x=io,
            dt=io,
            B=io,
            C=io,
            out=io,
            A=DType.F32,
            D=io,
            z=io if self.gate else None,
            dt_bias=DType.F32 if mamba1 else io,
            tied=not mamba1,
            dt_softplus=True,
            index=index,
            pool=pool,
            **more,
        )
