"""Operands for selective_state_update of several tokens: strided, poisoned, guarded; and the bounds its results must keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from decode_cases import I32, I64, Row, Steps, assert_matches, rounding, rows_of
from guarded_call import GuardedCall
from rounding import Approx, dot, exact
from ssu_cases import BF16, F16, F32, Memory
from torch import Tensor
from varying import vary

from ssmgen.families.selective_state_update import planning as op


@dataclass(frozen=True)
class Case(Steps):
    """A call of selective_state_update. packed: x, B and C are slices of one tensor."""

    tokens: int | None = 4
    batch: int = 6
    heads: int = 4
    headdim: int = 64
    d_state: int = 128
    groups: int = 2
    x: torch.dtype = BF16  # of all operands except states, weights and out
    D: bool = True
    z: bool = False
    dt_bias: bool = True
    softplus: bool = True
    limit: tuple[float, float] | None = None
    kept: torch.dtype | None = None  # type of intermediate states
    columns: int = 0  # of intermediate states and of a ragged tree: the number beyond the longest sequence's tokens
    seed: str = ""  # one, or slots
    rounds: int = 10


def matrix() -> list[Case]:
    base, ragged = Case("t4"), Case("ragged", lengths=(9, 2, 1, 0, 3, 4))
    tree = replace(base, id="tree", kept=F32, parents=I32, tokens=7)
    noisy = replace(base, id="noisy", state=BF16, seed="slots")
    cases = [
        *vary(base, f32={}, bf16={"state": BF16}, f16={"state": F16, "x": F16, "weights": F16}, t1={"tokens": 1}, no_axis={"tokens": None}),
        *vary(base, t9={"tokens": 9, "batch": 4}, t17_no_pool={"tokens": 17, "index": None, "batch": 2, "heads": 2}),
        *vary(base, gate={"z": True, "out": F32}, gate_bare={"z": True, "D": False, "dt_bias": False, "softplus": False}),
        *vary(base, limit={"limit": (0.01, 0.1)}, i64_pad5={"index": I64, "pad_slot_id": 5}, all_f32={"x": F32}),
        *[
            replace(base, id=f"h{h}g{g}p{p}n{n}", heads=h, groups=g, headdim=p, d_state=n, state=s, z=n == 96)
            for h, g, p, n, s in (
                (3, 1, 64, 128, BF16), (6, 6, 32, 64, F32), (2, 1, 80, 96, F16), (4, 2, 72, 32, BF16), (8, 1, 64, 16, F32),
                (2, 1, 128, 256, F32), (1, 1, 7, 64, BF16), (2, 2, 64, 4, F32), (1, 1, 16, 768, F32), (1, 1, 16, 1024, BF16),
            )
        ],
        *vary(base, packed={"packed": 8}, packed_odd={"packed": 1, "state": BF16}, out_gap={"out_gap": True}, odd_gap={"slot_gap": 3}),
        *vary(base, dst={"dst": "row", "batch": 11}, each={"dst": "token", "state": BF16}, no_update={"update": False}),
        *vary(base, accepted={"dst": "own", "accepted": I32}, accepted_row={"dst": "row", "accepted": I64, "index": I64, "batch": 11}),
        *vary(base, accepted_no_update={"accepted": I32, "update": False}, gap_each={"dst": "token", "slot_gap": 1, "index": I64}),
        *vary(base, kept={"kept": F32}, kept_bf16={"kept": BF16, "state": BF16}, kept_wide={"kept": BF16, "columns": 2, "rows": I64}),
        *vary(base, kept_f32_of_bf16={"kept": F32, "state": BF16, "update": False}, kept_f16_odd={"kept": F16, "slot_gap": 1, "rows": I32}),
        *vary(base, kept_t1={"kept": BF16, "state": BF16, "tokens": None}, kept_each={"kept": F32, "dst": "token", "accepted": I32}),
        *vary(tree, f32={}, bf16={"kept": BF16, "state": BF16}, rows={"rows": I32, "parents": I64}, t9={"tokens": 9, "update": False}),
        *vary(tree, accepted={"accepted": I32, "dst": "own", "kept": F16}, p72={"headdim": 72, "slot_gap": 1}),
        *vary(ragged, f32={}, one_axis={"tokens": 1, "index": I64, "pad_slot_id": 2, "state": BF16, "out_gap": True}, dst={"dst": "row"}),
        *vary(ragged, no_pool={"index": None, "packed": 1}, each={"dst": "token", "state": BF16, "columns": -3}, gate={"z": True}),
        *vary(ragged, accepted={"dst": "own", "accepted": I32, "kept": BF16, "columns": -4}, kept={"kept": F32, "rows": I32, "columns": 1}),
        *vary(ragged, tree={"kept": F32, "parents": I32}, tree_few={"kept": F32, "parents": I64, "columns": -2, "rows": I32}),
        *vary(noisy, bf16={}, f16={"state": F16, "seed": "one", "dst": "row", "batch": 11}, each={"dst": "token", "rounds": 4}),
        *vary(noisy, kept={"kept": BF16, "rows": I32}, kept_only={"kept": F16, "state": F32, "update": False}, no_pool={"index": None}),
        *vary(noisy, odd={"slot_gap": 1, "index": I64, "rounds": 1}, ragged={"lengths": ragged.lengths, "kept": BF16}),
        *vary(noisy, tree={"kept": F16, "parents": I32}),
    ]  # fmt: skip
    assert len({c.id for c in cases}) == len(cases)
    return cases


@dataclass
class Call(GuardedCall):
    sequences: list[Row]

    operator = "selective_state_update"


def _rows(case: Case, g: torch.Generator) -> tuple[int, dict[str, Any], list[Row]]:
    """As rows_of; rows of intermediate states may lie outside the buffer."""
    B, columns = len(case.counts), max(case.counts) + case.columns
    listed = [-1 if b == 3 else B + 9 if b == 6 else 2 * b + 1 for b in range(B)] if case.rows else list(range(B))
    kept = [r if case.kept and 0 <= r < 2 * B + 2 else -1 for r in listed]
    slots, indices, rows = rows_of(case, g, case.columns, kept, columns if case.lengths else max(case.counts))
    return slots, indices | ({"intermediate_state_indices": listed} if case.rows else {}), rows


def make_call(case: Case, device: str, seed: int = 0) -> Call:
    """Random operands. Unused slots hold NaN; buffers are padded with poison."""
    g, memory = torch.Generator().manual_seed(seed), Memory(device)
    B, H, P, N, G = len(case.counts), case.heads, case.headdim, case.d_state, case.groups
    slots, indices, sequences = _rows(case, g)
    types = {"cu_seqlens": I32 if case.index is I64 else I64, "num_accepted_tokens": case.accepted, "parents": case.parents}
    types |= {"intermediate_state_indices": case.rows}
    kwargs = {n: memory.fill(n, torch.tensor(t, dtype=types.get(n, case.index))) for n, t in indices.items()}
    lead = (sum(case.lengths) or B,) if case.tokens is None else (1, sum(case.lengths)) if case.lengths else (B, case.tokens)
    lead = (sum(case.lengths),) if case.lengths and case.tokens != 1 else lead
    gap = H * P * N + case.slot_gap
    kwargs["state"] = state = memory.view("state", (slots, H, P, N), (gap, P * N, N, 1), case.state)
    state.fill_(float("nan"))
    for slot in {s.slot for s in sequences} - {-1}:
        state[slot] = torch.randn(H, P, N, generator=g)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(case.x)

    shapes = {"x": (H, P), "B": (G, N), "C": (G, N)}
    values = {n: randn(*lead, *shape) for n, shape in shapes.items()}
    if case.packed is not None:
        parts = [torch.zeros(*lead, case.packed, dtype=case.x), *(t.flatten(len(lead)) for t in values.values()), randn(*lead, 8)]
        pieces = memory.fill("conv", torch.cat(parts, -1)).split([t.shape[-1] for t in parts], -1)
        kwargs |= {n: t.unflatten(-1, shapes[n]) for n, t in zip(values, pieces[1:], strict=False)}
    kwargs |= {n: memory.fill(n, t) for n, t in values.items() if n not in kwargs}
    kwargs["dt"] = memory.fill("dt", randn(*lead, H))
    kwargs["A"] = memory.fill("A", -(torch.rand(H, generator=g) * 4 + 0.1).to(case.weights))
    kwargs |= {n: memory.fill(n, torch.randn(H, generator=g).to(case.weights)) for n in ("D", "dt_bias") if getattr(case, n)}
    kwargs |= {"z": memory.fill("z", 3 * randn(*lead, H, P))} if case.z else {}
    strides = torch.empty(*lead, H, P, device="meta").stride()
    strides = (2 * strides[0] + 6, *[2 * s for s in strides[1:]]) if case.out_gap else strides
    kwargs["out"] = memory.view("out", (*lead, H, P), strides, case.out or case.x)
    if case.kept is not None:
        columns, rows = max(case.counts) + case.columns, 2 * B + 2 if case.rows else B + 1
        kept = memory.view("intermediate_states", (rows, columns, H, P, N), (gap * columns + case.slot_gap, gap, P * N, N, 1), case.kept)
        kwargs["intermediate_states"] = kept.fill_(7.0)
    if case.seed:
        seeds = torch.randint(-(2**62), 2**62, (slots if case.seed == "slots" else 1,), generator=g)
        kwargs |= {"rand_seed": memory.fill("rand_seed", seeds), "philox_rounds": case.rounds}
    kwargs |= {"dt_softplus": case.softplus, "dt_limit": case.limit, "pad_slot_id": case.pad_slot_id, "update_state": case.update}
    memory.seal()
    return Call(case, memory, kwargs, sequences)


def one_token(call: Call, t: int) -> Call:
    """The single-token call that does token t of another one alone, on the same state."""
    gone = ("intermediate_states", "parents", "rand_seed", "philox_rounds")
    kwargs = {n: v[:, t] if n in ("x", "dt", "B", "C", "z", "out") else v for n, v in call.kwargs.items() if n not in gone}
    found = Call(replace(call.case, tokens=None, kept=None, parents=None, seed=""), call.memory, kwargs, call.sequences)
    assert not found.problem.several
    return found


def step(h: Approx, reach: Tensor, x: Mapping[str, Approx], case: Case) -> tuple[Approx, Tensor, Approx]:
    """(new state [H, P, N], its reach, output [H, P]) of one token. `reach`: absolute values of all terms that the state is a sum of."""
    dt = x["dt"] + x["dt_bias"] if "dt_bias" in x else x["dt"]
    dt = dt.softplus() if case.softplus else dt
    if case.limit:
        dt = dt.moved(lambda v: v.clamp(*case.limit), 0.0, 0.0)
    decay = (x["A"] * dt).exp()[:, None, None]
    added = (dt[:, None] * x["x"])[:, :, None] * x["B"][:, None, :]
    new, reach = h * decay + added, reach * decay.size + added.size
    y = dot(new, x["C"][:, None, :], 6 + (case.d_state // 4 - 1).bit_length(), reach)
    y = y + x["x"] * x["D"][:, None] if "D" in x else y
    return new, reach, y * (x["z"] * x["z"].sigmoid()) if "z" in x else y


def expected(call: Call, any_order: bool = False) -> dict[str, dict[Any, Approx]]:
    """The outputs of a call, in float64, with bounds: {"state": {slot: …}, "intermediate_states": {(row, token): …}, "out": {(row, token):
    …}}; other output is zero. A state that a tree goes back to is off by its rounding. Sums over N follow the kernels' tree, or any order.
    """
    case = replace(call.case, d_state=4 << (call.case.d_state - 1)) if any_order and call.case.d_state < 12 else call.case
    views = {n: t.detach().cpu() for n, t in call.views.items()}
    T = {n: views[n] if views["x"].dim() == 4 else views[n].unsqueeze(1) for n in ("x", "dt", "B", "C", "z") if n in views}
    weights = {n: exact(views[n].flatten(1)[:, 0]) for n in ("A", "D", "dt_bias") if n in views}
    want: dict[str, dict[Any, Approx]] = {"state": {}, "intermediate_states": {}, "out": {}}
    columns = views["intermediate_states"].shape[1] if "intermediate_states" in views else 0
    group = call.case.heads // call.case.groups
    for s in call.sequences:
        h, reach, kept = exact(views["state"][s.slot]), views["state"][s.slot].double().abs(), {}
        for i in range(s.tokens if s.slot >= 0 else 0):
            if s.parents[i] >= 0:
                h, reach = kept[s.parents[i]]
            x = {n: exact(t[s.row, s.start + i]) for n, t in T.items()} | weights
            x["dt"] = x["dt"][:, 0]
            for n in ("B", "C"):
                x[n] = exact(T[n][s.row, s.start + i].repeat_interleave(group, 0))
            h, reach, want["out"][s.row, s.start + i] = step(h, reach, x, case)
            if s.kept >= 0 and i < columns:
                want["intermediate_states"][s.kept, i] = h
                off = rounding(call, "intermediate_states", h)
                kept[i] = Approx(h.value, h.error + off), reach + off
            want["state"] |= {s.targets[i]: h} if i in s.targets else {}
    return want


__all__ = ["Call", "Case", "assert_matches", "expected", "make_call", "matrix", "op"]
