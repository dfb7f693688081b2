"""The tensors of Mamba-3 over prompts. `head` and `row` are heads and headdim, `n` is d_state, `rank` is 1 for SISO."""

from __future__ import annotations

from ...engine.chunks.operands import TOKENS
from ...spec.operands import Operand, Types, table

_LAST = "of the last token"
OPERANDS = table(
    Operand("x", "token head row", view="batch token head row", strides=f"{TOKENS} head"),
    Operand(
        "B", "token rank group n | token group n", field="x", view="batch token rank group n", strides=f"{TOKENS} rank group",
        note="of x's type",
    ),
    Operand("C", "like B", field="x", note="of x's type"),
    Operand("dt", "token head", view="batch token head", strides=f"{TOKENS} head"),
    Operand("A", "like dt"),
    Operand("trap", "like dt"),
    Operand(
        "angle", "token head angle | token angle", optional=True, view="batch token head angle", strides=f"{TOKENS} head angle",
        note="logits; None: no rotation",
    ),
    Operand("D", "head", optional=True, strides="head"),
    Operand("z", "like x", optional=True, field="x", there="z", note="None: no gate"),
    Operand("dt_bias", "head", optional=True, strides="head"),
    Operand("B_norm", "n", optional=True, field="row_norm", strides="n", note="None: B is normed already"),
    Operand("C_norm", "n", optional=True, field="row_norm", strides="n", note="of B_norm's type"),
    Operand("B_bias", "head rank n | head n", optional=True, field="row_bias", strides="head rank"),
    Operand("C_bias", "like B_bias", optional=True, field="row_bias", note="of B_bias's type"),
    Operand("mimo_x", "head rank row | head row", optional=True, field="mimo", strides="head rank"),
    Operand("mimo_z", "like mimo_x", optional=True, field="mimo", there="mimo&z", note="with z, of mimo_x's type"),
    Operand("mimo_o", "like mimo_x", optional=True, field="mimo", there="mimo&!by_rank", note="None: one output for each rank"),
    Operand("norm_weight", "head row", optional=True, strides="head", note="None: no norm of the output"),
    Operand("cu_seqlens", "starts", Types.INDEX, optional=True, strides="starts"),
    Operand("initial_states", "sequences head row n", optional=True, field="state", there="initial", strides="sequences:64 head"),
    Operand(
        "initial_k", "sequences rank head n | sequences head n", optional=True, field="k_state", there="initial",
        strides="sequences:64 rank head", note=_LAST,
    ),
    Operand("initial_v", "sequences head row", optional=True, field="v_state", there="initial", strides="sequences:64 head", note=_LAST),
    Operand(
        "initial_angles", "sequences head angle", Types.F32, optional=True, there="initial&rotates", strides="sequences:64 head",
        note="radians",
    ),
    Operand(
        "state", "slot head row n", optional=True, written=True, there="pool", strides="slot:64 head", note="None: no final states"
    ),
    Operand(
        "k_state", "slot rank head n | slot head n", optional=True, written=True, there="pool", strides="slot:64 rank head", note=_LAST
    ),
    Operand("v_state", "slot head row", optional=True, written=True, there="pool", strides="slot:64 head", note=_LAST),
    Operand(
        "angle_state", "slot head angle", Types.F32, optional=True, written=True, there="pool&rotates", strides="slot:64 head",
        note="radians",
    ),
    Operand("state_indices", "sequences", Types.INDEX, optional=True, field="index", strides="sequences"),
    Operand("has_initial_state", "sequences", Types.BOOL, optional=True, there="started", strides="sequences"),
    Operand(
        "workspace", "number", Types.F32, optional=True, written=True, there="prepared", writes="prepares",
        note="None: a new one",
    ),
    Operand(
        "out", "token rank head row | token head row", field="x", written=True, view="batch token rank head row",
        strides=f"{TOKENS} rank?by_rank head", note="None: a new one of x's type",
    ),
    head="heads", row="headdim", n="d_state", group="groups", angle="angles", starts="sequences + 1", number="numbers",
)  # fmt: skip
INITIAL = ("initial_states", "initial_k", "initial_v", "initial_angles")
POOLS = ("state", "k_state", "v_state", "angle_state")
# Operands of the kernel before warpgroups.
OF_ANGLES = ("dt", "angle", "dt_bias", "cu_seqlens")
OF_NORMS = ("B", "C")
