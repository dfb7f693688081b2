"""What models ask of the gated norm behind their state."""

from __future__ import annotations

from ...models import Ask, Model, Role, Wanted
from .spec import OPERATOR, Activation, NormProblem


class NormAsk(Ask):
    """The norm of one token's groups: nothing else of a call changes it."""

    operator = OPERATOR
    role = Role.NORM

    def used_by(self, model: Model) -> bool:
        return model.norm_shape is not None

    def absent(self, model: Model, asked: str) -> str:
        return f"{model.name} has no gated norm that a rank could compute by itself"

    def problems(self, model: Model, wanted: Wanted) -> list[NormProblem]:
        (groups, size), io = model.norm_shape, wanted.io
        activation = Activation.SIGMOID if model.kind == "kda" else Activation.SILU
        same = {"x": io, "gate": io, "weight": io, "out": io, "norm_first": model.kind != "mamba2", "activation": activation}
        return [NormProblem(size=size, grouped=groups > 1, **same)]

    def size(self, model: Model, wanted: Wanted, batch: int) -> int:
        return batch * model.norm_shape[0]


ASKS = {OPERATOR: NormAsk()}
