"""chunk_scan: Mamba-2 (SSD) over whole sequences, in chunks of 64 tokens on the tensor cores.

d is softplus(dt + bias), and s the running sum of d A within a chunk. A chunk that begins in state S computes

    M_ij = (C_i . B_j) exp(s_i - s_j) d_j, j <= i        y_i = exp(s_i) C_i S^T + sum_j M_ij x_j + D x_i
    S <- exp(s_last) S + sum_j exp(s_last - s_j) d_j x_j B_j^T

A block walks a sequence's chunks in order, for `tile` rows of one head. Some of its warps, the walkers, hold 16 rows of S each in f32, in
the accumulators; other warps, the mixers, compute M one chunk early, because M does not depend on S; and one warp copies. The walkers
compute states at listed positions from the value of S at their chunk's start.

`parts` is the number of blocks that share a sequence. Each block first passes all chunks before its own and computes only S for them, by
the same operations as the block that owns them: no bit changes, and blocks do not communicate.
Bytes per token and head: 4 P of x and y, 4 N / (heads of a group) of B and C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from ...compile.occupancy import shared_violations
from ...engine.chunks.problem import Chunked, Stated
from ...spec.kernel import LATER, SM90, Arch, DType, Index, KernelSpec, Loads, Needs, Param, Pdl, Problem, must
from .operands import KERNELS

OPERATOR = "chunk_scan"

CHUNK = 64  # tokens; part of the result's bits
MOST_PARTS = 8
SMS = {80: 108, 90: 132, 100: 148, 103: 148, 120: 170}  # of the larger cards; others are assumed to have 80
PASSING = 0.4  # time of a chunk that computes only the state, relative to a whole chunk
SUMS = 3  # chunks whose decays are kept: the walkers' chunk, the mixers' chunk, and the next

# Fields that problems of linear attention lack.
WITHOUT_DT: dict[str, Any] = {"dt": None, "A": None, "dt_softplus": False}


class Gate(Enum):
    """The decay of the state. All except the first belong to linear attention, which has only a scale of y in addition, and d = 1."""

    DT = "dt"  # exp(d A)
    LOG = "log"  # exp(g), of each token and head
    CONSTANT = "constant"  # exp(g), of each head
    SLOPE = "slope"  # exp(-g), of each head
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanProblem(Problem, Chunked, Stated):
    """The fields that a call fixes: dtypes, sizes of a head's state, present operands. Heads, groups, tokens and strides are not fixed."""

    headdim: int
    d_state: int
    state: DType = DType.F32  # of all states
    x: DType = DType.BF16  # of B, C, z and out too
    dt: DType | None = DType.BF16
    A: DType | None = DType.F32
    D: DType | None = None
    D_rows: bool = field(default=False, metadata=LATER)  # D differs from row to row of a head
    dt_bias: DType | None = None
    z: bool = False
    gate: Gate = Gate.DT
    g: DType | None = None
    dt_softplus: bool = True
    dt_limit: bool = False
    cu_seqlens: Index = Index.NONE  # type of it: x is packed sequences
    initial: bool = False  # initial_states are read
    final: bool = False  # final_states are written
    pool: bool = False  # `state` is written instead of final_states, and read if has_initial_state is true
    started: bool = False  # has_initial_state is given
    index: Index = Index.NONE  # type of state_indices
    seq_idx: bool = False  # seq_idx is given: the state restarts within the tokens
    checkpoints: Index = Index.NONE  # type of checkpoint_positions; their number is an argument of the kernel
    copy: int = 16  # bytes of x, B, C, z and out that are contiguous and aligned
    state_loads: Loads = Loads.VECTOR  # of states: pairs of numbers
    segments: int = field(default=0, metadata=LATER)  # of a sequence, at most, if the division changes bits; 0: the heads decide
    short: bool = field(default=False, metadata=LATER)  # sequences are many and short (warpgroups.py has the numbers); changes no bit

    @property
    def terms(self) -> int:
        """16-bit terms of an operand of a product: f32 are sums of three bf16; the six largest of their nine products are computed."""
        return 3 if self.x is DType.F32 else 1

    @property
    def attention(self) -> bool:
        return self.gate is not Gate.DT

    @property
    def overwrites(self) -> bool:
        """Whether final states may overwrite initial states."""
        return self.started or (self.initial and self.final)

    def faults(self) -> list[str]:
        """Reasons why no variant can serve this problem."""
        return [
            *must(self.headdim % 16 == 0 and 16 <= self.headdim <= 256, f"headdim is {self.headdim}; expected 16 … 256 in steps of 16"),
            *must(self.d_state % 16 == 0 and 16 <= self.d_state <= 256, f"d_state is {self.d_state}; expected 16 … 256 in steps of 16"),
            *must(
                self.copy in (4, 8, 16),
                f"the tokens or heads of {'q, k, v' if self.attention else 'x, B, C, z'} or out begin at an odd element; "
                "expected multiples of 4 bytes. Pass contiguous tensors.",
            ),
            *self.state_faults(),
            *must(
                not self.attention or not (self.dt or self.A or self.D or self.dt_bias or self.z or self.dt_softplus or self.dt_limit),
                f"gate is {self.gate.value} with dt, A, D, dt_bias, z, dt_softplus or dt_limit; expected gate=dt",
            ),
            *must(
                not self.attention or not (self.seq_idx or self.marked),
                f"gate is {self.gate.value} with seq_idx or checkpoints; expected gate=dt",
            ),
            *must(self.attention or (self.dt is not None and self.A is not None), "gate is dt and dt or A is none; expected both"),
            *must(
                (self.g is None) == (self.gate in (Gate.DT, Gate.NONE)),
                f"g is {self.g.value if self.g else 'none'} with gate={self.gate.value}; "
                "expected g if and only if gate is log, constant or slope",
            ),
            *must(not (self.seq_idx and self.ragged), f"seq_idx is yes and cu_seqlens is {self.cu_seqlens.value}; expected one of them"),
        ]


@dataclass(frozen=True, kw_only=True)
class ScanSpec(KernelSpec, ScanProblem):
    """A problem, and how one variant computes it. No choice here changes a bit of the result."""

    family: ClassVar[str] = OPERATOR
    template: ClassVar[str] = "chunk_scan/chunk_scan.cu.j2"
    word: ClassVar[str] = "scan"  # in names of kernels
    states_alone: ClassVar[bool] = False  # whether it computes the state from zeros, and no outputs
    table: ClassVar[Any] = KERNELS

    tile: int  # rows of headdim per block, 16 per walker
    stages: int = 3  # chunks in shared memory: the walkers', the mixers', and the chunks that are loading
    min_blocks: int = 1  # blocks per SM that ptxas must leave registers for
    pdl: Pdl = Pdl.OFF
    copiers: int = field(default=0, metadata=LATER)  # warps that only copy; 0: all warps copy
    parts: int = field(default=1, metadata=LATER)  # blocks that share a sequence; without a cluster, all sequences of a call share them

    @property
    def needs(self) -> Needs:
        elements = self.state_loads is Loads.ELEMENT
        whole = self.terms == 1
        mma = self.x.value if whole else "bf16"
        return Needs(
            math=True, matrices=whole, shared_pairs=not whole, copies=True, meetings=True, elements=elements, bytes=self.started, mma=mma
        )

    @property
    def order(self) -> tuple[str | int, ...]:
        return self.family, 1

    @property
    def cluster_blocks(self) -> int:
        """Parts form a cluster only if the last one overwrites the state that all begin with."""
        return self.parts if self.overwrites else 1

    @property
    def stays(self) -> bool:
        """Whether one block per SM loops over sequences. With warpgroups only."""
        return False

    @property
    def ends(self) -> bool:
        """Whether one of the blocks that share a sequence has its first and its last part. With warpgroups only."""
        return False

    @property
    def walkers(self) -> int:
        return self.tile // 16

    @property
    def threads_per_block(self) -> int:
        return 32 * (self.walkers + len(self.rows_of_mixers) + self.copiers)

    @property
    def rows_of_mixers(self) -> list[list[int]]:
        """M's four blocks of 16 rows, by mixer. The k-th block takes k + 1 times the first one's time; the first mixer also sums decays. A
        single copier takes the place of one."""
        return [[1], [2, 0], [3]] if self.copiers == 1 else [[0], [1], [2], [3]]

    @property
    def tiles(self) -> int:
        """Blocks per head."""
        return -(-self.headdim // self.tile)

    @property
    def walked(self) -> int:
        """Columns of a state that a warp holds, or a warpgroup."""
        return self.d_state

    @property
    def halves(self) -> int:
        """Warpgroups that hold a state's columns."""
        return self.d_state // self.walked

    @property
    def stem(self) -> str:
        shape = f"p{self.headdim}n{self.d_state}_{self.state.value}_{self.x.value}" + (f"_{self.gate.value}" if self.attention else "")
        numbers = {"k": self.parts > 1 and self.parts, "c": self.copiers, "s": self.stages, "b": self.min_blocks > 1 and self.min_blocks}
        how = self.divided_by + "".join(f"{letter}{n}" for letter, n in numbers.items() if n)
        return f"{self.word}_{shape}_{how}{'' if self.pdl is Pdl.OFF else '_pdl'}"

    @property
    def divided_by(self) -> str:  # in its name
        return f"t{self.tile}"

    # Rows of 16-bit numbers in shared memory are offset by 16 bytes, modulo 128: eight rows use all banks when they are read as matrices.
    # f32 rows are read in pairs, four rows at a time, or singly if the sum is over tokens.
    @property
    def row_words(self) -> int:
        """32-bit words from one token's B or C to the next one's."""
        return self.d_state // 2 + 4 if self.terms == 1 else self.d_state + 8

    @property
    def x_words(self) -> int:
        return self.tile // 2 + 4 if self.terms == 1 else self.tile + 4

    @property
    def mix_words(self) -> int:
        return CHUNK // 2 + 4 if self.terms == 1 else CHUNK + 8

    @property
    def mixes(self) -> int:
        """Chunks of M that have room. One stage never needs two, but only f32 lacks the room."""
        return 1 if self.stages == 1 and self.terms > 1 else 2

    @property
    def stage_words(self) -> int:
        """32-bit words of B, C, x and z of a chunk in shared memory."""
        return CHUNK * (2 * self.row_words + (2 if self.z else 1) * self.x_words)

    @property
    def dynamic_bytes(self) -> int:
        return 4 * (self.stages * self.stage_words + self.mixes * CHUNK * self.mix_words)

    @property
    def shared_bytes(self) -> int:
        return self.dynamic_bytes + SUMS * (5 if self.seq_idx else 4) * CHUNK * 4

    def violations(self, arch: Arch) -> list[str]:
        if problems := [
            *self.faults(),
            *must(self.tile % 16 == 0 and 16 <= self.tile <= 128, f"tile is {self.tile}; expected 16 … 128 in steps of 16"),
        ]:
            return problems
        return [
            *must(self.headdim % self.tile == 0, f"tile is {self.tile}; expected a divisor of headdim {self.headdim}"),
            *must(
                self.d_state <= 64 or self.tile <= 64,
                f"tile is {self.tile} with d_state {self.d_state}; expected at most 64 above a d_state of 64, for enough registers",
            ),
            *must(
                1 <= self.stages <= 8 and self.min_blocks >= 1,
                f"stages is {self.stages} and min_blocks {self.min_blocks}; expected 1 … 8, and 1 or more",
            ),
            *must(0 <= self.copiers <= 4, f"copiers is {self.copiers}; expected 0 … 4"),
            *must(
                not self.copiers or self.stages > 2,
                f"stages is {self.stages} with {self.copiers} copiers; expected 3 or more, or copiers=0",
            ),
            *must(1 <= self.parts <= MOST_PARTS, f"parts is {self.parts}; expected 1 … {MOST_PARTS}"),
            *must(
                self.parts == 1 or self.stages > 1,
                f"stages is 1 with {self.parts} parts; expected 2 or more, to load a chunk while another is scanned",
            ),
            *must(
                arch >= SM90 or self.cluster_blocks == 1,
                f"parts is {self.parts} on {arch}; expected 1 before sm_90: final states may overwrite initial ones that other "
                "parts still read",
            ),
            *shared_violations(arch, self.shared_bytes),
            *self.arch_violations(arch, "asynchronous copies and bf16"),
        ]

    @property
    def g_by_token(self) -> bool:
        return self.gate is Gate.LOG

    @property
    def mapped(self) -> dict[str, int]:
        """Operands whose tiles are copied by tensor maps, and how many columns at once."""
        return {}

    def roles(self) -> list[str]:
        """The operands, as the kernel names them."""
        return self.operands()

    def parameters(self) -> list[Param]:
        """Pointers come first."""
        strides = KERNELS.stride_params(self)
        maps = [Param.tiles(f"{operand}_tiles") for operand in self.mapped]
        wide = [Param.i64("slots"), Param.i64("pad_slot_id")] if self.index is not Index.NONE else []
        wide += [p for p in strides if p.code == "q"]
        narrow = [p for p in strides if p.code != "q"]
        limits = [Param.f32("dt_low"), Param.f32("dt_high")] if self.dt_limit else []
        scale = [Param.f32("scale")] if self.attention else []
        counts = ["tokens", "heads", "group_heads", *(["positions"] if self.marked else [])]
        counts += ["items"] if self.stays else []
        counts += ["parts"] if self.parts > 1 and self.cluster_blocks == 1 else []
        return [*KERNELS.pointers(self), *maps, *wide, *map(Param.u32, counts), *narrow, *limits, *scale]

    def constants(self) -> dict[str, Any]:
        return {
            **self.state_constants(),
            "stepped": {Gate.DT: "dt", Gate.LOG: "g"}.get(self.gate, ""),  # the operand that gives the decay at each token
            "softplus": self.dt_softplus,
            "sigmoid": False,
            "silu": self.z,
            "mixers": len(self.rows_of_mixers),
            "rows_of_mixers": self.rows_of_mixers,
            "copiers": self.copiers,
            "chunk": CHUNK,
            "sums": SUMS,
            "passing": PASSING,
            "dwindling": math.log2(1 - PASSING),
            "own": "",  # prefix of the names of operands that begin with a block's sequence
            "own_columns": "kState" if self.halves == 1 else "kOwn",  # of a state, of one warpgroup
            "guarded": self.headdim % self.tile != 0,  # a head's last block has fewer rows
        }
