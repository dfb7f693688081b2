"""A model of transformers decodes with our kernel in the place of its own state update."""

from __future__ import annotations

import pytest
import torch

import ssmgen

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_greedy_decoding_is_unchanged(kind, monkeypatch):
    pytest.importorskip("transformers", reason="needs transformers")
    if kind == "mamba":
        import transformers.models.mamba.modeling_mamba as modeling
        from transformers import MambaConfig, MambaForCausalLM

        torch.manual_seed(0)
        model = MambaForCausalLM(MambaConfig(hidden_size=256, state_size=16, num_hidden_layers=3, vocab_size=512))
    else:
        import transformers.models.mamba2.modeling_mamba2 as modeling
        from transformers import Mamba2Config, Mamba2ForCausalLM

        torch.manual_seed(0)
        sizes = {"num_heads": 8, "head_dim": 64, "hidden_size": 256, "state_size": 128, "n_groups": 2}
        model = Mamba2ForCausalLM(Mamba2Config(**sizes, num_hidden_layers=3, vocab_size=512))
    name = f"{kind}_selective_state_update"
    if not hasattr(modeling, name):
        pytest.skip(f"this release of transformers has no {name}")
    model = model.cuda().eval()
    prompt = torch.arange(24, device="cuda").view(2, 12)
    options = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}

    def generate():
        with torch.no_grad():
            return model.generate(prompt, **options)

    want = generate()
    before = sum(ssmgen.stats().values())

    def update(state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None, **kwargs):
        return ssmgen.selective_state_update(state, hidden_states, dt, A, B, C, D, z, dt_bias, dt_softplus)

    monkeypatch.setattr(modeling, name, update)
    got = generate()
    assert sum(ssmgen.stats().values()) > before, "our kernel was not called"
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4)
