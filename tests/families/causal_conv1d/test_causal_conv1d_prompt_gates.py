"""causal_conv1d with gates: the bits of a multiplication before it and one after it, and of causal_conv1d_update token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conv_laws import SM90, Draw, emulated, equal, needs_emulator
from emulated_calls import emulate
from selection import costly
from test_causal_conv1d_gates import BF16, F16, F32, FUNCTIONS, GATES

import ssmgen
from ssmgen.errors import ArgumentError
from ssmgen.families.causal_conv1d import call as prompt_op
from ssmgen.families.causal_conv1d import context
from ssmgen.families.causal_conv1d import spec as conv
from ssmgen.families.causal_conv1d.spec import ConvLayout, ConvProblem, ConvSpec
from ssmgen.families.causal_conv1d_update import call as update_op
from ssmgen.spec.kernel import Loads, Pdl

FORMS = ["rows", "one token", "states", "in place", "seq_idx", "packed", "packed, states", "pool", "pool of rows"]
BOTH = ("input_gate", "output_gate")


def make(form: str, draw: Draw, gates: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of rows longer than a warp's piece, or of sequences that are shorter, longer and empty."""
    width, lengths = draw.width, (3, 0, 25, 1, 10)
    packed = form.startswith("packed") or form == "pool"

    def tokens() -> torch.Tensor:
        return draw.tokens(length=sum(lengths) + 2) if packed else draw.tokens(3, length=1 if form == "one token" else 21)

    call = {"x": tokens(), "weight": draw.weights[0], "bias": draw.weights[1]} | {name: tokens() for name in gates}
    if packed:
        call["query_start_loc"] = draw.ints([0, 3, 3, 28, 29, 39])
    sequences = 5 if packed else 3
    if form in ("states", "in place", "packed, states"):
        call |= {"initial_states": draw.states(sequences), "return_final_states": True}
    if form == "in place":
        call["final_states_out"] = call["initial_states"]
    if form == "seq_idx":
        call |= {"seq_idx": draw.ints([0] * 4 + [1] * 9 + [2] * 7 + [-1]).repeat(3, 1), "return_final_states": True}
    if form.startswith("pool"):
        slots, started = ([4, 1, -1, 0, 7], [1, 1, 1, 0, 1]) if packed else ([4, 9, 0], [1, 1, 0])
        call |= {"conv_states": draw.states(8, width - 1), "conv_state_indices": draw.ints(slots)}
        call |= {"has_initial_state": draw.ints(started, torch.bool)}
    return call


def kept(call: dict[str, Any]) -> dict[str, Any]:
    return {n: t.clone(memory_format=torch.preserve_format) if isinstance(t, torch.Tensor) else t for n, t in call.items()}


def results(found: Any, call: dict[str, Any]) -> list[torch.Tensor]:
    """out, final states, and the pool."""
    found = list(found) if isinstance(found, tuple) else [found]
    return found + [call[name] for name in ("conv_states",) if name in call]


def multiplied(function: Any, call: dict[str, Any], silu: bool) -> list[torch.Tensor]:
    """The results of a call with its gates as multiplications before and after it. Tokens without an output are 0 here."""
    plain = kept(call)
    around = {name: plain.pop(name) for name in BOTH if name in plain}
    if "input_gate" in around:
        plain["x"] = plain["x"] * around["input_gate"]
    plain["out"] = torch.zeros_like(plain["x"])
    out, *others = results(function(**plain, activation="silu" if silu else None), plain)
    if "output_gate" in around:
        out = torch.where(out == 0, out, out * around["output_gate"])  # padding is 0, also of a negative gate
    return [out, *others]


@costly(27, 54)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("gates", GATES, ids="-".join)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "last", "dim", "silu"), [(BF16, True, 24, False), (F16, False, 24, False), (F32, True, 17, True)])
def test_gates_are_multiplications_around_the_call(function, gates, form, dtype, last, dim, silu):
    run = ssmgen.causal_conv1d if function == "reference" else emulated(prompt_op)
    call = make(form, Draw("cpu", dtype, last, dim, width=3), gates)
    want = multiplied(run, call, silu)
    call["out"] = torch.zeros_like(call["x"])
    got = results(run(**call, activation="silu" if silu else None), call)
    assert len(got) == len(want) and all(equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_padding_is_zero_under_any_gate(function):
    run = ssmgen.causal_conv1d if function == "reference" else emulated(prompt_op)
    for form, rows in (("seq_idx", (..., 20)), ("pool", (slice(None), slice(3, 28)))):
        call = make(form, Draw("cpu", BF16, True, width=3), BOTH)
        call["output_gate"][rows] = torch.nan
        call["out"] = torch.zeros_like(call["x"])
        found = results(run(**call), call)[0]
        assert not found[rows].any() and not found.isnan().any()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_prompt_is_its_tokens_one_by_one(function, dtype):
    """LFM2's layer: all three tensors are slices of a projection. Then steps continue from the pool."""
    names = (prompt_op, update_op)
    prompt, update = (ssmgen.causal_conv1d, ssmgen.causal_conv1d_update) if function == "reference" else map(emulated, names)
    draw = Draw("cpu", dtype, True, 40, width=3)
    b, c, x = draw(11, 3 * 40 + 1)[:, 1:].chunk(3, 1)
    pool = draw.states(3)
    steps, slot = pool.clone(memory_format=torch.preserve_format), draw.ints([2])
    outs = [
        update(x[t, None], steps, draw.weights[0], conv_state_indices=slot, input_gate=b[t, None], output_gate=c[t, None])
        for t in range(11)
    ]
    got = prompt(
        x.t(), draw.weights[0], query_start_loc=draw.ints([0, 11]), conv_states=pool, conv_state_indices=slot,
        has_initial_state=torch.tensor([True]), input_gate=b.t(), output_gate=c.t(),
    )  # fmt: skip
    assert equal(got.t(), torch.cat(outs)) and equal(pool, steps)


@needs_emulator
def test_variants_are_bit_equal():
    call = make("pool", Draw("cpu", BF16, True, 136, width=4), BOTH)
    problem = ssmgen.causal_conv1d.build(**kept(call)).problem()[0]
    specs = [s for s in conv.space(problem, SM90) if s.pdl is Pdl.OFF and s.threads == 64]
    found = []
    for spec in specs:
        given = kept(call)
        given["out"] = torch.zeros_like(given["x"])
        found.append(results(emulate(ssmgen.causal_conv1d.build(**given), spec), given))
    assert len(specs) >= 6 and all(equal(a, b) for other in found for a, b in zip(other, found[0], strict=True))


def test_the_last_inputs_of_a_split_sequence_are_products():
    draw = Draw("cpu", BF16, True, width=4)
    x, gate = draw.tokens(2, length=9), draw.tokens(2, length=9)
    given = {"x": x, "weight": draw.weights[0], "input_gate": gate}
    found = context.ends(None, given, None, context.Asked(True, True))
    assert equal(found.N, (x * gate)[..., -3:])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_gate": torch.zeros(3, 24, 20)}, r"input_gate is \[3, 24, 20\]; expected \[3, 24, 21\], the shape of x"),
        ({"output_gate": torch.zeros(3, 24, 21, dtype=F16)}, "output_gate is float16; expected float32, the dtype of x"),
        ({"input_gate": 2.0}, "input_gate"),
    ],
)  # fmt: skip
def test_gates_that_do_not_fit(change, words):
    with pytest.raises(ArgumentError, match=words):
        ssmgen.causal_conv1d(**make("rows", Draw("cpu", F32, True, width=3), ("input_gate",)) | change)


def test_gates_run_channel_last():
    """Also with a contiguous length: kernels take channels with any distances."""
    for last, loads in ((True, Loads.VECTOR), (False, Loads.ELEMENT)):
        call = make("rows", Draw("cpu", BF16, last, width=3), BOTH)
        problem = ssmgen.causal_conv1d.build(**call).problem()[0]
        assert (problem.layout, problem.loads, problem.gates) == (ConvLayout.LAST, loads, BOTH)
    wrong = ConvSpec(layout=ConvLayout.FIRST, width=4, vec=8, output_gate=True)
    assert "output_gate is yes with layout=channel_first, unit=no; expected channel_last and no" in wrong.violations(SM90)
    assert ConvProblem(layout=ConvLayout.LAST, width=4).gates == ()
