"""skinny_linear: products of 1 to 16 rows with weights, as in a decode step."""

from ...spec.family import Family, Kernels

FAMILY = Family(
    name="skinny_linear",
    kernels=(
        Kernels("spec:SkinnySpec", "problem:SkinnyProblem", rules="rules"),
        Kernels("spec:FmaSpec"),
    ),
    functions={"skinny_linear": "call:skinny_linear"},
    sharding="sharding:RULES",
    trials="trial:TRIALS",
    bench={"skinny_linear": "bench:BENCH"},
    asks="models:ASKS",
    defaults="defaults:DEFAULTS",
    page="operators/skinny_linear.md",
)
