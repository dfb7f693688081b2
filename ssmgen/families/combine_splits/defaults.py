"""Default variants of combine_splits: an MLA and a GQA model's decode, few rows and many; a cascade's two splits; other branches."""

from typing import Any

from ...spec.kernel import DType, Index, Loads
from ...variants.defaults import Default
from .spec import MAX_SIZE, CombineProblem

MLA = CombineProblem(d_v=512, max_splits=160, axes=2, num_splits=Index.I32)
GQA = CombineProblem(d_v=128, max_splits=32)
PAIR: dict[str, Any] = {"o": DType.BF16, "max_splits": 2, "pair": True}

DEFAULTS = {
    "MLA, few rows": Default(MLA, 128),
    "MLA, many rows": Default(MLA, MAX_SIZE),
    "GQA, few rows": Default(GQA, 128),
    "GQA, many rows": Default(GQA, MAX_SIZE),
    "a cascade": Default(CombineProblem(d_v=128, axes=2, **PAIR), MAX_SIZE),
    "a cascade in place, with a mask": Default(CombineProblem(d_v=512, axes=2, mask=True, in_place=True, **PAIR), 128),
    "sink, any number of splits": Default(
        CombineProblem(d_v=128, o=DType.BF16, max_splits=0, axes=3, num_splits=Index.I64, sink=DType.F32, skip_single=True), MAX_SIZE
    ),
    "not aligned, no LSE": Default(
        CombineProblem(d_v=68, o=DType.F16, out=DType.F32, max_splits=8, lse_out=False, loads=Loads.ELEMENT), 128
    ),
}
