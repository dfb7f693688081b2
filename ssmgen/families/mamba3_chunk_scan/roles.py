"""mamba3_chunk_scan with three roles of warps: a warp does one part of every chunk, and parts of neighbouring chunks run at the same time.

Eight warps make a chunk ready: they load rows of B and C into registers one chunk early, norm, bias and rotate them, and store them to
shared memory; they also add up the angles. Four warps hold the state, 16 rows each, and round it for the outputs. Four warps compute M,
16 rows each, which stay in registers as an operand of M V, and the outputs. The roles meet at barriers in shared memory, with room for
two chunks between them. The sums have the order of the other variants, so the bits are the same.

A warp that holds the state has at most 64 of its numbers per thread, and 512 threads have 128 registers each. Larger states, and
architectures before sm_90, have the variants of spec.py.

Several blocks may share a sequence of a head, in one of two ways.

spans: each block has the outputs of one span of chunks. It first scans all chunks before its span, without q, M and outputs: makers make
only k, and writers only keep the count of their barriers. Blocks share nothing. A whole sequence has the same bits.
parts: the blocks of a cluster have one part each, as a call's `segments` ask. All but the last one first compute the state that their part
leaves, by the same means. Then the makers join the states of earlier parts, read from the shared memory of the other blocks, and a
second pass makes the outputs. Parts by the variants of spec.py have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ...compile.occupancy import LIMITS, SHARED_RESERVED
from ...spec.kernel import LATER, Arch, Loads, Needs, must
from .problem import ROWS
from .spec import Mamba3ScanSpec
from .times import LEAD, MOST_SPANS, span_starts

MOST_COLUMNS = 128  # of a state: the norm's sums have the order of the other variants up to here
MOST_TILE = 64  # rows of a block: a warp that holds the state has 16, and at most 64 numbers per thread
NUMBERS, KEPT = 4, 3  # chunks whose numbers, and whose last k, are in shared memory


@dataclass(frozen=True, kw_only=True)
class Mamba3RolesSpec(Mamba3ScanSpec):
    """A problem, and how warps with roles compute it. No choice here changes a bit of the result."""

    family: ClassVar[str] = "mamba3_chunk_scan_roles"
    template: ClassVar[str] = "mamba3_chunk_scan/roles/scan.cu.j2"
    word: ClassVar[str] = "mamba3_scan_roles"
    by_roles: ClassVar[bool] = True
    HOLDERS: ClassVar[int] = 4
    WRITERS: ClassVar[int] = ROWS // 16
    MAKERS: ClassVar[int] = 8
    STAGES: ClassVar[tuple[int, ...]] = (2,)
    state_warps: ClassVar[int] = HOLDERS

    stages: int = field(default=2, metadata=LATER)
    spans: int = field(default=1, metadata=LATER)  # type: ignore[misc]  # blocks that share a sequence of a head

    @property
    def needs(self) -> Needs:
        return Needs(
            math=True, circle=self.rotates, matrices=True, copies=True, barriers=True, meetings=True, registers=True,
            places=True, placed_pairs=True, placed_pair_stores=True, shared_quads=True,
            elements=self.state_loads is Loads.ELEMENT, bytes=self.started, mma=self.x.value, peers=self.parts > 1,
            pinned=True, own_thread=self.parts > 1,
        )  # fmt: skip

    @property
    def threads_per_block(self) -> int:
        return 32 * (self.HOLDERS + self.WRITERS + self.MAKERS)

    @property
    def stage_words(self) -> int:
        """Also V, the rows of x with their factors."""
        return super().stage_words + (ROWS * self.x_words if self.mimo else 0)

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers of holders', writers' and makers' threads, which begin with 128. Only these split them without spills, by the lock's
        compilers: others do for one architecture or compiler less."""
        if self.parts > 1 or self.spans > 1:
            return 120, 88, 152
        return {1: (104, 104, 152), 2: (128, 88, 144)}.get(self.rank, (112, 96, 152))

    @property
    def lead(self) -> float:
        """The share of a chunk's time that its state takes."""
        return LEAD

    @property
    def span_starts(self) -> str:
        """An expression of where `span` begins, in 65536ths of a sequence."""
        later = [f"span == {span} ? {round(65536 * start)} : " for span, start in enumerate(span_starts(self.spans, self.lead)) if span]
        return "".join(later) + "0"

    @property
    def joined_columns(self) -> int:
        """Columns of S of a warp that makes rows, when it joins the states of parts."""
        return self.d_state // max(n for n in range(1, self.MAKERS // self.row_warps + 1) if self.d_state // 16 % n == 0)

    @property
    def turn_words(self) -> int:
        """32-bit words of a token's sines."""
        return -(-self.angles // 4) * 4

    @property
    def words(self) -> dict[str, int]:
        return {
            "stages": self.stages * self.stage_words,
            "state": 2 * self.tile * self.row_words,  # rounded, of two chunks
            "y": ROWS * (self.tile + 8),
            "turns": 2 * self.chunk * self.turn_words + (8 if self.rotates else 0),
            "weights": 2 * self.rank * self.d_state if self.row_bias else 0,
            "log": 4 if self.parts > 1 else 0,
        }

    @property
    def shared_bytes(self) -> int:
        factors = (1 + bool(self.z) + (not self.by_rank)) * self.rank * self.tile if self.mimo else 0
        numbers = NUMBERS * (5 * ROWS + 1) + (2 + 2 * self.MAKERS) * self.angles
        own = numbers + (KEPT * self.rank + 2) * self.d_state + 3 * self.tile + factors + 64
        return self.dynamic_bytes + 4 * own

    def violations(self, arch: Arch) -> list[str]:
        if problems := super().violations(arch):
            return problems
        most = LIMITS[arch.number].shared - SHARED_RESERVED if arch.number in LIMITS else 48 << 10
        return [
            *must(arch.suffix == "a", f"arch is {arch}; expected sm_90a or sm_100a, on which warps change their numbers of registers"),
            *must(1 <= self.spans <= MOST_SPANS, f"spans is {self.spans}; expected 1 … {MOST_SPANS}"),
            *must(self.tiles == 1, f"tiles is {self.tiles}; expected 1, with warps of several roles"),
            *must(self.spans == 1 or self.parts == 1, f"spans is {self.spans} with parts {self.parts}; expected 1 of either"),
            *must(
                self.stages in self.STAGES,
                f"stages is {self.stages}; expected {' or '.join(map(str, self.STAGES))}, with warps of several roles",
            ),
            *must(self.min_blocks == 1, f"min_blocks is {self.min_blocks}; expected 1: a block has all registers of an SM"),
            *must(self.d_state <= MOST_COLUMNS, f"d_state is {self.d_state}; expected at most {MOST_COLUMNS}, with warps of several roles"),
            *must(self.tile <= MOST_TILE, f"a block has {self.tile} rows; expected at most {MOST_TILE}, with warps of several roles"),
            *must(self.shared_bytes <= most, f"a block uses {self.shared_bytes} bytes of shared memory; expected at most {most} on {arch}"),
        ]
