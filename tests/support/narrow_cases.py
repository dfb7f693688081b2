"""Calls of selective_state_update with narrow states, in memory whose gaps are filled, and the expected contents of that memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from bits import bits
from emulated_calls import SM90
from torch import Tensor

import ssmgen
from ssmgen.calls.checks import NARROW
from ssmgen.calls.operator import call_of
from ssmgen.emulator import run
from ssmgen.emulator.check import trial_of
from ssmgen.engine.narrow_reference import narrowed, widened
from ssmgen.engine.recurrences.mamba.operands import OPERANDS
from ssmgen.engine.recurrences.mamba.reference import one_token, reference
from ssmgen.families.selective_state_update.planning import Options, views_of
from ssmgen.spec.arguments import Arguments

I8, I16, E4M3 = torch.int8, torch.int16, torch.float8_e4m3fn
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
WRITTEN = ("state", "state_scale", "out", "intermediate_states", "intermediate_state_scales")
DECAY_ERROR = 2.0**-18  # of numbers in f32 arithmetic, relative to the greatest of their row: see ssu_cases.expected
EXCESS_ERROR = 2.0**-8  # relative to one step of a stored int8


@dataclass(frozen=True)
class Case:
    """One point of the matrix; `id` is readable."""

    id: str
    state: torch.dtype = I8
    heads: int = 4  # 0: no heads axis (Mamba-1)
    headdim: int = 64
    d_state: int = 128
    groups: int = 2
    tokens: int = 0  # 0: no tokens axis
    lengths: tuple[int, ...] = ()  # packed
    kept: torch.dtype | None = None
    tree: bool = False
    dst: str = ""  # row or token
    update: bool = True
    index: torch.dtype | None = torch.int32
    gap: int = 0  # elements between slots
    scale_gap: int = 0  # elements between the scales of rows
    noise: int = 0  # rounds
    z: bool = False
    batch: int = 4


def matrix() -> list[Case]:
    def vary(prefix: str, **cases: dict[str, Any]) -> list[Case]:
        return [Case(f"{prefix}-{name}", **how) for name, how in cases.items()]

    tree = {"tokens": 5, "tree": True, "kept": I8}
    return [
        *vary("one", i8={}, i16={"state": I16}, e4m3={"state": E4M3}, split={"dst": "row"}, no_pool={"index": None}),
        *vary("one", odd={"gap": 1, "index": torch.int64}, odd_i16={"state": I16, "gap": 3, "dst": "row"}, scales={"scale_gap": 1}),
        *vary("one", n96={"d_state": 96}, n256={"d_state": 256, "state": E4M3}, n4={"d_state": 4}),
        *vary("one", p80={"headdim": 80, "state": E4M3, "z": True}),
        *vary("one", mamba1={"heads": 0, "d_state": 16, "z": True}, mamba1_i16={"heads": 0, "d_state": 16, "state": I16, "dst": "row"}),
        *vary("noise", i8={"noise": 10}, i16={"noise": 4, "state": I16}, e4m3={"noise": 7, "state": E4M3, "dst": "row"}),
        *vary("several", i8={"tokens": 9}, i16={"tokens": 3, "state": I16}, e4m3={"tokens": 3, "state": E4M3, "headdim": 80}),
        *vary("several", kept={"tokens": 3, "kept": I8}, kept_only={"tokens": 3, "kept": E4M3, "state": BF16, "update": False}),
        *vary("several", each={"tokens": 3, "dst": "token"}, mixed={"tokens": 3, "kept": I16, "state": E4M3, "noise": 5}),
        *vary("several", kept_f32={"tokens": 2, "kept": F32, "gap": 1}, f32_kept={"tokens": 2, "kept": I8, "state": F32, "update": False}),
        *vary("several", packed={"lengths": (3, 0, 5, 1)}, packed_each={"lengths": (3, 0, 5, 1), "dst": "token", "state": I16}),
        *vary("tree", i8=tree, p72=tree | {"headdim": 72, "kept": E4M3, "state": I16}, noise=tree | {"noise": 3, "state": F16}),
    ]  # fmt: skip


def stored_values(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> Tensor:
    if dtype not in NARROW:
        return torch.randn(shape, generator=g).to(dtype)
    most = NARROW[dtype].largest
    return (torch.randn(shape, generator=g) * most / 4).clamp(-most, most).to(dtype)


class Call:
    """The arguments of a case, and copies of the whole buffers that they lie in."""

    def __init__(self, case: Case, device: str = "cpu", seed: int = 0):
        self.case, self.device, g = case, device, torch.Generator().manual_seed(seed)
        self.buffers: dict[str, Tensor] = {}
        self.used: dict[str, int] = {}  # of a buffer's last axis
        H, P, N, G = max(case.heads, 1), case.headdim, case.d_state, case.groups if case.heads else 1
        lead: tuple[int, ...] = (sum(case.lengths),) if case.lengths else (case.batch, case.tokens) if case.tokens else (case.batch,)
        row, group = ((H, P), (G, N)) if case.heads else ((P,), (N,))
        most = max(case.lengths, default=case.tokens)
        slots = case.batch * (2 + most) if case.index else case.batch
        self.named = {
            **{n: torch.randn(*lead, *row, generator=g).bfloat16().to(device) for n in ("x", *(["z"] if case.z else []))},
            **{n: torch.randn(*lead, *group, generator=g).bfloat16().to(device) for n in ("B", "C")},
            "dt": torch.randn(*lead, H if case.heads else P, generator=g).to(device),
            "A": -torch.rand((H,) if case.heads else (P, N), generator=g).to(device) - 0.05,
            "D": torch.randn(H if case.heads else P, generator=g).to(device),
            "state": self.states("state", (slots,), row, N, case.state, case.gap, g),
            "out": torch.full((*lead, *row), float("nan"), dtype=BF16, device=device),
        }
        if case.state in NARROW:
            self.named["state_scale"] = self.scales("state_scale", (slots, *row), g)
        order = torch.randperm(slots, generator=g).to(case.index or torch.int32)
        if case.index:
            source, target = order[: case.batch].clone(), order[case.batch : case.batch * 2].clone()
            source[1], target[2:3] = -1, -1
            self.named["state_indices"] = source.to(device)
            columns = order[case.batch : case.batch * (1 + most)].view(case.batch, -1) if case.dst == "token" else target
            self.named |= {"dst_state_indices": columns.to(device)} if case.dst else {}
        if case.lengths:
            self.named["cu_seqlens"] = torch.tensor([0, *case.lengths]).cumsum(0).int().to(device)
        if case.kept:
            rows = (case.batch, case.tokens + 1)
            self.named["intermediate_states"] = self.states("intermediate_states", rows, row, N, case.kept, case.gap, g)
            if case.kept in NARROW:
                self.named["intermediate_state_scales"] = self.scales("intermediate_state_scales", (*rows, *row), g)
        if case.tree:
            self.named["parents"] = torch.randint(-1, case.tokens, (case.batch, case.tokens), generator=g).int().to(device)
        if case.noise:
            self.named["rand_seed"] = torch.randint(-(2**62), 2**62, (slots,), generator=g).to(device)
        self.before = {n: t.clone() for n, t in self.buffers.items()}

    def states(self, name: str, lead: tuple, row: tuple, N: int, dtype: torch.dtype, gap: int, g: torch.Generator) -> Tensor:
        """Between gaps of `gap` elements, or of 16 where slots are to be aligned."""
        size = torch.Size((*row, N)).numel()
        self.buffers[name] = stored_values((*lead, size + (gap or 16)), dtype, g).to(self.device)
        self.used[name] = size
        return self.buffers[name][..., :size].unflatten(-1, (*row, N))

    def scales(self, name: str, shape: tuple[int, ...], g: torch.Generator) -> Tensor:
        self.buffers[name] = (torch.rand(*shape, 1 + self.case.scale_gap, generator=g) * 0.05 + 0.001).to(self.device)
        self.used[name] = 1
        return self.buffers[name][..., 0]

    @property
    def kwargs(self) -> dict[str, Any]:
        return self.named | {"dt_softplus": True, "update_state": self.case.update, "philox_rounds": self.case.noise}

    @property
    def built(self) -> Any:
        return self.public

    @property
    def public(self) -> Any:
        """The result of the public function."""
        return call_of(ssmgen.selective_state_update, **self.kwargs)

    @property
    def options(self) -> Options:
        return Options(True, None, -1, self.case.noise, self.case.update)

    def run(self) -> None:
        ssmgen.selective_state_update(**self.kwargs)

    def numbers(self) -> dict[str, Tensor]:
        """The values of the written operands in float64 on the CPU: widened if they have scales; and the scales."""
        views = views_of({n: t.cpu() for n, t in self.named.items()}, self.options, [])
        found = {
            n: widened(views[n], views.get(OPERANDS.scales.get(n, "")), torch.float64)
            for n in ("state", "intermediate_states", "out")
            if n in views
        }
        return found | {n: views[n].double() for n in OPERANDS.scales.values() if n in views}


def assert_matches(call: Call) -> None:
    """Compares with the float64 reference on an untouched call. The reference does not round states; a stored state may be a step, or half
    a step, away. Operands that are not written stay unchanged. In a tree, each token starts from its parent's stored state. f32 arithmetic
    may round a number near the middle of two to the other one. The result is then off by one or two steps, without a fault."""
    fresh = Call(call.case)
    views = views_of(fresh.named, fresh.options, problems := [])
    assert not problems, problems
    start = {n: t.clone() for n, t in fresh.numbers().items()}
    want = {n: t.clone() for n, t in start.items() if n not in OPERANDS.scales.values()}
    plain = {n: t for n, t in views.items() if n not in OPERANDS.scales.values()} | want
    got = call.numbers()
    if call.case.tree:
        walk_tree(plain, got["intermediate_states"])
    else:
        reference(**plain, dt_softplus=True, update_state=call.case.update, dtype=torch.float64)
    for name, scales in OPERANDS.scales.items():
        if name not in got:
            continue
        dtype, changed = call.named[name].dtype, (want[name] != start[name]).flatten(-2).any(-1)
        assert torch.equal(got[name][~changed], start[name][~changed]), name
        near = want[name][changed]
        most = near.abs().amax(-1, keepdim=True)
        error = (got[name][changed] - near).abs()
        if dtype not in NARROW:
            assert (error <= 2.0**-7 * near.abs() + DECAY_ERROR * most).all(), name
            continue
        assert torch.equal(got[scales][~changed], start[scales][~changed]), scales
        step, arithmetic = most / NARROW[dtype].largest, DECAY_ERROR * most
        own_scale = got[scales][changed][..., None]
        arithmetic = arithmetic + (EXCESS_ERROR * 0.06 if call.case.state == I8 else 0)  # 0.06 is the greatest scale to begin with
        assert ((own_scale - step).abs() <= arithmetic).all(), f"{scales}: not the greatest over {NARROW[dtype].largest}"
        steps = 1 if call.case.noise else 0.5
        size = torch.maximum(near.abs() / 8, step / 2.0**9 * 8) if dtype == E4M3 else step  # of a step: 3 bits, or a subnormal's step
        assert (error <= steps * size * (1 + 1e-3) + 2 * arithmetic).all(), f"{name} is off by {float((error / size).max()):.3f} steps"
    out = (got["out"] - want["out"]).abs()
    assert (out <= 2.0**-8 * want["out"].abs() + 2.0**-6 * want["out"].abs().mean()).all(), float(out.max())
    for name, buffer in call.buffers.items():  # gaps between slots and between scales
        used = call.used[name]
        assert torch.equal(bits(buffer)[..., used:], bits(call.before[name])[..., used:]), f"a gap of {name}"


def walk_tree(views: dict[str, Tensor], stored: Tensor) -> None:
    """Updates state, intermediate_states and out, all in float64: each token starts from its parent's state in `stored`, or without
    an earlier parent from the state before it. Nothing is rounded."""
    weights = {n: views[n].double() for n in ("A", "D")}
    for b, slot in enumerate(views["state_indices"].tolist()):
        if slot < 0:
            views["out"][b] = 0
            continue
        h = views["state"][slot]
        for t, parent in enumerate(views["parents"][b].tolist()):
            token = {n: views[n][b, t].double() for n in ("x", "dt", "B", "C")}
            h, views["out"][b, t] = one_token(stored[b, parent] if 0 <= parent < t else h, token, weights, True, None)
            views["intermediate_states"][b, t] = h
        views["state"][slot] = h


RINGED = 2, 8, 32, 1, 8, 3, 5  # H, P, N, G, R, T, slots of a replay on a ring, of three sequences


def ringed(dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """FlashInfer's arguments of a step on three sequences."""
    H, P, N, G, R, _, SLOTS = RINGED
    g = torch.Generator().manual_seed(seed)
    state, scale = narrowed(torch.randn(SLOTS, H, P, N, generator=g), dtype)
    call = {"state": state, "state_scale": scale, "x_cache": torch.zeros(SLOTS, H, R, P), "B_cache": torch.zeros(SLOTS, G, R, N)}
    call |= {
        "dt_cache": torch.zeros(SLOTS, H, R),
        "ring_start": torch.zeros(SLOTS).int(),
        "prev_num_accepted_tokens": torch.zeros(SLOTS).int(),
    }
    call |= {"A": -torch.rand(H, generator=g), "state_batch_indices": torch.tensor([3, 0, 4]).int()}
    return call | ringed_tokens(seed)


def caught_up(call: dict[str, Tensor]) -> Tensor:
    """The states of a step's three slots after they have caught up with their histories, in float64, unrounded."""
    S = widened(call["state"], call["state_scale"], torch.float64)
    for slot in call["state_batch_indices"].tolist():
        for k in range(int(call["prev_num_accepted_tokens"][slot])):
            at = (int(call["ring_start"][slot]) + k) % call["x_cache"].shape[2]
            dt, B = call["dt_cache"][slot, :, at].double(), call["B_cache"][slot, 0, at].double()
            write = (dt[:, None] * call["x_cache"][slot, :, at].double())[..., None] * B
            S[slot] = S[slot] * (dt * call["A"].double()).exp()[:, None, None] + write
    return S[call["state_batch_indices"]]


def assert_rounded_once(call: dict[str, Tensor], exact: Tensor) -> None:
    """The states of a step's three slots are within half a step of `exact`, plus the error of f32 arithmetic.

    Five tokens, each with a logarithm of decay below 1, and u = 2^-24: their products are off by 5 u in all, and a sum in three levels by
    15 u more. The factor of a token at the end is a power of the difference of two sums: 45 u, 10 u more for base 2, and 4 u for the power
    itself. Times dt and x this is 61 u of the token's write. DECAY_ERROR is 64 u, an eighth of a step of int16.
    """
    slots, dtype = call["state_batch_indices"].cpu(), call["state"].dtype
    most = exact.abs().amax(-1, keepdim=True)
    step = exact.abs() / 8 + most / 2**14 if dtype == E4M3 else most / NARROW[dtype].largest
    error = (widened(call["state"].cpu(), call["state_scale"].cpu(), torch.float64)[slots] - exact).abs()
    assert (error <= 0.5 * step + DECAY_ERROR * most).all(), f"off by {float((error / step).max()):.3f} steps"


def ringed_tokens(seed: int) -> dict[str, Tensor]:
    (H, P, N, G, _, T, _), g = RINGED, torch.Generator().manual_seed(seed + 1)
    made = {"x": torch.randn(3, T, H, P, generator=g), "dt": torch.rand(3, T, H, generator=g)[..., None].expand(3, T, H, P)}
    made |= {n: torch.randn(3, T, G, N, generator=g) for n in ("B", "C")}
    return made | {"out": torch.full((3, T, H, P), torch.nan)}


def trials_are_bit_equal(specs: Iterable[Any], batch: int) -> None:
    """States, their scales and outputs of random operands, with each of these variants."""
    results = []
    for spec in specs:
        trial = trial_of(spec, batch, 0)
        values, grid = trial.launch_of(spec)
        named = {n: trial.named[n] for n in spec.operands()}
        run(spec, SM90, grid, Arguments(spec, values).at([t.data_ptr() for t in named.values()]), named, trial.written)
        results.append([bits(named[n]) for n in ("state", "state_scale", "out")])
    assert len(results) > 2 and all(torch.equal(a, b) for other in results for a, b in zip(other, results[0], strict=True))
