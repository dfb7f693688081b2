"""gdn_layer and kda_layer of several tokens on a card: the bits of the separate operators, repetition, graphs, dependent launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_calls import make
from layer_cases import BF16, F32, GDN_TOKENS, I32, I64, KDA_TOKENS, Gdn, Kda, named, of_tokens
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

from ssmgen.select.catalog import OPERATOR_OF, OPERATORS

pytestmark = pytest.mark.gpu

QWEN35 = Gdn("qwen3.5-35b", heads=32, key_heads=16, K=128, V=128, conv_bias=None, tokens=4)
KIMI = Kda("kimi-linear", heads=32, key_heads=32, K=128, V=128, conv_bias=None, tokens=4)
KIMI_K3 = replace(KIMI, id="kimi-k3", heads=12, key_heads=12, lower_bound=-5.0)  # of eight ranks
SMALL, SMALL_KDA = Gdn("small", heads=8, key_heads=2, K=64, V=64, batch=7), Kda("small-kda", heads=8, key_heads=4, K=64, V=64, batch=7)


def forms(state: torch.dtype) -> dict[str, dict[str, Any]]:
    """The engines' uses of a call's states and windows."""
    return {
        "final": {},
        "verify": {"update": False, "kept": state, "saved": "runs"},
        "rows": {"update": False, "kept": state, "saved": "runs", "rows": I32},
        "accepted": {"accepted": I32},
    }


def models() -> list[Gdn]:
    """State of either type and layout, and batches on either side of the rules."""
    cases = []
    for model in (QWEN35, KIMI, KIMI_K3):
        for state, layout in ((BF16, "vk"), (F32, "vk"), (BF16, "kv"), (F32, "kv")):
            for form, how in forms(state).items():
                for tokens, batch in ((2, 1), (4, 8), (8, 2), (4, 33)):
                    name = f"{model.id}-{layout}-{'f32' if state is F32 else 'bf16'}-{form}-t{tokens}-{batch}"
                    cases.append(replace(model, id=name, layout=layout, state=state, batch=batch, tokens=tokens, **how))
    return cases


SHAPES = [
    *[replace(base, id=f"{base.id}-k{k}v{v}-{layout}", K=k, V=v, layout=layout, tokens=3)
      for base in (SMALL, SMALL_KDA) for k, v in ((96, 64), (256, 128), (64, 256), (128, 40)) for layout in ("vk", "kv")],
    *of_tokens(SMALL), *of_tokens(SMALL_KDA),
    *[replace(QWEN35, id=f"qwen-t{tokens}", tokens=tokens, batch=3) for tokens in range(1, 9)],
]  # fmt: skip
MATRIX = [*GDN_TOKENS, *KDA_TOKENS, *SHAPES, *models()]


@pytest.fixture(scope="module")
def loaded() -> None:
    """Kernels of the matrix."""
    prepare(MATRIX)


@named(MATRIX)
def test_bits_of_the_separate_operators(case, loaded):
    """Out, states and windows, step after step; unused slots are poison, padded rows NaN, and nothing else is touched."""
    assert_equals_the_operators(case)


@named(
    [
        *[replace(QWEN35, id=f"qwen-{form}", batch=3, **how) for form, how in forms(BF16).items()],
        replace(QWEN35, id="qwen-kv-f32", batch=3, layout="kv", state=F32, kept=F32),
        *[replace(KIMI, id=f"kimi-{form}", batch=3, tokens=8, state=F32, **how) for form, how in forms(F32).items()],
        replace(SMALL, id="tail", V=40, K=96, window="any", extra=1, tokens=3),
        replace(SMALL_KDA, id="odd", odd=True, slot_gap=1, tokens=2),
    ]
)
def test_variants_are_bit_equal(case):
    problem = problem_of(case)
    assert_variants_are_equal(case, list(OPERATORS[OPERATOR_OF[type(problem)]].space(problem, arch())), 12)


@named([*[replace(QWEN35, id=f"qwen-{batch}", batch=batch) for batch in (2, 40)], replace(KIMI, batch=8, saved="runs", kept=BF16)])
def test_2000_launches_are_equal(case):
    assert_launches_are_equal(case, 2000)


@named([replace(QWEN35, batch=2), replace(KIMI_K3, batch=40, layout="kv")])
def test_graphs_replay(case):
    assert_graphs_replay(case)


@needs_pdl
@named([replace(QWEN35, batch=2), replace(KIMI, batch=40, state=F32), replace(SMALL, layout="kv", tokens=8, index=I64)])
def test_pdl_on_and_off_are_bit_equal(case):
    assert_pdl_changes_nothing(case)


@needs_pdl
@named([replace(QWEN35, batch=2), replace(KIMI, batch=40)])
def test_pdl_waits_for_a_producer_that_triggers_early(case):
    assert_waits_for_its_producer(case)


@named([replace(QWEN35, batch=5), replace(KIMI, batch=5)])
def test_torch_compile_fullgraph(case):
    want, call = make(case, DEVICE).run().float() * 2, make(case, DEVICE)
    got = torch.compile(lambda: call.run(out=None).float() * 2, fullgraph=True, backend="aot_eager")()
    assert torch.equal(got, want) and got.dtype is F32
