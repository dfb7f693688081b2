"""A case of a benchmark: calls of one public function on rotating inputs, and the part of a call that is held against float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..calls import api
from ..calls.checks import NARROW
from ..calls.operator import call_of
from ..engine.accuracy import norm_error
from ..engine.narrow_reference import widened
from ..errors import SsmgenError
from ..spec.kernel import SM90, Arch
from .timing import Launch

COLD = 640e6  # bytes that inputs rotate over: ten times the L2 cache
HOT = 30e6  # bytes of inputs that stay in the L2 cache while timed
MOST = math.inf  # bytes at most, whatever a benchmark asks for; tests have less
MIN_SETS, MAX_SETS = 4, 512
HOST_BATCH = 8  # host times are of batches up to this
GATE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}  # norm error from rounding the stored values
GATE |= {torch.int16: 5e-5, torch.int8: 1.2e-2, torch.float8_e4m3fn: 4e-2}  # with a scale per row of normal values
EXACT = 0.0  # the limit of copies
SCRATCH = ("workspace",)  # written operands that are never read back

Call = Mapping[str, Any]  # keywords of a public function
Variants = Mapping[str, dict[str, Any]]  # {name of a contender: further keywords of its calls}


def sets_of(set_bytes: float, least: int = MIN_SETS, most: int = MAX_SETS, cold: float = COLD) -> int:
    """Sets of inputs that take `cold` bytes together, within bounds."""
    return min(most, max(least, math.ceil(min(cold, MOST) / set_bytes)))


def slots_of(slot_bytes: float, draws: int, cold: float = COLD) -> int:
    """Slots of a pool that takes `cold` bytes, or from which MIN_SETS calls draw `draws` slots each."""
    return max(math.ceil(min(cold, MOST) / slot_bytes), MIN_SETS * draws)


def drawn(slots: int, sets: int, batch: int, device: torch.device) -> Tensor:
    """[sets, batch] slots at random, each once. Every row begins at a multiple of 32 bytes, as FlashInfer assumes."""
    found = torch.randperm(slots, device=device)[: sets * batch].to(torch.int32).view(sets, batch)
    return torch.nn.functional.pad(found, (0, -batch % 8))[:, :batch]


def normal_pool(slots: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """[slots, *shape], normally distributed, in fewer bits with a deviation of 30; filled in parts, which need less memory."""
    pool = torch.empty(slots, *shape, dtype=dtype, device=device)
    for part in pool.split(max(1, slots // 16)):
        if dtype in NARROW:
            part.copy_(torch.randn(part.shape, device=device).mul_(30).clamp_(-120, 120))
        else:
            part.normal_()
    return pool


def scales_of(pool: Tensor) -> Tensor | None:
    """Scales of the rows of a pool of fewer bits, such that its numbers are of the size of one; None of any other."""
    return torch.rand(*pool.shape[:-1], device=pool.device) / 30 if pool.dtype in NARROW else None


def cuts_of(tokens: int, sequences: int, device: torch.device) -> Tensor:
    """Where packed sequences of different lengths start, and the last one ends: [sequences + 1], or fewer where tokens are fewer."""
    cuts = torch.randperm(tokens - 1)[: sequences - 1].sort().values + 1
    return torch.tensor([0, *cuts.tolist(), tokens], dtype=torch.int32, device=device)


def binary_tree(batch: int, tokens: int, device: torch.device | str) -> Tensor:
    """The parents [batch, tokens] of a draft tree in which each token has two children, as long as there are tokens."""
    return ((torch.arange(tokens, device=device, dtype=torch.int32) - 1) // 2).repeat(batch, 1)


def some_of(count: int, most: int, device: torch.device) -> Tensor:
    """Up to `most` of `count` rows, evenly spread."""
    return torch.linspace(0, count - 1, min(count, most), device=device).long()


def taken(t: Tensor, rows: Tensor) -> Tensor:
    """A copy of these rows, in which axes of stride 0 have stride 0."""
    bare = t
    for axis in range(1, t.dim()):
        bare = bare if t.stride(axis) else bare.narrow(axis, 0, min(1, t.shape[axis]))
    return bare[rows].expand(len(rows), *t.shape[1:])


def some_rows(
    call: Call, rows: Tensor, by_row: Sequence[str], pools: Sequence[str] = ("state",), indices: Sequence[str] = ("state_indices",),
    scales: Mapping[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The call of these rows of the batch, on copies of their slots. scales: {operand of fewer bits: its scales}, which becomes f32."""
    scales = scales or {}
    given = [name for name in indices if name in call]
    touched = torch.cat([call[name][rows].flatten() for name in given]).long()
    own = iter(torch.arange(len(touched), device=rows.device).split([call[name][rows].numel() for name in given]))
    small = {n: t for n, t in call.items() if n not in scales.values()}
    small |= {n: taken(call[n], rows) for n in by_row if call.get(n) is not None}
    small |= {n: next(own).view(call[n][rows].shape) for n in given}
    for name in (*pools, *scales):
        if name in call:
            where = touched if name in pools else rows
            scale = call.get(scales.get(name, ""))
            small[name] = call[name][where] if scale is None else widened(call[name][where], scale[where], torch.float32)
    return small


def by_pdl(arch: Arch) -> Variants:
    """Two launches: with PDL where the device has it, and without."""
    return {name_of("ssmgen", pdl): {"pdl": pdl} for pdl in ((True, False) if arch >= SM90 else (False,))}


def name_of(name: str, pdl: bool) -> str:
    return f"{name}_pdl" if pdl else name


@dataclass(kw_only=True)
class Case:
    """Calls of `function` on `sets` sets of inputs.

    rotating: {parameter: a value for each set, or for fewer, which then repeat}. shared: the values common to all sets. part: from a
    call's keywords, the keywords of the smaller call that is checked against float64. limits: of norm errors, by operand, if not GATE's
    for its dtype; slack: in addition. outputs: parameters that a call only writes; the gate fills them before.
    """

    function: Callable[..., Any]
    sets: int
    bytes: float  # moved by a call
    rotating: Mapping[str, Tensor | Sequence[Any]]
    shared: Mapping[str, Any] = field(default_factory=dict)
    part: Callable[[Call], Call] = dict
    limits: Mapping[str, float] = field(default_factory=dict)
    slack: float = 0.0
    outputs: Sequence[str] = ("out",)
    variants: Callable[[Arch], Variants] = by_pdl  # a plain call runs the first
    beside: Mapping[str, Launch] = field(default_factory=dict)  # our further contenders
    ahead: Case | None = None  # whose launch comes before each of these; part of the time, and timed by itself
    name: str = "ssmgen"  # of a contender, without PDL
    ratios: Sequence[str] = ()  # the names in `beside` that rows have a ratio to
    rivals: Mapping[str, Launch] = field(default_factory=dict)  # eager calls of names in `beside`, compared as peers are
    copied: tuple[Tensor, Tensor] | None = None  # (pool, slots [sets, batch]) of the slot copy
    comparable: bool = True  # the slot copy moves the same number of bytes
    peer_limits: Mapping[str, float] = field(default_factory=dict)  # by operand, in the order of peers' results
    host: bool = True  # host times are taken
    row: Mapping[str, Any] = field(default_factory=dict)  # further fields of the row
    at: Any = None  # where it is on the axes: for peers
    more: Mapping[str, Any] = field(default_factory=dict)  # arguments for peers only
    _known: dict[str, Tensor] | None = field(default=None, init=False, repr=False)

    @functools.cached_property
    def device(self) -> torch.device:
        return next(t.device for t in self.arguments(0).values() if isinstance(t, Tensor))

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Keywords of each call."""
        return [self.arguments(i) for i in range(self.sets)]

    def arguments(self, i: int) -> dict[str, Any]:
        """Keywords of the i-th call."""
        return {**self.shared, **{name: values[i % len(values)] for name, values in self.rotating.items()}}

    def bound(self, **how: Any) -> Launch:
        """The call on each set, with the host's part done beforehand."""
        calls = [api.bind(self.function, **{**call, **how}) for call in self.calls]
        if self.ahead is None:
            return lambda i: calls[i]()
        ahead = self.ahead.bound(pdl=how["pdl"])
        return lambda i: (ahead(i), calls[i]())

    def contenders(self) -> dict[str, Launch]:
        """Our contenders in addition to the variants."""
        return dict(self.beside)

    def written(self, call: Call, exact: bool = False) -> dict[str, Tensor]:
        """The operands that a call writes, as views; exact: float64 copies of them, as the reference writes them."""
        built = call_of(self.function, **call)
        views = built.caller.checked(built.operands, built.options, None)
        found = {name: views[name] for name in built.caller.family.written if name in views and name not in SCRATCH}
        if exact:
            found = {name: t.double() if t.is_floating_point() else t.clone() for name, t in found.items()}
            if built.before is not None:
                built.before()
            built.caller.reference(views | found, built.options, torch.float64)
        return found

    def expected(self) -> dict[str, Tensor]:
        """The results of the first call's part, in float64; computed once where no operand is both read and written."""
        found = self._known or self.written(self.part(self.arguments(0)), exact=True)
        repeats = all({name, f"{name}_out"} & {*self.outputs} for name in found)
        self._known = found if repeats else None
        return found

    def errors(self, call: Call, expected: Mapping[str, Tensor]) -> dict[str, float]:
        """Norm errors of a call's results, by operand."""
        found = self.written(self.part(call))
        return {name: norm_error(t, expected[name]) for name, t in found.items()}

    def gate(self, **how: Any) -> dict[str, float]:
        """Norm errors of one call, by operand. Raises SsmgenError where one is more than its limit."""
        if self.ahead is not None:
            self.ahead.function(**self.ahead.arguments(0), pdl=how.get("pdl"))
        call, expected = self.arguments(0), self.expected()
        for name in self.outputs:
            if name in call and call[name].is_floating_point():
                call[name].fill_(float("nan"))
        self.function(**{**call, **how})
        errors = self.errors(call, expected)
        self.check(errors, {name: self.limit(name) for name in errors})
        return errors

    def peer_errors(self, name: str, call: Launch) -> dict[str, float]:
        """Norm errors of a peer's results for the first set, by operand."""
        results: Any = call(0)
        returned = dict(zip(self.peer_limits, results if isinstance(results, tuple) else (results,), strict=True))
        given, expected = self.arguments(0), self.expected()
        returned = {operand: t.view(given[operand].shape) for operand, t in returned.items()}
        errors = self.errors({**given, **returned}, expected)
        return {operand: errors[operand] for operand in self.peer_limits}

    def limit(self, name: str) -> float:
        """The bound on an operand's norm error."""
        if name in self.limits:
            return self.limits[name]
        call = self.arguments(0)
        dtype = (call[name] if name in call else call[f"{name}_out"]).dtype
        return GATE[dtype] + self.slack if dtype in GATE else EXACT

    def check(self, errors: Mapping[str, float], limits: Mapping[str, float], objection: str = "") -> None:
        """Raises SsmgenError where an error is more than its limit, or for another objection."""
        if objection or not all(error < limits[name] or error == EXACT for name, error in errors.items()):
            found = [f"{name} error {error:.1e}" for name, error in errors.items()] + [objection] * bool(objection)
            raise SsmgenError(f"{self.function.__name__}: {', '.join(found)}; not timed")


def kept(call: Launch) -> Launch:
    """A call that returns new tensors, each of which is kept until the same call is made again."""
    results: dict[int, Any] = {}

    def run(i: int) -> Any:
        results[i] = call(i)
        return results[i]

    return run


def keeping(function: Callable[..., Any], calls: Sequence[Call]) -> Launch:
    """Calls of a function, whose results are kept."""
    return kept(lambda i: function(**calls[i]))


def without_tree(case: Case) -> Launch | None:
    """The same call without its draft tree: each token goes on from the one before it."""
    if "parents" not in case.shared:
        return None
    bound = [api.bind(case.function, **{n: t for n, t in call.items() if n != "parents"}) for call in case.calls]
    return lambda i: bound[i]()
