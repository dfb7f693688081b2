"""Drop-ins for Mamba-2's prompts on a card: the results of CPU tensors, without a synchronisation, and in CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from card_calls import serves_as_on_the_host
from engine_calls import pages
from prompt_oracles import BF16, F32, LENGTHS, POOL, SLOTS, TOKENS, ids_of, operands, sglang_call, starts_of, states, vllm_call
from scan_cases import BOUNDS
from torch import Tensor

from ssmgen.compat import mamba_ssm, sglang, trtllm, vllm

pytestmark = pytest.mark.gpu

BOUND = BOUNDS[BF16] + 2**-9  # of the kernel against float64, and the rounding of the reference
PACKED = {"seq_idx": ids_of(LENGTHS), "cu_seqlens": starts_of(LENGTHS), "return_varlen_states": True, "return_final_states": True}
TRACKED = {"return_track_states": True, "track_end_locs": torch.tensor([33, 5, 57]), "track_seq_idx": torch.tensor([3, 0, 3])}
BEFORE = {"initial_states": states(len(LENGTHS)), "state_dtype": F32}
STORED = {"final_state_indices": SLOTS}
WAYS = {
    "mamba_ssm-rows": (mamba_ssm.mamba_chunk_scan_combined, lambda: operands(2, 150, chunk_size=64, return_final_states=True)),
    "mamba_ssm-packed": (mamba_ssm.mamba_chunk_scan_combined, lambda: operands(1, TOKENS, chunk_size=64, **PACKED)),
    "vllm-chunks": (vllm.mamba_chunk_scan_combined_varlen, lambda: vllm_call(checkpoint=45, return_intermediate_states=True, **BEFORE)),
    "vllm-pool": (vllm.mamba_chunk_scan_combined_varlen, lambda: vllm_call(final_states_out=pages(9, *POOL, gap=8), **STORED)),
    "vllm-states": (vllm.mamba_chunk_scan_combined_varlen, lambda: vllm_call(final_states_out=pages(9, *POOL), **STORED, **BEFORE)),
    "sglang": (sglang.mamba_chunk_scan_combined, lambda: sglang_call(**TRACKED, **BEFORE)),
    "trtllm": (trtllm.mamba_chunk_scan_combined, lambda: sglang_call(return_final_states=True, **BEFORE)),
}
WRITTEN = ("out", "final_states_out")


def results(got: Any, call: dict[str, Any]) -> Iterator[Tensor]:
    """Every tensor that is returned or written."""
    yield from (t for t in (got if isinstance(got, tuple) else (got,)) if t is not None)
    yield from (call[n] for n in WRITTEN if n in call)


@pytest.mark.parametrize("way", WAYS)
def test_prompts_on_a_card(way):
    serves_as_on_the_host(*WAYS[way], results, BOUND)
