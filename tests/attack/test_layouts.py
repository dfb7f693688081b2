"""A card serves each call of a prompt that a CPU serves, for any offsets, strides and dtypes of its operands.

The CPU's answer is the call itself. The card's answer comes from `ssmgen.supported` for every ssmgen function that the call runs.
"""

from __future__ import annotations

import functools
from collections import Counter
from random import Random
from typing import Any, NamedTuple

import fuzz
import fuzz_calls
import fuzz_drop_ins
import pytest
import torch
from fuzz_calls import Form
from torch import Tensor

import ssmgen
from ssmgen.calls.api import OPERATOR_OF
from ssmgen.calls.operator import Call
from ssmgen.compat.hf import functions as hf
from ssmgen.errors import ArgumentError, UnsupportedError
from ssmgen.select import registry

SIXTEEN = (torch.bfloat16, torch.float16)
FLOATS = (*SIXTEEN, torch.float32)
SCANNED = ("x", "B", "C", "z", "out")  # of Mamba-2, which also has f32 products
STATES = ("state", "checkpoint", "kv_history")  # in names
DRAWS = 6  # of each form
PROMPTS = ("chunk_", "mamba_chunk_", "lightning_attention", "fi_chunk_", "extend", "mamba2_chunk_", "torch_chunk_")


@pytest.fixture(scope="module")
def forms():
    """Valid calls of every drop-in for prompts, and of ssmgen's own functions, with sizes that kernels have."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (fuzz_calls, fuzz_drop_ins):
            for size in ("P", "N", "K", "V"):
                patch.setattr(module, size, 16)
        made = [*fuzz_drop_ins.drop_ins(), *fuzz_calls.native(), *_transformers()]
    found = [form for form in made if form.function.__name__.startswith(PROMPTS)]
    assert len({form.function for form in found}) > 25
    return found


def _transformers() -> list[Form]:
    B, T, H, HK = 2, 3, 4, 2

    def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(B, T, *shape).to(dtype)

    scan = {"hidden_states": rand(H, 16), "dt": rand(H), "A": -torch.rand(H), "B": rand(2, 16), "C": rand(2, 16), "chunk_size": 2}
    rows = {"query": rand(HK, 16), "key": rand(HK, 16), "value": rand(H, 16), "beta": rand(H).sigmoid(), "output_final_state": True}
    return [
        Form("hf.mamba2_chunk_scan", hf.mamba2_chunk_scan, scan | {"z": rand(H, 16), "return_final_states": True}, (), False),
        Form("hf.delta_rule", hf.torch_chunk_gated_delta_rule, rows | {"g": -rand(H).abs()}, (), False),
        Form("hf.kda", hf.chunk_kimi_delta_attention, rows | {"g": -rand(H, 16).abs()}, (), False),
    ]


def elsewhere(t: Tensor, rng: Random, state: bool, written: bool) -> Tensor:
    """The same values at an offset of up to 7 elements, with gaps, or in another order of axes."""
    order, gaps = list(range(t.dim())), [0] * t.dim()
    if t.dim() > 2 and not state and not written and rng.random() < 0.2:
        rng.shuffle(order)
    for axis in range(1 if state else t.dim() - written):
        gaps[axis] = rng.choice((0, 0, 0, 1, 2, 3))
    sizes = [t.shape[a] + gaps[a] for a in order]
    ahead = rng.randrange(8)
    memory = t.new_zeros(ahead + torch.Size(sizes).numel())
    view = memory[ahead:].view(sizes)
    for place, axis in enumerate(order):
        view = view.narrow(place, 0, t.shape[axis])
    return view.permute([order.index(a) for a in range(t.dim())]).copy_(t)


def drawn(form: Form, rng: Random) -> fuzz.Arguments:
    """The form's arguments with other dtypes, offsets and strides."""
    given = dict(form.arguments)
    mamba = ("chunk_size" in given and "B" in given) or form.function.__name__ == "chunk_scan"
    rows = rng.choice(FLOATS if mamba else SIXTEEN)
    for name, t in given.items():
        if not isinstance(t, Tensor) or not t.is_floating_point():
            continue
        state = any(word in name for word in STATES)
        alike = name in (*SCANNED, "hidden_states") if mamba else t.dtype in SIXTEEN and not state and name not in ("g", "beta")
        dtype = rows if alike else rng.choice((t.dtype, t.dtype, *FLOATS))
        given[name] = elsewhere(t.to(dtype), rng, state, name in form.written)
    return given


class Said(NamedTuple):
    served: bool  # by the CPU
    refused: list[str]  # by a card, of the calls that it was asked to make
    odd: bool  # whether an operand begins at an odd element


@functools.cache
def reasons_against(problem: Any, size: int) -> list[str]:
    """The reasons as `ssmgen.supported` gives them."""
    return registry.explain(OPERATOR_OF[type(problem)], problem, size, fuzz.SM90, True, None).reasons


def asked(form: Form, given: fuzz.Arguments) -> Said:
    """Both answers for a call."""
    refused: list[str] = []
    plan = Call.plan

    def seen(call: Call) -> Any:
        problem, size, *_ = call.problem()
        refused.extend(reasons_against(problem, size))
        return plan(call)

    odd = any(isinstance(t, Tensor) and t.element_size() == 2 and t.data_ptr() % 4 for t in given.values())
    expected = {n: fuzz.dense(t) for n, t in given.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Call, "plan", seen)
        try:
            result = form.function(**given)
        except (ArgumentError, UnsupportedError):
            return Said(False, refused, odd)
    want = form.function(**expected)
    for got, other in zip(fuzz.tensors(result, given, form), fuzz.tensors(want, expected, form), strict=True):
        assert fuzz.close(got, other), form.id
    return Said(True, refused, odd)


def campaign(forms: list[Form], seed: int) -> Counter[str]:
    """Counts of the answers for DRAWS draws of each form. Raises AssertionError if a card refuses a call that the CPU serves."""
    count: Counter[str] = Counter()
    with fuzz.filled():
        for form in forms:
            for draw in range(DRAWS):
                said = asked(form, drawn(form, Random(f"{seed}/{form.id}/{draw}")))
                count["served" if said.served else "refused"] += 1
                count["odd and served"] += said.served and said.odd
                assert not (said.served and said.refused), (form.id, draw, said.refused)
    return count


@pytest.mark.parametrize("seed", range(2))
def test_a_card_serves_what_the_cpu_serves_of_drop_ins(forms, seed):
    count = campaign([form for form in forms if not form.public], seed)
    assert count["served"] > 3 * count["refused"]
    assert count["odd and served"] > count["served"] / 3


def test_ssmgen_s_own_functions_differ_in_odd_beginnings_alone(forms):
    """They copy nothing: kernels load at least 4 bytes at once."""
    told: Counter[str] = Counter()
    for form in (form for form in forms if form.public):
        for draw in range(DRAWS):
            said = asked(form, drawn(form, Random(f"own/{form.id}/{draw}")))
            told |= Counter(said.refused if said.served else ())
            assert all("at an odd element" in reason for reason in said.refused if said.served), (form.id, draw, said.refused)
    assert told


def test_the_comparison_sees_a_call_that_a_card_refuses(forms):
    own = next(form for form in forms if form.function is ssmgen.chunk_scan)
    given = {n: t.bfloat16() if n in SCANNED else t for n, t in own.arguments.items()}
    assert asked(own, given) == Said(True, [], False)
    x = given["x"]
    said = asked(own, given | {"x": x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)})
    assert said.served and said.odd and "at an odd element" in said.refused[0]
