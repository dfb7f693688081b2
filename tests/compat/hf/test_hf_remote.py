"""Models whose code comes with their checkpoint: functions are found by the objects that names in that code's module are bound to."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest
import torch

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import nothing_stays_patched as nothing_stays_patched

from ssmgen.compat import hf, mamba_ssm
from ssmgen.compat.hf import remote as hf_remote
from ssmgen.errors import PatchError

# A decode step: a convolution, which its layer keeps; a state update under another name; and a separate delta rule.
CODE = """
import torch
from torch.nn.functional import silu
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update as step

try:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
except ImportError:
    mamba_chunk_scan_combined = None


def torch_causal_conv1d_update(hidden_states, conv_state, weight, bias=None, activation=None):
    window = torch.cat([conv_state, hidden_states], -1)[..., -weight.shape[1]:]
    conv_state.copy_(window[..., -conv_state.shape[-1]:])
    return silu((window * weight).sum(-1, keepdim=True))


def torch_recurrent_gated_delta_rule(query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel=False):
    S, q, k, v = initial_state * g[:, 0, :, None, None].exp(), query[:, 0], key[:, 0], value[:, 0]
    S = S + k[..., None] * (beta[:, 0, :, None] * (v - (S * k[..., None]).sum(-2)))[..., None, :]
    return (S * q[..., None]).sum(-2)[:, None] * q.shape[-1] ** -0.5, S


class TinyConfig(PreTrainedConfig):
    model_type = "tiny_remote"


class TinyLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.update = torch_causal_conv1d_update
        self.conv = torch.nn.Parameter(torch.linspace(-1, 1, 16 * 4).view(16, 4))

    def forward(self, x, window, S, M):
        x = self.update(x[..., None], window, self.conv, None, "silu").view(-1, 1, 1, 16)
        y, S = torch_recurrent_gated_delta_rule(x, x, x, -x[..., 0].abs(), x[..., 1].sigmoid(), S, True)
        A, D = -torch.ones(1, 16, 16), torch.ones(1, 16)
        dt = torch.full((len(x), 1, 16), 0.5)
        return step(M, y[:, 0], dt, A, x[:, 0], x[:, 0], D), S


class TinyModel(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = TinyLayer()
        self.post_init()

    def forward(self, *state):
        return self.layer(*state)
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """The model as `from_pretrained` loads it, with its code."""
    import transformers
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "cache"), *sys.path])
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "modeling_tiny.py").write_text(CODE)
    names = {"AutoConfig": "modeling_tiny.TinyConfig", "AutoModel": "modeling_tiny.TinyModel"}
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny_remote", "auto_map": names}))
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    yield transformers.AutoModel.from_config(config, trust_remote_code=True)
    for name in [n for n in sys.modules if n.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)


def inputs() -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=g) for shape in ((2, 16), (2, 16, 3), (2, 1, 16, 16), (2, 1, 16, 16)))


def test_functions_of_a_checkpoint_are_replaced_and_given_back(model):
    """The functions may have any name, and the layer may keep one. States equal the results of its own functions."""
    module = sys.modules[type(model).__module__]
    before, kept = dict(vars(module)), model.layer.update
    own, ours = inputs(), inputs()
    with torch.no_grad():
        want = model(*own)
        with hf.patch(model) as patch:
            assert model.layer.update is module.torch_causal_conv1d_update is not kept
            got = model(*ours)
    labels = {f"{module.__name__}.{n}" for n in ("step", "torch_causal_conv1d_update", "torch_recurrent_gated_delta_rule")}
    assert set(patch.replaced) == labels == set(patch.calls())
    assert all(c.ssmgen == 1 and not c.original for c in patch.calls().values()), str(patch)
    for a, b in zip((*got, ours[1], ours[3]), (*want, own[1], own[3]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert model.layer.update is kept and all(vars(module)[n] is before[n] for n in before)


def test_overlapping_patches_of_a_checkpoint(model):
    """A model that was made between them has the replacement from its module; the last patch gives all back."""
    first = hf.patch([model])
    other = type(model)(model.config)
    second = hf.patch(iter([model, other]))
    first.undo()
    assert model.layer.update is other.layer.update and hf_remote.bound(sys.modules[type(model).__module__])
    assert model.layer.update.__name__ == "torch_causal_conv1d_update" and hasattr(model.layer.update, "__wrapped__")
    second.undo()
    assert not hasattr(model.layer.update, "__wrapped__")


def test_a_call_with_gradients_stays_the_checkpoint_s(model):
    with hf.patch(model) as patch, pytest.warns(RuntimeWarning, match="requires grad"):
        model(*inputs())
    assert patch.calls()[f"{type(model).__module__}.torch_causal_conv1d_update"].original == 1


def checkpoint(monkeypatch, **names) -> torch.nn.Module:
    """A model of a module of these names."""
    module = ModuleType("transformers_modules_of_a_test")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return type("Other", (torch.nn.Module,), {"__module__": module.__name__})()


def test_functions_of_packages_are_known_by_where_they_come_from(monkeypatch):
    def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None):
        raise AssertionError

    selective_state_update.__module__ = "mamba_ssm.ops.triton.selective_state_update"
    model = checkpoint(monkeypatch, ssu=selective_state_update)
    assert hf_remote.bound(sys.modules[type(model).__module__]) == {"ssu": mamba_ssm.selective_state_update}


def test_what_is_not_found_is_said_in_a_sentence(monkeypatch):
    def causal_conv1d_fn(x, weight):
        raise AssertionError

    model = checkpoint(monkeypatch, causal_conv1d_fn=causal_conv1d_fn, selective_state_update=None, other=3)
    words = "is None there, because its package is not installed"
    with pytest.raises(PatchError, match=words):
        hf.patch(model)
