"""selective_state_update on a card: the numerical contract."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import launch_laws
import pytest
import torch
from bits import bits
from card_calls import arch, launch, needs_pdl, waits_for_its_producer
from ssu_cases import BF16, F16, F32, Case, assert_matches, expected, make_call

import ssmgen
from ssmgen.compat.mamba_ssm import selective_state_update as mamba_signature
from ssmgen.families.selective_state_update import planning as op
from ssmgen.families.selective_state_update import spec as family
from ssmgen.launch import runtime
from ssmgen.select import registry
from ssmgen.spec.kernel import Pdl

pytestmark = pytest.mark.gpu

M2 = Case("m2", heads=16, groups=2, state=BF16, index=torch.int32, batch=4)
M1 = Case("m1", headdim=256, d_state=16, tied=False, z=BF16, index=torch.int32, batch=4)


def test_out_is_allocated_like_x():
    call = make_call(M2, "cuda")
    given = call.kwargs.pop("out")
    out = ssmgen.selective_state_update(*call.args, **call.kwargs)
    assert out.shape == given.shape and out.dtype == call.args[1].dtype and out.is_contiguous()


def ready(spec, call, hasty=()) -> Any:
    """One given variant, independent of the registry's choice, ready to run."""
    named = {n: call.named[n] for n in op.OPERANDS.names if n in call.named}
    views = op.views_of(named, call.options, problems := [])
    assert not problems
    return launch(spec, op.FAMILY, views, call.options, named, hasty)


def problem_of(call) -> family.SsuProblem:
    named = call.named
    return op.problem_of(op.views_of(named, call.options, []), {n: t.data_ptr() for n, t in named.items()}, call.options)


@pytest.mark.parametrize(
    "case",
    [
        Case("m2-bf16", heads=4, groups=2, state=BF16, out=F32, index=torch.int32),
        Case("m2-f32", heads=4, groups=2, state=F32, out=F32, index=torch.int32),
        Case("m2-f16-d96", heads=3, headdim=80, d_state=96, state=F16, out=F32),
        Case("m2-d256", heads=2, d_state=256, state=BF16, out=F32),
        Case("m1-d16", headdim=256, d_state=16, tied=False, z=BF16, out=F32),
        Case("m1-d16-bf16", headdim=256, d_state=16, tied=False, state=BF16, out=F32),
        Case("m1-d128", headdim=128, d_state=128, tied=False, out=F32),
    ],
    ids=lambda c: c.id,
)
def test_variants_are_bit_equal(case):
    arch = runtime.device_arch(torch.cuda.current_device())
    specs = list(family.space(problem_of(make_call(case, "cuda")), arch))
    chosen = random.Random(0).sample(specs, min(40, len(specs)))
    layouts = {(s.lanes, s.vec) for s in specs}
    chosen += [next(s for s in specs if (s.lanes, s.vec) == layout) for layout in sorted(layouts)]
    first = None
    for spec in chosen:
        call = make_call(case, "cuda")
        ready(spec, call)()
        torch.cuda.synchronize()
        result = bits(call.args[0]), bits(call.kwargs["out"])
        first = first or result
        assert all(torch.equal(a, b) for a, b in zip(result, first, strict=True)), f"{spec} differs from {chosen[0]}"
    assert len(layouts) > 2


def test_element_loads_equal_vector_loads():
    """The same numbers at aligned and at odd places."""
    case = Case("a", heads=16, groups=2, state=BF16, out=F32)
    aligned, odd = make_call(case, "cuda"), make_call(replace(case, conv_slices=True, slot_gap=1), "cuda")
    for name in ("state", "x", "B", "C"):
        odd.named[name].copy_(aligned.named[name])
    args = list(aligned.args)
    args[0], args[1], args[4], args[5] = odd.args[0], odd.args[1], odd.args[4], odd.args[5]
    a = ssmgen.selective_state_update(*aligned.args, **aligned.kwargs)
    b = ssmgen.selective_state_update(*args, **odd.kwargs)
    assert torch.equal(bits(a), bits(b)) and torch.equal(bits(aligned.args[0]), bits(odd.args[0]))
    assert any("state_loads=element,operand_loads=element" in text for text in ssmgen.stats())


@pytest.mark.parametrize("case", [M2, M1], ids=lambda c: c.id)
def test_batch_size_and_position_change_nothing(case):
    """Row 0 alone, and the same row at the end of a batch of 70."""
    small = make_call(replace(case, index=None, batch=1), "cuda")
    large = make_call(replace(case, index=None, batch=70), "cuda", seed=1)
    for name in ("state", "x", "B", "C", "z", "dt"):
        if name in large.named:
            source, target = small.named[name][0], large.named[name][69]
            (target[..., 0] if target.stride(-1) == 0 else target).copy_(source[..., 0] if target.stride(-1) == 0 else source)
    weights = small.args[3], small.args[6], small.args[8]
    args = list(large.args)
    args[3], args[6], args[8] = weights
    a = ssmgen.selective_state_update(*small.args, **small.kwargs)
    b = ssmgen.selective_state_update(*args, **large.kwargs)
    assert torch.equal(bits(a[0]), bits(b[69])) and torch.equal(bits(small.args[0][0]), bits(large.args[0][69]))


def test_tied_equals_the_same_values_spelt_out():
    call = make_call(Case("m2", heads=4, groups=2, out=F32), "cuda")
    other = make_call(Case("m2", heads=4, groups=2, out=F32), "cuda")
    args = [t.contiguous() if isinstance(t, torch.Tensor) and 0 in t.stride() else t for t in other.args]
    a = ssmgen.selective_state_update(*call.args, **call.kwargs)
    b = ssmgen.selective_state_update(*args, **other.kwargs)
    assert torch.equal(bits(a), bits(b)) and torch.equal(bits(call.args[0]), bits(other.args[0]))


def test_all_rows_padded():
    call = make_call(M2, "cuda")
    call.kwargs["state_indices"].fill_(-1)
    before = call.args[0].clone()
    out = ssmgen.selective_state_update(*call.args, **call.kwargs)
    assert (out == 0).all() and torch.equal(bits(call.args[0]), bits(before))


def test_empty_batch_launches_nothing():
    call = make_call(Case("m2", heads=4), "cuda")
    args = [t[:0] if i in (1, 2, 4, 5, 7) and t is not None else t for i, t in enumerate(call.args)]
    out = ssmgen.selective_state_update(*args)
    assert out.shape == (0, 4, 64)


@pytest.mark.usefixtures("room")
def test_pool_above_2_31_elements():
    """The last slot of a pool of more than 2^31 elements, in both directions of a split pool."""
    H, P, N = 128, 64, 128
    slots = 2**31 // (H * P * N) + 3
    pool = torch.zeros(slots, H, P, N, dtype=BF16, device="cuda")
    call = make_call(Case("small", heads=H, groups=8, state=BF16, batch=1), "cuda")
    pool[slots - 1] = call.args[0][0]
    index = torch.tensor([slots - 1], device="cuda")
    target = torch.tensor([slots - 2], device="cuda")
    split = ssmgen.selective_state_update(pool, *call.args[1:], state_indices=index, dst_state_indices=target)
    single = ssmgen.selective_state_update(pool, *call.args[1:], state_indices=index)
    want = ssmgen.selective_state_update(*call.args)
    assert torch.equal(bits(split), bits(want)) and torch.equal(bits(single), bits(want))
    assert torch.equal(bits(pool[slots - 1]), bits(call.args[0][0])) and torch.equal(bits(pool[slots - 2]), bits(call.args[0][0]))
    assert not pool[: slots - 2].any()


def test_mamba_ssm_signature():
    call = make_call(M1, "cuda")
    want = expected(call)
    out = mamba_signature(*call.args, state_batch_indices=call.kwargs["state_indices"])
    call.kwargs["out"].copy_(out)
    assert_matches(call, want)


# Programmatic dependent launch.


@pytest.mark.parametrize("case", [M2, M1], ids=lambda c: c.id)
def test_pdl_on_and_off_are_bit_equal_on_a_chain(case):
    launch_laws.pdl_changes_no_bit(lambda pdl: launch_laws.decode_chain(make_call(case, "cuda"), pdl))


@needs_pdl
@pytest.mark.parametrize("case", [M2, M1], ids=lambda c: c.id)
def test_pdl_waits_for_a_producer_that_triggers_early(case):
    """x, B and C are slices of a tensor that the kernel ahead is still writing when this one starts."""
    call = make_call(replace(case, conv_slices=True, index=None), "cuda")
    spec = registry.select("selective_state_update", problem_of(call), call.case.batch, arch(), True)

    def run(pdl: bool) -> None:
        ssmgen.selective_state_update(*call.args, **call.kwargs, pdl=pdl)

    hasty = ready(spec, call, spec.kernels) if case is M2 else None
    waits_for_its_producer(run, hasty, call.memory.buffers["conv"][0], call.args[0], call.kwargs["out"])


def test_variants_of_every_pdl_mode_exist():
    arch = runtime.device_arch(torch.cuda.current_device())
    modes = {s.pdl for s in family.space(problem_of(make_call(M2, "cuda")), arch)}
    assert modes == (set(Pdl) if arch.number >= 90 else {Pdl.OFF})
