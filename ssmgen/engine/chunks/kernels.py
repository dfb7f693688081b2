"""What kernels over chunks of prompts have in common.

A first kernel leaves an image of each chunk and head in the workspace; the chain, behind it, walks a sequence's chunks with the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, ClassVar, NamedTuple, TypeVar

from ...occupancy import LIMITS, SHARED_RESERVED
from ...spec import SM90, Arch, Index, KernelSpec, Loads, Needs, Param, Pdl, Problem, must
from .problem import Chunked, Stated

WORDS = {"images": "workspace"}  # what calls say for what kernels name by its contents
_PER_TOKEN = ("q", "k", "v", "out", "g", "gk", "beta", "read", "write", "erase", "alpha")
# Rows of a state in a block of the chain: powers of two, by which rows of v are turned in shared memory. With 128, ptxas
# leaves a thread 168 registers of the 217 that it wants.
TILES = (16, 32, 64)
# Blocks of 32 rows of one sequence: up to so many have an SM each, whose shared memory then serves two warps. Four would wait for it.
FEW = 128
_STATES = ("initial_states", "final_states", "state", "checkpoints")
C = TypeVar("C", bound="Chain")


class Counts(NamedTuple):
    """What a launch's blocks are counted by."""

    chunks: int  # numbers of chunks: see problem.chunks_of
    sequences: int
    heads: int  # of v
    group_heads: int  # heads of v that share one of q and k
    tokens: int = 0  # of all sequences, where these may be cut into segments


class ChunkKernel(KernelSpec, Chunked):
    """One of a call's kernels. A class has its roles, its template and its choices."""

    __slots__ = ()
    here: ClassVar[tuple[str, ...]]  # roles of the operands that the kernel takes, where the problem has them
    written: ClassVar[tuple[str, ...]]  # those of them that it writes

    def blocks(self, counts: Counts) -> int:
        """Blocks of a launch."""
        raise NotImplementedError

    def counted(self, counts: Counts) -> dict[str, int]:
        """Arguments that say which part of a launch is a block's, where a kernel has such beside those that all have."""
        return {}

    def roles(self) -> list[str]:
        """Tensor arguments in order, as kernels name them."""
        there = self.elements()
        return [role for role in self.here if role in there]

    def operands(self) -> list[str]:
        """The same, as calls name them."""
        return [WORDS.get(role, role) for role in self.roles()]

    @property
    def numbers(self) -> tuple[str, ...]:
        """f32 arguments."""
        return ()

    @property
    def mapped(self) -> dict[str, int]:
        """Operands whose tiles are copied by tensor maps, and how many columns at once."""
        return {}

    def strides(self) -> list[tuple[str, str]]:
        """(role, axis) of every stride the kernel takes, in elements. Those of batches and slots are 64-bit."""
        batch = [] if self.ragged else ["batch"]
        axes = {
            **dict.fromkeys(_PER_TOKEN, [*batch, "token", "head"]),
            **dict.fromkeys(("A_log", "dt_bias"), ["head"]),
            **dict.fromkeys(_STATES, ["slot", "head"]),
            "checkpoint_positions": ["position"],
            **dict.fromkeys(("cu_seqlens", "state_indices", "has_initial_state"), ["sequence"]),
        }
        return [(role, axis) for role in self.roles() for axis in axes.get(role, [])]

    def parameters(self) -> list[Param]:
        """Pointers come first."""
        roles, element = self.roles(), self.elements()
        pointers = [Param.pointer(role, element[role], const=role not in self.written) for role in roles]
        wide = [Param.i64("slots"), Param.i64("pad_slot_id")] if "state_indices" in roles else []
        wide += [Param.i64(f"{op}_{axis}") for op, axis in self.strides() if axis in ("batch", "slot")]
        narrow = [Param.u32(f"{op}_{axis}") for op, axis in self.strides() if axis not in ("batch", "slot")]
        counts = ["tokens", "sequences", "heads", "group_heads", *(["positions"] if "checkpoints" in roles else [])]
        maps = [Param.tiles(f"{operand}_tiles") for operand in self.mapped]
        return [*pointers, *maps, *wide, *map(Param.u32, counts), *narrow, *map(Param.f32, self.numbers)]

    def common_violations(self, arch: Arch, shared_bytes: int) -> list[str]:
        """What every kernel asks for, of a legal problem."""
        most = LIMITS[arch.number].shared - SHARED_RESERVED if arch.number in LIMITS else 48 << 10
        return [
            *must(shared_bytes <= most, f"{shared_bytes} bytes of shared memory exceed the {most} of {arch}"),
            *must(arch >= Arch(80), f"asynchronous copies and bf16 need sm_80, not {arch}"),
            *must(arch >= SM90 or self.pdl is Pdl.OFF, f"programmatic dependent launch needs sm_90, not {arch}"),
        ]


class Chain(ChunkKernel, Stated):
    """The last of a call's kernels, by each warp's own products: some warps hold 16 rows of the state each, the others fetch."""

    __slots__ = ()
    written: ClassVar[tuple[str, ...]] = ("out", "final_states", "state", "checkpoints")
    terms: ClassVar[int] = 1  # 16-bit terms of an operand of a product
    ends: ClassVar[bool] = False  # whether it makes N and M of whole sequences, and no outputs
    leads: ClassVar[bool] = False  # whether it walks first segments, and sequences that are not cut
    beside: ClassVar[bool] = False  # whether it runs beside the kernel ahead of it, and waits for that when it is done itself

    state_loads: Loads
    tile: int
    stages: int
    fetchers: int
    min_blocks: int
    ahead_pdl: Pdl
    divided: bool  # whether sequences may be cut into segments

    @property
    def behind(self) -> bool:
        """Whether a block has a segment that is not a sequence's first one, and whose state comes from the workspace."""
        return self.divided and not self.leads

    def roles(self) -> list[str]:
        starts = ("initial_states", "has_initial_state") if self.behind else ()
        return [role for role in super().roles() if role not in starts]

    @property
    def needs(self) -> Needs:
        elements = self.state_loads is Loads.ELEMENT
        return Needs(
            matrices=True, matrix_turns=True, matrix_stores=True, shared_pairs=True, shared_quads=True, places=True, copies=True,
            meetings=True, bytes=True, elements=elements, mma=self.x.value,
        )  # fmt: skip

    @property
    def early(self) -> bool:
        """Whether what the kernel ahead does not write is read before the wait for it."""
        return self.pdl not in (Pdl.OFF, Pdl.TRIGGER_TOP)

    def early_operands(self) -> list[str]:
        late = ("out", "final_states", "checkpoints") if self.beside else ("workspace", "out", "final_states", "checkpoints")
        return [name for name in self.operands() if self.early and name not in late]

    @property
    def threads_per_block(self) -> int:
        return 32 * (self.tile // 16 + self.fetchers)

    @property
    def tiles(self) -> int:
        """Blocks per head."""
        return self.head_v // self.tile

    @property
    def v_words(self) -> int:
        """32-bit words from one token's v to the next one's."""
        return self.tile // 2

    @property
    def shared_bytes(self) -> int:
        return self.dynamic_bytes

    def constants(self) -> dict[str, Any]:
        return super().constants() | {
            "vector_state": self.state_loads is Loads.VECTOR,
            "pooled": self.index is not Index.NONE,
            # what holds the state before the first token
            "past": "" if self.behind else "state" if self.started else "initial_states" if self.initial else "",
            "past_slot": "sequence" if self.pool and self.initial else "slot",
            "kept": "state" if self.pool else "final_states" if self.final else "",  # what receives the last one
        }

    def violations(self, arch: Arch) -> list[str]:
        if problems := [
            *self.faults(),
            *must(self.tile in TILES, f"tile {self.tile} is not {', '.join(map(str, TILES))}"),
        ]:
            return problems
        return [
            *must(self.head_v % self.tile == 0, f"tile {self.tile} does not divide V {self.head_v}"),
            *must(1 <= self.stages <= 4, f"stages {self.stages} are not 1 … 4"),
            *must(self.min_blocks >= 1, f"min_blocks {self.min_blocks} is not positive"),
            *must(self.fetchers in (1, 2, 4), f"fetchers {self.fetchers} are not 1, 2 or 4"),
            *must(self.min_blocks == 1 or self.tile <= 32, f"{self.min_blocks} blocks of {self.tile} rows leave too few registers"),
            *must(arch >= SM90 or self.ahead_pdl is Pdl.OFF, f"programmatic dependent launch needs sm_90, not {arch}"),
            *self.common_violations(arch, self.shared_bytes),
        ]


def of_problem(problem: Problem, kind: type[Problem]) -> dict[str, Any]:
    """The fields of a spec that are those of a kind of problem."""
    return {f.name: getattr(problem, f.name) for f in fields(kind)}


def of_lead(spec: Any, kind: type[Problem]) -> dict[str, Any]:
    """The fields of the kernel that walks first segments, of a call's last one: the kernel behind it need not wait for it."""
    how = {name: getattr(spec, name) for name in ("tile", "stages", "fetchers", "min_blocks")}
    return of_problem(spec, kind) | how | {"pdl": released(spec.pdl)}


def released(pdl: Pdl) -> Pdl:
    """How a kernel waits, that lets the one behind it start, or that starts, as soon as there is what both take."""
    return pdl if pdl is Pdl.OFF else Pdl.TRIGGER_LOADED


def edge_of(arch: Arch, pdl: bool) -> dict[str, Any]:
    """How the kernels of a call wait for the one ahead of them."""
    return {"pdl": Pdl.TRIGGER_LOADED if arch >= SM90 else Pdl.OFF, "ahead_pdl": Pdl.TRIGGER_LOADED if pdl else Pdl.OFF}


def by_warps(make: Callable[..., C], head_v: int, heads: int) -> Iterator[tuple[str, C | None, str]]:
    """(rule, spec, ""), best first, of chains by each warp's own products. make: (tile=, stages=) -> spec. The last one needs the least
    shared memory."""
    tiles = [t for t in TILES if head_v % t == 0]
    few = [t for t in tiles if t <= 32]
    tile = few[-1] if heads * head_v // 32 <= FEW else tiles[-1]
    # With three stages a chunk has the time of two to come, with two that of one; with one, nothing overlaps.
    yield "three stages", make(tile=tile, stages=3), ""
    yield "two stages", make(tile=tile, stages=2), ""
    yield "narrow", make(tile=few[-1], stages=2), ""
    yield "one stage", make(tile=tile, stages=1), ""
    yield "generic", make(tile=16, stages=1), ""
