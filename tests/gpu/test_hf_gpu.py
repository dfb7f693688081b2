"""transformers' models on a card: the same tokens with our kernels, prepared ahead, in a CUDA graph and compiled."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import (
    INDEXED,
    LAYERS,
    MODELS,
    TINY,
    DecodeStep,
    built,
    cache_of,
    change_rates,
    convolutions,
    fused_calls,
    fused_label,
    generate,
    minimax,
    prompt_calls,
    states_of,
)

from ssmgen.calls import fast_path
from ssmgen.compat import hf
from ssmgen.launch import runtime

pytestmark = pytest.mark.gpu

TOKENS = 12
# Sizes of models that are in use, in few and narrow layers
REAL = {
    "mamba": {"hidden_size": 256, "state_size": 16},
    "mamba2": {"hidden_size": 256, "num_heads": 8, "head_dim": 64, "state_size": 128},
    "qwen3_5": {"hidden_size": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "kimi_linear": {"hidden_size": 256, "linear_head_dim": 128},
}
# Of layers that are fused: sizes of Codestral, of Falcon-H1, and of Qwen3.5's and Qwen3-Next's
REAL_FUSED = {
    "mamba2": {"hidden_size": 256, "num_heads": 8, "head_dim": 64, "state_size": 128, "n_groups": 8},
    "falcon_h1": {
        "hidden_size": 256, "mamba_d_ssm": 512, "mamba_n_heads": 4, "mamba_d_head": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
        "mamba_rms_norm": False,
    },
    "qwen3_5": {"hidden_size": 256, "linear_num_value_heads": 8, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "qwen3_next": {"hidden_size": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "kimi_linear": {"hidden_size": 256, "linear_head_dim": 128},
}  # fmt: skip
FUSED = [(name, {}) for name in LAYERS] + list(REAL_FUSED.items())
CASES = [(name, {}) for name in TINY] + list(REAL.items())
SCANS = {name: any("conv" not in f for f in functions) for name, functions in MODELS.items()}


def plain_or_fused(plain: Iterable[str], fused: Iterable[str]) -> pytest.MarkDecorator:
    """These models with their functions replaced, and those with whole layers replaced."""
    cases = [(name, False) for name in plain] + [(name, True) for name in fused]
    return pytest.mark.parametrize(("name", "fuse"), cases, ids=[f"{name}-fused" if fuse else name for name, fuse in cases])


@pytest.fixture(autouse=True)
def f32_is_f32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.fixture
def launched(monkeypatch):
    """Our launches so far, as a list."""
    launches, on = [], runtime.Launch.on

    def counting(launch, stream, packed):
        enqueue = on(launch, stream, packed)

        def counted():
            launches.append(str(launch.kernel.spec))
            return enqueue()

        return counted

    def forget():  # plans keep what enqueues them
        for table in list(fast_path._tables):
            table.clear()

    forget()
    monkeypatch.setattr(runtime.Launch, "on", counting)
    yield launches
    forget()


def close(got, want):
    assert (got - want).abs().max() <= 1e-3 * want.abs().max(), (got - want).abs().max()


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=[name + ("-real" if sizes else "") for name, sizes in CASES])
def test_greedy_generation_is_unchanged(name, sizes, launched):
    model = built(name, **sizes).cuda()
    want = generate(model, TOKENS)
    assert not launched
    with hf.patch(model) as patch:
        got = generate(model, TOKENS)
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits, strict=True):
        close(a, b)
    calls = patch.calls()
    assert len(calls) == len(MODELS[name]) and calls.items() >= prompt_calls(name, model).items()
    assert not any(c.original for label, c in calls.items() if label not in prompt_calls(name, model))
    assert len(launched) >= sum(c.ssmgen for c in calls.values())


@pytest.mark.parametrize("name", TINY)
def test_no_call_of_a_bf16_model_is_left_to_the_original(name):
    model = built(name).bfloat16().cuda()
    with hf.patch(model) as patch:
        got = generate(model, TOKENS)
    assert all(torch.isfinite(logits).all() for logits in got.logits)
    calls = patch.calls()
    assert len(calls) == len(MODELS[name]) and not any(c.original for c in calls.values())


@pytest.mark.parametrize("head_dim", [16, 128])
def test_minimax_generates_the_same_tokens(head_dim, launched):
    """Its layers have no convolution, and no separate functions for prompts and steps."""
    model = minimax(head_dim=head_dim).cuda()
    want = generate(model, TOKENS)
    with hf.patch(model) as patch:
        got = generate(model, TOKENS)
    assert torch.equal(got.sequences, want.sequences)
    ours, theirs = ((*found.logits, *cache_of(found).linear_cache[::2]) for found in (got, want))
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)
    assert patch.calls() == {"minimax.MiniMaxLightningAttention": hf.Calls(2 * TOKENS, 0)} and len(launched) >= 2 * TOKENS


@plain_or_fused(REAL, REAL_FUSED)
def test_a_warm_model_loads_nothing(name, fuse):
    model = built(name, **(REAL_FUSED if fuse else REAL)[name]).cuda()
    hf.warm(model, batches=[1, 2], prompt_length=5, fuse=fuse)  # as `generate` has it
    loaded = runtime.loaded_count()
    with hf.patch(model, fuse=fuse) as patch:
        generate(model, TOKENS)
    assert (patch.calls() == fused_calls(name, model, TOKENS - 1) if fuse else patch.calls()) and runtime.loaded_count() == loaded
    assert hf.warm(model, batches=[1, 2], prompt_length=5, fuse=fuse) == 0


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_a_decode_step_in_a_cuda_graph(name, launched):
    """Replays equal the same number of eager steps: the cache's states keep their addresses. Models without attention, whose cache would
    grow."""
    model = built(name, **REAL[name]).cuda()
    hf.warm(model, batches=[2])
    with hf.patch(model), torch.no_grad():
        step = DecodeStep(model)
        cache = copy.deepcopy(step.cache)
        want = [step(cache) for _ in range(3)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # first-time work of cuBLAS and the allocator
            step(copy.deepcopy(step.cache))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step(step.cache)
        before = len(launched)
        for expected in want:
            graph.replay()
            close(out, expected)
    assert 0 < before == len(launched), "a replay goes through nobody's Python"


# The step of an indexed model is not a single graph.
@plain_or_fused(("mamba", "mamba2", "qwen3_5", "kimi_linear", "lfm2"), [name for name in LAYERS if name not in INDEXED])
def test_a_compiled_decode_step(name, fuse, launched):
    model = built(name, **(REAL_FUSED if fuse else REAL).get(name, {})).cuda()
    torch._dynamo.reset()
    with hf.patch(model, fuse=fuse), torch.no_grad():
        step = DecodeStep(model)
        want = step(copy.deepcopy(step.cache))
        before = len(launched)
        got = torch.compile(step, fullgraph=True)(copy.deepcopy(step.cache))
    close(got, want)
    assert len(launched) - before >= convolutions(model) * (2 if SCANS[name] and not fuse else 1)


@plain_or_fused(("mamba2", "qwen3_5"), ("mamba2", "qwen3_5", "qwen3_next"))
def test_generation_with_a_static_cache(name, fuse):
    """A static cache makes transformers compile the step, into CUDA graphs."""
    model = built(name, **(REAL_FUSED if fuse else REAL)[name]).cuda()
    want = generate(model, TOKENS)
    torch._dynamo.reset()
    hf.warm(model, batches=[2], fuse=fuse)
    with hf.patch(model, fuse=fuse):
        got = generate(model, TOKENS, cache_implementation="static")
    assert torch.equal(got.sequences, want.sequences)


# Whole layers.

every_fused = pytest.mark.parametrize(("name", "sizes"), FUSED, ids=[name + ("-real" if sizes else "") for name, sizes in FUSED])


@every_fused
def test_fused_greedy_generation_is_unchanged(name, sizes, launched):
    model = built(name, **sizes).cuda()
    want = generate(model, TOKENS)
    assert not launched
    with hf.patch(model, fuse=True) as patch:
        got = generate(model, TOKENS)
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip((*got.logits, *states_of(got)), (*want.logits, *states_of(want)), strict=True):
        close(a, b)
    assert patch.calls() == fused_calls(name, model, TOKENS - 1)
    assert len(launched) >= convolutions(model) * TOKENS


@every_fused
def test_no_fused_call_of_a_bf16_model_is_left_to_the_original(name, sizes):
    model = built(name, **sizes).bfloat16().cuda()
    with hf.patch(model, fuse=True) as patch:
        got = generate(model, TOKENS)
    assert all(torch.isfinite(logits).all() for logits in got.logits)
    assert patch.calls() == fused_calls(name, model, TOKENS - 1)


def test_a_layer_that_has_no_kernel_is_the_originals():
    """It runs with one warning. On the CPU the reference computes such heads."""
    model = built("mamba2", num_heads=6, head_dim=6, hidden_size=18).cuda()
    want = generate(model, TOKENS)
    with hf.patch(model, fuse=True) as patch, pytest.warns(RuntimeWarning, match="Mamba2Mixer of layer 0"):
        got = generate(model, TOKENS)
    assert torch.equal(got.sequences, want.sequences)
    assert patch.calls()[fused_label("mamba2")] == hf.Calls(0, convolutions(model) * (TOKENS - 1))


def captured(step, cache):
    """(graph of a step on the cache, its logits): nothing of it is computed yet."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # first-time work of cuBLAS and the allocator
        step(copy.deepcopy(cache))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(cache)
    return graph, out


@pytest.mark.parametrize("seen", [True, False], ids=["cache-seen-before", "new-cache"])
def test_a_fused_decode_step_in_a_cuda_graph(seen, launched):
    """Replays equal the same number of eager steps. `seen`: a step on this cache ran before the capture."""
    model = built("mamba2", **REAL_FUSED["mamba2"]).cuda()
    hf.warm(model, batches=[2], fuse=True)
    with hf.patch(model, fuse=True), torch.no_grad():
        step = DecodeStep(model)
        if seen:
            step(step.cache)
        cache = copy.deepcopy(step.cache)
        want = [step(cache) for _ in range(3)]
        graph, out = captured(step, step.cache)
        before = len(launched)
        for expected in want:
            graph.replay()
            close(out, expected)
        assert 0 < before == len(launched), "a replay goes through nobody's Python"
        close(step(step.cache), step(cache))  # and eager steps go on from there


def test_a_graph_of_a_fused_step_follows_its_weights():
    """The graph keeps the tensors that it needs, whatever eager steps allocate in between."""
    model = built("mamba2", **REAL_FUSED["mamba2"]).cuda()
    hf.warm(model, batches=[2], fuse=True)
    with hf.patch(model, fuse=True), torch.no_grad():
        step = DecodeStep(model)
        cache = copy.deepcopy(step.cache)
        before = step(copy.deepcopy(step.cache))
        graph, out = captured(step, step.cache)
        change_rates(model, "in place")
        want = step(cache)
        assert (want - before).abs().max() > 1e-2 * before.abs().max()
        graph.replay()
        close(out, want)
