"""mamba3_chunk_scan: Mamba-3 over whole sequences, SISO and MIMO, in chunks of 64 rows on the tensor cores.

A token is one row for each of R ranks, so a chunk has 64 // R tokens. With delta = (1 - trap) dt and gamma = trap dt, the pair (v_t, k_t)
enters the state twice: with gamma_t, and one token later with delta_(t+1), before that token's decay. Within a chunk both are one weight

    weight_t = gamma_t + delta_(t+1), and gamma_t alone for the chunk's last token        own_t = gamma_t
    M_ij = (q_i . k_j) exp(s_i - s_j) weight_j for rows of earlier tokens, (q_i . k_j) own_i for rows of one token
    y_i = exp(s_i) q_i S^T + sum_j M_ij v_j + D v_i        S <- exp(s_last) S + sum_j exp(s_last - s_j) weight_j v_j k_j^T

with s the running sum of A dt within the chunk. The next chunk begins with S + delta_first v_last k_last^T, in f32. A call that begins from
states does the same, so a sequence cut at a multiple of the chunk keeps its bits.

A block scans a head of one sequence: it norms, biases and rotates the chunk's rows of B and C in shared memory, and no other block reads
its states. Angles are sums within a chunk, added to the angle at its start, from -pi to pi. Rotated rows never go to memory. Warpgroups
(warpgroups.py) have a kernel before them, which makes angles and norms.
Bytes per token and head: 4 P of x and out, 2 P of z, and 4 N R / (heads of a group) of B and C.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...compile.occupancy import LIMITS, SHARED_RESERVED
from ...spec.kernel import LATER, SM90, Arch, Index, KernelSpec, Loads, Needs, Param, Pdl, must
from .operands import OPERANDS
from .problem import ROWS, Mamba3PromptProblem

OPERATOR = "mamba3_chunk_scan"
WARPS = 8


@dataclass(frozen=True, kw_only=True)
class Mamba3ScanSpec(KernelSpec, Mamba3PromptProblem):
    """A problem, and how one variant computes it. Only `parts` changes bits of the result."""

    family: ClassVar[str] = OPERATOR
    template: ClassVar[str] = "mamba3_chunk_scan/mamba3_chunk_scan.cu.j2"
    word: ClassVar[str] = "mamba3_scan"  # in names of kernels
    by_roles: ClassVar[bool] = False  # whether a warp does one part of every chunk (roles.py)
    by_warpgroups: ClassVar[bool] = False  # whether warpgroups multiply (warpgroups.py)
    spans: ClassVar[int] = 1  # of a sequence (roles.py)
    prepared: ClassVar[bool] = False  # whether a kernel before it makes angles and norms (warpgroups.py)
    prepares: ClassVar[bool] = False
    state_warps: ClassVar[int] = WARPS  # that hold the state

    stages: int = 2  # chunks in shared memory: with 2, one is loaded while another one is scanned
    min_blocks: int = 1  # blocks per SM that ptxas must leave registers for
    pdl: Pdl = Pdl.OFF
    tiles: int = field(default=1, metadata=LATER)  # blocks that share the rows of a head; each makes the rows of B and C ready
    parts: int = field(default=1, metadata=LATER)  # of a sequence, at most, each by a block of a cluster: the problem's segments, or 1

    @property
    def needs(self) -> Needs:
        return Needs(
            math=True, circle=self.rotates, matrices=True, copies=True, elements=self.state_loads is Loads.ELEMENT, bytes=self.started,
            mma=self.x.value, peers=self.parts > 1,
        )  # fmt: skip

    @property
    def order(self) -> tuple[str | int, ...]:
        return (self.parts,)

    @property
    def threads_per_block(self) -> int:
        return 32 * WARPS

    @property
    def terms(self) -> int:
        """16-bit terms of an operand of a product."""
        return 1

    @property
    def tile(self) -> int:
        """Rows of a block."""
        return self.headdim // self.tiles

    @property
    def cluster_blocks(self) -> int:
        """The parts of a sequence; or blocks of a head, if one of them replaces states that the others read."""
        return max(self.parts, self.tiles * self.spans if self.started else 1)

    @property
    def row_warps(self) -> int:
        """Warps that divide a block's rows of the state, 16 each."""
        return self.tile // 16

    @property
    def column_warps(self) -> int:
        """Warps that divide the state's columns."""
        found = (n for n in range(1, self.state_warps // self.row_warps + 1) if self.d_state // 16 % n == 0)
        return max(found, default=1)

    @property
    def stem(self) -> str:
        shape = f"p{self.headdim}n{self.d_state}r{self.rank}_{self.state.value}_{self.x.value}"
        how = (f"t{self.tile}" if self.tiles > 1 else "") + f"s{self.stages}" + (f"b{self.min_blocks}" if self.min_blocks > 1 else "")
        how += (f"k{self.parts}" if self.parts > 1 else "") + (f"d{self.spans}" if self.spans > 1 else "")
        return f"{self.word}_{shape}_{how}{'' if self.pdl is Pdl.OFF else '_pdl'}"

    # Rows of 16-bit numbers in shared memory are 16 bytes apart, modulo 128: eight rows use all banks when they are read as matrices.
    @property
    def row_words(self) -> int:
        """32-bit words from one row of B or C to the next one."""
        return self.d_state // 2 + 4

    @property
    def x_words(self) -> int:
        return self.tile // 2 + 4

    @property
    def stage_words(self) -> int:
        """32-bit words of C, B, x and z of a chunk. Rows of x are products' operands, if there are no mimo_x."""
        return 2 * ROWS * self.row_words + (2 if self.z else 1) * self.tokens_of_x * self.x_words

    @property
    def tokens_of_x(self) -> int:
        return self.chunk if self.mimo else ROWS

    @property
    def words(self) -> dict[str, int]:
        """32-bit words of each array in dynamic shared memory, in order."""
        return {
            "stages": self.stages * self.stage_words,
            "V": ROWS * self.x_words if self.mimo else 0,
            "M": ROWS * (ROWS // 2 + 4),
            "state": max(self.tile * self.row_words, ROWS * (self.tile + 4)),  # rounded; then y
            "theta": self.chunk * self.angles,
            "weights": 2 * self.rank * self.d_state if self.row_bias else 0,
        }

    @property
    def dynamic_bytes(self) -> int:
        return 4 * sum(self.words.values())

    @property
    def shared_bytes(self) -> int:
        """Also the arrays that the text declares: numbers of rows and tokens, angles, weights of rows, and the pending token."""
        factors = (1 + bool(self.z) + (not self.by_rank)) * self.rank * self.tile if self.mimo else 0
        own = 11 * ROWS + (WARPS + 2) * self.angles + (self.rank + 2) * self.d_state + 2 * self.tile + factors + 8
        return self.dynamic_bytes + 4 * own

    def violations(self, arch: Arch) -> list[str]:
        if problems := [*self.faults(), *must(self.tiles in (1, 2, 4, 8), f"tiles is {self.tiles}; expected 1, 2, 4 or 8")]:
            return problems
        most = LIMITS[arch.number].shared - SHARED_RESERVED if arch.number in LIMITS else 48 << 10
        return [
            *must(self.stages in (1, 2) or self.by_warpgroups, f"stages is {self.stages}; expected 1 or 2"),
            *must(
                self.headdim % (16 * self.tiles) == 0,
                f"tiles is {self.tiles} of headdim {self.headdim}; expected a divisor that leaves multiples of 16",
            ),
            *must(self.tiles == 1 or self.norm_weight is None, f"tiles is {self.tiles} with norm_weight; expected 1, to sum over a head"),
            *must(
                arch >= SM90 or self.cluster_blocks == 1,
                f"tiles is {self.tiles} on {arch}; expected 1 before sm_90: one block replaces states that the others read",
            ),
            *must(self.parts in (1, self.segments), f"parts is {self.parts}; expected 1 or the problem's segments {self.segments}"),
            *must(
                self.parts == 1 or self.tiles == 1,
                f"parts is {self.parts} with tiles {self.tiles}; expected 1 of either, as each forms clusters",
            ),
            *must(
                arch >= SM90 or self.parts == 1, f"parts is {self.parts} on {arch}; expected 1 before sm_90, which has the first clusters"
            ),
            *must(self.min_blocks >= 1, f"min_blocks is {self.min_blocks}; expected 1 or more"),
            *must(self.shared_bytes <= most, f"a block uses {self.shared_bytes} bytes of shared memory; expected at most {most} on {arch}"),
            *must(arch >= Arch(80), f"arch is {arch}; expected sm_80 or later for asynchronous copies and bf16"),
            *must(arch >= SM90 or self.pdl is Pdl.OFF, f"arch is {arch}; expected sm_90 or later, or pdl=off"),
        ]

    def operands(self) -> list[str]:
        """Tensor arguments in order."""
        return OPERANDS.of(self)

    def parameters(self) -> list[Param]:
        """Pointers come first."""
        names = self.operands()
        strides = [(Param.i64 if width == "i64" else Param.u32)(f"{name}_{axis}") for name, axis, width in OPERANDS.strides(self, names)]
        wide = [Param.i64("slots"), Param.i64("pad_slot_id")] if self.index is not Index.NONE else []
        wide += [p for p in strides if p.code == "q"]
        narrow = [p for p in strides if p.code != "q"]
        numbers = ["eps"] if self.row_norm is not None or self.norm_weight is not None else []
        numbers += ["A_floor"] if self.rate.raw else []
        counts = ("tokens", *(("all_tokens",) if self.prepared else ()), "heads", "group_heads")
        return [*OPERANDS.pointers(self, names), *wide, *map(Param.u32, counts), *narrow, *map(Param.f32, numbers)]

    def constants(self) -> dict[str, Any]:
        starts = dict(zip(self.words, _sums(self.words.values()), strict=True))
        return {
            "vector_state": self.state_loads is Loads.VECTOR,
            "pooled": self.index is not Index.NONE,
            "past": "pool" if self.started else "initial" if self.initial else "",  # holds the states before the first token
            "rows": ROWS,
            "place": "share" if self.by_roles else "place",  # the name of a block's part or span of a sequence
            "chunk": self.chunk,
            "at": starts,
            "rate": self.rate.value,
            "softplus": self.dt_softplus or self.rate.value == "softplus",
            "sigmoid": self.trap_sigmoid,
            "silu": self.z,
            "halves": self.rotates and self.rotary.value == "halves",
        }


def _sums(sizes: Any) -> list[int]:
    """The sum of all sizes before each one."""
    found, total = [], 0
    for size in sizes:
        found.append(total)
        total += size
    return found
