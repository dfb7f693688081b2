"""Prompts on a card: ten thousand launches of each form have the bits of one. chunk_scan's stand with its laws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import prompt_cases as prompts
import pytest
import selective_cases as selective
import torch
from repeats import others_in_graphs

import ssmgen

pytestmark = pytest.mark.gpu

DELTA = prompts.Case("chunk_gated_delta_rule", heads=32, key_heads=16, head_k=128, head_v=128, device="cuda")
KDA = prompts.Case(heads=16, key_heads=16, head_k=128, head_v=128, device="cuda")
MAMBA = selective.Sizes(dim=1536, device="cuda")
CUT = 3200  # tokens: of a sequence that the rules cut into segments
CASES: dict[str, Any] = {
    "delta": (ssmgen.chunk_gated_delta_rule, prompts.make, replace(DELTA, heads=64), (1, 300)),
    "delta-128-rows": (ssmgen.chunk_gated_delta_rule, prompts.make, replace(DELTA, heads=64), (2, 300)),
    "delta-segments": (ssmgen.chunk_gated_delta_rule, prompts.make, DELTA, (1, CUT)),
    "kda": (ssmgen.chunk_kda, prompts.make, KDA, (2, 300)),
    "kda-segments": (ssmgen.chunk_kda, prompts.make, replace(KDA, heads=8, key_heads=8), (1, CUT)),
    "gla": (ssmgen.chunk_gla, prompts.make, replace(KDA, function="chunk_gla"), (2, 300)),
    "rwkv7": (ssmgen.chunk_rwkv7, prompts.make, replace(KDA, function="chunk_rwkv7", head_k=64, head_v=64), (2, 300)),
    "mamba1": (ssmgen.selective_scan, selective.make, MAMBA, (16, 100)),
    "mamba1-roles": (ssmgen.selective_scan, selective.make, MAMBA, (1, 300)),
    "mamba1-segments": (ssmgen.selective_scan, selective.make, replace(MAMBA, dim=768), (1, CUT)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_ten_thousand_times(name):
    """Runs in graphs, from given states; consecutive calls share their workspace."""
    function, make, sizes, lead = CASES[name]
    call = make(sizes, *lead)
    _, states = function(**call, return_final_states=True)
    call["initial_states"] = states.float()
    if function is not ssmgen.selective_scan:
        call["workspace"] = torch.full((6 * 10**7,), 0xFF, dtype=torch.uint8, device="cuda")
    assert not others_in_graphs(function, call)
