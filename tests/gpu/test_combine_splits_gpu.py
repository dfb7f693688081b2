"""combine_splits on a card: the numerical contract, variants, the emulator, far offsets, graphs, dependent launches."""

from __future__ import annotations

from dataclasses import replace

import launch_laws as laws
import pytest
import torch
from bits import same as equal
from card_calls import arch, far, launch, needs_pdl, waits_for_its_producer
from combine_cases import BF16, DENSE, F16, F32, I32, I64, INF, LSES, PAIR, PREFIX, check_special, make
from emulated_calls import chosen, emulate, needs_emulator
from varying import named

import ssmgen
from ssmgen.bench.timing import host_us
from ssmgen.compat import flashinfer, vllm
from ssmgen.errors import ArgumentError
from ssmgen.families.combine_splits import call as op
from ssmgen.families.combine_splits import spec as kernels
from ssmgen.select import registry
from ssmgen.spec.kernel import Pdl

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


LARGE = [
    *[replace(PREFIX, id=f"mla-{s}", counts=(s,), rows=(128,), base=2, base_out="e", empty_lse=INF) for s in (2, 16, 64, 130)],
    replace(PREFIX, id="mla-batch", counts=tuple(1 + i % 5 for i in range(64)), rows=(128,), base=2, skip_single=True),
    *[replace(DENSE, id=f"gqa-{n}", splits=8, rows=(n, 32), o=BF16, base=2, layout="swapped") for n in (1, 16, 500)],
    replace(DENSE, id="wide-sink", splits=33, rows=(77, 16), d_v=1024, o=F16, out=F16, sink=BF16),
    replace(PAIR, id="cascade", rows=(700, 32), mask=True),
    replace(PAIR, id="cascade-in-place", rows=(700, 32), d_v=512, in_place=True, mask=True),
]


@pytest.mark.parametrize("empty_lse", [INF, -INF])
@pytest.mark.parametrize("kind", LSES)
def test_special_values_of_lse(kind, empty_lse):
    check_special(kind, empty_lse, DEVICE, lambda call: call.run())


VARIED = [
    replace(DENSE, id="dense-s40", splits=40, rows=(50, 3)),
    replace(DENSE, id="dense-s300-sink", splits=300, sink=F32, rows=(9,), d_v=260),
    replace(DENSE, id="dense-bf16-s7-d64", splits=7, d_v=64, o=BF16, layout="gaps", rows=(30, 5)),
    replace(DENSE, id="dense-f16-odd", splits=21, d_v=68, o=F16, layout="odd", rows=(30, 5)),
    replace(PREFIX, id="prefix", counts=(3, 0, 1, 30, 64), rows=(16,)),
    replace(PAIR, id="pair-bf16", rows=(70, 32)),
    replace(PAIR, id="pair-in-place", rows=(70, 32), d_v=512, in_place=True, mask=True),
]


@named(*VARIED)
def test_variants_are_bit_equal(case):
    laws.variants_are_bit_equal("combine_splits", case, laws.some(kernels.space(make(case, DEVICE).problem, arch()), 20))


@pytest.mark.parametrize("splits", [2, 7, 40, 200])
def test_batch_size_and_position_change_nothing(splits):
    """The last of 3000 rows alone: another rule serves it."""
    o, lse = torch.randn(splits, 3000, 128, device=DEVICE), 3 * torch.randn(splits, 3000, device=DEVICE)
    whole = ssmgen.combine_splits(o, lse, return_lse=True)
    alone = ssmgen.combine_splits(o[:, 2999:], lse[:, 2999:], return_lse=True)
    assert all(equal(a[2999:], b) for a, b in zip(whole, alone, strict=True))


@needs_emulator
@named(
    replace(DENSE, id="dense-s32", splits=32, spread=0.0, empty=0.0),
    replace(DENSE, id="dense-s256-bf16", splits=256, spread=0.0, empty=0.0, o=BF16, rows=(3,)),
    replace(PREFIX, id="prefix", counts=(1, 2, 0, 64), spread=0.0, empty=0.0, d_v=128),
    replace(PAIR, id="pair", spread=0.0, empty=0.0),
)
def test_emulator_agrees_bit_for_bit_where_weights_are_exact(case):
    """Equal LSEs, powers of two of them: nothing depends on how exponentials and reciprocals are approximated."""
    card, host = make(case, DEVICE), make(case, "cpu")
    spec = chosen(card, arch())
    card.run()
    emulate(host, spec, arch())
    assert all(equal(a.cpu(), b) for a, b in zip(card.results(), host.results(), strict=True))


# Offsets above 2^31 elements.


@pytest.mark.parametrize("odd", [0, 1], ids=["aligned", "odd"])
@pytest.mark.parametrize("axis", ["splits", "rows", "out"])
def test_tensors_above_2_31_elements(axis, odd, room):
    gap = 2**30 + 64 + odd
    shape = (3, 2, 3, 64)
    near, lse = torch.randn(shape, device=DEVICE).bfloat16(), torch.randn(3, 2, 3, device=DEVICE)
    want, want_lse = ssmgen.combine_splits(near, lse, return_lse=True)
    if axis == "out":
        out = far((2, 3, 64), (192, gap, 1))
        ssmgen.combine_splits(near, lse, out=out)
        assert equal(out, want)
        return
    strides = {"splits": (gap, 192, 64, 1), "rows": (128, 64, gap, 1)}[axis]
    o = far(shape, strides).copy_(near)
    got, got_lse = ssmgen.combine_splits(o, lse, return_lse=True)
    assert equal(got, want) and equal(got_lse, want_lse)
    starts = torch.tensor([0, 3], device=DEVICE)
    assert equal(ssmgen.combine_splits(o, lse, starts)[0], want)


# Repetition, graphs.


def test_many_launches_are_equal_in_place_too():
    """A barrier is needed in place: other warps of a block may still read a row's LSE while it is written."""
    laws.launches_write_the_same_bits([make(replace(PAIR, rows=(700, 32), d_v=512, in_place=True, empty=0.0), DEVICE)], 300)


@named(replace(PREFIX, d_v=1020, o=F16), replace(PAIR, d_v=1012))
def test_the_first_launch_may_be_in_a_graph(case):
    laws.the_first_launch_may_be_in_a_graph("combine_splits", case)


def test_a_graph_follows_num_splits():
    """A captured call reads the counts that are present at its replay."""
    o, lse = torch.randn(12, 4, 64, device=DEVICE), torch.randn(12, 4, device=DEVICE)
    starts, out = torch.tensor([0, 3, 4, 12], dtype=I32, device=DEVICE), torch.empty(3, 4, 64, device=DEVICE)
    ssmgen.combine_splits(o, lse, starts, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ssmgen.combine_splits(o, lse, starts, out=out)
    starts.copy_(torch.tensor([0, 0, 11, 12]))
    graph.replay()
    assert equal(out, ssmgen.combine_splits(o, lse, starts)) and not out[0].any()


def test_a_call_like_one_before_is_looked_at_again():
    laws.a_call_like_one_before_is_looked_at_again("combine_splits", DENSE)
    call = make(DENSE, DEVICE)
    with pytest.raises(ArgumentError, match="out overlaps o in memory"):
        ssmgen.combine_splits(call.kwargs["o"], call.kwargs["lse"], out=call.kwargs["o"][0])


def test_host_time_is_microseconds():
    """A guard against checks on the hot path, not a measurement."""
    call = make(PREFIX, DEVICE)
    assert host_us(call.run, blocks=5) < 60


def test_engines_signatures():
    va, vb = torch.randn(2, 70, 32, 128, device=DEVICE).half()
    sa, sb = torch.randn(2, 70, 32, device=DEVICE)
    want = ssmgen.combine_splits((va, vb), (sa, sb), lse_base=2, return_lse=True)
    stacked = torch.stack([va, vb], 1), torch.stack([sa, sb], 1)
    starts = torch.arange(0, 141, 2, dtype=I64, device=DEVICE)
    results = [flashinfer.merge_state(va, sa, vb, sb), flashinfer.merge_states(*stacked)]
    results.append(flashinfer.variable_length_merge_states(*(t.flatten(0, 1) for t in stacked), starts))
    v, s = va.clone(), sa.clone()
    flashinfer.merge_state_in_place(v, s, vb, sb, torch.ones(70, dtype=torch.bool, device=DEVICE))
    assert all(equal(a, b) for got in (*results, (v, s)) for a, b in zip(got, want, strict=True))
    out = torch.empty_like(va)
    vllm.merge_attn_states(out, va, sa.t().contiguous(), vb, sb.t())
    assert equal(out, ssmgen.combine_splits((va, vb), (sa, sb)))


# Programmatic dependent launch.


def chain(pdl: bool) -> list[torch.Tensor]:
    """Each call merges the output of the call before."""
    g = torch.Generator(DEVICE).manual_seed(0)
    o, lse = (torch.randn(2, 64, *rest, generator=g, device=DEVICE) for rest in ((512,), ()))
    outs = []
    for i in range(16):
        out, total = ssmgen.combine_splits(o, lse, return_lse=True, pdl=pdl)
        o[i % 2], lse[i % 2] = out, total - i
        ssmgen.combine_splits((o[0], o[1]), (lse[0], lse[1]), out=o[1], lse_out=lse[1], pdl=pdl)
        outs += [out, total]
    torch.cuda.synchronize()
    return [*outs, o, lse]


@needs_pdl
def test_pdl_on_and_off_are_bit_equal_on_a_chain():
    laws.pdl_changes_no_bit(chain)


@needs_pdl
@pytest.mark.parametrize(
    ("case", "rule", "trigger"),
    [
        pytest.param(replace(DENSE, o=BF16, empty=0.0, splits=40), "parts-8", Pdl.TRIGGER_LOADED, id="dense"),
        pytest.param(replace(DENSE, o=BF16, empty=0.0, splits=12), "parts-8", Pdl.TRIGGER_TOP, id="dense-few"),
        pytest.param(replace(PREFIX, o=BF16, empty=0.0), "parts-8", Pdl.TRIGGER_LOADED, id="prefix"),
        pytest.param(replace(PAIR, empty=0.0), "parts-8", Pdl.TRIGGER_TOP, id="pair"),
    ],
)
def test_pdl_waits_for_a_producer_that_triggers_early(case, rule, trigger):
    """The upstream kernel still writes o when this one starts. Without its wait this kernel reads too early."""
    call = make(case, DEVICE)
    found = registry.explain(op.OPERATOR, call.problem, op.size_of(call.views), arch(), True).chosen
    assert (found.rule, found.spec.pdl) == (rule, trigger)
    hasty = launch(found.spec, op.FAMILY, call.views, call.options, call.operands, hasty=found.spec.kernels)
    waits_for_its_producer(lambda pdl: call.run(pdl=pdl), hasty, call.memory.buffers["o"][0], call.operands["lse_out"], call.kwargs["out"])
