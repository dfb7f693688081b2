"""Gated norms of transformers' models under `patch(fuse=True)`: the results of their own forward, closer to f32 in 16 bits."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import MODELS, NORMS, assert_close, built, gated_norms, generate, known, modeling, norm_label, of_prompts
from hf_cases import nothing_stays_patched as nothing_stays_patched

from ssmgen.compat import hf
from ssmgen.compat.hf import norms as hf_norms
from ssmgen.compat.hf.functions import recording

MORE = {"falcon_h1": {"mamba_rms_norm": True}}
every_kind = pytest.mark.parametrize("name", NORMS)


def norm_of(name: str) -> torch.nn.Module:
    """One of the model's norms, with unequal weights. It skips if this transformers has no such class for the model."""
    if known(name) and not hasattr(modeling(name), NORMS[name]):
        pytest.skip(f"the {name} of this transformers has another model's norm")
    norm = gated_norms(built(name, **MORE.get(name, {})))[0]
    torch.manual_seed(0)
    norm.weight.data = torch.rand_like(norm.weight) + 0.5
    return norm


def operands(name: str, norm: torch.nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The operands that a layer passes: heads in rows for delta rules; in other layers the gate is a slice of the projections."""
    width = norm.weight.numel()
    if "mamba2_chunk_scan" in of_prompts(name):
        return torch.randn(2, 7, width, dtype=dtype), torch.randn(2, 7, 3 * width, dtype=dtype)[..., :width]
    return torch.randn(2 * 7 * 4, width, dtype=dtype), torch.randn(2 * 7 * 4, width, dtype=dtype)


def test_every_gated_norm_is_known():
    """No other class of a modeling file has such a name."""
    for name, module in [(name, modeling(name)) for name in MODELS if known(name)]:
        classes = [n for n, c in vars(module).items() if n.endswith("RMSNormGated") and c.__module__ == module.__name__]
        assert (
            tuple(classes) == hf_norms.classes(module) == ((NORMS[name],) if hasattr(module, NORMS.get(name, "none")) and classes else ())
        )
    assert sum(map(known, NORMS)) >= 9


@every_kind
def test_a_norm_gives_what_its_own_forward_does(name):
    norm = norm_of(name)
    x, gate = operands(name, norm, torch.float32)
    with torch.no_grad():
        want = norm(x, gate)
        with hf.patch(name, fuse=True) as patch, recording() as calls:
            got = norm(x, gate)
    assert_close(got, want)
    assert patch.calls() == {norm_label(norm): hf.Calls(1, 0)} and [call.function.__name__ for call in calls] == ["gated_rms_norm"]


@every_kind
def test_in_16_bits_it_is_no_farther_from_f32(name):
    norm = norm_of(name).bfloat16()
    x, gate = operands(name, norm, torch.bfloat16)
    with torch.no_grad():
        exact, theirs = copy.deepcopy(norm).double()(x.double(), gate.double()), norm(x, gate)
        with hf.patch(name, fuse=True):
            ours = norm(x, gate)
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).norm() <= (theirs - exact).norm()


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5"])
def test_under_grad_it_is_the_original_without_a_word(name, recwarn):
    norm = norm_of(name)
    x, gate = operands(name, norm, torch.float32)
    want = norm(x, gate)
    with hf.patch(name, fuse=True) as patch:
        got = norm(x, gate)
        got.sum().backward()
    assert torch.equal(got, want) and norm.weight.grad is not None and not patch.calls()
    assert not [w for w in recwarn if w.category is RuntimeWarning]


def test_what_has_no_kernel_is_the_originals():
    norm = norm_of("qwen3_5").double()
    x, gate = operands("qwen3_5", norm, torch.float64)
    with torch.no_grad(), hf.patch("qwen3_5", fuse=True) as patch:
        with pytest.warns(RuntimeWarning, match="x is torch.float64"):
            got = norm(x, gate)
        assert patch.calls() == {norm_label(norm): hf.Calls(0, 1)}
    with torch.no_grad():
        assert torch.equal(got, norm(x, gate))


@pytest.mark.parametrize("name", ["olmo_hybrid"])
def test_models_without_fused_layers_have_it_in_every_step(name):
    model = built(name)
    want = generate(model, 3)
    with hf.patch(model, fuse=True) as patch:
        got = generate(model, 3)
    assert torch.equal(got.sequences, want.sequences) and not hf.fusible(model)
    assert patch.calls()[norm_label(gated_norms(model)[0])] == hf.Calls(3 * len(gated_norms(model)), 0)


def test_a_norm_of_other_parameters_is_left_alone(monkeypatch):
    def forward(self, hidden_states, gate=None, residual=None):
        raise AssertionError

    monkeypatch.setattr(modeling("mamba2").MambaRMSNormGated, "forward", forward)
    with pytest.warns(RuntimeWarning, match="its forward takes self, hidden_states, gate, residual"):
        patch = hf.patch("mamba2", fuse=True)
    patch.undo()
    assert "mamba2.MambaRMSNormGated" not in patch.replaced and modeling("mamba2").MambaRMSNormGated.forward is forward
