"""Operands for the linear-attention functions: strided, poisoned, guarded; and the bounds their results must keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import cycle, product
from typing import Any

import torch
from decode_cases import I32, I64, Row, Steps, rows_of
from guarded_call import GuardedCall
from rounding import Approx, U, dot, exact
from ssu_cases import BF16, F16, F32, Memory, ulp
from torch import Tensor
from varying import vary

from ssmgen.engine.recurrences.attention.operands import OF_KEY_HEADS, ROLES
from ssmgen.families.linear_attention import planning as op

# The operands of each function. Their roles decide their shapes and values.
QKV = {"q": "query", "k": "key", "v": "value"}
RULES: dict[str, dict[str, str]] = {
    "gated_delta_rule": QKV | {"g": "gate", "beta": "beta"},
    "kda": QKV | {"g": "channel_gate", "beta": "beta"},
    "gdn2": QKV | {"g": "channel_gate", "b": "channel_factor", "w": "row_factor"},
    "delta_rule": QKV | {"beta": "beta"},
    "comba": QKV | {"p": "key", "g": "gate", "beta": "beta"},
    "rwkv7": {"r": "query", "k": "key", "v": "value", "w": "channel_gate", "kk": "key", "a": "key_factor"},
    "rwkv6": {"r": "query", "k": "key", "v": "value", "w": "channel_gate", "u": "bonus"},
    "dplr_delta_rule": QKV | {"a": "key", "b": "key", "gk": "channel_gate"},
    "gla": QKV | {"gk": "channel_gate", "gv": "row_gate"},
    "simple_gla": QKV | {"g": "gate"},
    "lightning_attn": QKV | {"slope": "slope"},
}


@dataclass(frozen=True)
class Case(Steps):
    """A call of one of the rules. packed: q, k, v are slices of one tensor; g and beta of another."""

    rule: str = "gated_delta_rule"
    heads: int = 4  # of v and the state
    group: int = 2  # of them per head of q and k
    K: int = 128
    V: int = 64
    x: torch.dtype | None = BF16  # of all operands except the state, weights and out; None: types differ
    omit: tuple[str, ...] = ()  # operands left out
    gate: str = "log"  # softplus, bounded, bounded_plain (without A_log)
    bias: str = "full"  # flat: [HV K]; or none
    extreme: bool = False  # gates that overflow unless the kernel takes care
    shared_gate: bool = False  # g [HV]
    shared_bonus: bool = True  # u [HV, K]
    beta: str = "plain"  # sigmoid, twice
    beta_rows: bool = False
    l2norm: bool = False
    scale: float | None = None
    kept: int | None = None  # columns of intermediate_states, beyond the most tokens; if negative, dst_state_indices has as few
    head_gap: int = 0  # elements between the heads of one
    layout: str = "vk"


RAW: dict[str, Any] = {"gate": "softplus", "beta": "sigmoid", "l2norm": True}
WILD = RAW | {"extreme": True, "heads": 10, "out": F32}
GDN = Case("gdn", **RAW)


def _rules() -> list[Case]:
    """Each function as its models call it, and with its other arguments."""
    kda, gdn2, comba, gla = (Case(rule, rule=rule) for rule in ("kda", "gdn2", "comba", "gla"))
    rwkv6, rwkv7 = (Case(rule, rule=rule, group=1, K=64) for rule in ("rwkv6", "rwkv7"))
    delta, dplr, simple, lightning = (
        Case("delta", rule="delta_rule"),
        Case("dplr", rule="dplr_delta_rule"),
        Case("simple", rule="simple_gla"),
        Case("la", rule="lightning_attn"),
    )
    return [
        *vary(Case("gdn"), log={"out": F32}, extreme=WILD, beta_rows={"beta": "sigmoid", "beta_rows": True, "x": F16}),
        *vary(GDN, qwen3={"state": BF16}, twice={"bias": "none", "beta": "twice", "x": F32}),
        *vary(kda, log={"l2norm": True, "state": BF16}, flat_bias={**RAW, "bias": "flat", "x": F32}, extreme=WILD),
        *vary(kda, bounded={**RAW, "gate": "bounded", "out": F32}, bounded_extreme={**WILD, "gate": "bounded", "weights": BF16}),
        *vary(kda, bounded_plain={"gate": "bounded_plain", "bias": "none", "beta_rows": True, "state": F16}),
        *vary(gdn2, log={"l2norm": True}, softplus={"gate": "softplus", "state": BF16, "x": F16, "weights": F16}),
        *vary(delta, sigmoid={"beta": "sigmoid", "l2norm": True, "x": F32}, rows={"beta": "twice", "beta_rows": True, "state": BF16}),
        *vary(comba, raw={**RAW, "out": F32}, log={"state": F16}),
        *vary(rwkv6, f32={"x": F32}, scaled={"V": 96, "scale": 0.125, "state": BF16}, each_token={"shared_bonus": False}),
        *vary(rwkv7, f32={"x": F32}, scaled={"V": 96, "scale": 0.125, "state": BF16}),
        *vary(dplr, gk={"out": F32}, bare={"omit": ("gk",), "state": BF16}),
        *vary(gla, gk={"omit": ("gv",), "out": F32}, gv={"omit": ("gk",), "state": BF16}, both={"x": F32}),
        *vary(simple, g={"state": F16}, shared={"shared_gate": True, "x": F32}, bare={"omit": ("g",), "out": F32}),
        *vary(lightning, unscaled={"scale": 1.0}),
    ]


def matrix() -> list[Case]:
    kda, rwkv7 = replace(GDN, id="kda", rule="kda"), Case("rwkv7", rule="rwkv7", group=1, K=64)
    many = replace(GDN, id="gdn-t4", tokens=4, batch=6, heads=2)
    ragged = replace(GDN, id="gdn-ragged", lengths=(9, 2, 1, 0, 3, 4), heads=2)
    dims = (64, 96), (64, 256), (96, 64), (96, 192), (128, 256), (192, 64), (192, 128), (256, 96), (256, 64)
    groups, types = ((1, 1), (3, 3), (6, 3), (8, 8), (16, 4), (5, 1)), product((BF16, F32, F16), repeat=2)
    steps = {1: F32, 2: BF16, 8: F32, 9: BF16, 16: F32}
    cases = [
        *_rules(),
        *[replace(c, id=f"{c.id}-t3", tokens=3, batch=4) for c in _rules()],
        *[replace(GDN, id=f"gdn-k{k}v{v}", K=k, V=v, heads=2, state=s, x=x) for (k, v), (s, x) in zip(dims, types, strict=True)],
        *[replace(GDN, id=f"gdn-{h}heads-{h // n}keys", heads=h, group=n, state=BF16) for h, n in groups],
        *[replace(GDN, id=f"gdn-t{t}", tokens=t, state=s, batch=4, heads=2) for t, s in steps.items()],
        *vary(kda, k96v128_t2={"K": 96, "V": 128, "tokens": 2, "heads": 2}, k192v256_t2={"K": 192, "V": 256, "tokens": 2, "heads": 2}),
        *vary(
            kda, mixed_t3={"x": None, "tokens": 3}, packed_odd_t3={"packed": 1, "tokens": 3}, each={"tokens": 3, "kept": 1, "dst": "token"}
        ),
        *vary(rwkv7, packed={"packed": 8, "index": None}, ragged={"lengths": ragged.lengths}),
        *vary(GDN, no_pool={"index": None, "batch": 3}, mixed={"x": None}, packed={"packed": 8}, packed_odd={"packed": 1, "state": BF16}),
        *vary(GDN, i64_pad7={"index": I64, "pad_slot_id": 7}, dst={"dst": "row", "batch": 11}, out_gap={"out_gap": True, "V": 96}),
        *vary(GDN, dst_i64_pad3={"dst": "row", "batch": 11, "index": I64, "pad_slot_id": 3, "state": BF16}, no_update={"update": False}),
        *vary(GDN, slot_gap={"slot_gap": 4096}, slot_gap_odd={"slot_gap": 3}, slot_gap_dst={"slot_gap": 1, "state": F16, "dst": "row"}),
        *vary(GDN, head_gap={"head_gap": 64}, head_gap_odd={"head_gap": 3, "slot_gap": 1, "state": BF16, "dst": "row"}),
        *vary(many, head_gap={"head_gap": 32, "kept": 0, "dst": "token"}, head_gap_bf16={"head_gap": 8, "update": False, "state": BF16}),
        *vary(GDN, tail={"V": 72, "state": BF16, "out_gap": True}, dst_accepted={"dst": "row", "accepted": I32, "batch": 11}),
        *vary(many, tail={"V": 72, "dst": "token", "kept": 0}, dst={"dst": "row", "batch": 11, "state": BF16}, each={"dst": "token"}),
        *vary(many, each_i64_pad5={"dst": "token", "index": I64, "pad_slot_id": 5, "state": BF16, "slot_gap": 1}),
        *vary(many, accepted={"dst": "row", "accepted": I64, "index": I64}, accepted_own={"dst": "own", "accepted": I32, "state": BF16}),
        *vary(many, accepted_no_update={"accepted": I32, "update": False, "kept": 0}, kept={"kept": 0, "state": BF16}),
        *vary(many, kept_wide_no_update={"kept": 3, "update": False, "packed": 1}, no_update={"update": False, "state": BF16}),
        *vary(GDN, t8_no_update={"tokens": 8, "batch": 4, "update": False, "state": F16, "x": F16, "V": 72, "accepted": I32, "out": F32}),
        *vary(GDN, t9_no_pool={"tokens": 9, "batch": 2, "heads": 2, "index": None, "kept": 0, "packed": 8}),
        *vary(ragged, pool={}, one_axis={"tokens": 1, "index": I64, "pad_slot_id": 2, "state": BF16, "out_gap": True}),
        *vary(ragged, no_pool={"index": None, "packed": 1}, dst={"dst": "row", "kept": 0}, accepted={"dst": "own", "accepted": I32}),
        *vary(ragged, each={"dst": "token", "state": BF16, "kept": 2}, few_columns={"dst": "token", "kept": -6}),
    ]
    assert len({c.id for c in cases}) == len(cases)
    return cases


def kv_matrix() -> list[Case]:
    """The same with a state [slots, heads, K, V]."""
    return [replace(c, id=f"{c.id}-kv", layout="kv") for c in matrix()]


_KV = kv_matrix()[::16]


def usual(case: Case) -> bool:
    """Whether a case always runs."""
    return case in _KV or (case.layout == "vk" and not case.id.endswith("-t3"))


@dataclass
class Call(GuardedCall):
    sequences: list[Row]

    @property
    def operator(self) -> str:
        return self.case.rule


def _rows(case: Case, g: torch.Generator) -> tuple[int, dict[str, Any], list[Row]]:
    """As rows_of; one sequence in six has no row of intermediate states."""
    kept = [-7 if case.rows and b % 6 == 3 else (2 * b + 1 if case.rows else b) for b in range(len(case.counts))]
    slots, indices, rows = rows_of(case, g, case.kept or 0, kept, max(case.counts) - (1 if case.lengths else 0))
    return slots, indices | ({"intermediate_state_indices": kept} if case.rows else {}), rows


def _values(kind: str, case: Case, shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    """Keys have norms below 1, so that no delta rule diverges; log decays are negative."""
    normal, uniform = torch.randn(*shape, generator=g), torch.rand(*shape, generator=g)
    if kind.endswith("gate"):
        return normal * 2 if case.gate != "log" else -0.6 * uniform
    plain = kind == "slope" or kind.endswith("factor") or (kind == "beta" and case.beta == "plain")
    return uniform if plain else normal * 0.8 * case.K**-0.5 if kind == "key" else normal


def make_call(case: Case, device: str, seed: int = 0) -> Call:
    """Random operands. Unused slots hold NaN; buffers are padded with poison."""
    g, memory = torch.Generator().manual_seed(seed), Memory(device)
    B, HV, HK, K, V = len(case.counts), case.heads, case.heads // case.group, case.K, case.V
    slots, indices, sequences = _rows(case, g)
    other = {"cu_seqlens": I32 if case.index is I64 else I64, "num_accepted_tokens": case.accepted}
    other |= {"parents": case.parents, "intermediate_state_indices": case.rows}
    kwargs = {n: memory.fill(n, torch.tensor(t, dtype=other.get(n, case.index))) for n, t in indices.items()}
    lead = (sum(case.lengths) or B,) if case.tokens is None else (1, sum(case.lengths)) if case.lengths else (B, case.tokens)
    per_head = (HV, V, K) if case.layout == "vk" else (HV, K, V)
    apart = V * K + case.head_gap
    kwargs["state"] = state = memory.view("state", (slots, *per_head), (HV * apart + case.slot_gap, apart, per_head[2], 1), case.state)
    state.fill_(float("nan"))
    for slot in {s.slot for s in sequences} - {-1}:
        state[slot] = torch.randn(per_head, generator=g)

    last = {"beta": (HV, V) if case.beta_rows else (HV,), "gate": (HV,), "query": (HK, K), "key": (HK, K), "key_factor": (HK, K)}
    last |= dict.fromkeys(("channel_gate", "channel_factor", "bonus"), (HV, K)) | dict.fromkeys(
        ("value", "row_gate", "row_factor"), (HV, V)
    )
    given = {n: kind for n, kind in RULES[case.rule].items() if n not in case.omit}
    shared = {"slope"} | ({"gate"} if case.shared_gate else set()) | ({"bonus"} if case.shared_bonus else set())
    last["slope"] = (HV,)
    shapes = {n: last[kind] if kind in shared else lead + last[kind] for n, kind in given.items()}
    types = cycle((case.x,) if case.x else (BF16, F32, F16))
    values = {n: _values(given[n], case, shape, g).to(t) for (n, shape), t in zip(shapes.items(), types, strict=False)}
    for names in [] if case.packed is None else [list(values)[:3], [n for n in ("g", "beta") if n in values]]:
        ends = [torch.zeros(*lead, width, dtype=case.x) for width in (case.packed, 8 + case.packed)]
        parts = [ends[0], *(values[n].flatten(len(lead)) for n in names), ends[1]]
        pieces = memory.fill("+".join(names), torch.cat(parts, -1)).split([t.shape[-1] for t in parts], -1)
        kwargs |= {n: t.unflatten(-1, last[given[n]]) for n, t in zip(names, pieces[1:], strict=False)}
    kwargs |= {n: memory.fill(n, t) for n, t in values.items() if n not in kwargs}
    if case.gate != "log":
        A_log, bias = torch.randn(HV, generator=g), torch.randn(HV, K, generator=g)
        if case.extreme:
            A_log = torch.tensor([-6.0, 60.0, -90.0, 20.0, 3.0]).repeat(HV)[:HV]
            bias = torch.tensor([95.0, -100.0, 3.0, -15.0, -90.0, 20.0, 1.0]).repeat(HV * K)[: HV * K].view(K, HV).T
        bias = bias[:, 0] if given["g"] == "gate" else bias.flatten() if case.bias == "flat" else bias
        weights = {"A_log": A_log if case.gate != "bounded_plain" else None, "dt_bias": bias if case.bias != "none" else None}
        kwargs |= {n: memory.fill(n, t.contiguous().to(case.weights)) for n, t in weights.items() if t is not None}
    strides = torch.empty(values["v"].shape, device="meta").stride()
    strides = (2 * strides[0] + 6, *[2 * s for s in strides[1:]]) if case.out_gap else strides
    kwargs["out"] = memory.view("out", values["v"].shape, strides, case.out or values["v"].dtype)
    if case.kept is not None:
        kept = (2 * B if case.rows else B, max(case.counts) + case.kept, *per_head)
        kwargs["intermediate_states"] = memory.fill("intermediate_states", torch.full(kept, 7.0, dtype=case.state))
    options = {
        "use_qk_l2norm": case.l2norm, "beta_sigmoid": case.beta != "plain", "allow_neg_eigval": case.beta == "twice", "scale": case.scale,
        "lower_bound": -5.0 if case.gate.startswith("bounded") else None, "pad_slot_id": case.pad_slot_id, "state_layout": case.layout,
    }  # fmt: skip
    kwargs |= {n: v for n, v in options.items() if v} | {"update_state": case.update}
    memory.seal()
    return Call(case, memory, kwargs, sequences)


def step(S: Approx, reach: Tensor, x: Mapping[str, Approx], options: op.Options, roundings: int) -> tuple[Approx, Tensor, Approx]:
    """(new state [HV, V, K], its reach, output [HV, V]) of one token. The state's errors go through the recurrence as its values do.
    `reach`: absolute values of all terms that the state is a sum of; a product with it may be a sum of theirs, <D S, q> + e <k, q>. Scale,
    decay and norms may apply to sums instead of their terms, with as many roundings as before.
    """
    form, across, down = options.form, (lambda t: t[:, None, :]), (lambda t: t[:, :, None])
    q, k, v, read = x["q"], x["k"], x["v"], x.get("read", x["k"])
    if form.l2norm:
        q, k, read = (t * dot(t, t, roundings + 1)[..., None].moved(lambda n: torch.rsqrt(n + 1e-6), 0.0, 4 * U) for t in (q, k, read))
    read = read * x["erase"] if "erase" in x else read
    decays = [down(x["gv"].exp())] if "gv" in x else []
    if g := x.get("gk", x.get("g")):
        biased = g + x["dt_bias"] if "dt_bias" in x else g
        if form.gate == "softplus":
            g = -(x["A_log"].exp() * biased.softplus())
        elif form.gate == "bounded":
            g = exact(torch.tensor(options.lower_bound)) * (x["A_log"].exp() * biased if "A_log" in x else biased).sigmoid()
        decays.append(across((-g if form.gate == "slope" else g).exp()))
    if "bonus" in x:  # the output reads the state before its update, which is as usual
        own = dot(k * x["bonus"], q, roundings + 4)[..., None] * v
        seen = dot(S, across(q), roundings + 6, reach)
        y = seen + own
    held = dot(S, across(read), roundings + 4, reach) if form.delta == "old" else None
    for decay in decays:
        S, reach = S * decay, reach * decay.size
    held = held or dot(S, across(read), roundings + 4, reach)
    if "write" in x or "alpha" in x:
        terms = [down(held) * across(x["write"] if "write" in x else -(read * x["alpha"])), down(v) * across(k)]
    else:
        e = v * x["w"] if "w" in x else v
        e = e + -held if form.delta != "none" else e
        if "beta" in x:
            beta = x["beta"] if form.beta == "plain" else x["beta"].sigmoid()
            beta = beta + beta if form.beta == "twice_sigmoid" else beta
            e = e * beta
        terms = [down(e) * across(k)]
    new, reach = sum(terms, S), sum((t.size for t in terms), reach)
    y = y if "bonus" in x else dot(new, across(q), roundings + 6, reach)
    return new, reach, Approx(y.value * options.scale, y.error * options.scale)


def expected(call: Call, any_order: bool = False) -> dict[str, dict[Any, Approx]]:
    """The outputs of a call, in float64, with bounds: {"state": {slot: …}, "intermediate_states": {(sequence, token): …},
    "out": {(row, token): …}}; other output is zero. Sums over K are the kernels' tree, or in any order; tensor cores also truncate.
    """
    K, options = call.case.K, call.built.options
    views = {n: t.detach().cpu() for n, t in call.views.items()}
    roundings = 2 * K if call.problem.frozen else K if any_order else 4 + (K // 4 - 1).bit_length()
    want: dict[str, dict[Any, Approx]] = {"state": {}, "intermediate_states": {}, "out": {}}
    weights = {n: views[n] for n in ("A_log", "dt_bias") if n in views}
    kept = views["intermediate_states"].shape[1] if "intermediate_states" in views else 0
    for s in call.sequences:
        S, reach, after = exact(views["state"][s.slot]), views["state"][s.slot].double().abs(), {}
        for i in range(s.tokens if s.slot >= 0 else 0):
            at = s.row, s.start + i
            if s.parents[i] >= 0:
                S, reach = after[s.parents[i]]
            x = {n: t[at] for n, t in views.items() if n in ROLES and n not in weights}
            x |= {n: x[n].repeat_interleave(call.case.group, 0) for n in OF_KEY_HEADS if n in x}
            x = {n: exact(t if t.dim() == 2 else t[:, None]) for n, t in (x | weights).items()}
            S, reach, want["out"][at] = step(S, reach, x, options, roundings)
            if s.kept >= 0 and i < kept:
                want["intermediate_states"][s.kept, i] = S
                # the rounding that a later token sees when it loads this state
                half = 0 if call.case.state is F32 else ulp(S.size, call.case.state) / 2
                after[i] = Approx(S.value, S.error + half), reach
            want["state"] |= {s.targets[i]: S} if i in s.targets else {}
    return want
