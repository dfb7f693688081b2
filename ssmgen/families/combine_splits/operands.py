"""The tensors of combine_splits. Rows have any axes; kernels see the axes that cannot be merged: outer, middle and inner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...calls.sharding import Rule
from ...spec.operands import Operand, Types, table

_ROWS = "outer middle?three inner?apart"
_SPLITS = "split?!pair outer?!indexed middle?three inner?apart"
OPERANDS = table(
    Operand("o", "split rows d_v | rows d_v", strides=_SPLITS, note="splits; or a pair of tensors, one for each"),
    Operand("lse", "split rows | rows", Types.F32, strides=_SPLITS),
    Operand("o_other", "rows d_v", optional=True, field="o", there="pair", strides=_SPLITS),
    Operand("lse_other", "rows", Types.F32, optional=True, there="pair", strides=_SPLITS),
    Operand("num_splits", "starts", Types.INDEX, optional=True, strides="outer"),
    Operand("attn_sink", "rows", optional=True, field="sink", strides=_ROWS, note="expandable to the rows"),
    Operand("mask", "rows", Types.BOOL, optional=True, strides=_ROWS, note="expandable to the rows"),
    Operand("out", "rows d_v", written=True, may_be=("o", "o_other"), strides=_ROWS),
    Operand("lse_out", "rows", Types.F32, optional=True, written=True, may_be=("lse", "lse_other"), there="lse_out", strides=_ROWS),
    rows="*rows", split="splits", starts="batch + 1",
)  # fmt: skip

# How a mesh of devices may divide them. The first axis of rows is the batch, the last one heads.
_PAIR = ("first", "second")


def _rows(given: Mapping[str, Any]) -> dict[str, str]:
    pair, indexed = "o.first" in given, given.get("num_splits") is not None
    o: Any = given["o.first"] if pair else given.get("o")
    if not hasattr(o, "dim"):
        return {}
    count = o.dim() - (1 if pair else 2) + indexed  # axes of rows that `out` has
    first = "row" if indexed else "batch"  # num_splits is indexed by this axis
    rows = [first, *["row"] * (count - 2), "head"] if count > 1 else [first][:count]
    theirs = rows[1:] if indexed else rows
    splits = {"o": ["split", *theirs, "n"], "lse": ["split", *theirs]}
    pairs = {f"{name}.{which}": words for which in _PAIR for name, words in {"o": [*rows, "n"], "lse": rows}.items()}
    expanded = {}
    for name in ("attn_sink", "mask"):
        t: Any = given.get(name)
        if hasattr(t, "dim"):
            own = rows[len(rows) - t.dim() :] if t.dim() else []
            expanded[name] = ["one" if n == 1 else word for n, word in zip(t.shape, own, strict=False)]
    found = {**splits, **pairs, **expanded, "out": [*rows, "n"], "lse_out": rows, "num_splits": ["entry"]}
    return {name: " ".join(words) for name, words in found.items()}


_ALONE = [name for name in OPERANDS.names if not name.endswith("_other")]
_EVERY = (*_ALONE, *[f"{name}.{which}" for which in _PAIR for name in ("o", "lse")])
RULES = {
    "combine_splits": Rule(
        dict.fromkeys(_EVERY, ""),
        ("out", "lse_out"),
        anchors=("out", "o.first", "o"),
        returns=("out", "lse_out"),
        tuples={"o": _PAIR, "lse": _PAIR},
        variant=_rows,
    )
}
