"""mamba3_chunk_scan with warpgroups, for one rank: roles as in roles.py, and the products of sm_90a, which read operands directly from
shared memory.

Two warpgroups make the rows of B and C ready, in the layout of these products. One computes the chunk's numbers and M. One holds the state
in f32, in the accumulators, from the first chunk to the last; it weights x by each row's decay to the chunk's end, and makes the outputs.
It computes y^T, so that the rounded state is the first operand and never passes through shared memory. D is added on M's diagonal.

A kernel before (prepare.py) makes the rows' norms, and the tokens' angles from their chunk's start. The warps that make rows add the sums
of earlier chunks.

Warpgroups sum in another order than mma.sync, so the bits differ from the other variants'. A problem has one order only: the rules
prefer warpgroups wherever they are legal, which does not depend on sequences, heads or lengths. Spans change no bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar

from ...compile.occupancy import LIMITS, SHARED_RESERVED
from ...spec.kernel import LATER, Arch, KernelSpec, Loads, Needs, must
from .operands import OPERANDS
from .prepare import Mamba3PrepareSpec
from .problem import ROWS, Mamba3PromptProblem
from .roles import NUMBERS, Mamba3RolesSpec

TILE = 64  # rows of a state, that a warpgroup holds
COLUMNS = (64, 128)  # of a state
LEAD = 0.55  # the share of a chunk's time that its state takes
BLOCK = ROWS * 32  # 32-bit words of 64 columns of a chunk


@dataclass(frozen=True, kw_only=True)
class Mamba3WarpgroupsSpec(Mamba3RolesSpec):
    """A problem, and how warpgroups with roles compute it. No choice here changes a bit of the result."""

    family: ClassVar[str] = "mamba3_chunk_scan_warpgroups"
    template: ClassVar[str] = "mamba3_chunk_scan/warpgroups/scan.cu.j2"
    word: ClassVar[str] = "mamba3_scan_wg"
    by_warpgroups: ClassVar[bool] = True
    STAGES: ClassVar[tuple[int, ...]] = (2, 3)

    stages: int = field(default=3, metadata=LATER)

    @property
    def prepared(self) -> bool:  # type: ignore[override]
        return self.rotates or self.row_norm is not None

    @property
    def ahead(self) -> tuple[KernelSpec, ...]:
        """The kernel that makes angles and norms, if there are any."""
        own = {f.name: getattr(self, f.name) for f in fields(Mamba3PromptProblem)} | {"segments": 1}
        return (Mamba3PrepareSpec(**own, pdl=self.pdl),) if self.prepared else ()

    @property
    def needs(self) -> Needs:
        return Needs(
            math=True, circle=self.rotates, matrices=True, copies=True, barriers=True, meetings=True,
            places=True, placed_pairs=True, placed_pair_stores=True,
            elements=self.state_loads is Loads.ELEMENT, bytes=self.started, mma=self.x.value,
            warpgroups=tuple(sorted({ROWS, self.d_state})), pinned=True, own_thread=True,
        )  # fmt: skip

    @property
    def order(self) -> tuple[str | int, ...]:
        return (self.family,)

    def operands(self) -> list[str]:
        """Tensor arguments in order. The kernel before it takes the angles' logits."""
        return [name for name in OPERANDS.of(self) if name != "angle"]

    @property
    def lead(self) -> float:
        return LEAD

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers of threads that hold the state, that compute M, and that make rows."""
        return 200, 72, 120

    @property
    def stage_words(self) -> int:
        """C, B, x, and z with the pitch of the other variants; a multiple of 1024 bytes."""
        words = (2 * (self.d_state // TILE) + 1) * BLOCK + (ROWS * self.x_words if self.z else 0)
        return -(-words // 256) * 256

    @property
    def words(self) -> dict[str, int]:
        return {
            "stages": self.stages * self.stage_words,
            "M": 2 * BLOCK,
            "weighed": BLOCK,
            "y": BLOCK,
            "weights": 2 * self.d_state if self.row_bias else 0,
        }

    @property
    def shared_bytes(self) -> int:
        """Also the arrays that the text declares, and padding to begin at a multiple of 1024."""
        own = NUMBERS * (8 * ROWS + 1) + (self.stages + 3) * self.d_state + 2 * (self.tile + self.angles) + 64
        return self.dynamic_bytes + 4 * own + 1024

    def violations(self, arch: Arch) -> list[str]:
        if problems := super().violations(arch):
            return problems
        most = LIMITS[90].shared - SHARED_RESERVED
        return [
            *must(str(arch) == "sm_90a", f"arch is {arch}; expected sm_90a for warpgroup products"),
            *must(
                self.rank == 1 and self.mimo is None,
                f"rank is {self.rank} {'without' if self.mimo is None else 'with'} mimo_x; expected 1 without",
            ),
            *must(self.parts == 1, f"parts is {self.parts}; expected 1, with warpgroups"),
            *must(self.headdim == TILE, f"headdim is {self.headdim}; expected {TILE}, the rows of a warpgroup"),
            *must(self.d_state in COLUMNS, f"d_state is {self.d_state}; expected 64 or 128"),
            *must(self.copy == 16, f"x, B, C, z and out are contiguous and aligned for {self.copy} bytes; expected 16"),
            *must(self.norm_weight is None, "norm_weight is given; expected none: a row of y belongs to four warps"),
            *must(self.shared_bytes <= most, f"a block uses {self.shared_bytes} bytes of shared memory; expected at most {most} on {arch}"),
        ]
