"""Default variants of gated_rms_norm: a delta rule's with few groups and with many, a Mamba-2's, the other branches."""

from ...engine.norm_kernel import NormProblem
from ...select.models import find_model
from ...spec.kernel import DType, Loads
from ...variants.defaults import Default
from .spec import MAX_SIZE

(DELTA_RULE,) = find_model("qwen3.5-397b-a17b").norms()
(MAMBA2,) = find_model("nemotron-h-8b").norms()
BETWEEN = NormProblem(size=4096, gate=None, residual=DType.F32, sum=DType.F32, rounded=True)

DEFAULTS = {
    "delta rule, few heads": Default(DELTA_RULE, 64),
    "delta rule, many heads": Default(DELTA_RULE, MAX_SIZE),
    "Mamba-2": Default(MAMBA2, 8),
    "a long row of f32": Default(NormProblem(size=10240, x=DType.F32, weight=DType.F32), 1),
    "between layers, the residual in f32": Default(BETWEEN, 1),
    "between layers, 1 + weight": Default(NormProblem(size=2048, gate=None, unit_offset=True, residual=DType.BF16, sum=DType.BF16), 8),
    "a layer norm": Default(NormProblem(size=1280, norm_first=True, centred=True, bias=DType.BF16, grouped=True), 8),
    "bare, not aligned": Default(NormProblem(size=100, gate=None, weight=None, out=DType.F16, loads=Loads.ELEMENT), MAX_SIZE),
}
