"""mamba2_layer: the same bits as its separate operators; error messages; specs and texts of its kernels."""

from __future__ import annotations

import random
import re
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from layer_calls import SM90, differing, emulate, emulated_chain, make, needs_emulator
from layer_cases import BF16, F32, I32, I64, MAMBA, MAMBA_MATRIX, named, vary
from selection import costly, few
from test_check import edited

import ssmgen
from ssmgen.compile.render import render, uses_pdl
from ssmgen.emulator import EmulatorError
from ssmgen.emulator.check import check
from ssmgen.engine.layers.norm import LayerGatedNormSpec
from ssmgen.engine.norm import LayerNorm
from ssmgen.engine.rows import axes
from ssmgen.errors import ArgumentError
from ssmgen.families.mamba2_layer import spec as kernels
from ssmgen.families.mamba2_layer.spec import Mamba2LayerProblem, Mamba2LayerSpec
from ssmgen.select import registry
from ssmgen.select.catalog import SPECS
from ssmgen.spec.kernel import Arch, DType, Index, Loads, Pdl, PoolMode, changed, parse_spec

# The same bits as the separate operators.


@named(MAMBA_MATRIX)
def test_a_call_on_cpu_equals_the_separate_operators(case):
    call, chain = make(case), make(case).chain()
    for _ in range(2):
        assert call.run() is call.kwargs["out"]
    chain.chain()
    call.assert_unharmed()
    assert not differing(call, chain)


def test_a_new_output_is_like_the_input():
    call = make(replace(MAMBA, x=F32))
    want = call.run().clone()
    got = make(replace(MAMBA, x=F32)).run(out=None)
    assert got.dtype is F32 and got.shape == want.shape and torch.equal(got, want)


@needs_emulator
@named(few(MAMBA_MATRIX))
def test_kernels_equal_those_of_the_separate_operators(case):
    chain, call = emulated_chain(case), make(case)
    emulate(call.built())
    call.assert_unharmed()
    assert not differing(call, chain)


@needs_emulator
def test_the_next_step_finds_what_this_one_left():
    chain, call = emulated_chain(MAMBA), make(MAMBA)
    chain.chain(lambda function, kwargs: emulate(function.build(**kwargs)))
    for _ in range(2):
        emulate(call.built())
    call.assert_unharmed()
    assert not differing(call, chain)


@costly(1)
@needs_emulator
@named([MAMBA, *vary(MAMBA, f32={"state": F32}, p40={"P": 40, "window": "any", "extra": 1}, odd={"odd": True}, noise={"philox": 7})])
def test_variants_are_bit_equal(case):
    chain = emulated_chain(case)
    found = list(kernels.space(make(case).built().problem()[0], SM90))
    for spec in random.Random(0).sample(found, 8):
        call = make(case)
        emulate(call.built(), spec)
        call.assert_unharmed()
        assert not differing(call, chain), spec


def test_no_legal_variant_is_left_out():
    """The list checks row loops before their launch options. It must equal the list of separate checks."""
    problem = make(MAMBA).built().problem()[0]
    more = {"prefetch": 264, "windows_ahead": True}
    every = [how | wider for how in axes(ahead=132) for wider in ([{}, more] if how["prefetch"] else [{}])]
    given = {f.name: getattr(problem, f.name) for f in fields(Mamba2LayerProblem)}
    legal = [spec for spec in (Mamba2LayerSpec(**given, **how) for how in every) if not spec.violations(SM90)]
    assert list(kernels.space(problem, SM90)) == legal and len(legal) > 100


@needs_emulator
def test_windows_asked_for_ahead_change_no_bit():
    chain = emulated_chain(MAMBA)
    problem = make(MAMBA).built().problem()[0]
    found = [s for s in kernels.space(problem, SM90) if s.prefetch]
    for spec in random.Random(1).sample(found, 4):
        call, ahead = make(MAMBA), replace(spec, prefetch=5, windows_ahead=True)
        assert not ahead.violations(SM90)
        emulate(call.built(), ahead)
        call.assert_unharmed()
        assert not differing(call, chain), spec


def test_windows_are_asked_for_ahead_beside_tiles():
    spec = replace(spec_of("ahead"), prefetch=0)
    assert "windows_ahead is yes; expected prefetch, one token and conv_layout=runs with it" in spec.violations(SM90)


# The emulator's check, on operands made from a spec.

BASE = "d_state=32,headdim=16,nheads=4,ngroups=2,D=f32,dt_bias=f32,index=i32,norm=bf16,norm_size=64"
HOW = {
    "two": "state=bf16,lanes=4,vec=8,ilp=2,tile=16,threads=32,pdl=trigger_loaded",
    "ahead": "state=bf16,lanes=4,vec=8,ilp=1,tile=8,threads=32,prefetch=3,windows_ahead=yes,pdl=trigger_loaded",
    "tail": "state=f32,lanes=8,vec=4,ilp=4,tile=32,threads=64,pdl=trigger_top,norm_size=32,norm_grouped=yes",
    "tiles": "state=f32,lanes=8,vec=4,ilp=1,tile=4,threads=32,conv_layout=channels,conv_len=4,conv_bias=f32",
    "any": "state=f32,lanes=8,vec=4,ilp=4,tile=16,threads=32,conv_layout=any,conv_loads=element,conv_taps=element",
    "odd": "state=f16,state_loads=element,norm_loads=element,lanes=4,vec=8,ilp=2,tile=16,threads=32,out=f32,norm=f32",
    "gated": "state=f32,norm=none,norm_size=0,z=bf16,lanes=8,vec=4,ilp=2,tile=8,threads=32,index=none",
    "bare": "state=bf16,norm=none,norm_size=0,D=none,dt_bias=none,lanes=2,vec=8,ilp=1,tile=16,threads=32,conv_width=2,conv_len=1",
    "across": "state=f32,lanes=8,vec=4,ilp=2,tile=8,threads=32,headdim=24,norm_size=32,norm_grouped=yes",
    "log": "state=f32,lanes=8,vec=4,ilp=2,tile=8,threads=32,A_is_log=yes",
    "limit": "state=bf16,lanes=4,vec=8,ilp=1,tile=8,threads=32,dt_limit=yes,norm_first=yes,norm_activation=silu",
}


def spec_of(name: str) -> Mamba2LayerSpec:
    fields = dict(item.split("=") for item in f"{BASE},{HOW[name]}".split(","))
    found = parse_spec("mamba2_layer:" + ",".join("=".join(item) for item in fields.items()), SPECS)
    assert isinstance(found, Mamba2LayerSpec)
    return found


@needs_emulator
@pytest.mark.parametrize("name", HOW)
def test_check_of_variants(name):
    for batch in (1, 4):
        assert check(spec_of(name), SM90, batch).passed


@needs_emulator
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("two", "arrived == kReaders - 1;", "false;"),
        ("two", "(kGroups - 1) * kDState", "kGroups * kDState"),
        ("tiles", "(kDState + n) / 4", "n / 4"),
        ("gated", "silu(sum[c])", "sum[c]"),
        ("tail", "arrivals + slot * arrivals_slot + group, 0)", "arrivals + slot * arrivals_slot + group, 1)"),
    ],
)
def test_check_finds_what_is_wrong(name, old, new, monkeypatch):
    """Edits of the first kernel. The emulator itself finds races and missing writes."""

    def changed(spec, arch):
        return render(spec, arch) if isinstance(spec, LayerGatedNormSpec) else edited(old, new)(spec, arch)

    monkeypatch.setattr("ssmgen.emulator.render", changed)
    try:
        assert not check(spec_of(name), SM90).passed
    except EmulatorError as e:
        assert "conv_" in str(e)


@needs_emulator
def test_check_finds_a_norm_that_forgets_the_padding(monkeypatch):
    """Nothing is written of a padded row, whose gate is NaN."""
    call, chain = make(MAMBA), emulated_chain(MAMBA)

    def changed(spec, arch):
        return (
            edited("const bool live =", "const bool live = true ||")(spec, arch)
            if isinstance(spec, LayerGatedNormSpec)
            else render(spec, arch)
        )

    monkeypatch.setattr("ssmgen.emulator.render", changed)
    emulate(call.built())
    assert differing(call, chain) == ["out"]


# Errors of a call.


def problems(**changes: Any) -> list[str]:
    call = make(MAMBA)
    with pytest.raises(ArgumentError) as e:
        call.run(**changes)
    assert not differing(call, make(MAMBA))
    return e.value.problems


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"xBC": None}, "xBC is a NoneType; expected a tensor"),
        ({"state": torch.zeros(19, 4, 16)}, "state is [19, 4, 16] and xBC [5, 192]; expected [slots, heads, headdim, d_state]"),
        ({"xBC": torch.zeros(5, 191, dtype=BF16)}, "xBC is [5, 191]; expected 64 channels of x"),
        ({"xBC": torch.zeros(5, 192)}, "conv_state is torch.bfloat16; expected torch.float32, the dtype of xBC"),
        ({"dt": torch.zeros(5, 3)}, "dt is [5, 3]; expected [batch, heads] = [5, 4]"),
        ({"z": torch.zeros(5, 16)}, "z is [5, 16]; expected [batch, heads * headdim] = [5, 64]"),
        ({"z": torch.zeros(5, 128)[:, ::2]}, "z has strides [128, 2]; expected a last stride of 1"),
        ({"z": None}, "norm_weight is given without z"),
        ({"norm_weight": torch.zeros(16)}, "norm_weight is [16]; expected [heads * headdim] = [64] or [norm_group_size] = [64]"),
        ({"norm_group_size": 24}, "norm_group_size is 24; expected a divisor of the 64 channels"),
        ({"norm_group_size": 16.0}, "norm_group_size is 16.0; expected a positive integer or None"),
        ({"norm_eps": "1e-5"}, "norm_eps is '1e-5'; expected a number of 0 or more"),
        ({"A_is_log": "yes"}, "A_is_log is 'yes'; expected True or False"),
        ({"dt_limit": (1.0, 0.0)}, "dt_limit is (1.0, 0.0); expected a tuple (low, high)"),
        ({"A": torch.zeros(4, 16)}, "A is [4, 16]; expected [heads] = [4]"),
        ({"D": torch.zeros(16)}, "D is [16]; expected [heads] = [4] or [heads, headdim] = [4, 16]"),
        ({"conv_state": torch.zeros(19, 190, 3, dtype=BF16)}, "conv_state is [19, 190, 3]; expected [slots, channels, width - 1 or width]"),
        ({"arrivals": torch.zeros(19, 4, dtype=I32)}, "arrivals is [19, 4]; expected [slots, groups] = [19, 2]"),
        ({"arrivals": torch.zeros(19, 2, dtype=I64)}, "arrivals is int64; expected int32"),
        ({"arrivals": torch.zeros(19, 4, dtype=I32)[:, ::2]}, "; expected a last stride of 1"),
        ({"state": torch.zeros(19, 4, 32, 16).mT}, "state has strides [2048, 512, 1, 16]; expected dense last three axes, [512, 32, 1]"),
        ({"out": torch.zeros(1, 64).expand(5, 64)}, "two of its elements share memory"),
        ({"out": torch.zeros(5, 64, device="meta")}, "out is on meta, state is on cpu"),
        ({"pdl": 1.5}, "pdl is 1.5; expected True, False or None"),
        ({"xBC": torch.zeros(5, 192, requires_grad=True)}, "xBC requires grad"),
    ],
)
def test_what_is_wrong_in_words(change, words):
    found = problems(**change)
    assert any(words in problem for problem in found), found


def test_all_that_is_wrong_at_once():
    found = problems(dt=torch.zeros(9), A=torch.zeros(9), conv_bias=torch.zeros(9), D=torch.zeros(9), pdl="yes")
    assert len(found) >= 5, found


@named([MAMBA, *vary(MAMBA, f32={"state": F32, "x": F32}, gated={"norm": None})])
def test_supported_and_explained(case):
    kwargs = make(case).kwargs
    assert ssmgen.supported(ssmgen.mamba2_layer, **kwargs, arch="sm_90a") == (True, [])
    told = ssmgen.explain(ssmgen.mamba2_layer, **kwargs, arch="sm_90a")
    assert told.operator == "mamba2_layer" and told.chosen and "mamba2_layer:" in str(told)


def test_problems_say_where_operands_lie():
    def posed(**changes: Any) -> Mamba2LayerProblem:
        return make(replace(MAMBA, **changes)).built().problem()[0]

    aligned, odd, gap = posed(), posed(odd=True, window="any"), posed(slot_gap=1)
    assert {aligned.conv.loads, aligned.conv.taps, aligned.norm.loads, aligned.state_loads} == {Loads.VECTOR}
    assert {odd.conv.loads, odd.conv.taps, odd.norm.loads} == {Loads.ELEMENT} and odd.state_loads is Loads.VECTOR
    assert gap.state_loads is Loads.ELEMENT and posed(batch=1) == aligned


# Registration.


@costly(1)
@named([MAMBA, *vary(MAMBA, gated={"norm": None, "conv_bias": None, "D": "none"}, noise={"philox": 7})])
def test_opcheck(case):
    call = make(case).built()
    torch.library.opcheck(
        torch.ops.ssmgen.mamba2_layer.default, (*call.given, *[list(v) if isinstance(v, tuple) else v for v in call.options], None)
    )


def test_compiled_whole():
    want, call = make(MAMBA).run(), make(MAMBA)
    got = torch.compile(lambda: call.run(out=None).float() * 2, fullgraph=True, backend="aot_eager")()
    assert torch.equal(got, want.float() * 2)


# Specs.

TWO, BARE = spec_of("two"), spec_of("bare")


@pytest.mark.parametrize(
    ("spec", "change", "words"),
    [
        (TWO, {"norm_threads": 48}, "threads is 48; expected 32"),
        (TWO, {"norm_size": 24}, "norm_size is 24; expected a divisor of the"),
        (TWO, {"conv_width": 1}, "conv_width is 1; expected 2"),
        (TWO, {"conv_len": 5}, "conv_state holds 5 inputs per channel"),
        (TWO, {"headdim": 18}, "a group has 64 channels and a head 18; expected multiples of"),
        (BARE, {"lanes": 32, "vec": 4, "ilp": 1, "d_state": 128, "tile": 1}, "tile is 1; expected a multiple of the 4 channels"),
        (TWO, {"x": DType.F16}, "; expected one dtype: they are one tensor"),
        (TWO, {"z": DType.F16}, "z is set with a norm, which has its own gate; expected one of them"),
        (TWO, {"tied": False}, "tied is no; expected yes: a layer has one A, dt and dt_bias per head"),
        (TWO, {"pool": PoolMode.SPLIT}, "; expected pool=single, or update=each with a slot per token"),
    ],
)
def test_violations_in_words(spec, change, words):
    assert not spec.violations(SM90)
    found = changed(spec, **change).violations(SM90)
    assert any(words in problem for problem in found), found


@pytest.mark.parametrize("name", HOW)
def test_layout_of_the_text(name):
    spec = spec_of(name)
    text = render(spec, SM90)
    assert text.startswith("// mamba2_layer for sm_90a") and parse_spec(str(spec), SPECS) == spec
    parameters = re.search(rf"{spec.name}\((.*?)\) \{{", text, re.S)[1]
    assert [p.split()[-1].lstrip("*") for p in parameters.split(",")] == [p.name for p in spec.parameters()]
    assert not any(line != line.rstrip() or "\t" in line or "{%" in line for line in text.splitlines())
    assert len(spec.kernels) == (1 if spec.norm.weight is None else 2)


@pytest.mark.parametrize("pdl", Pdl)
@pytest.mark.parametrize("name", ["two", "gated"])
def test_wait_precedes_every_access(name, pdl):
    text = render(replace(spec_of(name), pdl=pdl), SM90)
    body = text[text.index('extern "C"') :]
    assert uses_pdl(text) == (pdl is not Pdl.OFF) and "__restrict__" not in body and "__ldg" not in body
    if pdl is not Pdl.OFF:
        wait = body.index("wait_for_upstream();")
        assert all(m.start() > wait for m in re.finditer(r"\b(load|store)\w*[(<]", body))


@pytest.mark.parametrize("pdl", [p for p in Pdl if p is not Pdl.OFF])
def test_the_norm_touches_its_input_after_the_wait(pdl):
    norm = replace(TWO, pdl=pdl).kernels[1]
    text = render(norm, SM90)
    body = text[text.index('extern "C"') :]
    before, behind = body.split("wait_for_upstream();")
    assert "raw_x" not in before and "raw_x" in behind and {"z", "norm_weight", "state_indices"} == set(norm.early_operands())
    assert "raw_gate" in before and "state_indices" in before and "allow_dependents();" in behind and "allow_dependents" not in before


NEMOTRON = Mamba2LayerProblem(
    d_state=128, headdim=64, nheads=128, ngroups=8, D=DType.F32, dt_bias=DType.F32, index=Index.I32,
    norm=LayerNorm(weight=DType.BF16, size=1024, grouped=True),
)  # fmt: skip


@pytest.mark.parametrize("state", [DType.F32, DType.BF16])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_rules_choose_legal_variants(arch, state):
    arch = Arch.parse(arch)
    for batch in (1, 3, 8, 64, 300, 3000):
        spec = registry.select(kernels.OPERATOR, replace(NEMOTRON, state=state), batch, arch, arch.number >= 90)
        assert not spec.violations(arch) and len(spec.kernels) == 2
