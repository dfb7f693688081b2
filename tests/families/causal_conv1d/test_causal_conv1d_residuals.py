"""Both convolutions with residuals: the bits of additions after the call. Sequences that begin in a step: the bits of cleared slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conv_laws import SM90, Draw, activated, emulated, equal, needs_emulator
from emulated_calls import emulate
from selection import costly
from test_causal_conv1d_gates import BF16, F16, F32, FORMS, FUNCTIONS
from test_causal_conv1d_gates import make as steps_of
from test_causal_conv1d_prompt_gates import FORMS as PROMPTS
from test_causal_conv1d_prompt_gates import kept
from test_causal_conv1d_prompt_gates import make as prompts_of

import ssmgen
from ssmgen.errors import ArgumentError
from ssmgen.families.causal_conv1d import call as prompt_op
from ssmgen.families.causal_conv1d import spec as conv
from ssmgen.families.causal_conv1d.spec import ConvLayout, ConvSpec
from ssmgen.families.causal_conv1d_update import call as update_op
from ssmgen.families.causal_conv1d_update import spec as step
from ssmgen.families.causal_conv1d_update.spec import Advance, UpdateSpec
from ssmgen.spec.kernel import Index, Pdl

ONE, TWO = ("residual",), ("residual", "outer_residual")
ALL = ("input_gate", "output_gate", *TWO)
WRITTEN = ("conv_state", "conv_states", "intermediate_conv_window")
beside = pytest.mark.parametrize("names", [ONE, TWO, ("output_gate", "residual"), ALL], ids="-".join)
dtypes = pytest.mark.parametrize(("dtype", "last", "dim"), [(BF16, True, 24), (F16, False, 24), (F32, True, 17)])
SHIFTING = [form for form in FORMS if "position" not in FORMS[form]]


def of(function: str) -> tuple[Any, Any]:
    """(causal_conv1d, causal_conv1d_update)"""
    if function == "reference":
        return ssmgen.causal_conv1d, ssmgen.causal_conv1d_update
    return emulated(prompt_op), emulated(update_op)


def outcome(function: Any, call: dict[str, Any], **more: Any) -> list[torch.Tensor]:
    """The output, 0 for tokens without one, final states and all that the call writes. The call's tensors stay as they are."""
    given = kept(call) | {"out": torch.zeros_like(call["x"])} | more
    found = function(**given, activation="silu")
    return [*(found if isinstance(found, tuple) else [found]), *(given[name] for name in WRITTEN if name in given)]


def separately(function: Any, call: dict[str, Any]) -> list[torch.Tensor]:
    """The same, of a call with its gates and residuals as operations before and after it."""
    plain = {n: t for n, t in call.items() if n not in ALL}
    if "input_gate" in call:
        plain["x"] = call["x"] * call["input_gate"]
    first, *others = outcome(function, plain)
    out = first * call["output_gate"] if "output_gate" in call else first
    for name in TWO:
        out = out + call[name] if name in call else out
    of_channels = first.shape.index(len(call["weight"]))
    padding = (first == 0).all(of_channels, keepdim=True)  # a token; single channels may be 0 by chance
    return [torch.where(padding, first, out), *others]  # padding is 0, with any residual


def alike(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return len(got) == len(want) and all(equal(a, b) for a, b in zip(got, want, strict=True))


@costly(12, 24)
@pytest.mark.parametrize("function", FUNCTIONS)
@beside
@pytest.mark.parametrize("form", PROMPTS)
@dtypes
def test_residuals_of_prompts_are_sums_after_the_call(function, names, form, dtype, last, dim):
    call = prompts_of(form, Draw("cpu", dtype, last, dim, width=3), names)
    assert alike(outcome(of(function)[0], call), separately(of(function)[0], call))


@costly(12, 24)
@pytest.mark.parametrize("function", FUNCTIONS)
@beside
@pytest.mark.parametrize("form", FORMS)
@dtypes
def test_residuals_of_steps_are_sums_after_the_call(function, names, form, dtype, last, dim):
    call = steps_of(FORMS[form], Draw("cpu", dtype, last, dim, width=3), names)
    assert alike(outcome(of(function)[1], call), separately(of(function)[1], call))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_float64(function, dtype):
    """A prompt of Qwen4-Exp's layer and a step after it: each sum rounds once, and the convolution within its bound."""
    run, update = of(function)
    draw = Draw("cpu", dtype, True, 24, width=4)
    x, first, second = (draw.tokens(2, length=21) for _ in range(3))
    weight = draw.weights[0]
    out, state = run(
        x[..., :20].contiguous(), weight, activation="silu", dilation=3, return_final_states=True, residual=first[..., :20],
        outer_residual=second[..., :20],
    )  # fmt: skip
    last = update(x[..., 20], state, weight, activation="silu", dilation=3, residual=first[..., 20], outer_residual=second[..., 20])
    got = torch.cat([out, last[..., None]], -1).double()
    padded, taps = torch.nn.functional.pad(x.double(), (9, 0)), weight.double()[:, None]
    total = torch.nn.functional.conv1d(padded, taps, groups=24, dilation=3)
    size = torch.nn.functional.conv1d(padded.abs(), taps.abs(), groups=24, dilation=3)
    want, bound = activated(total, size, 4, True, dtype)
    eps = torch.finfo(dtype).eps
    for residual in (first, second):
        want = want + residual.double()
        bound = bound + eps / 2 * (want.abs() + bound)
    assert ((got - want).abs() <= bound).all()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", TWO)
def test_a_residual_may_be_the_output(function, name):
    for call, run in (
        (prompts_of("pool", Draw("cpu", BF16, True, width=3), TWO), of(function)[0]),
        (steps_of(FORMS["packed"], Draw("cpu", BF16, True, width=3), TWO), of(function)[1]),
        (steps_of(FORMS["many"], Draw("cpu", F32, False, width=3), TWO), of(function)[1]),
    ):  # fmt: skip
        before, again = call[name].clone(), kept(call)
        want, *others = outcome(run, call)
        found = run(**again | {"out": again[name]}, activation="silu")
        assert found is again[name]
        rows = want != 0
        assert equal(found[rows], want[rows]) and ((found == before) | (found == 0) | rows).all()
        assert alike([again[n] for n in WRITTEN if n in again], others)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_padding_is_zero_under_any_residual(function):
    for form, rows in (("seq_idx", (..., 20)), ("pool", (slice(None), slice(3, 28)))):
        call = prompts_of(form, Draw("cpu", BF16, True, width=3), TWO)
        call["residual"][rows] = torch.nan
        found = outcome(of(function)[0], call)[0]
        assert not found[rows].any() and not found.isnan().any()
    call = steps_of(FORMS["some"], Draw("cpu", BF16, True, width=3), ONE)
    call["residual"][1] = torch.nan
    assert not outcome(of(function)[1], call)[0][1].any()


@costly(6, 12)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("form", SHIFTING)
@dtypes
def test_a_sequence_that_begins_reads_no_entry(function, tree, form, dtype, last, dim):
    """The slots of new sequences hold NaN, and results have the bits of zeros there."""
    _, update = of(function)
    draw = Draw("cpu", dtype, last, dim, width=3)
    call = steps_of(FORMS[form], draw, ())
    tokens = FORMS[form]["tokens"]
    if tree and tokens > 1:
        call["parents"] = draw.ints([[0, 0, 1, 0][:tokens] + [-1] * (tokens - 4)] * 3)
    call["conv_state_indices"] = draw.ints([3, 1, 0])
    cleared = kept(call)
    call["conv_state"][1], cleared["conv_state"][1] = torch.nan, 0
    call["has_initial_state"] = torch.tensor([True, False, True])
    assert alike(outcome(update, call), outcome(update, cleared))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_sequence_that_begins_in_packed_tokens(function):
    """One without tokens keeps its entries."""
    draw = Draw("cpu", BF16, True, width=4)
    call = {"x": draw(5, 24), "conv_state": draw.states(4), "weight": draw.weights[0], "query_start_loc": draw.ints([0, 3, 3, 5])}
    call["conv_state_indices"] = draw.ints([2, 0, 1])
    cleared = kept(call)
    call["conv_state"][2], cleared["conv_state"][2] = torch.nan, 0
    call["has_initial_state"] = torch.tensor([False, False, True])
    assert alike(outcome(of(function)[1], call), outcome(of(function)[1], cleared))


@needs_emulator
def test_variants_are_bit_equal():
    draw = Draw("cpu", BF16, True, 136, width=4)
    prompt, one = prompts_of("pool", draw, TWO), steps_of(FORMS["one"], draw, TWO)
    one["has_initial_state"] = torch.tensor([True, True, False])
    for function, call, family in ((ssmgen.causal_conv1d, prompt, conv), (ssmgen.causal_conv1d_update, one, step)):
        problem = function.build(**kept(call)).problem()[0]
        specs = [s for s in family.space(problem, SM90) if s.pdl is Pdl.OFF and s.threads == 64]
        found = []
        for spec in specs:
            given = kept(call) | {"out": torch.zeros_like(call["x"])}
            out = emulate(function.build(**given), spec)
            found.append([out, *(given[name] for name in WRITTEN if name in given)])
        assert len(specs) >= 2 and all(alike(other, found[0]) for other in found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"residual": torch.zeros(3, 23)}, r"residual is \[3, 23\]; expected \[3, 24\], the shape of x"),
        ({"residual": torch.zeros(3, 24, dtype=F16)}, "residual is float16; expected float32, the dtype of x"),
        ({"residual": None, "outer_residual": torch.zeros(3, 24)}, "outer_residual is given without residual"),
        ({"has_initial_state": torch.zeros(2, dtype=torch.bool)}, "has_initial_state is"),
        ({"has_initial_state": torch.zeros(3)}, "has_initial_state"),
    ],
)  # fmt: skip
def test_what_does_not_fit(change, words):
    call = steps_of(FORMS["one"], Draw("cpu", F32, True, width=3), ONE) | change
    with pytest.raises(ArgumentError, match=words):
        ssmgen.causal_conv1d_update(**call)
    if "has_initial_state" not in change:
        prompt = {n: t.mT[None] if isinstance(t, torch.Tensor) and n in ("x", *TWO) else t for n, t in call.items()}
        prompt = {n: prompt.get(n) for n in ("x", "weight", *TWO)}
        with pytest.raises(ArgumentError, match="residual"):
            ssmgen.causal_conv1d(**prompt)


def test_what_no_kernel_serves():
    draw = Draw("cpu", F32, True, width=3)
    tree = steps_of(FORMS["some"], draw, ONE) | {"parents": torch.zeros(3, 3, dtype=torch.int32)}
    with pytest.raises(ArgumentError, match="residual is given with a draft tree; expected None"):
        ssmgen.causal_conv1d_update(**tree)
    rolling = steps_of(FORMS["rolling"], draw, ()) | {"has_initial_state": torch.ones(3, dtype=torch.bool)}
    with pytest.raises(ArgumentError, match="has_initial_state is given with num_accepted_tokens; expected one of them"):
        ssmgen.causal_conv1d_update(**rolling)
    wrong = UpdateSpec(width=4, state_len=3, vec=4, tokens=2, parents=Index.I32, residual=True)
    assert "residual is yes with a draft tree; expected no" in wrong.violations(SM90)
    wrong = UpdateSpec(width=4, vec=4, advance=Advance.ROLL, position=Index.I32, state_len=3, started=True, outer_residual=True)
    said = "; ".join(wrong.violations(SM90))
    assert "started is yes with advance=roll; expected shift" in said and "outer_residual is yes without residual" in said
    first = ConvSpec(layout=ConvLayout.FIRST, width=4, vec=8, residual=True)
    assert "residual is yes with layout=channel_first, unit=no; expected channel_last and no" in first.violations(SM90)
