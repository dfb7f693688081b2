"""Bad calls, made from valid ones: one to three arguments of each are changed (fuzz_mutations.py).

The law: a call works, or raises an error that its documentation names. A call that works gives the same results as with dense copies of its
operands, and changes only its outputs. A call that raises changes nothing. Calls that work could also be launched: the problem
is one that a kernel serves or that `supported` has reasons against, and every argument fits the kernel's parameters.

    python tests/attack/fuzz.py --cases 50000 --seed 7
"""

from __future__ import annotations

import argparse
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import fuzz_mutations as mutations
import torch
from fuzz_calls import Arguments, Form, native
from fuzz_drop_ins import drop_ins
from torch import Tensor

import ssmgen
from ssmgen.calls.api import OPERATOR_OF
from ssmgen.errors import ArgumentError, UnsupportedError
from ssmgen.select import registry
from ssmgen.spec.arguments import Arguments as Packed
from ssmgen.spec.kernel import Arch

SM90 = Arch.parse("sm_90a")


def forms() -> list[Form]:
    """All ways in which functions are called here."""
    return [*native(), *drop_ins()]


Place = tuple[Any, ...]  # (name,), or (name, place) of a tensor in a tuple


def leaves(given: Arguments) -> Iterator[tuple[Place, Any]]:
    """Every argument, and of tuples every item."""
    for name, value in given.items():
        if isinstance(value, tuple) and value and isinstance(value[0], Tensor):
            yield from (((name, i), item) for i, item in enumerate(value))
        else:
            yield (name,), value


def replaced(given: Arguments, path: Place, value: Any) -> Arguments:
    name = path[0]
    if len(path) == 1:
        return given | {name: value}
    whole = list(given[name])
    whole[path[1]] = value
    return given | {name: type(given[name])(*whole) if hasattr(given[name], "_fields") else tuple(whole)}


def word(given: Arguments, path: Place) -> str:
    """As `Form.written` has it."""
    fields = getattr(given[path[0]], "_fields", None)
    return ".".join([path[0], *[str(fields[i] if fields else i) for i in path[1:]]])


def is_memory(t: Any) -> bool:
    return isinstance(t, Tensor) and t.layout is torch.strided and not t.is_nested and not t.is_quantized and t.device.type == "cpu"


def with_own_memory(given: Arguments) -> Arguments:
    """The same arguments, strides and sharing included, in copies of their memory."""
    stores: dict[int, Any] = {}

    def copy(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        store = t.untyped_storage()
        mine = stores.setdefault(store.data_ptr(), store.clone())
        return torch.empty(0, dtype=t.dtype).set_(mine, t.storage_offset(), t.shape, t.stride())

    for path, value in leaves(given):
        given = replaced(given, path, copy(value))
    return given


def dense(t: Any) -> Any:
    """The values of a tensor in separate, dense memory; expanded axes stay expanded."""
    if not is_memory(t):
        return t
    t = t.detach().as_subclass(Tensor).resolve_neg().resolve_conj()
    expanded = [a for a, (n, s) in enumerate(zip(t.shape, t.stride(), strict=True)) if n > 1 and s == 0]
    base = t
    for a in expanded:
        base = base.narrow(a, 0, 1)
    return base.clone(memory_format=torch.contiguous_format).expand(t.shape)


@dataclass
class Case:
    form: Form
    given: Arguments
    changes: list[str]
    keywords: bool = False  # one too many or too few: a TypeError is right
    shared: bool = False  # an argument comes twice


def case(form: Form, rng: Random, scalars: bool) -> Case:
    """A call of a form with one to three changes. scalars: also changes arguments that are not tensors, and adds option names of other
    functions."""
    made = Case(form, with_own_memory(form.arguments), [])
    wanted = rng.choice((1, 1, 1, 2, 3))
    for _ in range(50):
        if len(made.changes) == wanted:
            break
        given = made.given
        if rng.random() < 0.02:
            made.keywords = True
            if rng.random() < 0.5:
                name = rng.choice(list(given))
                made.given = {n: v for n, v in given.items() if n != name}
                made.changes.append(f"without {name}")
            else:
                name = rng.choice(("gate", "w_", "state_", *(("scale", "read", "erase", "objections") if scalars else ())))
                made.given = {name: rng.choice((None, 1.0))} | given
                made.changes.append(f"with {name}")
            continue
        path, value = rng.choice(list(leaves(given)))
        if not isinstance(value, Tensor):
            change: Any = mutations.another_scalar
            if not scalars:
                continue
        elif rng.random() < 0.05:
            others = [v for _, v in leaves(given) if isinstance(v, Tensor) and v is not value]
            if not others:
                continue
            change, made.shared, new = None, True, rng.choice(others)
        elif len(path) > 1 and rng.random() < 0.1:  # the whole tuple
            path, change, value = path[:1], mutations.other_kind, value
        else:
            change = rng.choice(mutations.TENSORS)
        if change is not None:
            try:
                new = mutations.mutated(change, value, rng)
            except mutations.CannotBeError:
                continue
        made.given = replaced(given, path, new)
        made.changes.append(f"{word(given, path)}: {getattr(change, '__name__', 'shared')} {brief(new)}")
    return made


def brief(v: Any) -> str:
    if not isinstance(v, Tensor):
        return repr(v)[:60].replace("\n", " ")
    try:
        return f"{str(v.dtype)[6:]} {str(v.layout)[6:]} {list(v.shape)} {list(v.stride()) if is_memory(v) else ''}"
    except RuntimeError:  # nested
        return f"{v.dtype} {v.layout} nested"


class Broken(NamedTuple):
    """A case that broke the law: the call, how it broke it, and the evidence."""

    call: str
    how: str


@dataclass
class Report:
    """The outcomes of the cases: counts by function and outcome, and each case that broke the law."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken: list[Broken] = field(default_factory=list)

    def add(self, made: Case, outcome: str, detail: str = "") -> None:
        self.counts[made.form.id.partition("-")[0], outcome] += 1
        if detail:
            self.broken.append(Broken(f"{made.form.id} [{'; '.join(made.changes)}]", f"{outcome}: {detail}"))

    def __str__(self) -> str:
        outcomes = sorted({o for _, o in self.counts})
        wide = max(len(name) for name, _ in self.counts)
        lines = [" " * wide + "".join(f"{o:>18}" for o in outcomes)]
        for name in dict.fromkeys(n for n, _ in self.counts):
            lines.append(f"{name:{wide}}" + "".join(f"{self.counts[name, o]:>18}" for o in outcomes))
        totals = [sum(n for (_, o), n in self.counts.items() if o == outcome) for outcome in outcomes]
        return "\n".join([*lines, f"{'all':{wide}}" + "".join(f"{n:>18}" for n in totals)])


def run(made: Case, report: Report) -> None:
    form, given = made.form, made.given
    plain = given
    if not made.shared:
        for path, value in leaves(given):
            plain = replaced(plain, path, dense(value))
    before = {path: t.untyped_storage().clone() for path, t in leaves(given) if is_memory(t)}
    words = {path: word(given, path) for path in before}
    try:
        result = form.function(**given)
        outcome = "works"
    except (ArgumentError, UnsupportedError, NotImplementedError) as e:
        outcome, documented = type(e).__name__, type(e) in (ArgumentError, UnsupportedError) or not form.public
        if not documented:
            return report.add(made, "raw", where(e))
    except Exception as e:
        outcome = type(e).__name__
        if not (made.keywords and isinstance(e, TypeError) and ("keyword" in str(e) or "missing" in str(e))):
            return report.add(made, "raw", where(e))
    may = [t for path, t in leaves(given) if path in words and words[path] in form.written] if outcome == "works" else []
    stores = {t.untyped_storage().data_ptr() for t in may}
    for path, t in leaves(given):
        if path in before and t.untyped_storage().data_ptr() not in stores and not same(before[path], t.untyped_storage()):
            return report.add(made, "changed", words[path])
    for t in may:
        if not kept_around(t, may, before[next(p for p, v in leaves(given) if v is t)]):
            return report.add(made, "changed", "around what is written")
    if outcome == "works" and not made.shared:
        try:
            want = form.function(**plain)
        except Exception as e:
            return report.add(made, "different", f"dense copies: {where(e)}")
        for got, expected in zip(tensors(result, given, form), tensors(want, plain, form), strict=True):
            if not close(got, expected):
                return report.add(made, "different", f"{brief(got)} and of dense copies {brief(expected)}")
    if form.public:
        problem = launchable(form.function, given, outcome)
        if problem:
            return report.add(made, "not launchable", problem)
    report.add(made, outcome)


def launchable(function: Callable[..., Any], given: Arguments, outcome: str) -> str:
    """Contradictions between a call's outcome and either `supported` or the arguments of its kernels."""
    try:
        yes, reasons = ssmgen.supported(function, **given, arch="sm_90a")
        if outcome == "works" and yes:
            call = function.build(**given)
            problem, size, _, _ = call.problem()
            views = call.caller.checked(call.operands, call.options, call.pdl, call.objections)
            for part in registry.select(OPERATOR_OF[type(problem)], problem, size, SM90, True).kernels:
                Packed(part, call.caller.family.values_of(part, views, call.options))
    except Exception as e:
        return "" if outcome == "TypeError" and isinstance(e, TypeError) else where(e)
    if outcome == "works":
        return "" if yes or reasons else "no reason"
    return f"supported, and it raises {outcome}" if yes and outcome != "ArgumentError" else ""


def where(e: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(e.__traceback__) if "/ssmgen/" in f.filename]
    place = f"{'/'.join(Path(frames[-1].filename).parts[-2:])}:{frames[-1].lineno}" if frames else "?"
    return f"{type(e).__name__} at {place}: {str(e).splitlines()[0] if str(e) else ''}"[:240]


def same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and bool((as_bytes(a) == as_bytes(b)).all())


def as_bytes(store: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(store)


def kept_around(t: Tensor, may: list[Tensor], before: Any) -> bool:
    """Whether the storage of a written tensor is unchanged between and around the elements of all that may be written."""
    store = t.untyped_storage()
    touched = torch.zeros(len(store) // t.element_size(), dtype=torch.bool)
    for w in may:
        if w.untyped_storage().data_ptr() == store.data_ptr():
            if w.element_size() != t.element_size():
                return True
            touched.as_strided(w.shape, w.stride(), w.storage_offset()).fill_(True)
    changed = (as_bytes(store) != as_bytes(before)).view(-1, t.element_size()).any(1)[: len(touched)]
    return not (changed & ~touched).any()


def tensors(result: Any, given: Arguments, form: Form) -> list[Tensor]:
    """The tensors that a call returns or writes."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    written = [t for path, t in leaves(given) if isinstance(t, Tensor) and word(given, path) in form.written]
    return [t for t in (*results, *written) if isinstance(t, Tensor)]


def close(got: Tensor, want: Tensor) -> bool:
    if not is_memory(got) or not is_memory(want) or got.shape != want.shape or got.dtype != want.dtype:
        return False
    a, b = (t.detach().as_subclass(Tensor).resolve_neg().double() for t in (got, want))
    return torch.allclose(a, b, rtol=0.02, atol=0.02, equal_nan=True)


@contextmanager
def filled() -> Iterator[None]:
    """Fills new memory with NaN. Elements that a call may leave unwritten in a new tensor are then the same every time."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def campaign(count: int, seed: int, scalars: bool = True, progress: Callable[[int], None] = lambda n: None) -> Report:
    """`count` cases, all forms alike often."""
    report, all_forms = Report(), forms()
    with warnings.catch_warnings(), filled():
        warnings.simplefilter("ignore")
        for n in range(count):
            form = all_forms[n % len(all_forms)]
            run(case(form, Random(f"{seed}/{n}"), scalars), report)
            progress(n)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tensors-only", action="store_true", help="change no scalars")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    report = campaign(asked.cases, asked.seed, not asked.tensors_only)
    print(report)
    for how, n in Counter(b.how for b in report.broken).most_common():
        print(f"{n:6} {how}\n       such as {next(b.call for b in report.broken if b.how == how)}")
    print(f"{asked.cases} cases, {len(report.broken)} broke the law")
    return int(bool(report.broken))


if __name__ == "__main__":
    sys.exit(main())
