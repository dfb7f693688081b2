"""Base of all kernels over chunks of prompts.

A first kernel writes an image of each chunk and head to the workspace; then the chain scans a sequence's chunks with the state.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar, NamedTuple

from ...compile.occupancy import shared_violations
from ...spec.kernel import SM90, Arch, KernelSpec, Param, Pdl, Problem
from .problem import Chunked


class Counts(NamedTuple):
    """The sizes that determine the number of blocks of a launch."""

    chunks: int  # chunk numbers: see problem.chunks_of
    sequences: int
    heads: int  # of v
    group_heads: int  # heads of v that share one of q and k
    tokens: int = 0  # of all sequences, if these may be split into segments


class ChunkKernel(KernelSpec, Chunked):
    """One kernel of a call. A class defines its roles, its template and its choices."""

    __slots__ = ()
    word: ClassVar[str]  # for the family, in names of kernels
    prepares: ClassVar[bool] = False  # whether it makes images
    walks: ClassVar[bool] = False  # whether it scans chunks with the state

    @property
    def outputs(self) -> bool:
        """Whether it writes outputs, and the requested states."""
        return False

    @property
    def leaves(self) -> bool:
        """Whether it writes into the workspace."""
        return True

    def blocks(self, counts: Counts) -> int:
        """Blocks of a launch."""
        raise NotImplementedError

    def counted(self, counts: Counts) -> dict[str, int]:
        """Further arguments that locate a block's work, for kernels that have some."""
        return {}

    def operands(self) -> list[str]:
        """Tensor arguments in order, as calls name them: the order of the table, except that images to be read come first."""
        return sorted(self.table.of(self), key=lambda name: self.prepares or name != "workspace")

    def roles(self) -> list[str]:
        """The same operands by their names in kernels."""
        return [self.table[name].parameter for name in self.operands()]

    @property
    def numbers(self) -> tuple[str, ...]:
        """f32 arguments."""
        return ()

    @property
    def mapped(self) -> dict[str, int]:
        """Operands whose tiles are copied by tensor maps, and how many columns at once."""
        return {}

    def parameters(self) -> list[Param]:
        """Pointers come first."""
        roles, strides = self.roles(), self.table.stride_params(self)
        slots = [Param.i64("slots"), Param.i64("pad_slot_id")] if "state_indices" in roles else []
        wide, narrow = ([p for p in strides if (p.code == "q") is is_wide] for is_wide in (True, False))
        counts = ["tokens", "sequences", "heads", "group_heads", *(["positions"] if "checkpoints" in roles else [])]
        maps = [Param.tiles(f"{operand}_tiles") for operand in self.mapped]
        pointers = self.table.pointers(self, self.operands())
        return [*pointers, *maps, *slots, *wide, *map(Param.u32, counts), *narrow, *map(Param.f32, self.numbers)]

    def common_violations(self, arch: Arch, shared_bytes: int) -> list[str]:
        """Constraints of every kernel on a legal problem."""
        return [
            *shared_violations(arch, shared_bytes),
            *self.arch_violations(arch, "asynchronous copies and bf16"),
        ]


def of_problem(problem: Problem, kind: type[Problem]) -> dict[str, Any]:
    """The fields of a spec that belong to a kind of problem."""
    return {f.name: getattr(problem, f.name) for f in fields(kind)}


def released(pdl: Pdl) -> Pdl:
    """The wait of two kernels around an early start: the second one may start as soon as the inputs of both are ready."""
    return pdl if pdl is Pdl.OFF else Pdl.TRIGGER_LOADED


def edge_of(arch: Arch, pdl: bool) -> dict[str, Any]:
    """How each kernel of a call waits for the previous one."""
    return {"pdl": Pdl.TRIGGER_LOADED if arch >= SM90 else Pdl.OFF, "ahead_pdl": Pdl.TRIGGER_LOADED if pdl else Pdl.OFF}
