"""Calls of public functions in the emulator: their kernels' texts, with arguments packed as for a card."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from ssmgen import emulator
from ssmgen.calls import planning
from ssmgen.compile.render import render
from ssmgen.emulator import SMS, run_source
from ssmgen.select import registry
from ssmgen.spec.arguments import Arguments
from ssmgen.spec.kernel import Arch

SM80, SM90 = Arch.parse("sm_80"), Arch.parse("sm_90a")
needs_emulator = pytest.mark.skipif(not emulator.available(), reason="needs g++")
Change = Callable[[str], str]


def written_by(part: Any) -> tuple[str, ...]:
    """Operands that a kernel writes, as it calls them."""
    return tuple(p.name for p in part.parameters() if p.code == "Q" and not p.ctype.startswith("const"))


def launch_emulated(
    part: Any,
    family: Any,
    views: Mapping[str, Tensor],
    options: Any,
    operands: Mapping[str, Tensor],
    arch: Arch = SM90,
    change: Change = str,
) -> None:
    """One kernel of a call; `change` edits its text. Operands that share memory with written ones may be written too."""
    named = {n: operands[n] for n in part.operands()}
    packed = Arguments(part, family.values_of(part, views, options)).at([t.data_ptr() for t in named.values()])
    roles = part.roles() if hasattr(part, "roles") else part.operands()
    stored = {t.data_ptr() for role, t in zip(roles, named.values(), strict=True) if role in written_by(part) and t.numel()}
    writable = tuple(n for n, t in named.items() if t.data_ptr() in stored)
    grid = family.grid_of(part, views)
    launch = part.name, min(grid, SMS) if part.stays else grid, part.threads_per_block, packed, named, writable, part.dynamic_bytes
    run_source(change(render(part, arch)), *launch, early=part.early_operands(), cluster=part.cluster_blocks)


def run_as_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on calls on CPU tensors run the kernels that the registry chooses, instead of the reference."""

    def plan(caller: Any, given: Any, options: Any, pdl: Any, objections: Any = ()) -> Callable[[], None]:
        operands, family = caller.named(given), caller.family
        views = caller.checked(operands, options, pdl, objections)
        problem = family.problem_of(views, {n: t.data_ptr() for n, t in operands.items()}, options)
        spec = registry.select(family.operator, problem, family.size_of(views), SM90, True)

        def launched() -> None:
            for part in spec.kernels:
                launch_emulated(part, family, views, options, operands)

        return launched

    monkeypatch.setattr(planning.Caller, "plan", plan)


def chosen(call: Any, arch: Arch = SM90) -> Any:
    """The variant that the registry chooses for a built call, or for one that has it; None if there is nothing to do."""
    built = getattr(call, "built", call)
    views, family = built.caller.checked(built.operands, built.options, None), built.caller.family
    problem = family.problem_of(views, {n: t.data_ptr() for n, t in built.operands.items()}, built.options)
    size = family.size_of(views)
    return registry.select(family.operator, problem, size, arch, arch >= Arch(90)) if size else None


def emulate(call: Any, spec: Any = None, arch: Arch = SM90, change: Change = str) -> Any:
    """The result of a built call, or of one that has it, by a given variant or the registry's choice. spec: also a function of the problem
    that makes one."""
    built = getattr(call, "built", call)
    views, family = built.caller.checked(built.operands, built.options, None), built.caller.family
    problem = family.problem_of(views, {n: t.data_ptr() for n, t in built.operands.items()}, built.options)
    if built.before is not None:
        built.before()
    if family.size_of(views):
        spec = spec(problem) if callable(spec) else spec or chosen(built, arch)
        taken, given = {n for part in spec.kernels for n in part.operands()}, set(built.operands)
        assert taken | {"workspace"} == given | {"workspace"} and taken <= given, "an operand of no kernel, or none of it"
        if "workspace" in built.operands:
            built.operands["workspace"].view(torch.uint8).fill_(0xFF)  # NaN in every dtype
        for part in spec.kernels:
            launch_emulated(part, family, views, built.options, built.operands, arch, change)
    return built.result
