"""Prompts of transformers' models on a card: logits and caches as near to the same weights in f32 as transformers' own."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import (
    CLASSES,
    INDEXED,
    PROMPTED,
    SOME,
    Prompt,
    fused_label,
    fused_prompt_calls,
    generate,
    mixers,
    norm_of_error,
    norms_of_a_pass,
    prompt_calls,
    prompted,
    takes_cache,
)

import ssmgen
from ssmgen.compat import hf
from ssmgen.launch import runtime

pytestmark = pytest.mark.gpu

LENGTHS = (1, 63, 64, 65, 300)
_WIDE = {"hidden_size": 256, "initializer_range": 0.05}  # weights of wide layers are small; otherwise a rounding decides the attention
_HYBRID = {**_WIDE, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 2, "mamba_d_state": 128}
_DELTA = {**_WIDE, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
# Heads of published models, in two layers or in the tiny model's number of layers; their chunks have a usual length
REAL = {
    **dict.fromkeys(("mamba", "falcon_mamba"), {**_WIDE, "intermediate_size": 512, "state_size": 16, "time_step_rank": 16}),
    **dict.fromkeys(("jamba", "zamba"), {**_WIDE, "mamba_d_state": 16, "mamba_dt_rank": 16}),
    "mamba2": {**_WIDE, "num_heads": 8, "head_dim": 64, "state_size": 128, "n_groups": 8, "num_hidden_layers": 2, "chunk_size": 64},
    "bamba": {**_HYBRID, "num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_chunk_size": 64},
    "falcon_h1": {
        **_WIDE, "mamba_d_ssm": 512, "mamba_n_heads": 4, "mamba_d_head": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
        "mamba_rms_norm": False, "mamba_chunk_size": 64,
    },
    "granitemoehybrid": {**_HYBRID, "num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "mamba_chunk_size": 64},
    "nemotron_h": {**_WIDE, "mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 128, "chunk_size": 64},
    "zamba2": {**_WIDE, "n_mamba_heads": 8, "mamba_d_state": 64, "mamba_ngroups": 1, "chunk_size": 64},
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "lara_mini"), _DELTA),
    "olmo_hybrid": {**_WIDE, "linear_key_head_dim": 96, "linear_value_head_dim": 192},
    **dict.fromkeys(("kimi_linear", "glm5_next", "bailing_hybrid"), {**_WIDE, "linear_head_dim": 128}),
}  # fmt: skip
CASES = [(name, {}) for name in PROMPTED] + [(name, REAL[name]) for name in PROMPTED]
every_case = pytest.mark.parametrize(("name", "sizes"), CASES, ids=[name + ("-real" if sizes else "") for name, sizes in CASES])
every_kind = pytest.mark.parametrize("name", PROMPTED)


@pytest.fixture(autouse=True)
def f32_is_f32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def doubled(calls):
    return {label: hf.Calls(2 * c.ssmgen, 2 * c.original) for label, c in calls.items()}


def assert_as_near(ours: Prompt, theirs: Prompt, exact: Prompt) -> None:
    """The error against f32 is at most twice the model's own: that is left to chance with few numbers."""
    assert [state.dtype for state in ours.states] == [state.dtype for state in theirs.states]
    assert norm_of_error(ours, exact) <= 2 * norm_of_error(theirs, exact)


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_prompts_and_those_behind_them(name, sizes, dtype):
    model = prompted(name, **sizes).to(dtype).cuda()
    f32 = copy.deepcopy(model).float()
    for length in LENGTHS:
        exact, theirs = Prompt.run(f32, length), Prompt.run(model, length)
        with hf.patch(model) as patch:
            ours = Prompt.run(model, length)
            assert patch.calls() == prompt_calls(name, model)
            after = ours.go_on(model, 66)
        assert_as_near(ours, theirs, exact)
        assert_as_near(after, theirs.go_on(model, 66), exact.go_on(f32, 66))
        assert patch.calls() == doubled(prompt_calls(name, model))


@every_case
@pytest.mark.parametrize("fuse", [False, True], ids=["patched", "fused"])
def test_padding_on_the_left(name, sizes, fuse):
    model = prompted(name, **sizes).bfloat16().cuda()
    mask = torch.ones(2, 100, dtype=torch.long, device="cuda")
    mask[1, :37] = 0
    exact, theirs = (Prompt.run(m, 100, attention_mask=mask) for m in (copy.deepcopy(model).float(), model))
    with hf.patch(model, fuse=fuse) as patch:
        ours = Prompt.run(model, 100, attention_mask=mask)
    assert_as_near(ours, theirs, exact)
    assert patch.calls() == (fused_prompt_calls(name, model, mask) if fuse else prompt_calls(name, model))


@pytest.mark.parametrize(("name", "sizes"), [case for case in CASES if case[0] in CLASSES])
def test_a_fused_prompt_in_two_pieces(name, sizes):
    """As near to the whole prompt in f32 as transformers' own whole one."""
    model = prompted(name, **sizes).bfloat16().cuda()
    exact, theirs = (Prompt.run(m, 165) for m in (copy.deepcopy(model).float(), model))
    how = {}
    with hf.patch(model, fuse=True) as patch:
        for first, end in ((0, 65), (65, 165)):
            if "position_ids" in inspect.signature(model.forward).parameters:
                how["position_ids"] = torch.arange(first, end, device="cuda").expand(2, -1)
            ours = Prompt.run(model, 165, tokens=slice(first, end), **how)
            how |= takes_cache(model, ours.cache)
    expected = doubled(fused_prompt_calls(name, model))
    assert patch.calls() == expected | (dict.fromkeys(norms_of_a_pass(model), SOME) if name in INDEXED else {})
    for whole in (exact, theirs):
        whole.logits = whole.logits[:, 65:]
    assert_as_near(ours, theirs, exact)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "qwen3_next", "kimi_linear"])
def test_padding_asks_the_host_nothing(name):
    """Neither a prompt nor the prompt after it synchronises, once their kernels are loaded."""
    from transformers import DynamicCache

    model = prompted(name).bfloat16().cuda()
    layer, hidden = mixers(model)[0], torch.randn(2, 9, 32, device="cuda").bfloat16()
    with hf.patch(model, fuse=True) as patch, torch.no_grad():
        for mode in ("default", "error"):
            cache = DynamicCache(config=model.config)
            for length in (9, 5):
                mask = torch.ones(2, length, dtype=torch.long, device="cuda")
                mask[1, :2] = 0
                torch.cuda.set_sync_debug_mode(mode)
                try:
                    layer(hidden[:, :length], **takes_cache(layer, cache), attention_mask=mask)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
    assert patch.calls() == {fused_label(name): hf.Calls(4, 0)}


@every_case
@pytest.mark.parametrize("fuse", [False, True], ids=["patched", "fused"])
def test_greedy_tokens_are_likely(name, sizes, fuse):
    """Each is the likeliest of the same weights in f32, or a token that bf16's error could make the likeliest."""
    model = prompted(name, **sizes).bfloat16().cuda()
    model.generation_config.eos_token_id = None  # which generate() would keep from being chosen
    with hf.patch(model, fuse=fuse) as patch:
        got = generate(model, 12)
    assert not any(c.original for c in patch.calls().values())
    with torch.no_grad():
        logits, rounded = (m(input_ids=got.sequences[:, :-1]).logits[:, 4:].float() for m in (copy.deepcopy(model).float(), model))
    chosen = logits.gather(-1, got.sequences[:, 5:, None])[..., 0]
    assert (logits.amax(-1) - chosen).max() <= 4 * (rounded - logits).abs().max()


@every_kind
def test_f32_prompts(name):
    model = prompted(name).cuda()
    want = Prompt.run(model, 65)
    with hf.patch(model) as patch:
        got = Prompt.run(model, 65)
    assert patch.calls() == prompt_calls(name, model)
    assert str(patch).count("transformers computes") == sum(c.original > 0 for c in patch.calls().values())
    for a, b in zip((got.logits, *got.states), (want.logits, *want.states), strict=True):
        assert (a - b).abs().max() <= 1e-3 * b.abs().max()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("mamba2", torch.bfloat16), ("mamba2", torch.float32), ("qwen3_5", torch.bfloat16), ("kimi_linear", torch.bfloat16)],
    ids=str,
)
def test_a_compiled_prompt(name, dtype):
    model = prompted(name, **REAL[name]).to(dtype).cuda()
    ids = torch.arange(3, 63, device="cuda").view(2, 30)

    def run(ids):
        return model(input_ids=ids, use_cache=True).logits

    torch._dynamo.reset()
    with hf.patch(model), torch.no_grad():
        want, got = run(ids), torch.compile(run, fullgraph=True)(ids)
    assert (got - want).abs().max() <= (2e-2 if dtype == torch.bfloat16 else 1e-3) * want.abs().max()


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "kimi_linear"])
def test_a_warm_model_loads_nothing(name):
    model = prompted(name, **REAL[name]).bfloat16().cuda()
    ssmgen.warm(model, batches=[1, 2], prompt_length=5)
    loaded = runtime.loaded_count()
    with hf.patch(model) as patch:
        generate(model, 2)
    assert patch.calls().items() >= prompt_calls(name, model).items() and runtime.loaded_count() == loaded
