"""Segments of chunk_delta_rule: their part of the workspace, and the kernel that joins them (engine/chunks/segments.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...engine.chunks.segments import Join, asked, joining
from ...spec.kernel import LATER
from .problem import DeltaProblem, image_bytes
from .spec import DeltaSpec


def workspace_for(tokens: int, sequences: int, heads: int, head_k: int, head_v: int, segments: int | None, longest: int) -> int:
    """Bytes that a call needs: images, then the results of segments. Segment i of candidate c and head h is at
    ((c segments + i) heads + h) room; the last segment stores nothing."""
    cut = DeltaProblem(head_k=head_k, head_v=head_v, **asked(segments, heads, head_v, longest))
    kept = cut.candidates(tokens, sequences) * cut.segments
    return image_bytes(tokens, sequences, heads) + kept * heads * cut.room * 4


@dataclass(frozen=True, kw_only=True)
class JoinSpec(Join, DeltaSpec):
    """States between segments of the delta rule."""

    family: ClassVar[str] = "chunk_delta_rule_join"

    head_v: int
    segments: int = field(default=2, metadata=LATER)
    segment_chunks: int = field(default=1, metadata=LATER)

    @classmethod
    def of(cls, spec: Any) -> JoinSpec:
        return cls(**joining(spec))
