"""selective_scan by warps of two kinds: scanning warps, and aides that prepare their inputs and compute the output.

Before the scan of a tile, aides copy its operands, and compute d, d u, and B and C as f32. After the scan they add up the sums of C h, and
compute D u, the gate and the output. Scanning warps have no other work. Their lanes hold the states of one or two channels, which share a
load of B and C. Exponentials are computed some tokens before their states need them, also across tiles. Each scheduler has both kinds of
warps, so one kind runs while the other waits. All warps synchronise once per tile.

Sums and their order are as in `SelectiveSpec`: both give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ...spec.kernel import Arch, Needs, Pdl, is_pow2, must
from ...spec.variants import spec_of, trials
from .problem import Order, SelectiveProblem
from .spec import GROUP, MOST_STATES, POLYNOMIAL, SelectiveSpec, parts_of

# (most channels of all sequences, scanning warps of a block); a block has the same number of aides: each of 132 SMs has one block at most.
# On an H200 one sequence took, without and with roles, 106 and 61 us (2048 tokens of 1536 channels), 109 and 80 us (3072 channels), 420 and
# 319 us (8192 tokens of 4096 channels), 2350 and 2062 us (32768 tokens of 8192 channels).
BLOCKS = tuple((132 * 8 * warps, warps) for warps in (2, 4, 8))
AHEAD = 8  # most states of a lane that leave registers for precomputed exponentials


@dataclass(frozen=True, kw_only=True)
class RolesSpec(SelectiveSpec):
    """A problem, and how warps of two kinds compute it. Only `polynomial` and `parts` change bits of the result."""

    family: ClassVar[str] = "selective_scan_roles"
    template: ClassVar[str] = "selective_scan/roles/scan.cu.j2"

    abreast: int = 2  # channels of a lane
    aides: int = 4  # warps of a block, in addition to the `warps` that scan
    apart: bool = False  # whether separate halves of the aides prepare inputs and compute the output
    lead: int = 1  # tokens by which exponentials are computed early

    @property
    def needs(self) -> Needs:
        return Needs(math=True, copies=True, bytes=self.started, places=True, placed_pairs=True)

    @property
    def order(self) -> tuple[str | int, ...]:
        return SelectiveSpec.family, self.polynomial, self.parts

    @property
    def threads_per_block(self) -> int:
        return 32 * (self.warps + self.aides)

    @property
    def hands(self) -> int:
        """Threads that share one kind of a tile's work."""
        return 32 * self.aides // (1 + self.apart)

    @property
    def places(self) -> int:
        """Groups of lanes in a block, each with one channel or two."""
        return 32 * self.warps // self.lanes

    @property
    def channels(self) -> int:
        return self.places * self.abreast

    @property
    def ahead_of_states(self) -> bool:
        return self.lead > 0 and 4 * self.quads * self.abreast <= AHEAD

    @property
    def stages(self) -> int:
        """Raw tiles: one in output, one in the scan, the next one, one in preparation, and the tiles that are loading."""
        return 5 if self.tile >= 32 else 6

    @property
    def shared_by(self) -> str:
        return f"r{self.aides}{'s' * self.apart}c{self.abreast}e{self.lead}"

    # Shared memory, in 32-bit words: the stages, d and d u of three tiles, sums of two; B and C of two as f32.

    @property
    def row_words(self) -> int:
        """Words from one row to the next one: if lanes have runs of several rows, an odd number of four banks."""
        words = self._words(self.layout, self.channels)
        return words | 4 if self.layout is Order.FIRST else words

    @property
    def half(self) -> int:
        """Quads before the quads of odd channels, if a lane has one channel: four banks' quads lie between them and their neighbours."""
        return self.places // 2 + (4 - self.places // 2) % 8

    @property
    def places_quads(self) -> int:
        """Quads of a row of steps or of sums, one for each place."""
        return self.places if self.abreast == 2 else self.half + self.places // 2

    @property
    def pitch(self) -> int:
        """Words from d and d u of a token and a lane's channels to the next token's; with one channel, of two tokens."""
        return 4 * (self.places_quads + (self.layout is Order.FIRST))

    @property
    def step_words(self) -> int:
        """Words of d and d u of a tile."""
        return self.tile * self.abreast // 2 * self.pitch

    @property
    def sum_pitch(self) -> int:
        """Words from 4 tokens' sums of a lane, of all places, to the next lane's: eight neighbouring lanes of a warp use all banks."""
        apart = 8 // self.lanes if self.abreast == 2 else max(1, 4 // self.lanes)
        return GROUP * (self.places_quads + (apart - self.places_quads) % 8)

    @property
    def sum_run(self) -> int:
        """Words from 4 tokens' sums to the next ones'."""
        words = self.abreast * self.lanes * self.sum_pitch
        beside = min(4, self.tile // GROUP)  # runs of neighbouring lanes, if tokens are contiguous
        return words + ((8 // beside * GROUP - words) % 32 if self.layout is Order.FIRST else 0)

    @property
    def sum_words(self) -> int:
        """Words of the sums of a tile."""
        return self.tile // GROUP * self.sum_run

    @property
    def dynamic_bytes(self) -> int:
        return 4 * (self.stages * self.stage_words + 3 * self.step_words + 2 * self.sum_words)

    @property
    def static_bytes(self) -> int:
        by_channel = (self.D is not None) + (self.delta_bias is not None)
        left = (self.parts - 1) * 32 * self.warps * self.abreast * (4 * self.quads + 1)
        return 16 * self.tile * self.padded + 4 * left + 4 * self.channels * by_channel

    @property
    def pieces(self) -> tuple[int, int]:
        """Copies per row, for u, delta and z, and for B and C."""
        inner = self.channels if self.layout is Order.LAST else self.tile
        key_inner = self.padded if self.key_layout is Order.LAST else self.tile
        return (
            inner * self.x.size // self.copy if self.copy else 0,
            key_inner * self.x.size // self.key_copy if self.key_copy else 0,
        )

    def violations(self, arch: Arch) -> list[str]:
        if problems := [
            *must(is_pow2(self.aides) and self.aides <= 16, f"aides is {self.aides}; expected 1, 2, 4 … 16"),
            *must(self.aides > 1 or not self.apart, f"apart is yes with {self.aides} aides; expected 2 or more warps"),
            *must(self.abreast in (1, 2), f"abreast is {self.abreast}; expected 1 or 2"),
            *must(0 <= self.lead <= GROUP, f"lead is {self.lead}; expected 0 … {GROUP}"),
        ]:
            return problems
        states, pieces = 4 * self.quads * self.abreast, max(self.pieces)
        return [
            *super().violations(arch),
            *must(self.warps + self.aides <= 32, f"warps is {self.warps} and aides {self.aides}; expected at most 32 together"),
            *must(pieces <= self.hands, f"a row is copied in {pieces} pieces; expected at most {self.hands}, the lanes of the aides"),
            *must(self.abreast == 1 or states <= MOST_STATES, f"a lane holds {states} states; expected at most {MOST_STATES}"),
        ]

    def constants(self) -> dict[str, Any]:
        return super().constants() | {
            "ahead": self.ahead_of_states,
            # at most 2 cells of 4 tokens and 2 channels per lane of the aides
            "few_cells": self.tile * self.channels <= 2 * 8 * self.hands,
            "shared_rows": self.copy > 0,
            "shared_keys": self.key_copy > 0 and self.d_state == self.padded,
        }


def roles_space(problem: SelectiveProblem, arch: Arch) -> Iterator[RolesSpec]:
    """Every legal variant, within the axes that are worth a trial."""
    shares = (0, 1, 2) if problem.x.size == 2 else (POLYNOMIAL[problem.x],)
    axes = {"lanes": (2, 4, 8), "warps": (4, 8), "abreast": (1, 2), "tile": (16, 32), "polynomial": shares, "pdl": Pdl}
    return trials(RolesSpec, problem, arch, axes, parts=parts_of(problem, arch))


def by_roles(problem: SelectiveProblem, size: int, wait: Pdl, parts: int) -> Iterator[tuple[str, RolesSpec | None, str]]:
    """One candidate: for 16 states and 16-bit operands that can be copied, if one block per SM holds all channels."""
    name, warps = "4 lanes by roles, tile 32", next((warps for most, warps in BLOCKS if size <= most), 0)
    if problem.padded != 16 or problem.x.size != 2 or not problem.copy or not problem.key_copy or parts > 1:
        yield name, None, "the rule is for 16 states, whole sequences, and aligned 16-bit operands"
    elif not warps:
        yield name, None, f"all sequences have {size} channels; the rule is for at most {BLOCKS[-1][0]}"
    else:
        how: dict[str, Any] = {"lanes": 4, "warps": warps, "tile": 32, "polynomial": POLYNOMIAL[problem.x], "pdl": wait}
        yield f"{name}, {warps} warps walk", spec_of(RolesSpec, problem, **how, abreast=1, aides=warps, apart=True), ""
