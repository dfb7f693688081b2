"""token_shift: each channel of a token mixed with that of the token before."""

from ...spec.family import Family, Kernels

FAMILY = Family(
    name="token_shift",
    kernels=(Kernels("spec:TokenShiftSpec", "spec:TokenShiftProblem"),),
    functions={"token_shift": "call:token_shift"},
    sharding="sharding:RULES",
    trials="trial:TRIALS",
    bench={"token_shift": "bench:BENCH"},
    tuning="tuning:TUNING",
    defaults="defaults:DEFAULTS",
    page="operators/token_shift.md",
)
