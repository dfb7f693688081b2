"""Segments of chunk_delta_rule: their part of the workspace, and the kernel that joins them (engine/chunks/segments.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...engine.chunks.segments import Join, asked
from .problem import DeltaProblem, image_bytes
from .spec import DeltaSpec


def workspace_for(tokens: int, sequences: int, heads: int, head_k: int, head_v: int, segments: int | None, longest: int) -> int:
    """Bytes that a call needs: images, then the results of segments."""
    cut = DeltaProblem(head_k=head_k, head_v=head_v, **asked(segments, heads, head_v, longest))
    return image_bytes(tokens, sequences, heads) + cut.segment_bytes(tokens, sequences, heads)


@dataclass(frozen=True, kw_only=True)
class JoinSpec(Join, DeltaSpec):
    """States between segments of the delta rule."""

    family: ClassVar[str] = "chunk_delta_rule_join"
