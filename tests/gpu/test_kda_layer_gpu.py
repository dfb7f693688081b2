"""kda_layer on a card: the bits of the separate operators, variants, repetition, graphs, dependent launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layer_calls import make
from layer_cases import BF16, F32, I64, KDA_MATRIX, Kda, named, vary
from layer_laws import (
    DEVICE,
    arch,
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

from ssmgen.families.delta_layer import spec as kernels

pytestmark = pytest.mark.gpu

KIMI = Kda("kimi-linear", heads=32, key_heads=32, K=128, V=128, conv_bias=None)
KIMI_K3 = replace(KIMI, id="kimi-k3", heads=12, key_heads=12, lower_bound=-5.0)  # of eight ranks


def models() -> list[Kda]:
    """State of either type and layout, and batches on either side of the rules."""
    cases = []
    for model in (KIMI, KIMI_K3):
        for layout in ("vk", "kv"):
            for state in (BF16, F32):
                for batch in (1, 2, 5, 9, 33, 300):
                    name = f"{model.id}-{layout}-{'f32' if state is F32 else 'bf16'}-{batch}"
                    cases.append(replace(model, id=name, layout=layout, state=state, batch=batch, extra=batch % 2))
    return cases


SMALL = Kda("small", heads=8, key_heads=2, K=64, V=64, batch=7)
SHAPES = [
    *vary(KIMI, channels={"window": "channels", "batch": 17}, odd={"odd": True, "batch": 3}, flat={"flat": True}),
    *[replace(SMALL, id=f"k{k}v{v}-{layout}", K=k, V=v, layout=layout) for k, v in ((96, 64), (256, 128), (64, 256), (128, 40), (64, 512))
      for layout in ("vk", "kv")],
    *vary(SMALL, odd={"odd": True}, odd_kv={"odd": True, "layout": "kv", "slot_gap": 1}, bare={"lower_bound": -5.0, "bare_gate": True}),
    *vary(SMALL, no_slots={"index": None}, pad={"index": I64, "pad_slot_id": 3}),
]  # fmt: skip
MATRIX = [*KDA_MATRIX, *SHAPES, *models()]


@pytest.fixture(scope="module")
def loaded() -> None:
    """Kernels of the matrix."""
    prepare(MATRIX)


@named(MATRIX)
def test_bits_of_the_separate_operators(case, loaded):
    """Out, state and windows, step after step; unused slots are poison, padded rows NaN, and nothing else is touched."""
    assert_equals_the_operators(case)


@named(
    [
        *vary(KIMI, bf16={"batch": 3}, f32={"batch": 3, "state": F32}, kv={"batch": 3, "layout": "kv"}),
        replace(SMALL, id="tail", V=40, K=96, window="any", extra=1),
        replace(SMALL, id="odd", odd=True, slot_gap=1),
    ]
)
def test_variants_are_bit_equal(case):
    found = list(kernels.space(problem_of(case), arch()))
    for form in {(s.norm_inside, s.clustered) for s in found}:
        assert_variants_are_equal(case, [s for s in found if (s.norm_inside, s.clustered) == form], 12)


@named([replace(KIMI, id=str(n), batch=n) for n in (1, 16)] + [replace(KIMI, id="512", heads=4, key_heads=4, batch=512)])
def test_10000_launches_are_equal(case):
    """Whole models at small batches, a rank of several at a large one."""
    assert_launches_are_equal(case, 10_000)


@named([replace(KIMI, batch=1), replace(KIMI_K3, batch=40, layout="kv")])
def test_graphs_replay(case):
    assert_graphs_replay(case)


@needs_pdl
@named([replace(KIMI, batch=1), replace(KIMI_K3, batch=40, state=F32), replace(SMALL, layout="kv")])
def test_pdl_on_and_off_are_bit_equal(case):
    assert_pdl_changes_nothing(case)


@needs_pdl
@named([replace(KIMI, batch=1), replace(KIMI, id="whole-heads", batch=40)])
def test_pdl_waits_for_a_producer_that_triggers_early(case):
    assert_waits_for_its_producer(case)


def test_torch_compile_fullgraph():
    case = replace(KIMI, batch=5)
    want, call = make(case, DEVICE).run().float() * 2, make(case, DEVICE)
    got = torch.compile(lambda: call.run(out=None).float() * 2, fullgraph=True, backend="aot_eager")()
    assert torch.equal(got, want) and got.dtype is F32
