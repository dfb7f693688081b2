"""Default variants of decode_attention: norms, a gate and a rotation of some channels; a rotation of whole heads; none of these."""

from ...spec.kernel import DType
from ...variants.defaults import Default
from .spec import DecodeAttentionProblem

BF16, F32 = DType.BF16, DType.F32
_QWEN = DecodeAttentionProblem(head_dim=256, group=4, rotary=64, angles=BF16, norm=BF16, unit_offset=True, gate=BF16)

DEFAULTS = {
    "norms, a gate, a rotation of some channels": Default(_QWEN, 4),
    "a rotation of whole heads": Default(DecodeAttentionProblem(head_dim=128, group=6, rotary=128, angles=BF16), 2),
    "f32, heads of 80": Default(DecodeAttentionProblem(head_dim=80, group=1, x=F32, cache=F32), 8),
}
