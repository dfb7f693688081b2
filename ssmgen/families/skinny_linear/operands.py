"""The tensors of skinny_linear: up to four weights of equal K, each with its bias, its scales, its residual and its output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...calls.sharding import Rule
from ...spec.operands import Operand, Types, table

MOST = 4  # weights of a call
# The fields of a spec that say whether a call has another weight.
_MORE = ("", "second", "third", "fourth")
_MORE_OUTS = ("", "second_out", "third", "fourth")


def _of(name: str, i: int) -> str:
    return f"{name}_{i}" if i else name


# The tensors of which a call has one for each weight: parameter -> operands.
LISTS = {name: [_of(name, i) for i in range(MOST)] for name in ("weight", "bias", "scale", "residual", "out")}
WEIGHTS, BIASES, SCALES, RESIDUALS, OUTS = LISTS.values()
# Names of a call's lists, for messages.
WORDS = {operand: f"{name}[{i}]" for name, operands in LISTS.items() for i, operand in enumerate(operands) if i}


def _rows() -> list[Operand]:
    weights = [
        Operand(
            name, f"n{i or ''} k", Types.WEIGHT, optional=i > 0, field="weight", there=_MORE[i], strides="n", view="n k",
            note="" if i else "or several",
        )
        for i, name in enumerate(WEIGHTS)
    ]  # fmt: skip
    biases, scales = (
        [
            Operand(name, f"n{i or ''}", optional=True, field=kind, there="&".join(filter(None, (kind, _MORE[i]))))
            for i, name in enumerate(names)
        ]
        for kind, names in (("bias", BIASES), ("scale", SCALES))
    )
    residuals = [
        Operand(
            name, f"rows n{i or ''}", optional=True, field="residual", there="&".join(filter(None, ("residual", _MORE_OUTS[i]))),
            strides="row", view="row n",
        )
        for i, name in enumerate(RESIDUALS)
    ]  # fmt: skip
    outs = [
        Operand(
            name, f"rows n{i or ''}", optional=i > 0, written=True, may_be=(RESIDUALS[i],), field="out", there=_MORE_OUTS[i],
            strides="row", view="row n",
        )
        for i, name in enumerate(OUTS)
    ]  # fmt: skip
    norm = Operand("norm_weight", "k", optional=True, field="norm")
    return [Operand("x", "rows k", strides="row", view="row k"), *weights, *biases, *scales, norm, *residuals, *outs]


OPERANDS = table(*_rows(), rows="*rows", k="K", n="N", n1="N1", n2="N2", n3="N3")

# How a mesh of devices may divide them. Rows of a weight, and columns of its output, are the heads of other functions.
_ITEMS = tuple(map(str, range(MOST)))


def _axes(given: Mapping[str, Any]) -> dict[str, str]:
    """x and outputs have any number of axes of rows."""
    x: Any = given.get("x")
    lead = ["batch", *["row"] * x.dim()][: max(x.dim() - 1, 0)] if hasattr(x, "dim") else ["batch"]
    rows = " ".join([*lead, "head"])
    of = dict.fromkeys(LISTS, "head") | {"weight": "head k", "residual": rows, "out": rows}
    found = {f"{name}{item}": words for name, words in of.items() for item in ("", *[f".{i}" for i in _ITEMS])}
    return {**found, "x": " ".join([*lead, "k"]), "norm_weight": "k"}


RULES = {"skinny_linear": Rule(_axes({}), ("out",), anchors=("weight", "weight.0"), tuples=dict.fromkeys(LISTS, _ITEMS), variant=_axes)}
