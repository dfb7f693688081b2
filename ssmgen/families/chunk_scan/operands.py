"""The tensors of chunk_scan: Mamba-2, and linear attention with a decay per head, whose v is x, k is B and q is C."""

from __future__ import annotations

from ...engine.chunks.operands import ATTENTION_WORDS, TOKENS, checkpoints, sequences
from ...spec.operands import Operand, Table, Types, table

_STATE = "head value key"
_G = "batch:64?g_by_token&!ragged token?g_by_token head"
# Operands of a kernel that only context parallelism launches: see ends.py.
_ALONE = (
    Operand("since", "sequences head", Types.I32, there="states_alone"),
    Operand("ends", f"sequences {_STATE}", Types.F32, written=True, there="states_alone"),
)
OPERANDS = table(
    Operand("x", "token head value", view="batch token head value", strides=f"{TOKENS} head"),
    Operand("dt", "token head", there="dt", view="batch token head", strides=f"{TOKENS} head"),
    Operand("A", "head", there="A", strides="head", note="negative"),
    Operand("g", "token head | head", optional=True, view="batch token head | head", strides=_G),
    Operand("B", "token group key", field="x", view="batch token group key", strides=f"{TOKENS} group"),
    Operand("C", "like B", field="x", there="!states_alone"),
    Operand("D", "head value | head", optional=True, view="head row", strides="head row"),
    Operand("z", "like x", optional=True, field="x", there="z", note="a gate"),
    Operand("dt_bias", "head", optional=True, strides="head"),
    Operand("seq_idx", "batch token", Types.I32, optional=True, strides=TOKENS, note="instead of `cu_seqlens`"),
    *sequences(_STATE, _STATE, "head"),
    *checkpoints(_STATE),
    Operand("out", "like x", field="x", written=True, there="!states_alone"),
    **ATTENTION_WORDS | {"group": "G", "head": "H", "value": "P", "key": "N", "token": "T"},
)
KERNELS = OPERANDS.beside(*_ALONE)
OF_OWN_TYPE = tuple([row.name for row in OPERANDS if row.types is Types.FLOAT and not row.field and row.name != "x"])
SCAN = OPERANDS.only(*[name for name in OPERANDS.names if name != "g"])
# Linear attention lacks these. It has different names for the rest, and for their axes.
_LACKING = ("dt", "A", "D", "z", "dt_bias", "seq_idx", "checkpoint_positions", "checkpoints")
_ATTENTION = Table([row for row in OPERANDS if row.name not in _LACKING], {**OPERANDS.words, **ATTENTION_WORDS})
_OWN = {"x": "v", "B": "k", "C": "q"}
WORDS = {"chunk_simple_gla": _OWN, "chunk_lightning_attn": {**_OWN, "g": "slope"}}
ATTENTIONS = {name: _ATTENTION.only(required=("g",) if "g" in words else ()) for name, words in WORDS.items()}
