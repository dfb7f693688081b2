"""The variants of mamba3_chunk_scan for a problem, and the choice for a call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from ...spec.kernel import SM90, Arch, Pdl
from .problem import Mamba3PromptProblem, why_whole
from .roles import Mamba3RolesSpec
from .spec import Mamba3ScanSpec
from .times import MOST_SPANS
from .warpgroups import Mamba3WarpgroupsSpec

SIZE, MAX_SIZE = "heads of all sequences", 2**31 - 1
SMS = 132  # of an H100 and an H200
# Spans that calls may get, if one block for each of them fits on the card. Times of an H200 in us, one sequence of 2048 tokens, SISO by
# warpgroups: 64 heads whole 91, in 2 spans 81; 24 heads in 2 spans 69, in 3 spans 65, in 4 spans 66. Four ranks: 64 heads 455 and 354.
SPANS = (3, 2)


def _spec(kind: type[Mamba3ScanSpec], problem: Mamba3PromptProblem, **how: Any) -> Mamba3ScanSpec:
    return kind(**_fields(problem), **how)


def _fields(problem: Mamba3PromptProblem) -> dict[str, Any]:
    return {f.name: getattr(problem, f.name) for f in fields(Mamba3PromptProblem)}


def tiled(problem: Mamba3PromptProblem, tiles: int) -> Mamba3ScanSpec:
    """The variant in which `tiles` blocks share a head."""
    return _spec(Mamba3ScanSpec, problem, tiles=tiles, stages=1, pdl=Pdl.TRIGGER_LOADED)


def spanned(problem: Mamba3PromptProblem, spans: int) -> Mamba3RolesSpec:
    """The variant with roles in which `spans` blocks share a sequence of a head. The bits are those of a whole sequence."""
    return Mamba3RolesSpec(**_fields(problem), spans=spans, pdl=Pdl.TRIGGER_LOADED)


def parted(problem: Mamba3PromptProblem) -> Mamba3ScanSpec:
    """The variant without roles for the parts that a call asks for."""
    return _spec(Mamba3ScanSpec, problem, stages=2, parts=problem.segments, pdl=Pdl.TRIGGER_LOADED)


def joined(problem: Mamba3PromptProblem) -> Mamba3RolesSpec:
    """The variant with roles for the parts that a call asks for."""
    return Mamba3RolesSpec(**_fields(problem), parts=problem.segments, pdl=Pdl.TRIGGER_LOADED)


def parts_of(problem: Mamba3PromptProblem, arch: Arch) -> int:
    """Parts of a sequence, at most, each by a block of a cluster."""
    parts = problem.segments if arch >= SM90 else 1
    by_warpgroups = parts == 2 and not _spec(Mamba3WarpgroupsSpec, problem).violations(arch)
    return 1 if by_warpgroups else parts  # two parts have the bits of a whole sequence, which only warpgroups have then


def space(problem: Mamba3PromptProblem, arch: Arch) -> Iterator[Mamba3ScanSpec]:
    """Every legal variant of a problem, within the axes that are worth a trial."""
    tried: list[Mamba3ScanSpec] = []
    parts = parts_of(problem, arch)
    for pdl in Pdl:
        tried += [_spec(Mamba3RolesSpec, problem, spans=spans, parts=parts, pdl=pdl) for spans in range(1, MOST_SPANS + 1)]
        tried += [_spec(Mamba3WarpgroupsSpec, problem, spans=spans, pdl=pdl) for spans in range(1, MOST_SPANS + 1) if parts == 1]
        tried += [
            _spec(Mamba3ScanSpec, problem, stages=stages, min_blocks=min_blocks, tiles=tiles, parts=parts, pdl=pdl)
            for stages, min_blocks, tiles in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 1, 2), (1, 2, 2), (2, 1, 4))
        ]
    yield from (spec for spec in tried if not spec.violations(arch))


def candidates(problem: Mamba3PromptProblem, size: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, Mamba3ScanSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one needs the least shared memory."""
    wait = Pdl.TRIGGER_LOADED if pdl else Pdl.OFF
    if (parts := parts_of(problem, arch)) > 1:
        yield f"up to {parts} parts, warps with roles", _spec(Mamba3RolesSpec, problem, parts=parts, pdl=wait), ""
        for stages in (2, 1):
            yield f"up to {parts} parts, {_said(stages)}", _spec(Mamba3ScanSpec, problem, stages=stages, parts=parts, pdl=wait), ""
    else:
        yield "parts", None, why_whole(arch)
        for kind, name in ((Mamba3WarpgroupsSpec, "warpgroups"), (Mamba3RolesSpec, "warps with roles")):
            if wrong := _spec(kind, problem).violations(arch):
                yield name, None, wrong[0]
                continue
            for spans in SPANS:
                if spans * size <= SMS:
                    yield f"{name}, {spans} spans", _spec(kind, problem, spans=spans, pdl=wait), ""
                else:
                    why = f"{spans} blocks for each of {size} heads are more than the {SMS} SMs of an H200"
                    yield f"{name}, {spans} spans", None, why
            yield name, _spec(kind, problem, pdl=wait), ""
    for stages in (2, 1):
        yield _said(stages), _spec(Mamba3ScanSpec, problem, stages=stages, pdl=wait), ""


def _said(stages: int) -> str:
    return "1 stage" if stages == 1 else f"{stages} stages"
