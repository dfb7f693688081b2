"""replay_selective_state_update: speculative decoding of Mamba-2 without the states of draft tokens."""

from ...spec.family import Family, Kernels

FAMILY = Family(
    name="replay_selective_state_update",
    kernels=(Kernels("spec:ReplaySpec", "problem:ReplayProblem"),),
    functions={
        "replay_selective_state_update": "call:replay_selective_state_update",
        "checkpoint_selective_state_update": "call:checkpoint_selective_state_update",
        "materialize_selective_state": "call:materialize_selective_state",
    },
    bench={"replay_selective_state_update": "bench:BENCH"},
    asks="models:ASKS",
    defaults="defaults:DEFAULTS",
    sharding="operands:RULES",
    trials="trial:TRIALS",
    page="operators/replay.md",
)
