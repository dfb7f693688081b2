"""Drop-ins for Mamba-1's prompts on a card: the results of CPU tensors, without a synchronisation, and in CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from engine_calls import pages
from mamba1_oracles import SLOTS, D, N, by_channels, operands, vllm_call
from prompt_oracles import BF16, F32, randn
from scan_cases import error, same
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


def on_card(call):
    """The call's tensors there, with the strides they have."""

    def moved(t):
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda").copy_(t) if isinstance(t, Tensor) else t

    return {n: moved(t) for n, t in call.items()}


def results(got, call):
    """Every tensor that is returned or written."""
    yield from got if isinstance(got, tuple) else (got,)
    yield from (call[n] for n in ("ssm_states",) if n in call)


@pytest.mark.parametrize("way", WAYS)
def test_prompts_on_a_card(way):
    function, make = WAYS[way]
    here, there = make(), on_card(make())
    with torch.inference_mode():
        wanted = [t.clone() for t in results(function(**here), here)]
        function(**there)  # compiles
        there, again, captured = (on_card(make()) for _ in range(3))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = list(results(function(**there), there))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(found) == len(wanted)
        assert all(error(f, w.double()) <= BOUND for f, w in zip(found, wanted, strict=True))
        repeated = list(results(function(**again), again))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = function(**captured)
        graph.replay()
        torch.cuda.synchronize()
        assert all(same(a, b) and same(a, c) for a, b, c in zip(found, repeated, results(got, captured), strict=True))
