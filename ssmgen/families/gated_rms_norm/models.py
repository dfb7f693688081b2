"""The gated norm kernels that models need after their state update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...engine.norm import Activation
from ...engine.norm_kernel import NormProblem
from ...select.models import Ask, Client, Model, Role, Wanted
from .spec import OPERATOR


class NormAsk(Ask):
    """The norm of one token's groups: no other property of a call changes it."""

    operator = OPERATOR
    role = Role.NORM

    def used_by(self, model: Model) -> bool:
        return model.norm_shape is not None

    def called_by(self, model: Model, caller: Client) -> bool:
        return caller is not Client.MAMBA_SSM or model.kind == "mamba2"

    def absent(self, model: Model, asked: str) -> str:
        return f"{model.name} has no gated norm that one rank can compute"

    def problems(self, model: Model, wanted: Wanted) -> Sequence[NormProblem]:
        (groups, size), io = _shape(model), wanted.io
        activation = Activation.SIGMOID if model.kind == "kda" else Activation.SILU
        same: dict[str, Any] = {**dict.fromkeys(("x", "gate", "weight", "out"), io), "norm_first": model.kind != "mamba2"}
        # mamba-ssm's prompts have two axes of rows, like norms of several groups; its steps have one.
        forms = {groups > 1, True} if wanted.caller is Client.MAMBA_SSM else {groups > 1}
        return [NormProblem(size=size, grouped=grouped, activation=activation, **same) for grouped in sorted(forms)]

    def size(self, model: Model, wanted: Wanted, batch: int) -> int:
        groups, _ = _shape(model)
        return batch * groups


def _shape(model: Model) -> tuple[int, int]:
    """The norm's groups and the elements of each, in a model that has one."""
    assert model.norm_shape is not None, "nothing is asked where `used_by` says no"
    return model.norm_shape


ASKS = {OPERATOR: NormAsk()}
