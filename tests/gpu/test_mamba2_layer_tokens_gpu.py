"""mamba2_layer of several tokens on a card: the bits of the separate operators, variants, repetition, graphs, dependent launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layer_calls import make
from layer_cases import BF16, F32, I32, I64, MAMBA_TOKENS, Mamba, named
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

NEMOTRON = Mamba("nemotron-h-8b", heads=128, P=64, N=128, groups=8, size=1024, tokens=4)
MAMBA2 = Mamba("mamba2-2.7b", heads=80, P=64, N=128, groups=1, tokens=2)
FALCON = Mamba("falcon-h1-7b", heads=24, P=128, N=256, groups=1, norm=None, tokens=3)
SMALL = Mamba("small", heads=8, P=64, N=64, groups=2, batch=7, tokens=5)

FORMS = {
    "final": {},
    "verify": {"update": False, "saved": "runs", "rows": I32},
    "accepted": {"accepted": I32},
}


def forms(case: Mamba) -> list[Mamba]:
    """Kept states have the state's type."""
    kept = {"verify": {"kept": case.state}}
    return [replace(case, id=f"{case.id}-{form}", **how, **kept.get(form, {})) for form, how in FORMS.items()]


def models() -> list[Mamba]:
    """State of either type, and batches on either side of the rules."""
    return [
        case
        for model in (NEMOTRON, MAMBA2, FALCON)
        for state in (BF16, F32)
        for batch in (1, 8, 33)
        for case in forms(replace(model, id=f"{model.id}-{'f32' if state is F32 else 'bf16'}-{batch}", state=state, batch=batch))
    ]


SHAPES = [
    *[case for tokens in (1, 2, 6, 7, 8) for case in forms(replace(SMALL, id=f"t{tokens}", tokens=tokens))],
    *[case for h, g in ((1, 1), (6, 2), (12, 1)) for case in forms(replace(SMALL, id=f"h{h}g{g}", heads=h, groups=g))],
    *[case for p, n in ((64, 16), (40, 96), (128, 256), (20, 36)) for case in forms(replace(SMALL, id=f"p{p}n{n}", P=p, N=n))],
    *forms(replace(SMALL, id="odd", odd=True, window="any", slot_gap=1)),
    *forms(replace(SMALL, id="channels", window="channels", extra=1, index=I64, pad_slot_id=3)),
    *forms(replace(SMALL, id="noise", philox=10)),
    *forms(replace(SMALL, id="gated", norm=None, D="row")),
]
MATRIX = [*MAMBA_TOKENS, *SHAPES, *models()]


@pytest.fixture(scope="module")
def loaded() -> None:
    """Kernels of the matrix."""
    prepare(MATRIX)


@named(MATRIX)
def test_bits_of_the_separate_operators(case, loaded):
    """Out, states, windows and kept states, step after step. Unused slots are poison, padded rows NaN, and the rest stays unchanged."""
    assert_equals_the_operators(case)


@pytest.mark.parametrize("batch", [300])
@named(forms(replace(NEMOTRON, heads=16, groups=1, tokens=3)))  # of one of eight ranks
def test_bits_of_many_sequences(case, batch):
    assert_equals_the_operators(replace(case, batch=batch))


VARIED = [
    *forms(replace(NEMOTRON, batch=3)),
    *forms(replace(SMALL, id="tail", P=40, N=96, window="any", extra=1)),
    replace(MAMBA2, id="mamba2-2.7b-f32", batch=3, state=F32, kept=F32),
    replace(SMALL, id="odd", odd=True, slot_gap=1, accepted=I32),
    replace(SMALL, id="noise", philox=10, kept=BF16),
]


@named(VARIED)
def test_variants_are_bit_equal(case):
    assert_variants_are_equal(case, list(kernels.space(problem_of(case), arch())), 12)


@pytest.mark.parametrize("batch", [2, 40])
@named(forms(NEMOTRON))
def test_500_launches_are_equal(case, batch):
    assert_launches_are_equal(replace(case, batch=batch), 500)


@named([*forms(replace(NEMOTRON, batch=2)), replace(MAMBA2, batch=40)])
def test_graphs_replay(case):
    assert_graphs_replay(case)


def test_capture_needs_warm():
    assert_capture_needs_warm(replace(SMALL, P=36, N=72, norm=None))  # that no other test has, so that it is not loaded yet


@needs_pdl
@named([*forms(replace(NEMOTRON, batch=2)), replace(MAMBA2, batch=40, state=F32), replace(SMALL, norm=None)])
def test_pdl_on_and_off_are_bit_equal(case):
    assert_pdl_changes_nothing(case)


@needs_pdl
@named([replace(NEMOTRON, batch=2), replace(MAMBA2, batch=8)])
def test_pdl_waits_for_a_producer_that_triggers_early(case):
    assert_waits_for_its_producer(case)


@named(forms(replace(NEMOTRON, batch=5)))
def test_torch_compile_fullgraph(case):
    want, call = make(case, DEVICE).run().float() * 2, make(case, DEVICE)
    got = torch.compile(lambda: call.run(out=None).float() * 2, fullgraph=True, backend="aot_eager")()
    assert torch.equal(got[call.live], want[call.live]) and got.dtype is F32
