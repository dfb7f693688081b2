"""Calls of linear attention with noise: their states must be the f32 ones of the same call, rounded with the noise of their slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from la_cases import BF16, F16, I32, RAW, RULES, Case, make_call
from torch import Tensor

from ssmgen.engine.stochastic_reference import stored

Run = Callable[[Any, dict[str, Any]], object]  # of a public function and its arguments

ROUNDS = 7


def seeded(case: Case, slots: int, device: str = "cpu") -> dict[str, Any]:
    seeds = torch.randint(-(2**62), 2**62, (slots,), generator=torch.Generator().manual_seed(len(case.id)))
    return {"rand_seed": seeds.to(device), "philox_rounds": ROUNDS}


def same(a: Tensor, b: Tensor) -> bool:
    """Whether they are equal, NaN included."""
    return torch.equal(a.float().nan_to_num(9.0), b.float().nan_to_num(9.0))


def run(case: Case, how: Run, device: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """(the call, its arguments afterwards, the arguments of the same call with f32 states and without noise)"""
    call = make_call(case, device)
    noisy = call.kwargs | seeded(case, call.kwargs["state"].shape[0], device)
    exact = dict(call.kwargs)
    exact |= {n: call.kwargs[n].float() for n in ("state", "intermediate_states") if n in call.kwargs} | {
        "out": torch.empty_like(call.kwargs["out"])
    }
    for kwargs in (noisy, exact):
        how(call.function, kwargs)
    return call, noisy, exact


def assert_rounded(case: Case, how: Run, device: str = "cpu") -> None:
    """Every stored state is the f32 one, rounded with its slot's noise; nothing else is written."""
    untouched = make_call(case, device).kwargs
    call, noisy, exact = run(case, how, device)
    seeds, state, changed = noisy["rand_seed"], noisy["state"], 0
    assert torch.equal(noisy["out"], exact["out"])
    for slot in range(len(state)):
        if same(exact["state"][slot], untouched["state"][slot]):
            assert same(state[slot], untouched["state"][slot])
            continue
        want = stored(exact["state"][slot], case.state, int(seeds[slot]), ROUNDS, slot)
        assert torch.equal(state[slot], want), slot
        changed += not torch.equal(want, exact["state"][slot].to(case.state))
    if "intermediate_states" in noisy:
        for b, sequence in enumerate(call.sequences):
            kept, row = noisy["intermediate_states"], sequence.kept
            for t in range(min(case.counts[b], kept.shape[1]) if sequence.slot >= 0 and 0 <= row < len(kept) else 0):
                want = stored(exact["intermediate_states"][row, t], case.state, int(seeds[sequence.slot]), ROUNDS, sequence.slot, 1 + t)
                assert torch.equal(kept[row, t], want), (b, t)
                changed += not torch.equal(want, exact["intermediate_states"][row, t].to(case.state))
    assert changed, "no state is rounded other than to nearest"


SMALL: dict[str, Any] = {"heads": 4, "K": 32, "V": 24, "state": BF16, "batch": 4}
SHAPES = {
    "one": {},
    "f16": {"state": F16, "K": 96, "V": 40},
    "keys-first": {"layout": "kv", "K": 64, "V": 32, "state": F16},
    "tail": {"V": 20},
    "odd": {"slot_gap": 1, "packed": 1, "V": 12},
    "apart": {"head_gap": 8, "dst": "row", "batch": 7},
    "no-pool": {"index": None},
    "several": {"tokens": 3, "kept": 0},
    "several-keys-first": {"tokens": 3, "kept": 0, "layout": "kv", "V": 32, "K": 64, "dst": "row"},
    "each": {"tokens": 3, "dst": "token", "state": F16},
    "each-keys-first": {"tokens": 2, "dst": "token", "layout": "kv", "V": 16, "K": 32},
    "packed": {"lengths": (3, 0, 5, 1), "dst": "row", "kept": 1},
    "accepted": {"tokens": 3, "dst": "own", "accepted": I32},
    "verify": {"tokens": 3, "kept": 1, "update": False},
    "rows": {"tokens": 2, "kept": 0, "rows": I32, "batch": 7},
}  # fmt: skip
CASES = [Case(name, **RAW | SMALL | shape) for name, shape in SHAPES.items()]
CASES += [Case(f"kda-{n}", rule="kda", **RAW | SMALL | SHAPES[n]) for n in ("one", "f16", "keys-first", "each", "several", "accepted")]
CASES += [Case(rule, rule=rule, **SMALL) for rule in RULES if rule not in ("gated_delta_rule", "kda")]
CASES += [Case(f"{rule}-t3", rule=rule, **SMALL | SHAPES["several"]) for rule in ("rwkv7", "gla", "comba")]
