"""chunk_scan with warpgroups: the tensor cores of sm_90a, which read operands directly from shared memory.

A block has four warpgroups. The first loads C, B, x and z of chunks, and dt, and computes the decays. Two prepare every other chunk each:
M, x weighted by each token's decay to the chunk's end, and the store of y from shared memory. The fourth scans: it holds 64 rows of the
state in f32, in the accumulators, from the first chunk to the last. It computes y^T, so that the rounded state is the first operand, and
the state never passes through shared memory. States at listed positions are copies of it, each advanced by a separate product.

A state of 256 columns takes two warpgroups of 128 each, and one prepares every chunk. Each sums its part of y over its own columns; they
exchange halves of these sums through shared memory, and each stores y of half of the tokens. A headdim that is not a multiple of 64
takes another block for its last rows, whose tensor map returns zeros for the missing rows.

`stays` is for many short sequences: one block per SM loops over sequences, and no bit changes. Its loads and preparation run early across
sequences too, so that the scan waits neither at the beginning of a sequence nor at its end. The fourth loading warp lists the block's work,
the longest of 32 sequences first.

`parts` blocks of a cluster share a sequence: each computes the state of its own part from zeros, reads the states of the earlier parts, and
scans its part again. The result is exact, but its order of summation differs.
`ends`, which the rules always set, lets the first block scan the first part in the meantime. The others continue from its state, and the
first block then takes the last part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

from ...compile.occupancy import LIMITS, SHARED_RESERVED
from ...spec.kernel import LATER, Arch, Loads, Needs, Pdl, must
from ...spec.variants import spec_of, trials
from .spec import CHUNK, SMS, ScanProblem, ScanSpec

ROWS = 64  # of a state, that a warpgroup holds
THREADS = 512
COLUMNS = 128  # of a state, that a warpgroup holds at most
# of threads that load, prepare and scan: there are two warpgroups of the second kind, and all threads begin with 128
REGISTERS = (64, 120, 208)
REGISTERS_BY_HALVES = (40, 120, 176)  # the same with two scanning warpgroups
# (blocks of a sequence, parts): this number of clusters of `parts` blocks is on a card of 132 SMs at once. More clusters wait.
PARTS = ((8, 8), (16, 6), (30, 4), (36, 3))
MOST = 8  # parts: the blocks of a cluster
LISTED = 8  # items that a block that stays lists at once: with sequences of one chunk each, its roles differ by at most 6 items
LEAD = (1, 2)  # chunks that the first block scans, and that others sum in this time. For 16 and 24 heads 3 : 7 and 1 : 3 are slower
LEAST = 8  # chunks of a part: with fewer, the exchange between parts takes longer than their work
UNDIVIDED = LEAST + LEAST * LEAD[0] // LEAD[1]  # chunks of the longest sequence that no blocks divide
# Blocks of a sequence that two parts divide, if states have 256 columns or headdim is not a multiple of 64. An H200 takes 0.69 of the time
# for 4096 tokens of 24 x 128 x 256, and 0.72 for 48 x 32 x 128. Other sizes keep the bits that they have.
HALVED = 66
SHORT, SHORT_PACKED = 2048, 1024  # tokens of a call's sequences, on average with which blocks stay. Packed ones of 2048 gain 1 % or lose 4


@dataclass(frozen=True, kw_only=True)
class WarpgroupScanSpec(ScanSpec):
    """A problem, and how warpgroups compute it. Only `parts` and `ends` change bits of the result."""

    family: ClassVar[str] = "chunk_scan_warpgroups"
    template: ClassVar[str] = "chunk_scan/warpgroups/scan.cu.j2"
    word: ClassVar[str] = "scan_wg"

    tile: int = ROWS
    stages: int = 4
    parts: int = 1  # blocks that divide a sequence
    stays: bool = field(default=False, metadata=LATER)  # one block per SM loops over sequences
    ends: bool = field(default=False, metadata=LATER)  # the first of the blocks that share a sequence has its first and its last part

    @property
    def needs(self) -> Needs:
        columns = tuple(sorted({CHUNK, self.walked, *([CHUNK // 2] if self.halves > 1 else [])}))
        return Needs(
            math=True, matrices=True, copies=self.ragged, barriers=True, maps=True,
            box_prefetches=self.halves > 1, uneven=self.headdim % ROWS != 0,
            elements=self.state_loads is Loads.ELEMENT,
            bytes=self.started, meetings=self.parts > 1 or self.halves > 1, warpgroups=columns, mma=self.x.value,
        )  # fmt: skip

    @property
    def threads_per_block(self) -> int:
        return THREADS

    @property
    def order(self) -> tuple[str | int, ...]:
        return (self.family, self.parts, "ends") if self.ends else (self.family, self.parts)

    @property
    def cluster_blocks(self) -> int:
        return self.parts

    @property
    def divided_by(self) -> str:
        return "stay" if self.stays else "k1" if self.parts == 1 else ""

    @property
    def walked(self) -> int:
        return min(self.d_state, COLUMNS)

    # Rows of shared memory are 128 bytes.

    @property
    def row_words(self) -> int:
        return self.d_state // 2

    @property
    def x_words(self) -> int:
        return self.tile // 2

    @property
    def mix_words(self) -> int:
        return CHUNK // 2

    @property
    def dynamic_bytes(self) -> int:
        """Bytes of stages, two M, two weighted x and two y; or, if two warpgroups hold the state, two buffers for their exchange."""
        return super().dynamic_bytes + 2 * CHUNK * self.tile * (2 + (2 if self.halves == 1 else 4))

    @property
    def shared_bytes(self) -> int:
        """Also per-token numbers of each stage, barriers, and padding to begin at a multiple of 1024."""
        listed = LISTED * 80 if self.stays else 0
        return self.dynamic_bytes + self.stages * CHUNK * (8 + 4 + 4 + 4 + 16 + 4 * self.seq_idx) + 256 + listed + 1024

    def violations(self, arch: Arch) -> list[str]:
        if problems := self.faults():
            return problems
        most = LIMITS[90].shared - SHARED_RESERVED
        return [
            *must(str(arch) == "sm_90a", f"arch is {arch}; expected sm_90a for warpgroup products"),
            *must(self.tile == ROWS, f"tile is {self.tile}; expected {ROWS}, the rows of a warpgroup"),
            *must(self.terms == 1, f"x is {self.x.value}; expected bf16 or f16, for warpgroup products"),
            *must(not self.D_rows, "D_rows is yes; expected no: D is added on the diagonal of M, one number per head"),
            *must(self.d_state in (64, 128, 256), f"d_state is {self.d_state}; expected 64, 128 or 256"),
            *must(
                self.halves == 1 or self.stages == 2,
                f"stages is {self.stages} with d_state {self.d_state}; expected 2, for enough shared memory",
            ),
            *must(
                self.halves == 1 or self.parts == 1 or self.ends,
                f"ends is no with {self.parts} parts and d_state {self.d_state}; expected yes",
            ),
            *must(self.copy == 16, f"x, B, C, z and out are contiguous and aligned for {self.copy} bytes; expected 16"),
            *must(
                self.stages in (2, 4, 6) and self.min_blocks == 1,
                f"stages is {self.stages} and min_blocks {self.min_blocks}; expected 2, 4 or 6, and 1",
            ),
            *must(1 <= self.parts <= MOST, f"parts is {self.parts}; expected 1 … {MOST}"),
            *must(
                self.parts == 1 or not self.stays,
                f"stays is yes with {self.parts} parts; expected no, since clustered blocks are not persistent",
            ),
            *must(self.parts > 1 or not self.ends, "ends is yes with parts=1; expected no, or 2 or more parts"),
            *must(self.shared_bytes <= most, f"a block uses {self.shared_bytes} bytes of shared memory; expected at most {most} on {arch}"),
        ]

    @property
    def mapped(self) -> dict[str, int]:
        rows = self.tile if self.headdim % self.tile == 0 else 0
        return {"C": self.d_state, "B": self.d_state, "x": rows} | ({"z": rows} if self.z else {})

    def _walker_out(self) -> str:
        """The start of an item's rows of y."""
        if not self.stays:
            return "out"
        start = "item.first * out_token" if self.ragged else "i64(item.sequence) * out_batch"
        return f"out + {start} + u64(item.head) * out_head + item.tile * kTile"

    def constants(self) -> dict[str, Any]:
        return super().constants() | {
            "registers": REGISTERS if self.halves == 1 else REGISTERS_BY_HALVES,
            "at_half": "" if self.halves == 1 else " + half * (kOwn / 64 * kBlock)",  # where a warpgroup's columns of B begin
            "own_warp": "const u32 own_warp = warp - 12;" if self.halves == 1 else "const u32 own_warp = warp % 4, half = warp / 4 - 2;",
            "walker_out": self._walker_out(),
            "least": LEAST,
            "lead": LEAD,
            "listed": LISTED,
            "own": "own_" if self.stays else "",
        }


def tiles_of(problem: ScanProblem) -> int:
    """Blocks per head."""
    return -(-problem.headdim // ROWS)


def parts_of(problem: ScanProblem, heads: int) -> int:
    """Blocks that divide a sequence: several where the heads of one leave most of the card idle, or where a call asks for them."""
    blocks = heads * tiles_of(problem)
    halved = blocks <= HALVED and (problem.d_state > COLUMNS or problem.headdim % ROWS != 0)
    return min(problem.segments, MOST) or next((parts for most, parts in PARTS if blocks <= most), 2 if halved else 1)


@lru_cache(maxsize=1024)
def may_stay(problem: ScanProblem, heads: int) -> bool:
    """Whether blocks stay where a call's sequences are many and short: warpgroups serve it, and no packed sequence is divided."""
    whole = parts_of(problem, heads) == 1 or not problem.ragged
    return whole and not spec_of(WarpgroupScanSpec, problem, stages=2, stays=True).violations(Arch(90, "a"))


def many_short(problem: ScanProblem, heads: int, sequences: int, tokens: int) -> bool:
    """Whether a call needs more blocks than there are SMs, and its sequences, of `tokens` tokens in all, are short. If blocks share longer
    sequences, only a batch is known to have none."""
    blocks, most = sequences * heads * tiles_of(problem), SHORT_PACKED if problem.ragged else SHORT
    if parts_of(problem, heads) > 1:
        most = UNDIVIDED * CHUNK
    return blocks > SMS[90] and tokens <= most * sequences and may_stay(problem, heads)


def warpgroup_space(problem: ScanProblem, arch: Arch) -> Iterator[ScanSpec]:
    """Every legal variant within the axes that are worth a trial, except parts, which change bits."""
    return trials(WarpgroupScanSpec, problem, arch, {"stages": (2, 4, 6), "stays": (False, True), "pdl": Pdl})


def by_warpgroups(problem: ScanProblem, heads: int, pdl: Pdl) -> Iterator[tuple[str, ScanSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first: parts where heads are few, blocks that stay where sequences are short."""
    stays, parts = problem.short, 1 if problem.short else parts_of(problem, heads)
    if not stays:
        most = f"it is for more than {SMS[90]} heads of sequences, of at most {SHORT} tokens each (packed: {SHORT_PACKED} on average)"
        divided = f"{parts} blocks share a sequence of more than {UNDIVIDED} chunks"
        yield "warpgroups, blocks that stay", None, divided if parts > 1 else most
    form = f"{parts} parts, " if parts > 1 else "blocks that stay, " if stays else ""
    for stages in (4, 2):  # an even number: each warpgroup that prepares then sees all uses of half of them
        spec = spec_of(WarpgroupScanSpec, problem, parts=parts, ends=parts > 1, stays=stays, stages=stages, pdl=pdl)
        yield f"warpgroups, {form}{stages} stages", spec, ""
