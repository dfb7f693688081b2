"""gated_rms_norm: the gated norm after the state update of Mamba-2, gated delta rule and KDA layers; rms_norm: the norm between layers,
without a gate, which may add a layer's output to its residual; and gated_layer_norm, which subtracts the mean and may add a bias.

A team of threads owns one group: `vec` neighbouring elements per thread and pass, all of them in registers, so that x and the gate are
read once. Teams are a part of a warp, a warp, or a block. Bytes per group: size * (sizeof(x) + sizeof(gate) + sizeof(out)); the weight
stays in L2.

The sum of squares has one order in every variant: a chain over 4 neighbours, then pairs of neighbours, pairs of pairs, and so on up to the
whole group; a missing neighbour adds nothing. The sum for the mean has the same order; the mean is subtracted before the squares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ...engine.layers.norm import LayerGatedNormSpec as LayerGatedNormSpec
from ...engine.norm_kernel import FEW, NormKernel, NormProblem, shape
from ...spec.kernel import Arch, Pdl
from ...spec.variants import legal, spec_of

OPERATOR = "gated_rms_norm"
EARLY = 128  # groups up to which it triggers early, for a product that loads its weights meanwhile: 16 rows of a Mamba-2 layer's 8
SIZE, MAX_SIZE = "groups", 2**17  # the rules compare this size; beyond the maximum, nothing changes


@dataclass(frozen=True, kw_only=True)
class NormSpec(NormKernel):
    """A problem, and how one variant computes it."""

    family: ClassVar[str] = OPERATOR
    template: ClassVar[str] = "gated_rms_norm/gated_rms_norm.cu.j2"


def _shape(problem: NormProblem, held: int, threads: int, vec: int = 0, **how: Any) -> NormSpec:
    """The variant whose threads hold about `held` elements each, in blocks of about `threads` threads."""
    return spec_of(NormSpec, problem, **shape(problem, held, threads, vec), **how)


def space(problem: NormProblem, arch: Arch) -> Iterator[NormSpec]:
    """Every legal variant of a problem, within the axes that are worth a trial."""
    found: dict[NormSpec, None] = {}
    for vec in (4, 8):
        for held in (4, 8, 16, 32):
            for threads in (32, 64, 128, 256):
                for pdl in (Pdl.OFF, Pdl.WAIT, Pdl.TRIGGER_FIRST, Pdl.TRIGGER_TOP, Pdl.TRIGGER_LOADED):
                    found.setdefault(_shape(problem, held, threads, vec, pdl=pdl))
    return legal(found, arch)


def candidates(problem: NormProblem, groups: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, NormSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one applies to every legal problem."""
    if groups > FEW:
        yield "few-groups", None, f"a call has {groups} groups; the rule is for at most {FEW}"
    elif MIDDLE // 2 < problem.size <= MIDDLE:
        yield "few-groups", _shape(problem, 4, 32, 4, pdl=Pdl.TRIGGER_LOADED if pdl else Pdl.OFF), ""
    else:
        early = Pdl.TRIGGER_TOP if groups * problem.size <= LITTLE else Pdl.TRIGGER_LOADED
        yield "few-groups", _shape(problem, problem.widest, 32, pdl=early if pdl else Pdl.OFF), ""
    vec = min(4, problem.widest) if problem.size <= SHORT else 0
    if problem.size > SHORT:
        yield "some-groups", None, f"groups have {problem.size} elements; the rule is for at most {SHORT}"
    elif groups > SOME:
        yield "some-groups", None, f"a call has {groups} groups; the rule is for at most {SOME}"
    else:
        yield "some-groups", _shape(problem, 4, 128, vec, pdl=Pdl.TRIGGER_TOP if pdl else Pdl.OFF), ""
    yield "many-groups", _shape(problem, 8, 128, vec, pdl=Pdl.TRIGGER_LOADED if pdl else Pdl.OFF), ""


SOME = 4096  # short groups: more threads and an early start of dependents took 11 % less (2048 groups of 128 elements)
LITTLE = 2**19  # elements, up to which dependents wait little; with 2^20, an early start took 4 % more, on both cards
MIDDLE = 1024  # elements, and slightly fewer: 4 per thread were fastest with 8, 64 and 512 groups
SHORT = 128  # elements: loads of 4 were measured to be faster, with many groups
