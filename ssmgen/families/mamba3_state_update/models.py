"""Mamba-3 models, and the decode kernels that they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...engine.recurrences.mamba3.model import Mamba3Model
from ...select.models import Client, Model, StateAsk
from .spec import OPERATOR


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba3(Mamba3Model):
    """A model that this family decodes."""

    operator: ClassVar[str] = OPERATOR


class Mamba3Ask(StateAsk):
    """A decode step, of one token or of several."""

    operator = OPERATOR
    options = frozenset(("tokens", "pools"))

    def called_by(self, model: Model, caller: Client) -> bool:
        return caller is Client.MAMBA_SSM  # its patched layers


KINDS = {"mamba3": Mamba3}
ASKS = {OPERATOR: Mamba3Ask()}
