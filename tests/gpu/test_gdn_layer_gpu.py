"""gdn_layer on a card: the bits of the separate operators, variants, padding, repetition, graphs, dependent launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layer_calls import make
from layer_cases import BF16, F32, GDN_HEADS, GDN_MATRIX, I64, Gdn, named, vary
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

from ssmgen.families.delta_layer import spec as kernels

pytestmark = pytest.mark.gpu

QWEN35_35B = Gdn("qwen3.5-35b", heads=32, key_heads=16, K=128, V=128)
QWEN35_397B = replace(QWEN35_35B, id="qwen3.5-397b", heads=64)
QWEN3_NEXT = replace(QWEN35_35B, id="qwen3-next", taps=4, conv_bias=None, state=F32, norm=F32)


def models() -> list[Gdn]:
    """State of either type and layout, and batches on either side of the rules."""
    cases = []
    for model in (QWEN35_35B, QWEN35_397B):
        for layout in ("vk", "kv"):
            for state in (BF16, F32):
                for batch in (1, 2, 5, 8, 9, 33, 300):
                    name = f"{model.id}-{layout}-{'f32' if state is F32 else 'bf16'}-{batch}"
                    cases.append(replace(model, id=name, layout=layout, state=state, batch=batch, extra=batch % 2))
    return cases


SMALL = Gdn("small", heads=8, key_heads=2, K=64, V=64, batch=7)
SHAPES = [
    *vary(QWEN3_NEXT, one={"batch": 1}, several={"batch": 17}, kv={"batch": 17, "layout": "kv"}, channels={"window": "channels"}),
    *[replace(SMALL, id=f"h{h}g{g}", heads=h, key_heads=g) for h, g in ((1, 1), (4, 4), (6, 2), (16, 2), (12, 1))],
    *[replace(SMALL, id=f"k{k}v{v}-{layout}", K=k, V=v, layout=layout) for k, v in ((96, 64), (256, 128), (64, 256), (128, 40), (64, 512))
      for layout in ("vk", "kv")],
    *vary(SMALL, odd={"odd": True}, odd_kv={"odd": True, "layout": "kv", "slot_gap": 1}),
    *vary(SMALL, no_slots={"index": None}, pad={"index": I64, "pad_slot_id": 3}),
]  # fmt: skip
MATRIX = [*GDN_MATRIX, *GDN_HEADS, *SHAPES, *models()]


@pytest.fixture(scope="module")
def loaded() -> None:
    """Kernels of the matrix."""
    prepare(MATRIX)


@named(MATRIX)
def test_bits_of_the_separate_operators(case, loaded):
    """Out, state and windows, step after step; unused slots are poison, padded rows NaN, and nothing else is touched."""
    assert_equals_the_operators(case)


VARIED = [
    replace(QWEN35_35B, batch=3),
    replace(QWEN35_35B, id="qwen3.5-35b-f32", batch=3, state=F32),
    *[replace(QWEN35_397B, id=f"qwen3.5-397b-kv-{n}", batch=3, layout="kv", state=t) for n, t in (("bf16", BF16), ("f32", F32))],
    replace(SMALL, id="tail", V=40, K=96, window="any", extra=1),
    replace(SMALL, id="odd", odd=True, slot_gap=1),
]


@named(VARIED)
def test_variants_are_bit_equal(case):
    found = list(kernels.space(problem_of(case), arch()))
    for form in {(s.norm_inside, s.clustered) for s in found}:
        assert_variants_are_equal(case, [s for s in found if (s.norm_inside, s.clustered) == form], 12)


@named([replace(QWEN35_35B, id=str(n), batch=n) for n in (1, 16)] + [replace(QWEN35_35B, id="512", heads=4, key_heads=2, batch=512)])
def test_10000_launches_are_equal(case):
    """Whole models at small batches, a rank of several at a large one."""
    assert_launches_are_equal(case, 10_000)


@named([replace(QWEN35_35B, batch=2), replace(QWEN35_397B, batch=40, layout="kv")])
def test_graphs_replay(case):
    assert_graphs_replay(case)


def test_capture_needs_warm():
    assert_capture_needs_warm(replace(SMALL, V=36, K=72))  # that no other test has, so that it is not loaded yet


@needs_pdl
@named([replace(QWEN35_35B, batch=2), replace(QWEN35_397B, batch=40, state=F32), replace(SMALL, layout="kv")])
def test_pdl_on_and_off_are_bit_equal(case):
    assert_pdl_changes_nothing(case)


@needs_pdl
@named([replace(QWEN35_35B, batch=2), replace(QWEN35_35B, id="whole-heads", batch=40)])
def test_pdl_waits_for_a_producer_that_triggers_early(case):
    assert_waits_for_its_producer(case)


def test_torch_compile_fullgraph():
    case = replace(QWEN35_35B, batch=5)
    want, call = make(case, DEVICE).run().float() * 2, make(case, DEVICE)
    got = torch.compile(lambda: call.run(out=None).float() * 2, fullgraph=True, backend="aot_eager")()
    assert torch.equal(got, want) and got.dtype is F32
