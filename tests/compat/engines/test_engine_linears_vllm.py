"""The linear layers of vLLM itself, if it is installed: each class of layers, whole and as a rank's part, also under torch.compile."""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from torch.nn.functional import linear

from ssmgen.compat import vllm
from ssmgen.compat.shared import linears

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
K, N, BF16 = 64, 96, torch.bfloat16
LAYERS = "vllm.model_executor.layers"
# {class: its sizes}
KINDS = {
    "ReplicatedLinear": (K, N),
    "ColumnParallelLinear": (K, N),
    "MergedColumnParallelLinear": (K, [N // 2, N // 2]),
    "QKVParallelLinear": (K, 16, 4, 2),
    "RowParallelLinear": (K, N),
}


@pytest.fixture(params=[1, 2], ids=lambda ranks: f"{ranks} ranks")
def ranks(request, monkeypatch):
    """The number of ranks, of which this process has the first one's part of each layer."""
    monkeypatch.setattr(torch.version, "cuda", torch.version.cuda or "13.0")
    monkeypatch.setenv("SSMGEN_ENGINE_LINEAR", "allow")
    monkeypatch.delenv("SSMGEN_ENGINE_KEEP", raising=False)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    vllm.register()
    for module in (f"{LAYERS}.linear", f"{LAYERS}.vocab_parallel_embedding", "vllm.model_executor.parameter"):
        found = import_module(module)
        for name, value in (("get_tensor_model_parallel_world_size", request.param), ("get_tensor_model_parallel_rank", 0)):
            monkeypatch.setattr(found, name, lambda value=value: value)
    with torch.no_grad():
        yield request.param
    vllm.unregister()


@pytest.fixture
def rows(monkeypatch):
    """The rows of each call of skinny_linear."""
    found, ours = [], linears.skinny_linear
    monkeypatch.setattr(linears, "skinny_linear", lambda x, *rest: found.append(x.shape[:-1].numel()) or ours(x, *rest))
    return found


def built(kind: str):
    """The layer, with a bias; the sum over ranks, which follows in row-parallel layers, is left out."""
    more = {"bias": False, "reduce_results": False} if kind == "RowParallelLinear" else {"bias": True}
    made = getattr(import_module(f"{LAYERS}.linear"), kind)(*KINDS[kind], params_dtype=BF16, return_bias=False, **more)
    for parameter in made.parameters():
        parameter.normal_(0, 0.1)
    return made


def own(made, x, method):
    """vLLM's own product."""
    return inspect.unwrap(method)(made.quant_method, made, x, made.bias)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_vllm_is_served_up_to_16_rows(ranks, rows, kind):
    made = built(kind)
    n, k = made.weight.shape
    whole = {"QKVParallelLinear": K * 16 * (4 + 2 + 2)}.get(kind, K * N)
    assert n * k == whole // (1 if kind == "ReplicatedLinear" else ranks)
    method = type(made.quant_method).apply
    for count in (1, 16, 17):
        x = torch.randn(count, k).bfloat16()
        want = own(made, x, method)
        got = made(x)
        assert got.shape == (count, n) and torch.allclose(got, want, rtol=2**-6, atol=2**-6)
    assert rows == [1, 16]
    made(torch.randn(2, 8, k).bfloat16())
    assert rows == [1, 16, 16]


@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_of_a_layer_for_any_number_of_rows(ranks, rows, kind):
    torch._dynamo.reset()  # all of these functions share one limit of recompilations
    made, graphs, operators = built(kind), [], []

    def backend(graph, inputs):
        graphs.append(graph)
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    forward = torch.compile(made.forward, fullgraph=True, dynamic=True, backend=backend)
    for count in (5, 16, 17, 3):
        x = torch.randn(count, made.weight.shape[1]).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.allclose(forward(x), linear(x, made.weight, made.bias), rtol=2**-6, atol=2**-6)
    assert len(graphs) == 1 and "ssmgen.vllm_linear.default" in operators and rows == [5, 16, 3]


def test_the_head_is_served(ranks, rows):
    made = import_module(f"{LAYERS}.vocab_parallel_embedding").ParallelLMHead(256, K, params_dtype=BF16)
    made.weight.normal_(0, 0.1)
    for count in (16, 17):
        x = torch.randn(count, K).bfloat16()
        assert torch.allclose(made.quant_method.apply(made, x), linear(x, made.weight), rtol=2**-6, atol=2**-6)
    assert rows == [16] and made.weight.shape == (256 // ranks, K)


def test_an_odd_part_stays_vllm_s(ranks, rows):
    """8 rows and 2 ranks: 4 rows each."""
    made = import_module(f"{LAYERS}.linear").ColumnParallelLinear(K, 8, bias=False, params_dtype=BF16, return_bias=False)
    made.weight.normal_()
    made(torch.randn(2, K).bfloat16())
    assert rows == ([2] if ranks == 1 else [])


def test_quantised_methods_are_untouched(ranks):
    module = import_module(f"{LAYERS}.quantization.fp8")
    assert inspect.unwrap(module.Fp8LinearMethod.apply) is module.Fp8LinearMethod.apply
    plain = import_module(f"{LAYERS}.linear").UnquantizedLinearMethod
    assert inspect.unwrap(plain.apply) is not plain.apply


def test_the_batch_invariant_mode_keeps_vllm_s_products(ranks, rows, monkeypatch):
    vllm.unregister()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    vllm.register()
    made = built("ReplicatedLinear")
    for count in (1, 16, 17):
        made(torch.randn(count, K).bfloat16())
    assert rows == []


def test_the_key_of_compiled_graphs(ranks, monkeypatch):
    envs = import_module("vllm.envs")
    ours = envs.compile_factors()
    vllm.unregister()
    assert ours == envs.compile_factors() | {"SSMGEN_ENGINE_LINEAR": "allow"}
