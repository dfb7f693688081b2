"""What the axes of tensors are that calls which step a state of Mamba's have alike."""

from __future__ import annotations

from ....calls.sharding import CONTROL

AXES = {
    **dict.fromkeys(("x", "z", "out"), "* head row|* head"),
    **dict.fromkeys(("D", "dt_bias"), "head row|head"),
    "dt": "* head row|* head",
    "A": "head row n|head n|head",
    **dict.fromkeys(("B", "C"), "* group n|batch n"),
    **CONTROL,
    "rand_seed": "batch",
}
