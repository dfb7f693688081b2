"""Operands of decode layers: slices of a projection, poisoned and guarded pools; and the separate operators that a layer must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from ssu_cases import BF16, F16, F32, Memory
from torch import Tensor

import ssmgen
from ssmgen import emulator, registry
from ssmgen.arguments import Arguments
from ssmgen.kernels import OPERATOR_OF
from ssmgen.ops import calls
from ssmgen.spec import Arch, KernelSpec

I32, I64 = torch.int32, torch.int64
SM90 = Arch.parse("sm_90a")
needs_emulator = pytest.mark.skipif(not emulator.available(), reason="needs g++")


@dataclass(frozen=True)
class Case:
    """What the layers' cases share. `id` is readable."""

    id: str
    batch: int = 5
    x: torch.dtype = BF16  # of the projection and the windows
    gates: torch.dtype | None = None  # of dt, or of a and b; None: slices of the projection
    state: torch.dtype = BF16
    out: torch.dtype | None = None  # None: that of x
    weights: torch.dtype = F32  # of A, D, dt_bias; of A_log
    bias: bool = True  # whether there is dt_bias
    taps: int = 4
    conv_weight: torch.dtype = BF16
    conv_bias: torch.dtype | None = BF16
    window: str = "runs"  # or channels; any
    extra: int = 0  # inputs that a window holds beyond those of the taps but the last
    z: torch.dtype | None = None  # None: a slice of the projection
    norm: torch.dtype | None = BF16  # None: no norm
    norm_first: bool = False
    index: torch.dtype | None = I32
    pad_slot_id: int = -1
    slot_gap: int = 0  # elements between slots of the state
    odd: bool = False  # slices at odd places, weights and out too

    @property
    def slots(self) -> int:
        return self.batch if self.index is None else self.batch + min(self.batch, 32) + 9


@dataclass(frozen=True)
class Gdn(Case):
    """Of gdn_layer."""

    heads: int = 4
    key_heads: int = 2
    K: int = 32
    V: int = 16
    norm_first: bool = True
    activation: str = "silu"
    l2norm: bool = True
    twice: bool = False
    scale: float | None = None
    layout: str = "vk"
    headed: bool = False  # z and out have an axis of heads


@dataclass(frozen=True)
class Kda(Gdn):
    """Of kda_layer."""

    activation: str = "sigmoid"
    lower_bound: float | None = None
    bare_gate: bool = False  # no A_log
    flat: bool = False  # g and dt_bias without an axis of heads


@dataclass(frozen=True)
class Mamba(Case):
    """Of mamba2_layer."""

    heads: int = 4
    groups: int = 2
    P: int = 16
    N: int = 32
    size: int | None = None  # that is normed together; None: of a row
    ungated: bool = False  # no z
    D: str = "head"  # or row; none
    softplus: bool = True
    limit: tuple[float, float] | None = None
    philox: int = 0


def vary(base: Any, **cases: dict[str, Any]) -> list[Any]:
    return [replace(base, **({"id": f"{base.id}-{name}".replace("_", "-")} | changes)) for name, changes in cases.items()]


def named(cases: Iterable[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda c: c.id)


@dataclass
class LayerCall:
    """A call's arguments, and what surrounds them in memory."""

    case: Case
    memory: Memory
    kwargs: dict[str, Any]
    live: list[int]  # rows that are no padding
    used: Tensor  # slots of those
    function: Callable[..., Tensor] = field(repr=False)
    separate: Callable[[LayerCall, Callable[[Callable[..., Any], dict[str, Any]], None]], None] = field(repr=False)

    def run(self, **more: Any) -> Tensor:
        return self.function(**self.kwargs | more)

    def built(self, **more: Any) -> calls.Call:
        return self.function.build(**self.kwargs | more)

    def chain(self, run: Callable[[Callable[..., Any], dict[str, Any]], None] | None = None) -> LayerCall:
        """The same by the three operators, one after the other, `run` by name and arguments; padded rows have zeros. Returns itself."""
        self.separate(self, run or (lambda function, kwargs: function(**kwargs)))
        padded = [b for b in range(self.case.batch) if b not in self.live]
        self.kwargs["out"][padded] = 0
        return self

    def results(self) -> dict[str, Tensor]:
        return {n: bits(self.kwargs[n]).clone() for n in ("out", "state", "conv_state")}

    def assert_unharmed(self) -> None:
        """Nothing but the output and the states of live rows has changed, and nothing is counted any more."""
        wrong = self.memory.untouched({"out": None, "state": self.used, "conv_state": self.used})
        assert not wrong, f"changed outside what the call may write: {wrong}"
        padded = [b for b in range(self.case.batch) if b not in self.live]
        assert not self.kwargs["out"][padded].any(), "a padded row's output is not zero"
        assert not self.kwargs["arrivals"].any(), "arrivals are counted still"


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(I32 if t.dtype is F32 else torch.int16)


def differing(a: LayerCall, b: LayerCall) -> list[str]:
    """Names of results that are not the same bits."""
    return [n for n, mine in a.results().items() if not torch.equal(mine, b.results()[n])]


class _Maker:
    """Tensors between guards, from one seed, the same on every device."""

    def __init__(self, case: Case, device: str, seed: int):
        self.case, self.memory = case, Memory(device)
        self.generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(case.slots, generator=self.generator)
        chosen = chosen[chosen != case.pad_slot_id][: case.batch].to(case.index or I64)
        if case.index is None:
            chosen = torch.arange(case.batch)
        elif case.batch > 1:
            chosen[1] = case.pad_slot_id
            chosen[4:5] = case.slots + 3
        self.index = chosen
        self.live = [b for b, slot in enumerate(chosen.tolist()) if 0 <= slot < case.slots and slot != case.pad_slot_id]
        self.used = chosen[self.live].long()

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=self.generator) * scale

    def fill(self, name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
        odd = int(self.case.odd)
        strides = tuple(torch.empty(values.shape, device="meta").stride())
        view = self.memory.view(name, tuple(values.shape), strides, dtype, 64 + odd)
        return view.copy_(values)

    def projection(self, sizes: dict[str, int], of: dict[str, torch.dtype | None]) -> dict[str, Tensor]:
        """Slices of one tensor, those of dtypes of their own apart. What padded rows hold is NaN."""
        case, odd = self.case, int(self.case.odd)
        whole = sum(sizes.values())
        values = self.randn(case.batch, whole)
        values[[b for b in range(case.batch) if b not in self.live]] = float("nan")
        proj = self.memory.view("proj", (case.batch, whole), (whole + -whole % 16 + odd, 1), case.x, 64 + odd).copy_(values)
        parts = dict(zip(sizes, proj.split(list(sizes.values()), 1), strict=True))
        return {n: t if of.get(n) is None else self.fill(n, t.float(), of[n]) for n, t in parts.items()}

    def pool(self, name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, offset: int = 64) -> Tensor:
        """Only the slots that are used hold anything but poison. Those of many are alike up to a factor, which takes less time."""
        view = self.memory.view(name, (self.case.slots, *shape), strides, dtype, offset)
        rows = torch.arange(len(self.used), device=view.device)
        values = self.randn(min(len(rows), 16), *shape).to(view.device)[rows % 16]
        view[self.used.to(view.device)] = (values * (1 + rows / 512).view(-1, *[1] * len(shape))).to(dtype)
        return view

    def layer(self, channels: int, groups: int, shape: tuple[int, ...]) -> dict[str, Any]:
        """What both layers have."""
        case, size = self.case, torch.Size(shape).numel()
        length = case.taps - 1 + case.extra
        window = {
            "runs": (channels * length + -channels * length % 16, length, 1),
            "channels": (length * (channels + 8), 1, channels + 8),
            "any": (channels * (2 * length + 1), 2 * length + 1, 2),
        }[case.window]
        dense = tuple(torch.empty(shape, device="meta").stride())
        return {
            "state": self.pool("state", shape, (size + case.slot_gap, *dense), case.state),
            "conv_state": self.pool("conv_state", (channels, length), window, case.x),
            "arrivals": self.fill("arrivals", torch.zeros(case.slots, groups), I32),
            "conv_weight": self.fill("conv_weight", self.randn(channels, case.taps, scale=0.5), case.conv_weight),
            "conv_bias": None if case.conv_bias is None else self.fill("conv_bias", self.randn(channels), case.conv_bias),
            "state_indices": None if case.index is None else self.fill("state_indices", self.index, case.index),
            "pad_slot_id": case.pad_slot_id,
        }

    def output(self, *shape: int) -> Tensor:
        """Rows with gaps between them."""
        row = torch.Size(shape[1:]).numel()
        strides = (row + -row % 8 + 8 + int(self.case.odd), *torch.empty(shape[1:], device="meta").stride())
        return self.memory.view("out", shape, strides, self.case.out or self.case.x, 64 + int(self.case.odd))

    def call(self, kwargs: dict[str, Any], function: Any, separate: Any) -> LayerCall:
        self.memory.seal()
        return LayerCall(self.case, self.memory, kwargs, self.live, self.used.to(self.memory.device), function, separate)


def make(case: Case, device: str = "cpu", seed: int = 0) -> LayerCall:
    """The same operands on every device."""
    maker = _Maker(case, device, seed)
    return _gdn(maker, case) if isinstance(case, Gdn) else _mamba(maker, case)


def _gdn(maker: _Maker, case: Gdn) -> LayerCall:
    inner, HV, kda = case.heads * case.V, case.heads, isinstance(case, Kda)
    channels = 2 * case.key_heads * case.K + inner
    gates = {"g": HV * case.K, "beta": HV} if kda else {"b": HV, "a": HV}
    parts = maker.projection({"mixed_qkv": channels, "z": inner, **gates}, {"z": case.z, **dict.fromkeys(gates, case.gates)})
    per_head = (HV, case.K) if kda else (HV,)
    held = (HV, case.V, case.K) if case.layout == "vk" else (HV, case.K, case.V)
    kwargs = parts | maker.layer(channels, case.key_heads, held)
    kwargs |= {
        "A_log": maker.fill("A_log", maker.randn(HV), case.weights),
        "dt_bias": maker.fill("dt_bias", maker.randn(*per_head), case.weights) if case.bias else None,
        "norm_weight": None if case.norm is None else maker.fill("norm_weight", maker.randn(case.V), case.norm),
        "out": maker.output(case.batch, inner),
        "norm_before_gate": case.norm_first,
        "norm_activation": case.activation,
        "allow_neg_eigval": case.twice,
        "use_qk_l2norm": case.l2norm,
        "scale": case.scale,
        "state_layout": case.layout,
    }
    if isinstance(case, Kda):
        kwargs |= {"lower_bound": case.lower_bound, "norm_eps": 1e-6, "A_log": None if case.bare_gate else kwargs["A_log"]}
        flat = kwargs["dt_bias"] is not None and case.flat
        kwargs |= {"dt_bias": kwargs["dt_bias"].flatten()} if flat else {}
        kwargs |= {} if case.flat else {"g": kwargs["g"].unflatten(1, per_head)}
    if case.norm is None:
        kwargs["z"] = None
    elif case.headed:
        kwargs["z"] = kwargs["z"].unflatten(1, (HV, case.V))
    if case.headed:
        kwargs["out"] = kwargs["out"].unflatten(1, (HV, case.V))
    return maker.call(kwargs, ssmgen.kda_layer if kda else ssmgen.gdn_layer, _separate_gdn)


def _convolved(call: LayerCall, inputs: str, run: Any) -> Tensor:
    k = call.kwargs
    x = k[inputs].unsqueeze(2)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    where = {"conv_state_indices": k["state_indices"], "pad_slot_id": k["pad_slot_id"]} if k["state_indices"] is not None else {}
    given = {"x": x, "conv_state": k["conv_state"], "weight": k["conv_weight"], "bias": k["conv_bias"]}
    run(ssmgen.causal_conv1d_update, given | {"activation": "silu", "out": out} | where)
    return out.squeeze(2)


def _separate_gdn(call: LayerCall, run: Any) -> None:
    case, k = call.case, call.kwargs
    qkv, keys = _convolved(call, "mixed_qkv", run), case.key_heads * case.K
    q, key, v = qkv.split([keys, keys, case.heads * case.V], 1)
    heads = (case.heads, case.V)
    out = k["out"] if case.headed else k["out"].unflatten(1, heads)
    y = torch.empty_like(out, memory_format=torch.contiguous_format)
    operands = {n: k[n] for n in ("state", "A_log", "dt_bias", "state_indices", "pad_slot_id", "scale", "state_layout", "use_qk_l2norm")}
    operands |= {"q": q.unflatten(1, (-1, case.K)), "k": key.unflatten(1, (-1, case.K)), "v": v.unflatten(1, heads)}
    operands |= {"beta_sigmoid": True, "allow_neg_eigval": case.twice, "out": out if case.norm is None else y}
    if isinstance(case, Kda):
        gates = {"g": k["g"].reshape(case.batch, case.heads, case.K), "beta": k["beta"], "lower_bound": case.lower_bound}
        run(ssmgen.kda, operands | gates)
    else:
        run(ssmgen.gated_delta_rule, operands | {"g": k["a"], "beta": k["b"]})
    if case.norm is not None:
        z = k["z"] if case.headed else k["z"].unflatten(1, heads)
        how = {"norm_before_gate": case.norm_first, "activation": case.activation, "eps": 1e-6}
        run(ssmgen.gated_rms_norm, {"x": y, "gate": z, "weight": k["norm_weight"], "out": out} | how)


def _mamba(maker: _Maker, case: Mamba) -> LayerCall:
    H, inner = case.heads, case.heads * case.P
    channels = inner + 2 * case.groups * case.N
    parts = maker.projection({"z": inner, "xBC": channels, "dt": H}, {"z": case.z, "dt": case.gates})
    kwargs = parts | maker.layer(channels, case.groups, (H, case.P, case.N))
    kwargs |= {
        "z": None if case.ungated else kwargs["z"],
        "A": maker.fill("A", -torch.rand(H, generator=maker.generator) - 0.1, case.weights),
        "D": maker.fill("D", maker.randn(*((H, case.P) if case.D == "row" else (H,))), case.weights) if case.D != "none" else None,
        "dt_bias": maker.fill("dt_bias", maker.randn(H), case.weights) if case.bias else None,
        "norm_weight": None if case.norm is None else maker.fill("norm_weight", maker.randn(inner), case.norm),
        "out": maker.output(case.batch, inner),
        "norm_group_size": case.size,
        "norm_before_gate": case.norm_first,
        "dt_softplus": case.softplus,
        "dt_limit": case.limit,
    }
    if case.philox:
        seeds = torch.randint(-(2**62), 2**62, (case.slots,), generator=maker.generator)
        kwargs |= {"rand_seed": seeds.to(maker.memory.device), "philox_rounds": case.philox}
    return maker.call(kwargs, ssmgen.mamba2_layer, _separate_mamba)


def _separate_mamba(call: LayerCall, run: Any) -> None:
    case, k = call.case, call.kwargs
    xBC, heads = _convolved(call, "xBC", run), (case.heads, case.P)
    x, B, C = xBC.split([case.heads * case.P, case.groups * case.N, case.groups * case.N], 1)
    z = None if k["z"] is None else k["z"].unflatten(1, heads)
    out = k["out"].unflatten(1, heads)
    y = out if case.norm is None else torch.empty_like(out, memory_format=torch.contiguous_format)
    operands = {n: k[n] for n in ("state", "dt_softplus", "dt_limit", "state_indices", "pad_slot_id")}
    operands |= {n: k[n] for n in ("rand_seed", "philox_rounds") if n in k}
    operands |= {"x": x.unflatten(1, heads), "B": B.unflatten(1, (-1, case.N)), "C": C.unflatten(1, (-1, case.N))}
    operands |= {"dt": k["dt"].unsqueeze(2).expand(-1, *heads), "A": k["A"][:, None, None].expand(*heads, case.N)}
    operands |= {n: k[n][:, None].expand(heads) if k[n].dim() == 1 else k[n] for n in ("D", "dt_bias") if k[n] is not None}
    run(ssmgen.selective_state_update, operands | {"z": z if case.norm is None else None, "out": y})
    if case.norm is not None:
        how = {"group_size": case.size or case.heads * case.P, "norm_before_gate": case.norm_first}
        run(ssmgen.gated_rms_norm, {"x": y.flatten(1), "gate": k["z"], "weight": k["norm_weight"], "out": k["out"]} | how)


def emulate(call: calls.Call, spec: KernelSpec | None = None, pdl: bool = False) -> None:
    """A call's variant, or the one that sm_90a's rules choose, in the emulator."""
    caller, operands = call.caller, call.operands
    problem, size, _, _ = call.problem()
    spec = spec or registry.select(OPERATOR_OF[type(problem)], problem, size, SM90, pdl)
    views = caller.checked(operands, call.options, None)
    for part in spec.kernels:
        takes = {n: operands[n] for n in part.operands()}
        packed = Arguments(part, caller.family.values_of(part, views, call.options)).at([t.data_ptr() for t in takes.values()])
        emulator.run(part, SM90, caller.family.grid_of(part, views), packed, takes, caller.family.written)


def emulated_chain(case: Case) -> LayerCall:
    """The separate operators' kernels in the emulator."""
    return make(case).chain(lambda function, kwargs: emulate(function.build(**kwargs)))


# What the emulator and the card are given.

GDN = Gdn("gdn")
GDN_MATRIX = [
    GDN,
    *vary(GDN, kv={"layout": "kv"}, f32={"state": F32}, kv_f32={"layout": "kv", "state": F32}, f16={"x": F16, "state": F16}),
    *vary(GDN, all_f32={"x": F32, "state": F32, "conv_weight": F32, "conv_bias": F32, "norm": F32}, out_f32={"out": F32}),
    *vary(
        GDN, channels={"window": "channels"}, any={"window": "any", "extra": 1}, taps2={"taps": 2, "conv_bias": None}, longer={"extra": 1}
    ),
    *vary(GDN, odd={"odd": True}, odd_kv={"odd": True, "layout": "kv", "slot_gap": 1}, slot_gap={"slot_gap": 1, "state": F32}),
    *vary(GDN, bare={"norm": None, "bias": False, "l2norm": False}, twice={"twice": True, "scale": 0.5}, sigmoid={"activation": "sigmoid"}),
    *vary(GDN, gate_first={"norm_first": False}, mixed={"z": F32, "gates": F32, "norm": F32, "weights": F16, "conv_weight": F32}),
    *vary(GDN, no_slots={"index": None, "batch": 3}, pad={"index": I64, "pad_slot_id": 7}, one={"batch": 1}, headed={"headed": True}),
    *vary(GDN, taps2={"taps": 2, "conv_bias": None}, taps3={"taps": 3, "window": "channels", "x": F32}, taps8={"taps": 8}),
    *vary(GDN, equal={"key_heads": 4}, one_key={"key_heads": 1}, v12={"V": 12, "K": 36}, v20_kv={"V": 20, "layout": "kv"}, v40={"V": 40}),
]
GDN_HEADS = [
    Gdn("heads-128", heads=2, key_heads=1, K=128, V=128, batch=2, index=None),
    Gdn("heads-256", heads=1, key_heads=1, V=256, batch=2),
]

KDA = Kda("kda", key_heads=4)
KDA_MATRIX = [
    KDA,
    *vary(KDA, kv={"layout": "kv"}, f32={"state": F32}, kv_f32={"layout": "kv", "state": F32}, f16={"x": F16, "state": F16}),
    *vary(KDA, all_f32={"x": F32, "state": F32, "conv_weight": F32, "conv_bias": F32, "norm": F32, "gates": F32}),
    *vary(KDA, bounded={"lower_bound": -5.0}, bare_gate={"lower_bound": -3.0, "bare_gate": True, "flat": True}, flat={"flat": True}),
    *vary(KDA, odd={"odd": True}, odd_kv={"odd": True, "layout": "kv", "slot_gap": 1}, slot_gap={"slot_gap": 1, "state": F32}),
    *vary(KDA, bare={"norm": None, "bias": False, "l2norm": False}, twice={"twice": True, "scale": 0.5}, silu={"activation": "silu"}),
    *vary(KDA, any={"window": "any", "extra": 1}, channels={"window": "channels"}, mixed={"z": F32, "gates": F32, "weights": F16}),
    *vary(KDA, no_slots={"index": None, "batch": 3}, pad={"index": I64, "pad_slot_id": 7}, one={"batch": 1}, headed={"headed": True}),
    *vary(KDA, few_keys={"key_heads": 2}, v12={"V": 12, "K": 36}, v20_kv={"V": 20, "layout": "kv"}, v40={"V": 40}),
    Kda("kda-128", heads=2, key_heads=2, K=128, V=128, batch=2, index=None),
]

MAMBA = Mamba("mamba")
MAMBA_MATRIX = [
    MAMBA,
    *vary(MAMBA, f32={"state": F32}, f16={"x": F16, "state": F16}, out_f32={"out": F32}),
    *vary(MAMBA, all_f32={"x": F32, "state": F32, "conv_weight": F32, "conv_bias": F32, "norm": F32}, slot_gap={"slot_gap": 1}),
    *vary(
        MAMBA, channels={"window": "channels"}, any={"window": "any", "extra": 1}, taps2={"taps": 2, "conv_bias": None}, longer={"extra": 1}
    ),
    *vary(MAMBA, odd={"odd": True}, grouped={"size": 32}, heads={"size": 16}, norm_first={"norm_first": True}, one_group={"groups": 1}),
    *vary(MAMBA, gated={"norm": None, "D": "row"}, bare={"norm": None, "ungated": True, "D": "none", "bias": False, "softplus": False}),
    *vary(MAMBA, mixed={"z": F32, "gates": F32, "norm": F32, "weights": F16, "conv_weight": F32}, limit={"limit": (0.01, 0.1)}),
    *vary(MAMBA, no_slots={"index": None, "batch": 3}, pad={"index": I64, "pad_slot_id": 7}, one={"batch": 1}, p20={"P": 20, "N": 36}),
    *vary(
        MAMBA,
        taps2={"taps": 2, "conv_bias": None},
        taps3={"taps": 3, "window": "channels", "x": F32},
        taps8={"taps": 8},
        noise={"philox": 7},
    ),
]
