"""chunk_simple_gla and chunk_lightning_attn on a card: the laws of their results at the sizes of models."""

from __future__ import annotations

from dataclasses import replace

import attention_cases as laws
import pytest
import torch
from attention_cases import BF16, F16, F32, FORMS, Sizes, make

import ssmgen

pytestmark = pytest.mark.gpu

MODEL = Sizes(heads=16, groups=16, headdim=128, d_state=128, device="cuda")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("x", [BF16, F16, F32])
def test_results_are_those_of_a_formula(form, x):
    name, call = make(form, replace(MODEL, x=x), 2, 330)
    laws.is_accurate(getattr(ssmgen, name), call)


@pytest.mark.parametrize("form", FORMS)
def test_decoding_goes_on(form):
    laws.decoding_goes_on(getattr(ssmgen, make(form, MODEL)[0]), form, replace(MODEL, groups=4), 300)


@pytest.mark.parametrize("form", FORMS)
def test_packed_sequences_in_a_pool_and_a_cut_change_no_bit(form):
    laws.packing_and_cuts_change_no_bit(getattr(ssmgen, make(form, MODEL)[0]), form, MODEL, (3, 500, 0, 64, 130), 128)


@pytest.mark.parametrize("form", ["log", "slope"])
def test_in_a_graph(form):
    name, call = make(form, MODEL, 2, 300)
    scan, call = getattr(ssmgen, name), call | {"out": torch.empty_like(call["v"])}
    wanted = scan(**call).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scan(**call)
    call["out"].zero_()
    graph.replay()
    assert laws.same(call["out"], wanted)
