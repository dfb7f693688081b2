"""selective_scan: Mamba-1 over whole sequences, token by token, with the states of a channel in registers.

Per token, channel and state n, with d = softplus(delta + bias),

    h_n <- 2^(d A_n log2(e)) h_n + d u B_n        y = sum_n C_n h_n + D u, times silu(z)

A block has `channels` channels of one sequence, and scans its tokens in tiles of `tile`, loaded by asynchronous copies; B and C are
converted to f32 in shared memory, one tile early. Each warp does the rest of a tile alone. Its lanes first share d and d u of its channels,
through shared memory. Then `lanes` lanes per channel scan the tokens, with d_state / lanes states each in registers, and store their sums
of C h. Finally they share the work from these sums to the output.
The special function units compute 16 exponentials per clock and SM, eight cycles for a warp. The scan has 6.7 instructions per exponential,
and three more for its share of the rest, 1.5 cycles of them on the special function units. `polynomial` exponentials of every 4 tokens x 4
states are therefore computed by a polynomial on the FMA pipe, in 11 instructions.
y is summed over quads of states, then pairwise: the same tree for any number of lanes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...compile.occupancy import shared_violations
from ...spec.kernel import LATER, SM90, Arch, DType, Index, KernelSpec, Loads, Needs, Param, Pdl, is_pow2, must
from .operands import OPERANDS
from .problem import CUT, OPERATOR, Order, SelectiveProblem, cut_from

GROUP = 4  # tokens whose y are summed at once
MOST_STATES = 32  # per lane
STATIC = 48 << 10  # bytes of shared memory that a kernel's text may declare
# (token, state) of a group of 4 x 4; the first `polynomial` of them use the polynomial. Spread over tokens first, so that both pipes always
# have work.
TURNS = [(token, n) for n in (3, 1, 2, 0) for token in (3, 1, 2, 0)]

# 2^f = 1 + f c1 + … + f^6 c6 for f in -0.5 … 0.5, minimax of the relative error (2.6e-9 before rounding; 8.4e-8 in f32): c6 first.
EXPONENTIAL = ("0.000155946778", "0.00134066434", "0.00961769279", "0.0555031039", "0.240226522", "0.693147242", "1.")


@dataclass(frozen=True, kw_only=True)
class SelectiveSpec(KernelSpec, SelectiveProblem):
    """A problem, and how one variant computes it. Only `polynomial` and `parts` change bits of the result."""

    family: ClassVar[str] = OPERATOR
    template: ClassVar[str] = "selective_scan/selective_scan.cu.j2"
    table: ClassVar[Any] = OPERANDS

    lanes: int  # per channel
    warps: int  # of a block
    tile: int  # tokens in shared memory
    polynomial: int = 1  # number of 16 exponentials that use the polynomial
    min_blocks: int = 1  # blocks per SM that ptxas must leave registers for
    pdl: Pdl = Pdl.OFF
    parts: int = field(default=1, metadata=LATER)  # of a sequence, at most, each by a block of a cluster: the problem's segments, or 1

    @property
    def needs(self) -> Needs:
        small = self.x.size == 2
        return Needs(math=True, copies=True, bytes=self.started, shared_pairs=small, shared_quads=not small)

    @property
    def order(self) -> tuple[str | int, ...]:
        return self.family, self.polynomial, self.parts

    @property
    def cluster_blocks(self) -> int:
        return self.parts

    @property
    def threads_per_block(self) -> int:
        return 32 * self.warps

    @property
    def channels(self) -> int:
        """Channels of a block."""
        return 32 * self.warps // self.lanes

    @property
    def warp_channels(self) -> int:
        return 32 // self.lanes

    @property
    def quads(self) -> int:
        """Quads of states per lane."""
        return self.padded // (4 * self.lanes)

    @property
    def stem(self) -> str:
        where = self.layout.value + ("" if self.copy else "_any")
        how = f"l{self.lanes}w{self.warps}t{self.tile}p{self.polynomial}{self.shared_by}" + (
            f"b{self.min_blocks}" if self.min_blocks > 1 else ""
        )
        how += f"k{self.parts}" if self.parts > 1 else ""
        return f"selective_scan_n{self.d_state}_{where}_{self.state.value}_{self.x.value}_{how}{'' if self.pdl is Pdl.OFF else '_pdl'}"

    @property
    def shared_by(self) -> str:
        """The part of the name for warps with separate roles."""
        return ""

    # Shared memory, in 32-bit words: two stages of raw u, delta, z, B and C, with rows of the contiguous axis.

    def _words(self, layout: Order, inner: int) -> int:
        """32-bit words of a row of `inner` numbers, or of a tile's tokens."""
        return -(-(inner if layout is Order.LAST else self.tile) * self.x.size // 16) * 4

    @property
    def row_words(self) -> int:
        """Words from one row to the next one. Lanes of a warp read neighbouring runs of several rows, which use all banks."""
        if self.layout is Order.LAST:
            return self._words(self.layout, self.channels) + max(4, self.warp_channels // 4 * self.x.size)
        return self._words(self.layout, self.channels) + (4 * self.x.size if self.tile > 16 else 0)

    @property
    def key_words(self) -> int:
        return self._words(self.key_layout, self.padded) + (0 if self.key_layout is Order.LAST else 4)

    @property
    def stage_words(self) -> int:
        rows = self.tile if self.layout is Order.LAST else self.channels
        keys = self.tile if self.key_layout is Order.LAST else self.padded
        return (3 if self.z else 2) * rows * self.row_words + 2 * keys * self.key_words

    @property
    def pitch(self) -> int:
        """Pairs of d and d u from one token's to the next one's."""
        return self.channels + (self.warp_channels // 4 if self.layout is Order.LAST else 1)

    @property
    def sum_pitch(self) -> int:
        """Words from the lanes' sums of 4 tokens to the next 4 tokens' sums."""
        return GROUP * self.threads_per_block + 4

    @property
    def sum_words(self) -> int:
        """Words of a tile's sums; or, if more, of the results of all parts except the last: the states of each thread, and its sum of d."""
        return max(self.tile // GROUP * self.sum_pitch, (self.parts - 1) * self.threads_per_block * (4 * self.quads + 1))

    @property
    def dynamic_bytes(self) -> int:
        return 4 * 2 * self.stage_words

    @property
    def static_bytes(self) -> int:
        by_channel = (self.D is not None) + (self.delta_bias is not None)
        return self.tile * (8 * self.pitch + 4 * 4 * self.padded) + 4 * self.sum_words + 4 * self.channels * by_channel

    def violations(self, arch: Arch) -> list[str]:
        if problems := [
            *self.faults(),
            *must(is_pow2(self.lanes) and self.lanes <= 8, f"lanes is {self.lanes}; expected 1, 2, 4 or 8"),
            *must(is_pow2(self.warps) and self.warps <= 32, f"warps is {self.warps}; expected 1, 2, 4 … 32"),
        ]:
            return problems
        return [
            *must(self.quads >= 1, f"lanes is {self.lanes} with {self.padded} states; expected 4 or more states per lane"),
            *must(4 * self.quads <= MOST_STATES, f"a lane holds {4 * self.quads} states; expected at most {MOST_STATES}. Use more lanes."),
            *must(self.channels >= 8, f"a block has {self.channels} channels; expected 8 or more"),
            *must(is_pow2(self.tile) and 8 <= self.tile <= 128, f"tile is {self.tile}; expected 8, 16 … 128"),
            *must(0 <= self.polynomial <= len(TURNS), f"polynomial is {self.polynomial}; expected 0 … {len(TURNS)}"),
            *must(self.min_blocks >= 1, f"min_blocks is {self.min_blocks}; expected 1 or more"),
            *must(self.parts in (1, self.segments), f"parts is {self.parts}; expected 1 or the problem's segments {self.segments}"),
            *must(
                arch >= SM90 or self.parts == 1, f"parts is {self.parts} on {arch}; expected 1 before sm_90, which has the first clusters"
            ),
            *must(
                self.static_bytes <= STATIC,
                f"a block declares {self.static_bytes} bytes of static shared memory; expected at most {STATIC}",
            ),
            *shared_violations(arch, self.dynamic_bytes + self.static_bytes),
            *self.arch_violations(arch, "asynchronous copies and bf16"),
        ]

    # Kernels take no stride for the axis along which they copy.

    @property
    def by_token(self) -> bool:
        return not self.copy or self.layout is Order.LAST

    @property
    def by_channel(self) -> bool:
        return not self.copy or self.layout is Order.FIRST

    @property
    def keys_by_token(self) -> bool:
        return not self.key_copy or self.key_layout is Order.LAST

    @property
    def keys_by_n(self) -> bool:
        return not self.key_copy or self.key_layout is Order.FIRST

    def parameters(self) -> list[Param]:
        """Pointers come first."""
        strides = OPERANDS.stride_params(self)
        slots = [Param.i64("slots"), Param.i64("pad_slot_id")] if self.index is not Index.NONE else []
        wide, narrow = ([p for p in strides if (p.code == "q") is is_wide] for is_wide in (True, False))
        return [
            *OPERANDS.pointers(self), *slots, *wide, *map(Param.u32, ("tokens", "groups", "group_channels", "blocks")), *narrow,
        ]  # fmt: skip

    def constants(self) -> dict[str, Any]:
        return {
            "first": self.layout is Order.FIRST,
            "key_first": self.key_layout is Order.FIRST,
            **self.state_constants(),
            "vector_state": self.state_loads is Loads.VECTOR and self.d_state % 4 == 0,
            "cut": CUT,
            "cut_from": cut_from(self.segment_tokens),
            "turns": sum(1 << (4 * token + n) for token, n in TURNS[: self.polynomial]),
            "exponential": EXPONENTIAL,
            "group": GROUP,
            "evenly": self.tile >= 4 * self.lanes,  # whether a tile has four tokens for each lane
            "softplus": self.delta_softplus,
            "sigmoid": False,
            "silu": self.z,
        }


# Out of 16 exponentials. Results of the special function units may be off by 2 units of the last place, with a bias. If decays are near 1,
# this adds up: an average of 0.1 * 2^-24 would cause an error of 1.4e-5 of a state after 4096 tokens (1.3e-5 on an H200); the polynomial's
# rounding causes 1.2e-6. This matters with f32 operands.
POLYNOMIAL = {DType.BF16: 1, DType.F16: 1, DType.F32: len(TURNS)}


def parts_of(problem: SelectiveProblem, arch: Arch) -> int:
    """Parts of a sequence, at most, each by a block of a cluster."""
    return problem.segments if arch >= SM90 else 1
