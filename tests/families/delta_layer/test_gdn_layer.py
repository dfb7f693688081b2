"""gdn_layer: the same bits as its separate operators; error messages; specs and texts of its kernels."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_calls import SM90, differing, emulate, emulated_chain, make, needs_emulator
from layer_cases import BF16, F32, GDN, GDN_HEADS, GDN_MATRIX, I32, I64, Gdn, named, vary
from selection import costly, few
from test_check import edited

import ssmgen
from ssmgen.compile.render import render, uses_pdl
from ssmgen.emulator import EmulatorError
from ssmgen.emulator.check import check
from ssmgen.engine.layers.norm import LayerGatedNormSpec
from ssmgen.engine.norm import LayerNorm
from ssmgen.engine.recurrences.attention.problem import Beta, Delta, Gate, Layout, Tokens
from ssmgen.engine.rows import axes
from ssmgen.errors import ArgumentError
from ssmgen.families.delta_layer import spec as kernels
from ssmgen.families.delta_layer.problem import DeltaLayerProblem
from ssmgen.families.delta_layer.spec import DeltaLayerSpec
from ssmgen.select import registry
from ssmgen.select.catalog import SPECS
from ssmgen.spec.kernel import Arch, DType, Index, Loads, Pdl, PoolMode, changed, parse_spec

# The same bits as the separate operators.


@named(GDN_MATRIX)
def test_a_call_on_cpu_equals_the_separate_operators(case):
    call, chain = make(case), make(case).chain()
    for _ in range(2):
        assert call.run() is call.kwargs["out"]
    chain.chain()
    call.assert_unharmed()
    assert not differing(call, chain)


def test_a_new_output_is_like_the_input():
    call = make(replace(GDN, x=F32))
    want = call.run().clone()
    fresh = make(replace(GDN, x=F32))
    got = fresh.run(out=None)
    assert got.dtype is F32 and got.shape == want.shape and torch.equal(got, want)


@needs_emulator
@named(few([*GDN_MATRIX, *GDN_HEADS]))
def test_kernels_equal_those_of_the_separate_operators(case):
    """One kernel, and two. Both follow the rules' choice, except for the kernel that normalises."""
    chain = emulated_chain(case)
    problem, size, _, _ = make(case).built().problem()
    spec = registry.select(kernels.OPERATOR, problem, size, SM90, False)
    whole = [kernels.whole_heads(problem, threads, SM90, False) for threads in (64, 128) if case.norm]
    assert not any(variant.violations(SM90) for variant in whole)
    for variant in (spec, *whole):
        call = make(case)
        emulate(call.built(), variant)
        call.assert_unharmed()
        assert not differing(call, chain), variant


@needs_emulator
@pytest.mark.parametrize("inside", [False, True], ids=["two-kernels", "one-kernel"])
def test_the_next_step_finds_what_this_one_left(inside):
    chain = emulated_chain(GDN)
    chain.chain(lambda function, kwargs: emulate(function.build(**kwargs)))
    call = make(GDN)
    spec = registry.select(kernels.OPERATOR, call.built().problem()[0], GDN.batch, SM90, False)
    for _ in range(2):
        emulate(call.built(), kernels.whole_heads(spec, 64, SM90, False) if inside else spec)
    call.assert_unharmed()
    assert not differing(call, chain)


VARIED = [GDN, *vary(GDN, kv={"layout": "kv"}, f32={"state": F32}, v40={"V": 40, "window": "any", "extra": 1}, odd={"odd": True})]


@costly(1)
@needs_emulator
@named(VARIED)
def test_variants_are_bit_equal(case):
    chain = emulated_chain(case)
    found = list(kernels.space(make(case).built().problem()[0], SM90))
    chosen = random.Random(0)
    forms = {(s.norm_inside, s.clustered): [] for s in found}
    for spec in found:
        forms[spec.norm_inside, spec.clustered].append(spec)
    for spec in [s for of_form in forms.values() for s in chosen.sample(of_form, min(3, len(of_form)))]:
        call = make(case)
        emulate(call.built(), spec)
        call.assert_unharmed()
        assert not differing(call, chain), spec


def test_the_space_has_both_forms():
    problem = make(GDN).built().problem()[0]
    found = list(kernels.space(problem, SM90))
    assert {(s.norm_inside, s.clustered) for s in found} == {(False, False), (True, False), (True, True)}
    assert all((s.tiles > 1) == s.clustered and s.cluster_blocks == s.tiles for s in found if s.norm_inside)
    assert len(found) == len(set(found)) < 3 * len(list(axes()))
    assert not any(s.norm_inside for s in kernels.space(changed(problem, norm=None, norm_size=0, norm_grouped=False), SM90))


# The emulator's check, on operands made from a spec.

BASE = (
    "dim_k=32,dim_v=16,nheads=4,key_heads=2,g=bf16,beta=bf16,A_log=f32,dt_bias=f32,gate=softplus,beta_form=sigmoid,l2norm=yes,index=i32,"
    "norm=bf16,norm_size=16,norm_grouped=yes,norm_first=yes"
)
HOW = {
    "two": "state=bf16,lanes=4,vec=8,ilp=2,tile=16,threads=32,pdl=trigger_loaded",
    "one": "state=bf16,lanes=4,vec=8,ilp=2,tile=16,threads=32,norm_inside=yes,pdl=trigger_loaded",
    "cluster": "state=bf16,lanes=4,vec=8,ilp=1,tile=8,threads=32,norm_inside=yes,clustered=yes,pdl=trigger_loaded",
    "quarters": "state=f32,lanes=8,vec=4,ilp=1,tile=4,threads=32,norm_inside=yes,clustered=yes,norm_first=no,norm_activation=sigmoid",
    "tail": "state=f32,lanes=8,vec=4,ilp=4,tile=32,threads=64,norm_inside=yes,pdl=trigger_top",
    "tiles": "state=f32,lanes=8,vec=4,ilp=1,tile=4,threads=32,conv_layout=channels,conv_len=4,conv_bias=f32",
    "kv": "state=bf16,layout=kv,lanes=8,vec=4,ilp=8,tile=32,threads=32,norm_inside=yes,norm_activation=sigmoid",
    "kv-two": "state=f32,layout=kv,lanes=8,vec=4,ilp=4,tile=16,threads=32,conv_layout=any,conv_loads=element,conv_taps=element",
    "odd": "state=f16,state_loads=element,norm_loads=element,lanes=4,vec=8,ilp=2,tile=16,threads=32,norm_inside=yes,out=f32,norm=f32",
    "bare": "state=f32,norm=none,norm_size=0,norm_grouped=no,dt_bias=none,lanes=8,vec=4,ilp=2,tile=8,threads=32,index=none",
    "twice": "state=bf16,beta_form=twice_sigmoid,l2norm=no,norm_first=no,lanes=2,vec=8,ilp=1,tile=16,threads=32,conv_width=2,conv_len=1",
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
        ("one", "* weight[i] * gate[i]", "* weight[i]"),
        ("one", "1.f / kDimV, eps", "1.1f / kDimV, eps"),
        ("two", "arrived == kReaders - 1;", "false;"),
        ("two", "(kKeyHeads - 1) * kDimK", "kKeyHeads * kDimK"),
        ("kv-two", "2 * kKeyHeads * kDimK + head", "2 * kKeyHeads * kDimK + 0 * head"),
        ("tiles", "(kDimK + n) / 4", "n / 4"),
        ("bare", "silu(sum[c])", "sum[c]"),
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


# Errors of a call.


def problems(case: Gdn = GDN, **changes: Any) -> list[str]:
    call = make(case)
    with pytest.raises(ArgumentError) as e:
        call.run(**changes)
    assert not differing(call, make(case))
    return e.value.problems


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mixed_qkv": None}, "mixed_qkv is a NoneType; expected a tensor"),
        ({"state": torch.zeros(19, 4, 16)}, "state is [19, 4, 16] and mixed_qkv [5, 192]; expected [slots, heads, V, K] and [batch"),
        ({"mixed_qkv": torch.zeros(5, 191, dtype=BF16)}, "mixed_qkv is [5, 191]; expected"),
        ({"mixed_qkv": torch.zeros(5, 256, dtype=BF16)}, "of q and of k for each key head"),
        ({"mixed_qkv": torch.zeros(5, 192)}, "conv_state is torch.bfloat16; expected torch.float32, the dtype of mixed_qkv"),
        ({"a": torch.zeros(5, 3)}, "a is [5, 3]; expected [batch, heads] = [5, 4]"),
        ({"b": torch.zeros(5, 4, dtype=torch.float64)}, "b is torch.float64; expected float32, float16 or bfloat16"),
        ({"z": torch.zeros(5, 16)}, "z is [5, 16]; expected [batch, heads * V] = [5, 64] or [batch, heads, V] = [5, 4, 16]"),
        ({"z": torch.zeros(5, 128)[:, ::2]}, "z has strides [128, 2]; expected a last stride of 1"),
        ({"z": None}, "norm_weight is given without z"),
        ({"norm_weight": None}, "z is given without norm_weight"),
        ({"norm_weight": torch.zeros(64)}, "norm_weight is [64]; expected [V] = [16]"),
        ({"A_log": torch.zeros(1)}, "A_log is [1]; expected [heads] = [4]"),
        ({"conv_weight": torch.zeros(192)}, "conv_weight is [192]; expected [channels, width]"),
        ({"conv_state": torch.zeros(19, 190, 3, dtype=BF16)}, "conv_state is [19, 190, 3]; expected [slots, channels, width - 1 or width]"),
        ({"arrivals": torch.zeros(19, 4, dtype=I32)}, "arrivals is [19, 4]; expected [slots, groups] = [19, 2]"),
        ({"arrivals": torch.zeros(19, 2, dtype=I64)}, "arrivals is int64; expected int32"),
        ({"state_indices": torch.zeros(5)}, "state_indices is torch.float32; expected int32 or int64"),
        ({"state_indices": None, "state": torch.zeros(4, 4, 16, 32), "conv_state": torch.zeros(4, 192, 3, dtype=BF16),
          "arrivals": torch.zeros(4, 2, dtype=I32)}, "state has 4 slots; expected 5, one per sequence of the batch"),
        ({"state": torch.zeros(19, 4, 32, 16).mT}, "state has strides [2048, 512, 1, 16]; expected dense last three axes, [512, 32, 1]"),
        ({"out": torch.zeros(1, 64).expand(5, 64)}, "two of its elements share memory"),
        ({"out": torch.zeros(5, 64, device="meta")}, "out is on meta, state is on cpu"),
        ({"state_layout": "kk"}, "state_layout is 'kk'; expected 'vk' or 'kv'"),
        ({"norm_eps": 0}, "norm_eps is 0; expected a positive number"),
        ({"norm_activation": "gelu"}, "norm_activation is 'gelu'; expected 'silu', 'swish' or 'sigmoid'"),
        ({"norm_before_gate": "no"}, "norm_before_gate is 'no'; expected True or False"),
        ({"scale": "1"}, "scale is '1'; expected a number"),
        ({"use_qk_l2norm": None}, "use_qk_l2norm is None; expected True or False"),
        ({"pdl": 1.5}, "pdl is 1.5; expected True, False or None"),
        ({"mixed_qkv": torch.zeros(5, 192, requires_grad=True)}, "mixed_qkv requires grad"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_words(change, words):
    found = problems(**change)
    assert any(words in problem for problem in found), found


def test_all_that_is_wrong_at_once():
    found = problems(a=torch.zeros(9), A_log=torch.zeros(9), conv_bias=torch.zeros(9), norm_eps=-1, norm_activation="relu", pdl="yes")
    assert len(found) >= 6, found


def test_what_overlaps_in_memory():
    call = make(GDN)
    assert any("out overlaps z in memory" in p for p in problems_of(call, out=call.kwargs["z"]))
    assert any("state overlaps" in p for p in problems_of(call, z=call.kwargs["state"].view(-1)[:320].view(5, 64)))


def problems_of(call: Any, **changes: Any) -> list[str]:
    with pytest.raises(ArgumentError) as e:
        call.run(**changes)
    return e.value.problems


@named([GDN, *vary(GDN, kv={"layout": "kv", "x": F32}, bare={"norm": None, "bias": False})])
def test_supported_and_explained(case):
    kwargs = make(case).kwargs
    assert ssmgen.supported(ssmgen.gdn_layer, **kwargs, arch="sm_90a") == (True, [])
    told = ssmgen.explain(ssmgen.gdn_layer, **kwargs, arch="sm_90a")
    assert told.operator == "delta_layer" and told.chosen.spec.function == "gdn_layer"
    good, why = ssmgen.supported(ssmgen.gdn_layer, **kwargs | {"norm_eps": None}, arch="sm_90a")
    assert not good and why == ["norm_eps is None; expected a positive number in the range of float32 or int64"]


def test_heads_that_no_kernel_serves_are_refused():
    call = make(replace(GDN, V=18))
    good, why = ssmgen.supported(ssmgen.gdn_layer, **call.kwargs, arch="sm_90a")
    assert not good and any("; expected multiples of" in reason for reason in why), why


def test_problems_say_where_operands_lie():
    def posed(**changes: Any) -> DeltaLayerProblem:
        return make(replace(GDN, **changes)).built().problem()[0]

    aligned, odd, gap = posed(), posed(odd=True, window="any"), posed(slot_gap=1)
    assert {aligned.conv.loads, aligned.conv.taps, aligned.norm.loads, aligned.state_loads} == {Loads.VECTOR}
    assert {odd.conv.loads, odd.conv.taps, odd.norm.loads} == {Loads.ELEMENT} and odd.state_loads is Loads.VECTOR
    assert gap.state_loads is Loads.ELEMENT
    assert posed(layout="kv").layout is Layout.KV and posed(twice=True).beta_form is Beta.TWICE_SIGMOID
    assert posed(headed=True) == aligned and posed(batch=1) == aligned


# Registration.


@costly(1)
@named([GDN, *vary(GDN, bare={"norm": None, "bias": False, "conv_bias": None}, kv={"layout": "kv", "index": None, "batch": 3})])
def test_opcheck(case):
    call = make(case).built()
    torch.library.opcheck(torch.ops.ssmgen.delta_layer.default, ("gdn_layer", *call.given, *call.options, None))


def test_compiled_whole():
    want, call = make(GDN).run(), make(GDN)
    got = torch.compile(lambda: call.run(out=None).float() * 2, fullgraph=True, backend="aot_eager")()
    assert torch.equal(got, want.float() * 2)


# Specs.

ONE, TWO, BARE = spec_of("one"), spec_of("two"), spec_of("bare")


@pytest.mark.parametrize(
    ("spec", "change", "words"),
    [
        (ONE, {"tile": 8, "ilp": 1}, "tile is 8 with norm_inside=yes; expected dim_v 16, a whole head, or clustered=yes"),
        (BARE, {"norm_inside": True}, "norm_inside is yes and norm is none; expected a norm"),
        (ONE, {"norm_inside": True, "clustered": True}, "a head has 1 blocks; expected 2 …"),
        (TWO, {"clustered": True}, "clustered is yes and norm_inside is no; expected both or neither"),
        (
            ONE,
            {"dim_v": 264, "norm_size": 264, "tile": 272},
            "rows; expected at most 128, or at most 256 in steps of 8",
        ),
        (
            ONE,
            {"dim_v": 132, "norm_size": 132, "tile": 144},
            "rows; expected at most 128, or at most 256 in steps of 8",
        ),
        (TWO, {"norm_threads": 48}, "threads is 48; expected 32"),
        (TWO, {"norm_size": 32}, "norm_size is 32; expected dim_v"),
        (TWO, {"conv_width": 1}, "conv_width is 1; expected 2"),
        (TWO, {"conv_len": 5}, "conv_state holds 5 inputs per channel"),
        (TWO, {"dim_v": 18}, "a group has 64 channels and a head 18; expected multiples of"),
        (TWO, {"lanes": 16, "vec": 2, "ilp": 1, "tile": 2}, "vec is 2; expected 4 or more, the chain of the canonical sum"),
        (BARE, {"lanes": 32, "vec": 4, "ilp": 1, "dim_k": 128, "tile": 1}, "tile is 1; expected a multiple of the 4 channels"),
        (TWO, {"q": DType.F16}, "; expected one dtype: they are one tensor"),
        (TWO, {"beta": None, "beta_form": Beta.PLAIN}, "the delta rule is not a layer's"),
        (TWO, {"delta": Delta.OLD}, "the delta rule is not a layer's"),
        (TWO, {"gate": Gate.LOG, "A_log": None, "dt_bias": None}, "a layer's gate is raw"),
        (TWO, {"gk": DType.BF16}, "the decay is not a layer's"),
        (TWO, {"beta_form": Beta.PLAIN}, "a layer's beta is a logit"),
        (TWO, {"tokens": Tokens.MANY}, "conv_tokens is 0 in a call of"),
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
    assert text.startswith("// delta_layer for sm_90a") and parse_spec(str(spec), SPECS) == spec
    parameters = re.search(rf"{spec.name}\((.*?)\) \{{", text, re.S)[1]
    assert [p.split()[-1].lstrip("*") for p in parameters.split(",")] == [p.name for p in spec.parameters()]
    assert not any(line != line.rstrip() or "\t" in line or "{%" in line for line in text.splitlines())
    assert ("squares" in text) == spec.norm_inside and len(spec.kernels) == (1 if spec.norm_inside or spec.norm.weight is None else 2)


@pytest.mark.parametrize("pdl", Pdl)
@pytest.mark.parametrize("name", ["one", "two", "kv"])
def test_wait_precedes_every_access(name, pdl):
    text = render(replace(spec_of(name), pdl=pdl), SM90)
    body = text[text.index('extern "C"') :]
    assert uses_pdl(text) == (pdl is not Pdl.OFF) and "__restrict__" not in body and "__ldg" not in body
    if pdl is not Pdl.OFF:
        wait = body.index("wait_for_upstream();")
        assert all(m.start() > wait for m in re.finditer(r"\b(load|store)\w*[(<]", body))


QWEN = DeltaLayerProblem(
    dim_k=128, dim_v=128, nheads=32, key_heads=16, g=DType.BF16, beta=DType.BF16, A_log=DType.F32, dt_bias=DType.F32, gate=Gate.SOFTPLUS,
    beta_form=Beta.SIGMOID, l2norm=True, index=Index.I32,
    norm=LayerNorm(weight=DType.BF16, size=128, grouped=True, first=True),
)  # fmt: skip


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("state", [DType.F32, DType.BF16])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_rules_choose_legal_variants(arch, state, layout):
    """Heads that keep the card busy are whole, and norm themselves."""
    arch = Arch.parse(arch)
    problem = replace(QWEN, state=state, layout=layout)
    for batch in (1, 3, 8, 9, 64, 300, 3000):
        spec = registry.select(kernels.OPERATOR, problem, batch, arch, arch.number >= 90)
        heads = batch * problem.nheads
        most = kernels.CLUSTERS[problem.interleaved, state.size][-1][0]
        assert not spec.violations(arch) and spec.clustered == (heads <= most and arch.number >= 90)
        assert spec.norm_inside == (spec.clustered or (layout is Layout.VK and heads >= kernels.FEW_HEADS))
        assert spec.cluster_blocks == (spec.tiles if spec.clustered else 1)
        assert spec.norm_inside or spec.kernels[1].pdl is (Pdl.OFF if spec.pdl is Pdl.OFF else Pdl.TRIGGER_LOADED)
