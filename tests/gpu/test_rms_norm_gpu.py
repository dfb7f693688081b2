"""rms_norm on a card: it rounds where models do, and gives the emulator's bits for the sum; in a CUDA graph and again."""

from __future__ import annotations

import pytest
import torch
from test_rms_norm import CASES, as_models_do, assert_within_a_rounding, operands

import ssmgen

pytestmark = pytest.mark.gpu


def on_card(name: str) -> dict:
    """The operands with their strides."""
    return {n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda").copy_(t) if isinstance(t, torch.Tensor) else t
            for n, t in operands(name).items()}  # fmt: skip


def on_host(call: dict) -> dict:
    return {n: t.cpu() if isinstance(t, torch.Tensor) else t for n, t in call.items()}


@pytest.mark.parametrize("pdl", [False, None], ids=["no-pdl", "pdl"])
@pytest.mark.parametrize("name", CASES)
def test_it_rounds_where_models_do(name, pdl):
    call = on_card(name)
    ssmgen.rms_norm(**call, pdl=pdl)
    assert_within_a_rounding(on_host(call), *as_models_do(operands(name)))


def test_a_graph_adds_in_place_again_and_again():
    """The residual grows by x with every replay, and the sum is normalised."""
    call = on_card("mamba2")
    x, weight, residual = call["x"], call["weight"], call["residual"]
    start = residual.clone()
    ssmgen.warm(ssmgen.rms_norm, x, weight, residual=residual, residual_out=residual, round_before_weight=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = ssmgen.rms_norm(x, weight, residual=residual, residual_out=residual, round_before_weight=True)
    want = start
    for _ in range(3):
        graph.replay()
        want = want + x.float()
    assert torch.equal(residual, want)
    assert torch.equal(out, ssmgen.rms_norm(want.to(x.dtype), weight, round_before_weight=True))
