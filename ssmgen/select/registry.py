"""Problem -> spec. Reports the variant that serves a problem, its rule, and why the others do not."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..errors import UnsupportedError
from ..spec.kernel import Arch, KernelSpec, flat
from . import tuned
from .catalog import OPERATORS


@dataclass(frozen=True, slots=True)
class Verdict:
    """One rule's answer for a problem."""

    rule: str
    spec: KernelSpec | None
    reason: str  # why it was not chosen; empty for the chosen one

    @property
    def legal(self) -> bool:
        """Whether it has a variant, without a reason against it."""
        return self.spec is not None and not self.reason


@dataclass(frozen=True, slots=True)
class Chosen:
    """The variant that serves a problem, and its rule."""

    rule: str
    spec: KernelSpec


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything that the registry considered, in order of preference."""

    operator: str
    problem: Any
    size: int  # the size that the rules look at
    arch: Arch
    gpu: str | None  # the GPU whose tuned rows were considered
    verdicts: tuple[Verdict, ...]
    faults: tuple[str, ...]  # constraints that no variant can meet

    @property
    def chosen(self) -> Chosen | None:
        return next((Chosen(v.rule, v.spec) for v in self.verdicts if v.spec is not None and v.legal), None)

    @property
    def reasons(self) -> list[str]:
        """Why nothing serves the problem; empty if a variant does."""
        if self.chosen:
            return []
        return list(self.faults) or [f"{v.rule}: {v.reason}" for v in self.verdicts]

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        verdicts = [{"rule": v.rule, "spec": v.spec and str(v.spec), "rejected": v.reason or None} for v in self.verdicts]
        return {
            "operator": self.operator,
            unit(self.operator): self.size,
            "arch": str(self.arch),
            "gpu": self.gpu,
            "problem": describe(self.problem),
            "faults": list(self.faults),
            "verdicts": verdicts,
        }

    def __str__(self) -> str:
        lines = [f"{self.operator}, {unit(self.operator)} {self.size}, {self.gpu or self.arch}: {describe(self.problem)}"]
        lines += [f"  never: {f}" for f in self.faults]
        for v in self.verdicts:
            lines.append(f"  {'->' if not v.reason else '  '} {v.rule}: {v.reason or v.spec}")
        return "\n".join(lines)


def unit(operator: str) -> str:
    """The unit of an operator's call size; sequences by default."""
    return getattr(OPERATORS[operator], "SIZE", "batch")


def describe(problem: Any) -> str:
    return " ".join(f"{name}={getattr(value, 'value', value)}" for name, value in flat(problem).items() if value is not None)


def _tuned(operator: str, problem: Any, size: int, arch: Arch, pdl: bool, gpu: str) -> Iterator[tuple[str, KernelSpec | None, str]]:
    """(rule, spec or None, why it does not apply) of the measured rows."""
    for found in tuned.find(operator, problem, size, arch, pdl, gpu):
        yield "tuned" if found.exact else f"tuned at {unit(operator)} {found.row.size}", found.spec, found.stale


def launched(operator: str, spec: KernelSpec, size: int) -> KernelSpec:
    """The variant that a call of this size launches for a measured or ruled one: small calls of some operators trigger early."""
    return spec.with_early_triggers() if size <= getattr(OPERATORS[operator], "EARLY", 0) else spec


def _considered(operator: str, problem: Any, size: int, arch: Arch, pdl: bool, gpu: str | None) -> Iterator[Verdict]:
    """Each rule's variant in order of preference, with its violations. `select` stops at the first legal one: violations take time."""
    rows = () if gpu is None else _tuned(operator, problem, size, arch, pdl, gpu)
    for rule, spec, reason in itertools.chain(rows, OPERATORS[operator].candidates(problem, size, arch, pdl)):
        if spec is not None:
            spec = launched(operator, spec, size)
            reason = "; ".join(spec.violations(arch))
        yield Verdict(rule, spec, reason)


@functools.lru_cache(maxsize=4096)
def explain(operator: str, problem: Any, size: int, arch: Arch, pdl: bool, gpu: str | None = None) -> Explanation:
    """Everything that was considered, in this order: a row measured at this size, rows of sizes near it, the rules, the generic variant.

    `pdl` requests a variant that may overlap the end of the previous kernel. gpu: its name in torch; None to use the rules alone.
    """
    faults = tuple(problem.faults())
    verdicts: list[Verdict] = []
    chosen = None
    for verdict in () if faults else _considered(operator, problem, size, arch, pdl, gpu):
        if verdict.legal and chosen:
            verdict = replace(verdict, reason=f"{chosen} comes first")
        chosen = chosen or (verdict.rule if verdict.legal else None)
        verdicts.append(verdict)
    return Explanation(operator, problem, size, arch, gpu, tuple(verdicts), faults)


def select(operator: str, problem: Any, size: int, arch: Arch, pdl: bool, gpu: str | None = None) -> KernelSpec:
    """The variant for a problem at a size (see `unit`). Raises UnsupportedError with every reason."""
    return _chosen(operator, problem, size, arch, pdl, gpu).spec


@functools.lru_cache(maxsize=4096)
def _chosen(operator: str, problem: Any, size: int, arch: Arch, pdl: bool, gpu: str | None) -> Chosen:
    verdicts = () if problem.faults() else _considered(operator, problem, size, arch, pdl, gpu)
    if found := next((Chosen(v.rule, v.spec) for v in verdicts if v.spec is not None and v.legal), None):
        return found
    raise UnsupportedError(f"{operator} ({describe(problem)}) on {arch}", explain(operator, problem, size, arch, pdl, gpu).reasons)


def forget() -> None:
    """Reads the tuned tables again. Plans that the process has made stay."""
    tuned.forget()
    explain.cache_clear()
    _chosen.cache_clear()
    ranges.cache_clear()


@functools.lru_cache(maxsize=1024)
def ranges(
    operator: str, problem: Any, arch: Arch, pdl: bool, max_size: int = 1024, gpu: str | None = None
) -> tuple[tuple[int, int, Chosen], ...]:
    """(first size, last size, the choice for them) over sizes 1 … max_size, in ascending order. Raises UnsupportedError."""
    # Rules see the size only through thresholds. Every threshold between two powers of two therefore shows as a different choice at the two
    # powers; bisection then finds it.
    seen: dict[int, Chosen] = {}

    def at(size: int) -> Chosen:
        if size not in seen:
            seen[size] = _chosen(operator, problem, size, arch, pdl, gpu)
        return seen[size]

    def visit(low: int, high: int) -> None:
        if at(low) != at(high) and high - low > 1:
            middle = (low + high) // 2
            visit(low, middle)
            visit(middle, high)

    edges = [1 << i for i in range(max_size.bit_length()) if 1 << i < max_size] + [max_size]
    for low, high in zip(edges, edges[1:] or edges, strict=False):
        visit(low, high)
    starts = [size for before, size in zip([0, *sorted(seen)], sorted(seen), strict=False) if not before or seen[before] != seen[size]]
    return tuple((first, after - 1, seen[first]) for first, after in zip(starts, [*starts[1:], max_size + 1], strict=True))


def variants(operator: str, problem: Any, arch: Arch, pdl: bool, max_size: int = 1024, gpu: str | None = None) -> tuple[KernelSpec, ...]:
    """Every variant that `select` can return for sizes 1 … max_size, for `ssmgen build`."""
    return tuple(dict.fromkeys(chosen.spec for _, _, chosen in ranges(operator, problem, arch, pdl, max_size, gpu)))


# Plans made in this process, by variant. Counted when a plan is made, not on the hot path.
_served: Counter[str] = Counter()


def count_plan(spec: KernelSpec) -> None:
    _served[str(spec)] += 1


def stats() -> dict[str, int]:
    """{spec: number of call patterns that it has served in this process}"""
    return dict(_served)
