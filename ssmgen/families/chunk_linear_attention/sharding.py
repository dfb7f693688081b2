"""What the axes of chunk_linear_attention's tensors are."""

from __future__ import annotations

from ...calls.sharding import Rule
from .operands import FUNCTIONS, OF_KEYS

_KEYS, _CHANNELS, _HEADS = "batch token group k|token group k", "batch token head k|token head k", "batch token head|token head"

# Parameters that no kernel takes: torch multiplies v with one, and the other is refused.
_PER_ROW = {"chunk_gdn2": ("w",), "chunk_gla": ("gv",)}


def _rule(name: str) -> Rule:
    required, words = FUNCTIONS[name]
    operands = {
        **dict.fromkeys(OF_KEYS, _KEYS),
        "v": "batch token head v|token head v",
        **dict.fromkeys(("gk", "erase"), _CHANNELS),
        **dict.fromkeys(("g", "beta"), _HEADS),
    }
    return Rule(
        {
            **operands,
            **{word: operands[role] for role, word in words.items()},
            **dict.fromkeys(_PER_ROW.get(name, ()), operands["v"]),
            "out": operands["v"],
            "A_log": "head",
            "dt_bias": "head" if "g" in required else "head|head k",
            **dict.fromkeys(("initial_states", "final_states_out", "state"), "batch head row n"),
            **dict.fromkeys(("state_indices", "has_initial_state"), "batch"),
            "checkpoint_positions": "position",
            "checkpoints_out": "position head row n",
            "workspace": "byte",  # each rank's own, and no tensor of all of them: what is in it is of no use to others
        },
        ("final_states_out", "state", "checkpoints_out", "out"),
        anchors=("state", "final_states_out", "out", "v"),
        returns=("out", "final_states_out", "checkpoints_out"),
        asked={"final_states_out": "return_final_states", "checkpoints_out": "return_checkpoints"},
    )


RULES = {name: _rule(name) for name in FUNCTIONS}
