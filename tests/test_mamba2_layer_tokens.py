"""mamba2_layer of several tokens: the same bits as the operators that it is made of; what is wrong with a call; specs and texts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from layer_cases import (
    BF16,
    F32,
    I32,
    MAMBA,
    MAMBA_TOKENS,
    SM90,
    differing,
    emulate,
    emulated_chain,
    make,
    named,
    needs_emulator,
)
from test_check import edited

from ssmgen.emulator import EmulatorError
from ssmgen.emulator.check import check
from ssmgen.kernels import FAMILIES
from ssmgen.kernels import mamba2_layer_tokens as kernels
from ssmgen.kernels.layer_gated_norm import LayerGatedNormSpec
from ssmgen.kernels.mamba2_layer_tokens import Mamba2LayerTokensSpec
from ssmgen.render import render
from ssmgen.spec import parse_spec

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
@named(MAMBA_TOKENS)
def test_kernels_equal_those_of_the_separate_operators(case):
    chain, call = emulated_chain(case), make(case)
    emulate(call.built())
    call.assert_unharmed()
    assert not differing(call, chain)


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
    """Of windows that roll: which tokens were accepted changes from step to step."""
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
    "rows": "conv_tokens=8,state=f32,lanes=8,vec=4,ilp=2,tile=8,threads=32,intermediate_states=f32,intermediate_indices=i32,conv_windows=any,"
    "conv_rows=i32,update=none,state_loads=element",
    "windows": "conv_tokens=1,state=f32,lanes=8,vec=4,ilp=2,tile=8,threads=32,conv_windows=runs,conv_rows=i64,norm=none,norm_size=0,z=f32",
    "accepted": "conv_tokens=3,state=bf16,lanes=4,vec=8,ilp=1,tile=8,threads=32,accepted=i32,update=each,pool=split,conv_len=5",
    "rolled": "conv_tokens=8,state=f32,lanes=8,vec=4,ilp=2,tile=8,threads=32,accepted=i64,update=each,pool=split,conv_layout=channels,conv_len=12",
    "log": "conv_tokens=2,state=f32,lanes=8,vec=4,ilp=2,tile=8,threads=32,A_is_log=yes,dt_limit=yes,index=none,norm_first=yes",
}  # fmt: skip


def spec_of(name: str) -> Mamba2LayerTokensSpec:
    fields = dict(item.split("=") for item in f"{BASE},{HOW[name]}".split(","))
    found = parse_spec("mamba2_layer_tokens:" + ",".join("=".join(item) for item in fields.items()), FAMILIES)
    assert isinstance(found, Mamba2LayerTokensSpec)
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
    """Edits of the first kernel. What races or is not written the emulator finds by itself."""

    def changed(spec, arch):
        return render(spec, arch) if isinstance(spec, LayerGatedNormSpec) else edited(old, new)(spec, arch)

    monkeypatch.setattr("ssmgen.emulator.render", changed)
    try:
        assert not check(spec_of(name), SM90).passed
    except EmulatorError as e:
        assert any(name in str(e) for name in ("conv_", "staged"))


@needs_emulator
@pytest.mark.parametrize(("old", "new"), [("in_range && is_slot", "is_slot"), ("&& is_slot(window_slot)", ""), ("is_slot(slot) &&", "")])
def test_check_finds_a_norm_that_forgets_the_padding(old, new, monkeypatch):
    """Of a padded row, whose gate is NaN, nothing is written."""
    case = replace(MAMBA, tokens=3, accepted=I32, batch=8)
    call, chain = make(case), emulated_chain(case)

    def changed(spec, arch):
        return edited(old, new)(spec, arch) if isinstance(spec, LayerGatedNormSpec) else render(spec, arch)

    monkeypatch.setattr("ssmgen.emulator.render", changed)
    emulate(call.built())
    assert differing(call, chain) == ["out"]
