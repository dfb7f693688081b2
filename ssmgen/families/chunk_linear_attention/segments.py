"""Segments of chunk_linear_attention, for rules that read the state by one key per token (engine/chunks/segments.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...engine.chunks.segments import Join, asked
from .problem import LinearPromptProblem, Rule, workspace_bytes
from .spec import LinearSpec

FEWEST = 3  # least segments after the first, by the rule: with two, KDA's 8192 tokens of 32 heads took 325 us, and 316 us as one


def cut_by(rule: Rule, segments: int | None, heads: int, head_v: int, longest: int) -> dict[str, Any]:
    """The fields of a problem that fix how its sequences of at most `longest` tokens are cut; segments: the call's, or None for the
    rule."""
    return asked(segments, heads, head_v, longest, FEWEST) if rule.weighs else {}


def workspace_for(tokens: int, sequences: int, heads: int, head_k: int, head_v: int, rule: Rule, segments: int | None, longest: int) -> int:
    """Bytes that a call needs: images, then the results of segments."""
    cut = LinearPromptProblem(head_k=head_k, head_v=head_v, rule=rule, **cut_by(rule, segments, heads, head_v, longest))
    return workspace_bytes(tokens, sequences, heads, head_k, rule) + cut.segment_bytes(tokens, sequences, heads)


@dataclass(frozen=True, kw_only=True)
class JoinSpec(Join, LinearSpec):
    """States between segments of these attentions."""

    family: ClassVar[str] = "chunk_linear_attention_join"

    def constants(self) -> dict[str, Any]:
        return super().constants() | {"image": self.image.bytes}
