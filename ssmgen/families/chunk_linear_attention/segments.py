"""Segments of chunk_linear_attention, of its rules that read the state by one key per token: as those of chunk_delta_rule, which see."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ...engine.chunks.kernels import of_problem
from ...engine.chunks.segments import SUMMING, Ends, Join, Lead, Sums, asked, joining, stateless
from ...engine.chunks.warpgroups import ROWS
from ...engine.recurrences.attention.problem import Beta, Gate
from ...spec import LATER, Needs
from .chain import ChainSpec, Stage
from .problem import LinearPromptProblem, Rule, workspace_bytes
from .spec import LinearSpec
from .warpgroups import WarpgroupChainSpec, half_words, joined, panels

FEWEST = 3  # segments behind the first, as the rule has it: with two, KDA's 8192 tokens of 32 heads took 325 us, and 316 as one
_HERE = ("images", "v", "cu_seqlens", "state_indices")
_ENDS = ("images", "v", "cu_seqlens", "ends")


def cut_by(rule: Rule, segments: int | None, heads: int, head_v: int, longest: int) -> dict[str, Any]:
    """The fields of a problem that say how its sequences are cut, of which none has more tokens than `longest`; segments: what a call asks
    for, or None for the rule."""
    return asked(segments, heads, head_v, longest, FEWEST) if rule.weighs else {}


def workspace_for(tokens: int, sequences: int, heads: int, head_k: int, head_v: int, rule: Rule, segments: int | None, longest: int) -> int:
    """Bytes that a call needs: images, and behind them what segments leave, as chunk_delta_rule has it."""
    cut = LinearPromptProblem(head_k=head_k, head_v=head_v, rule=rule, **cut_by(rule, segments, heads, head_v, longest))
    kept = cut.candidates(tokens, sequences) * cut.segments
    return workspace_bytes(tokens, sequences, heads, head_k, rule) + kept * heads * cut.room * 4


def of_sums(spec: ChainSpec) -> dict[str, Any]:
    """The fields of the kernel that makes a call's N and M: those that it hangs on, and of others the default."""
    kept = of_problem(spec, LinearPromptProblem)
    kept |= dict.fromkeys(("g", "gk", "A_log", "dt_bias", "beta", "erase")) | {
        "gate": Gate.LOG,
        "beta_form": Beta.PLAIN,
        "rule": Rule.DELTA,
    }
    return kept | {"read": False, "l2norm": False} | stateless(spec)


@dataclass(frozen=True, kw_only=True)
class LeadSpec(Lead, ChainSpec):
    """First segments, by each warp's products."""

    family: ClassVar[str] = "chunk_linear_attention_lead"


@dataclass(frozen=True, kw_only=True)
class WarpgroupLeadSpec(Lead, WarpgroupChainSpec):
    """First segments, by warpgroups."""

    family: ClassVar[str] = "chunk_linear_attention_warpgroup_lead"


@dataclass(frozen=True, kw_only=True)
class SumsSpec(Sums, ChainSpec):
    """N and M of segments, by each warp's products."""

    family: ClassVar[str] = "chunk_linear_attention_sums"
    here: ClassVar[tuple[str, ...]] = _HERE

    @property
    def stage(self) -> Stage:
        image = self.image
        w, without_q = image.q // 4, (image.w - image.q) // 4
        v = image.p // 4 - without_q
        return Stage(0, w, image.t // 4 - without_q, image.rest // 4 - without_q, 0, v, v + self.rule.tokens * self.v_words)

    @property
    def pieces(self) -> list[tuple[int, int, int]]:
        image = self.image
        return [(0, image.q, 0), (image.w, image.p - image.w, self.stage.w)]


@dataclass(frozen=True, kw_only=True)
class WarpgroupSumsSpec(Sums, WarpgroupChainSpec):
    """N and M of segments, by warpgroups: one fetches, the others walk."""

    family: ClassVar[str] = "chunk_linear_attention_warpgroup_sums"
    here: ClassVar[tuple[str, ...]] = _HERE

    @property
    def needs(self) -> Needs:
        return replace(super().needs, copies=False)  # chunks of segments but the last are whole

    @property
    def threads_per_block(self) -> int:
        return 128 * (1 + self.tile // ROWS)

    @property
    def stage(self) -> Stage:
        image, rows = self.image, self.rule.tokens
        w = image.q // 4
        v = w + (image.t - image.w) // 4
        t = v + rows * self.v_words
        rest = t + sum(half_words(self.rule))
        return Stage(0, w, t, rest, 0, v, rest + (image.p - image.rest) // 4)

    @property
    def pieces(self) -> list[tuple[int, int, int]]:
        image, stage = self.image, self.stage
        found = [(0, image.q, 0), (image.w, image.t - image.w, stage.w), (image.rest, image.p - image.rest, stage.rest)]
        return joined([*found, *panels(image.t, stage.t, self.rule, half_words(self.rule))])

    @property
    def dynamic_bytes(self) -> int:
        return self.stages * 4 * (self.stage.words + self.head_k)

    def constants(self) -> dict[str, Any]:
        return super().constants() | {"registers": SUMMING, "filled_by": 2}


@dataclass(frozen=True, kw_only=True)
class EndsSpec(Ends, SumsSpec):
    """N and M of sequences, by each warp's products."""

    family: ClassVar[str] = "chunk_linear_attention_ends"
    here: ClassVar[tuple[str, ...]] = _ENDS

    transitions: bool = True


@dataclass(frozen=True, kw_only=True)
class WarpgroupEndsSpec(Ends, WarpgroupSumsSpec):
    """N and M of sequences, by warpgroups."""

    family: ClassVar[str] = "chunk_linear_attention_warpgroup_ends"
    here: ClassVar[tuple[str, ...]] = _ENDS

    transitions: bool = True


@dataclass(frozen=True, kw_only=True)
class JoinSpec(Join, LinearSpec):
    """States between segments of these attentions."""

    family: ClassVar[str] = "chunk_linear_attention_join"

    head_v: int
    segments: int = field(default=2, metadata=LATER)
    segment_chunks: int = field(default=1, metadata=LATER)

    @classmethod
    def of(cls, spec: ChainSpec) -> JoinSpec:
        return cls(**joining(spec), rule=Rule.DELTA)

    def constants(self) -> dict[str, Any]:
        return super().constants() | {"image": self.image.bytes}
