"""Convolutions whose taps are apart: the bits of a wider weight with zeros between its taps, and torch's convolution in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conv_laws import SM90, Draw, emulated, equal, needs_emulator
from emulated_calls import emulate
from selection import costly
from test_causal_conv1d_gates import BF16, F16, F32, FORMS, FUNCTIONS
from test_causal_conv1d_gates import make as steps_of
from test_causal_conv1d_prompt_gates import FORMS as PROMPTS
from test_causal_conv1d_prompt_gates import kept, results
from test_causal_conv1d_prompt_gates import make as prompts_of

import ssmgen
from ssmgen.errors import ArgumentError
from ssmgen.families.causal_conv1d import call as prompt_op
from ssmgen.families.causal_conv1d import context
from ssmgen.families.causal_conv1d import spec as conv
from ssmgen.families.causal_conv1d.spec import ConvLayout, ConvSpec
from ssmgen.families.causal_conv1d_update import call as update_op
from ssmgen.families.causal_conv1d_update import spec as step
from ssmgen.families.causal_conv1d_update.spec import UpdateSpec
from ssmgen.spec.kernel import Index, Pdl

WIDTH, DILATION, REACH = 3, 3, 7
BOTH = ("input_gate", "output_gate")
gated = pytest.mark.parametrize("gates", [(), BOTH], ids=["plain", "gated"])
dtypes = pytest.mark.parametrize(("dtype", "last", "dim"), [(BF16, True, 24), (F16, False, 24), (F32, True, 17)])


def apart(weight: torch.Tensor) -> torch.Tensor:
    """Every third tap of [dim, 7], with zeros between them."""
    wide = torch.zeros_like(weight)
    wide[:, ::DILATION] = weight[:, ::DILATION]
    return wide


def both(call: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the call with taps apart, the call with a wider weight), of a call whose windows span 7 inputs."""
    wide = kept(call) | {"weight": apart(call["weight"])}
    return call | {"weight": call["weight"][:, ::DILATION].contiguous(), "dilation": DILATION}, wide


def steps_are_alike(update: Any, form: str, draw: Draw, gates: tuple[str, ...]) -> None:
    """Steps with taps apart have the bits of steps with a wider weight."""
    how = FORMS[form] | {"entries": FORMS[form]["entries"] + 4} if "entries" in FORMS[form] else FORMS[form]
    call, wide = both(steps_of(how, draw, gates))
    assert equal(update(**call, activation="silu"), update(**wide, activation="silu"))
    for name in ("conv_state", "intermediate_conv_window"):
        assert name not in call or equal(call[name], wide[name])


def prompts_are_alike(run: Any, form: str, draw: Draw, gates: tuple[str, ...]) -> None:
    """The same of prompts."""
    call, wide = both(prompts_of(form, draw, gates))
    for given in (call, wide):
        given["out"] = torch.zeros_like(given["x"])
    got, want = (results(run(**given, activation="silu"), given) for given in (call, wide))
    assert len(got) == len(want) and all(equal(a, b) for a, b in zip(got, want, strict=True))


@costly(18, 36)
@pytest.mark.parametrize("function", FUNCTIONS)
@gated
@pytest.mark.parametrize("form", FORMS)
@dtypes
def test_steps_have_the_bits_of_a_wider_weight(function, gates, form, dtype, last, dim):
    update = ssmgen.causal_conv1d_update if function == "reference" else emulated(update_op)
    steps_are_alike(update, form, Draw("cpu", dtype, last, dim, width=REACH), gates)


@costly(18, 36)
@pytest.mark.parametrize("function", FUNCTIONS)
@gated
@pytest.mark.parametrize("form", PROMPTS)
@dtypes
def test_prompts_have_the_bits_of_a_wider_weight(function, gates, form, dtype, last, dim):
    run = ssmgen.causal_conv1d if function == "reference" else emulated(prompt_op)
    prompts_are_alike(run, form, Draw("cpu", dtype, last, dim, width=REACH), gates)


@costly(3)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("width", "dilation"), [(4, 3), (2, 16), (8, 2)])
def test_torch_s_convolution_in_float64(function, width, dilation):
    """A prompt, then steps that continue from its state."""
    run, update = (ssmgen.causal_conv1d, ssmgen.causal_conv1d_update)
    if function != "reference":
        run, update = emulated(prompt_op), emulated(update_op)
    history = (width - 1) * dilation
    draw = Draw("cpu", F32, True, 24, width=width)
    x, weight = draw.tokens(2, length=45), draw.weights[0]
    out, state = run(x[..., :40].contiguous(), weight, dilation=dilation, return_final_states=True)
    assert state.shape == (2, 24, history)
    steps = [update(x[..., t], state, weight, dilation=dilation) for t in range(40, 45)]
    padded = torch.nn.functional.pad(x.double(), (history, 0))
    want = torch.nn.functional.conv1d(padded, weight.double()[:, None], groups=24, dilation=dilation)
    got = torch.cat([out, torch.stack(steps, -1)], -1).double()
    size = torch.nn.functional.conv1d(padded.abs(), weight.double().abs()[:, None], groups=24, dilation=dilation)
    assert ((got - want).abs() <= (width + 2) * 2.0**-24 * size).all()
    assert equal(state, x[..., -history:] if history <= 45 else padded[..., -history:].float())


@needs_emulator
def test_variants_are_bit_equal():
    call, _ = both(prompts_of("pool", Draw("cpu", BF16, True, 136, width=REACH), ()))
    problem = ssmgen.causal_conv1d.build(**kept(call)).problem()[0]
    found = []
    specs = [s for s in conv.space(problem, SM90) if s.pdl is Pdl.OFF and s.threads == 64]
    for spec in specs:
        given = kept(call)
        given["out"] = torch.zeros_like(given["x"])
        found.append(results(emulate(ssmgen.causal_conv1d.build(**given), spec), given))
    given = kept(call)
    given["out"] = torch.zeros_like(given["x"])
    found.append(results(emulate(ssmgen.causal_conv1d.build(**given)), given))
    assert len(specs) >= 4 and all(equal(a, b) for other in found for a, b in zip(other, found[0], strict=True))


def test_the_last_inputs_of_a_split_sequence():
    draw = Draw("cpu", BF16, True, width=WIDTH)
    given = {"x": draw.tokens(2, length=9), "weight": draw.weights[0], "dilation": DILATION}
    assert equal(context.ends(None, given, None, context.Asked(True, True)).N, given["x"][..., -6:])
    assert context.blank(given)[0].shape == (1, 24, 6)


def test_what_does_not_fit():
    draw = Draw("cpu", F32, True, width=4)
    x, state, weight = draw.tokens(3, length=3), draw.states(3, 9), draw.weights[0]
    for change, words in (
        ({"dilation": 0}, "dilation is 0"), ({"dilation": 6}, "a window of 19 inputs; expected at most 17"),
        ({"dilation": 4}, r"of state_len 9; expected \(width - 1\) dilation = 12 or more"),
        ({"dilation": 3, "parents": draw.ints([[0, 0, 0]] * 3)}, "dilation is 3 with a draft tree; expected 1"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=words):
            ssmgen.causal_conv1d_update(x, state, weight, **change)
    with pytest.raises(ArgumentError, match=r"\[slots, dim, \(width - 1\) dilation\] = \[slots, 24, 9\]"):
        ssmgen.causal_conv1d(x, weight, conv_states=draw.states(3, 3), dilation=3)
    wrong = ConvSpec(layout=ConvLayout.FIRST, width=4, vec=8, dilation=2)
    assert "dilation is 2 with layout=channel_first, unit=no; expected channel_last and no" in wrong.violations(SM90)
    assert any("a window of at most 17" in v for v in ConvSpec(layout=ConvLayout.LAST, width=4, vec=4, dilation=6).violations(SM90))
    tree = UpdateSpec(width=4, state_len=9, vec=4, tokens=2, parents=Index.I32, dilation=3)
    assert "dilation is 3 with a draft tree; expected 1" in tree.violations(SM90)
    assert step.UpdateProblem(width=4).reach == 4
