"""Calls of decode layers in guarded memory, operands sliced from a projection; and the separate operators that a layer must equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from bits import bits
from layer_cases import I32, I64, Case, Gdn, Kda, Mamba
from ssu_cases import Memory
from torch import Tensor

import ssmgen
from ssmgen import emulator
from ssmgen.calls import operator as calls
from ssmgen.select import catalog, registry
from ssmgen.spec.arguments import Arguments
from ssmgen.spec.kernel import Arch, KernelSpec

SM90 = Arch.parse("sm_90a")
needs_emulator = pytest.mark.skipif(not emulator.available(), reason="needs g++")


@dataclass
class LayerCall:
    """A call's arguments and the memory around them."""

    case: Case
    memory: Memory
    kwargs: dict[str, Any]
    live: list[int]  # rows that are not padding
    used: Tensor  # slots that states are written to
    windows: Tensor  # slots that windows are written to
    rows: Tensor  # rows that intermediate states and windows are written to
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
        names = ("out", "state", "conv_state", *KEPT)
        return {n: bits(self.kwargs[n]).clone() for n in names if self.kwargs.get(n) is not None}

    def assert_unharmed(self) -> None:
        """Only the output and the states of live rows have changed, and all counters are zero again."""
        allowed = {"out": None, "state": self.used, "conv_state": self.windows, **dict.fromkeys(KEPT, self.rows)}
        pools = () if self.case.update else ("state", "conv_state")
        wrong = self.memory.untouched({n: t for n, t in allowed.items() if n not in pools})
        assert not wrong, f"changed outside what the call may write: {wrong}"
        padded = [b for b in range(self.case.batch) if b not in self.live]
        assert not self.kwargs["out"][padded].any(), "a padded row's output is not zero"
        assert not self.kwargs["arrivals"].any(), "arrivals are counted still"


KEPT = ("intermediate_states", "intermediate_conv_window")


def differing(a: LayerCall, b: LayerCall) -> list[str]:
    """Names of results that are not the same bits."""
    return [n for n, mine in a.results().items() if not torch.equal(mine, b.results()[n])]


class _Maker:
    """Tensors between guards, from one seed, the same on every device."""

    def __init__(self, case: Case, device: str, seed: int):
        self.case, self.memory = case, Memory(device)
        self.generator = torch.Generator().manual_seed(seed)
        self.dst = self.counts = None
        order = torch.randperm(case.slots, generator=self.generator)
        order = order[order != case.pad_slot_id]
        if case.accepted:
            self._by_token(order)
            return
        chosen = order[: case.batch].to(case.index or I64)
        if case.index is None:
            chosen = torch.arange(case.batch)
        elif case.batch > 1:
            chosen[1] = case.pad_slot_id
            chosen[4:5] = case.slots + 3
        self.index = chosen
        self.live = [b for b, slot in enumerate(chosen.tolist()) if self.is_slot(slot)]
        self.used = self.read = self.windows = chosen[self.live].long()

    def is_slot(self, slot: int) -> bool:
        return 0 <= slot < self.case.slots and slot != self.case.pad_slot_id

    def _by_token(self, order: Tensor) -> None:
        """Slots of each token, as vLLM has them: except for a few, a sequence may start from the slots that it writes.

        Of five sequences, one has a count out of range, one no slot for its window, one no slot for its state.
        """
        case = self.case
        B, T = case.batch, case.tokens
        table, fresh = order[: 2 * B * T].to(case.index).view(2, B, T).unbind()
        counts = 1 + torch.arange(B) % T
        target = table.clone()
        target[::3] = fresh[::3]
        target[2::4, T - 1] = case.pad_slot_id
        counts[1::5] = torch.tensor([0, T + 1]).repeat(B)[: len(counts[1::5])]
        table[4::5, 0] = case.slots + 3
        if B > 5:
            table[5, counts[5] - 1] = case.pad_slot_id
        self.index, self.dst, self.counts = table, target, counts.to(case.accepted)
        started = [int(row[n - 1]) if 1 <= n <= T else -1 for row, n in zip(table, counts.tolist(), strict=True)]
        self.live = [b for b in range(B) if self.is_slot(started[b]) and self.is_slot(int(table[b, 0]))]
        self.read = torch.tensor([started[b] for b in self.live])
        self.windows = table[self.live, 0].long()
        written = target[self.live].long().flatten()
        self.used = written[torch.tensor([self.is_slot(slot) for slot in written.tolist()])]

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=self.generator) * scale

    def fill(self, name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
        odd = int(self.case.odd)
        strides = tuple(torch.empty(values.shape, device="meta").stride())
        view = self.memory.view(name, tuple(values.shape), strides, dtype, 64 + odd)
        return view.copy_(values)

    def projection(self, sizes: dict[str, int], of: dict[str, torch.dtype | None]) -> dict[str, Tensor]:
        """Slices of one tensor; operands with another dtype are separate tensors. Padded rows hold NaN."""
        case, odd = self.case, int(self.case.odd)
        whole = sum(sizes.values())
        values = self.randn(*case.lead, whole)
        values[[b for b in range(case.batch) if b not in self.live]] = float("nan")
        row = whole + -whole % 16 + odd
        strides = (row * case.tokens + 16 * odd, row, 1) if case.tokens else (row, 1)
        proj = self.memory.view("proj", (*case.lead, whole), strides, case.x, 64 + odd).copy_(values)
        parts = dict(zip(sizes, proj.split(list(sizes.values()), -1), strict=True))
        return {n: t if of.get(n) is None else self.fill(n, t.float(), of[n]) for n, t in parts.items()}

    def pool(
        self, name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, slots: Tensor, offset: int = 64
    ) -> Tensor:
        """All slots that are not used hold poison. Many used slots are equal up to a factor, which takes less time."""
        view = self.memory.view(name, (self.case.slots, *shape), strides, dtype, offset)
        rows = torch.arange(len(slots), device=view.device)
        values = self.randn(min(len(rows), 16), *shape).to(view.device)[rows % 16]
        view[slots.to(view.device)] = (values * (1 + rows / 512).view(-1, *[1] * len(shape))).to(dtype)
        return view

    def several(self, channels: int, shape: tuple[int, ...]) -> dict[str, Any]:
        """Arguments that calls of several tokens add. One of the rows must stay unchanged."""
        case = self.case
        if not case.tokens:
            return {}
        made: dict[str, Any] = {"update_state": case.update}
        rows, columns = case.batch, case.tokens + case.columns
        self.rows = torch.tensor(self.live)
        if case.rows:
            rows = 2 * case.batch
            index = 2 * torch.arange(case.batch) + 1
            index[2::3] = torch.tensor([-1, rows])[torch.arange(len(index[2::3])) % 2]
            self.rows = index[self.live][(index[self.live] >= 0) & (index[self.live] < rows)]
            made["intermediate_state_indices"] = self.fill("intermediate_state_indices", index, case.rows)
        if case.kept:
            size = torch.Size(shape).numel() + case.slot_gap
            strides = (size * columns, size, *torch.empty(shape, device="meta").stride())
            made[KEPT[0]] = self.memory.view(KEPT[0], (rows, columns, *shape), strides, case.kept)
        if case.saved:
            length, gap = case.taps - 1, int(case.saved == "any")
            column = channels * (length + gap) + -channels * (length + gap) % 8
            strides = (column * columns, column, length + gap, 1)
            made[KEPT[1]] = self.memory.view(KEPT[1], (rows, columns, channels, length), strides, case.x)
        if case.accepted:
            made["num_accepted_tokens"] = self.fill("num_accepted_tokens", self.counts, case.accepted)
            made["dst_state_indices"] = self.fill("dst_state_indices", self.dst, case.index)
        return made

    def layer(self, channels: int, groups: int, shape: tuple[int, ...]) -> dict[str, Any]:
        """Arguments that both layers take."""
        case, size = self.case, torch.Size(shape).numel()
        length = case.window_len
        window = {
            "runs": (channels * length + -channels * length % 16, length, 1),
            "channels": (length * (channels + 8), 1, channels + 8),
            "any": (channels * (2 * length + 1), 2 * length + 1, 2),
        }[case.window]
        dense = tuple(torch.empty(shape, device="meta").stride())
        conv_state = self.pool("conv_state", (channels, length), window, case.x, self.windows)
        if case.accepted:  # inputs that are no longer history
            for slot, count in zip(self.windows.tolist(), self.counts[self.live].tolist(), strict=True):
                conv_state[slot, :, : count - 1] = float("nan")
                conv_state[slot, :, count + case.taps - 2 :] = float("nan")
        return self.several(channels, shape) | {
            "state": self.pool("state", shape, (size + case.slot_gap, *dense), case.state, self.read),
            "conv_state": conv_state,
            "arrivals": self.fill("arrivals", torch.zeros(case.slots, groups), I32),
            "conv_weight": self.fill("conv_weight", self.randn(channels, case.taps, scale=0.5), case.conv_weight),
            "conv_bias": None if case.conv_bias is None else self.fill("conv_bias", self.randn(channels), case.conv_bias),
            "state_indices": None if case.index is None else self.fill("state_indices", self.index, case.index),
            "pad_slot_id": case.pad_slot_id,
        }

    def output(self, *shape: int) -> Tensor:
        """Rows with gaps between them."""
        row = torch.Size(shape[-1:]).numel()
        apart = row + -row % 8 + 8 + int(self.case.odd)
        strides = (apart * self.case.tokens + 8, apart, 1) if self.case.tokens else (apart, *torch.empty(shape[1:], device="meta").stride())
        return self.memory.view("out", shape, strides, self.case.out or self.case.x, 64 + int(self.case.odd))

    def call(self, kwargs: dict[str, Any], function: Any, separate: Any) -> LayerCall:
        self.memory.seal()
        if self.case.philox:
            seeds = torch.randint(-(2**62), 2**62, (self.case.slots,), generator=self.generator)
            kwargs |= {"rand_seed": seeds.to(self.memory.device), "philox_rounds": self.case.philox}
        where = [t.to(self.memory.device) for t in (self.used, self.windows, getattr(self, "rows", self.used))]
        return LayerCall(self.case, self.memory, kwargs, self.live, *where, function, separate)


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
        "out": maker.output(*case.lead, inner),
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
        kwargs |= {} if case.flat else {"g": kwargs["g"].unflatten(-1, per_head)}
    if case.norm is None:
        kwargs["z"] = None
    elif case.headed:
        kwargs["z"] = kwargs["z"].unflatten(-1, (HV, case.V))
    if case.headed:
        kwargs["out"] = kwargs["out"].unflatten(-1, (HV, case.V))
    return maker.call(kwargs, ssmgen.kda_layer if kda else ssmgen.gdn_layer, _separate_gdn)


def _convolved(call: LayerCall, inputs: str, run: Any) -> Tensor:
    """The result of the convolution alone. It always moves its window; calls that do not move it pass a copy."""
    k, case = call.kwargs, call.case
    x = k[inputs].transpose(1, 2) if case.tokens else k[inputs].unsqueeze(2)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    slots = k["state_indices"]
    where = {"conv_state_indices": slots, "pad_slot_id": k["pad_slot_id"]} if slots is not None else {}
    if case.accepted:  # a sequence that is padding for the layer may not be padding for the convolution
        padded = torch.tensor([b not in call.live for b in range(case.batch)], device=slots.device)
        where["conv_state_indices"] = torch.where(padded, k["pad_slot_id"], slots[:, 0])
        where["num_accepted_tokens"] = k["num_accepted_tokens"]
    given = {"x": x, "weight": k["conv_weight"], "bias": k["conv_bias"]}
    if not case.update:
        copy = torch.empty_strided(k["conv_state"].shape, k["conv_state"].stride(), dtype=case.x, device=x.device)
        given["conv_state"] = copy.copy_(k["conv_state"])
    given = {"conv_state": k["conv_state"]} | given
    if case.saved:
        given |= {n: k[n] for n in (KEPT[1], "intermediate_state_indices") if n in k}
    run(ssmgen.causal_conv1d_update, given | {"activation": "silu", "out": out} | where)
    return out.transpose(1, 2) if case.tokens else out.squeeze(2)


def _several(call: LayerCall) -> dict[str, Any]:
    """Arguments for several tokens that the recurrence alone takes."""
    k, case = call.kwargs, call.case
    told = {n: k[n] for n in ("update_state", "num_accepted_tokens", "dst_state_indices") if n in k}
    if case.accepted:  # likewise
        padded = torch.tensor([b not in call.live for b in range(case.batch)], device=k["state_indices"].device)
        told["state_indices"] = torch.where(padded[:, None], k["pad_slot_id"], k["state_indices"])
    if case.kept:
        told |= {n: k[n] for n in (KEPT[0], "intermediate_state_indices") if n in k}
    return told


def _separate_gdn(call: LayerCall, run: Any) -> None:
    case, k = call.case, call.kwargs
    qkv, keys = _convolved(call, "mixed_qkv", run), case.key_heads * case.K
    q, key, v = qkv.split([keys, keys, case.heads * case.V], -1)
    heads = (case.heads, case.V)
    out = k["out"] if case.headed else k["out"].unflatten(-1, heads)
    y = torch.empty_like(out, memory_format=torch.contiguous_format)
    operands = {n: k[n] for n in ("state", "A_log", "dt_bias", "state_indices", "pad_slot_id", "scale", "state_layout", "use_qk_l2norm")}
    operands |= {n: k[n] for n in ("rand_seed", "philox_rounds") if n in k}
    operands |= {"q": q.unflatten(-1, (-1, case.K)), "k": key.unflatten(-1, (-1, case.K)), "v": v.unflatten(-1, heads)}
    operands |= {"beta_sigmoid": True, "allow_neg_eigval": case.twice, "out": out if case.norm is None else y}
    if isinstance(case, Kda):
        operands |= {"g": k["g"].reshape(*case.lead, case.heads, case.K), "beta": k["beta"], "lower_bound": case.lower_bound}
    else:
        operands |= {"g": k["a"], "beta": k["b"]}
    _run_rule(call, ssmgen.kda if isinstance(case, Kda) else ssmgen.gated_delta_rule, operands | _several(call), run)
    if case.norm is None:
        return
    z = k["z"] if case.headed else k["z"].unflatten(-1, heads)
    how = {"weight": k["norm_weight"], "norm_before_gate": case.norm_first, "activation": case.activation, "eps": 1e-6}
    for t in range(case.tokens) if case.tokens else [slice(None)]:  # whose rows need no common stride
        of_token = {"x": y, "gate": z, "out": out}
        run(ssmgen.gated_rms_norm, {n: rows[:, t] if case.tokens else rows for n, rows in of_token.items()} | how)


def _run_rule(call: LayerCall, function: Any, operands: dict[str, Any], run: Any) -> None:
    """Runs the delta rule alone. It keeps states only in rows 0, 1, … If it keeps none and does not update the pool, it may use tensor
    cores, whose results differ bitwise from a layer's."""
    case, rows = call.case, operands.pop("intermediate_state_indices", None)
    if rows is None and (case.update or case.kept):
        run(function, operands)
        return
    state, target = operands["state"], operands.get(KEPT[0])
    kept = state.new_empty(*case.lead, *state.shape[1:])
    run(function, operands | {KEPT[0]: kept})
    for b in call.live if target is not None else []:
        if 0 <= (row := int(rows[b])) < len(target):
            target[row, : case.tokens] = kept[b]


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
        "out": maker.output(*case.lead, inner),
        "norm_group_size": case.size,
        "norm_before_gate": case.norm_first,
        "dt_softplus": case.softplus,
        "dt_limit": case.limit,
    }
    return maker.call(kwargs, ssmgen.mamba2_layer, _separate_mamba)


def _separate_mamba(call: LayerCall, run: Any) -> None:
    case, k = call.case, call.kwargs
    xBC, heads = _convolved(call, "xBC", run), (case.heads, case.P)
    x, B, C = xBC.split([case.heads * case.P, case.groups * case.N, case.groups * case.N], -1)
    z = None if k["z"] is None else k["z"].unflatten(-1, heads)
    out = k["out"].unflatten(-1, heads)
    y = out if case.norm is None else torch.empty_like(out, memory_format=torch.contiguous_format)
    operands = {n: k[n] for n in ("state", "dt_softplus", "dt_limit", "state_indices", "pad_slot_id")}
    operands |= {n: k[n] for n in ("rand_seed", "philox_rounds") if n in k}
    operands |= {"x": x.unflatten(-1, heads), "B": B.unflatten(-1, (-1, case.N)), "C": C.unflatten(-1, (-1, case.N))}
    operands |= {"dt": k["dt"].unsqueeze(-1).expand(*case.lead, *heads), "A": k["A"][:, None, None].expand(*heads, case.N)}
    operands |= {n: k[n][:, None].expand(heads) if k[n].dim() == 1 else k[n] for n in ("D", "dt_bias") if k[n] is not None}
    operands |= _several(call)
    run(ssmgen.selective_state_update, operands | {"z": z if case.norm is None else None, "out": y})
    if case.norm is not None:
        how = {"group_size": case.size or case.heads * case.P, "norm_before_gate": case.norm_first}
        if not case.tokens:
            run(ssmgen.gated_rms_norm, {"x": y.flatten(1), "gate": k["z"], "weight": k["norm_weight"], "out": k["out"]} | how)
            return
        for t in range(case.tokens):  # whose rows need no common stride
            rows = {"x": y[:, t].flatten(1), "gate": k["z"][:, t], "out": k["out"][:, t]}
            run(ssmgen.gated_rms_norm, rows | {"weight": k["norm_weight"]} | how)


def emulate(call: calls.Call, spec: KernelSpec | None = None, pdl: bool = False) -> None:
    """A call's variant, or the one that sm_90a's rules choose, in the emulator."""
    caller, operands = call.caller, call.operands
    problem, size, _, _ = call.problem()
    spec = spec or registry.select(catalog.OPERATOR_OF[type(problem)], problem, size, SM90, pdl)
    views = caller.checked(operands, call.options, None)
    for part in spec.kernels:
        takes = {n: operands[n] for n in part.operands()}
        packed = Arguments(part, caller.family.values_of(part, views, call.options)).at([t.data_ptr() for t in takes.values()])
        emulator.run(part, SM90, caller.family.grid_of(part, views), packed, takes, caller.family.written)


def emulated_chain(case: Case) -> LayerCall:
    """The separate operators' kernels in the emulator."""
    return make(case).chain(lambda function, kwargs: emulate(function.build(**kwargs)))
