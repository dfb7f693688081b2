"""The problem of a Mamba-3 prompt: shapes, dtypes, the activations that the kernel applies, and its states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...engine.recurrences.mamba3.problem import MOST_RANK, Rate, Rotary
from ...spec.kernel import LATER, SM90, Arch, DType, Index, Loads, Problem, must

ROWS = 64  # of a chunk's products: one for each token and rank

# If a sequence has few heads, the blocks of a cluster can scan parts of it at once: first the state that each part leaves, for all parts
# but the last, then outputs. Only a call asks for parts. On an H200, 2048 tokens of 24 heads took 107 us in 5 parts and 79 in 3 spans,
# which change no bit.
MOST = 8  # parts: the blocks of a cluster


def asked(segments: int | None) -> dict[str, Any]:
    """The fields of a problem that say how sequences are cut: as the call asks; whole if it gives None."""
    parts = min(segments or 1, MOST)
    return {"segments": parts} if parts > 1 else {}


def why_whole(arch: Arch) -> str:
    """Why a call's sequences are not cut."""
    if arch < SM90:
        return f"arch is {arch}; parts need sm_90, which has the first clusters"
    return "the call asks for one segment or for none, or for two where warpgroups serve it: two have a whole sequence's bits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba3PromptProblem(Problem):
    """The fields that a call fixes. Heads, groups, tokens, sequences and strides are not fixed."""

    headdim: int
    d_state: int
    rank: int = 1
    angles: int = 0  # of a head; 0: rows of B and C do not rotate
    rotary: Rotary = Rotary.PAIRS
    rate: Rate = Rate.HEAVY
    dt_softplus: bool = True
    trap_sigmoid: bool = True
    x: DType = DType.BF16  # of B, C, z and out too
    dt: DType = DType.BF16
    A: DType = DType.BF16
    trap: DType = DType.BF16
    angle: DType | None = None
    D: DType | None = None
    z: bool = False
    dt_bias: DType | None = None
    row_norm: DType | None = None  # weights of the norms of B and C
    row_bias: DType | None = None  # of B and C
    mimo: DType | None = None  # mimo_x, mimo_z and mimo_o
    norm_weight: DType | None = None
    by_rank: bool = False  # one output for each rank; else their sum
    state: DType = DType.F32
    k_state: DType = DType.BF16
    v_state: DType = DType.BF16
    cu_seqlens: Index = Index.NONE  # type of it: x is packed sequences
    initial: bool = False  # initial_states and the others are read
    pool: bool = False  # states are written
    final: bool = False  # they are new tensors: sequences without tokens get their initial states
    started: bool = False  # has_initial_state is given
    index: Index = Index.NONE  # type of state_indices
    copy: int = 16  # bytes of x, B, C, z and out that are contiguous and aligned
    state_loads: Loads = Loads.VECTOR  # of states: pairs of numbers
    segments: int = field(default=1, metadata=LATER)  # of a sequence, at most

    @property
    def rotates(self) -> bool:
        return self.angles > 0

    @property
    def ragged(self) -> bool:
        return self.cu_seqlens is not Index.NONE

    @property
    def chunk(self) -> int:
        """Tokens of a chunk; part of the result's bits."""
        return ROWS // self.rank

    def cut(self, tokens: int) -> tuple[int, int]:
        """(parts, tokens of each part except the last) of a sequence of `tokens` tokens."""
        chunks = -(-tokens // self.chunk)
        wanted = max(1, min(self.segments, chunks))
        each = max(1, -(-chunks // wanted)) * self.chunk
        return max(1, -(-tokens // each)), each

    def faults(self) -> list[str]:
        """Reasons why no variant can serve this problem."""
        most = self.d_state // 2
        return [
            *must(self.headdim % 16 == 0 and 16 <= self.headdim <= 128, f"headdim is {self.headdim}; expected 16 … 128 in steps of 16"),
            *must(self.d_state % 16 == 0 and 16 <= self.d_state <= 256, f"d_state is {self.d_state}; expected 16 … 256 in steps of 16"),
            *must(1 <= self.rank <= MOST_RANK, f"rank is {self.rank}; expected 1 … {MOST_RANK}"),
            *must(0 <= self.angles <= most, f"angles is {self.angles}; expected 0 … {most}, half of d_state"),
            *must(self.rotates == (self.angle is not None), f"angles is {self.angles} and angle is {self.angle}; expected both or neither"),
            *must(self.rank == 1 or self.mimo is not None, f"rank is {self.rank} and mimo is none; expected mimo_x for several ranks"),
            *must(self.x is not DType.F32, "x, B and C are f32; expected bf16 or f16, for tensor cores"),
            *must(
                self.copy in (4, 8, 16),
                "the tokens or heads of x, B, C, z or out begin at an odd element; expected multiples of 4 bytes. Pass contiguous tensors.",
            ),
            *must(not (self.started and self.initial), "initial and started are both yes; expected one: each says where a sequence starts"),
            *must(self.pool or not (self.index is not Index.NONE or self.started or self.final), "pool is no with index, started or final"),
            *must(
                not (self.final and (self.index is not Index.NONE or self.started)),
                "final is yes with index or started; expected new states in the order of the sequences",
            ),
            *must(1 <= self.segments <= MOST, f"segments is {self.segments}; expected 1 … {MOST}"),
        ]
