"""vLLM's norms outside of torch.compile on a card: the results of CPU tensors, without a synchronisation, and in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from card_calls import serves_as_on_the_host
from torch import Tensor
from torch_conv import randn

from ssmgen.compat import vllm

pytestmark = pytest.mark.gpu

HOW = {
    "delta": (vllm.native_rms_norm, {"eps": 1e-5, "group_size": None, "norm_before_gate": True, "activation": "swish"}),
    "bailing": (vllm.native_rms_norm, {"eps": 1e-5, "group_size": 256, "norm_before_gate": True, "activation": "sigmoid"}),
    "kimi": (vllm.native_fused_rms_norm, {"eps": 1e-5, "activation": "sigmoid"}),
    "mamba2": (vllm.native_mixer2_norm, {"tp_size": 1, "n_groups": 8, "group_size": 256, "use_rms_norm": True, "variance_epsilon": 1e-5}),
}


def of_a_layer(function: Callable[..., Tensor], layer: dict[str, Any]) -> Callable[..., Tensor]:
    def call(weight: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        return function(SimpleNamespace(weight=weight, **layer), x, gate)

    return call


def results(out: Tensor, given: Any) -> Iterator[Tensor]:
    yield out
    yield given["x"]


@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(name, dtype):
    function, layer = HOW[name]

    def make() -> dict[str, Tensor]:
        x, gate = (randn(33, 2048, seed=seed).to(dtype) for seed in (0, 1))
        return {"x": x, "gate": gate, "weight": randn(2048, seed=2).to(dtype)}

    serves_as_on_the_host(of_a_layer(function, layer), make, results, 1e-5 if dtype is torch.float32 else 2.0**-8)
