"""causal_conv1d and causal_conv1d_update on a card: the numerical contract, laws, variants, the emulator."""

from __future__ import annotations

import random
from dataclasses import replace

import conv_laws as laws
import launch_laws
import pytest
import torch
from card_calls import arch, prepare
from conv_cases import FIRST, I32, LAST, POOL, RING, ROLL, SHIFT, SHORT, STATEFUL, Case, UpdateCase, make, make_update
from conv_laws import LAST_AXIS, Draw, activated, assert_matches, bits, equal, expected
from emulated_calls import chosen, needs_emulator
from ssu_cases import BF16, F16, F32
from varying import named

import ssmgen
from ssmgen import emulator
from ssmgen.families.causal_conv1d import spec as conv
from ssmgen.families.causal_conv1d_update import spec as step
from ssmgen.spec.arguments import Arguments

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
forward, update = ssmgen.causal_conv1d, ssmgen.causal_conv1d_update


# The grids of causal-conv1d's own tests, at bounds instead of tolerances.

LENGTHS = (1, 2, 8, 16, 32, 64, 128, 129, 130, 151, 256, 372, 512, 784, 1024, 1134, 2048, 4096)
NAMES = {F32: "f32", F16: "f16", BF16: "bf16"}


def convolution(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum, absolute sum) in float64, of [batch, dim, width - 1 + length]."""
    width = weight.shape[1]
    length = inputs.shape[2] - width + 1
    start = torch.zeros(weight.shape[0], device=inputs.device, dtype=torch.float64) if bias is None else bias.double()
    total, size = (t[:, None].expand(inputs.shape[0], -1, length) for t in (start, start.abs()))
    for j in range(width):
        term = weight[:, j, None].double() * inputs[..., j : j + length].double()
        total, size = total + term, size + term.abs()
    return total, size


@pytest.mark.parametrize("dressed", [False, True], ids=["bare", "silu-bias"])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_grid_of_lengths(last, dtype, width, dressed):
    """Slices of wider tensors, with and without states on either side."""
    draw = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device=DEVICE).to(dtype)

    made = []
    for dim in (64, 4096 + 32):
        weight, bias = normal(dim, width, dtype=F32), normal(dim, dtype=F32) if dressed else None
        past = normal(2, width - 1, dim).transpose(1, 2)
        for length in LENGTHS:
            wide = normal(2, length, 256 + dim + 64).transpose(1, 2) if last else normal(2, 256 + dim + 64, length)
            for initial in (None, past):
                for final in (False, True):
                    options = {"activation": "silu" if dressed else None, "initial_states": initial, "return_final_states": final}
                    made.append(((wide[:, 256 : 256 + dim], weight, bias), options))
    prepare([ssmgen.explain(forward, *args, **options).chosen.spec for args, options in made])
    for (x, weight, bias), options in made:
        initial, length = options["initial_states"], x.shape[2]
        before = x.new_zeros(2, x.shape[1], width - 1) if initial is None else initial
        inputs = torch.cat([before, x], 2)
        want, bound = activated(*convolution(inputs, weight, bias), width, dressed, dtype)
        out = forward(x, weight, bias, **options)
        if options["return_final_states"]:
            out, final = out
            assert equal(final, inputs[..., length:]), f"final states of {list(x.shape)}"
        assert ((out.double() - want).abs() <= bound).all(), f"output of {list(x.shape)} {options}"
        assert (out.stride(1) == 1) == (last or length == 1), "out is laid out like x"


@pytest.mark.parametrize("advance", [SHIFT, RING], ids=["shift", "ring"])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
def test_grid_of_updates(dtype, width, advance):
    """64 sequences, some of them padding, in a pool; the state is longer than needed."""
    for i, tokens in enumerate((None, 4, 5)):
        dim, extra = (2048, 2064, 4096)[(i + width) % 3], random.Random(width + i).randrange(11)
        where = {"state": "channels", "extra": extra, "batch": 64, "dim": dim, "tokens": tokens, "layout": "channels"}
        call = make_update(UpdateCase("grid", advance, width, x=dtype, weight=F32, bias=F32, **where), DEVICE)
        want = expected(call)
        call.run()
        assert_matches(call, want)


# Laws.


@LAST_AXIS
@pytest.mark.parametrize("width", [2, 4, 7])
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
def test_forward_equals_token_by_token_updates(dtype, width, last):
    laws.forward_equals_updates(forward, update, Draw(DEVICE, dtype, last, dim=264, width=width), batch=5, length=70)


@pytest.mark.parametrize("ring", [False, True], ids=["shift", "ring"])
@pytest.mark.parametrize("state_len", [3, 9])
def test_several_tokens_equal_single_ones(state_len, ring):
    for last in (False, True):
        laws.several_tokens_equal_single_ones(update, Draw(DEVICE, BF16, last, dim=256), state_len, (*range(1, 17), 20), ring)


@pytest.mark.parametrize(("state_len", "tokens"), [(3, 1), (7, 3), (4, 6)])
def test_ring_equals_shift(state_len, tokens):
    laws.ring_equals_shift(update, Draw(DEVICE, BF16, True, dim=256), state_len, tokens)


@LAST_AXIS
@pytest.mark.parametrize("tokens", [1, 4, 7])
def test_speculation_equals_the_accepted_history(tokens, last):
    laws.speculation_equals_the_accepted_history(forward, update, Draw(DEVICE, BF16, last, dim=256), tokens, steps=30)


@pytest.mark.parametrize("law", [laws.a_chain_is_no_tree, laws.each_path_equals_the_path_alone, laws.the_order_of_siblings_changes_nothing])
@pytest.mark.parametrize(("last", "state_len", "width"), [(False, 3, 4), (False, 4, 4), (True, 6, 3), (True, 7, 8)])
def test_draft_trees(law, last, state_len, width):
    for dtype in NAMES:
        law(update, Draw(DEVICE, dtype, last, dim=264, width=width), state_len)


@LAST_AXIS
def test_packed_sequences_equal_each_alone(last):
    laws.packed_equals_each_sequence(forward, Draw(DEVICE, BF16, last, dim=264), (5, 0, 3000, 1, 2, 33))


@LAST_AXIS
def test_segments_equal_sequences(last):
    laws.segments_equal_sequences(forward, Draw(DEVICE, BF16, last, dim=264), (3, 1, 40, 2, 1500, 7))


@LAST_AXIS
def test_split_at_any_point_equals_the_whole(last):
    laws.split_equals_whole(forward, Draw(DEVICE, BF16, last, dim=264), (*range(1, 30), 255, 256, 257, 511, 512, 513, 2000), 2001)


@LAST_AXIS
def test_many_packed_sequences_equal_segments(last):
    """40 000 sequences of 0 to 5 tokens: the search for a piece's sequence takes four steps."""
    lengths = torch.randint(0, 6, (40_000,), generator=torch.Generator().manual_seed(1)).tolist()
    draw = Draw(DEVICE, BF16, last, dim=64)
    x = draw.tokens(length=sum(lengths))
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int().to(DEVICE)
    packed = forward(x, *draw.weights, activation="silu", query_start_loc=starts)
    assert equal(packed[None], forward(x[None], *draw.weights, activation="silu", seq_idx=ids[None]))


VARIED = [
    replace(FIRST, id="first-states", dim=64, length=5000, **STATEFUL),
    replace(FIRST, id="first-packed-shifted", layout="first_slice", lengths=(3, 0, 3000, 1, 270, 511), **POOL),
    replace(FIRST, id="first-packed-beside", dim=64, lengths=(253, 1, 1, 1, 250, 3, 0, 2, 500, 2, 1, 9, 0) * 3, **POOL),
    replace(FIRST, id="first-f32-seq-idx", x=F32, seq_idx=True),
    replace(LAST, id="last-seq-idx", seq_idx=True, dim=264, length=700),
    replace(LAST, id="last-packed", dim=264, lengths=(*SHORT, 900), **POOL),
    replace(LAST, id="last-odd-pool", layout="last_odd", dim=517, lengths=(*SHORT, 300), **POOL),
    replace(LAST, id="last-odd-states", layout="last_odd", dim=261, length=900, **STATEFUL),
    UpdateCase("shift", dim=2064, batch=9),
    UpdateCase("shift-t3-odd", tokens=3, dim=261, layout="odd", state="any"),
    UpdateCase("roll-t5", ROLL, tokens=5, dim=264),
    UpdateCase("ring-packed", RING, state="channels", dim=264, lengths=(3, 1, 0, 9, 2), extra=2),
    UpdateCase("tree-t8", tokens=8, parents=I32, dim=264, saved="windows"),
]


@named(*VARIED)
def test_variants_are_bit_equal(case):
    space = (conv if isinstance(case, Case) else step).space
    launch_laws.variants_are_bit_equal("causal_conv1d", case, launch_laws.some(space(make(case, DEVICE).problem, arch()), 16))


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_batch_size_and_position_change_nothing(last):
    """Row 0 alone, and the same row at the end of a batch of 70; the rule for large inputs and the one for small ones agree."""
    draw = Draw(DEVICE, BF16, last, dim=1024)
    x = draw.tokens(70, length=256)
    whole, alone = (forward(t, *draw.weights, activation="silu") for t in (x, x[69:]))
    assert equal(whole[69:], alone)
    states = draw.states(70)
    kept = states[69:].clone()
    out = update(x[..., 0], states, *draw.weights)
    assert equal(out[69:], update(x[69:, :, 0], kept, *draw.weights)) and equal(states[69:], kept)


# Sequences that are not there.


def test_all_sequences_padded():
    for case in (replace(LAST, id="p", lengths=SHORT, **POOL), UpdateCase("u", tokens=3)):
        call = make(case, DEVICE)
        call.kwargs["conv_state_indices"].fill_(-1)
        state = next(call.views[n] for n in ("conv_states", "conv_state") if n in call.views)
        before = bits(state).clone()
        call.run()
        assert not call.views["out"].any() and torch.equal(bits(state), before)


def test_no_sequences_and_no_channels():
    weight = torch.zeros(8, 4, device=DEVICE)
    nothing = torch.zeros(0, 8, 5, device=DEVICE)
    assert forward(nothing, weight).shape == (0, 8, 5)
    assert forward(nothing[0:0, :, 0].t(), weight, query_start_loc=torch.zeros(1, dtype=I32, device=DEVICE)).shape == (8, 0)
    state = torch.ones(2, 8, 3, device=DEVICE)
    assert update(nothing, state, weight).shape == (0, 8, 5) and (state == 1).all()
    assert forward(torch.zeros(2, 0, 5, device=DEVICE), weight[:0]).shape == (2, 0, 5)


# The emulator.


@needs_emulator
@named(
    replace(FIRST, id="first-packed", lengths=(3, 0, 300, 1), **POOL, silu=False),
    replace(LAST, id="last-states-f32", **STATEFUL, silu=False, x=F32),
    replace(LAST, id="last-odd-f16", layout="last_odd", dim=37, silu=False, x=F16, seq_idx=True),
    UpdateCase("shift-t3", tokens=3, silu=False),
    UpdateCase("roll-any", ROLL, tokens=4, state="any", dim=37, layout="odd", silu=False, x=F32),
    UpdateCase("ring-packed", RING, state="channels", lengths=(3, 1, 0, 9), extra=1, silu=False, saved="channels"),
)
def test_emulator_agrees_bit_for_bit_without_exponentials(case):
    card, host = make(case, DEVICE), make(case, "cpu")
    spec = chosen(card, arch())
    card.run()
    values = host.op.kernel_values(spec, host.views, host.options)
    packed = Arguments(spec, values).at([t.data_ptr() for t in host.operands.values()])
    emulator.run(spec, arch(), host.op.grid_of(spec, host.views), packed, host.operands, tuple(host.written))
    assert all(equal(a.cpu(), b) for a, b in zip(card.results(), host.results(), strict=True))
