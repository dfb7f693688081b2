"""A gated norm: its problem, and its kernel, as a separate operator or at the end of a layer.

A team of threads owns one group: `vec` neighbouring elements per thread and pass, all of them in registers, so that x and the gate are
read once. A team is part of a warp, a warp, or a block. Bytes per group: size * (sizeof(x) + sizeof(gate) + sizeof(out)); the weight
stays in L2.

The sum of squares has the same order in all variants: a chain over 4 neighbours, then pairs of neighbours, pairs of pairs, up to the whole
group. A missing neighbour adds nothing. The sum for the mean, which is subtracted first, has the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ..spec.kernel import LATER, Arch, DType, KernelSpec, Loads, Needs, Param, Pdl, Problem, is_pow2, must
from .norm import Activation
from .norm_operands import OPERANDS

MAX_GROUP = 16384
HELD = 32  # elements of a group that a thread holds, at most


# Up to this number of groups, small blocks reach more SMs: two blocks of one warp for each scheduler of the H200's 132 SMs.
FEW = 1056


@dataclass(frozen=True, slots=True, kw_only=True)
class NormProblem(Problem):
    """The problem that a call fixes. The number of rows and of groups per row are not part of it."""

    size: int  # elements of a group
    x: DType = DType.BF16
    gate: DType | None = DType.BF16
    weight: DType | None = DType.BF16
    out: DType = DType.BF16
    norm_first: bool = False  # the gate multiplies the normalised values, not the norm's input
    activation: Activation = Activation.SILU
    grouped: bool = False  # rows have several groups
    loads: Loads = Loads.VECTOR  # of all operands: aligned to the widest vector
    # Of norms without a gate
    residual: DType | None = field(default=None, metadata=LATER)  # added to x
    sum: DType | None = field(default=None, metadata=LATER)  # dtype of the tensor that receives the sum
    unit_offset: bool = field(default=False, metadata=LATER)  # 1 + weight multiplies
    rounded: bool = field(default=False, metadata=LATER)  # to out's dtype, before the weight
    # Of layer norms
    centred: bool = field(default=False, metadata=LATER)  # the mean is subtracted
    bias: DType | None = field(default=None, metadata=LATER)  # added after the weight

    @property
    def widest(self) -> int:
        """Largest number of elements per access."""
        return 8 if self.size % 8 == 0 and self.x is not DType.F32 else 4

    @property
    def partial(self) -> bool:
        """Whether the last vector of a group is partial. Operands are then loaded and stored element by element."""
        return self.size % 4 != 0

    def faults(self) -> list[str]:
        """Constraints that no variant can meet."""
        return [
            *must(1 <= self.size <= MAX_GROUP, f"size is {self.size}; expected 1 … {MAX_GROUP}"),
            *must(
                not self.partial or self.loads is Loads.ELEMENT,
                f"loads is {self.loads.value} with size {self.size}, no multiple of 4; expected loads=element",
            ),
            *must(self.gate is not None or not self.norm_first, "norm_first is yes and gate is none; expected a gate"),
            *must(
                self.gate is not None or self.activation is Activation.SILU,
                f"activation is {self.activation.value} and gate is none; expected a gate",
            ),
            *must(
                self.gate is None or not (self.residual or self.unit_offset or self.rounded),
                "a gate is set with residual, unit_offset or rounded; expected either",
            ),
            *must((self.residual is None) == (self.sum is None), "one of residual and sum is none; expected both or neither"),
            *must(
                self.weight is not None or not (self.unit_offset or self.rounded),
                "unit_offset or rounded is yes and weight is none; expected a weight",
            ),
            *must(self.centred or self.bias is None, "bias is set and centred is no; expected centred=yes"),
            *must(
                not self.centred or not (self.residual or self.unit_offset or self.rounded),
                "centred is yes with residual, unit_offset or rounded; expected none of them",
            ),
        ]


@dataclass(frozen=True, kw_only=True)
class NormKernel(KernelSpec, NormProblem):
    """A problem, and the choices of one variant. No choice here changes a bit of the result.

    A family's spec adds its name and its template, which may extend the template of the separate norm. `roles` are the operands by their
    names in the template, `operands` by their names in the call.
    """

    triggers_first: ClassVar[bool] = True

    vec: int  # elements per thread and pass
    team: int  # threads that own a group
    threads: int = 128
    min_blocks: int = 0  # blocks per SM that ptxas must leave registers for; 0 = its own choice
    pdl: Pdl = Pdl.OFF

    @property
    def passes(self) -> int:
        return -(-self.size // (self.team * self.vec))

    @property
    def teams(self) -> int:
        """Groups per block."""
        return self.threads // self.team

    @property
    def threads_per_block(self) -> int:
        return self.threads

    @property
    def stem(self) -> str:
        how = f"v{self.vec}t{self.team}x{self.threads}{'' if self.pdl is Pdl.OFF else '_pdl'}"
        gate = f"_{self.gate.value}{'_first' if self.norm_first else ''}_{self.activation.value}" if self.gate else ""
        added = f"_add_{self.residual.value}_{self.sum.value}" if self.residual and self.sum else ""
        weighed = ("_rounded" if self.rounded else "") + ("_plus1" if self.unit_offset else "")
        weighed += ("_centred" if self.centred else "") + (f"_bias_{self.bias.value}" if self.bias else "")
        return f"norm{self.size}{'s' if self.grouped else ''}_{self.x.value}_{self.out.value}{gate}{added}{weighed}_{how}"

    def violations(self, arch: Arch) -> list[str]:
        warps = self.team % 32 == 0
        if shape := [
            *must(self.vec in (4, 8), f"vec is {self.vec}; expected 4 or 8"),
            *must(
                1 <= self.team <= 1024 and (warps or (self.team < 32 and is_pow2(self.team))),
                f"team is {self.team}; expected 1, 2, 4, 8 or 16 threads, or 32 … 1024 in steps of 32",
            ),
        ]:
            return [*self.faults(), *shape]
        held, most = self.passes * self.vec, HELD if self.threads <= 512 else HELD // 2
        return [
            *self.faults(),
            *must(self.partial or self.size % self.vec == 0, f"size is {self.size}; expected a multiple of vec {self.vec}"),
            *must(not self.partial or self.vec == 4, f"vec is {self.vec}; expected 4 with size {self.size}, no multiple of 4"),
            *must(self.passes == 1 or is_pow2(self.team), f"team is {self.team} with {self.passes} passes; expected a power of two"),
            *must(self.threads % 32 == 0 and 32 <= self.threads <= 1024, f"threads is {self.threads}; expected 32 … 1024 in steps of 32"),
            *must(self.threads % self.team == 0, f"threads is {self.threads}; expected a multiple of team {self.team}"),
            *must(
                self.team <= 32 or self.threads == self.team,
                f"threads is {self.threads}; expected {self.team}, as many as meet at the team's barrier",
            ),
            *must(held <= most, f"a thread holds {held} elements of its group; expected at most {most} with {self.threads} threads"),
            *self.arch_violations(arch),
        ]

    def with_early_triggers(self) -> KernelSpec:
        return self if self.pdl is Pdl.OFF else replace(self, pdl=Pdl.TRIGGER_FIRST)

    @property
    def needs(self) -> Needs:
        return replace(super().needs, guarded=self.partial)

    def roles(self) -> list[str]:
        """Tensor arguments in order, by their names in the template."""
        return OPERANDS.of(self)

    def operands(self) -> list[str]:
        """Tensor arguments in order, by their names in the call."""
        return self.roles()

    def strides(self) -> list[tuple[str, str]]:
        """(role, axis) of every stride the kernel takes, in elements."""
        return [(role, axis) for role, axis, _ in OPERANDS.strides(self, self.roles())]

    def parameters(self) -> list[Param]:
        units = [Param.u32("units")] if self.teams > 1 else []
        groups = Param.divisor("groups") if self.grouped else []
        strides = [Param.u32(f"{role}_{axis}") for role, axis in self.strides()]
        return [*OPERANDS.pointers(self, self.roles()), *units, *groups, *strides, Param.f32("eps")]

    def _offsets(self) -> dict[str, str]:
        """The offset of each operand to a thread's first element."""
        terms: dict[str, list[str]] = {role: [] for role in self.roles()}
        for role, axis in self.strides():
            terms[role].append(f"u64({axis}) * {role}_{axis}")
        return {role: " + ".join([*sums, "column"]) for role, sums in terms.items()}

    def constants(self) -> dict[str, Any]:
        return {
            "vector": self.loads is Loads.VECTOR,
            "whole": self.passes * self.team * self.vec == self.size,
            "warps": max(1, self.team // 32),
            "warp_sums": _pow2(max(1, self.team // 32)),
            "offsets": self._offsets(),
            "rounds_sum": self.residual is not None and self.out not in (self.sum, DType.F32),
            "rounds_normed": self.rounded and self.out is not DType.F32,
            "pooled": False,  # rows have slots, and those without one are not written
            # For many elements, weight and bias are loaded late: after the registers of the gate, or of x before conversion, are free.
            "late_weight": (self.weight is not None or self.bias is not None) and self.passes * self.vec > 8,
        }


def _pow2(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def team_of(problem: NormProblem, vec: int, held: int) -> int:
    """The smallest team that holds a group with `held` elements per thread, at most 1024 threads: a power of two, or whole warps that need
    a single pass."""
    vectors = -(-problem.size // vec)
    if vectors <= 32:
        return _pow2(-(-vectors * vec // max(held, vec)))
    if held <= vec and vectors <= 1024:
        return -(-vectors // 32) * 32
    return min(1024, _pow2(-(-problem.size // held)))


def shape(problem: NormProblem, held: int, threads: int, vec: int = 0) -> dict[str, Any]:
    """The fields of a variant with about `held` elements per thread and about `threads` threads per block."""
    vec = vec or problem.widest
    team = team_of(problem, vec, held)
    return {"vec": vec, "team": team, "threads": team if team > 32 else threads}
