"""The kernels that prompts of models with a short convolution need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...engine.convolution_models import ConvolutionAsk
from ...select.models import Client, Model, Role, Wanted
from ...spec.kernel import Index
from .spec import OPERATOR, ConvLayout, ConvProblem

PROMPT = 2048  # tokens of a sequence, by default


class PromptsAsk(ConvolutionAsk):
    """Rows of any length, and packed sequences with a pool of states, in every layout. The problem does not fix the number of channels."""

    operator = OPERATOR
    role = Role.PROMPTS

    def problems(self, model: Model, wanted: Wanted) -> Sequence[ConvProblem]:
        same = self.same(model, wanted)
        first: dict[str, Any] = {"layout": ConvLayout.FIRST}
        last: dict[str, Any] = {"layout": ConvLayout.LAST}
        unaligned = first | {"shifted": True}  # rows begin at any address
        pool: dict[str, Any] = {"query_start_loc": Index.I32, "pool": True, "started": True}
        # A prompt of one token has rows that begin at any address.
        called = wanted.by(Client.MAMBA_SSM, Client.TRANSFORMERS)
        rows = [(first, wanted.by(Client.MAMBA_SSM)), (unaligned, called), (last, called)]
        packed = [(unaligned, wanted.by()), (last, wanted.by(Client.ENGINES))]
        found = [ConvProblem(**same, **layout) for layout, there in rows if there]
        return found + [ConvProblem(**same, **layout, **pool, index=i) for layout, there in packed if there for i in wanted.indices]

    def size(self, model: Model, wanted: Wanted, batch: int) -> int:
        return -(-batch * (wanted.tokens or PROMPT) * model.conv_channels * wanted.io.size // 1024)


ASKS = {OPERATOR: PromptsAsk()}
