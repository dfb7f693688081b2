"""Segments of chunk_linear_attention, of its rules that read the state by one key per token (engine/chunks/segments.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...engine.chunks.segments import Join, asked, joining
from ...spec.kernel import LATER
from .problem import LinearPromptProblem, Rule, workspace_bytes
from .spec import LinearSpec

FEWEST = 3  # segments behind the first, as the rule has it: with two, KDA's 8192 tokens of 32 heads took 325 us, and 316 as one


def cut_by(rule: Rule, segments: int | None, heads: int, head_v: int, longest: int) -> dict[str, Any]:
    """The fields of a problem that say how its sequences are cut, of which none has more tokens than `longest`; segments: what a call asks
    for, or None for the rule."""
    return asked(segments, heads, head_v, longest, FEWEST) if rule.weighs else {}


def workspace_for(tokens: int, sequences: int, heads: int, head_k: int, head_v: int, rule: Rule, segments: int | None, longest: int) -> int:
    """Bytes that a call needs: images, and behind them what segments leave, as chunk_delta_rule has it."""
    cut = LinearPromptProblem(head_k=head_k, head_v=head_v, rule=rule, **cut_by(rule, segments, heads, head_v, longest))
    kept = cut.candidates(tokens, sequences) * cut.segments
    return workspace_bytes(tokens, sequences, heads, head_k, rule) + kept * heads * cut.room * 4


@dataclass(frozen=True, kw_only=True)
class JoinSpec(Join, LinearSpec):
    """States between segments of these attentions."""

    family: ClassVar[str] = "chunk_linear_attention_join"

    head_v: int
    segments: int = field(default=2, metadata=LATER)
    segment_chunks: int = field(default=1, metadata=LATER)

    @classmethod
    def of(cls, spec: Any) -> JoinSpec:
        return cls(**joining(spec), rule=Rule.DELTA)

    def constants(self) -> dict[str, Any]:
        return super().constants() | {"image": self.image.bytes}
