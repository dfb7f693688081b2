"""gated_rms_norm on a card: the numerical contract, variants, far offsets, graphs, dependent launches."""

from __future__ import annotations

from dataclasses import replace

import launch_laws as laws
import pytest
import torch
from bits import same as equal
from card_calls import arch, far, launch, needs_pdl, waits_for_its_producer
from norm_cases import F16, F32, GDN, KDA, MAMBA, PLAIN, make
from varying import named

import ssmgen
from ssmgen.bench.timing import host_us
from ssmgen.errors import ArgumentError
from ssmgen.families.gated_rms_norm import call as op
from ssmgen.families.gated_rms_norm import spec as kernels
from ssmgen.select import registry
from ssmgen.spec.kernel import Pdl

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


LARGE = [
    replace(MAMBA, id="mamba2-2.7b", rows=(300,), groups=1, size=5120),
    replace(MAMBA, id="nemotron-h", rows=(257,), groups=8, size=1024, x=F32, layout="gaps"),
    replace(GDN, id="qwen3.5", rows=(128,), groups=64),
    replace(KDA, id="kimi", rows=(99, 4), groups=32, in_place="x"),
    replace(PLAIN, id="plain-16384", rows=(200,), size=16384, x=F32, out=F32),
    replace(GDN, id="odd", rows=(777,), groups=3, size=1500, layout="odd", x=F16, gate=F32, out=F16),
]


VARIED = [
    replace(GDN, id="gdn-128", rows=(33,), out=F32),
    replace(GDN, id="gdn-100-odd", rows=(40,), size=100, layout="odd", x=F16, out=F32),
    replace(KDA, id="kda-64-f32", rows=(40,), size=64, x=F32, out=F32),
    replace(MAMBA, id="mamba-1024", rows=(20,), out=F32),
    replace(MAMBA, id="mamba-5120", rows=(9,), size=5120, in_place="x"),
    replace(PLAIN, id="plain-3000", rows=(30,), size=3000, out=F32),
    replace(GDN, id="gdn-16384", rows=(9,), groups=2, size=16384, out=F32),
]


@named(*VARIED)
def test_variants_are_bit_equal(case):
    laws.variants_are_bit_equal("gated_rms_norm", case, laws.some(kernels.space(make(case, DEVICE).problem, arch()), 24))


@pytest.mark.parametrize(("groups", "size"), [(4, 64), (32, 128), (1, 5120), (8, 1024)])
def test_batch_size_and_position_change_nothing(groups, size):
    """The last of 3000 rows alone: another rule serves it."""
    x, gate = torch.randn(2, 3000, groups, size, device=DEVICE)
    weight = torch.randn(groups * size, device=DEVICE)
    whole = ssmgen.gated_rms_norm(x, gate, weight)
    assert equal(ssmgen.gated_rms_norm(x[2999:], gate[2999:], weight), whole[2999:])


# Offsets above 2^31 elements.


@pytest.mark.parametrize("odd", [0, 1], ids=["aligned", "odd"])
@pytest.mark.parametrize("name", ["x", "gate", "out"])
@pytest.mark.parametrize("axis", ["rows", "groups"])
def test_tensors_above_2_31_elements(axis, name, odd, room):
    gap = 2**30 + 64 + odd
    shape, strides = ((3, 2, 128), (gap, 128, 1)) if axis == "rows" else ((2, 3, 128), (128, gap, 1))
    near = {n: torch.randn(shape, device=DEVICE).bfloat16() for n in ("x", "gate", "out")}
    weight = torch.randn(128, device=DEVICE)
    want = ssmgen.gated_rms_norm(near["x"], near["gate"], weight)
    moved = far(shape, strides).copy_(near[name])
    named_far = near | {name: moved}
    ssmgen.gated_rms_norm(named_far["x"], named_far["gate"], weight, out=named_far["out"])
    assert equal(named_far["out"], want)


# Repetition, graphs.


def test_many_launches_are_equal_in_place_too():
    laws.launches_write_the_same_bits([make(replace(MAMBA, rows=(500,), size=5120, groups=1, in_place="x"), DEVICE)], 300)


@named(replace(MAMBA, size=1236), replace(GDN, size=124))
def test_the_first_launch_may_be_in_a_graph(case):
    laws.the_first_launch_may_be_in_a_graph("gated_rms_norm", case)


def test_a_call_like_one_before_is_looked_at_again():
    laws.a_call_like_one_before_is_looked_at_again("gated_rms_norm", GDN)
    call = make(GDN, DEVICE)
    x = call.kwargs["x"]
    with pytest.raises(ArgumentError, match="out overlaps weight in memory"):
        ssmgen.gated_rms_norm(x, call.kwargs["gate"], x[0, 0], out=x)


def test_host_time_is_microseconds():
    """A guard against checks on the hot path, not a measurement."""
    call = make(GDN, DEVICE)
    assert host_us(call.run, blocks=5) < 60


# Programmatic dependent launch.


def chain(pdl: bool) -> list[torch.Tensor]:
    """Each call normalises the output of the call before, out of place and in place."""
    g = torch.Generator(DEVICE).manual_seed(0)
    x, gate = torch.randn(2, 64, 8, 1024, generator=g, device=DEVICE).bfloat16()
    weight = torch.randn(1024, generator=g, device=DEVICE)
    outs = []
    for _ in range(16):
        y = ssmgen.gated_rms_norm(x, gate, weight, pdl=pdl)
        ssmgen.gated_rms_norm(y, x, out=x, norm_before_gate=True, activation="sigmoid", pdl=pdl)
        ssmgen.gated_rms_norm(x, y, weight, out=x, pdl=pdl)
        outs += [y, x.clone()]
    torch.cuda.synchronize()
    return outs


@needs_pdl
def test_pdl_on_and_off_are_bit_equal_on_a_chain():
    laws.pdl_changes_no_bit(chain)


@needs_pdl
@pytest.mark.parametrize(
    ("case", "rule", "trigger"),
    [
        pytest.param(replace(GDN, rows=(40,)), "few-groups", Pdl.TRIGGER_TOP, id="gdn"),
        pytest.param(replace(GDN, rows=(16,)), "few-groups", Pdl.TRIGGER_FIRST, id="gdn-first"),
        pytest.param(replace(MAMBA, groups=8), "few-groups", Pdl.TRIGGER_FIRST, id="mamba"),
        pytest.param(replace(MAMBA, groups=1, size=5120), "few-groups", Pdl.TRIGGER_FIRST, id="mamba-one-group"),
        pytest.param(replace(GDN, rows=(300,)), "some-groups", Pdl.TRIGGER_TOP, id="gdn-some-groups"),
        pytest.param(replace(GDN, rows=(1100,)), "many-groups", Pdl.TRIGGER_LOADED, id="gdn-many-groups"),
    ],
)
def test_pdl_waits_for_a_producer_that_triggers_early(case, rule, trigger):
    """The upstream kernel still writes x when this one starts. Without its wait this kernel reads too early."""
    call = make(case, DEVICE)
    found = registry.explain(op.OPERATOR, call.problem, op.size_of(call.views), arch(), True).chosen
    assert (found.rule, found.spec.pdl) == (rule, trigger)
    hasty = launch(found.spec, op.FAMILY, call.views, call.options, call.operands, hasty=found.spec.kernels)
    waits_for_its_producer(lambda pdl: call.run(pdl=pdl), hasty, call.memory.buffers["x"][0], call.out, call.out)
