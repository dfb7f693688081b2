"""Finds the fastest variant of a call on this card: a cost model selects among the legal variants, and these are timed in turn."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..bench import timing
from ..cache.store import shared_cache
from ..calls.operator import Call
from ..compile import nvrtc
from ..compile.render import code_digest
from ..errors import SsmgenError
from ..launch import runtime
from ..select import registry
from ..select import tuned as table
from ..select.catalog import OPERATOR_OF, OPERATORS
from ..spec.kernel import KernelSpec, Pdl, flat, text_of
from ..variants.build import build
from . import model
from .cases import Case

COMPILED, TIMED, FINAL = 48, 16, 5  # limits on the numbers of variants: compiled, timed, and timed again
GRAPH_US = 1000.0  # minimum time of a graph of one variant, unless 24 launches take less: overhead is then small
OUTPUTS = frozenset(("out", "lse_out", "final_states", "intermediate_states", "intermediate_conv_window", "mix", "sums"))  # never read
KNOWN = "known"  # reason for an outcome without a measurement
GAIN = 0.985  # of the rules' time: smaller gains are noise, and the rules' choice is kept


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a case. row is None if nothing was measured; `why` is then the reason."""

    label: str
    row: table.Row | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Bench:
    """A card, and the properties that its times depend on."""

    gpu: str
    card: model.Card
    driver: str
    compiler: str

    @classmethod
    def here(cls) -> Bench:
        """Raises SsmgenError without a GPU."""
        if not torch.cuda.is_available():
            raise SsmgenError("torch finds no CUDA device; tune needs one")
        device = torch.cuda.current_device()
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        card = model.Card(runtime.device_arch(device), sms, timing.ceilings_tbs()["in_place"])
        version = runtime.check(runtime.driver().cuDriverGetVersion(), SsmgenError)
        return cls(runtime.device_name(device), card, f"CUDA {version // 1000}.{version % 1000 // 10}", nvrtc.build_id())


def tune(
    bench: Bench,
    work: Iterable[Case],
    path: Path,
    budget: float | None = None,
    again: bool = False,
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Measures cases until there are no more or `budget` seconds have passed. Each row is written to the table at `path` as it comes, so an
    interrupt loses only the current case. Cases with a valid row are skipped, unless `again`.

    Raises TableError.
    """
    start, outcomes = time.monotonic(), []
    rows = table.read(path)
    for case in work:
        if budget is not None and time.monotonic() - start > budget:
            break
        outcome = outcome_of(case, bench, rows, again)
        if outcome.row is not None and outcome.why != KNOWN:
            rows[outcome.row.key] = outcome.row
            table.write(path, bench.gpu, rows.values())
        outcomes.append(outcome)
        done(outcome)
    registry.forget()
    return outcomes


def outcome_of(case: Case, bench: Bench, rows: Mapping[Any, table.Row], again: bool) -> Outcome:
    """The outcome of a case: its valid row, or a new measurement if there is none or `again` is set."""
    known = rows.get(_key(case.call(0)))
    if known is not None and not again and not table.staleness(known, bench.card.arch):
        return Outcome(case.label, known, KNOWN)
    return _tuned(case, bench)


def _key(call: Call) -> tuple[str, str, bool, int]:
    problem, size, _, pdl = call.problem()
    return OPERATOR_OF[type(problem)], table.bucket(problem), bool(pdl), size


def _tuned(case: Case, bench: Bench) -> Outcome:
    call = case.call(0)
    operator, text, pdl, size = _key(call)
    problem = call.problem()[0]
    rule = registry.select(operator, problem, size, bench.card.arch, pdl)
    try:
        case.gate()  # checks the current variant against float64; the rules' variant and all others must give its bits
        served = registry.select(operator, problem, size, bench.card.arch, pdl, bench.gpu)
        specs = _promising(call, rule, bench, pdl)
        check_bits(call, rule, [*specs, served])
    except SsmgenError as e:
        return Outcome(case.label, None, str(e))
    calls = [case.call(i) for i in range(case.sets)]
    us = _times(calls, case.sets, [rule, *specs], rounds=2, captures=1)
    us = _times(calls, case.sets, [rule, *_finalists(us, rule)], rounds=7, captures=2)
    ranked = sorted(us, key=us.__getitem__)
    best = next((spec for spec in ranked if us[spec] < GAIN * us[rule] and _never_spills(spec, bench)), rule)
    second = next((spec for spec in ranked if spec != best), best)
    row = table.Row(
        operator=operator, problem=text, size=size, pdl=pdl, spec=str(best), us=round(us[best], 3), rule_us=round(us[rule], 3),
        runner_up=difference(best, second), runner_up_us=round(us[second], 3), label=case.label, code=code_digest(best, bench.card.arch),
        arch=str(bench.card.arch), driver=bench.driver, compiler=bench.compiler, date=datetime.date.today().isoformat(),
    )  # fmt: skip
    return Outcome(case.label, row)


def _finalists(us: Mapping[KernelSpec, float], rule: KernelSpec) -> list[KernelSpec]:
    """Up to FINAL variants that were faster than the rules' choice in the short timing: a slower one would have to fall below GAIN
    of the rules' time to be kept. If there are none, the best other variant, as the runner-up."""
    others = sorted((spec for spec in us if spec != rule), key=us.__getitem__)
    return [spec for spec in others[:FINAL] if us[spec] < us[rule]] or others[:1]


def _promising(call: Call, rule: KernelSpec, bench: Bench, pdl: bool) -> list[KernelSpec]:
    """The legal variants that may win, without the rules' choice; compiled, and without spills."""
    problem, arch = call.problem()[0], bench.card.arch
    views = call.caller.checked(call.operands, call.options, call.pdl)
    space = OPERATORS[OPERATOR_OF[type(problem)]].space(problem, arch)
    legal = [s for s in space if (s.pdl is not Pdl.OFF) == pdl and s != rule and s.order == rule.order]
    grid = {spec: call.caller.family.grid_of(spec, views) for spec in legal}
    likely = model.promising([model.Candidate(spec, grid[spec]) for spec in legal], bench.card, COMPILED, rule)
    built = build([(part, arch) for c in likely for part in c.spec.kernels], shared_cache())
    used = {b.spec: b.entry.resources for b in built if b.entry is not None and b.error is None}
    compiled = [
        model.Candidate(c.spec, c.grid, used[c.spec].registers, used[c.spec].shared)
        for c in likely
        if all(part in used for part in c.spec.kernels)
    ]
    return [c.spec for c in model.promising(compiled, bench.card, TIMED, rule)]


def _never_spills(spec: KernelSpec, bench: Bench) -> bool:
    """Whether the variant does not spill for any problem that its row may serve."""
    parts = [(part, bench.card.arch) for s in table.alike(spec) if not s.violations(bench.card.arch) for part in s.kernels]
    return all(b.error is None for b in build(parts, shared_cache()))


def check_bits(call: Call, rule: KernelSpec, specs: Iterable[KernelSpec]) -> None:
    """Raises SsmgenError if a variant writes other bits than the rules' variant, or leaves out an output: all variants of a problem must
    agree. Restores the call's operands."""
    written = {n: t for n, t in call.operands.items() if n in call.caller.family.written}
    found = {n: t.clone() for n, t in written.items()}
    # An earlier call may have left the right answer in an output, so tensors that are only written start as NaN.
    before = {n: torch.full_like(t, torch.nan) if n in OUTPUTS else found[n] for n, t in written.items()}

    def results(spec: KernelSpec) -> dict[str, Tensor]:
        for n, t in written.items():
            t.copy_(before[n])
        call.launch_with(spec).at(call.pointers)()
        return {n: t.clone() for n, t in written.items()}

    want = results(rule)
    for spec in specs:
        if different := [n for n, t in results(spec).items() if not _same(t, want[n])]:
            raise SsmgenError(f"{', '.join(different)} of {spec} differ from those of {rule}. This is a bug in ssmgen: please report it.")
    for n, t in written.items():
        t.copy_(found[n])


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _in_turn(plans: Sequence[Callable[[], object]]) -> timing.Launch:
    return lambda i: plans[i]()


def _times(calls: list[Call], sets: int, specs: list[KernelSpec], rounds: int, captures: int) -> dict[KernelSpec, float]:
    launches, pointers = {spec: calls[0].launch_with(spec) for spec in specs}, [call.pointers for call in calls]
    plans = {spec: [launch.at(at) for at in pointers] for spec, launch in launches.items()}
    contenders = {spec: _in_turn(plan) for spec, plan in plans.items()}
    (once,) = timing.device_us({specs[0]: contenders[specs[0]]}, sets, rounds=1, captures=1, least=1).values()
    return timing.device_us(contenders, sets, rounds, captures, least=min(24, math.ceil(GRAPH_US / once)))


def difference(spec: KernelSpec, other: KernelSpec) -> str:
    """The fields in which another variant of a problem differs."""
    mine = flat(spec)  # the other variant may be of another class, with other fields
    return ",".join(f"{name}={text_of(value)}" for name, value in flat(other).items() if name not in mine or value != mine[name])
