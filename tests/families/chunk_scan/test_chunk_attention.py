"""chunk_simple_gla, chunk_lightning_attn: laws on the CPU and in the emulator, checks, and which kernels they get."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import attention_cases as laws
import pytest
import torch
from attention_cases import BF16, F16, F32, FORMS, Sizes, make
from emulated_calls import SM90, needs_emulator
from selection import costly

import ssmgen
from ssmgen import emulator
from ssmgen.compile.render import render
from ssmgen.emulator.check import check
from ssmgen.errors import ArgumentError
from ssmgen.families.chunk_scan.rules import candidates
from ssmgen.families.chunk_scan.spec import WITHOUT_DT, Gate, ScanSpec
from ssmgen.select.models import Wanted, asks, find_model
from ssmgen.spec.kernel import DType, Index, Loads

SMALL = Sizes()


def emulated(name: str) -> laws.Scan:
    return partial(laws.emulated, function=getattr(ssmgen, name))


def runners(name: str) -> list[laws.Scan]:
    return [getattr(ssmgen, name), *([emulated(name)] if emulator.available() else [])]


@costly(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("x", [BF16, F32])
def test_results_are_those_of_a_formula(form, x):
    name, call = make(form, replace(SMALL, x=x), 2, 70)
    for scan in runners(name):
        laws.is_accurate(scan, call)


@needs_emulator
def test_strong_decay_and_a_long_memory():
    for factor in (1e-3, 30.0):
        name, call = make("log", replace(SMALL, x=F16), 1, 130)
        laws.is_accurate(emulated(name), call | {"g": call["g"] * factor})


@pytest.mark.parametrize("form", FORMS)
def test_decoding_goes_on(form):
    for scan in runners(make(form, SMALL)[0]):
        laws.decoding_goes_on(scan, form, SMALL, 66)


@pytest.mark.parametrize("form", ["log", "slope"])
def test_packed_sequences_in_a_pool_and_a_cut_change_no_bit(form):
    name, _ = make(form, SMALL)
    for scan in runners(name):
        laws.packing_and_cuts_change_no_bit(scan, form, SMALL, (3, 70, 0, 64), 64)


@pytest.mark.parametrize("form", ["log", "slope"])
def test_segments_say_how_many_blocks_divide_a_sequence(form):
    name, call = make(form, Sizes(heads=2, headdim=64, d_state=64), 1, 70)
    function = getattr(ssmgen, name)
    for segments, parts in ((None, 8), (1, 1), (3, 3), (1024, 8)):
        chosen = ssmgen.explain(function, **call, segments=segments, arch="sm_90a").chosen
        assert "warpgroups" in str(chosen.spec) and chosen.spec.cluster_blocks == parts
        assert laws.same(function(**call, segments=segments), function(**call))  # of the reference, which has none


SPEC = {"headdim": 16, "d_state": 32, **WITHOUT_DT, "tile": 16, "stages": 2}
SPECS = [
    ScanSpec(**SPEC, gate=Gate.LOG, g=DType.BF16, cu_seqlens=Index.I64, initial=True, final=True),
    ScanSpec(**SPEC, gate=Gate.SLOPE, g=DType.F32, cu_seqlens=Index.I32, pool=True, started=True, index=Index.I32),
    ScanSpec(**SPEC, gate=Gate.CONSTANT, g=DType.F16, x=DType.F32, copy=4, state_loads=Loads.ELEMENT, final=True),
    ScanSpec(**SPEC, gate=Gate.NONE, x=DType.F16, final=True),
]


@needs_emulator
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.gate.value)
def test_check_of_variants(spec):
    assert check(spec, SM90, 4).passed


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.gate.value)
def test_a_kernel_has_what_its_gate_needs(spec):
    text = render(spec, SM90)
    text = text[text.index("using X =") :]
    assert ("raw_g" in text) == (spec.gate is Gate.LOG) and not re.search(r"raw_dt|softplus|\bA_head\b", text)
    assert ("g_head" in text) == (spec.gate is not Gate.NONE) and ("-to_float(load(g" in text) == (spec.gate is Gate.SLOPE)


@pytest.mark.parametrize(
    ("form", "changes", "words"),
    [
        ("log", {"v": torch.zeros(2, 5, 32)}, "v is [2, 5, 32]; expected [batch, T, HV, P]".replace("P", "V")),
        ("log", {"k": torch.zeros(2, 5, 3, 32).bfloat16()}, "v has 2 heads; expected a multiple of the 3"),
        ("log", {"q": torch.zeros(2, 5, 1, 16).bfloat16()}, "q is [2, 5, 1, 16]; expected […, HK, K] = [2, 5, 1, 32]"),
        ("log", {"q": torch.zeros(2, 5, 1, 32)}, "q is float32; expected bfloat16, the dtype of v"),
        ("log", {"g": torch.zeros(2, 2)}, "g is [2, 2]; expected […, HV] = [2, 5, 2]"),
        ("slope", {"slope": torch.zeros(2, 5, 2)}, "slope is [2, 5, 2]; expected [HV]"),
        ("slope", {"state": torch.zeros(2, 2, 32, 16)}, "state is [2, 2, 32, 16]; expected [slots, HV, V, K] = [2, 2, 32, 32]"),
    ],
)
def test_what_is_wrong_in_words(form, changes, words):
    name, call = make(form, SMALL, 2, 5)
    with pytest.raises(ArgumentError) as e:
        getattr(ssmgen, name)(**call | changes)
    assert words in str(e.value)


def test_what_is_written_shares_no_memory():
    name, call = make("log", SMALL, 2, 5)
    with pytest.raises(ArgumentError, match=r"\bv\b"):
        getattr(ssmgen, name)(**call, out=call["v"])


def test_faults_in_words():
    words = " ".join(ScanSpec(**SPEC, gate=Gate.LOG, D=DType.F32).faults() + ScanSpec(**SPEC, gate=Gate.NONE, g=DType.F32, copy=2).faults())
    assert (
        "with dt, A, D, dt_bias, z, dt_softplus or dt_limit; expected gate=dt" in words
        and "; expected g if and only if gate is log, constant or slope" in words
        and "the tokens or heads of q, k, v or out begin at an odd element" in words
    )


def test_what_a_model_asks_for():
    model = find_model("minimax-text-01")
    problems = asks()["chunk_scan"].problems(model, Wanted(indices=(Index.NONE, Index.I32)))
    assert {(p.gate, p.g, p.headdim, p.d_state) for p in problems} == {(Gate.SLOPE, DType.F32, 128, 128)}
    assert {p.pool for p in problems} == {True, False} and not [fault for p in problems for fault in p.faults()]
    for problem in problems:
        assert not next(spec for _, spec, _ in candidates(problem, 1, SM90, True) if spec).violations(SM90)
