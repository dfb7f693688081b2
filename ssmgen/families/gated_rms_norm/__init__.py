"""gated_rms_norm: the norm between a state and the output projection, by itself and as the last kernel of a decode layer."""

from ...family import Family, Kernels

FAMILY = Family(
    name="gated_rms_norm",
    kernels=(Kernels("spec:NormSpec", "spec:NormProblem"), Kernels("layer_spec:LayerGatedNormSpec")),
    functions={"gated_rms_norm": "call:gated_rms_norm"},
    page="operators/gated_rms_norm.md",
)
