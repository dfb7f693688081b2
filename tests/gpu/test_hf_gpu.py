"""transformers' models on a card: the same tokens with our kernels, prepared ahead, in a CUDA graph and compiled."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17: pip install 'ssmgen[hf]'")

from hf_cases import TINY, DecodeStep, built, convolutions, generate

from ssmgen import runtime
from ssmgen.compat import hf

pytestmark = pytest.mark.gpu

TOKENS = 12
# Sizes of models that are in use, in few and narrow layers
REAL = {
    "mamba": {"hidden_size": 256, "state_size": 16},
    "mamba2": {"hidden_size": 256, "num_heads": 8, "head_dim": 64, "state_size": 128},
    "qwen3_5": {"hidden_size": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "kimi_linear": {"hidden_size": 256, "linear_head_dim": 128},
}
CASES = [(name, {}) for name in TINY] + list(REAL.items())
SCANS = {name: any("conv" not in f for f in functions) for name, functions in hf.MODELS.items()}


@pytest.fixture(autouse=True)
def f32_is_f32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.fixture
def launched(monkeypatch):
    """Our launches so far, as a list."""
    launches, enqueue = [], runtime.Plan.__call__

    def count(plan):
        launches.append(str(plan.launch.kernel.spec))
        enqueue(plan)

    monkeypatch.setattr(runtime.Plan, "__call__", count)
    return launches


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
    assert len(calls) == len(hf.MODELS[name]) and not any(c.original for c in calls.values())
    assert len(launched) >= sum(c.ssmgen for c in calls.values())


@pytest.mark.parametrize("name", TINY)
def test_no_call_of_a_bf16_model_is_left_to_the_original(name):
    model = built(name).bfloat16().cuda()
    with hf.patch(model) as patch:
        got = generate(model, TOKENS)
    assert all(torch.isfinite(logits).all() for logits in got.logits)
    calls = patch.calls()
    assert len(calls) == len(hf.MODELS[name]) and not any(c.original for c in calls.values())


@pytest.mark.parametrize("name", REAL)
def test_a_warm_model_loads_nothing(name):
    model = built(name, **REAL[name]).cuda()
    hf.warm(model, batches=[1, 2], prompt_length=5)  # as `generate` has it
    loaded = runtime.loaded_count()
    with hf.patch(model) as patch:
        generate(model, TOKENS)
    assert patch.calls() and runtime.loaded_count() == loaded
    assert hf.warm(model, batches=[1, 2], prompt_length=5) == 0


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_a_decode_step_in_a_cuda_graph(name, launched):
    """Replayed, it does what as many steps do: the cache's states lie where they lay. Models without attention, whose cache grows."""
    model = built(name, **REAL[name]).cuda()
    hf.warm(model, batches=[2])
    with hf.patch(model), torch.no_grad():
        step = DecodeStep(model)
        cache = copy.deepcopy(step.cache)
        want = [step(cache) for _ in range(3)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what cuBLAS and the allocator do at first
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


@pytest.mark.parametrize("name", ["mamba", "mamba2", "qwen3_5", "kimi_linear", "lfm2"])
def test_a_compiled_decode_step(name, launched):
    model = built(name, **REAL.get(name, {})).cuda()
    torch._dynamo.reset()
    with hf.patch(model), torch.no_grad():
        step = DecodeStep(model)
        want = step(copy.deepcopy(step.cache))
        before = len(launched)
        got = torch.compile(step, fullgraph=True)(copy.deepcopy(step.cache))
    close(got, want)
    assert len(launched) - before >= convolutions(model) * (2 if SCANS[name] else 1)


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5"])
def test_generation_with_a_static_cache(name):
    """Which transformers compiles, into CUDA graphs."""
    model = built(name, **REAL[name]).cuda()
    want = generate(model, TOKENS)
    torch._dynamo.reset()
    hf.warm(model, batches=[2])
    with hf.patch(model):
        got = generate(model, TOKENS, cache_implementation="static")
    assert torch.equal(got.sequences, want.sequences)
