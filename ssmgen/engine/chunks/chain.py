"""Specs of the kernels that scan chunks with the state, by their role in a call and by their backend for matrix products.

A family derives its spec, and adds the properties of its chunk images: operands, shared memory, library needs. No choice here changes a bit
of the result, except the backend, whose products sum in another order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, TypeVar

from ...spec.kernel import NAMED, SM90, Arch, DType, Index, KernelSpec, Layout, Loads, Needs, Pdl, changed, made, must, text_of
from . import warpgroups
from .kernels import ChunkKernel, Counts, released
from .problem import Divided, Stated
from .warpgroups import ROWS

# State rows per block of the chain: powers of two, by which rows of v are swizzled in shared memory. With 128 rows, ptxas gives a thread
# 168 of the 217 registers that it needs.
TILES = (16, 32, 64)
# Fields with other defaults for warpgroups. Texts of chains by warpgroups may leave these values out, texts of chains by warps may not.
ON_WARPGROUPS = {"stages": 3, "fetchers": 1}
C = TypeVar("C", bound="Chain")


class Role(Enum):
    """The role of a chunk kernel in a call."""

    CHAIN = "chain"  # outputs and states: of whole sequences, or of all segments except the first if sequences are split
    LEAD = "lead"  # outputs and states of first segments and of sequences that are not split; also leaves states for the other segments
    SUMS = "sums"  # N and M of segments: a segment takes the state S to S M + N
    ENDS = "ends"  # N and M of whole sequences, into [sequences, HV, V + K, K] f32, M below N


class Backend(Enum):
    """The unit that computes products."""

    WARPS = "warps"  # each warp computes its own: some warps hold 16 rows of the state each, the others load
    WARPGROUPS = "warpgroups"  # the tensor cores of sm_90a: one warpgroup loads, one writes o, each of the others holds 64 rows


@dataclass(frozen=True, kw_only=True)
class Chain(ChunkKernel, Stated, Divided):
    """A problem, and the kernel that scans its chunks with the state, in f32 in registers, after the kernel that prepares them."""

    terms: ClassVar[int] = 1  # 16-bit terms of an operand of a product
    walks: ClassVar[bool] = True

    role: Role = field(default=Role.CHAIN, metadata=NAMED)
    backend: Backend = field(default=Backend.WARPS, metadata=NAMED)
    tile: int = 64  # rows of the state (value channels) per block, 16 per walker
    stages: int = 2  # chunks in shared memory: the current one, and the chunks that are loading
    fetchers: int = 2  # warps
    min_blocks: int = 1  # blocks per SM that ptxas must leave registers for
    ahead_pdl: Pdl = Pdl.OFF  # PDL of the kernel that prepares
    transitions: bool = field(default=True, metadata=NAMED)  # role ENDS: also compute M

    @classmethod
    def kinds(cls) -> Mapping[str, Mapping[str, Any]]:
        return {
            _kind(cls.family, role, backend): {"role": role, "backend": backend} | (ON_WARPGROUPS if backend is Backend.WARPGROUPS else {})
            for role in Role
            for backend in Backend
        }

    @classmethod
    def by_warpgroups(cls: type[C], **given: Any) -> C:
        return made(cls, ON_WARPGROUPS | given | {"backend": Backend.WARPGROUPS})

    @property
    def kind(self) -> str:
        return _kind(self.family, self.role, self.backend)

    def said(self) -> Iterator[str]:
        yield from super().said()
        if self.ends:
            yield f"transitions={text_of(self.transitions)}"

    @property
    def template(self) -> str:
        return f"{self.family}/{'warpgroups/' if self.grouped else ''}chain.cu.j2"

    @property
    def grouped(self) -> bool:
        """Whether warpgroups compute products."""
        return self.backend is Backend.WARPGROUPS

    @property
    def leads(self) -> bool:
        return self.role is Role.LEAD

    @property
    def ends(self) -> bool:
        return self.role is Role.ENDS

    @property
    def sums(self) -> bool:
        """Whether it computes N and M, and no outputs."""
        return self.role in (Role.SUMS, Role.ENDS)

    @property
    def beside(self) -> bool:
        """Whether it runs concurrently with the previous kernel, and waits for that kernel only at its own end."""
        return self.role is Role.SUMS

    @property
    def behind(self) -> bool:
        """Whether some blocks process later segments of a sequence, whose initial state is in the workspace."""
        return self.divided and not self.leads

    # The kernels of a call

    @abstractmethod
    def prepared(self) -> tuple[KernelSpec, KernelSpec]:
        """The kernel that makes chunk images, and the kernel that joins segments."""

    @abstractmethod
    def unread(self) -> dict[str, Any]:
        """Values for the fields that N and M do not depend on, as if the call had none of these operands."""

    @property
    def ahead(self) -> tuple[KernelSpec, ...]:
        if self.role is not Role.CHAIN:
            return ()
        prepare, join = self.prepared()
        return (prepare, self.leading(), self.summing(), join) if self.divided else (prepare,)

    def leading(self: C) -> C:
        """The kernel for first segments; the next kernel need not wait for it."""
        return changed(self, role=Role.LEAD, pdl=released(self.pdl), ahead_pdl=Pdl.OFF)

    def summing(self: C) -> C:
        """The kernel that computes N and M of segments."""
        return changed(self, role=Role.SUMS, tile=self._tile_of_sums(True), **self._stateless())

    def ending(self: C, transitions: bool) -> C:
        """The kernel that computes N of whole sequences from this call's images, and M too with `transitions`."""
        whole = {"pool": False, "index": Index.NONE, "segments": 1, "segment_chunks": 1, "transitions": transitions}
        return changed(self, role=Role.ENDS, tile=self._tile_of_sums(transitions), **self._stateless() | whole)

    def _tile_of_sums(self, transitions: bool) -> int:
        if self.grouped:
            wide = transitions and self.head_k % (2 * ROWS) == 0 and self.head_v % (2 * ROWS) == 0
            return 2 * ROWS if wide else ROWS
        return max(t for t in TILES if t <= self.tile and self.head_k % t == 0)

    def _stateless(self) -> dict[str, Any]:
        """The fields of a kernel without states as operands. A pool's slots still mark padded sequences."""
        nothing = {"initial": False, "final": False, "started": False, "pool": self.index is not Index.NONE, "checkpoints": Index.NONE}
        plain = {"state": DType.F32, "layout": Layout.VK, "state_loads": Loads.VECTOR, "pdl": released(self.pdl), "ahead_pdl": Pdl.OFF}
        return self.unread() | nothing | plain

    # A launch

    @property
    def outputs(self) -> bool:
        return not self.sums

    @property
    def leaves(self) -> bool:
        return self.role in (Role.LEAD, Role.SUMS)

    @property
    def tiles(self) -> int:
        """Blocks per head, or per head of a segment: each has `tile` rows of the state, or of N or M."""
        rows = {Role.SUMS: self.head_k, Role.ENDS: self.head_k * self.transitions}.get(self.role, 0)
        return (self.head_v + rows) // self.tile

    def blocks(self, counts: Counts) -> int:
        walked = counts.sequences
        if self.behind:
            walked = self.candidates(counts.tokens, counts.sequences) * (self.segments - self.sums)
        return walked * counts.heads * self.tiles

    @property
    def threads_per_block(self) -> int:
        if self.grouped:
            return 128 * ((1 if self.sums else 2) + self.tile // ROWS)
        return 32 * (self.tile // 16 + self.fetchers)

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory; warpgroups also need barriers, and space to align to a multiple of 1024."""
        return self.dynamic_bytes + (1024 if self.grouped else 0)

    @property
    def order(self) -> tuple[str | int, ...]:
        return (self.kind,) if self.grouped else ()

    @property
    def early(self) -> bool:
        """Whether operands that the previous kernel does not write are read before the wait for it."""
        return self.pdl not in (Pdl.OFF, Pdl.TRIGGER_TOP)

    def early_operands(self) -> list[str]:
        late = ("out", "final_states", "checkpoints") if self.beside else ("workspace", "out", "final_states", "checkpoints")
        return [name for name in self.operands() if self.early and name not in late]

    # A text

    @property
    def stem(self) -> str:
        role = {Role.ENDS: "ends" if self.transitions else "ends_n"}.get(self.role, self.role.value)
        how = [f"t{self.tile}s{self.stages}f{self.fetchers}", f"b{self.min_blocks}" if self.min_blocks > 1 else ""]
        how += [f"n{self.segments}" if self.divided else "", "" if self.pdl is Pdl.OFF else "_pdl"]
        return "_".join([self.word, role, *(["wg"] if self.grouped else []), *self.shape(), "".join(how)])

    @abstractmethod
    def shape(self) -> list[str]:
        """The parts of its name that describe the problem."""

    @property
    def needs(self) -> Needs:
        return Needs(
            matrices=True, matrix_turns=True, matrix_stores=True, shared_pairs=True, shared_quads=True, places=True, copies=True,
            meetings=True, bytes=True, elements=self.state_loads is Loads.ELEMENT, mma=self.x.value,
        )  # fmt: skip

    @property
    def v_words(self) -> int:
        """32-bit words from one token's v to the next one's."""
        return self.tile // 2

    def constants(self) -> dict[str, Any]:
        found = super().constants() | self.state_constants()
        found |= {"past": ""} if self.behind or self.sums else {}
        found |= {"kept": ""} if self.sums else {}
        return found | ({"registers": warpgroups.registers(self.tile, self.head_k, self.sums)} if self.grouped else {})

    # Constraints

    def violations(self, arch: Arch) -> list[str]:
        own = self.faults() or self.violations_of_shape(arch) or self._violations_of_role()
        return own or [problem for kernel in self.ahead for problem in kernel.violations(arch)]

    def violations_of_shape(self, arch: Arch) -> list[str]:
        """Violated constraints of tiles, stages and threads, for any role."""
        return self._of_warpgroups(arch) if self.grouped else self._of_warps(arch)

    def _of_warps(self, arch: Arch) -> list[str]:
        if wrong := must(self.tile in TILES, f"tile is {self.tile}; expected one of {', '.join(map(str, TILES))}"):
            return wrong
        return [
            *must(self.head_v % self.tile == 0, f"tile is {self.tile}; expected a divisor of V = {self.head_v}"),
            *must(1 <= self.stages <= 4, f"stages is {self.stages}; expected 1 … 4"),
            *must(self.min_blocks >= 1, f"min_blocks is {self.min_blocks}; expected 1 or more"),
            *must(self.fetchers in (1, 2, 4), f"fetchers is {self.fetchers}; expected 1, 2 or 4"),
            *must(
                self.min_blocks == 1 or self.tile <= 32,
                f"min_blocks is {self.min_blocks} with tile {self.tile}; expected 1 above a tile of 32, for enough registers",
            ),
            *must(arch >= SM90 or self.ahead_pdl is Pdl.OFF, f"arch is {arch}; expected sm_90 or later, or pdl=off"),
            *self.common_violations(arch, self.shared_bytes),
        ]

    def _of_warpgroups(self, arch: Arch) -> list[str]:
        tiles = warpgroups.TILES
        return [
            *must(str(arch) == "sm_90a", f"arch is {arch}; expected sm_90a for warpgroup products"),
            *must(self.tile in tiles, f"tile is {self.tile}; expected 64 or 128"),
            *must(self.tile not in tiles or self.head_v % self.tile == 0, f"tile is {self.tile}; expected a divisor of V = {self.head_v}"),
            *must(self.head_k in (64, 128), f"K is {self.head_k}; expected 64 or 128"),
            *must(self.tile == ROWS or not self.marked, f"tile is {self.tile} with checkpoints; expected {ROWS}, for enough registers"),
            *must(self.copy == 16, f"q, k, v and out are contiguous and aligned for {self.copy} bytes; expected 16"),
            *must(2 <= self.stages <= 4, f"stages is {self.stages}; expected 2 … 4"),
            *must(
                self.min_blocks == 1, f"min_blocks is {self.min_blocks}; expected 1, since each role of warps sets its own register count"
            ),
            *must(self.fetchers == 1, f"fetchers is {self.fetchers}; expected 1, a warpgroup"),
            *self.common_violations(arch, self.shared_bytes),
        ]

    def _violations_of_role(self) -> list[str]:
        if self.leads:
            return must(self.divided, f"segments is {self.segments}; expected 2 or more for the kernel of the first segment")
        return [
            *must(
                self.divided or self.role is not Role.SUMS,
                f"segments is {self.segments}; expected 2 or more for the kernel of the segments' sums",
            ),
            *must(not self.sums or self.head_k % self.tile == 0, f"tile is {self.tile}; expected a divisor of K = {self.head_k}"),
        ]


def _kind(family: str, role: Role, backend: Backend) -> str:
    if role is Role.CHAIN:
        return family if backend is Backend.WARPS else f"{family}_warpgroups"
    return f"{family}_{role.value}" if backend is Backend.WARPS else f"{family}_warpgroup_{role.value}"
