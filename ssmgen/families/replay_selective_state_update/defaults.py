"""Default variants of replay: one shape, with a history of the last step or a ring."""

from typing import Any

from ...spec.kernel import DType, Index, Narrow
from ...variants.defaults import Default
from .spec import History, ReplayProblem

SHAPE: dict[str, Any] = {
    "nheads": 16, "headdim": 64, "d_state": 128, "ngroups": 1, "D": DType.BF16, "dt_bias": DType.BF16, "index": Index.I32,
}  # fmt: skip

DEFAULTS = {
    "the last step's history": Default(ReplayProblem(**SHAPE, state=DType.BF16), 1),
    "a ring, int8 state, rounded": Default(ReplayProblem(**SHAPE, state=Narrow.I8, history=History.RING, window=16, philox_rounds=10), 64),
    "a ring": Default(ReplayProblem(**SHAPE, state=DType.BF16, history=History.RING, window=16), 1),
    "the last step's history, of many heads, rounded": Default(ReplayProblem(**SHAPE, state=DType.BF16, philox_rounds=10), 64),
    "a cache whose states the caller writes": Default(ReplayProblem(**SHAPE, state=DType.F32, history=History.CACHE, window=16), 1),
    "f32 state": Default(ReplayProblem(**SHAPE, state=DType.F32), 1),
    "two kernels behind the convolution": Default(ReplayProblem(**SHAPE, state=DType.BF16, two_kernels=True, after_conv=True), 1),
}
