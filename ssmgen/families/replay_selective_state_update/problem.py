"""The problem of a replay step: its history, its tokens, the data it keeps, the kernels that its caller wants, and their arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from ...spec.kernel import LATER, DType, Index, KernelSpec, Loads, Narrow, Param, Problem, must
from .operands import OPERANDS

MAX_TOKENS = 32


class History(Enum):
    """STEP: the inputs of the last step, in one of two buffers; each step writes the state. RING: of several steps; the state is written
    when the history would outgrow its window. CACHE: of several steps of one token; the caller says for each sequence how many entries
    count, and whether the state is written, which then includes the new token."""

    STEP = "step"
    RING = "ring"
    CACHE = "cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayProblem(Problem):
    """The fields that a call fixes. Batch, tokens and strides are not fixed."""

    d_state: int
    headdim: int
    nheads: int
    ngroups: int
    state: DType | Narrow = DType.F32
    x: DType = DType.BF16  # of B, C and their history too
    dt: DType = DType.BF16
    A: DType = DType.F32
    D: DType | None = None
    z: DType | None = None
    dt_bias: DType | None = None
    out: DType = DType.BF16
    dt_softplus: bool = True
    history: History = History.STEP
    tokens: int = 8  # room for the tokens of a step, and of the history, in multiples of eight
    window: int = 8
    materialize: bool = False  # only S' is wanted; it goes to a separate tensor
    cu_seqlens: Index = Index.NONE
    index: Index = Index.NONE
    advance: bool = False  # the kernel does the bookkeeping of its slots
    two_kernels: bool = False
    internal_pdl: bool = True  # with two kernels, whether the second may start before the first has ended
    after_conv: bool = False  # the previous kernel in the stream wrote x, B and C, and no other input of this one
    philox_rounds: int = 0  # of stochastic rounding; 0 = to nearest
    terms: int = 3  # bf16 terms of an f32 in a product
    state_loads: Loads = Loads.VECTOR
    operand_loads: Loads = Loads.VECTOR  # of x, B, C, z, out and the history
    zero_padding: bool = field(default=True, metadata=LATER)  # the output of padded sequences is zero; else it is unchanged

    @property
    def scaled(self) -> bool:
        """Whether every row of the state has a scale."""
        return isinstance(self.state, Narrow)

    def faults(self) -> list[str]:
        """Reasons why no variant can serve this problem."""
        room = range(8, MAX_TOKENS + 1, 8)
        return [
            *must(self.d_state % 32 == 0 and 32 <= self.d_state <= 256, f"d_state is {self.d_state}; expected 32 … 256 in steps of 32"),
            *must(self.headdim >= 8 and self.headdim % 8 == 0, f"headdim is {self.headdim}; expected a multiple of 8"),
            *must(self.nheads % self.ngroups == 0, f"nheads is {self.nheads}; expected a multiple of ngroups {self.ngroups}"),
            *must(
                self.headdim * self.d_state * self.nheads < 2**31,
                "one slot of the state has 2^31 elements or more; expected fewer, for 32-bit offsets",
            ),
            *must(
                self.tokens in room and self.window in room,
                f"tokens is {self.tokens} and window {self.window}; expected multiples of 8, up to {MAX_TOKENS}",
            ),
            *must(
                not self.philox_rounds or self.state is not DType.F32,
                f"philox_rounds is {self.philox_rounds} with an f32 state, which is not rounded; expected 0",
            ),
            *must(1 <= self.terms <= 3, f"terms is {self.terms}; expected 1 … 3"),
            *must(
                not (self.materialize and (self.advance or self.after_conv or self.two_kernels)),
                "materialize is yes with advance, after_conv or two_kernels; expected none of them: it only reads the history",
            ),
            *must(
                self.history is not History.CACHE
                or not (self.materialize or self.advance or self.after_conv or self.two_kernels or self.cu_seqlens is not Index.NONE),
                "history is cache with materialize, advance, after_conv, two_kernels or cu_seqlens; expected none of them",
            ),
            *must(self.history is not History.CACHE or self.tokens == 8, f"tokens is {self.tokens} with a cache; expected 8, room for one"),
        ]


class Part(Enum):
    """One kernel, or two: one that makes `mix` and keeps the new inputs, and one that goes through the states."""

    FUSED = "fused"
    PRECOMPUTE = "precompute"
    MAIN = "main"


@dataclass(frozen=True, kw_only=True)
class ReplayArguments(KernelSpec, ReplayProblem):
    """A problem, and the choice of one of its kernels."""

    table: ClassVar[Any] = OPERANDS

    part: Part = Part.FUSED

    @property
    def steps(self) -> bool:
        """Whether the history covers one step, in one of two buffers."""
        return self.history is History.STEP

    @property
    def rings(self) -> bool:
        return self.history is History.RING

    @property
    def caches(self) -> bool:
        """Whether the caller says what counts, and which states are written."""
        return self.history is History.CACHE

    @property
    def fused(self) -> bool:
        """Whether one kernel does everything."""
        return self.part is Part.FUSED

    @property
    def makes(self) -> bool:
        """Whether this kernel computes the products between tokens (`mix`)."""
        return self.part is not Part.MAIN

    @property
    def applies(self) -> bool:
        """Whether this kernel goes through the states."""
        return self.part is not Part.PRECOMPUTE

    @property
    def takes_rate(self) -> bool:
        """Whether this kernel takes A."""
        return (self.makes and not self.materialize) or not self.steps

    @property
    def ragged(self) -> bool:
        return self.cu_seqlens is not Index.NONE

    @property
    def loose(self) -> bool:
        """Whether operands are loaded element by element, at any stride."""
        return self.operand_loads is Loads.ELEMENT

    @property
    def out_type(self) -> DType | Narrow:
        return self.state if self.materialize and not self.scaled else self.out

    def written(self) -> list[str]:
        """Operands that the kernel may write."""
        return OPERANDS.written_by(self)

    def parameters(self) -> list[Param]:
        pooled, strides = self.index is not Index.NONE, OPERANDS.stride_params(self)
        wide = [Param.i64("slots"), Param.i64("pad_slot_id")] if pooled else []
        narrow = [*(["state_indices_batch"] if pooled else []), "window", *(["ring"] if self.rings else [])]
        narrow += [] if self.materialize else ["total_tokens" if self.ragged else "tokens"]
        return [
            *OPERANDS.pointers(self), *wide, *(p for p in strides if p.code == "q"), *map(Param.u32, narrow),
            *(p for p in strides if p.code != "q"),
        ]  # fmt: skip
