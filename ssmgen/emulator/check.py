"""`ssmgen check`: runs one variant in the emulator, and compares it with the float64 reference, on operands made from the spec alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..calls.checks import STATES
from ..engine.accuracy import norm_error
from ..engine.narrow_reference import widened
from ..engine.trial import TOLERANCE, Trial
from ..errors import SsmgenError, TrialError
from ..spec.arguments import Arguments
from ..spec.family import parts, records
from ..spec.kernel import Arch, DType, KernelSpec
from . import run


@dataclass(frozen=True, slots=True)
class Outcome:
    """Norm errors against float64; infinite if the kernel wrote to a forbidden place."""

    state_error: float  # includes intermediate states and a ring
    out_error: float
    blocks: int
    wrong: tuple[str, ...]  # operands whose error exceeds the limit, in words

    @property
    def passed(self) -> bool:
        return not self.wrong


def check(spec: KernelSpec, arch: Arch, batch: int = 3, seed: int = 0) -> Outcome:
    """Runs a variant on `batch` sequences; the second is padding if there are slots.

    Raises EmulatorError if the kernel does something forbidden, EmulatorMissingError without a compiler, SpecError; SsmgenError for a spec
    without a trial.
    """
    spec.check(arch)
    trial = trial_of(spec, batch, seed)
    before = _numbers(trial, trial.written)
    expected = {name: t.to(torch.float64, copy=True) if t.is_floating_point() else t.clone() for name, t in before.items()}
    plain = {name: t for name, t in trial.views.items() if name not in trial.scales.values()}
    trial.reference(plain | _numbers(trial, trial.scales) | expected)
    for part in spec.kernels:
        values, grid = trial.launch_of(part)
        if missing := ", ".join(name for name in part.operands() if name not in trial.named):
            raise TrialError(f"the trial of {part.family} makes no {missing}; expected all operands of {part}. Make it in trial.py.")
        named = {name: trial.named[name] for name in part.operands()}
        packed = Arguments(part, values).at([t.data_ptr() for t in named.values()])
        run(part, arch, grid, packed, named, trial.written)
    results = _numbers(trial, trial.written)
    errors = {name: _error(results[name], before[name], expected[name]) for name in results if name not in trial.between}
    wrong = [_words(trial, name, results[name], expected[name], e) for name, e in errors.items() if not e <= _limit(trial, name)]
    blocks = trial.launch_of(spec)[1]
    return Outcome(max((e for name, e in errors.items() if name != "out"), default=0.0), errors.get("out", 0.0), blocks, tuple(wrong))


def _words(trial: Trial, name: str, result: Tensor, expected: Tensor, error: float) -> str:
    """The difference of an operand, and the limit for it."""
    found, wanted = result.double(), expected.double()
    count = int(((found != wanted) & ~(found.isnan() & wanted.isnan())).sum())
    limit = _limit(trial, name)
    allowed = f"at most {limit:.1e} is allowed" if limit else "this trial requires exact equality"
    elsewhere = "" if error < float("inf") else ", and elements beside it were overwritten"
    return f"{name} differs from the reference in {count} of {result.numel()} elements (norm error {error:.1e}){elsewhere}; {allowed}"


def _numbers(trial: Trial, names: Iterable[str]) -> dict[str, Tensor]:
    """Copies of operands. States with scales are converted to numbers, and their scales are left out."""
    scales, views = trial.scales, trial.views
    wanted = [name for name in names if name not in scales.values()]
    return {n: widened(views[n], views[scales[n]], torch.float64) if n in scales else views[n].clone() for n in wanted}


def trial_of(spec: KernelSpec, batch: int, seed: int, tokens: int | None = None) -> Trial:
    """The trial that the family's record makes for a spec. tokens: the least length of the longest sequence, for families that take
    prompts.

    Raises SsmgenError if there is no trial for such specs.
    """
    make = parts("trials").get(type(spec))
    why = _unchecked(spec)
    if make is None or why:
        raise SsmgenError(f"{spec.kind} cannot be checked: {why or f'no family has a trial of {type(spec).__name__}'}")
    trial: Trial = make(spec, batch, seed) if tokens is None else make(spec, batch, seed, tokens)
    return trial


def _unchecked(spec: KernelSpec) -> str:
    """Why it cannot be checked, in the words of the record; empty if it can."""
    own = [kernels for family in records() for kernels in family.kernels if family.part(kernels.spec) is type(spec)]
    return next(filter(None, (kernels.unchecked or kernels.parts.get(spec.kind) for kernels in own)), "")


def _limit(trial: Trial, name: str) -> float:
    if name in trial.exact:
        return 0.0
    rounding = TOLERANCE[STATES[trial.views[name].dtype]]
    return (max(rounding, 1e-5) if name == "out" else rounding) + (trial.tokens - 1) * TOLERANCE[DType.F32] + trial.slack.get(name, 0.0)


def _error(result: Tensor, before: Tensor, expected: Tensor) -> float:
    """The norm error over the entries that the reference changes, by the first two axes: slot and head, sequence and token, …. It is
    infinite if any other entry changed, or if NaNs differ."""
    if not result.is_floating_point():
        return 0.0 if torch.equal(result, expected) else float("inf")
    result, before, expected = (t.double()[(...,) + (None,) * max(0, 3 - t.dim())] for t in (result, before, expected))
    nothing, infinite = expected.isnan(), expected.isinf() & (result == expected)
    changed = ((expected != before) & ~(nothing & before.isnan())).flatten(2).any(-1)
    unharmed = torch.equal(result[~changed].nan_to_num(), before[~changed].nan_to_num()) and torch.equal(result.isnan(), nothing)
    result, expected = result.masked_fill(infinite | nothing, 0), expected.masked_fill(infinite | nothing, 0)
    return norm_error(result[changed], expected[changed]) if unharmed else float("inf")
