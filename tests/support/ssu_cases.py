"""Operands for selective_state_update: strided, poisoned, guarded; and the bounds its results must keep."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import ssmgen
from ssmgen.engine.recurrences.mamba.reference import reference
from ssmgen.engine.recurrences.reference import softplus
from ssmgen.families.selective_state_update.planning import Options, views_of

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
POISON = {F32: 1e30, F16: 6e4, BF16: 1e30}


@dataclass(frozen=True)
class Case:
    """One point of the matrix; `id` is readable."""

    id: str
    heads: int = 0  # 0: no heads axis (Mamba-1)
    headdim: int = 64
    d_state: int = 128
    groups: int = 1
    state: torch.dtype = F32
    x: torch.dtype = BF16
    bc: torch.dtype = BF16
    dt: torch.dtype = BF16
    A: torch.dtype = F32
    D: torch.dtype | None = F32
    z: torch.dtype | None = None
    dt_bias: torch.dtype | None = F32
    out: torch.dtype | None = None  # None: the dtype of x
    tied: bool = True
    softplus: bool = True
    limit: tuple[float, float] | None = None
    index: torch.dtype | None = None
    split: bool = False
    pad_slot_id: int = -1
    conv_slices: bool = False  # x, B, C as slices of one tensor, at an odd offset
    slot_gap: int = 0  # elements between slots
    batch: int = 5


def matrix() -> list[Case]:
    m2 = Case("m2", heads=16, groups=2)
    m1 = Case("m1", heads=0, headdim=128, d_state=16, tied=False, z=BF16)
    cases = [replace(m2, id=f"m2-{name}-pool", state=t, index=torch.int32) for name, t in (("f32", F32), ("f16", F16), ("bf16", BF16))]
    cases += [replace(m1, id=f"m1-{name}-pool", state=t, index=torch.int32) for name, t in (("f32", F32), ("f16", F16), ("bf16", BF16))]
    cases += [replace(m1, id=f"m1-d{n}", d_state=n) for n in (2, 4, 8, 16, 32, 64, 96, 128, 256)]
    cases += [replace(m1, id=f"m1-d{n}-bf16", d_state=n, state=BF16) for n in (2, 4, 8, 16, 32)]
    cases += [
        replace(m2, id=f"m2-d{n}-{name}", d_state=n, state=t) for n in (16, 32, 64, 96, 256) for name, t in (("f32", F32), ("bf16", BF16))
    ]
    cases += [replace(m2, id=f"m2-p{p}", headdim=p, heads=4, state=BF16) for p in (1, 32, 80, 96, 128, 200)]
    cases += [replace(m1, id=f"m1-dim{p}", headdim=p) for p in (7, 1536, 2064)]
    cases += [
        replace(m2, id=f"m2-h{h}g{g}", heads=h, groups=g, state=BF16)
        for h, g in ((1, 1), (3, 1), (12, 3), (24, 3), (24, 8), (48, 1), (80, 1), (128, 8))
    ]
    cases += [
        replace(m2, id="m2-untied", tied=False, z=BF16),
        replace(m2, id="m2-all-f32", x=F32, bc=F32, dt=F32),
        replace(m2, id="m2-all-f16", state=F16, x=F16, bc=F16, dt=F16, A=F16, D=F16, dt_bias=F16, z=F16),
        replace(m2, id="m2-all-bf16", state=BF16, A=BF16, D=BF16, dt_bias=BF16, z=BF16),
        replace(m2, id="m2-mixed", state=BF16, x=F16, bc=F32, dt=F32, A=BF16, D=F16, dt_bias=BF16, z=F32, out=F32),
        replace(m2, id="m2-bare", D=None, dt_bias=None, softplus=False),
        replace(m1, id="m1-bare", D=None, dt_bias=None, softplus=False, z=None),
        replace(m1, id="m1-d-only", dt_bias=None, z=None),
        replace(m2, id="m2-limit", limit=(0.01, 0.1)),
        replace(m1, id="m1-limit", limit=(0.0, 0.05)),
        replace(m2, id="m2-i64-pad7", index=torch.int64, pad_slot_id=7, batch=9),
        replace(m2, id="m2-split-i32", index=torch.int32, split=True, state=BF16),
        replace(m1, id="m1-split-i64", index=torch.int64, split=True),
        replace(m2, id="m2-conv-slices", conv_slices=True, index=torch.int32),
        replace(m1, id="m1-conv-slices", conv_slices=True),
        replace(m2, id="m2-conv-slices-p80", conv_slices=True, headdim=80, state=F16, z=F32),
        replace(m2, id="m2-slot-gap", slot_gap=4096, index=torch.int32),
        replace(m2, id="m2-slot-gap-odd", slot_gap=3, index=torch.int32, state=BF16),
        replace(m1, id="m1-slot-gap-odd", slot_gap=1, index=torch.int64, split=True, state=F16),
        replace(m2, id="m2-batch1", batch=1, index=torch.int32),
        replace(m2, id="m2-batch130", batch=130, heads=3, groups=1, index=torch.int32, state=BF16),
        replace(m1, id="m1-batch300", batch=300, index=torch.int32),
    ]
    assert len({c.id for c in cases}) == len(cases)
    return cases


def small_matrix() -> list[Case]:
    """The same matrix with fewer heads and sequences where they add nothing: for computation on a CPU."""

    def smaller(case: Case) -> Case:
        heads = case.heads if case.heads * case.headdim * case.d_state < 100_000 else 2 * case.groups
        return replace(case, heads=heads, batch=min(case.batch, 9))

    return [smaller(case) for case in matrix()]


class Memory:
    """Allocates views inside poisoned buffers and remembers what the buffers held."""

    def __init__(self, device: str):
        self.device = device
        self.buffers: dict[str, tuple[Tensor, Tensor, tuple]] = {}

    def view(self, name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, offset: int = 64) -> Tensor:
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        buffer = torch.full((extent + offset + 64,), POISON.get(dtype, -(2**20)), dtype=dtype, device=self.device)
        view = buffer.as_strided(shape, strides, offset)
        self.buffers[name] = (buffer, buffer, (shape, strides, offset))
        return view

    def fill(self, name: str, values: Tensor) -> Tensor:
        """A dense view with these values, between guards."""
        strides = tuple(torch.empty(values.shape, device="meta").stride())
        view = self.view(name, tuple(values.shape), strides, values.dtype)
        view.copy_(values)
        return view

    def seal(self) -> None:
        self.buffers = {name: (buffer, buffer.clone(), where) for name, (buffer, _, where) in self.buffers.items()}

    def untouched(self, allowed: dict[str, Tensor | None]) -> list[str]:
        """Names of buffers of which other elements than the allowed ones changed. allowed: {name: indices of axis 0, None for all}."""
        wrong = []
        for name, (buffer, before, (shape, strides, offset)) in self.buffers.items():
            bits = {4: torch.int32, 2: torch.int16, 8: torch.int64}[buffer.element_size()]
            changed = buffer.view(bits) != before.view(bits)
            if name in allowed:
                rows = allowed[name]
                changed.as_strided(shape, strides, offset)[slice(None) if rows is None else rows] = False
            if changed.any():
                wrong.append(name)
        return wrong


@dataclass
class Call:
    """A call's arguments and the memory around them."""

    case: Case
    memory: Memory
    args: tuple
    kwargs: dict
    written: Tensor  # slots that the call may change

    @property
    def named(self) -> dict[str, Tensor]:
        names = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias")
        tensors = dict(zip(names, self.args, strict=False)) | {k: v for k, v in self.kwargs.items() if isinstance(v, Tensor)}
        return {k: v for k, v in tensors.items() if v is not None}

    @property
    def built(self) -> Any:
        return ssmgen.selective_state_update.build(*self.args, **self.kwargs)

    def run(self, **more: Any) -> Tensor:
        return ssmgen.selective_state_update(*self.args, **self.kwargs, **more)

    def results(self) -> list[Tensor]:
        return [self.args[0], self.kwargs["out"]]

    @property
    def options(self) -> Options:
        """The call's options, without its tensors."""
        return Options(self.case.softplus, self.case.limit, self.case.pad_slot_id, 0, True)


def make_call(case: Case, device: str, seed: int = 0) -> Call:
    """Random operands. Unused slots hold NaN; buffers are padded with poison; padded rows point at NaN slots or nowhere."""
    g = torch.Generator().manual_seed(seed)
    memory = Memory(device)
    B, H, P, N, G = case.batch, max(case.heads, 1), case.headdim, case.d_state, case.groups
    headed = case.heads > 0

    def randn(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    slots = B if case.index is None else 3 * B + 9
    slot_stride = H * P * N + case.slot_gap
    shape, strides = ((slots, H, P, N), (slot_stride, P * N, N, 1)) if headed else ((slots, P, N), (slot_stride, N, 1))
    state = memory.view("state", shape, strides, case.state)
    source = target = None
    written = torch.arange(B)
    if case.index is None:
        state.copy_(randn(*shape, dtype=case.state))
    else:
        state.fill_(float("nan"))
        order = torch.randperm(slots, generator=g)
        order = order[order != case.pad_slot_id]
        source = order[:B].clone()
        state[source.to(device)] = randn(B, *shape[1:], dtype=case.state).to(device)
        target = order[B : 2 * B].clone() if case.split else source.clone()
        if B > 2:
            source[1] = case.pad_slot_id
            if not case.split:
                target[1] = source[1]
            source[B - 1] = -5  # negative is padding whatever pad_slot_id is
            target[B - 1] = -5
        if case.split and B > 4:
            target[3] = case.pad_slot_id  # computed, but written nowhere
        written = target[(target >= 0) & (target != case.pad_slot_id) & (source >= 0) & (source != case.pad_slot_id)]

    row = (H, P) if headed else (P,)
    group = (G, N) if headed else (N,)
    if case.conv_slices:
        width = H * P + 2 * G * N + 3
        conv = memory.fill("conv", randn(B, width, dtype=case.x))
        x = conv[:, 1 : 1 + H * P].unflatten(1, row) if headed else conv[:, 1 : 1 + P]
        start = 1 + H * P
        Bm, C = (conv[:, s : s + G * N].unflatten(1, group) if headed else conv[:, s : s + N] for s in (start, start + G * N + 1))
    else:
        x = memory.fill("x", randn(B, *row, dtype=case.x))
        Bm, C = (memory.fill(name, randn(B, *group, dtype=case.bc)) for name in "BC")
    if case.tied and headed:
        dt = memory.fill("dt", randn(B, H, dtype=case.dt))[..., None].expand(B, H, P)
        A = memory.fill("A", -(torch.rand(H, generator=g) * 4 + 0.1).to(case.A))[:, None, None].expand(H, P, N)
        weight = lambda name, t: None if t is None else memory.fill(name, randn(H, dtype=t))[:, None].expand(H, P)  # noqa: E731
    else:
        dt = memory.fill("dt", randn(B, *row, dtype=case.dt))
        A = memory.fill("A", -(torch.rand(*row, N, generator=g) * 4 + 0.1).to(case.A))
        weight = lambda name, t: None if t is None else memory.fill(name, randn(*row, dtype=t))  # noqa: E731
    D, dt_bias = weight("D", case.D), weight("dt_bias", case.dt_bias)
    z = None if case.z is None else memory.fill("z", randn(B, *row, dtype=case.z) * 3)
    out = memory.view("out", (B, *row), tuple(torch.empty(B, *row, device="meta").stride()), case.out or case.x)
    kwargs = {"out": out, "dt_limit": case.limit, "pad_slot_id": case.pad_slot_id}
    if source is not None:
        kwargs["state_indices"] = memory.fill("state_indices", source.to(case.index))
        if case.split:
            kwargs["dst_state_indices"] = memory.fill("dst_state_indices", target.to(case.index))
    memory.seal()
    return Call(case, memory, (state, x, dt, A, Bm, C, D, z, dt_bias, case.softplus), kwargs, written)


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbours of `dtype` around each value."""
    bits, smallest = {F32: (23, -126), F16: (10, -14), BF16: (7, -126)}[dtype]
    exponent = torch.frexp(values.abs())[1] - 1
    return torch.ldexp(torch.ones_like(values), exponent.clamp(min=smallest) - bits)


@dataclass
class Expected:
    state: Tensor  # float64, all slots
    out: Tensor
    state_bound: Tensor
    out_bound: Tensor


def expected(call: Call) -> Expected:
    """The float64 result, and how far an f32 computation with one rounding at each store may be from it.

    Relative errors, in units of 2^-24: ex2.approx 4, log1p 2, each product, sum or rounding 1. dt: softplus takes an ex2 of an
    argument up to |v| log2(e) (its rounding costs |v| more), a log1p and a sum, which stays below 16. decay = 2^(dt A log2 e): 4, plus
    |dt A| (16 + 3) from its argument. Then state: decay's error and 2, dt x B: 16 + 3. All of it is covered by 2^-19.
    """
    case = call.case
    named = {k: v.detach().cpu() for k, v in call.named.items()}
    views = views_of(named, call.options, problems := [])
    assert not problems, problems
    state = views["state"]
    new, out = state.double(), torch.zeros(views["out"].shape, dtype=torch.float64)
    operands = {k: v for k, v in views.items() if k not in ("state", "out")}
    options = {"dt_softplus": case.softplus, "dt_limit": case.limit, "pad_slot_id": case.pad_slot_id}
    reference(state=new, **operands, **options, out=out, dtype=torch.float64)

    batch, H, P = views["x"].shape
    out_bound = torch.zeros_like(out)
    state_bound = torch.zeros_like(new)
    eps = 2.0**-19
    for b in range(batch):
        src = b if "state_indices" not in views else int(views["state_indices"][b])
        dst = src if "dst_state_indices" not in views else int(views["dst_state_indices"][b])
        if src < 0 or ("state_indices" in views and src == case.pad_slot_id):
            continue
        dt = views["dt"][b].double() + (views["dt_bias"].double() if "dt_bias" in views else 0)
        dt = softplus(dt) if case.softplus else dt
        dt = dt.clamp(*case.limit) if case.limit else dt
        per_group = H // views["B"].shape[1]
        Bb, Cb = (views[k][b].double().repeat_interleave(per_group, 0)[:, None] for k in "BC")
        A, xb = views["A"].double(), views["x"][b].double()
        kept = (state[src].double() * torch.exp(dt[..., None] * A)).abs()
        added = (dt * xb)[..., None].abs() * Bb.abs()
        error = eps * (kept * (1 + (dt[..., None] * A).abs()) + added)
        total = ((kept + added) * Cb.abs()).sum(-1)
        y_bound = (error * Cb.abs()).sum(-1) + 2.0**-24 * 16 * total
        if "D" in views:
            y_bound += 2.0**-23 * (views["D"].double() * xb).abs()
        if "z" in views:
            z = views["z"][b].double()
            y_bound *= (z * torch.sigmoid(z)).abs() * (1 + eps * (1 + z.abs()))
            y_bound += eps * (1 + z.abs()) * out[b].abs()
        out_bound[b] = y_bound + ulp(out[b], views["out"].dtype)
        if dst >= 0 and not ("dst_state_indices" in views and dst == case.pad_slot_id):
            state_bound[dst] = error + (0 if state.dtype is F32 else 1) * ulp(new[dst], state.dtype)
    return Expected(new, out, state_bound, out_bound)


def assert_matches(call: Call, want: Expected) -> None:
    """State and output within their bounds, padded rows zero, and nothing else in memory changed."""
    views = views_of({k: v.detach().cpu() for k, v in call.named.items()}, call.options, [])
    slots = call.written
    state, out = views["state"].double(), views["out"].double()
    wrong = call.memory.untouched({"state": slots.to(call.args[0].device), "out": None})
    assert not wrong, f"changed outside what the call may write: {wrong}"
    difference = (state[slots] - want.state[slots]).abs()
    assert (difference <= want.state_bound[slots]).all(), (
        f"state off by {float((difference / want.state_bound[slots]).max()):.2f} x its bound"
    )
    difference = (out - want.out).abs()
    assert (difference <= want.out_bound).all(), f"out off by {float((difference / want.out_bound.clamp(min=1e-30)).max()):.2f} x its bound"
