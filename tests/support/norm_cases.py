"""Operands for gated_rms_norm: strided, poisoned, guarded; its expected results and their error bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from guarded_call import GuardedCall, gaps
from ssu_cases import BF16, F16, F32, Memory, ulp
from torch import Tensor
from varying import vary

from ssmgen.families.gated_rms_norm import call as op

NAN = math.nan
NAMES = {F32: "f32", F16: "f16", BF16: "bf16"}


@dataclass(frozen=True)
class Case:
    """One point of the matrix; `id` is readable."""

    id: str
    rows: tuple[int, ...] = (3,)
    groups: int = 1
    size: int = 128
    flat: bool = False  # groups in one axis, given by group_size
    x: torch.dtype = BF16
    gate: torch.dtype | None = BF16
    weight: torch.dtype | None = BF16
    each: bool = False  # each group has its own weight
    out: torch.dtype = BF16
    norm_first: bool = False
    activation: str = "silu"
    layout: str = "dense"  # of x and gate: see LAYOUTS
    out_layout: str = "dense"
    in_place: str = ""  # the operand that out is
    eps: float = 1e-5
    spread: float = 1.0  # of x
    gate_spread: float = 2.0


MAMBA = Case("mamba", size=1024, flat=True, groups=2, each=True)
GDN = Case("gdn", groups=4, norm_first=True)
KDA = replace(GDN, id="kda", activation="sigmoid", weight=F32)
PLAIN = Case("plain", gate=None)

SIZES = (4, 8, 12, 28, 32, 60, 64, 96, 100, 128, 132, 200, 256, 260, 264, 320, 512, 1000, 1024, 1028, 1280, 2048, 2560, 3000, 4096)
LARGE_SIZES = (5120, 6144, 8192, 10240, 16380, 16384)


def matrix() -> list[Case]:
    cases = [
        MAMBA,
        GDN,
        KDA,
        PLAIN,
        *[replace(PLAIN, id=f"gated-{n}", size=n, gate=BF16, rows=(5,) if n < 512 else (2,)) for n in (*SIZES, *LARGE_SIZES)],
        *[
            replace(GDN, id=f"f32-{n}", size=n, x=F32, gate=F32, weight=F32, out=F32, rows=(2,))
            for n in (4, 36, 64, 260, 1280, 8192, 16384)
        ],
        *[replace(GDN, id=f"gdn-{NAMES[a]}-{NAMES[b]}-{NAMES[c]}", x=a, gate=b, out=c) for a in NAMES for b in NAMES for c in NAMES],
        *[replace(MAMBA, id=f"mamba-{kind}", layout=kind, out_layout=kind) for kind in LAYOUTS],
        *[replace(GDN, id=f"gdn-{kind}", layout=kind, out_layout="dense" if kind == "odd" else kind, size=68) for kind in LAYOUTS],
        *[replace(GDN, id=f"gdn-rows-{'x'.join(map(str, r)) or 'none'}", rows=r) for r in ((), (1,), (37,), (2, 3), (1, 1), (0,))],
        *vary(GDN, each={"each": True}, no_weight={"weight": None}, each_f16={"each": True, "weight": F16, "size": 132}),
        *vary(MAMBA, shared={"each": False}, no_weight={"weight": None}, apart={"flat": False}, groups8={"groups": 8, "size": 64}),
        *vary(MAMBA, one_group={"groups": 1, "size": 5120, "each": False}, sigmoid={"activation": "sigmoid"}, x_f32={"x": F32}),
        *vary(MAMBA, in_x={"in_place": "x"}, in_gate={"in_place": "gate"}, eps={"eps": 0.5}, zero={"spread": 0.0}),
        *vary(GDN, in_x={"in_place": "x"}, in_gate={"in_place": "gate", "size": 100}, swish={"activation": "swish"}),
        *vary(GDN, in_x_gaps={"in_place": "x", "layout": "gaps"}, in_x_odd={"in_place": "x", "layout": "odd"}),
        *vary(MAMBA, far_gate={"gate_spread": 60.0}, small={"spread": 1e-3, "x": F32}, large={"spread": 1e6, "x": F32, "out": F32}),
        *vary(PLAIN, f32={"x": F32, "out": F32}, no_weight={"weight": None}, groups={"groups": 3}, in_x={"in_place": "x", "size": 1024}),
    ]
    assert len({c.id for c in cases}) == len(cases)
    return cases


# (strides, elements from an aligned address)
LAYOUTS = {
    "dense": lambda shape: (tuple(torch.empty(shape, device="meta").stride()), 64),
    "gaps": lambda shape: (gaps(shape, axes=2), 64),
    "odd": lambda shape: (gaps(shape, 1, axes=2), 65),
}


class Call(GuardedCall):
    operator = op.OPERATOR

    @property
    def out(self) -> Tensor:
        return self.operands["out"]


def make(case: Case, device: str, seed: int = 0) -> Call:
    g, memory = torch.Generator().manual_seed(seed), Memory(device)
    # with several axes of rows, the last one would be the axis of groups
    grouped = (case.groups,) if case.groups > 1 or len(case.rows) > 1 else ()
    shape = (*case.rows, case.groups * case.size) if case.flat else (*case.rows, *grouped, case.size)

    def view(name: str, layout: str, dtype: torch.dtype) -> Tensor:
        if 0 in shape:
            return torch.empty(shape, dtype=dtype, device=device)
        strides, offset = LAYOUTS[layout](shape)
        return memory.view(name, shape, strides, dtype, offset)

    kwargs: dict[str, Any] = {"x": view("x", case.layout, case.x)}
    kwargs["x"].copy_(case.spread * torch.randn(shape, generator=g))
    if case.gate:
        kwargs["gate"] = view("gate", case.layout, case.gate)
        kwargs["gate"].copy_(case.gate_spread * torch.randn(shape, generator=g))
    if case.weight:
        count = case.groups if case.each else 1
        kwargs["weight"] = memory.fill("weight", torch.randn(count * case.size, generator=g).to(case.weight))
        if case.each and not case.flat:
            kwargs["weight"] = kwargs["weight"].view(count, case.size)
    kwargs["out"] = kwargs[case.in_place] if case.in_place else view("out", case.out_layout, case.out)
    kwargs |= {"eps": case.eps, "norm_before_gate": case.norm_first, "activation": case.activation}
    if case.flat:
        kwargs["group_size"] = case.size
    memory.seal()
    return Call(case, memory, kwargs)


@dataclass
class Expected:
    """The result in float64, and how far a computation in f32 may be off."""

    out: Tensor
    bound: Tensor


def expected(call: Call) -> Expected:
    """The results that a call must give, with error bounds. Computed before the call.

    The logistic function of v is off by the roundings of v log2(e) (two of 2^-24 of it), of ex2.approx (2 ulp), of a sum and of rcp.approx
    (1 ulp). Half of the error of the sum of squares is in its root: twice the error of each square, chains of 4 and 12 levels of pairs, the
    mean's factor; rsqrt.approx adds 2 ulp. Numbers below 2^-126 may have been flushed. A result rounded past a power of two is off by the
    error twice.
    """
    views = {n: t.detach().cpu() for n, t in call.views.items()}
    dtype, eps = views["out"].dtype, 2.0**-24
    out = torch.empty(views["out"].shape, dtype=torch.float64)
    op.CALLER.reference(views | {"out": out}, call.options, torch.float64)
    x = views["x"].double()
    off, value = torch.zeros_like(x), x
    if "gate" in views:
        gate = views["gate"].double()
        off = (2 * gate.abs() + 9) * eps
        value = x * (gate if call.case.activation != "sigmoid" else 1) * torch.sigmoid(gate)
    squares = (x if call.case.norm_first else value).square()
    of_squares = torch.zeros_like(x) if call.case.norm_first else 2 * off
    total = squares.sum(-1, keepdim=True)
    of_sum = (squares * of_squares).sum(-1, keepdim=True) / torch.where(total > 0, total, 1) + 20 * eps
    relative = off + 0.5 * of_sum + 8 * eps
    bound = 2 * relative * out.abs() + 2.0**-100 + torch.where(out != 0, 0.5 * ulp(out, dtype), 0)
    return Expected(out, bound)


def assert_matches(call: Call, want: Expected) -> None:
    """The result within its bound, and nothing else in memory changed."""
    written = call.case.in_place or "out"
    wrong = call.memory.untouched({written: None} if written in call.memory.buffers else {})
    assert not wrong, f"changed outside what the call may write: {wrong}"
    got = call.views["out"].detach().cpu().double()
    excess = torch.where(got == want.out, 0.0, (got - want.out).abs() / want.bound).nan_to_num(nan=math.inf)
    assert not excess.numel() or excess.max() <= 1, f"out off by {float(excess.max()):.2f} x its bound"
