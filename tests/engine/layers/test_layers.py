"""mamba2_layer, gdn_layer and kda_layer, of one token and of several: the same bits as their separate operators."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from layer_calls import SM90, differing, emulate, emulated_chain, make, needs_emulator
from layer_cases import (
    BF16,
    F32,
    GDN,
    GDN_HEADS,
    GDN_MATRIX,
    GDN_TOKENS,
    I32,
    KDA,
    KDA_MATRIX,
    KDA_TOKENS,
    MAMBA,
    MAMBA_MATRIX,
    MAMBA_TOKENS,
    Case,
    Gdn,
    Mamba,
    named,
    vary,
)
from selection import costly, covering, few

from ssmgen.engine.rows import axes
from ssmgen.families.delta_layer import spec as delta
from ssmgen.families.mamba2_layer import spec as mamba
from ssmgen.families.mamba2_layer.spec import Mamba2LayerProblem, Mamba2LayerSpec
from ssmgen.select import registry
from ssmgen.select.catalog import OPERATOR_OF
from ssmgen.spec.kernel import changed

THREE = [MAMBA, GDN, KDA]
OF_ONE_TOKEN = [*MAMBA_MATRIX, *GDN_MATRIX, *GDN_HEADS, *KDA_MATRIX]
OF_SEVERAL = [*MAMBA_TOKENS, *GDN_TOKENS, *KDA_TOKENS]
CHOICES = {mamba.OPERATOR: mamba, delta.OPERATOR: delta}


def space(case: Any) -> list[Any]:
    """All legal variants of a case."""
    problem = make(case).built().problem()[0]
    return list(CHOICES[OPERATOR_OF[type(problem)]].space(problem, SM90))


@named([*MAMBA_MATRIX, *GDN_MATRIX, *KDA_MATRIX, *OF_SEVERAL])
def test_a_call_on_cpu_equals_the_separate_operators(case):
    call, chain = make(case), make(case).chain()
    for _ in range(2 if case.accepted is None else 1):
        assert call.run() is call.kwargs["out"]
    if case.accepted is None:
        chain.chain()
    call.assert_unharmed()
    assert not differing(call, chain)


@named([*[replace(case, x=F32) for case in THREE], KDA, replace(MAMBA, id="mamba-t3", tokens=3, x=F32)])
def test_a_new_output_is_like_the_input(case):
    want, got = make(case).run().clone(), make(case).run(out=None)
    assert got.dtype is case.x and got.shape == want.shape and torch.equal(got, want)


def values(case: Case) -> set[Any]:
    """The values of a case's fields. KDA's layer has the kernels of GDN's, except what reads the state and its decays."""
    kernels = isinstance(case, Mamba), bool(case.tokens)
    found = {(*kernels, f.name, getattr(case, f.name)) for f in fields(case) if f.name not in ("id", "batch")}
    return found | {(type(case), *kernels, getattr(case, "layout", ""), case.state, bool(case.accepted))}


@needs_emulator
@named([*few(covering(OF_ONE_TOKEN, values), 9), *few(covering(OF_SEVERAL, values), 6)])
def test_kernels_equal_those_of_the_separate_operators(case):
    """The rules' choice and, for a delta rule of one token, the kernel that also normalises, in one of two block sizes. That these are
    equal is a law of variants. Every value of every field occurs; the reference above and the card run all cases."""
    chain = emulated_chain(case)
    problem, size, _, _ = make(case).built().problem()
    spec = registry.select(OPERATOR_OF[type(problem)], problem, size, SM90, False)
    whole = isinstance(case, Gdn) and case.norm and not case.tokens
    inside = [delta.whole_heads(problem, (64, 128)[len(case.id) % 2], SM90, False)] if whole else []
    assert not any(variant.violations(SM90) for variant in inside)
    for variant in (spec, *inside):
        call = make(case)
        emulate(call.built(), variant)
        call.assert_unharmed()
        assert not differing(call, chain), variant


@needs_emulator
@pytest.mark.parametrize(("case", "inside"), [(MAMBA, False), (GDN, False), (GDN, True)], ids=["mamba", "two-kernels", "one-kernel"])
def test_the_next_step_finds_what_this_one_left(case, inside):
    chain, call = emulated_chain(case), make(case)
    chain.chain(lambda function, kwargs: emulate(function.build(**kwargs)))
    spec = delta.whole_heads(call.built().problem()[0], 64, SM90, False) if inside else None
    for _ in range(2):
        emulate(call.built(), spec)
    call.assert_unharmed()
    assert not differing(call, chain)


@needs_emulator
@named([MAMBA, GDN])
def test_the_next_steps_find_what_several_tokens_left(case):
    """Windows roll: which tokens were accepted changes from step to step."""
    case = replace(case, tokens=3, accepted=I32, batch=1)
    chain, call = make(case), make(case)
    for accepted in (1, 3, 2):
        for one in (chain, call):
            one.kwargs["num_accepted_tokens"].fill_(accepted)
            one.kwargs["dst_state_indices"].copy_(one.kwargs["state_indices"])
        emulate(call.built())
        chain.chain(lambda function, kwargs: emulate(function.build(**kwargs)))
        assert not differing(call, chain)
    assert call.kwargs["out"].isfinite().all() and not call.kwargs["arrivals"].any()


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


@named([MAMBA, GDN])
def test_one_token_with_an_axis_is_one_token(case):
    """A call of one token with a tokens axis has the kernels and the results of a call without that axis."""
    case = replace(case, tokens=1)
    call, plain = make(case), make(case)
    squeezed = {n: plain.kwargs[n].squeeze(1) for n in ("xBC", "dt", "mixed_qkv", "a", "b", "z", "out") if n in plain.kwargs}
    assert call.run().dim() == plain.run(**squeezed).dim() + 1
    assert not differing(call, plain) and call.built().problem()[0] == plain.built(**squeezed).problem()[0]


# Variants.

FEW = {"norm": None, "batch": 3}
VARIED = [
    *[MAMBA, *vary(MAMBA, f32={"state": F32}, p40={"P": 40, "window": "any", "extra": 1}, odd={"odd": True}, noise={"philox": 7})],
    *[GDN, *vary(GDN, kv={"layout": "kv"}, f32={"state": F32}, v40={"V": 40, "window": "any", "extra": 1}, odd={"odd": True})],
    *[KDA, *vary(KDA, kv={"layout": "kv"}, tail={"state": F32, "V": 40, "lower_bound": -5.0}, odd={"odd": True})],
]
OF_TOKENS = [
    *[replace(base, id=f"{base.id}-t3", tokens=3, **FEW) for base in (MAMBA, GDN)],
    *[replace(base, id=f"{base.id}-t4-accepted", tokens=4, accepted=I32, kept=BF16, saved="runs", **FEW) for base in (MAMBA, KDA)],
    *[
        replace(base, id=f"{base.id}-t2-tail", tokens=2, window="any", state=F32, update=False, kept=F32, saved="any", **FEW, **rows)
        for base, rows in ((MAMBA, {"P": 40}), (GDN, {"V": 40}))
    ],
    replace(GDN, id="gdn-t3-kv", tokens=3, layout="kv", kept=BF16, **FEW),
    replace(KDA, id="kda-t3-odd", tokens=3, odd=True, V=20, **FEW),
]


@costly(5)
@needs_emulator
@named([*VARIED, *OF_TOKENS])
def test_variants_are_bit_equal(case):
    chain, chosen = emulated_chain(case), random.Random(0)
    forms: dict[Any, list[Any]] = {}
    for spec in space(case):
        forms.setdefault(isinstance(case, Gdn) and (spec.norm_inside, spec.clustered), []).append(spec)
    for spec in [s for of_form in forms.values() for s in chosen.sample(of_form, min(4 if len(forms) == 1 else 2, len(of_form)))]:
        call = make(case)
        emulate(call.built(), spec)
        call.assert_unharmed()
        assert not differing(call, chain), spec


def test_the_space_of_a_delta_rule_has_both_forms():
    found, problem = space(GDN), make(GDN).built().problem()[0]
    assert {(s.norm_inside, s.clustered) for s in found} == {(False, False), (True, False), (True, True)}
    assert all((s.tiles > 1) == s.clustered and s.cluster_blocks == s.tiles for s in found if s.norm_inside)
    assert len(found) == len(set(found)) < 3 * len(list(axes()))
    assert not any(s.norm_inside for s in delta.space(changed(problem, norm=None, norm_size=0, norm_grouped=False), SM90))


def test_no_legal_variant_of_mamba2_is_left_out():
    """The list checks row loops before their launch options. It must equal the list of separate checks."""
    problem = make(MAMBA).built().problem()[0]
    more = {"prefetch": 264, "windows_ahead": True}
    every = [how | wider for how in axes(ahead=132) for wider in ([{}, more] if how["prefetch"] else [{}])]
    given = {f.name: getattr(problem, f.name) for f in fields(Mamba2LayerProblem)}
    legal = [spec for spec in (Mamba2LayerSpec(**given, **how) for how in every) if not spec.violations(SM90)]
    assert space(MAMBA) == legal and len(legal) > 100


@needs_emulator
def test_windows_asked_for_ahead_change_no_bit():
    chain = emulated_chain(MAMBA)
    for spec in random.Random(1).sample([s for s in space(MAMBA) if s.prefetch], 4):
        call, ahead = make(MAMBA), replace(spec, prefetch=5, windows_ahead=True)
        assert not ahead.violations(SM90)
        emulate(call.built(), ahead)
        call.assert_unharmed()
        assert not differing(call, chain), spec
