"""chunk_linear_attention: linear attentions whose state decays per key channel, over whole sequences, by two kernels.

A chunk has 64 rows: a token's each, or of the low-rank form two for each of 32 tokens, of which the first half writes v and the second one
what is read. With gamma the running sum of log2 decays of a key channel, e what is read with and w what is written with, a chunk that
begins in S gives

    E_i = e_i 2^gamma_i        Q_i = scale q_i 2^gamma_i        W_j = w_j 2^(gamma_last - gamma_j)        decay = 2^gamma_last
    A_ij = sum over channels of e_i w_j 2^(gamma_i - gamma_j), j < i        T = (I + A)^-1
    P_ij = scale times that of q_i w_j 2^(gamma_i - gamma_j), j <= i
    X = v - E S^T        u = T X        o = Q S^T + P u        S <- S diag(decay) + u^T W

What reads the state before its decay has gamma of the token before in E and A. beta is in w: so ones are on T's diagonal, which no
rounding moves. The first kernel makes all but X, u and o, of all chunks at once, and leaves for each chunk and head an *image*; the second
one walks a sequence's chunks with a head's S, some of its rows, in f32 in registers.
Bytes per token and head: 4 V of v and out, 2 x (6 K + 160 + K / 16) of images, and q, k and gates once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...occupancy import LIMITS, SHARED_RESERVED
from ...spec import SM90, Arch, KernelSpec, Param, Pdl, must
from ..chunk_delta_rule.spec import WORDS, Counts, of_problem
from ..linear_attention.problem import Gate
from .problem import BLOCK, BLOCK_BYTES, PANEL_BYTES, PANELS, ROWS, ImageProblem, Rule

__all__ = ["Counts", "LinearSpec", "of_problem"]

_STATES = ("initial_states", "final_states", "state", "checkpoints")


@dataclass(frozen=True, kw_only=True)
class LinearSpec(KernelSpec, ImageProblem):
    """How one of the two kernels computes its part. A class has its roles, its template and its choices."""

    here: ClassVar[tuple[str, ...]]  # roles of the operands that the kernel takes, where the problem has them
    written: ClassVar[tuple[str, ...]]  # those of them that it writes
    scaled: ClassVar[bool] = False  # whether it takes the scale, and what else gates are made with

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
        per_token = ("q", "k", "v", "out", "g", "gk", "beta", "read", "write", "erase", "alpha")
        axes = {
            **dict.fromkeys(per_token, [*batch, "token", "head"]),
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
        numbers = ["scale", *(["lower_bound"] if self.gate is Gate.BOUNDED else [])] if self.scaled else []
        return [*pointers, *maps, *wide, *map(Param.u32, counts), *narrow, *map(Param.f32, numbers)]

    def constants(self) -> dict[str, Any]:
        return {
            "rows": ROWS,
            "chunk": self.rule.tokens,
            "reads": self.rule.reads,
            "low_rank": self.rule is Rule.LOW_RANK,
            "block": BLOCK,
            "block_bytes": BLOCK_BYTES,
            "image": self.image,
            "panels": PANELS,
            "panel_bytes": PANEL_BYTES,
        }

    def common_violations(self, arch: Arch, shared_bytes: int) -> list[str]:
        """What every kernel asks for, of a legal problem."""
        most = LIMITS[arch.number].shared - SHARED_RESERVED if arch.number in LIMITS else 48 << 10
        return [
            *must(shared_bytes <= most, f"{shared_bytes} bytes of shared memory exceed the {most} of {arch}"),
            *must(arch >= Arch(80), f"asynchronous copies and bf16 need sm_80, not {arch}"),
            *must(arch >= SM90 or self.pdl is Pdl.OFF, f"programmatic dependent launch needs sm_90, not {arch}"),
        ]
