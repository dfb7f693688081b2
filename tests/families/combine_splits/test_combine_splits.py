"""combine_splits without a GPU: reference, emulated kernels, laws."""

from __future__ import annotations

import math
import random
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from bits import same as equal
from combine_cases import BF16, DENSE, F16, F32, I32, INF, LSES, NAN, PAIR, PREFIX, Call, Case, check_special, make, matrix
from emulated_calls import SM90, emulate, needs_emulator
from selection import costly, covering
from subjects import is_accurate
from varying import named

import ssmgen
from ssmgen.families.combine_splits import call as op
from ssmgen.families.combine_splits import spec as kernels
from ssmgen.select import registry
from ssmgen.spec.kernel import Arch, Pdl


@costly(40, 80)
@named(*matrix())
def test_reference_is_within_rounding_of_float64(case):
    is_accurate("combine_splits", case, "cpu", lambda call: call.run())


def test_reference_against_the_textbook_formula():
    """Attention over 12 keys in one go, and in splits of 5, 4 and 3 of them."""
    g = torch.Generator().manual_seed(0)
    scores, values = torch.randn(12, generator=g), torch.randn(12, 8, generator=g)
    whole = torch.softmax(scores, 0) @ values
    some = list(zip(scores.split([5, 4, 3]), values.split([5, 4, 3]), strict=True))
    o, lse = torch.stack([torch.softmax(s, 0) @ v for s, v in some]), torch.stack([s.logsumexp(0) for s, _ in some])
    out, total = ssmgen.combine_splits(o, lse, return_lse=True)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(total, scores.logsumexp(0))
    sink = torch.tensor(0.7)
    want = (torch.softmax(torch.cat([scores, sink[None]]), 0)[:12]) @ values
    out, total = ssmgen.combine_splits(o, lse, attn_sink=sink, return_lse=True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(total, scores.logsumexp(0))


def features(case: Case) -> set[tuple]:
    """The generated text's inputs, without dtypes, each paired with the form."""
    call = make(case, "cpu")
    if not call.operands["out"].numel():
        return {("rows", 0)}
    problem, form = call.problem, (case.pair, bool(case.counts))
    spec = registry.select(op.OPERATOR, problem, op.size_of(call.views), SM90, True)
    held = {
        f.name: getattr(problem, f.name) for f in fields(problem) if f.name not in ("d_v", "o", "out", "num_splits", "sink", "max_splits")
    }
    derived = spec.constants()
    held |= {n: derived[n] for n in ("scan", "held", "team_chains", "warps", "whole", "meets")}
    return {(*form, *pair) for pair in held.items()} | {(n, getattr(spec, n)) for n in ("vec", "lanes", "parts", "ilp", "sink")}


@costly(8, 20)
@needs_emulator
@named(*covering(matrix(), features))
def test_kernels_are_within_rounding_of_float64(case):
    is_accurate("combine_splits", case, "cpu", emulate)


@needs_emulator
@named(DENSE, PREFIX, PAIR)
def test_without_pdl_for_an_old_architecture(case):
    is_accurate("combine_splits", case, "cpu", partial(emulate, arch=Arch.parse("sm_80")))


VARIED = [
    replace(DENSE, id="dense-s40", splits=40),
    replace(DENSE, id="dense-s170-sink", splits=170, sink=F32, rows=(2,), d_v=36),
    replace(DENSE, id="dense-bf16-s7-d64", splits=7, d_v=64, o=BF16, layout="gaps"),
    replace(DENSE, id="dense-f16-odd", splits=21, d_v=68, o=F16, layout="odd"),
    replace(PREFIX, id="prefix", d_v=256, counts=(3, 0, 1, 30), rows=(2,)),
    replace(PAIR, id="pair-bf16", rows=(3, 2)),
    replace(PAIR, id="pair-in-place", rows=(3, 2), d_v=512, in_place=True, mask=True),
]


@costly(2)
@needs_emulator
@named(*VARIED)
def test_variants_are_bit_equal(case):
    first = None
    specs = [s for s in kernels.space(make(case, "cpu").problem, SM90) if s.pdl is Pdl.TRIGGER_LOADED]
    assert len({(s.vec, s.lanes, s.parts, s.ilp) for s in specs}) == len(specs) >= 4
    specs = random.Random(0).sample(specs, min(4, len(specs)))
    for spec in specs:
        call = make(case, "cpu")
        emulate(call, spec)
        first = first or call
        assert all(equal(a, b) for a, b in zip(call.results(), first.results(), strict=True)), f"{spec} differs from {specs[0]}"


# Laws, of kernels.


def results(case: Case, **more) -> list[torch.Tensor]:
    call = make(case, "cpu")
    call = Call(case, call.memory, call.kwargs | more)
    emulate(call)
    return call.results()


@needs_emulator
def test_every_form_gives_the_same_bits():
    """The same splits dense, as [n, splits, heads, d_v], as entries of a batch, among more of them, and as a pair."""
    case = replace(DENSE, splits=2, rows=(3, 4), out_layout="dense")
    base = make(case, "cpu")
    o, lse = base.kwargs["o"], base.kwargs["lse"]
    want = results(case)
    assert all(equal(a, b) for a, b in zip(results(replace(case, layout="swapped")), want, strict=True))
    assert all(equal(a, b) for a, b in zip(results(case, o=(o[0], o[1]), lse=(lse[0], lse[1].t().contiguous().t())), want, strict=True))
    packed = [t.transpose(0, 1).flatten(0, 1) for t in (o, lse)]
    for extra in (0, 200):  # more of them in all, so another bound
        padded = [torch.cat([t, t.new_full((extra, *t.shape[1:]), NAN)]) for t in packed]
        starts = torch.arange(0, 7, 2, dtype=I32)
        got = results(case, o=padded[0], lse=padded[1], num_splits=starts)
        assert all(equal(a, b) for a, b in zip(got, want, strict=True))


@needs_emulator
@pytest.mark.parametrize("splits", [7, 40])
def test_batch_size_and_position_change_nothing(splits):
    case = replace(DENSE, splits=splits, rows=(70,), d_v=64)
    whole, call = results(case), make(case, "cpu")
    o, lse = call.kwargs["o"][:, 69:], call.kwargs["lse"][:, 69:]
    alone = results(case, o=o, lse=lse, out=torch.empty(1, 64, dtype=BF16), lse_out=torch.empty(1))
    assert all(equal(a[69:], b) for a, b in zip(whole, alone, strict=True))


@costly(6)
@needs_emulator
@pytest.mark.parametrize("empty_lse", [INF, -INF])
@pytest.mark.parametrize("kind", LSES)
@pytest.mark.parametrize("emulated", [False, True], ids=["reference", "kernel"])
def test_special_values_of_lse(kind, empty_lse, emulated):
    check_special(kind, empty_lse, "cpu", lambda call: emulate(call) if emulated else call.run())


@needs_emulator
@pytest.mark.parametrize("sink", [-INF, 0.0, 200.0, INF])
def test_extreme_sinks(sink):
    o, lse = torch.ones(2, 1, 64), torch.zeros(2, 1)
    out, lse_out = torch.full((1, 64), NAN), torch.full((1,), NAN)
    emulate(Call(DENSE, None, {"o": o, "lse": lse, "attn_sink": torch.tensor([sink]), "out": out, "lse_out": lse_out}))
    assert out[0, 0] == pytest.approx(2 / (2 + math.exp(sink)) if sink < 100 else 0.0, rel=1e-6) and lse_out[0] == pytest.approx(
        math.log(2)
    )


@needs_emulator
def test_a_single_split_is_copied_or_left_alone():
    o, lse = torch.randn(3, 4, 64).bfloat16(), torch.randn(3, 4)
    kwargs = {"o": o, "lse": lse, "num_splits": torch.tensor([0, 1, 3])}
    for skip in (False, True):
        out, lse_out = torch.full((2, 4, 64), 7.0, dtype=BF16), torch.full((2, 4), 7.0)
        emulate(Call(DENSE, None, kwargs | {"out": out, "lse_out": lse_out, "skip_single": skip}))
        want = (torch.full_like(o[0], 7.0), torch.full_like(lse[0], 7.0)) if skip else (o[0], lse[0])
        assert torch.equal(out[0], want[0]) and torch.equal(lse_out[0], want[1]) and not (out[1] == 7).all()


@needs_emulator
def test_num_splits_reaches_no_further_than_there_are_splits():
    """Its contents do not matter: the emulator stops at a load outside an operand."""
    o, lse = torch.randn(5, 2, 64), torch.randn(5, 2)
    for starts in ([0, 3, 9], [4, 2, 5], [-3, 2, 5], [7, 8, 9]):
        for dtype in (torch.int32, torch.int64):
            out = torch.full((2, 2, 64), NAN)
            emulate(Call(DENSE, None, {"o": o, "lse": lse, "num_splits": torch.tensor(starts, dtype=dtype), "out": out}))
            assert out.isfinite().all()


def test_new_outputs():
    o, lse = torch.randn(5, 2, 3, 64), torch.randn(5, 2, 3)
    out, lse_out = ssmgen.combine_splits(o.half(), lse, return_lse=True)
    assert (out.shape, out.dtype, lse_out.shape, lse_out.dtype) == ((2, 3, 64), F16, (2, 3), F32)
    assert ssmgen.combine_splits(o, lse, torch.tensor([0, 2, 5])).shape == (2, 2, 3, 64)
    given = torch.empty(2, 3, 64, dtype=BF16), torch.empty(2, 3)
    got = ssmgen.combine_splits((o[0], o[1]), (lse[0], lse[1]), out=given[0], lse_out=given[1], return_lse=True)
    assert got[0] is given[0] and got[1] is given[1]
    assert ssmgen.combine_splits(o, lse, lse_out=given[1]).shape == (2, 3, 64)
