"""The tensors of linear attention over prompts, by their roles in the recurrence, and which of them each public function takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...engine.chunks.operands import ATTENTION_WORDS, ENDS, TOKENS, attention, rule_of
from ...spec.operands import Operand, Table, Types, table

_HEADS = f"{TOKENS} head"


def _rows(name: str, axes: str, optional: bool = True, field: str = "", there: str = "", note: str = "") -> Operand:
    """An operand with a number per channel. Channels must be dense: kernels take no stride for them."""
    how = there or f"prepares&{name}"
    return Operand(
        name, f"token {axes}", optional=optional, field=field, there=how, view="batch token head channel", strides=_HEADS, note=note
    )  # fmt: skip


def _gate(name: str, note: str = "") -> Operand:
    return Operand(name, "token head", optional=True, there=f"prepares&{name}", view="batch token head", strides=_HEADS, note=note)


OPERANDS = table(
    *attention(
        _rows("q", "group key", optional=False, field="x", there="prepares"),
        _rows("k", "group key", optional=False, field="x", there="prepares"),
        _rows("v", "head value", optional=False, field="x", there="walks"),
        _rows("read", "group key", field="x", note="the key that is read with, if not k"),
        _rows("write", "group key", field="x", note="low rank: the vector that is written"),
        _gate("g", "decay per head"),
        _rows("gk", "head key", note="decay per key channel"),
        _gate("beta"),
        Operand("A_log", "head", optional=True, there="prepares&A_log", strides="head"),
        Operand("dt_bias", "head key | head*key | head", optional=True, there="prepares&dt_bias", view="head channel", strides="head"),
        _rows("erase", "head key", note="factor of the key that is read with"),
        _rows("alpha", "group key", note="low rank: -(read * alpha) is written"),
    ),
    **ATTENTION_WORDS | {"head*key": "HV K"},
)
TURNED = OPERANDS.turned("value", "key")  # transposed by the layout "kv"
KERNELS = OPERANDS.beside(ENDS)
OF_KEYS = tuple([row.name for row in OPERANDS if "group" in row.axes])
OF_OWN_TYPE = tuple([row.name for row in OPERANDS if row.types is Types.FLOAT and not row.field])
CHANNELS = tuple([name for name in OF_OWN_TYPE if "key" in OPERANDS[name].axes])
# torch multiplies v with the write gate of Gated DeltaNet 2, before the first kernel.
GATED: Table = OPERANDS.only("v").beside(Operand("w", "token head value"))


class Function(NamedTuple):
    """The operands that a public function needs, except q, k and v, and the parameters whose name differs from their role."""

    required: tuple[str, ...] = ()
    words: Mapping[str, str] = {}  # role -> parameter


FUNCTIONS = {
    "chunk_kda": Function(("gk", "beta"), {"gk": "g"}),
    "chunk_gla": Function(),
    "chunk_gdn2": Function(("gk", "erase"), {"gk": "g", "erase": "b"}),
    "chunk_comba": Function(("g", "beta", "read"), {"read": "p"}),
    "chunk_rwkv7": Function(("gk", "read", "alpha"), {"q": "r", "gk": "w", "read": "kk", "alpha": "a"}),
    "chunk_dplr_delta_rule": Function(("read", "write"), {"read": "a", "write": "b"}),
}

# How a mesh of devices may divide them.
# Parameters that no kernel takes: torch multiplies v with one, and the other is refused.
_PER_ROW = {"chunk_gdn2": ("w",), "chunk_gla": ("gv",)}
RULES = {
    name: rule_of(OPERANDS, "v", function.words, axes=dict.fromkeys(_PER_ROW.get(name, ()), "batch token head v|token head v"))
    for name, function in FUNCTIONS.items()
}
