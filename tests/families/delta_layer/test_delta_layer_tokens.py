"""gdn_layer and kda_layer of several tokens: the same bits as their separate operators; errors of a call; specs."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_calls import SM90, differing, emulate, emulated_chain, make, needs_emulator
from layer_cases import BF16, F32, GDN, GDN_TOKENS, I32, I64, KDA, KDA_TOKENS, named
from selection import costly, few
from test_check import edited

import ssmgen
from ssmgen.compile.render import render, uses_pdl
from ssmgen.emulator import EmulatorError
from ssmgen.emulator.check import check
from ssmgen.engine.layers.norm import LayerGatedNormSpec
from ssmgen.engine.recurrences.attention.problem import Tokens, Update
from ssmgen.errors import ArgumentError
from ssmgen.families.delta_layer.spec import DeltaLayerSpec, space
from ssmgen.select.catalog import SPECS
from ssmgen.spec.kernel import DType, Index, Loads, Pdl, PoolMode, changed, parse_spec

CASES = [*GDN_TOKENS, *KDA_TOKENS]

# The same bits as the separate operators.


@named(CASES)
def test_a_call_on_cpu_equals_the_separate_operators(case):
    call, chain = make(case), make(case).chain()
    for _ in range(2 if case.accepted is None else 1):
        assert call.run() is call.kwargs["out"]
    if case.accepted is None:
        chain.chain()
    call.assert_unharmed()
    assert not differing(call, chain)


@needs_emulator
@named(few(CASES))
def test_kernels_equal_those_of_the_separate_operators(case):
    chain, call = emulated_chain(case), make(case)
    emulate(call.built())
    call.assert_unharmed()
    assert not differing(call, chain)


@costly(1)
@needs_emulator
@named(
    [
        replace(GDN, id="t3", tokens=3, norm=None, batch=3),
        replace(GDN, id="t2-v40", tokens=2, V=40, window="any", norm=None, batch=3, state=F32, update=False, kept=F32, saved="any"),
        replace(GDN, id="t3-kv", tokens=3, norm=None, batch=3, layout="kv", kept=BF16),
        replace(KDA, id="t4-accepted", tokens=4, accepted=I32, norm=None, batch=3, kept=BF16, saved="runs"),
        replace(KDA, id="t3-odd", tokens=3, norm=None, batch=3, odd=True, V=20),
    ]
)
def test_variants_are_bit_equal(case):
    chain = emulated_chain(case)
    problem = make(case).built().problem()[0]
    found = list(space(problem, SM90))
    for spec in random.Random(0).sample(found, 5):
        call = make(case)
        emulate(call.built(), spec)
        call.assert_unharmed()
        assert not differing(call, chain), spec


@needs_emulator
@named([GDN, KDA])
def test_tokens_one_by_one(case):
    """One call of several tokens equals consecutive calls of one token, for f32 states: out, state and window."""
    case = replace(case, state=F32, tokens=3)
    call, steps = make(case), make(case)
    emulate(call.built())
    for t in range(3):
        one = {n: steps.kwargs[n][:, t] for n in ("mixed_qkv", "a", "b", "g", "beta", "z", "out") if n in steps.kwargs}
        emulate(steps.function.build(**steps.kwargs | one))
    call.assert_unharmed()
    assert not differing(call, steps)


@needs_emulator
def test_the_next_steps_find_what_this_one_left():
    """Windows roll: which tokens were accepted changes from step to step."""
    case = replace(GDN, tokens=3, accepted=I32, batch=1)
    chain, call = make(case), make(case)
    for accepted in (1, 3, 2):
        for one in (chain, call):
            one.kwargs["num_accepted_tokens"].fill_(accepted)
            one.kwargs["dst_state_indices"].copy_(one.kwargs["state_indices"])
        emulate(call.built())
        chain.chain(lambda function, kwargs: emulate(function.build(**kwargs)))
        assert not differing(call, chain)
    assert call.kwargs["out"].isfinite().all() and not call.kwargs["arrivals"].any()


# The emulator's check, on operands made from a spec.

BASE = (
    "dim_k=32,dim_v=16,nheads=4,key_heads=2,beta=bf16,A_log=f32,dt_bias=f32,beta_form=sigmoid,l2norm=yes,index=i32,tokens=many,"
    "norm=bf16,norm_size=16,norm_grouped=yes,norm_first=yes"
)
GDN_HOW, KDA_HOW = "g=bf16,gate=softplus", "gk=bf16,gate=softplus,norm_activation=sigmoid"
HOW = {
    "final": f"{GDN_HOW},conv_tokens=3,chunk=3,state=bf16,lanes=4,vec=8,ilp=2,tile=16,threads=32,pdl=trigger_loaded",
    "tail": f"{GDN_HOW},conv_tokens=2,chunk=2,state=f32,lanes=8,vec=4,ilp=4,tile=32,threads=64,pdl=trigger_top",
    "tiles": f"{GDN_HOW},conv_tokens=2,chunk=2,state=f32,lanes=8,vec=4,ilp=1,tile=4,threads=32,conv_layout=channels,conv_len=4,"
    "conv_bias=f32",
    "kept": f"{GDN_HOW},conv_tokens=3,chunk=3,state=bf16,lanes=4,vec=8,ilp=2,tile=16,threads=32,intermediates=yes,conv_windows=runs,"
    "update=none",
    "rows": f"{GDN_HOW},conv_tokens=8,chunk=8,state=f32,lanes=8,vec=4,ilp=2,tile=8,threads=32,intermediates=yes,intermediate_indices=i32,"
    "conv_windows=any,conv_rows=i32,update=none,state_loads=element",
    "accepted": f"{GDN_HOW},conv_tokens=3,chunk=3,state=bf16,lanes=4,vec=8,ilp=1,tile=8,threads=32,accepted=i32,update=each,pool=split,"
    "conv_len=5",
    "kda": f"{KDA_HOW},conv_tokens=3,chunk=3,state=bf16,lanes=4,vec=8,ilp=2,tile=16,threads=32,pdl=trigger_loaded",
    "kda-bounded": f"{KDA_HOW},gate=bounded,A_log=none,conv_tokens=5,chunk=5,state=f32,lanes=8,vec=4,ilp=2,tile=8,threads=32,norm=none,"
    "norm_size=0,norm_grouped=no,index=none",
    "kda-kv": f"{KDA_HOW},conv_tokens=2,chunk=2,state=bf16,layout=kv,lanes=8,vec=4,ilp=8,tile=32,threads=32,conv_windows=runs,"
    "conv_rows=i64",
    "kda-odd": f"{KDA_HOW},conv_tokens=3,chunk=3,state=f16,state_loads=element,operand_loads=element,norm_loads=element,lanes=4,vec=8,"
    "ilp=2,tile=16,threads=32,gk=f32,conv_layout=any,conv_loads=element,conv_taps=element",
    "kda-rolled": f"{KDA_HOW},conv_tokens=8,chunk=8,state=f32,lanes=8,vec=4,ilp=2,tile=8,threads=32,accepted=i64,update=each,pool=split,"
    "conv_layout=channels,conv_len=12",
}  # fmt: skip


def spec_of(name: str) -> DeltaLayerSpec:
    fields = dict(item.split("=") for item in f"{BASE},{HOW[name]}".split(","))
    found = parse_spec("delta_layer:" + ",".join("=".join(item) for item in fields.items()), SPECS)
    assert isinstance(found, DeltaLayerSpec)
    return found


@costly(3)
@needs_emulator
@pytest.mark.parametrize("name", HOW)
def test_check_of_variants(name):
    for batch in (1, 4):
        assert check(spec_of(name), SM90, batch).passed


@costly(3)
@needs_emulator
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("final", "arrived == kReaders - 1;", "false;"),
        ("final", "i < kDimK ? 0 : 1 * (kDimK / 4)", "0"),
        ("tiles", "(kKeyHeads - 1) * kDimK", "kKeyHeads * kDimK"),
        ("kept", "tile == 0 && head % kHeadsPerKey == 0", "tile == 0 && head == 0"),
        ("kept", "kept_row * intermediate_states_row", "0 * intermediate_states_row"),
        ("rows", "(keeps ? kept_row : 0)", "0"),
        ("rows", "if (keeps) store", "store"),
        ("accepted", "dst_slot = dst_staged[t]", "dst_slot = dst_staged[0]"),
        ("tail", "arrivals + slot * arrivals_slot + group, 0)", "arrivals + slot * arrivals_slot + group, 1)"),
        ("kda", "gk_head + offset", "gk_head"),
        ("kda", "staged[c * kTokenQuads + quad(0, p, z)] = quad_of(token.query[p] + 4 * z);", ""),
        ("kda-rolled", "int(column) + k", "k"),
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
        assert any(name in str(e) for name in ("conv_", "staged", "intermediate_states"))


# Errors of a call.


def problems(case: Any = GDN, tokens: int = 3, accepted: Any = None, **changes: Any) -> list[str]:
    case = replace(case, tokens=tokens, accepted=accepted)
    call = make(case)
    with pytest.raises(ArgumentError) as e:
        call.run(**changes)
    assert not differing(call, make(case))
    return e.value.problems


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": 9}, "mixed_qkv is [5, 9, 192], 9 tokens per sequence; expected 1 … 8"),
        ({"case": KDA, "tokens": 9}, "mixed_qkv is [5, 9, 320], 9 tokens per sequence; expected 1 … 8"),
        ({"mixed_qkv": torch.zeros(5, 192, dtype=BF16), "update_state": False},
         "mixed_qkv is [5, 192] and update_state is False; expected [batch, tokens"),
        ({"update_state": 2}, "update_state is 2; expected True or False"),
        ({"a": torch.zeros(5, 4)}, "a is [5, 4]; expected [batch, tokens, heads] = [5, 3, 4]"),
        ({"case": KDA, "g": torch.zeros(5, 3, 4)}, "g is [5, 3, 4]; expected [batch, tokens, heads * K] = [5, 3, 128] or [batch,"),
        ({"z": torch.zeros(5, 64)}, "z is [5, 64]; expected [batch, tokens, heads * V] = [5, 3, 64] or [batch, tokens, heads, V]"),
        ({"intermediate_states": torch.zeros(5, 2, 4, 16, 32)}, "intermediate_states is [5, 2, 4, 16, 32]; expected [batch or more"),
        ({"intermediate_states": torch.zeros(5, 3, 4, 16, 32)}, "intermediate_states is torch.float32; "
            "expected torch.bfloat16, the dtype of state"),
        ({"intermediate_conv_window": torch.zeros(5, 3, 192, 3)}, "intermediate_conv_window is torch.float32; expected"),
        ({"intermediate_state_indices": torch.zeros(5, dtype=I32)}, "intermediate_state_indices is given without a buffer"),
        ({"num_accepted_tokens": torch.ones(5, dtype=I32)}, "state_indices is [5]; expected [batch, columns], of which num_accepted"),
        ({"dst_state_indices": torch.zeros(5, 3, dtype=I32)}, "is missing; expected num_accepted_tokens"),
        ({"accepted": I32, "dst_state_indices": torch.zeros(5, 3, dtype=I64)}, "state_indices is torch.int32 and dst_state_ind"),
        ({"accepted": I32, "update_state": False}, "num_accepted_tokens and dst_state_indices are given with update_state=False"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_words(change, words):
    found = problems(**change)
    assert any(words in problem for problem in found), found


def test_what_overlaps_in_memory():
    kept = torch.zeros(1, 1, 4, 16, 32, dtype=BF16).expand(5, 3, 4, 16, 32)
    assert any("two of its elements share memory" in p for p in problems(intermediate_states=kept))
    call = make(replace(GDN, tokens=3))
    with pytest.raises(ArgumentError, match="out overlaps z in memory"):
        call.run(out=call.kwargs["z"])


def test_one_token_with_an_axis_is_one_token():
    """A call of one token with a tokens axis has the kernels and the results of a call without that axis."""
    case = replace(GDN, tokens=1)
    call, plain = make(case), make(case)
    squeezed = {n: plain.kwargs[n].squeeze(1) for n in ("mixed_qkv", "a", "b", "z", "out")}
    call.run()
    plain.function(**plain.kwargs | squeezed)
    assert not differing(call, plain) and call.built().problem()[0] == plain.built(**squeezed).problem()[0]


@named([replace(GDN, tokens=3), replace(KDA, tokens=8, accepted=I64, batch=8), replace(GDN, tokens=1, update=False, kept=BF16)])
def test_supported_and_explained(case):
    call = make(case)
    assert ssmgen.supported(call.function, **call.kwargs, arch="sm_90a") == (True, [])
    told = ssmgen.explain(call.function, **call.kwargs, arch="sm_90a")
    assert told.operator == "delta_layer" and told.chosen.spec.function == call.function.__name__


def test_problems_say_what_is_asked_for():
    def posed(base: Any = GDN, **changes: Any) -> Any:
        return make(replace(base, **{"tokens": 3} | changes)).built().problem()[0]

    plain, kept, frozen = posed(), posed(kept=BF16, saved="runs", rows=I32), posed(update=False)
    assert (plain.tokens, plain.update, plain.conv.tokens, plain.intermediates) == (Tokens.MANY, Update.FINAL, 3, False)
    assert kept.intermediates and kept.intermediate_indices is kept.conv.rows is kept.rows_index is Index.I32
    assert frozen.update is Update.NONE and not frozen.conv_moves and not frozen.frozen
    accepted = posed(accepted=I64, index=I64)
    assert (accepted.update, accepted.pool, accepted.accepted, accepted.conv_rolls) == (Update.EACH, PoolMode.SPLIT, Index.I64, True)
    assert posed(kept=BF16, slot_gap=1).state_loads is Loads.ELEMENT and posed(KDA, odd=True).operand_loads is Loads.ELEMENT


# Registration.


@costly(1)
@named(
    [
        *[replace(base, id=f"{base.id}-final", tokens=3) for base in (GDN, KDA)],
        *[replace(base, id=f"{base.id}-kept", tokens=2, kept=BF16, saved="runs", rows=I32, update=False) for base in (GDN, KDA)],
        *[replace(base, id=f"{base.id}-accepted", tokens=2, accepted=I32) for base in (GDN, KDA)],
    ]
)
def test_opcheck(case):
    call = make(case).built()
    torch.library.opcheck(torch.ops.ssmgen.delta_layer.default, (call.caller.name, *call.given, *call.options, None))


@named([replace(GDN, tokens=3), replace(KDA, tokens=3)])
def test_compiled_whole(case):
    want, call = make(case).run(), make(case)
    got = torch.compile(lambda: call.run(out=None).float() * 2, fullgraph=True, backend="aot_eager")()
    assert torch.equal(got, want.float() * 2)


# Specs.


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("final", {"chunk": 8}, "; expected conv_tokens 3, all staged at once"),
        ("final", {"conv_tokens": 9, "chunk": 9}, "conv_tokens is 9; expected 0 …"),
        ("final", {"tokens": Tokens.RAGGED, "cu_seqlens": Index.I32}, "tokens is ragged; expected one or many"),
        ("final", {"update": Update.EACH, "pool": PoolMode.SPLIT}, "; expected accepted if and only if update is each"),
        ("final", {"intermediate_indices": Index.I32}, " and intermediates is no; expected both or neither"),
        ("rows", {"conv_rows": Index.NONE}, "conv_rows is none and intermediate_indices is "),
        ("kept", {"ilp": 1}, "the rows in flight: several tokens keep all rows of a tile in registers"),
        (
            "final",
            {"dim_k": 1024, "lanes": 32, "ilp": 4, "tile": 4, "conv_tokens": 8, "chunk": 8},
            "bytes of shared memory; expected at most 49152",
        ),
        ("final", {"tokens": Tokens.ONE}, "conv_tokens is 3 in a call of"),
        ("kda", {"g": DType.BF16}, "the decay is not a layer's; expected g with A_log and gate=softplus, or gk"),
        ("final", {"norm_inside": True}, "norm_inside is yes with several tokens; expected no: a second kernel computes their norm"),
        ("accepted", {"prefetch": 132}, "; expected 0: the column that a call starts from is in memory"),
        ("accepted", {"conv_len": 3}, "or more with num_accepted_tokens"),
    ],
)
def test_violations_in_words(name, change, words):
    spec = spec_of(name)
    assert not spec.violations(SM90)
    found = changed(spec, **change).violations(SM90)
    assert any(words in problem for problem in found), found


@pytest.mark.parametrize("name", HOW)
def test_layout_of_the_text(name):
    spec = spec_of(name)
    text = render(spec, SM90)
    assert text.startswith(f"// {spec.family} for sm_90a") and parse_spec(str(spec), SPECS) == spec
    parameters = re.search(rf"{spec.name}\((.*?)\) \{{", text, re.S)[1]
    assert [p.split()[-1].lstrip("*") for p in parameters.split(",")] == [p.name for p in spec.parameters()]
    assert not any(line != line.rstrip() or "\t" in line or "{%" in line for line in text.splitlines())
    assert ("arrivals" in text) == (spec.update is not Update.NONE) and len(spec.kernels) == (1 if spec.norm.weight is None else 2)
    if spec.norm.weight is not None:
        assert (spec.kernels[1].tokens, spec.kernels[1].accepted) == (spec.conv.tokens, spec.accepted)


@pytest.mark.parametrize("name", HOW)
def test_shared_memory_is_what_the_spec_says(name):
    spec, sizes = spec_of(name), {"Quad": 16, "float": 4, "int": 4, "i64": 8}
    known = {"kChunk": spec.chunk, "kTokenQuads": len(spec.token_vectors()) * spec.dim_k // 4 + 2, "kTile": spec.tile, "1": 1}
    declared = re.findall(r"^ +SHARED\((\w+), \w+, ([^)]*)\);", render(spec, SM90), re.M)
    total = sum(sizes[kind] * math.prod(known[factor] for factor in count.split(" * ")) for kind, count in declared)
    assert total <= spec.shared_bytes <= total + 16


@pytest.mark.parametrize("pdl", Pdl)
@pytest.mark.parametrize("name", ["final", "accepted", "kda"])
def test_wait_precedes_every_access(name, pdl):
    text = render(replace(spec_of(name), pdl=pdl), SM90)
    body = text[text.index('extern "C"') :]
    assert uses_pdl(text) == (pdl is not Pdl.OFF) and "__restrict__" not in body and "__ldg" not in body
    if pdl is not Pdl.OFF:
        wait = body.index("wait_for_upstream();")
        assert all(m.start() > wait for m in re.finditer(r"\b(load|store)\w*[(<]", body))
