"""Drop-ins for Mamba-1's prompts on a card: the results of CPU tensors, without a synchronisation, and in CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from card_calls import serves_as_on_the_host
from engine_calls import pages
from mamba1_oracles import SLOTS, D, N, by_channels, operands, vllm_call
from prompt_oracles import BF16, F32, randn
from selective_cases import BOUNDS
from torch import Tensor

from ssmgen.compat import mamba_ssm, vllm
from ssmgen.compat.sglang import mamba as sglang_mamba

pytestmark = pytest.mark.gpu

BOUND = BOUNDS[BF16] + 2**-9  # of the kernel against float64, and the rounding of the reference
STARTED = torch.tensor([True, True, False, True, False])


def sglang_call() -> dict[str, Tensor]:
    call = operands(T=150, make=by_channels, dtype=F32)
    given = {"x": call["u"].t(), "dt": call["delta"].abs().t(), "B": call["B"].t(), "C": call["C"].t()}
    return given | {"A": call["A"], "h0": randn(D, N, seed=8, dtype=F32)}


WAYS = {
    "mamba_ssm": (mamba_ssm.selective_scan_fn, lambda: operands(2, T=150, G=3, return_last_state=True)),
    "mamba_ssm-turned": (mamba_ssm.selective_scan_fn, lambda: operands(2, T=150) | {"delta": by_channels(2, D, 150, seed=1)}),
    "mamba_ssm-channels": (mamba_ssm.selective_scan_fn, lambda: operands(2, T=152, make=by_channels)),
    "vllm": (vllm.selective_scan_fn, lambda: vllm_call(has_initial_state=STARTED)),
    "vllm-bf16": (vllm.selective_scan_fn, lambda: vllm_call(ssm_states=pages(9, D, N, dtype=BF16), cache_indices=SLOTS)),
    "sglang": (sglang_mamba.selective_scan, sglang_call),
}


def results(got, call):
    """Every tensor that is returned or written."""
    yield from got if isinstance(got, tuple) else (got,)
    yield from (call[n] for n in ("ssm_states",) if n in call)


@pytest.mark.parametrize("way", WAYS)
def test_prompts_on_a_card(way):
    serves_as_on_the_host(*WAYS[way], results, BOUND)
