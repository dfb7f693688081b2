"""Rows of the operand tables of prompt families: starts of packed sequences, states, checkpoints and the workspace.

`of`, `first` and `slots` are conditions on a spec, written as in `Operand.there`. A kernel takes states if `of` holds, initial states if
`first` holds too, and slots if `slots` holds.
"""

from __future__ import annotations

from typing import Any

from ...spec.operands import Operand, Types

TOKENS = "batch:64?!ragged token"  # strides of an operand of tokens
_BY_SEQUENCE: dict[str, Any] = {"optional": True, "view": "sequence", "strides": "sequence"}


def sequences(axes: str, view: str, strides: str, of: str = "", first: str = "", slots: str = "") -> tuple[Operand, ...]:
    """axes: of one state; view: the names of these axes in kernels; strides: the axes whose strides kernels take."""
    states: dict[str, Any] = {"optional": True, "field": "state", "view": f"slot {view}", "strides": f"slot:64 {strides}"}
    return (
        Operand("cu_seqlens", "starts", Types.INDEX, **_BY_SEQUENCE),
        Operand("initial_states", f"sequences {axes}", there=f"{of}initial{first}", **states),
        Operand("final_states", f"sequences {axes}", written=True, may_be=("initial_states",), there=f"{of}final", **states),
        Operand("state", f"slot {axes}", written=True, there=f"{of}pool", note="instead of `final_states`", **states),
        Operand("state_indices", "sequences", Types.INDEX, field="index", there=f"{slots}index", **_BY_SEQUENCE),
        Operand("has_initial_state", "sequences", Types.BOOL, there=f"{of}started{first}", **_BY_SEQUENCE),
    )


def checkpoints(axes: str, of: str = "") -> tuple[Operand, ...]:
    """States after tokens at listed positions."""
    how: dict[str, Any] = {"optional": True, "there": f"{of}checkpoints"}
    return (
        Operand("checkpoint_positions", "position", Types.INDEX, field="checkpoints", view="position", strides="position", **how),
        Operand("checkpoints", f"position {axes}", written=True, field="state", view=f"slot {axes}", strides="slot:64 head", **how),
    )


# For families whose first kernel writes images of chunks into the workspace.

WORKSPACE = Operand("workspace", "byte", Types.BYTES, written=True, writes="leaves", role="images", note="None: a new one")
# An operand of a kernel that only context parallelism launches: see Role.ENDS.
ENDS = Operand("ends", "sequences head value+key key", Types.F32, written=True, there="walks&ends")


def attention(*tokens: Operand) -> tuple[Operand, ...]:
    """The rows of a linear attention over prompts. tokens: the rows of its tokens and gates, v included."""
    axes, outputs = "head value key", "outputs&"
    return (
        *tokens,
        *sequences(axes, axes, "head", outputs, "&!behind", "walks&"),
        *checkpoints(axes, outputs),
        WORKSPACE,
        Operand("out", "like v", written=True, field="x", there="outputs"),
    )


ATTENTION_WORDS = {"group": "HK", "head": "HV", "key": "K", "value": "V", "starts": "sequences + 1", "position": "count", "byte": "bytes"}
