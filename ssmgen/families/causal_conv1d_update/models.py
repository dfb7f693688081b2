"""The kernels that decoding models with a short convolution needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...engine.convolution_models import ConvolutionAsk
from ...select.models import Client, Model, Role, Wanted
from ...spec.kernel import Index
from .spec import OPERATOR, Advance, StateLayout, UpdateProblem


class StepAsk(ConvolutionAsk):
    """Every layout of the window; with several tokens, the window rolls."""

    operator = OPERATOR
    role = Role.CONVOLUTION

    def problems(self, model: Model, wanted: Wanted) -> Sequence[UpdateProblem]:
        tokens, width = wanted.count, model.conv_width
        step = self.same(model, wanted) | {"tokens": tokens}
        step |= {"advance": Advance.ROLL, "position": Index.I32} if tokens > 1 else {}
        # A window that shifts may also hold the oldest input, which is no longer read, as in transformers; one that rolls does not.
        lengths = [width + tokens - 2, *([width] if tokens == 1 else [])]
        if wanted.caller is not None:
            lengths = lengths[:1] if wanted.caller is Client.ENGINES else lengths[-1:]
        layouts: list[dict[str, Any]] = [{"layout": StateLayout.RUNS, "state_len": length} for length in lengths]
        layouts += [{"layout": StateLayout.CHANNELS}] if wanted.by(Client.ENGINES) else []
        return [UpdateProblem(**step, **layout, index=index) for layout in layouts for index in wanted.indices]


ASKS = {OPERATOR: StepAsk()}
