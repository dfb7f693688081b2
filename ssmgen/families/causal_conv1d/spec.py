"""causal_conv1d: the short depthwise convolution before a recurrence, over whole sequences.

Every token is read once and written once; the speed limit is an elementwise copy. Channel-first: a warp takes a piece of one channel's row,
in 16-byte vectors along the length, and passes the halo on by shuffles. Packed sequences are one row, and the first tokens of each are
convolved separately. Channel-last: a warp takes some tokens of 32 neighbouring vectors of channels, and reads the halo again, mostly from
L1. Gates multiply inputs before the convolution and outputs after it, and residuals are added to outputs, channel-last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from ...engine.window import MAX_WIDTH, Convolution
from ...spec.kernel import LATER, Arch, DType, Index, KernelSpec, Loads, Needs, Param, Pdl, Problem, is_pow2, must
from ...spec.variants import spec_of, trials
from .operands import OPERANDS

OPERATOR = "causal_conv1d"
SIZE, MAX_SIZE = "KiB of x", 2**22  # the rules compare this size


class ConvLayout(Enum):
    """Which axis of x [batch, dim, length] is contiguous: the length, or the channels."""

    FIRST = "channel_first"
    LAST = "channel_last"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvProblem(Problem, Convolution):
    """The fields that a call fixes: layout, dtypes and present operands. Sizes are not fixed."""

    layout: ConvLayout
    width: int
    x: DType = DType.BF16  # of states and out too
    weight: DType = DType.BF16
    bias: DType | None = None
    silu: bool = True
    seq_idx: bool = False
    query_start_loc: Index = Index.NONE  # type of it: x is packed sequences
    initial: bool = False  # initial_states are read
    final: bool = False  # final_states are written
    pool: bool = False  # conv_states are written, and read where has_initial_state says so
    started: bool = False  # has_initial_state is given
    index: Index = Index.NONE  # type of conv_state_indices
    # Channel-first: VECTOR for unit strides along the length. Channel-last: for unit strides along the channels, and all else aligned.
    loads: Loads = Loads.VECTOR
    shifted: bool = False  # channel-first vectors: rows may begin off the 16-byte grid, and each block checks its own row
    unit: bool = False  # channel-last elements: contiguous along the channels, but not aligned
    taps: Loads = Loads.VECTOR  # weight and bias: a lane's channels as one run
    input_gate: bool = field(default=False, metadata=LATER)  # x is multiplied by a gate before the convolution
    output_gate: bool = field(default=False, metadata=LATER)  # the output is multiplied by a gate
    dilation: int = field(default=1, metadata=LATER)  # distance between the inputs of neighbouring taps
    residual: bool = field(default=False, metadata=LATER)  # added to the output
    outer_residual: bool = field(default=False, metadata=LATER)  # added after residual

    @property
    def ragged(self) -> bool:
        return self.query_start_loc is not Index.NONE

    @property
    def words(self) -> bool:
        """Whether lanes have pairs of channels, in one word or in two: channel-last 16-bit elements of unit stride."""
        return self.unit and self.x.size == 2

    @property
    def along(self) -> bool:
        """Whether kernels take the distance between neighbours along the length."""
        return self.layout is ConvLayout.LAST or self.loads is Loads.ELEMENT

    @property
    def across(self) -> bool:
        """Whether kernels take the distance between channels."""
        return self.layout is ConvLayout.FIRST or (self.loads is Loads.ELEMENT and not self.unit)

    def faults(self) -> list[str]:
        """Reasons why no variant can serve this problem."""
        stateful = self.initial or self.final or self.pool
        return [
            *must(1 <= self.width <= MAX_WIDTH, f"width is {self.width}; expected 1 … {MAX_WIDTH}"),
            *must(self.width > 1 or not stateful, "width is 1 with a state; expected 2 or more, or no state"),
            *must(
                not (self.pool and (self.initial or self.final)),
                "pool is yes with initial or final; expected one or the other: a pool holds both states",
            ),
            *must(
                self.pool or (self.index is Index.NONE and not self.started), "index or started is set without a pool; expected pool=yes"
            ),
            *must(
                not self.shifted or (self.layout is ConvLayout.FIRST and self.loads is Loads.VECTOR),
                f"shifted is yes with layout={self.layout.value}, loads={self.loads.value}; expected channel-first vectors",
            ),
            *must(
                not self.unit or (self.layout is ConvLayout.LAST and self.loads is Loads.ELEMENT),
                f"unit is yes with layout={self.layout.value}, loads={self.loads.value}; expected channel-last elements",
            ),
            *must(
                self.shifted or not (self.ragged and self.layout is ConvLayout.FIRST and self.loads is Loads.VECTOR),
                "shifted is no with packed channel-first vectors; expected yes, since sequences begin anywhere",
            ),
            *must(
                not (self.ragged and self.seq_idx),
                f"seq_idx is yes and query_start_loc is {self.query_start_loc.value}; expected one of them",
            ),
            *self.reach_faults(),
            *must(
                self.dilation == 1 or (self.layout is ConvLayout.LAST and not self.unit),
                f"dilation is {self.dilation} with layout={self.layout.value}, unit={'yes' if self.unit else 'no'}; "
                "expected channel_last and no",
            ),
            *must(
                not self.beside or (self.layout is ConvLayout.LAST and not self.unit),
                f"{' and '.join(self.beside)} is yes with layout={self.layout.value}, unit={'yes' if self.unit else 'no'}; "
                "expected channel_last and no",
            ),
        ]


@dataclass(frozen=True, kw_only=True)
class ConvSpec(KernelSpec, ConvProblem):
    """A problem, and how one variant computes it. No choice here changes a bit of the result."""

    family: ClassVar[str] = OPERATOR
    table: ClassVar[Any] = OPERANDS

    vec: int  # elements per access; channel-first: along the length, channel-last: channels
    vectors: int = 2  # channel-first: of vec tokens, per lane; channel-last: tokens per lane
    threads: int = 128
    min_blocks: int = 0  # blocks per SM that ptxas must leave registers for; 0 = its own choice
    pdl: Pdl = Pdl.OFF

    @property
    def template(self) -> str:
        return f"{OPERATOR}/{'first' if self.layout is ConvLayout.FIRST else 'last'}.cu.j2"

    @property
    def needs(self) -> Needs:
        return Needs(math=self.silu, bytes=self.started, lines=self.ragged and self.layout is ConvLayout.LAST)

    @property
    def threads_per_block(self) -> int:
        return self.threads

    @property
    def piece(self) -> int:
        """Tokens that a warp takes of a sequence."""
        return self.vectors * (32 * self.vec if self.layout is ConvLayout.FIRST else 1)

    @property
    def head_lanes(self) -> int:
        """Channel-first packed sequences: lanes for the inputs before a sequence that its tokens read, a power of two."""
        return 1 << (self.width - 2).bit_length()

    @property
    def stem(self) -> str:
        what = "first" if self.layout is ConvLayout.FIRST else "last"
        how = f"v{self.vec}n{self.vectors}x{self.threads}" + (f"b{self.min_blocks}" if self.min_blocks else "")
        taps = f"w{self.width}{'' if self.dilation == 1 else f'd{self.dilation}'}"
        return f"conv_{what}_{taps}_{self.x.value}_{how}{'' if self.pdl is Pdl.OFF else '_pdl'}"

    def violations(self, arch: Arch) -> list[str]:
        first = self.layout is ConvLayout.FIRST
        run = (1 if first else self.vec) * self.width * self.weight.size  # bytes of a lane's taps
        return [
            *self.faults(),
            *must(self.threads % 32 == 0 and 32 <= self.threads <= 1024, f"threads is {self.threads}; expected 32 … 1024 in steps of 32"),
            *must(
                self.vectors >= 1 and self.min_blocks >= 0,
                f"vectors is {self.vectors} and min_blocks {self.min_blocks}; expected 1 or more, and 0 or more",
            ),
            *must(
                is_pow2(self.vec) and self.vec * self.x.size in ((16,) if first else (4, 8)),
                f"vec is {self.vec} of {self.x.value}; expected {'16' if first else '4 or 8'} bytes",
            ),
            *must(
                self.piece >= self.reach - 1, f"a warp takes pieces of {self.piece} tokens; expected {self.reach - 1} or more, the history"
            ),
            *must(
                self.taps is Loads.ELEMENT or run % 4 == 0, f"a lane's taps have {run} bytes; expected a multiple of 4. Use taps=element."
            ),
            *must(
                self.taps is Loads.ELEMENT or not first or run in (4, 8, 16, 32),
                f"a lane's taps have {run} bytes; expected 4, 8, 16 or 32, to stay aligned. Use taps=element.",
            ),
            *must(
                self.taps is Loads.ELEMENT or first or self.loads is Loads.VECTOR or self.words,
                "taps is vector for lanes whose channels are apart; expected element",
            ),
            *self.arch_violations(arch),
        ]

    def parameters(self) -> list[Param]:
        strides = OPERANDS.stride_params(self)
        wide = [Param.i64("slots"), Param.i64("pad_slot_id")] if self.index is not Index.NONE else []
        wide += [p for p in strides if p.code == "q"]
        first = self.layout is ConvLayout.FIRST
        divisors = [*Param.divisor("pieces"), *(Param.divisor("dim") if first else [Param.u32("dim"), *Param.divisor("channel_blocks")])]
        narrow = [p for p in strides if p.code != "q"]
        return [*OPERANDS.pointers(self), *wide, *divisors, Param.u32("length"), Param.u32("sequences"), *narrow]

    def constants(self) -> dict[str, Any]:
        return {
            "pooled": self.index is not Index.NONE,
            "vector": self.loads is Loads.VECTOR,
            "shifted": self.shifted,
            "vector_taps": self.taps is Loads.VECTOR,
            "words": self.words,
            "heads": self.ragged and self.layout is ConvLayout.FIRST and self.width > 1,
            "past": "conv_states" if self.started else "initial_states" if self.initial else "",  # holds the tokens before the first
            "kept": "conv_states" if self.pool else "final_states" if self.final else "",  # receives the last tokens
            "gates": self.gates,
            "residuals": self.residuals,
            "beside": self.beside,
        }


def space(problem: ConvProblem, arch: Arch) -> Iterator[ConvSpec]:
    """Every legal variant of a problem, within the axes that are worth a trial."""
    first = problem.layout is ConvLayout.FIRST
    vec = (16 // problem.x.size,) if first else (8 // problem.x.size, 4 // problem.x.size)
    vectors = (1, 2, 4) if first else (4, 6, 8, 16)
    return trials(ConvSpec, problem, arch, {"vec": vec, "vectors": vectors, "threads": (64, 128, 256), "pdl": Pdl})


# Channel-last needs many short threads: at 72 registers 7 blocks of 128 fit on an SM; ptxas alone reaches 4 to 6. Inputs that do not fill
# the card need shorter pieces. Measured on an H200, docs/performance.md.
SMALL_KIB = 16 * 1024


def _tokens(problem: ConvProblem) -> int:
    """Tokens per lane, channel-last. A wide convolution takes 26 instructions per output with 8 tokens, 23 with 16."""
    plain = problem.loads is Loads.VECTOR and problem.x.size == 2 and not (problem.seq_idx or problem.initial or problem.started)
    if problem.dilation > 1:  # the history of a piece is one other piece
        return max(8, problem.reach // 2 * 2)
    plain = plain and not problem.beside
    return 16 if problem.width > 6 and plain else 8


def _resident(problem: ConvProblem, arch: Arch) -> int:
    """Blocks of 128 threads per SM, channel-last, whose registers suffice without spilling."""
    if problem.dilation > 1:
        return 1
    if problem.width > 6:
        return 6 if _tokens(problem) == 16 else 1
    extra = problem.seq_idx + (problem.initial or problem.started) + max(0, problem.width - 4)
    if problem.beside:  # a lane holds gates or residuals, too
        return 4 if extra < (2 if problem.loads is Loads.VECTOR else 1) else 1
    if problem.loads is Loads.ELEMENT:
        return 1 if extra else 7 if problem.words else 5
    if problem.ragged and extra == 1 and arch.number // 10 == 10:  # 6 blocks would spill 8 bytes there
        return 5
    return (7, 6, 5, 1, 1)[extra]


def candidates(problem: ConvProblem, size: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, ConvSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one is generic and applies to every legal problem."""
    wait = Pdl.TRIGGER_LOADED if pdl else Pdl.OFF
    how: dict[str, Any]
    if problem.layout is ConvLayout.FIRST:
        how = {"vec": 16 // problem.x.size, "pdl": wait}
        if problem.ragged:
            # With enough tokens for all warps, a warp's sequence look-ups serve more tokens. 64 registers suffice, except for the widest.
            vector = problem.loads is Loads.VECTOR
            vectors, blocks = 4 if vector and size > SMALL_KIB else 2, 8 if vector and problem.width <= 6 else 4
            yield "packed", spec_of(ConvSpec, problem, **how, vectors=vectors, min_blocks=blocks), ""
        else:
            # The warps of a block share a piece's seq_idx in L1: 8 of them leave half a byte per token and channel to L2.
            yield "rows", spec_of(ConvSpec, problem, **how, vectors=2, threads=256 if problem.seq_idx else 128), ""
        return
    # Lanes of wide convolutions hold half the channels; otherwise their taps would leave room for few threads.
    how = {"vec": 2 if problem.width > 6 else 8 // problem.x.size, "pdl": wait}
    resident = _resident(problem, arch)
    if size <= SMALL_KIB:
        tokens, blocks = (
            (_tokens(problem) if problem.dilation > 1 else 8, 1)
            if resident == 1 or problem.width > 6
            else (6, 0 if resident == 7 else min(4, resident))
        )
        yield "small", spec_of(ConvSpec, problem, **how, vectors=tokens, min_blocks=blocks), ""
    else:
        yield "small", None, f"x has {size} KiB; the rule is for at most {SMALL_KIB}"
        yield "resident", spec_of(ConvSpec, problem, **how, vectors=_tokens(problem), min_blocks=resident), ""
    yield "generic", spec_of(ConvSpec, problem, **how, vectors=_tokens(problem) if problem.dilation > 1 else 8, min_blocks=1), ""
