"""causal_conv1d if sequences cross pieces of a row, if indices repeat, and if rows of channels have any address."""

from __future__ import annotations

from dataclasses import replace

import conv_laws as laws
import pytest
import torch
from conv_cases import FIRST, LAST, POOL, SHORT, STATEFUL, Case, make
from conv_laws import Draw, assert_matches, emulate, emulated, equal, expected
from emulated_calls import SM90, needs_emulator
from selection import costly
from ssu_cases import BF16, F16, F32
from varying import named, vary

from ssmgen.families.causal_conv1d import call as op
from ssmgen.families.causal_conv1d import spec as conv
from ssmgen.families.causal_conv1d.spec import ConvSpec
from ssmgen.select import registry
from ssmgen.spec.kernel import Loads, Pdl

pytestmark = needs_emulator
forward = emulated(op)

BESIDE = (253, 1, 1, 1, 250, 3, 0, 2, 500, 2, 1, 9, 0, 0)  # begin up to 3 tokens before every 256th, or there
IN_PLACE = {"initial": True, "final": "in_place"}


@costly(1)
@named(
    *vary(replace(FIRST, id="aligned", dim=3, lengths=BESIDE), pool=POOL, in_place=IN_PLACE, w8={**IN_PLACE, "width": 8, "x": F32}),
    *vary(replace(FIRST, id="slice", layout="first_slice", lengths=BESIDE), pool=POOL, w2={**POOL, "width": 2}, w1={"width": 1}),
)
def test_sequences_that_begin_beside_the_ends_of_pieces(case):
    """The results are right and bit-equal for pieces of every size."""
    first = None
    specs = {s.vectors: s for s in conv.space(make(case, "cpu").problem, SM90) if s.pdl is Pdl.TRIGGER_LOADED}
    for spec in specs.values():
        call = make(case, "cpu")
        want = expected(call)
        emulate(call, spec)
        assert_matches(call, want)
        first = first or call.results()
        assert all(equal(a, b) for a, b in zip(call.results(), first, strict=True)), str(spec)
    assert sorted(specs) == [1, 2, 4]


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_tokens_of_no_sequence_get_no_output(last):
    """Tokens before the first sequence, and after the last one, which is empty, get no output. They change no other result."""
    draw = Draw("cpu", BF16, last)
    x, out = draw.tokens(length=1100), draw.tokens(length=1100)
    before = out.clone()
    forward(x, *draw.weights, query_start_loc=draw.ints([600, 600, 603, 1060, 1060]), out=out)
    inside = slice(600, 1060)
    assert equal(out[:, :600], before[:, :600]) and equal(out[:, 1060:], before[:, 1060:])
    assert equal(out[:, inside], forward(x[:, inside], *draw.weights, query_start_loc=draw.ints([0, 0, 3, 460])))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_segments_longer_than_vectors_of_a_warp(dtype):
    laws.segments_equal_sequences(forward, Draw("cpu", dtype, False, dim=6), lengths=(3, 1, 700, 2, 259, 6))


@named(
    replace(FIRST, id="bf16", seq_idx=True, length=1200, batch=1, dim=6),
    replace(FIRST, id="w8-f32", seq_idx=True, width=8, x=F32, length=600),
)
def test_indices_that_come_back_join_what_they_parted(case):
    """Indices 0 1 0: the last token's taps skip only the token in the middle."""
    call = make(case, "cpu")
    ids, x = call.views["seq_idx"], call.views["x"]
    g = torch.Generator().manual_seed(0)
    ids.zero_()  # whole vectors of one sequence, except the tokens set below
    ids[:, 255] = 1
    ids[:, 259] = -1
    ids[:, 300:400] = torch.randint(-1, 2, (100,), generator=g)
    ids[:, 512:] = -1
    ids[:, 590:] = 3
    x.copy_(torch.randn(x.shape, generator=g)).masked_fill_((ids < 0)[:, None], float("nan"))
    call.memory.seal()
    want = expected(call)
    emulate(call)
    assert_matches(call, want)


WORDS = replace(LAST, id="words", layout="last_odd", dim=300, length=30)  # the second of three warps reads words, of odd and of even rows


@named(
    *vary(WORDS, odd={}, even_out={"out": "last"}, f16={"x": F16, "width": 3}, taps={"taps": "odd"}, dim={"dim": 301}, w8={"width": 8}),
    *vary(WORDS, states=STATEFUL, ids={"seq_idx": True}, packed={"lengths": SHORT, **POOL}, bare={"bias": None, "silu": False}),
)
def test_rows_of_channels_at_odd_places(case):
    call = make(case, "cpu")
    assert call.problem.words and (call.problem.taps is Loads.VECTOR) == (case.taps == "dense" and case.dim == 300)
    want = expected(call)
    emulate(call)
    assert_matches(call, want)


def chosen(case: Case, kib: int) -> ConvSpec:
    return registry.select(op.OPERATOR, make(case, "cpu").problem, kib, SM90, True)


@named(replace(LAST, id="w7", width=7), replace(LAST, id="w8-f16-packed", width=8, x=F16, lengths=SHORT))
def test_wide_convolutions_of_large_inputs_have_longer_pieces(case):
    assert chosen(case, 1024).vectors < chosen(case, 2**20).vectors == 16
    call = make(case, "cpu")
    want = expected(call)
    emulate(call, chosen(case, 2**20))
    assert_matches(call, want)
