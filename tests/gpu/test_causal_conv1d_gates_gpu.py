"""Both convolutions with gates and residuals on a card: the bits of the plain kernel and of separate multiplications and additions."""

from __future__ import annotations

import pytest
import torch
from conv_laws import Draw, equal
from test_causal_conv1d_gates import FORMS, GATES, gates_are_multiplications, make
from test_causal_conv1d_prompt_gates import BOTH, kept, multiplied, results
from test_causal_conv1d_prompt_gates import FORMS as PROMPTS
from test_causal_conv1d_prompt_gates import make as prompts_of
from test_causal_conv1d_residuals import ALL, ONE, SHIFTING, TWO, alike, outcome, separately

import ssmgen

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("gates", GATES, ids="-".join)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "last", "dim"), [(torch.bfloat16, True, 1024), (torch.float16, False, 24), (torch.float32, True, 17)])
def test_gates_are_multiplications_around_the_call(gates, form, dtype, last, dim):
    call = make(FORMS[form], Draw("cuda", dtype, last, dim, width=3), gates)
    gates_are_multiplications(ssmgen.causal_conv1d_update, call, gates)


@pytest.mark.parametrize("gates", GATES, ids="-".join)
@pytest.mark.parametrize("form", PROMPTS)
@pytest.mark.parametrize(("dtype", "last", "dim"), [(torch.bfloat16, True, 1024), (torch.float16, False, 24), (torch.float32, True, 17)])
def test_gates_of_prompts(gates, form, dtype, last, dim):
    call = prompts_of(form, Draw("cuda", dtype, last, dim, width=3), gates)
    want = multiplied(ssmgen.causal_conv1d, call, False)
    call["out"] = torch.zeros_like(call["x"])
    got = results(ssmgen.causal_conv1d(**call), call)
    assert len(got) == len(want) and all(equal(a, b) for a, b in zip(got, want, strict=True))


on_a_card = pytest.mark.parametrize(
    ("dtype", "last", "dim"), [(torch.bfloat16, True, 1024), (torch.float16, False, 24), (torch.float32, True, 17)]
)


@pytest.mark.parametrize("names", [ONE, TWO, ALL], ids="-".join)
@pytest.mark.parametrize("form", FORMS)
@on_a_card
def test_residuals_of_steps(names, form, dtype, last, dim):
    call = make(FORMS[form], Draw("cuda", dtype, last, dim, width=3), names)
    assert alike(outcome(ssmgen.causal_conv1d_update, call), separately(ssmgen.causal_conv1d_update, call))


@pytest.mark.parametrize("names", [ONE, TWO, ALL], ids="-".join)
@pytest.mark.parametrize("form", PROMPTS)
@on_a_card
def test_residuals_of_prompts(names, form, dtype, last, dim):
    call = prompts_of(form, Draw("cuda", dtype, last, dim, width=3), names)
    assert alike(outcome(ssmgen.causal_conv1d, call), separately(ssmgen.causal_conv1d, call))


@pytest.mark.parametrize("form", SHIFTING)
@on_a_card
def test_a_sequence_that_begins_reads_no_entry(form, dtype, last, dim):
    draw = Draw("cuda", dtype, last, dim, width=3)
    call = make(FORMS[form], draw, ()) | {"conv_state_indices": draw.ints([3, 1, 0])}
    cleared = kept(call)
    call["conv_state"][1], cleared["conv_state"][1] = torch.nan, 0
    call["has_initial_state"] = draw.ints([1, 0, 1], torch.bool)
    assert alike(outcome(ssmgen.causal_conv1d_update, call), outcome(ssmgen.causal_conv1d_update, cleared))


def test_a_graph_with_gates_of_prompts():
    call = prompts_of("pool", Draw("cuda", torch.bfloat16, True, 2048, width=3), BOTH)
    call["out"] = torch.zeros_like(call["x"])
    before = kept(call)
    want = [t.clone() for t in results(ssmgen.causal_conv1d(**call), call)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ssmgen.causal_conv1d(**call)
    for name in ("conv_states", "out"):
        call[name].copy_(before[name])
    graph.replay()
    torch.cuda.synchronize()
    assert all(equal(a, b) for a, b in zip(results(call["out"], call), want, strict=True))


def test_a_graph_with_gates():
    draw = Draw("cuda", torch.bfloat16, True, 2048, width=3)
    call = make(FORMS["one"], draw, ("input_gate", "output_gate"))
    out = torch.empty_like(call["x"])
    before = call["conv_state"].clone(memory_format=torch.preserve_format)
    ssmgen.causal_conv1d_update(**call, out=out)
    want, kept = out.clone(), call["conv_state"].clone(memory_format=torch.preserve_format)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ssmgen.causal_conv1d_update(**call, out=out)
    call["conv_state"].copy_(before)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert equal(out, want) and equal(call["conv_state"], kept)
