"""token_shift: mixes each channel of a token with the same channel of the previous token."""

from ...spec.family import Family, Kernels

FAMILY = Family(
    name="token_shift",
    kernels=(Kernels("spec:TokenShiftSpec", "spec:TokenShiftProblem"),),
    functions={"token_shift": "call:token_shift"},
    sharding="sharding:RULES",
    trials="trial:TRIALS",
    bench={"token_shift": "bench:BENCH"},
    defaults="defaults:DEFAULTS",
    page="operators/token_shift.md",
)
