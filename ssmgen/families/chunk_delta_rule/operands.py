"""The tensors of the delta rule over prompts. Only the gated one has g; with A_log and dt_bias it is a raw gate."""

from __future__ import annotations

from ...engine.chunks.operands import ATTENTION_WORDS, ENDS, TOKENS, attention, rule_of
from ...spec.operands import Operand, Types, table

_HEADS = f"{TOKENS} head"


def _gate(name: str, optional: bool = True) -> Operand:
    return Operand(name, "token head", optional=optional, there=f"prepares&{name}", view="batch token head", strides=_HEADS)


def _of_gate(name: str) -> Operand:
    return Operand(name, "head", optional=True, there=f"prepares&{name}", strides="head", note="of a raw gate")


OPERANDS = table(
    *attention(
        Operand("q", "token group key", field="x", there="takes_q", view="batch token head key", strides=_HEADS),
        Operand("k", "token group key", field="x", there="takes_k", view="batch token head key", strides=_HEADS),
        Operand("v", "token head value", field="x", there="walks", view="batch token head value", strides=_HEADS),
        _gate("g"),
        _gate("beta", optional=False),
        _of_gate("A_log"),
        _of_gate("dt_bias"),
    ),
    **ATTENTION_WORDS,
)
TURNED = OPERANDS.turned("value", "key")  # transposed by the layout "kv"
OF_GATES = tuple([row.name for row in OPERANDS if row.types is Types.FLOAT and not row.field])  # each has a separate dtype
KERNELS = OPERANDS.beside(ENDS)
FUNCTIONS = {"chunk_gated_delta_rule": OPERANDS.only(required=("g",)), "chunk_delta_rule": OPERANDS}

# How a mesh of devices may divide them.
RULES = {name: rule_of(table, "v") for name, table in FUNCTIONS.items()}
