"""The tensors of skinny_linear: up to four weights of equal K, each with its bias and its output."""

from __future__ import annotations

from ...spec.operands import Operand, table

MOST = 4  # weights of a call
# The fields of a spec that say whether a call has another weight.
_MORE = ("", "second", "third", "fourth")


def _of(name: str, i: int) -> str:
    return f"{name}_{i}" if i else name


WEIGHTS, BIASES, OUTS = ([_of(name, i) for i in range(MOST)] for name in ("weight", "bias", "out"))
# Names of a call's lists, for messages.
WORDS = {_of(name, i): f"{name}[{i}]" for name in ("weight", "bias", "out") for i in range(1, MOST)}


def _rows() -> list[Operand]:
    weights = [
        Operand(name, f"n{i or ''} k", optional=i > 0, field="x", there=_MORE[i], strides="n", view="n k", note="" if i else "or several")
        for i, name in enumerate(WEIGHTS)
    ]
    biases = [
        Operand(name, f"n{i or ''}", optional=True, field="bias", there="&".join(filter(None, ("bias", _MORE[i]))))
        for i, name in enumerate(BIASES)
    ]
    outs = [
        Operand(name, f"rows n{i or ''}", optional=i > 0, written=True, field="out", there=_MORE[i], strides="row", view="row n")
        for i, name in enumerate(OUTS)
    ]
    return [Operand("x", "rows k", strides="row", view="row k"), *weights, *biases, *outs]


OPERANDS = table(*_rows(), rows="*rows", k="K", n="N", n1="N1", n2="N2", n3="N3")
