"""kda_layer: the same bits as its separate operators; error messages; specs and texts of its kernels.

test_gdn_layer.py tests the parts that both layers share.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_calls import SM90, differing, emulate, emulated_chain, make, needs_emulator
from layer_cases import BF16, F32, I32, KDA, KDA_MATRIX, named, vary
from selection import costly, few
from test_check import edited

import ssmgen
from ssmgen.compile.render import render
from ssmgen.emulator.check import check
from ssmgen.engine.layers.norm import LayerGatedNormSpec
from ssmgen.engine.recurrences.attention.problem import Gate, Layout
from ssmgen.errors import ArgumentError
from ssmgen.families.delta_layer import spec as kernels
from ssmgen.families.delta_layer.spec import DeltaLayerSpec
from ssmgen.select import registry
from ssmgen.select.catalog import SPECS
from ssmgen.select.models import find_model
from ssmgen.spec.kernel import Arch, DType, Loads, changed, parse_spec

# The same bits as the separate operators.


@named(KDA_MATRIX)
def test_a_call_on_cpu_equals_the_separate_operators(case):
    call, chain = make(case), make(case).chain()
    for _ in range(2):
        assert call.run() is call.kwargs["out"]
    chain.chain()
    call.assert_unharmed()
    assert not differing(call, chain)


def test_a_new_output_is_like_the_input():
    want = make(KDA).run().clone()
    got = make(KDA).run(out=None)
    assert got.dtype is BF16 and got.shape == want.shape and torch.equal(got, want)


@needs_emulator
@named(few(KDA_MATRIX))
def test_kernels_equal_those_of_the_separate_operators(case):
    """One kernel, and two. Both follow the rules' choice, except for the kernel that normalises."""
    chain = emulated_chain(case)
    problem, size, _, _ = make(case).built().problem()
    spec = registry.select(kernels.OPERATOR, problem, size, SM90, False)
    whole = [kernels.whole_heads(problem, 64, SM90, False)] if case.norm else []
    for variant in (spec, *whole):
        call = make(case)
        emulate(call.built(), variant)
        call.assert_unharmed()
        assert not differing(call, chain), variant


@costly(1)
@needs_emulator
@named([KDA, *vary(KDA, kv={"layout": "kv"}, tail={"state": F32, "V": 40, "lower_bound": -5.0}, odd={"odd": True})])
def test_variants_are_bit_equal(case):
    chain = emulated_chain(case)
    found = list(kernels.space(make(case).built().problem()[0], SM90))
    chosen = random.Random(0)
    forms = {(s.norm_inside, s.clustered): [] for s in found}
    for spec in found:
        forms[spec.norm_inside, spec.clustered].append(spec)
    for spec in [s for of_form in forms.values() for s in chosen.sample(of_form, min(2, len(of_form)))]:
        call = make(case)
        emulate(call.built(), spec)
        call.assert_unharmed()
        assert not differing(call, chain), spec


# The emulator's check, on operands made from a spec.

BASE = (
    "dim_k=32,dim_v=16,nheads=4,key_heads=4,gk=bf16,beta=bf16,A_log=f32,dt_bias=f32,gate=softplus,beta_form=sigmoid,l2norm=yes,index=i32,"
    "norm=bf16,norm_size=16,norm_grouped=yes,norm_first=yes,norm_activation=sigmoid"
)
HOW = {
    "two": "state=bf16,lanes=4,vec=8,ilp=2,tile=16,threads=32,pdl=trigger_loaded",
    "one": "state=bf16,lanes=4,vec=8,ilp=2,tile=16,threads=32,norm_inside=yes,pdl=trigger_loaded",
    "cluster": "state=bf16,lanes=4,vec=8,ilp=1,tile=8,threads=32,norm_inside=yes,clustered=yes,norm_activation=sigmoid",
    "bounded": "state=f32,gate=bounded,key_heads=2,lanes=8,vec=4,ilp=4,tile=32,threads=64,norm_inside=yes,pdl=trigger_top",
    "bare": "state=f32,gate=bounded,A_log=none,norm=none,norm_size=0,norm_grouped=no,lanes=8,vec=4,ilp=2,tile=8,threads=32,index=none",
    "kv": "state=bf16,layout=kv,lanes=8,vec=4,ilp=8,tile=32,threads=32,norm_inside=yes,conv_len=4",
    "odd": "state=f16,state_loads=element,operand_loads=element,norm_loads=element,lanes=4,vec=8,ilp=2,tile=16,threads=32,out=f32,gk=f32",
}


def spec_of(name: str) -> DeltaLayerSpec:
    fields = dict(item.split("=") for item in f"{BASE},{HOW[name]}".split(","))
    found = parse_spec("delta_layer:" + ",".join("=".join(item) for item in fields.items()), SPECS)
    assert isinstance(found, DeltaLayerSpec)
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
        ("one", "gk_head + offset", "gk_head"),
        ("two", "token.query[p][j] * token.decay[p][j]", "token.query[p][j]"),
        ("bounded", "lower_bound * sigmoid", "sigmoid"),
        ("kv", "* weight[i] * gate[i]", "* weight[i]"),
    ],
)
def test_check_finds_what_is_wrong(name, old, new, monkeypatch):
    def changed(spec, arch):
        return render(spec, arch) if isinstance(spec, LayerGatedNormSpec) else edited(old, new)(spec, arch)

    monkeypatch.setattr("ssmgen.emulator.render", changed)
    assert not check(spec_of(name), SM90).passed


# Errors of a call.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"g": torch.zeros(5, 4, 31)}, "g is [5, 4, 31]; expected [batch, heads * K] = [5, 128] or [batch, heads, K] = [5, 4, 32]"),
        ({"g": None}, "g is a NoneType; expected a tensor"),
        ({"beta": torch.zeros(5, 4, 32)}, "beta is [5, 4, 32]; expected [batch, heads] = [5, 4]"),
        ({"dt_bias": torch.zeros(4)}, "dt_bias is [4]; expected [heads * K] = [128] or [heads, K] = [4, 32]"),
        ({"A_log": None}, "A_log and lower_bound are None; expected one of them"),
        ({"A_log": torch.zeros(4, 32)}, "A_log is [4, 32]; expected [heads] = [4]"),
        ({"lower_bound": "-5"}, "lower_bound is '-5'; expected a number"),
        ({"lower_bound": float("nan")}, "lower_bound is nan; expected a number"),
        ({"z": None}, "norm_weight is given without z"),
        ({"arrivals": torch.zeros(19, 2, dtype=I32)}, "arrivals is [19, 2]; expected [slots, groups] = [19, 4]"),
        ({"mixed_qkv": torch.zeros(5, 321, dtype=BF16)}, "mixed_qkv is [5, 321]; expected"),
    ],
)
def test_what_is_wrong_in_words(change, words):
    call = make(KDA)
    with pytest.raises(ArgumentError) as e:
        call.run(**change)
    assert any(words in problem for problem in e.value.problems), e.value.problems
    assert not differing(call, make(KDA))


@named([KDA, *vary(KDA, bounded={"lower_bound": -5.0}, bare={"norm": None, "bias": False})])
def test_supported_and_explained(case):
    kwargs = make(case).kwargs
    assert ssmgen.supported(ssmgen.kda_layer, **kwargs, arch="sm_90a") == (True, [])
    told = ssmgen.explain(ssmgen.kda_layer, **kwargs, arch="sm_90a")
    assert told.operator == "delta_layer" and told.chosen.spec.function == "kda_layer"


def test_problems_say_where_operands_lie():
    def posed(**changes: Any) -> Any:
        return make(replace(KDA, **changes)).built().problem()[0]

    aligned = posed()
    assert {aligned.operand_loads, aligned.conv.loads, aligned.norm.loads} == {Loads.VECTOR} and aligned.gate is Gate.SOFTPLUS
    assert posed(odd=True).operand_loads is Loads.ELEMENT
    assert posed(lower_bound=-5.0).gate is Gate.BOUNDED and posed(lower_bound=-5.0, bare_gate=True).A_log is None
    assert posed(headed=True, flat=True, batch=1) == aligned


# Registration.


@costly(1)
@named([KDA, *vary(KDA, bare={"norm": None, "bias": False, "conv_bias": None}, bounded={"lower_bound": -5.0, "bare_gate": True})])
def test_opcheck(case):
    call = make(case).built()
    torch.library.opcheck(torch.ops.ssmgen.delta_layer.default, ("kda_layer", *call.given, *call.options, None))


def test_compiled_whole():
    want, call = make(KDA).run(), make(KDA)
    got = torch.compile(lambda: call.run(out=None).float() * 2, fullgraph=True, backend="aot_eager")()
    assert torch.equal(got, want.float() * 2)


# Specs.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gk": None}, "the decay is not a layer's; expected g with A_log and gate=softplus, or gk"),
        ({"g": DType.BF16}, "the decay is not a layer's"),
        ({"gate": Gate.LOG, "A_log": None, "dt_bias": None}, "a layer's gate is raw"),
        ({"A_log": None}, "gate is softplus and A_log is none; expected A_log"),
        ({"beta_rows": True}, "the delta rule is not a layer's"),
    ],
)
def test_violations_in_words(change, words):
    spec = spec_of("two")
    assert not spec.violations(SM90)
    found = changed(spec, **change).violations(SM90)
    assert any(words in problem for problem in found), found


@pytest.mark.parametrize("name", HOW)
def test_layout_of_the_text(name):
    spec = spec_of(name)
    text = render(spec, SM90)
    assert text.startswith("// delta_layer for sm_90a") and parse_spec(str(spec), SPECS) == spec and spec.stem.startswith("kda_layer_h4")
    assert ("lower_bound" in [p.name for p in spec.parameters()]) == (spec.gate is Gate.BOUNDED)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("state", [DType.F32, DType.BF16])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_rules_choose_legal_variants(arch, state, layout):
    arch = Arch.parse(arch)
    problem = find_model("kimi-linear-48b-a3b").layers((state,), layout=layout)[0]
    for batch in (1, 2, 9, 64, 3000):
        spec = registry.select(kernels.OPERATOR, problem, batch, arch, arch.number >= 90)
        heads = batch * problem.nheads
        few = heads <= kernels.CLUSTERS[problem.interleaved, state.size][-1][0] and arch.number >= 90
        inside = few or (layout is Layout.VK and heads >= kernels.FEW_HEADS)
        assert isinstance(spec, DeltaLayerSpec) and not spec.violations(arch) and spec.norm_inside == inside
