"""The tensors of Mamba-1 over prompts; kernels name `dim` channels. `channels_first` makes tokens the last axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...engine.chunks.operands import rule_of, sequences
from ...spec.operands import Operand, Types, table

_BATCH = "batch:64?!ragged"
OPERANDS = table(
    Operand("u", "token dim", field="x", view="batch token channel", strides=f"{_BATCH} token?by_token channel?by_channel"),
    Operand("delta", "like u", field="x"),
    Operand("A", "dim n", Types.F32, view="channel n", strides="channel n", note="negative"),
    Operand(
        "B", "token group n | token n", field="x", view="batch token group n", strides=f"{_BATCH} group token?keys_by_token n?keys_by_n"
    ),
    Operand("C", "like B", field="x"),
    Operand("D", "dim", optional=True, view="channel", strides="channel"),
    Operand("z", "like u", optional=True, field="x", there="z", note="a gate"),
    Operand("delta_bias", "dim", optional=True, view="channel", strides="channel"),
    *sequences("dim n", "channel n", "channel"),
    Operand("out", "like u", field="x", written=True),
    group="G", n="N", starts="sequences + 1",
)  # fmt: skip
KEYS = ("B", "C")  # shared by groups of channels
ROWS = tuple([name for name in OPERANDS.alike("u") if name not in KEYS])

# How a mesh of devices may divide them. Channels are the heads of other functions.


def _per_token(given: Mapping[str, Any]) -> dict[str, str]:
    """Axes of tensors with tokens: an option tells whether channels come first, the number of axes whether there are groups."""
    u, first = given["u"], given.get("channels_first", False)
    batch = "batch " if u.dim() == 3 else ""
    rows, groups, keys = ("head token", "group n token", "n token") if first else ("token head", "token group n", "token n")
    return {
        **dict.fromkeys(ROWS, batch + rows),
        **{name: batch + (groups if name in given and given[name].dim() > u.dim() else keys) for name in KEYS},
    }


RULES = {"selective_scan": rule_of(OPERANDS, "u", variant=_per_token)}
