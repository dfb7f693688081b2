"""slot_copy: reads and writes back the same slots of a pool, in place. The ceiling that decode kernels are measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...spec.kernel import SM90, Arch, KernelSpec, Needs, Param, Pdl, must
from .operands import OPERANDS


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotCopySpec(KernelSpec):
    family: ClassVar[str] = "slot_copy"
    template: ClassVar[str] = "slot_copy/slot_copy.cu.j2"
    word: ClassVar[str] = "u32"  # the element type of copies
    table: ClassVar[Any] = OPERANDS

    slot_bytes: int
    threads: int = 128
    min_blocks: int = 0
    pdl: Pdl = Pdl.OFF

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def threads_per_block(self) -> int:
        return self.threads

    @property
    def blocks_per_slot(self) -> int:
        return self.slot_bytes // (16 * self.threads)

    def violations(self, arch: Arch) -> list[str]:
        return [
            *must(self.threads % 32 == 0 and 32 <= self.threads <= 1024, f"threads is {self.threads}; expected 32 … 1024 in steps of 32"),
            *must(
                self.slot_bytes % (16 * self.threads) == 0,
                f"slot_bytes is {self.slot_bytes}; expected a multiple of 16 x threads {self.threads}",
            ),
            *must(arch >= SM90 or self.pdl is Pdl.OFF, f"arch is {arch}; expected sm_90 or later, or pdl=off"),
        ]

    @property
    def stem(self) -> str:
        return f"slot_copy_{self.slot_bytes}{'' if self.pdl is Pdl.OFF else '_pdl'}"

    def parameters(self) -> list[Param]:
        return [*OPERANDS.pointers(self), *OPERANDS.stride_params(self)]
