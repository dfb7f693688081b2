"""Decode shapes of public models, so that kernels can be built by model name."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path

from .errors import ModelError
from .kernels.selective_state_update import SsuProblem
from .spec import DType, Index, PoolMode

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, slots=True)
class Model:
    """One row of models.toml."""

    name: str
    kind: str  # mamba1 | mamba2
    nheads: int
    headdim: int
    d_state: int
    ngroups: int
    state: DType  # as its reference implementation keeps it
    gate: bool  # z goes through the kernel
    verified: bool
    source: str

    def divided(self, tp: int) -> Model:
        """One tensor-parallel rank's share. Groups that cannot be divided are replicated, as serving engines do.

        Raises ModelError when the heads (Mamba-1: channels) do not divide.
        """
        part = "headdim" if self.kind == "mamba1" else "nheads"
        whole = getattr(self, part)
        if tp < 1 or whole % tp:
            raise ModelError(f"{self.name} has {whole} {'channels' if part == 'headdim' else 'heads'}, which {tp} ranks cannot share")
        groups = self.ngroups // tp if self.ngroups % tp == 0 else max(1, self.ngroups // tp)
        values = {f: getattr(self, f) for f in self.__dataclass_fields__}
        return Model(**values | {part: whole // tp, "ngroups": groups})

    def problems(
        self,
        states: tuple[DType, ...] = (),
        io: DType = DType.BF16,
        indices: tuple[Index, ...] = (Index.NONE, Index.I32),
        pools: tuple[PoolMode, ...] = (PoolMode.SINGLE,),
    ) -> list[SsuProblem]:
        """What decoding the model asks for, in the dtypes of transformers and the serving engines."""
        mamba1 = self.kind == "mamba1"
        return [
            SsuProblem(
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
            )
            for state in states or (self.state,)
            for index in indices
            for pool in pools
            if index is not Index.NONE or pool is PoolMode.SINGLE
        ]


@functools.cache
def models() -> dict[str, Model]:
    """All models, by name."""
    table = tomllib.loads((Path(__file__).parent / "models.toml").read_text())
    found = {}
    for name, row in table.items():
        mamba1 = row["kind"] == "mamba1"
        found[name] = Model(
            name=name,
            kind=row["kind"],
            nheads=1 if mamba1 else row["nheads"],
            headdim=row["dim"] if mamba1 else row["headdim"],
            d_state=row["d_state"],
            ngroups=row.get("ngroups", 1),
            state=DType(row.get("state", "f32")),
            gate=row.get("gate", mamba1),
            verified=row["verified"],
            source=row["source"],
        )
    return found


def find_model(name: str) -> Model:
    """Raises ModelError that names the models there are."""
    if name not in models():
        close = [m for m in models() if name in m or m in name]
        raise ModelError(f"no model {name!r} in models.toml; known: {', '.join(close or models())}")
    return models()[name]
