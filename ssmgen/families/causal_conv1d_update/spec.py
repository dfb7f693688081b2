"""causal_conv1d_update: the convolution's decode step, a few tokens per sequence, with the window kept in a pool of slots.

A lane owns some neighbouring channels of a sequence: it reads their window and tokens, and writes outputs and window. A 16-bit
convolution of width 4 moves 16 bytes per channel, 12 of them for the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from ...engine.window import MAX_WIDTH, Convolution, Saved, StateLayout, Windowed
from ...spec.kernel import LATER, Arch, DType, Index, KernelSpec, Loads, Needs, Param, Pdl, Problem, is_pow2, must
from ...spec.variants import spec_of, trials
from .operands import OPERANDS

OPERATOR = "causal_conv1d_update"

MAX_TOKENS = 16  # that a kernel is made for; in longer calls, and in packed sequences, it takes some at a time


MAX_TREE = 128  # tokens of a sequence whose tree is given by children: parents are computed in shared memory


class Advance(Enum):
    """Update of the window of inputs in a slot.

    SHIFT: the last width - 1 are the history; new inputs push the oldest out. ROLL: the history begins at num_accepted_tokens - 1, and its
    last width - 2 entries move to the front, followed by the new inputs. RING: cache_seqlens counts the inputs so far, modulo the length.
    """

    SHIFT = "shift"
    ROLL = "roll"
    RING = "ring"


class Tokens(Enum):
    """FIXED: the number that the kernel is made for. COUNTED: any number, the same for all sequences. RAGGED: by query_start_loc."""

    FIXED = "fixed"
    COUNTED = "counted"
    RAGGED = "ragged"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateProblem(Problem, Windowed, Convolution):
    """The fields that a call fixes. Batch and channels are not fixed."""

    width: int
    x: DType = DType.BF16  # of the state and out too
    weight: DType = DType.BF16
    bias: DType | None = None
    silu: bool = True
    advance: Advance = Advance.SHIFT
    position: Index = Index.NONE  # type of num_accepted_tokens or cache_seqlens
    tokens: int = 1  # per pass
    count: Tokens = Tokens.FIXED
    query_start_loc: Index = Index.NONE
    index: Index = Index.NONE
    layout: StateLayout = StateLayout.RUNS
    state_len: int = 0  # of RUNS; elsewhere a run-time argument
    saved: Saved = Saved.NO
    saved_index: Index = Index.NONE  # type of intermediate_state_indices
    loads: Loads = Loads.VECTOR  # x and out
    taps: Loads = Loads.VECTOR
    parents: Index = field(default=Index.NONE, metadata=LATER)  # a draft tree: a token's window holds its ancestors' inputs
    children: Index = field(default=Index.NONE, metadata=LATER)  # or type of first children and next siblings, and of parents to write
    input_gate: bool = field(default=False, metadata=LATER)  # x is multiplied by a gate before the convolution
    output_gate: bool = field(default=False, metadata=LATER)  # the output is multiplied by a gate
    dilation: int = field(default=1, metadata=LATER)  # distance between the inputs of neighbouring taps
    residual: bool = field(default=False, metadata=LATER)  # added to the output
    outer_residual: bool = field(default=False, metadata=LATER)  # added after residual
    started: bool = field(default=False, metadata=LATER)  # has_initial_state is given

    @property
    def several(self) -> bool:
        """Whether x and out have a token axis that the kernel steps along."""
        return self.count is not Tokens.FIXED or self.tokens > 1

    @property
    def ragged(self) -> bool:
        return self.count is Tokens.RAGGED

    @property
    def is_ring(self) -> bool:
        """Whether entries of the state are a ring."""
        return self.advance is Advance.RING

    @property
    def rolls(self) -> bool:
        """Whether the history begins where the accepted tokens end."""
        return self.advance is Advance.ROLL

    @property
    def saves(self) -> bool:
        """Whether the window after each token is kept."""
        return self.saved is not Saved.NO

    @property
    def saves_any(self) -> bool:
        return self.saved is Saved.ANY

    @property
    def tree(self) -> Index:
        return self.parents if self.children is Index.NONE else self.children

    @property
    def runs_lens(self) -> tuple[int, ...]:
        """State lengths that RUNS supports: it rewrites the whole state, which is at most one entry longer than the history."""
        if self.advance is Advance.ROLL:
            return (self.reach + self.tokens - 2,)
        return (self.reach - 1, self.reach)

    def faults(self) -> list[str]:
        """Reasons why no variant can serve this problem."""
        return [
            *must(2 <= self.width <= MAX_WIDTH, f"width is {self.width}; expected 2 … {MAX_WIDTH}"),
            *self.reach_faults(),
            *must(self.dilation == 1 or self.tree is Index.NONE, f"dilation is {self.dilation} with a draft tree; expected 1"),
            *must(1 <= self.tokens <= MAX_TOKENS, f"tokens is {self.tokens}; expected 1 … {MAX_TOKENS}"),
            *must(
                (self.advance is Advance.SHIFT) == (self.position is Index.NONE),
                f"advance is {self.advance.value} and position is {self.position.value}; "
                "expected none with shift, and a type with ring or roll",
            ),
            *must(
                (self.count is Tokens.RAGGED) == (self.query_start_loc is not Index.NONE),
                f"count is {self.count.value} and query_start_loc is {self.query_start_loc.value}; "
                "expected a type if and only if count is ragged",
            ),
            *must(
                self.layout is StateLayout.RUNS or not self.state_len,
                f"state_len is {self.state_len} with layout={self.layout.value}; expected 0",
            ),
            *must(
                self.layout is not StateLayout.RUNS or self.state_len in self.runs_lens,
                f"state_len is {self.state_len}; expected {' or '.join(map(str, self.runs_lens))} with layout=runs",
            ),
            *must(
                self.layout is not StateLayout.RUNS or self.advance is not Advance.RING,
                "layout is runs with advance=ring; expected another layout, since a ring is not rewritten whole",
            ),
            *must(
                self.layout is not StateLayout.RUNS or self.advance is Advance.SHIFT or self.count is Tokens.FIXED,
                f"count is {self.count.value} with runs that roll; expected fixed",
            ),
            *must(
                self.saved is not Saved.NO or self.saved_index is Index.NONE,
                f"saved_index is {self.saved_index.value} and saved is no; expected saved windows",
            ),
            *must(self.several or self.tree is Index.NONE, "tokens is 1 with a draft tree; expected several"),
            *must(not self.gates or self.tree is Index.NONE, "input_gate or output_gate is yes with a draft tree; expected no"),
            *must(not self.residuals or self.tree is Index.NONE, "residual is yes with a draft tree; expected no"),
            *must(
                not self.started or self.advance is Advance.SHIFT,
                f"started is yes with advance={self.advance.value}; expected shift, which writes all entries",
            ),
            *must(Index.NONE in (self.parents, self.children), "parents and children are both set; expected one of them"),
            *must(
                self.children is Index.NONE or self.count is not Tokens.RAGGED,
                "children is set with count=ragged; expected the same number of tokens in each sequence, or parents",
            ),
        ]


@dataclass(frozen=True, kw_only=True)
class UpdateSpec(KernelSpec, UpdateProblem):
    """A problem, and how one variant computes it. No choice here changes a bit of the result."""

    family: ClassVar[str] = OPERATOR
    template: ClassVar[str] = "causal_conv1d_update/causal_conv1d_update.cu.j2"
    table: ClassVar[Any] = OPERANDS

    vec: int  # channels per lane
    threads: int = 128
    min_blocks: int = 0  # blocks per SM that ptxas must leave registers for; 0 = its own choice
    pdl: Pdl = Pdl.OFF

    @property
    def needs(self) -> Needs:
        return Needs(math=self.silu, bytes=self.started)

    @property
    def threads_per_block(self) -> int:
        return self.threads

    @property
    def stem(self) -> str:
        how = f"v{self.vec}x{self.threads}{'' if self.pdl is Pdl.OFF else '_pdl'}"
        taps = f"w{self.width}{'' if self.dilation == 1 else f'd{self.dilation}'}"
        return f"conv_update_{taps}t{self.tokens}_{self.x.value}_{self.advance.value}_{self.layout.value}_{how}"

    def violations(self, arch: Arch) -> list[str]:
        run = self.vec * self.width * self.weight.size
        return [
            *self.faults(),
            *must(self.threads % 32 == 0 and 32 <= self.threads <= 1024, f"threads is {self.threads}; expected 32 … 1024 in steps of 32"),
            *must(is_pow2(self.vec) and self.vec * self.x.size in (4, 8), f"vec is {self.vec} of {self.x.value}; expected 4 or 8 bytes"),
            *must(
                self.taps is Loads.ELEMENT or run % 4 == 0, f"a lane's taps have {run} bytes; expected a multiple of 4. Use taps=element."
            ),
            *self.arch_violations(arch),
        ]

    def parameters(self) -> list[Param]:
        strides = OPERANDS.stride_params(self)
        wide = [Param.i64("slots"), Param.i64("pad_slot_id")] if self.index is not Index.NONE else []
        wide += [Param.i64("window_rows")] if self.saves else []
        wide += [p for p in strides if p.code == "q"]
        sizes = ["dim"]
        sizes += [] if self.count is Tokens.FIXED else ["length"]  # COUNTED: tokens per sequence; RAGGED: tokens in all
        sizes += [] if self.runs else ["state_len"]
        sizes += ["window_tokens"] if self.saves else []
        sizes += ["parent_columns"] if self.parents is not Index.NONE and self.ragged else []
        narrow = [p for p in strides if p.code != "q"]
        return [*OPERANDS.pointers(self), *wide, *Param.divisor("channel_blocks"), *map(Param.u32, sizes), *narrow]

    def constants(self) -> dict[str, Any]:
        return {
            "pooled": self.index is not Index.NONE,
            "ragged": self.ragged,
            "fixed": self.count is Tokens.FIXED,
            "several": self.several,
            "tree": self.tree is not Index.NONE,
            "children": self.children is not Index.NONE,
            "most": MAX_TREE,
            "vector": self.loads is Loads.VECTOR,
            "vector_taps": self.taps is Loads.VECTOR,
            # Whether lanes have all of their channels, or none: vectors are used only if they divide the number of channels.
            "whole": Loads.VECTOR in (self.loads, self.taps) or self.layout is not StateLayout.ANY or self.saved is Saved.RUNS,
            "runs": self.runs,
            # Entries of a run before the history.
            "ahead": max(0, self.state_len - self.reach + 1) if self.advance is Advance.SHIFT else 0,
            "advance": self.advance.value,
            "saves": self.saves,
            "gates": self.gates,
            "residuals": self.residuals,
            "beside": self.beside,
        }


def tokens_of(reach: int, length: int, query_start_loc: Index, tree: Index = Index.NONE) -> tuple[int, Tokens]:
    """(tokens per pass, how they are counted). length: tokens per sequence, or in all if sequences are packed."""
    some = 4 if reach <= 5 else 2  # tokens that the registers hold in addition to the taps
    if query_start_loc is not Index.NONE:
        return some, Tokens.RAGGED
    fixed = range(1, MAX_TOKENS + 1) if tree is Index.NONE else range(2, some + 1)  # in a tree, registers hold each token's window
    return (length, Tokens.FIXED) if length in fixed else (some, Tokens.COUNTED)


def space(problem: UpdateProblem, arch: Arch) -> Iterator[UpdateSpec]:
    """Every legal variant of a problem, within the axes that are worth a trial."""
    vec = (4 // problem.x.size, 8 // problem.x.size)
    return trials(UpdateSpec, problem, arch, {"vec": vec, "threads": (64, 128, 256), "pdl": Pdl})


def candidates(problem: UpdateProblem, batch: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, UpdateSpec | None, str]]:
    """(rule, spec or None, why it does not apply). Nearly one variant serves every size: docs/performance.md lists the other trials."""
    one = problem.tokens == 1 and problem.saved is Saved.NO
    how: dict[str, Any] = {"min_blocks": 0 if one else 1}  # otherwise ptxas spills a few bytes, to stay below 64 registers
    if one and batch == 1 and problem.layout is StateLayout.RUNS and problem.x.size < 4:  # measured on an H100 and an H200
        yield (
            "one sequence",
            spec_of(UpdateSpec, problem, **how, vec=4 // problem.x.size, threads=64, pdl=Pdl.TRIGGER_LOADED if pdl else Pdl.OFF),
            "",
        )
    yield "single", spec_of(UpdateSpec, problem, **how, vec=8 // problem.x.size, pdl=Pdl.TRIGGER_LOADED if pdl else Pdl.OFF), ""
