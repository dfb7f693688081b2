"""mamba2_layer, gdn_layer and kda_layer on a card, of one token and of several: the bits of the separate operators, variants, repetition,
graphs, dependent launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from card_calls import arch, needs_pdl
from layer_calls import make
from layer_card_cases import (
    KIMI,
    KIMI_K3,
    MAMBA2,
    MODELS,
    MODELS_OF_TOKENS,
    NEMOTRON,
    QWEN35_35B,
    QWEN35_397B,
    SHAPES,
    SHAPES_OF_TOKENS,
    SMALL,
    SMALL_GDN,
    VARIED,
    VARIED_OF_TOKENS,
    WINDOWED,
    forms,
    named_of,
)
from layer_cases import BF16, F32, GDN_HEADS, GDN_MATRIX, GDN_TOKENS, I64, KDA_MATRIX, KDA_TOKENS, MAMBA_MATRIX, MAMBA_TOKENS, Gdn, named
from layer_laws import (
    DEVICE,
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

from ssmgen.select.catalog import OPERATOR_OF, OPERATORS

pytestmark = pytest.mark.gpu

MATRIX = [*MAMBA_MATRIX, *GDN_MATRIX, *GDN_HEADS, *KDA_MATRIX, *SHAPES, *MODELS]
MATRIX_OF_TOKENS = [*MAMBA_TOKENS, *GDN_TOKENS, *KDA_TOKENS, *SHAPES_OF_TOKENS, *MODELS_OF_TOKENS]


@pytest.fixture(scope="module")
def loaded() -> None:
    """Kernels of the matrix."""
    prepare(MATRIX)


@pytest.fixture(scope="module")
def loaded_of_tokens() -> None:
    prepare(MATRIX_OF_TOKENS)


@named(MATRIX)
def test_bits_of_the_separate_operators(case, loaded):
    """Out, state and windows, step after step; unused slots are poison, padded rows NaN, and nothing else is touched."""
    assert_equals_the_operators(case)


@named(MATRIX_OF_TOKENS)
def test_bits_of_the_separate_operators_for_several_tokens(case, loaded_of_tokens):
    """Kept states and windows too."""
    assert_equals_the_operators(case)


@named(forms(WINDOWED, heads=16, groups=1, tokens=3, batch=300))  # of one of eight ranks
def test_bits_of_many_sequences(case):
    assert_equals_the_operators(case)


@named([*VARIED, *VARIED_OF_TOKENS])
def test_variants_are_bit_equal(case):
    problem = problem_of(case)
    found = list(OPERATORS[OPERATOR_OF[type(problem)]].space(problem, arch()))
    form_of = (lambda s: (s.norm_inside, s.clustered)) if isinstance(case, Gdn) else (lambda s: None)
    for form in {form_of(s) for s in found}:
        assert_variants_are_equal(case, [s for s in found if form_of(s) == form], 12 if isinstance(case, Gdn) else 16)


RANKS = [replace(NEMOTRON, heads=16, groups=1), replace(QWEN35_35B, heads=4, key_heads=2), replace(KIMI, heads=4, key_heads=4)]


@named([*[named_of(model, batch=n) for model in (NEMOTRON, QWEN35_35B, KIMI) for n in (1, 16)], *[named_of(r, batch=512) for r in RANKS]])
def test_10000_launches_are_equal(case):
    """Whole models at small batches, a rank of several at a large one."""
    assert_launches_are_equal(case, 10_000)


@named(
    [
        *[case for batch in (2, 40) for case in forms(WINDOWED, tokens=4, batch=batch)],
        *[named_of(QWEN35_35B, tokens=4, batch=batch) for batch in (2, 40)],
        named_of(KIMI, tokens=4, batch=8, saved="runs", kept=BF16),
    ]
)
def test_2000_launches_of_several_tokens_are_equal(case):
    assert_launches_are_equal(case, 2000)


REPLAYED = [
    *[named_of(NEMOTRON, batch=2), named_of(MAMBA2, batch=40), *forms(WINDOWED, tokens=4, batch=2), named_of(MAMBA2, tokens=2, batch=40)],
    *[named_of(QWEN35_35B, batch=2), named_of(QWEN35_397B, batch=40, layout="kv"), named_of(QWEN35_35B, tokens=4, batch=2)],
    *[named_of(KIMI, batch=1), named_of(KIMI_K3, batch=40, layout="kv"), named_of(KIMI_K3, tokens=4, batch=40, layout="kv")],
]


@named(REPLAYED)
def test_graphs_replay(case):
    assert_graphs_replay(case)


@named([replace(SMALL, P=36, N=72), replace(SMALL, id="small-tokens", P=36, N=72, norm=None, tokens=5), replace(SMALL_GDN, V=36, K=72)])
def test_capture_needs_warm(case):
    """No other test has these cases, so that they are not loaded yet."""
    assert_capture_needs_warm(case)


DEPENDENT = [
    *[named_of(NEMOTRON, batch=2), named_of(MAMBA2, batch=40, state=F32), named_of(SMALL, norm=None)],
    *[*forms(WINDOWED, tokens=4, batch=2), named_of(MAMBA2, tokens=2, batch=40, state=F32), named_of(SMALL, tokens=5, norm=None)],
    *[named_of(QWEN35_35B, batch=2), named_of(QWEN35_397B, batch=40, state=F32), named_of(SMALL_GDN, layout="kv")],
    *[named_of(QWEN35_35B, tokens=4, batch=2), named_of(SMALL_GDN, layout="kv", tokens=8, index=I64)],
    *[named_of(KIMI, batch=1), named_of(KIMI_K3, batch=40, state=F32), named_of(KIMI, tokens=4, batch=40, state=F32)],
]


@needs_pdl
@named(DEPENDENT)
def test_pdl_on_and_off_are_bit_equal(case):
    assert_pdl_changes_nothing(case)


@needs_pdl
@named(
    [
        *[named_of(NEMOTRON, batch=2), named_of(MAMBA2, batch=8), named_of(QWEN35_35B, batch=2), named_of(QWEN35_35B, batch=40)],
        *[named_of(KIMI, batch=1), named_of(KIMI, batch=40), named_of(WINDOWED, tokens=4, batch=2), named_of(MAMBA2, tokens=2, batch=8)],
        *[named_of(QWEN35_35B, tokens=4, batch=2), named_of(KIMI, tokens=4, batch=40)],
    ]
)
def test_pdl_waits_for_a_producer_that_triggers_early(case):
    assert_waits_for_its_producer(case)


COMPILED = [named_of(model, batch=5) for model in (NEMOTRON, QWEN35_35B, KIMI)]


@named([*COMPILED, *forms(WINDOWED, tokens=4, batch=5), named_of(QWEN35_35B, tokens=4, batch=5), named_of(KIMI, tokens=4, batch=5)])
def test_torch_compile_fullgraph(case):
    torch.compiler.reset()  # all cases compile one lambda, whose recompilations are limited
    want, call = make(case, DEVICE).run().float() * 2, make(case, DEVICE)
    got = torch.compile(lambda: call.run(out=None).float() * 2, fullgraph=True, backend="aot_eager")()
    assert torch.equal(got[call.live], want[call.live]) and got.dtype is F32
