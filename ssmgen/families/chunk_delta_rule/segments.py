"""Segments of chunk_delta_rule: the kernels that walk a prompt's parts side by side (engine/chunks/segments.py)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ...engine.chunks.kernels import of_problem
from ...engine.chunks.problem import CHUNK
from ...engine.chunks.segments import SUMMING, Ends, Join, Lead, Sums, asked, joining, stateless
from ...engine.chunks.warpgroups import ROWS
from ...engine.recurrences.attention.problem import Beta
from ...spec import LATER, DType, Needs
from .chain import ChainSpec
from .problem import COEFFICIENTS, PANEL_BYTES, PANELS, DeltaProblem, Gate, image_bytes
from .spec import DeltaSpec
from .warpgroups import WarpgroupChainSpec


def workspace_for(tokens: int, sequences: int, heads: int, head_k: int, head_v: int, segments: int | None, longest: int) -> int:
    """Bytes that a call needs: images, and behind them what segments leave, of segment i of candidate c and head h at
    ((c segments + i) heads + h) room; of the last one nothing."""
    cut = DeltaProblem(head_k=head_k, head_v=head_v, **asked(segments, heads, head_v, longest))
    kept = cut.candidates(tokens, sequences) * cut.segments
    return image_bytes(tokens, sequences, heads) + kept * heads * cut.room * 4


def of_sums(spec: ChainSpec) -> dict[str, Any]:
    """The fields of the kernel that makes a call's N and M: those that it hangs on, and of others the default."""
    kept = of_problem(spec, DeltaProblem) | {"g": None, "gate": Gate.NONE, "A_log": None, "dt_bias": None, "l2norm": False}
    return kept | {"beta": DType.BF16, "beta_form": Beta.PLAIN} | stateless(spec)


@dataclass(frozen=True, kw_only=True)
class LeadSpec(Lead, ChainSpec):
    """First segments, by each warp's products."""

    family: ClassVar[str] = "chunk_delta_rule_lead"


@dataclass(frozen=True, kw_only=True)
class WarpgroupLeadSpec(Lead, WarpgroupChainSpec):
    """First segments, by warpgroups."""

    family: ClassVar[str] = "chunk_delta_rule_warpgroup_lead"


_HERE = ("images", "k", "v", "cu_seqlens", "state_indices")


@dataclass(frozen=True, kw_only=True)
class SumsSpec(Sums, ChainSpec):
    """N and M of segments, by each warp's products."""

    family: ClassVar[str] = "chunk_delta_rule_sums"
    here: ClassVar[tuple[str, ...]] = _HERE

    @property
    def dynamic_bytes(self) -> int:
        """k, v, T and coefficients of each stage's chunk."""
        return self.stages * (4 * CHUNK * (self.row_words + self.v_words) + sum(PANEL_BYTES) + 4 * COEFFICIENTS)


@dataclass(frozen=True, kw_only=True)
class WarpgroupSumsSpec(Sums, WarpgroupChainSpec):
    """N and M of segments, by warpgroups: one fetches, the others walk."""

    family: ClassVar[str] = "chunk_delta_rule_warpgroup_sums"
    here: ClassVar[tuple[str, ...]] = _HERE

    @property
    def mapped(self) -> dict[str, int]:
        return {"k": self.head_k, "v": self.tile}

    @property
    def needs(self) -> Needs:
        return replace(super().needs, copies=False)  # chunks of segments but the last are whole

    @property
    def threads_per_block(self) -> int:
        return 128 * (1 + self.tile // ROWS)

    @property
    def stage_bytes(self) -> int:
        return CHUNK * 2 * (self.head_k + self.tile) + PANELS * PANEL_BYTES[0] + -(-4 * COEFFICIENTS // 1024) * 1024

    @property
    def dynamic_bytes(self) -> int:
        return self.stages * self.stage_bytes

    def constants(self) -> dict[str, Any]:
        return super().constants() | {"registers": SUMMING}


@dataclass(frozen=True, kw_only=True)
class EndsSpec(Ends, SumsSpec):
    """N and M of sequences, by each warp's products."""

    family: ClassVar[str] = "chunk_delta_rule_ends"
    here: ClassVar[tuple[str, ...]] = Ends.here

    transitions: bool = True


@dataclass(frozen=True, kw_only=True)
class WarpgroupEndsSpec(Ends, WarpgroupSumsSpec):
    """N and M of sequences, by warpgroups."""

    family: ClassVar[str] = "chunk_delta_rule_warpgroup_ends"
    here: ClassVar[tuple[str, ...]] = Ends.here

    transitions: bool = True


@dataclass(frozen=True, kw_only=True)
class JoinSpec(Join, DeltaSpec):
    """States between segments of the delta rule."""

    family: ClassVar[str] = "chunk_delta_rule_join"

    head_v: int
    segments: int = field(default=2, metadata=LATER)
    segment_chunks: int = field(default=1, metadata=LATER)

    @classmethod
    def of(cls, spec: ChainSpec) -> JoinSpec:
        return cls(**joining(spec))
