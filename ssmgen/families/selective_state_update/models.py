"""The decode kernels that Mamba models need."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from ...engine.recurrences.mamba.model import MambaModel
from ...select.models import SEVERAL, Model, StateAsk
from .spec import OPERATOR


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba(MambaModel):
    """A model that this family decodes."""

    operator: ClassVar[str] = OPERATOR


class SsuAsk(StateAsk):
    """A decode step, of one token or of several."""

    operator = OPERATOR
    options = SEVERAL | {"pools"}
    narrow = True

    def takes(self, model: Model) -> Collection[str]:
        return ("pools",) if model.kind == "mamba1" else self.options


KINDS = {"mamba1": Mamba, "mamba2": Mamba}
ASKS = {OPERATOR: SsuAsk()}
