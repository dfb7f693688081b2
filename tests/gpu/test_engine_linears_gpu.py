"""The engines' operators of linear layers on a card: the choice by the number of rows, in CUDA graphs and in graphs of torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

import ssmgen
from ssmgen.compat import sglang, vllm
from ssmgen.compat.shared.linears import most_rows, tensor_cores

pytestmark = pytest.mark.gpu

DEVICE, N, K = "cuda", 4096, 2048
OPERATORS = {vllm: torch.ops.ssmgen.vllm_linear, sglang: torch.ops.ssmgen.sglang_linear}
each = pytest.mark.parametrize("operator", OPERATORS.values(), ids=str)
of_types = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])


def operands(rows: int, dtype: torch.dtype):
    torch.manual_seed(rows)
    weight = torch.randn(N, K, device=DEVICE).mul_(K**-0.5).to(dtype)
    return torch.randn(rows, K, device=DEVICE).to(dtype), weight, torch.randn(N, device=DEVICE).to(dtype)


def expected(x, weight, bias):
    """The bits that the operator must give."""
    most = most_rows(weight.dtype, tensor_cores(weight.device))
    return ssmgen.skinny_linear(x, weight, bias) if x.shape[0] <= most else linear(x, weight, bias)


@each
@of_types
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 17, 64])
def test_the_choice_by_rows(operator, dtype, rows):
    with torch.inference_mode():
        given = operands(rows, dtype)
        assert torch.equal(operator(*given), expected(*given))
        assert torch.equal(operator(given[0], given[1], None), expected(given[0], given[1], None))


@each
@of_types
@pytest.mark.parametrize("rows", [1, 16, 17])
def test_a_graph_follows_x(operator, dtype, rows):
    with torch.inference_mode():
        x, weight, bias = operands(rows, dtype)
        operator(x, weight, bias)  # as an engine's warm-up of this batch size
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = operator(x, weight, bias)
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert torch.equal(out, expected(x, weight, bias))


@each
def test_one_compiled_graph_of_any_number_of_rows(operator):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._inductor.compile(graph, inputs)

    _, weight, bias = operands(1, torch.bfloat16)
    forward = torch.compile(lambda x: operator(x, weight, bias).relu(), fullgraph=True, dynamic=True, backend=backend)
    with torch.inference_mode():
        for rows in (5, 16, 17, 40, 2):
            x = operands(rows, torch.bfloat16)[0]
            torch._dynamo.mark_dynamic(x, 0)
            assert torch.equal(forward(x), expected(x, weight, bias).relu())
    assert len(graphs) == 1
