"""mamba2_layer of several tokens: the same bits as its separate operators; errors of a call; specs and texts."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_calls import SM90, differing, emulate, emulated_chain, make, needs_emulator
from layer_cases import BF16, F32, I32, I64, MAMBA, MAMBA_TOKENS, named
from selection import costly, few
from test_check import edited

import ssmgen
from ssmgen.compile.render import render, uses_pdl
from ssmgen.emulator import EmulatorError
from ssmgen.emulator.check import check
from ssmgen.engine.layers.norm import LayerGatedNormSpec
from ssmgen.engine.norm import LayerNorm
from ssmgen.engine.recurrences.attention.problem import Update
from ssmgen.engine.short_conv import ShortConv
from ssmgen.errors import ArgumentError
from ssmgen.families.causal_conv1d_update.spec import Saved, StateLayout
from ssmgen.families.mamba2_layer import spec as kernels
from ssmgen.families.mamba2_layer.spec import Mamba2LayerProblem, Mamba2LayerSpec
from ssmgen.select import registry
from ssmgen.select.catalog import SPECS
from ssmgen.spec.kernel import Arch, DType, Index, Loads, Pdl, PoolMode, changed, parse_spec

# The same bits as the separate operators.


@named(MAMBA_TOKENS)
def test_a_call_on_cpu_equals_the_separate_operators(case):
    call, chain = make(case), make(case).chain()
    for _ in range(2 if case.accepted is None else 1):
        assert call.run() is call.kwargs["out"]
    if case.accepted is None:
        chain.chain()
    call.assert_unharmed()
    assert not differing(call, chain)


@needs_emulator
@named(few(MAMBA_TOKENS))
def test_kernels_equal_those_of_the_separate_operators(case):
    chain, call = emulated_chain(case), make(case)
    emulate(call.built())
    call.assert_unharmed()
    assert not differing(call, chain)


@costly(1)
@needs_emulator
@named(
    [
        replace(MAMBA, id="t3", tokens=3, norm=None, batch=3),
        replace(MAMBA, id="t4-accepted", tokens=4, accepted=I32, norm=None, batch=3, kept=BF16, saved="runs"),
        replace(MAMBA, id="t2-p40", tokens=2, P=40, window="any", norm=None, batch=3, state=F32, update=False, kept=F32, saved="any"),
    ]
)
def test_variants_are_bit_equal(case):
    chain = emulated_chain(case)
    found = list(kernels.space(make(case).built().problem()[0], SM90))
    for spec in random.Random(0).sample(found, 6):
        call = make(case)
        emulate(call.built(), spec)
        call.assert_unharmed()
        assert not differing(call, chain), spec


@needs_emulator
def test_the_next_steps_find_what_this_one_left():
    """Windows roll: which tokens were accepted changes from step to step."""
    case = replace(MAMBA, tokens=3, accepted=I32, batch=1)
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

BASE = "d_state=32,headdim=16,nheads=4,ngroups=2,D=f32,dt_bias=f32,index=i32,norm=bf16,norm_size=64"
HOW = {
    "final": "conv_tokens=3,state=bf16,lanes=4,vec=8,ilp=2,tile=16,threads=32,pdl=trigger_loaded",
    "tail": "conv_tokens=2,state=f32,lanes=8,vec=4,ilp=4,tile=32,threads=64,pdl=trigger_top,norm_size=32,norm_grouped=yes",
    "tiles": "conv_tokens=2,state=f32,lanes=8,vec=4,ilp=1,tile=4,threads=32,conv_layout=channels,conv_len=4,conv_bias=f32",
    "any": "conv_tokens=3,state=f32,lanes=8,vec=4,ilp=4,tile=16,threads=32,conv_layout=any,conv_loads=element,conv_taps=element",
    "kept": "conv_tokens=3,state=bf16,lanes=4,vec=8,ilp=2,tile=16,threads=32,intermediate_states=bf16,conv_windows=runs,update=none",
    "rows": "conv_tokens=8,state=f32,lanes=8,vec=4,ilp=2,tile=8,threads=32,intermediate_states=f32,intermediate_indices=i32,update=none,"
    "conv_windows=any,conv_rows=i32,state_loads=element",
    "windows": "conv_tokens=1,state=f32,lanes=8,vec=4,ilp=2,tile=8,threads=32,conv_windows=runs,conv_rows=i64,norm=none,norm_size=0,z=f32",
    "accepted": "conv_tokens=3,state=bf16,lanes=4,vec=8,ilp=1,tile=8,threads=32,accepted=i32,update=each,pool=split,conv_len=5",
    "rolled": "conv_tokens=8,state=f32,lanes=8,vec=4,ilp=2,tile=8,threads=32,accepted=i64,update=each,pool=split,conv_layout=channels,"
    "conv_len=12",
    "log": "conv_tokens=2,state=f32,lanes=8,vec=4,ilp=2,tile=8,threads=32,A_is_log=yes,dt_limit=yes,index=none,norm_first=yes",
}  # fmt: skip


def spec_of(name: str) -> Mamba2LayerSpec:
    fields = dict(item.split("=") for item in f"{BASE},{HOW[name]}".split(","))
    found = parse_spec("mamba2_layer:several=yes," + ",".join("=".join(item) for item in fields.items()), SPECS)
    assert isinstance(found, Mamba2LayerSpec)
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
        ("final", "kWidth - 1 + kTokens - kLength + i", "kWidth + kTokens - kLength - 2 + i"),
        ("tiles", "i < kDState ? B_staged : C_staged", "true ? B_staged : C_staged"),
        ("kept", "tile == 0 && head % kHeadsPerGroup == 0", "tile == 0 && head == 0"),
        ("kept", "inputs[r][t + 1 + k]", "inputs[r][t + k]"),
        ("rows", "|| !keeps_window", ""),
        ("accepted", "column & 2 ? there", "column & 1 ? there"),
        ("accepted", "inputs[r][1 + i]", "inputs[r][i]"),
        ("rolled", "int(column) + k", "k"),
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
        assert any(name in str(e) for name in ("conv_", "staged", "which is read only"))


@needs_emulator
@pytest.mark.parametrize(("old", "new"), [("in_range && is_slot", "is_slot"), ("&& is_slot(window_slot)", ""), ("is_slot(slot) &&", "")])
def test_check_finds_a_norm_that_forgets_the_padding(old, new, monkeypatch):
    """Nothing is written of a padded row, whose gate is NaN."""
    case = replace(MAMBA, tokens=3, accepted=I32, batch=8)
    call, chain = make(case), emulated_chain(case)

    def changed(spec, arch):
        return edited(old, new)(spec, arch) if isinstance(spec, LayerGatedNormSpec) else render(spec, arch)

    monkeypatch.setattr("ssmgen.emulator.render", changed)
    emulate(call.built())
    assert differing(call, chain) == ["out"]


# Errors of a call.

T3 = replace(MAMBA, id="t3", tokens=3)
ACCEPTED = replace(MAMBA, id="accepted", tokens=3, accepted=I32)
VERIFY = replace(MAMBA, id="verify", tokens=3, update=False, kept=BF16, saved="runs", rows=I32)


def problems(case: Any, **changes: Any) -> list[str]:
    call = make(case)
    with pytest.raises(ArgumentError) as e:
        call.run(**changes)
    assert str(e.value).startswith("mamba2_layer cannot run") and not differing(call, make(case))
    return e.value.problems


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=BF16)


NONE = {"xBC": bf16(5, 0, 192), "dt": bf16(5, 0, 4), **dict.fromkeys(("z", "out"), bf16(5, 0, 64))}  # tokens


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        (replace(T3, tokens=9), {}, "xBC is [5, 9, 192], 9 tokens per sequence; expected 1 … 8"),
        (T3, NONE, "xBC is [5, 0, 192], 0 tokens per sequence; expected 1 … 8"),
        (T3, {"xBC": bf16(5, 192)}, "out is [5, 3, 64]; expected [batch, heads * headdim] = [5, 64]"),
        (T3, {"xBC": bf16(5, 192), "intermediate_states": bf16(5, 3, 4, 16, 32)}, "xBC is [5, 192] and intermediate_states is given; "
            "expected [batch, tokens"),
        (T3, {"xBC": bf16(5, 192), "update_state": False}, "xBC is [5, 192] and update_state is False; expected [batch, tokens"),
        (T3, {"xBC": bf16(5, 2, 3, 192)}, "and xBC [5, 2, 3, 192]; expected"),
        (T3, {"dt": bf16(5, 4)}, "dt is [5, 4]; expected [batch, tokens, heads] = [5, 3, 4]"),
        (T3, {"z": bf16(5, 2, 64)}, "z is [5, 2, 64]; expected [batch, tokens, heads * headdim] = [5, 3, 64]"),
        (T3, {"out": bf16(5, 1, 64).expand(5, 3, 64)}, "out has strides [64, 0, 1], and two of its elements share memory"),
        (T3, {"update_state": "no"}, "update_state is 'no'; expected True or False"),
        (T3, {"xBC": torch.zeros(5, 3, 192)}, "conv_state is torch.bfloat16; expected"),
        (T3, {"intermediate_state_indices": torch.zeros(5, dtype=I32)}, "intermediate_state_indices is given without a buffer"),
        (VERIFY, {"intermediate_states": bf16(9, 2, 4, 16, 32)}, "intermediate_states is [9, 2, 4, 16, 32]; "
            "expected [rows, tokens or more, heads, headdim"),
        (VERIFY, {"intermediate_states": bf16(9, 3, 4, 32, 16).mT}, "intermediate_states has strides [6144, 2048, 512, 1, 16]"),
        (VERIFY, {"intermediate_states": bf16(9, 1, 4, 16, 32).expand(9, 3, 4, 16, 32)}, "two of its elements share memory"),
        (VERIFY, {"intermediate_conv_window": bf16(9, 3, 192, 4)}, "intermediate_conv_window is [9, 3, 192, 4]; "
            "expected [rows, tokens or more, channels"),
        (VERIFY, {"intermediate_conv_window": torch.zeros(9, 3, 192, 3)}, "intermediate_conv_window is torch.float32; expected"),
        (VERIFY, {"intermediate_state_indices": torch.zeros(4, dtype=I32)}, "intermediate_state_indices is [4]; expected [batch] = [5]"),
        (VERIFY, {"intermediate_state_indices": None, "intermediate_states": bf16(4, 3, 4, 16, 32)}, "intermediate_states is [4, 3, 4, "
            "16, 32]; expected [batch or more, tokens or more, heads"),
        (VERIFY, {"intermediate_state_indices": torch.zeros(5)}, "intermediate_state_indices is torch.float32; expected int32 or int64"),
        (ACCEPTED, {"dst_state_indices": None}, "is missing; expected num_accepted_tokens"),
        (ACCEPTED, {"num_accepted_tokens": None, "state_indices": torch.zeros(5, dtype=I32)}, "is missing; expected num_accepted_tokens"),
        (ACCEPTED, {"state_indices": None}, "is missing; expected num_accepted_tokens"),
        (ACCEPTED, {"update_state": False}, "num_accepted_tokens and dst_state_indices are given with update_state=False"),
        (ACCEPTED, {"dst_state_indices": torch.zeros(5, 3, dtype=I64)}, "state_indices is torch.int32 and dst_state_indices is"),
        (ACCEPTED, {"dst_state_indices": torch.zeros(5, dtype=I32)}, "dst_state_indices is [5]; expected [batch, tokens] = [5, 3]"),
        (ACCEPTED, {"state_indices": torch.zeros(5, dtype=I32)}, "state_indices is [5]; expected [batch, columns], of which"),
        (ACCEPTED, {"state_indices": torch.zeros(5, 33, dtype=I32)}, "state_indices is [5, 33]; expected 1 … 32 columns"),
        (ACCEPTED, {"state_indices": torch.zeros(5, 0, dtype=I32)}, "state_indices is [5, 0]; expected 1 … 32 columns"),
        (ACCEPTED, {"num_accepted_tokens": torch.zeros(3, dtype=I32)}, "num_accepted_tokens is [3]; expected [batch] = [5]"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_words(case, change, words):
    found = problems(case, **change)
    assert any(words in problem for problem in found), found


def test_what_no_kernel_serves():
    """A window that is too short for its tokens; more shared memory than there is."""
    call = make(ACCEPTED)
    short = call.kwargs | {"conv_state": call.kwargs["conv_state"][..., :4].contiguous()}
    served, reasons = ssmgen.supported(ssmgen.mamba2_layer, **short, arch="sm_90a")
    assert not served and reasons == ["conv_state holds 4 inputs per channel; expected 5 or more with num_accepted_tokens"]
    served, reasons = ssmgen.supported(ssmgen.mamba2_layer, **make(replace(MAMBA, tokens=8, N=1024)).kwargs, arch="sm_90a")
    assert not served and "bytes of shared memory; expected at most 49152" in reasons[0]


@named([T3, ACCEPTED, VERIFY, replace(T3, id="gated", norm=None)])
def test_supported_and_explained(case):
    kwargs = make(case).kwargs
    assert ssmgen.supported(ssmgen.mamba2_layer, **kwargs, arch="sm_90a") == (True, [])
    told = ssmgen.explain(ssmgen.mamba2_layer, **kwargs, arch="sm_90a")
    assert told.operator == "mamba2_layer" and told.chosen.spec.several


def posed(case: Any, **changes: Any) -> Any:
    return make(replace(case, **changes)).built().problem()[0]


def test_problems_say_what_a_call_asks_for():
    assert not posed(T3, tokens=1).several, "one token's kernels"
    final, verify, accepted = posed(T3), posed(VERIFY), posed(ACCEPTED)
    assert [p.update for p in (final, verify, accepted)] == [Update.FINAL, Update.NONE, Update.EACH]
    assert (final.conv.tokens, final.conv.windows, final.pool, final.intermediates) == (3, Saved.NO, PoolMode.SINGLE, False)
    assert (verify.conv.windows, verify.conv.rows, verify.intermediate_indices) == (Saved.RUNS, Index.I32, Index.I32)
    assert (accepted.accepted, accepted.pool, accepted.conv.len, accepted.conv.layout) == (Index.I32, PoolMode.SPLIT, 5, StateLayout.RUNS)
    assert posed(ACCEPTED, extra=1).conv.layout is StateLayout.ANY, "all of a run is rewritten"
    assert posed(VERIFY, kept=None).intermediate_indices is Index.NONE and posed(VERIFY, saved="").conv.rows is Index.NONE
    assert posed(VERIFY, saved="any").conv.windows is Saved.ANY and posed(VERIFY, slot_gap=1).state_loads is Loads.ELEMENT


def test_a_new_output_is_like_the_input():
    case = replace(T3, x=F32)
    want, got = make(case).run().clone(), make(case).run(out=None)
    assert got.dtype is F32 and got.shape == want.shape and torch.equal(got, want)


def test_one_token_with_an_axis_is_one_without():
    case = replace(MAMBA, tokens=1)
    flat, axis = make(case), make(case)
    squeezed = {n: flat.kwargs[n].squeeze(1) for n in ("xBC", "dt", "z", "out")}
    assert flat.run(**squeezed).shape == (5, 64) and axis.run().shape == (5, 1, 64)
    assert not differing(flat, axis)


# Registration.


@costly(1)
@named([T3, ACCEPTED, VERIFY])
def test_opcheck(case):
    call = make(case).built()
    torch.library.opcheck(
        torch.ops.ssmgen.mamba2_layer.default, (*call.given, *[list(v) if isinstance(v, tuple) else v for v in call.options], None)
    )


def test_compiled_whole():
    want, call = make(VERIFY).run(), make(VERIFY)
    got = torch.compile(lambda: call.run(out=None).float() * 2, fullgraph=True, backend="aot_eager")()
    assert torch.equal(got[call.live], want[call.live].float() * 2)


# Specs.


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("final", {"conv_tokens": 9}, "conv_tokens is 9; expected 0 … 8"),
        ("final", {"conv_len": 5}, "conv_state holds 5 inputs per channel; expected 3 or 4 for width 4"),
        ("accepted", {"conv_len": 4}, "conv_state holds 4 inputs per channel; expected 5 or more"),
        ("accepted", {"conv_len": 6}, "conv_state holds runs of 6 inputs; expected 5, since a kernel rewrites the whole run"),
        ("accepted", {"update": Update.FINAL}, "expected accepted if and only if update is each"),
        ("final", {"update": Update.EACH, "pool": PoolMode.SPLIT}, "expected accepted if and only if update is each"),
        ("final", {"conv_rows": Index.I32}, " and conv_windows is no; expected saved windows"),
        ("rows", {"conv_rows": Index.I64}, "conv_rows is i64 and intermediate_indices is "),
        ("final", {"cu_seqlens": Index.I32}, "cu_seqlens or parents is set; expected none"),
        ("tiles", {"tile": 8}, ", the rows in flight: several tokens keep all rows of a tile in registers"),
        ("final", {"x": DType.F16}, "; expected one dtype: they are one tensor"),
        ("final", {"tied": False}, "A, dt or dt_bias differs within a head; expected one value per head for several tokens"),
        ("final", {"norm_size": 24}, "norm_size is 24; expected a divisor of the"),
        ("accepted", {"prefetch": 132}, "; expected 0: the column that a call starts from is in memory"),
    ],
)  # fmt: skip
def test_violations_in_words(name, change, words):
    spec = spec_of(name)
    assert not spec.violations(SM90)
    found = changed(spec, **change).violations(SM90)
    assert any(words in problem for problem in found), found


@pytest.mark.parametrize("name", HOW)
def test_layout_of_the_text(name):
    spec = spec_of(name)
    for part in spec.kernels:
        text = render(part, SM90)
        assert text.startswith(f"// {part.family} for sm_90a") and parse_spec(str(part), SPECS) == part
        parameters = re.search(rf"{part.name}\((.*?)\) \{{", text, re.S)[1]
        assert [p.split()[-1].lstrip("*") for p in parameters.split(",")] == [p.name for p in part.parameters()]
        assert not any(line != line.rstrip() or "\t" in line or "{%" in line for line in text.splitlines())
    assert len(spec.kernels) == (1 if spec.norm.weight is None else 2)


@pytest.mark.parametrize("name", HOW)
def test_shared_memory_is_what_the_text_declares(name):
    spec, sizes = spec_of(name), {"Quad": 16, "float": 4, "int": 4, "i64": 8}
    known = {"kChunk": spec.chunk, "kVectorQuads": spec.d_state // 4, "kTile": spec.tile, "1": 1}
    declared = re.findall(r"^ +SHARED\((\w+), \w+, ([^)]*)\);", render(spec, SM90), re.M)
    total = sum(sizes[kind] * math.prod(known[factor] for factor in count.split(" * ")) for kind, count in declared)
    assert total <= spec.shared_bytes < total + 64


@pytest.mark.parametrize("pdl", Pdl)
@pytest.mark.parametrize("name", ["final", "accepted", "kept"])
def test_wait_precedes_every_access(name, pdl):
    text = render(replace(spec_of(name), pdl=pdl), SM90)
    body = text[text.index('extern "C"') :]
    assert uses_pdl(text) == (pdl is not Pdl.OFF) and "__restrict__" not in body and "__ldg" not in body
    if pdl is not Pdl.OFF:
        wait = body.index("wait_for_upstream();")
        assert all(m.start() > wait for m in re.finditer(r"\b(load|store)\w*[(<]", body))


def test_the_norm_touches_its_input_after_the_wait():
    norm = replace(spec_of("accepted"), pdl=Pdl.TRIGGER_LOADED).kernels[1]
    before, behind = render(norm, SM90).split('extern "C"')[1].split("wait_for_upstream();")
    assert "raw_x" not in before and "raw_x" in behind
    assert {"z", "norm_weight", "state_indices", "num_accepted_tokens"} == set(norm.early_operands())


NEMOTRON = Mamba2LayerProblem(
    d_state=128, headdim=64, nheads=128, ngroups=8, D=DType.F32, dt_bias=DType.F32, index=Index.I32, several=True,
    norm=LayerNorm(weight=DType.BF16, size=1024, grouped=True), conv=ShortConv(tokens=4),
)  # fmt: skip


@pytest.mark.parametrize("state", [DType.F32, DType.BF16])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_rules_choose_legal_variants(arch, state):
    arch = Arch.parse(arch)
    for batch in (1, 3, 8, 64, 300, 3000):
        for d_state in (64, 128, 256):
            problem = replace(NEMOTRON, state=state, d_state=d_state)
            spec = registry.select(kernels.OPERATOR, problem, batch, arch, arch.number >= 90)
            assert not spec.violations(arch) and len(spec.kernels) == 2
