"""The tensors of Mamba-1 over prompts; kernels name `dim` channels. `channels_first` makes tokens the last axis."""

from __future__ import annotations

from ...engine.chunks.operands import sequences
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
