"""Which variants serve steps of 16-bit states that are rounded with noise: those that a sweep on a card found faster."""

from __future__ import annotations

from typing import Any

import pytest

from ssmgen.select import registry
from ssmgen.select.catalog import OPERATOR_OF
from ssmgen.select.models import find_model
from ssmgen.spec.kernel import Arch, DType, Index, PoolMode, changed
from ssmgen.variants.defaults import layer

SM90 = Arch(90, "a")
QWEN, KIMI, NEMOTRON = "qwen3.5-35b-a3b", "kimi-linear-48b-a3b", "nemotron-h-8b"


def step(model: str, state: DType) -> Any:
    return find_model(model).problem(state, Index.I32, PoolMode.SINGLE)


# docs/lab/linear_attention.md and selective_state_update.md: (problem, rows of a block, threads, blocks of prefetch), from 64 sequences on.
MEASURED = {
    "gated delta rule": (lambda state: step(QWEN, state), (64, 64, 0)),
    "KDA": (lambda state: step(KIMI, state), (64, 64, 0)),
    "Mamba-2 layer": (lambda state: layer(NEMOTRON, state), (64, 64, 0)),
    "Mamba-2 state": (lambda state: step(NEMOTRON, state), (16, 64, 264)),
}


def chosen(problem: Any, batch: int) -> tuple[int, int, int]:
    spec: Any = registry.select(OPERATOR_OF[type(problem)], problem, batch, SM90, True)
    return spec.tile, spec.threads, spec.prefetch


@pytest.mark.parametrize("rounds", [4, 10])
@pytest.mark.parametrize("state", [DType.F16, DType.BF16])
@pytest.mark.parametrize("name", MEASURED)
def test_large_steps_with_noise_have_the_measured_variants(name, state, rounds):
    problem_of, want = MEASURED[name]
    plain = problem_of(state)
    for batch in (64, 256):
        assert chosen(changed(plain, philox_rounds=rounds), batch) == want != chosen(plain, batch)


@pytest.mark.parametrize("name", MEASURED)
def test_noise_changes_no_choice_for_one_sequence(name):
    plain = MEASURED[name][0](DType.BF16)
    assert chosen(changed(plain, philox_rounds=10), 1) == chosen(plain, 1)
