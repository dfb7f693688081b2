"""vLLM's norms in PyTorch operations: ssmgen's kernel outside of torch.compile, and vLLM's own operations where it traces them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_calls import no_call_goes_to_the_engine, vllm_functions  # noqa: F401
from engine_stand_ins import answer, found
from torch import Tensor
from torch.nn.functional import silu
from torch_conv import randn

from ssmgen.compat import vllm as plugin

BF16, F32 = torch.bfloat16, torch.float32
PLACES = {
    "RMSNormGated": "vllm.model_executor.layers.layernorm",
    "FusedRMSNormGated": "vllm.third_party.flash_linear_attention.ops.kda",
    "Mixer2RMSNormGated": "vllm.model_executor.layers.mamba.mamba_mixer2",
}


def exact(x: Tensor, gate: Tensor | None, weight: Tensor, group: int, before: bool, activation: str) -> Tensor:
    """The norm in float64. before: the norm comes before the gate."""
    act = torch.sigmoid if activation == "sigmoid" else silu
    gated = 1.0 if gate is None else act(gate.double())
    v = x.double() if before else x.double() * gated
    v = v.unflatten(-1, (-1, group))
    v = (v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2) * weight.double()
    return v * gated if before else v


def near(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and torch.allclose(got.double(), want, rtol=2 * torch.finfo(got.dtype).eps, atol=1e-5)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("group", "before", "activation"), [(None, True, "swish"), (16, False, "silu"), (32, True, "sigmoid")])
@pytest.mark.parametrize("gated", [True, False])
def test_the_norm_of_delta_rules_and_bailing(vllm, dtype, group, before, activation, gated):
    """x may be a slice of wider rows, and z may be missing."""
    wide = randn(5, 200).to(dtype)
    x, z, weight = wide[:, 8:72], randn(5, 64, seed=1).to(dtype) if gated else None, randn(64, seed=2)
    layer = SimpleNamespace(weight=weight, eps=1e-5, group_size=group, norm_before_gate=before, activation=activation)
    got, kept = found(PLACES["RMSNormGated"], "RMSNormGated.forward_native")(layer, x, z), wide.clone()
    assert got.dtype is dtype and near(got, exact(x, z, weight, group or 64, before, activation)) and torch.equal(wide, kept)


@pytest.mark.parametrize("weighed", [True, False])
def test_the_norm_of_kimi_delta_attention(vllm, weighed):
    """The gate may lack axes of size one, and x is not overwritten."""
    x, g, weight = randn(1, 5, 2, 32), randn(5, 2, 32, seed=1), randn(32, seed=2) if weighed else None
    layer, kept = SimpleNamespace(weight=weight, eps=1e-5, activation="sigmoid"), x.clone()
    got = found(PLACES["FusedRMSNormGated"], "FusedRMSNormGated.forward_native")(layer, x, g)
    want = exact(x, g[None], torch.ones(32) if weight is None else weight, 32, True, "sigmoid")
    assert near(got, want) and torch.equal(x, kept)


def mixer2(**change: Any) -> Any:
    given = {"tp_size": 1, "n_groups": 4, "group_size": 16, "use_rms_norm": True, "variance_epsilon": 1e-5, "weight": randn(64, seed=2)}
    return SimpleNamespace(**given | change)


@pytest.mark.parametrize(("change", "group"), [({}, 16), ({"n_groups": 1, "group_size": 64}, 64), ({"tp_size": 2, "n_groups": 8}, 16)])
def test_the_norm_of_mamba_2(vllm, change, group):
    """Groups of one rank, or all channels."""
    x, gate, layer = randn(5, 64), randn(5, 64, seed=1), mixer2(**change)
    got = found(PLACES["Mixer2RMSNormGated"], "Mixer2RMSNormGated.forward_native")(layer, x, gate)
    assert near(got, exact(x, gate, layer.weight, group, False, "silu"))


ENGINE_S = [
    ("Mixer2RMSNormGated", mixer2(n_groups=1, tp_size=2), {}),
    ("Mixer2RMSNormGated", mixer2(n_groups=3, tp_size=2), {}),
    ("Mixer2RMSNormGated", mixer2(use_rms_norm=False, weight=None), {}),
    ("Mixer2RMSNormGated", mixer2(weight=randn(64).bfloat16()), {}),
    ("FusedRMSNormGated", SimpleNamespace(), {"residual": torch.ones(5, 64)}),
    ("FusedRMSNormGated", SimpleNamespace(), {"prenorm": True}),
]


@pytest.mark.parametrize(("name", "layer", "more"), ENGINE_S)
def test_what_stays_the_engine_s_without_a_warning(vllm, name, layer, more):
    """Sums over several ranks, a weight of another dtype, residuals."""
    got = found(PLACES[name], f"{name}.forward_native")(layer, randn(5, 64), randn(5, 64, seed=1), **more)
    assert got == answer(PLACES[name], f"{name}.forward_native")


@pytest.mark.parametrize("name", PLACES)
def test_traced_calls_stay_the_engine_s(vllm, name, monkeypatch):
    """torch.compile fuses these operations with their neighbours."""
    monkeypatch.setattr("ssmgen.compat.shared.replacing.is_compiling", lambda: True)
    place = f"{name}.forward_native"
    assert found(PLACES[name], place)(mixer2(), randn(5, 64), randn(5, 64, seed=1)) == answer(PLACES[name], place)
    (made,) = [r for r in plugin._ENGINE.replacements if r.place == f"{PLACES[name]}.{place}"]
    assert made.traced
