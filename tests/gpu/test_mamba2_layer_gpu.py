"""mamba2_layer on a card: the bits of the separate operators, variants, padding, repetition, graphs, dependent launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layer_calls import make
from layer_cases import BF16, F32, I64, MAMBA_MATRIX, Mamba, named, vary
from layer_laws import (
    DEVICE,
    arch,
    assert_capture_needs_warm,
    assert_equals_the_operators,
    assert_graphs_replay,
    assert_launches_are_equal,
    assert_pdl_changes_nothing,
    assert_variants_are_equal,
    assert_waits_for_its_producer,
    prepare,
    problem_of,
)
from test_selective_state_update import needs_pdl

from ssmgen.families.mamba2_layer import spec as kernels

pytestmark = pytest.mark.gpu

NEMOTRON = Mamba("nemotron-h-8b", heads=128, P=64, N=128, groups=8, size=1024, extra=1)
MAMBA2 = Mamba("mamba2-2.7b", heads=80, P=64, N=128, groups=1)
SMALL = Mamba("small", heads=8, P=64, N=64, groups=2, batch=7)


def models() -> list[Mamba]:
    """State of either type, and batches on either side of the rules."""
    return [
        replace(model, id=f"{model.id}-{'f32' if state is F32 else 'bf16'}-{batch}", state=state, batch=batch)
        for model in (NEMOTRON, MAMBA2)
        for state in (BF16, F32)
        for batch in (1, 2, 5, 8, 33, 300)
    ]


SHAPES = [
    Mamba("mamba2-130m", heads=24, P=64, N=128, groups=1, batch=3, extra=1),
    Mamba("p80", heads=112, P=80, N=128, groups=8, size=1120, state=F32, batch=7),
    Mamba("granite", heads=48, P=64, N=128, groups=1, batch=9),
    *[replace(SMALL, id=f"h{h}g{g}", heads=h, groups=g) for h, g in ((1, 1), (4, 4), (6, 2), (16, 2), (12, 1))],
    *[replace(SMALL, id=f"p{p}n{n}", P=p, N=n) for p, n in ((64, 16), (40, 96), (128, 256), (20, 36))],
    *vary(SMALL, odd={"odd": True}, gap={"slot_gap": 1}, no_slots={"index": None}, pad={"index": I64, "pad_slot_id": 3}),
    *vary(SMALL, gated={"norm": None, "D": "row"}, noise={"philox": 10}, channels={"window": "channels"}, first={"norm_first": True}),
]
MATRIX = [*MAMBA_MATRIX, *SHAPES, *models()]


@pytest.fixture(scope="module")
def loaded() -> None:
    """Kernels of the matrix."""
    prepare(MATRIX)


@named(MATRIX)
def test_bits_of_the_separate_operators(case, loaded):
    """Out, state and windows, step after step; unused slots are poison, padded rows NaN, and nothing else is touched."""
    assert_equals_the_operators(case)


VARIED = [
    replace(NEMOTRON, batch=3),
    replace(MAMBA2, id="mamba2-2.7b-f32", batch=3, state=F32),
    replace(SMALL, id="tail", P=40, N=96, window="any", extra=1),
    replace(SMALL, id="odd", odd=True, slot_gap=1),
    replace(SMALL, id="noise", philox=10),
]


@named(VARIED)
def test_variants_are_bit_equal(case):
    assert_variants_are_equal(case, list(kernels.space(problem_of(case), arch())), 16)


@named([replace(NEMOTRON, id=str(n), batch=n) for n in (1, 16)] + [replace(NEMOTRON, id="512", heads=16, groups=1, batch=512)])
def test_10000_launches_are_equal(case):
    """Whole models at small batches, a rank of several at a large one."""
    assert_launches_are_equal(case, 10_000)


@named([replace(NEMOTRON, batch=2), replace(MAMBA2, batch=40)])
def test_graphs_replay(case):
    assert_graphs_replay(case)


def test_capture_needs_warm():
    assert_capture_needs_warm(replace(SMALL, P=36, N=72))  # that no other test has, so that it is not loaded yet


@needs_pdl
@named([replace(NEMOTRON, batch=2), replace(MAMBA2, batch=40, state=F32), replace(SMALL, norm=None)])
def test_pdl_on_and_off_are_bit_equal(case):
    assert_pdl_changes_nothing(case)


@needs_pdl
@named([replace(NEMOTRON, batch=2), replace(MAMBA2, batch=8)])
def test_pdl_waits_for_a_producer_that_triggers_early(case):
    assert_waits_for_its_producer(case)


def test_torch_compile_fullgraph():
    case = replace(NEMOTRON, batch=5)
    want, call = make(case, DEVICE).run().float() * 2, make(case, DEVICE)
    got = torch.compile(lambda: call.run(out=None).float() * 2, fullgraph=True, backend="aot_eager")()
    assert torch.equal(got, want) and got.dtype is F32
