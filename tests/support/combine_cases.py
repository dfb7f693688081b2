"""Operands for combine_splits: strided, poisoned, guarded; its expected results and their error bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from guarded_call import GuardedCall, gaps
from ssu_cases import BF16, F16, F32, Memory, ulp
from torch import Tensor
from varying import vary

from ssmgen.families.combine_splits import call as op
from ssmgen.families.combine_splits.reference import combine_splits as reference

I32, I64 = torch.int32, torch.int64
INF, NAN = math.inf, math.nan


@dataclass(frozen=True)
class Case:
    """One point of the matrix; `id` is readable."""

    id: str
    splits: int = 5  # of every row
    counts: tuple[int, ...] = ()  # of each entry of a batch instead, which leads the rows
    pair: bool = False
    rows: tuple[int, ...] = (3, 4)
    d_v: int = 128
    o: torch.dtype = F32
    out: torch.dtype = BF16
    layout: str = "dense"  # of o and lse: see LAYOUTS
    out_layout: str = "dense"
    index: torch.dtype = I32
    sink: torch.dtype | None = None
    mask: bool = False
    lse_out: bool = True
    in_place: bool = False
    base: int | str = "e"
    base_out: int | str | None = None
    empty_lse: float = -INF
    skip_single: bool = False
    spread: float = 3.0  # of LSEs
    shift: float = 0.0
    empty: float = 0.2  # of the splits


DENSE = Case("dense")
PREFIX = Case("prefix", counts=(3, 1, 0, 7, 40, 1), rows=(4,), d_v=512)
PAIR = Case("pair", splits=2, pair=True, o=BF16, rows=(5, 4), empty=0.3)
NAMES = {F32: "f32", F16: "f16", BF16: "bf16"}


def matrix() -> list[Case]:
    cases = [
        *[replace(DENSE, id=f"dense-s{s}", splits=s) for s in (0, 1, 2, 3, 4, 8, 9, 16, 17, 32, 33, 64, 65, 96, 128, 129, 160, 161, 300)],
        *[replace(DENSE, id=f"dense-d{d}", d_v=d, splits=12) for d in (4, 8, 12, 36, 64, 68, 100, 192, 256, 260, 512, 576, 1020, 1024)],
        *[replace(DENSE, id=f"dense-bf16-d{d}-s{s}", d_v=d, splits=s, o=BF16) for d in (4, 8, 12, 64, 128, 136, 512) for s in (2, 7, 20)],
        *[replace(DENSE, id=f"dense-{NAMES[o]}-{NAMES[to]}", o=o, out=to, splits=9) for o in NAMES for to in NAMES],
        *[replace(DENSE, id=f"dense-{kind}", layout=kind, out_layout=kind, rows=(2, 3, 2), splits=6) for kind in LAYOUTS],
        *[replace(DENSE, id=f"dense-out-{kind}", out_layout=kind, d_v=64, splits=6) for kind in LAYOUTS],
        *[replace(DENSE, id=f"dense-{len(rows)}-axes", rows=rows, splits=11) for rows in ((), (7,), (1, 1), (2, 1, 3), (2, 3, 2, 2))],
        *vary(DENSE, base2={"base": 2}, e_to_2={"base_out": 2}, two_to_e={"base": 2, "base_out": "e", "empty_lse": INF}),
        *vary(DENSE, far={"shift": 80.0, "spread": 20.0, "splits": 40}, low={"shift": -1e4}, wide={"spread": 100.0, "splits": 70}),
        *vary(DENSE, sink={"sink": F32}, sink2={"sink": BF16, "base": 2}, mask={"mask": True}, no_lse={"lse_out": False}),
        *vary(DENSE, all_empty={"empty": 1.0, "empty_lse": INF}, none_empty={"empty": 0.0, "splits": 37}, no_rows={"rows": (0, 4)}),
        PREFIX,
        *vary(PREFIX, i64={"index": I64}, skip={"skip_single": True}, rows2={"rows": (2, 3)}, base2={"base": 2, "base_out": "e"}),
        *vary(PREFIX, sink={"sink": F16, "rows": (2, 3), "d_v": 64}, mask={"mask": True, "d_v": 128}, gaps={"out_layout": "gaps"}),
        *vary(PREFIX, many={"counts": (2,) * 90, "d_v": 64}, long={"counts": (170, 3, 0, 1), "d_v": 128}, odd={"layout": "odd"}),
        *vary(
            PREFIX, none={"counts": (0, 0)}, one={"counts": (9,)}, no_rows={"rows": ()}, short={"counts": (1, 0, 2), "o": BF16, "d_v": 64}
        ),
        *vary(PREFIX, short_skip={"counts": (1, 0, 2, 1, 3), "o": BF16, "d_v": 64, "skip_single": True, "mask": True}),
        *[replace(PAIR, id=f"pair-{NAMES[o]}-d{d}", o=o, out=o, d_v=d) for o in NAMES for d in (64, 128, 256, 512)],
        *vary(PAIR, heads_first={"layout": "swapped"}, mask={"mask": True}, odd={"layout": "odd", "d_v": 68}, base2={"base": 2}),
        *[
            replace(PAIR, id=f"pair-in-place-{NAMES[o]}-d{d}", o=o, out=o, d_v=d, in_place=True, mask=d == 512)
            for o, d in ((BF16, 64), (BF16, 512), (F32, 128), (F32, 512), (F16, 1024))
        ],
    ]
    assert len({c.id for c in cases}) == len(cases)
    return cases


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of the first two axes the other way round: [n, splits, heads, d_v] for [splits, n, heads, d_v]."""
    order = [1, 0, *range(2, len(shape))]
    strides = torch.empty([shape[a] for a in order], device="meta").stride()
    return tuple(strides[order.index(a)] for a in range(len(shape)))


# (strides, elements from an aligned address)
LAYOUTS = {
    "dense": lambda shape: (tuple(torch.empty(shape, device="meta").stride()), 64),
    "swapped": lambda shape: (_swapped(shape) if len(shape) > 2 else tuple(torch.empty(shape, device="meta").stride()), 64),
    "gaps": lambda shape: (gaps(shape), 64),
    "odd": lambda shape: (gaps(shape, 1), 65),
}


class Call(GuardedCall):
    operator = op.OPERATOR


def _view(memory: Memory, name: str, layout: str, shape: tuple[int, ...], dtype: torch.dtype, trailing: bool = True) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device=memory.device)
    whole = shape if trailing else (*shape, 1)  # LSEs have no columns
    strides, offset = LAYOUTS[layout](whole)
    view = memory.view(name, whole, strides, dtype, offset)
    return view if trailing else view[..., 0]


def make(case: Case, device: str, seed: int = 0) -> Call:
    g, memory = torch.Generator().manual_seed(seed), Memory(device)
    total = sum(case.counts) if case.counts else case.splits
    shape = case.rows if case.pair else (total, *case.rows)
    rows = (len(case.counts), *case.rows) if case.counts else case.rows

    def partial(suffix: str) -> tuple[Tensor, Tensor]:
        o = _view(memory, f"o{suffix}", case.layout, (*shape, case.d_v), case.o)
        lse = _view(memory, f"lse{suffix}", case.layout, shape, F32, trailing=False)
        empty = torch.rand(shape, generator=g) < case.empty
        o.copy_(torch.randn(*shape, case.d_v, generator=g).masked_fill(empty[..., None], NAN))
        kind = torch.randint(0, 4, shape, generator=g)
        nothing = torch.tensor([-INF, INF, NAN, -INF])[kind]
        lse.copy_(torch.where(empty, nothing, case.shift + case.spread * torch.randn(shape, generator=g)))
        return o, lse

    o, lse = partial("")
    kwargs: dict[str, Any] = {"o": o, "lse": lse}
    if case.pair:
        other = partial("_other")
        kwargs = {"o": (o, other[0]), "lse": (lse, other[1])}
    if case.counts:
        kwargs["num_splits"] = memory.fill("num_splits", torch.tensor([0, *accumulate(case.counts)], dtype=case.index))
    if case.sink:
        kwargs["attn_sink"] = memory.fill("attn_sink", case.shift + torch.randn(rows[-1], generator=g).to(case.sink))
    if case.mask:
        kwargs["mask"] = torch.arange(rows[0], device=device).view(-1, *[1] * (len(rows) - 1)) % 3 != 1
    kwargs["out"] = o if case.in_place else _view(memory, "out", case.out_layout, (*rows, case.d_v), case.out)
    if case.lse_out:
        kwargs["lse_out"] = lse if case.in_place else _view(memory, "lse_out", case.out_layout, rows, F32, trailing=False)
    kwargs |= {"lse_base": case.base, "lse_base_out": case.base_out, "empty_lse": case.empty_lse, "skip_single": case.skip_single}
    memory.seal()
    return Call(case, memory, kwargs)


@dataclass
class Expected:
    """The result in float64, and how far a computation in f32 may be off; infinite values must be equal."""

    results: list[Tensor]
    bounds: list[Tensor]


def _groups(views: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor, tuple[int, ...]]]:
    """(o, lse, place in out) in float64 for each group of splits."""
    if "o_other" in views:
        yield *(torch.stack([views[n], views[f"{n}_other"]]).double() for n in ("o", "lse")), ()
    elif "num_splits" in views:
        for b, (begin, end) in enumerate(pairwise(views["num_splits"].tolist())):
            yield views["o"][begin:end].double(), views["lse"][begin:end].double(), (b,)
    else:
        yield views["o"].double(), views["lse"].double(), ()


def expected(call: Call) -> Expected:
    """The results that a call must give, with error bounds. Computed before the call.

    A weight 2^x is off by the roundings of x (three of 2^-24 of it, times ln 2) and of ex2.approx (2 ulp); sums of S terms, chains of S / 8
    or S / 32 by 2^-24 for each step; rcp.approx by 1 ulp, log2f by 1. Numbers below 2^-118 may have been flushed. A result rounded past a
    power of two is off by the error twice.
    """
    views = {n: t.detach().cpu() for n, t in call.views.items()}
    eps, natural = 2.0**-24, call.options.natural
    results = {n: views[n].double() for n in ("out", "lse_out") if n in views}
    how = {"natural": natural, "natural_out": call.options.natural_out, "empty_lse": call.options.empty_lse}
    reference(**views | results, **how, skip_single=call.options.skip_single, dtype=torch.float64)
    bounds = {n: torch.zeros_like(t) for n, t in results.items()}
    for o, lse, where in _groups(views):
        if not len(lse):
            continue
        live = lse.isfinite()
        logs = torch.where(live, lse, -INF) / (math.log(2) if natural else 1)  # base 2
        most = logs.amax(0)
        origin = torch.where(most == -INF, 0, most)
        x = logs - origin
        weight = torch.where(live, 2.0**x, 0)
        off = torch.where(live, weight * (3 * eps * math.log(2) * x.abs().nan_to_num(posinf=0) + 4 * eps), 0).sum(0)
        weights = weight.sum(0).clamp(min=1)
        sums_off = off / weights + (len(lse) / 32 + 7) * eps
        size = (weight[..., None] * o.abs().where(weight[..., None] > 0, torch.tensor(0.0, dtype=torch.float64))).sum(0) / weights[
            ..., None
        ]
        share = torch.ones_like(weights)
        if "attn_sink" in views:
            sink = views["attn_sink"][where].double() / math.log(2)
            part = 2.0 ** (sink - origin) / (weights + 2.0 ** (sink - origin))
            share = 1 - part
            sums_off = sums_off + part * eps * (4 + 3 * (sink.abs() + (sink - origin).abs()))
        worst = torch.where(live, 3 * eps * math.log(2) * x.abs().nan_to_num(posinf=0), 0)
        worst = worst.where(weight > 2.0**-40, 0).amax(0)  # splits below this weight are lost in rounding
        relative = worst + (4 + len(lse) / 8 + 5) * eps + sums_off + 4 * eps
        bounds["out"][where] = 2 * relative[..., None] * size * share[..., None] + 2.0**-118
        if "lse_out" in bounds:
            unit = math.log(2) if call.options.natural_out else 1.0
            log = torch.log2(weights)
            bounds["lse_out"][where] = unit * (origin.abs() * 2 * eps + 4 * eps * log + sums_off / math.log(2)) + eps
    for n, t in results.items():
        bounds[n] = bounds[n] + torch.where(t.isfinite() & (t != 0), 0.5 * ulp(t.nan_to_num(posinf=0, neginf=0), views[n].dtype), 0)
    return Expected(list(results.values()), list(bounds.values()))


def assert_matches(call: Call, want: Expected) -> None:
    """Results within their bounds, and nothing else in memory changed."""
    written = ("o", "lse") if call.case.in_place else ("out", "lse_out")
    wrong = call.memory.untouched(dict.fromkeys(n for n in written if n in call.memory.buffers))
    assert not wrong, f"changed outside what the call may write: {wrong}"
    results = [call.views[n] for n in ("out", "lse_out") if n in call.views]
    for name, result, right, bound in zip(("out", "lse_out"), results, want.results, want.bounds, strict=False):
        got = result.detach().cpu().double()
        same = (got == right) | (got.isnan() & right.isnan())  # elements that the call leaves unchanged were NaN
        excess = torch.where(same, 0.0, (got - right).abs() / bound).nan_to_num(nan=INF)
        assert not excess.numel() or excess.max() <= 1, f"{name} off by {float(excess.max()):.2f} x its bound"


LSES = {  # of two splits: the second's share of the output, and the sum's logarithm; None: nothing is there
    "both": ((0.0, 0.0), 0.5, math.log(2)),
    "second-empty": ((1.5, -INF), 0.0, 1.5),
    "first-inf": ((INF, -2.0), 1.0, -2.0),
    "nan": ((NAN, 3.0), 1.0, 3.0),
    "nan-inf": ((NAN, INF), None, None),
    "minus-inf": ((-INF, -INF), None, None),
    "lost": ((0.0, -200.0), 0.0, 0.0),
    "largest": ((3e38, -3e38), 0.0, 3e38),
}


def check_special(kind: str, empty_lse: float, device: str, run: Callable[[Call], Any]) -> None:
    """Splits of zeros and of ones; one without a weight holds NaN."""
    lses, share, total = LSES[kind]
    o = torch.tensor([0.0, 1.0])[:, None, None].repeat(1, 3, 64)
    o[0] = NAN if share in (1.0, None) else 0.0
    o[1] = NAN if share in (0.0, None) else 1.0
    lse = torch.tensor(lses)[:, None].repeat(1, 3)
    kwargs: dict[str, Any] = {"o": o, "lse": lse, "out": torch.full((3, 64), NAN), "lse_out": torch.full((3,), NAN)}
    kwargs = {n: t.to(device) for n, t in kwargs.items()}
    run(Call(DENSE, Memory(device), kwargs | {"empty_lse": empty_lse}))
    assert (kwargs["out"] == (share or 0.0)).all()
    assert kwargs["lse_out"].tolist() == pytest.approx([empty_lse if total is None else total] * 3, rel=1e-6)
