"""The products of models: the first and the last projection of their recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...select.models import Ask, Client, Model, Role, Wanted
from .problem import MAX_K, OPERATOR, ROWS, SkinnyProblem

SHARED: tuple[dict[str, Any], ...] = ({"weights": 2}, {"weights": 3}, {"weights": 4}, {"weights": 2, "gated": True}, {"relu2": True})
"""Products of several weights in one launch, and with activations."""


class ProductAsk(Ask):
    """Products without bias, as linear layers of transformers' models make them after `accelerate`. Their kernels depend on the length of
    the weight's rows: the hidden size, if the table of models has it, and the channels of the recurrence's output. Up to four weights of
    the hidden size share a launch, and so do gate and up of an MLP, or up and relu2."""

    operator = OPERATOR
    role = Role.PRODUCT
    switch, most = "rows", ROWS[-1]
    narrow = True  # states do not concern it

    def used_by(self, model: Model) -> bool:
        return bool(_widths(model))

    def called_by(self, model: Model, caller: Client) -> bool:
        return caller is Client.TRANSFORMERS

    def problems(self, model: Model, wanted: Wanted) -> Sequence[SkinnyProblem]:
        assert wanted.rows is not None, "nothing is asked where `serves` says no"
        sizes = [most for most, fewer in zip(ROWS, (0, *ROWS), strict=False) if wanted.rows > fewer]
        kinds = {k: [{}, *(SHARED if k == model.hidden else ())] for k in _widths(model)}
        return [SkinnyProblem(k=k, x=wanted.io, out=wanted.io, rows=rows, **more) for k in kinds for rows in sizes for more in kinds[k]]

    def size(self, model: Model, wanted: Wanted, batch: int) -> int:
        """Rows of the last projection's weight. A guess where the hidden size is unknown: the length of these rows."""
        return model.hidden or model.inner


def _widths(model: Model) -> list[int]:
    """Elements of the rows of the weights, of one rank: tensor parallelism divides the last projection's."""
    found = dict.fromkeys(filter(None, (model.hidden, model.inner)))
    return [k for k in found if k % 8 == 0 and k <= MAX_K]


ASKS = {OPERATOR: ProductAsk()}
