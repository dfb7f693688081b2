"""The state that tokens produce from zeros, with warpgroups: chunk_scan's first half if other ranks hold a sequence's other tokens.

A rank's tokens are parts, each a packed sequence, and a block has a part of a head. Chunks whose contribution decays to nothing before the
end of the last part are not read: `since` holds the first chunk of each part that is. If all heads forget soon, very little is read.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from ...spec.kernel import Arch, Index, Loads, Pdl, must
from .spec import CHUNK, ScanProblem, ScanSpec
from .warpgroups import WarpgroupScanSpec


@dataclass(frozen=True, kw_only=True)
class EndsSpec(WarpgroupScanSpec):
    """[sequences, H, P, N] f32, of packed sequences, from chunk since[sequence, head] on."""

    family: ClassVar[str] = "chunk_scan_warpgroup_ends"
    template: ClassVar[str] = "chunk_scan/warpgroups/ends.cu.j2"
    word: ClassVar[str] = "scan_ends"
    states_alone: ClassVar[bool] = True

    @classmethod
    def of(cls, spec: ScanSpec) -> EndsSpec:
        """The variant for the tokens of a call that `spec` serves."""
        kept = {f.name: getattr(spec, f.name) for f in fields(ScanProblem)}
        kept |= dict.fromkeys(("z", "D_rows", "initial", "final", "pool", "started", "seq_idx"), False)
        kept |= {"D": None, "index": Index.NONE, "checkpoints": Index.NONE, "segments": 0, "state_loads": Loads.VECTOR}
        return cls(**kept, stages=4, pdl=Pdl.OFF)

    @property
    def mapped(self) -> dict[str, int]:
        return {"B": self.d_state, "x": self.tile}

    @property
    def dynamic_bytes(self) -> int:
        """Bytes of the stages of B and x, and of two stages of weighted x."""
        return 2 * CHUNK * (self.stages * (self.d_state + self.tile) + 2 * self.tile)

    def violations(self, arch: Arch) -> list[str]:
        return (
            super().violations(arch)
            + must(self.ragged, "cu_seqlens is none; expected a type: the tokens of a rank are packed")
            + must(
                self.halves == 1 and self.headdim % self.tile == 0,
                f"tile is {self.tile} for states of {self.headdim} x {self.d_state}; "
                "expected a divisor of headdim, and d_state of at most 128",
            )
        )
