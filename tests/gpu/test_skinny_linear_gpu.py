"""skinny_linear on a card: float64, bits over rows and variants, late producers, graphs, torch.compile."""

from __future__ import annotations

import random

import pytest
import torch
from card_calls import needs_pdl, waits_for_its_producer

import ssmgen
from ssmgen.calls.operator import call_of
from ssmgen.families.skinny_linear.rules import space
from ssmgen.launch import runtime

pytestmark = pytest.mark.gpu

DEVICE, BF16, F16, F32 = "cuda", torch.bfloat16, torch.float16, torch.float32
SHAPES = [(2048, 4096), (4096, 8192), (136, 1000), (18560, 512), (8, 8), (24, 14336)]
# Norm errors: one rounding, and sums in f32.
LIMITS = {BF16: 3e-3, F16: 4e-4, F32: 2e-6}


def operands(rows, n, k, dtype, spare=8):
    """x and the weight with NaN between their rows."""
    torch.manual_seed(0)
    x, w = (torch.full((m, k + spare), float("nan"), device=DEVICE, dtype=dtype)[:, :k] for m in (rows, n))
    return x.copy_(torch.randn(rows, k)), w.copy_(torch.randn(n, k) * k**-0.5)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_within_rounding_of_float64_and_the_same_bits_beside_any_rows(dtype, shape):
    x, w = operands(16, *shape, dtype)
    bias = torch.randn(shape[0], device=DEVICE)
    want = x.double() @ w.double().t() + bias.double()
    for out in dict.fromkeys((dtype, F32)):

        def poisoned(rows, out=out):
            return torch.full((rows, shape[0] + 3), float("nan"), device=DEVICE, dtype=out)[:, : shape[0]]

        whole = ssmgen.skinny_linear(x, w, bias, out=poisoned(16))
        assert ((whole.double() - want).norm() / want.norm()).item() < LIMITS[out if dtype is not F32 else F32]
        for start, end, pdl in ((0, 1, None), (3, 4, False), (2, 10, None), (5, 14, False), (15, 16, None), (0, 8, False)):
            assert torch.equal(ssmgen.skinny_linear(x[start:end], w, bias, out=poisoned(end - start), pdl=pdl), whole[start:end])


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=["int8", "e4m3"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("shape", [(4096, 8192), (136, 1008), (18560, 512), (24, 14336)], ids=str)
def test_weights_of_8_bits(shape, dtype, stored):
    """Within rounding of float64; a scale of 1 gives the bits of weights in x's type; a row has the same bits beside any others."""
    x, w = operands(16, *shape, dtype)
    most = 127 if stored is torch.int8 else 448
    narrow = (w[:, : shape[1]].float() * (most * shape[1] ** 0.5 / 5)).clamp(-most, most).to(stored)
    scale, bias = torch.rand(shape[0], device=DEVICE) / most, torch.randn(shape[0], device=DEVICE)
    want = x.double() @ narrow.double().t() * scale.double() + bias.double()
    whole = ssmgen.skinny_linear(x, narrow, bias, scale=scale)
    assert ((whole.double() - want).norm() / want.norm()).item() < LIMITS[dtype]
    for start, end, pdl in ((0, 1, None), (2, 10, None), (5, 14, False), (15, 16, None)):
        assert torch.equal(ssmgen.skinny_linear(x[start:end], narrow, bias, scale=scale, pdl=pdl), whole[start:end])
    f32 = torch.empty(16, shape[0], device=DEVICE)
    one = ssmgen.skinny_linear(x, narrow, bias, scale=torch.ones_like(scale), out=f32.clone())
    assert torch.equal(one, ssmgen.skinny_linear(x, narrow.to(dtype), bias, out=f32))


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("shape", [(4096, 8192), (136, 1008), (24, 14336)], ids=str)
def test_the_norm_the_gate_and_the_residual(shape, dtype):
    """The bits of rms_norm before the product, and of f32 sums after it; a row has the same bits beside any others."""
    x, w = operands(16, *shape, dtype)
    weights = [w, w.roll(1, 0)]
    norm, residual = torch.rand(shape[1], device=DEVICE), torch.randn(16, shape[0], device=DEVICE, dtype=dtype)
    normed = ssmgen.rms_norm(x, norm, 1e-5)
    sums = ssmgen.skinny_linear(normed, w, out=torch.empty(16, shape[0], device=DEVICE))
    alone = ssmgen.skinny_linear(x, w, norm_weight=norm, eps=1e-5, residual=residual)
    assert torch.equal(alone, (sums + residual.float()).to(dtype))
    in_place = residual.clone()
    assert torch.equal(ssmgen.skinny_linear(x, w, norm_weight=norm, eps=1e-5, residual=in_place, out=in_place), alone)
    how = {"norm_weight": norm, "eps": 1e-5, "activation": "silu_and_mul"}
    whole = ssmgen.skinny_linear(x, weights, residual=residual, **how)
    up = ssmgen.skinny_linear(normed, weights[1], out=torch.empty(16, shape[0], device=DEVICE))
    want = torch.nn.functional.silu(sums.double()) * up.double() + residual.double()
    assert ((whole.double() - want).norm() / want.norm()).item() < LIMITS[dtype]
    for start, end, pdl in ((0, 1, None), (2, 10, None), (5, 14, False), (15, 16, None)):
        assert torch.equal(ssmgen.skinny_linear(x[start:end], weights, residual=residual[start:end], pdl=pdl, **how), whole[start:end])


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("shape", [(21504, 4096), (136, 1008), (24, 14336)], ids=str)
def test_relu2_and_multipliers_before_the_residual(shape, dtype):
    """The bits of f32 sums that are scaled, squared and added to; a row has the same bits beside any others."""
    x, w = operands(16, *shape, dtype)
    scale, residual = torch.rand(shape[0], device=DEVICE) + 0.5, torch.randn(16, shape[0], device=DEVICE, dtype=dtype)
    sums = ssmgen.skinny_linear(x, w, scale=scale, out=torch.empty(16, shape[0], device=DEVICE))
    assert torch.equal(ssmgen.skinny_linear(x, w, scale=scale, residual=residual), (sums + residual.float()).to(dtype))
    squared = ssmgen.skinny_linear(x, w, scale=scale, activation="relu2")
    assert torch.equal(squared, sums.relu().square().to(dtype)) and squared.any()
    how = {"scale": scale, "activation": "relu2"}
    whole = ssmgen.skinny_linear(x, w, residual=residual, **how)
    assert torch.equal(whole, (sums.relu().square() + residual.float()).to(dtype))
    for start, end, pdl in ((0, 1, None), (2, 10, None), (5, 14, False), (15, 16, None)):
        assert torch.equal(ssmgen.skinny_linear(x[start:end], w, residual=residual[start:end], pdl=pdl, **how), whole[start:end])


@pytest.mark.parametrize(("n", "k", "dtype"), [(18560, 4096, BF16), (4096, 8192, BF16), (1000, 1000, F16), (512, 2048, F32)])
@pytest.mark.parametrize("rows", [8, 16])
def test_variants_are_bit_equal_over_many_runs(n, k, dtype, rows):
    """Weights are read from memory: they rotate over more than the L2 cache has."""
    x, w = operands(rows, n, k, dtype)
    weights = [w.roll(i, 0) for i in range(max(2, min(6, 2**28 // (n * k))))]
    outs = [torch.empty(rows, n, device=DEVICE, dtype=dtype) for _ in weights]
    calls = [call_of(ssmgen.skinny_linear, x, weight, out=out) for weight, out in zip(weights, outs, strict=True)]
    problem, *_ = calls[0].problem()
    specs = list(space(problem, runtime.device_arch(torch.cuda.current_device())))
    want = None
    for spec in random.Random(0).sample(specs, min(12, len(specs))):
        launch = calls[0].launch_with(spec)
        plans = [launch.at(call.pointers) for call in calls]
        for _ in range(10):
            for out, plan in zip(outs, plans, strict=True):
                out.fill_(float("nan"))
                plan()
            want = want or [out.clone() for out in outs]
            assert all(torch.equal(a, b) for a, b in zip(outs, want, strict=True)), spec


@needs_pdl
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("rows", [1, 16])
def test_a_producer_that_writes_x_late(dtype, rows):
    x, w = operands(rows, 4096, 2048, dtype, spare=0)
    out = torch.empty(rows, 4096, device=DEVICE, dtype=dtype)
    late = x.view(BF16)  # in pieces of two bytes, as the producer writes
    waits_for_its_producer(lambda pdl: ssmgen.skinny_linear(x, w, out=out, pdl=pdl), None, late, out, out)


def test_a_chain_in_a_graph_has_the_bits_of_single_calls():
    """Each product reads the last one's output, and may start while that one ends."""
    x, w = operands(5, 2048, 2048, BF16)
    weights = [w.roll(i, 0) for i in range(12)]
    want = x
    for weight in weights:
        want = ssmgen.skinny_linear(want, weight, pdl=False)
        torch.cuda.synchronize()
    buffers = [torch.empty(5, 2048, device=DEVICE, dtype=BF16) for _ in weights]
    ssmgen.warm(ssmgen.skinny_linear, x, w, out=buffers[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for weight, out in zip(weights, buffers, strict=True):
            y = ssmgen.skinny_linear(y, weight, out=out)
    for _ in range(20):
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, want)


def test_compiled_and_bound_calls():
    x, w = operands(3, 256, 512, BF16)
    want = ssmgen.skinny_linear(x, [w, w[:8]])

    def two(x):
        return ssmgen.skinny_linear(x, [w, w[:8]])

    assert all(torch.equal(a, b) for a, b in zip(torch.compile(two, fullgraph=True)(x), want, strict=True))
    out = torch.empty_like(want[0])
    ssmgen.bind(ssmgen.skinny_linear, x, w, out=out)()
    assert torch.equal(out, want[0])
