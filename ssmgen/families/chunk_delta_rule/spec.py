"""chunk_delta_rule: the gated delta rule over whole sequences, in chunks of 64 tokens on the tensor cores, by two kernels.

With gamma the running sum of a chunk's log2 decays, and rk = 1 / |k|, rq = scale / |q| (or 1 and scale), a chunk that begins in S gives

    A_ij = beta_j rk_i rk_j 2^(gamma_i - gamma_j) k_i.k_j, j < i        T = (I + A)^-1
    P_ij = beta_j rq_i rk_j 2^(gamma_i - gamma_j) q_i.k_j, j <= i
    X = v - 2^gamma rk (k S^T)        u = T X        o = 2^gamma rq (q S^T) + P u
    S <- 2^gamma_last S + (beta 2^(gamma_last - gamma) rk u)^T k

beta is in columns of A, not in rows: so ones are on T's diagonal, which no rounding moves, and u is without beta. T and P do not hang on S.
The first kernel makes them, of all chunks at once, and leaves for each chunk and head an *image*; the second one walks a sequence's chunks
with a head's S, some of its rows, in f32 in registers.
Bytes per token and head: 4 V of v and out, 2 x 174 of images, 4 K / (heads of a key head) of q and k, in each kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

from ...occupancy import LIMITS, SHARED_RESERVED
from ...spec import SM90, Arch, KernelSpec, Param, Pdl, Problem, must
from .problem import CHUNK, COEFFICIENTS, COEFFICIENTS_AT, IMAGE, P_AT, PANEL_BYTES, PANELS, T_AT, ChunkProblem, Gate

_STATES = ("initial_states", "final_states", "state", "checkpoints")
WORDS = {"images": "workspace"}  # what calls say for what kernels name by its contents


class Counts(NamedTuple):
    """What a launch's blocks are counted by."""

    chunks: int  # numbers of chunks: see problem.chunks_of
    sequences: int
    heads: int  # of v
    group_heads: int  # heads of v that share one of q and k


@dataclass(frozen=True, kw_only=True)
class DeltaSpec(KernelSpec, ChunkProblem):
    """How one of the two kernels computes its part. A class has its roles, its template and its choices."""

    here: ClassVar[tuple[str, ...]]  # roles of the operands that the kernel takes, where the problem has them
    written: ClassVar[tuple[str, ...]]  # those of them that it writes
    scaled: ClassVar[bool] = False  # whether it takes the scale

    pdl: Pdl = Pdl.OFF

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
    def mapped(self) -> dict[str, int]:
        """Operands whose tiles are copied by tensor maps, and how many columns at once."""
        return {}

    def strides(self) -> list[tuple[str, str]]:
        """(role, axis) of every stride the kernel takes, in elements. Those of batches and slots are 64-bit."""
        batch = [] if self.ragged else ["batch"]
        axes = {
            **dict.fromkeys(("q", "k", "v", "out", "g", "beta"), [*batch, "token", "head"]),
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
        return [*pointers, *maps, *wide, *map(Param.u32, counts), *narrow, *([Param.f32("scale")] if self.scaled else [])]

    def constants(self) -> dict[str, Any]:
        return {
            "chunk": CHUNK,
            "image": IMAGE,
            "panels": PANELS,
            "panel_bytes": PANEL_BYTES,
            "t_at": T_AT,
            "p_at": P_AT,
            "coefficients_at": COEFFICIENTS_AT,
            "coefficients": COEFFICIENTS,
            "gated": self.gate is not Gate.NONE,
        }

    def common_violations(self, arch: Arch, shared_bytes: int) -> list[str]:
        """What every kernel asks for, of a legal problem."""
        most = LIMITS[arch.number].shared - SHARED_RESERVED if arch.number in LIMITS else 48 << 10
        return [
            *must(shared_bytes <= most, f"{shared_bytes} bytes of shared memory exceed the {most} of {arch}"),
            *must(arch >= Arch(80), f"asynchronous copies and bf16 need sm_80, not {arch}"),
            *must(arch >= SM90 or self.pdl is Pdl.OFF, f"programmatic dependent launch needs sm_90, not {arch}"),
        ]


def of_problem(problem: Problem, kind: type[Problem]) -> dict[str, Any]:
    """The fields of a spec that are those of a kind of problem."""
    return {f.name: getattr(problem, f.name) for f in fields(kind)}
